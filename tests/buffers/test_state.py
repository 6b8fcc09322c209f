"""The pure state machine: hand-worked cases, illegal events by name, and a model for any order of events."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.errors import ConfigError, InvalidDataError
from asyncrl.interfaces import DroppedGroup, GroupSummary
from buffers.policies import Evicted
from buffers.selection import make_selection
from buffers.state import BufferState, Stage

ROWS = object()


def summary(group_id: int, version: int = 0, *, tokens: int = 10) -> GroupSummary:
    return GroupSummary(
        group_id=group_id,
        rows=2,
        oldest_version=version,
        tokens=tokens,
        version_tokens={version: tokens},
        rewards=(0.0, 1.0),
        lengths=(tokens, 0),
    )


def state_of(*, capacity: int = 8, max_staleness: int = 1, selection: str = "fifo") -> BufferState:
    return BufferState(capacity=capacity, max_staleness=max_staleness, selection=make_selection(selection))


def fill(state: BufferState, versions: dict[int, int | None]) -> None:
    """Admit the group_ids; put those that have a version."""
    for group_id in versions:
        state.admit(group_id)
    for group_id, version in versions.items():
        if version is not None:
            state.put(summary(group_id, version), ROWS)


def group_ids_of(taken: tuple | None) -> list[int] | None:
    return None if taken is None else [one.summary.group_id for one in taken]


def test_a_group_from_admission_to_release():
    state = state_of()
    state.admit(0)
    assert state.stage(0) is Stage.PENDING
    state.put(summary(0), ROWS)
    assert state.stage(0) is Stage.READY
    (group,) = state.take(1, weight_version=0)
    assert group.rows is ROWS
    assert state.stage(0) is Stage.SELECTED
    state.release([0])
    assert state.stage(0) is None
    counts = state.statistics()
    assert (counts.admitted, counts.released, counts.pending, counts.ready, counts.selected) == (1, 1, 0, 0, 0)


def test_fifo_waits_for_slow_groups_and_keeps_the_order():
    state = state_of()
    fill(state, {0: 0, 1: None, 2: 0, 3: 0})
    assert state.take(2, weight_version=0) is None
    assert state.explain(2) == "1 of 2 groups are next in order; group_id 1 is not finished"
    state.put(summary(1), ROWS)
    assert group_ids_of(state.take(2, weight_version=0)) == [0, 1]
    assert group_ids_of(state.take(2, weight_version=0)) == [2, 3]
    assert state.explain(1) == "0 of 1 groups are next in order; more groups must be admitted"


def test_fifo_skips_a_dropped_group():
    state = state_of()
    fill(state, {0: 0, 1: None, 2: 0})
    state.drop(1, "failed", tokens=5)
    assert group_ids_of(state.take(2, weight_version=0)) == [0, 2]
    assert state.statistics().dropped_tokens == {"failed": 5}


def test_fifo_lets_a_group_that_was_admitted_late_go_first():
    state = state_of()
    fill(state, {3: 0, 4: 0, 5: 0})
    state.admit(1)
    assert state.take(1, weight_version=0) is None
    state.put(summary(1), ROWS)
    assert group_ids_of(state.take(3, weight_version=0)) == [1, 3, 4]


def test_fifo_ready_passes_slow_groups():
    state = state_of(selection="fifo_ready")
    fill(state, {0: None, 3: 0, 2: 0, 1: None})
    assert group_ids_of(state.take(2, weight_version=0)) == [2, 3]
    assert state.explain(2) == "0 of 2 groups are ready"


@pytest.mark.parametrize("selection", ["fifo", "fifo_ready"])
def test_stale_groups_are_dropped_and_never_returned(selection: str):
    state = state_of(max_staleness=2, selection=selection)
    fill(state, {0: 0, 1: 1, 2: 0, 3: 5})
    assert group_ids_of(state.take(2, weight_version=3)) == [1, 3]
    assert state.drain_dropped() == (
        DroppedGroup(group_id=0, reason="stale", tokens=10),
        DroppedGroup(group_id=2, reason="stale", tokens=10),
    )
    assert state.statistics().dropped == {"stale": 2}
    assert state.statistics().dropped_tokens == {"stale": 20}


def test_a_group_at_the_bound_is_still_selected():
    state = state_of(max_staleness=2)
    fill(state, {0: 1, 1: 3})
    assert group_ids_of(state.take(2, weight_version=3)) == [0, 1]


def test_restored_groups_are_selected_again_in_their_order():
    state = state_of()
    fill(state, {0: 0, 1: 0, 2: 0, 3: None})
    assert group_ids_of(state.take(2, weight_version=0)) == [0, 1]
    state.restore([1, 0])
    assert state.statistics().ready_tokens == 30
    assert group_ids_of(state.take(3, weight_version=0)) == [0, 1, 2]


def test_a_restored_group_can_become_stale():
    state = state_of(max_staleness=0)
    fill(state, {0: 0, 1: 1})
    assert group_ids_of(state.take(1, weight_version=0)) == [0]
    state.restore([0])
    assert group_ids_of(state.take(1, weight_version=1)) == [1]
    assert state.statistics().dropped == {"stale": 1}


def test_a_cancelled_admission_leaves_no_trace():
    state = state_of(capacity=1)
    state.admit(0)
    state.cancel_admission(0)
    assert state.statistics().admitted == 0
    state.admit(0)
    assert not state.has_room


def test_selected_groups_keep_their_place_until_released():
    state = state_of(capacity=2)
    fill(state, {0: 0, 1: None})
    state.take(1, weight_version=0)
    assert not state.has_room
    state.release([0])
    assert state.has_room


def test_a_policy_that_ignores_the_bound_cannot_break_it():
    class Nothing:
        def ready(self, summary: GroupSummary) -> None: ...
        def forget(self, group_id: int) -> None: ...
        def evict(self, *, weight_version: int) -> Evicted | None:
            return None

    state = BufferState(capacity=4, max_staleness=1, selection=make_selection("fifo"), evictions=[Nothing()])
    fill(state, {0: 0, 1: 5, 2: 5})
    assert group_ids_of(state.take(2, weight_version=5)) == [1, 2]
    assert state.statistics().dropped == {"stale": 1}


def test_illegal_events_are_refused_by_name():
    state = state_of(capacity=3)
    fill(state, {0: None, 1: 0})
    with pytest.raises(InvalidDataError, match="group_id 0 was admitted before"):
        state.admit(0)
    with pytest.raises(InvalidDataError, match="group_id 1 must be pending, but it is ready"):
        state.put(summary(1), ROWS)
    with pytest.raises(InvalidDataError, match="group_id 9 must be pending, but it was never admitted"):
        state.put(summary(9), ROWS)
    with pytest.raises(InvalidDataError, match="group_id 1 must be selected, but it is ready"):
        state.release([1])
    with pytest.raises(InvalidDataError, match="group_id 9 cannot be dropped: it was never admitted"):
        state.drop(9, "failed")
    with pytest.raises(InvalidDataError, match="without a reason"):
        state.drop(0, "")
    with pytest.raises(InvalidDataError, match="-1 tokens"):
        state.drop(0, "failed", tokens=-1)
    state.drop(1, "failed")
    with pytest.raises(InvalidDataError, match="group_id 1 cannot be dropped: it was released or dropped"):
        state.drop(1, "failed")
    with pytest.raises(InvalidDataError, match="group_id 1 was admitted before"):
        state.admit(1)
    state.admit(2)
    state.admit(3)
    with pytest.raises(InvalidDataError, match="all 3 places are taken"):
        state.admit(4)


def test_a_release_is_all_or_nothing():
    state = state_of()
    fill(state, {0: 0, 1: None})
    state.take(1, weight_version=0)
    for group_ids in ([0, 1], [0, 0]):
        with pytest.raises(InvalidDataError):
            state.release(group_ids)
        assert state.stage(0) is Stage.SELECTED


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="capacity must be at least 1"):
        state_of(capacity=0)
    with pytest.raises(ValueError, match="max_staleness must be 0 or more"):
        state_of(max_staleness=-1)
    with pytest.raises(ConfigError, match="no selection is called 'newest'"):
        make_selection("newest")


class AnyOrderOfEvents(RuleBasedStateMachine):
    """A dictionary as the model; group_ids come in any order."""

    @initialize(
        capacity=st.integers(1, 6), max_staleness=st.integers(0, 2), selection=st.sampled_from(["fifo", "fifo_ready"])
    )
    def begin(self, capacity: int, max_staleness: int, selection: str) -> None:
        self.capacity, self.max_staleness, self.selection = capacity, max_staleness, selection
        self.state = state_of(capacity=capacity, max_staleness=max_staleness, selection=selection)
        self.stages: dict[int, str] = {}
        self.versions: dict[int, int] = {}
        self.ended = {"released": 0, "dropped": 0}
        self.used: set[int] = set()
        self.dropped_tokens = 0
        self.version = 0

    def among(self, data: st.DataObject, stage: str) -> int:
        return data.draw(st.sampled_from(sorted(group_id for group_id, one in self.stages.items() if one == stage)))

    @rule(group_id=st.integers(0, 30))
    def admit(self, group_id: int) -> None:
        if group_id in self.used or len(self.stages) == self.capacity:
            with pytest.raises(InvalidDataError):
                self.state.admit(group_id)
        else:
            self.state.admit(group_id)
            self.stages[group_id] = "pending"
            self.used.add(group_id)

    @precondition(lambda self: "pending" in self.stages.values())
    @rule(data=st.data(), staleness=st.integers(0, 3))
    def put(self, data: st.DataObject, staleness: int) -> None:
        group_id = self.among(data, "pending")
        self.versions[group_id] = max(0, self.version - staleness)
        self.state.put(summary(group_id, self.versions[group_id], tokens=group_id + 1), ROWS)
        self.stages[group_id] = "ready"

    @precondition(lambda self: "pending" in self.stages.values())
    @rule(data=st.data())
    def cancel_admission(self, data: st.DataObject) -> None:
        group_id = self.among(data, "pending")
        self.state.cancel_admission(group_id)
        del self.stages[group_id]
        self.used.discard(group_id)

    @rule(groups=st.integers(1, 3), newer=st.integers(0, 1))
    def take(self, groups: int, newer: int) -> None:
        self.version += newer
        taken = self.state.take(groups, weight_version=self.version)
        for group_id in [group_id for group_id, one in self.stages.items() if one == "ready"]:
            if self.version - self.versions[group_id] > self.max_staleness:
                self.forget_dropped(group_id)
        ready = sorted(group_id for group_id, one in self.stages.items() if one == "ready")
        if self.selection == "fifo":
            pending = [group_id for group_id, one in self.stages.items() if one == "pending"]
            ready = [group_id for group_id in ready if group_id < min(pending, default=10**9)]
        assert group_ids_of(taken) == (ready[:groups] if len(ready) >= groups else None)
        for group in taken or ():
            self.stages[group.summary.group_id] = "selected"

    @precondition(lambda self: "selected" in self.stages.values())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        group_id = self.among(data, "selected")
        self.state.release([group_id])
        del self.stages[group_id]
        self.ended["released"] += 1

    @precondition(lambda self: "selected" in self.stages.values())
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        group_id = self.among(data, "selected")
        self.state.restore([group_id])
        self.stages[group_id] = "ready"

    @precondition(lambda self: self.stages)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.stages)))
        self.state.drop(group_id, "test", tokens=group_id + 1)
        self.forget_dropped(group_id)

    def forget_dropped(self, group_id: int) -> None:
        del self.stages[group_id]
        self.ended["dropped"] += 1
        self.dropped_tokens += group_id + 1

    @invariant()
    def the_counts_add_up(self) -> None:
        if not hasattr(self, "state"):
            return
        counts = self.state.statistics()
        in_stage = {
            stage: sum(one == stage for one in self.stages.values()) for stage in ("pending", "ready", "selected")
        }
        assert (counts.pending, counts.ready, counts.selected) == tuple(in_stage.values())
        assert (counts.released, sum(counts.dropped.values())) == tuple(self.ended.values())
        assert sum(counts.dropped_tokens.values()) == self.dropped_tokens
        assert counts.ready_tokens == sum(group_id + 1 for group_id, one in self.stages.items() if one == "ready")
        occupied = counts.pending + counts.ready + counts.selected
        assert counts.admitted == occupied + counts.released + sum(counts.dropped.values())
        assert occupied <= self.capacity
        assert self.state.has_room == (occupied < self.capacity)


TestAnyOrderOfEvents = AnyOrderOfEvents.TestCase
TestAnyOrderOfEvents.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
