"""Tasksets of verifiers: a small one of the kind that its users write."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import pytest

pytest.importorskip("verifiers.v1", reason="needs verifiers, which is not in the exact set: on PYTHONPATH in .ci/run")

import verifiers.v1 as vf

from asyncrl.envs.verifiers import VerifiersFactory
from asyncrl.errors import ConfigError

pytestmark = pytest.mark.slow
Play = Callable[..., Any]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class SumsConfig(vf.TasksetConfig):
    largest: int = 10


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> Iterable[SumTask]:
        for first in range(self.config.largest):
            for second in range(self.config.largest):
                data = SumData(prompt=f"{first}+{second}", answer=str(first + second), system_prompt="Add.")
                yield SumTask(data, self.config.task)


class Boxed(SumTask):
    NEEDS_CONTAINER = True


class InABox(SumTask):
    @vf.reward
    async def tests(self, runtime: vf.Runtime) -> float:
        return 0.0


class Silent(vf.Task[SumData]): ...


def taskset_of(task: type[Any], name: str) -> str:
    """Make a module that exports a taskset of one kind of task, as an installed one does."""

    class Taskset(vf.Taskset[task, vf.TasksetConfig]):  # type: ignore[valid-type]
        def load(self) -> Iterable[Any]:
            yield task(SumData(prompt="1+1", answer="2"), self.config.task)

    module: Any = types.ModuleType(name)
    module.Taskset, module.__all__ = Taskset, ["Taskset"]
    sys.modules[name] = module
    return name


@pytest.fixture(autouse=True)
def _sums() -> None:
    module: Any = types.ModuleType("sums_taskset")
    module.Sums, module.__all__ = Sums, ["Sums"]
    module.__spec__ = None
    sys.modules["sums_taskset"] = module


async def test_a_taskset_is_played_and_scored_by_its_own_rewards(play_many: Play):
    factory = VerifiersFactory(taskset="sums_taskset", deterministic=True, largest=12)

    def said(prompt: str) -> str:
        first, second = prompt.rpartition("+")[0].split()[-1][-2:], prompt.rpartition("+")[2].split()[0][:2]
        digits = ["".join(filter(str.isdigit, each)) for each in (first, second)]
        return str(int(digits[0]) + int(digits[1])) if all(digits) else "0"

    ended = await play_many(factory, said, episodes=100)
    rewards = [each.reward for each in ended]
    assert set(rewards) <= {0.0, 2.0}
    assert rewards.count(2.0) > 50
    items = {
        split: {factory.task(index, split=split)["item"] for index in range(144)} for split in ("train", "held_out")
    }
    assert items["train"].isdisjoint(items["held_out"])
    assert len(items["train"]) + factory.held_out_rows == 144
    environment = factory.make()
    messages = await environment.reset(factory.task(0, split="train"))
    assert [each["role"] for each in messages] == ["system", "user"]
    step = await environment.step({"role": "assistant", "content": "x"})
    assert step.info == {"reward_parts": {"turns": 1.0, "right": 0.0}} or "right" in str(step.info)


@pytest.mark.parametrize(
    ("task", "words"), [(Boxed, "needs a container"), (InABox, "needs a runtime"), (Silent, "no rewards of its own")]
)
def test_what_needs_more_than_an_answer_is_refused_by_name(task: type[Any], words: str):
    with pytest.raises(ConfigError, match=words):
        VerifiersFactory(taskset=taskset_of(task, f"taskset_{task.__name__.lower()}"))


def test_an_unknown_taskset_is_refused():
    with pytest.raises(ConfigError, match="cannot make the taskset 'nothing_there'"):
        VerifiersFactory(taskset="nothing_there")
