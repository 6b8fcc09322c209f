"""The life of groups in a replay buffer: a pure state machine, without a clock, a wait or a task.

    admit        put, extend      take            release, used up
    ------> pending ---> ready -------> selected -----------------> released
               |           |  <-------     |
               |           |   restore; release, to be used again
               +-----------+---------------+--> dropped (reason)

A group is ready when all the columns that its consumer asked for are there, in whatever order they came. It is used by
at most ``max_uses`` steps; once it was used it is never dropped: what ends its stay early counts as released.
A group that is promised to batches of an earlier run waits for them alone: no policy hands it out, refuses it or
gives it up before.

Groups that are pending, ready or selected occupy a place; there are ``capacity`` places. Each event costs O(log n) per
group named in it, where n is the number of places taken.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, cast

from asyncrl.errors import InvalidDataError
from asyncrl.interfaces import DroppedGroup, GroupSummary, ReplayBufferStatistics, SelectedGroup
from buffers.eviction import Eviction, StalenessBound
from buffers.selection import Selection
from buffers.slots import SlotHeap, SlotRanges

if TYPE_CHECKING:
    from asyncrl.data import DataProto, DataProtoFuture

__all__ = ["BufferState", "Stage", "joined"]


class Stage(Enum):
    """Where a group is in its life, while it occupies a place.

    >>> [stage.value for stage in Stage]
    ['pending', 'ready', 'selected']
    """

    PENDING = "pending"
    READY = "ready"
    SELECTED = "selected"


@dataclass(slots=True)
class _Group:
    stage: Stage = Stage.PENDING
    held: SelectedGroup | None = None
    missing: set[str] = field(default_factory=set)
    parts: list[DataProto | DataProtoFuture] = field(default_factory=list)
    rewards: tuple[float, ...] | None = None
    promised: int = 0


class BufferState:
    """Groups and their stages. Raises :class:`InvalidDataError` for any event that the picture above does not have.

        >>> from buffers.selection import SlotOrder
        >>> state = BufferState(capacity=2, max_staleness=1, selection=SlotOrder())
        >>> state.admit(0)
        >>> state.put(summary, data)
        >>> (group,) = state.take(1, weight_version=2)
        >>> state.stage(0), group.summary.rewards
        (<Stage.SELECTED: 'selected'>, (0.0, 1.0))
        >>> state.release([0])
        >>> state.stage(0) is None, state.statistics().released
        (True, 1)

    The examples of the methods put the same group: number 0, with four tokens, the oldest of them sampled under
    version 1. Its rows are ``data``.

    Args:
        capacity: places.
        max_staleness: hard bound on ``weight_version - oldest_version`` of what :meth:`take` returns.
        selection: which ready groups are taken; owned by this state from now on.
        eviction: which are given up before their turn; by default those that passed the bound.
        columns: names that must have arrived, beside the first rows, before a group is ready.
        max_uses: steps that may train on one group.
        refuse: names the reason to drop a group as it gets ready, or None.

    Raises:
        ValueError: ``capacity`` or ``max_uses`` is below 1, or ``max_staleness`` below 0.
    """

    def __init__(
        self,
        *,
        capacity: int,
        max_staleness: int,
        selection: Selection,
        eviction: Eviction | None = None,
        columns: Collection[str] = (),
        max_uses: int = 1,
        refuse: Callable[[GroupSummary], str | None] | None = None,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 group, got {capacity}")
        if max_staleness < 0:
            raise ValueError(f"max_staleness must be 0 or more, got {max_staleness}")
        if max_uses < 1:
            raise ValueError(f"max_uses must be at least 1, got {max_uses}")
        self.capacity = capacity
        self.max_staleness = max_staleness
        self.max_uses = max_uses
        self._columns = frozenset(columns)
        self._refuse = refuse
        self._used = SlotHeap()
        self._used_up: list[int] = []
        self._selection = selection
        self._eviction: Eviction = eviction or StalenessBound(max_staleness)
        self._groups: dict[int, _Group] = {}
        self._known = SlotRanges()
        self._counts = dict.fromkeys(Stage, 0)
        self._admitted = 0
        self._released = 0
        self._ready_tokens = 0
        self._dropped: dict[str, int] = {}
        self._dropped_tokens: dict[str, int] = {}
        self._news: list[DroppedGroup] = []

    @property
    def has_room(self) -> bool:
        """True if a group can be admitted.

        >>> state = BufferState(capacity=1, max_staleness=1, selection=SlotOrder())
        >>> state.admit(0)
        >>> state.has_room
        False
        """
        return len(self._groups) < self.capacity

    def stage(self, slot: int) -> Stage | None:
        """Where the group is, or None if it occupies no place.

        >>> state = BufferState(capacity=2, max_staleness=1, selection=SlotOrder())
        >>> state.admit(0)
        >>> state.stage(0), state.stage(1)
        (<Stage.PENDING: 'pending'>, None)
        """
        group = self._groups.get(slot)
        return None if group is None else group.stage

    def check_new(self, slot: int) -> None:
        """Refuse a slot that was ever admitted.

            >>> state = BufferState(capacity=2, max_staleness=1, selection=SlotOrder())
            >>> state.admit(0)
            >>> state.drop(0, "too slow")
            >>> state.check_new(1)
            >>> state.check_new(0)
            Traceback (most recent call last):
            asyncrl.errors.InvalidDataError: slot 0 was admitted before; a slot number is used once

        Raises:
            InvalidDataError: it was.
        """
        if slot in self._known:
            raise InvalidDataError(f"slot {slot} was admitted before; a slot number is used once")

    def admit(self, slot: int) -> None:
        """Take a place for a new group. Call only while :attr:`has_room`.

            >>> state = BufferState(capacity=1, max_staleness=1, selection=SlotOrder())
            >>> state.admit(0)
            >>> state.admit(1)
            Traceback (most recent call last):
            asyncrl.errors.InvalidDataError: all 1 places are taken

        Raises:
            InvalidDataError: the slot was admitted before, or there is no room.
        """
        self.check_new(slot)
        if not self.has_room:
            raise InvalidDataError(f"all {self.capacity} places are taken")
        self._known.add(slot)
        self._groups[slot] = _Group(missing=set(self._columns))
        self._admitted += 1
        self._counts[Stage.PENDING] += 1
        self._selection.admitted(slot)

    def withdraw(self, slot: int) -> None:
        """Undo :meth:`admit`, as if it had not been called. The group must be pending.

            >>> state = BufferState(capacity=1, max_staleness=1, selection=SlotOrder())
            >>> state.admit(0)
            >>> state.withdraw(0)
            >>> state.statistics().admitted
            0
            >>> state.admit(0)  # its number is free again

        Raises:
            InvalidDataError: it is not pending.
        """
        self._require([slot], Stage.PENDING)
        self._selection.forget(slot)
        self._forget(slot)
        self._known.remove(slot)
        self._admitted -= 1

    def put(
        self, summary: GroupSummary, rows: DataProto | DataProtoFuture, *, uses: int = 0, promised: int = 0
    ) -> None:
        """The first rows of a pending group, and its summary. It is ready if no further columns are waited for.

            >>> state = BufferState(capacity=2, max_staleness=1, selection=SlotOrder())
            >>> state.admit(0)
            >>> state.put(summary, data)
            >>> state.stage(0), state.statistics().ready_tokens
            (<Stage.READY: 'ready'>, 4)

        Args:
            summary: of the group; names its slot.
            rows: [G], where they lie.
            uses: steps of an earlier run that trained on it.
            promised: steps that :meth:`take_these` will take it for, before any policy hears of it.

        Raises:
            InvalidDataError: the group is not pending, has its first rows already, or has not one reward per row.
        """
        self._require([summary.slot], Stage.PENDING)
        group = self._groups[summary.slot]
        if group.held is not None:
            raise InvalidDataError(f"slot {summary.slot} was put before; what comes later extends it")
        group.held = SelectedGroup(summary=summary, rows=rows, uses=uses)
        group.promised = promised
        if promised:
            self._selection.forget(summary.slot)
        self._complete(group)

    def extend(
        self,
        slot: int,
        columns: Collection[str],
        rows: DataProto | DataProtoFuture,
        *,
        rewards: tuple[float, ...] | None = None,
    ) -> None:
        """Further columns of a pending group, before or after :meth:`put`.

            >>> state = BufferState(capacity=2, max_staleness=1, selection=SlotOrder(), columns=["scores"])
            >>> state.admit(0)
            >>> state.put(summary, DataProto.from_dict({"x": torch.tensor([1, 2])}))
            >>> state.stage(0)
            <Stage.PENDING: 'pending'>
            >>> state.extend(0, ["scores"], DataProto.from_dict({"scores": torch.ones(2)}), rewards=(0.5, 2.0))
            >>> (group,) = state.take(1, weight_version=2)
            >>> "scores" in group.rows.batch, group.summary.rewards
            (True, (0.5, 2.0))

        Args:
            slot: of the group.
            columns: names of those that came, each waited for and not here yet.
            rows: [G], with these columns, in the order of the group's rows.
            rewards: one per row; they replace those of the summary.

        Raises:
            InvalidDataError: the group is not pending, a column came twice or was not asked for, or there is not one
                reward per row.
        """
        self._require([slot], Stage.PENDING)
        group = self._groups[slot]
        late = set(columns) - group.missing
        if late:
            raise InvalidDataError(f"columns {sorted(late)} of slot {slot} came twice, or nobody asked for them")
        group.missing -= set(columns)
        group.parts.append(rows)
        group.rewards = group.rewards if rewards is None else rewards
        self._complete(group)

    def _complete(self, group: _Group) -> None:
        """Make a group ready if everything is there, unless it is refused."""
        if group.held is None or group.missing:
            return
        summary, rows = group.held.summary, group.held.rows
        if group.rewards is not None:
            if len(group.rewards) != summary.rows:
                raise InvalidDataError(
                    f"slot {summary.slot} has {summary.rows} rows and got {len(group.rewards)} rewards"
                )
            summary = replace(summary, rewards=group.rewards)
        for part in group.parts:
            rows = joined(rows, part)
        group.held = replace(group.held, summary=summary, rows=rows)
        group.parts.clear()
        reason = self._refuse(summary) if self._refuse is not None and not group.promised else None
        if reason is not None:
            self.drop(summary.slot, reason)
            return
        self._become_ready(group, group.held)
        self._evict(None)

    def take(self, groups: int, *, weight_version: int) -> tuple[SelectedGroup, ...] | None:
        """The groups to train on at ``weight_version``, now selected; None if they are not there yet.

        Groups that passed the staleness bound are dropped on the way (reason ``stale``).

            >>> state = BufferState(capacity=2, max_staleness=1, selection=SlotOrder())
            >>> state.admit(0)
            >>> state.put(summary, data)
            >>> state.take(1, weight_version=3) is None  # its oldest token is of version 1, 2 behind; the bound is 1
            True
            >>> state.drain_dropped()
            (DroppedGroup(slot=0, reason='stale', tokens=4),)

        Raises:
            InvalidDataError: the policy chose a group that is not ready.
        """
        while True:
            self._evict(weight_version)
            chosen = self._selection.choose(groups, weight_version=weight_version)
            if chosen is None:
                return None
            self._require(chosen, Stage.READY)
            taken = [(slot, self._groups[slot], self._held(slot)) for slot in chosen]
            # The bound is this state's promise, whatever policies were plugged in.
            stale = [
                slot for slot, _, held in taken if weight_version - held.summary.oldest_version > self.max_staleness
            ]
            if stale:
                for slot in stale:
                    self.drop(slot, "stale")
                continue
            for _, group, held in taken:
                self._leave_ready(group, held)
                self._move(group, Stage.SELECTED)
            return tuple(held for _, _, held in taken)

    def take_these(self, slots: Sequence[int]) -> tuple[SelectedGroup, ...] | None:
        """Exactly these groups, now selected, however old; None until all of them are ready.

        They are trained on again as they were once before, so the bound was kept then.

            >>> state = BufferState(capacity=2, max_staleness=1, selection=SlotOrder())
            >>> state.admit(0)
            >>> state.take_these([0]) is None
            True
            >>> state.put(summary, data, promised=1)
            >>> state.take(1, weight_version=1) is None  # no policy hears of it
            True
            >>> [group.summary.slot for group in state.take_these([0])]
            [0]

        Raises:
            InvalidDataError: a group is named twice, or is neither pending nor ready.
        """
        stages = [self.stage(slot) for slot in slots]
        if any(stage is Stage.PENDING for stage in stages):
            return None
        self._require(slots, Stage.READY)
        taken = tuple(self._held(slot) for slot in slots)
        for held in taken:
            group = self._groups[held.summary.slot]
            self._leave_ready(group, held)
            self._move(group, Stage.SELECTED)
        return taken

    def make_room(self) -> bool:
        """Let the ready group that was used most often go; False if none was used.

        >>> state = BufferState(capacity=1, max_staleness=1, selection=SlotOrder(), max_uses=3)
        >>> state.admit(0)
        >>> state.put(summary, data)
        >>> state.make_room()
        False
        >>> _ = state.take(1, weight_version=2)
        >>> state.release([0])  # used once of three times, and ready again
        >>> state.make_room(), state.has_room, state.statistics().released
        (True, True, 1)
        """
        slot = self._used.least()
        if slot is None:
            return False
        self.drop(slot, "used")
        return True

    def _evict(self, weight_version: int | None) -> None:
        while evicted := self._eviction.evict(weight_version=weight_version):
            for slot, reason in evicted:
                self.drop(slot, reason)

    def release(self, slots: Iterable[int]) -> None:
        """Selected groups were trained on. All of them or, when one is not selected, none.

            >>> state = BufferState(capacity=1, max_staleness=1, selection=SlotOrder(), max_uses=2)
            >>> state.admit(0)
            >>> state.put(summary, data)
            >>> for _ in range(2):
            ...     (group,) = state.take(1, weight_version=2)
            ...     state.release([0])
            ...     print(group.uses, state.stage(0))
            0 Stage.READY
            1 None

        Raises:
            InvalidDataError: a group is not selected, or named twice.
        """
        for slot in self._require(slots, Stage.SELECTED):
            group, held = self._groups[slot], self._held(slot)
            held = group.held = replace(held, uses=held.uses + 1)
            group.promised = max(0, group.promised - 1)
            if held.uses < self.max_uses:
                self._become_ready(group, held)
            else:
                self._forget(slot)
                self._released += 1

    def restore(self, slots: Iterable[int]) -> None:
        """Selected groups are ready again. All of them or, when one is not selected, none.

            >>> state = BufferState(capacity=1, max_staleness=1, selection=SlotOrder())
            >>> state.admit(0)
            >>> state.put(summary, data)
            >>> _ = state.take(1, weight_version=2)
            >>> state.restore([0])
            >>> state.stage(0)
            <Stage.READY: 'ready'>

        Raises:
            InvalidDataError: a group is not selected, or named twice.
        """
        for slot in self._require(slots, Stage.SELECTED):
            self._become_ready(self._groups[slot], self._held(slot))

    def drop(self, slot: int, reason: str, *, tokens: int = 0) -> None:
        """Give a group up, whatever its stage. ``tokens`` is what was sampled for a pending one.

            >>> state = BufferState(capacity=1, max_staleness=1, selection=SlotOrder())
            >>> state.admit(0)
            >>> state.drop(0, "too slow", tokens=3)
            >>> state.statistics().dropped, state.statistics().dropped_tokens
            ({'too slow': 1}, {'too slow': 3})
            >>> state.drop(0, "too slow")
            Traceback (most recent call last):
            asyncrl.errors.InvalidDataError: slot 0 cannot be dropped: it was released or dropped

        Raises:
            InvalidDataError: the group occupies no place, there is no reason, or ``tokens`` is negative.
        """
        if not reason:
            raise InvalidDataError(f"slot {slot} was dropped without a reason")
        if tokens < 0:
            raise InvalidDataError(f"slot {slot} was dropped with {tokens} tokens")
        group = self._groups.get(slot)
        if group is None:
            raise InvalidDataError(f"slot {slot} cannot be dropped: {self._whereabouts(slot)}")
        if group.held is not None:
            tokens = group.held.summary.tokens
        if group.stage is Stage.READY:
            self._leave_ready(group, self._held(slot))
        elif group.stage is Stage.PENDING and not group.promised:
            self._selection.forget(slot)
        self._forget(slot)
        if group.held is not None and group.held.uses:
            self._released += 1
            self._used_up.append(group.held.uses)
            return
        self._dropped[reason] = self._dropped.get(reason, 0) + 1
        self._dropped_tokens[reason] = self._dropped_tokens.get(reason, 0) + tokens
        self._news.append(DroppedGroup(slot=slot, reason=reason, tokens=tokens))

    def drain_dropped(self) -> tuple[DroppedGroup, ...]:
        """Groups dropped since the last call, in order.

        >>> state = BufferState(capacity=1, max_staleness=1, selection=SlotOrder())
        >>> state.admit(0)
        >>> state.drop(0, "too slow", tokens=3)
        >>> state.drain_dropped(), state.drain_dropped()
        ((DroppedGroup(slot=0, reason='too slow', tokens=3),), ())
        """
        news, self._news = tuple(self._news), []
        return news

    def drain_used_up(self) -> tuple[int, ...]:
        """Uses of the groups that left since the last call with fewer than ``max_uses``, but with some.

        >>> state = BufferState(capacity=1, max_staleness=1, selection=SlotOrder(), max_uses=3)
        >>> state.admit(0)
        >>> state.put(summary, data)
        >>> _ = state.take(1, weight_version=2)
        >>> state.release([0])
        >>> state.make_room(), state.drain_used_up()
        (True, (1,))
        """
        used, self._used_up = tuple(self._used_up), []
        return used

    def explain(self, groups: int) -> str:
        """Why :meth:`take` would wait, in words.

        >>> state = BufferState(capacity=2, max_staleness=1, selection=SlotOrder())
        >>> state.admit(0)
        >>> state.explain(1)
        '0 of 1 groups are next in line; slot 0 is not finished'
        """
        return self._selection.explain(groups)

    def statistics(self) -> ReplayBufferStatistics:
        """Counts, in groups and tokens; ``waiting`` is empty, since nothing waits here.

        >>> state = BufferState(capacity=2, max_staleness=1, selection=SlotOrder())
        >>> for slot in (0, 1):
        ...     state.admit(slot)
        >>> state.put(summary, data)
        >>> counts = state.statistics()
        >>> counts.admitted, counts.pending, counts.ready, counts.ready_tokens
        (2, 1, 1, 4)
        """
        return ReplayBufferStatistics(
            capacity=self.capacity,
            admitted=self._admitted,
            pending=self._counts[Stage.PENDING],
            ready=self._counts[Stage.READY],
            selected=self._counts[Stage.SELECTED],
            released=self._released,
            dropped=dict(self._dropped),
            dropped_tokens=dict(self._dropped_tokens),
            ready_tokens=self._ready_tokens,
            waiting={},
        )

    def _require(self, slots: Iterable[int], stage: Stage) -> list[int]:
        wanted = list(slots)
        if len(set(wanted)) != len(wanted):
            raise InvalidDataError(f"a slot is named twice in {wanted}")
        for slot in wanted:
            group = self._groups.get(slot)
            if group is None or group.stage is not stage:
                raise InvalidDataError(f"slot {slot} must be {stage.value}, but {self._whereabouts(slot)}")
        return wanted

    def _whereabouts(self, slot: int) -> str:
        if slot in self._groups:
            return f"it is {self._groups[slot].stage.value}"
        return "it was released or dropped" if slot in self._known else "it was never admitted"

    def _held(self, slot: int) -> SelectedGroup:
        held = self._groups[slot].held
        assert held is not None, "ready and selected groups hold rows"
        return held

    def _move(self, group: _Group, stage: Stage) -> None:
        self._counts[group.stage] -= 1
        self._counts[stage] += 1
        group.stage = stage

    def _become_ready(self, group: _Group, held: SelectedGroup) -> None:
        self._move(group, Stage.READY)
        if not held.uses:
            self._ready_tokens += held.summary.tokens
        if group.promised:
            return
        if held.uses:
            self._used.push(held.summary.slot, -held.uses)
        self._selection.ready(held.summary)
        self._eviction.ready(held.summary)

    def _leave_ready(self, group: _Group, held: SelectedGroup) -> None:
        slot = held.summary.slot
        if not held.uses:
            self._ready_tokens -= held.summary.tokens
        if group.promised:
            return
        if held.uses:
            self._used.discard(slot)
        self._selection.forget(slot)
        self._eviction.forget(slot)

    def _forget(self, slot: int) -> None:
        self._counts[self._groups.pop(slot).stage] -= 1


def joined(rows: DataProto | DataProtoFuture, part: DataProto | DataProtoFuture) -> DataProto | DataProtoFuture:
    """Rows with further columns; a future stays one, and no payload moves. A batch is given the columns itself.

        >>> rows = DataProto.from_dict({"x": torch.tensor([1, 2])})
        >>> both = joined(rows, DataProto.from_dict({"scores": torch.tensor([0.5, 2.0])}))
        >>> sorted(both.batch.keys()), both is rows
        (['scores', 'x'], True)

    Raises:
        SchemaError: rows differ in number, or a column is in both and differs.
    """
    from asyncrl.data import DataProto, DataProtoFuture

    if isinstance(part, DataProtoFuture) and isinstance(rows, DataProto):
        rows = DataProtoFuture.of(rows)
    return rows.union(cast("DataProto", part))
