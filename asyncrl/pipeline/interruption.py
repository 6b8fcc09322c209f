"""Running a coroutine to its end, or until a signal asks it to stop; either way its cleanup runs."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, Generic, TypeVar

from asyncrl.errors import AsyncRLError

__all__ = ["Terminated", "first_cause", "run_to_end"]

_T = TypeVar("_T")


class Terminated(SystemExit):
    """SIGTERM arrived; everything was cleaned up. Exit status 143, as a shell expects."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


def run_to_end(main: Coroutine[Any, Any, _T]) -> _T:
    """Run ``main`` on an event loop of its own (uvloop where it is installed), blocking until it ends.

    The first SIGINT or SIGTERM cancels ``main``, whose cleanup runs; a second SIGINT interrupts the cleanup. Inside a
    running event loop, as in a notebook, the new loop runs in a thread; interrupting the cell cancels ``main`` too.

    Raises:
        KeyboardInterrupt: after SIGINT.
        Terminated: after SIGTERM.
        BaseException: what ended ``main``; of a group of errors the one that came first and has a name.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(_Guarded(main))
    return _run_beside(_Guarded(main))


class _Guarded(Generic[_T]):
    """A coroutine that can be cancelled from outside, and remembers why."""

    def __init__(self, main: Coroutine[Any, Any, _T]) -> None:
        self._main = main
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[_T] | None = None
        self._lock = threading.Lock()
        self._cancelled = False
        self.terminated = False

    async def __call__(self) -> _T:
        with self._lock:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            if self._cancelled:
                self._main.close()
                raise asyncio.CancelledError
        if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
            return await self._main
        before = signal.getsignal(signal.SIGTERM)
        self._loop.add_signal_handler(signal.SIGTERM, self._terminate)
        try:
            return await self._main
        finally:  # uvloop leaves its handler in place, and the signal would be lost from here on
            self._loop.remove_signal_handler(signal.SIGTERM)
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)

    def _terminate(self) -> None:
        self.terminated = True
        assert self._task is not None
        self._task.cancel()

    def cancel(self) -> None:
        """From any thread, before it runs or while it does."""
        with self._lock:
            self._cancelled = True
            if self._loop is not None and self._task is not None:
                self._loop.call_soon_threadsafe(self._task.cancel)


def _run(guarded: _Guarded[_T]) -> _T:
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        try:
            return runner.run(guarded())
        except asyncio.CancelledError:
            if guarded.terminated:
                raise Terminated from None
            raise
        except BaseExceptionGroup as group:
            first = first_cause(group)
            raise first from first.__cause__ or group  # its own cause says more than what else ended


def _run_beside(guarded: _Guarded[_T]) -> _T:
    """In a thread, while this one waits. A first interrupt is a call, not an exception, until the thread has ended.

    As an exception it may come at any line, also between the start of the thread and knowing of it; nobody would wait
    for the cleanup then.
    """
    interrupts = 0

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        interrupts += 1
        if interrupts > 1:
            raise KeyboardInterrupt
        guarded.cancel()

    takes_signals = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, interrupt) if takes_signals else None
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="asyncrl-run") as threads:
            return threads.submit(_run, guarded).result()
    except asyncio.CancelledError:
        if interrupts:
            raise KeyboardInterrupt from None
        raise
    finally:
        if takes_signals:
            signal.signal(signal.SIGINT, before or signal.SIG_DFL)


def first_cause(error: BaseException) -> BaseException:
    """The error to name: of a group the first of asyncrl's own errors, else the first of all."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [first_cause(leaf) for leaf in error.exceptions]
    return next((leaf for leaf in leaves if isinstance(leaf, AsyncRLError)), leaves[0])


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
