"""Generator methods: their items come as they are made, no faster than they are taken."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import pytest
import torch

from asyncrl.data import DataProto
from asyncrl.errors import CheckpointError, DispatchError
from asyncrl.single_controller import ClassWithInitArgs, Dispatch, Execute, Worker, WorkerGroup, register
from asyncrl.single_controller.local import LocalWorkerGroup
from asyncrl.single_controller.streams import AHEAD, StreamItem

TIMEOUT_S = 30.0


class Source(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.made = 0
        self.closed = asyncio.Event()
        self.closings = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def count(self, end: int) -> AsyncGenerator[int, None]:
        try:
            for number in range(end):
                self.made += 1
                yield number * 10 + self.rank
        finally:
            self.closings += 1
            self.closed.set()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def rows(self, batch: DataProto) -> Iterator[int]:
        assert batch.batch is not None
        for value in batch.batch["x"].tolist():
            self.made += 1
            yield value
        self.closings += 1

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def losses(self) -> AsyncGenerator[float, None]:
        yield 1.0
        yield 0.5

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    async def breaks(self) -> AsyncGenerator[str, None]:
        yield "first"
        raise CheckpointError("damaged")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def never(self) -> AsyncGenerator[int, None]:
        try:
            await asyncio.sleep(TIMEOUT_S)
            yield 1
        finally:
            self.closings += 1
            self.closed.set()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def after_closing(self) -> tuple[int, int]:
        await asyncio.wait_for(self.closed.wait(), TIMEOUT_S)
        return self.made, self.closings

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def progress(self) -> int:
        return self.made


@pytest.fixture(scope="module", autouse=True)
def by_value() -> None:
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def group(make_group: Callable[..., WorkerGroup]) -> WorkerGroup:
    return make_group(Source, name="source")


@pytest.fixture
def fresh(make_group: Callable[..., WorkerGroup]) -> Iterator[WorkerGroup]:
    group = make_group(Source, name="fresh")
    yield group
    group.shutdown()


def by_rank(items: list[StreamItem[Any]]) -> dict[int, list[Any]]:
    return {rank: [item.value for item in items if item.rank == rank] for rank in (0, 1)}


async def test_items_come_from_all_ranks_each_in_its_order(group: WorkerGroup) -> None:
    items = [item async for item in group.count(20)]
    assert by_rank(items) == {0: [number * 10 for number in range(20)], 1: [number * 10 + 1 for number in range(20)]}


def test_a_plain_generator_gets_its_rows_and_is_iterated_in_a_thread(group: WorkerGroup) -> None:
    data = DataProto.from_dict(tensors={"x": torch.arange(6)})
    with group.rows(data) as rows:
        assert by_rank(list(rows)) == {0: [0, 1, 2], 1: [3, 4, 5]}
    # Plain methods stand in line: the ones after a stream begin when it has ended.
    assert len(group.progress().result(TIMEOUT_S)) == 2


async def test_one_rank_gives_plain_values(group: WorkerGroup) -> None:
    async with group.losses() as losses:
        assert [loss async for loss in losses] == [1.0, 0.5]


async def test_what_came_before_an_error_is_given_first(group: WorkerGroup) -> None:
    stream = group.breaks()
    assert await anext(stream) == "first"
    with pytest.raises(CheckpointError, match="damaged") as caught:
        await anext(stream)
    assert caught.value.origin is not None
    assert (caught.value.origin.rank, caught.value.origin.method) == (0, "breaks")


async def test_a_generator_stands_still_until_its_items_are_taken_and_is_closed_when_its_consumer_leaves(
    fresh: WorkerGroup,
) -> None:
    async with fresh.count(10_000) as stream:
        first = await anext(stream)
        assert first.value in (0, 1)
        assert max(await fresh.progress()) <= 3 * AHEAD
    left = time.monotonic()
    done = await fresh.after_closing()
    assert time.monotonic() - left < TIMEOUT_S / 3
    for made, closings in done:
        assert closings == 1
        assert made <= 4 * AHEAD
    assert len(await fresh.progress()) == 2


async def test_leaving_a_generator_that_is_at_work_cancels_it(fresh: WorkerGroup) -> None:
    stream = fresh.never()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(stream), 0.2)
    await fresh.progress()
    stream.close()
    assert [closings for _, closings in await fresh.after_closing()] == [1, 1]
    # One that is dropped before anything came does not keep later calls waiting either.
    del stream
    fresh.never().close()
    assert len(await asyncio.wait_for(fresh.progress(), TIMEOUT_S)) == 2


async def test_a_stream_waits_for_futures_among_its_arguments() -> None:
    async with LocalWorkerGroup(ClassWithInitArgs(Echo), world_size=2, loop="current") as group:
        rows = group.rows(group.echo(DataProto.from_dict(tensors={"x": torch.arange(4)})))
        assert sorted([item.value async for item in rows]) == [0, 1, 2, 3]


def test_streams_have_no_deadline_and_no_retries() -> None:
    with pytest.raises(DispatchError, match="is a generator"):

        @register(dispatch_mode=Dispatch.ONE_TO_ALL, deadline_s=1.0)
        def items() -> Iterator[int]:
            yield 1


class Echo(Source):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def echo(self, batch: DataProto) -> DataProto:
        return batch
