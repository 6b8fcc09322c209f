"""Devices that rollouts and the trainer share: they take turns, and at no time do both hold the memory.

    rollouts awake --- trainer_turn() begins: the pool sleeps, then the trainer wakes ---> trainer awake
    trainer awake  --- trainer_turn() ends: the trainer sleeps, then the pool wakes -----> rollouts awake

What holds, whatever is cancelled or fails:

1. A side is woken only when the other one sleeps.
2. A hand-over that has begun is completed, even if its caller is cancelled meanwhile. It begins when the rollouts are
   ready for it; until then a turn can be given up.
3. A turn that fails or is cancelled keeps the devices with the trainer: a checkpoint may follow, and the next turn that
   ends well gives them back.
4. Requests lose nothing: an engine that sleeps keeps those it has, and computes their keys and values again afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Literal, Protocol

from asyncrl.runtime import shield_until_done


class Devices(Protocol):
    """The devices of rollouts and trainer; ``shared`` if they take turns on the same ones."""

    @property
    def shared(self) -> bool: ...

    def trainer_turn(self) -> AbstractAsyncContextManager[None]:
        """Have the trainer's memory on its devices inside the block."""
        ...


class SeparateDevices:
    """Rollouts and trainer have devices of their own, and compute at the same time."""

    shared = False

    def trainer_turn(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two that share the devices.

    ``sleep`` and ``wake`` are idempotent, and done when the memory is free or back. ``ready`` waits for what has to end
    before a sleep; cancelled, it has changed nothing.
    """

    sleep: Callable[[], Awaitable[object]]
    wake: Callable[[], Awaitable[object]]
    ready: Callable[[], Awaitable[object]] | None = None


@dataclass(slots=True, kw_only=True)
class SharedDevices:
    """Takes the turns of rollouts and trainer. Used from one event loop; turns may be nested.

    Attributes:
        holder: the side whose memory is on the devices; ``neither``: in the middle of a hand-over, or after one failed.
        waiting: entered while devices are handed over.
    """

    rollouts: Side
    trainer: Side
    holder: Literal["rollouts", "trainer", "neither"] = "rollouts"
    waiting: Callable[[], AbstractContextManager[object]] = nullcontext
    _turns: int = field(default=0, init=False)
    _handing_over: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    @property
    def shared(self) -> bool:
        return True

    @asynccontextmanager
    async def trainer_turn(self) -> AsyncIterator[None]:
        """Give the devices to the trainer inside the block, and back to the rollouts after the outermost one."""
        self._turns += 1
        try:
            await self._hand_over("trainer")
            yield
        finally:
            self._turns -= 1
        if not self._turns:
            await self._hand_over("rollouts")

    async def _hand_over(self, to: Literal["rollouts", "trainer"]) -> None:
        async def hand_over() -> None:
            async with self._handing_over:
                if self.holder == to or (to == "rollouts" and self._turns):
                    return
                giving, taking = (self.rollouts, self.trainer) if to == "trainer" else (self.trainer, self.rollouts)
                self.holder = "neither"
                with self.waiting():
                    await giving.sleep()
                    await taking.wake()
                self.holder = to

        if to == "trainer" and self.holder == "rollouts" and self.rollouts.ready is not None:
            with self.waiting():
                await self.rollouts.ready()
        await shield_until_done(hand_over())
