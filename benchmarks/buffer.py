"""What the replay buffer costs: rows per second through admit, put, select and release, and the slowest calls.

    python benchmarks/buffer.py [--json] [--groups 20000] [--rounds 5]

Groups of 8 rows finish in random order within a window, as rollouts do; a trainer selects batches and releases them.
The floor is a bare asyncio.Queue that passes the same groups from the same producers to the same consumer, without
order, places, staleness or books. Buffer and floor take turns; figures are medians over the rounds. The two sizes show
what growth costs: a buffer of 16 times as many groups.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import time
from dataclasses import dataclass

import uvloop

from asyncrl.data import DataProto
from asyncrl.interfaces import GroupSummary
from buffers.replay import AsyncReplayBuffer

ROWS_PER_GROUP = 8


@dataclass(frozen=True, slots=True)
class Outcome:
    rows_per_s: float
    put_p99_us: float
    release_p99_us: float


def summaries(count: int) -> list[GroupSummary]:
    return [
        GroupSummary(
            slot=slot,
            rows=ROWS_PER_GROUP,
            oldest_version=0,
            tokens=800,
            version_tokens={0: 800},
            rewards=(0.0,) * ROWS_PER_GROUP,
            lengths=(100,) * ROWS_PER_GROUP,
        )
        for slot in range(count)
    ]


def finishing_order(count: int, window: int) -> list[int]:
    """Slots in the order in which they finish: each at most half a window away from its turn."""
    dice = random.Random(0)
    return sorted(range(count), key=lambda slot: slot + dice.random() * window / 2)


def p99_us(durations: list[float]) -> float:
    return statistics.quantiles(durations, n=100)[98] * 1e6


async def through_buffer(groups: list[GroupSummary], order: list[int], *, capacity: int, batch: int) -> Outcome:
    buffer = AsyncReplayBuffer(capacity=capacity, max_staleness=0)
    rows = DataProto()
    puts: list[float] = []
    releases: list[float] = []

    async def admit() -> None:
        for group in groups:
            await buffer.admit(group.slot)
            admitted.put_nowait(group.slot)

    async def produce() -> None:
        seen = -1
        for slot in order:
            while seen < slot:
                seen = await admitted.get()
            started = time.perf_counter()
            buffer.put(groups[slot], rows)
            puts.append(time.perf_counter() - started)

    async def train() -> None:
        for _ in range(len(groups) // batch):
            selected = await buffer.select(batch, weight_version=0)
            started = time.perf_counter()
            buffer.release([group.summary.slot for group in selected])
            releases.append(time.perf_counter() - started)

    admitted: asyncio.Queue[int] = asyncio.Queue()
    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for story in (admit(), produce(), train()):
            tasks.create_task(story)
    elapsed = time.perf_counter() - started
    counts = buffer.statistics()
    if (counts.admitted, counts.released) != (len(groups), len(groups)):
        raise AssertionError(f"the buffer lost groups: {counts}")
    return Outcome(len(groups) * ROWS_PER_GROUP / elapsed, p99_us(puts), p99_us(releases))


async def through_queue(groups: list[GroupSummary], order: list[int], *, capacity: int, batch: int) -> float:
    queue: asyncio.Queue[tuple[GroupSummary, DataProto]] = asyncio.Queue(capacity)
    rows = DataProto()

    async def produce() -> None:
        for slot in order:
            await queue.put((groups[slot], rows))

    async def train() -> None:
        for _ in range(len(groups) // batch):
            for _ in range(batch):
                await queue.get()

    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(produce())
        tasks.create_task(train())
    return len(groups) * ROWS_PER_GROUP / (time.perf_counter() - started)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", action="store_true", help="print one JSON object")
    arguments.add_argument("--groups", type=int, default=20480, help="groups per round, a multiple of 1024")
    arguments.add_argument("--rounds", type=int, default=5)
    options = arguments.parse_args()

    groups = summaries(options.groups)
    figures = []
    for batch in (64, 1024):
        capacity = 2 * batch
        order = finishing_order(len(groups), capacity)
        outcomes: list[Outcome] = []
        floors: list[float] = []
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            for _ in range(options.rounds):
                outcomes.append(runner.run(through_buffer(groups, order, capacity=capacity, batch=batch)))
                floors.append(runner.run(through_queue(groups, order, capacity=capacity, batch=batch)))
        floor = statistics.median(floors)
        rate = statistics.median(outcome.rows_per_s for outcome in outcomes)
        figures.append(
            {
                "name": f"rows, batches of {batch} of {capacity} groups",
                "value": round(rate),
                "unit": "rows/s",
                "floor": round(floor),
                "ratio": round(floor / rate, 2),
                "goal": "at least 200000 rows/s",
                "holds": rate >= 200_000,
            }
        )
        per_group_us = ROWS_PER_GROUP / floor * 1e6
        for name, value, goal_us in (
            ("put, p99", statistics.median(outcome.put_p99_us for outcome in outcomes), 1_000),
            ("release, p99", statistics.median(outcome.release_p99_us for outcome in outcomes), 20_000),
        ):
            figures.append(
                {
                    "name": f"{name}, batches of {batch}",
                    "value": round(value, 1),
                    "unit": "us",
                    "floor": round(per_group_us, 2),
                    "ratio": round(value / per_group_us, 1),
                    "goal": f"at most {goal_us} us",
                    "holds": value <= goal_us,
                }
            )
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "loop": "uvloop"}
    if options.json:
        print(json.dumps({"machine": machine, "figures": figures}))
        return
    for figure in figures:
        print(
            f"{figure['name']:44s} {figure['value']:>10} {figure['unit']:7s} floor {figure['floor']:>10}  "
            f"x{figure['ratio']:<7} goal: {figure['goal']}: {'holds' if figure['holds'] else 'does not hold'}"
        )


if __name__ == "__main__":
    main()
