"""The life of a prompt: hand-worked stories, forbidden events by name, and laws over any order of events."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncrl.errors import InvalidDataError
from asyncrl.ledger import (
    Aborted,
    AttemptFailed,
    Committed,
    Completed,
    Consumed,
    Dispatched,
    Dropped,
    GivenUp,
    Issued,
    LedgerEvent,
    Lost,
    Rebased,
    Resumed,
    Reused,
    Rewarded,
    SampledTurn,
    TurnsAppended,
)
from buffers.ledger_state import LedgerState, PromptState


def rolled_out(slot: int, attempt: int = 0) -> tuple[LedgerEvent, ...]:
    return (
        Dispatched(slot=slot, attempt=attempt, version=0),
        Completed(slot=slot, attempt=attempt, tokens=10),
    )


def turns(*told: tuple[int, int, int, int, int]) -> TurnsAppended:
    """Turns by slot, attempt, row, number and tokens."""
    return TurnsAppended(turns=tuple(SampledTurn(*turn) for turn in told))


def lived(*events: LedgerEvent) -> LedgerState:
    return LedgerState().replay(events)


def test_a_prompt_from_issue_to_checkpoint():
    state = lived(
        Issued(0),
        Dispatched(slot=0, attempt=0, version=3, replica="r1"),
        turns((0, 0, 1, 0, 4)),
        turns((0, 0, 1, 1, 2)),
        Completed(slot=0, attempt=0, tokens=6),
        Rewarded(slot=0, rewards=(1.0, 0.0)),
        Consumed(slot=0, step=4, position=0),
        Committed(4),
    )
    counts = state.statistics()
    assert (counts.issued, counts.consumed, counts.live, counts.unaccounted) == (1, 1, 0, 0)
    assert (counts.committed_step, state.last_step, state.batch(4)) == (4, 4, (0,))


def test_a_late_result_of_an_old_attempt_never_wins():
    state = lived(
        Issued(0),
        Dispatched(slot=0, attempt=0, version=0),
        Dispatched(slot=0, attempt=1, version=0),  # the first replica does not answer
    )
    assert not state.apply(Completed(slot=0, attempt=0, tokens=9))
    assert not state.apply(turns((0, 0, 0, 0, 9)))
    assert state.live() == {0: PromptState.DISPATCHED}
    assert state.apply(Completed(slot=0, attempt=1, tokens=5))
    assert not state.apply(Completed(slot=0, attempt=0, tokens=9))
    assert not state.apply(Completed(slot=0, attempt=1, tokens=5))  # told twice
    assert not state.apply(AttemptFailed(slot=0, attempt=0, failure="infrastructure", tokens=9))
    assert state.statistics().superseded == 5
    assert state.live() == {0: PromptState.COMPLETED}


def test_a_turn_told_twice_counts_once_and_none_is_skipped():
    state = lived(Issued(0), Dispatched(slot=0, attempt=0, version=0))
    assert state.apply(turns((0, 0, 0, 0, 4)))
    assert not state.apply(turns((0, 0, 0, 0, 4)))
    with pytest.raises(InvalidDataError, match="turns come in order"):
        state.apply(turns((0, 0, 0, 2, 4)))


def test_of_turns_told_together_those_in_time_count():
    state = lived(
        Issued(0), Issued(1), Dispatched(slot=0, attempt=0, version=0), Dispatched(slot=1, attempt=0, version=0)
    )
    state.apply(Dispatched(slot=1, attempt=1, version=0))
    told = turns((0, 0, 0, 0, 4), (1, 0, 0, 0, 3), (0, 0, 0, 1, 2), (0, 0, 0, 0, 4))
    assert state.in_time(told) == turns((0, 0, 0, 0, 4), (0, 0, 0, 1, 2))
    assert state.statistics().superseded == 0
    assert state.apply(told)
    assert state.statistics().superseded == 2
    with pytest.raises(InvalidDataError, match="turn 3 of prompt 0, row 0 came before turn 2"):
        state.apply(turns((1, 1, 0, 0, 3), (0, 0, 0, 3, 1)))
    assert state.apply(turns((1, 1, 0, 0, 3)))  # it was not told: a refused event changes nothing
    with pytest.raises(InvalidDataError, match="never dispatched"):
        state.apply(turns((1, 2, 0, 0, 3)))


def test_a_failed_attempt_is_tried_again_and_a_prompt_that_keeps_failing_is_given_up():
    state = lived(Issued(0), Dispatched(slot=0, attempt=0, version=0))
    state.apply(AttemptFailed(slot=0, attempt=0, failure="infrastructure", tokens=3))
    assert state.live() == {0: PromptState.ISSUED}
    state.apply(Dispatched(slot=0, attempt=1, version=0))
    state.apply(Aborted(slot=0, attempt=1, tokens=3))
    state.apply(GivenUp(slot=0, failure="environment_failed", tokens=6))
    counts = state.statistics()
    assert (counts.failed, counts.live, counts.unaccounted) == ({"environment_failed": 1}, 0, 0)


def test_resuming_brings_back_what_the_checkpoint_does_not_know():
    state = lived(*[Issued(slot) for slot in range(6)])
    for slot in range(4):
        state.replay(rolled_out(slot))
    state.replay([Consumed(slot=0, step=1, position=0), Committed(1)])
    state.replay([Consumed(slot=1, step=2, position=0), Reused(slot=0, step=2, position=1)])
    state.replay([Dropped(slot=2, reason="stale", tokens=10), Dispatched(slot=4, attempt=0, version=1)])
    state.apply(Resumed(1))
    assert state.live() == {
        1: PromptState.COMPLETED,
        3: PromptState.COMPLETED,
        4: PromptState.ISSUED,
        5: PromptState.ISSUED,
    }
    counts = state.statistics()
    assert (counts.consumed, counts.reused, counts.dropped, counts.lives) == (1, 0, {"stale": 1}, 2)
    assert counts.unaccounted == 0
    assert not state.apply(Completed(slot=1, attempt=0, tokens=10))  # of the life before
    assert state.attempt(4) == 0  # the next is 1


def test_resuming_from_an_older_checkpoint_undoes_a_newer_one():
    state = lived(Issued(0), *rolled_out(0), Consumed(slot=0, step=5, position=0), Committed(5), Resumed(3))
    assert state.live() == {0: PromptState.COMPLETED}
    assert state.statistics().committed_step == 3
    state.apply(Consumed(slot=0, step=5, position=0))
    assert state.statistics().unaccounted == 0


def test_rows_that_are_lost_are_sampled_again_under_a_new_attempt():
    state = lived(Issued(0), *rolled_out(0, attempt=2), Lost(slot=0, attempt=2))
    assert state.live() == {0: PromptState.ISSUED}
    with pytest.raises(InvalidDataError, match="attempts grow"):
        state.apply(Dispatched(slot=0, attempt=2, version=0))
    state.replay(rolled_out(0, attempt=3))


def test_a_ledger_may_begin_at_a_checkpoint():
    state = lived(Rebased(step=4, next_slot=10, consumed=7, dropped=1, live=(3, 9)), Issued(3), Issued(9))
    counts = state.statistics()
    assert (counts.issued, counts.consumed, counts.live, counts.unaccounted) == (10, 7, 2, 0)
    assert state.next_slot == 10
    with pytest.raises(InvalidDataError, match="issued before"):
        state.apply(Issued(5))
    with pytest.raises(InvalidDataError, match="begins at step 4"):
        state.apply(Resumed(3))


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (Issued(0), "issued before"),
        (Dispatched(slot=0, attempt=0, version=0), "it is completed"),
        (Dispatched(slot=9, attempt=0, version=0), "never issued"),
        (Completed(slot=9, attempt=0, tokens=1), "never issued"),
        (Completed(slot=1, attempt=0, tokens=1), "never dispatched"),
        (Rewarded(slot=1, rewards=(1.0,)), "it is issued"),
        (Rewarded(slot=0, rewards=()), "0 rewards"),
        (Consumed(slot=1, step=1, position=0), "it is issued"),
        (Consumed(slot=2, step=2, position=0), "it was consumed"),
        (Consumed(slot=0, step=1, position=0), "checkpoint of step 1"),
        (Reused(slot=0, step=2, position=0), "not consumed yet"),
        (Dropped(slot=2, reason="stale", tokens=0), "it was consumed"),
        (Dropped(slot=0, reason="", tokens=0), "without a reason"),
        (GivenUp(slot=0, failure="", tokens=0), "without a kind"),
        (Committed(0), "came after"),
        (Lost(slot=1, attempt=0), "it is issued"),
        (Rebased(step=1, next_slot=0, consumed=0, dropped=0, live=()), "not in its midst"),
    ],
)
def test_what_the_picture_does_not_have_is_refused_and_changes_nothing(event: LedgerEvent, why: str):
    state = lived(
        Issued(0),
        Issued(1),
        Issued(2),
        *rolled_out(0),
        *rolled_out(2),
        Consumed(slot=2, step=1, position=0),
        Committed(1),
    )
    before = (state.statistics(), state.live())
    with pytest.raises(InvalidDataError, match=why):
        state.apply(event)
    assert (state.statistics(), state.live()) == before


class Lives(RuleBasedStateMachine):
    """Any order of events, with crashes: the invariant holds, and replaying gives the state that was lived."""

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
        return data.draw(st.sampled_from(sorted(slot for slot, at in self.model.items() if at in where)))

    def any_in(self, *where: str) -> bool:
        return any(at in where for at in self.model.values())

    @rule()
    def issue(self) -> None:
        slot = len(self.model)
        self.happen(Issued(slot))
        self.model[slot] = "issued"

    @precondition(lambda self: self.any_in("issued", "dispatched"))
    @rule(data=st.data())
    def dispatch(self, data: st.DataObject) -> None:
        slot = self.some(data, "issued", "dispatched")
        self.happen(Dispatched(slot=slot, attempt=self.state.attempt(slot) + 1, version=self.step))
        self.model[slot] = "dispatched"

    @precondition(lambda self: self.any_in("dispatched"))
    @rule(data=st.data(), late=st.booleans())
    def answer(self, data: st.DataObject, late: bool) -> None:
        slot = self.some(data, "dispatched")
        attempt = self.state.attempt(slot) - late
        if attempt < 0:
            return
        assert self.happen(Completed(slot=slot, attempt=attempt, tokens=3)) is not late
        if not late:
            self.model[slot] = "completed"

    @precondition(lambda self: self.any_in("dispatched"))
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        slot = self.some(data, "dispatched")
        self.happen(AttemptFailed(slot=slot, attempt=self.state.attempt(slot), failure="environment", tokens=1))
        self.model[slot] = "issued"

    @precondition(lambda self: self.any_in("completed"))
    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        self.step += 1
        slot = self.some(data, "completed")
        self.happen(Consumed(slot=slot, step=self.step, position=0))
        self.model[slot], self.consumed_at[slot] = "consumed", self.step

    @precondition(lambda self: self.any_in("issued", "dispatched", "completed"))
    @rule(data=st.data(), failed=st.booleans())
    def end(self, data: st.DataObject, failed: bool) -> None:
        slot = self.some(data, "issued", "dispatched", "completed")
        self.happen(
            GivenUp(slot=slot, failure="environment", tokens=2) if failed else Dropped(slot=slot, reason="x", tokens=2)
        )
        self.model[slot] = "failed" if failed else "dropped"

    @rule()
    def save(self) -> None:
        self.happen(Committed(self.step))

    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        self.step = data.draw(st.integers(0, self.step))
        self.happen(Resumed(self.step))
        for slot, at in self.model.items():
            if at == "dispatched":
                self.model[slot] = "issued"
            elif at == "consumed" and self.consumed_at[slot] > self.step:
                self.model[slot] = "completed"

    @invariant()
    def nothing_is_lost_and_nothing_counted_twice(self) -> None:
        counts = self.state.statistics()
        assert counts.unaccounted == 0
        places = list(self.model.values())
        assert counts.issued == len(places)
        assert counts.consumed == places.count("consumed")
        assert sum(counts.dropped.values()) == places.count("dropped")
        assert sum(counts.failed.values()) == places.count("failed")
        live = {slot: at for slot, at in self.model.items() if at in ("issued", "dispatched", "completed")}
        assert {slot: where.value for slot, where in self.state.live().items()} == live

    def teardown(self) -> None:
        again = LedgerState().replay(self.events)
        assert (again.statistics(), again.live()) == (self.state.statistics(), self.state.live())


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
