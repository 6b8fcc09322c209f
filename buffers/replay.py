"""The replay buffer of one process: the state machine of :mod:`buffers.state` behind fair waits with deadlines."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from asyncrl.errors import BufferClosedError, DeadlineError, InvalidDataError, LedgerError
from asyncrl.interfaces import DroppedGroup, GroupSummary, ReplayBufferStatistics, SelectedGroup
from buffers.policies import Eviction, ZeroVariance, compose_evictions, compose_rate_limit, compose_selection
from buffers.selection import Selection
from buffers.state import BufferState, Stage

if TYPE_CHECKING:
    from asyncrl.algorithms.credit import Credit
    from asyncrl.data import DataProto, DataProtoFuture
    from asyncrl.ledger import Ledger, LedgerArchive


@dataclass(slots=True, eq=False, kw_only=True)
class _Waiter:
    future: asyncio.Future[Any]
    since: float

    def waited_s(self) -> float:
        return self.future.get_loop().time() - self.since

    def was_served(self) -> bool:
        return self.future.done() and not self.future.cancelled() and self.future.exception() is None


@dataclass(slots=True, eq=False, kw_only=True)
class _Admission(_Waiter):
    group_id: int
    again: bool
    reason: ClassVar[str] = "admit: the buffer is full"


@dataclass(slots=True, eq=False, kw_only=True)
class _Request(_Waiter):
    groups: int
    weight_version: int
    group_ids: tuple[int, ...] | None
    reason: ClassVar[str] = "select: the next groups are not ready"


class AsyncReplayBuffer:
    """Implements :class:`asyncrl.interfaces.ReplayBuffer` for callers on one event loop.

    Waiting calls are served in the order in which they began to wait, and none overtakes another: a small request
    behind a large one waits too. A call that is cancelled or passes its deadline changes nothing, even if it was
    served in the same iteration of the loop: its place is free again, its groups are ready again. Time is that of the
    running loop. Listeners are called inside the call that caused the drop, and their exceptions propagate from it.

    Args:
        capacity: groups that are pending, ready or selected at once. A driver under the admission law needs its
            ``window``: ``groups_per_step * (max_staleness + 1)``.
        max_staleness: hard bound, in versions.
        selection: ``fifo`` (group_id order, slow groups are waited for), ``windowed_fifo`` (waited for within a
            window), ``fifo_ready`` (group_id order among the ready ones), ``freshest``, ``uniform``, ``prioritized``,
            or a policy object (``buffers/selection.py``).
        eviction: what is dropped early, beside groups that passed the bound: ``oldest``, ``lowest_advantage`` or
            ``reservoir`` keep ``keep_groups`` ready groups, and need a selection that does not wait for certain groups
            (neither ``fifo`` nor ``windowed_fifo``); or a policy object that decides alone.
        batch_groups: groups that one select takes; quotas and rate limits need it.
        columns: names that must have arrived by :meth:`extend` before a group is ready.
        max_uses: steps that may train on one group.
        zero_variance: ``keep`` groups whose rewards are all equal, or ``drop`` them as they become ready (reason
            ``zero_variance``; arXiv:2503.14476). A later prompt replaces each, so batches stay full;
            ``zero_variance_limit`` of them in a row are an error. With ``credit`` branches or turns are compared
            (:mod:`asyncrl.algorithms.credit`); if ``scores`` are in ``columns``, by these alone.
        quotas: shares of a batch by environment (:attr:`GroupSummary.environment`).
        samples_per_insert: how often a group is used on average; ``insert_tolerance`` is how far either side may be
            ahead, in groups (:class:`buffers.policies.RateLimit`).
        window, priority, exponent, seed: options of selections.
        keep_groups: of ``eviction``.
        ledger: the ledger (or archive) that :meth:`query` reads. The buffer itself records nothing.

    >>> async def one_step():
    ...     buffer = AsyncReplayBuffer(capacity=4, max_staleness=1)
    ...     await buffer.admit(0)
    ...     buffer.put(summary, data)
    ...     batch = await buffer.select(1, weight_version=1, timeout_s=5.0)
    ...     buffer.release([group.summary.group_id for group in batch])
    ...     await buffer.select(1, weight_version=2, timeout_s=0.0)
    >>> asyncio.run(one_step())  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    asyncrl.errors.DeadlineError: select of 1 groups at version 2 passed its deadline of 0 s: 0 of 1 groups are next ...

    Raises:
        ConfigError: options are out of range, or contradict one another.
    """

    def __init__(
        self,
        *,
        capacity: int,
        max_staleness: int,
        selection: str | Selection = "fifo",
        eviction: Literal["oldest", "lowest_advantage", "reservoir"] | Eviction | None = None,
        batch_groups: int = 1,
        columns: Collection[str] = (),
        max_uses: int = 1,
        zero_variance: Literal["keep", "drop"] = "keep",
        zero_variance_limit: int = 1000,
        credit: Credit = "outcome",
        quotas: Mapping[str, float] | None = None,
        samples_per_insert: float | None = None,
        insert_tolerance: float | None = None,
        window: int | None = None,
        priority: Literal["advantage", "staleness"] | None = None,
        exponent: float | None = None,
        seed: int | None = None,
        keep_groups: int | None = None,
        ledger: Ledger | LedgerArchive | None = None,
    ) -> None:
        refuse = ZeroVariance(zero_variance_limit, credit=credit, by_turns="scores" not in columns)
        self._state = BufferState(
            capacity=capacity,
            max_staleness=max_staleness,
            selection=compose_selection(
                selection, quotas, window=window, priority=priority, exponent=exponent, seed=seed
            ),
            evictions=compose_evictions(
                eviction,
                selection=selection,
                max_staleness=max_staleness,
                quotas=quotas,
                batch_groups=batch_groups,
                capacity=capacity,
                keep_groups=keep_groups,
                seed=seed,
            ),
            columns=columns,
            max_uses=max_uses,
            refuse=refuse if zero_variance == "drop" else None,
        )
        self._rate = compose_rate_limit(
            samples_per_insert, insert_tolerance, batch_groups=batch_groups, max_uses=max_uses, capacity=capacity
        )
        self._batch_groups = batch_groups
        self._ledger = ledger
        self._admissions: OrderedDict[int, _Admission] = OrderedDict()
        self._requests: OrderedDict[int, _Request] = OrderedDict()
        self._tickets = count()
        self._listeners: list[Callable[[DroppedGroup], None]] = []
        self._dropped: list[DroppedGroup] = []  # counted; the listeners hear of them next
        self._closed = False
        self._error: BaseException | None = None

    # ---------------------------------------------------------------------------------------------------------- waits

    async def admit(self, group_id: int, *, again: bool = False, timeout_s: float | None = None) -> None:
        self._check_open("admit")
        self._state.check_new(group_id)
        if group_id in self._admissions:
            raise InvalidDataError(f"group_id {group_id} is being admitted by another call")
        if not self._admissions and self._may_admit(again=again):
            self._admit(group_id)
            if self._rate.limits:
                self._settle()  # it may allow a selection that waits
            return
        loop = asyncio.get_running_loop()
        waiter = _Admission(group_id=group_id, again=again, future=loop.create_future(), since=loop.time())
        await self._wait(
            self._admissions, group_id, waiter, timeout_s, give_back=lambda _: self.cancel_admission(group_id)
        )

    async def select(
        self,
        groups: int,
        *,
        weight_version: int,
        group_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> tuple[SelectedGroup, ...]:
        self._check_open("select")
        if not 1 <= groups <= self._state.capacity:
            raise InvalidDataError(f"select can return 1..{self._state.capacity} groups (the capacity), not {groups}")
        loop = asyncio.get_running_loop()
        waiter = _Request(
            groups=groups,
            weight_version=weight_version,
            group_ids=None if group_ids is None else tuple(group_ids),
            future=loop.create_future(),
            since=loop.time(),
        )
        taken: tuple[SelectedGroup, ...] = await self._wait(
            self._requests, next(self._tickets), waiter, timeout_s, give_back=self._give_back
        )
        return taken

    async def _wait(
        self,
        queue: OrderedDict[int, Any],
        key: int,
        waiter: _Admission | _Request,
        timeout_s: float | None,
        *,
        give_back: Callable[[Any], None],
    ) -> Any:
        """Queue a call until it is served. ``give_back`` undoes a service that the caller no longer receives."""
        queue[key] = waiter
        timer: asyncio.TimerHandle | None = None
        received = False
        try:
            self._settle()
            if timeout_s is not None:
                timer = waiter.future.get_loop().call_later(max(0.0, timeout_s), self._expire, waiter, timeout_s)
            result = await waiter.future
            received = True
            return result
        finally:
            if timer is not None:
                timer.cancel()
            if queue.get(key) is waiter:
                del queue[key]
            if not received and waiter.was_served():
                give_back(waiter.future.result())
            self._settle()

    def cancel_admission(self, group_id: int) -> None:
        """Undo :meth:`admit`, as if it had not been called; nothing if the group is not pending (any more)."""
        if self._state.stage(group_id) is Stage.PENDING:
            self._state.cancel_admission(group_id)
            self._rate.inserted(-1)
            self._settle()

    def _give_back(self, groups: Iterable[SelectedGroup]) -> None:
        group_ids = [group.summary.group_id for group in groups]
        self.restore([group_id for group_id in group_ids if self._state.stage(group_id) is Stage.SELECTED])

    def _expire(self, waiter: _Admission | _Request, timeout_s: float) -> None:
        if not waiter.future.done():
            why = self._why(waiter)
            message = f"{self._describe(waiter)} passed its deadline of {timeout_s:g} s: {why}"
            waiter.future.set_exception(DeadlineError(message, waiting_for=why, timeout_s=timeout_s))

    # --------------------------------------------------------------------------------------------------------- events

    def put(
        self, summary: GroupSummary, rows: DataProto | DataProtoFuture, *, uses: int = 0, reserved_uses: int = 0
    ) -> None:
        self._check_open("put")
        self._state.put(summary, rows, uses=uses, reserved_uses=reserved_uses)
        self._rate.sampled(uses)
        self._settle()

    def extend(
        self,
        group_id: int,
        columns: Collection[str],
        rows: DataProto | DataProtoFuture,
        *,
        rewards: tuple[float, ...] | None = None,
    ) -> None:
        self._check_open("extend")
        self._state.extend(group_id, columns, rows, rewards=rewards)
        self._settle()

    def release(self, group_ids: Iterable[int]) -> None:
        self._state.release(group_ids)
        self._settle()

    def restore(self, group_ids: Iterable[int]) -> None:
        restored = list(group_ids)
        self._state.restore(restored)
        self._rate.sampled(-len(restored))
        self._settle()

    def drop(self, group_id: int, reason: str, *, tokens: int = 0) -> None:
        was_selected = self._state.stage(group_id) is Stage.SELECTED
        self._state.drop(group_id, reason, tokens=tokens)
        if was_selected:
            self._rate.sampled(-1)  # no step trains on it
        self._settle()

    def on_drop(self, listener: Callable[[DroppedGroup], None]) -> None:
        self._listeners.append(listener)

    def close(self, error: BaseException | None = None) -> None:
        if self._closed:
            return
        self._closed, self._error = True, error
        for waiter in self._waiters():
            waiter.future.set_exception(self._closed_error(self._describe(waiter)))

    async def settled(self) -> None:
        """Return at once: every call has taken effect when it returns."""

    def _settle(self) -> None:
        if self._state.has_left:
            self._count_left()
        again = True
        while again and not self._closed:
            again = False
            while self._requests:
                ticket, request = next(iter(self._requests.items()))
                if not request.future.done():
                    served = self._serve(request)
                    if self._state.has_left:
                        self._count_left()
                    if not served:
                        break
                del self._requests[ticket]
            while self._admissions:
                group_id, admission = next(iter(self._admissions.items()))
                if not admission.future.done() and not self._may_admit(again=admission.again):
                    break
                del self._admissions[group_id]
                if not admission.future.done():
                    self._admit(group_id)
                    admission.future.set_result(None)
                    again = self._rate.limits  # it may allow the next selection
        if self._dropped:
            dropped, self._dropped = self._dropped, []
            for group in dropped:
                for listener in self._listeners:
                    listener(group)

    def _count_left(self) -> None:
        """Count groups that have left, for the rate limit. Before waits are served."""
        for uses in self._state.drain_used_up():
            self._rate.settled(uses)
        dropped = self._state.drain_dropped()
        self._rate.inserted(-len(dropped))
        self._dropped += dropped

    def _serve(self, request: _Request) -> bool:
        """Give a request its groups, or the error of taking them: it is not that of the call that is made now."""
        try:
            taken = self._take(request)
        except Exception as error:  # noqa: BLE001  raised by the call that waits
            request.future.set_exception(error)
            return True
        if taken is not None:
            request.future.set_result(taken)
        return taken is not None

    def _take(self, request: _Request) -> tuple[SelectedGroup, ...] | None:
        if request.group_ids is not None:
            taken = self._state.take_these(request.group_ids)
        elif not self._rate.may_sample(request.groups):
            return None
        else:
            taken = self._state.take(request.groups, weight_version=request.weight_version)
        if taken is not None:
            self._rate.sampled(len(taken))
        return taken

    def _admit(self, group_id: int) -> None:
        self._state.admit(group_id)
        self._rate.inserted()

    def _may_admit(self, *, again: bool) -> bool:
        """Return whether a group may be admitted now. If the rate limit keeps all places occupied, free one."""
        if not again and not self._rate.may_insert():
            return False
        if self._state.has_room:
            return True
        if self._rate.may_sample(self._batch_groups) or not self._state.make_room():
            return False
        self._count_left()
        return again or self._rate.may_insert()

    # -------------------------------------------------------------------------------------------------------- reading

    def query(
        self, where: str = "", parameters: Mapping[str, Any] | None = None, *, limit: int | None = None
    ) -> DataProto:
        if self._ledger is None:
            raise LedgerError(
                "query: trajectories are read from a ledger, and this buffer was made without one; make it with "
                "ledger=SQLiteLedger(path) or, to read only, ledger=SQLiteLedger.archive(path); a run gives its buffer "
                'the one that ledger.kind = "sqlite" keeps'
            )
        return self._ledger.query(where, parameters, limit=limit)

    def statistics(self) -> ReplayBufferStatistics:
        waiting: dict[str, float] = {}
        for waiter in self._waiters():
            waiting[waiter.reason] = max(waiting.get(waiter.reason, 0.0), waiter.waited_s())
        return replace(self._state.statistics(), waiting=waiting)

    def explain(self) -> tuple[str, ...]:
        return tuple(
            f"{self._describe(waiter)} has waited {waiter.waited_s():.3g} s: {self._why(waiter)}"
            for waiter in self._waiters()
        )

    def _waiters(self) -> list[_Admission | _Request]:
        waiters: list[_Admission | _Request] = [*self._admissions.values(), *self._requests.values()]
        return [waiter for waiter in waiters if not waiter.future.done()]

    def _why(self, waiter: _Admission | _Request) -> str:
        if isinstance(waiter, _Request):
            first = next(waiting for waiting in self._requests.values() if not waiting.future.done())
            if first is not waiter:
                return "other calls of select came first"
            if waiter.group_ids is not None:
                return f"group_ids {', '.join(map(str, waiter.group_ids))} are not all ready"
            if not self._rate.may_sample(waiter.groups):
                return f"{self._rate}: new groups must be admitted first"
            return self._state.explain(waiter.groups)
        if not waiter.again and not self._rate.may_insert():
            return f"{self._rate}: they must be used first"
        counts = self._state.statistics()
        return (
            f"all {counts.capacity} places are taken "
            f"({counts.pending} pending, {counts.ready} ready, {counts.selected} selected)"
        )

    def _describe(self, waiter: _Admission | _Request) -> str:
        if isinstance(waiter, _Request):
            return f"select of {waiter.groups} groups at version {waiter.weight_version}"
        return f"admit of group_id {waiter.group_id}"

    def _check_open(self, call: str) -> None:
        if self._closed:
            raise self._closed_error(call)

    def _closed_error(self, call: str) -> BufferClosedError:
        cause = f": {type(self._error).__name__}: {self._error}" if self._error is not None else ""
        error = BufferClosedError(f"{call}: the buffer is closed{cause}")
        error.__cause__ = self._error
        return error
