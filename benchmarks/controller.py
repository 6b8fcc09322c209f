"""What the single controller costs above bare Ray: calls, batches, futures, starting, cancelling, deaths.

    python benchmarks/controller.py [--json] [--rounds 60] [--only one_to_all,dp_tiny]

Two groups of four workers, and as many bare Ray actors that do the same with numpy arrays. Floor and value of a figure
alternate, in the same process; both are medians. Figures without a floor have a goal.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import signal
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import ray
import torch

from asyncrl.data import DataProto
from asyncrl.errors import WorkerDiedError
from asyncrl.single_controller import Dispatch, Execute, Worker, make_nd_compute_dataproto_dispatch_fn, register
from asyncrl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

RANKS = 4
LARGE = 64 << 20
STORE = 2 << 30
ROWS = 1020
BATCHES = 10
STAGE_S = 0.1
OUTSTANDING = 10_000
MESH = make_nd_compute_dataproto_dispatch_fn("replica")


@dataclass(frozen=True, kw_only=True)
class Figure:
    name: str
    value: float
    unit: str
    floor: float | None
    ratio: float | None
    goal: str
    holds: bool


# ------------------------------------------------------------------------------------------------ both sides' workers


class Fetched:
    """Adds up the bytes of the blocks that this process fetches from now on."""

    def __init__(self) -> None:
        from asyncrl.single_controller.call import HeldValue
        from asyncrl.single_controller.ray.messages import RayValue

        self.size_bytes = 0
        get_all, here_all, fetch_all = RayValue.get_all, HeldValue.get_all, RayValue.fetch_all

        def counted(found: list[DataProto]) -> list[DataProto]:
            self.size_bytes += sum(each.size_bytes for each in found)
            return found

        async def fetch(blocks: Sequence[Any]) -> list[DataProto]:
            return counted(await fetch_all(blocks))

        RayValue.get_all = lambda blocks: counted(get_all(blocks))  # type: ignore[method-assign]
        RayValue.fetch_all = fetch  # type: ignore[method-assign]
        HeldValue.get_all = lambda blocks: counted(here_all(blocks))  # type: ignore[method-assign]


class Light(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def ping(self) -> int:
        return self.rank


class Stage(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.fetched: Fetched
        self.running = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.opened = asyncio.Event()
        self._register_dispatch_collect_info("replica", dp_rank=self.rank, is_collect=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def ping(self) -> int:
        return self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, read_only=True)
    async def echo(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=MESH, read_only=True)
    async def echo_mesh(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, read_only=True)
    def slow(self, batch: DataProto) -> DataProto:
        time.sleep(STAGE_S)
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC, read_only=True)
    async def count(self, batch: DataProto) -> int:
        return len(batch)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    async def count_own(self, batch: DataProto) -> int:
        return len(batch)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC, read_only=True)
    async def first_rows(self, batch: DataProto) -> list[int]:
        assert batch.batch is not None
        return [int(row) for row in batch.batch["x"][:, 0]]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def count_fetches(self) -> None:
        self.fetched = Fetched()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def fetched_bytes(self) -> int:
        return self.fetched.size_bytes

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def pid(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def until_open(self) -> None:
        await self.opened.wait()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def open(self) -> None:
        self.opened.set()
        self.opened = asyncio.Event()  # for those who come later

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
        self.opened = asyncio.Event()

    async def ping(self) -> int:
        return 0

    async def echo(self, array: Any) -> Any:
        return array

    async def count(self, array: Any) -> int:
        return len(array)

    async def count_own(self, array: Any) -> int:
        return len(array.copy())

    async def until_open(self) -> None:
        await self.opened.wait()

    async def open(self) -> None:
        self.opened.set()
        self.opened = asyncio.Event()  # for those who come later

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


@ray.remote(num_cpus=0)
class BareStage:
    """One call after another, as a plain method of a worker."""

    def slow(self, array: Any) -> Any:
        time.sleep(STAGE_S)
        return array


@ray.remote(num_cpus=1)
class BareLight:
    async def ping(self) -> int:
        return 0


# --------------------------------------------------------------------------------------------------------- measuring


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def against(name: str, pairs: Sequence[tuple[float, float]], *, goal: float) -> Figure:
    """From seconds of ours and of the floor, round by round."""
    value, floor = (statistics.median(column) * 1e3 for column in zip(*pairs, strict=True))
    ratio = value / floor
    return Figure(
        name=name,
        value=round(value, 3),
        unit="ms",
        floor=round(floor, 3),
        ratio=round(ratio, 3),
        goal=f"<= {goal:g} x floor",
        holds=ratio <= goal,
    )


def taking_turns(
    name: str, ours: Callable[[], object], bare: Callable[[], object], *, rounds: int, goal: float
) -> Figure:
    for function in (ours, bare, ours, bare):
        function()
    pairs = [(seconds(ours), seconds(bare)) for _ in range(rounds)]
    return against(name, pairs, goal=goal)


def alone(name: str, value: float, unit: str, *, goal: float) -> Figure:
    return Figure(
        name=name, value=round(value, 3), unit=unit, floor=None, ratio=None, goal=f"<= {goal:g}", holds=value <= goal
    )


def _made(call: Callable[[], Any], count: int) -> tuple[list[Any], tuple[float, float]]:
    """What so many calls gave, and microseconds of one: the calling thread's own time, and the wall's."""
    gc.collect()
    began, thread_began = time.perf_counter(), time.thread_time()
    held = [call() for _ in range(count)]
    taken = time.thread_time() - thread_began, time.perf_counter() - began
    return held, (taken[0] / count * 1e6, taken[1] / count * 1e6)


class Bench:
    """The groups and actors that figures are measured on."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.few = max(5, rounds // 6)
        self.first, self.second = (
            RayWorkerGroup(RayResourcePool([RANKS]), RayClassWithInitArgs(Stage), name=name)
            for name in ("first", "second")
        )
        self.bare_first, self.bare_second = (
            [Bare.options(max_concurrency=2 * OUTSTANDING).remote() for _ in range(RANKS)] for _ in range(2)
        )
        self.first.ping().result()
        self.second.ping().result()
        ray.get([actor.ping.remote() for actor in self.bare_first + self.bare_second])
        self.tiny = DataProto.from_dict(tensors={"x": torch.arange(64)})
        self.large = DataProto.from_dict(
            tensors={"x": torch.arange(ROWS)[:, None].expand(ROWS, LARGE // ROWS // 8).contiguous()}
        )
        assert self.large.batch is not None
        self.tiny_array = np.arange(64)
        self.large_array = self.large.batch["x"].numpy()

    # ------------------------------------------------------------------------------------------------------- bare Ray

    def shards(self, array: Any, *, put: bool) -> list[Any]:
        parts = np.array_split(array, RANKS)
        return [ray.put(part) for part in parts] if put else parts

    @staticmethod
    def bare(method: str, actors: list[Any], values: Sequence[Any]) -> list[Any]:
        return [getattr(actor, method).remote(value) for actor, value in zip(actors, values, strict=True)]

    # -------------------------------------------------------------------------------------------------------- figures

    def calls(self) -> Iterator[Figure]:
        yield taking_turns(
            "one_to_all",
            lambda: self.first.ping().result(),
            lambda: ray.get([actor.ping.remote() for actor in self.bare_first]),
            rounds=4 * self.rounds,
            goal=1.1,
        )

        def bare_echo() -> object:
            return np.concatenate(ray.get(self.bare("echo", self.bare_first, self.shards(self.tiny_array, put=False))))

        for name, method, goal in (("dp_tiny", self.first.echo, 1.1), ("dp_mesh_tiny", self.first.echo_mesh, 1.2)):
            yield taking_turns(
                name, lambda call=method: call(self.tiny).result(), bare_echo, rounds=4 * self.rounds, goal=goal
            )

    def payloads(self) -> Iterator[Figure]:
        yield taking_turns(
            "dp_64mb_in",
            lambda: self.first.count(self.large).result(),
            lambda: ray.get(self.bare("count", self.bare_first, self.shards(self.large_array, put=True))),
            rounds=self.few,
            goal=1.2,
        )
        yield taking_turns(
            "echo_64mb",
            lambda: self.first.echo(self.large).result(),
            lambda: np.concatenate(
                ray.get(self.bare("echo", self.bare_first, self.shards(self.large_array, put=True)))
            ),
            rounds=self.few,
            goal=1.2,
        )

    def futures(self) -> Iterator[Figure]:
        held = self.first.echo(self.large)
        held.exception()
        refs = self.bare("echo", self.bare_first, self.shards(self.large_array, put=True))
        ray.wait(refs, num_returns=RANKS)
        yield taking_turns(
            "future_64mb_4to4",
            lambda: self.second.count(held).result(),
            lambda: ray.get(self.bare("count", self.bare_second, refs)),
            rounds=self.rounds,
            goal=1.3,
        )
        yield taking_turns(
            "future_64mb_4to4_own",
            lambda: self.second.count_own(held).result(),
            lambda: ray.get(self.bare("count_own", self.bare_second, refs)),
            rounds=self.few,
            goal=1.3,
        )
        third = RayWorkerGroup(RayResourcePool([3]), RayClassWithInitArgs(Stage), name="third")
        third.count_fetches().result()
        part = held.slice(100, 1000).reorder(list(reversed(range(900))))
        seen = [row for rows in third.first_rows(part).result() for row in rows]
        if seen != list(reversed(range(100, 1000))):
            raise AssertionError("the consumers got other rows")
        own, block = LARGE * 300 / ROWS, LARGE / RANKS
        worst = max(third.fetched_bytes().result())
        yield alone("future_4to3_bytes", worst / (own + block), "of own rows and one block", goal=1.0)
        here = Fetched()
        self.second.count(held).result()
        third.count(part).result()
        yield alone("driver_bytes", here.size_bytes, "bytes", goal=0)
        third.shutdown()

    def stages(self) -> Iterator[Figure]:
        bare_a, bare_b = ([BareStage.remote() for _ in range(RANKS)] for _ in range(2))

        def ours(data: DataProto, submitting: list[float]) -> None:
            start = time.perf_counter()
            futures = [self.second.slow(self.first.slow(data)) for _ in range(BATCHES)]
            submitting.append(time.perf_counter() - start)
            for future in futures:
                if error := future.exception():
                    raise error

        def bare(array: Any, *, put: bool) -> None:
            refs = []
            for _ in range(BATCHES):
                refs += self.bare("slow", bare_b, self.bare("slow", bare_a, self.shards(array, put=put)))
            ray.wait(refs, num_returns=len(refs))

        ideal = (BATCHES + 1) * STAGE_S
        submitting: list[float] = []
        for _ in range(2):
            ours(self.tiny, submitting)
        submitting.clear()
        pairs = [(seconds(lambda: ours(self.tiny, submitting)), ideal) for _ in range(self.few)]
        yield against("two_stages_tiny", pairs, goal=1.03)
        yield alone("two_stages_submit_ms", statistics.median(submitting) * 1e3, "ms", goal=20)
        bare(self.tiny_array, put=False)
        pairs = [
            (seconds(lambda: ours(self.tiny, [])), seconds(lambda: bare(self.tiny_array, put=False)))
            for _ in range(self.few)
        ]
        yield against("two_stages_tiny_over_ray", pairs, goal=1.03)
        ours(self.large, [])
        bare(self.large_array, put=True)
        pairs = [
            (seconds(lambda: ours(self.large, [])), seconds(lambda: bare(self.large_array, put=True)))
            for _ in range(self.few)
        ]
        yield against("two_stages_64mb", pairs, goal=1.1)

    def starting(self) -> Iterator[Figure]:
        def ours() -> float:
            start = time.perf_counter()
            group = RayWorkerGroup(RayResourcePool([RANKS]), RayClassWithInitArgs(Light), name="light")
            group.ping().result()
            took = time.perf_counter() - start
            group.shutdown()
            return took

        def bare() -> float:
            start = time.perf_counter()
            actors = [BareLight.remote() for _ in range(RANKS)]
            ray.get([actor.ping.remote() for actor in actors])
            took = time.perf_counter() - start
            for actor in actors:
                ray.kill(actor)
            return took

        def settled(start: Callable[[], float]) -> float:
            took = start()
            time.sleep(1.0)  # processes end, and Ray starts spare ones
            return took

        settled(bare)
        settled(ours)
        yield against("start_4_workers", [(settled(ours), settled(bare)) for _ in range(self.few)], goal=1.3)

    def outstanding(self) -> Iterator[Figure]:
        """Calls that wait in the workers: what making one costs the driver's thread, and the bytes that one holds.

        The thread's own time is what the driver spends. The wall's also has what Ray's threads and four workers, which
        receive these calls meanwhile, take of the same cores: it stands beside that of bare Ray's four sends.
        """

        def ours() -> tuple[float, float]:
            self.first.until_open()
            held, taken = _made(self.first.until_open, OUTSTANDING)
            self.first.open().result()
            for future in held:
                future.result()
            return taken

        def bare() -> tuple[float, float]:
            held, taken = _made(lambda: [actor.until_open.remote() for actor in self.bare_first], OUTSTANDING)
            ray.get([actor.open.remote() for actor in self.bare_first])
            for refs in held:
                ray.get(refs)
            return taken

        for function in (ours, bare):
            function()  # memory is slow when it is first touched
        rounds = [(ours(), bare()) for _ in range(3)]
        for name, clock, goal in (("outstanding_us", 0, 300.0), ("outstanding_wall_us", 1, None)):
            value, floor = (statistics.median(each[side][clock] for each in rounds) for side in (0, 1))
            yield Figure(
                name=name,
                value=round(value, 3),
                unit="us",
                floor=round(floor, 3),
                ratio=round(value / floor, 3),
                goal="none" if goal is None else f"<= {goal:g}",
                holds=goal is None or value <= goal,
            )
        self.second.until_open()
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        held, _ = _made(self.second.until_open, OUTSTANDING)
        time.sleep(0.5)
        gc.collect()
        size = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        yield alone("outstanding_bytes", size / OUTSTANDING, "bytes", goal=2048)
        self.second.open().result()
        for future in held:
            future.result()

    def cancelling(self) -> Iterator[Figure]:
        def ours() -> float:
            future = self.first.forever()
            self.first.until_running().result()
            seen = self.first.until_cancelled()
            return seconds(lambda: (future.cancel(), seen.result()))

        yield alone("cancel_ms", statistics.median(ours() for _ in range(self.few)) * 1e3, "ms", goal=50)

    def dying(self) -> Iterator[Figure]:
        """From SIGKILL of a rank until its call has the error."""

        def ours() -> float:
            group = RayWorkerGroup(RayResourcePool([RANKS]), RayClassWithInitArgs(Stage), name="dying")
            process = group.pid().result()[0]
            future = group.forever()
            group.until_running().result()
            os.kill(process, signal.SIGKILL)
            took = seconds(future.exception)
            assert isinstance(future.exception(), WorkerDiedError)
            group.shutdown()
            return took

        yield alone("death_ms", max(ours() for _ in range(self.few)) * 1e3, "ms, longest", goal=1000)


PARTS: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    "calls": Bench.calls,
    "payloads": Bench.payloads,
    "futures": Bench.futures,
    "stages": Bench.stages,
    "starting": Bench.starting,
    "outstanding": Bench.outstanding,
    "cancelling": Bench.cancelling,
    "dying": Bench.dying,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    arguments = parser.parse_args()
    parts = arguments.only.split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"--only knows {', '.join(PARTS)}, not {', '.join(unknown)}")
    ray.init(
        num_cpus=4 * RANKS,
        object_store_memory=STORE,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    # Memory is slow when it is first touched: touch the store before anything is measured.
    touched = [ray.put(np.ones(LARGE, dtype=np.uint8)) for _ in range(STORE // LARGE - 2)]
    del touched
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "ray": ray.__version__,
        "torch": torch.__version__,
        "load_average_1_min": round(os.getloadavg()[0], 1),
    }
    bench = Bench(arguments.rounds)
    figures: list[Figure] = []
    for part in parts:
        for figure in PARTS[part](bench):
            figures.append(figure)
            if not arguments.json:
                _print(figure)
    bench.first.shutdown()
    bench.second.shutdown()
    ray.shutdown()
    if arguments.json:
        print(json.dumps({"machine": machine, "figures": [asdict(figure) for figure in figures]}))
    else:
        print(machine)


def _print(figure: Figure) -> None:
    floor = "" if figure.floor is None else f"floor {figure.floor:10.3f}  x {figure.ratio:6.3f}"
    verdict = "holds" if figure.holds else "DOES NOT HOLD"
    print(
        f"{figure.name:22} {figure.value:10.3f} {figure.unit:26} {floor:28}  goal {figure.goal}: {verdict}", flush=True
    )


if __name__ == "__main__":
    sys.exit(main())
