"""WorkerHost: runs the calls of one worker inside its process, whatever the backend.

A worker process imports this module first; torch is loaded with the first batch that arrives, or by the worker's class.

Synchronous methods run one call after another, in one thread::

    queued --(second in the queue)--> preparing --(has its arguments)--> prepared --(first)--> running --> finished
       '----------------------------------'-----------------------------------'---(cancelled)-----------------^

If the next call is prepared when one ends, the thread runs it at once, while the event loop handles the end of the one
before. Only the call behind the running one is prepared: that bounds the memory of arguments.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import logging
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, cast

from asyncrl.errors import GroupClosedError
from asyncrl.single_controller.call import Arguments, Call, Cancelled, Failed, Reply, StoredValue, shapes_of
from asyncrl.single_controller.worker import WorkerContext, constructing

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from asyncrl.data.future import DataProtoFuture
    from asyncrl.data.plan import Plan
    from asyncrl.runtime import ControllerLoop

# ruff: noqa: SLF001  the queue and its calls work on each other's state
# pyright: reportPrivateUsage=false


# ----------------------------------------------------------------------------------------------- synchronous methods


class SyncCalls:
    """The queue of a worker's synchronous calls, and the thread that runs them.

    With ``inline`` they run on the event loop itself, without a thread: deterministic, and blocking the loop.
    """

    def __init__(self, *, inline: bool = False) -> None:
        self._thread = None if inline else ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker")
        self._lock = threading.Lock()
        self._queue: list[QueuedCall] = []

    def enqueue(self) -> QueuedCall:
        """Make the queue entry of one call."""
        return QueuedCall(self)

    async def run(self, function: Callable[[], Any]) -> Any:
        """Run a function in the thread, without an entry in the queue."""
        if self._thread is None:
            return await without_exit(_immediately(function))
        return await asyncio.get_running_loop().run_in_executor(self._thread, _in_context(function))

    def stop(self) -> None:
        """End the thread after the running call, and cancel the queued ones. From any thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _calls_ahead_of(self, call: QueuedCall) -> int:
        with self._lock:
            return self._queue.index(call)

    def _advance(self) -> None:
        """Start the first call if it is prepared, and wake the calls that may have moved. On the loop."""
        with self._lock:
            first, moved = self._started_first(), self._queue[:2]
        if first is not None:
            assert self._thread is not None
            try:
                work = self._thread.submit(self._run_calls, first)
            except RuntimeError as error:  # the thread has been stopped
                self._refuse(first, error)
            else:
                work.add_done_callback(functools.partial(self._after_thread, first))
        for call in moved:
            call.moved.set()

    def _started_first(self) -> QueuedCall | None:
        """Mark the first call as started if it is prepared and has not started, and return it. Under the lock."""
        first = self._queue[0] if self._queue else None
        if first is None or first._function is None or first._started:
            return None
        first._started = True
        return first

    def _after_thread(self, call: QueuedCall, work: Future[None]) -> None:
        if work.cancelled():  # the thread was stopped before it could run
            self._refuse(call, asyncio.CancelledError())

    def _refuse(self, call: QueuedCall, error: BaseException) -> None:
        with self._lock:
            self._queue.remove(call)
        call._finish(None, error)

    def _run_calls(self, call: QueuedCall | None) -> None:
        """Run this call, and those that are prepared after it. In the thread."""
        while call is not None:
            value, error = call._run()
            with self._lock:
                self._queue.remove(call)
                following = self._started_first()
            call._finish(value, error)
            call = following
            # Neither is kept while the next one runs, nor in the frame that a traceback refers to.
            del value, error, following


@dataclass(eq=False, slots=True)
class QueuedCall:
    """One entry of the queue, by ``async with``, on one event loop. ``moved``: its position may have changed."""

    _calls: SyncCalls
    _function: Callable[[], Any] | None = None
    _started: bool = False
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _result: asyncio.Future[Any] | None = None
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> Self:
        with self._calls._lock:
            self._calls._queue.append(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        with self._calls._lock:
            if not self._started:  # otherwise the thread removes it
                self._calls._queue.remove(self)
                self._function = None
        self._calls._advance()

    async def wait_second(self) -> None:
        """Wait until at most one call is ahead."""
        await self._wait_until_ahead(1)

    async def wait_first(self) -> None:
        await self._wait_until_ahead(0)

    async def run(self, function: Callable[[], Any]) -> Any:
        """Run the call as soon as no other is ahead."""
        if self._calls._thread is None:
            await self.wait_first()
            return await without_exit(_immediately(function))
        result = self._result = self._loop.create_future()  # before the thread can see the function
        self._function = _in_context(function)
        self._calls._advance()
        return await result

    async def _wait_until_ahead(self, most: int) -> None:
        while self._calls._calls_ahead_of(self) > most:
            self.moved.clear()
            await self.moved.wait()

    def _run(self) -> tuple[Any, BaseException | None]:
        function, self._function = self._function, None
        assert function is not None
        try:
            return function(), None
        except BaseException as error:  # noqa: BLE001  whatever it is, the call fails with it
            return None, error

    def _finish(self, value: Any, error: BaseException | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._set_result, value, error)

    def _set_result(self, value: Any, error: BaseException | None) -> None:
        result, self._result = self._result, None  # the thread keeps the first call that it runs until it ends
        assert result is not None
        if not result.done():  # it is, if the call was cancelled while it ran
            if error is None:
                result.set_result(value)
            else:
                result.set_exception(error)
        self._calls._advance()


async def _immediately(function: Callable[[], Any]) -> Any:
    return function()


async def without_exit(awaitable: Awaitable[Any]) -> Any:
    """Turn ``sys.exit()`` in a method into an error of the method: it must not end the event loop."""
    try:
        return await awaitable
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"the method raised {error!r}") from error


def _in_context(function: Callable[[], Any]) -> Callable[[], Any]:
    """Bind the function to the current context, for another thread."""
    context = contextvars.copy_context()

    def call() -> Any:
        try:
            return context.run(function)
        except (SystemExit, KeyboardInterrupt, StopIteration) as error:  # a future cannot hold StopIteration
            raise RuntimeError(f"the method raised {error!r}") from error

    return call


# ------------------------------------------------------------------------------------------------------------ the host

_END: Any = object()
_HIDDEN = (__file__,)
"""Frames of these files are left out of the tracebacks of methods."""

EPOCH_BITS = 40
"""Bits of a call's number; the higher ones number the programs that a worker has served one after another."""


class WorkerHost:
    """Holds one worker and runs its calls, on one event loop. ``inline`` is that of :class:`SyncCalls`.

    Calls start in the order of their numbers, in whatever order they arrive. Synchronous methods then run one after
    another in one thread; the batches of the next call are fetched while one runs. Calls of ``async def`` methods run
    concurrently on the loop.
    """

    def __init__(self, *, inline: bool = False) -> None:
        self._worker: Any = None
        self._inline = inline
        self._loop: ControllerLoop | None = None
        self._sync_calls = SyncCalls(inline=inline)
        self._is_async: dict[str, bool] = {}
        self._next = 0
        self._arrived: dict[int, asyncio.Future[None]] = {}
        self._running: dict[int, asyncio.Task[Any]] = {}
        self._cancelled: set[int] = set()
        self._skipped: set[int] = set()

    async def construct(
        self, worker_class: type, args: tuple[Any, ...], kwargs: dict[str, Any], context: WorkerContext
    ) -> Failed | None:
        """Construct the worker; return the failure if its ``__init__`` raises."""

        def make() -> Any:
            token = constructing.set(context)
            try:
                return worker_class(*args, **kwargs)
            finally:
                constructing.reset(token)

        result = await self._value_or_failure(self._sync_calls.run(make))
        if isinstance(result, Failed):
            return result
        self._worker = result
        return None

    async def call(self, call: Call, sequence: int | None) -> Reply:
        """Run a call after those before it have started, and return the reply. Never raises.

        ``sequence`` numbers the calls to this worker, from 0 and without gaps. None is the next number: for a call that
        was sent when no other was active.
        """
        if sequence is None:
            sequence = self._next
        if sequence != self._next:
            try:
                await self._wait_for_turn(sequence)
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
            return await self._run(call)
        except asyncio.CancelledError:
            return Cancelled()
        except BaseException as error:  # noqa: BLE001  whatever it is, the call fails with it
            return Failed.of(error, hidden=_HIDDEN, arguments=shapes_of(call.arguments))
        finally:
            del self._running[sequence]

    async def stream(self, call: Call, sequence: int) -> AsyncGenerator[Reply, None]:
        """Run a generator method, and yield its items; a failure is the last one."""
        try:
            if sequence != self._next:
                await self._wait_for_turn(sequence)
            self._advance()
            arguments = await self._materialized(call)
            items = getattr(self._worker, call.method)(*arguments.args, **arguments.kwargs)
            del arguments
            if hasattr(items, "__anext__"):
                try:
                    while (item := await without_exit(anext(items, _END))) is not _END:
                        yield item
                finally:
                    await without_exit(items.aclose())
                return
            async with self._sync_calls.enqueue() as queued:
                await queued.wait_first()
                try:
                    while (item := await self._sync_calls.run(functools.partial(next, items, _END))) is not _END:
                        yield item
                finally:
                    await self._sync_calls.run(items.close)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            yield Cancelled()
        except Exception as error:  # noqa: BLE001  whatever it is, the call fails with it
            if isinstance(error.__context__, GeneratorExit):  # nothing reads the items any more
                _log.warning("%s failed while it was closed", call.method, exc_info=error)
                return
            yield Failed.of(error, hidden=_HIDDEN, arguments=shapes_of(call.arguments))

    def cancel(self, sequence: int) -> None:
        """Cancel a call that runs or has not arrived yet."""
        task = self._running.get(sequence)
        if task is not None:
            task.cancel()
        elif sequence >= self._next:
            self._cancelled.add(sequence)

    def skip(self, sequence: int) -> None:
        """Do not wait for the call of this number, which will not arrive."""
        if sequence < self._next:
            return
        if sequence == self._next:
            self._advance()
        else:
            self._skipped.add(sequence)

    def begin_at(self, sequence: int) -> None:
        """Set the number of the first call to this worker: earlier ones were for the worker it replaces."""
        self._next = sequence - 1
        self._advance()

    def take_over(self) -> int:
        """Take the calls of another program from now on; return the number of its first one.

        Calls of the program before that have not started are refused, and so are its later ones.
        """
        self._next = ((self._next >> EPOCH_BITS) + 1) << EPOCH_BITS
        self._skipped.clear()
        self._cancelled.clear()
        waiting, self._arrived = self._arrived, {}
        for waiter in waiting.values():
            if not waiter.done():  # a stream was cancelled while it waited
                waiter.set_result(None)
        return self._next

    async def prepare(self, method: str) -> Failed | None:
        """Run a method without arguments outside of the order of calls."""
        return await self._failure(self._run_hook(getattr(self._worker, method)))

    async def close(self) -> Failed | None:
        """Cancel running calls and call the worker's ``aclose`` or ``close``, if it has one.

        Workers that share the process are closed one after the other, also after one of them has failed; those with
        ``aclose`` beside the others, which have to wait for the running method of their thread.
        """
        for task in list(self._running.values()):
            task.cancel()
        failure = await self._failure(self._close_workers())
        self.stop()
        return failure

    async def _close_workers(self) -> None:
        errors: list[Exception] = []

        async def run(hooks: list[Callable[[], Any]]) -> None:
            for hook in hooks:
                try:
                    await self._run_hook(hook)
                except Exception as error:  # noqa: BLE001  raised below, once all are closed
                    errors.append(error)

        found = [getattr(each, "aclose", None) or getattr(each, "close", None) for each in workers_of(self._worker)]
        in_loop = [hook for hook in found if inspect.iscoroutinefunction(hook)]
        await asyncio.gather(run(in_loop), run([hook for hook in found if hook is not None and hook not in in_loop]))
        if len(errors) > 1:
            raise ExceptionGroup("several workers of this process failed to close", errors)
        if errors:
            raise errors[0]

    async def _run_hook(self, hook: Callable[[], Any]) -> Any:
        return await (hook() if inspect.iscoroutinefunction(hook) else self._sync_calls.run(hook))

    async def _failure(self, coroutine: Coroutine[Any, Any, Any]) -> Failed | None:
        result = await self._value_or_failure(coroutine)
        return result if isinstance(result, Failed) else None

    def stop(self) -> None:
        """End the thread of synchronous methods after the running call. From any thread."""
        self._sync_calls.stop()

    async def _wait_for_turn(self, sequence: int) -> None:
        if sequence > self._next:
            await self._arrived.setdefault(sequence, asyncio.get_running_loop().create_future())
        if sequence < self._next:
            raise GroupClosedError("another program has attached to this worker group, which takes only its calls now")

    def _advance(self) -> None:
        self._next += 1
        while self._next in self._skipped:
            self._skipped.discard(self._next)
            self._next += 1
        waiter = self._arrived.pop(self._next, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _run(self, call: Call) -> Any:
        method = getattr(self._worker, call.method)
        is_async = self._is_async.get(call.method)
        if is_async is None:
            is_async = self._is_async[call.method] = inspect.iscoroutinefunction(method)
        if is_async:
            arguments = await self._materialized(call)
            return await without_exit(method(*arguments.args, **arguments.kwargs))
        async with self._sync_calls.enqueue() as queued:
            await queued.wait_second()
            arguments = await self._materialized(call)
            return await queued.run(functools.partial(method, *arguments.args, **arguments.kwargs))

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
        from asyncrl.runtime import ControllerLoop

        if self._loop is None:
            self._loop = ControllerLoop.current()
        return DataProtoFuture.from_plan(plan, "argument", self._loop)

    async def _value_or_failure(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await without_exit(coroutine)
        except Exception as error:  # noqa: BLE001  of the worker's own code, for the caller
            return Failed.of(error, hidden=_HIDDEN)


def workers_of(worker: Any) -> list[Any]:
    """Return the workers that are closed for this one, in order: itself, or those that it consists of."""
    declares = hasattr(worker.__class__, "_workers_to_close")  # a worker itself may answer to any name
    return worker._workers_to_close if declares else [worker]


def _writable(value: Any) -> Any:
    """Copy a batch that others read too; return anything else as it is."""
    module = sys.modules.get("asyncrl.data.proto")  # a worker without batches does not load torch
    return value.writable() if module is not None and isinstance(value, module.DataProto) else value
