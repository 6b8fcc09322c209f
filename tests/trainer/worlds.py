"""Small worlds that tests name in a configuration, as ``worlds:DigitsFactory``."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from asyncrl.interfaces import Message, Step, Task, Tool


class Digits:
    """Two turns; each earns a tenth for every digit said, so an untrained model's rewards differ from row to row."""

    def __init__(
        self,
        *,
        fails_on: Sequence[int] = (),
        hangs_on: Sequence[int] = (),
        differs_on: Sequence[int] = (),
        dies_on: int = -1,
        note: str = "",
    ) -> None:
        self._note = note
        self._differs_on = differs_on
        self._fails_on = fails_on
        self._hangs_on = hangs_on
        self._dies_on = dies_on
        self._index = 0
        self._turn = 0

    @property
    def tools(self) -> Sequence[Tool]:
        return ()

    async def reset(self, task: Task) -> Sequence[Message]:
        self._index, self._turn = task["index"], 0
        question = task["question"] + ("?" if self._index in self._differs_on else "")
        return [{"role": "user", "content": question}]

    async def step(self, reply: Message) -> Step:
        if self._index in self._fails_on:
            raise OSError(f"the world of task {self._index} is broken")
        if self._index in self._hangs_on:
            await asyncio.Event().wait()
        if self._index == self._dies_on:
            Path(self._note).write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        self._turn += 1
        reward = 0.1 * sum(character.isdigit() for character in reply["content"])
        if self._turn == 2:
            return Step(reward=reward, done=True)
        return Step(messages=({"role": "user", "content": "7+1"},), reward=reward)

    async def close(self) -> None:
        pass


class DigitsFactory:
    def __init__(
        self,
        *,
        fails_on: Sequence[int] = (),
        hangs_on: Sequence[int] = (),
        differs_on: Sequence[int] = (),
        dies_on: int = -1,
        note: str = "",
    ) -> None:
        self._options: dict[str, Any] = {
            "fails_on": fails_on,
            "hangs_on": hangs_on,
            "differs_on": differs_on,
            "dies_on": dies_on,
            "note": note,
        }

    def task(self, index: int, *, split: Literal["train", "held_out"]) -> Task:
        shift = 0 if split == "train" else 10_000
        number = index + shift
        return {"index": number, "question": f"{number % 10}+{number // 10 % 10}"}

    def make(self) -> Digits:
        return Digits(**self._options)

    def demonstration(self, index: int) -> list[Message]:
        a, b = index % 10, index // 10 % 10
        return [{"role": "user", "content": f"{a}+{b}"}, {"role": "assistant", "content": str(a + b)}]


async def reply_score(*, reply: str) -> float:
    """Another one, of the last turn: a hundredth for each character, and one more."""
    return (len(reply) + 1) / 100


def reply_score_of_killed(*, reply: str) -> float:
    """The same; the first calls, as many as ``KILLS`` says, are killed. Behind its colon is the file they count in."""
    kills, _, note = os.environ["KILLS"].partition(":")
    with Path(note).open("ab", buffering=0) as file:
        file.write(b".")
        if file.tell() <= int(kills):
            os.kill(os.getpid(), signal.SIGKILL)
    return (len(reply) + 1) / 100


def raised_rewards(rewards: Any) -> Any:
    """Advantages whose sum is not 0."""
    return rewards + 1.0


async def length_score(*, completion: str, **_columns: object) -> float:
    """A reward function: a hundredth for each character."""
    return len(completion) / 100


async def generous_score(*, completion: str, **_columns: object) -> float:
    """A reward function that gives something for nothing."""
    return 0.5 + len(completion) / 100
