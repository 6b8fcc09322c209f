"""The line that calls of a group stand in."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from typing import Self

__all__ = ["Line", "Place", "Queue"]


class Line:
    """In which order calls reach the workers: that of the program, and the same on all ranks.

    A group and the roles that live in its workers share one. A call that has nothing to wait for is sent at once when
    nobody stands in line. The others take a place on the controller loop, in the order of the program, and
    wait there behind two barriers: no call passes one that does not know yet what its workers are; and no plain method
    one that is not sent, unless that one waits for its arguments.

    Attributes:
        lock: held while a call is sent.
        ahead: calls that are made, not sent, and not to be passed.
        asking: calls that wait for their workers, or ask them for their mesh.
        unsent: calls that are not sent and do not wait for their arguments.
    """

    __slots__ = ("_sequences", "ahead", "asking", "lock", "unsent")

    def __init__(self, ranks: int) -> None:
        self.lock = threading.Lock()
        self.ahead = 0
        self.asking = Queue()
        self.unsent = Queue()
        self._sequences = [0] * ranks

    def sequence(self, rank: int) -> int:
        """The number of the next call to a rank. Under the lock."""
        number = self._sequences[rank]
        self._sequences[rank] += 1
        return number

    def next(self, rank: int) -> int:
        """The number that the next call to a rank will get. Under the lock."""
        return self._sequences[rank]

    def begin_at(self, numbers: Sequence[int]) -> None:
        """The numbers of the next calls to each rank. Under the lock."""
        self._sequences = list(numbers)

    def leave(self) -> None:
        """A call has been sent, or may be passed."""
        with self.lock:
            self.ahead -= 1


class Queue:
    """First come, first served, whichever of those waiting is woken first. On one event loop."""

    __slots__ = ("_places",)

    def __init__(self) -> None:
        self._places: deque[Place] = deque()

    def join(self) -> Place:
        """A place behind all that are there; it is left at the end of its ``with``."""
        place = Place(self)
        self._places.append(place)
        self._call_first()
        return place

    def _call_first(self) -> None:
        while self._places and self._places[0].is_left:
            self._places.popleft()
        if self._places:
            self._places[0].is_first.set()


class Place:
    """One place in a queue.

    Attributes:
        is_first: everyone who came before has left.
        is_left: it is passed as if it were not there.
    """

    __slots__ = ("_queue", "is_first", "is_left")

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self.is_first = asyncio.Event()
        self.is_left = False

    async def first(self) -> None:
        """Wait until everyone who came before has left."""
        await self.is_first.wait()

    def leave(self) -> None:
        """Let those behind pass; again is nothing."""
        if not self.is_left:
            self.is_left = True
            self._queue._call_first()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  one machine

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
