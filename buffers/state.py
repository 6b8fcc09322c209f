"""The stages of groups in a replay buffer: a pure state machine, without a clock, a wait or a task.

    admit        put, extend      take            release after the last use
    ------> pending ---> ready -------> selected -----------------> released
               |           |  <-------     |
               |           |   restore; release before the last use
               +-----------+---------------+--> dropped (reason)

A group is ready when its rows and all the columns that the buffer waits for have arrived, in any order. At most
``max_uses`` steps train on it. A group that was used is never counted as dropped: if it leaves early, it was released.
A group with reserved uses is selected by its number only: no policy selects, refuses or evicts it before.

Pending, ready and selected groups occupy one of ``capacity`` places. Each call costs O(log n) per group named in it,
where n is the number of occupied places.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, cast

from asyncrl.errors import InvalidDataError
from asyncrl.interfaces import DroppedGroup, GroupSummary, ReplayBufferStatistics, SelectedGroup
from buffers.group_ids import GroupIdHeap, GroupIdSet
from buffers.policies import Eviction, StalenessBound
from buffers.selection import Selection

if TYPE_CHECKING:
    from asyncrl.data import DataProto, DataProtoFuture


class Stage(Enum):
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
    reserved_uses: int = 0


class BufferState:
    """Groups and their stages. Any call that the diagram above does not have raises :class:`InvalidDataError`.

        >>> from buffers.selection import GroupIdOrder
        >>> state = BufferState(capacity=2, max_staleness=1, selection=GroupIdOrder())
        >>> state.admit(0)
        >>> state.put(summary, data)  # its oldest token was sampled under version 1
        >>> (group,) = state.take(1, weight_version=2)
        >>> state.stage(0), group.summary.rewards
        (<Stage.SELECTED: 'selected'>, (0.0, 1.0))
        >>> state.restore([0])
        >>> state.take(1, weight_version=3) is None  # 2 versions old now; the bound is 1
        True
        >>> state.drain_dropped()
        (DroppedGroup(group_id=0, reason='stale', tokens=4),)

    Methods without a docstring are those of :class:`asyncrl.interfaces.ReplayBuffer`, without its waits.

    Args:
        capacity: places.
        max_staleness: hard bound on ``weight_version - oldest_version`` of what :meth:`take` returns.
        selection: chooses which ready groups are taken; used by this state alone.
        evictions: choose which groups are dropped early; by default those that passed the bound.
        columns: names that must arrive, beside the first rows, before a group is ready.
        max_uses: steps that may train on one group.
        refuse: returns a reason to drop a group as it becomes ready, or None.

    Raises:
        ValueError: ``capacity`` or ``max_uses`` is below 1, or ``max_staleness`` below 0.
    """

    def __init__(
        self,
        *,
        capacity: int,
        max_staleness: int,
        selection: Selection,
        evictions: Sequence[Eviction] = (),
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
        self._selection = selection
        self._evictions: Sequence[Eviction] = tuple(evictions) or (StalenessBound(max_staleness),)
        self._groups: dict[int, _Group] = {}
        self._known = GroupIdSet()
        self._used = GroupIdHeap()
        """Ready groups that were used, the most used first."""
        self._counts = dict.fromkeys(Stage, 0)
        self._admitted = self._released = self._ready_tokens = 0
        self._dropped: dict[str, int] = {}
        self._dropped_tokens: dict[str, int] = {}
        self._undelivered_drops: list[DroppedGroup] = []
        self._undelivered_uses: list[int] = []

    @property
    def has_room(self) -> bool:
        return len(self._groups) < self.capacity

    def stage(self, group_id: int) -> Stage | None:
        """Return the group's stage, or None if it occupies no place."""
        group = self._groups.get(group_id)
        return None if group is None else group.stage

    def check_new(self, group_id: int) -> None:
        """Raise :class:`InvalidDataError` if the group was ever admitted."""
        if group_id in self._known:
            raise InvalidDataError(f"group_id {group_id} was admitted before; a group_id is used once")

    def admit(self, group_id: int) -> None:
        self.check_new(group_id)
        if not self.has_room:
            raise InvalidDataError(f"all {self.capacity} places are taken")
        self._known.add(group_id)
        self._groups[group_id] = _Group(missing=set(self._columns))
        self._admitted += 1
        self._counts[Stage.PENDING] += 1
        self._selection.admitted(group_id)

    def cancel_admission(self, group_id: int) -> None:
        """Undo :meth:`admit` of a pending group, as if it had not been called: the number can be admitted again."""
        self._require([group_id], Stage.PENDING)
        self._selection.forget(group_id)
        self._forget(group_id)
        self._known.remove(group_id)
        self._admitted -= 1

    def put(
        self, summary: GroupSummary, rows: DataProto | DataProtoFuture, *, uses: int = 0, reserved_uses: int = 0
    ) -> None:
        self._require([summary.group_id], Stage.PENDING)
        group = self._groups[summary.group_id]
        if group.held is not None:
            raise InvalidDataError(f"group_id {summary.group_id} was put before; add further columns with extend")
        group.held = SelectedGroup(summary=summary, rows=rows, uses=uses)
        group.reserved_uses = reserved_uses
        if reserved_uses:
            self._selection.forget(summary.group_id)
        self._complete(group)

    def extend(
        self,
        group_id: int,
        columns: Collection[str],
        rows: DataProto | DataProtoFuture,
        *,
        rewards: tuple[float, ...] | None = None,
    ) -> None:
        self._require([group_id], Stage.PENDING)
        group = self._groups[group_id]
        if unexpected := set(columns) - group.missing:
            raise InvalidDataError(
                f"columns {sorted(unexpected)} of group_id {group_id} came twice, or the buffer does not wait for them"
            )
        group.missing -= set(columns)
        group.parts.append(rows)
        group.rewards = group.rewards if rewards is None else rewards
        self._complete(group)

    def _complete(self, group: _Group) -> None:
        """Make a group ready if all its columns have arrived, unless it is refused."""
        if group.held is None or group.missing:
            return
        summary, rows = group.held.summary, group.held.rows
        if group.rewards is not None:
            if len(group.rewards) != summary.rows:
                raise InvalidDataError(
                    f"group_id {summary.group_id} has {summary.rows} rows and got {len(group.rewards)} rewards"
                )
            summary = replace(summary, rewards=group.rewards)
        for part in group.parts:
            rows = join_columns(rows, part)
        group.held = replace(group.held, summary=summary, rows=rows)
        group.parts.clear()
        reason = self._refuse(summary) if self._refuse is not None and not group.reserved_uses else None
        if reason is not None:
            self.drop(summary.group_id, reason)
            return
        self._become_ready(group, group.held)
        self._evict(None)

    def take(self, groups: int, *, weight_version: int) -> tuple[SelectedGroup, ...] | None:
        """Select groups to train on at ``weight_version``; None if there are not enough yet.

        Groups that passed the staleness bound are dropped first (reason ``stale``).
        """
        while True:
            self._evict(weight_version)
            chosen = self._selection.choose(groups, weight_version=weight_version)
            if chosen is None:
                return None
            self._require(chosen, Stage.READY)
            # The bound holds whatever policies were plugged in.
            taken = [self._held(group_id) for group_id in chosen]
            oldest = weight_version - self.max_staleness
            stale = [held.summary.group_id for held in taken if held.summary.oldest_version < oldest]
            if not stale:
                return self._select(taken)
            for group_id in stale:
                self.drop(group_id, "stale")

    def take_these(self, group_ids: Sequence[int]) -> tuple[SelectedGroup, ...] | None:
        """Select exactly these groups; None until all of them are ready.

        The staleness bound is not checked: an earlier run trained on them at the same version, when the bound was kept.
        """
        if any(self.stage(group_id) is Stage.PENDING for group_id in group_ids):
            return None
        self._require(group_ids, Stage.READY)
        return self._select([self._held(group_id) for group_id in group_ids])

    def _select(self, taken: Sequence[SelectedGroup]) -> tuple[SelectedGroup, ...]:
        for held in taken:
            group = self._groups[held.summary.group_id]
            self._leave_ready(group, held)
            self._move(group, Stage.SELECTED)
        return tuple(taken)

    def make_room(self) -> bool:
        """Release the ready group that was used most often; False if no ready group was used."""
        group_id = self._used.least()
        if group_id is None:
            return False
        self.drop(group_id, "used")
        return True

    def _evict(self, weight_version: int | None) -> None:
        for eviction in self._evictions:
            while (evicted := eviction.evict(weight_version=weight_version)) is not None:
                self.drop(evicted.group_id, evicted.reason)

    def release(self, group_ids: Iterable[int]) -> None:
        for group_id in self._require(group_ids, Stage.SELECTED):
            group, held = self._groups[group_id], self._held(group_id)
            held = group.held = replace(held, uses=held.uses + 1)
            group.reserved_uses = max(0, group.reserved_uses - 1)
            if held.uses < self.max_uses:
                self._become_ready(group, held)
            else:
                self._forget(group_id)
                self._released += 1

    def restore(self, group_ids: Iterable[int]) -> None:
        for group_id in self._require(group_ids, Stage.SELECTED):
            self._become_ready(self._groups[group_id], self._held(group_id))

    def drop(self, group_id: int, reason: str, *, tokens: int = 0) -> None:
        if not reason:
            raise InvalidDataError(f"group_id {group_id} was dropped without a reason")
        if tokens < 0:
            raise InvalidDataError(f"group_id {group_id} was dropped with {tokens} tokens")
        group = self._groups.get(group_id)
        if group is None:
            raise InvalidDataError(f"group_id {group_id} cannot be dropped: {self._whereabouts(group_id)}")
        if group.held is not None:
            tokens = group.held.summary.tokens
        if group.stage is Stage.READY:
            self._leave_ready(group, self._held(group_id))
        elif group.stage is Stage.PENDING and not group.reserved_uses:
            self._selection.forget(group_id)
        self._forget(group_id)
        if group.held is not None and group.held.uses:
            self._released += 1
            self._undelivered_uses.append(group.held.uses)
            return
        self._dropped[reason] = self._dropped.get(reason, 0) + 1
        self._dropped_tokens[reason] = self._dropped_tokens.get(reason, 0) + tokens
        self._undelivered_drops.append(DroppedGroup(group_id=group_id, reason=reason, tokens=tokens))

    @property
    def has_left(self) -> bool:
        """Whether :meth:`drain_dropped` or :meth:`drain_used_up` has groups to return."""
        return bool(self._undelivered_drops or self._undelivered_uses)

    def drain_dropped(self) -> tuple[DroppedGroup, ...]:
        """Return the groups dropped since the last call, in order."""
        drops, self._undelivered_drops = tuple(self._undelivered_drops), []
        return drops

    def drain_used_up(self) -> tuple[int, ...]:
        """Return the uses of each group that was used and has left since the last call before its last use."""
        uses, self._undelivered_uses = tuple(self._undelivered_uses), []
        return uses

    def explain(self, groups: int) -> str:
        """Return in words why :meth:`take` would return None."""
        return self._selection.explain(groups)

    def statistics(self) -> ReplayBufferStatistics:
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

    def _require(self, group_ids: Iterable[int], stage: Stage) -> list[int]:
        wanted = list(group_ids)
        if len(set(wanted)) != len(wanted):
            raise InvalidDataError(f"a group_id is named twice in {wanted}")
        for group_id in wanted:
            group = self._groups.get(group_id)
            if group is None or group.stage is not stage:
                raise InvalidDataError(f"group_id {group_id} must be {stage.value}, but {self._whereabouts(group_id)}")
        return wanted

    def _whereabouts(self, group_id: int) -> str:
        if group_id in self._groups:
            return f"it is {self._groups[group_id].stage.value}"
        return "it was released or dropped" if group_id in self._known else "it was never admitted"

    def _held(self, group_id: int) -> SelectedGroup:
        held = self._groups[group_id].held
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
        if group.reserved_uses:
            return
        if held.uses:
            self._used.push(held.summary.group_id, -held.uses)
        self._selection.ready(held.summary)
        for eviction in self._evictions:
            eviction.ready(held.summary)

    def _leave_ready(self, group: _Group, held: SelectedGroup) -> None:
        group_id = held.summary.group_id
        if not held.uses:
            self._ready_tokens -= held.summary.tokens
        if group.reserved_uses:
            return
        if held.uses:
            self._used.discard(group_id)
        self._selection.forget(group_id)
        for eviction in self._evictions:
            eviction.forget(group_id)

    def _forget(self, group_id: int) -> None:
        self._counts[self._groups.pop(group_id).stage] -= 1


def join_columns(rows: DataProto | DataProtoFuture, part: DataProto | DataProtoFuture) -> DataProto | DataProtoFuture:
    """Return rows with further columns. A future stays a future, and no payload moves; a batch is extended in place.

    Raises:
        SchemaError: the numbers of rows differ, or a column is in both with different values.
    """
    from asyncrl.data import DataProto, DataProtoFuture

    if isinstance(part, DataProtoFuture) and isinstance(rows, DataProto):
        rows = DataProtoFuture.of(rows)
    return rows.union(cast("DataProto", part))
