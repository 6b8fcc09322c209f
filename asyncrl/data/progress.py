"""Progress: how far the ranks of a call are."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from asyncrl.data.outcome import Outcome

if TYPE_CHECKING:
    from asyncrl.data.plan import Header, Plan

__all__ = ["FinishedPart", "Progress", "Shard"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One rank's share of a call. ``rows``: its rows of the arguments, without padding, where they are split."""

    rank: int
    state: Literal["running", "done", "failed", "cancelled"]
    since_s: float
    rows: range | None = None
    header: Header | None = None
    took_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FinishedPart:
    """``make`` gives the plan of what the call returned for ``rows`` of its arguments."""

    rows: range
    make: Callable[[], Plan]


class Progress:
    """Written as the call goes on, read from any thread and any event loop. Holds blocks, no payload and no arguments.

    Args:
        now: the clock that durations are measured on, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._shards: dict[int, Shard] = {}
        self._parts: list[FinishedPart] = []
        self._listeners: dict[object, Callable[[], object]] = {}

    @property
    def shards(self) -> list[Shard]:
        """By rank; none before the call is sent."""
        with self._lock:
            return [self._shards[rank] for rank in sorted(self._shards)]

    def sent(self, rows: Sequence[range | None]) -> None:
        """The call has gone to its ranks, each with these rows of the arguments."""
        now = self._now()
        with self._lock:
            for rank, each in enumerate(rows):
                self._shards[rank] = Shard(rank=rank, state="running", since_s=now, rows=each)

    def ended(
        self,
        rank: int,
        state: Literal["done", "failed", "cancelled"],
        *,
        header: Header | None = None,
        make: Callable[[], Plan] | None = None,
    ) -> None:
        """A rank has replied, with a batch of this ``header`` if there is one."""
        now = self._now()
        with self._lock:
            shard = self._shards[rank]
            self._shards[rank] = replace(shard, state=state, since_s=now, header=header, took_s=now - shard.since_s)
            if make is not None and shard.rows:
                self._parts.append(FinishedPart(shard.rows, make))
            listeners = list(self._listeners.values())
        for listener in listeners:
            listener()

    async def finished(self, outcome: Outcome[Any]) -> AsyncGenerator[FinishedPart, None]:
        """Parts that hold rows, in the order in which they finish, until ``outcome`` is complete."""
        loop = asyncio.get_running_loop()
        news = asyncio.Event()
        key = object()

        def wake() -> None:
            # A closed loop has nobody left who waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(news.set)

        with self._lock:
            self._listeners[key] = wake
        unsubscribe = outcome.subscribe(wake)
        given = 0
        try:
            while True:
                news.clear()
                complete = outcome.complete
                while given < len(self._parts):
                    given += 1
                    yield self._parts[given - 1]
                if complete:
                    return
                await news.wait()
        finally:
            unsubscribe()
            with self._lock:
                del self._listeners[key]
