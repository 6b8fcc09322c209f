"""Future: what a call will return."""

from __future__ import annotations

import asyncio
import concurrent.futures
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar, cast

from asyncrl.data.outcome import Outcome
from asyncrl.errors import DeadlineError
from asyncrl.single_controller.controller_loop import ControllerLoop, TaskOwner

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from asyncrl.data.progress import Progress

__all__ = ["Future"]

T = TypeVar("T")

MAX_LABEL = 200
"""Characters of a label: it grows with every operation, and a run has any number of them."""


class Maker(Protocol):
    """What makes the outcome of a future. From any thread."""

    def cancel(self) -> None:
        """End it."""

    def watch(self) -> None:
        """Somebody wants to know when it ends."""

    def wait_here(self, timeout_s: float | None) -> None:
        """This thread is going to block for it, for so long at most: help, if that is faster."""


class Future(Generic[T]):
    """What a call will return. Await it in any event loop, or call :meth:`result` in any thread.

    Futures are shared values: leaving an ``await`` early (``asyncio.wait_for``, a cancelled task) leaves the call
    going for the others who hold it; :meth:`cancel` and :meth:`deadline` end it in the workers.

        >>> greetings = group.greet("hi")
        >>> greetings.result()
        ['hi, from 0 of 2', 'hi, from 1 of 2']
    """

    is_part = False
    """Made of other futures here, not by a call."""

    def __init__(
        self,
        loop: ControllerLoop,
        label: str,
        *,
        inputs: Sequence[Future[Any]] = (),
        progress: Progress | None = None,
    ) -> None:
        self.controller = loop
        self.outcome: Outcome[Any] = Outcome(_shortened(label))
        self.begun_s = loop.now()
        self.progress = progress
        # Weakly: a future does not keep the past of its run in memory.
        self.inputs = tuple((each.outcome.label, weakref.ref(each)) for each in inputs)
        self._work: Maker | None = None

    # -------------------------------------------------------------------------------------------------- the making

    def run(self, make: Callable[[], Coroutine[Any, Any, Any]], owner: TaskOwner) -> Self:
        """Let ``owner`` run ``make()`` for this future.

        >>> async def answer():
        ...     return 42
        >>> loop = future.controller
        >>> Future(loop, "the answer").run(answer, loop.owner).result()
        42
        """
        self._work = owner.spawn(make, self.outcome.settle)
        return self

    def made_by(self, work: Maker) -> None:
        """``work`` completes the outcome; cancelling this future cancels it.

        >>> class Nothing:
        ...     def cancel(self):
        ...         print("ended")
        >>> pending = Future(future.controller, "nothing")
        >>> pending.made_by(Nothing())
        >>> pending.cancel()
        ended
        True
        """
        self._work = work

    def start(self) -> None:
        """Begin what nobody has begun yet, and see it end. Awaiting does it too.

        >>> part = future[:1]
        >>> part.start()
        """
        if self._work is not None:
            self._work.watch()

    def value_of(self, raw: Any) -> T:
        """The value that an outcome stands for. Blocks the thread while a payload moves.

        >>> future.value_of(asyncio.run(future.completed())) == data
        True
        """
        return cast("T", raw)

    async def value_of_async(self, raw: Any) -> T:
        """:meth:`value_of` without blocking the loop.

        >>> async def value():
        ...     return await future.value_of_async(await future.completed())
        >>> asyncio.run(value()) == data
        True
        """
        return cast("T", raw)

    async def completed(self) -> Any:
        """The outcome as it is, without a payload: a plan, if this is a batch. Does not suspend if it is there.

            >>> asyncio.run(future.completed()).header.rows
            3

        Raises:
            asyncio.CancelledError: the call was cancelled.
            BaseException: what the call failed with.
        """
        self.start()
        await self.outcome.completion()
        try:
            return self.outcome.get()
        except concurrent.futures.CancelledError as error:
            raise asyncio.CancelledError(str(error)) from None

    # --------------------------------------------------------------------------------------------------- the using

    def done(self) -> bool:
        """Finished, failed or cancelled. The payload of a finished batch may still be with its workers.

        >>> future.done()
        True
        """
        if not self.outcome.complete and self._work is not None:
            self._work.watch()
        return self.outcome.complete

    def cancelled(self) -> bool:
        """Whether the call was cancelled.

        >>> future.cancelled()
        False
        """
        return self.outcome.state == "cancelled"

    def cancel(self) -> bool:
        """End the call: its coroutines in the workers are cancelled, or it is never submitted.

            >>> future.cancel()  # it has finished
            False

        Returns:
            False if it had finished.
        """
        if not self.outcome.cancel():
            return False
        if self._work is not None:
            self._work.cancel()
        return True

    def result(self, timeout: float | None = None) -> T:
        """Wait for the value, blocking this thread for at most ``timeout`` seconds.

            >>> future.result(timeout=10) == data
            True

        Raises:
            DeadlineError: ``timeout`` passed; the call goes on.
            RuntimeError: called on the controller loop itself, which would wait for itself: ``await`` there.
            concurrent.futures.CancelledError: the call was cancelled.
            BaseException: what the call failed with.
            KeyboardInterrupt: after cancelling this thread's unfinished calls (in a notebook, those of the cell).
        """
        try:
            return self.value_of(self._wait(timeout))
        except KeyboardInterrupt:
            from asyncrl.single_controller.interruption import cancel_what_was_started_here

            cancel_what_was_started_here()
            raise

    def get(self, timeout: float | None = None) -> T:
        """:meth:`result`, under verl's name.

        >>> future.get() == data
        True
        """
        return self.result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the call failed with, or None. Waits like :meth:`result`.

            >>> future.exception() is None
            True
            >>> future.select(["nothing"]).exception()
            SchemaError("batch has no ['nothing']: it has ['x']")

        Raises:
            concurrent.futures.CancelledError: the call was cancelled.
            DeadlineError: ``timeout`` passed; the call goes on.
            RuntimeError: as :meth:`result`.
        """
        try:
            self._wait(timeout)
        except concurrent.futures.CancelledError:
            raise
        except BaseException:
            if self.outcome.state != "failed":
                raise
            return self.outcome.error()
        return None

    def add_done_callback(self, callback: Callable[[Self], object]) -> None:
        """Call ``callback(self)`` on the controller loop once the call has finished, failed or been cancelled.

        >>> done = threading.Event()
        >>> future.add_done_callback(lambda finished: done.set())
        >>> done.wait(10)
        True
        """
        self.start()
        self.outcome.subscribe(lambda: self.controller.notify(callback, self))

    def deadline(self, timeout_s: float) -> Self:
        """Fail with :class:`DeadlineError` and cancel the call unless it finishes within ``timeout_s`` from now.

            >>> future.deadline(10).result() == data
            True

        Returns:
            This future, so that ``await group.update(batch).deadline(30)`` reads well.

        Raises:
            ValueError: ``timeout_s`` is not positive.
        """
        if not timeout_s > 0:
            raise ValueError(f"a deadline lies ahead: got {timeout_s} s")
        self.start()
        self.controller.call(self._arm, timeout_s)
        return self

    def _arm(self, timeout_s: float) -> None:
        timer = self.controller.loop.call_later(timeout_s, self._expire, timeout_s)
        self.outcome.subscribe(lambda: self.controller.notify(timer.cancel))

    def _expire(self, timeout_s: float) -> None:
        label = self.outcome.label
        error = DeadlineError(f"{label} did not finish within {timeout_s:g} s", waiting_for=label, timeout_s=timeout_s)
        if self.outcome.fail(error) and self._work is not None:
            self._work.cancel()

    def __await__(self) -> Generator[Any, None, T]:
        return self._get_async().__await__()

    async def _get_async(self) -> T:
        return await self.value_of_async(await self.completed())

    def _wait(self, timeout_s: float | None) -> Any:
        if not self.outcome.complete and self._work is not None and not self.controller.is_here:
            self._work.wait_here(timeout_s)
        if not self.outcome.complete:
            self.start()
        if not self.outcome.complete:
            if self.controller.is_here:
                raise RuntimeError(
                    f"result() of {self.outcome.label} was called on the controller loop, which would wait for "
                    "itself: use `await future` there"
                )
            if not self.controller.loop.is_running():
                raise RuntimeError(
                    f"{self.outcome.label} cannot finish: the event loop it runs on is not running any more"
                )
            if not self.outcome.wait(timeout_s):
                raise DeadlineError(
                    f"{self.outcome.label} has not finished after {timeout_s:g} s; it goes on",
                    waiting_for=self.outcome.label,
                    timeout_s=timeout_s or 0.0,
                )
        return self.outcome.get()

    def explain(self) -> str:
        """Who makes it, from which call and inputs, how far each rank is and since when, as a tree. Waits for nothing.

        Inputs are shown while somebody holds them; whole results with bytes and, if ``meta_info`` has it, the
        ``weight_version``.

            >>> print(future.explain())
            batch: 3 rows, 48 B
        """
        from asyncrl.data.explanation import explanation_of

        return explanation_of(self).as_text()

    def _repr_html_(self) -> str:
        from asyncrl.data.explanation import explanation_of

        return explanation_of(self).as_html()

    def _status(self) -> str:
        return self.outcome.status

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.outcome.label}: {self._status()}>"

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} stays in its process: hand it to a worker group's method, or send its result")


def _shortened(label: str) -> str:
    if len(label) <= MAX_LABEL:
        return label
    return f"{label[: MAX_LABEL // 2]} ... {label[-MAX_LABEL // 2 :]}"
