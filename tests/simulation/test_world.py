"""Runs of the production loop on the virtual clock, with hand-worked numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asyncrl.simulation import Distribution, Fault, Scenario, Simulation, simulate

ONE_UNIT = Scenario(steps=4, groups_per_step=2)
"""Rollouts of one second (16 tokens), updates of one second, one step ahead."""


def times(result: Simulation) -> list[float]:
    return [round(step.at_s, 6) for step in result.steps]


def staleness(result: Simulation) -> list[dict[int, int]]:
    return [dict(step.certificate.histogram) for step in result.steps]


def test_a_synchronous_run_alternates_rollouts_and_updates():
    result = simulate(replace(ONE_UNIT, max_staleness=0))
    assert times(result) == [2.0, 4.0, 6.0, 8.0]  # a second of rollout, a second of update, again and again
    assert staleness(result) == [{0: 32}] * 4
    assert result.violations == []


def test_one_step_off_rollouts_and_updates_overlap():
    result = simulate(ONE_UNIT)
    assert times(result) == [2.0, 3.0, 4.0, 5.0]
    assert staleness(result) == [{0: 32}, {1: 32}, {1: 32}, {1: 32}]
    assert result.busy_s["train"] == pytest.approx(4.0)


@pytest.mark.parametrize(("policy", "masked"), [("wait", 0), ("mask", 128), ("drop", 0), ("correct", 0)])
def test_each_policy_with_a_slow_group(policy: str, masked: int):
    # Group 0 takes 10 s instead of one, 16 tokens a second. The tenth step trains on it, with 32 of its 160 tokens.
    scenario = Scenario(
        steps=12,
        groups_per_step=1,
        max_staleness=1,
        policy=policy,
        replicas=2,
        faults=(Fault(kind="slow", at=0),),
        tokens=Distribution.parse("160"),
        token_s=1 / 160,
    )
    result = simulate(scenario, fetch=True)
    assert result.violations == []
    assert [fault.kind for fault in result.injected] == ["slow"]
    assert sum(step.certificate.masked_tokens for step in result.steps) == masked
    assert bool(result.dropped) == (policy == "drop")
    assert 0 not in result.dropped or result.dropped[0] == "stale"
    oldest = max(step.certificate.maximum for step in result.steps)
    assert oldest <= 1 or policy == "correct"
    assert (result.steps[0].at_s > 10) == (policy == "wait")


def test_a_group_that_is_issued_while_a_version_is_committed_counts_as_of_the_version_before():
    # Group 4 fails while version 4 is committed, and group 5 takes its place at once: it was issued under version 3. It
    # is slow, so it gives its place away when version 8 serves, to group 11.
    scenario = Scenario(
        steps=12,
        groups_per_step=1,
        policy="mask",
        replicas=2,
        tokens=Distribution.parse("15"),
        commit_s=0.3,
        faults=(Fault(kind="environment", at=4), Fault(kind="slow", at=5)),
    )
    result = simulate(scenario)
    assert (result.ended_by, result.violations) == ([], [])
    assert result.dropped[4] == "environment_failed"
    assert result.trained[8].group_ids == (5,)


def test_a_seed_determines_the_run():
    scenario = Scenario(steps=6, groups_per_step=3, tokens=Distribution.parse("lognormal(2, 1)"), replicas=2, seed=5)
    first, again, other = simulate(scenario), simulate(scenario), simulate(replace(scenario, seed=6))
    assert first.steps == again.steps
    assert first.trained == again.trained
    assert first.steps != other.steps


FAULTY = Scenario(
    steps=4,
    groups_per_step=2,
    max_staleness=1,
    checkpoint_every=1,
    rollout_deadline_s=50,
    weights_deadline_s=50,
    revive_s=None,
    tokens=Distribution.parse("uniform(4, 30)"),
)


@pytest.mark.parametrize(
    ("fault", "ended_by"),
    [
        (Fault(kind="environment", at=3), ""),
        (Fault(kind="slow", at=3), ""),
        (Fault(kind="duplicate", at=3), ""),
        (Fault(kind="crash", at=3), "Error: "),
        (Fault(kind="freeze", at=3), "Error: "),
        (Fault(kind="garbage", at=3), "InvalidDataError: "),
        (Fault(kind="weights", at=2), "Error: "),
        (Fault(kind="trainer", at=3), "WorkerDiedError: the trainer died in step 3"),
        (Fault(kind="snapshot", at=2), ""),
        (Fault(kind="storage", at=2), ""),
    ],
)
def test_a_fault_has_its_effect_and_no_other(fault: Fault, ended_by: str):
    scenario = replace(FAULTY, shared_devices=fault.kind == "snapshot", faults=(fault,))
    result = simulate(scenario, fetch=True, limit_s=1e4)
    assert result.injected == [fault]
    assert result.violations == []
    assert len(result.ended_by) == bool(ended_by)
    assert ended_by in " ".join(result.ended_by)
    unsaved = {"snapshot": "no room for the snapshot", "storage": "no space left for the checkpoint"}.get(fault.kind)
    assert result.unsaved == ({2: f"OSError: {unsaved} of step 2"} if unsaved else {})
    assert [step.step for step in result.steps] == [1, 2, 3, 4]
    assert result.dropped == ({3: "environment_failed"} if fault.kind == "environment" else {})


@pytest.mark.parametrize("fault", [Fault(kind="crash", at=3), Fault(kind="weights", at=2)])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_replaced_replica_costs_no_group(fault: Fault, replicas: int):
    result = simulate(replace(FAULTY, replicas=replicas, revive_s=2.0, faults=(fault,)), fetch=True)
    assert result.injected == [fault]
    assert result.ended_by == []
    assert result.violations == []
    assert sorted(group_id for batch in result.trained for group_id in batch.group_ids) == list(range(8))


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_prompt_whose_replicas_die_three_times_is_dropped(replicas: int):
    faults = (Fault(kind="crash", at=3),) * 3
    result = simulate(replace(FAULTY, replicas=replicas, revive_s=2.0, faults=faults), fetch=True)
    assert result.injected == list(faults)
    assert result.dropped == {3: "rollouts_lost"}
    assert result.ended_by == []
    assert result.violations == []
    assert sorted(group_id for batch in result.trained for group_id in batch.group_ids) == [0, 1, 2, 4, 5, 6, 7, 8]


def test_replicas_that_die_with_every_prompt_end_the_run():
    faults = tuple(Fault(kind="crash", at=group_id) for group_id in range(5) for _ in range(3))
    result = simulate(replace(FAULTY, revive_s=2.0, faults=faults))
    (ended,) = result.ended_by
    assert ended.startswith("RolloutsLostError: 3 replicas died or failed under the same rollouts")
    assert result.violations == []


def test_a_run_without_a_checkpoint_restarts():
    result = simulate(replace(FAULTY, checkpoint_every=0, faults=(Fault(kind="trainer", at=4),)))
    assert [step.step for step in result.steps] == [1, 2, 3, 4]
    assert sorted(group_id for batch in result.trained for group_id in batch.group_ids) == list(range(8))


def test_rewards_overlap_with_everything_else():
    result = simulate(replace(ONE_UNIT, reward_s=Distribution.parse("1")))
    assert times(result) == [3.0, 4.0, 6.0, 7.0]
    assert result.violations == []


PINNED = Scenario(
    steps=8,
    groups_per_step=1,
    replicas=2,
    tokens=Distribution.parse("48"),
    eval_every=1,
    eval_replicas=1,
)
"""Rollouts and held-out tasks of three seconds: two steps, each of which is published as it ends."""


def test_evaluations_on_pinned_replicas_cost_training_only_these():
    result = simulate(PINNED)
    assert result.violations == []
    assert result.scores == {step: (step, step) for step in (1, 3, 5, 7)}
    assert result.unscored == {step: f"the evaluation of step {step - 1} was still under way" for step in (2, 4, 6)}
    alone = simulate(replace(PINNED, replicas=1, eval_every=0, eval_replicas=0))
    assert times(result) == times(alone)


def test_without_pins_a_score_may_be_of_several_versions():
    result = simulate(replace(PINNED, eval_replicas=0))
    assert result.violations == []
    assert result.unscored == {}
    assert any(oldest < newest for oldest, newest in result.scores.values())


def test_a_checkpoint_does_not_wait_for_a_pinned_evaluation_and_a_restart_names_the_score_it_lacks():
    slow = replace(PINNED, eval_every=3, eval_tasks=128, saturation=32.0, checkpoint_every=1, ledger=True)
    result = simulate(replace(slow, faults=(Fault(kind="trainer", at=6),)))  # tasks of 12 s
    assert result.violations == []
    assert result.ended_by == ["WorkerDiedError: the trainer died in step 6"]
    assert result.unscored == {3: "the run stopped while it was evaluated"}
    assert result.scores == {6: (6, 6)}


@pytest.mark.parametrize(("revive_s", "max_staleness"), [(0.5, 1), (None, 1), (5.0, 8)])
def test_a_replica_that_dies_under_an_evaluation_costs_its_score_at_most(revive_s: float | None, max_staleness: int):
    scenario = replace(PINNED, eval_every=2, revive_s=revive_s, max_staleness=max_staleness, replicas=3)
    result = simulate(replace(scenario, faults=(Fault(kind="evaluation", at=2),)))
    assert [fault.kind for fault in result.injected] == ["evaluation"]
    assert result.violations == []
    assert result.scores.keys() | result.unscored.keys() == {2, 4, 6}
