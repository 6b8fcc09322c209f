"""What a run starts from, worked out by hand: checkpoint, ledger and counts of tokens that do not agree."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from asyncrl.data import DataProto
from asyncrl.interfaces import GroupSummary
from asyncrl.ledger import Ledger, RecordedGroup, RecordedTurns, Recovered
from asyncrl.staleness import POLICIES
from asyncrl.trainer.checkpoint import DriverState
from asyncrl.trainer.recovery import StartingPoint, starting_point

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
