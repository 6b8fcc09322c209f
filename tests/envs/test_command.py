"""Agents that are programs: what they ask becomes the trajectory, and whatever they do costs their episode alone."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import json
import math
import os
import re
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.config import Config
from asyncrl.envs.calculator import CalculatorFactory
from asyncrl.envs.command import CommandFactory, _is_script, _Sandboxed, filled, run_program
from asyncrl.errors import ConfigError, EnvironmentDeadlineError, EnvironmentFailure, RequestAbortedError
from asyncrl.interfaces import (
    Environment,
    FiniteHeldOutTasks,
    OverlongPromptFilter,
    SamplingParams,
    Step,
    TaskDifficulty,
)
from asyncrl.rollout.chat import ChatRenderer
from asyncrl.rollout.episode import EpisodePolicy, run_agent_episode
from asyncrl.rollout.trajectory import Trajectory
from asyncrl.sandboxes.contract import Isolation, SandboxLimits
from asyncrl.sandboxes.namespaces import NamespacesBackend
from asyncrl.tasks.run import train
from tests.envs.playing import RecordingEngine

AGENT = Path(__file__).with_name("agent_program.py")


def calls_then_answers(text: str) -> str:
    """A policy that calls the calculator with the question's operands, then says what the tool answered."""
    if "<|tool|>" in text:
        return text.rpartition("<|tool|>")[2].partition("<|end|>")[0]
    a, operator, b = re.findall(r"\d+|[+-]", text.partition("<|user|>")[2])[:3]
    arguments = {"a": int(a), "operator": operator, "b": int(b)}
    return f"<tool_call>\n{json.dumps({'name': 'calculator', 'arguments': arguments})}\n</tool_call>"


def factory_of(manner: str, **options: Any) -> CommandFactory:
    given = {"tasks": "calculator", "operation_shares": [1.0], "deadline_s": 60.0, "seed": 0, **options}
    return CommandFactory(command=[sys.executable, "-I", "-S", str(AGENT), manner, "{task}"], **given)


@pytest.fixture
def play(scratch: ChatRenderer) -> Callable[..., Any]:
    """Plays an episode of each of several tasks at once; nothing is left afterwards."""

    async def play(
        factory: CommandFactory,
        *,
        episodes: int = 1,
        said: Callable[[str], str] = calls_then_answers,
        max_turns: int = 8,
        ends_in_s: float = math.inf,
    ) -> tuple[list[Trajectory], RecordingEngine]:
        def reply(prompt: tuple[int, ...]) -> list[int]:
            return scratch.tokenizer.encode(said(scratch.decode(prompt)) + "<|end|>", add_special_tokens=False)

        engine = RecordingEngine(reply)
        await engine.start()
        gc.collect()  # what tests before this one have left
        here = psutil.Process()
        tasks_before, open_before, children_before = asyncio.all_tasks(), here.num_fds(), here.children(recursive=True)
        policy = {
            "engine": engine,
            "renderer": scratch,
            "sampling": SamplingParams(max_new_tokens=64),
            "max_turns": max_turns,
            "max_seq_len": 512,
        }
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(
                        run_agent_episode(
                            factory.make(),
                            factory.task(index, split="train"),
                            EpisodePolicy(**policy, request_prefix=f"row{index}", seed=index),
                            deadline_s=30.0,
                            ends_s=asyncio.get_running_loop().time() + ends_in_s,
                        )
                    )
                    for index in range(episodes)
                ]
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            await factory.aclose()
            assert asyncio.all_tasks() == tasks_before
            assert here.num_fds() <= open_before
            assert set(here.children(recursive=True)) <= set(children_before)  # one from before may have ended
        return [each.result() for each in running], engine

    return play


async def test_what_a_program_asks_is_what_is_trained_on(play: Callable[..., Any], scratch: ChatRenderer) -> None:
    factory = factory_of("well")
    trajectories, engine = await play(factory, episodes=4)
    for index, trajectory in enumerate(trajectories):
        sampled = [token for number in range(2) for token in engine.sampled[f"row{index}-{number}"]]
        mine = zip(trajectory.token_ids, trajectory.loss_mask, strict=True)
        assert [token for token, trained in mine if trained] == sampled
        assert trajectory.reward == 1.0
        assert trajectory.branches == []
        assert trajectory.info["exit_status"] == 0
        assert scratch.decode(trajectory.token_ids).startswith(f"<|user|>{trajectory.task['question']}<|end|>")
    assert {request.sampling.temperature for request in engine.requests} == {1.0}  # the run's, not the agent's 0


@pytest.mark.parametrize("sandbox", [None, {}], ids=["here", "sandbox"])
async def test_so_many_programs_run_at_a_time(
    play: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, sandbox: dict[str, Any] | None
) -> None:
    factory = factory_of("well", concurrency=2, sandbox=sandbox)
    assert factory_of("well")._running._value == 4 * (os.cpu_count() or 1)
    place, placed, at_once = factory.place, 0, []

    @contextlib.asynccontextmanager
    async def counted() -> AsyncIterator[Any]:
        nonlocal placed
        placed += 1
        at_once.append(placed)
        async with place() as found:
            yield found
        placed -= 1

    monkeypatch.setattr(factory, "place", counted)
    trajectories, _ = await play(factory, episodes=5)
    assert [each.reward for each in trajectories] == [1.0] * 5
    assert max(at_once) == 2


async def test_an_episode_that_waits_for_its_turn_says_so(
    play: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    factory = factory_of("well", concurrency=1, deadline_s=30.0)
    factory.limits = replace(factory.limits, deadline_s=0.05)
    words = r"agent took longer than .* s: it waited to be one of env.options.concurrency = 1 programs at a time"
    async with factory.turn():
        with pytest.raises(EnvironmentDeadlineError, match=words):
            await play(factory, episodes=1, ends_in_s=0.3)
    assert "has waited for 0.05 s to be one of env.options.concurrency = 1" in caplog.text


async def test_branches_are_one_tree(play: Callable[..., Any]) -> None:
    (trajectory,), engine = await play(factory_of("tree"), said=lambda text: f"{len(text)}")
    parents = [turn.parent for turn in trajectory.turns]
    assert parents == [-1, -1, -1, 0, -1]
    assert trajectory.sampled_tokens == sum(map(len, engine.sampled.values()))
    assert (trajectory.info["branches"], trajectory.info["conversations"]) == (4, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("manner", "error", "text"),
    [
        ("silent", EnvironmentFailure, "had no turn of the model.*status 1.*no idea"),
        ("dies", EnvironmentFailure, "killed by signal 11"),
        ("hangs", EnvironmentDeadlineError, "did not end within deadline_s = 1"),
        ("flood", EnvironmentFailure, "wrote more than output_bytes = 4000"),
    ],
)
async def test_a_misbehaving_program_fails_by_name(
    play: Callable[..., Any], manner: str, error: type[Exception], text: str
) -> None:
    limits = {"deadline_s": 1.0 if manner == "hangs" else 60.0, "output_bytes": 4000}
    with pytest.raises(error, match=text):
        await play(factory_of(manner, **limits))


@pytest.mark.slow
@pytest.mark.parametrize("manner", ["daemon", "forks", "connections", "forges", "fails"])
async def test_whatever_it_leaves_is_ended(play: Callable[..., Any], manner: str) -> None:
    (trajectory,), _ = await play(factory_of(manner, reward="exit_status"))
    assert trajectory.reward == float(manner != "fails")
    assert len(trajectory.turns) == 1


@pytest.mark.slow
async def test_a_program_without_turns_left_is_ended(play: Callable[..., Any]) -> None:
    (trajectory,), _ = await play(factory_of("loops"), max_turns=3)
    assert (len(trajectory.turns), trajectory.finish_reason) == (3, "max_turns")


async def test_in_a_sandbox_a_program_reaches_its_session(play: Callable[..., Any]) -> None:
    (trajectory,), engine = await play(factory_of("well", sandbox={}))
    assert (trajectory.reward, len(trajectory.turns)) == (1.0, 2)
    sampled = [token for number in range(2) for token in engine.sampled[f"row0-{number}"]]
    mine = zip(trajectory.token_ids, trajectory.loss_mask, strict=True)
    assert [token for token, trained in mine if trained] == sampled


@pytest.mark.slow
@pytest.mark.parametrize("sandbox", [None, {}])
async def test_in_a_sandbox_it_reaches_nothing_else(play: Callable[..., Any], sandbox: dict[str, Any] | None) -> None:
    probe = await NamespacesBackend().create(SandboxLimits())
    await probe.destroy()
    if probe.isolation.missing:
        pytest.skip(f"this machine does not allow programs an own {', '.join(probe.isolation.missing)}")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        here = {"port": listening.getsockname()[1], "folder": str(Path(__file__).parent), "process": os.getpid()}
        env = {"REACHES": json.dumps(here)}
        (trajectory,), _ = await play(
            factory_of("looks", sandbox=sandbox, env=env),
            said=lambda text: text.rpartition("<|user|>")[2].partition("<|end|>")[0],
        )
    assert trajectory.turns[0].message["content"] == ("port folder process" if sandbox is None else "nothing")


@pytest.mark.slow
@pytest.mark.parametrize("manner", ["daemon", "forks", "connections", "forges", "fails"])
async def test_whatever_it_leaves_in_a_sandbox_is_ended(play: Callable[..., Any], manner: str) -> None:
    (trajectory,), _ = await play(factory_of(manner, reward="exit_status", sandbox={}))
    assert trajectory.reward == float(manner != "fails")
    assert len(trajectory.turns) == 1


@pytest.mark.slow
async def test_limits_and_judges_of_a_sandbox(play: Callable[..., Any], tmp_path: Path) -> None:
    (trajectory,), _ = await play(factory_of("loops", sandbox={}), max_turns=3)
    assert (len(trajectory.turns), trajectory.finish_reason) == (3, "max_turns")
    (tmp_path / "given.txt").write_text("42")
    test = ["grep", "-q", "42", "given.txt", "answer.txt"]
    (tested,), _ = await play(factory_of("well", test_command=test, copy=str(tmp_path), sandbox={}))
    assert tested.reward == 1.0
    (tmp_path / "judge.py").write_text("print(open('answer.txt').read() == open('given.txt').read() or 0.5)")
    (tmp_path / "link.py").symlink_to(tmp_path / "judge.py")
    score = [sys.executable, "-I", str(tmp_path / "link.py")]  # which the sandbox does not show
    (scored,), _ = await play(factory_of("well", score_command=score, copy=str(tmp_path), sandbox={}))
    assert scored.reward == 0.5
    with pytest.raises(EnvironmentDeadlineError, match="deadline_s = 1"):
        await play(factory_of("hangs", sandbox={}, deadline_s=1.0))
    with pytest.raises(EnvironmentFailure, match="output_bytes = 4000"):
        await play(factory_of("flood", sandbox={}, output_bytes=4000))
    with pytest.raises(ConfigError, match="no network but its session"):
        factory_of("well", sandbox={"network": True})
    with pytest.raises(ConfigError, match="fields of SandboxLimits"):
        factory_of("well", sandbox={"colour": "red"})


async def test_a_program_has_an_empty_input(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"of the worker")
    os.close(writing)
    kept = os.dup(0)
    os.dup2(reading, 0)
    os.close(reading)
    try:
        limits = {"deadline_s": 60.0, "output_bytes": 1000}
        end = await run_program(["cat"], folder=tmp_path, env=dict(os.environ), over=asyncio.Event(), **limits)
    finally:
        os.dup2(kept, 0)
        os.close(kept)
    assert end.succeeded
    assert end.output == b""


async def test_a_failure_of_the_engine_is_not_the_agents(scratch: ChatRenderer) -> None:
    engine = RecordingEngine(lambda prompt: [7] * 1000)
    await engine.start()
    policy = EpisodePolicy(
        engine=engine,
        renderer=scratch,
        sampling=SamplingParams(max_new_tokens=1000),
        max_turns=4,
        max_seq_len=2048,
        request_prefix="row",
        seed=0,
    )
    factory = factory_of("well")

    async def abort() -> None:
        while not engine.requests:
            await asyncio.sleep(0)
        await engine.abort("row-0")

    episode = run_agent_episode(factory.make(), factory.task(0, split="train"), policy, deadline_s=30.0)
    found = await asyncio.gather(episode, abort(), return_exceptions=True)
    assert isinstance(found[0], RequestAbortedError)


@pytest.mark.slow
async def test_rewards_of_programs(play: Callable[..., Any]) -> None:
    scoring = ["python3", "-c", "print('a line'); print(0.25)"]
    (scored,), _ = await play(factory_of("well", score_command=scoring))
    (tested,), _ = await play(factory_of("well", test_command=["grep", "-q", "^{answer}$", "answer.txt"]))
    assert (scored.reward, tested.reward) == (0.25, 1.0)
    with pytest.raises(EnvironmentFailure, match=r"the last line of score_command must be a number.*it is 'nan'"):
        await play(factory_of("well", score_command=["echo", "nan"]))


async def test_a_copy_ends_before_the_folder_of_a_cancelled_episode_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("copy", "left"):
        (tmp_path / name).mkdir()
    copying, go_on, copytree = asyncio.Event(), threading.Event(), shutil.copytree
    loop = asyncio.get_running_loop()

    def held(*given: Any, **more: Any) -> Any:
        loop.call_soon_threadsafe(copying.set)
        go_on.wait()
        return copytree(*given, **more)

    monkeypatch.setattr(shutil, "copytree", held)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "left"))
    factory = factory_of("well", copy=str(tmp_path / "copy"))

    async def episode() -> None:
        async with factory.place() as place:
            await place.prepare(factory)

    running = asyncio.create_task(episode())
    await copying.wait()
    running.cancel()
    await asyncio.wait([running], timeout=0.1)
    over = running.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not over
    assert list((tmp_path / "left").iterdir()) == []


@pytest.mark.parametrize("sandbox", [None, {}])
async def test_the_judge_is_the_runs_file_and_finds_nothing_that_the_agent_has_prepared(
    play: Callable[..., Any], sandbox: dict[str, Any] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score = """
import json, os
turns = json.load(open(os.environ["ASYNCRL_TURNS_FILE"]))
prepared = os.listdir(os.environ["HOME"]) + os.listdir(os.environ["TMPDIR"])
print(0.25 if len(turns) == 1 and not prepared and "PYTHONNOUSERSITE" in os.environ else 1.0)
"""
    (tmp_path / "score.py").write_text(score)
    monkeypatch.chdir(tmp_path)
    (trajectory,), _ = await play(factory_of("prepares", score_command=["python3", "score.py"], sandbox=sandbox))
    assert trajectory.reward == 0.25


def test_a_judge_whose_files_do_not_fit_in_the_sandbox_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "judge.py").write_text("#" * 2_000_000)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"holds 1048576 bytes of files, and .*judge\.py have 2000000") as told:
        factory_of("prepares", test_command=["python3", "judge.py"], sandbox={"file_bytes": 1 << 20})
    assert told.value.path == "env.options.sandbox.file_bytes"


async def test_a_first_request_beyond_the_turns_of_an_episode_says_so(play: Callable[..., Any]) -> None:
    with pytest.raises(EnvironmentFailure, match=r"as its first request needs more than env\.max_turns, and "):
        await play(factory_of("many"), max_turns=2)


def test_scripts_are_told_from_programs_as_shells_do(tmp_path: Path) -> None:
    for content, script in ((b"#!/bin/sh\n", True), (b"./a-test\n", True), (b"\x7fELF\2\1\1\0", False)):
        program = tmp_path / "program"
        program.write_bytes(content)
        assert _is_script(str(program)) is script


@pytest.mark.parametrize("sandbox", [None, {}])
async def test_work_that_crashes_its_test_earns_nothing(
    play: Callable[..., Any], sandbox: dict[str, Any] | None
) -> None:
    def tested(program: str) -> CommandFactory:
        options = {"test_command": ["python3", "-c", program], "output_bytes": 4000, "sandbox": sandbox}
        return factory_of("prepares", **options)

    for crash, limited in (("import os; os.kill(os.getpid(), 11)", 0.0), ("print('x' * 5000)", 1.0)):
        (failed,), _ = await play(tested(crash))
        assert (failed.reward, failed.info["reward_parts"]) == (0.0, {"test_limits": limited, "test_not_started": 0.0})
    with pytest.raises(EnvironmentFailure, match="test_command was killed by signal 9"):
        await play(tested("import os; os.kill(os.getpid(), 9)"))


async def test_a_test_that_cannot_be_started_is_no_reward(
    play: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # What a shell or a script does not find, or a program of the folder that is gone, may be the agent's doing.
    script = tmp_path / "test.sh"
    script.write_text("#!/bin/sh\n./no-such-test\n")
    script.chmod(0o755)
    missing = ["sh", "-c", "./no-such-test"]
    for wrong, started in ((["sh", "-c", "exit 1"], 1), (missing, 0), (["./no-such-test"], 0), ([str(script)], 0)):
        factory = factory_of("prepares", test_command=wrong)
        trajectories, _ = await play(factory, episodes=2)
        for failed in trajectories:
            assert failed.reward == 0.0
            assert failed.info["reward_parts"] == {"test_limits": 0.0, "test_not_started": float(not started)}
        told = [record.getMessage() for record in caplog.records if "test_not_started" in record.getMessage()]
        assert len(told) == (not started)
        assert all("no-such-test" in each for each in told)
        caplog.clear()
    test_command = [sys.executable, "-c", "raise SystemExit(127)"]
    with pytest.raises(EnvironmentFailure, match=r"test_command ended with status 127 \(it could not be started\)"):
        await play(factory_of("prepares", test_command=test_command))


@pytest.mark.parametrize(
    ("manner", "sandbox", "text"),
    [
        ("removes", None, "the agent has removed or closed its folder"),
        ("replaces", None, "the agent has removed or closed its folder"),
        ("fills", {"file_bytes": 1 << 20}, "turns.json cannot be written in the agent's sandbox: .*[Nn]o space"),
    ],
)
async def test_an_agent_that_leaves_no_place_for_its_test_earns_nothing(
    play: Callable[..., Any], manner: str, sandbox: dict[str, Any] | None, text: str
) -> None:
    (failed,), _ = await play(factory_of(manner, test_command=["true"], sandbox=sandbox))
    assert (failed.reward, failed.info["reward_parts"]) == (0.0, {"test_limits": 1.0, "test_not_started": 0.0})
    with pytest.raises(EnvironmentFailure, match=text):
        await play(factory_of(manner, score_command=["echo", "1"], sandbox=sandbox))


async def test_a_program_may_give_credit_to_turns(play: Callable[..., Any]) -> None:
    program = (
        "import json, os; turns = json.load(open(os.environ['ASYNCRL_TURNS_FILE']));"
        "print(json.dumps({'reward': 3, 'turn_rewards': [turn['parent'] for turn in turns]}))"
    )
    (trajectory,), _ = await play(factory_of("tree", score_command=["python3", "-c", program]), said=lambda text: "so")
    assert [turn.reward for turn in trajectory.turns] == [-1.0, -1.0, -1.0, 0.0, -1.0]


class SlowTasks(CalculatorFactory):
    """Tasks whose environment does not return from ``slow``, or does not end."""

    def __init__(self, *, slow: str, seed: int) -> None:
        super().__init__(operation_shares=[1.0], seed=seed)
        self._slow = slow

    def make(self) -> Environment:
        environment = super().make()

        async def never(_: object) -> None:
            await asyncio.Event().wait()

        async def goes_on(_: object) -> Step:
            return Step(reward=1.0)

        if self._slow:
            setattr(environment, self._slow, never)
        else:
            environment.step = goes_on  # type: ignore[method-assign]
        return environment


async def test_an_environment_of_tasks_has_a_deadline_and_one_turn(play: Callable[..., Any]) -> None:
    def factory(slow: str) -> CommandFactory:
        command = [sys.executable, "-I", "-S", str(AGENT), "well", "{task}"]
        return CommandFactory(command=command, tasks=f"{__name__}:SlowTasks", slow=slow)

    def said(text: str) -> str:
        late.limits = replace(late.limits, deadline_s=0.01)  # once the program runs
        return "so"

    with pytest.raises(EnvironmentFailure, match="goes on after the agent's last message"):
        await play(factory(""))
    late = factory("step")
    with pytest.raises(EnvironmentDeadlineError, match=r"the step of tasks took longer .* 0.01 in .*command.py"):
        await play(late, said=said)
    late = factory("reset")
    said("")
    with pytest.raises(EnvironmentDeadlineError, match="the reset of tasks took longer"):
        await play(late)


def test_it_has_the_capabilities_of_its_tasks(tmp_path: Path) -> None:
    def has(factory: CommandFactory) -> set[str]:  # as isinstance() does from Python 3.12 on
        names = ("held_out_rows", "filter_overlong_prompts", "difficulty")
        return {name for name in names if inspect.getattr_static(factory, name, None) is not None}

    sums = factory_of("well")
    assert has(sums) == {"difficulty"}
    assert isinstance(sums, TaskDifficulty)
    assert not isinstance(sums, FiniteHeldOutTasks | OverlongPromptFilter)
    assert sums.difficulty(sums.task(0, split="train")) == "1 operations"
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": "x" * length, "answer": "1"}) + "\n" for length in (1, 2, 9)))
    given: dict[str, Any] = {"held_out": str(file), "columns": {"ground_truth": "answer"}, "reward": "exact"}
    rows = CommandFactory(command=["true"], **given)
    assert has(rows) == {"held_out_rows", "filter_overlong_prompts"}
    file.write_text(file.read_text() * 2)  # they are read when they are needed
    assert isinstance(rows, FiniteHeldOutTasks)
    assert isinstance(rows, OverlongPromptFilter)
    assert rows.held_out_rows == 6
    assert rows.filter_overlong_prompts(lambda messages, tools=(): len(messages[0]["content"]), below=5).left_out == 2
    assert rows.held_out_rows == 4


def test_options_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no program 'no-such-agent'"):
        CommandFactory(command=["no-such-agent"], tasks="calculator")
    with pytest.raises(ConfigError, match="concurrency is 0"):
        factory_of("well", concurrency=0)
    with pytest.raises(ConfigError, match=r"concurrency is 2\.5"):
        factory_of("well", concurrency=2.5)
    with pytest.raises(ConfigError, match="there is no program 'no-such-test'"):
        factory_of("well", test_command=["no-such-test"])
    with pytest.raises(ConfigError, match="there is no program"):  # no shell fills it in
        factory_of("well", test_command=["${HOME}-no-such-test"])
    (tmp_path / "pyproject.toml").touch()  # there is one in the working directory, too
    copied = factory_of("well", test_command=["cat", "pyproject.toml", "README.md"], copy=str(tmp_path))
    assert copied.judging_command == ["cat", "pyproject.toml", str(Path("README.md").absolute())]
    factory_of("well", score_command=["sh", "-c", "x" * 5000])
    with pytest.raises(ConfigError, match="one of several"):
        factory_of("well", test_command=["true"], score_command=["true"])
    with pytest.raises(ConfigError, match=r"has no value for \{mistake\}"):
        filled("{mistake}", {"task": "t"})
    with pytest.raises(ConfigError, match=r"\$\{task\} is a shell's"):
        factory_of("well", test_command=["sh", "-c", "judge ${task}"])


@pytest.mark.parametrize(("option", "value"), [("test_command", ["true", "{mistake}"]), ("env", {"A": "{mistake}"})])
async def test_a_placeholder_without_a_value_names_its_option(
    play: Callable[..., Any], option: str, value: Any
) -> None:
    with pytest.raises(ConfigError, match=r"has no value for \{mistake\}") as wrong:
        await play(factory_of("prepares", **{option: value}))
    assert wrong.value.path == f"env.options.{option}"


async def test_a_command_that_its_launcher_makes_too_long_is_a_failure() -> None:
    class Unused:
        folder = "/sandbox"
        isolation = Isolation(user=True, network=False, processes=True, files=True, system_calls=True)

    unused: Any = Unused()
    limits: Any = CommandFactory(command=["true"], tasks="calculator").limits
    with pytest.raises(EnvironmentFailure, match="sh cannot be started: argument list too long"):
        await _Sandboxed(unused).run(["sh", "x" * (96 * 1024 - 40)], {}, limits, over=asyncio.Event())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_a_run_trains_on_what_programs_ask(small_config: Callable[..., Config], backend: str) -> None:
    command = [sys.executable, "-I", "-S", str(AGENT), "tree", "{task}"]
    options = {"command": command, "tasks": "calculator", "deadline_s": 60.0}
    config = small_config(
        env={"name": "command", "options": options},
        sft={"steps": 2},
        algorithm={"credit": "branch"},
        cluster={"backend": backend},
    )
    summary = train(config)
    tokens = summary["tokens"]
    assert summary["steps"] == 3
    assert tokens["generated"] == tokens["trained"] + sum(tokens["dropped"].values()) + tokens["in_flight"]
