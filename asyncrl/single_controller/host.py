"""What runs calls inside a worker's process, whatever the backend.

A worker process loads this module first; torch is loaded with the first batch that arrives, or by the worker's class.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from asyncrl.errors import GroupClosedError
from asyncrl.single_controller import plain_calls
from asyncrl.single_controller.call import Arguments, Call, Cancelled, Failed, Reply, StoredValue
from asyncrl.single_controller.decorator import registration_of
from asyncrl.single_controller.plain_calls import PlainCalls, without_exit
from asyncrl.single_controller.shapes import shapes_of
from asyncrl.single_controller.worker import WorkerContext, constructing

if TYPE_CHECKING:
    from asyncrl.data.future import DataProtoFuture
    from asyncrl.data.plan import Plan
    from asyncrl.single_controller.controller_loop import ControllerLoop

__all__ = ["WorkerHost"]


_NO_MORE: Any = object()
_HIDDEN = (__file__, plain_calls.__file__)
"""Frames of these files are not the user's."""

EPOCH_BITS = 40
"""Of a call's number: the rest tells which of the programs that a worker served one after another has sent it."""


class WorkerHost:
    """Holds one worker and runs its calls, on one event loop.

    Calls begin in the order of their numbers, however they arrive. Plain methods then run one after another in a
    thread of their own; the batches of the next one are fetched while one runs. Calls of ``async def`` methods run
    side by side on the loop.

    Args:
        inline: run plain methods on the loop itself, and no thread at all: deterministic, and blocking the loop.
    """

    def __init__(self, *, inline: bool = False) -> None:
        self._worker: Any = None
        self._inline = inline
        self._loop: ControllerLoop | None = None
        self._plain = PlainCalls(inline=inline)
        self._traits: dict[str, _Trait] = {}
        self._next = 0
        self._arrived: dict[int, asyncio.Future[None]] = {}
        self._running: dict[int, asyncio.Task[Any]] = {}
        self._cancelled: set[int] = set()
        self._skipped: set[int] = set()

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

        result = await self._outcome(self._plain.run(make))
        if isinstance(result, Failed):
            return result
        self._worker = result
        return None

    async def call(self, call: Call, sequence: int | None) -> Reply:
        """Run a call when it is its turn, and tell what became of it. Never raises.

        ``sequence`` numbers the calls to this worker, from 0 and without gaps. None is the next number: of a call that
        was made when no other was under way.
        """
        if sequence is None:
            sequence = self._next
        if sequence != self._next:
            try:
                await self._turn(sequence)
            except GroupClosedError as error:
                return Failed.of(error, hidden=_HIDDEN, arguments=shapes_of(call.arguments))
        self._advance()
        if sequence in self._cancelled:
            self._cancelled.discard(sequence)
            return Cancelled()
        task = asyncio.current_task()
        assert task is not None
        self._running[sequence] = task
        try:
            return await self._perform(call)
        except asyncio.CancelledError:
            return Cancelled()
        except BaseException as error:  # noqa: BLE001  whatever it is, it is what the call failed with
            return Failed.of(error, hidden=_HIDDEN, arguments=shapes_of(call.arguments))
        finally:
            del self._running[sequence]

    async def stream(self, call: Call, sequence: int) -> AsyncGenerator[Reply, None]:
        """The items of a generator method when it is its turn; if it fails, how is the last one."""
        try:
            if sequence != self._next:
                await self._turn(sequence)
            self._advance()
            arguments = await self._materialized(call)
            method = getattr(self._worker, call.method)
            trait = self._traits.get(call.method) or self._traits.setdefault(call.method, _Trait.of(method))
            items = method(*arguments.args, **arguments.kwargs)
            del arguments
            if hasattr(items, "__anext__"):
                async with trait.limit or contextlib.nullcontext():
                    try:
                        while (item := await without_exit(anext(items, _NO_MORE))) is not _NO_MORE:
                            yield item
                    finally:
                        await without_exit(items.aclose())
                return
            async with self._plain.place(trait.priority) as place:
                await place.first()
                try:
                    while (item := await self._plain.run(functools.partial(next, items, _NO_MORE))) is not _NO_MORE:
                        yield item
                finally:
                    await self._plain.run(items.close)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            yield Cancelled()
        except Exception as error:  # noqa: BLE001  whatever it is, it is what the call failed with
            yield Failed.of(error, hidden=_HIDDEN, arguments=shapes_of(call.arguments))

    def cancel(self, sequence: int) -> None:
        """Cancel a call that runs or is still to arrive."""
        task = self._running.get(sequence)
        if task is not None:
            task.cancel()
        elif sequence >= self._next:
            self._cancelled.add(sequence)

    def skip(self, sequence: int) -> None:
        """A call of this number never arrives."""
        if sequence < self._next:
            return
        if sequence == self._next:
            self._advance()
        else:
            self._skipped.add(sequence)

    def begin_at(self, sequence: int) -> None:
        """Calls to this worker are numbered from ``sequence``: earlier ones were another's."""
        self._next = sequence - 1
        self._advance()

    def take_over(self) -> int:
        """The calls of another program come from now on; the number of the first one.

        Those of the program before that have not begun are refused, as are its later ones.
        """
        self._next = ((self._next >> EPOCH_BITS) + 1) << EPOCH_BITS
        self._skipped.clear()
        self._cancelled.clear()
        waiting, self._arrived = self._arrived, {}
        for waiter in waiting.values():
            waiter.set_result(None)
        return self._next

    async def prepare(self, method: str) -> Failed | None:
        """Run a method without arguments that is no call of the group's."""
        function = getattr(self._worker, method)
        coroutine = function() if inspect.iscoroutinefunction(function) else self._plain.run(function)
        result = await self._outcome(coroutine)
        return result if isinstance(result, Failed) else None

    async def close(self) -> Failed | None:
        """Cancel running calls and let the worker close itself (``aclose`` or ``close``, if it has one)."""
        for task in list(self._running.values()):
            task.cancel()
        result: Any = None
        if self._worker is not None:
            hook = getattr(self._worker, "aclose", None) or getattr(self._worker, "close", None)
            if hook is not None:
                result = await self._outcome(hook() if inspect.iscoroutinefunction(hook) else self._plain.run(hook))
        self.stop()
        return result if isinstance(result, Failed) else None

    def stop(self) -> None:
        """End the thread of plain methods once what runs in it has ended. From any thread."""
        self._plain.stop()

    # --------------------------------------------------------------------------------------------------------- order

    async def _turn(self, sequence: int) -> None:
        """Wait until every call before has begun."""
        if sequence > self._next:
            await self._arrived.setdefault(sequence, asyncio.get_running_loop().create_future())
        if sequence < self._next:
            raise GroupClosedError("another program has attached itself to this worker group, and calls it from now on")

    def _advance(self) -> None:
        self._next += 1
        while self._next in self._skipped:
            self._skipped.discard(self._next)
            self._next += 1
        waiter = self._arrived.pop(self._next, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # ----------------------------------------------------------------------------------------------------------- calls

    async def _perform(self, call: Call) -> Any:
        method = getattr(self._worker, call.method)
        trait = self._traits.get(call.method) or self._traits.setdefault(call.method, _Trait.of(method))
        if trait.side_by_side:
            if trait.limit is not None:
                async with trait.limit:
                    arguments = await self._materialized(call)
                    return await without_exit(method(*arguments.args, **arguments.kwargs))
            arguments = await self._materialized(call)
            return await without_exit(method(*arguments.args, **arguments.kwargs))
        async with self._plain.place(trait.priority) as place:
            await place.next()
            arguments = await self._materialized(call)
            return await place.run(functools.partial(method, *arguments.args, **arguments.kwargs))

    async def _materialized(self, call: Call) -> Arguments:
        arguments = call.arguments
        if not call.to_fetch:
            return arguments
        return Arguments(
            await self._batches(arguments.args, call),
            await self._batches(arguments.kwargs, call),
        )

    async def _batches(self, tree: Any, call: Call) -> Any:
        if type(tree) in (list, tuple):
            return type(tree)([await self._batches(each, call) for each in tree])
        if type(tree) is dict:
            entries = cast("dict[object, object]", tree)
            return {key: await self._batches(each, call) for key, each in entries.items()}
        if isinstance(tree, StoredValue):
            value = await tree.fetch()
            return value if call.read_only else _writable(value)
        from asyncrl.data.plan import Plan
        from asyncrl.data.proto import DataProto

        if isinstance(tree, Plan) and call.materialize_futures:
            return await tree.fetch(read_only=call.read_only, inline=self._inline)
        if isinstance(tree, DataProto) and not call.materialize_futures:
            tree = Plan.of(tree)
        return self._as_future(tree) if isinstance(tree, Plan) else tree

    def _as_future(self, plan: Plan) -> DataProtoFuture:
        from asyncrl.data.future import DataProtoFuture
        from asyncrl.single_controller.controller_loop import ControllerLoop

        if self._loop is None:
            self._loop = ControllerLoop.current()
        return DataProtoFuture.from_plan(plan, "argument", self._loop)

    async def _outcome(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await without_exit(coroutine)
        except Exception as error:  # noqa: BLE001  of the worker's own code, for the driver
            return Failed.of(error, hidden=_HIDDEN)


def _writable(value: Any) -> Any:
    """A batch that others read too, copied; anything else as it is."""
    module = sys.modules.get("asyncrl.data.proto")  # a worker that never sees a batch does not load torch for it
    return value.writable() if module is not None and isinstance(value, module.DataProto) else value


@dataclass(frozen=True, slots=True)
class _Trait:
    """How the calls of one method run."""

    side_by_side: bool
    limit: asyncio.Semaphore | None
    priority: int

    @staticmethod
    def of(method: Callable[..., Any]) -> _Trait:
        registration = registration_of(method)
        most = None if registration is None else registration.max_concurrency
        return _Trait(
            side_by_side=inspect.iscoroutinefunction(method),
            limit=None if most is None else asyncio.Semaphore(most),
            priority=0 if registration is None else registration.priority,
        )
