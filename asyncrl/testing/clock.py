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
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple, cast

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


class SimulationDeadlock(AssertionError):
    """Every task waits, and no timer is set (or only beyond the limit): nothing can happen any more."""


class _Task(asyncio.Task[Any]):
    """A task that sorts into sets by its number, not by its address: sets of tasks have one order in every run."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class _Timer(asyncio.TimerHandle):
    """A timer with a place among those that are due at the same time."""

    _scheduled: bool  # of asyncio.TimerHandle
    place: tuple[float, int]

    def __lt__(self, other: Any) -> bool:  # a _Timer, as all of this loop are
        return (self.when(), self.place) < (other.when(), other.place)


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs callbacks in the order in which they became ready; when none is, the clock jumps to the earliest timer.

    The seed decides the order of timers that are due at the same time, on which no program may rely; None keeps the
    order they were set in. Everything else is fixed, so a run depends on the program and the seed alone. The loop has
    no threads, sockets or signals; ``run_in_executor`` calls its function at once, in no time. A program that runs
    until ``limit_s`` is taken to run forever.

    Raises:
        SimulationDeadlock: from :meth:`run_until_complete`, naming the tasks that wait.
    """

    # Of asyncio.BaseEventLoop, which is made to be derived from and leaves them unannotated.
    _ready: deque[asyncio.Handle]
    _scheduled: list[_Timer]
    _run_once: Callable[[], None]
    _check_closed: Callable[[], None]

    def __init__(self, seed: int | None = None, *, limit_s: float = math.inf) -> None:
        super().__init__()
        self._limit_s = limit_s
        self._now_s = 0.0
        self._selector = self  # BaseEventLoop waits by select()
        self._numbers = itertools.count()
        self._dice = None if seed is None else random.Random(seed)  # noqa: S311  reproducible, not secret
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self.failures: list[dict[str, Any]] = []
        """Contexts of unhandled errors; :func:`run_virtually` raises the first."""

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now_s

    def select(self, timeout: float | None) -> tuple[()]:
        """Jump to the earliest timer if the loop would wait."""
        if timeout is None or (timeout > 0 and self._scheduled[0].when() > self._limit_s):
            raise SimulationDeadlock(self._waiting_tasks())
        if timeout > 0:
            self._now_s = self._scheduled[0].when()
            self._clock_resolution = math.ulp(self._now_s)  # timers of this very moment are due, and no others
        return ()

    def _process_events(self, events: tuple[()]) -> None:
        """Do nothing: the loop has no files."""

    def _write_to_self(self) -> None:
        """Do nothing: the loop is never woken by another thread."""

    def call_at(
        self, when: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        self._check_closed()
        timer = _Timer(when, callback, args, self, context)
        timer.place = (self._dice.random() if self._dice is not None else 0.0, next(self._numbers))
        timer._scheduled = True  # noqa: SLF001  as BaseEventLoop.call_at does, for timers that are cancelled
        heapq.heappush(self._scheduled, timer)
        return timer

    def create_task(
        self,
        coro: Generator[Any, None, _T] | Coroutine[Any, Any, _T],
        *,
        name: object = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[_T]:
        self._check_closed()
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
        except Exception as error:  # noqa: BLE001  raised where the future is awaited
            future.set_exception(error)
        return future

    def run_until_complete(self, future: Generator[Any, None, _T] | Awaitable[_T]) -> _T:
        try:
            return super().run_until_complete(future)
        except SimulationDeadlock:
            self._abandon()
            raise

    def _abandon(self) -> None:
        """Cancel every task, so that what they hold is closed."""
        for task in list(self._tasks):
            task.cancel()
        while self._ready:
            self._run_once()

    def _waiting_tasks(self) -> str:
        waiting = [f"{task.get_name()} in {_place(task)}" for task in self._tasks if not task.done()]
        what = "no timer is set" if not self._scheduled else f"it was to be over by {self._limit_s:g} s"
        return f"at {self._now_s:g} s every task waits and {what}: " + "; ".join(waiting)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.failures.append(context)


def run_virtually(main: Coroutine[Any, Any, _T], *, seed: int | None = None, limit_s: float = math.inf) -> _T:
    """Run ``main`` on a new :class:`VirtualLoop`; tasks it leaves behind are cancelled.

    Raises:
        SimulationDeadlock: nothing could happen any more.
        BaseException: what ``main`` raised, or else the first unhandled error of a callback.
    """
    loop = VirtualLoop(seed, limit_s=limit_s)
    try:
        result = loop.run_until_complete(main)
        loop._abandon()  # noqa: SLF001  the other half of this module
    finally:
        loop.close()
    for context in loop.failures:
        error = context.get("exception")
        raise error if isinstance(error, BaseException) else RuntimeError(str(context.get("message")))
    return result


def _place(task: asyncio.Task[Any]) -> str:
    """Return where a task waits: the innermost of its own frames."""
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
