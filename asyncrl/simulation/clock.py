"""An event loop whose time jumps to the next timer instead of passing: hours take milliseconds, always the same way.

>>> import asyncio
>>> async def an_hour() -> float:
...     await asyncio.sleep(3600)
...     return asyncio.get_running_loop().time()
>>> run_virtually(an_hour())
3600.0
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import math
import random
from asyncio import events
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple, cast

__all__ = ["SimulationDeadlock", "VirtualLoop", "run_virtually"]

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


class SimulationDeadlock(AssertionError):
    """Everybody waits, and no timer is set (or only beyond the limit): nothing can ever happen again."""


class _Task(asyncio.Task[Any]):
    """A task that sorts into sets by its number, not by its address: sets of tasks have one order in every run."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs what is ready in the order it became so; when nothing is, the clock jumps to the earliest timer.

    Of timers due at one moment the seed decides which comes first: their order is an accident that no program may rely
    on. Everything else is fixed, so a run depends on the program and the seed alone. There are no threads, sockets and
    signals here; ``run_in_executor`` runs its function at once, in no time.

    Args:
        seed: draws the order of timers due at one moment; None keeps the order they were set in.
        limit_s: time that must not come: what goes on until then goes on for ever.

    Raises:
        SimulationDeadlock: from :meth:`run_until_complete`, naming the tasks that wait.
    """

    def __init__(self, seed: int | None = None, *, limit_s: float = math.inf) -> None:
        self._limit_s = limit_s
        self._running = False  # asked for by the next line
        super().__init__()
        self._now_s = 0.0
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()
        self._dice = None if seed is None else random.Random(seed)  # noqa: S311  reproducible, not secret
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._stopping = self._closed = False
        self.failures: list[dict[str, Any]] = []
        """Contexts of errors that nobody took; :func:`run_virtually` raises the first."""

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now_s

    # ---------------------------------------------------------------------------------------------------- scheduling

    def call_soon(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        self._check_open()
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        self._check_open()
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        tie = self._dice.random() if self._dice is not None else 0.0
        heapq.heappush(self._timers, (when, tie, next(self._numbers), handle))
        return handle

    def create_task(
        self,
        coro: Generator[Any, None, _T] | Coroutine[Any, Any, _T],
        *,
        name: object = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[_T]:
        self._check_open()
        number = next(self._numbers)
        task: Any = _Task.__new__(_Task)
        task.number = number  # before __init__, which puts it into a set
        task.__init__(coro, loop=self, name=f"task {number}" if name is None else str(name), context=context)
        self._tasks[task] = None
        task.add_done_callback(self._forget)
        return cast("asyncio.Task[_T]", task)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)

    def run_in_executor(self, executor: Executor | None, func: Callable[[*_Ts], _T], *args: *_Ts) -> asyncio.Future[_T]:
        future: asyncio.Future[_T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  handed to whoever awaits it
            future.set_exception(error)
        return future

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Called by a handle that is cancelled: it is skipped when its time comes."""

    # ------------------------------------------------------------------------------------------------------- running

    def run_forever(self) -> None:
        self._check_open()
        if self._running:
            raise RuntimeError("this loop is running already")
        before = events._get_running_loop()  # noqa: SLF001  documented for those who write event loops
        self._running, self._stopping = True, False
        try:
            events._set_running_loop(self)  # noqa: SLF001
            while not self._stopping:
                self._run_once()
        finally:
            self._running = self._stopping = False
            events._set_running_loop(before)  # noqa: SLF001

    def _run_once(self) -> None:
        if not self._ready:
            while self._timers and self._timers[0][3].cancelled():
                heapq.heappop(self._timers)
            if not self._timers:
                raise SimulationDeadlock(self._who_waits())
            self._now_s = max(self._now_s, self._timers[0][0])
            if self._now_s > self._limit_s:
                raise SimulationDeadlock(self._who_waits())
            while self._timers and self._timers[0][0] <= self._now_s:
                handle: asyncio.Handle = heapq.heappop(self._timers)[3]
                if not handle.cancelled():
                    self._ready.append(handle)
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if not handle.cancelled():
                handle._run()  # noqa: SLF001

    def run_until_complete(self, future: Generator[Any, None, _T] | Awaitable[_T]) -> _T:
        task: asyncio.Future[Any] = asyncio.ensure_future(cast("Awaitable[Any]", future), loop=self)
        task.add_done_callback(lambda _done: self.stop())
        try:
            self.run_forever()
        except SimulationDeadlock:
            self._abandon(task)
            raise
        if not task.done():
            raise RuntimeError("the loop was stopped before its main task was done")
        return cast("_T", task.result())

    def _abandon(self, main: asyncio.Future[Any]) -> None:
        """Let everybody who waits for ever be cancelled, so that what they hold is closed."""
        for task in list(self._tasks):
            task.cancel()
        while self._ready:
            self._run_once()
        if main.done() and not main.cancelled():
            main.exception()

    def _who_waits(self) -> str:
        waiting = [f"{task.get_name()} in {_place(task)}" for task in self._tasks if not task.done()]
        what = "no timer is set" if not self._timers else f"it was to be over by {self._limit_s:g} s"
        return f"at {self._now_s:g} s everybody waits and {what}: " + "; ".join(waiting)

    def stop(self) -> None:
        self._stopping = True

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        if self._running:
            raise RuntimeError("a loop that is running cannot be closed")
        self._closed = True
        self._ready.clear()
        self._timers.clear()

    async def shutdown_asyncgens(self) -> None:
        """Nothing to do: generators are closed by those who use them."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Nothing to do: there are no threads."""

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("Event loop is closed")

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.failures.append(context)


def run_virtually(main: Coroutine[Any, Any, _T], *, seed: int | None = None, limit_s: float = math.inf) -> _T:
    """Run ``main`` on a new :class:`VirtualLoop`; tasks it leaves behind are cancelled.

    Raises:
        SimulationDeadlock: nothing could happen any more.
        BaseException: what ``main`` raised, or else the first error of a callback that nobody took.
    """
    loop = VirtualLoop(seed, limit_s=limit_s)
    try:
        result = loop.run_until_complete(main)
        loop._abandon(loop.create_future())  # noqa: SLF001  the other half of this module
    finally:
        loop.close()
    for context in loop.failures:
        error = context.get("exception")
        raise error if isinstance(error, BaseException) else RuntimeError(str(context.get("message")))
    return result


def _place(task: asyncio.Task[Any]) -> str:
    """Where a task waits: the innermost of its own frames."""
    frames = task.get_stack()
    if not frames:
        return "no frame"
    innermost: Any = task.get_coro()
    code, line = frames[-1].f_code, frames[-1].f_lineno
    while (inner := getattr(innermost, "cr_await", None)) is not None and hasattr(inner, "cr_frame"):
        innermost = inner
        if inner.cr_frame is not None:
            code, line = inner.cr_frame.f_code, inner.cr_frame.f_lineno
    return f"{code.co_qualname} (line {line})"
