"""Progress: how far the ranks of a call are."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from typing import Any

    from asyncrl.data.outcome import Outcome
    from asyncrl.data.plan import Header, Plan

__all__ = ["FinishedPart", "Progress", "Shard", "ShardState"]

ShardState: TypeAlias = Literal["running", "done", "failed", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One rank's share of a call. ``rows``: its rows of the arguments, without padding, where they are split."""

    rank: int
    state: ShardState
    since_s: float
    rows: range | None = None
    header: Header | None = None
    took_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FinishedPart:
    """``make`` gives the plan of what the call returned for ``rows`` of its arguments."""

    rows: range
    make: Callable[[], Plan]


@functools.lru_cache(maxsize=64)
def _all_running(ranks: int) -> tuple[ShardState, ...]:
    running: ShardState = "running"
    return (running,) * ranks


class Progress:
    """Written as the call goes on, read from any thread and any event loop. Holds blocks, no payload and no arguments.

    Small, for a program may have any number of calls outstanding: what people look at is made when they look.

    Args:
        now: the clock that durations are measured on, in seconds.
    """

    __slots__ = ("_ends_s", "_finished", "_headers", "_listeners", "_lock", "_now", "_rows", "_sent_s", "_states")

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._states: list[ShardState] | tuple[ShardState, ...] = ()
        self._rows: Sequence[range | None] = ()
        self._headers: dict[int, Header] | None = None
        self._ends_s: dict[int, float] | None = None
        self._sent_s = 0.0
        self._finished: tuple[FinishedPart, ...] = ()
        self._listeners: dict[object, Callable[[], object]] | None = None

    @property
    def shards(self) -> list[Shard]:
        """By rank; none before the call is sent."""
        with self._lock:
            return [
                Shard(
                    rank=rank,
                    state=state,
                    since_s=self._sent_s,
                    rows=self._rows[rank] if self._rows else None,
                    header=(self._headers or {}).get(rank),
                    took_s=(self._ends_s or {}).get(rank, self._sent_s) - self._sent_s,
                )
                for rank, state in enumerate(self._states)
            ]

    def sent(self, ranks: int, rows: Sequence[range] = ()) -> None:
        """The call goes to its ranks, with these rows of the arguments where they are split."""
        with self._lock:
            self._sent_s = self._now()
            self._states = _all_running(ranks)
            self._rows = rows

    def ended(
        self,
        rank: int,
        state: Literal["done", "failed", "cancelled"],
        *,
        header: Header | None = None,
        make: Callable[[], Plan] | None = None,
    ) -> None:
        """A rank has replied, with a batch of this ``header`` if there is one."""
        with self._lock:
            if isinstance(self._states, tuple):  # the one that all calls share until their first reply
                self._states = list(self._states)
            self._states[rank] = state
            self._ends_s = self._ends_s or {}
            self._ends_s[rank] = self._now()
            if header is not None:
                self._headers = self._headers or {}
                self._headers[rank] = header
            if make is not None and self._rows and (rows := self._rows[rank]):
                self._finished += (FinishedPart(rows, make),)
            listeners = list(self._listeners.values()) if self._listeners else ()
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
            if self._listeners is None:
                self._listeners = {}
            self._listeners[key] = wake
        unsubscribe = outcome.subscribe(wake)
        given = 0
        try:
            while True:
                news.clear()
                complete = outcome.complete
                while given < len(self._finished):
                    given += 1
                    yield self._finished[given - 1]
                if complete:
                    return
                await news.wait()
        finally:
            unsubscribe()
            with self._lock:
                del self._listeners[key]
