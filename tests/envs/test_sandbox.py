"""The environment ``sandbox``: tools that run in it, checks, and failures that are no rewards."""

from __future__ import annotations

import errno
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.envs.sandbox import SandboxFactory, answer_text
from asyncrl.errors import ConfigError, EnvironmentFailure, SandboxError
from asyncrl.interfaces import EnvironmentWait, Message, Step, Task, Tool
from asyncrl.rollout.episode import replay_episode
from asyncrl.sandboxes import namespaces
from asyncrl.sandboxes.contract import ProgramEnd, SandboxLimits
from asyncrl.sandboxes.namespaces import NamespacesBackend, NamespacesSandbox

ROW = {
    "data_source": "bugs",
    "prompt": [{"role": "user", "content": "Make double.py right."}],
    "reward_model": {"ground_truth": ""},
    "extra_info": {
        "files": {"double.py": "def f(x): return x\n"},
        "tests": {"test.py": "import double\nassert double.f(2) == 4\n"},
        "check": "python3 test.py",
    },
}


def factory(tmp_path: Path, **options: Any) -> SandboxFactory:
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    given = {"files": str(tmp_path / "rows.jsonl"), "reward": "none", "limits": {"deadline_s": 10.0}, **options}
    return SandboxFactory(tools=["bash", "python", "write_file"], **given)


def call(name: str, **arguments: Any) -> Message:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def texts(step: Step) -> list[str]:
    return [message["content"] for message in step.messages]


async def test_a_coding_agent_changes_files_until_the_tests_pass(tmp_path: Path):
    made = factory(tmp_path)
    for repaired in (False, True):
        environment = made.make()
        assert (await environment.reset(made.task(0, split="train")))[-1]["content"] == "Make double.py right."
        assert [each.name for each in environment.tools] == ["bash", "python", "write_file"]
        step = await environment.step(call("bash", command="ls; cat double.py; exit 3"))
        assert texts(step) == ["double.py\ndef f(x): return x\n(exit code 3)"]
        step = await environment.step(call("bash", command="echo " + "x" * 100_000))
        assert texts(step) == ["argument list too long\n(exit code 126)"]
        if repaired:
            step = await environment.step(call("write_file", path="double.py", content="def f(x): return 2 * x\n"))
            assert texts(step) == ["written"]
            assert texts(await environment.step(call("python", program="import double; print(double.f(2))"))) == ["4"]
        done = await environment.step({"role": "assistant", "content": "done"})
        assert (done.done, done.reward) == (True, float(repaired))
        await environment.close()
    await made.aclose()


async def ended(made: SandboxFactory, task: Task, command: str) -> Step:
    """Play an episode in which the policy runs one command, and return its last step."""
    environment = made.make()
    await environment.reset(task)
    await environment.step(call("bash", command=command))
    step = await environment.step({"role": "assistant", "content": "done"})
    assert step.done
    await environment.close()
    return step


async def earned(made: SandboxFactory, task: Task, command: str) -> float:
    return (await ended(made, task, command)).reward


async def test_a_policy_that_leaves_no_room_for_the_tests_fails_them(tmp_path: Path):
    made = factory(tmp_path)
    step = await ended(made, made.task(0, split="train"), "mkdir test.py; chmod 0 .")
    parts = {"checked": 0.0, "check_limits": 1.0, "check_not_started": 0.0}
    assert (step.reward, step.info) == (0.0, {"reward_parts": parts})
    await made.aclose()


@pytest.mark.parametrize(
    ("check", "part"),
    [
        ("no-such-test", "check_not_started"),
        ("sleep 9", "check_limits"),
        ("yes", "check_limits"),
        ("kill -KILL $$", "check_limits"),  # as a container's memory ends it
        ("exit 1", ""),
    ],
)
async def test_a_check_that_may_say_nothing_of_the_work_is_counted_and_logged(
    tmp_path: Path, check: str, part: str, caplog: pytest.LogCaptureFixture
):
    made = factory(tmp_path, limits={"deadline_s": 0.5, "output_bytes": 1000})
    task = made.task(0, split="train")
    task["extra_info"] = {"check": check}
    for _ in range(2):
        parts = (await ended(made, task, "true")).info["reward_parts"]
        assert {name for name, value in parts.items() if value} == ({part} if part else set())
    told = [record.getMessage() for record in caplog.records if f"reward/{part or 'check'}" in record.getMessage()]
    assert len(told) == bool(part)
    assert part != "check_not_started" or "no-such-test" in told[0]
    await made.aclose()


CUSTOM = "import os\nos._exit(0)\n"


@pytest.mark.parametrize(
    ("command", "check", "reward"),
    [
        ("echo 42 > ~/answer.txt", 'grep -q 42 ~/answer.txt && test "$(ls -A)" = answer.txt', 1.0),
        (  # nor where this Python is in a virtual environment, and looks for no packages of the user
            f'at=$(python3 -m site --user-site); mkdir -p "$at"; echo "{CUSTOM}" > "$at/usercustomize.py"',
            '[ -z "$PYTHONNOUSERSITE" ] || python3 -c "exit(1)"',
            0.0,
        ),
        ("printf '[user]\\nname = me\\n' > ~/.gitconfig", 'test -s "${GIT_CONFIG_GLOBAL-$HOME/.gitconfig}"', 0.0),
    ],
)
async def test_a_check_has_the_policys_home_and_reads_no_settings_from_it(
    tmp_path: Path, command: str, check: str, reward: float
):
    made = factory(tmp_path)
    task = made.task(0, split="train")
    task["extra_info"] = {"check": check}
    assert await earned(made, task, command) == reward
    await made.aclose()


@pytest.mark.parametrize(
    "forgery",
    [
        "ln -s /dev/null test.py",
        "mkdir tests; echo 3 > out; ln -s ../out tests/expected",
        "mkdir tests; echo 3 > out; ln out tests/expected",
        "ln -s . tests; ln -s expected out",
    ],
)
async def test_a_link_in_the_place_of_a_test_earns_nothing(tmp_path: Path, forgery: str):
    made = factory(tmp_path)
    task = made.task(0, split="train")
    program = "assert open('out').read() == open('tests/expected').read()"
    task["extra_info"]["tests"] = {"tests/expected": "4\n", "test.py": program}
    for command, reward in (("echo 4 > out", 1.0), (forgery, 0.0)):
        assert await earned(made, task, command) == reward
    await made.aclose()


async def test_a_row_with_a_check_needs_no_rule(tmp_path: Path):
    made = factory(tmp_path, reward=None)  # no rule is known for its source, and the one of codecontests needs tests
    environment = made.make()
    await environment.reset({**made.task(0, split="train"), "data_source": "codecontests"})
    step = await environment.step({"role": "assistant", "content": "done"})
    parts = {"checked": 0.0, "check_limits": 0.0, "check_not_started": 0.0}
    assert (step.reward, step.info) == (0.0, {"reward_parts": parts})
    await environment.close()
    await made.aclose()
    unchecked = {**ROW, "extra_info": {}}
    (tmp_path / "unchecked.jsonl").write_text(json.dumps(unchecked) + "\n")
    with pytest.raises(ConfigError, match="no rule judges rows of the data source 'bugs'"):
        SandboxFactory(files=str(tmp_path / "unchecked.jsonl")).task(0, split="train")
    SandboxFactory(files=str(tmp_path / "unchecked.jsonl"), check="true").task(0, split="train")


def test_the_tools_of_a_prompt_count(tmp_path: Path):
    counted: list[list[str]] = []

    def count(messages: Sequence[Message], tools: Sequence[Tool] = ()) -> int:
        counted.append([each.name for each in tools])
        return 1

    factory(tmp_path).filter_overlong_prompts(count, below=5)
    assert counted == [["bash", "python", "write_file"]]


async def test_a_sandbox_that_dies_is_a_failure_and_no_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made, sandboxes = factory(tmp_path), []
    create = NamespacesBackend.create

    async def noted(backend: NamespacesBackend, limits: SandboxLimits) -> NamespacesSandbox:
        sandboxes.append(await create(backend, limits))
        return sandboxes[-1]

    monkeypatch.setattr(NamespacesBackend, "create", noted)
    environment = made.make()
    await environment.reset(made.task(0, split="train"))
    sandboxes[0]._process.kill()
    with pytest.raises(SandboxError):
        await environment.step(call("bash", command="ls"))
    await environment.close()
    await made.aclose()


async def test_a_worker_without_descriptors_is_a_failure_and_no_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def broken(pipes: Any, stdin: bytes) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    made = factory(tmp_path)
    environment = made.make()
    await environment.reset(made.task(0, split="train"))
    monkeypatch.setattr(namespaces._Pipes, "open", broken)
    with pytest.raises(SandboxError, match=r"a command could not be started: .*Too many open files"):
        await environment.step({"role": "assistant", "content": "done"})
    await environment.close()
    await made.aclose()


async def test_a_check_that_no_system_starts_is_a_failure_and_no_reward(tmp_path: Path):
    made = factory(tmp_path)
    task = made.task(0, split="train")
    task["extra_info"]["check"] = "true " + "x" * 100_000
    with pytest.raises(EnvironmentFailure, match="check cannot be started: argument list too long"):
        await made.make().reset(task)
    await made.aclose()


async def test_an_episode_is_not_played_again_for_its_reward_and_may_wait_for_its_sandbox(tmp_path: Path):
    made = factory(tmp_path, wait_s=7.0)
    environment = made.make()
    assert isinstance(environment, EnvironmentWait)
    assert environment.wait_s == 7.0
    assert await replay_episode(environment, made.task(0, split="train"), [], deadline_s=10.0) is None
    assert made._pool is None
    await made.aclose()


def test_a_long_output_is_cut_in_the_middle_and_an_end_is_named():
    assert answer_text(ProgramEnd(how="exited", code=0, output=b"a\n", error=b"b\n")) == "a\nb"
    assert answer_text(ProgramEnd(how="deadline", code=0)) == "(it was ended: deadline)"
    text = answer_text(ProgramEnd(how="exited", code=0, output=b"x" * 50_000))
    assert (len(text) < 20_100, "(50000 characters)" in text) == (True, True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tools": ["zsh"]}, "no tool 'zsh'"),
        ({"limits": {"disk": 1}}, "disk"),
        ({"limits": {"children": 0}}, "children is 0"),
        ({"limits": {"network": True}}, "namespaces has no network"),
        ({"tool_deadline_s": 9.0}, "a command in a sandbox has the deadline of its limits"),
        ({"backend": "nothing"}, "no sandbox backend named 'nothing'"),
        ({"backend_options": {"x": 1}}, "no option 'x'"),
    ],
)
def test_options_that_cannot_be_used_are_refused(tmp_path: Path, options: dict[str, Any], words: str):
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    with pytest.raises(ConfigError, match=words):
        SandboxFactory(**{"files": str(tmp_path / "rows.jsonl"), "reward": "none", **options})
