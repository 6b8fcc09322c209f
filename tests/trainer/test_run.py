"""Whole runs on the local backend: real engine, real trainer, a small world."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import re
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from asyncrl.config import Config, load_config
from asyncrl.errors import CheckpointError, ConfigError, EnvironmentFailure, TokenBalanceError, WeightVersionError
from asyncrl.rollout.worker import TokenAccount, TokenMeter
from asyncrl.staleness import POLICIES
from asyncrl.tasks import handle
from asyncrl.tasks.run import evaluate, generate, sft, train
from asyncrl.telemetry import report_text
from asyncrl.telemetry.progress import make_progress
from asyncrl.telemetry.run_directory import RunDirectory
from asyncrl.telemetry.timeline import Timeline
from asyncrl.trainer import report
from asyncrl.trainer.assembly import Assembly, make_environments
from asyncrl.trainer.checkpoint import DriverState
from asyncrl.trainer.driver import Driver
from asyncrl.trainer.journal import TokenBalance
from asyncrl.trainer.recovery import starting_point
from asyncrl.trainer.run import TrainingRun, _check_state_fits, _same_updates
from asyncrl.trainer.workers import TrainerSpec, TrainerWorker

MakeConfig = Callable[..., Config]


def only_run(config: Config, *, pattern: str = "small-2*") -> Path:
    (folder,) = config.runs.glob(pattern)
    return folder


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_tells_where_every_token_went_and_keeps_its_bound(
    small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    statuses: list[report.RunStatus] = []
    monkeypatch.setattr(report, "write_status", lambda path, status: statuses.append(status))
    config = small_config(steps=4, max_staleness=2, telemetry={"progress": "plain"})
    summary = train(config)
    # Not from the beginnings of lines: a bar of another library may not have ended its own.
    noted = re.findall(r"\[ *[\d.]+ s\] (.*)", capsys.readouterr().err)
    assert {*noted[noted.index("serve") : noted.index("train")]} >= {"the trainer is loaded", "replicas serve"}
    used = summary["trainer"]
    assert used.keys() == {"update_s", "tflops", "memory_peak_gb"}  # what a CPU can do is not known
    assert 0 < used["update_s"] < summary["wall_s"]
    assert used["tflops"] > 0
    assert len(used["memory_peak_gb"]) == 1
    (run,) = config.runs.glob("small-2*")
    assert {"train/tflops", "train/memory_peak_gb"} <= metrics_of(run)[-1].keys() | metrics_of(run)[1].keys()
    assert statuses[0].causes[0].startswith("start: for ")  # before and after the training there are statuses, too
    assert statuses[-1].causes[0].startswith(("save: for ", "score after: for "))
    tokens = summary["tokens"]
    assert tokens["generated"] == tokens["trained"] > 0
    assert (tokens["dropped"], tokens["in_flight"]) == ({}, 0)
    assert summary["staleness"]["max"] <= 2
    assert sum(summary["staleness"]["histogram"].values()) == tokens["trained"]
    assert (summary["steps"], summary["weight_version"], summary["max_staleness"]) == (4, 4, 2)
    assert summary["idle"].keys() == {"trainer", "driver", "rollout-0"}
    for causes in summary["idle"].values():
        assert sum(causes.values()) == pytest.approx(100)
        assert causes.get("not recorded", 0) <= 5

    run = only_run(config)
    assert json.loads((run / "summary.json").read_text())["tokens"] == tokens
    steps = [line for line in metrics_of(run) if "train/loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert all(line["staleness_max"] <= 2 for line in steps)
    assert {"rollout", "train", "publish", "evaluate"} <= {
        event["cat"].split(",")[1]
        for event in json.loads((run / "timeline.json").read_text())["traceEvents"]
        if "," in event.get("cat", "")
    }
    assert len((run / "trajectories.jsonl").read_text().splitlines()) == 4


@pytest.mark.slow
def test_the_warm_start_teaches_and_its_model_can_be_scored_and_shown(small_config: MakeConfig):
    config = small_config(steps=0, sft={"steps": 30, "batch_size": 16, "lr": 1e-2})
    folder = Path(sft(config)["model"])
    losses = [line["sft/loss"] for line in metrics_of(only_run(config))]
    assert len(losses) == 30
    assert losses[-1] < 0.5 * losses[0]
    scored = evaluate(config, checkpoint=folder)
    assert scored["tasks"] == 4
    (shown,) = generate(config, checkpoint=folder, prompt="3+4")
    assert "3+4" in shown["text"]
    whole = generate(config, checkpoint=folder, tasks=2, out=config.runs / "shown.jsonl")
    assert [record["task"]["index"] for record in whole] == [10_000, 10_001]
    assert len((config.runs / "shown.jsonl").read_text().splitlines()) == 2


def test_a_group_whose_world_is_broken_is_replaced_and_its_tokens_are_counted(small_config: MakeConfig):
    config = small_config(env={"name": "worlds:DigitsFactory", "options": {"fails_on": [1, 2]}})
    summary = train(config)
    dropped = summary["tokens"]["dropped"]
    assert dropped["environment_failed"] > 0
    assert dropped.keys() <= {"environment_failed", "masked"}  # a slow machine may sample past the bound
    assert summary["tokens"]["generated"] == summary["tokens"]["trained"] + sum(dropped.values())
    assert summary["steps"] == 3


def test_failures_are_counted_by_cause_with_one_example_and_a_resumed_run_goes_on_counting(small_config: MakeConfig):
    config = small_config(steps=1, env={"name": "worlds:DigitsFactory", "options": {"fails_on": [1, 2]}})
    summary = train(config)
    ((cause, found),) = summary["failures"].items()
    assert re.fullmatch(r"OSError in .*/worlds\.py:\d+ step", cause)
    assert found["count"] >= 3  # an episode failed three times, and the others of its group as often as they could
    assert re.search(r'File ".*worlds.py", line \d+, in step', found["example"])
    assert found["example"].endswith("OSError: the world of task 1 is broken")
    assert "asyncrl/rollout" not in found["example"]
    run = only_run(config)
    assert (run / "logs/driver.log").read_text().count("OSError: the world of task 1 is broken") == 1
    assert f"{found['count']:,} times" in report_text(summary)
    resumed = train(config.model_copy(update={"steps": 2}), resume=run)
    assert resumed["failures"][cause]["count"] >= found["count"]


def test_a_world_that_hangs_meets_its_deadline(small_config: MakeConfig):
    config = small_config(
        steps=1,
        env={"name": "worlds:DigitsFactory", "options": {"hangs_on": [0]}, "deadline_s": 0.2},
        rollout={"max_attempts": 1},
    )
    summary = train(config)
    assert summary["tokens"]["dropped"]["environment_failed"] > 0
    (cause,) = summary["failures"]
    assert re.fullmatch(r"EnvironmentDeadlineError in .*/worlds\.py:\d+ step", cause)


def test_a_world_that_is_always_broken_ends_the_run_by_name(small_config: MakeConfig):
    config = small_config(env={"name": "worlds:DigitsFactory", "options": {"fails_on": list(range(100))}})
    with pytest.raises(EnvironmentFailure, match="is broken") as caught:
        train(config)
    assert "worlds.py" in "".join(traceback.format_exception(caught.value))  # the line of the user's code that raised


def test_rewards_of_a_function_and_a_reference_take_their_place_in_the_loop(small_config: MakeConfig):
    config = small_config(
        steps=2,
        reward={"source": "function", "options": {"function": "worlds:generous_score"}},
        algorithm={"kl_coef": 0.1},
        model={"source": "scratch"},
    )
    summary = train(config)
    assert 0 < summary["reward_first"] < 1
    steps = [line for line in metrics_of(only_run(config)) if "train/loss" in line]
    assert steps[0]["train/reference_kl"] == pytest.approx(0, abs=1e-6)
    assert steps[1]["train/reference_kl"] > 0
    scores = [line["eval/reward_mean"] for line in metrics_of(only_run(config)) if "eval/success" in line]
    assert len(scores) == 2
    assert all(score >= 0.5 for score in scores)  # held-out answers are rewarded by the same function


def test_the_held_out_score_is_of_the_configured_reward_or_of_the_environments(
    small_config: MakeConfig, tmp_path: Path
):
    reward = {"source": "function", "options": {"function": "worlds:generous_score"}}
    config = small_config(steps=0, reward=reward, eval={"tasks": 4, "success_reward": 0.5})
    file = tmp_path / "answers.jsonl"
    scores = evaluate(config, out=file)["scores"]
    rewards = [json.loads(line)["reward"] for line in file.read_text().splitlines()]
    assert scores["reward"].mean == pytest.approx(sum(rewards) / 4)
    assert scores["avg@1"].mean == 1.0
    plain = config.model_copy(update={"eval": config.eval.model_copy(update={"reward": "environment"})})
    assert evaluate(plain)["scores"]["reward"].mean < 0.5


def test_a_run_goes_on_from_its_checkpoint(small_config: MakeConfig):
    config = small_config(steps=2, checkpoint={"every": 2})
    first = train(config)
    run = only_run(config)
    longer = config.model_copy(update={"steps": 5})
    second = train(longer, resume=run)
    assert second["weight_version"] == 5
    assert second["success_before"] == first["success_before"]
    tokens = second["tokens"]
    assert tokens["generated"] == tokens["trained"] + sum(tokens["dropped"].values())
    trained = tokens["trained"] - first["tokens"]["trained"]
    assert second["tokens_per_s"] == pytest.approx(trained / second["phases_s"]["train"])
    assert [line["step"] for line in metrics_of(run) if "train/loss" in line] == [1, 2, 3, 4, 5]
    with pytest.raises(CheckpointError, match="all its 5 steps"):
        train(longer, resume=run)


@pytest.mark.slow
def test_a_resumed_run_keeps_its_first_reference_and_its_model(small_config: MakeConfig):
    config = small_config(steps=2, max_staleness=2, checkpoint={"every": 1}, algorithm={"kl_coef": 0.1})
    train(config)
    run = only_run(config)
    with pytest.raises(ConfigError, match="must be unchanged"):
        train(small_config(steps=3, model={"options": {"hidden_size": 64}}), resume=run)
    train(config.model_copy(update={"steps": 3}), resume=run)
    steps = [line for line in metrics_of(run) if "train/loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert steps[2]["train/reference_kl"] > 1e-6  # 0 if the checkpoint had become the reference


@pytest.mark.parametrize("fails_on", [[], [1, 2]])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_meter_that_counts_wrong_ends_the_run_by_name(small_config: MakeConfig, monkeypatch, fails_on, change):
    count, calls = TokenMeter.count, itertools.count()

    def wrong(meter: TokenMeter, account: TokenAccount, tokens: int) -> None:
        count(meter, account, tokens + (change if next(calls) % 7 == 0 else 0))

    monkeypatch.setattr(TokenMeter, "count", wrong)
    config = small_config(steps=1, env={"name": "worlds:DigitsFactory", "options": {"fails_on": fails_on}})
    with pytest.raises(
        TokenBalanceError, match=r"^-?\d+ tokens are unaccounted for: \d+ were generated, \d+ trained on"
    ):
        train(config)


def test_a_balance_with_a_negative_count_is_no_balance():
    TokenBalance(generated=5, trained=3, dropped={"masked": 2}, in_flight=0).check()
    with pytest.raises(TokenBalanceError, match="-2 environment_failed"):
        TokenBalance(generated=5, trained=7, dropped={"environment_failed": -2}, in_flight=0).check()


def test_a_refused_resume_leaves_the_files_and_an_accepted_one_names_what_it_changes(
    small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
):
    config = small_config(steps=1, checkpoint={"every": 1})
    train(config)
    run = only_run(config)
    text = (run / "config.toml").read_text()
    refused = small_config(steps=2, env={"name": "no_such_environment"}, checkpoint={"every": 1})
    for _ in range(2):
        with pytest.raises(ConfigError, match="no_such_environment"):
            train(refused, resume=run)
        assert (run / "config.toml").read_text() == text
        assert (run / "summary.json").is_file()
    of_another_kind = small_config(steps=2, trainer={"optimizer": "sgd"}, checkpoint={"every": 1})
    with pytest.raises(ConfigError, match=r"trainer.optimizer = sgd: the checkpoints .* written with adamw"):
        train(of_another_kind, resume=run)
    for meter in (run / "meters").glob("*.tokens"):
        meter.write_bytes(b"")
    summaries: list[bool] = []
    update = Driver._update

    async def looked(self: Driver, *step: Any) -> Any:
        summaries.append((run / "summary.json").exists())
        return await update(self, *step)

    monkeypatch.setattr(Driver, "_update", looked)
    train(config.model_copy(update={"steps": 2, "seed": 7}), resume=run)
    assert summaries == [False]
    assert (run / "config-1.toml").read_text() == text
    assert load_config(run / "config.toml").seed == 7
    log = (run / "logs" / "driver.log").read_text()
    assert f"resumed after step 1 with seed = 7 (was {config.seed})" in log
    assert "tokens is damaged" in log


def test_a_run_may_be_resumed_to_fewer_steps_than_it_had_issued_groups_for():
    state = DriverState(
        step=1,
        next_group_id=8,
        outstanding=(2, 3, 4, 5, 6, 7),
        generated=20,
        trained=10,
        dropped={},
        staleness={},
        history={},
    )
    law = starting_point(state, steps=2, groups_per_step=2, max_staleness=1, policy=POLICIES["wait"]).law
    assert [law.issue(), law.issue()] == [2, 3]
    assert law.finished


def test_a_run_without_steps_needs_no_falling_rate(small_config: MakeConfig):
    config = small_config(steps=0, trainer={"lr_scheduler_type": "linear"})
    assert train(config)["weight_version"] == 0


def test_sampled_answers_of_another_truncation_are_not_continued(
    small_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    found: list[Any] = []

    def opened(path: Path, *, settings: Any, samples: int) -> None:
        found.append(settings["rollout"].keys())
        raise ConfigError("opened")

    monkeypatch.setattr("asyncrl.tasks.run.AnswersFile", opened)
    for temperature in (None, 1.0):
        with pytest.raises(ConfigError, match="opened"):
            generate(small_config(), temperature=temperature, out=tmp_path / "answers.jsonl")
    greedy, sampled = found
    assert sampled - greedy == {"top_p", "top_k"}


def test_answers_of_a_run_that_trains_on_are_not_continued_with_its_next_checkpoint(
    small_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    found: list[Any] = []

    def opened(path: Path, *, settings: Any, samples: int) -> None:
        found.append(settings["checkpoint"])
        raise ConfigError("opened")

    monkeypatch.setattr("asyncrl.tasks.run.AnswersFile", opened)
    for step in (1, 2):
        monkeypatch.setattr("asyncrl.tasks.run._weights_of", lambda checkpoint, step=step: (f"step-{step}/model", step))
        with pytest.raises(ConfigError, match="opened"):
            generate(small_config(), checkpoint=tmp_path, out=tmp_path / "answers.jsonl")
    assert found == [("step-1/model", 1), ("step-2/model", 2)]


def test_what_cannot_be_done_is_told_before_anything_starts(small_config: MakeConfig, tmp_path: Path):
    with pytest.raises(ConfigError, match="no task to score"):
        evaluate(small_config(eval={"tasks": 0}))
    with pytest.raises(ConfigError, match="no task to score"):
        handle.evaluate(small_config(eval={"tasks": 0}))
    with pytest.raises(ConfigError, match="folder does not exist"):
        generate(small_config(), out=tmp_path / "absent" / "shown.jsonl")
    assert not (tmp_path / "runs").exists()
    config = small_config(buffer={"selection": "fifa"}, sft={"steps": 1})
    with pytest.raises(ConfigError, match="no selection is called 'fifa'"):
        train(config)
    assert not (tmp_path / "runs").exists()


@contextmanager
def training_run(config: Config) -> Iterator[TrainingRun]:
    with RunDirectory.create(config.runs, config.name) as run:
        run.write_config(config.to_toml())
        yield TrainingRun(config, run, make_progress("none"), timeline=Timeline())


@pytest.mark.parametrize(
    ("algorithm", "key", "value"),
    [
        ({"kl_coef": 0.1}, "kl_placement", "reward"),
        ({"kl_coef": 0.1, "kl_placement": "reward", "allow_unsound": True}, "kl_estimator", "k2"),
        ({"kl_coef": 0.1, "kl_placement": "reward"}, "kl_coef", 0.0),
    ],
)
def test_what_the_stages_of_a_run_were_made_for_cannot_be_set(
    small_config: MakeConfig, algorithm: dict[str, Any], key: str, value: Any
):
    remedy = f"stop the run, and resume it with --algorithm.{key}"
    with training_run(small_config(algorithm=algorithm)) as training:
        with pytest.raises(ConfigError, match=rf"^algorithm\.{key} cannot be set while a run trains; {remedy}"):
            training._set(f"algorithm.{key}", value)
        training._set("algorithm.kl_coef", 0.2)
        training._set("algorithm.loss", "gspo")


def test_a_key_of_the_trainer_that_a_critic_shares_cannot_be_set(small_config: MakeConfig):
    with training_run(small_config(algorithm={"advantage": "gae", "loss": "ppo"})) as training:
        with pytest.raises(ConfigError, match=r"resume it with --trainer\.max_tokens_per_microbatch"):
            training._set("trainer.max_tokens_per_microbatch", 2048)
        training._set("trainer.lr", 1e-4)  # the critic has its own
    with training_run(small_config()) as training:
        training._set("trainer.max_tokens_per_microbatch", 2048)


def test_nothing_is_set_while_recorded_steps_are_trained_again(small_config: MakeConfig):
    with training_run(small_config(steps=9)) as training:
        journal = SimpleNamespace(recovered=SimpleNamespace(batches={3: [7], 4: [8], 99: [9]}))
        training._driver = cast(Any, SimpleNamespace(journal=journal))
        training._step_begun = 3
        with pytest.raises(ConfigError, match=r"trainer\.lr: steps until 4 are trained again .* set it after step 4"):
            training._set("trainer.lr", 1e-4)
        training._step_begun = 4
        training._set("trainer.lr", 1e-4)


def test_configurations_that_trained_steps_after_another(tmp_path: Path):
    with RunDirectory.create(tmp_path, "r") as run:
        for step, text in enumerate(("a", "b", "c", "d")):
            run.write_config(text, step=10 * step or None)
        assert sorted(path.read_text() for path in run.configs_until_after(10)) == ["b", "c"]
        assert run.configs_until_after(30) == []
        run.rewind(10)
        assert run.configs_until_after(0) == [run.path / "config-10.toml"]
        run.write_config("e", step=20)
        assert (run.path / "config-20.toml").read_text() == "d"


TWICE = {"buffer": {"options": {"max_uses": 2}}}
FALLING = {"lr_scheduler_type": "linear"}
WAIT = {"staleness": {"policy": "wait"}}
CRITIC: dict[str, Any] = {"algorithm": {"advantage": "gae", "loss": "ppo"}}
SCORED: dict[str, Any] = {"reward": {"source": "worlds:Length"}}


@pytest.mark.parametrize(
    ("before", "now", "refused"),
    [
        ({"sft": {"steps": 3}}, {"sft": {"steps": 0}}, "sft.steps = 0: the run began with a warm start\nresume"),
        ({"sft": {"steps": 0}}, {"sft": {"steps": 3}}, "sft.steps = 3: the run began without a warm start"),
        ({"sft": {"steps": 3}}, {"sft": {"steps": 4}}, ""),
        (SCORED, {}, "reward.source = environment: the run has recorded groups with rewards of worlds:Length"),
        (SCORED | {"ledger": {"kind": "none"}}, {}, ""),
        (SCORED, {"ledger": {"kind": "none"}}, ""),
        ({}, SCORED, ""),
        (
            TWICE,
            SCORED | TWICE,
            "reward.source = worlds:Length: the run has recorded groups with rewards of environment",
        ),
    ],
    ids=str,
)
def test_a_change_that_a_resume_cannot_honour_is_refused(
    small_config: MakeConfig, before: dict[str, Any], now: dict[str, Any], refused: str
):
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        _check_state_fits(small_config(**now), small_config(**before), has_critic=False)


@pytest.mark.parametrize(
    ("before", "now", "same"),
    [
        ({}, {}, True),
        ({}, {"trainer": {"lr": 1e-3}}, False),
        ({}, {"algorithm": {"kl_coef": 0.1}}, False),
        ({}, {"critic": {"lr": 1e-3}}, True),  # there is none
        (CRITIC, CRITIC | {"critic": {"lr": 1e-3}}, False),
        ({}, {"trainer": {"max_tokens_per_microbatch": 9000, "gradient_checkpointing": True}}, True),
        ({}, {"algorithm": {"max_mismatch_kl": 0.5}}, True),
        ({"max_staleness": 2}, {"max_staleness": 3}, False),
        ({"max_staleness": 2} | WAIT, {"max_staleness": 3} | WAIT, True),
        ({"max_staleness": 2} | WAIT, {"max_staleness": 2}, False),
        ({}, {"rollout": {"temperature": 0.5}}, False),
        ({}, {"algorithm": {"allow_unsound": True}, "rollout": {"replicas": 2}}, True),
        ({}, {"trainer": {"groups_per_step": 9, "num_cpus": 2.0}}, True),
        ({"steps": 3}, {"steps": 4}, True),
        ({"steps": 3, "trainer": FALLING}, {"steps": 4, "trainer": FALLING}, False),
    ],
    ids=str,
)
def test_which_changes_make_other_weights_of_the_same_rows(
    small_config: MakeConfig, before: dict[str, Any], now: dict[str, Any], same: bool
):
    assert _same_updates(small_config(**now), small_config(**before)) is same


async def test_a_timeline_that_cannot_be_written_keeps_nothing_open(caplog: pytest.LogCaptureFixture):
    closed: list[str] = []

    def part(name: str, **methods: Any) -> SimpleNamespace:
        return SimpleNamespace(close=lambda: closed.append(name), **methods)

    async def nothing(**_: object) -> None: ...

    def full(path: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = SimpleNamespace(
        _checkpoints=SimpleNamespace(sent=nothing),
        _assembly=SimpleNamespace(aclose=nothing),
        _trackers=part("trackers"),
        _timeline=SimpleNamespace(save=full),
        _run=part("run", timeline_path="timeline.json"),
        _progress=part("progress"),
    )
    await TrainingRun._close(cast("Any", run))
    assert closed == ["trackers", "run", "progress"]
    assert "timeline.json is not written: [Errno 28] No space left on device" in caplog.text


@pytest.mark.parametrize("has_critic", [True, False])
def test_a_checkpoint_with_a_critic_keeps_its_optimizer(small_config: MakeConfig, has_critic: bool):
    refused = pytest.raises(ConfigError, match="muon: the checkpoints of the run were written with")
    with refused if has_critic else nullcontext():
        _check_state_fits(small_config(critic={"optimizer": "muon"}), small_config(), has_critic=has_critic)


def test_an_estimator_in_the_loss_alone_can_be_set(small_config: MakeConfig):
    with training_run(small_config(algorithm={"kl_coef": 0.1})) as training:
        training._set("algorithm.kl_estimator", "k2")


async def test_an_interrupt_while_the_ledger_is_opened_waits_for_that(
    small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
):
    begun, goes_on, ended = threading.Event(), threading.Event(), list[str]()

    def open_slowly(self: Assembly, *_: Any, **__: Any) -> None:
        begun.set()
        goes_on.wait()
        ended.append("opening")

    async def close(self: Assembly) -> None:
        ended.append("run")

    monkeypatch.setattr(Assembly, "make_ledger", open_slowly)
    monkeypatch.setattr(Assembly, "aclose", close)
    with training_run(small_config()) as training:
        running = asyncio.create_task(training.train())
        await asyncio.to_thread(begun.wait)
        running.cancel()
        for _ in range(100):
            await asyncio.sleep(0)
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert ended == ["opening", "run"]


async def test_an_interrupt_does_not_wait_for_a_store_that_hangs_and_opens_nothing_after_it(
    small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
):
    threads: list[threading.Thread] = []
    begun, goes_on = threading.Event(), threading.Event()

    def hang(*_: Any, **__: Any) -> None:
        threads.append(threading.current_thread())
        begun.set()
        goes_on.wait()

    monkeypatch.setattr("asyncrl.trainer.run.StoredRun", hang)
    config = small_config(checkpoint={"url": "memory://bucket/runs"})
    with training_run(config) as training:
        running = asyncio.create_task(training.train())
        await asyncio.to_thread(begun.wait)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    goes_on.set()
    (thread,) = threads
    await asyncio.to_thread(thread.join)
    assert not (only_run(config) / "ledger.sqlite").exists()


def test_resuming_nothing_is_refused(small_config: MakeConfig, tmp_path: Path):
    with pytest.raises(ConfigError, match="no run to resume"):
        train(small_config(), resume=tmp_path)
    with RunDirectory.create(tmp_path, "empty") as run:
        run.write_config("")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        train(small_config(), resume=run.path)


def test_an_option_a_part_does_not_have_is_told_with_the_nearest(small_config: MakeConfig):
    with pytest.raises(ConfigError, match="did you mean 'fails_on'") as caught:
        train(small_config(env={"name": "worlds:DigitsFactory", "options": {"fail_on": [1]}}))
    assert caught.value.path == "env.options.fail_on"
    with pytest.raises(ConfigError, match="max_running_requests"):
        train(small_config(rollout={"options": {"max_runing_requests": 1}}))


def test_weights_under_another_versions_name_are_refused():
    worker = TrainerWorker(TrainerSpec(engine="fsdp"))
    with pytest.raises(WeightVersionError, match="weights of version 0 were to be published as version 1"):
        worker.publish(1)


def test_a_release_that_hangs_is_left_behind_when_it_is_given_up():
    """As one of a transport of the user's own may; the worker's loop ends all the same."""
    worker, hangs, ended = TrainerWorker(TrainerSpec(engine="fsdp")), threading.Event(), threading.Event()
    transport: Any = SimpleNamespace(release=lambda version: hangs.wait())
    worker._transport = transport

    async def given_up() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await worker.release(0)

    def run() -> None:
        asyncio.run(given_up())
        ended.set()

    threading.Thread(target=run, daemon=True).start()
    try:
        assert ended.wait(10.0)
    finally:
        hangs.set()


def test_the_seed_of_a_run_is_the_seed_of_its_tasks(small_config: MakeConfig):
    def first_task(run_seed: int, **options: Any) -> str:
        config = small_config(seed=run_seed, env={"name": "calculator", "options": options})
        return str(make_environments(config).task(0, split="train")["question"])

    assert first_task(1) != first_task(2)
    assert first_task(1) == first_task(2, seed=1)


@pytest.mark.parametrize("broken", ["Assembly", "make_progress"])
@pytest.mark.parametrize("command", [train, evaluate])
def test_a_run_that_fails_before_its_work_begins_leaves_its_folder_unlocked(
    small_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, broken: str, command: Callable[[Config], object]
):
    def fails(*_: Any, **__: Any) -> Any:
        raise ConfigError("no such thing", path="cluster")

    opened: list[RunDirectory] = []
    create = RunDirectory.create
    monkeypatch.setattr(RunDirectory, "create", lambda *given: (opened.append(create(*given)), opened[-1])[1])
    for module in ("asyncrl.tasks.run", "asyncrl.trainer.run"):
        monkeypatch.setattr(f"{module}.{broken}", fails, raising=False)
    with pytest.raises(ConfigError, match="no such thing"):
        command(small_config(eval={"tasks": 1}))
    (run,) = opened
    assert run._lock.closed
