"""Recorded runs are trained again: as they were, and as they were not."""

from __future__ import annotations

import asyncio
import contextlib
import doctest
import io
import json
import re
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import asyncrl
import asyncrl.tasks.rerun
from asyncrl.algorithms import DAPO, PolicyTokens, TruncatedImportance
from asyncrl.cli.main import main
from asyncrl.config import Config
from asyncrl.errors import ConfigError, InfrastructureError, RecordingError, SchemaError
from asyncrl.tasks.rerun import fork_config, fork_policy
from asyncrl.tasks.run import train
from asyncrl.telemetry.progress import SilentProgress
from asyncrl.telemetry.run_directory import is_locked
from asyncrl.trainer.assembly import Assembly
from asyncrl.trainer.driver import Driver

MakeConfig = Callable[..., Config]


def recorded(config: Config) -> Path:
    train(config)
    (folder,) = config.runs.glob("small-2*")
    return folder


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:06d}" / "model" / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_an_asynchronous_run_is_replayed_bit_for_bit_and_forked(
    small_config: MakeConfig, capsys: pytest.CaptureFixture[str]
):
    run = recorded(small_config(steps=4, max_staleness=2, checkpoint={"every": 2}, eval={"tasks": 0}))
    with asyncrl.Recording(run) as recording:
        assert (recording.first_step, recording.last_step, recording.lacks()) == (0, 4, ())
        batches = dict(recording.batches())
        assert [len(batch) for batch in batches.values()] == [8, 8, 8, 8]
        group_ids = sorted({int(group_id) for batch in batches.values() for group_id in batch.batch["group_id"]})
        assert group_ids == list(range(8))
        assert len(recording.trajectories("step = 3")) == 8

        again = recording.replay({"algorithm.allow_unsound": True})
        assert (again.compared, again.first_difference, again.equal) == (4, None, True)
        assert again.forked == ()
        assert same(weights(again.run, 4), weights(run, 4))
        told = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        losses = [line["train/loss"] for line in told if "train/loss" in line]
        assert [metrics["loss"] for metrics in again.metrics] == losses  # not only the weights
        attached = asyncrl.attach(again.run)
        assert [step["train/loss"] for step in attached] == losses
        results: Any = attached.wait()
        assert (results["weights"], results["compared"]) == (again.weights, 4)
        assert "training steps" in attached.report()

        fork = recording.replay({"algorithm.loss": "gspo", "trainer.lr": 1e-3}, from_step=2)
        assert fork.forked == ("algorithm.loss", "trainer.lr")
        assert (fork.compared, fork.first_difference) == (2, 3)
        assert not same(weights(fork.run, 4), weights(run, 4))
    assert main(["replay", str(run), "--from-step", "2", "--json"]) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert (outcome["equal"], outcome["weights"]) == (True, again.weights)


def by_hand(recording: asyncrl.Recording) -> float:
    """Run the program of the documentation that computes the loss of step 1; return what it prints."""
    page = (Path(__file__).parents[2] / "docs" / "design" / "replay.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python by-hand\n(.*?)```", page, re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, "replay.md", "exec"), {"recording": recording})
    return float(printed.getvalue())


def test_a_loss_by_hand_is_the_loss_of_the_step_and_a_fork_takes_a_loss_of_ones_own(small_config: MakeConfig):
    algorithm = {"advantage": "worlds:raised_rewards"}
    run = asyncrl.attach(recorded(small_config(steps=2, max_staleness=1, eval={"tasks": 0}, algorithm=algorithm)))
    with run.recording() as recording:
        first, _ = run
        assert abs(first["train/loss"]) > 1e-4
        assert by_hand(recording) == pytest.approx(first["train/loss"], abs=1e-6)

        def twice(tokens: PolicyTokens, *, factor: float = 2.0) -> torch.Tensor:
            return factor * DAPO()(tokens).loss

        settings = {"algorithm.loss": twice, "algorithm.correction": TruncatedImportance(cap=3.0)}
        fork = recording.train(settings)
        doubled = [step["train/loss"] for step in fork]
        assert {"algorithm.correction_options.cap", "algorithm.loss"} <= {*fork.wait().forked}
        assert fork.state == "finished"
        assert doubled[0] == pytest.approx(2 * first["train/loss"], abs=1e-6)
        assert asyncio.run(awaited(recording, to_step=1)).equal

        texts = run.text(recording.trajectories())
        assert texts == recording.text(recording.trajectories())
        assert {line["text"] for line in run.trajectories()} <= {str(text) for text in texts}
        assert all(text.response.startswith(text.turns[0]) for text in texts)
        assert run.text(recording.trajectories("reward > 100")) == []
        with pytest.raises(SchemaError, match="these lack turns"):
            run.text(recording.batch(1).select(["input_ids"]))


async def awaited(recording: asyncrl.Recording, *, to_step: int) -> Any:
    return await recording.train(to_step=to_step)


@pytest.mark.slow
def test_the_examples_of_a_recording_run(small_config: MakeConfig):
    run = recorded(small_config(steps=4, max_staleness=2, eval={"tasks": 0}))
    with asyncrl.Recording(run) as recording:
        ran = doctest.testmod(asyncrl.tasks.rerun, extraglobs={"run": run, "recording": recording})
    assert (ran.failed, ran.attempted > 0) == (0, True)


def test_what_a_recording_lacks_is_told_before_anything_starts(
    small_config: MakeConfig, capsys: pytest.CaptureFixture[str]
):
    config = small_config(steps=2, eval={"tasks": 0})
    run = recorded(config)
    with asyncrl.Recording(run) as recording:
        with pytest.raises(RecordingError, match=r"no checkpoint of step 1 is left \(only 2\)"):
            recording.replay(from_step=1)
        with pytest.raises(RecordingError, match=r"steps 1\.\.7 are not recorded: steps 1\.\.2 are recorded"):
            recording.replay(to_step=7)
        with pytest.raises(ConfigError, match="decided what was sampled"):
            recording.replay({"rollout.temperature": 0.5})
        with pytest.raises(ConfigError, match="decided what was sampled"):
            recording.replay({"trainer.group_size": 2})
        with pytest.raises(ConfigError, match=r"algorithm\.loss"):
            recording.replay({"algorithm.los": "gspo"})
        with pytest.raises(ConfigError, match="no tracker named 'nope'"):
            recording.train({"telemetry.trackers": ["nope"]})
    with sqlite3.connect(run / "ledger.sqlite") as ledger:
        ledger.execute(
            "DELETE FROM trajectories WHERE group_id = (SELECT group_id FROM batches WHERE step = 2 LIMIT 1)"
        )
    shutil.rmtree(run / "model")
    with asyncrl.Recording(run) as recording:
        rows, model = recording.lacks()
    assert rows == "the rows of 1 steps are missing, the first of step 2"
    assert model == "the model it started with is missing: model"
    assert main(["replay", str(run), "--dry-run"]) == 1
    assert "missing: the rows of 1 steps" in capsys.readouterr().out
    assert not list(run.parent.glob("small-replay*"))
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        asyncrl.Recording(run / "logs")
    (run / "ledger.sqlite").unlink()
    with pytest.raises(RecordingError, match="no such ledger"):
        asyncrl.Recording(run)


def test_a_replay_that_cannot_begin_or_end_in_order_leaves_nothing_open(
    small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
):
    closed: list[str] = []
    close = Assembly.aclose

    async def fail(assembly: Assembly) -> None:
        await close(assembly)
        raise InfrastructureError("a worker does not end")

    class Shown(SilentProgress):
        def close(self) -> None:
            closed.append("progress")

    with asyncrl.Recording(recorded(small_config(steps=1, eval={"tasks": 0}))) as recording:
        monkeypatch.setattr(Assembly, "aclose", fail)
        monkeypatch.setattr(asyncrl.tasks.rerun, "make_progress", lambda kind: Shown())
        with pytest.raises(InfrastructureError, match="a worker does not end"):
            recording.replay()
        monkeypatch.setattr(asyncrl.tasks.rerun, "Assembly", None)
        with pytest.raises(TypeError, match="not callable"):
            recording.train()
    folders = list(recording.path.parent.glob("small-replay*"))
    assert (closed, [is_locked(folder) for folder in folders]) == (["progress"], [False, False])


class FromBefore(asyncrl.Recording):
    """A recording whose run was never asked whether its algorithm is sound."""

    def config_of(self, step: int) -> Config:
        config = super().config_of(step)
        return config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"allow_unsound": False})})


@pytest.mark.slow
def test_a_run_from_before_a_rule_is_replayed_and_its_forks_are_held_to_the_rule(small_config: MakeConfig):
    algorithm = {"correction": "none", "allow_unsound": True}
    run = recorded(small_config(steps=1, eval={"tasks": 0}, algorithm=algorithm))
    with FromBefore(run) as recording:
        assert recording.replay().equal
        with pytest.raises(ConfigError, match=r"algorithm\.correction"):
            recording.train({"trainer.lr": 1e-3})


class Stopped(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"max_staleness": 4, "trainer": {"num_mini_batches": 2, "epochs": 2}, "algorithm": {"loss": "clip_cov"}},
        {
            "max_staleness": 2,
            "reward": {"source": "function", "options": {"function": "worlds:length_score"}},
            "algorithm": {"kl_coef": 0.1},
        },
        {"algorithm": {"kl_coef": 0.1, "kl_placement": "reward", "target_kl": 0.01}, "sft": {"steps": 3}},
        {"trainer": {"lora": {"rank": 4, "alpha": 8}}, "algorithm": {"kl_coef": 0.1}},
        {"max_staleness": 2, "buffer": {"options": {"max_uses": 2}}},
        {"max_staleness": 1, "staleness": {"policy": "drop"}, "env": {"latency_s": 0.02}},
    ],
    ids=["prepared", "rewarded", "penalty", "lora", "reused", "drop"],
)
def test_what_takes_part_in_an_update_is_recorded(small_config: MakeConfig, changes: dict[str, Any]):
    run = recorded(small_config(steps=5, checkpoint={"every": 3}, eval={"tasks": 0}, **changes))
    with asyncrl.Recording(run) as recording:
        assert recording.replay().equal
        assert recording.replay(from_step=3).equal


@pytest.mark.slow
def test_a_run_of_two_lives_under_two_configurations_is_replayed(
    small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
):
    config = small_config(
        steps=6, max_staleness=2, checkpoint={"every": 2}, eval={"tasks": 0}, trainer={"lr_scheduler_type": "linear"}
    )
    update = Driver._update

    async def stopping(self: Driver, at: int, groups: Any) -> Any:
        if at == 4:
            raise Stopped
        return await update(self, at, groups)

    with monkeypatch.context() as patch:
        patch.setattr(Driver, "_update", stopping)
        with pytest.raises(Stopped):
            train(config)
    (run,) = config.runs.glob("small-2*")
    longer = small_config(
        steps=8, max_staleness=2, checkpoint={"every": 2}, trainer={"lr": 3e-3, "lr_scheduler_type": "linear"}
    )
    train(longer, resume=run)
    with asyncrl.Recording(run) as recording:
        assert (recording.life(2).step, recording.life(3).step) == (0, 2)
        assert (recording.config_of(2).trainer.lr, recording.config_of(3).trainer.lr) == (1e-2, 3e-3)
        again = recording.replay()
    assert again.equal
    assert same(weights(again.run, 8), weights(run, 8))


@pytest.mark.slow
def test_a_run_whose_divergence_changed_with_each_life_is_replayed(small_config: MakeConfig):
    lives: list[dict[str, Any]] = [
        {},
        {"kl_coef": 0.1},
        {"kl_coef": 0.1, "kl_placement": "reward", "kl_estimator": "k1"},
        {"kl_coef": 0.02, "kl_placement": "reward", "kl_estimator": "k2", "allow_unsound": True},
    ]
    run: Path | None = None
    for step, algorithm in enumerate(lives, 1):
        config = small_config(
            steps=step, max_staleness=0, checkpoint={"every": 1, "keep_last": 4}, eval={"tasks": 0}, algorithm=algorithm
        )
        train(config, resume=run)
        (run,) = config.runs.glob("small-2*")
    assert run is not None
    with asyncrl.Recording(run) as recording:
        again = recording.replay()
        assert again.equal
        assert [step.get("reward_kl_coefficient") for step in again.metrics] == [None, None, 0.1, 0.02]
        told = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [line.get("train/reward_kl") for line in told] == [step.get("reward_kl") for step in again.metrics]
        assert [line.get("train/reward_kl_coefficient") for line in told] == [None, None, 0.1, 0.02]
        (fork,) = recording.replay({"algorithm.kl_coef": 0.5}, from_step=3).metrics
        assert fork["reward_kl_coefficient"] == 0.5


def test_a_part_that_is_replaced_in_a_fork_takes_its_options_with_it(small_config: MakeConfig):
    recorded = small_config(algorithm={"correction": "tis", "correction_options": {"cap": 5.0}})

    def options(**settings: Any) -> dict[str, Any]:
        forked = fork_config(recorded, {f"algorithm.{key}": value for key, value in settings.items()})
        return forked.algorithm.correction_options

    assert options(loss="gspo") == options(correction="tis") == {"cap": 5.0}
    assert options(correction="none") == {}
    assert options(correction_options='{"high" = 3.0}', correction="mis") == {"high": 3.0}
    assert options(correction=TruncatedImportance(cap=3.0)) == {"cap": 3.0}
    with pytest.raises(ConfigError, match="algorithm"):
        fork_config(recorded, {"algorithm": "tis"})


def test_a_key_that_is_set_to_none_stays_so_in_a_fork(small_config: MakeConfig):
    recorded = small_config(simulation={"saturation": "none"}, critic={"cliprange_value": "none"})
    assert fork_config(recorded, {}) == recorded
    assert fork_config(recorded, {"trainer.lr": 0.5}).simulation.saturation is None


@pytest.mark.parametrize(("policy", "law"), [("mask", "mask"), ("drop", "drop"), ("wait", "wait"), ("correct", "wait")])
def test_a_fork_leaves_old_tokens_out_where_a_run_waits(small_config: MakeConfig, policy: str, law: str):
    config = small_config(max_staleness=0, staleness={"policy": policy})
    assert fork_policy(config, ["max_staleness"]).name == law
    assert fork_policy(config, ["algorithm.loss"]).name == "wait"


@pytest.mark.slow
def test_laws_of_a_fork(small_config: MakeConfig):
    run = recorded(
        small_config(
            steps=5, max_staleness=4, staleness={"policy": "correct"}, env={"latency_s": 0.02}, eval={"tasks": 0}
        )
    )
    with asyncrl.Recording(run) as recording:
        masked = recording.replay({"staleness.policy": "mask"})
        assert (masked.forked, masked.first_difference) == (("staleness.policy",), None)  # nothing was too old
        with pytest.raises(RecordingError, match="no token of step"):
            recording.replay({"staleness.policy": "mask", "max_staleness": 1})
        with pytest.raises(RecordingError, match="no token of step"):
            recording.replay({"staleness.policy": "mask", "max_staleness": 0})
        with pytest.raises(RecordingError, match="no group of step"):
            recording.replay({"staleness.policy": "drop", "max_staleness": 0})
        for policy in ("wait", "correct"):
            with pytest.raises(ConfigError, match=f'"{policy}" leaves nothing out'):
                recording.replay({"staleness.policy": policy, "max_staleness": 0})
