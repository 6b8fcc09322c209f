"""Streams: the items of a generator method, from all ranks as they arrive.

    open --(all ranks have ended)-----> ended
      |--(a rank fails)---------------> failed: the items received before come first, then the error; other ranks close
      |--(the call is cancelled)------> cancelled: the same, with a CancelledError
      '--(the consumer closes it)-----> closed: the generators are closed in the workers

At most ``PREFETCH`` items are produced before they are consumed (on Ray as many again wait in each worker); then the
generators pause. A consumer closes a stream with ``break`` out of ``async with``, :meth:`Stream.aclose`,
:meth:`Stream.close`, or by dropping it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from asyncrl.single_controller.call import NO_VALUE, AttemptLost, Cancelled, Reply
from asyncrl.single_controller.decorator import Execute
from asyncrl.single_controller.invocation import Invocation

if TYPE_CHECKING:
    from asyncrl.runtime import ControllerLoop, Work

# ruff: noqa: SLF001  a group and its invocations work on each other's state
# pyright: reportPrivateUsage=false

T = TypeVar("T")

PREFETCH = 8
"""Items that are produced before they are consumed."""

_END: Any = object()


@dataclass(frozen=True, slots=True)
class StreamItem(Generic[T]):
    """One item, with the rank that yielded it."""

    rank: int
    value: T


class RankStream:
    """The replies of one rank to a call of a generator method. A reply without a value is the last.

    ``on_end`` is called once, with True if the rank has ended the stream, and False if the consumer has.
    """

    def __init__(self, items: AsyncGenerator[Reply, None], on_end: Callable[[bool], object]) -> None:
        self._items = items
        self._on_end: Callable[[bool], object] | None = on_end
        self._lost: AttemptLost | None = None
        self._waiting: asyncio.Task[Any] | None = None

    async def replies(self) -> AsyncGenerator[Reply, None]:
        while (reply := self._lost or await self._next()) is not _END:
            yield reply
        self._end(by_rank=True)

    def lose(self, lost: AttemptLost) -> None:
        """Make this the only further reply: the worker is lost. On the loop that consumes the replies."""
        if self._lost is None:
            self._lost = lost
            if self._waiting is not None:
                self._waiting.cancel()

    def leave(self) -> None:
        """Stop consuming. Idempotent."""
        self._end(by_rank=False)

    async def aclose(self) -> None:
        """:meth:`leave`, and close the generator in this process."""
        self.leave()
        await self._items.aclose()

    async def _next(self) -> Reply:
        task = self._waiting = asyncio.current_task()
        assert task is not None
        reply: Reply = _END
        try:
            reply = await anext(self._items, _END)
        except asyncio.CancelledError:
            if self._lost is None:
                raise
        finally:
            self._waiting = None
        if self._lost is None:
            return reply
        if task.uncancel():  # the consumer was cancelled, too
            raise asyncio.CancelledError
        return self._lost

    def _end(self, *, by_rank: bool) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(by_rank)


class StreamInvocation(Invocation):
    """The call behind a stream: sent like any other, it receives items instead of one reply for each rank."""

    __slots__ = ("_changed", "_items", "_pumping", "_ranks", "closed_by_consumer")

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._items: deque[StreamItem[Any]] = deque()
        self._changed = asyncio.Event()
        self._pumping: Work | None = None
        self._ranks: list[RankStream] = []
        self.closed_by_consumer = False

    def send(self) -> None:
        if self._finished:
            return
        group = self._group
        arguments = self._scatter.arguments()
        self.progress.sent(len(arguments))
        try:
            for rank, each in enumerate(arguments):
                sequence = group._order.take_sequence(rank)
                self._sequences.append(sequence)
                try:
                    stream = group._open_stream(rank, self._call_with(each), sequence)
                except BaseException:
                    group._skip(rank, sequence)
                    raise
                self._ranks.append(stream)
        except BaseException:
            for stream in self._ranks:
                stream.leave()
            raise
        group._sent()
        self._mesh = self._scatter.mesh
        del self._scatter
        self._pumping = group._owner.spawn(self._pump, self._after_pump)
        self._cancel_if_finished()

    def _cancel_ranks(self) -> None:
        if self._pumping is not None:
            self._pumping.cancel()

    def _after_pump(self, task: asyncio.Task[Any]) -> None:
        for stream in self._ranks:
            stream.leave()  # a pump that is cancelled before its first step has not done so
        self._after_task(task)

    async def _pump(self) -> None:
        async with contextlib.AsyncExitStack() as closing:
            for stream in self._ranks:
                await closing.enter_async_context(contextlib.aclosing(stream))
            pumps = [asyncio.ensure_future(self._pump_rank(rank, each)) for rank, each in enumerate(self._ranks)]
            try:
                await asyncio.gather(*pumps)
            finally:
                for pump in pumps:
                    pump.cancel()
                # A generator can be closed only when it is not running.
                await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump_rank(self, rank: int, stream: RankStream) -> None:
        collects = self._mesh is None or rank in self._mesh.collectors
        async for reply in stream.replies():
            if isinstance(reply, NO_VALUE):
                self.progress.ended(rank, "cancelled" if isinstance(reply, Cancelled) else "failed")
                raise self._error(rank, reply)
            if collects:
                self._items.append(StreamItem(rank, reply))
                self._notify()
            while len(self._items) >= PREFETCH:
                await self._changed.wait()
        self.progress.ended(rank, "done")

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def take(self) -> StreamItem[Any] | None:
        """Return an item if one has arrived. From any thread."""
        if self.closed_by_consumer:
            self._items.clear()  # one may have arrived since, until the ranks stop
        try:
            item = self._items.popleft()
        except IndexError:
            return None
        self._group._loop.notify(self._notify)
        return item

    async def arrival(self) -> None:
        """Wait until an item has arrived, or none will. On the controller loop."""
        unsubscribe = self.outcome.subscribe(lambda: self._group._loop.notify(self._notify))
        try:
            while not self._items and not self.outcome.complete:
                await self._changed.wait()
        finally:
            unsubscribe()

    def leave(self) -> None:
        """Drop the items and cancel the call. From any thread."""
        self.closed_by_consumer = True
        self._items.clear()
        if self.outcome.cancel():
            self.cancel()

    @property
    def on_one_rank(self) -> bool:
        """Whether only rank 0 runs the call: then its items are plain values."""
        return self._registration.execute_mode is Execute.RANK_ZERO


class Stream(
    Iterator[T], AsyncIterator[T], AbstractContextManager["Stream[T]"], AbstractAsyncContextManager["Stream[T]"]
):
    """The items of a generator method: an asynchronous iterator in any event loop, an iterator in any thread.

    Items of ``Execute.RANK_ZERO`` methods are the values; of others, :class:`StreamItem`: those of one rank in their
    order, those of different ranks as they arrive.

        >>> with group.count(2) as numbers:  # `async with` and `async for` in a coroutine
        ...     sorted((item.rank, item.value) for item in numbers)
        [(0, 0), (0, 1), (1, 0), (1, 1)]

    Raises, after the items that arrived before:
        AsyncRLError: the failure of a rank, as for calls.
        CancelledError: the call was cancelled, by a cancelled argument or an interrupt; asyncio's in a coroutine, that
            of concurrent.futures in a thread.
        RuntimeError: the controller loop has ended, or would wait for itself.
    """

    def __init__(self, invocation: StreamInvocation, loop: ControllerLoop) -> None:
        self._invocation = invocation
        self._loop = loop

    @property
    def label(self) -> str:
        return self._invocation.outcome.label

    async def __anext__(self) -> T:
        while (item := self._invocation.take()) is None:
            try:
                if self._ended():
                    raise StopAsyncIteration
            except concurrent.futures.CancelledError as error:
                raise asyncio.CancelledError(str(error)) from None
            await asyncio.wrap_future(self._arrival())
        return self._value(item)

    def __next__(self) -> T:
        while (item := self._invocation.take()) is None:
            if self._ended():
                raise StopIteration
            if self._loop.is_here:
                raise RuntimeError(
                    f"{self.label} was iterated on the controller loop, which would wait for itself: "
                    "use `async for` there"
                )
            self._arrival().result()
        return self._value(item)

    def _ended(self) -> bool:
        outcome = self._invocation.outcome
        if not outcome.complete or self._invocation._items:
            return False
        if outcome.state == "failed" or not self._invocation.closed_by_consumer:
            outcome.get()
        return True

    def _arrival(self) -> concurrent.futures.Future[None]:
        if not self._loop.loop.is_running():
            raise RuntimeError(f"{self.label} cannot continue: its event loop has ended")
        return asyncio.run_coroutine_threadsafe(self._invocation.arrival(), self._loop.loop)

    def _value(self, item: StreamItem[Any]) -> T:
        return cast("T", item.value if self._invocation.on_one_rank else item)

    def close(self) -> None:
        """Close the generators in the workers, and drop the items. From any thread. Idempotent."""
        self._invocation.leave()

    async def aclose(self) -> None:
        """:meth:`close`, for ``contextlib.aclosing``."""
        self.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Stream {self.label}: {self._invocation.outcome.status}>"
