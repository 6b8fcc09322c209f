"""What a run goes on from: its driver's state, taken at a checkpoint and put to work again after it."""

from __future__ import annotations

from typing import Any

from asyncrl.pipeline.accounts import TokenAccounts, TokenBalance
from asyncrl.pipeline.checkpoint import DriverState
from asyncrl.pipeline.driver import Driver
from asyncrl.pipeline.staleness import AdmissionLaw, StalenessPolicy

__all__ = ["admission_law", "driver_state", "resumed_accounts"]


def driver_state(driver: Driver, balance: TokenBalance, *, step: int, history: dict[str, Any]) -> DriverState:
    """The driver between two steps, ``step`` of which are done."""
    return DriverState(
        step=step,
        next_slot=driver.law.next_slot,
        outstanding=tuple(sorted(driver.outstanding)),
        generated=balance.generated,
        trained=balance.trained,
        dropped=dict(balance.dropped),
        staleness=dict(driver.staleness),
        history=history,
    )


def admission_law(
    resumed: DriverState | None, *, steps: int, groups_per_step: int, max_staleness: int, policy: StalenessPolicy
) -> AdmissionLaw:
    """The law for a run of ``steps`` steps in all, from its beginning or from where ``resumed`` was."""
    overdue_after = policy.overdue_after(max_staleness)
    if resumed is None:
        return AdmissionLaw(
            groups_per_step,
            max_staleness=max_staleness,
            total_groups=steps * groups_per_step,
            overdue_after=overdue_after,
        )
    total_groups = (steps - resumed.step) * groups_per_step
    return AdmissionLaw(
        groups_per_step,
        max_staleness=max_staleness,
        total_groups=total_groups,
        first_version=resumed.step,
        first_slot=resumed.next_slot,
        again=sorted(resumed.outstanding)[:total_groups],  # fewer steps than planned before need fewer groups
        overdue_after=overdue_after,
    )


def resumed_accounts(resumed: DriverState | None) -> TokenAccounts:
    """Carry on the counts; what was sampled and neither trained on nor dropped by then is lost and told so."""
    if resumed is None:
        return TokenAccounts()
    lost = resumed.generated - resumed.trained - sum(resumed.dropped.values())
    dropped = {**resumed.dropped, "interrupted": resumed.dropped.get("interrupted", 0) + lost}
    return TokenAccounts(trained=resumed.trained, dropped=dropped)
