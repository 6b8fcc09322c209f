"""The outcome of something that is still going on: set once, read from any thread and any event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Generic, Literal, TypeVar

from asyncrl.errors import GroupClosedError

__all__ = ["Outcome"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Outcome(Generic[T]):
    """Pending, then done, failed or cancelled, for good. Every method may be called from any thread.

    A failure that nobody has asked for by the time the outcome is garbage collected is logged in one line.
    """

    __slots__ = ("_callbacks", "_error", "_lock", "_seen", "_state", "_traceback", "_value", "label")

    def __init__(self, label: str) -> None:
        self.label = label
        self._lock = threading.Lock()
        self._state: Literal["pending", "done", "failed", "cancelled"] = "pending"
        self._value: T
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._callbacks: dict[object, Callable[[], object]] | None = None
        self._seen = False

    @property
    def state(self) -> Literal["pending", "done", "failed", "cancelled"]:
        return self._state

    @property
    def status(self) -> str:
        """The state, and the class of the error if it failed; looking at it is not asking for the error."""
        return self._state if self._error is None else f"failed: {type(self._error).__name__}"

    @property
    def complete(self) -> bool:
        return self._state != "pending"

    def succeed(self, value: T) -> bool:
        """False if it was complete already."""
        with self._lock:
            if self.complete:
                return False
            self._value = value
            self._state = "done"
        self._wake()
        return True

    def fail(self, error: BaseException) -> bool:
        """False if it was complete already."""
        with self._lock:
            if self.complete:
                return False
            self._error, self._traceback = error, error.__traceback__
            self._state = "failed"
        self._wake()
        return True

    def cancel(self) -> bool:
        """False if it was complete already."""
        with self._lock:
            if self.complete:
                return False
            self._state = "cancelled"
        self._wake()
        return True

    def settle(self, task: asyncio.Task[T]) -> None:
        """Take over how ``task`` ended."""
        if task.cancelled():
            self.cancel()
        elif (error := task.exception()) is not None:
            self.fail(error)
        else:
            self.succeed(task.result())

    def get(self) -> T:
        """The value.

        Raises:
            CancelledError: it was cancelled.
            BaseException: whatever it failed with.
        """
        if self._state == "done":
            return self._value
        if self._state == "cancelled":
            raise concurrent.futures.CancelledError(f"{self.label} was cancelled")
        error = self.error()
        if error is None:
            raise RuntimeError(f"{self.label} is not finished")
        # Each reader sees the way to the failure, not the readers before it.
        raise error.with_traceback(self._traceback)

    def error(self) -> BaseException | None:
        """What it failed with, if it did."""
        self._seen = True
        return self._error

    def subscribe(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call ``callback`` once when complete (now, if it is), in whatever thread that happens.

        Returns:
            A function that takes the subscription back.
        """
        key = object()
        with self._lock:
            waiting = not self.complete
            if waiting:
                self._callbacks = self._callbacks or {}
                self._callbacks[key] = callback
        if not waiting:
            callback()

        def unsubscribe() -> None:
            with self._lock:
                if self._callbacks:
                    self._callbacks.pop(key, None)

        return unsubscribe

    def wait(self, timeout_s: float | None) -> bool:
        """Block the thread until complete; False if ``timeout_s`` passed first."""
        if self.complete:
            return True
        event = threading.Event()
        unsubscribe = self.subscribe(event.set)
        try:
            return event.wait(timeout_s)
        finally:
            unsubscribe()

    async def completion(self) -> None:
        """Wait in the running event loop. Returns without suspending if complete. Cancelling it changes nothing."""
        if self.complete:
            return
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def finish() -> None:
            if not waiter.done():
                waiter.set_result(None)

        def wake() -> None:
            # A closed loop has nobody left who waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(finish)

        unsubscribe = self.subscribe(wake)
        try:
            await waiter
        finally:
            unsubscribe()

    def _wake(self) -> None:
        with self._lock:
            callbacks, self._callbacks = list((self._callbacks or {}).values()), None
        for callback in callbacks:
            callback()

    def __del__(self) -> None:
        if getattr(self, "_state", "") == "failed" and not self._seen:
            error = self._error
            if isinstance(error, GroupClosedError):
                return  # whoever shut the group down left this call behind on purpose
            first_line = (str(error).splitlines() or [""])[0]
            logger.error("%s failed and nobody looked: %s: %s", self.label, type(error).__name__, first_line)
