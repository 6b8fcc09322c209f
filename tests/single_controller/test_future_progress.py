"""Parts as ranks finish, what a future tells of itself, functions of rows, many futures, and memory."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import sys
import weakref
from collections.abc import Callable

import pytest
import torch

from asyncrl.data import DataProto, DataProtoFuture, as_completed, gather
from asyncrl.errors import SchemaError, UserCodeError, WorkerError
from asyncrl.single_controller import ClassWithInitArgs, Dispatch, Worker, WorkerGroup, register
from asyncrl.single_controller.local import LocalWorkerGroup

TIMEOUT_S = 30.0


class Doors(Worker):
    """Ranks wait until their door is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.doors: dict[str, asyncio.Event] = {}

    def door(self, name: str) -> asyncio.Event:
        return self.doors.setdefault(name, asyncio.Event())

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def copy(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def copy_after(self, batch: DataProto, name: str) -> DataProto:
        await self.door(name).wait()
        if name == "broken":
            raise ValueError("broken")
        batch.meta_info["weight_version"] = 7
        return batch

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    async def open(self, name: str) -> None:
        self.door(name).set()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    async def seen(self, batch: DataProto) -> list[int]:
        return numbers(batch)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def sizes(self, batches: list[DataProto]) -> list[int]:
        return [len(each) for each in batches]


@pytest.fixture(scope="module")
def doors(make_group: Callable[..., WorkerGroup]) -> WorkerGroup:
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    return make_group(Doors, name="doors")


def batch(count: int, start: int = 0) -> DataProto:
    return DataProto.from_dict(tensors={"x": torch.arange(start, start + count)})


def numbers(data: DataProto) -> list[int]:
    assert data.batch is not None
    return [int(each) for each in data.batch["x"]]


def plus_one(data: DataProto) -> DataProto:
    assert data.batch is not None
    data.batch["x"].add_(1)
    return data


# ---------------------------------------------------------------------------------------------------------------- rows


def test_parts_come_as_ranks_finish(doors: WorkerGroup) -> None:
    async def story() -> None:
        future = doors.copy_after(batch(5), "parts")
        seen: list[tuple[range, list[int]]] = []
        doors.open(["", "parts"])
        async with contextlib.aclosing(future.then(plus_one).rows()) as parts:
            async for part in parts:
                seen.append((part.rows, numbers(await part.batch)))
                if len(seen) == 1:
                    assert not future.done()
                    doors.open(["parts", ""])
        # Rank 1 had three rows, the last one padding.
        assert seen == [(range(3, 5), [4, 5]), (range(3), [1, 2, 3])]
        assert numbers(await future) == [0, 1, 2, 3, 4]
        # They come again, for whoever asks later.
        assert [part.rows async for part in future.rows()] == [range(3, 5), range(3)]
        # What cuts rows is one part.
        assert [part.rows async for part in future.slice(1, 4).rows()] == [range(3)]

    asyncio.run(story())


def test_a_call_that_fails_raises_for_who_waits_for_its_parts(doors: WorkerGroup) -> None:
    async def story() -> None:
        future = doors.copy_after(batch(2), "broken")
        doors.open(["broken", "broken"])
        with pytest.raises(WorkerError, match="broken"):
            await anext(future.rows())

    asyncio.run(story())


def test_leaving_the_parts_early_leaves_the_call_going(doors: WorkerGroup) -> None:
    async def story() -> None:
        future = doors.copy_after(batch(2), "early")
        doors.open(["early", ""])
        async with contextlib.aclosing(future.rows()) as parts:
            async for part in parts:
                assert part.rows == range(1)
                break
        assert not future.done()
        doors.open(["", "early"])
        assert len(await future) == 2

    asyncio.run(story())


# ---------------------------------------------------------------------------------------------------------------- then


def test_a_function_of_rows_is_applied_by_the_ranks(doors: WorkerGroup) -> None:
    future = doors.copy(batch(5))
    moved = future.then(plus_one).then(plus_one)
    assert doors.seen(moved).result(TIMEOUT_S) == [[2, 3, 4], [5, 6, 6]]
    assert numbers(moved.slice(1, 3).result(TIMEOUT_S)) == [3, 4]
    # It wrote into batches of its own.
    assert numbers(future.result(TIMEOUT_S)) == [0, 1, 2, 3, 4]


def test_a_function_of_rows_that_fails_is_named(doors: WorkerGroup) -> None:
    def fails_for_three(data: DataProto) -> DataProto:
        if 3 in numbers(data):
            raise KeyError("three")
        return data

    future = doors.copy(batch(4)).then(fails_for_three)
    message = r"fails_for_three, given to then\(\) of doors.copy, raised KeyError for 2 rows: 'three'"
    with pytest.raises(UserCodeError, match=message):
        doors.seen(future).result(TIMEOUT_S)
    assert numbers(future.slice(0, 3).result(TIMEOUT_S)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda data: data.slice(0, 1), SchemaError, "returned 1 for 2"),
        (lambda data: None, UserCodeError, "must return a DataProto, and returned NoneType for no rows"),
        (lambda data: data.with_columns(**{f"y{len(data)}": torch.zeros(len(data))}), SchemaError, "other columns"),
        (lambda data: DataProto(data.batch, meta_info={"rows": len(data)}), SchemaError, "other meta_info"),
    ],
)
def test_what_is_no_function_of_rows_is_refused(
    function: Callable[[DataProto], DataProto], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        DataProtoFuture.of(batch(2)).then(function).result(TIMEOUT_S)


# -------------------------------------------------------------------------------------------------- several at once


def test_all_values_in_order(doors: WorkerGroup) -> None:
    first, second = doors.copy(batch(2)), doors.seen(batch(2))
    together = gather(first, second)
    assert together.result(TIMEOUT_S) == [batch(2), [[0], [1]]]
    assert gather().result(TIMEOUT_S) == []
    # As an argument it is the list of its batches, which go from worker to worker.
    assert doors.sizes(gather(first, first.slice(0, 1))).result(TIMEOUT_S) == [[2, 1]] * 2


def test_one_that_fails_fails_all_and_stops_none(doors: WorkerGroup) -> None:
    waiting = doors.copy_after(batch(2), "gathered")
    broken = DataProtoFuture.of(batch(1)).select(["y"])
    with pytest.raises(SchemaError, match="'y'"):
        gather(waiting, broken).result(TIMEOUT_S)
    together = gather(waiting)
    assert together.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        together.result(TIMEOUT_S)
    doors.open(["gathered", "gathered"])
    assert len(waiting.result(TIMEOUT_S)) == 2


def test_each_as_it_finishes(doors: WorkerGroup) -> None:
    async def story() -> None:
        late, broken = doors.copy_after(batch(2), "late"), DataProtoFuture.of(batch(1)).select(["y"])
        order = []
        async for future in as_completed([late, broken, doors.copy(batch(1))]):
            order.append(future)
            if len(order) == 2:
                assert not late.done()
                doors.open(["late", "late"])
        assert order[2] is late
        assert isinstance(broken.exception(), SchemaError)

    asyncio.run(story())


async def test_leaving_the_completed_early_leaves_nothing_behind() -> None:
    with LocalWorkerGroup(ClassWithInitArgs(Doors), name="doors") as doors:
        never = doors.copy_after(batch(1), "never")
        futures = [never, DataProtoFuture.of(batch(1))]
        held = weakref.ref(futures[1])
        iterator = as_completed(futures)
        assert await anext(iterator) is futures[1]
        await iterator.aclose()
        del futures, iterator
        gc.collect()
        assert held() is None
        assert never.cancel()


# ------------------------------------------------------------------------------------------------------------- explain


def test_a_future_explains_where_it_is(doors: WorkerGroup) -> None:
    first = doors.copy_after(batch(3), "explained")
    second = doors.copy(first.slice(0, 2))
    third = second.select(["x"])
    lines = third.explain().splitlines()
    assert lines[0].startswith("doors.copy.select: pending for ")
    assert lines[1].startswith("└─ from doors.copy: pending for ")
    assert lines[2].startswith("   └─ from doors.copy_after[0:2]: pending for ")
    assert lines[3].startswith("      └─ from doors.copy_after: pending for ")
    doors.open(["explained", "explained"])
    assert len(third.result(TIMEOUT_S)) == 2
    text = first.explain()
    assert text.startswith("doors.copy_after: 3 rows, 24 B, weight version 7\n├─ rank 0: done after ")
    assert "s, given rows 0:2, gave 2 rows, 16 B, weight version 7\n└─ rank 1: done after " in text
    del first
    gc.collect()
    assert "from doors.copy_after[0:2]: no longer referenced" in second.explain()


def test_what_a_future_shows_in_a_notebook_is_escaped() -> None:
    whole = DataProtoFuture.from_plan(DataProtoFuture.of(batch(1)).outcome.get(), "<b>label</b>")
    part = whole.slice(0, 1)
    assert part.done()
    label = "&lt;b&gt;label&lt;/b&gt;"
    assert part._repr_html_() == f"<pre>{label}[0:1]: 1 row, 8 B\n└─ from {label}: 1 row, 8 B</pre>"


# -------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.slow
async def test_ten_thousand_calls_leave_nothing_behind() -> None:
    doors = LocalWorkerGroup(ClassWithInitArgs(Doors), loop="current")
    data = batch(1)
    counts = []
    held: list[weakref.ref[DataProtoFuture]] = []
    last = doors.copy(data)
    for number in range(10_001):
        # Every call takes what the one before returned: the past must not hang on the present.
        last = doors.copy(last[0:1])
        if number % 100 == 0:
            held.append(weakref.ref(last))
            await last.plan()
        if number % 5_000 == 0:
            gc.collect()
            counts.append(len(gc.get_objects()))
    assert counts[2] - counts[1] < 500
    assert [each() for each in held[:-1]] == [None] * (len(held) - 1)
    assert await last == data
    await doors.aclose()


def test_ten_thousand_operations_need_no_depth_of_stack() -> None:
    future = DataProtoFuture.of(batch(3))
    for _ in range(10_000):
        future = future.slice(0, 3)
    assert future.done()
    assert future.result(TIMEOUT_S) == batch(3)
    assert len(repr(future)) < 400
