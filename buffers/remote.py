"""The replay buffer in a process of its own: books and policies there, rows in the object store, answers here.

    driver                                         worker `buffer`
      RemoteReplayBuffer  --admit, select (wait)-->  BufferWorker
        a mirror of its   --put, drop, ... -------->   AsyncReplayBuffer
        statistics        <------------- news ------     references to rows

What crosses is summaries and references: rows of more than 64 KB lie in the object store from the moment a rollout
worker returned them until a trainer rank fetches them. Smaller ones travel in the messages, as everywhere.

The contract is that of :class:`asyncrl.interfaces.ReplayBuffer`, with what a distance brings:

- :meth:`~RemoteReplayBuffer.put` and its like send and return; they are done there in the order of the calls. One that
  breaks a rule closes the buffer with that error: the next call raises it, and so does every wait.
- :meth:`~RemoteReplayBuffer.statistics` and the listeners of drops follow as news comes, within a round trip;
  :meth:`~RemoteReplayBuffer.settled` waits for what was sent.
- A wait that is cancelled changes nothing, not even when its answer was on the way: it is given back.
- The death of the worker ends every wait with :class:`~asyncrl.errors.WorkerDiedError`. The books die with it: a run
  goes on from its ledger.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from asyncrl.errors import AsyncRLError, BufferClosedError, DeadlineError, InfrastructureError
from asyncrl.interfaces import DroppedGroup, GroupSummary, ReplayBufferStatistics, SelectedGroup
from asyncrl.single_controller import Dispatch, Worker, register
from buffers.replay import AsyncReplayBuffer

if TYPE_CHECKING:
    from asyncrl.data import DataProto, DataProtoFuture
    from asyncrl.interfaces import Ledger, LedgerArchive

__all__ = ["BufferWorker", "RemoteReplayBuffer"]

_SENT = frozenset({"put", "extend", "release", "drop", "restore"})
"""Operations that nobody waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _News:
    """What changed in the buffer: it has done so many of the operations sent to it."""

    revision: int
    done: int
    dropped: tuple[DroppedGroup, ...]
    statistics: ReplayBufferStatistics
    waits: tuple[str, ...]
    failure: AsyncRLError | None


class BufferWorker(Worker):
    """Holds a replay buffer, made from ``options``, and references to the rows in it."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self._buffer = AsyncReplayBuffer(**options)
        self._buffer.on_drop(self._dropped)
        self._drops: list[DroppedGroup] = []
        self._failure: AsyncRLError | None = None
        self._revision = self._done = 0
        self._changed = asyncio.Event()
        self._given: dict[int, tuple[int, ...]] = {}

    @register(dispatch_mode=Dispatch.RANK_ZERO, materialize_futures=False)
    async def do(self, number: int, operation: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Operation ``number`` of those that nobody waits for, or none; what it fails with is news."""
        try:
            if operation in _SENT:
                getattr(self._buffer, operation)(*arguments, **options)
            elif operation:
                raise InfrastructureError(f"{operation!r} is no operation of a buffer: {', '.join(sorted(_SENT))} are")
        except AsyncRLError as error:
            self._failure = self._failure or error
        finally:
            self._done = number
            self._change()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def admit(self, slot: int, again: bool, timeout_s: float | None) -> None:
        """As :meth:`asyncrl.interfaces.ReplayBuffer.admit`."""
        try:
            await self._buffer.admit(slot, again=again, timeout_s=timeout_s)
        finally:
            self._change()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def select(
        self,
        ticket: int,
        groups: int,
        weight_version: int,
        slots: tuple[int, ...] | None,
        timeout_s: float | None,
        received: tuple[int, ...],
    ) -> list[tuple[GroupSummary, int, Any]]:
        """The groups taken: summary, uses, and the plan of the rows. ``received``: tickets whose answers arrived."""
        for each in received:
            self._given.pop(each, None)
        taken: tuple[SelectedGroup, ...] = ()
        try:
            taken = await self._buffer.select(groups, weight_version=weight_version, slots=slots, timeout_s=timeout_s)
            answer = [(group.summary, group.uses, await _plan_of(group.rows)) for group in taken]
        except BaseException:
            self._buffer.restore([group.summary.slot for group in taken])
            raise
        finally:
            self._change()
        self._given[ticket] = tuple(group.summary.slot for group in taken)
        return answer

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def give_back(self, *, ticket: int | None = None, slot: int | None = None) -> None:
        """Nobody waits any more for the groups of a ticket, or for the place of a slot: as if nobody had asked."""
        if ticket is not None:
            self._buffer.restore(self._given.pop(ticket, ()))
        if slot is not None:
            self._buffer.withdraw(slot)
        self._change()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def end(self, why: str) -> None:
        """As :meth:`asyncrl.interfaces.ReplayBuffer.close`."""
        self._buffer.close(InfrastructureError(why) if why else None)
        self._change()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def news(self, after: int) -> _News:
        """What changed after revision ``after``; waits until something has."""
        while self._revision <= after:
            self._changed.clear()
            await self._changed.wait()
        dropped, self._drops = tuple(self._drops), []
        return _News(
            revision=self._revision,
            done=self._done,
            dropped=dropped,
            statistics=self._buffer.statistics(),
            waits=self._buffer.explain(),
            failure=self._failure,
        )

    async def aclose(self) -> None:
        """Wake whoever waits."""
        self._buffer.close()

    def _dropped(self, group: DroppedGroup) -> None:
        self._drops.append(group)
        self._change()

    def _change(self) -> None:
        self._revision += 1
        self._changed.set()


async def _plan_of(rows: DataProto | DataProtoFuture) -> Any:
    from asyncrl.data import DataProtoFuture

    return await rows.plan() if isinstance(rows, DataProtoFuture) else rows


class RemoteReplayBuffer:
    """Implements :class:`asyncrl.interfaces.PlacedReplayBuffer`. Used from one event loop.

    Args:
        ledger: what :meth:`query` asks; it stays in this process.
        options: the others of :class:`buffers.replay.AsyncReplayBuffer`, checked here.

    Raises:
        ConfigError, ValueError, TypeError: as :class:`~buffers.replay.AsyncReplayBuffer`.
    """

    __signature__ = inspect.signature(AsyncReplayBuffer)

    def __init__(self, *, ledger: Ledger | LedgerArchive | None = None, **options: Any) -> None:
        self._here = AsyncReplayBuffer(ledger=ledger, **options)
        """Holds no group: it has checked the options, and has the ledger."""
        self._statistics = self._here.statistics()
        self._options = options
        self._group: Any = None
        self._listening: asyncio.Task[None] | None = None
        self._listeners: list[Callable[[DroppedGroup], None]] = []
        self._sent = self._done = 0
        self._waits: tuple[str, ...] = ()
        self._told_s = 0.0
        self._heard = asyncio.Event()
        self._tickets = count()
        self._received: list[int] = []
        self._error: BaseException | None = None
        self._closed = False

    # ---------------------------------------------------------------------------------------------------------- place

    def worker(self) -> tuple[type[Worker], dict[str, Any]]:
        """The class of the worker it lives in, and what that is made from."""
        return BufferWorker, self._options

    async def attach(self, group: Any) -> None:
        """Live in the one worker of ``group`` from now on."""
        self._group = group
        self._listening = asyncio.create_task(self._listen(), name="news of the buffer")

    async def aclose(self) -> None:
        """Let go of the worker, which its group closes. Idempotent."""
        task, self._listening = self._listening, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _listen(self) -> None:
        """Take in what changes there, until the worker is gone or a rule was broken."""
        revision = 0
        try:
            while True:
                news: _News = await self._group.news(revision)
                revision = news.revision
                self._done, self._statistics, self._waits = news.done, news.statistics, news.waits
                self._told_s = asyncio.get_running_loop().time()
                if news.failure is not None:
                    raise news.failure
                for dropped in news.dropped:
                    for listener in self._listeners:
                        listener(dropped)
                self._tell()
        except Exception as error:  # noqa: BLE001  raised by the next call, whoever makes it
            self._error = self._error or error
            self._closed = True
            if not isinstance(error, InfrastructureError):
                self._group.end(f"{type(error).__name__}: {error}")
        finally:
            self._tell()

    def _tell(self) -> None:
        heard, self._heard = self._heard, asyncio.Event()
        heard.set()

    # ---------------------------------------------------------------------------------------------------------- waits

    async def admit(self, slot: int, *, again: bool = False, timeout_s: float | None = None) -> None:
        """As :meth:`asyncrl.interfaces.ReplayBuffer.admit`."""
        self._check("admit")
        call = self._group.admit(slot, again, timeout_s)
        try:
            await call
        except asyncio.CancelledError:
            call.cancel()
            self._group.give_back(slot=slot)
            raise
        except BufferClosedError as error:
            raise self._reason("admit", error) from self._error

    async def select(
        self,
        groups: int,
        *,
        weight_version: int,
        slots: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> tuple[SelectedGroup, ...]:
        """As :meth:`asyncrl.interfaces.ReplayBuffer.select`."""
        self._check("select")
        from asyncrl.data import DataProtoFuture
        from asyncrl.data.plan import Plan

        ticket = next(self._tickets)
        received, self._received = tuple(self._received), []
        wanted = None if slots is None else tuple(slots)
        call = self._group.select(ticket, groups, weight_version, wanted, timeout_s, received)
        try:
            answer = await call
        except asyncio.CancelledError:
            call.cancel()
            self._group.give_back(ticket=ticket)
            raise
        except BufferClosedError as error:
            raise self._reason("select", error) from self._error
        self._received.append(ticket)
        return tuple(
            SelectedGroup(
                summary=summary,
                rows=DataProtoFuture.from_plan(rows, f"group {summary.slot}") if isinstance(rows, Plan) else rows,
                uses=uses,
            )
            for summary, uses, rows in answer
        )

    async def settled(self, *, timeout_s: float | None = None) -> None:
        """Wait until everything asked for so far was done there, and is in :meth:`statistics`; every drop was told.

        Raises:
            DeadlineError: it is not after ``timeout_s``.
            AsyncRLError: what one of the operations failed with, or the worker's death.
        """
        if self._error is None:
            self._send("")  # what comes back says that all before it is done
        wanted = self._sent
        try:
            async with asyncio.timeout(timeout_s):
                while self._done < wanted and self._error is None:
                    await self._heard.wait()
        except TimeoutError:
            why = f"the buffer's worker to do {wanted - self._done} of {wanted} operations"
            raise DeadlineError(
                f"the buffer was not settled within {timeout_s:g} s: waiting for {why}",
                waiting_for=why,
                timeout_s=timeout_s or 0.0,
            ) from None
        if self._error is not None:
            raise self._error

    # ----------------------------------------------------------------------------------------------------- operations

    def put(
        self, summary: GroupSummary, rows: DataProto | DataProtoFuture, *, uses: int = 0, promised: int = 0
    ) -> None:
        """As :meth:`asyncrl.interfaces.ReplayBuffer.put`."""
        self._send("put", summary, rows, uses=uses, promised=promised)

    def extend(
        self,
        slot: int,
        columns: Collection[str],
        rows: DataProto | DataProtoFuture,
        *,
        rewards: tuple[float, ...] | None = None,
    ) -> None:
        """As :meth:`asyncrl.interfaces.ReplayBuffer.extend`."""
        self._send("extend", slot, tuple(columns), rows, rewards=rewards)

    def release(self, slots: Iterable[int]) -> None:
        """As :meth:`asyncrl.interfaces.ReplayBuffer.release`."""
        self._send("release", tuple(slots))

    def drop(self, slot: int, reason: str, *, tokens: int = 0) -> None:
        """As :meth:`asyncrl.interfaces.ReplayBuffer.drop`; listeners hear of it when the worker has done it."""
        self._send("drop", slot, reason, tokens=tokens)

    def restore(self, slots: Iterable[int]) -> None:
        """As :meth:`asyncrl.interfaces.ReplayBuffer.restore`."""
        self._send("restore", tuple(slots))

    def on_drop(self, listener: Callable[[DroppedGroup], None]) -> None:
        """As :meth:`asyncrl.interfaces.ReplayBuffer.on_drop`, on the loop of :meth:`attach`."""
        self._listeners.append(listener)

    def close(self, error: BaseException | None = None) -> None:
        """As :meth:`asyncrl.interfaces.ReplayBuffer.close`."""
        if self._closed:
            return
        self._closed, self._error = True, self._error or error
        if self._group is not None:
            self._group.end("" if error is None else f"{type(error).__name__}: {error}")

    def query(
        self, where: str = "", parameters: Mapping[str, Any] | None = None, *, limit: int | None = None
    ) -> DataProto:
        """As :meth:`asyncrl.interfaces.ReplayBuffer.query`; the worker is not asked, and may be dead."""
        return self._here.query(where, parameters, limit=limit)

    def statistics(self) -> ReplayBufferStatistics:
        """As of the last news."""
        return self._statistics

    def explain(self) -> tuple[str, ...]:
        """One sentence for every wait in progress, and how old the news is."""
        if not self._waits:
            return ()
        age_s = asyncio.get_running_loop().time() - self._told_s
        return tuple(f"{wait} (told {age_s:.3g} s ago by the buffer's worker)" for wait in self._waits)

    def _send(self, operation: str, *arguments: Any, **options: Any) -> None:
        self._check(operation, also_closed=operation in ("", "release", "drop", "restore"))
        self._sent += 1
        self._group.do(self._sent, operation, arguments, options)

    def _check(self, call: str, *, also_closed: bool = False) -> None:
        if self._group is None:
            raise BufferClosedError(f"{call}: the buffer has no worker yet: attach it to one")
        if self._closed and not also_closed:
            raise self._reason(call, BufferClosedError(f"{call}: the buffer is closed")) from self._error

    def _reason(self, call: str, closed: BufferClosedError) -> AsyncRLError:
        if self._error is None:
            return closed
        if isinstance(self._error, InfrastructureError):
            return copy.copy(self._error)  # what those get that were waiting when the worker died
        return BufferClosedError(f"{call}: the buffer is closed: {type(self._error).__name__}: {self._error}")
