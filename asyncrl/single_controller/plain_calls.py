"""Plain methods of a worker: one call after another, in a thread of their own.

    in line --(one is ahead)--> getting ready --(has its arguments)--> ready --(none is ahead)--> running --> over
       '------------------------------'------------------------------------'----(cancelled)------------------^

Where the next call is ready when one ends, the thread goes on with it by itself; the event loop is told of the end
meanwhile. Only the call behind the running one gets ready, no other: that bounds what is held.
"""

# ruff: noqa: SLF001  the line and its places are one machine
# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

__all__ = ["Place", "PlainCalls", "without_exit"]


class PlainCalls:
    """The line of a worker's plain calls, and their thread.

    Args:
        inline: run them on the event loop itself, and no thread at all: deterministic, and blocking the loop.
    """

    def __init__(self, *, inline: bool = False) -> None:
        self._thread = None if inline else ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker")
        self._lock = threading.Lock()
        self._places: list[Place] = []

    def place(self, priority: int) -> Place:
        """A place in line for one call: behind the first, before all whose priority is lower."""
        return Place(self, priority)

    async def run(self, function: Callable[[], Any]) -> Any:
        """Run what has no place of its own in the thread of the calls."""
        if self._thread is None:
            return await without_exit(_immediately(function))
        return await asyncio.get_running_loop().run_in_executor(self._thread, _prepared(function))

    def stop(self) -> None:
        """End the thread once what runs in it has ended; what has not begun is cancelled. From any thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _ahead_of(self, place: Place) -> int:
        with self._lock:
            return self._places.index(place)

    def _go_on(self) -> None:
        """Begin the first call if it is ready, and wake those that may have moved. On the loop."""
        with self._lock:
            first, moved = self._begun_first(), self._places[:2]
        if first is not None:
            assert self._thread is not None
            try:
                work = self._thread.submit(self._work, first)
            except RuntimeError as error:  # it has been stopped
                self._refuse(first, error)
            else:
                work.add_done_callback(functools.partial(self._worked, first))
        for place in moved:
            place.moved.set()

    def _begun_first(self) -> Place | None:
        """The first call, if it is ready and has not begun: from here on it has. Under the lock."""
        first = self._places[0] if self._places else None
        if first is None or first._function is None or first._begun:
            return None
        first._begun = True
        return first

    def _worked(self, place: Place, work: Future[None]) -> None:
        if work.cancelled():  # it has been stopped before
            self._refuse(place, asyncio.CancelledError())

    def _refuse(self, place: Place, error: BaseException) -> None:
        with self._lock:
            self._places.remove(place)
        place._tell(None, error)

    def _work(self, place: Place | None) -> None:
        """Run this call, and those that are ready after it. In the thread."""
        while place is not None:
            value, error = place._outcome()
            with self._lock:
                self._places.remove(place)
                following = self._begun_first()
            place._tell(value, error)
            place = following
            # Neither is kept while the next one runs, nor in the frame that a traceback refers to.
            del value, error, following


class Place:
    """Of one call. Entered in line, left when the call is over; on one event loop."""

    __slots__ = ("_begun", "_calls", "_ended", "_function", "_loop", "_priority", "moved")

    def __init__(self, calls: PlainCalls, priority: int) -> None:
        self._calls = calls
        self._priority = priority
        self._function: Callable[[], Any] | None = None
        self._begun = False
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[Any] | None = None
        self.moved = asyncio.Event()

    async def __aenter__(self) -> Self:
        with self._calls._lock:
            places = self._calls._places
            place = len(places)
            # Never before the first, which runs.
            while place > 1 and places[place - 1]._priority < self._priority:
                place -= 1
            places.insert(place, self)
        return self

    async def __aexit__(self, *_: object) -> None:
        with self._calls._lock:
            if not self._begun:  # otherwise the thread takes it out
                self._calls._places.remove(self)
                self._function = None
        self._calls._go_on()

    async def next(self) -> None:
        """Wait until at most one call is ahead."""
        await self._ahead(1)

    async def first(self) -> None:
        """Wait until no call is ahead."""
        await self._ahead(0)

    async def run(self, function: Callable[[], Any]) -> Any:
        """Run the call itself, as soon as no other is ahead."""
        if self._calls._thread is None:
            await self.first()
            return await without_exit(_immediately(function))
        ended = self._ended = self._loop.create_future()  # before the thread can see the function
        self._function = _prepared(function)
        self._calls._go_on()
        return await ended

    async def _ahead(self, most: int) -> None:
        while self._calls._ahead_of(self) > most:
            self.moved.clear()
            await self.moved.wait()

    def _outcome(self) -> tuple[Any, BaseException | None]:
        function, self._function = self._function, None
        assert function is not None
        try:
            return function(), None
        except BaseException as error:  # noqa: BLE001  whatever it is, it is what the call failed with
            return None, error

    def _tell(self, value: Any, error: BaseException | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._settle, value, error)

    def _settle(self, value: Any, error: BaseException | None) -> None:
        ended, self._ended = self._ended, None  # the thread knows the first of those that it runs as long as it runs
        assert ended is not None
        if not ended.done():  # cancelled while it ran
            if error is None:
                ended.set_result(value)
            else:
                ended.set_exception(error)
        self._calls._go_on()


async def _immediately(function: Callable[[], Any]) -> Any:
    return function()


async def without_exit(awaitable: Awaitable[Any]) -> Any:
    """``sys.exit()`` in a method ends the method with an error, not the event loop that runs it."""
    try:
        return await awaitable
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"the method raised {error!r}") from error


def _prepared(function: Callable[[], Any]) -> Callable[[], Any]:
    """The function in today's context, for another thread."""
    context = contextvars.copy_context()

    def call() -> Any:
        try:
            return context.run(function)
        except (SystemExit, KeyboardInterrupt, StopIteration) as error:  # the last one no future can hold
            raise RuntimeError(f"the method raised {error!r}") from error

    return call
