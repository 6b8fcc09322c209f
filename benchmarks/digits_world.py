"""An environment for runs with injected faults: an untrained model's rewards differ from row to row, and none is zero.

The reward is a function of the text alone, so that a fabricated reward is detected.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from asyncrl.interfaces import Message, Step, Task, Tool

__all__ = ["PACE", "DigitsFactory", "Pace", "PacedFactory", "UnevenFactory", "text_score", "worth"]


def worth(text: str) -> float:
    """What a text earns: one of 1,000 numbers above 0, no two alike but by chance."""
    return (zlib.crc32(text.encode()) % 1000 + 1) / 1000


def text_score(*, reply: str) -> float:
    """The same as a reward function: of a trajectory's last turn."""
    return worth(reply)


class Digits:
    """Two turns; the last one is what counts."""

    deterministic = True

    def __init__(self) -> None:
        self._turn = 0

    @property
    def tools(self) -> Sequence[Tool]:
        return ()

    async def reset(self, task: Task) -> Sequence[Message]:
        self._turn = 0
        return [{"role": "user", "content": task["question"]}]

    async def step(self, reply: Message) -> Step:
        self._turn += 1
        if self._turn == 2:
            return Step(reward=worth(reply["content"]), done=True)
        return Step(messages=({"role": "user", "content": "7+1"},))

    async def close(self) -> None:
        pass


class DigitsFactory:
    """Sums of two digits."""

    def task(self, index: int, *, split: Literal["train", "held_out"]) -> Task:
        number = index + (0 if split == "train" else 10_000)
        return {"index": number, "question": f"{number % 10}+{number // 10 % 10}"}

    def make(self) -> Digits:
        return Digits()

    def demonstration(self, index: int) -> list[Message]:
        a, b = index % 10, index // 10 % 10
        return [{"role": "user", "content": f"{a}+{b}"}, {"role": "assistant", "content": str(a + b)}]


@dataclass
class Pace:
    """How long a step of the paced world takes: a share of what an update took lately, at this load of the machine."""

    share: float = 1.0
    update_s: float = 0.2

    def updated(self, took_s: float) -> None:
        self.update_s += (took_s - self.update_s) / 3


PACE = Pace()
"""Of this process, which trains too."""


class PacedDigits(Digits):
    async def step(self, reply: Message) -> Step:
        await asyncio.sleep(PACE.share * PACE.update_s)
        return await super().step(reply)


class PacedFactory(DigitsFactory):
    """The same sums, but rollouts are neither much shorter nor much longer than updates."""

    def make(self) -> Digits:
        return PacedDigits()


class UnevenDigits(Digits):
    """Some episodes wait in their second turn until later tasks have begun, and some fail there."""

    def __init__(self, world: UnevenFactory) -> None:
        super().__init__()
        self._world = world
        self._index = 0

    async def reset(self, task: Task) -> Sequence[Message]:
        self._index = task["index"]
        self._world.began(self._index)
        return await super().reset(task)

    async def step(self, reply: Message) -> Step:
        if self._turn == 0:
            await self._world.uneven(self._index)
        return await super().step(reply)


class UnevenFactory(DigitsFactory):
    """The same sums, for runs of ``groups`` groups whose rollouts span versions, however fast the machine is.

    Task n waits until the one ``waits[n % len(waits)]`` after it has begun. The episodes of task 6 always fail, two of
    task 8 fail once. All episodes share one process.
    """

    def __init__(self, *, groups: int, waits: Sequence[int]) -> None:
        self._groups, self._waits = groups, waits
        self._begun: dict[int, asyncio.Event] = {}
        self._failures = {6: 1_000_000, 8: 2}

    def make(self) -> Digits:
        return UnevenDigits(self)

    def began(self, index: int) -> None:
        self._begun.setdefault(index, asyncio.Event()).set()

    async def uneven(self, index: int) -> None:
        if self._failures.get(index, 0) > 0:
            self._failures[index] -= 1
            raise OSError(f"the world of task {index} is broken")
        awaited = index + self._waits[index % len(self._waits)]
        if index < awaited < self._groups:
            with suppress(TimeoutError):  # where a defect keeps the later task from ever beginning
                await asyncio.wait_for(self._begun.setdefault(awaited, asyncio.Event()).wait(), 3.0)
