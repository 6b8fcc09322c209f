"""Who calls the steps of a :class:`Generation`: a thread of its own, or the event loop.

Both take events (functions to be called between two steps), step while there is work, and hand the touched rows to
``deliver`` on the event loop.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from asyncrl.errors import EngineError
from engines.rollout.embedded.generation import Generation
from engines.rollout.embedded.row import Row

__all__ = ["InlineStepping", "Stepping", "ThreadStepping"]

# A thread whose steps are faster than this gathers tokens before it wakes the event loop: a wake-up costs both threads
# the interpreter lock. The last token of a request is never held back.
_GATHER_S = 0.01

Event: TypeAlias = Callable[[], None]
Deliver: TypeAlias = Callable[[Sequence[Row]], None]


class Stepping(Protocol):
    """Calls events and steps, never two at a time, in the order they were posted."""

    def post(self, event: Event) -> None:
        """Call ``event`` before the next step. What it raises is the end of every request."""
        ...

    def start(self) -> None:
        """Begin."""
        ...

    async def close(self) -> None:
        """Call the events posted so far, finish the present step, stop. Idempotent."""
        ...


def _guarded(generation: Generation, action: Event) -> None:
    """Do it; what goes wrong in it ends every request, so that nobody waits for a token that cannot come."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - whatever a model raises: it is handed to every request, none swallowed
        failure = EngineError(f"the engine failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        generation.fail(failure)


class ThreadStepping:
    """Steps in a thread, so the event loop never waits for the model.

    One call into the event loop serves all rows of a step, and of several steps if these are short or the loop is
    late: a slow reader costs the thread nothing.

    Args:
        setup: called first in the thread (thread counts are per thread).
    """

    def __init__(
        self, generation: Generation, *, loop: asyncio.AbstractEventLoop, deliver: Deliver, setup: Event
    ) -> None:
        self._generation = generation
        self._loop = loop
        self._deliver = deliver
        self._setup = setup
        self._inbox: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._outbox: deque[list[Row]] = deque()
        self._announced = False
        self._ended = loop.create_future()
        self._thread = threading.Thread(target=self._run, name="asyncrl-decode", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, event: Event) -> None:
        self._inbox.put(event)

    async def close(self) -> None:
        self._inbox.put(None)
        await asyncio.shield(self._ended)
        self._collect()

    def _run(self) -> None:
        self._setup()
        generation = self._generation
        announced = 0.0
        try:
            while True:
                while not (generation.has_work and self._inbox.empty()):
                    event = self._inbox.get()
                    if event is None:
                        return
                    _guarded(generation, event)
                    self._announce()
                _guarded(generation, generation.step)
                now = time.perf_counter()
                if generation.ended or now - announced >= _GATHER_S or not generation.has_work:
                    announced = now
                    self._announce()
        finally:
            self._call_loop(self._end)

    def _announce(self) -> None:
        generation = self._generation
        if generation.touched:
            self._outbox.append(generation.touched)
            generation.touched = []
            generation.ended = False
            if not self._announced:
                self._announced = True
                self._call_loop(self._collect)

    def _call_loop(self, callback: Event) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            # The loop was closed before the engine: nobody is left to tell.
            self._inbox.put(None)

    def _collect(self) -> None:
        self._announced = False
        while self._outbox:
            self._deliver(self._outbox.popleft())

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)


class InlineStepping:
    """Steps on the event loop, which it blocks meanwhile, and gives way after each.

    With nothing else that depends on time, a program is a function of its seeds: requests submitted in the same turn
    of the loop join the same step, in the order of submission.
    """

    def __init__(self, generation: Generation, *, deliver: Deliver) -> None:
        self._generation = generation
        self._deliver = deliver
        self._inbox: deque[Event] = deque()
        self._wake = asyncio.Event()
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="asyncrl-decode")

    def post(self, event: Event) -> None:
        if self._task is not None and self._task.done():
            _guarded(self._generation, event)  # cancelled from outside: events are all that is left
            return
        self._inbox.append(event)
        self._wake.set()

    async def close(self) -> None:
        self._closing = True
        self._wake.set()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        generation = self._generation
        try:
            while True:
                while self._inbox:
                    _guarded(generation, self._inbox.popleft())
                self._hand_over()
                if self._closing:
                    return
                if generation.has_work:
                    _guarded(generation, generation.step)
                    self._hand_over()
                    await asyncio.sleep(0)
                else:
                    self._wake.clear()
                    await self._wake.wait()
        finally:
            if not self._closing:
                generation.fail(EngineError("the task that decodes was cancelled from outside"))
                self._hand_over()

    def _hand_over(self) -> None:
        touched, self._generation.touched = self._generation.touched, []
        if touched:
            self._deliver(touched)
