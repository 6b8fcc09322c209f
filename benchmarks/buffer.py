"""What the replay buffer costs: rows per second through admit, put, select and release, and the slowest calls.

    python benchmarks/buffer.py [--json] [--groups 20000] [--rounds 5]

Groups of 8 rows finish in random order within a window, as rollouts do; a trainer selects batches and releases them.
The floor is a bare asyncio.Queue that passes the same groups from the same producers to the same consumer, without
order, capacity, staleness or statistics. Buffer and floor alternate; figures are medians over the rounds. The two
sizes show what growth costs: a buffer of 16 times as many groups.

Then every policy in turn, with all groups ready: a batch is selected and released, as many are admitted and put. Its
floor is the same loop on a dictionary. Nothing waits there, so it is measured in processor time, which does not depend
on other programs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import random
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

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
            group_id=group_id,
            rows=ROWS_PER_GROUP,
            oldest_version=0,
            tokens=800,
            version_tokens={0: 800},
            rewards=(0.0,) * ROWS_PER_GROUP,
            lengths=(100,) * ROWS_PER_GROUP,
        )
        for group_id in range(count)
    ]


def finishing_order(count: int, window: int) -> list[int]:
    """Return groups in the order in which they finish: each at most half a window away from its place."""
    dice = random.Random(0)
    return sorted(range(count), key=lambda group_id: group_id + dice.random() * window / 2)


def p99_us(durations: list[float]) -> float:
    """The shortest of them that 99 % do not exceed; of less than a hundred the longest."""
    return sorted(durations)[math.ceil(0.99 * len(durations)) - 1] * 1e6


async def through_buffer(groups: list[GroupSummary], order: list[int], *, capacity: int, batch: int) -> Outcome:
    buffer = AsyncReplayBuffer(capacity=capacity, max_staleness=0)
    rows = DataProto()
    puts: list[float] = []
    releases: list[float] = []

    async def admit() -> None:
        for group in groups:
            await buffer.admit(group.group_id)
            admitted.put_nowait(group.group_id)

    async def produce() -> None:
        seen = -1
        for group_id in order:
            while seen < group_id:
                seen = await admitted.get()
            started = time.perf_counter()
            buffer.put(groups[group_id], rows)
            puts.append(time.perf_counter() - started)

    async def train() -> None:
        for _ in range(len(groups) // batch):
            selected = await buffer.select(batch, weight_version=0)
            started = time.perf_counter()
            buffer.release([group.summary.group_id for group in selected])
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
        for group_id in order:
            await queue.put((groups[group_id], rows))

    async def train() -> None:
        for _ in range(len(groups) // batch):
            for _ in range(batch):
                await queue.get()

    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(produce())
        tasks.create_task(train())
    return len(groups) * ROWS_PER_GROUP / (time.perf_counter() - started)


POLICIES: dict[str, dict[str, Any]] = {
    "fifo": {"selection": "fifo"},
    "windowed_fifo": {"selection": "windowed_fifo", "window": 64},
    "fifo_ready": {"selection": "fifo_ready"},
    "freshest": {"selection": "freshest"},
    "uniform": {"selection": "uniform"},
    "prioritized by advantage": {"selection": "prioritized", "priority": "advantage"},
    "prioritized by staleness": {"selection": "prioritized", "priority": "staleness", "exponent": 0.5},
    "uniform of a reservoir": {"selection": "uniform", "eviction": "reservoir", "keep_groups": 192},
    "fifo_ready by quota": {"selection": "fifo_ready", "quotas": {"a": 0.75, "b": 0.25}},
    "uniform, used twice": {"selection": "uniform", "max_uses": 2},
}
"""Each as the options of a buffer."""


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
    rows_per_s: float
    floor_rows_per_s: float
    put_p99_us: float
    select_p99_us: float
    release_p99_us: float


async def with_policy(options: dict[str, Any], *, batch: int, selects: int) -> PolicyOutcome:
    capacity = 4 * batch
    buffer = AsyncReplayBuffer(capacity=capacity, max_staleness=1 << 30, batch_groups=batch, **options)
    dice = random.Random(0)
    rows = DataProto()
    groups = [
        replace(
            group,
            oldest_version=group.group_id // batch,
            rewards=tuple(dice.random() for _ in range(ROWS_PER_GROUP)),
            environment="b" if group.group_id % 4 == 0 else "a",
        )
        for group in summaries(capacity + 2 * batch * selects)
    ]
    puts: list[float] = []
    taken: list[float] = []
    releases: list[float] = []
    used = 0
    group_id = 0
    begun = time.process_time()
    for _ in range(selects):
        counts = buffer.statistics()
        room = capacity - counts.pending - counts.ready - counts.selected
        for _ in range(room):
            await buffer.admit(group_id)
            started = time.process_time()
            buffer.put(groups[group_id], rows)
            puts.append(time.process_time() - started)
            group_id += 1
        started = time.process_time()
        selected = await buffer.select(batch, weight_version=group_id // batch)
        taken.append(time.process_time() - started)
        started = time.process_time()
        buffer.release([group.summary.group_id for group in selected])
        releases.append(time.process_time() - started)
        used += len(selected)
    elapsed = time.process_time() - begun
    # A row counts once when it is put and once when it is selected; the floor does the same with a dictionary.
    held: dict[int, GroupSummary] = {}
    begun = time.process_time()
    for number in range(group_id):
        held[groups[number].group_id] = groups[number]
    for number in range(min(used, group_id)):
        held.pop(number)
    floor = group_id * ROWS_PER_GROUP / (time.process_time() - begun)
    return PolicyOutcome(used * ROWS_PER_GROUP / elapsed, floor, p99_us(puts), p99_us(taken), p99_us(releases))


def policy_figures(*, rounds: int, batch: int = 64, selects: int = 60) -> list[dict[str, Any]]:
    figures: list[dict[str, Any]] = []
    for name, options in POLICIES.items():
        outcomes = [asyncio.run(with_policy(options, batch=batch, selects=selects)) for _ in range(rounds)]
        rate = statistics.median(outcome.rows_per_s for outcome in outcomes)
        floor = statistics.median(outcome.floor_rows_per_s for outcome in outcomes)
        figures.append(
            {
                "name": f"{name}: put and select",
                "value": round(rate),
                "unit": "rows/s",
                "floor": round(floor),
                "ratio": round(floor / rate, 2),
                "goal": "at least 100000 rows/s",
                "holds": rate >= 100_000,
            }
        )
        for what in ("put", "select", "release"):
            value = statistics.median(getattr(outcome, f"{what}_p99_us") for outcome in outcomes)
            figures.append(
                {
                    "name": f"{name}: {what}, p99" + ("" if what == "put" else f" of {batch} groups"),
                    "value": round(value, 1),
                    "unit": "us",
                    "floor": None,
                    "ratio": None,
                    "goal": "at most 10000 us",
                    "holds": value <= 10_000,
                }
            )
    return figures


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", action="store_true", help="print one JSON object")
    arguments.add_argument("--groups", type=int, default=20480, help="groups per round, a multiple of 1024")
    arguments.add_argument("--rounds", type=int, default=5)
    options = arguments.parse_args()
    if options.groups < 1024 or options.groups % 1024:
        arguments.error(f"--groups {options.groups}: batches of 1024 leave some over; give a multiple of 1024")

    groups = summaries(options.groups)
    figures: list[dict[str, Any]] = []
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
    figures += policy_figures(rounds=options.rounds)
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "loop": "uvloop"}
    if options.json:
        print(json.dumps({"machine": machine, "figures": figures}))
        return
    for figure in figures:
        floor_text = "" if figure["floor"] is None else f"floor {figure['floor']:>10}  x{figure['ratio']:<7} "
        print(
            f"{figure['name']:52s} {figure['value']:>10} {figure['unit']:7s} {floor_text}"
            f"goal: {figure['goal']}: {'holds' if figure['holds'] else 'does not hold'}"
        )


if __name__ == "__main__":
    main()
