"""Training from Python: arguments become a configuration, and a run is a handle."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import math
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from asyncrl import attach, evaluate, generate, sft, train
from asyncrl.config import Config, load_config
from asyncrl.errors import ConfigError, InfrastructureError, RewardError, RunStoppedError
from asyncrl.single_controller.local import LocalWorkerGroup
from asyncrl.tasks.handle import Run
from asyncrl.tasks.settings import python_config, with_row_files, write_rows
from asyncrl.telemetry.run_directory import RunDirectory, read_json_lines, replace_text, sound_record
from asyncrl.trainer.assembly import make_environments
from asyncrl.trainer.checkpoint import Checkpoints
from asyncrl.trainer.report import read_status
from asyncrl.trainer.run import TrainingRun
from engines.training.scratch import make as make_scratch

ROWS = [{"prompt": f"say {number}", "wanted": number % 10} for number in range(8)]
SAID = [[{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": str(n)}] for n in range(8)]
MODEL = {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2, "max_position": 128}


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model": {"source": "scratch", "options": {**MODEL, "tokenizer_conversations": 8}},
        "data": ROWS,
        "steps": 2,
        "runs": folder / "runs",
        "cluster.backend": "local",
        "env.options.demonstrations": [{"messages": each} for each in SAID],
        "rollout": {"max_new_tokens": 4, "max_seq_len": 64},
        "trainer": {"groups_per_step": 2, "group_size": 2, "lr": 1e-2},
        "telemetry.progress": "none",
        **changes,
    }


# ------------------------------------------------------------------------------------------------------- configurations


def test_arguments_are_the_sections_of_a_file():
    config, rows = python_config(
        model="scratch",
        data="train.jsonl",
        reward="math",
        settings={"steps": 3, "trainer.lr": 1e-4, "trainer": {"group_size": 2}, "rollout": {"stop": ["\n"]}},
    )
    assert (config.name, config.steps, config.model.source) == ("run", 3, "scratch")
    assert (config.trainer.lr, config.trainer.group_size, config.rollout.stop) == (1e-4, 2, ("\n",))
    assert config.env.options == {"files": "train.jsonl", "reward": "math"}
    assert (config.eval.tasks, rows) == (0, {})


def test_arguments_are_added_to_a_file_or_a_configuration(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text('name="first"\nsteps=1\n[model]\npath="m"\n[env]\nname="calculator"\n[trainer]\nlr=0.1\n')
    config, _ = python_config(file, settings={"trainer.group_size": 4})
    assert (config.name, config.trainer.lr, config.trainer.group_size) == ("first", 0.1, 4)
    again, _ = python_config(config, model="other/model", settings={"steps": 2})
    assert (again.model.path, again.steps, again.trainer) == ("other/model", 2, config.trainer)


def test_dots_separate_tables_in_the_name_of_a_setting_alone():
    config, _ = python_config(
        model="m",
        env={"name": "dataset", "options": {"files": "a.jsonl", "rewards": {"math.v2": "math", "code": "exact"}}},
        settings={"steps": 1, "env.options.rewards": {"code": "code"}},
    )
    assert config.env.options["rewards"] == {"math.v2": "math", "code": "code"}


def test_wrong_settings_are_refused_as_in_a_file():
    with pytest.raises(ConfigError, match=r"did you mean trainer\.lr"):
        python_config(model="m", env="calculator", settings={"steps": 1, "trainer.lrr": 0.1})
    with pytest.raises(ConfigError, match="steps: is missing"):
        python_config(model="m", env="calculator", settings={})


def test_objects_stay_objects_and_the_file_has_their_paths():
    def mine(rewards: Any, groups: Any) -> Any:
        return rewards

    config, _ = python_config(model="m", env="calculator", settings={"steps": 1, "algorithm.advantage": mine})
    assert config.algorithm.advantage is mine
    assert config.algorithm.estimator().function is mine
    text = config.to_toml()
    assert "test_objects_stay_objects_and_the_file_has_their_paths.<locals>.mine" in text
    assert config.model_dump(mode="json")["algorithm"]["advantage"].endswith("<locals>.mine")


def test_a_file_with_the_path_of_an_object_that_has_no_module_is_refused_with_what_to_do(tmp_path: Path):
    config, _ = python_config(
        model="m", env="calculator", settings={"steps": 1, "algorithm.advantage": lambda rewards, groups: rewards}
    )
    (tmp_path / "config.toml").write_text(config.to_toml())
    read = load_config(tmp_path / "config.toml")
    with pytest.raises(ConfigError, match="give it again, in Python"):
        read.algorithm.estimator()


@pytest.mark.parametrize(
    ("function", "arguments", "remedy"),
    [
        (evaluate, {"held_out": ROWS}, "take rows to answer as data"),
        (generate, {"reward": len}, "judge nothing"),
        (generate, {"demonstrations": "said.jsonl"}, "sft takes conversations as data"),
        (evaluate, {"resume": "runs/a"}, "take a run as checkpoint"),
        (sft, {"reward": "exact"}, "judge nothing"),
        (sft, {"held_out": 0.1}, "take rows to answer as data"),
        (sft, {"tools": [len]}, "sft takes them as env="),
        (train, {"checkpoint": "runs/a"}, "train takes a run as resume"),
    ],
)
def test_an_argument_of_another_function_is_refused_with_what_takes_its_place(
    function: Callable[..., Any], arguments: dict[str, Any], remedy: str
):
    (name,) = arguments
    with pytest.raises(ConfigError, match=f"{name} is no argument of this function; .*{remedy}"):
        function(model="m", env="calculator", **arguments)


def test_keys_of_a_table_are_no_arguments():
    config, _ = python_config(
        model="m", env="calculator", settings={"steps": 1, "checkpoint": {"every": 3}, "reward": {"source": "remote"}}
    )
    assert (config.checkpoint.every, config.reward.source) == (3, "remote")


def test_sft_takes_an_environment_or_conversations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("asyncrl.tasks.run.sft", lambda config: {"config": config})
    made = sft(model="scratch", env="calculator", sft={"steps": 1})["config"]
    assert (made.env.name, made.sft.steps) == ("calculator", 1)
    talks = [{"messages": each} for each in SAID]
    tools = {"options": {"tools": [len]}}
    made = sft(model="scratch", data=talks, env=tools, sft={"steps": 1}, runs=tmp_path)["config"]
    assert (made.env.name, made.env.options["tools"]) == ("dataset", [len])
    assert len(read_json_lines(Path(made.env.options["demonstrations"]))) == len(SAID)


@pytest.mark.parametrize("kind", ["list", "generator", "pandas"])
def test_rows_are_written_as_they_are(tmp_path: Path, kind: str):
    data: Any = ROWS if kind == "list" else (row for row in ROWS)
    if kind == "pandas":
        from pandas import DataFrame

        data = DataFrame(ROWS)
    config, rows = python_config(model="m", data=data, reward="exact", settings={"steps": 1})
    config = with_row_files(config, rows, tmp_path)
    write_rows(config, rows)
    (line, *_) = read_json_lines(Path(config.env.options["files"]))
    assert line == {"prompt": "say 0", "wanted": 0}


def test_demonstrations_keep_the_column_completion(tmp_path: Path):
    config, rows = python_config(
        model="scratch", demonstrations=[{"prompt": "1+1", "completion": "2"}], settings={"steps": 1}
    )
    config = with_row_files(config, rows, tmp_path)
    write_rows(config, rows)
    (message, answer) = make_environments(config).demonstration(0)
    assert (message["content"], answer["content"]) == ("1+1", "2")


def test_what_is_not_rows_is_refused(tmp_path: Path):
    for data, message in (({"prompt": ["a"]}, "files is dict, not rows"), ([1], "row 0 of files is int")):
        config, rows = python_config(model="m", data=data, reward="exact", settings={"steps": 1})
        with pytest.raises(ConfigError, match=message):
            write_rows(with_row_files(config, rows, tmp_path), rows)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations that `evaluate` and `generate` answer with."""
    found: list[Config] = []
    for name in ("evaluate", "generate"):
        monkeypatch.setattr(f"asyncrl.tasks.run.{name}", lambda config, **arguments: found.append(config))
    return found


def test_rows_are_answered_whatever_the_run_was_trained_on(tmp_path: Path, asked: list[Config]):
    base = {"name": "first", "steps": 1, "runs": str(tmp_path), "model": {"path": "m"}}
    calculator = {**base, "env": {"name": "calculator", "max_turns": 3, "options": {"digits": 2}}}
    evaluate(calculator, data=ROWS, reward=len)
    generate(calculator, data=ROWS)
    for made, reward in zip(asked, (len, "none"), strict=True):
        assert (made.env.name, made.env.max_turns, made.reward.source) == ("dataset", 3, "environment")
        assert made.env.options.keys() == {"held_out", "reward"}
        assert made.env.options["reward"] == reward
    dotted = {"name": "asyncrl.envs.dataset:DatasetFactory", "options": {"sources": [{"files": "a.jsonl"}]}}
    evaluate({**base, "env": dotted}, data="b.jsonl", reward="exact")
    assert asked[-1].env.options == {"held_out": "b.jsonl", "reward": "exact"}
    agent = {"name": "command", "options": {"command": ["agent"]}}
    for env in (agent, {"name": "sandbox", "options": {"check": "true"}}):  # these take rows themselves
        evaluate({**base, "env": env}, data="b.jsonl")
        assert (asked[-1].env.name, asked[-1].env.options) == (env["name"], {**env["options"], "held_out": "b.jsonl"})


def test_rows_are_answered_though_the_environment_of_the_run_is_gone(tmp_path: Path, asked: list[Config]):
    base = {"name": "first", "steps": 1, "runs": str(tmp_path), "model": {"path": "m"}}
    gone = {**base, "env": {"name": "asyncrl.tasks.settings:_env.<locals>.<lambda>", "options": {"digits": 2}}}
    with pytest.raises(ConfigError, match=r'give it again, in Python; or give env="dataset"'):
        evaluate(gone, data="b.jsonl")
    evaluate(gone, data="b.jsonl", reward="exact", env="dataset")
    assert (asked[-1].env.name, asked[-1].env.options) == ("dataset", {"held_out": "b.jsonl", "reward": "exact"})
    dataset = {**base, "env": {"name": "asyncrl.envs.dataset:DatasetFactory", "options": {"columns": {"prompt": "q"}}}}
    evaluate(dataset, data="b.jsonl", env="dataset")  # the same by another name: its options stay
    assert asked[-1].env.options == {"columns": {"prompt": "q"}, "held_out": "b.jsonl"}


def test_a_reward_that_is_given_judges_all_rows(tmp_path: Path, asked: list[Config]):
    options = {"files": "a.jsonl", "rewards": {"openai/gsm8k": "gsm8k"}}
    config = {"name": "first", "steps": 1, "model": {"path": "m"}, "env": {"name": "dataset", "options": options}}
    evaluate(config, data="b.jsonl", reward=len)
    assert asked[-1].env.options == {"held_out": "b.jsonl", "reward": len}
    generate(config, data="b.jsonl")
    assert asked[-1].env.options == {"held_out": "b.jsonl", "reward": "none"}
    evaluate(config, data="b.jsonl")
    assert asked[-1].env.options == {"held_out": "b.jsonl", "rewards": {"openai/gsm8k": "gsm8k"}}
    evaluate(config, data="b.jsonl", reward=len, env={"options": {"rewards": {"a": "exact"}}})
    assert asked[-1].env.options == {"held_out": "b.jsonl", "reward": len, "rewards": {"a": "exact"}}


# ----------------------------------------------------------------------------------------------------------------- runs


def test_a_closure_rewards_rows_by_their_columns_and_the_handle_shows_the_run(tmp_path: Path):
    seen: set[int] = set()

    def right(completion: str, wanted: int) -> float:
        seen.add(wanted)
        return float(str(wanted) in completion)

    run = train(**settings(tmp_path, reward=right))
    steps = [step["step"] for step in run]
    summary = run.wait()
    assert steps == [1, 2]
    assert seen <= set(range(8))
    assert (summary.steps, run.state, run.step) == (2, "finished", 2)
    assert run.summary == summary
    assert "training steps" in run.report()
    assert (len(run.trajectories(last=1)), run.trajectories(last=0)) == (1, [])
    with pytest.raises(ConfigError, match="last = -1"):
        run.trajectories(last=-1)
    described = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    assert {name for name in [*run][-1] if name.startswith("train/") and "_staleness_" not in name} <= set(
        re.findall(r"`(train/\w+)`", described)
    )
    with run.recording() as recording:
        assert recording.last_step == 2
    # The rows that it was trained on, some or all of them, are asked without being held out of anything.
    scored = evaluate(checkpoint=run.path, data=ROWS, reward=right)
    assert (scored["tasks"], scored["weight_version"]) == (len(ROWS), 2)
    assert evaluate(checkpoint=run.path, data=ROWS, reward=right, eval={"tasks": 3})["tasks"] == len(ROWS)
    (answer,) = generate(checkpoint=run.path, prompt="say 3")
    assert "say 3" in answer["text"]


async def test_a_run_is_awaited_and_its_steps_arrive_in_order(tmp_path: Path):
    async def always(completion: str) -> float:
        return len(completion) / 10

    run = train(**settings(tmp_path, reward=always))
    assert [step["step"] async for step in run] == [1, 2]
    assert (await run).steps == 2


class Scripted:
    """A program that does the next part of its script while it is waited for, and has failed after the last."""

    def __init__(self, *parts: Callable[[], None]) -> None:
        self._parts = [*parts]

    @property
    def ended(self) -> bool:
        return not self._parts

    def wait(self, timeout_s: float | None = None) -> None:
        if self._parts:
            self._parts.pop(0)()
        if self._parts:
            raise TimeoutError
        raise InfrastructureError("it failed")

    async def join(self, timeout_s: float | None = None) -> None:
        await asyncio.to_thread(self.wait)

    async def cancelled_with_caller(self, waiting: Any) -> Any:
        return await waiting


def scripted(folder: Path, *metrics: list[tuple[int, float]]) -> Run[Any]:
    """Return a run whose metrics have one of these pairs of step and time after the other."""

    def write(pairs: list[tuple[int, float]]) -> None:
        lines = [json.dumps({"step": step, "time_s": time_s, "reward_mean": 0.5}) for step, time_s in pairs]
        replace_text(folder / "metrics.jsonl", "".join(f"{line}\n" for line in lines))

    config, _ = python_config(model="m", env="calculator", settings={"steps": 3})
    return Run(folder, config=config, program=cast("Any", Scripted(*(partial(write, pairs) for pairs in metrics))))


def follow(run: Run[Any], seen: list[int]) -> None:
    for step in run:
        seen.append(step["step"])


async def follow_on_a_loop(run: Run[Any], seen: list[int]) -> None:
    async for step in run:
        seen.append(step["step"])


@pytest.mark.parametrize("on_a_loop", [False, True])
def test_steps_come_before_what_ended_the_run_and_again_after_a_resume_from_earlier(tmp_path: Path, on_a_loop: bool):
    run = scripted(tmp_path, [(1, 0.1), (2, 0.2)], [(1, 0.1)], [(1, 0.1), (2, 0.3), (3, 0.4)])
    seen: list[int] = []
    with pytest.raises(InfrastructureError, match="it failed"):
        asyncio.run(follow_on_a_loop(run, seen)) if on_a_loop else follow(run, seen)
    assert seen == [1, 2, 2, 3]


@pytest.mark.parametrize("on_a_loop", [False, True])
def test_an_error_that_is_not_the_end_of_the_run_is_raised_at_once(tmp_path: Path, on_a_loop: bool):
    def fail() -> None:
        raise OSError("not the run's")

    run = scripted(tmp_path, [(1, 0.1)])
    cast("Any", run)._program._parts.insert(0, fail)
    with pytest.raises(OSError, match="not the run's"):
        asyncio.run(follow_on_a_loop(run, [])) if on_a_loop else follow(run, [])


async def test_a_task_that_is_cancelled_yields_no_more_steps_of_a_stopped_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run, seen, joined = scripted(tmp_path, [(1, 0.1)]), list[int](), asyncio.Event()
    program: Any = run._program

    async def join(timeout_s: float | None = None) -> None:
        joined.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            with contextlib.suppress(InfrastructureError):
                await asyncio.to_thread(program.wait)
            raise

    monkeypatch.setattr(program, "join", join)
    run._stopped = True
    following = asyncio.ensure_future(follow_on_a_loop(run, seen))
    await joined.wait()
    following.cancel()
    done, _ = await asyncio.wait([following], timeout=5)
    following.cancel()
    assert (len(done), following.cancelled(), seen) == (1, True, [])


def test_a_line_of_metrics_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    read: list[bytes] = []
    monkeypatch.setattr("asyncrl.tasks.handle.sound_record", lambda line: (read.append(line), sound_record(line))[1])
    with RunDirectory.create(tmp_path, "run") as directory:
        directory.write_config('name = "run"\nsteps = 2\n[model]\npath = "m"\n[env]\nname = "calculator"\n')
        run, steps = attach(directory.path), iter(attach(directory.path))
        for step in (1, 2):
            directory.log_metrics({"reward_mean": 0.5}, step=step, version=step)
            assert next(steps)["step"] == step
            assert (run.step, f"step {step} of 2" in repr(run), f"step {step} of 2" in run._repr_html_()) == (
                step,
                1,
                1,
            )
    assert len(read) == 4


def test_tools_are_called_on_the_way_to_the_answer(tmp_path: Path):
    from asyncrl.envs.dataset import DatasetFactory

    def double(number: int) -> int:
        """Double a number."""
        return 2 * number

    def last(completion: str, prompt: list[dict[str, Any]]) -> float:
        return float(completion == prompt[-1]["content"])

    (tmp_path / "rows.jsonl").write_text('{"prompt": "double 4"}\n')
    factory = DatasetFactory(files=str(tmp_path / "rows.jsonl"), reward=last, tools=[double])

    async def episode() -> float:
        environment = factory.make()
        assert [each.name for each in environment.tools] == ["double"]
        await environment.reset(factory.task(0, split="train"))
        call = {"id": "a", "function": {"name": "double", "arguments": {"number": 4}}}
        step = await environment.step({"role": "assistant", "content": "", "tool_calls": [call]})
        assert not step.done
        assert step.messages[0]["content"] == "8"
        return (await environment.step({"role": "assistant", "content": "8"})).reward

    assert asyncio.run(episode()) == 1.0


def test_a_reward_that_needs_a_column_that_rows_lack_is_refused_before_the_start(tmp_path: Path):
    run = train(**settings(tmp_path, reward=lambda completion, expected: 1.0))
    with pytest.raises(InfrastructureError, match="ended without a summary"):
        attach(run.path).wait(60)
    with pytest.raises(ConfigError, match="needs 'expected', which is neither an option nor a column of the rows"):
        run.wait()
    assert run.state == "ended"
    with pytest.raises(ConfigError, match="expected"):
        list(run)


def test_a_run_is_stopped_and_resumed_with_its_functions_given_again(tmp_path: Path):
    started = threading.Event()

    def reward(completion: str) -> float:
        started.set()
        return float(len(completion))

    given: dict[str, Any] = {"reward": reward, "algorithm.advantage": lambda rewards, groups: rewards - rewards.mean()}
    run = train(**settings(tmp_path, steps=500, **given))
    assert started.wait(60)
    run.stop()
    assert run.state == "ended"
    with pytest.raises(RunStoppedError, match="was stopped after step"):
        run.wait()
    done = run.step
    with pytest.raises(ConfigError, match="give it again, in Python"):
        train(resume=run.path, steps=done + 1).wait()
    again = train(resume=run.path, steps=done + 1, **given)
    assert again.path == run.path
    assert again.wait().steps == done + 1


@pytest.mark.slow
def test_a_run_of_a_model_of_the_program_is_resumed_with_it_given_again(tmp_path: Path):
    def mine(folder: Path, *, seed: int, demonstrations: Any) -> None:
        make_scratch(folder, seed=seed, demonstrations=demonstrations, tokenizer_conversations=8, **MODEL)

    given: dict[str, Any] = {"model": {"source": mine}, "reward": lambda completion: float(len(completion))}
    run = train(**settings(tmp_path, steps=1, **given))
    run.wait()
    with pytest.raises(ConfigError, match=r"\[model\] must be unchanged"):
        train(resume=run.path, steps=2, model={"source": "gguf"})
    assert train(resume=run.path, steps=2, **given).wait().steps == 2


class OneByOne:
    """A program that does one thing each time that it is waited for."""

    def __init__(self, *things: Callable[[], object]) -> None:
        self.things = [*things]

    @property
    def ended(self) -> bool:
        return not self.things

    def wait(self, timeout_s: float | None = None) -> None:
        if self.things:
            self.things.pop(0)()
            raise TimeoutError


def test_steps_that_a_resume_trains_again_come_as_they_are_now(tmp_path: Path):
    config, _ = python_config(model="m", env="calculator", settings={"steps": 6})

    def trained(directory: RunDirectory, *steps: int, reward: float) -> None:
        for step in steps:
            directory.log_metrics({"reward_mean": reward}, step=step, version=step)

    with RunDirectory.create(tmp_path, "first") as directory:
        directory.write_config(config.to_toml())
        trained(directory, *range(1, 6), reward=0.0)
    path = directory.path
    assert [step["step"] for step in itertools.islice(attach(path), 5)] == [1, 2, 3, 4, 5]

    resumed = RunDirectory.open(path)
    resumed.stale_after = 3  # the step of its checkpoint
    seen = iter(attach(path))
    assert [next(seen)["step"] for _ in range(5)] == [1, 2, 3, 4, 5]  # elsewhere nothing is known of the checkpoint
    program = OneByOne(
        lambda: None,
        lambda: resumed.rewind(3),
        lambda: (trained(resumed, 4, 5, 6, reward=1.0), resumed.close()),
    )
    run: Run[Any] = Run(path, config=config, program=program, directory=resumed)  # type: ignore[arg-type]
    assert repr(run).endswith("step 3 of 6>"), "what the resume is about to remove does not count"
    found = [(step["step"], step["reward_mean"]) for step in run]
    assert found == [(1, 0.0), (2, 0.0), (3, 0.0), (4, 1.0), (5, 1.0), (6, 1.0)]
    assert repr(run).endswith("step 6 of 6>")
    assert [next(seen)["step"] for _ in range(3)] == [4, 5, 6]


def test_steps_after_two_resumes_in_a_row_come_though_the_clock_of_the_run_went_back(tmp_path: Path):
    config, _ = python_config(model="m", env="calculator", settings={"steps": 6})
    now = [0.0]

    def trained(directory: RunDirectory, *steps: int, each_s: float) -> None:
        for step in steps:
            now[0] += each_s
            directory.log_metrics({"reward_mean": 0.5}, step=step, version=step)

    with RunDirectory.create(tmp_path, "run", clock=lambda: now[0]) as directory:
        directory.write_config(config.to_toml())
        trained(directory, 1, 2, 3, 4, 5, each_s=100.0)
    second = RunDirectory.open(directory.path, clock=lambda: now[0])
    seen = iter(attach(directory.path))
    assert [next(seen)["step"] for _ in range(5)] == [1, 2, 3, 4, 5]
    second.rewind(3)
    second.close()  # before its first step
    with RunDirectory.open(directory.path, clock=lambda: now[0]) as third:
        trained(third, 4, each_s=50.0)
    with third.metrics_path.open("a") as file:
        file.write('{"step": 5, "reward_mean": 0.5}\n')
    assert [next(seen)["step"] for _ in range(2)] == [4, 5]
    with pytest.raises(InfrastructureError, match="without a summary"):
        next(seen)


@pytest.mark.parametrize("killed", [False, True])
def test_an_interrupt_while_it_is_awaited_stops_the_run(
    killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    interrupts: list[int] = []

    close_workers = LocalWorkerGroup._close_workers

    async def close_too_late(group: LocalWorkerGroup) -> list[Any]:
        await close_workers(group)  # what they hold is this process's: the tests after this one would find it
        raise TimeoutError  # as after the seconds that workers have to close

    if killed:
        monkeypatch.setattr(LocalWorkerGroup, "_close_workers", close_too_late)

    def reward(completion: str) -> float:
        if not interrupts:
            interrupts.append(signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return 1.0

    run = train(**settings(tmp_path, reward=reward, steps=500))
    with pytest.raises(KeyboardInterrupt):
        run.wait()
    assert run.ended
    assert not [each for each in threading.enumerate() if each.name == "asyncrl-run"]
    assert ("the workers were killed" in caplog.text) == killed


def test_a_run_of_another_process_is_attached_to(tmp_path: Path):
    run = train(**settings(tmp_path, reward=lambda completion: float(len(completion))))
    other = attach(run.path)
    assert [step["step"] for step in other] == [1, 2]
    assert other.wait() == run.wait()
    assert repr(other).endswith("finished, step 2 of 2>")
    with pytest.raises(InfrastructureError, match="takes no orders now"):
        other.pause()
    with pytest.raises(ConfigError, match=r"no config\.toml"):
        attach(tmp_path)


def test_a_run_is_paused_set_resumed_and_stopped_from_elsewhere(tmp_path: Path):
    run = train(**settings(tmp_path, reward=lambda completion: float(len(completion)), steps=500))
    steps = iter(run)
    next(steps)
    other = attach(run.path)
    other.pause()
    with pytest.raises(ConfigError, match=r"rollout\.max_new_tokens cannot be set while a run trains"):
        other.set("rollout.max_new_tokens", 3)
    with pytest.raises(ConfigError, match=r"trainer\.optimizer cannot be set while a run trains"):
        other.set("trainer.optimizer", "sgd")
    with pytest.raises(ConfigError, match=r"trainer\.lr = -1"):
        other.set("trainer.lr", -1)
    other.set("trainer.lr", 5e-3)
    other.set("algorithm.loss", "gspo")
    assert read_status(run.path / "status.json").steps == 500
    other.resume()
    while next(steps)["train/lr"] != 5e-3:
        pass
    assert run.metrics["train/lr"].iloc[-1] == 5e-3
    other.stop()
    with pytest.raises(RunStoppedError, match="stopped by an order"):
        run.wait()
    with run.recording() as recording:
        changed = load_config(run.path / "config.toml")
        assert (changed.trainer.lr, changed.algorithm.loss) == (5e-3, "gspo")
        last = recording.last_step
        assert recording.config_of(last).trainer.lr == 5e-3
        assert recording.config_of(1).trainer.lr == 1e-2
        replayed = recording.replay(to_step=last - 1)
    assert replayed.equal


@pytest.mark.slow
def test_a_key_that_is_set_right_after_a_checkpoint_goes_on_from_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    taken: list[int] = []
    take = Checkpoints.take

    async def taking(self: Checkpoints, *arguments: Any, step: int, **options: Any) -> Any:
        taken.append(step)
        return await take(self, *arguments, step=step, **options)

    def latest(self: Checkpoints) -> Path:
        raise AssertionError("every file of every checkpoint is read")

    monkeypatch.setattr(Checkpoints, "take", taking)
    monkeypatch.setattr(Checkpoints, "latest", latest)
    changes = {"checkpoint.every": 1, "reward": lambda completion: float(len(completion))}
    run = train(**settings(tmp_path, steps=500, **changes))
    steps = iter(run)
    next(steps)
    run.set("trainer.lr", 5e-3)
    while next(steps)["train/lr"] != 5e-3:
        pass
    assert taken == [*range(len(taken))]
    run.stop()
    with pytest.raises(RunStoppedError, match="was stopped"):
        run.wait()


@pytest.mark.slow
def test_a_key_that_is_set_while_the_disk_is_full_waits_for_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    take, steps_taken = Checkpoints.take, list[int]()

    async def taking(self: Checkpoints, *arguments: Any, step: int, **options: Any) -> Any:
        steps_taken.append(step)
        if len(steps_taken) == 1:
            raise OSError(errno.ENOSPC, "no space left on device")
        return await take(self, *arguments, step=step, **options)

    monkeypatch.setattr(Checkpoints, "take", taking)
    monkeypatch.setattr("asyncrl.trainer.run.MIN_INTERVAL_S", 0.0)
    monkeypatch.setattr("asyncrl.trainer.run.MAX_SHARE", math.inf)
    run = train(**settings(tmp_path, steps=500, reward=lambda completion: 1.0, **{"checkpoint.every": 0}))
    steps = iter(run)
    next(steps)
    run.set("trainer.lr", 5e-3)
    while next(steps)["train/lr"] != 5e-3:
        pass
    run.stop()
    with pytest.raises(RunStoppedError, match="was stopped"):
        run.wait()
    first, second = steps_taken[:2]
    assert second == first + 1
    log = (run.path / "logs" / "driver.log").read_text()
    assert f"the checkpoint of step {first} was not written" in log
    with sqlite3.connect(run.path / "ledger.sqlite") as ledger:
        committed = [step for (step,) in ledger.execute("SELECT step FROM events WHERE kind = 'committed'")]
    assert second in committed


@pytest.mark.slow
def test_a_key_that_is_set_while_the_disk_stays_full_is_tried_seldom_and_before_the_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    take, steps_taken = Checkpoints.take, list[int]()

    async def taking(self: Checkpoints, *arguments: Any, step: int, **options: Any) -> Any:
        steps_taken.append(step)
        if step < 40:
            raise OSError(errno.ENOSPC, "no space left on device")
        return await take(self, *arguments, step=step, **options)

    monkeypatch.setattr(Checkpoints, "take", taking)
    run = train(**settings(tmp_path, steps=40, reward=lambda completion: 1.0, **{"checkpoint.every": 0}))
    next(iter(run))
    run.pause()
    run.set("trainer.lr", 5e-3)
    run.resume()
    assert list(run.wait().unsaved) == [str(steps_taken[0]), "39"]
    assert steps_taken[1:] == [39, 40]
    assert 5e-3 not in [step["train/lr"] for step in run.metrics.to_dict("records")]
    assert "what was set is not used: no step is left" in (run.path / "logs" / "driver.log").read_text()


@pytest.mark.slow
def test_a_key_that_is_set_while_another_one_is_taken_over_keeps_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save = TrainingRun._save
    begun = threading.Event()

    async def saving(self: TrainingRun, *arguments: Any) -> Any:
        if begun.is_set():
            self._set("trainer.max_grad_norm", 2.0)
            begun.clear()
        return await save(self, *arguments)

    monkeypatch.setattr(TrainingRun, "_save", saving)
    changes = {"checkpoint.every": 0, "reward": lambda completion: float(len(completion))}
    run = train(**settings(tmp_path, steps=500, **changes))
    steps = iter(run)
    next(steps)
    begun.set()
    run.set("trainer.lr", 5e-3)
    while next(steps)["train/lr"] != 5e-3:
        pass
    next(steps)
    next(steps)
    run.stop()
    config = load_config(run.path / "config.toml")
    assert (config.trainer.lr, config.trainer.max_grad_norm) == (5e-3, 2.0)


def test_a_run_that_has_failed_is_stopped_already(tmp_path: Path):
    def reward(completion: str) -> float:
        raise ValueError("mine")

    run = train(**settings(tmp_path, reward=reward))
    with pytest.raises(RewardError, match="raised"):
        run.wait()
    run.stop()
    assert run.state == "ended"


def test_a_key_that_is_set_in_the_last_step_is_refused(tmp_path: Path):
    handle: list[Any] = []
    begun, refused = threading.Event(), []

    def reward(completion: str) -> float:
        begun.wait(60)
        try:
            handle[0].set("trainer.lr", 5e-3)
        except ConfigError as error:
            refused.append(str(error))
        return 1.0

    handle.append(train(**settings(tmp_path, steps=1, reward=reward)))
    begun.set()
    handle[0].wait()
    assert refused[0].startswith("trainer.lr: the last step has begun")


PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from tests.tasks.test_handle import settings
from asyncrl import attach, evaluate, generate, sft, train

run = train(**settings(Path({folder!r}), reward=lambda completion: float(len(completion))))
"""


@pytest.mark.slow
def test_a_program_that_ends_waits_for_its_run(tmp_path: Path):
    program = PROGRAM.format(tests=str(Path(__file__).parents[2]), folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "runs").glob("run-*")
    assert attach(path).state == "finished", done.stderr


@pytest.mark.slow
def test_two_runs_of_one_program_begin_at_the_same_time(tmp_path: Path):
    program = (
        "from asyncrl import train\n"
        "def long(completion): return float(len(completion))\n"
        f"given = dict({settings(tmp_path, runs=str(tmp_path / 'runs'))!r}, reward=long)\n"
        "first, second = train(**given), train(**given)\n"
        "print(first.wait().steps + second.wait().steps)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr


# ------------------------------------------------------------------------------------------- without training


@pytest.mark.slow
def test_a_model_is_taught_scored_and_asked_from_python(tmp_path: Path):
    shared: dict[str, Any] = {
        "runs": tmp_path / "runs",
        "cluster": {"backend": "local"},
        "rollout": {"max_new_tokens": 4, "max_seq_len": 64},
        "telemetry.progress": "none",
    }
    taught = sft(
        model={"source": "scratch", "options": {**MODEL, "tokenizer_conversations": 8}},
        data=[{"messages": each} for each in SAID],
        sft={"steps": 60, "batch_size": 8, "lr": 1e-2},
        **shared,
    )

    def right(completion: str, wanted: int) -> float:
        return float(completion == str(wanted))

    scored = evaluate(checkpoint=taught["model"], data=ROWS, reward=right, **shared)
    assert scored["tasks"] == len(ROWS)
    assert scored["scores"]["avg@1"].mean > 0.5
    (answer,) = generate(model=taught["model"], prompt="say 3", **shared)
    assert "say 3" in answer["text"]
    answers = generate(model=taught["model"], data=ROWS[:2], **shared)
    assert [each["task_number"] for each in answers] == [0, 1]
