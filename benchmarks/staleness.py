"""What each staleness policy costs: time, stale tokens, masked tokens, dropped rollouts, and a bias towards short ones.

    python benchmarks/staleness.py [--json] [--steps 240] [--jobs 2] [--sigmas 1,0.5] [--laws mask,wait]

A step trains on 64 rollouts and takes one unit of time; a rollout's duration is lognormal(1, sigma) units, its reward
comes at its end, new weights arrive at once and are swapped in flight, max_staleness is 4. The loop, the law, the
buffer and the pool are the production ones on a virtual clock (asyncrl/simulation). Figures are those of the steady
state.

The floor of the masked share is derived in docs/design/staleness.md: with steps of T units, whatever a law does, the
tokens sampled more than 4 T before the end of their rollout cannot be trained on, E[(D - 4 T)+] / E[D] of them (`own
floor`); a law that lets the trainer wait before it takes its batch gains the wait, E[(D - 5 T + 1)+] / E[D] (`least
floor`).
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import platform
import random
from dataclasses import dataclass, replace
from multiprocessing import get_context

from asyncrl.simulation import Distribution, Scenario, simulate
from asyncrl.staleness import POLICIES, StalenessPolicy, merge

BATCH, BOUND, TOKENS_PER_UNIT = 64, 4, 64
LAWS: dict[str, StalenessPolicy] = {
    "aggregate lead, no bound": replace(POLICIES["correct"], overdue=False),
    "wait": POLICIES["wait"],
    "drop": POLICIES["drop"],
    "mask, overdue hold places": replace(POLICIES["mask"], overdue=False),
    "mask (default)": POLICIES["mask"],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    law: str
    sigma: float
    group_size: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    time_per_step: float
    past_bound: float
    oldest: int
    trained_past_bound: int
    length_ratio: float
    masked: float
    waste: float
    own_floor: float
    least_floor: float


def measure(case: Case) -> Outcome:
    import torch

    torch.set_num_threads(1)
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # for torch's own developers
    scenario = Scenario(
        steps=case.steps,
        groups_per_step=BATCH // case.group_size,
        group_size=case.group_size,
        max_staleness=BOUND,
        policy=LAWS[case.law],
        tokens=Distribution("lognormal", (1 + math.log(TOKENS_PER_UNIT), case.sigma)),
        token_s=1 / TOKENS_PER_UNIT,
        endless=True,
    )
    result = simulate(scenario)
    if LAWS[case.law].too_old != "correct" and result.violations:
        raise AssertionError(result.violations[:3])
    warm = case.steps // 4
    steps, trained = result.steps[warm:], result.trained[warm:]
    certificate = merge(step.certificate for step in steps)
    ages = [age for batch in trained for age in batch.oldest]
    time_per_step = (steps[-1].at_s - steps[0].at_s) / (len(steps) - 1)
    issued = range(trained[0].group_ids[0], max(max(batch.group_ids) for batch in trained))
    return Outcome(
        time_per_step=time_per_step,
        past_bound=sum(age > BOUND for age in ages) / len(ages),
        oldest=max(ages),
        trained_past_bound=max(0, certificate.maximum - BOUND),
        length_ratio=mean_length(scenario, [group_id for batch in trained for group_id in batch.group_ids])
        / mean_length(scenario, issued),
        masked=certificate.masked_share,
        waste=certificate.waste,
        own_floor=too_old(case, BOUND * time_per_step),
        least_floor=too_old(case, (BOUND + 1) * time_per_step - 1),
    )


def mean_length(scenario: Scenario, group_ids: list[int] | range) -> float:
    """Mean tokens of the rollouts of these group_ids: known beforehand, whatever became of them."""
    rows = [(group_id, row) for group_id in group_ids for row in range(scenario.group_size)]
    return sum(scenario.length(scenario.dice(group_id, row)) for group_id, row in rows) / len(rows)


def too_old(case: Case, window: float) -> float:
    """Share of the tokens that are older than ``window`` when the last rollout of their group ends."""
    durations = Distribution("lognormal", (1, case.sigma))
    if case.group_size == 1:
        return durations.excess(window) / durations.mean
    dice = random.Random(0)
    old = total = 0.0
    for _ in range(20_000):
        group = [durations.sample(dice) for _ in range(case.group_size)]
        old += sum(min(duration, max(0.0, max(group) - window)) for duration in group)
        total += sum(group)
    return old / total


def figures_of(case: Case, outcome: Outcome) -> list[dict[str, object]]:
    """One row of the common form for each goal; those of the default law under the issue's distribution have goals."""
    name = f"{case.law}, sigma {case.sigma:g}" + (f", groups of {case.group_size}" if case.group_size > 1 else "")
    judged = case.law == "mask (default)" and case.sigma == 1.0 and case.group_size == 1
    over = outcome.masked / outcome.own_floor
    rows = [
        ("time_per_step", outcome.time_per_step, "steps", 1.0, 1.25, False),
        ("max_staleness", BOUND + outcome.trained_past_bound, "versions", None, BOUND, False),
        ("length_ratio", outcome.length_ratio, "", 1.0, 0.98, True),
        ("masked_over_bound", over, "", 1.0, 1.1, False),
        ("masked_over_least_floor", outcome.masked / outcome.least_floor, "", 1.0, None, False),
        ("masked", outcome.masked, "share", outcome.own_floor, None, False),
        ("thrown_away", outcome.waste, "share", None, None, False),
        ("past_bound", outcome.past_bound, "share of rollouts", None, None, False),
        ("oldest", float(outcome.oldest), "versions", None, None, False),
    ]
    return [
        {
            "name": f"{name}: {figure}",
            "value": round(value, 4),
            "unit": unit,
            "floor": None if floor is None else round(floor, 4),
            "ratio": None if not floor else round(value / floor, 4),
            "goal": None if goal is None or not judged else f"at {'least' if at_least else 'most'} {goal}",
            "holds": None if goal is None or not judged else (value >= goal if at_least else value <= goal),
        }
        for figure, value, unit, floor, goal, at_least in rows
    ]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", action="store_true", help="print one JSON object")
    arguments.add_argument("--steps", type=int, default=240, help="training steps; the first quarter is not measured")
    arguments.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    arguments.add_argument("--laws", default="", help="only those whose names begin so, with commas between them")
    arguments.add_argument("--sigmas", default="1,0.5,1.5", help="tails of the durations, with commas between them")
    arguments.add_argument(
        "--groups", default="1,8", help="rollouts in a group, with commas; 8 only with the first tail"
    )
    options = arguments.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    laws = [law for law in LAWS if any(law.startswith(each) for each in options.laws.split(","))]
    sigmas, sizes = (
        [float(each) for each in options.sigmas.split(",")],
        [int(each) for each in options.groups.split(",")],
    )
    cases = [
        Case(law=law, sigma=sigma, group_size=size, steps=options.steps)
        for size in sizes
        for sigma in (sigmas if size == 1 else sigmas[:1])
        for law in laws
    ]
    figures: list[dict[str, object]] = []
    if not options.json:
        print(
            f"{'sigma':>5} {'group':>5} {'law':26s} {'time/step':>9} {'past bound':>10} {'oldest':>6} "
            f"{'trained/issued':>14} {'masked':>7} {'floor':>6} {'ratio':>6} {'(least)':>7} {'thrown away':>11}"
        )
    with get_context("spawn").Pool(min(options.jobs, len(cases))) as pool:
        for case, outcome in zip(cases, pool.imap(measure, cases), strict=True):
            figures += figures_of(case, outcome)
            if not options.json:
                print(
                    f"{case.sigma:5g} {case.group_size:5d} {case.law:26s} {outcome.time_per_step:9.3f} "
                    f"{outcome.past_bound:10.3f} {outcome.oldest:6d} {outcome.length_ratio:14.3f} "
                    f"{outcome.masked:7.4f} {outcome.own_floor:6.4f} {outcome.masked / outcome.own_floor:6.3f} "
                    f"{outcome.masked / outcome.least_floor:7.3f} {outcome.waste:11.3f}",
                    flush=True,
                )
    if options.json:
        machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        print(json.dumps({"machine": machine, "figures": figures}))
        return
    for figure in figures:
        if figure["goal"] is not None:
            verdict = "holds" if figure["holds"] else "DOES NOT HOLD"
            print(f"{figure['name']}: {figure['value']}, goal {figure['goal']}: {verdict}")


if __name__ == "__main__":
    main()
