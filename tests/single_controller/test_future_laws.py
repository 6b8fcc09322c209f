"""The law of futures, on both backends: ``f.op(x).result()`` equals ``f.result().op(x)``, for chains of operations."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.errors import AsyncRLError
from asyncrl.single_controller import Dispatch, Worker, WorkerGroup, register

TIMEOUT_S = 30.0


class Copier(Worker):
    """Gives back what it gets."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def copy(self, batch: DataProto) -> DataProto:
        return batch


@pytest.fixture(scope="module")
def copier(make_group: Callable[..., WorkerGroup]) -> WorkerGroup:
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    return make_group(Copier)


def rows(count: int) -> DataProto:
    lengths = [number % 3 for number in range(count)]
    return DataProto.from_dict(
        tensors={
            "x": torch.arange(count),
            "y": torch.arange(2.0 * count).reshape(count, 2),
            "ids": torch.nested.nested_tensor_from_jagged(
                torch.arange(sum(lengths)), torch.tensor([0, *np.cumsum(lengths).tolist()])
            ),
        },
        non_tensors={"name": np.array([f"row {number}" for number in range(count)], dtype=object)},
        meta_info={"run": 1, "weight_version": 3},
    )


def squared(batch: DataProto) -> DataProto:
    """Add a column, drop one, and write into a third."""
    for name, column in () if batch.batch is None else batch.batch.items():
        if name in ("x", "z") and isinstance(column, torch.Tensor):
            column.mul_(column)
    batch.meta_info["squared"] = True
    return batch.with_columns(mark=np.array(["new"] * len(batch), dtype=object))


def reordered(batch: DataProto, index: list[int]) -> DataProto:
    again = batch.select()
    again.reorder(index)
    return again


def popped(batch: DataProto, keys: tuple[list[str], list[str], list[str]]) -> tuple[DataProto, DataProto]:
    rest = batch.select()
    taken = rest.pop(*keys)
    return taken, rest


def united(batch: DataProto) -> DataProto:
    return batch.select().union(batch.select(["x"], []).rename("x", "w"))


Batch = DataProto | DataProtoFuture
Operation = tuple[str, Callable[[DataProtoFuture], DataProtoFuture], Callable[[DataProto], DataProto]]
"""What it is, on a future, and on a batch."""


def both(text: str, operation: Callable[..., object]) -> Operation:
    return text, operation, operation  # type: ignore[return-value]


def _index(index: list[int]) -> Operation:
    return both(f"select_idxs {index}", lambda f: f.select_idxs(index))


def _reorder(index: list[int]) -> Operation:
    return f"reorder {index}", lambda f: f.reorder(index), lambda d: reordered(d, index)


def _pop(drawn: tuple[list[str], list[str], list[str], bool]) -> Operation:
    *keys, taken = drawn
    place = 0 if taken else 1
    return (
        f"pop {keys} {taken}",
        lambda f: f.pop(*keys)[place],
        lambda d: popped(d, (keys[0], keys[1], keys[2]))[place],
    )


def _rename(names: tuple[list[str], list[str]]) -> Operation:
    return f"rename {names}", lambda f: f.rename(*names), lambda d: d.select().rename(*names)


def waited(batch: Batch) -> Batch:
    """Into how many parts it splits is known once it is finished."""
    if isinstance(batch, DataProtoFuture):
        batch.exception(TIMEOUT_S)
    return batch


tensor_names = st.lists(st.sampled_from(["x", "y", "ids"]), unique=True, max_size=3)
operations = st.lists(
    st.one_of(
        st.tuples(
            st.none() | st.integers(-9, 9), st.none() | st.integers(-9, 9), st.sampled_from([None, 1, 2, -1])
        ).map(lambda cut: both(f"slice {cut}", lambda f: f.slice(*cut))),
        st.lists(st.integers(-5, 4), max_size=6).map(_index),
        st.lists(st.integers(-5, 4), max_size=6).map(_reorder),
        st.tuples(st.integers(-1, 3), st.booleans()).map(lambda how: both(f"repeat {how}", lambda f: f.repeat(*how))),
        st.tuples(tensor_names, st.lists(st.just("name"), max_size=1)).map(
            lambda names: both(f"select {names}", lambda f: f.select(*names))
        ),
        st.tuples(
            tensor_names, st.lists(st.just("name"), max_size=1), st.lists(st.just("run"), max_size=1), st.booleans()
        ).map(_pop),
        st.sampled_from([(["x"], ["z"]), (["x", "y"], ["y", "x"]), (["name"], ["text"]), (["x"], ["y"])]).map(_rename),
        st.tuples(st.integers(1, 3), st.integers(0, 2)).map(
            lambda cut: both(f"chunk {cut}", lambda f: f.chunk(cut[0])[cut[1] % cut[0]])
        ),
        st.integers(1, 3).map(lambda size: both(f"split {size}", lambda f: type(f).concat(waited(f).split(size)))),
        st.just(("union", lambda f: f.union(f.select(["x"], []).rename("x", "w")), united)),
        st.just(both("concat", lambda f: type(f).concat([f, f]))),
        st.just(("then", lambda f: f.then(squared), lambda d: squared(d.clone()))),
    ),
    max_size=4,
)


def check(future: DataProtoFuture, data: DataProto, chosen: list[Operation]) -> None:
    whole = future
    given = data.clone()
    for _, on_future, on_batch in chosen:
        try:
            data = on_batch(data)
        except (AsyncRLError, IndexError) as error:
            # The same error: at once, or from the future.
            with pytest.raises(type(error)):
                on_future(future).result(TIMEOUT_S)
            break
        future = on_future(future)
    else:
        assert future.result(TIMEOUT_S) == data
        assert len(future) == len(data)
    # Nothing was changed in place.
    assert whole.result(TIMEOUT_S) == given


def test_operations_on_a_future_are_those_on_the_batch(copier: WorkerGroup, backend: str) -> None:
    @settings(
        max_examples=150 if backend == "local" else 10,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize=True,
    )
    @given(count=st.integers(0, 5), chosen=operations, finished=st.booleans())
    def law(count: int, chosen: list[Operation], finished: bool) -> None:
        future = copier.copy(rows(count))
        if finished:
            future.result(TIMEOUT_S)
        check(future, rows(count), chosen)

    law()
