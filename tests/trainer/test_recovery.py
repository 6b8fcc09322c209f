"""What a run starts from, worked out by hand: checkpoint, ledger and counts of tokens that do not agree."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from asyncrl.data import DataProto
from asyncrl.errors import ConfigError
from asyncrl.interfaces import GroupSummary
from asyncrl.ledger import Ledger, RecordedGroup, RecordedTurns, Recovered
from asyncrl.staleness import POLICIES
from asyncrl.trainer.checkpoint import DriverState
from asyncrl.trainer.driver import Driver, TrainingPlan
from asyncrl.trainer.journal import Journal, TokenBalance
from asyncrl.trainer.recovery import StartingPoint, check_batches, driver_state, starting_point

STATE = DriverState(
    step=4,
    next_group_id=12,
    outstanding=(8, 9, 10, 11),
    generated=100,
    trained=80,
    dropped={"stale": 12, "masked": 3, "interrupted": 5},
    staleness={},
    history={},
    consumed=8,
)


def recorded(group_id: int, *, uses: int = 0, version: int = 4) -> RecordedGroup:
    summary = GroupSummary(
        group_id=group_id,
        rows=1,
        oldest_version=version,
        tokens=10,
        version_tokens={version: 10},
        rewards=(1.0,),
        lengths=(10,),
    )
    return RecordedGroup(summary=summary, rows=DataProto(), rewarded=False, uses=uses)


FOUND = Recovered(
    next_group_id=12,
    waiting={11: 1},
    batches={},
    groups={8: recorded(8), 9: recorded(9), 10: recorded(10)},
    dropped_tokens={"stale": 14},
    turns={11: RecordedTurns(content=b"", tokens=6)},
)


def start(state: DriverState = STATE, found: Recovered | None = FOUND, *, steps: int = 6, **more: Any) -> StartingPoint:
    ledger = cast("Ledger", SimpleNamespace(recovered=found)) if found is not None else None
    policy = POLICIES["drop"]
    return starting_point(state, ledger, steps=steps, groups_per_step=2, max_staleness=1, policy=policy, **more)


@pytest.mark.parametrize(("metered", "interrupted"), [(150, 17), (133, 0), (120, 0), (0, 0)])
def test_what_is_recorded_was_generated_where_the_meters_lag(metered: int, interrupted: int):
    """80 are trained on, 14 and 3 dropped, and 30 and 6 recorded: 133 were sampled, whatever the meters say."""
    begun = start(generated=metered)
    assert begun.generated == max(metered, 133)
    assert begun.journal.dropped_tokens.get("interrupted", 0) == interrupted
    balance = begun.journal.balance(generated=begun.generated, in_flight=30)  # and 6 turns, which the journal adds
    balance.check()
    assert balance.difference == 0


@pytest.mark.parametrize(("metered", "interrupted"), [(110, 15), (90, 5)])
def test_without_a_ledger_the_checkpoint_counts_at_least(metered: int, interrupted: int):
    begun = start(STATE, None, generated=metered)
    assert begun.generated == max(metered, 100)
    assert begun.journal.dropped_tokens == {"interrupted": interrupted, "masked": 3, "stale": 12}


def test_fewer_steps_than_recorded_ones_need_the_groups_of_those_that_are_left():
    """Step 5 took 9 and 10; step 6 took the slow 8, and 5 once more. The run ends with step 5."""
    found = replace(FOUND, batches={5: (9, 10), 6: (8, 5)}, groups={**FOUND.groups, 5: recorded(5, uses=1)})
    begun = start(found=found, steps=5, generated=133)
    assert {group_id: each.reserved_uses for group_id, each in begun.groups.items()} == {9: 1, 10: 1}
    assert (begun.reused, begun.left_over, begun.left_over_tokens) == ({}, (8, 11), 10)
    assert begun.law.finished
    begun.journal.balance(generated=begun.generated, in_flight=20 + begun.left_over_tokens).check()

    whole = start(found=found, steps=7)
    assert {group_id: each.reserved_uses for group_id, each in whole.groups.items()} == {8: 1, 9: 1, 10: 1, 11: 0}
    assert {group_id: each.reserved_uses for group_id, each in whole.reused.items()} == {5: 1}
    assert whole.left_over == ()


@pytest.mark.parametrize("found", [None, FOUND])
def test_groups_that_fewer_steps_do_not_need_stay_in_the_checkpoints(found: Recovered | None):
    begun = start(found=found, steps=5)
    assert begun.left_over == (10, 11)
    driver = Driver(
        plan=TrainingPlan(steps=5, groups_per_step=2, group_size=1),
        law=begun.law,
        groups=begun.groups,
        stages=cast("Any", SimpleNamespace(journal=Journal())),
        learner=cast("Any", SimpleNamespace(advantages=SimpleNamespace(kl_coef=None, kl_start=None))),
        observer=cast("Any", None),
    )
    balance = TokenBalance(generated=0, trained=0, dropped={}, in_flight=0)
    state = driver_state(driver, balance, step=5, history={}, left_over=begun.left_over)
    assert state.outstanding == (8, 9, 10, 11)


def test_recorded_batches_that_use_a_group_more_often_than_is_allowed_now_are_refused():
    """Group 5 was trained on twice, and step 6 trains on it again; group 8 is trained on by steps 5 and 7."""
    batches = {5: (8, 9), 6: (10, 5), 7: (8, 9)}
    found = replace(FOUND, batches=batches, groups={**FOUND.groups, 5: recorded(5, uses=2)})
    check = partial(check_batches, found, groups_per_step=2, max_staleness=1, policy=POLICIES["wait"])
    check(steps=7, max_uses=3)
    check(steps=7)  # a buffer that keeps rules of its own
    check(steps=5, max_uses=1)
    with pytest.raises(ConfigError, match=r"max_uses is 1, .* up to step 7 train on a group 3 times in all") as told:
        check(steps=7, max_uses=1)
    assert told.value.path == "buffer.options.max_uses"
    assert told.value.remedy == "3 until step 7 is in a checkpoint (--steps 7 ends with one)"


def test_recorded_batches_of_which_a_smaller_bound_leaves_no_token_are_refused():
    """Steps 6 and 7, at versions 5 and 6, train on tokens of version 4 alone; step 8 on one group of version 7."""
    groups = {8: recorded(8), 9: recorded(9), 10: recorded(10, version=7)}
    found = replace(FOUND, batches={6: (8, 9), 7: (9, 8), 8: (8, 10)}, groups=groups)

    def check(max_staleness: int, policy: str) -> None:
        check_batches(found, steps=8, groups_per_step=2, max_staleness=max_staleness, policy=POLICIES[policy])

    check(2, "mask")
    for policy in ("wait", "drop", "correct"):
        check(1, policy)
    with pytest.raises(ConfigError, match=r"max_staleness is 1, but step 7 .* at least 2 versions old") as told:
        check(1, "mask")
    assert told.value.path == "max_staleness"
    assert told.value.remedy == "2 until step 8 is in a checkpoint (--steps 8 ends with one)"
