"""Plays many episodes of an environment, and counts what drifted and what was left behind."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from asyncrl.envs.calculator import CalculatorFactory
from asyncrl.interfaces import ClosableFactory, GenerationChunk, GenerationRequest, SamplingParams
from asyncrl.rollout.chat import ChatRenderer
from asyncrl.rollout.episode import AgentEnvironment, EpisodePolicy, run_agent_episode, run_episode
from asyncrl.rollout.trajectory import Trajectory
from asyncrl.testing import ScriptedEngine
from engines.rollout.transformers.engine import TransformersEngine
from engines.training.scratch import make_scratch_tokenizer


@dataclass(frozen=True)
class Played:
    """Ended episodes in the order of their tasks, sampled tokens that are not those to be trained on, what is left."""

    ended: list[Trajectory | Exception]
    drift_tokens: int
    left: list[str]


class Recording:
    """Before an engine's class: keeps the prompt of each request, and what was sampled for it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.sampled: dict[str, list[int]] = {}

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        self.prompts[request.request_id] = request.prompt_token_ids
        sampled = self.sampled[request.request_id] = []
        async for chunk in super().generate(request):  # type: ignore[misc]  the engine's
            sampled += chunk.token_ids
            yield chunk


class RecordingEngine(Recording, ScriptedEngine): ...


class RecordingModel(Recording, TransformersEngine): ...


def scratch_renderer() -> ChatRenderer:
    factory = CalculatorFactory()
    return ChatRenderer(make_scratch_tokenizer([factory.demonstration(index) for index in range(100)]))


async def play(
    environments: Any,
    policy: Callable[[str], str] | RecordingModel,
    *,
    renderer: ChatRenderer,
    episodes: int,
    max_turns: int = 8,
    max_new_tokens: int = 400,
    deadline_s: float = 30.0,
) -> Played:
    """Play episodes, eight at a time, with a started model, or a policy that says what it makes of the text so far."""

    def reply(prompt: tuple[int, ...]) -> list[int]:
        return renderer.tokenizer.encode(policy(renderer.decode(prompt)) + "<|end|>", add_special_tokens=False)

    engine = policy if isinstance(policy, RecordingModel) else RecordingEngine(reply)
    if engine is not policy:
        await engine.start()
    places = asyncio.Semaphore(8)

    async def one(index: int) -> Trajectory | Exception:
        async with places:
            try:
                environment = environments.make()
                if isinstance(environment, AgentEnvironment):
                    asked = EpisodePolicy(
                        engine=engine,
                        renderer=renderer,
                        sampling=SamplingParams(max_new_tokens=max_new_tokens),
                        max_turns=max_turns,
                        max_seq_len=8000,
                        request_prefix=f"{index}",
                        seed=index,
                    )
                    task = environments.task(index, split="train")
                    return await run_agent_episode(environment, task, asked, deadline_s=deadline_s)
                return await run_episode(
                    engine,
                    environment,
                    renderer,
                    environments.task(index, split="train"),
                    sampling=SamplingParams(max_new_tokens=max_new_tokens),
                    max_turns=max_turns,
                    max_seq_len=8000,
                    deadline_s=deadline_s,
                    request_prefix=f"{index}",
                    seed=index,
                )
            except Exception as error:  # noqa: BLE001  the caller's
                return error

    environments.task(0, split="train")  # opens the files of a data set, which stay open
    gc.collect()
    before = resources()
    ended = await asyncio.gather(*(one(index) for index in range(episodes)))
    if isinstance(environments, ClosableFactory):
        await environments.aclose()
    await asyncio.sleep(0)
    gc.collect()
    drift = 0
    for index, trajectory in enumerate(ended):
        if isinstance(trajectory, Trajectory):
            drift += _drift(trajectory, f"{index}", engine)
    return Played(ended=list(ended), drift_tokens=drift, left=[each for each in resources() if each not in before])


def _drift(trajectory: Trajectory, name: str, engine: Recording) -> int:
    """Count sampled tokens that the trajectory does not have where they were sampled, after what they were given."""
    drift = abs(sum(trajectory.loss_mask) - sum(turn.end - turn.start for turn in trajectory.turns))
    for number, turn in enumerate(trajectory.turns):
        sampled = engine.sampled[f"{name}-{number}"]
        same = list(trajectory.token_ids[turn.start : turn.end]) == sampled
        if not same or engine.prompts[f"{name}-{number}"] != _before(trajectory, number):
            drift += len(sampled)
    return drift


def _before(trajectory: Trajectory, number: int) -> tuple[int, ...]:
    """Return what the policy saw before a turn: all tokens of a line, and those of its branch in a tree."""
    turn = trajectory.turns[number]
    if turn.parent is None:
        return trajectory.token_ids[: turn.start]
    begin = trajectory.turns[number - 1].end if number else 0
    seen: tuple[int, ...] = ()
    if turn.parent >= 0:
        above = trajectory.turns[turn.parent]
        seen = (*_before(trajectory, turn.parent), *trajectory.token_ids[above.start : above.end])
    return (*seen, *trajectory.token_ids[begin : turn.start])


def resources() -> list[str]:
    """Child processes, open files, sockets and pipes, and tasks."""
    found = [f"process {each.pid}" for each in psutil.Process().children(recursive=True)]
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # of the listing itself
            found.append(f"descriptor {each.readlink()}")
    return [*found, *(f"task {each.get_name()}: {each.get_coro()}" for each in asyncio.all_tasks())]
