"""The replay buffer of one process: the state machine of :mod:`buffers.state` behind fair waits with deadlines."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from asyncrl.errors import BufferClosedError, ConfigError, DeadlineError, InvalidDataError, LedgerError
from asyncrl.interfaces import DroppedGroup, GroupSummary, ReplayBufferStatistics, SelectedGroup
from buffers.eviction import Eviction
from buffers.policies import ZeroVariance, compose_eviction, compose_selection
from buffers.rate_limit import RateLimit
from buffers.selection import Selection
from buffers.state import BufferState, Stage

if TYPE_CHECKING:
    from asyncrl.data import DataProto, DataProtoFuture
    from asyncrl.interfaces import Ledger, LedgerArchive

__all__ = ["AsyncReplayBuffer"]

_T = TypeVar("_T")


@dataclass(slots=True, eq=False, kw_only=True)
class _Waiter(Generic[_T]):
    """One waiting call. Whoever makes the wait come true resolves its future with what it waited for."""

    future: asyncio.Future[_T]
    since: float

    def waited_s(self) -> float:
        return self.future.get_loop().time() - self.since

    def was_served(self) -> bool:
        return self.future.done() and not self.future.cancelled() and self.future.exception() is None


@dataclass(slots=True, eq=False, kw_only=True)
class _Admission(_Waiter[None]):
    slot: int
    again: bool
    reason: ClassVar[str] = "admit: the buffer is full"


@dataclass(slots=True, eq=False, kw_only=True)
class _Request(_Waiter[tuple[SelectedGroup, ...]]):
    groups: int
    weight_version: int
    slots: tuple[int, ...] | None = None
    reason: ClassVar[str] = "select: the next groups are not ready"


class AsyncReplayBuffer:
    """Implements :class:`asyncrl.interfaces.ReplayBuffer` for callers on one event loop.

    Places and groups are handed to the calls that wait for them, in the order in which they began to wait, and nobody
    overtakes: a small request behind a large one waits too. A call that is cancelled or passes its deadline changes
    nothing, not even when it was served in the same turn of the loop: the place is free again, the groups are ready
    again. Time is the running loop's.

    Args:
        capacity: groups that are pending, ready or selected at once. A driver under the admission law needs its
            ``window``: ``groups_per_step * (max_staleness + 1)``.
        max_staleness: hard bound, in versions.
        selection: ``fifo`` (slot order, slow groups are waited for), ``windowed_fifo`` (so far and no further),
            ``fifo_ready`` (slot order among the ready ones), ``freshest``, ``uniform``, ``prioritized``, or a policy
            object (``buffers/selection.py``, ``buffers/sampling.py``).
        eviction: what is given up early, beside groups that passed the bound: ``oldest``, ``dullest`` or ``reservoir``
            keep ``keep_groups`` ready groups, where the selection waits for none of them (neither ``fifo`` nor
            ``windowed_fifo``); or a policy object that does all of it.
        batch_groups: groups that one select takes, where quotas or a rate limit must know.
        columns: names that must have arrived by :meth:`extend` before a group is ready.
        max_uses: steps that may train on one group.
        zero_variance: ``keep`` groups whose rewards are all equal, or ``drop`` them as they get ready (reason
            ``zero_variance``; arXiv:2503.14476). The slot of one that is dropped is taken by a later prompt, so batches
            stay full; ``zero_variance_limit`` of them in a row are an error.
        quotas: shares of a batch by environment (:attr:`GroupSummary.environment`).
        samples_per_insert: how often a group is used on average; ``insert_tolerance`` says how far either side may be
            ahead, in groups (``buffers/rate_limit.py``).
        window, priority, exponent, seed: of selections that take them.
        keep_groups: of ``eviction``.
        ledger: what :meth:`query` asks: the one that whoever fills the buffer keeps, or the archive of another's. The
            buffer itself tells it nothing.

    >>> import asyncio
    >>> async def story() -> tuple[int, ...]:
    ...     buffer = AsyncReplayBuffer(capacity=4, max_staleness=1)
    ...     await buffer.admit(0)
    ...     buffer.put(
    ...         GroupSummary(
    ...             slot=0, rows=1, oldest_version=0, tokens=2, version_tokens={0: 2}, rewards=(1.0,), lengths=(2,)
    ...         ),
    ...         rows=...,
    ...     )
    ...     batch = await buffer.select(1, weight_version=1, timeout_s=5.0)
    ...     buffer.release([group.summary.slot for group in batch])
    ...     return tuple(group.summary.slot for group in batch)
    >>> asyncio.run(story())
    (0,)

    The examples of the methods put the same group: two rows ``data``, and their ``summary``; ``ledger`` knows it.

    Raises:
        ConfigError: options that are out of range, or do not go together.
    """

    def __init__(
        self,
        *,
        capacity: int,
        max_staleness: int,
        selection: str | Selection = "fifo",
        eviction: Literal["oldest", "dullest", "reservoir"] | Eviction | None = None,
        batch_groups: int = 1,
        columns: Collection[str] = (),
        max_uses: int = 1,
        zero_variance: Literal["keep", "drop"] = "keep",
        zero_variance_limit: int = 1000,
        quotas: Mapping[str, float] | None = None,
        samples_per_insert: float | None = None,
        insert_tolerance: float | None = None,
        window: int | None = None,
        priority: Literal["advantage", "age"] | None = None,
        exponent: float | None = None,
        seed: int | None = None,
        keep_groups: int | None = None,
        ledger: Ledger | LedgerArchive | None = None,
    ) -> None:
        self._state = BufferState(
            capacity=capacity,
            max_staleness=max_staleness,
            selection=compose_selection(
                selection, quotas, window=window, priority=priority, exponent=exponent, seed=seed
            ),
            eviction=compose_eviction(
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
            refuse=ZeroVariance(zero_variance_limit) if zero_variance == "drop" else None,
        )
        self._ledger = ledger
        self._batch_groups = batch_groups
        self._rate: RateLimit | None = None
        if samples_per_insert is not None:
            self._rate = RateLimit(
                samples_per_insert=samples_per_insert,
                tolerance=(samples_per_insert * (batch_groups + 1) if insert_tolerance is None else insert_tolerance),
                batch_groups=batch_groups,
                max_uses=max_uses,
                capacity=capacity,
            )
        elif insert_tolerance is not None:
            raise ConfigError(
                "insert_tolerance belongs to samples_per_insert",
                path="buffer.options.insert_tolerance",
                remedy="give both, or none",
            )
        self._admissions: OrderedDict[int, _Admission] = OrderedDict()
        self._requests: OrderedDict[int, _Request] = OrderedDict()
        self._tickets = count()
        self._listeners: list[Callable[[DroppedGroup], None]] = []
        self._closed = False
        self._error: BaseException | None = None

    async def admit(self, slot: int, *, again: bool = False, timeout_s: float | None = None) -> None:
        """Reserve a place for the group ``slot``; waits while the buffer is full.

            >>> buffer = AsyncReplayBuffer(capacity=1, max_staleness=1)
            >>> asyncio.run(buffer.admit(0))
            >>> asyncio.run(buffer.admit(1, timeout_s=0.0))  # doctest: +ELLIPSIS
            Traceback (most recent call last):
            asyncrl.errors.DeadlineError: admit of slot 1 passed its deadline of 0 s: all 1 places are taken ...

        Args:
            slot: of the group.
            again: an earlier run admitted it too, so a rate of use is not asked a second time: what it holds back are
                new groups, and a resumed run takes up its old ones before it trains.
            timeout_s: to wait at most.

        Raises:
            InvalidDataError: the slot was admitted before, or another call is admitting it.
            DeadlineError: still full after ``timeout_s``.
            BufferClosedError: closed, before or meanwhile.
        """
        self._check_open("admit")
        self._state.check_new(slot)
        if slot in self._admissions:
            raise InvalidDataError(f"slot {slot} is being admitted by another call")
        if not self._admissions and self._may_admit(again=again):
            self._admit(slot)
            return
        loop = asyncio.get_running_loop()
        waiter = _Admission(slot=slot, again=again, future=loop.create_future(), since=loop.time())
        self._admissions[slot] = waiter
        served = False
        try:
            with self._deadline(waiter, timeout_s):
                await waiter.future
            served = True
        finally:
            if self._admissions.get(slot) is waiter:
                del self._admissions[slot]
            if not served and waiter.was_served():
                self.withdraw(slot)
            self._settle()

    def withdraw(self, slot: int) -> None:
        """Undo :meth:`admit`, as if it had not been called; nothing if the group is not pending (any more).

        >>> buffer = AsyncReplayBuffer(capacity=4, max_staleness=1)
        >>> asyncio.run(buffer.admit(0))
        >>> buffer.withdraw(0)
        >>> buffer.statistics().admitted
        0
        """
        if self._state.stage(slot) is Stage.PENDING:
            self._state.withdraw(slot)
            if self._rate is not None:
                self._rate.inserted(-1)
            self._settle()

    async def settled(self) -> None:
        """Everything is done when its call returns.

        >>> buffer = AsyncReplayBuffer(capacity=4, max_staleness=1)
        >>> asyncio.run(buffer.settled())
        """

    def put(
        self, summary: GroupSummary, rows: DataProto | DataProtoFuture, *, uses: int = 0, promised: int = 0
    ) -> None:
        """The first rows of a pending group; it is ready, unless columns are still to come (:meth:`extend`).

        ``uses`` is how many steps of an earlier run trained on it; ``promised`` how many will take it by its number
        (``select(slots=...)``), until which no policy hands it out, refuses it or gives it up.

            >>> buffer = AsyncReplayBuffer(capacity=4, max_staleness=1)
            >>> asyncio.run(buffer.admit(0))
            >>> buffer.put(summary, data)
            >>> buffer.statistics().ready
            1

        Raises:
            InvalidDataError: the slot is unknown or not pending.
            BufferClosedError: closed.
        """
        self._check_open("put")
        self._state.put(summary, rows, uses=uses, promised=promised)
        if self._rate is not None:
            self._rate.sampled(uses)
        self._settle()

    def extend(
        self,
        slot: int,
        columns: Collection[str],
        rows: DataProto | DataProtoFuture,
        *,
        rewards: tuple[float, ...] | None = None,
    ) -> None:
        """Further columns of a pending group, joined to its rows; ``rewards`` take the place of its summary's.

            >>> buffer = AsyncReplayBuffer(capacity=4, max_staleness=1, columns=["reference_log_probs"])
            >>> asyncio.run(buffer.admit(0))
            >>> buffer.put(summary, data)
            >>> scored = DataProto.from_dict({"reference_log_probs": torch.zeros(len(data))})
            >>> buffer.extend(0, ["reference_log_probs"], scored)
            >>> buffer.statistics().ready
            1

        Raises:
            BufferClosedError: closed.
            InvalidDataError: the group is not pending, or nobody waits for these columns.
        """
        self._check_open("extend")
        self._state.extend(slot, columns, rows, rewards=rewards)
        self._settle()

    async def select(
        self,
        groups: int,
        *,
        weight_version: int,
        slots: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> tuple[SelectedGroup, ...]:
        """Wait for ``groups`` groups that may be trained at ``weight_version`` and take them, in the policy's order.

        With ``slots`` take exactly these, in this order, as an earlier run did: neither policy nor bound is asked.

            >>> buffer = AsyncReplayBuffer(capacity=4, max_staleness=1)
            >>> asyncio.run(buffer.admit(0))
            >>> buffer.put(summary, data)
            >>> [group.summary.slot for group in asyncio.run(buffer.select(1, weight_version=2))]
            [0]

        Raises:
            InvalidDataError: ``groups`` is not in 1..capacity, so the wait could never end.
            DeadlineError: they were not there within ``timeout_s``.
            BufferClosedError: closed, before or meanwhile.
        """
        self._check_open("select")
        if not 1 <= groups <= self._state.capacity:
            raise InvalidDataError(f"select can return 1..{self._state.capacity} groups (the capacity), not {groups}")
        loop = asyncio.get_running_loop()
        waiter = _Request(
            groups=groups,
            weight_version=weight_version,
            slots=None if slots is None else tuple(slots),
            future=loop.create_future(),
            since=loop.time(),
        )
        ticket = next(self._tickets)
        self._requests[ticket] = waiter
        served = False
        try:
            self._settle()
            with self._deadline(waiter, timeout_s):
                taken = await waiter.future
            served = True
            return taken
        finally:
            self._requests.pop(ticket, None)
            if not served and waiter.was_served():
                taken_slots = [group.summary.slot for group in waiter.future.result()]
                self.restore([slot for slot in taken_slots if self._state.stage(slot) is Stage.SELECTED])
            self._settle()

    def release(self, slots: Iterable[int]) -> None:
        """The groups were trained on; forget their rows. All of them or, when one is not selected, none.

            >>> buffer = AsyncReplayBuffer(capacity=4, max_staleness=1)
            >>> asyncio.run(buffer.admit(0))
            >>> buffer.put(summary, data)
            >>> (group,) = asyncio.run(buffer.select(1, weight_version=2))
            >>> buffer.release([group.summary.slot])
            >>> buffer.statistics().released
            1

        Raises:
            InvalidDataError: a group is not selected.
        """
        self._state.release(slots)
        self._settle()

    def drop(self, slot: int, reason: str, *, tokens: int = 0) -> None:
        """Give a group up. ``tokens`` counts what was sampled for a pending group; others know theirs.

            >>> buffer = AsyncReplayBuffer(capacity=4, max_staleness=1)
            >>> asyncio.run(buffer.admit(0))
            >>> buffer.drop(0, "too slow", tokens=3)
            >>> buffer.statistics().dropped_tokens
            {'too slow': 3}

        Raises:
            InvalidDataError: the slot is unknown, or there is no reason.
        """
        self._state.drop(slot, reason, tokens=tokens)
        self._settle()

    def on_drop(self, listener: Callable[[DroppedGroup], None]) -> None:
        """Tell ``listener`` of every group dropped from now on, once the buffer's books are in order again.

        It is called inside the call that caused the drop, which also gets what it raises.

        >>> buffer = AsyncReplayBuffer(capacity=4, max_staleness=1)
        >>> asyncio.run(buffer.admit(0))
        >>> dropped = []
        >>> buffer.on_drop(dropped.append)
        >>> buffer.drop(0, "too slow", tokens=3)
        >>> dropped
        [DroppedGroup(slot=0, reason='too slow', tokens=3)]
        """
        self._listeners.append(listener)

    def restore(self, slots: Iterable[int]) -> None:
        """Give selected groups back as ready: their step did not happen.

            >>> buffer = AsyncReplayBuffer(capacity=4, max_staleness=1)
            >>> asyncio.run(buffer.admit(0))
            >>> buffer.put(summary, data)
            >>> (group,) = asyncio.run(buffer.select(1, weight_version=2))
            >>> buffer.restore([group.summary.slot])
            >>> buffer.statistics().ready
            1

        Raises:
            InvalidDataError: a group is not selected.
        """
        given_back = list(slots)
        self._state.restore(given_back)
        if self._rate is not None:
            self._rate.sampled(-len(given_back))
        self._settle()

    def close(self, error: BaseException | None = None) -> None:
        """Wake every waiter with :class:`BufferClosedError` (caused by ``error``). Idempotent: the first error counts.

        Groups can still be released, dropped and restored, so that the books can be closed too.

        >>> buffer = AsyncReplayBuffer(capacity=4, max_staleness=1)
        >>> buffer.close()
        >>> asyncio.run(buffer.admit(0))
        Traceback (most recent call last):
        asyncrl.errors.BufferClosedError: admit: the buffer is closed
        """
        if self._closed:
            return
        self._closed, self._error = True, error
        for waiter in self._waiters():
            waiter.future.set_exception(self._closed_error(self._describe(waiter)))

    def query(
        self, where: str = "", parameters: Mapping[str, Any] | None = None, *, limit: int | None = None
    ) -> DataProto:
        """Trajectories that the ledger has recorded, of this life of a run and those before it. Blocks.

        They are those on the disk: what was appended just now is there after ``await ledger.durable()``.

            >>> buffer = AsyncReplayBuffer(capacity=4, max_staleness=1, ledger=ledger)
            >>> good = buffer.query("reward > :least", {"least": 0.5})
            >>> good.batch["rewards"].tolist(), good.non_tensor_batch["state"].tolist()
            ([1.0], ['completed'])

        Args:
            where: an SQL condition on the view ``rows`` (``buffers/ledger_schema.py``), with ``:name`` for parameters.
            parameters: by name.
            limit: rows at most.

        Returns:
            The trajectory columns of :mod:`asyncrl.interfaces`, ``attempt``, ``step`` (that trained on it, or -1) and
            ``position`` [B] int64, and ``state`` (str), in the order of prompt and row.

        Raises:
            LedgerError: the buffer was made without a ledger, or the condition is none.
        """
        if self._ledger is None:
            raise LedgerError(
                "query: trajectories are read from a ledger, and this buffer was made without one; make it with "
                "ledger=SQLiteLedger(path) or, to read only, ledger=SQLiteLedger.archive(path); a run gives its buffer "
                'the one that ledger.kind = "sqlite" keeps'
            )
        return self._ledger.query(where, parameters, limit=limit)

    def statistics(self) -> ReplayBufferStatistics:
        """Counts in groups; ``waiting`` has the longest wait now in progress, in seconds, by its reason.

        >>> buffer = AsyncReplayBuffer(capacity=4, max_staleness=1)
        >>> asyncio.run(buffer.admit(0))
        >>> buffer.statistics().pending
        1
        """
        waiting: dict[str, float] = {}
        for waiter in self._waiters():
            waiting[waiter.reason] = max(waiting.get(waiter.reason, 0.0), waiter.waited_s())
        return replace(self._state.statistics(), waiting=waiting)

    def explain(self) -> tuple[str, ...]:
        """One sentence for every wait in progress: what waits, for how long, and what for.

        >>> buffer = AsyncReplayBuffer(capacity=4, max_staleness=1)
        >>> async def stuck():
        ...     async with asyncio.TaskGroup() as tasks:
        ...         waiting = tasks.create_task(buffer.select(1, weight_version=0))
        ...         await asyncio.sleep(0)
        ...         told = buffer.explain()
        ...         waiting.cancel()
        ...     return told
        >>> asyncio.run(stuck())  # doctest: +ELLIPSIS
        ('select of 1 groups at version 0 has waited ... s: ...',)
        """
        return tuple(
            f"{self._describe(waiter)} has waited {waiter.waited_s():.3g} s: {self._why(waiter)}"
            for waiter in self._waiters()
        )

    def _waiters(self) -> list[_Admission | _Request]:
        waiters: list[_Admission | _Request] = [*self._admissions.values(), *self._requests.values()]
        return [waiter for waiter in waiters if not waiter.future.done()]

    def _settle(self) -> None:
        """Serve whoever can be served, in order; then tell the listeners what was dropped."""
        self._settle_rate()
        while self._requests and not self._closed:
            ticket, request = next(iter(self._requests.items()))
            if not request.future.done():
                taken = self._take(request)
                if taken is None:
                    break
                request.future.set_result(taken)
            del self._requests[ticket]
        while self._admissions and not self._closed:
            slot, admission = next(iter(self._admissions.items()))
            if not self._may_admit(again=admission.again):
                break
            del self._admissions[slot]
            if not admission.future.done():
                self._admit(slot)
                admission.future.set_result(None)
        for dropped in self._state.drain_dropped():
            if self._rate is not None:
                self._rate.inserted(-1)
            for listener in self._listeners:
                listener(dropped)

    def _take(self, request: _Request) -> tuple[SelectedGroup, ...] | None:
        if request.slots is not None:
            taken = self._state.take_these(request.slots)
        elif self._rate is not None and not self._rate.may_sample(request.groups):
            return None
        else:
            taken = self._state.take(request.groups, weight_version=request.weight_version)
        if taken is not None and self._rate is not None:
            self._rate.sampled(len(taken))
        return taken

    def _admit(self, slot: int) -> None:
        self._state.admit(slot)
        if self._rate is not None:
            self._rate.inserted()

    def _may_admit(self, *, again: bool) -> bool:
        """Whether a group may come in now; where the rate of use is what keeps the places taken, one is freed."""
        if self._rate is not None and not again and not self._rate.may_insert():
            return False
        if self._state.has_room:
            return True
        stuck = self._rate is not None and not self._rate.may_sample(self._batch_groups)
        made = stuck and self._state.make_room()
        self._settle_rate()
        return made and (again or self._rate is None or self._rate.may_insert())

    def _settle_rate(self) -> None:
        used_up = self._state.drain_used_up()
        if self._rate is not None:
            for uses in used_up:
                self._rate.settled(uses)

    @contextmanager
    def _deadline(self, waiter: _Admission | _Request, timeout_s: float | None) -> Iterator[None]:
        """Let the wait fail with :class:`DeadlineError` after ``timeout_s``, unless it was served by then."""
        if timeout_s is None:
            yield
            return
        timer = waiter.future.get_loop().call_later(max(0.0, timeout_s), self._expire, waiter, timeout_s)
        try:
            yield
        finally:
            timer.cancel()

    def _expire(self, waiter: _Admission | _Request, timeout_s: float) -> None:
        if not waiter.future.done():
            why = self._why(waiter)
            message = f"{self._describe(waiter)} passed its deadline of {timeout_s:g} s: {why}"
            waiter.future.set_exception(DeadlineError(message, waiting_for=why, timeout_s=timeout_s))

    def _why(self, waiter: _Admission | _Request) -> str:
        if isinstance(waiter, _Request):
            first = next(waiting for waiting in self._requests.values() if not waiting.future.done())
            if first is not waiter:
                return "other calls of select came first"
            if waiter.slots is not None:
                return f"slots {', '.join(map(str, waiter.slots))} are not all ready"
            if self._rate is not None and not self._rate.may_sample(waiter.groups):
                return f"{self._rate.samples:g} uses of {self._rate.inserts} groups: new groups must come in first"
            return self._state.explain(waiter.groups)
        if self._rate is not None and not waiter.again and not self._rate.may_insert():
            return f"{self._rate.samples:g} uses of {self._rate.inserts} groups: they must be used first"
        counts = self._state.statistics()
        return (
            f"all {counts.capacity} places are taken "
            f"({counts.pending} pending, {counts.ready} ready, {counts.selected} selected)"
        )

    def _describe(self, waiter: _Admission | _Request) -> str:
        if isinstance(waiter, _Request):
            return f"select of {waiter.groups} groups at version {waiter.weight_version}"
        return f"admit of slot {waiter.slot}"

    def _check_open(self, call: str) -> None:
        if self._closed:
            raise self._closed_error(call)

    def _closed_error(self, call: str) -> BufferClosedError:
        cause = f": {type(self._error).__name__}: {self._error}" if self._error is not None else ""
        error = BufferClosedError(f"{call}: the buffer is closed{cause}")
        error.__cause__ = self._error
        return error
