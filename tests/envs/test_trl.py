"""Classes written for TRL's environment_factory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.envs.trl import TRLFactory
from asyncrl.errors import ConfigError, EnvironmentDeadlineError, EnvironmentFailure
from asyncrl.interfaces import Message, Tool
from asyncrl.tasks.run import train

Play = Callable[..., Any]
WORLD = '''
class Counter:
    """Count to the target; the reward is 1 if it is reached."""

    def reset(self, target, **kwargs):
        self.count, self.target = 0, target
        return f" Now it is {self.count}."

    def increment(self, step: int) -> int:
        """Add to the counter.

        Args:
            step: how much
        """
        if step < 0:
            raise ValueError("step is not negative")
        if step > 90:
            raise KeyError(step)
        self.count += step
        return self.count

    async def read(self) -> str:
        """Read the counter."""
        return str(self.count)

    def get_reward(self):
        return float(self.count == self.target)

    def _hidden(self): ...


def short(completions, environments, target, **kwargs):
    assert environments[0].target == target[0]
    return [0.5 if len(completions[0]) == 5 else None]


def wrong(completions):
    return 1.0
'''


@pytest.fixture
def world(tmp_path: Path) -> Callable[..., TRLFactory]:
    (tmp_path / "world.py").write_text(WORLD)
    rows = [
        {"prompt": [{"role": "user", "content": f"Count to {n}."}], "data_source": "count", "extra_info": {"target": n}}
        for n in range(1, 9)
    ]
    lines = [json.dumps({**row, "reward_model": {"ground_truth": ""}}) for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    (tmp_path / "said.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"Count to {n}. Now it is 0.", "response": "done"}) for n in range(1, 9))
    )

    def make(**options: Any) -> TRLFactory:
        given = {"environment_factory": f"{tmp_path / 'world.py'}:Counter", "files": str(tmp_path / "rows.jsonl")}
        return TRLFactory(**{**given, "order": "file", **options})

    return make


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def counting(text: str) -> str:
    """Adds 2, reads, and says that it is done."""
    return [call("increment", step=2), call("read"), "done"][text.count("<|assistant|>") - 1]


@pytest.mark.slow
async def test_a_hundred_episodes(world: Callable[..., TRLFactory], tmp_path: Path, play_many: Play) -> None:
    factory = world(reward_funcs=[f"{tmp_path / 'world.py'}:short"])
    trajectories = await play_many(factory, counting, episodes=104)
    assert [each.reward for each in trajectories] == [0.5 + (index % 8 == 1) for index in range(104)]
    assert {len(each.turns) for each in trajectories} == {3}


async def test_methods_are_tools_and_their_errors_those_of_tools(world: Callable[..., TRLFactory]) -> None:
    environment = world().make()
    (first,) = await environment.reset(world().task(2, split="train"))
    assert first["content"] == "Count to 3. Now it is 0."
    assert [each.name for each in environment.tools] == ["increment", "read"]
    assert environment.tools[0].parameters["properties"]["step"]["description"] == "how much"
    calls = [{"function": {"name": "increment", "arguments": {"step": -1}}}]
    step = await environment.step({"role": "assistant", "content": "", "tool_calls": calls})
    assert step.messages[0]["content"] == "error: step is not negative"
    assert step.info == {"mistakes": 1}
    calls = [{"function": {"name": "increment", "arguments": {"step": 91}}}]
    with pytest.raises(EnvironmentFailure, match="tool 'increment' failed: KeyError"):
        await environment.step({"role": "assistant", "content": "", "tool_calls": calls})
    await environment.close()


async def test_tools_count_in_a_prompt_and_have_a_deadline_of_their_own(world: Callable[..., TRLFactory]) -> None:
    class Waiting:
        """Never answers."""

        def reset(self) -> None: ...

        async def wait(self) -> str:
            """Wait."""
            await asyncio.Event().wait()
            return ""

        def get_reward(self) -> float:
            return 0.0

    factory = world(environment_factory=Waiting, tool_deadline_s=0.01)
    counted: list[list[str]] = []

    def count(messages: Sequence[Message], tools: Sequence[Tool] = ()) -> int:
        counted.append([each.name for each in tools])
        return 1

    factory.filter_overlong_prompts(count, below=5)
    assert counted == [["wait"]] * 8
    environment = factory.make()
    await environment.reset(factory.task(0, split="train"))
    calls = [{"function": {"name": "wait", "arguments": {}}}]
    with pytest.raises(EnvironmentDeadlineError, match=r"'wait' gave no answer in 0\.01 s"):
        await environment.step({"role": "assistant", "content": "", "tool_calls": calls})


async def test_a_reward_function_for_batches_is_refused(world: Callable[..., TRLFactory], tmp_path: Path) -> None:
    environment = world(reward_funcs=[f"{tmp_path / 'world.py'}:wrong"]).make()
    await environment.reset(world().task(0, split="train"))
    with pytest.raises(EnvironmentFailure, match=r"function wrong must return one reward .* got 1.0"):
        await environment.step({"role": "assistant", "content": "done"})


def test_invalid_options_are_refused(world: Callable[..., TRLFactory]) -> None:
    class Nothing:
        """Neither reset nor reward."""

    class Resets:
        """No reward."""

        def reset(self) -> None: ...

    for options, says in (
        ({"environment_factory": Nothing}, "a Nothing has no reset"),
        ({"environment_factory": Resets}, "a Resets has no reward"),
        ({"reward": "exact"}, "trl does not take reward"),
    ):
        with pytest.raises(ConfigError, match=says):
            world(**options)


@pytest.mark.slow
def test_a_run(world: Callable[..., TRLFactory], small_config: Callable[..., Config], tmp_path: Path) -> None:
    world()
    rows = str(tmp_path / "rows.jsonl")
    options = {
        "environment_factory": f"{tmp_path / 'world.py'}:Counter",
        "files": rows,
        "held_out_share": 0.3,
        "demonstrations": str(tmp_path / "said.jsonl"),
    }
    env = {"name": "asyncrl.envs.trl:TRLFactory", "max_turns": 2, "options": options}
    model = {"options": {"max_position": 512, "hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2}}
    summary = train(small_config(env=env, model=model, rollout={"max_seq_len": 400}, eval={"tasks": 1}))
    assert summary["steps"] == 3
    assert summary["tokens"]["generated"] > 0
