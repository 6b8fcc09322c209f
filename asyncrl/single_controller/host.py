"""What runs calls inside a worker's process, whatever the backend."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import pickle
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor, thread
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self, TypeAlias

from asyncrl.data.future import DataProtoFuture
from asyncrl.data.plan import Header, Plan
from asyncrl.data.proto import DataProto
from asyncrl.errors import AsyncRLError, WorkerError
from asyncrl.single_controller.controller_loop import ControllerLoop
from asyncrl.single_controller.dispatch import Arguments, StoredValue
from asyncrl.single_controller.worker import WorkerContext, constructing

__all__ = ["Call", "Cancelled", "Failed", "Reply", "Returned", "ReturnedBatch", "WorkerHost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call on its way to one rank. ``sequence`` numbers the calls to that rank, from 0 and without gaps."""

    call_id: int
    sequence: int
    method: str
    arguments: Arguments
    materialize_futures: bool
    read_only: bool
    keep_batch: bool


@dataclass(frozen=True, slots=True)
class Returned:
    """The method returned this value."""

    value: Any


@dataclass(frozen=True, slots=True)
class ReturnedBatch:
    """The method returned a batch, which stays with its worker."""

    header: Header


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The call was cancelled before it returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The method raised.

    Between processes the exception travels as ``pickled``, so that a class that one side cannot load costs the class
    only, not the reply.
    """

    error: BaseException | None
    kind: str
    message: str
    remote_traceback: str
    pickled: bytes | None = None

    @staticmethod
    def of(error: BaseException) -> Failed:
        trace = "".join(traceback.format_exception(type(error), error, _users(error.__traceback__)))
        return Failed(error=error, kind=type(error).__qualname__, message=str(error), remote_traceback=trace)

    def portable(self) -> Failed:
        """The same for another process."""
        if self.error is None:
            return self
        try:
            data = pickle.dumps(self.error)
            pickle.loads(data)  # noqa: S301  our own, to see whether it loads
        except Exception:  # noqa: BLE001  exceptions of users fail to pickle in any way; the traceback goes as text
            return replace(self, error=None)
        return replace(self, error=None, pickled=data)

    def _original(self) -> BaseException | None:
        if self.pickled is None:
            return self.error
        try:
            error = pickle.loads(self.pickled)  # noqa: S301  from our own worker
        except Exception:  # noqa: BLE001  as above
            return None
        return error if isinstance(error, BaseException) else None

    def to_error(self, *, group: str, rank: int, method: str) -> BaseException:
        """The exception for the driver: the worker's own if asyncrl made it, else a :class:`WorkerError`."""
        original = self._original()
        if isinstance(original, AsyncRLError):
            original.add_note(f"raised by {group}.{method} on rank {rank}; traceback there:\n{self.remote_traceback}")
            return original
        error = WorkerError(
            f"{group}.{method} raised {self.kind} on rank {rank}: {self.message}\n\n"
            f"traceback on rank {rank}:\n{self.remote_traceback}",
            group=group,
            rank=rank,
            method=method,
            remote_traceback=self.remote_traceback,
        )
        error.__cause__ = original
        return error


def _users(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame on that is not this module's or the thread pool's."""
    hidden = (__file__, thread.__file__)
    first = trace
    while first is not None and first.tb_frame.f_code.co_filename in hidden:
        first = first.tb_next
    return first or trace


Reply: TypeAlias = Returned | ReturnedBatch | Cancelled | Failed


class WorkerHost:
    """Holds one worker and runs its calls, on one event loop.

    Calls begin in the order of their ``sequence``, however they arrive. Plain methods then run one after another in a
    thread of their own; the batches of the next one are fetched while one runs. Calls of ``async def`` methods run
    side by side on the loop.

    Args:
        inline: run plain methods on the loop itself, and no thread at all: deterministic, and blocking the loop.
    """

    def __init__(self, *, inline: bool = False) -> None:
        self._worker: Any = None
        self._inline = inline
        self._loop: ControllerLoop | None = None
        self._thread = None if inline else ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker")
        self._line = _Line()
        self._next = 0
        self._arrived: dict[int, asyncio.Future[None]] = {}
        self._running: dict[int, asyncio.Task[Any]] = {}
        self._cancelled: set[int] = set()

    async def construct(
        self, worker_class: type, args: tuple[Any, ...], kwargs: dict[str, Any], context: WorkerContext
    ) -> Failed | None:
        """Make the worker; the failure if its ``__init__`` raises."""

        def make() -> Any:
            token = constructing.set(context)
            try:
                return worker_class(*args, **kwargs)
            finally:
                constructing.reset(token)

        result = await self._outcome(self._run_plain(make))
        if isinstance(result, Failed):
            return result
        self._worker = result
        return None

    async def call(self, call: Call) -> tuple[Reply, DataProto | None]:
        """Run a call when it is its turn: the reply for the driver, and the batch that stays here."""
        await self._turn(call.sequence)
        if call.call_id in self._cancelled:
            self._cancelled.discard(call.call_id)
            return Cancelled(), None
        task = asyncio.get_running_loop().create_task(self._perform(call))
        self._running[call.call_id] = task
        try:
            result = await self._settled(task)
        finally:
            del self._running[call.call_id]
        if isinstance(result, DataProto) and call.keep_batch:
            return ReturnedBatch(Header.of(result)), result
        return (result if isinstance(result, Failed | Cancelled) else Returned(result)), None

    def cancel(self, call_id: int, sequence: int) -> None:
        """Cancel a call that runs or is still to arrive."""
        task = self._running.get(call_id)
        if task is not None:
            task.cancel()
        elif sequence >= self._next:
            self._cancelled.add(call_id)

    def skip(self, sequence: int) -> None:
        """A call of this number never arrives."""
        if sequence < self._next:
            return
        if sequence == self._next:
            self._advance()
        else:
            waiter = self._arrived.setdefault(sequence, asyncio.get_running_loop().create_future())
            waiter.add_done_callback(lambda _: self._advance())

    async def close(self) -> Failed | None:
        """Cancel running calls and let the worker close itself (``aclose`` or ``close``, if it has one)."""
        for task in self._running.values():
            task.cancel()
        result: Any = None
        if self._worker is not None:
            hook = getattr(self._worker, "aclose", None) or getattr(self._worker, "close", None)
            if hook is not None:
                result = await self._outcome(hook() if inspect.iscoroutinefunction(hook) else self._run_plain(hook))
        self.stop()
        return result if isinstance(result, Failed) else None

    def stop(self) -> None:
        """End the thread of plain methods once what runs in it has ended. From any thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    # --------------------------------------------------------------------------------------------------------- order

    async def _turn(self, sequence: int) -> None:
        if sequence != self._next:
            waiter = self._arrived.setdefault(sequence, asyncio.get_running_loop().create_future())
            await waiter
        self._advance()

    def _advance(self) -> None:
        self._next += 1
        waiter = self._arrived.pop(self._next, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # ----------------------------------------------------------------------------------------------------------- calls

    async def _perform(self, call: Call) -> Any:
        method = getattr(self._worker, call.method)
        if inspect.iscoroutinefunction(method):
            arguments = await self._materialized(call)
            return await _leaving(method(*arguments.args, **arguments.kwargs))
        async with self._line.place() as place:
            await place.next()
            arguments = await self._materialized(call)
            await place.first()
            return await self._run_plain(functools.partial(method, *arguments.args, **arguments.kwargs))

    async def _materialized(self, call: Call) -> Arguments:
        arguments = call.arguments
        return Arguments(
            await self._batches(arguments.args, call),
            await self._batches(arguments.kwargs, call),
        )

    async def _batches(self, tree: Any, call: Call) -> Any:
        if type(tree) in (list, tuple):
            return type(tree)([await self._batches(each, call) for each in tree])
        if type(tree) is dict:
            return {key: await self._batches(each, call) for key, each in tree.items()}
        if isinstance(tree, StoredValue):
            return await tree.fetch()
        if not isinstance(tree, Plan):
            return tree
        if call.materialize_futures:
            return await tree.fetch(read_only=call.read_only, inline=self._inline)
        if self._loop is None:
            self._loop = ControllerLoop.current()
        return DataProtoFuture.from_plan(tree, "argument", self._loop)

    async def _run_plain(self, function: Callable[[], Any]) -> Any:
        if self._thread is None:
            return await _leaving(_immediately(function))
        context = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: context.run(_without_exit, function))

    async def _outcome(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return await self._settled(asyncio.get_running_loop().create_task(coroutine))

    async def _settled(self, task: asyncio.Task[Any]) -> Any:
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            raise
        if task.cancelled():
            return Cancelled()
        error = task.exception()
        return task.result() if error is None else Failed.of(error)


class _Line:
    """Plain calls standing in line. The one behind the first may get ready, no other: that bounds what is held."""

    def __init__(self) -> None:
        self._places: list[_Place] = []

    def place(self) -> _Place:
        return _Place(self._places)


class _Place:
    def __init__(self, places: list[_Place]) -> None:
        self._places = places
        self.moved = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._places.append(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._places.remove(self)
        for place in self._places[:2]:
            place.moved.set()

    async def next(self) -> None:
        """Wait until at most one call is ahead."""
        await self._ahead(1)

    async def first(self) -> None:
        """Wait until no call is ahead."""
        await self._ahead(0)

    async def _ahead(self, most: int) -> None:
        while self._places.index(self) > most:
            self.moved.clear()
            await self.moved.wait()


async def _immediately(function: Callable[[], Any]) -> Any:
    return function()


async def _leaving(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """``sys.exit()`` in a method ends the method with an error, not the event loop that runs it."""
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"the method raised {error!r}") from error


def _without_exit(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"the method raised {error!r}") from error
