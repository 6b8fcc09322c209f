"""Environments that take too long cost their group, whatever the deadline of all its attempts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import EnvironmentDeadlineError
from asyncrl.interfaces import Message, SamplingParams, Step, Task
from asyncrl.rollout.chat import ChatRenderer
from asyncrl.rollout.episode import EpisodePolicy
from asyncrl.rollout.trajectory import Trajectory, prompt_rows
from asyncrl.rollout.worker import EpisodeLimits, RolloutSpec, RolloutWorker
from asyncrl.testing import EchoFactory
from asyncrl.testing.clock import run_virtually
from asyncrl.weights import TransportSpec


class HangingAgent:
    """Hangs until its own deadline."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s

    async def run_agent(self, task: Task, policy: EpisodePolicy) -> Trajectory:
        await asyncio.sleep(self._deadline_s)
        raise EnvironmentDeadlineError("the agent did not end")

    async def close(self) -> None: ...


class HangingEnvironment:
    tools = ()

    async def reset(self, task: Task) -> list[Message]:
        await asyncio.Event().wait()
        raise AssertionError

    async def step(self, reply: Message) -> Step:
        raise AssertionError

    async def close(self) -> None: ...


class Hanging(EchoFactory):
    made = 0

    def __init__(self, *, agent_s: float = 0.0) -> None:
        super().__init__()
        self._agent_s = agent_s

    def make(self) -> Any:
        type(self).made += 1
        return HangingAgent(self._agent_s) if self._agent_s else HangingEnvironment()


@pytest.mark.parametrize(
    ("options", "attempts", "ends_s"),
    [({"agent_s": 600.0}, 3, 1770.0), ({"agent_s": 3600.0}, 1, 1770.0), ({"agent_s": 60.0}, 3, 180.0), ({}, 2, 1770.0)],
)
def test_a_group_that_hangs_fails_before_its_rollouts_are_given_up(
    scratch: ChatRenderer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, float],
    attempts: int,
    ends_s: float,
) -> None:
    monkeypatch.setattr(Hanging, "made", 0)
    scratch.tokenizer.save_pretrained(tmp_path)
    spec = RolloutSpec(
        engine="asyncrl.testing:EchoEngine",
        environment=Hanging,
        environment_options=options,
        transport=TransportSpec(name="asyncrl.testing:EmptyTransport", namespace="run"),
        limits=EpisodeLimits(max_turns=1, max_seq_len=64, deadline_s=1000.0),
        sampling=SamplingParams(max_new_tokens=8),
    )

    async def roll_out() -> float:
        worker = RolloutWorker(spec)
        await worker.start(str(tmp_path), 0)
        began_s = asyncio.get_running_loop().time()
        prompts = prompt_rows([{"word": "a", "turns": 1}] * 2, group_id=0, seeds=[1, 2], purpose="train")
        prompts.meta_info["deadline_s"] = 1800.0
        with pytest.raises(EnvironmentDeadlineError):
            await worker.rollout(prompts)
        took_s = asyncio.get_running_loop().time() - began_s
        await worker.aclose()
        return took_s

    assert run_virtually(roll_out()) == ends_s
    assert Hanging.made == 2 * attempts
