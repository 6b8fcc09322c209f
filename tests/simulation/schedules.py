"""Random schedules: small runs with random sizes, durations and faults, each drawn from one seed."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from asyncrl.simulation.model import Distribution, Fault, FaultKind, Scenario
from asyncrl.staleness import POLICIES

_BY_GROUP: tuple[FaultKind, ...] = ("environment", "crash", "freeze", "slow", "garbage", "duplicate")
_BY_STEP: tuple[FaultKind, ...] = ("weights", "trainer", "storage")


def random_scenario(seed: int) -> Scenario:
    """Return a run of a few steps and groups; a third of them have no fault, the others up to four."""
    dice = random.Random(seed)
    groups_per_step = dice.choice((1, 1, 2, 2, 3))
    steps = dice.randint(2, 5)
    max_staleness = dice.choice((0, 1, 1, 2, 3))
    issued = groups_per_step * (steps + max_staleness)
    faults = []
    for _ in range(dice.choice((0, 0, 1, 1, 2, 4))):
        by_group_id = dice.random() < 0.7
        kinds, highest = (_BY_GROUP, issued) if by_group_id else (_BY_STEP, steps)
        kind = dice.choice(kinds)
        if kind == "storage" and random.Random(seed + 5).random() < 0.5:
            kind = "snapshot"
        faults.append(Fault(kind=kind, at=dice.randint(0 if by_group_id else 1, highest)))
    scenario = Scenario(
        steps=steps,
        groups_per_step=groups_per_step,
        group_size=dice.choice((1, 1, 2)),
        max_staleness=max_staleness,
        policy=dice.choice(tuple(POLICIES)),
        tokens=dice.choice(_LENGTHS),
        most_tokens=_MOST_TOKENS,
        token_s=0.25,
        turns=dice.choice((1, 1, 2)),
        turn_s=dice.choice(_PAUSES),
        replicas=dice.choice((1, 2)),
        saturation=dice.choice((1.0, 3.0, math.inf)),
        reward_s=dice.choice((None, None, _PAUSES[2])),
        update_s=dice.choice(_UPDATES),
        publish_s=dice.choice((0.0, 0.5)),
        prepare_s=dice.choice((0.0, 0.5, 3.0)),
        commit_s=random.Random(seed + 4).choice((0.0, 0.0, 0.5)),
        checkpoint_every=dice.choice((0, 1, 2)),
        checkpoint_write_s=random.Random(seed + 3).choice((0.0, 0.5, 20.0)),
        rollout_deadline_s=1e4,  # only a rollout of a frozen replica takes as long
        weights_deadline_s=1e3,
        revive_s=dice.choice((None, 0.5, 5.0)),
        faults=tuple(faults),
        seed=seed,
        ledger=dice.random() < 0.1,
    )
    scenario = _with_evaluations(scenario, random.Random(seed + 1))
    scenario = _on_shared_devices(scenario, random.Random(seed + 2))
    buffer = dice.choice(({}, {}, {"samples_per_insert": 1.0}, {"eviction": "oldest", "keep_groups": groups_per_step}))
    if "eviction" in buffer and scenario.staleness.selection == "fifo":
        buffer = {}  # the buffer refuses to wait in order for groups that it evicts
    return replace(scenario, buffer=buffer) if scenario.ledger else scenario


def _with_evaluations(scenario: Scenario, dice: random.Random) -> Scenario:
    """Evaluate beside training in half of the runs, in some with replicas that are pinned, or die meanwhile."""
    faults = scenario.faults
    if dice.random() < 0.3:
        faults += (Fault(kind="evaluation", at=dice.randint(0, scenario.steps)),)
    return replace(
        scenario,
        eval_every=dice.choice((0, 0, 1, 2)),
        eval_tasks=dice.choice((1, 3, 40)),
        eval_replicas=dice.randint(0, scenario.replicas - 1),
        faults=faults,
    )


def _on_shared_devices(scenario: Scenario, dice: random.Random) -> Scenario:
    """Let replicas and trainer take turns in a quarter of the runs; in some of these a replica dies in a hand-over."""
    if dice.random() < 0.75:
        return scenario
    faults = scenario.faults
    if dice.random() < 0.4:
        faults += (Fault(kind="hand-over", at=dice.randint(0, scenario.steps)),)
    return replace(scenario, shared_devices=True, hand_over_s=dice.choice((0.0, 0.3, 2.0)), faults=faults)


_MOST_TOKENS = 256
_LENGTHS = tuple(map(Distribution.parse, ("4", "uniform(1, 8)", "lognormal(1.4, 1)", "lognormal(1, 2)")))
_PAUSES = tuple(map(Distribution.parse, ("0", "0", "exponential(1)")))
_UPDATES = tuple(map(Distribution.parse, ("1", "uniform(0.1, 2)", "exponential(4)")))
