"""The replay buffer in a process of its own: summaries and policies there, rows in the object store, a mirror here.

    driver                                         worker `buffer`
      RemoteReplayBuffer  --admit, select (wait)-->  BufferWorker
        a mirror of its   --put, drop, ... -------->   AsyncReplayBuffer
        statistics        <------------ updates ---     references to rows

Summaries and references cross the boundary: rows of more than 64 KB stay in the object store from the moment a rollout
worker returned them until a trainer rank fetches them. Smaller ones travel in the messages, as everywhere.

The contract is that of :class:`asyncrl.interfaces.ReplayBuffer`. The distance adds:

- :meth:`~RemoteReplayBuffer.put` and the other calls that do not wait send a message and return; the worker executes
  them in order, but for one whose rows are still being made: later ones overtake it. If one of them is not legal,
  raises, or does not reach the worker, the buffer is closed with that error: the next call raises it, and so does every
  wait.
- :meth:`~RemoteReplayBuffer.statistics` and the listeners of drops follow with the updates, within a round trip;
  :meth:`~RemoteReplayBuffer.settled` waits for everything that was sent.
- A wait that is cancelled changes nothing, even if its result was on the way: the worker takes it back.
- When the worker dies, every wait ends with :class:`~asyncrl.errors.WorkerDiedError`. The buffer's contents are lost;
  the run can resume from its ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from asyncrl.errors import (
    AsyncRLError,
    BufferClosedError,
    DeadlineError,
    GroupClosedError,
    InfrastructureError,
    WorkerError,
)
from asyncrl.interfaces import DroppedGroup, GroupSummary, ReplayBufferStatistics, SelectedGroup
from asyncrl.runtime import ControllerLoop
from asyncrl.single_controller import Dispatch, Worker, register
from buffers.replay import AsyncReplayBuffer

if TYPE_CHECKING:
    from asyncrl.data import DataProto, DataProtoFuture
    from asyncrl.ledger import Ledger, LedgerArchive


_SENT = frozenset({"put", "extend", "release", "drop", "restore"})
"""Operations without a result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Update:
    """The buffer's state after the worker has executed the operations up to number ``executed``."""

    revision: int
    executed: int
    dropped: tuple[DroppedGroup, ...]
    statistics: ReplayBufferStatistics
    waits: tuple[str, ...]
    failure: AsyncRLError | None


class BufferWorker(Worker):
    """Holds a replay buffer, made from ``options``, and references to the rows in it."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self._buffer = AsyncReplayBuffer(**options)
        self._buffer.on_drop(self._record_drop)
        self._drops: list[DroppedGroup] = []
        self._failure: AsyncRLError | None = None
        self._revision = self._executed = 0
        self._ahead: set[int] = set()
        """Operations that were executed before an earlier one, which waits for its rows."""
        self._changed = asyncio.Event()
        self._unconfirmed: dict[int, tuple[int, ...]] = {}
        """By ticket, groups that were selected and whose result may not have arrived."""

    @register(dispatch_mode=Dispatch.RANK_ZERO, materialize_futures=False)
    async def execute(self, number: int, operation: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Execute operation ``number`` of those without a result (or none, if empty). An update reports its failure."""
        try:
            if operation in _SENT:
                getattr(self._buffer, operation)(*arguments, **options)
            elif operation:
                raise InfrastructureError(f"{operation!r} is not an operation of a buffer: {', '.join(sorted(_SENT))}")
        except AsyncRLError as error:
            self._failure = self._failure or error
        except Exception as error:  # noqa: BLE001  reported too: nothing waits for the result of this call
            text = f"{operation} of the buffer raised {type(error).__name__}: {error}"
            self._failure = self._failure or WorkerError(
                text, method=operation, remote_traceback=traceback.format_exc()
            )
        finally:
            self._ahead.add(number)
            while (following := self._executed + 1) in self._ahead:
                self._ahead.remove(following)
                self._executed = following
            self._change()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def admit(self, group_id: int, again: bool, timeout_s: float | None) -> None:
        try:
            await self._buffer.admit(group_id, again=again, timeout_s=timeout_s)
        finally:
            self._change()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def select(
        self,
        ticket: int,
        groups: int,
        weight_version: int,
        group_ids: tuple[int, ...] | None,
        timeout_s: float | None,
        received: tuple[int, ...],
    ) -> list[tuple[GroupSummary, int, Any]]:
        """Return the summary, uses and plan of the rows of each group. ``received``: tickets whose results arrived."""
        for each in received:
            self._unconfirmed.pop(each, None)
        taken: tuple[SelectedGroup, ...] = ()
        try:
            taken = await self._buffer.select(
                groups, weight_version=weight_version, group_ids=group_ids, timeout_s=timeout_s
            )
            result = [(group.summary, group.uses, await _plan_of(group.rows)) for group in taken]
        except BaseException:
            self._buffer.restore([group.summary.group_id for group in taken])
            raise
        finally:
            self._change()
        self._unconfirmed[ticket] = tuple(group.summary.group_id for group in taken)
        return result

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def cancel(self, *, ticket: int | None = None, group_id: int | None = None) -> None:
        """Undo the selection of a ticket or the admission of a group, because the call was cancelled."""
        if ticket is not None:
            self._buffer.restore(self._unconfirmed.pop(ticket, ()))
        if group_id is not None:
            self._buffer.cancel_admission(group_id)
        self._change()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def close_buffer(self, why: str) -> None:
        self._buffer.close(InfrastructureError(why) if why else None)
        self._change()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def update(self, after: int) -> _Update:
        """Wait until something has changed after revision ``after``; return the new state."""
        while self._revision <= after:
            self._changed.clear()
            await self._changed.wait()
        dropped, self._drops = tuple(self._drops), []
        return _Update(
            revision=self._revision,
            executed=self._executed,
            dropped=dropped,
            statistics=self._buffer.statistics(),
            waits=self._buffer.explain(),
            failure=self._failure,
        )

    async def aclose(self) -> None:
        self._buffer.close()

    def _record_drop(self, group: DroppedGroup) -> None:
        self._drops.append(group)
        self._change()

    def _change(self) -> None:
        self._revision += 1
        self._changed.set()


async def _plan_of(rows: DataProto | DataProtoFuture) -> Any:
    from asyncrl.data import DataProtoFuture

    return await rows.plan() if isinstance(rows, DataProtoFuture) else rows


class RemoteReplayBuffer:
    """Implements :class:`asyncrl.interfaces.OutOfProcessReplayBuffer`. Used from one event loop.

    Options are checked here; :meth:`query` reads the ``ledger`` in this process, so it works after the worker has died.

    Raises:
        ConfigError, ValueError, TypeError: as :class:`~buffers.replay.AsyncReplayBuffer`.
    """

    __signature__ = inspect.signature(AsyncReplayBuffer)  # the options that `make_part` accepts

    def __init__(self, *, ledger: Ledger | LedgerArchive | None = None, **options: Any) -> None:
        self._empty = AsyncReplayBuffer(ledger=ledger, **options)
        """Holds no group: it has checked the options, and reads the ledger."""
        self._statistics = self._empty.statistics()
        self._options = options
        self._group: Any = None
        self._following: asyncio.Task[None] | None = None
        self._listeners: list[Callable[[DroppedGroup], None]] = []
        self._sent = self._executed = 0
        self._waits: tuple[str, ...] = ()
        self._updated_s = 0.0
        self._updated = asyncio.Event()
        self._tickets = count()
        self._received: list[int] = []
        self._error: BaseException | None = None
        self._closed = False

    # --------------------------------------------------------------------------------------------------------- worker

    def worker(self) -> tuple[type[Worker], dict[str, Any]]:
        return BufferWorker, self._options

    async def attach(self, group: Any) -> None:
        self._group = group
        self._loop = ControllerLoop.current()
        self._following = asyncio.create_task(self._follow(), name="updates of the buffer")

    async def aclose(self) -> None:
        task, self._following = self._following, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _follow(self) -> None:
        revision = 0
        try:
            while True:
                update: _Update = await self._group.update(revision)
                revision = update.revision
                self._executed, self._statistics, self._waits = update.executed, update.statistics, update.waits
                self._updated_s = asyncio.get_running_loop().time()
                if update.failure is not None:
                    raise update.failure
                for dropped in update.dropped:
                    for listener in self._listeners:
                        listener(dropped)
                self._notify()
        except Exception as error:  # noqa: BLE001  raised by the next call
            self._fail(error)
        finally:
            self._notify()

    def _fail(self, error: BaseException) -> None:
        """Close the buffer, here and in the worker, with the first error: the next call raises it."""
        self._closed = True
        if self._error is None:
            self._error = error
            with contextlib.suppress(GroupClosedError):
                # A worker that has died does not answer: its error is known.
                self._group.close_buffer(f"{type(error).__name__}: {error}").outcome.error()

    def _notify(self) -> None:
        updated, self._updated = self._updated, asyncio.Event()
        updated.set()

    # ---------------------------------------------------------------------------------------------------------- waits

    async def admit(self, group_id: int, *, again: bool = False, timeout_s: float | None = None) -> None:
        self._check("admit")
        await self._result("admit", self._group.admit(group_id, again, timeout_s), group_id=group_id)

    async def select(
        self,
        groups: int,
        *,
        weight_version: int,
        group_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> tuple[SelectedGroup, ...]:
        self._check("select")
        from asyncrl.data import DataProtoFuture
        from asyncrl.data.plan import Plan

        ticket = next(self._tickets)
        received, self._received = tuple(self._received), []
        wanted = None if group_ids is None else tuple(group_ids)
        call = self._group.select(ticket, groups, weight_version, wanted, timeout_s, received)
        result = await self._result("select", call, ticket=ticket)
        self._received.append(ticket)
        return tuple(
            SelectedGroup(
                summary=summary,
                rows=DataProtoFuture.from_plan(rows, f"group {summary.group_id}") if isinstance(rows, Plan) else rows,
                uses=uses,
            )
            for summary, uses, rows in result
        )

    async def _result(self, what: str, call: Any, **undo: int) -> Any:
        """Wait for a call of the worker. If this wait is cancelled, the worker undoes the call."""
        try:
            return await call
        except asyncio.CancelledError:
            call.cancel()
            self._group.cancel(**undo)
            raise
        except BufferClosedError as error:
            raise self._reason(what, error) from self._error

    async def settled(self, *, timeout_s: float | None = None) -> None:
        """As :meth:`asyncrl.interfaces.ReplayBuffer.settled`.

        Raises:
            DeadlineError: the worker has not executed everything within ``timeout_s``.
            AsyncRLError: the error of an operation that failed, or of the worker's death.
        """
        if self._error is None:
            self._send("")  # so that an update follows
        wanted = self._sent
        try:
            async with asyncio.timeout(timeout_s):
                while self._executed < wanted and self._error is None:
                    await self._updated.wait()
        except TimeoutError:
            why = f"the buffer's worker to execute operation {self._executed + 1} of {wanted}"
            raise DeadlineError(
                f"the buffer was not settled within {timeout_s:g} s: waiting for {why}",
                waiting_for=why,
                timeout_s=timeout_s or 0.0,
            ) from None
        if self._error is not None:
            raise self._error

    # ----------------------------------------------------------------------------------------------------- operations

    def put(
        self, summary: GroupSummary, rows: DataProto | DataProtoFuture, *, uses: int = 0, reserved_uses: int = 0
    ) -> None:
        self._send("put", summary, rows, uses=uses, reserved_uses=reserved_uses)

    def extend(
        self,
        group_id: int,
        columns: Collection[str],
        rows: DataProto | DataProtoFuture,
        *,
        rewards: tuple[float, ...] | None = None,
    ) -> None:
        self._send("extend", group_id, tuple(columns), rows, rewards=rewards)

    def release(self, group_ids: Iterable[int]) -> None:
        self._send("release", tuple(group_ids))

    def drop(self, group_id: int, reason: str, *, tokens: int = 0) -> None:
        self._send("drop", group_id, reason, tokens=tokens)

    def restore(self, group_ids: Iterable[int]) -> None:
        self._send("restore", tuple(group_ids))

    def on_drop(self, listener: Callable[[DroppedGroup], None]) -> None:
        """As :meth:`asyncrl.interfaces.ReplayBuffer.on_drop`; listeners are called on the loop of :meth:`attach`."""
        self._listeners.append(listener)

    def close(self, error: BaseException | None = None) -> None:
        if self._closed:
            return
        self._closed, self._error = True, self._error or error
        if self._group is not None:
            self._group.close_buffer("" if error is None else f"{type(error).__name__}: {error}")

    def query(
        self, where: str = "", parameters: Mapping[str, Any] | None = None, *, limit: int | None = None
    ) -> DataProto:
        return self._empty.query(where, parameters, limit=limit)

    def statistics(self) -> ReplayBufferStatistics:
        return self._statistics

    def explain(self) -> tuple[str, ...]:
        if not self._waits:
            return ()
        since_s = asyncio.get_running_loop().time() - self._updated_s
        return tuple(f"{wait} (reported {since_s:.3g} s ago by the buffer's worker)" for wait in self._waits)

    def _send(self, operation: str, *arguments: Any, **options: Any) -> None:
        self._check(operation, also_closed=operation in ("", "release", "drop", "restore"))
        call = self._group.execute(self._sent + 1, operation, arguments, options)
        self._sent += 1
        call.add_done_callback(lambda ended: self._loop.notify(self._end, ended))

    def _end(self, call: Any) -> None:
        """Close the buffer if a call of ``execute`` has not reached the worker: only then does it fail."""
        if call.outcome.state != "done":
            cancelled = InfrastructureError(f"{call.outcome.label} was cancelled: it may not have been executed")
            self._fail(call.outcome.error() or cancelled)
            self._notify()

    def _check(self, call: str, *, also_closed: bool = False) -> None:
        if self._group is None:
            raise BufferClosedError(f"{call}: the buffer has no worker yet: attach it to one")
        if self._closed and not also_closed:
            raise self._reason(call, BufferClosedError(f"{call}: the buffer is closed")) from self._error

    def _reason(self, call: str, closed: BufferClosedError) -> AsyncRLError:
        if self._error is None or isinstance(self._error, GroupClosedError):
            return closed
        if isinstance(self._error, InfrastructureError):
            return copy.copy(self._error)  # the same error as that of calls that were waiting when the worker died
        return BufferClosedError(f"{call}: the buffer is closed: {type(self._error).__name__}: {self._error}")
