"""What a run goes on from: its driver's state, taken at a checkpoint and put to work again after it.

The checkpoint knows what holds between two steps (weights, what was trained on); the ledger knows what went on beside
it (rollouts that finished, groups given up), also after the checkpoint. Together they leave nothing open.
"""

from __future__ import annotations

from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.ledger import LedgerBase, LedgerPosition, Recovered
from asyncrl.pipeline.accounts import TokenAccounts, TokenBalance
from asyncrl.pipeline.checkpoint import DriverState
from asyncrl.pipeline.driver import Driver
from asyncrl.pipeline.staleness import AdmissionLaw, StalenessPolicy

__all__ = [
    "admission_law",
    "check_batches",
    "driver_state",
    "ledger_base",
    "resumed_accounts",
    "still_outstanding",
]

STEP_REASONS = frozenset({"masked"})
"""Reasons under which tokens are given up by a step itself: the checkpoint has counted those, the ledger all others."""


def driver_state(
    driver: Driver,
    balance: TokenBalance,
    *,
    step: int,
    history: dict[str, Any],
    position: LedgerPosition | None = None,
) -> DriverState:
    """The driver between two steps, ``step`` of which are done; up to ``position`` the ledger is on the disk."""
    ledger = driver.journal.ledger
    return DriverState(
        step=step,
        next_slot=driver.law.next_slot,
        outstanding=tuple(sorted({*driver.outstanding, *driver.law.again})),
        generated=balance.generated,
        trained=balance.trained,
        dropped=dict(balance.dropped),
        staleness=dict(driver.staleness),
        history=history,
        consumed=ledger.statistics().consumed if ledger is not None else step * driver.plan.groups_per_step,
        ledger=position or LedgerPosition(),
        kl_coefficient=driver.penalty.controller.coefficient if driver.penalty is not None else None,
    )


def ledger_base(resumed: DriverState) -> LedgerBase:
    """What a checkpoint tells the ledger."""
    return LedgerBase(
        step=resumed.step,
        next_slot=resumed.next_slot,
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
    """Whether the batches that are taken again are as large as those to come: the admission law knows one size.

    Raises:
        ConfigError: one has another size.
    """
    sizes = {step: len(batch) for step, batch in sorted(found.batches.items()) if step <= steps}
    for step, size in sizes.items():
        if size != groups_per_step:
            raise ConfigError(
                f"groups_per_step is {groups_per_step}, but step {step} is done again with its recorded {size} groups",
                path="trainer.groups_per_step",
                remedy=f"{size} until step {max(sizes)} is in a checkpoint (--steps {max(sizes)} ends with one)",
            )


def still_outstanding(
    resumed: DriverState | None, found: Recovered, *, total_groups: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Prompts of earlier lives that the steps to come need: those recorded (held), and those to be rolled out (again).

    Fewer steps than planned before need fewer groups; batches that are taken again come first, then the oldest prompts.
    """
    if resumed is None:
        return (), ()
    if not found.next_slot:  # without a ledger
        return (), tuple(sorted(resumed.outstanding)[:total_groups])
    batches = {slot for batch in found.batches.values() for slot in batch}
    live = {*found.waiting, *(slot for slot, group in found.groups.items() if not group.uses)}
    first = sorted(live, key=lambda slot: (slot not in batches, slot))[:total_groups]
    return tuple(sorted(set(first) - found.waiting.keys())), tuple(sorted(found.waiting.keys() & set(first)))


def admission_law(
    resumed: DriverState | None,
    *,
    steps: int,
    groups_per_step: int,
    max_staleness: int,
    policy: StalenessPolicy,
    found: Recovered | None = None,
) -> AdmissionLaw:
    """The law for a run of ``steps`` steps in all, from its beginning or from where ``resumed`` and the ledger were."""
    overdue_after = policy.overdue_after(max_staleness)
    if resumed is None:
        return AdmissionLaw(
            groups_per_step,
            max_staleness=max_staleness,
            total_groups=steps * groups_per_step,
            overdue_after=overdue_after,
        )
    found = found or Recovered(next_slot=0, waiting={}, batches={}, groups={}, dropped_tokens={})
    total_groups = (steps - resumed.step) * groups_per_step
    held, again = still_outstanding(resumed, found, total_groups=total_groups)
    return AdmissionLaw(
        groups_per_step,
        max_staleness=max_staleness,
        total_groups=total_groups,
        first_version=resumed.step,
        first_slot=found.next_slot or resumed.next_slot,
        held=held,
        again=again,
        overdue_after=overdue_after,
    )


def resumed_accounts(
    resumed: DriverState | None, *, found: Recovered | None = None, generated: int | None = None
) -> TokenAccounts:
    """Carry on the counts; tokens that were neither trained on, dropped nor recorded are lost and told so.

    ``generated`` is what the engines of all earlier lives delivered; the checkpoint's count where it is not known.
    """
    if resumed is None:
        return TokenAccounts()
    if found is None or not found.next_slot:
        held, dropped = 0, {reason: tokens for reason, tokens in resumed.dropped.items() if reason != "interrupted"}
    else:
        held = sum(group.summary.tokens for group in found.groups.values() if not group.uses)
        held += sum(turns.tokens for turns in found.turns.values())
        dropped = {reason: tokens for reason, tokens in resumed.dropped.items() if reason in STEP_REASONS}
        dropped |= found.dropped_tokens
    total = resumed.generated if generated is None else generated
    dropped["interrupted"] = total - resumed.trained - sum(dropped.values()) - held
    return TokenAccounts(trained=resumed.trained, dropped=dropped)
