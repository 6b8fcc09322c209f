"""Runs that are interrupted and go on: what the ledger and the checkpoints make of it."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import asyncrl
from asyncrl.config import Config
from asyncrl.errors import CheckpointError, ConfigError, EnvironmentFailure
from asyncrl.io import DurableFiles, verify_folder
from asyncrl.ledger import Recovered
from asyncrl.rollout.turns import TurnRecord, decode_turns
from asyncrl.rollout.worker import TokenMeter, metered_tokens
from asyncrl.tasks.run import train
from asyncrl.telemetry.run_directory import RunDirectory
from asyncrl.trainer.checkpoint import Checkpoints, read_driver_state
from asyncrl.trainer.driver import Driver
from asyncrl.trainer.journal import Journal
from asyncrl.trainer.recovery import check_batches
from buffers.ledger import query

MakeConfig = Callable[..., Config]


def only_run(config: Config) -> Path:
    (folder,) = config.runs.glob("small-2*")
    return folder


def lines(run: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:06d}" / "model" / "model.safetensors")


class Stopped(Exception):
    pass


def stop_before(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The run ends by an error when it wants to train this step, once the checkpoints before it are written."""
    update = Driver._update

    async def stopping(self: Driver, at: int, groups: Any) -> Any:
        if at == step:
            await self.checkpoint_written()
            raise Stopped
        return await update(self, at, groups)

    monkeypatch.setattr(Driver, "_update", stopping)


@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param({"env": {"candidates": 4}}, marks=pytest.mark.slow),
        pytest.param(
            {"algorithm": {"advantage": "gae", "loss": "ppo"}, "critic": {"lr": 1e-2}}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_a_run_that_was_interrupted_ends_in_the_weights_of_one_that_was_not(
    more: dict[str, Any],
    small_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
):
    def config(folder: str) -> Config:
        return small_config(
            runs=str(tmp_path / folder),
            steps=5,
            max_staleness=0,
            rollout={"options": {"max_running_requests": 1}},
            checkpoint={"every": 2},
            eval={"tasks": 4, "every": 2},
            **more,
        )

    calm = config("calm")
    expected = train(calm)
    hurt = config("hurt")
    with monkeypatch.context() as patch:
        stop_before(patch, 4)
        with pytest.raises(Stopped):
            train(hurt)
    run = only_run(hurt)
    before = sqlite3.connect(run / "ledger.sqlite").execute("SELECT count(*) FROM trajectories").fetchone()[0]
    hurt = hurt.model_copy(update={"telemetry": hurt.telemetry.model_copy(update={"progress": "plain"})})
    summary = train(hurt, resume=run)

    assert "step 4 of 5; 3 is trained again from the ledger" in capsys.readouterr().err
    after = weights(run, 5)
    assert all(torch.equal(tensor, after[name]) for name, tensor in weights(only_run(calm), 5).items())
    assert summary["tokens"]["trained"] == expected["tokens"]["trained"]
    assert sum(summary["tokens"]["dropped"].values()) + summary["tokens"]["trained"] == summary["tokens"]["generated"]
    with sqlite3.connect(run / "ledger.sqlite") as ledger:
        assert ledger.execute("SELECT step, position, group_id FROM batches ORDER BY sequence").fetchall()[-4:] == [
            (4, 0, 6),
            (4, 1, 7),
            (5, 0, 8),
            (5, 1, 9),
        ]
        (rows,) = ledger.execute("SELECT count(*) FROM trajectories").fetchone()
        assert rows - before == 8 * (5 - before // 8)  # step 3 was trained again on the rows it had; none was sampled
    assert [line["step"] for line in lines(run, "metrics.jsonl") if "train/loss" in line] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in lines(run, "metrics.jsonl") if "eval/success" in line] == [0, 2, 4, 5]
    shown = [line["group_id"] for line in lines(run, "trajectories.jsonl")]
    assert len(shown) == len(set(shown)) == 5
    assert len(query(run / "ledger.sqlite", "step = 3")) == 8


@pytest.mark.parametrize(("interrupted", "saved"), [pytest.param("_select", 2, marks=pytest.mark.slow), ("_update", 3)])
def test_ctrl_c_saves_the_last_whole_step_and_says_how_to_go_on(
    small_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    interrupted: str,
    saved: int,
):
    config = small_config(steps=4, max_staleness=0, checkpoint={"every": 100}, telemetry={"progress": "plain"})
    original = getattr(Driver, interrupted)

    async def interrupting(self: Driver, step: int, *more: Any) -> Any:
        if step == 3:
            self._step_s = 100.0  # the step before took as long as this machine may need
            os.kill(os.getpid(), signal.SIGINT)
            if interrupted == "_select":
                await asyncio.Event().wait()
        return await original(self, step, *more)

    with monkeypatch.context() as patch:
        patch.setattr(Driver, interrupted, interrupting)
        with pytest.raises(KeyboardInterrupt) as caught:
            train(config)
    run = only_run(config)
    assert caught.value.__notes__ == [f"go on with: asyncrl train --resume {run}"]
    assert Checkpoints(run / "checkpoints", keep=2).latest().name == f"step-{saved:06d}"
    assert [line["step"] for line in lines(run, "metrics.jsonl") if "train/loss" in line] == [*range(1, saved + 1)]
    summary = train(config, resume=run)
    assert f"step {saved + 1} of 4" in capsys.readouterr().err
    assert sum(summary["tokens"]["dropped"].values()) + summary["tokens"]["trained"] == summary["tokens"]["generated"]
    assert [line["step"] for line in lines(run, "metrics.jsonl") if "train/loss" in line] == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("last", ["evaluate", "write_summary"])
def test_a_run_that_is_stopped_on_its_last_metre_ends_like_any_other(
    small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, last: str
):
    config = small_config(steps=2, max_staleness=0, checkpoint={"every": 100}, eval={"tasks": 4, "every": 2})
    owner: Any = {"evaluate": Driver, "write_summary": RunDirectory}[last]

    def stopped(self: Any, *_: Any) -> Any:
        raise Stopped

    async def stopped_at_the_end(self: Driver, **options: Any) -> Any:
        if self.law.version == config.steps:
            raise Stopped
        return await evaluate(self, **options)

    evaluate = Driver.evaluate
    with monkeypatch.context() as patch:
        patch.setattr(owner, last, stopped_at_the_end if last == "evaluate" else stopped)
        with pytest.raises(Stopped):
            train(config)
    run = only_run(config)
    assert Checkpoints(run / "checkpoints", keep=2).latest().name == "step-000002"
    with pytest.raises(ConfigError, match=r"steps = 1: .* has done 2 steps, and continues after them"):
        train(config.model_copy(update={"steps": 1}), resume=run)
    summary = train(config, resume=run)
    assert summary["success_after"] is not None
    assert summary["tokens"]["generated"] == summary["tokens"]["trained"] + sum(summary["tokens"]["dropped"].values())
    assert json.loads((run / "summary.json").read_text())["tokens"] == summary["tokens"]
    assert [line["step"] for line in lines(run, "metrics.jsonl") if "train/loss" in line] == [1, 2]
    assert [line["step"] for line in lines(run, "metrics.jsonl") if "eval/success" in line] == [0, 2]
    with pytest.raises(CheckpointError, match="has done all its 2 steps"):
        train(config, resume=run)


def test_a_last_evaluation_without_an_answer_ends_no_run(
    small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    config = small_config(steps=2, max_staleness=0, eval={"tasks": 2, "every": 1, "on_start": False})

    async def unanswered(self: Driver, **_: Any) -> Any:
        raise EnvironmentFailure("the world is gone")

    with monkeypatch.context() as patch:
        patch.setattr(Driver, "evaluate", unanswered)
        summary = train(config)
    assert (summary["steps"], summary["success_after"]) == (2, None)
    assert caplog.text.count("has no score: no held-out task was answered: the world is gone") == 2
    assert summary["unscored"] == dict.fromkeys(("1", "2"), "no held-out task was answered: the world is gone")


@pytest.mark.slow
def test_no_checkpoint_waits_for_a_pinned_evaluation_and_a_resumed_run_names_the_score_it_lacks(
    small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
):
    config = small_config(
        steps=5,
        rollout={"replicas": 2},
        checkpoint={"every": 1},
        eval={"tasks": 4, "every": 2, "replicas": 1, "on_start": False},
    )
    evaluate = Driver.evaluate

    async def endless(self: Driver, *, replicas: int = 0) -> Any:
        async with self.stages.pool.pinned(1):
            await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(Driver, "evaluate", endless)
        stop_before(patch, 4)
        with pytest.raises(Stopped):
            train(config)
    run = only_run(config)
    assert Checkpoints(run / "checkpoints", keep=2).latest().name == "step-000003"

    pinned: list[int] = []

    async def noted(self: Driver, *, replicas: int = 0) -> Any:
        pinned.append(replicas)
        return await evaluate(self, replicas=replicas)

    monkeypatch.setattr(Driver, "evaluate", noted)
    summary = train(config, resume=run)
    assert summary["unscored"] == {"2": "the run stopped while it was evaluated"}
    assert [(score["step"], score["version"], score["newest_version"]) for score in summary["scores"]] == [
        (4, 4, 4),
        (5, 5, 5),
    ]
    assert pinned == [1, 0]  # at the end nothing is published, and all replicas evaluate


def test_trajectories_that_were_under_way_go_on_token_for_token(
    small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
):
    def config(**env: Any) -> Config:
        return small_config(
            steps=2, max_staleness=0, checkpoint={"every": 2}, eval={"tasks": 0}, seed=3, env=env, trainer={"lr": 1e-2}
        )

    first_turns: list[TurnRecord] = []
    enough = asyncio.Event()
    told = Journal.turns

    def telling(self: Journal, content: bytes) -> None:
        told(self, content)
        first_turns.extend(decode_turns(content))
        if len(first_turns) >= 8:
            enough.set()

    async def stopping(self: Driver, step: int) -> Any:
        await enough.wait()
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "turns", telling)
        patch.setattr(Driver, "_select", stopping)
        with pytest.raises(Stopped):
            train(config(latency_s=30.0))  # every row has said its first turn, and waits for the world
    (run,) = config().runs.glob("small-2*")
    summary = train(config(options={"differs_on": [1]}), resume=run)
    sampled = {(turn.group_id, turn.row): turn.generation() for turn in first_turns}
    assert len(sampled) == 8
    # The world of prompt 1 answers in other words than before the stop: its trajectories were begun again.
    expected = sum(len(said.token_ids) for (group_id, _row), said in sampled.items() if group_id == 0)
    assert summary["continued"] == {
        "trajectories": 4,
        "tokens": expected,
        "restarted": {"the environment answered differently": 4},
    }
    tokens = summary["tokens"]
    assert tokens["generated"] == tokens["trained"] + sum(tokens["dropped"].values())
    assert tokens["dropped"] == {
        "interrupted": sum(len(said.token_ids) for (group_id, _row), said in sampled.items() if group_id == 1)
    }
    rows = query(run / "ledger.sqlite", "group_id = 0")
    for row in range(4):
        said = sampled[0, row]
        mask = rows.batch["loss_mask"][row]
        assert tuple(rows.batch["input_ids"][row][mask][: len(said.token_ids)].tolist()) == said.token_ids
        assert tuple(rows.batch["behaviour_log_probs"][row][mask][: len(said.token_ids)].tolist()) == said.log_probs
    with sqlite3.connect(run / "ledger.sqlite") as ledger:
        assert ledger.execute("SELECT count(*) FROM unfinished").fetchone() == (0,)


def test_a_damaged_model_of_the_run_is_named(small_config: MakeConfig):
    config = small_config(steps=2, checkpoint={"every": 1}, eval={"tasks": 0})
    train(config)
    run = only_run(config)
    (run / "model" / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged"):
        train(small_config(steps=3, checkpoint={"every": 1}, eval={"tasks": 0}), resume=run)
    with asyncrl.Recording(run) as recording:
        (lacks,) = recording.lacks()
    assert lacks.startswith("the model it started with cannot be loaded: ")


def test_a_damaged_checkpoint_is_passed_over(small_config: MakeConfig):
    config = small_config(steps=4, checkpoint={"every": 2, "keep_last": 3}, eval={"tasks": 0})
    train(config)
    run = only_run(config)
    victim = run / "checkpoints" / "step-000004" / "model" / "model.safetensors"
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        verify_folder(victim.parents[1])
    checkpoints = Checkpoints(run / "checkpoints", keep=2)
    assert checkpoints.latest().name == "step-000002"
    summary = train(config, resume=run)  # steps 3 and 4 again, on the rows they had
    masked = summary["tokens"]["dropped"].get("masked", 0)  # a slow machine may sample past the bound
    assert summary["tokens"]["generated"] == summary["tokens"]["trained"] + masked
    assert checkpoints.latest().name == "step-000004"
    for checkpoint in checkpoints.all():
        shutil.rmtree(checkpoint / "trainer")
    with pytest.raises(CheckpointError, match="is missing"):
        checkpoints.latest()


def test_a_checkpoint_that_cannot_be_written_is_named_and_the_one_before_stays(
    small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    config = small_config(steps=4, checkpoint={"every": 1, "keep_last": 1}, eval={"tasks": 0})
    seal = DurableFiles.seal

    def full(self: DurableFiles, folder: Path, **known: Any) -> None:
        if folder.name.startswith((".step-000002", ".step-000003")):
            assert Checkpoints(folder.parent, keep=1).latest().name == "step-000001"
            raise OSError(errno.ENOSPC, "no space left on device")
        seal(self, folder, **known)

    monkeypatch.setattr(DurableFiles, "seal", full)
    summary = train(config)
    reason = "OSError: [Errno 28] no space left on device"
    assert summary["unsaved"] == {"2": reason, "3": reason}
    assert f"the checkpoint of step 2 was not written, the one before stays: {reason}" in caplog.text
    assert [path.name for path in (only_run(config) / "checkpoints").glob("*step-*")] == ["step-000004"]
    with sqlite3.connect(only_run(config) / "ledger.sqlite") as ledger:
        committed = ledger.execute("SELECT step FROM events WHERE kind = 'committed' ORDER BY sequence").fetchall()
    assert [step for (step,) in committed] == [1, 4, 4]


def test_a_meter_outlives_its_process(tmp_path: Path):
    program = (
        "import os, signal, sys; from pathlib import Path; from asyncrl.rollout.worker import TokenMeter\n"
        "meter = TokenMeter(Path(sys.argv[1]))\n"
        "with meter.account('train') as account:\n"
        "    meter.count(account, 5); meter.count(account, 2)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert killed.returncode == -9
    meter = TokenMeter(tmp_path)
    with meter.account("eval") as account:
        meter.count(account, 3)
    assert (metered_tokens(tmp_path, "train"), metered_tokens(tmp_path, "eval")) == (7, 3)
    (tmp_path / "1-2.tokens").mkdir()  # damaged
    assert metered_tokens(tmp_path, "train") == 7
    assert metered_tokens(tmp_path / "absent", "train") == 0


@pytest.mark.slow
def test_counts_that_the_death_of_a_machine_took_are_those_of_the_ledger(
    small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
):
    """Step 3 comes after the checkpoint: its groups are recorded, and no meter has counted them."""
    config = small_config(steps=4, max_staleness=0, checkpoint={"every": 2}, eval={"tasks": 0})
    with monkeypatch.context() as patch:
        stop_before(patch, 4)
        with pytest.raises(Stopped):
            train(config)
    run = only_run(config)
    for meter in (run / "meters").glob("*.tokens"):
        meter.write_bytes(bytes(meter.stat().st_size))
    tokens = train(config, resume=run)["tokens"]
    sampled = int(query(run / "ledger.sqlite").batch["loss_mask"].values().sum())
    assert tokens == {"generated": sampled, "trained": sampled, "dropped": {}, "in_flight": 0}
    assert "count 0 tokens, and at least" in (run / "logs" / "driver.log").read_text()


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("max_staleness", "seed", "more"),
    [
        pytest.param(0, 4, (), marks=pytest.mark.slow),
        pytest.param(2, 1, (), marks=pytest.mark.slow),
        pytest.param(0, 5, ("--lose-folder",), marks=pytest.mark.long),
        pytest.param(2, 6, ("--lose-folder",), marks=pytest.mark.long),
    ],
)
def test_killed_at_random_moments_every_prompt_is_trained_on_once(
    tmp_path: Path, max_staleness: int, seed: int, more: Sequence[str]
):
    program = Path(__file__).parent / "kills.py"
    arguments = [str(tmp_path), "--kills", "8", "--seed", str(seed), "--max-staleness", str(max_staleness), *more]
    done = subprocess.run(
        [sys.executable, str(program), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    hurt = told["hurt"]
    assert told["kills"] + told["restarts"] >= 3, "the run was over before it was hurt"
    assert (hurt["lost"], hurt["duplicated"], hurt["unaccounted_tokens"], hurt["shown_twice"]) == (0, 0, 0, 0)
    # What it had learned when it was killed it learned again, bit for bit; and all of it can be replayed.
    assert (hurt["made_differently"], hurt["replayed"], told["calm"]["replayed"]) == (0, True, True)
    assert hurt["states"] == {"committed": 16, "failed": 1}
    assert hurt["steps"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert hurt["scores"] == [0, 3, 6, 8]
    assert hurt["staleness"] <= max_staleness
    if max_staleness == 0:
        assert hurt["batches"] == told["calm"]["batches"]
        assert told["equal_weights"]


@pytest.mark.slow
def test_batches_that_are_taken_again_keep_their_size(small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch):
    """Steps 1 to 3 come after the last checkpoint, and their batches of 2 stand in the ledger."""

    def config(groups: int, steps: int = 5) -> Config:
        return small_config(
            steps=steps, checkpoint={"every": 100}, eval={"tasks": 0}, trainer={"groups_per_step": groups}
        )

    with monkeypatch.context() as patch:
        stop_before(patch, 4)
        with pytest.raises(Stopped):
            train(config(2))
    run = only_run(config(2))

    def is_refused(groups: int, *, first: int) -> None:
        with pytest.raises(ConfigError, match=rf"groups_per_step is .*step {first} .* 2 recorded groups") as told:
            train(config(groups), resume=run)
        assert told.value.path == "trainer.groups_per_step"

    is_refused(1, first=1)
    is_refused(3, first=1)
    assert train(config(2, steps=2), resume=run)["weight_version"] == 2
    is_refused(1, first=3)
    assert train(config(2, steps=3), resume=run)["weight_version"] == 3
    assert train(config(1), resume=run)["weight_version"] == 5  # nothing is taken again any more


@pytest.mark.slow
@pytest.mark.parametrize(("lr", "steps", "newest"), [(1e-2, [1, 2, 3], 3), (1e-3, [1], 0)])
def test_a_resume_with_another_rate_keeps_only_what_the_checkpoints_weights_have_sampled(
    small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, lr: float, steps: list[int], newest: int
):
    def config(lr: float) -> Config:
        settings: dict[str, Any] = {"checkpoint": {"every": 100}, "eval": {"tasks": 0}, "trainer": {"lr": lr}}
        return small_config(steps=4, max_staleness=0, **settings)

    with monkeypatch.context() as patch:
        stop_before(patch, 4)
        with pytest.raises(Stopped):
            train(config(1e-2))
    recovered: list[Recovered] = []

    def checked(found: Recovered, **rules: Any) -> None:
        recovered.append(dataclasses.replace(found, groups={**found.groups}))
        check_batches(found, **rules)

    monkeypatch.setattr("asyncrl.trainer.run.check_batches", checked)
    assert train(config(lr), resume=only_run(config(lr)))["weight_version"] == 4
    (found,) = recovered
    assert [*found.batches] == steps
    assert max(version for group in found.groups.values() for version in group.summary.version_tokens) <= newest


@pytest.mark.slow
def test_prompts_that_fewer_steps_do_not_need_wait_for_more(small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch):
    config = small_config(steps=5, ledger={"kind": "none"}, checkpoint={"every": 2}, eval={"tasks": 0})
    with monkeypatch.context() as patch:
        stop_before(patch, 3)
        with pytest.raises(Stopped):
            train(config)
    run = only_run(config)
    checkpoints = Checkpoints(run / "checkpoints", keep=2)
    before = read_driver_state(checkpoints.latest())
    assert (before.step, bool(before.outstanding)) == (2, True)
    train(config.model_copy(update={"steps": 2}), resume=run)
    assert read_driver_state(checkpoints.latest()).outstanding == before.outstanding
    assert train(config, resume=run)["weight_version"] == 5


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"dp_replicate": 2}, {"tp": 2}, {"pp": 2}], ids=str)
def test_a_run_of_two_ranks_goes_on_with_one(small_config: MakeConfig, mesh: dict[str, int]):
    """Each rank wrote its part on Ray; one rank in this process reads both, and exports the same model."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2, "max_position": 128}
    model = {"options": {**sizes, "tie_word_embeddings": "pp" not in mesh}}
    config = small_config(
        steps=2,
        cluster={"backend": "ray"},
        model=model,
        trainer={"world_size": 2, "mesh": mesh},
        checkpoint={"every": 1},
        eval={"tasks": 0},
    )
    train(config)
    run = only_run(config)
    parts = sorted(path.name for path in (run / "checkpoints" / "step-000002" / "trainer").glob("rank-*"))
    assert parts == ["rank-00000.safetensors", "rank-00001.safetensors"]
    before = weights(run, 2)
    same = small_config(steps=2, model=model, checkpoint={"every": 1}, eval={"tasks": 0})
    (run / "summary.json").unlink()  # as if killed before its end: step 2 is saved again
    train(same, resume=run)
    after = weights(run, 2)
    assert [path.name for path in (run / "checkpoints" / "step-000002" / "trainer").glob("rank-*")] == parts[:1]
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert train(same.model_copy(update={"steps": 3}), resume=run)["steps"] == 3
