"""A replica's state: one replica's failures in order, and laws over any order of events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.rollout.health import HealthPolicy, ReplicaHealth

POLICY = HealthPolicy(probe_failures=3, generation_failures=2, weight_failures=2, restart_s=1.0, max_restart_s=10.0)


def serving() -> tuple[ReplicaHealth, int]:
    health = ReplicaHealth(POLICY)
    engine = health.start()
    health.started(engine)
    health.verified(engine)
    return health, engine


def test_failures_of_each_kind_in_order():
    health, first = serving()
    assert health.state == "healthy"
    assert health.probe_failed(first, "no token within 3 s")
    assert (health.state, health.serves) == ("suspect", True)
    assert health.probe_succeeded(first)
    assert health.state == "healthy"
    health.generation_failed(first, "reset")
    assert health.generation_failed(first, "reset")
    assert (health.state, health.serves, health.reason) == ("dead", False, "reset")
    second = health.start()
    assert not health.verified(first)
    assert not health.verified(second), "it has not even started"
    health.started(second)
    assert (health.state, health.serves) == ("stale", False)
    health.verified(second)
    assert health.serves


def test_one_kind_of_failure_says_nothing_about_the_other():
    health, engine = serving()
    health.probe_failed(engine, "slow")
    health.probe_failed(engine, "slow")
    health.generation_failed(engine, "reset")
    assert health.state == "suspect"
    health.generation_succeeded(engine)
    assert health.state == "suspect", "its probes still fail"
    health.probe_failed(engine, "slow")
    assert health.state == "dead"


def test_a_lease_covers_what_times_out_but_not_a_death():
    health, engine = serving()
    health.lease(engine)
    for _ in range(9):
        health.probe_failed(engine, "busy copying")
        health.generation_failed(engine, "busy copying")
    assert health.state == "healthy"
    health.ended(engine, "killed by SIGKILL")
    assert health.state == "dead"


def test_a_fenced_replica_comes_back_with_the_weights_and_dies_of_missing_them_too_often():
    health, engine = serving()
    health.fenced(engine, "checksum differs")
    assert (health.state, health.serves) == ("stale", False)
    health.verified(engine)
    assert health.serves
    health.fenced(engine, "checksum differs")
    health.fenced(engine, "checksum differs")
    assert health.state == "dead"


def test_failed_starts_are_repeated_less_and_less_often():
    health = ReplicaHealth(POLICY)
    assert health.restart_delay_s == 0.0
    delays = []
    for _ in range(6):
        health.ended(health.start(), "no such folder")
        delays.append(health.restart_delay_s)
    assert delays == [2.0, 4.0, 8.0, 10.0, 10.0, 10.0]
    engine = health.start()
    health.started(engine)
    health.verified(engine)
    health.ended(engine, "killed")
    assert health.restart_delay_s == 1.0


@pytest.mark.parametrize("event", ["fenced", "probe_failed"])
def test_a_start_whose_engine_never_serves_counts_as_failed(event: str):
    health = ReplicaHealth(POLICY)
    delays = []
    for _ in range(4):
        engine = health.start()
        health.started(engine)
        while health.state != "dead":
            getattr(health, event)(engine, "no weights")
        delays.append(health.restart_delay_s)
    assert delays == [2.0, 4.0, 8.0, 10.0]


def test_a_start_whose_engine_served_does_not_count_as_failed():
    health, engine = serving()
    health.fenced(engine, "checksum differs")
    health.ended(engine, "killed")
    assert health.restart_delay_s == 1.0


@pytest.mark.parametrize("limits", [{"probe_failures": 0}, {"weight_failures": 0}, {"restart_s": 99.0}])
def test_policies_that_make_no_sense(limits: dict[str, float]):
    with pytest.raises(ValueError, match=r"at least 1|must lie in"):
        HealthPolicy(**limits)  # type: ignore[arg-type]


EVENTS = (
    "started",
    "verified",
    "fenced",
    "probe_succeeded",
    "probe_failed",
    "generation_succeeded",
    "generation_failed",
    "ended",
    "lease",
    "release",
    "start",
)
HAPPENINGS = st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 2)), max_size=60)


@given(HAPPENINGS)
def test_laws(happenings: list[tuple[str, int]]):
    """``age`` 0 is an event of the incarnation that runs, 1 and 2 of earlier ones."""
    health = ReplicaHealth(POLICY)
    verified_of = -1
    probes = generations = 0
    for event, age in happenings:
        before, leased = health.state, health.leased
        engine = health.incarnation - age
        if event == "start":
            if before != "dead":
                with pytest.raises(ValueError, match="only a dead one"):
                    health.start()
                continue
            assert health.start() == engine + age + 1
            probes = generations = 0
        elif event in ("probe_failed", "generation_failed", "ended", "fenced"):
            changed = getattr(health, event)(engine, "reason")
            assert changed == (before != health.state)
        else:
            getattr(health, event)(engine)
        if age and event != "start":
            assert health.state == before, "news of an earlier engine change nothing"
            continue
        counted = before in ("healthy", "suspect", "stale") and not leased
        probes += event == "probe_failed" and counted
        generations += event == "generation_failed" and counted and before != "stale"
        probes = 0 if event in ("probe_succeeded",) and before in ("healthy", "suspect", "stale") else probes
        generations = 0 if event == "generation_succeeded" and before in ("healthy", "suspect") else generations
        if event == "verified" and before == "stale":
            verified_of, probes, generations = health.incarnation, 0, 0
        if health.state == "dead" and before not in ("dead",):
            assert event in ("ended", "fenced") or probes == 3 or generations == 2
        if health.serves:
            assert verified_of == health.incarnation, "nothing serves that was not verified since its start"
        if before == "dead" and event != "start":
            assert health.state == "dead"
        if before == "starting":
            assert health.state in ("starting", "stale", "dead")
