"""What the single controller costs above bare Ray: calls, batches, futures, cancelling.

    python benchmarks/controller.py [--json] [--rounds 20]

Two groups of four workers, and eight bare Ray actors that do the same with numpy arrays. Every figure is the median of
its rounds; the floor is measured between them, in the same process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import ray
import torch

from asyncrl.data import DataProto
from asyncrl.single_controller import Dispatch, Execute, Worker, register
from asyncrl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

RANKS = 4
LARGE = 64 << 20


@dataclass
class Figure:
    name: str
    value: float
    unit: str
    floor: float
    ratio: float
    goal: str
    holds: bool


class Stage(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.running = asyncio.Event()
        self.cancelled = asyncio.Event()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def ping(self) -> int:
        return self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, read_only=True)
    async def echo(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC, read_only=True)
    async def count(self, batch: DataProto) -> int:
        return len(batch)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    async def count_own(self, batch: DataProto) -> int:
        return len(batch)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    async def forever(self) -> None:
        self.cancelled.clear()
        self.running.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.running.clear()
            self.cancelled.set()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    async def until_running(self) -> None:
        await self.running.wait()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    async def until_cancelled(self) -> None:
        await self.cancelled.wait()


@ray.remote(num_cpus=0)
class Bare:
    def __init__(self) -> None:
        self.running = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def ping(self) -> int:
        return 0

    async def echo(self, array: Any) -> Any:
        return array

    async def count(self, array: Any) -> int:
        return len(array)

    async def count_own(self, array: Any) -> int:
        return len(array.copy())

    async def forever(self) -> None:
        self.cancelled.clear()
        self.running.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.running.clear()
            self.cancelled.set()

    async def until_running(self) -> None:
        await self.running.wait()

    async def until_cancelled(self) -> None:
        await self.cancelled.wait()


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def compare(name: str, ours: Callable[[], object], bare: Callable[[], object], *, rounds: int, goal: float) -> Figure:
    """Medians of alternating rounds; the goal is a ratio to the floor."""
    for function in (ours, bare):
        function()
    return figure(name, [(seconds(ours), seconds(bare)) for _ in range(rounds)], goal=goal)


def figure(name: str, pairs: Sequence[tuple[float, float]], *, goal: float) -> Figure:
    """From seconds of ours and of bare Ray, round by round."""
    value, floor = (statistics.median(column) * 1e3 for column in zip(*pairs, strict=True))
    ratio = value / floor
    return Figure(name, round(value, 3), "ms", round(floor, 3), round(ratio, 2), f"<= {goal:g} x floor", ratio <= goal)


def measure(rounds: int) -> list[Figure]:
    first = RayWorkerGroup(RayResourcePool([RANKS]), RayClassWithInitArgs(Stage), name="first")
    second = RayWorkerGroup(RayResourcePool([RANKS]), RayClassWithInitArgs(Stage), name="second")
    bare_first, bare_second = ([Bare.remote() for _ in range(RANKS)] for _ in range(2))
    first.ping().result()
    second.ping().result()
    ray.get([actor.ping.remote() for actor in bare_first + bare_second])

    tiny = DataProto.from_dict(tensors={"x": torch.arange(64)})
    large = DataProto.from_dict(tensors={"x": torch.ones(1024, LARGE // 1024 // 8, dtype=torch.int64)})
    tiny_array, large_array = np.arange(64), np.ones((1024, LARGE // 1024 // 8), dtype=np.int64)

    def bare_map(method: str, actors: list[Any], values: Any) -> list[Any]:
        return [getattr(actor, method).remote(value) for actor, value in zip(actors, values, strict=True)]

    few = max(5, rounds // 3)
    figures = [
        compare(
            "one_to_all",
            lambda: first.ping().result(),
            lambda: ray.get([actor.ping.remote() for actor in bare_first]),
            rounds=rounds,
            goal=1.5,
        ),
        compare(
            "dp_tiny",
            lambda: first.echo(tiny).result(),
            lambda: np.concatenate(ray.get(bare_map("echo", bare_first, np.array_split(tiny_array, RANKS)))),
            rounds=rounds,
            goal=2.0,
        ),
        compare(
            "two_stages_tiny",
            lambda: second.echo(first.echo(tiny)).result(),
            lambda: np.concatenate(
                ray.get(bare_map("echo", bare_second, bare_map("echo", bare_first, np.array_split(tiny_array, RANKS))))
            ),
            rounds=rounds,
            goal=2.0,
        ),
        compare(
            "dp_64mb_in",
            lambda: first.count(large).result(),
            lambda: ray.get(
                bare_map("count", bare_first, [ray.put(part) for part in np.array_split(large_array, RANKS)])
            ),
            rounds=few,
            goal=1.2,
        ),
        compare(
            "echo_64mb",
            lambda: first.echo(large).result(),
            lambda: np.concatenate(
                ray.get(bare_map("echo", bare_first, [ray.put(part) for part in np.array_split(large_array, RANKS)]))
            ),
            rounds=few,
            goal=1.2,
        ),
    ]
    held = first.echo(large)
    held.exception()
    held_refs = bare_map("echo", bare_first, [ray.put(part) for part in np.array_split(large_array, RANKS)])
    ray.wait(held_refs, num_returns=RANKS)
    figures += [
        compare(
            "future_64mb_4to4",
            lambda: second.count(held).result(),
            lambda: ray.get(bare_map("count", bare_second, held_refs)),
            rounds=rounds,
            goal=2.0,
        ),
        compare(
            "future_64mb_4to4_own",
            lambda: second.count_own(held).result(),
            lambda: ray.get(bare_map("count_own", bare_second, held_refs)),
            rounds=few,
            goal=2.0,
        ),
    ]

    def our_cancel() -> float:
        future = first.forever()
        first.until_running().result()
        seen = first.until_cancelled()
        return seconds(lambda: (future.cancel(), seen.result()))

    def bare_cancel() -> float:
        ref = bare_first[0].forever.remote()
        ray.get(bare_first[0].until_running.remote())
        seen = bare_first[0].until_cancelled.remote()
        return seconds(lambda: (ray.cancel(ref), ray.get(seen)))

    figures.append(figure("cancel_ms", [(our_cancel(), bare_cancel()) for _ in range(few)], goal=1.5))
    first.shutdown()
    second.shutdown()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    ray.init(num_cpus=2 * RANKS, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    figures = measure(arguments.rounds)
    ray.shutdown()
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "ray": ray.__version__,
        "torch": torch.__version__,
        "load_average_1_min": round(os.getloadavg()[0], 1),
    }
    if arguments.json:
        print(json.dumps({"machine": machine, "figures": [asdict(figure) for figure in figures]}))
        return
    print(machine)
    for each in figures:
        verdict = "holds" if each.holds else "DOES NOT HOLD"
        print(
            f"{each.name:22} {each.value:9.3f} {each.unit}  floor {each.floor:9.3f}  x {each.ratio:5.2f}"
            f"  goal {each.goal}: {verdict}"
        )


if __name__ == "__main__":
    sys.exit(main())
