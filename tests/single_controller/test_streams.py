"""Generator methods: their items come as they are made, no faster than they are taken."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import pytest
import torch

from asyncrl.data import DataProto
from asyncrl.errors import CheckpointError, DispatchError, WorkerDiedError, WorkerError
from asyncrl.single_controller import ClassWithInitArgs, Dispatch, Execute, Worker, WorkerGroup, register
from asyncrl.single_controller.local import LocalWorkerGroup
from asyncrl.single_controller.restart import Restart
from asyncrl.single_controller.streams import PREFETCH, Stream, StreamItem

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

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def ends_with(self, error: BaseException) -> AsyncGenerator[str, None]:
        yield "first"
        raise error

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def for_ever(self) -> str:
        await asyncio.sleep(TIMEOUT_S)
        return "over"

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def letters(self, word: str) -> AsyncGenerator[str, None]:
        for letter in word:
            yield letter

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


class FailsTwice(Worker):
    """Rank 0 fails while rank 1 is paused, and the cleanup of rank 1 fails too."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def numbers(self) -> AsyncGenerator[int, None]:
        try:
            if self.rank == 0:
                raise ValueError("the first error")
            while True:
                yield 1
        finally:
            if self.rank == 1:
                raise KeyError("the second error")


async def test_an_error_while_a_stream_is_closed_does_not_hide_the_first() -> None:
    async with LocalWorkerGroup(ClassWithInitArgs(FailsTwice), world_size=2, loop="current") as group:
        numbers = group.numbers()
        with pytest.raises(WorkerError, match="ValueError on rank 0: the first error"):
            [item async for item in numbers]


async def test_one_rank_gives_plain_values(group: WorkerGroup) -> None:
    async with group.losses() as losses:
        assert [loss async for loss in losses] == [1.0, 0.5]


class Unsendable:
    """An argument that cannot be pickled, for a reason of its own; nor is it a word."""

    def __reduce__(self) -> Any:
        raise RuntimeError("it does not travel")


async def test_an_argument_that_cannot_be_sent_holds_up_no_later_call(group: WorkerGroup) -> None:
    with pytest.raises((RuntimeError, WorkerError)):
        await anext(group.letters(Unsendable()))
    assert await asyncio.wait_for(anext(group.letters("ab")), TIMEOUT_S) == "a"


async def test_what_came_before_an_error_is_given_first(group: WorkerGroup) -> None:
    stream = group.breaks()
    assert await anext(stream) == "first"
    with pytest.raises(CheckpointError, match="damaged") as caught:
        await anext(stream)
    assert caught.value.origin is not None
    assert (caught.value.origin.rank, caught.value.origin.method) == (0, "breaks")


async def test_a_generator_that_cancels_itself_has_failed(group: WorkerGroup) -> None:
    stream = group.ends_with(asyncio.CancelledError())
    assert await anext(stream) == "first"
    with pytest.raises(WorkerError, match=r"source\.ends_with was cancelled by its own code on rank 0"):
        await anext(stream)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=["exit", "interrupt"])
def test_leaving_the_program_ends_the_stream_only(group: WorkerGroup, error: BaseException) -> None:
    stream = group.ends_with(error)
    assert next(stream) == "first"
    with pytest.raises(WorkerError, match="the method raised"):
        next(stream)
    assert list(group.letters("ab")) == ["a", "b"]


def test_a_stream_whose_argument_is_cancelled_is_cancelled(group: WorkerGroup) -> None:
    argument = group.for_ever()
    streams = [group.letters(argument) for _ in range(2)]
    argument.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        list(streams[0])
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(anext(streams[1]))


async def test_a_stream_that_its_consumer_has_left_is_over(group: WorkerGroup) -> None:
    stream = group.count(1000)
    await anext(stream)
    stream.close()
    assert list(stream) == [item async for item in stream] == []


async def test_a_generator_stands_still_until_its_items_are_taken_and_is_closed_when_its_consumer_leaves(
    fresh: WorkerGroup,
) -> None:
    async with fresh.count(10_000) as stream:
        first = await anext(stream)
        assert first.value in (0, 1)
        assert max(await fresh.progress()) <= 3 * PREFETCH
    left = time.monotonic()
    done = await fresh.after_closing()
    assert time.monotonic() - left < TIMEOUT_S / 3
    for made, closings in done:
        assert closings == 1
        assert made <= 4 * PREFETCH
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


def test_a_stream_whose_loop_has_ended_does_not_hang() -> None:
    async def unfinished() -> tuple[LocalWorkerGroup, Stream[Any]]:
        group = LocalWorkerGroup(ClassWithInitArgs(Source), loop="current")
        await group.ready()
        return group, group.never()

    loop = asyncio.new_event_loop()
    group, stream = loop.run_until_complete(unfinished())
    with pytest.raises(RuntimeError, match="its event loop has ended"):
        next(stream)
    with pytest.raises(RuntimeError, match="its event loop has ended"):
        asyncio.run(anext(stream))
    loop.run_until_complete(group.aclose())
    loop.close()


@pytest.mark.parametrize("method", ["never", "stuck"])
async def test_the_streams_of_a_killed_worker_fail_as_its_calls_do(method: str) -> None:
    async with LocalWorkerGroup(ClassWithInitArgs(Echo), world_size=2, name="mortal") as group:
        stream = getattr(group, method)()
        waiting = asyncio.ensure_future(anext(stream))
        await group.begun()
        group.kill(1)
        with pytest.raises(WorkerDiedError, match=f"the worker of rank 1 of mortal was killed during {method}"):
            await asyncio.wait_for(waiting, 5.0)
        with pytest.raises(WorkerDiedError, match="killed during count"):
            await asyncio.wait_for(anext(group.count(0)), 5.0)


async def test_what_came_before_a_death_is_given_first() -> None:
    async with LocalWorkerGroup(ClassWithInitArgs(Source), loop="current") as group:
        stream = group.count(PREFETCH + 1)
        assert (await anext(stream)).value == 0
        await group.progress()
        group.kill(0)
        await asyncio.sleep(0)
        assert [(await anext(stream)).value for _ in range(PREFETCH)] == [
            10 * number for number in range(1, PREFETCH + 1)
        ]
        with pytest.raises(WorkerDiedError):
            await asyncio.wait_for(anext(stream), 5.0)


async def test_a_restart_ends_the_streams_of_all_workers_that_it_makes_again() -> None:
    restart = Restart(backoff_s=0.0)
    async with LocalWorkerGroup(ClassWithInitArgs(Source), world_size=2, restart=restart) as group:
        stream = group.never()
        await group.progress()
        group.kill(0)
        with pytest.raises(WorkerDiedError):
            await asyncio.wait_for(anext(stream), 5.0)
        assert sorted([item.value async for item in group.count(1)]) == [0, 1]


async def test_a_stream_is_left_at_any_moment_and_keeps_no_later_call_waiting() -> None:
    async with LocalWorkerGroup(ClassWithInitArgs(Source), loop="current") as group:
        for steps in range(12):
            stream = group.never()
            for _ in range(steps):
                await asyncio.sleep(0)
            stream.close()
            assert await asyncio.wait_for(group.progress(), 5.0) == [0]


def test_streams_have_no_deadline_and_no_retries() -> None:
    with pytest.raises(DispatchError, match="is a generator"):

        @register(dispatch_mode=Dispatch.ONE_TO_ALL, deadline_s=1.0)
        def items() -> Iterator[int]:
            yield 1


class Echo(Source):
    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stuck(self) -> Iterator[int]:
        self.gate.wait(1.0)
        yield 1

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def begun(self) -> None:
        await asyncio.sleep(0.05)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def echo(self, batch: DataProto) -> DataProto:
        return batch


async def test_a_stream_that_one_rank_cannot_open_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async with LocalWorkerGroup(ClassWithInitArgs(Source), world_size=2, loop="current") as group:
        open_stream = group._open_stream

        def fails(rank: int, call: Any, sequence: int) -> Any:
            if rank == 1:
                raise DispatchError("an argument cannot be pickled")
            return open_stream(rank, call, sequence)

        monkeypatch.setattr(group, "_open_stream", fails)
        with pytest.raises(DispatchError, match="cannot be pickled"):
            async for _ in group.count(3):
                pass
        assert not group._streams
        monkeypatch.undo()
        assert len([item async for item in group.count(3)]) == 6, "the workers do not wait for the call before"
