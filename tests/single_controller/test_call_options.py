"""What a method is registered with beyond its dispatch, what a call may override, and what a group counts."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.data.schema import Column, Schema
from asyncrl.errors import DeadlineError, DispatchError, SchemaError
from asyncrl.single_controller import Dispatch, Worker, WorkerGroup, register
from asyncrl.single_controller.worker_group import GroupStatistics

TIMEOUT_S = 30.0
X = Schema((Column("x", "tensor", "int64"),))


class Offering(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.door = asyncio.Event()
        self.journal: list[str] = []

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, rows=lambda batch, n: len(batch) * n, schema=X)
    async def sample(self, batch: DataProto, n: int) -> DataProto:
        await self.door.wait()
        return batch.repeat(n)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, rows=lambda batch: len(batch) // 0)
    async def wrong_declaration(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, rows=len)
    async def wrong_rows(self, batch: DataProto) -> DataProto:
        return batch.repeat(2)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, schema=X)
    async def wrong_columns(self, batch: DataProto) -> DataProto:
        return batch.rename("x", "y")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def undeclared(self, batch: DataProto) -> DataProto:
        await self.door.wait()
        return batch

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def open_door(self) -> None:
        self.door.set()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, deadline_s=0.05)
    async def slow(self, name: str) -> str:
        await asyncio.sleep(0.5 if name == "half a second" else TIMEOUT_S)
        return name

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def write(self, text: str) -> list[str]:
        self.journal.append(text)
        return list(self.journal)


@pytest.fixture(scope="module", autouse=True)
def by_value() -> None:
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def group(make_group: Callable[..., WorkerGroup]) -> WorkerGroup:
    return make_group(Offering, name="offering")


def batch(count: int) -> DataProto:
    return DataProto.from_dict(tensors={"x": torch.arange(count)})


def test_declared_rows_and_columns_are_known_before_the_data(group: WorkerGroup) -> None:
    future: DataProtoFuture = group.sample(batch(4), 3)
    assert not future.done()
    assert (len(future), future.schema) == (12, X)
    assert (len(future[2:7]), len(future.select(["x"])), len(future.repeat(2))) == (5, 12, 24)
    assert len(future.split(5)) == 3
    # So are those of a call that is given one.
    second = group.sample(future[:5], 2)
    assert len(second) == 10
    unknown = group.undeclared(batch(2))
    with pytest.raises(RuntimeError, match=r"register\(rows=...\) declares it"):
        len(group.sample(unknown, 2))
    with pytest.raises(RuntimeError, match=r"register\(schema=...\) declares them"):
        assert unknown.schema
    group.open_door().result(TIMEOUT_S)
    assert len(second.result(TIMEOUT_S)) == 10
    assert unknown.result(TIMEOUT_S) == batch(2)
    assert unknown.schema == X


def test_what_is_not_as_declared_is_an_error_by_name(group: WorkerGroup) -> None:
    with pytest.raises(SchemaError, match=r"(?s)offering\.wrong_rows returned another .*8 rows, declared were 4"):
        group.wrong_rows(batch(4)).result(TIMEOUT_S)
    with pytest.raises(SchemaError, match=r"(?s)offering\.wrong_columns returned another .*'x' is missing"):
        group.wrong_columns(batch(4)).result(TIMEOUT_S)


def test_a_call_whose_rows_cannot_be_told_is_not_made(group: WorkerGroup) -> None:
    before = group.statistics().waiting
    with pytest.raises(ZeroDivisionError):
        group.wrong_declaration(batch(2))
    assert group.statistics().waiting == before


def test_deadlines_are_registered_and_overridden_per_call(group: WorkerGroup) -> None:
    with pytest.raises(DeadlineError, match=r"offering\.slow did not finish within 0\.05 s"):
        group.slow("for ever").result(TIMEOUT_S)
    patient = group.slow.options(deadline_s=TIMEOUT_S)
    assert patient("half a second").result(TIMEOUT_S) == ["half a second"] * 2
    assert group.write.options(blocking=True)("first") == [["first"]] * 2


def test_options_that_do_not_go_together_are_refused(group: WorkerGroup) -> None:
    for never in (0, math.nan):
        with pytest.raises(DispatchError, match="must be positive"):
            group.slow.options(deadline_s=never)
    with pytest.raises(DispatchError, match="does not return a batch"):
        register(dispatch_mode=Dispatch.ONE_TO_ALL, schema=X)(lambda self: None)


def test_a_group_counts_its_calls(make_group: Callable[..., WorkerGroup]) -> None:
    group = make_group(Offering, name="counted")
    group.ready().result(TIMEOUT_S)
    waits = group.undeclared(batch(4))
    behind = group.sample(waits, 1)
    group.write("counted").result(TIMEOUT_S)
    with pytest.raises(DeadlineError):
        group.slow("for ever").result(TIMEOUT_S)
    begun = GroupStatistics(
        done=1,
        failed=1,
        cancelled=0,
        waiting=1,
        running=1,
        outstanding=(1, 1),
        returned_bytes=0,
        deaths=0,
        restarts=0,
        dead=(),
    )
    assert counted(group, begun) == begun
    behind.cancel()
    group.open_door().result(TIMEOUT_S)
    waits.result(TIMEOUT_S)
    over = replace(begun, done=3, cancelled=1, waiting=0, running=0, outstanding=(0, 0), returned_bytes=32)
    assert counted(group, over) == over


def counted(group: WorkerGroup, expected: GroupStatistics) -> GroupStatistics:
    """What is counted once the threads that finish calls have come to counting: a result is told before that."""
    until = time.monotonic() + TIMEOUT_S
    while (found := group.statistics()) != expected and time.monotonic() < until:
        time.sleep(0.001)
    return found
