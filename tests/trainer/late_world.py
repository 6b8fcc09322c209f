"""A world in which task 0 is answered only when task 4 has begun: its rollouts are as slow as four training steps."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

from asyncrl.interfaces import Message, Step, Task, Tool


class Late:
    """Two turns; every digit said earns a tenth."""

    def __init__(self, begun: asyncio.Event) -> None:
        self._begun = begun
        self._index = self._turn = 0

    @property
    def tools(self) -> Sequence[Tool]:
        return ()

    async def reset(self, task: Task) -> Sequence[Message]:
        self._index, self._turn = task["index"], 0
        if self._index == 4:
            self._begun.set()
        return [{"role": "user", "content": f"{self._index}+1"}]

    async def step(self, reply: Message) -> Step:
        if self._index == 0:
            await self._begun.wait()
        self._turn += 1
        reward = 0.1 * sum(character.isdigit() for character in reply["content"])
        return Step(messages=({"role": "user", "content": "7+1"},), reward=reward, done=self._turn == 2)

    async def close(self) -> None:
        pass


class LateFactory:
    def __init__(self) -> None:
        self._begun = asyncio.Event()

    def task(self, index: int, *, split: Literal["train", "held_out"]) -> Task:
        return {"index": index + (0 if split == "train" else 10_000)}

    def make(self) -> Late:
        return Late(self._begun)

    def demonstration(self, index: int) -> list[Message]:
        return [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
