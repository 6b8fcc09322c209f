"""Nothing is kept: calls, futures and shards go when the last user lets go of them."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.data import DataProto, DataProtoFuture, gather
from asyncrl.errors import UserCodeError, WorkerError
from asyncrl.single_controller import ClassWithInitArgs, Dispatch, Restart, Worker, WorkerGroup, register
from asyncrl.single_controller.local import LocalWorkerGroup

TIMEOUT_S = 100.0


class Copier(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def copy(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, idempotent=True)
    async def copy_again(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def same(self, value: Any) -> Any:
        return value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def fail(self) -> None:
        raise ValueError("as asked")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def held(self) -> int:
        """Objects of Ray's store that this worker refers to."""
        return references()


def rows(count: int, width: int = 1) -> DataProto:
    return DataProto.from_dict({"x": torch.ones(count, width)}, meta_info={"run": 1})


def resident_bytes() -> int:
    """What this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def alive() -> int:
    gc.collect()
    return len(gc.get_objects())


async def round_of_calls(first: WorkerGroup, second: WorkerGroup, batch: DataProto, settle: Callable[..., Any]) -> int:
    """Eleven calls in every way that futures are used and dropped."""
    made = first.copy(batch)
    halves = made.chunk(2)
    scored = second.copy(halves[0].rename("x", "y").union(halves[1]))
    again = first.copy(scored.select(["x"]))
    handed = [group.copy(again) for group in (first, second)]
    await settle(gather(*handed))
    await settle(scored)
    first.copy(DataProtoFuture.concat([made, again]))  # nobody looks
    await settle(first.same([1, 2]))
    await settle(first.same(made))
    dropped = second.same("dropped")
    dropped.cancel()
    failed = second.fail()
    with pytest.raises(WorkerError):
        await settle(failed)
    with pytest.raises(UserCodeError):
        await settle(second.copy(second.copy(batch).then(_refuse)))
    return 11


def _refuse(batch: DataProto) -> DataProto:
    raise ValueError("as asked")


async def here(future: Awaitable[Any]) -> Any:
    return await future


def local_pair() -> tuple[WorkerGroup, WorkerGroup]:
    first, second = (LocalWorkerGroup(ClassWithInitArgs(Copier), world_size=2, loop="current") for _ in range(2))
    return first, second


@pytest.mark.parametrize("calls", [2_000, pytest.param(100_000, marks=[pytest.mark.long, pytest.mark.timeout(1800)])])
async def test_calls_leave_nothing_behind(calls: int) -> None:
    first, second = local_pair()
    batch = rows(4)
    for _ in range(30):
        await round_of_calls(first, second, batch, here)
    objects, resident, made = alive(), resident_bytes(), 0
    while made < calls:
        made += await round_of_calls(first, second, batch, here)
    assert alive() - objects < 200
    assert resident_bytes() - resident < 8 * 2**20
    for group in (first, second):
        await group.aclose()


async def test_a_shard_goes_with_its_last_user() -> None:
    first, second = local_pair()
    made = first.copy(rows(4))
    plan = await made.plan()
    payloads = [weakref.ref(block.value) for block in plan.blocks()]  # type: ignore[attr-defined]
    assert len(payloads) == 2
    left, right = made.chunk(2)
    del plan, made
    await left.header()
    gc.collect()
    assert all(payload() is not None for payload in payloads)
    del right
    kept = second.copy(left)
    other = first.copy(left)
    await kept.header()
    await other.header()
    gc.collect()
    # The first two rows are rank 0's; nobody wants rank 1's any more.
    assert [payload() is not None for payload in payloads] == [True, False]
    del left
    gc.collect()
    assert [payload() is not None for payload in payloads] == [False, False]
    assert await kept == await other == rows(2)
    for group in (first, second):
        await group.aclose()


async def test_a_call_that_could_be_sent_again_lets_its_inputs_go_once_it_has_finished() -> None:
    made = ClassWithInitArgs(Copier)
    async with LocalWorkerGroup(made, world_size=2, loop="current", restart=Restart()) as group:
        first = group.copy(rows(4))
        second = group.copy_again(first)
        await second.header()
        payload = weakref.ref((await first.plan()).blocks()[0].value)  # type: ignore[attr-defined]
        del first
        gc.collect()
        assert payload() is None
        assert await second == rows(4)


async def test_an_explained_future_does_not_keep_its_inputs() -> None:
    first, second = local_pair()
    made = first.copy(rows(4))
    payload = weakref.ref((await made.plan()).blocks()[0].value)  # type: ignore[attr-defined]
    scored = second.copy(made)
    await scored.header()
    assert "from Copier.copy" in scored.explain()
    del made
    gc.collect()
    assert payload() is None
    assert "no longer referenced" in scored.explain()
    for group in (first, second):
        await group.aclose()


# --------------------------------------------------------------------------------------------------------------- Ray


def references() -> int:
    """Objects of Ray's store that this process refers to."""
    import ray

    gc.collect()
    worker: Any = ray._private.worker.global_worker
    return len(worker.core_worker.get_all_reference_counts())


def settled(measure: Callable[[], int], most: int) -> int:
    """Ray lets go in the background: wait until it has, for at most some seconds."""
    ends = time.monotonic() + 10
    while (found := measure()) > most and time.monotonic() < ends:
        time.sleep(0.05)
    return found


async def blocking(future: Any) -> Any:
    return future.result(TIMEOUT_S)


@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    "calls", [pytest.param(330, marks=pytest.mark.slow), pytest.param(5_000, marks=pytest.mark.long)]
)
def test_calls_on_ray_leave_nothing_behind(calls: int) -> None:
    import ray.cloudpickle

    from asyncrl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    groups = [RayWorkerGroup(RayResourcePool([2]), RayClassWithInitArgs(Copier)) for _ in range(2)]
    batch = rows(4, 65_536)  # 1 MiB: its shards lie in the object store
    for group in groups:
        group.ready().result(TIMEOUT_S)
    for _ in range(3):
        asyncio.run(round_of_calls(groups[0], groups[1], batch, blocking))

    def everywhere() -> int:
        return references() + sum(sum(group.held().result(TIMEOUT_S)) for group in groups)

    counted, objects, made = everywhere(), alive(), 0
    while made < calls:
        made += asyncio.run(round_of_calls(groups[0], groups[1], batch, blocking))
    assert settled(everywhere, counted) <= counted
    assert alive() - objects < 500
    for group in groups:
        group.shutdown()
