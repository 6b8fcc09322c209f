"""Futures: the result of a call that may still be running, as a value that can be shared, cut, joined and passed on.

From :class:`Outcome` (set once, readable from any thread and event loop) and :class:`Progress` (how far the ranks of a
call are) to :class:`Future`, :class:`DataProtoFuture` (a future batch, whose payload stays with its workers), and
:func:`gather` and :func:`as_completed` for several futures at once.
"""

from __future__ import annotations

import asyncio
import builtins
import concurrent.futures
import contextlib
import functools
import html
import logging
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, Protocol, Self, TypeAlias, TypeVar, cast

from asyncrl.errors import DeadlineError, GroupClosedError, SchemaError
from asyncrl.runtime import ControllerLoop, TaskOwner, cancel_calls_of_this_thread

if TYPE_CHECKING:
    from collections.abc import Coroutine

    import numpy as np
    import torch

    from asyncrl.data.plan import Header, Plan
    from asyncrl.data.proto import DataProto
    from asyncrl.data.schema import Declared, Schema

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_LABEL = 200
"""Characters of a label: it grows with every operation, and a run has any number of them."""


def _call_on(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: Any) -> Callable[[], None]:
    """Return a callback for any thread that calls ``function`` on ``loop``, unless the loop is closed by then."""

    def callback() -> None:
        # Nothing waits on a closed loop any more.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(function, *arguments)

    return callback


# ------------------------------------------------------------------------------------------------------------- outcomes

OutcomeState: TypeAlias = Literal["pending", "done", "failed", "cancelled"]


class Outcome(Generic[T]):
    """Pending, then done, failed or cancelled, for good. Every method may be called from any thread.

    A failure whose error was not retrieved by the time the outcome is garbage collected is logged in one line.
    """

    __slots__ = ("_callbacks", "_error", "_lock", "_retrieved", "_state", "_traceback", "_value", "label")

    def __init__(self, label: str) -> None:
        self.label = label
        self._lock = threading.Lock()
        self._state: OutcomeState = "pending"
        self._value: T
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._callbacks: dict[object, Callable[[], object]] | None = None
        self._retrieved = False

    @property
    def state(self) -> OutcomeState:
        return self._state

    @property
    def status(self) -> str:
        """The state, and the class of the error if it failed; reading this does not count as retrieving the error."""
        return self._state if self._error is None else f"failed: {type(self._error).__name__}"

    @property
    def complete(self) -> bool:
        return self._state != "pending"

    def succeed(self, value: T) -> bool:
        """Set the value; return False if the outcome was complete already. So do :meth:`fail` and :meth:`cancel`."""
        return self._complete("done", value)

    def fail(self, error: BaseException) -> bool:
        return self._complete("failed", error)

    def cancel(self) -> bool:
        return self._complete("cancelled", None)

    def _complete(self, state: OutcomeState, result: Any) -> bool:
        with self._lock:
            if self.complete:
                return False
            if state == "failed":
                self._error, self._traceback = result, result.__traceback__
            else:
                self._value = result
            self._state = state
            callbacks, self._callbacks = self._callbacks, None
        for callback in list(callbacks.values()) if callbacks else ():
            callback()
        return True

    def settle(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.cancel()
        elif (error := task.exception()) is not None:
            self.fail(error)
        else:
            self.succeed(task.result())

    def get(self) -> T:
        """Return the value.

        Raises:
            CancelledError: it was cancelled.
            BaseException: the error that it failed with.
        """
        if self._state == "done":
            return self._value
        if self._state == "cancelled":
            raise concurrent.futures.CancelledError(f"{self.label} was cancelled")
        error = self.error()
        if error is None:
            raise RuntimeError(f"{self.label} is not finished")
        # Every reader gets the traceback of the failure, without those of the readers before it.
        raise error.with_traceback(self._traceback)

    def error(self) -> BaseException | None:
        """Return the error that it failed with, if it did, and count it as retrieved."""
        self._retrieved = True
        return self._error

    def subscribe(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call ``callback`` once when complete (now, if it is), in whatever thread that happens.

        Return a function that ends the subscription.
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
        """Block the thread until complete; return False if ``timeout_s`` passed first."""
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

        unsubscribe = self.subscribe(_call_on(loop, finish))
        try:
            await waiter
        finally:
            unsubscribe()

    def __del__(self) -> None:
        if getattr(self, "_state", "") == "failed" and not self._retrieved:
            error = self._error
            if isinstance(error, GroupClosedError):
                return  # the program shut the group down with this call unfinished, on purpose
            first_line = (str(error).splitlines() or [""])[0]
            logger.error(
                "%s failed, its error was never retrieved: %s: %s", self.label, type(error).__name__, first_line
            )


# ------------------------------------------------------------------------------------------------------------- progress

ShardState: TypeAlias = Literal["running", "done", "failed", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One rank's share of a call. ``rows``: its rows of the arguments, without padding, where they are split."""

    rank: int
    state: ShardState
    since_s: float
    rows: range | None = None
    header: Header | None = None
    took_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FinishedPart:
    """``make`` returns the plan of the call's result for ``rows`` of its arguments."""

    rows: range
    make: Callable[[], Plan]


@functools.lru_cache(maxsize=64)
def _all_running(ranks: int) -> tuple[ShardState, ...]:
    running: ShardState = "running"
    return (running,) * ranks


class Progress:
    """How far the ranks of a call are: written as replies arrive, read from any thread and any event loop.

    It holds blocks, no payload and no arguments, and is small, since a program may have any number of calls
    outstanding: the records that people read (:attr:`shards`) are made when they are read. ``now`` is the clock, in
    seconds.
    """

    __slots__ = ("_ends_s", "_finished", "_headers", "_listeners", "_lock", "_now", "_rows", "_sent_s", "_states")

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._states: list[ShardState] | tuple[ShardState, ...] = ()
        self._rows: Sequence[range | None] = ()
        self._headers: dict[int, Header] | None = None
        self._ends_s: dict[int, float] | None = None
        self._sent_s = 0.0
        self._finished: tuple[FinishedPart, ...] = ()
        self._listeners: dict[object, Callable[[], object]] | None = None

    @property
    def shards(self) -> list[Shard]:
        """By rank; empty before the call is sent."""
        with self._lock:
            return [
                Shard(
                    rank=rank,
                    state=state,
                    since_s=self._sent_s,
                    rows=self._rows[rank] if self._rows else None,
                    header=(self._headers or {}).get(rank),
                    took_s=(self._ends_s or {}).get(rank, self._sent_s) - self._sent_s,
                )
                for rank, state in enumerate(self._states)
            ]

    def sent(self, ranks: int, rows: Sequence[range] = ()) -> None:
        """Record that the call is sent to its ranks, with these rows of the arguments where they are split."""
        with self._lock:
            self._sent_s = self._now()
            self._states = _all_running(ranks)
            self._rows = rows

    def ended(
        self,
        rank: int,
        state: Literal["done", "failed", "cancelled"],
        *,
        header: Header | None = None,
        make: Callable[[], Plan] | None = None,
    ) -> None:
        """Record the reply of a rank, and the ``header`` of its batch if it returned one."""
        with self._lock:
            if isinstance(self._states, tuple):  # the one that all calls share until their first reply
                self._states = list(self._states)
            self._states[rank] = state
            self._ends_s = self._ends_s or {}
            self._ends_s[rank] = self._now()
            if header is not None:
                self._headers = self._headers or {}
                self._headers[rank] = header
            if make is not None and self._rows and (rows := self._rows[rank]):
                self._finished += (FinishedPart(rows, make),)
            listeners = list(self._listeners.values()) if self._listeners else ()
        for listener in listeners:
            listener()

    async def finished(self, outcome: Outcome[Any]) -> AsyncGenerator[FinishedPart, None]:
        """Yield the parts that hold rows, in the order in which they finish, until ``outcome`` is complete."""
        changed = asyncio.Event()
        wake = _call_on(asyncio.get_running_loop(), changed.set)
        key = object()
        with self._lock:
            self._listeners = self._listeners or {}
            self._listeners[key] = wake
        unsubscribe = outcome.subscribe(wake)
        yielded = 0
        try:
            while True:
                changed.clear()
                complete = outcome.complete
                while yielded < len(self._finished):
                    yielded += 1
                    yield self._finished[yielded - 1]
                if complete:
                    return
                await changed.wait()
        finally:
            unsubscribe()
            with self._lock:
                del self._listeners[key]


# -------------------------------------------------------------------------------------------------------------- futures


class Maker(Protocol):
    """The work that completes a future. All methods may be called from any thread."""

    def cancel(self) -> None:
        """End the work."""

    def watch(self) -> None:
        """Notice the end of the work from now on. Idempotent."""

    def wait_here(self, timeout_s: float | None) -> None:
        """Help to complete the work in this thread, which is about to block for it for at most ``timeout_s``."""


class Future(Generic[T]):
    """The result of a call that may still be running. Await it in any event loop, or call :meth:`result` in any thread.

    Futures are shared values: leaving an ``await`` early (``asyncio.wait_for``, a cancelled task) does not end the
    call, whose result others may hold; :meth:`cancel` and :meth:`deadline` end it in the workers.

        >>> greetings = group.greet("hi")
        >>> greetings.result()
        ['hi, from 0 of 2', 'hi, from 1 of 2']
    """

    is_part = False
    """Whether it is made of other futures in this process, not by a call."""

    def __init__(
        self,
        loop: ControllerLoop,
        label: str,
        *,
        inputs: Sequence[Future[Any]] = (),
        progress: Progress | None = None,
    ) -> None:
        if len(label) > MAX_LABEL:
            label = f"{label[: MAX_LABEL // 2]} ... {label[-MAX_LABEL // 2 :]}"
        self.controller = loop
        self.outcome: Outcome[Any] = Outcome(label)
        self.started_s = loop.now()
        self.progress = progress
        # Weak references: a future does not keep the past of its run in memory.
        self.inputs = tuple((each.outcome.label, weakref.ref(each)) for each in inputs)
        self._work: Maker | None = None

    # ------------------------------------------------------------------------------------------------ its completion

    def run(self, make: Callable[[], Coroutine[Any, Any, Any]], owner: TaskOwner) -> Self:
        """Complete this future with what ``make()`` returns, run as a task of ``owner``."""
        self._work = owner.spawn(make, self.outcome.settle)
        return self

    def made_by(self, work: Maker) -> None:
        """Attach the work that completes the outcome; cancelling this future cancels it."""
        self._work = work

    def start(self) -> None:
        """Start work that has not started yet, and notice its end. Awaiting does so too."""
        if self._work is not None:
            self._work.watch()

    def value_of(self, raw: Any) -> T:
        """Return the value that an outcome stands for. Blocks the thread while a payload moves."""
        return cast("T", raw)

    async def value_of_async(self, raw: Any) -> T:
        return cast("T", raw)

    async def completed(self) -> Any:
        """Wait for the outcome itself, without a payload: a plan, if this is a batch. Does not suspend if complete.

        Raises:
            asyncio.CancelledError: the call was cancelled.
            BaseException: the error that the call failed with.
        """
        self.start()
        await self.outcome.completion()
        try:
            return self.outcome.get()
        except concurrent.futures.CancelledError as error:
            raise asyncio.CancelledError(str(error)) from None

    # ------------------------------------------------------------------------------------------------------- its use

    def done(self) -> bool:
        """Whether it has ended. The payload of a batch may still be with its workers."""
        if not self.outcome.complete and self._work is not None:
            self._work.watch()
        return self.outcome.complete

    def cancelled(self) -> bool:
        return self.outcome.state == "cancelled"

    def cancel(self) -> bool:
        """Cancel the call: its coroutines in the workers are cancelled, or it is never submitted.

        Return False if it was complete already.
        """
        if not self.outcome.cancel():
            return False
        if self._work is not None:
            self._work.cancel()
        return True

    def result(self, timeout: float | None = None) -> T:
        """Wait for the value, blocking this thread for at most ``timeout`` seconds.

        Raises:
            DeadlineError: ``timeout`` passed; the call continues.
            RuntimeError: called on the controller loop itself, which would wait for itself: ``await`` there.
            concurrent.futures.CancelledError: the call was cancelled.
            BaseException: the error that the call failed with.
            KeyboardInterrupt: after cancelling this thread's unfinished calls (in a notebook, those of the cell).
        """
        try:
            return self.value_of(self._wait(timeout))
        except KeyboardInterrupt:
            cancel_calls_of_this_thread()
            raise

    def get(self, timeout: float | None = None) -> T:
        """:meth:`result`, under verl's name."""
        return self.result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error that the call failed with, or None. Waits as :meth:`result` does.

        Raises:
            concurrent.futures.CancelledError: the call was cancelled.
            DeadlineError: ``timeout`` passed; the call continues.
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
        """Call ``callback(self)`` on the controller loop once the call has finished, failed or been cancelled."""
        self.start()
        self.outcome.subscribe(lambda: self.controller.notify(callback, self))

    def deadline(self, timeout_s: float) -> Self:
        """Fail with :class:`DeadlineError` and cancel the call unless it finishes within ``timeout_s`` from now.

        Return this future, for ``await group.update(batch).deadline(30)``.

        Raises:
            ValueError: ``timeout_s`` is not positive.
        """
        if not timeout_s > 0:
            raise ValueError(f"a deadline must be more than 0 s away, got {timeout_s} s")
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
        outcome, label = self.outcome, self.outcome.label
        if not outcome.complete and self._work is not None and not self.controller.is_here:
            self._work.wait_here(timeout_s)
        if not outcome.complete:
            self.start()
        if not outcome.complete:
            if self.controller.is_here:
                raise RuntimeError(
                    f"result() of {label} was called on the controller loop, which would wait for itself: "
                    "use `await future` there"
                )
            if not self.controller.loop.is_running():
                raise RuntimeError(f"{label} cannot finish: its event loop has stopped")
            if not outcome.wait(timeout_s):
                raise DeadlineError(
                    f"{label} has not finished after {timeout_s:g} s; the call continues",
                    waiting_for=label,
                    timeout_s=timeout_s or 0.0,
                )
        return outcome.get()

    def explain(self) -> str:
        """Show which call makes it, from which inputs, how far each rank is and since when, as a tree. Does not wait.

        Inputs are shown as long as they are referenced elsewhere; whole results with their bytes and, if ``meta_info``
        has it, the ``weight_version``.
        """
        from asyncrl.data.display import explanation_of

        return "\n".join(explanation_of(self))

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.explain())}</pre>"

    def _status(self) -> str:
        return self.outcome.status

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.outcome.label}: {self._status()}>"

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} cannot be pickled: pass it to a worker group's method, or send its result")


# ------------------------------------------------------------------------------------------------------- future batches


@dataclass(frozen=True, slots=True)
class FinishedRows:
    """Part of a batch, whose payload stays where it was made.

    ``rows`` are counted in the arguments of the call: where it returns one row for each, they are the rows of the
    result; where it returns k, those times k.

        >>> FinishedRows(range(0, 3), future).rows
        range(0, 3)
    """

    rows: range
    batch: DataProtoFuture


class DataProtoFuture(Future["DataProto"]):
    """A batch that is still being made, or whose payload is with its workers: a value to cut, join and pass on.

    Operations return at once, finished or not, and mean what they mean on :class:`DataProto`:
    ``f.slice(0, 3).result()`` equals ``f.result().slice(0, 3)``. Nothing is changed in place: ``reorder``, ``rename``,
    ``union`` and ``pop`` return new futures. The payload moves only for ``await``/:meth:`result`, once: all readers of
    a future in one process share its tensors and arrays. A future that is passed to a worker group moves from worker to
    worker, each rank fetching the blocks that hold its rows. :meth:`header` returns rows, columns and ``meta_info``
    without any payload.

        >>> doubled = group.double(data)  # at once
        >>> again = group.double(doubled.slice(0, 2))  # a future of a future
        >>> again.result().batch["x"].tolist()
        [4, 8]
    """

    _fetch: tuple[asyncio.AbstractEventLoop, Outcome[None]] | None = None
    """Of the reader that fetches the payload now."""

    def __init__(
        self,
        loop: ControllerLoop,
        label: str,
        *,
        inputs: Sequence[Future[Any]] = (),
        progress: Progress | None = None,
        parents: Sequence[DataProtoFuture] = (),
        apply: Callable[[Sequence[Plan]], Plan] | None = None,
    ) -> None:
        super().__init__(loop, label, inputs=inputs or parents, progress=progress)
        self.is_part = apply is not None
        self._parents = tuple(parents)
        self._apply = apply
        self._of_part: Callable[[Plan], Plan] = _unchanged
        self._start_lock = threading.Lock()
        self._started = apply is None
        self._data: DataProto | None = None
        self.declared: Declared | None = None

    @staticmethod
    def from_plan(plan: Plan, label: str, loop: ControllerLoop | None = None) -> DataProtoFuture:
        future = DataProtoFuture(loop or ControllerLoop.default(), label)
        future.outcome.succeed(plan)
        return future

    @staticmethod
    def of(data: DataProto) -> DataProtoFuture:
        from asyncrl.data.plan import Plan

        return DataProtoFuture.from_plan(Plan.of(data), "batch")

    # ------------------------------------------------------------------------------------------------- without payload

    async def header(self) -> Header:
        """Wait for the call and return rows, schema, ``meta_info`` and size."""
        header = (await self.plan()).header
        return replace(header, meta_info=dict(header.meta_info))

    async def meta_info(self) -> dict[str, Any]:
        return (await self.header()).meta_info

    async def plan(self) -> Plan:
        """Wait for the call and return which rows and columns of which blocks the batch is made of."""
        return cast("Plan", await self.completed())

    async def rows(self) -> AsyncGenerator[FinishedRows, None]:
        """Yield each rank's rows as they finish, without any payload; all parts, in order, are the batch.

        The result of a call whose rows are split comes in as many parts as ranks had rows; so does what ``select``,
        ``pop``, ``rename`` and ``then`` make of it. Any other future is one part. If a rank fails, the parts that had
        finished are yielded first, then the error is raised. Leaving the loop early does not end the call.
        """
        self.start()
        in_parts = False
        if self.progress is not None:
            async with contextlib.aclosing(self.progress.finished(self.outcome)) as parts:
                async for part in parts:
                    label = f"{self.outcome.label} of rows {part.rows.start}:{part.rows.stop}"
                    plan = self._of_part(part.make())
                    yield FinishedRows(part.rows, DataProtoFuture.from_plan(plan, label, self.controller))
                    in_parts = True
        whole = await self.plan()
        if not in_parts:
            yield FinishedRows(range(whole.header.rows), self)

    @property
    def knows_rows(self) -> bool:
        """Whether ``len`` is known: the call has finished, or declares it."""
        return (self.declared is not None and self.declared.rows is not None) or self.done()

    @property
    def schema(self) -> Schema:
        """The columns, once the call has finished; before, if its method declares them.

        Raises:
            RuntimeError: they are not known yet.
        """
        if self.declared is not None and self.declared.schema is not None:
            return self.declared.schema.any_rows()
        if not self.done():
            raise RuntimeError(
                f"the columns of {self.outcome.label} are not known yet: `(await future.header()).schema` waits for "
                "them, and register(schema=...) declares them"
            )
        return cast("Plan", self.outcome.get()).header.schema.any_rows()

    def __len__(self) -> int:
        if self.declared is not None and self.declared.rows is not None:
            return self.declared.rows
        if not self.done():
            raise RuntimeError(
                f"the number of rows of {self.outcome.label} is not known yet: "
                "`(await future.header()).rows` waits for it, and register(rows=...) declares it"
            )
        return cast("Plan", self.outcome.get()).header.rows

    def __bool__(self) -> bool:
        return True

    # ------------------------------------------------------------------------------------------------------------ rows

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProtoFuture:
        text = ":".join("" if each is None else str(each) for each in (start, end))
        return self._derive(
            f"[{text}{'' if step is None else f':{step}'}]",
            lambda plan: plan.slice(start, end, step),
            rows=lambda count: len(range(count)[builtins.slice(start, end, step)]),
        )

    def select_idxs(
        self, idxs: Sequence[int] | Sequence[bool] | np.ndarray[Any, Any] | torch.Tensor
    ) -> DataProtoFuture:
        import numpy as np
        import torch

        from asyncrl.data.columns import row_index

        kept: Any = np.array(idxs.detach().cpu().numpy() if isinstance(idxs, torch.Tensor) else idxs)
        return self._derive(".select_idxs", lambda plan: plan.take(row_index(kept, plan.header.rows)))

    def __getitem__(self, item: Any) -> DataProtoFuture:
        if isinstance(item, builtins.slice):
            rows: Any = cast("Any", item)
            return self.slice(rows.start, rows.stop, rows.step)
        if isinstance(item, int):
            raise TypeError("a future gives batches, not single rows: use future[i:i + 1], or (await future)[i]")
        return self.select_idxs(item)

    def __iter__(self) -> NoReturn:
        raise TypeError(f"{self.outcome.label} cannot be iterated before its rows have arrived: `await` it first")

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """As :meth:`DataProto.chunk`, before the rows are known.

        Raises:
            SchemaError: ``chunks`` is below 1; when a part is used, as :meth:`DataProto.chunk`.
        """
        if chunks < 1:
            raise SchemaError(f"chunks must be at least 1, got {chunks}")
        cut: list[list[Plan]] = []

        def part(number: int) -> Callable[[Plan], Plan]:
            def apply(plan: Plan) -> Plan:
                if not cut:
                    cut.append(plan.chunk(chunks))
                return cut[0][number]

            return apply

        return [self._derive(f".chunk({chunks})[{number}]", part(number)) for number in range(chunks)]

    def split(self, split_size: int) -> list[DataProtoFuture]:
        """As :meth:`DataProto.split`.

        Raises:
            RuntimeError: the number of rows, and so the number of parts, is not known yet.
            SchemaError: ``split_size`` is below 1.
        """
        if split_size < 1:
            raise SchemaError(f"split_size must be at least 1, got {split_size}")
        if not self.knows_rows:
            raise RuntimeError(
                f"the number of parts of {split_size} rows in {self.outcome.label} is not known yet: "
                "`await future.header()` first, or use chunk, whose number of parts is given"
            )
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    def reorder(self, indices: Sequence[int] | np.ndarray[Any, Any] | torch.Tensor) -> DataProtoFuture:
        """:meth:`select_idxs`, under the name that :class:`DataProto` changes itself by."""
        return self.select_idxs(indices)

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProtoFuture:
        """As :meth:`DataProto.repeat`. The rows are fetched once for all copies.

        Raises:
            SchemaError: ``repeat_times`` is negative.
        """
        if repeat_times < 0:
            raise SchemaError(f"repeat_times must not be negative, got {repeat_times}")
        return self._derive(
            f".repeat({repeat_times})",
            lambda plan: plan.repeat(repeat_times, interleave=interleave),
            rows=lambda count: count * repeat_times,
        )

    @staticmethod
    def concat(data: Iterable[DataProtoFuture | DataProto]) -> DataProtoFuture:
        """As :meth:`DataProto.concat`, of futures and batches.

        Raises:
            SchemaError: there is none.
        """
        from asyncrl.data.plan import Plan

        given = list(data)
        futures = [_as_future(each) for each in given]
        if not futures:
            Plan.concat([])
        loop = next((each.controller for each in given if isinstance(each, DataProtoFuture)), futures[0].controller)
        label = f"concat({', '.join(each.outcome.label for each in futures)})"
        return DataProtoFuture(loop, label, parents=futures, apply=Plan.concat)

    # --------------------------------------------------------------------------------------------------------- columns

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> DataProtoFuture:
        keys = _listed(batch_keys, non_tensor_batch_keys, meta_info_keys)
        return self._derive(".select", lambda plan: plan.select(*keys), by_row=True)

    def pop(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> tuple[DataProtoFuture, DataProtoFuture]:
        """Return ``popped, rest``: what :meth:`DataProto.pop` returns, and what it leaves."""
        keys = _listed(batch_keys, non_tensor_batch_keys, meta_info_keys)
        popped = self._derive(".pop", lambda plan: plan.pop(*keys)[0], by_row=True)
        return popped, self._derive(".pop.rest", lambda plan: plan.pop(*keys)[1], by_row=True)

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> DataProtoFuture:
        old, new = ([each] if isinstance(each, str) else list(each) for each in (old_keys, new_keys))
        return self._derive(".rename", lambda plan: plan.rename(old, new), by_row=True)

    def then(self, function: Callable[[DataProto], DataProto]) -> DataProtoFuture:
        """Apply ``function`` to the rows where they are consumed: here, or in each worker to its rows.

        It works row by row: it returns one row for each, in order, whatever the other rows are. (What needs all rows
        belongs in a worker's method, or after ``await``.) To learn columns and ``meta_info`` before there are rows, it
        is applied to an empty batch of the same columns first. It may write into its batch. On Ray it is pickled.

            >>> double = future.then(lambda batch: batch.with_columns(double=batch.batch["x"] * 2))
            >>> double.result().batch["double"].tolist()
            [2, 4, 6]

        Raises, when the result is used:
            UserCodeError: it raised (its error is the ``__cause__`` in this process) or returned no batch.
            SchemaError: not one row for each, or other columns or ``meta_info`` than for no rows.
        """
        label = getattr(function, "__name__", type(function).__name__)
        name = f"{label}, given to then() of {self.outcome.label},"
        return self._derive(f".then({label})", lambda plan: plan.then(function, name=name), by_row=True)

    def union(self, other: DataProtoFuture | DataProto) -> DataProtoFuture:
        right = _as_future(other)
        label = f"{self.outcome.label}.union({right.outcome.label})"
        return DataProtoFuture(
            self.controller, label, parents=(self, right), apply=lambda plans: plans[0].union(plans[1])
        )

    # ----------------------------------------------------------------------------------------------------- derivation

    def _derive(
        self,
        text: str,
        apply: Callable[[Plan], Plan],
        *,
        by_row: bool = False,
        rows: Callable[[int], int] | None = None,
    ) -> DataProtoFuture:
        """Return the future of ``apply`` to this plan, with ``text`` appended to the label.

        ``by_row``: applying it to parts of the rows and joining the results gives the same. ``rows`` computes the
        number of rows of the result from that of this; default: as many, if ``by_row``.
        """
        derived = DataProtoFuture(
            self.controller,
            self.outcome.label + text,
            parents=(self,),
            apply=lambda plans: apply(plans[0]),
            progress=self.progress if by_row else None,
        )
        if self.declared is not None and (by_row or rows is not None):
            derived.declared = self.declared.with_rows(rows or (lambda count: count))
        if by_row and self.progress is not None:
            earlier = self._of_part
            derived._of_part = apply if earlier is _unchanged else lambda plan: apply(earlier(plan))
        return derived

    def _lineage(self) -> list[DataProtoFuture]:
        """The futures that have to be started for this one, parents before children, itself last. Not recursive."""
        found: dict[int, DataProtoFuture] = {}
        stack: list[tuple[DataProtoFuture, bool]] = [(self, False)]
        while stack:
            future, expanded = stack.pop()
            if id(future) in found or future._started:  # noqa: SLF001  of this class
                continue
            if expanded:
                found[id(future)] = future
            else:
                stack.append((future, True))
                stack += [(parent, False) for parent in future._parents]  # noqa: SLF001
        return list(found.values())

    def done(self) -> bool:
        for future in self._lineage():
            if all(Future[Any].done(parent) for parent in future._parents):  # noqa: SLF001  of this class
                future._begin()  # noqa: SLF001
        return super().done()

    def start(self) -> None:
        for future in self._lineage():
            future._begin()  # noqa: SLF001  of this class
        super().start()

    def _begin(self) -> None:
        with self._start_lock:
            if self._started:
                return
            self._started = True
            parents, apply = self._parents, self._apply
            # From here on only the task below refers to the parents.
            self._parents, self._apply = (), None
        assert apply is not None
        if self.outcome.complete:
            return
        if all(parent.outcome.complete for parent in parents):
            self._resolve_now(parents, apply)
        else:
            self.run(lambda: _resolved(parents, apply), self.controller.owner)

    def _resolve_now(self, parents: Sequence[DataProtoFuture], apply: Callable[[Sequence[Plan]], Plan]) -> None:
        try:
            plan = apply([parent.outcome.get() for parent in parents])
        except concurrent.futures.CancelledError:
            self.outcome.cancel()
        except Exception as error:  # noqa: BLE001  any error is what this future failed with
            self.outcome.fail(error)
        else:
            self.outcome.succeed(plan)

    def value_of(self, raw: Any) -> DataProto:
        if self._data is None:
            self._data = cast("Plan", raw).get()
        return self._data.select()

    async def value_of_async(self, raw: Any) -> DataProto:
        loop = asyncio.get_running_loop()
        while self._data is None:
            if self._fetch is not None and self._fetch[0] is loop:  # another loop may stop before it has fetched
                await self._fetch[1].completion()
                continue  # should it have ended without the payload, the next reader fetches it
            fetch = self._fetch = loop, Outcome("fetch")
            try:
                self._data = await cast("Plan", raw).fetch()
            finally:
                self._fetch = None if self._fetch is fetch else self._fetch
                fetch[1].succeed(None)
        return self._data.select()

    def _status(self) -> str:
        if self.outcome.state == "done":
            header = cast("Plan", self.outcome.get()).header
            names = ", ".join(header.schema.names)
            return f"{header.rows} rows, {header.size_bytes} bytes ({names})"
        return super()._status()

    def __reduce__(self) -> Any:
        if self.done() and self.outcome.state == "done":
            return DataProtoFuture.from_plan, (self.outcome.get(), self.outcome.label)
        return super().__reduce__()


def _unchanged(plan: Plan) -> Plan:
    return plan


async def _resolved(parents: Sequence[DataProtoFuture], apply: Callable[[Sequence[Plan]], Plan]) -> Plan:
    return apply([await parent.plan() for parent in parents])


def _listed(*keys: Iterable[str] | None) -> list[list[str] | None]:
    return [None if each is None else [each] if isinstance(each, str) else list(each) for each in keys]


def _as_future(data: DataProtoFuture | DataProto) -> DataProtoFuture:
    return data if isinstance(data, DataProtoFuture) else DataProtoFuture.of(data)


# ------------------------------------------------------------------------------------------------------ several futures


def gather(*futures: Future[T]) -> Future[list[T]]:
    """Return the values of all futures, in this order, as a future. Payloads of batches move when it is awaited.

    It fails as soon as one fails, and is cancelled as soon as one is; the others continue, since futures are shared.
    Cancelling it cancels none of them.

        >>> gather(DataProtoFuture.of(data), DataProtoFuture.of(data[:1])).result()[1].batch["x"].tolist()
        [1]
    """
    loop = futures[0].controller if futures else ControllerLoop.default()
    gathered = _Gathered(loop, f"gather({', '.join(each.outcome.label for each in futures)})", futures)
    return gathered.run(lambda: _outcomes(futures), loop.owner)


async def _outcomes(futures: Sequence[Future[Any]]) -> list[Any]:
    async with contextlib.aclosing(as_completed(futures)) as finished:
        async for future in finished:
            await future.completed()
    return [await future.completed() for future in futures]


class _Gathered(Future[list[T]]):
    """Its outcome is the list of those of its futures: plans for batches, as it travels to a worker."""

    is_part = True

    def __init__(self, loop: ControllerLoop, label: str, futures: Sequence[Future[T]]) -> None:
        super().__init__(loop, label, inputs=futures)
        self._futures = tuple(futures)

    def value_of(self, raw: Any) -> list[T]:
        return [future.value_of(each) for future, each in zip(self._futures, raw, strict=True)]

    async def value_of_async(self, raw: Any) -> list[T]:
        pairs = zip(self._futures, raw, strict=True)
        return list(await asyncio.gather(*(future.value_of_async(each) for future, each in pairs)))


async def as_completed(futures: Iterable[Future[T]]) -> AsyncGenerator[Future[T], None]:
    """Iterate over the futures, each as soon as it has finished, failed or been cancelled.

    Leaving the loop early does not end the futures; no subscription is left once the iterator is closed.

        >>> async def first_column(*futures):
        ...     return [(await future).batch["x"].tolist() async for future in as_completed(futures)]
        >>> asyncio.run(first_column(DataProtoFuture.of(data)))
        [[1, 2, 3]]
    """
    waiting = list(futures)
    loop = asyncio.get_running_loop()
    finished: asyncio.Queue[Future[T]] = asyncio.Queue()
    subscriptions: list[Callable[[], None]] = []
    try:
        for future in waiting:
            future.start()
            subscriptions.append(future.outcome.subscribe(_call_on(loop, finished.put_nowait, future)))
        for _ in waiting:
            yield await finished.get()
    finally:
        for unsubscribe in subscriptions:
            unsubscribe()
