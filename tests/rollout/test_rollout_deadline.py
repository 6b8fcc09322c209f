"""Environments that take too long cost their group, whatever the deadline of all its attempts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asyncrl.data import DataProto
from asyncrl.errors import EnvironmentDeadlineError
from asyncrl.interfaces import Message, SamplingParams, Step, Task
from asyncrl.rollout.chat import ChatRenderer
from asyncrl.rollout.episode import EpisodePolicy
from asyncrl.rollout.trajectory import Trajectory, prompt_rows
from asyncrl.rollout.worker import EpisodeLimits, RolloutSpec, RolloutWorker
from asyncrl.testing import EchoEnvironment, EchoFactory
from asyncrl.testing.clock import run_virtually
from asyncrl.weights import TransportSpec


class HangingAgent:
    """Hangs until its own deadline."""

    def __init__(self, deadline_s: float, *, closes: bool) -> None:
        self._deadline_s = deadline_s
        self._closes = closes

    async def run_agent(self, task: Task, policy: EpisodePolicy) -> Trajectory:
        await asyncio.sleep(self._deadline_s)
        raise EnvironmentDeadlineError("the agent did not end")

    async def close(self) -> None:
        if not self._closes:
            await asyncio.Event().wait()


class HangingEnvironment:
    tools = ()

    def __init__(self, *, closes: bool) -> None:
        self._closes = closes

    async def reset(self, task: Task) -> list[Message]:
        await asyncio.Event().wait()
        raise AssertionError

    async def step(self, reply: Message) -> Step:
        raise AssertionError

    async def close(self) -> None:
        if not self._closes:
            await asyncio.Event().wait()


class Hanging(EchoFactory):
    made = 0

    def __init__(self, *, agent_s: float = 0.0, closes: bool = True) -> None:
        super().__init__()
        self._agent_s = agent_s
        self._closes = closes

    def make(self) -> Any:
        type(self).made += 1
        if self._agent_s:
            return HangingAgent(self._agent_s, closes=self._closes)
        return HangingEnvironment(closes=self._closes)


class HangingAgain(EchoFactory):
    """Its first two environments can be played, and none after them."""

    made = 0

    def make(self) -> Any:
        type(self).made += 1
        environment: Any = EchoEnvironment() if self.made <= 2 else HangingEnvironment(closes=False)
        environment.deterministic = True
        return environment


async def roll_out(folder: Path, environment: type[EchoFactory], *, deadline_s: float, **options: Any) -> DataProto:
    """Roll out a group of two that is given up after 1800 s."""
    spec = RolloutSpec(
        engine="asyncrl.testing:EchoEngine",
        environment=environment,
        environment_options=options,
        transport=TransportSpec(name="asyncrl.testing:EmptyTransport", namespace="run"),
        limits=EpisodeLimits(max_turns=1, max_seq_len=64, deadline_s=deadline_s),
        sampling=SamplingParams(max_new_tokens=8),
        reward_check_share=0.1,
    )
    worker = RolloutWorker(spec)
    await worker.start(str(folder), 0)
    prompts = prompt_rows([{"word": "a", "turns": 1}] * 2, group_id=0, seeds=[1, 2], purpose="train")
    prompts.meta_info["deadline_s"] = 1800.0
    try:
        return await worker.rollout(prompts)
    finally:
        await worker.aclose()


@pytest.mark.parametrize(
    ("options", "attempts", "ends_s"),
    [
        ({"agent_s": 600.0}, 3, 1770.0),
        ({"agent_s": 3600.0}, 1, 1770.0),
        ({"agent_s": 60.0}, 3, 180.0),
        ({}, 2, 1770.0),
        ({"agent_s": 3600.0, "closes": False}, 1, 1795.0),
        ({"closes": False}, 1, 1795.0),
    ],
)
def test_a_group_that_hangs_fails_before_its_rollouts_are_given_up(
    scratch: ChatRenderer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    attempts: int,
    ends_s: float,
) -> None:
    monkeypatch.setattr(Hanging, "made", 0)
    scratch.tokenizer.save_pretrained(tmp_path)

    async def story() -> float:
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(EnvironmentDeadlineError):
            await roll_out(tmp_path, Hanging, deadline_s=1000.0, **options)
        return asyncio.get_running_loop().time() - began_s

    assert run_virtually(story()) == ends_s
    assert Hanging.made == 2 * attempts


def test_a_check_that_hangs_ends_before_the_rollouts_are_given_up(
    scratch: ChatRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HangingAgain, "made", 0)
    scratch.tokenizer.save_pretrained(tmp_path)

    async def story() -> float:
        began_s = asyncio.get_running_loop().time()
        batch = await roll_out(tmp_path, HangingAgain, deadline_s=3600.0)
        assert (batch.meta_info["checks"]["rows"], HangingAgain.made) == (0, 3)
        return asyncio.get_running_loop().time() - began_s

    assert run_virtually(story()) == pytest.approx(1795.0, abs=1.0)
