"""What only the local backend has: everything on one loop, in one order, without Ray."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import random
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from blockbuster import blockbuster_ctx

from asyncrl.data import DataProto
from asyncrl.errors import DeadlineError, DispatchError, InfrastructureError, SchemaError
from asyncrl.simulation import run_virtually
from asyncrl.single_controller import ClassWithInitArgs, Dispatch, Worker, register
from asyncrl.single_controller.local import LocalWorkerGroup


class Clockwork(Worker):
    """Sleeps, and tells when and where."""

    def __init__(self) -> None:
        super().__init__()
        self.threads = {threading.get_ident()}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def sleep(self, duration_s: float) -> float:
        await asyncio.sleep(duration_s)
        return asyncio.get_running_loop().time()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def thread(self) -> int:
        self.threads.add(threading.get_ident())
        assert len(self.threads) == 1
        return threading.get_ident()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double(self, batch: DataProto) -> DataProto:
        assert batch.batch is not None
        return DataProto.from_dict(tensors={"x": batch.batch["x"] * 2})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def take(self, values: dict[str, Any]) -> dict[str, Any]:
        return values

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def malform(self, batch: DataProto) -> DataProto:
        batch.non_tensor_batch["x"] = [1]  # type: ignore[assignment]
        return batch


def virtually(story: Any) -> Any:
    return run_virtually(story())


def on_this_loop(world_size: int = 2) -> LocalWorkerGroup:
    return LocalWorkerGroup(ClassWithInitArgs(Clockwork), world_size=world_size, loop="current", name="clockwork")


def test_an_hour_passes_on_a_virtual_clock() -> None:
    async def story() -> tuple[list[float], float]:
        group = on_this_loop()
        first, second = group.sleep(3600.0), group.sleep(60.0)
        assert await second == [60.0, 60.0]
        with pytest.raises(DeadlineError):
            await group.sleep(1e6).deadline(5.0)
        assert asyncio.get_running_loop().time() == 65.0
        times = await first
        await group.aclose()
        return times, asyncio.get_running_loop().time()

    assert virtually(story) == ([3600.0, 3600.0], 3600.0)


@pytest.mark.parametrize("world_size", [0, -1, "2", 2.5, None])
def test_a_number_of_workers_that_is_none_is_refused(world_size: Any) -> None:
    with pytest.raises(DispatchError, match="world_size must be a whole number, at least 1, got"):
        LocalWorkerGroup(ClassWithInitArgs(Clockwork), world_size=world_size)
    with pytest.raises(DispatchError, match=r"made of ClassWithInitArgs\(Class, ...\), got"):
        LocalWorkerGroup(Clockwork, world_size=1)  # type: ignore[arg-type]


async def test_everything_runs_in_this_thread() -> None:
    async with on_this_loop() as group:
        assert await group.thread() == [threading.get_ident()] * 2
        batch = DataProto.from_dict(tensors={"x": torch.arange(3)})
        result = await group.double(group.double(batch).slice(1, 3))
        assert result.batch["x"].tolist() == [4, 8]


async def test_a_batch_that_is_malformed_is_an_error() -> None:
    async with on_this_loop() as group:
        async with asyncio.timeout(5.0):
            with pytest.raises(SchemaError, match="column 'x' of non_tensor_batch must be an array") as caught:
                await group.malform(DataProto.from_dict(tensors={"x": torch.arange(2)}))
        assert caught.value.origin is not None
        assert caught.value.origin.arguments == "(1 rows: x int64)"


async def test_what_the_caller_changes_later_is_not_seen() -> None:
    async with on_this_loop(world_size=1) as group:
        array, tensor, leaf = np.zeros(2), torch.zeros(2), torch.zeros(2, requires_grad=True)
        parameter = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
        taking = group.take({"array": array, "tensors": [tensor, leaf, parameter]})
        array += 1
        with torch.no_grad():
            for each in (tensor, leaf, parameter):
                each.add_(1)
        ((taken,)) = await taking
        assert taken["array"].tolist() == [0.0, 0.0]
        assert [each.tolist() for each in taken["tensors"]] == [[0.0, 0.0]] * 3
        assert [each.requires_grad for each in taken["tensors"]] == [False, True, False]
        assert [type(each) for each in taken["tensors"]] == [torch.Tensor, torch.Tensor, torch.nn.Parameter]


async def test_waiting_without_await_says_what_to_do() -> None:
    async with on_this_loop() as group:
        with pytest.raises(RuntimeError, match="use `await future` there"):
            group.sleep(0.0).result()
        with pytest.raises(RuntimeError, match="use `await future` there"):
            group.thread(blocking=True)


def test_a_future_whose_loop_has_ended_does_not_hang() -> None:
    async def story() -> Any:
        return on_this_loop().sleep(3600.0)

    # asyncio.run cancels what is left.
    with pytest.raises(concurrent.futures.CancelledError):
        asyncio.run(story()).result()

    async def unfinished() -> tuple[LocalWorkerGroup, Any]:
        group = on_this_loop()
        await group.ready()
        return group, group.sleep(3600.0)

    loop = asyncio.new_event_loop()
    group, future = loop.run_until_complete(unfinished())
    with pytest.raises(RuntimeError, match="its event loop has stopped"):
        future.result()
    loop.run_until_complete(group.aclose())
    loop.close()
    assert isinstance(future.exception(), InfrastructureError)


async def test_plain_methods_keep_to_one_thread_of_their_own() -> None:
    async with LocalWorkerGroup(ClassWithInitArgs(Clockwork), world_size=2) as group:
        first, second = await group.thread()
        assert len({first, second, threading.get_ident()}) == 3
        assert await group.thread() == [first, second]


async def test_nothing_blocks_and_nothing_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    batch = DataProto.from_dict(tensors={"x": torch.arange(5)})
    with caplog.at_level(logging.WARNING), blockbuster_ctx():
        group = LocalWorkerGroup(ClassWithInitArgs(Clockwork), world_size=2)
        parts = group.double(batch).chunk(5)
        values = [int((await group.double(part)).batch["x"][0]) for part in parts]
        asleep = group.sleep(3600.0)
        await group.aclose()
        with pytest.raises(InfrastructureError):
            await asleep
    assert values == [0, 4, 8, 12, 16]
    assert len(group._owner) == 0
    assert caplog.records == []


class Sleeper(Worker):
    """Sleeps until it is cancelled; ``began`` and ``ended`` have the numbers of the calls, for any thread."""

    def __init__(self, began: set[int], ended: set[int], changed: threading.Condition) -> None:
        super().__init__()
        self.began, self.ended, self.changed = began, ended, changed

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def sleep(self, number: int) -> None:
        self.note(self.began, number)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.note(self.ended, number)

    def note(self, numbers: set[int], number: int) -> None:
        with self.changed:
            numbers.add(number)
            self.changed.notify_all()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def nothing(self) -> None:
        pass


@pytest.mark.parametrize("seed", range(3))
def test_law_a_call_that_another_thread_cancels_ends_though_nothing_else_wakes_the_loop(seed: int) -> None:
    numbers = random.Random(seed).sample(range(10), 10)
    began: set[int] = set()
    ended: set[int] = set()
    changed = threading.Condition()
    with LocalWorkerGroup(ClassWithInitArgs(Sleeper, began, ended, changed)) as group:
        loop = group._loop.loop
        loop.set_debug(True)  # then it refuses what another thread does to its tasks
        try:
            calls = [group.sleep(number) for number in range(10)]
            for number in numbers[:5]:  # begun or not
                assert calls[number].cancel()
            with changed:
                assert changed.wait_for(lambda: began >= set(numbers[5:]), 5.0)
            for number in numbers[5:]:
                assert calls[number].cancel()
            with changed:
                assert changed.wait_for(lambda: ended >= set(numbers[5:]), 5.0)
            group.nothing().result(5.0)  # what was called before it has begun, or never will
            with changed:
                assert changed.wait_for(lambda: ended == began, 5.0)
        finally:
            loop.set_debug(False)


@pytest.mark.slow
def test_it_works_where_ray_is_not_installed() -> None:
    program = """
import sys
sys.modules["ray"] = None
import torch
from asyncrl.data import DataProto
from asyncrl.single_controller import ClassWithInitArgs, Dispatch, Worker, register
from asyncrl.single_controller.local import LocalWorkerGroup

class Doubler(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"x": batch.batch["x"] * 2})

group = LocalWorkerGroup(ClassWithInitArgs(Doubler), world_size=2)
print(group.double(DataProto.from_dict(tensors={"x": torch.arange(3)})).result().batch["x"].tolist())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert (done.stdout, done.returncode) == ("[0, 2, 4]\n", 0), done.stderr
