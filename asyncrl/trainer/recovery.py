"""What a run starts from: the driver's state at a checkpoint, and what the ledger kept beside it.

The checkpoint holds what is true between two steps (weights, what was trained on); the ledger holds what happened
beside it (rollouts that finished, groups dropped), also after the checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from asyncrl.data import DataProtoFuture
from asyncrl.errors import ConfigError
from asyncrl.ledger import Ledger, LedgerBase, LedgerPosition, Recovered
from asyncrl.staleness import AdmissionLaw, StalenessPolicy
from asyncrl.trainer.checkpoint import DriverState
from asyncrl.trainer.group import Group
from asyncrl.trainer.journal import Journal, TokenBalance

if TYPE_CHECKING:
    from asyncrl.trainer.driver import Driver

STEP_REASONS = frozenset({"masked"})
"""Reasons under which a step itself drops tokens: the checkpoint has counted those, the ledger all others."""


def driver_state(
    driver: Driver,
    balance: TokenBalance,
    *,
    step: int,
    history: dict[str, Any],
    position: LedgerPosition | None = None,
) -> DriverState:
    """Return the state of a driver after ``step`` steps; the ledger is on the disk up to ``position``."""
    ledger = driver.journal.ledger
    return DriverState(
        step=step,
        next_group_id=driver.law.next_group_id,
        outstanding=tuple(sorted({*driver.groups, *driver.law.again})),
        generated=balance.generated,
        trained=balance.trained,
        dropped=dict(balance.dropped),
        staleness=dict(driver.journal.staleness),
        history={
            **history,
            "failures": dict(driver.journal.failures),
            "evaluating": sorted(driver.evaluating),
            **(_chosen(driver) if driver.tasks is not None else {}),
        },
        consumed=ledger.statistics().consumed if ledger is not None else step * driver.plan.groups_per_step,
        ledger=position or LedgerPosition(),
        kl_coef=driver.learner.advantages.kl_coef,
        kl_start=driver.learner.advantages.kl_start,
    )


def _chosen(driver: Driver) -> dict[str, Any]:
    assert driver.tasks is not None
    tasks = {str(each.group_id): each.task for each in driver.groups.values() if each.task is not None}
    return {"curriculum": driver.tasks.curriculum.state(), "tasks": tasks}


def lost_scores(resumed: DriverState, *, scored: Collection[int], again: int | None) -> tuple[int, ...]:
    """Return steps whose evaluation was under way at the checkpoint, and which are neither scored nor scored again."""
    steps: Sequence[int] = resumed.history.get("evaluating", ())
    return tuple(step for step in steps if step not in scored and step != again)


def ledger_base(resumed: DriverState) -> LedgerBase:
    """Return what a ledger needs of the checkpoint that a run resumes from."""
    return LedgerBase(
        step=resumed.step,
        next_group_id=resumed.next_group_id,
        consumed=resumed.consumed,
        outstanding=resumed.outstanding,
        dropped_tokens={
            reason: tokens
            for reason, tokens in resumed.dropped.items()
            if reason not in STEP_REASONS and reason != "interrupted"
        },
        position=resumed.ledger,
    )


def check_batches(found: Recovered, *, steps: int, groups_per_step: int) -> None:
    """Raise ConfigError unless recorded batches, trained on again, are as large as new ones: the law has one size."""
    sizes = {step: len(batch) for step, batch in sorted(found.batches.items()) if step <= steps}
    for step, size in sizes.items():
        if size != groups_per_step:
            raise ConfigError(
                f"groups_per_step is {groups_per_step}, but step {step} is trained again on its {size} recorded groups",
                path="trainer.groups_per_step",
                remedy=f"{size} until step {max(sizes)} is in a checkpoint (--steps {max(sizes)} ends with one)",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingPoint:
    """What the driver of a new or resumed run starts with.

    Attributes:
        journal: with the counts of the runs before.
        groups: outstanding ones of the runs before.
        reused: groups that were trained on, and that recorded batches train on once more.
        tasks: of groups that are issued, where a curriculum has chosen them.
        left_over_tokens: sampled for recorded groups that the remaining steps do not need; they stay in the ledger.
    """

    law: AdmissionLaw
    journal: Journal
    groups: dict[int, Group]
    reused: dict[int, Group]
    left_over_tokens: int = 0
    tasks: Mapping[int, int] = field(default_factory=dict[int, int])

    @property
    def places(self) -> int:
        """Places in the buffer that groups of the runs before need."""
        return len({*self.groups, *self.law.again}) + len(self.reused)


def starting_point(
    resumed: DriverState | None,
    ledger: Ledger | None = None,
    *,
    steps: int,
    groups_per_step: int,
    max_staleness: int,
    policy: StalenessPolicy,
    generated: int | None = None,
    endless: bool = False,
) -> StartingPoint:
    """Make the admission law, the journal and the groups of a run of ``steps`` steps in all.

    ``resumed`` is the state of the checkpoint to resume from (None for a new run), ``ledger`` the run's, opened.
    ``generated`` are tokens that the engines of all runs before delivered; None: as the checkpoint counted. With
    ``endless`` the law goes on admitting groups that no step will train on (benchmarks).
    """
    journal = Journal(
        ledger,
        trained=resumed.trained if resumed is not None else 0,
        dropped=_dropped_tokens(resumed, ledger, generated=generated),
        staleness=resumed.staleness if resumed is not None else None,
        failures=resumed.history.get("failures") if resumed is not None else None,
    )
    found = journal.recovered
    first_version = resumed.step if resumed is not None else 0
    total_groups = (steps - first_version) * groups_per_step
    held, again = _outstanding(resumed, found, total_groups=total_groups)
    law = AdmissionLaw(
        groups_per_step,
        max_staleness=max_staleness,
        total_groups=None if endless else total_groups,
        first_version=first_version,
        first_group_id=(found.next_group_id or resumed.next_group_id) if resumed is not None else 0,
        held=held,
        again=again,
        overdue_after=policy.overdue_after(max_staleness),
    )
    outstanding = [*held, *(again if found.next_group_id else ())]
    used = [group_id for group_id, group in found.groups.items() if group.uses]
    chosen: Mapping[str, int] = resumed.history.get("tasks", {}) if resumed is not None else {}
    tasks = {**{int(group_id): task for group_id, task in chosen.items()}, **found.tasks}
    left_over = sum(
        group.summary.tokens for group_id, group in found.groups.items() if group_id not in held and not group.uses
    )
    return StartingPoint(
        law=law,
        journal=journal,
        groups={group_id: _recovered_group(group_id, found, tasks.get(group_id)) for group_id in outstanding},
        reused={group_id: _recovered_group(group_id, found, tasks.get(group_id)) for group_id in used},
        left_over_tokens=left_over,
        tasks=tasks,
    )


def _recovered_group(group_id: int, found: Recovered, task: int | None) -> Group:
    recorded = found.groups.get(group_id)
    if recorded is None:
        return Group(group_id=group_id, task=task)
    return Group(
        group_id=group_id,
        task=task,
        summary=recorded.summary,
        rows=DataProtoFuture.of(recorded.rows),
        uses=recorded.uses,
        rewarded=recorded.rewarded,
        reserved_uses=sum(batch.count(group_id) for batch in found.batches.values()),
    )


def _outstanding(
    resumed: DriverState | None, found: Recovered, *, total_groups: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return outstanding groups that the steps to come need: recorded ones (held), and those to be sampled again.

    Fewer steps than planned before need fewer groups; recorded batches come first, then the oldest groups.
    """
    if resumed is None:
        return (), ()
    if not found.next_group_id:  # without a ledger
        return (), tuple(sorted(resumed.outstanding)[:total_groups])
    batches = {group_id for batch in found.batches.values() for group_id in batch}
    live = {*found.waiting, *(group_id for group_id, group in found.groups.items() if not group.uses)}
    first = sorted(live, key=lambda group_id: (group_id not in batches, group_id))[:total_groups]
    return tuple(sorted(set(first) - found.waiting.keys())), tuple(sorted(found.waiting.keys() & set(first)))


def _dropped_tokens(resumed: DriverState | None, ledger: Ledger | None, *, generated: int | None) -> dict[str, int]:
    """Return tokens dropped so far, by reason; what was neither trained on nor recorded was lost ("interrupted")."""
    if resumed is None:
        return {}
    found = ledger.recovered if ledger is not None else None
    if found is None or not found.next_group_id:
        held, dropped = 0, {reason: tokens for reason, tokens in resumed.dropped.items() if reason != "interrupted"}
    else:
        held = sum(group.summary.tokens for group in found.groups.values() if not group.uses)
        held += sum(turns.tokens for turns in found.turns.values())
        dropped = {reason: tokens for reason, tokens in resumed.dropped.items() if reason in STEP_REASONS}
        dropped |= found.dropped_tokens
    total = resumed.generated if generated is None else generated
    dropped["interrupted"] = total - resumed.trained - sum(dropped.values()) - held
    return dropped
