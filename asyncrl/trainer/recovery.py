"""What a run starts from: the driver's state at a checkpoint, and what the ledger kept beside it.

The checkpoint holds what is true between two steps (weights, what was trained on); the ledger holds what happened
beside it (rollouts that finished, groups dropped), also after the checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from asyncrl.data import DataProtoFuture
from asyncrl.errors import ConfigError
from asyncrl.ledger import Ledger, LedgerBase, LedgerPosition, RecordedGroup, Recovered
from asyncrl.staleness import AdmissionLaw, StalenessPolicy
from asyncrl.telemetry.run_directory import to_json
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
    left_over: Collection[int] = (),
) -> DriverState:
    """Return the state of a driver after ``step`` steps; the ledger is on the disk up to ``position``.

    ``left_over`` are groups of the runs before that the driver has not (:class:`StartingPoint`).
    """
    ledger = driver.journal.ledger
    return DriverState(
        step=step,
        next_group_id=driver.law.next_group_id,
        outstanding=tuple(sorted({*driver.groups, *driver.law.again, *left_over})),
        generated=balance.generated,
        trained=balance.trained,
        dropped=dict(balance.dropped),
        staleness=dict(driver.journal.staleness),
        history=to_json(
            {
                **history,
                "failures": driver.journal.failures,
                "evaluating": sorted(driver.evaluating),
                **(_chosen(driver) if driver.tasks is not None else {}),
            }
        ),
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


def ledger_base(resumed: DriverState, *, same_updates: bool = True) -> LedgerBase:
    """Return what a ledger needs of the checkpoint that a run resumes from, with the same updates or with others."""
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
        same_updates=same_updates,
    )


def check_batches(
    found: Recovered,
    *,
    steps: int,
    groups_per_step: int,
    max_uses: int | None = None,
    max_staleness: int,
    policy: StalenessPolicy,
) -> None:
    """Check that recorded batches, trained on again, are as new ones may be: in size, in uses and in staleness.

    Raises:
        ConfigError: one is not, or all of its tokens are masked now.
    """
    batches = {step: batch for step, batch in sorted(found.batches.items()) if step <= steps}
    last = max(batches, default=0)
    until = f"until step {last} is in a checkpoint (--steps {last} ends with one)"
    for step, batch in batches.items():
        if len(batch) != groups_per_step:
            raise ConfigError(
                f"groups_per_step is {groups_per_step}, but step {step} is trained again on its {len(batch)} recorded "
                "groups",
                path="trainer.groups_per_step",
                remedy=f"{len(batch)} {until}",
            )
    again = Counter(group_id for batch in batches.values() for group_id in batch)
    most = max((found.groups[group_id].uses + uses for group_id, uses in again.items()), default=0)
    if max_uses is not None and most > max_uses:
        raise ConfigError(
            f"max_uses is {max_uses}, but recorded batches up to step {last} train on a group {most} times in all",
            path="buffer.options.max_uses",
            remedy=f"{most} {until}",
        )
    newest = {
        step: max(max(found.groups[group_id].summary.version_tokens) for group_id in batch)
        for step, batch in batches.items()
    }
    for step, version in newest.items():
        oldest = policy.oldest_version(step - 1, max_staleness=max_staleness)
        if oldest is not None and version < oldest:
            needed = max(step - 1 - version for step, version in newest.items())
            raise ConfigError(
                f"max_staleness is {max_staleness}, but step {step} is trained again on recorded tokens, all of which "
                f"are at least {step - 1 - version} versions old: none would be left",
                path="max_staleness",
                remedy=f"{needed} {until}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingPoint:
    """What the driver of a new or resumed run starts with.

    Attributes:
        journal: with the counts of the runs before.
        groups: outstanding ones of the runs before.
        reused: groups that were trained on, and that recorded batches train on once more.
        tasks: of groups that are issued, where a curriculum has chosen them.
        left_over: outstanding groups that the remaining steps do not need; they stay in ledger and checkpoints.
        left_over_tokens: sampled for those of them that are recorded.
        generated: tokens that the engines of the runs before delivered.
    """

    law: AdmissionLaw
    journal: Journal
    groups: dict[int, Group]
    reused: dict[int, Group]
    left_over: tuple[int, ...] = ()
    left_over_tokens: int = 0
    generated: int = 0
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
    generated: int = 0,
    endless: bool = False,
) -> StartingPoint:
    """Make the admission law, the journal and the groups of a run of ``steps`` steps in all.

    ``resumed`` is the state of the checkpoint to resume from (None for a new run), ``ledger`` the run's, opened.
    ``generated`` are tokens that the engines of all runs before delivered, by counts that may lag: those of the
    checkpoint, and what is trained on, dropped or recorded, were delivered too. With ``endless`` the law goes on
    admitting groups that no step will train on (benchmarks).
    """
    trained = resumed.trained if resumed is not None else 0
    dropped, recorded_tokens = _dropped_and_recorded(resumed, ledger)
    accounted = trained + sum(dropped.values()) + recorded_tokens
    generated = max(generated, accounted, resumed.generated if resumed is not None else 0)
    dropped["interrupted"] = generated - accounted  # neither trained on nor recorded, so lost
    journal = Journal(
        ledger,
        trained=trained,
        dropped=dropped,
        staleness=resumed.staleness if resumed is not None else None,
        failures=resumed.history.get("failures") if resumed is not None else None,
    )
    found = journal.recovered
    first_version = resumed.step if resumed is not None else 0
    total_groups = (steps - first_version) * groups_per_step
    reserved = Counter(group_id for step, batch in found.batches.items() if step <= steps for group_id in batch)
    live = _outstanding(resumed, found, first=reserved)
    needed, left_over = live[:total_groups], live[total_groups:]
    held = [group_id for group_id in needed if group_id in found.groups]
    again = [group_id for group_id in needed if group_id not in found.groups]
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
    reused = [group_id for group_id, group in found.groups.items() if group.uses and group_id in reserved]
    chosen: Mapping[str, int] = resumed.history.get("tasks", {}) if resumed is not None else {}
    tasks = {**{int(group_id): task for group_id, task in chosen.items()}, **found.tasks}
    groups = {
        group_id: _recovered_group(
            group_id, found.groups.get(group_id), task=tasks.get(group_id), reserved_uses=reserved[group_id]
        )
        for group_id in (*outstanding, *reused)
    }
    return StartingPoint(
        law=law,
        journal=journal,
        groups={group_id: groups[group_id] for group_id in outstanding},
        reused={group_id: groups[group_id] for group_id in reused},
        left_over=tuple(left_over),
        left_over_tokens=sum(each.summary.tokens for group_id, each in found.groups.items() if group_id in left_over),
        generated=generated,
        tasks=tasks,
    )


def _recovered_group(group_id: int, recorded: RecordedGroup | None, *, task: int | None, reserved_uses: int) -> Group:
    if recorded is None:
        return Group(group_id=group_id, task=task)
    return Group(
        group_id=group_id,
        task=task,
        summary=recorded.summary,
        rows=DataProtoFuture.of(recorded.rows),
        uses=recorded.uses,
        rewarded=recorded.rewarded,
        reserved_uses=reserved_uses,
    )


def _outstanding(resumed: DriverState | None, found: Recovered, *, first: Collection[int]) -> list[int]:
    """Return outstanding groups in the order in which the steps to come need them: those in ``first``, then the oldest.

    Fewer steps than planned before need fewer groups.
    """
    if resumed is None:
        return []
    live = {*found.waiting, *(group_id for group_id, group in found.groups.items() if not group.uses)}
    if not found.next_group_id:  # without a ledger
        live = {*resumed.outstanding}
    return sorted(live, key=lambda group_id: (group_id not in first, group_id))


def _dropped_and_recorded(resumed: DriverState | None, ledger: Ledger | None) -> tuple[dict[str, int], int]:
    """Return tokens dropped so far, by reason, without lost ones, and those recorded for groups to be trained on."""
    if resumed is None:
        return {}, 0
    found = ledger.recovered if ledger is not None else None
    if found is None or not found.next_group_id:
        return {reason: tokens for reason, tokens in resumed.dropped.items() if reason != "interrupted"}, 0
    dropped = {reason: tokens for reason, tokens in resumed.dropped.items() if reason in STEP_REASONS}
    recorded = sum(group.summary.tokens for group in found.groups.values() if not group.uses)
    return {**dropped, **found.dropped_tokens}, recorded + sum(turns.tokens for turns in found.turns.values())
