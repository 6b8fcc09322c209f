"""The states of a group: hand-worked cases, illegal events by name, and laws over any order of events."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncrl.errors import InvalidDataError
from asyncrl.ledger import (
    AttemptLost,
    Committed,
    Completed,
    Consumed,
    Dispatched,
    Dropped,
    GroupFailed,
    Issued,
    LedgerEvent,
    Rebased,
    Resumed,
    Reused,
    Rewarded,
    SampledTurn,
    TurnsAppended,
)
from buffers.ledger_state import GroupState, LedgerState


def rolled_out(group_id: int, attempt: int = 0) -> tuple[LedgerEvent, ...]:
    return (
        Dispatched(group_id=group_id, attempt=attempt, version=0),
        Completed(group_id=group_id, attempt=attempt, tokens=10),
    )


def turns(*given: tuple[int, int, int, int, int]) -> TurnsAppended:
    """Turns by group_id, attempt, row, number and tokens."""
    return TurnsAppended(turns=tuple(SampledTurn(*turn) for turn in given))


def state_after(*events: LedgerEvent) -> LedgerState:
    return LedgerState().replay(events)


def test_a_group_from_issue_to_checkpoint():
    state = state_after(
        Issued(0),
        Dispatched(group_id=0, attempt=0, version=3),
        turns((0, 0, 1, 0, 4)),
        turns((0, 0, 1, 1, 2)),
        Completed(group_id=0, attempt=0, tokens=6),
        Rewarded(group_id=0, rewards=(1.0, 0.0)),
        Consumed(group_id=0, step=4, position=0),
        Committed(4),
    )
    counts = state.statistics()
    assert (counts.issued, counts.consumed, counts.live, counts.unaccounted) == (1, 1, 0, 0)
    assert counts.committed_step == 4


def test_a_late_result_of_an_old_attempt_never_counts():
    state = state_after(
        Issued(0),
        Dispatched(group_id=0, attempt=0, version=0),
        Dispatched(group_id=0, attempt=1, version=0),  # the first replica does not answer
    )
    assert not state.apply(Completed(group_id=0, attempt=0, tokens=9))
    assert not state.apply(turns((0, 0, 0, 0, 9)))
    assert state.live() == {0: GroupState.DISPATCHED}
    assert state.apply(Completed(group_id=0, attempt=1, tokens=5))
    assert not state.apply(Completed(group_id=0, attempt=0, tokens=9))
    assert not state.apply(Completed(group_id=0, attempt=1, tokens=5))  # a duplicate
    assert state.statistics().superseded == 4
    assert state.live() == {0: GroupState.COMPLETED}


def test_a_duplicate_turn_counts_once_and_no_turn_is_skipped():
    state = state_after(Issued(0), Dispatched(group_id=0, attempt=0, version=0))
    assert state.apply(turns((0, 0, 0, 0, 4)))
    assert not state.apply(turns((0, 0, 0, 0, 4)))
    with pytest.raises(InvalidDataError, match="turns come in order"):
        state.apply(turns((0, 0, 0, 2, 4)))


def test_late_turns_of_an_event_are_left_out():
    state = state_after(
        Issued(0), Issued(1), Dispatched(group_id=0, attempt=0, version=0), Dispatched(group_id=1, attempt=0, version=0)
    )
    state.apply(Dispatched(group_id=1, attempt=1, version=0))
    event = turns((0, 0, 0, 0, 4), (1, 0, 0, 0, 3), (0, 0, 0, 1, 2), (0, 0, 0, 0, 4))
    assert state.without_superseded(event) == turns((0, 0, 0, 0, 4), (0, 0, 0, 1, 2))
    assert state.statistics().superseded == 0
    assert state.apply(event)
    assert state.statistics().superseded == 2
    with pytest.raises(InvalidDataError, match="turn 3 of group 0, row 0 came before turn 2"):
        state.apply(turns((1, 1, 0, 0, 3), (0, 0, 0, 3, 1)))
    assert state.apply(turns((1, 1, 0, 0, 3)))  # not recorded above: a refused event changes nothing
    with pytest.raises(InvalidDataError, match="never dispatched"):
        state.apply(turns((1, 2, 0, 0, 3)))


def test_an_attempt_is_repeated_and_a_group_fails_for_good():
    state = state_after(Issued(0), Dispatched(group_id=0, attempt=0, version=0))
    state.apply(Dispatched(group_id=0, attempt=1, version=0))
    state.apply(GroupFailed(group_id=0, failure="environment_failed", tokens=6))
    counts = state.statistics()
    assert (counts.failed, counts.live, counts.unaccounted) == ({"environment_failed": 1}, 0, 0)


def test_resuming_undoes_what_the_checkpoint_does_not_have():
    state = state_after(*[Issued(group_id) for group_id in range(6)])
    for group_id in range(4):
        state.replay(rolled_out(group_id))
    state.replay([Consumed(group_id=0, step=1, position=0), Committed(1)])
    state.replay([Consumed(group_id=1, step=2, position=0), Reused(group_id=0, step=2, position=1)])
    state.replay([Dropped(group_id=2, reason="stale", tokens=10), Dispatched(group_id=4, attempt=0, version=1)])
    state.apply(Resumed(1))
    assert state.live() == {
        1: GroupState.COMPLETED,
        3: GroupState.COMPLETED,
        4: GroupState.ISSUED,
        5: GroupState.ISSUED,
    }
    counts = state.statistics()
    assert (counts.consumed, counts.reused, counts.dropped, counts.processes) == (1, 0, {"stale": 1}, 2)
    assert counts.unaccounted == 0
    assert not state.apply(Completed(group_id=1, attempt=0, tokens=10))  # of the process before
    assert state.attempt(4) == 0  # the next is 1


def test_resuming_from_an_older_checkpoint_undoes_a_newer_one():
    state = state_after(Issued(0), *rolled_out(0), Consumed(group_id=0, step=5, position=0), Committed(5), Resumed(3))
    assert state.live() == {0: GroupState.COMPLETED}
    assert state.statistics().committed_step == 3
    state.apply(Consumed(group_id=0, step=5, position=0))
    assert state.statistics().unaccounted == 0


def test_rows_that_are_lost_are_sampled_again_under_a_new_attempt():
    state = state_after(Issued(0), *rolled_out(0, attempt=2), AttemptLost(group_id=0, attempt=2))
    assert state.live() == {0: GroupState.ISSUED}
    with pytest.raises(InvalidDataError, match="attempt numbers grow"):
        state.apply(Dispatched(group_id=0, attempt=2, version=0))
    state.replay(rolled_out(0, attempt=3))


def test_a_ledger_may_begin_at_a_checkpoint():
    state = state_after(Rebased(step=4, next_group_id=10, consumed=7, dropped=1, live=(3, 9)), Issued(3), Issued(9))
    counts = state.statistics()
    assert (counts.issued, counts.consumed, counts.live, counts.unaccounted) == (10, 7, 2, 0)
    assert state.next_group_id == 10
    with pytest.raises(InvalidDataError, match="issued before"):
        state.apply(Issued(5))
    with pytest.raises(InvalidDataError, match="begins at step 4"):
        state.apply(Resumed(3))


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (Issued(0), "issued before"),
        (Dispatched(group_id=0, attempt=0, version=0), "it is completed"),
        (Dispatched(group_id=9, attempt=0, version=0), "never issued"),
        (Completed(group_id=9, attempt=0, tokens=1), "never issued"),
        (Completed(group_id=1, attempt=0, tokens=1), "never dispatched"),
        (Rewarded(group_id=1, rewards=(1.0,)), "it is issued"),
        (Rewarded(group_id=0, rewards=()), "0 rewards"),
        (Rewarded(group_id=0, rewards=(1.0, math.nan)), "not finite"),
        (Rewarded(group_id=0, rewards=(-math.inf, 1.0)), "not finite"),
        (Consumed(group_id=1, step=1, position=0), "it is issued"),
        (Consumed(group_id=2, step=2, position=0), "it was consumed"),
        (Consumed(group_id=0, step=1, position=0), "checkpoint of step 1"),
        (Reused(group_id=0, step=2, position=0), "not consumed yet"),
        (Dropped(group_id=2, reason="stale", tokens=0), "it was consumed"),
        (Dropped(group_id=0, reason="", tokens=0), "without a reason"),
        (GroupFailed(group_id=0, failure="", tokens=0), "without a kind"),
        (Committed(0), "came after"),
        (AttemptLost(group_id=1, attempt=0), "it is issued"),
        (Rebased(step=1, next_group_id=0, consumed=0, dropped=0, live=()), "first event only"),
    ],
)
def test_an_illegal_event_is_refused_and_changes_nothing(event: LedgerEvent, why: str):
    state = state_after(
        Issued(0),
        Issued(1),
        Issued(2),
        *rolled_out(0),
        *rolled_out(2),
        Consumed(group_id=2, step=1, position=0),
        Committed(1),
    )
    before = (state.statistics(), state.live())
    with pytest.raises(InvalidDataError, match=why):
        state.apply(event)
    assert (state.statistics(), state.live()) == before


class AnyOrderOfEvents(RuleBasedStateMachine):
    """Any order of events, with crashes: the invariant holds, and replaying the events gives the same state."""

    def __init__(self) -> None:
        super().__init__()
        self.state = LedgerState()
        self.events: list[LedgerEvent] = []
        self.model: dict[int, str] = {}
        self.step = 0
        self.consumed_at: dict[int, int] = {}

    def happen(self, event: LedgerEvent) -> bool:
        counts = self.state.apply(event)
        self.events.append(event)
        return counts

    def some(self, data: st.DataObject, *where: str) -> int:
        return data.draw(st.sampled_from(sorted(group_id for group_id, at in self.model.items() if at in where)))

    def any_in(self, *where: str) -> bool:
        return any(at in where for at in self.model.values())

    @rule()
    def issue(self) -> None:
        group_id = len(self.model)
        self.happen(Issued(group_id))
        self.model[group_id] = "issued"

    @precondition(lambda self: self.any_in("issued", "dispatched"))
    @rule(data=st.data())
    def dispatch(self, data: st.DataObject) -> None:
        group_id = self.some(data, "issued", "dispatched")
        self.happen(Dispatched(group_id=group_id, attempt=self.state.attempt(group_id) + 1, version=self.step))
        self.model[group_id] = "dispatched"

    @precondition(lambda self: self.any_in("dispatched"))
    @rule(data=st.data(), late=st.booleans())
    def answer(self, data: st.DataObject, late: bool) -> None:
        group_id = self.some(data, "dispatched")
        attempt = self.state.attempt(group_id) - late
        if attempt < 0:
            return
        assert self.happen(Completed(group_id=group_id, attempt=attempt, tokens=3)) is not late
        if not late:
            self.model[group_id] = "completed"

    @precondition(lambda self: self.any_in("completed"))
    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        self.step += 1
        group_id = self.some(data, "completed")
        self.happen(Consumed(group_id=group_id, step=self.step, position=0))
        self.model[group_id], self.consumed_at[group_id] = "consumed", self.step

    @precondition(lambda self: self.any_in("issued", "dispatched", "completed"))
    @rule(data=st.data(), failed=st.booleans())
    def end(self, data: st.DataObject, failed: bool) -> None:
        group_id = self.some(data, "issued", "dispatched", "completed")
        self.happen(
            GroupFailed(group_id=group_id, failure="environment", tokens=2)
            if failed
            else Dropped(group_id=group_id, reason="x", tokens=2)
        )
        self.model[group_id] = "failed" if failed else "dropped"

    @rule()
    def save(self) -> None:
        self.happen(Committed(self.step))

    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        self.step = data.draw(st.integers(0, self.step))
        self.happen(Resumed(self.step))
        for group_id, at in self.model.items():
            if at == "dispatched":
                self.model[group_id] = "issued"
            elif at == "consumed" and self.consumed_at[group_id] > self.step:
                self.model[group_id] = "completed"

    @invariant()
    def no_group_is_lost_and_none_is_counted_twice(self) -> None:
        counts = self.state.statistics()
        assert counts.unaccounted == 0
        places = list(self.model.values())
        assert counts.issued == len(places)
        assert counts.consumed == places.count("consumed")
        assert sum(counts.dropped.values()) == places.count("dropped")
        assert sum(counts.failed.values()) == places.count("failed")
        live = {group_id: at for group_id, at in self.model.items() if at in ("issued", "dispatched", "completed")}
        assert {group_id: where.value for group_id, where in self.state.live().items()} == live

    def teardown(self) -> None:
        again = LedgerState().replay(self.events)
        assert (again.statistics(), again.live()) == (self.state.statistics(), self.state.live())


TestAnyOrderOfEvents = AnyOrderOfEvents.TestCase
TestAnyOrderOfEvents.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
