"""What the ledger costs: durable trajectory commits per second, and what an event costs the event loop.

    python benchmarks/ledger.py [--json] [--seconds 3] [--rounds 3] [--folder .]

Groups of 8 trajectories of 8 KB each (1,000 tokens, all sampled) are completed one after the other; `fsync = "commit"`
syncs every group commit to the disk. The floor is the disk: the same bytes written to one file with an fsync after
every 4 MB. The cost to the event loop is the time of `append`, without the encoding, which workers do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from asyncrl.ledger import Completed, Consumed, Dispatched, Issued
from asyncrl.rollout.trajectory import Trajectory, Turn, encode_rows
from buffers.ledger import SQLiteLedger

ROWS = 8
TOKENS = 1000


@dataclass(frozen=True, slots=True)
class Outcome:
    trajectories_per_s: float
    append_us: float
    append_p99_us: float
    commits: int


def group_of() -> tuple[bytes, float]:
    """The rows of a group as bytes, and the seconds a worker takes to make them."""
    dice = np.random.default_rng(0)
    trajectories = [
        Trajectory(
            task={"question": "1+1"},
            token_ids=tuple(dice.integers(0, 32000, TOKENS).tolist()),
            loss_mask=(True,) * TOKENS,
            behaviour_log_probs=tuple((-dice.random(TOKENS)).tolist()),
            weight_versions=(3,) * TOKENS,
            reward=1.0,
            turns=(Turn(start=0, end=TOKENS, finish_reason="stop", message={"role": "assistant", "content": ""}),),
            finish_reason="done",
        )
        for _ in range(ROWS)
    ]
    started = time.perf_counter()
    content = encode_rows(trajectories)
    return content, time.perf_counter() - started


async def through_ledger(folder: Path, rows: bytes, *, seconds: float) -> Outcome:
    ledger = await asyncio.to_thread(SQLiteLedger, folder / "ledger.sqlite", fsync="commit")
    appends: list[float] = []
    group_id = 0
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        begun = time.perf_counter()
        ledger.append(Issued(group_id))
        ledger.append(Dispatched(group_id=group_id, attempt=0, version=3))
        ledger.append(Completed(group_id=group_id, attempt=0, tokens=ROWS * TOKENS), rows=rows)
        ledger.append(Consumed(group_id=group_id, step=group_id + 1, position=0))
        appends.append(time.perf_counter() - begun)
        group_id += 1
        await ledger.room()
    await ledger.durable()
    elapsed = time.perf_counter() - started
    commits = ledger.commits
    await ledger.aclose()
    return Outcome(
        group_id * ROWS / elapsed,
        statistics.median(appends) * 1e6,
        statistics.quantiles(appends, n=100)[98] * 1e6,
        commits,
    )


def through_file(folder: Path, rows: bytes, *, seconds: float) -> float:
    """Trajectories per second that the bare disk takes."""
    every = max(1, (4 << 20) // len(rows))
    groups = 0
    started = time.perf_counter()
    with (folder / "bare").open("wb", buffering=0) as file:
        while time.perf_counter() - started < seconds:
            for _ in range(every):
                file.write(rows)
            os.fsync(file.fileno())
            groups += every
    return groups * ROWS / (time.perf_counter() - started)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", action="store_true", help="print one JSON object")
    arguments.add_argument("--seconds", type=float, default=3.0)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--folder", type=Path, default=None, help="on the disk to measure; default: temporary files")
    options = arguments.parse_args()

    rows, encode_s = group_of()
    outcomes: list[Outcome] = []
    floors: list[float] = []
    for _ in range(options.rounds):
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        try:
            outcomes.append(asyncio.run(through_ledger(folder, rows, seconds=options.seconds)))
            floors.append(through_file(folder, rows, seconds=min(1.0, options.seconds)))
        finally:
            shutil.rmtree(folder)
    rate = statistics.median(outcome.trajectories_per_s for outcome in outcomes)
    floor = statistics.median(floors)
    append_us = statistics.median(outcome.append_us for outcome in outcomes)
    p99_us = statistics.median(outcome.append_p99_us for outcome in outcomes)
    figures = [
        {
            "name": f"durable trajectories of {len(rows) // ROWS} bytes",
            "value": round(rate),
            "unit": "1/s",
            "floor": round(floor),
            "ratio": round(floor / rate, 2),
            "goal": "at least 5000 1/s",
            "holds": rate >= 5000,
        },
        {
            "name": "a group's four events, on the loop",
            "value": round(append_us, 1),
            "unit": "us",
            "floor": None,
            "ratio": None,
            "goal": "at most 300 us",
            "holds": append_us <= 300,
        },
        {
            "name": "... p99",
            "value": round(p99_us, 1),
            "unit": "us",
            "floor": None,
            "ratio": None,
            "goal": "at most 10000 us",
            "holds": p99_us <= 10_000,
        },
        {
            "name": "a group's rows to bytes, in the worker",
            "value": round(encode_s * 1e6, 1),
            "unit": "us",
            "floor": None,
            "ratio": None,
            "goal": "at most 10000 us",
            "holds": encode_s <= 0.01,
        },
    ]
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    if options.json:
        print(json.dumps({"machine": machine, "figures": figures}))
        return
    for figure in figures:
        floor_text = "" if figure["floor"] is None else f"floor {figure['floor']:>8}  x{figure['ratio']:<6} "
        holds = "holds" if figure["holds"] else "does not hold"
        print(f"{figure['name']:42s} {figure['value']:>10} {figure['unit']:5s} {floor_text}", end="")
        print(f"goal: {figure['goal']}: {holds}")
    print(f"commits: {[outcome.commits for outcome in outcomes]}")


if __name__ == "__main__":
    main()
