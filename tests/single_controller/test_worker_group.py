"""What a worker group promises, on both backends."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import inspect
import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.data.plan import Header
from asyncrl.errors import CheckpointError, DeadlineError, DispatchError, InfrastructureError, SchemaError, WorkerError
from asyncrl.single_controller import Dispatch, Execute, Worker, WorkerGroup, register

TIMEOUT_S = 30.0


def by_rank(group: Any, value: int) -> tuple[list[Any], dict[str, Any]]:
    return [[value * 10 + rank for rank in range(group.world_size)]], {}


def joined(group: Any, output: list[Any]) -> str:
    return f"{group.world_size} ranks: {output}"


class Bench(Worker):
    """Does a little of everything."""

    def __init__(self, scale: int = 1) -> None:
        super().__init__()
        self.scale = scale
        self.journal: list[str] = []
        self.gate = threading.Event()
        self.doors: dict[str, asyncio.Event] = {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double(self, batch: DataProto, times: int = 2) -> DataProto:
        """Multiply column x.

        By two, unless told otherwise.
        """
        assert batch.batch is not None
        return DataProto.from_dict(tensors={"x": batch.batch["x"] * times}, meta_info={"source": "double"})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def echo(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def trained(self, batch: DataProto) -> DataProto:
        """Writes into its batch, and takes gradients through it."""
        assert batch.batch is not None
        x = batch.batch["x"].add_(1).float()
        weight = torch.ones(1, requires_grad=True)
        (weight * x).sum().backward()
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, read_only=True)
    def only_read(self, batch: DataProto) -> DataProto:
        assert batch.batch is not None
        return DataProto.from_dict(tensors={"x": batch.batch["x"] + 1})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def sample(self, batch: DataProto, n: int) -> DataProto:
        return batch.repeat(n)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def first_row(self, batch: DataProto) -> DataProto:
        return batch.slice(0, 1)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, pad=False)
    def unpadded(self, batch: DataProto) -> DataProto:
        return batch.slice(0, 1)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def nothing(self, batch: DataProto) -> None:
        pass

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def nested(self, tree: dict[str, Any], number: int, *, names: list[str]) -> DataProto:
        left, right = tree["left"], tree["others"][0]
        return DataProto.from_dict(
            tensors={"sum": left.batch["x"] + right.batch["x"] + number},
            non_tensors={"name": [",".join(names)] * len(left)},
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def rows(self, batch: DataProto) -> list[int]:
        assert batch.batch is not None
        return batch.batch["x"].tolist()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor], batch: DataProto) -> DataProto:
        assert batch.batch is not None
        return DataProto.from_dict(tensors={"x": function(batch.batch["x"])})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def ranks(self) -> tuple[int, int, str]:
        return self.rank, self.world_size, self.group_name

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    async def rank_zero(self, value: Any = None) -> tuple[int, Any]:
        return self.rank, value

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def make_rows(self, count: int) -> DataProto:
        return DataProto.from_dict(tensors={"x": torch.arange(count)})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def total(self, batch: DataProto, weight: np.ndarray[Any, Any]) -> float:
        assert batch.batch is not None
        return float(batch.batch["x"].sum()) + float(weight.sum())

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def mine(self, value: int) -> int:
        return value * 100 + self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def plus(self, value: int) -> int:
        return value + 1

    @register(dispatch_mode={"dispatch_fn": by_rank, "collect_fn": joined})
    def custom(self, value: int) -> int:
        return value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=True)
    def blocking(self) -> int:
        return self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC, materialize_futures=False)
    async def lazily(self, batch: DataProtoFuture) -> tuple[str, int, int]:
        header = await batch.header()
        first = await batch.slice(0, 1)
        assert first.batch is not None
        return type(batch).__name__, header.rows, int(first.batch["x"][0])

    # ------------------------------------------------------------------------------------------- order and cancelling

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def write(self, text: str) -> None:
        self.journal.append(text)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def read(self) -> list[str]:
        return list(self.journal)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wait_at_gate(self) -> str:
        assert self.gate.wait(TIMEOUT_S)
        self.gate.clear()
        return "through"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def open_gate(self) -> None:
        self.gate.set()

    def door(self, name: str) -> asyncio.Event:
        return self.doors.setdefault(name, asyncio.Event())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def wait_for(self, name: str) -> str:
        self.door(f"{name} entered").set()
        try:
            await self.door(name).wait()
        except asyncio.CancelledError:
            self.door(f"{name} cancelled").set()
            raise
        return name

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def open(self, name: str) -> None:
        self.door(name).set()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def echo_after(self, batch: DataProto, name: str) -> DataProto:
        await self.door(name).wait()
        return batch

    # --------------------------------------------------------------------------------------------------------- failing

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self, ranks: list[int]) -> int:
        if self.rank in ranks:
            raise KeyError(f"no such thing on {self.rank}")
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def fail_on_one(self) -> str:
        if self.rank == 1:
            raise CheckpointError("damaged")
        return await self.wait_for("never")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def fail_batch(self, batch: DataProto) -> DataProto:
        raise ValueError("this batch")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def leave(self) -> None:
        sys.exit(3)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_strangely(self) -> None:
        class Unpicklable(Exception):
            def __reduce__(self) -> Any:
                raise TypeError("not this one")

        raise Unpicklable("strange")


@pytest.fixture(scope="module", autouse=True)
def by_value() -> None:
    """Let Ray's workers get the classes of this module by value: they cannot import it."""
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def group(make_group: Callable[..., WorkerGroup]) -> WorkerGroup:
    return make_group(Bench, name="bench")


@pytest.fixture(scope="module")
def other(make_group: Callable[..., WorkerGroup]) -> WorkerGroup:
    return make_group(Bench, 5, world_size=1, name="other")


def batch(count: int, start: int = 0) -> DataProto:
    return DataProto.from_dict(tensors={"x": torch.arange(start, start + count)})


def column(data: DataProto, name: str = "x") -> list[int]:
    assert data.batch is not None
    return data.batch[name].tolist()


# ----------------------------------------------------------------------------------------------------- calls and modes


def test_every_rank_knows_its_place(group: WorkerGroup) -> None:
    assert group.ranks().result(TIMEOUT_S) == [(0, 2, "bench"), (1, 2, "bench")]


def test_rows_are_split_and_joined(group: WorkerGroup) -> None:
    future = group.double(batch(4), times=3)
    assert isinstance(future, DataProtoFuture)
    result = future.result(TIMEOUT_S)
    assert column(result) == [0, 3, 6, 9]
    assert result.meta_info == {"source": "double"}


def test_padding_is_taken_off_and_the_batch_not_changed(group: WorkerGroup) -> None:
    data = batch(5)
    assert column(group.double(data).result(TIMEOUT_S)) == [0, 2, 4, 6, 8]
    assert data == batch(5)
    # Ranks get three rows each; the second repeats its last one.
    assert group.rows(data).result(TIMEOUT_S) == [[0, 1, 2], [3, 4, 4]]


def test_padding_is_taken_off_where_every_row_gives_several(group: WorkerGroup) -> None:
    assert column(group.sample(batch(3), 2).result(TIMEOUT_S)) == [0, 0, 1, 1, 2, 2]


def test_fewer_rows_than_ranks(group: WorkerGroup) -> None:
    assert column(group.echo(batch(1, start=7)).result(TIMEOUT_S)) == [7]
    assert column(group.echo(batch(0)).result(TIMEOUT_S)) == []


def test_padding_that_cannot_be_taken_off_is_an_error(group: WorkerGroup) -> None:
    with pytest.raises(DispatchError, match="got 2 rows of which 1 were padding, and returned 1"):
        group.first_row(batch(3)).result(TIMEOUT_S)
    assert column(group.unpadded(batch(3)).result(TIMEOUT_S)) == [0, 2]


def test_arguments_may_be_trees_and_scalars(group: WorkerGroup) -> None:
    tree = {"left": batch(3), "others": [group.echo(batch(3, start=10))]}
    result = group.nested(tree, 100, names=["a", "b"]).result(TIMEOUT_S)
    assert column(result, "sum") == [110, 112, 114]
    assert result.non_tensor_batch["name"].tolist() == ["a,b"] * 3


def test_batches_of_one_call_need_equally_many_rows(group: WorkerGroup) -> None:
    tree = {"left": batch(3), "others": [group.echo(batch(4))]}
    with pytest.raises(DispatchError, match="got 3 and 4"):
        group.nested(tree, 0, names=[]).result(TIMEOUT_S)


def test_a_function_goes_to_every_rank(group: WorkerGroup) -> None:
    assert column(group.mapped(lambda x: x + 1, batch(3)).result(TIMEOUT_S)) == [1, 2, 3]
    with pytest.raises(DispatchError, match="needs a function"):
        group.mapped(3, batch(3))


def test_one_to_all_copies_batches_and_arrays(group: WorkerGroup) -> None:
    large = np.ones(50_000)
    assert group.total(batch(4), large).result(TIMEOUT_S) == [50_006.0, 50_006.0]
    assert group.total(group.echo(batch(5)), large).result(TIMEOUT_S) == [50_010.0, 50_010.0]


def test_one_rank_gives_one_value(group: WorkerGroup) -> None:
    assert group.rank_zero("value").result(TIMEOUT_S) == (0, "value")
    rows = group.make_rows(3)
    assert isinstance(rows, DataProtoFuture)
    assert column(rows.result(TIMEOUT_S)) == [0, 1, 2]


def test_lists_give_every_rank_its_own(group: WorkerGroup) -> None:
    assert group.mine([1, 2]).result(TIMEOUT_S) == [100, 201]
    assert group.plus([1, 2]).result(TIMEOUT_S) == [2, 3]
    with pytest.raises(DispatchError, match=r"argument 0 must be a list .* each of the 2 ranks, got 3 entries"):
        group.plus([1, 2, 3])


def test_functions_of_ones_own_split_and_collect(group: WorkerGroup) -> None:
    assert group.custom(4).result(TIMEOUT_S) == "2 ranks: [40, 41]"


def test_values_of_other_calls_are_arguments_too(group: WorkerGroup) -> None:
    assert group.rank_zero({"ranks": group.plus([1, 2])}).result(TIMEOUT_S) == (0, {"ranks": [2, 3]})


def test_any_method_may_be_called_by_name(group: WorkerGroup) -> None:
    assert group.execute_all_sync("read") == group.read().result(TIMEOUT_S)
    assert group.execute_rank_zero_sync("rank_zero", 1) == (0, 1)


def test_blocking_by_registration_and_by_call(group: WorkerGroup) -> None:
    assert group.blocking() == [0, 1]
    assert group.blocking(blocking=False).result(TIMEOUT_S) == [0, 1]
    assert group.ranks(blocking=True)[1][0] == 1


def test_the_group_shows_the_methods_of_its_workers(group: WorkerGroup) -> None:
    assert inspect.getdoc(group.double) == inspect.getdoc(Bench.double)
    assert list(inspect.signature(group.double).parameters) == ["batch", "times"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'time'"):
        group.double(batch(2), time=3)


def test_a_method_that_joins_batches_must_return_them(group: WorkerGroup) -> None:
    with pytest.raises(DispatchError, match="returned NoneType on rank 0"):
        group.nothing(batch(2)).result(TIMEOUT_S)


def test_a_method_may_take_the_future_instead(group: WorkerGroup) -> None:
    assert group.lazily(group.double(batch(4))).result(TIMEOUT_S) == [
        ("DataProtoFuture", 2, 0),
        ("DataProtoFuture", 2, 4),
    ]


# ------------------------------------------------------------------------------------------------------------- futures


def test_a_header_tells_rows_columns_and_meta_info(group: WorkerGroup) -> None:
    async def story() -> Header:
        future = group.double(batch(5))
        assert await future.meta_info() == {"source": "double"}
        return await future.header()

    header = asyncio.run(story())
    assert (header.rows, header.schema.names, header.size_bytes) == (5, ("x",), 40)


def test_a_future_goes_from_group_to_group(group: WorkerGroup, other: WorkerGroup) -> None:
    backoff = group.double(batch(5))
    both = DataProtoFuture.concat([backoff.slice(3, 5), backoff.slice(0, 2), batch(1, start=50)])
    assert column(other.double(both.select(meta_info_keys=[]), times=10).result(TIMEOUT_S)) == [60, 80, 0, 20, 500]


def test_operations_return_before_the_rows_are_there(group: WorkerGroup) -> None:
    future = group.echo_after(batch(6), "operations")
    first, second, third = future.chunk(3)
    swapped = DataProtoFuture.concat([third, first]).select_idxs([3, 0])
    assert not any(each.done() for each in (future, first, swapped))
    with pytest.raises(RuntimeError, match="not known yet"):
        len(future)
    assert "pending" in repr(swapped)
    group.open("operations").result(TIMEOUT_S)
    assert column(swapped.result(TIMEOUT_S)) == [1, 4]
    assert second.done()
    assert (len(second), len(future.split(4))) == (2, 2)
    assert "2 rows" in repr(second)


operations = st.lists(
    st.one_of(
        st.tuples(st.just("slice"), st.integers(-7, 7), st.integers(-7, 7)),
        st.tuples(st.just("select_idxs"), st.lists(st.integers(-2, 1), max_size=5)),
        st.tuples(st.just("chunk"), st.integers(1, 3)),
        st.tuples(st.just("select"), st.sampled_from([["x"], ["missing"]])),
        st.tuples(st.just("concat")),
        st.tuples(st.just("union")),
    ),
    max_size=4,
)


def applied(value: Any, operation: tuple[Any, ...]) -> Any:
    name, *arguments = operation
    if name == "concat":
        return type(value).concat([value, value])
    if name == "union":
        return value.select().union(value.select())
    result = getattr(value, name)(*arguments)
    return result[-1] if name == "chunk" else result


@settings(max_examples=15, deadline=None)
@given(rows=st.integers(0, 5), chosen=operations)
def test_law_operations_on_the_future_are_those_on_the_result(
    group: WorkerGroup, rows: int, chosen: list[tuple[Any, ...]]
) -> None:
    future, result = group.double(batch(rows)), group.double(batch(rows)).result(TIMEOUT_S)
    for operation in chosen:
        future = applied(future, operation)
        try:
            result = applied(result, operation)
        except (SchemaError, IndexError) as error:
            with pytest.raises(type(error)):
                future.result(TIMEOUT_S)
            return
    assert future.result(TIMEOUT_S) == result


def test_results_belong_to_their_reader(group: WorkerGroup) -> None:
    future = group.double(batch(2))
    mine = future.result(TIMEOUT_S)
    mine.pop(["x"])
    mine.meta_info["changed"] = True
    assert future.result(TIMEOUT_S) == DataProto.from_dict(
        tensors={"x": torch.tensor([0, 2])}, meta_info={"source": "double"}
    )


def test_workers_may_write_into_what_they_get(group: WorkerGroup, other: WorkerGroup) -> None:
    data = DataProto.from_dict(tensors={"x": torch.zeros(2, 100_000)})
    source = group.echo(data)
    first, second = other.trained(source), group.trained(source)
    third = other.trained(data)
    data.batch["x"].fill_(7)  # type: ignore[union-attr]
    mine = source.result(TIMEOUT_S)
    mine.batch["x"].fill_(8)  # type: ignore[union-attr]
    for future in (first, second, third, other.only_read(source)):
        result = future.result(TIMEOUT_S)
        assert result.batch is not None
        assert bool((result.batch["x"] == 1).all())


async def test_a_future_can_be_awaited_again_and_together(group: WorkerGroup) -> None:
    future = group.double(batch(2))
    first, second, ranks = await asyncio.gather(future, future, group.ranks())
    assert first == second == await future
    assert len(ranks) == 2


def test_a_future_can_be_awaited_on_uvloop(group: WorkerGroup) -> None:
    async def story() -> list[int]:
        return column(await group.double(group.double(batch(3))))

    assert uvloop.run(story()) == [0, 4, 8]


async def test_result_inside_a_running_loop_is_only_blocking(group: WorkerGroup) -> None:
    assert column(group.double(batch(2)).result(TIMEOUT_S)) == [0, 2]


async def test_leaving_an_await_leaves_the_call_going(group: WorkerGroup) -> None:
    future = group.wait_for("left")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await future
    await group.open("left")
    assert await future == ["left", "left"]


def test_result_on_the_controller_loop_says_what_to_do(group: WorkerGroup) -> None:
    future = group.wait_for("controller")
    answer: concurrent.futures.Future[BaseException | None] = concurrent.futures.Future()

    def on_loop(_: object) -> None:
        try:
            future.result()
        except RuntimeError as error:
            answer.set_result(error)

    group.ranks().add_done_callback(on_loop)
    assert "use `await future` there" in str(answer.result(TIMEOUT_S))
    group.open("controller").result(TIMEOUT_S)
    assert future.result(TIMEOUT_S) == ["controller"] * 2


def test_a_result_that_takes_too_long_leaves_the_call_going(group: WorkerGroup) -> None:
    future = group.wait_for("slow")
    with pytest.raises(DeadlineError, match="the call continues") as caught:
        future.result(timeout=0.01)
    assert caught.value.waiting_for == "bench.wait_for"
    group.open("slow").result(TIMEOUT_S)
    assert future.result(TIMEOUT_S) == ["slow", "slow"]


def test_a_deadline_ends_the_call(group: WorkerGroup) -> None:
    future = group.wait_for("deadline").deadline(0.05)
    with pytest.raises(DeadlineError, match=r"bench\.wait_for did not finish within 0\.05 s"):
        future.result(TIMEOUT_S)
    # The coroutines in the workers were cancelled.
    group.wait_for("deadline cancelled").result(TIMEOUT_S)


# ------------------------------------------------------------------------------------------- order and concurrency


def test_plain_calls_run_in_the_order_of_the_program(group: WorkerGroup) -> None:
    for number in range(20):
        group.write(f"order {number}")
    group.write("last").result(TIMEOUT_S)
    for journal in group.read().result(TIMEOUT_S):
        written = [text for text in journal if text.startswith("order")]
        assert written == [f"order {number}" for number in range(20)]


def test_a_call_that_waits_for_a_future_lets_others_pass(group: WorkerGroup, other: WorkerGroup) -> None:
    waiting = group.rows(other.echo_after(batch(2), "pass"))
    assert group.plus([1, 1]).result(TIMEOUT_S) == [2, 2]
    assert not waiting.done()
    other.open("pass").result(TIMEOUT_S)
    assert waiting.result(TIMEOUT_S) == [[0], [1]]


def test_async_calls_run_while_a_plain_one_does(group: WorkerGroup) -> None:
    standing = group.wait_at_gate()
    assert len(group.ranks().result(TIMEOUT_S)) == 2
    assert not standing.done()
    group.open_gate().result(TIMEOUT_S)
    assert standing.result(TIMEOUT_S) == ["through", "through"]


# ---------------------------------------------------------------------------------------------------------- cancelling


def test_cancelling_reaches_the_coroutine(group: WorkerGroup) -> None:
    future = group.wait_for("cancel")
    group.wait_for("cancel entered").result(TIMEOUT_S)
    assert future.cancel()
    group.wait_for("cancel cancelled").result(TIMEOUT_S)
    assert future.cancelled()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(TIMEOUT_S)
    assert not future.cancel()


def test_a_plain_call_cancelled_in_line_is_not_run(group: WorkerGroup) -> None:
    standing = group.wait_at_gate()
    behind = group.write("cancelled in line")
    group.ranks().result(TIMEOUT_S)
    assert behind.cancel()
    group.ranks().result(TIMEOUT_S)
    group.open_gate().result(TIMEOUT_S)
    standing.result(TIMEOUT_S)
    group.write("after it").result(TIMEOUT_S)
    assert all("cancelled in line" not in journal for journal in group.read().result(TIMEOUT_S))


async def test_awaiting_a_cancelled_call(group: WorkerGroup) -> None:
    future = group.wait_for("cancelled await")
    future.cancel()
    with pytest.raises(asyncio.CancelledError):
        await future
    derived = group.echo_after(batch(2), "never")
    part = derived.slice(0, 1)
    derived.cancel()
    with pytest.raises(asyncio.CancelledError):
        await part


def test_a_call_cancelled_before_its_arguments_are_there_is_never_made(group: WorkerGroup, other: WorkerGroup) -> None:
    waiting = group.double(other.echo_after(batch(2), "cancel early"))
    assert waiting.cancel()
    other.open("cancel early").result(TIMEOUT_S)
    with pytest.raises(concurrent.futures.CancelledError):
        waiting.result(TIMEOUT_S)


# ------------------------------------------------------------------------------------------------------------- failing


def test_an_error_says_where_it_was_raised(group: WorkerGroup) -> None:
    with pytest.raises(WorkerError) as caught:
        group.fail([1]).result(TIMEOUT_S)
    error = caught.value
    assert (error.group, error.rank, error.method) == ("bench", 1, "fail")
    assert isinstance(error.__cause__, KeyError)
    assert "bench.fail raised KeyError on rank 1: 'no such thing on 1'" in str(error)
    assert "in fail" in error.remote_traceback
    assert "host.py" not in error.remote_traceback


def test_our_own_errors_keep_their_class_and_end_the_siblings(group: WorkerGroup) -> None:
    with pytest.raises(CheckpointError, match="damaged") as caught:
        group.fail_on_one().result(TIMEOUT_S)
    assert "raised by bench.fail_on_one on rank 1" in caught.value.__notes__[0]
    # Rank 0 was waiting in wait_for("never"): it was cancelled, which opened this door. Rank 1's stays shut.
    assert group.execute_rank_zero("wait_for", "never cancelled").result(TIMEOUT_S) == "never cancelled"


def test_an_error_that_cannot_travel_arrives_as_text(group: WorkerGroup) -> None:
    with pytest.raises(WorkerError, match=r"Unpicklable on rank \d: strange"):
        group.fail_strangely().result(TIMEOUT_S)


def test_leaving_the_program_ends_the_call_only(group: WorkerGroup) -> None:
    with pytest.raises(WorkerError, match=r"SystemExit\(3\)"):
        group.leave().result(TIMEOUT_S)
    assert len(group.ranks().result(TIMEOUT_S)) == 2


def test_an_error_travels_along_futures(group: WorkerGroup, other: WorkerGroup) -> None:
    failed = group.fail_batch(batch(2))
    end = other.rows(other.double(failed.slice(0, 1)))
    with pytest.raises(WorkerError, match="this batch") as caught:
        end.result(TIMEOUT_S)
    assert caught.value.rank in (0, 1)
    way = [note for note in caught.value.__notes__ if "argument of" in note]
    assert way == [
        "it was an argument of other.double, which was not called",
        "it was an argument of other.rows, which was not called",
    ]
    # Looking at it from here does not tell of the others' way.
    assert "argument of" not in str(getattr(failed.exception(TIMEOUT_S), "__notes__", []))


def test_a_failure_that_nobody_looks_at_is_logged_once(group: WorkerGroup, caplog: pytest.LogCaptureFixture) -> None:
    future = group.fail_batch(batch(2))
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    assert done.wait(TIMEOUT_S)
    with caplog.at_level(logging.ERROR, logger="asyncrl"):
        del future
        # The controller loop lets go of the finished task a moment later.
        group.ranks().result(TIMEOUT_S)
        gc.collect()
    lines = [record.getMessage() for record in caplog.records if "never retrieved" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith("bench.fail_batch failed, its error was never retrieved: WorkerError")


class Unborn(Worker):
    def __init__(self, ranks: list[int]) -> None:
        super().__init__()
        if self.rank in ranks:
            raise ValueError("not today")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def ping(self) -> int:
        return self.rank


def test_a_constructor_that_raises_ends_the_group(make_group: Callable[..., WorkerGroup]) -> None:
    group = make_group(Unborn, [0], world_size=1, name="unborn")
    call = group.ping()
    for waiting in (group.ready(), call, group.ping()):
        with pytest.raises(WorkerError, match=r"unborn.__init__ raised ValueError on rank 0: not today"):
            waiting.result(TIMEOUT_S)


class Closing(Worker):
    """Says in a file that it was closed."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def forever(self) -> None:
        await asyncio.Event().wait()

    async def aclose(self) -> None:
        from pathlib import Path

        await asyncio.to_thread(Path(self.path + str(self.rank)).write_text, "closed")


async def test_shutting_down_closes_workers_and_ends_calls(
    make_group: Callable[..., WorkerGroup], tmp_path: Any
) -> None:
    group = make_group(Closing, str(tmp_path / "rank"), world_size=1, name="closing")
    async with group:
        call = group.forever()
    assert (tmp_path / "rank0").read_text() == "closed"
    with pytest.raises(InfrastructureError, match=r"closing was shut down before closing\.forever finished"):
        await call
    with pytest.raises(InfrastructureError, match="closing is closed"):
        group.forever()
    await group.aclose()
