"""Bottlenecks that were planted, and what the adviser says about them (asyncrl/telemetry/adviser.py).

    python benchmarks/adviser.py [--seed 0] [--rounds 1] [--only simulated|real] [--json]

A round has 24 planted bottlenecks in simulated runs and 6 in real ones (local backend, a tiny model; slow parts sleep),
and 10 healthy runs, 6 of them simulated. Sizes and strengths are drawn from the seed; each planted bottleneck is added
to a run that would be healthy. Goals: ``named`` all of the planted, ``false`` 0, and for every process of every run the
causes of its time sum to 100 % +- 1 (``off``), with at most 5 % of a real run that is not recorded. Exit status 1 where
one is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from digits_world import Digits, DigitsFactory

from asyncrl.algorithms.losses import DAPO, PolicyTokens, TokenLosses
from asyncrl.config import Config
from asyncrl.data import DataProto
from asyncrl.interfaces import Message, Step, Task
from asyncrl.simulation import Distribution, Fault, Scenario, simulate
from asyncrl.tasks.run import train
from asyncrl.telemetry.adviser import advise

HEALTHY = "healthy"
Dice: TypeAlias = random.Random

# ------------------------------------------------------------------------------------------------------ simulated runs


def balanced(dice: Dice) -> Scenario:
    """Return a run whose engines need 0.4 to 0.85 of an update for its rollouts, and a long rollout at most 0.8.

    A rollout of mean length takes 0.2 to 0.5 of it. A third each has even lengths, uneven ones, and turns or a reward
    that take little time.
    """
    groups, size, replicas = dice.choice((2, 4, 8, 16)), dice.choice((4, 8)), dice.choice((1, 2, 4))
    update_s, length = dice.uniform(0.5, 60), dice.uniform(30, 2000)
    spread, sigma, kind = dice.uniform(0.05, 0.6), dice.uniform(0.1, 0.6), dice.randrange(3)
    tokens = Distribution("uniform", (length * (1 - spread), length * (1 + spread)))
    if kind == 1:
        tokens = Distribution("lognormal", (math.log(length) - sigma**2 / 2, sigma))
    longest = tokens.quantile(1 - 1 / (groups * size))
    token_s = min(dice.uniform(0.2, 0.5) * update_s / length, 0.8 * update_s / longest)
    needed = groups * size * length * token_s / replicas
    base = Scenario(
        steps=dice.choice((15, 20, 40)),
        groups_per_step=groups,
        group_size=size,
        max_staleness=dice.choice((1, 2, 3)),
        policy=dice.choice(("mask", "mask", "wait", "drop")),
        tokens=tokens,
        token_s=token_s,
        replicas=replicas,
        saturation=max(1.0, needed / (dice.uniform(0.4, 0.85) * update_s)),
        update_s=Distribution("uniform", (0.85 * update_s, 1.15 * update_s)),
        publish_s=dice.uniform(0, 0.04) * update_s,
        prepare_s=dice.uniform(0, 0.1) * update_s,
        seed=dice.randrange(1 << 30),
    )
    if kind == 2:
        share = Distribution("uniform", (0.0, 0.1 * update_s))
        base = replace(base, **dice.choice(({"turns": 2, "turn_s": share}, {"reward_s": share})))
    return base


def few_replicas(base: Scenario, dice: Dice) -> Scenario:
    return replace(base, saturation=base.saturation / dice.uniform(3, 10))


def tight_bound(base: Scenario, dice: Dice) -> Scenario:
    """The engines have room for more requests, and the bound allows too few groups for the time that one takes."""
    length = base.tokens.mean
    base = replace(
        base,
        tokens=Distribution("uniform", (0.8 * length, 1.2 * length)),
        saturation=math.inf,
        turns=1,
        turn_s=Distribution("constant", (0.0,)),
        reward_s=None,
    )
    if dice.random() < 0.5:
        return replace(base, max_staleness=0, token_s=dice.uniform(0.6, 1.5) * base.update_s.mean / length)
    bound = dice.choice((1, 2))
    return replace(base, max_staleness=bound, token_s=dice.uniform(2, 5) * bound * base.update_s.mean / length)


def long_tail(base: Scenario, dice: Dice) -> Scenario:
    """One rollout in some hundreds takes many times the mean, and the batch waits for it."""
    sigma = dice.uniform(1.3, 1.9)
    mu = math.log(base.tokens.mean * dice.uniform(1, 3)) - sigma**2 / 2
    tokens, bound = Distribution("lognormal", (mu, sigma)), dice.choice((0, 1))
    return replace(
        base, max_staleness=bound, policy="wait", tokens=tokens, saturation=math.inf, groups_per_step=8, group_size=8
    )


def slow_environment(base: Scenario, dice: Dice) -> Scenario:
    turns = dice.choice((1, 2, 4))
    turn_s = dice.uniform(1.5, 6) * (base.max_staleness + 1) * base.update_s.mean / turns
    return replace(base, turns=turns, turn_s=Distribution("uniform", (0.5 * turn_s, 1.5 * turn_s)))


def slow_reward(base: Scenario, dice: Dice) -> Scenario:
    reward_s = dice.uniform(1.5, 6) * (base.max_staleness + 1) * base.update_s.mean
    return replace(base, reward_s=Distribution("uniform", (0.7 * reward_s, 1.3 * reward_s)))


def slow_update(base: Scenario, dice: Dice) -> Scenario:
    times = dice.uniform(3, 10)
    low, high = base.update_s.parameters
    return replace(base, update_s=Distribution("uniform", (times * low, times * high)))


def slow_publication(base: Scenario, dice: Dice) -> Scenario:
    update_s = base.update_s.mean
    if dice.random() < 0.5:
        return replace(base, publish_s=dice.uniform(0.8, 4) * update_s)
    return replace(base, prepare_s=dice.uniform(1.8, 5) * update_s)


def slow_checkpoint(base: Scenario, dice: Dice) -> Scenario:
    every = dice.choice((1, 2, 3))
    return replace(base, checkpoint_every=every, checkpoint_s=dice.uniform(0.8, 4) * every * base.update_s.mean)


def dying_replicas(base: Scenario, dice: Dice) -> Scenario:
    """Each replica dies every few steps, and takes the time of some updates to be back."""
    every = max(dice.choice((2, 3)) * base.groups_per_step // base.replicas, 1)
    faults = tuple(Fault(kind="crash", at=at) for at in range(2, base.steps * base.groups_per_step, every))
    return replace(base, faults=faults, revive_s=dice.uniform(1.5, 4) * base.update_s.mean)


def small_buffer(base: Scenario, dice: Dice) -> Scenario:
    longer = dice.uniform(0.8, 2) * base.update_s.mean / base.tokens.mean
    return replace(
        base, max_staleness=3, buffer={"capacity": base.groups_per_step}, saturation=math.inf, token_s=longer
    )


SIMULATED: Mapping[str, tuple[Callable[[Scenario, Dice], Scenario], int]] = {
    HEALTHY: (lambda base, dice: base, 6),
    "rollout": (few_replicas, 3),
    "staleness bound": (tight_bound, 3),
    "long tail": (long_tail, 3),
    "environment": (slow_environment, 3),
    "reward": (slow_reward, 2),
    "update": (slow_update, 3),
    "publication": (slow_publication, 2),
    "checkpoint": (slow_checkpoint, 2),
    "replicas": (dying_replicas, 2),
    "buffer": (small_buffer, 1),
}
"""By cause, what plants it, and how often in a round."""


def run_simulated(cause: str, dice: Dice) -> dict[str, Any]:
    scenario = SIMULATED[cause][0](balanced(dice), dice)
    result = simulate(scenario)
    found = {name: getattr(result, name) for name in ("idle", "episodes", "work_s", "tokens")}
    config = {"max_staleness": scenario.max_staleness, "staleness": {"policy": scenario.staleness.name}}
    advice = advise(found, config)
    return {**found, "cause": advice.cause if advice else HEALTHY, "sentence": advice.sentence if advice else ""}


# ----------------------------------------------------------------------------------------------------------- real runs


class World(DigitsFactory):
    """Sums whose prompts and steps take a time, and whose rewards differ in one group of ``equal``."""

    def __init__(self, *, task_s: float = 0.0, step_s: float = 0.0, held_out_s: float = 0.0, equal: int = 1) -> None:
        self.task_s, self.step_s, self.held_out_s, self.equal = task_s, step_s, held_out_s, equal

    def task(self, index: int, *, split: Literal["train", "held_out"]) -> Task:
        time.sleep(self.task_s)
        return {**super().task(index, split=split), "held_out": split == "held_out"}

    def make(self) -> Digits:
        return _SlowDigits(self)


class _SlowDigits(Digits):
    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._task: Task = {}

    async def reset(self, task: Task) -> Sequence[Message]:
        self._task = task
        return await super().reset(task)

    async def step(self, reply: Message) -> Step:
        await asyncio.sleep(self._world.held_out_s if self._task["held_out"] else self._world.step_s)
        step = await super().step(reply)
        return step if self._task["index"] % self._world.equal == 0 else replace(step, reward=0.0)


class SlowReward:
    def __init__(self, *, took_s: float) -> None:
        self._took_s = took_s

    async def score(self, batch: DataProto) -> DataProto:
        await asyncio.sleep(self._took_s)
        return DataProto.from_dict({"rewards": torch.rand(len(batch))})

    async def close(self) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class SlowLoss(DAPO):
    took_s: float = 0.0

    def __call__(self, tokens: PolicyTokens) -> TokenLosses:
        time.sleep(self.took_s)
        return super().__call__(tokens)


def slow_part(cause: str, dice: Dice) -> dict[str, Any]:
    """Return the settings that plant a cause into a run of updates of 0.25 s and rollouts of 0.15 s."""
    match cause:
        case "environment":
            return {"env": {"latency_s": dice.uniform(0.6, 1.2)}}
        case "reward":
            return {"reward": {"source": "adviser:SlowReward", "options": {"took_s": dice.uniform(1.0, 2.0)}}}
        case "update":
            return {"algorithm": {"loss": "adviser:SlowLoss", "loss_options": {"took_s": dice.uniform(0.8, 1.5)}}}
        case "evaluation":
            held_out_s = dice.uniform(0.3, 0.6)
            return {
                "env": {"options": {"step_s": 0.07, "held_out_s": held_out_s}},
                "eval": {"tasks": 4, "every": 1, "on_start": False},
                "checkpoint": {"every": 1},
            }
        case "filters":
            return {
                "env": {"options": {"step_s": 0.02, "equal": dice.choice((6, 8, 10))}},
                "buffer": {"options": {"zero_variance": "drop"}},
            }
        case "prompts":
            return {"env": {"options": {"step_s": 0.01, "task_s": dice.uniform(0.2, 0.4)}}}
    took_s = dice.uniform(0.2, 0.4)
    return {
        "max_staleness": dice.choice((1, 2)),
        "env": {"options": {"step_s": dice.uniform(0.15, 0.3) * took_s}},
        "algorithm": {"loss": "adviser:SlowLoss", "loss_options": {"took_s": took_s}},
    }


REAL = {HEALTHY: 4, "environment": 1, "reward": 1, "update": 1, "evaluation": 1, "filters": 1, "prompts": 1}


def run_real(cause: str, dice: Dice, folder: Path) -> dict[str, Any]:
    tables: dict[str, Any] = {
        "name": "adviser",
        "steps": 10,
        "max_staleness": 1,
        "seed": dice.randrange(1000),
        "runs": str(folder),
        "cluster": {"backend": "local"},
        "model": {
            "source": "scratch",
            "options": {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2, "max_position": 128},
        },
        "env": {"name": "adviser:World", "options": {"step_s": 0.07}},
        "rollout": {"max_new_tokens": 6, "max_seq_len": 64},
        "trainer": {"groups_per_step": 2, "group_size": 4, "lr": 1e-4},
        "algorithm": {"loss": "adviser:SlowLoss", "loss_options": {"took_s": 0.25}},
        "eval": {"tasks": 0},
        "checkpoint": {"every": 0},
        "telemetry": {"progress": "none"},
    }
    for name, value in slow_part(cause, dice).items():
        tables[name] = {**tables.get(name, {}), **value} if isinstance(value, dict) else value
    summary = train(Config.from_mapping(tables))
    advice = summary["advice"] or {"cause": HEALTHY, "sentence": ""}
    return {"idle": summary["idle"], "cause": advice["cause"], "sentence": advice["sentence"]}


# ------------------------------------------------------------------------------------------------------------- figures


def rounds(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield for every run where it ran, what was planted, and what was found."""
    for seed in range(options.seed, options.seed + options.rounds):
        if options.only != "real":
            for cause, (_, count) in SIMULATED.items():
                for number in range(count):
                    yield "simulated", cause, run_simulated(cause, Dice(f"{seed} {cause} {number}"))
        if options.only != "simulated":
            for cause, count in REAL.items():
                for number in range(count):
                    yield "real", cause, run_real(cause, Dice(f"{seed} {cause} {number}"), folder)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seed", type=int, default=0, help="of the first round")
    arguments.add_argument("--rounds", type=int, default=1)
    arguments.add_argument("--only", choices=("simulated", "real"))
    arguments.add_argument("--json", action="store_true", help="print one JSON object")
    options = arguments.parse_args()
    logging.disable(logging.WARNING)  # of replicas that die on purpose
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"false": 0, "healthy": 0, "runs": 0, "off": 0.0, "not_recorded": 0.0}
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for where, cause, found in rounds(options, Path(folder)):
            figures["runs"] += 1
            figures["off"] = max(figures["off"], *(abs(sum(each.values()) - 100) for each in found["idle"].values()))
            if where == "real":
                lost = max(each.get("not recorded", 0.0) for each in found["idle"].values())
                figures["not_recorded"] = max(figures["not_recorded"], lost)
            right = found["cause"] == cause
            if cause == HEALTHY:
                figures["healthy"] += 1
                figures["false"] += not right
            else:
                figures[f"planted_{where}"] = figures.get(f"planted_{where}", 0) + 1
                figures[f"named_{where}"] = figures.get(f"named_{where}", 0) + right
            if not right:
                shares = {
                    name: {key: round(share) for key, share in each.items()} for name, each in found["idle"].items()
                }
                wrong.append(f"{where}: {cause} was planted, and {found['cause']} named: {shares}")
            if not options.json:
                print(f"{'' if right else 'WRONG  '}{where}, {cause}: {found['sentence'] or HEALTHY}", flush=True)
    named = all(figures.get(f"named_{where}") == figures.get(f"planted_{where}") for where in ("simulated", "real"))
    holds = named and not figures["false"] and figures["off"] <= 1 and figures["not_recorded"] <= 5
    if options.json:
        print(json.dumps({"figures": figures, "wrong": wrong, "holds": holds}))
    else:
        print("\n".join([*wrong, *(f"{name:20} {value}" for name, value in figures.items())]))
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
