"""The smallest environment: one prompt, one answer, no reward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from asyncrl.errors import ConfigError
from asyncrl.interfaces import Message, Step, Task, Tool


class SingleTurnEnvironment:
    """Sends ``task["prompt"]`` as the user and ends with the first answer; the reward is 0."""

    deterministic = True

    @property
    def tools(self) -> Sequence[Tool]:
        return ()

    async def reset(self, task: Task) -> Sequence[Message]:
        return [{"role": "user", "content": str(task["prompt"])}]

    async def step(self, reply: Message) -> Step:
        del reply
        return Step(done=True)

    async def close(self) -> None:
        """Do nothing."""


class SingleTurnFactory:
    """Every task is ``prompt``."""

    def __init__(self, *, prompt: str) -> None:
        self._prompt = prompt

    def task(self, index: int, *, split: Literal["train", "held_out"]) -> Task:
        del index, split
        return {"prompt": self._prompt}

    def make(self) -> SingleTurnEnvironment:
        return SingleTurnEnvironment()

    def demonstration(self, index: int) -> list[Message]:
        raise ConfigError(f"a single prompt has no demonstration {index}", path="env.name")
