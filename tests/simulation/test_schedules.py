"""Random schedules with faults keep all laws, and deliberate mistakes in the code are found."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import random_scenario

import asyncrl.trainer.recovery
from asyncrl.errors import AsyncRLError
from asyncrl.interfaces import DroppedGroup
from asyncrl.rollout.publication import Publication
from asyncrl.simulation import SimulationDeadlock, simulate
from asyncrl.staleness import AdmissionLaw, StalenessPolicy
from asyncrl.trainer.driver import Driver


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Silence the log, which would report hundreds of faults."""
    log = logging.getLogger("asyncrl")
    level = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(level)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_schedule_ends_and_keeps_the_law(seed: int):
    result = simulate(random_scenario(seed), fetch=seed % 10 == 0, limit_s=1e6)
    assert result.violations == []


@pytest.mark.slow
def test_a_thousand_schedules():
    for seed in range(1000):
        assert simulate(random_scenario(seed), fetch=seed % 50 == 0, limit_s=1e6).violations == [], seed


def found(seeds: range) -> str:
    """Return the first violation or error in these schedules."""
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
    monkeypatch.setattr(AdmissionLaw, "dropped", lambda self, group_id: None)
    assert found(range(300))


def test_drops_that_are_not_counted_are_found(monkeypatch: pytest.MonkeyPatch):
    def dropped(self: Driver, group: DroppedGroup) -> None:
        self.groups.pop(group.group_id, None)
        self.law.dropped(group.group_id)
        self._book.dropped(group.group_id)
        self._admission_changed.set()

    monkeypatch.setattr(Driver, "_dropped", dropped)
    assert "unaccounted for" in found(range(300))


def test_a_publication_that_reaches_a_pinned_replica_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Publication, "pin", lambda self, *names: ())
    assert "has tokens of other versions" in found(range(300))


@pytest.mark.slow
def test_a_replica_that_is_unpinned_with_old_weights_is_found(monkeypatch: pytest.MonkeyPatch):
    def unpin(self: Publication, replica: str) -> tuple[()]:
        for one in self.replicas:
            one.pinned = one.pinned and one.name != replica
        return ()

    monkeypatch.setattr(Publication, "unpin", unpin)
    assert found(range(300))


def test_a_checkpoint_without_the_outstanding_groups_is_found(monkeypatch: pytest.MonkeyPatch):
    """A restart would lose the prompts that were issued and not trained on."""
    honest = asyncrl.trainer.recovery.driver_state

    def forgetful(driver: Driver, *arguments: object, **options: object) -> object:
        groups, driver.groups = driver.groups, {}
        try:
            return honest(driver, *arguments, **options)  # type: ignore[arg-type]
        finally:
            driver.groups = groups

    monkeypatch.setattr("asyncrl.simulation.world.driver_state", forgetful)
    assert "neither trained on nor dropped" in found(range(300))


def test_a_batch_trained_twice_is_found(monkeypatch: pytest.MonkeyPatch):
    """A restart would continue at an older place than the checkpoint's."""
    monkeypatch.setattr(
        "asyncrl.trainer.recovery.AdmissionLaw",
        lambda groups_per_step, **options: AdmissionLaw(
            groups_per_step,
            **{name: options[name] for name in ("max_staleness", "total_groups", "first_version")},
        ),
    )
    assert "trained on twice" in found(range(300))
