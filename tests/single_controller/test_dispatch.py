"""Shares of rows, and arguments on their way to the ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data import DataProto
from asyncrl.data.plan import Plan
from asyncrl.errors import DispatchError
from asyncrl.single_controller import Dispatch, Worker, register
from asyncrl.single_controller.call import Arguments
from asyncrl.single_controller.scatter import Scatter, collect, rows_of, shares


def as_lists(rows: int, ranks: int, *, pad: bool) -> list[list[int]]:
    return [np.asarray(share.index).tolist() for share in shares(rows, ranks, pad=pad)]


def test_rows_that_divide_are_cut_evenly() -> None:
    assert as_lists(6, 3, pad=True) == [[0, 1], [2, 3], [4, 5]]


def test_smaller_shares_repeat_their_last_row() -> None:
    assert as_lists(5, 3, pad=True) == [[0, 1], [2, 3], [4, 4]]
    assert as_lists(5, 3, pad=False) == [[0, 1], [2, 3], [4]]


def test_ranks_without_rows_repeat_some_row() -> None:
    assert as_lists(2, 5, pad=True) == [[0], [1], [0], [1], [0]]
    assert as_lists(2, 5, pad=False) == [[0], [1], [], [], []]


def test_no_rows_need_no_padding() -> None:
    assert as_lists(0, 3, pad=True) == [[], [], []]


@given(rows=st.integers(0, 40), ranks=st.integers(1, 9), pad=st.booleans())
def test_law_shares_without_their_padding_are_the_rows(rows: int, ranks: int, pad: bool) -> None:
    parts = shares(rows, ranks, pad=pad)
    kept = [np.asarray(part.index).tolist()[: len(part.index) - part.padding] for part in parts]
    assert [row for rows_of_rank in kept for row in rows_of_rank] == list(range(rows))
    sizes = [len(part.index) for part in parts]
    assert max(sizes) - min(sizes) <= (0 if pad and rows else 1)
    assert all(part.padding in (0, 1) for part in parts)


class Backend:
    """The hooks of a worker group that splitting uses."""

    world_size = 2

    def _store(self, value: Any) -> Any:
        return Plan.of(value) if isinstance(value, DataProto) else value

    def _store_parts(self, data: DataProto, parts: list[Any]) -> list[Any]:
        return [self._store(rows_of(data, part)) for part in parts]

    def _dereference(self, arguments: Arguments) -> Arguments:
        return arguments


def resolved(mode: Dispatch, *args: Any, ranks: int = 2, **kwargs: Any) -> list[Arguments]:
    return Scatter(mode, Arguments(args, kwargs), ranks=ranks, pad=True, group=Backend()).arguments()


def batch(count: int) -> DataProto:
    return DataProto.from_dict(tensors={"x": torch.arange(count)})


def test_parts_of_a_batch_are_views() -> None:
    data = batch(4)
    first, second = resolved(Dispatch.DP_COMPUTE_PROTO, data)
    assert data.batch is not None
    start = data.batch["x"].data_ptr()
    pointers = [each.args[0].get(read_only=True).batch["x"].data_ptr() for each in (first, second)]
    assert pointers == [start, start + 2 * 8]


def test_lists_that_happen_to_be_as_long_as_the_group_are_not_scattered() -> None:
    first, second = resolved(Dispatch.ONE_TO_ALL, [1, 2], names=("a", "b"))
    assert first == second == Arguments(([1, 2],), {"names": ("a", "b")})
    first, second = resolved(Dispatch.DP_COMPUTE_PROTO, batch(2), [1, 2])
    assert first.args[1] == [1, 2]


@pytest.mark.parametrize("value", [[1, 2, 3], 5, "ab", {"a": 1, "b": 2}])
def test_what_is_no_list_by_rank_is_refused(value: Any) -> None:
    with pytest.raises(DispatchError, match="amount must be a list with one entry for each of the 2 ranks"):
        resolved(Dispatch.DP_COMPUTE, amount=value)


@pytest.mark.parametrize("returned", [None, 3, (1, 2), ([[1, 2]], None), "ab", ([[1, 2]],)])
def test_what_a_dispatch_function_returns_is_checked(returned: Any) -> None:
    mode: Any = {"dispatch_fn": lambda group, *args: returned, "collect_fn": lambda group, output: output}
    with pytest.raises(DispatchError, match=r"a dispatch_fn must return \(args, kwargs\), a tuple and a dict, got"):
        Scatter(mode, Arguments((1,), {}), ranks=2, pad=True, group=Backend())  # type: ignore[arg-type]


def test_padding_in_the_middle_is_taken_off() -> None:
    parts = shares(4, 3, pad=True)
    plans = [Plan.of(batch(4)).take(part.index) for part in parts]
    joined = collect(Dispatch.DP_COMPUTE_PROTO, plans, parts, group=None, method="m")
    assert joined.get() == batch(4)


@pytest.mark.parametrize("mode", ["dp_compute_proto", {"dispatch_fn": print}, None])
def test_modes_that_are_none_are_refused(mode: Any) -> None:
    with pytest.raises(DispatchError, match="dispatch_mode must be"):
        register(dispatch_mode=mode)


def test_registering_leaves_the_method_as_it_is() -> None:
    class Plain(Worker):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def same(self, data: DataProto) -> DataProto:
            return data

    data = batch(1)
    assert Plain().same(data) is data
