"""Random schedules and faults: nothing may break, and what is broken on purpose must be found."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncrl.pipeline.resumption
from asyncrl.errors import AsyncRLError
from asyncrl.interfaces import DroppedGroup
from asyncrl.pipeline.driver import Driver
from asyncrl.pipeline.staleness import AdmissionLaw, StalenessPolicy
from asyncrl.simulation import SimulationDeadlock, random_scenario, simulate


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Faults are told in the log of a real run; here they come by the hundred."""
    log = logging.getLogger("asyncrl")
    level = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(level)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_schedule_comes_to_its_end_and_keeps_the_law(seed: int):
    result = simulate(random_scenario(seed), fetch=seed % 10 == 0, limit_s=1e6)
    assert result.violations == []


@pytest.mark.slow
def test_a_thousand_schedules():
    for seed in range(1000):
        assert simulate(random_scenario(seed), fetch=seed % 50 == 0, limit_s=1e6).violations == [], seed


def found(seeds: range) -> str:
    """The first thing that goes wrong in these schedules."""
    for seed in seeds:
        try:
            violations = simulate(random_scenario(seed), limit_s=1e6).violations
        except (AsyncRLError, SimulationDeadlock, ExceptionGroup) as error:
            return f"{type(error).__name__}: {error}"
        if violations:
            return violations[0]
    return ""


def test_a_mask_that_lets_one_version_too_many_pass_is_found(monkeypatch: pytest.MonkeyPatch):
    def oldest_version(self: StalenessPolicy, trainer_version: int, *, max_staleness: int) -> int | None:
        return max(0, trainer_version - max_staleness - 1) if self.too_old == "mask" else None

    monkeypatch.setattr(StalenessPolicy, "oldest_version", oldest_version)
    assert "versions old" in found(range(300))


def test_a_law_that_forgets_what_was_dropped_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(AdmissionLaw, "dropped", lambda self, slot: None)
    assert found(range(300))


def test_drops_that_are_not_counted_are_found(monkeypatch: pytest.MonkeyPatch):
    def dropped(self: Driver, group: DroppedGroup) -> None:
        self.outstanding.discard(group.slot)
        self.law.dropped(group.slot)
        self._admission_changed.set()

    monkeypatch.setattr(Driver, "_dropped", dropped)
    assert "unaccounted for" in found(range(300))


def test_a_checkpoint_that_forgets_who_was_under_way_is_found(monkeypatch: pytest.MonkeyPatch):
    """A cursor ahead of the buffer: prompts issued and not trained on are lost by a restart."""
    honest = asyncrl.pipeline.resumption.driver_state

    def forgetful(driver: Driver, *arguments: object, **options: object) -> object:
        driver_outstanding, driver.outstanding = driver.outstanding, set()
        try:
            return honest(driver, *arguments, **options)  # type: ignore[arg-type]
        finally:
            driver.outstanding = driver_outstanding

    monkeypatch.setattr("asyncrl.simulation.world.driver_state", forgetful)
    assert "neither trained on nor dropped" in found(range(300))


def test_a_batch_trained_twice_is_found(monkeypatch: pytest.MonkeyPatch):
    """A restart that takes up an older place than the checkpoint's."""
    monkeypatch.setattr(
        "asyncrl.simulation.world.admission_law",
        lambda resumed, **options: AdmissionLaw(
            options["groups_per_step"],
            max_staleness=options["max_staleness"],
            total_groups=(options["steps"] - (resumed.step if resumed else 0)) * options["groups_per_step"],
            first_version=resumed.step if resumed else 0,
        ),
    )
    assert "trained on twice" in found(range(300))
