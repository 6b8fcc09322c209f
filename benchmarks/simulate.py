"""Random schedules and faults through the production loop on a virtual clock; the laws are checked for each of them.

    python benchmarks/simulate.py --schedules 100000 [--json] [--seed 0] [--jobs 2]

Each schedule is a small run (tests/simulation/schedules.py) drawn from one number: sizes, policy, durations, order of
simultaneous events, and faults: environments that fail, replicas that die, hang, answer slowly, with garbage or twice,
weights that do not arrive, a trainer that dies, a disk that is full. The driver, the law, the buffer, the pool, weight
publication and resumption are those of a real run. These laws are checked after every step and at the end: issued =
trained on + dropped + live, no group_id twice, no token older than the bound in the loss, certificates equal to the
batches that the trainer received, the token equation, and the end of the run. One schedule in fifty fetches its batches
and applies the real loss mask. One in ten keeps the real ledger, as a file, and a driver process that follows a fault
resumes it: with the recorded groups, the batches of steps after the checkpoint, and the drops, some of them with a rate
of use or an eviction. A failing schedule is named by its number: `--seed N --schedules 1` runs it again.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import platform
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

from asyncrl.simulation import simulate

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "simulation"))
from schedules import random_scenario

CHUNK = 200
FETCH_EVERY = 50
LIMIT_S = 1e6


@dataclass(slots=True)
class Tried:
    """Totals of some schedules: violations, faults, failures that ended driver processes, and processor time."""

    schedules: int = 0
    ledgers: int = 0
    broken: list[str] = field(default_factory=list)
    injected: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    cpu_s: float = 0.0

    def add(self, other: Tried) -> None:
        self.schedules += other.schedules
        self.ledgers += other.ledgers
        self.broken += other.broken
        self.injected += other.injected
        self.ended += other.ended
        self.cpu_s += other.cpu_s


def run_chunk(seeds: range) -> Tried:
    """Run some schedules."""
    begun_s = time.process_time()
    logging.getLogger("asyncrl").setLevel(logging.CRITICAL)  # failures are what this is about
    tried = Tried(len(seeds))
    for seed in seeds:
        scenario = random_scenario(seed)
        tried.ledgers += scenario.ledger
        try:
            result = simulate(scenario, fetch=seed % FETCH_EVERY == 0, limit_s=LIMIT_S)
        except Exception as error:  # noqa: BLE001  reported with its number
            tried.broken.append(f"schedule {seed}: {type(error).__name__}: {error}")
            continue
        tried.broken += [f"schedule {seed}: {violation}" for violation in result.violations]
        tried.injected.update(fault.kind for fault in result.injected)
        tried.ended.update(why.partition(":")[0] for why in result.ended_by)
    tried.cpu_s = time.process_time() - begun_s
    return tried


def begin() -> None:
    import torch

    torch.set_num_threads(1)
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # for torch's own developers
    gc.freeze()
    gc.set_threshold(200_000)  # looking for cycles as often as usual takes a fifth of the time


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--schedules", type=int, default=2000)
    arguments.add_argument("--seed", type=int, default=0, help="number of the first schedule")
    arguments.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    arguments.add_argument("--json", action="store_true", help="print one JSON object")
    options = arguments.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    last = options.seed + options.schedules
    chunks = [range(first, min(first + CHUNK, last)) for first in range(options.seed, last, CHUNK)]
    total = Tried()
    with get_context("spawn").Pool(min(options.jobs, len(chunks)), initializer=begin) as pool:
        pool.map(run_chunk, [range(options.seed, options.seed)] * options.jobs)  # imports are not what is measured
        started = time.perf_counter()
        for tried in pool.imap_unordered(run_chunk, chunks):
            total.add(tried)
            for line in tried.broken[:5]:
                print(line, flush=True)
        elapsed_s = time.perf_counter() - started
    done, broken = total.schedules, total.broken
    figures = [
        figure("schedules", done, "schedules"),
        figure("of them with a ledger", total.ledgers, "schedules"),
        figure("rate on one core", round(done / max(total.cpu_s, 1e-9), 1), "schedules/s of processor time"),
        figure(
            "rate",
            round(done / elapsed_s, 1),
            "schedules/s",
            goal="100000 in minutes: at least 100",
            holds=done >= 100 * elapsed_s,
        ),
        figure("violations", len(broken), "", goal="0", holds=not broken),
        figure("restarts", total.ended.total(), ""),
        *(figure(f"faults, {kind}", times, "") for kind, times in sorted(total.injected.items())),
        *(figure(f"processes ended by {error}", times, "") for error, times in sorted(total.ended.items())),
    ]
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "jobs": options.jobs}
    if options.json:
        print(json.dumps({"machine": machine, "figures": figures, "broken": broken[:100]}))
        sys.exit(1 if broken else 0)
    for each in figures:
        verdict = (
            "" if each["goal"] is None else f"  goal {each['goal']}: {'holds' if each['holds'] else 'DOES NOT HOLD'}"
        )
        print(f"{each['name']:36s} {each['value']:>10} {each['unit']}{verdict}")
    sys.exit(1 if broken else 0)


def figure(
    name: str, value: float, unit: str, *, goal: str | None = None, holds: bool | None = None
) -> dict[str, object]:
    return {"name": name, "value": value, "unit": unit, "floor": None, "ratio": None, "goal": goal, "holds": holds}


if __name__ == "__main__":
    main()
