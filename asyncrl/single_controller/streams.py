"""Streams: what a generator method yields, item by item, from all ranks as they come.

    open --(all ranks are through)--> ended
      |--(a rank fails)-------------> failed: what had come is given first, then the error; the others are closed
      |--(the call is cancelled)----> cancelled: the same, with a CancelledError
      '--(the consumer leaves)------> left: the generators are closed in the workers

At most ``AHEAD`` items are made before they are asked for (and on Ray as many again wait in each worker); then the
generators stand still. Leaving is ``break`` out of ``async with``, :meth:`Stream.aclose`, :meth:`Stream.close`, or
dropping the stream.
"""

# ruff: noqa: SLF001  a group and its invocations are one machine in several files
# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast

from asyncrl.single_controller.call import NO_VALUE, Cancelled, Lost, Reply
from asyncrl.single_controller.dispatch import Execute
from asyncrl.single_controller.invocation import Invocation

if TYPE_CHECKING:
    from asyncrl.single_controller.controller_loop import ControllerLoop, Work

__all__ = ["AHEAD", "Source", "Stream", "StreamItem", "Streaming"]

T = TypeVar("T")

AHEAD = 8
"""Items that are made before they are asked for."""

_NO_MORE: Any = object()


@dataclass(frozen=True, slots=True)
class StreamItem(Generic[T]):
    """What one rank yielded.

    >>> StreamItem(rank=0, value="hi").value
    'hi'
    """

    rank: int
    value: T


class Source:
    """The items of one rank, on their way since it was made.

    Args:
        items: replies, of which one without a value is the last.
        over: called once: whether the rank is through, or is left before that.
    """

    def __init__(self, items: AsyncGenerator[Reply, None], over: Callable[[bool], object]) -> None:
        self._items = items
        self._over: Callable[[bool], object] | None = over
        self._lost: Lost | None = None
        self._asking: asyncio.Task[Any] | None = None

    async def replies(self) -> AsyncGenerator[Reply, None]:
        while (reply := self._lost or await self._next()) is not _NO_MORE:
            yield reply
        self._end(through=True)

    def lose(self, lost: Lost) -> None:
        """No item comes any more, but this reply. On the loop that asks for the items."""
        if self._lost is None:
            self._lost = lost
            if self._asking is not None:
                self._asking.cancel()

    def leave(self) -> None:
        """Nobody asks for further items; nothing, if it is over."""
        self._end(through=False)

    async def aclose(self) -> None:
        """:meth:`leave`, and close what is open here."""
        self.leave()
        await self._items.aclose()

    async def _next(self) -> Reply:
        task = self._asking = asyncio.current_task()
        assert task is not None
        reply: Reply = _NO_MORE
        try:
            reply = await anext(self._items, _NO_MORE)
        except asyncio.CancelledError:
            if self._lost is None:
                raise
        finally:
            self._asking = None
        if self._lost is None:
            return reply
        if task.uncancel():  # its consumer has left, too
            raise asyncio.CancelledError
        return self._lost

    def _end(self, *, through: bool) -> None:
        over, self._over = self._over, None
        if over is not None:
            over(through)


class Streaming(Invocation):
    """The call behind a stream: sent as any other, it has items instead of replies."""

    __slots__ = ("_changed", "_items", "_pumping", "_sources", "left")

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._items: deque[StreamItem[Any]] = deque()
        self._changed = asyncio.Event()
        self._pumping: Work | None = None
        self._sources: list[Source] = []
        self.left = False

    def send(self) -> None:
        """To all ranks in one go. Under the line's lock."""
        if self._over:
            return
        group = self._group
        arguments = self._scatter.arguments()
        self.progress.sent(len(arguments))
        for rank, each in enumerate(arguments):
            sequence = group._line.sequence(rank)
            self._sequences.append(sequence)
            self._sources.append(group._open_stream(rank, self._call_with(each), sequence))
        group._sent()
        self._mesh = self._scatter.mesh
        del self._scatter
        self._pumping = group._owner.spawn(self._pump, self._collected)
        self._abandon_if_over()

    def _abandon(self) -> None:
        if self._pumping is not None:
            self._pumping.cancel()

    def _collected(self, task: asyncio.Task[Any]) -> None:
        for source in self._sources:
            source.leave()  # a pump that is cancelled before its first step has not done so
        super()._collected(task)

    async def _pump(self) -> None:
        async with contextlib.AsyncExitStack() as closing:
            for source in self._sources:
                await closing.enter_async_context(contextlib.aclosing(source))
            pumps = [asyncio.ensure_future(self._pump_rank(rank, each)) for rank, each in enumerate(self._sources)]
            try:
                await asyncio.gather(*pumps)
            finally:
                for pump in pumps:
                    pump.cancel()
                # A generator that is at work is closed once it has heard.
                await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump_rank(self, rank: int, source: Source) -> None:
        given = self._mesh is None or rank in self._mesh.collectors
        async for reply in source.replies():
            if isinstance(reply, NO_VALUE):
                self.progress.ended(rank, "cancelled" if isinstance(reply, Cancelled) else "failed")
                raise self._error(rank, reply)
            if given:
                self._items.append(StreamItem(rank, reply))
                self._tell()
            while len(self._items) >= AHEAD:
                await self._changed.wait()
        self.progress.ended(rank, "done")

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def take(self) -> StreamItem[Any] | None:
        """An item, if there is one now. From any thread."""
        try:
            item = self._items.popleft()
        except IndexError:
            return None
        self._group._loop.notify(self._tell)
        return item

    async def arrival(self) -> None:
        """Wait until there is an item, or none will come. On the controller loop."""
        unsubscribe = self.outcome.subscribe(lambda: self._group._loop.notify(self._tell))
        try:
            while not self._items and not self.outcome.complete:
                await self._changed.wait()
        finally:
            unsubscribe()

    def leave(self) -> None:
        """Nobody wants further items. From any thread."""
        self.left = True
        self._items.clear()
        if self.outcome.cancel():
            self.cancel()

    @property
    def alone(self) -> bool:
        """Whether one rank alone runs it: then its items are plain values."""
        return self._registration.execute_mode is Execute.RANK_ZERO


class Stream(Generic[T]):
    """The items of a generator method: an iterator in any event loop, or in any thread.

    Items of ``Execute.RANK_ZERO`` methods are the values; of others, :class:`StreamItem`: those of one rank in their
    order, those of different ranks as they come.

        >>> with group.count(2) as numbers:  # `async with` and `async for` in a coroutine
        ...     sorted((item.rank, item.value) for item in numbers)
        [(0, 0), (0, 1), (1, 0), (1, 1)]

    Raises, after the items that had come before:
        AsyncRLError: what a rank failed with, as calls do.
        CancelledError: the call was cancelled, by an argument that was or by an interrupt; asyncio's in a coroutine,
            that of concurrent.futures in a thread.
        RuntimeError: the loop that it runs on has ended, or waits for itself.
    """

    def __init__(self, streaming: Streaming, loop: ControllerLoop) -> None:
        self._streaming = streaming
        self._loop = loop

    @property
    def label(self) -> str:
        """Group and method.

        >>> group.count(2).label
        'Greeter.count'
        """
        return self._streaming.outcome.label

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        while (item := self._streaming.take()) is None:
            try:
                if self._ended():
                    raise StopAsyncIteration
            except concurrent.futures.CancelledError as error:
                raise asyncio.CancelledError(str(error)) from None
            await asyncio.wrap_future(self._arrival())
        return self._value(item)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        while (item := self._streaming.take()) is None:
            if self._ended():
                raise StopIteration
            if self._loop.is_here:
                raise RuntimeError(f"{self.label} was iterated on the controller loop, which would wait for itself")
            self._arrival().result()
        return self._value(item)

    def _ended(self) -> bool:
        outcome = self._streaming.outcome
        if not outcome.complete or self._streaming._items:
            return False
        if outcome.state == "failed" or not self._streaming.left:
            outcome.get()
        return True

    def _arrival(self) -> concurrent.futures.Future[None]:
        if not self._loop.loop.is_running():
            raise RuntimeError(f"{self.label} cannot go on: the event loop it runs on is not running any more")
        return asyncio.run_coroutine_threadsafe(self._streaming.arrival(), self._loop.loop)

    def _value(self, item: StreamItem[Any]) -> T:
        return cast("T", item.value if self._streaming.alone else item)

    def close(self) -> None:
        """Leave: the generators are closed in the workers. From any thread; again is nothing.

        >>> numbers = group.count(1000)
        >>> next(numbers).value
        0
        >>> numbers.close()
        """
        self._streaming.leave()

    async def aclose(self) -> None:
        """:meth:`close`, for ``contextlib.aclosing`` and its like.

        >>> asyncio.run(group.count(1000).aclose())
        """
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Stream {self.label}: {self._streaming.outcome.status}>"
