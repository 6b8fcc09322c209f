"""Futures as values: operations, failures, deadlines and pickling."""

from __future__ import annotations

import asyncio
import concurrent.futures
import pickle
import threading
from collections.abc import Callable, Sequence

import pytest
import torch

from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.data.future import Future
from asyncrl.data.plan import Header, Plan
from asyncrl.errors import DeadlineError, SchemaError
from asyncrl.runtime import ControllerLoop

TIMEOUT_S = 10.0


def batch(count: int) -> DataProto:
    return DataProto.from_dict(tensors={"x": torch.arange(count)}, meta_info={"run": 1})


class Promise:
    """A future of a batch whose end is decided here."""

    def __init__(self) -> None:
        loop = ControllerLoop.default()
        self._event = asyncio.Event()
        self._loop = loop
        self._plan: Plan | None = None
        self._error: Exception | None = None
        self.future = DataProtoFuture(loop, "promise").run(self._wait, loop.owner)

    async def _wait(self) -> Plan:
        await self._event.wait()
        if self._error is not None:
            raise self._error
        assert self._plan is not None
        return self._plan

    def keep(self, data: DataProto) -> None:
        self._plan = Plan.of(data)
        self._loop.call(self._event.set)

    def break_with(self, error: Exception) -> None:
        self._error = error
        self._loop.call(self._event.set)


def test_parts_of_a_promise_are_kept_with_it() -> None:
    promise = Promise()
    part = promise.future.slice(1, 3).select(["x"])
    assert not part.done()
    assert repr(part) == "<DataProtoFuture promise[1:3].select: pending>"
    promise.keep(batch(4))
    assert part.result(TIMEOUT_S) == batch(4).slice(1, 3)
    assert part.done()
    assert len(part) == 2
    assert repr(part) == "<DataProtoFuture promise[1:3].select: 2 rows, 16 bytes (x)>"


def test_parts_of_a_broken_promise_break() -> None:
    promise = Promise()
    part = DataProtoFuture.concat([promise.future, batch(1)]).slice(0, 1)
    promise.break_with(SchemaError("no good"))
    with pytest.raises(SchemaError, match="no good"):
        part.result(TIMEOUT_S)
    assert isinstance(promise.future.exception(TIMEOUT_S), SchemaError)


def test_cancelling_a_part_leaves_the_whole() -> None:
    promise = Promise()
    part, other = promise.future.chunk(2)
    part.add_done_callback(lambda _: None)
    assert part.cancel()
    promise.keep(batch(2))
    assert other.result(TIMEOUT_S) == batch(2).slice(1, 2)
    with pytest.raises(concurrent.futures.CancelledError):
        part.result(TIMEOUT_S)


@pytest.mark.parametrize(
    ("operation", "error"),
    [
        (lambda f: f.chunk(2)[0], SchemaError),
        (lambda f: f.select(["y"]), SchemaError),
        (lambda f: f.select_idxs([3]), IndexError),
        (lambda f: f.union(batch(2)), SchemaError),
        (lambda f: DataProtoFuture.concat([f, DataProto.from_dict(tensors={"y": torch.zeros(1)})]), SchemaError),
    ],
)
def test_mistakes_are_errors_of_the_future(
    operation: Callable[[DataProtoFuture], DataProtoFuture], error: type[Exception]
) -> None:
    future = operation(DataProtoFuture.of(batch(3)))
    with pytest.raises(error):
        future.result(TIMEOUT_S)


@pytest.mark.parametrize(
    "operation", [lambda f: f.chunk(0), lambda f: f.split(0), lambda _: DataProtoFuture.concat([])]
)
def test_mistakes_that_need_no_rows_raise_at_once(operation: Callable[[DataProtoFuture], object]) -> None:
    with pytest.raises(SchemaError):
        operation(DataProtoFuture.of(batch(3)))


def test_splitting_before_the_rows_are_known_raises_with_a_remedy() -> None:
    promise = Promise()
    with pytest.raises(RuntimeError, match=r"number of parts of 2 rows in promise .* .* or use chunk"):
        promise.future.split(2)
    promise.keep(batch(3))
    promise.future.result(TIMEOUT_S)
    assert [len(part) for part in promise.future.split(2)] == [2, 1]


def test_popping_gives_two_futures_and_leaves_the_first_as_it_is() -> None:
    whole = DataProtoFuture.of(batch(2).with_columns(y=torch.zeros(2)))
    popped, rest = whole.pop(["y"], meta_info_keys=["run"])
    assert popped.result(TIMEOUT_S) == DataProto.from_dict(tensors={"y": torch.zeros(2)}, meta_info={"run": 1})
    assert rest.result(TIMEOUT_S) == DataProto.from_dict(tensors={"x": torch.arange(2)})
    assert whole.result(TIMEOUT_S).schema.names == ("x", "y")


def test_a_future_is_no_sequence() -> None:
    future = DataProtoFuture.of(batch(0))
    assert future
    assert future[0:1].result(TIMEOUT_S) == batch(0)
    with pytest.raises(TypeError, match="await"):
        next(iter(future))
    with pytest.raises(TypeError, match="single rows"):
        future[0]


def test_masks_and_tensors_select_rows() -> None:
    future = DataProtoFuture.of(batch(3))
    mask = [True, False, True]
    chosen = future.select_idxs(mask)
    mask[0] = False
    assert chosen.result(TIMEOUT_S) == batch(3).select_idxs([0, 2])
    assert future[torch.tensor([2, 2])].result(TIMEOUT_S) == batch(3).select_idxs([2, 2])


def test_finished_futures_pickle_and_others_raise() -> None:
    future = DataProtoFuture.of(batch(3)).slice(1, 3)
    assert pickle.loads(pickle.dumps(future)).result(TIMEOUT_S) == batch(3).slice(1, 3)
    promise = Promise()
    with pytest.raises(TypeError, match="pass it to a worker group's method"):
        pickle.dumps(promise.future)
    promise.future.cancel()


def test_a_callback_gets_the_future_whenever_it_comes() -> None:
    promise = Promise()
    early: concurrent.futures.Future[object] = concurrent.futures.Future()
    late: concurrent.futures.Future[object] = concurrent.futures.Future()
    part = promise.future.slice(0, 1)
    part.add_done_callback(early.set_result)
    promise.keep(batch(1))
    assert early.result(TIMEOUT_S) is part
    part.add_done_callback(late.set_result)
    assert late.result(TIMEOUT_S) is part


def test_a_deadline_that_is_met_changes_nothing() -> None:
    promise = Promise()
    future = promise.future.deadline(60.0)
    promise.keep(batch(1))
    assert future.result(TIMEOUT_S) == batch(1)


def test_a_part_may_have_a_deadline_of_its_own() -> None:
    promise = Promise()
    part = promise.future.slice(0, 1).deadline(0.01)
    with pytest.raises(DeadlineError, match=r"promise\[0:1\] did not finish within 0\.01 s"):
        part.result(TIMEOUT_S)
    assert not promise.future.done()
    promise.future.cancel()


async def test_a_future_is_awaited_in_many_loops_at_once() -> None:
    promise = Promise()
    results: list[int] = []

    def elsewhere() -> None:
        async def story() -> None:
            results.append(len(await promise.future))

        asyncio.run(story())

    threads = [threading.Thread(target=elsewhere) for _ in range(3)]
    for thread in threads:
        thread.start()
    promise.keep(batch(2))
    assert len(await promise.future) == 2
    await asyncio.to_thread(lambda: [thread.join(TIMEOUT_S) for thread in threads])
    assert results == [2, 2, 2]


class Counted:
    """A block that counts how often it is fetched."""

    def __init__(self, data: DataProto) -> None:
        self.data = data
        self.fetched = 0

    @classmethod
    async def fetch_all(cls, blocks: Sequence[Counted]) -> list[DataProto]:
        for block in blocks:
            block.fetched += 1
        await asyncio.sleep(0)
        return [block.data for block in blocks]


async def test_awaits_at_the_same_time_fetch_once() -> None:
    block = Counted(batch(2))
    future = DataProtoFuture.from_plan(Plan.shard(block, Header.of(batch(2))), "counted")
    readers = [asyncio.ensure_future(_read(future)) for _ in range(3)]
    await asyncio.sleep(0)
    readers[0].cancel()  # the one that fetches: the next one does
    assert await asyncio.gather(*readers[1:]) == [batch(2), batch(2)]
    assert block.fetched == 2


async def test_readers_of_a_future_share_its_tensors_and_those_of_one_derived_do_not() -> None:
    future = DataProtoFuture.of(batch(2))
    derived = future.slice(0, 1)
    first = await future
    for each in (first, await derived):
        assert each.batch is not None
        each.batch["x"].fill_(7)
        each.meta_info["mine"] = 1
    again, part = await future, await future.slice(0, 1)
    assert again.batch is not None
    assert again.batch["x"].tolist() == [7, 7]
    assert "mine" not in again.meta_info
    assert part == batch(1)


async def _read(future: DataProtoFuture) -> DataProto:
    return await future


async def test_reading_errors_again_does_not_lengthen_their_traceback() -> None:
    async def work() -> int:
        raise ValueError("once")

    loop = ControllerLoop.default()
    future: Future[int] = Future(loop, "work").run(work, loop.owner)
    depths: list[int] = []
    for _ in range(3):
        with pytest.raises(ValueError, match="once") as caught:
            await future
        depths.append(len(caught.traceback))
    assert len(set(depths)) == 1
