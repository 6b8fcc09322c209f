"""The calculator's tasks, and many episodes that leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.envs.calculator import CalculatorFactory
from asyncrl.interfaces import ClosableFactory, GenerationChunk, GenerationRequest, SamplingParams
from asyncrl.rollout.chat import ChatRenderer
from asyncrl.rollout.episode import run_episode
from asyncrl.rollout.trajectory import Trajectory
from asyncrl.testing import ScriptedEngine
from engines.training.scratch import make_scratch_tokenizer


@pytest.fixture(scope="session")
def factory() -> CalculatorFactory:
    return CalculatorFactory()


@pytest.fixture(scope="session")
def scratch(factory: CalculatorFactory) -> ChatRenderer:
    return ChatRenderer(make_scratch_tokenizer([factory.demonstration(index) for index in range(100)]))


class RecordingEngine(ScriptedEngine):
    """Keeps what it sampled for each request."""

    def __init__(self, reply: Callable[[tuple[int, ...]], Sequence[int]]) -> None:
        super().__init__(reply)
        self.sampled: dict[str, list[int]] = {}

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        sampled = self.sampled[request.request_id] = []
        async for chunk in super().generate(request):
            sampled += chunk.token_ids
            yield chunk


@pytest.fixture
def play_many(scratch: ChatRenderer) -> Callable[..., Any]:
    """Plays episodes, eight at a time, with a policy that says what ``said`` makes of the text so far.

    What was sampled is what is trained on, token by token, and no process, descriptor or task is left.
    """

    async def play(
        environments: Any, said: Callable[[str], str], *, episodes: int, max_turns: int = 8, deadline_s: float = 30.0
    ) -> list[Trajectory | Exception]:
        def reply(prompt: tuple[int, ...]) -> list[int]:
            return scratch.tokenizer.encode(said(scratch.decode(prompt)) + "<|end|>", add_special_tokens=False)

        engine = RecordingEngine(reply)
        await engine.start()
        places = asyncio.Semaphore(8)

        async def one(index: int) -> Trajectory | Exception:
            async with places:
                try:
                    return await run_episode(
                        engine,
                        environments.make(),
                        scratch,
                        environments.task(index, split="train"),
                        sampling=SamplingParams(max_new_tokens=400),
                        max_turns=max_turns,
                        max_seq_len=8000,
                        deadline_s=deadline_s,
                        request_prefix=f"{index}",
                        seed=index,
                    )
                except Exception as error:  # noqa: BLE001  the test's
                    return error

        environments.task(0, split="train")  # opens the files of a data set, which stay open
        gc.collect()
        before = resources()
        ended = await asyncio.gather(*(one(index) for index in range(episodes)))
        if isinstance(environments, ClosableFactory):
            await environments.aclose()
        await asyncio.sleep(0)
        gc.collect()
        assert resources() == before
        for index, trajectory in enumerate(ended):
            if isinstance(trajectory, Trajectory):
                turns = [list(trajectory.token_ids[turn.start : turn.end]) for turn in trajectory.turns]
                assert turns == [engine.sampled[f"{index}-{number}"] for number in range(len(turns))]
                assert sum(map(len, turns)) == sum(trajectory.loss_mask)
                prompts = {each.request_id: each.prompt_token_ids for each in engine.requests}
                for number, turn in enumerate(trajectory.turns):
                    assert prompts[f"{index}-{number}"] == trajectory.token_ids[: turn.start]
        return list(ended)

    return play


def resources() -> tuple[list[int], list[str], int]:
    """Child processes, open files, sockets and pipes, and tasks."""
    children = sorted(each.pid for each in psutil.Process().children(recursive=True))
    opened = []
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # of the listing itself
            opened.append(str(each.readlink()))
    return children, sorted(opened), len(asyncio.all_tasks())
