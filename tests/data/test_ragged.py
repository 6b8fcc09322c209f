"""Ragged columns: values and offsets."""

from __future__ import annotations

import subprocess
import sys

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from asyncrl.data.ragged import (
    check_offsets,
    concat_ragged,
    lengths,
    normalise_ragged,
    offsets_of,
    ragged_from_list,
    ragged_from_values,
    row_of,
    rows_of,
    share_offsets,
    slice_ragged,
    take_ragged,
    values_of,
)
from asyncrl.errors import SchemaError

LAW = settings(max_examples=30, deadline=None)

Rows = list[list[int]]
rows_lists = st.lists(st.lists(st.integers(-5, 5), max_size=4), min_size=1, max_size=6)


def ragged(rows: Rows) -> torch.Tensor:
    return ragged_from_list([torch.tensor(row, dtype=torch.int64) for row in rows])


def listed(column: torch.Tensor) -> Rows:
    return [row.tolist() for row in rows_of(column)]


def test_a_column_of_three_rows() -> None:
    column = ragged([[1, 2, 3], [], [4]])
    assert values_of(column).tolist() == [1, 2, 3, 4]
    assert offsets_of(column).tolist() == [0, 3, 3, 4]
    assert lengths(column).tolist() == [3, 0, 1]
    assert row_of(column, 0).tolist() == [1, 2, 3]
    assert row_of(column, 1).tolist() == []


def test_a_column_without_rows() -> None:
    column = ragged_from_list([], dtype=torch.int64)
    assert column.dtype == torch.int64
    assert lengths(column).tolist() == []
    assert listed(concat_ragged([{"x": column}, {"x": ragged([[1]])}])["x"]) == [[1]]


def test_rows_with_features() -> None:
    column = ragged_from_list([torch.ones(2, 3), torch.zeros(0, 3), torch.full((1, 3), 2.0)])
    taken = take_ragged({"x": column}, torch.tensor([2, 0]))["x"]
    assert [row.shape for row in rows_of(taken)] == [(1, 3), (2, 3)]


def test_slices_are_views() -> None:
    column = ragged([[1, 2, 3], [4], [5, 6]])
    part = slice_ragged({"x": column}, 1, 3)["x"]
    assert listed(part) == [[4], [5, 6]]
    values_of(part)[0] = 9
    assert listed(column) == [[1, 2, 3], [9], [5, 6]]


def test_columns_keep_sharing_offsets() -> None:
    columns = share_offsets({"a": ragged([[1, 2], [3]]), "b": ragged([[4, 5], [6]]), "c": ragged([[7], [8]])})
    for changed in (
        columns,
        slice_ragged(columns, 0, 1),
        take_ragged(columns, torch.tensor([1, 0, 1])),
        concat_ragged([columns, columns]),
    ):
        assert offsets_of(changed["a"]) is offsets_of(changed["b"])
        assert offsets_of(changed["a"]) is not offsets_of(changed["c"])


@LAW
@given(rows_lists, st.data())
def test_rows_are_those_of_a_list(rows: Rows, draw: st.DataObject) -> None:
    columns = {"x": ragged(rows)}
    index = draw.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8))
    start, end = sorted(draw.draw(st.tuples(*[st.integers(0, len(rows))] * 2)))
    assert listed(take_ragged(columns, torch.tensor(index, dtype=torch.int64))["x"]) == [rows[row] for row in index]
    assert listed(slice_ragged(columns, start, end)["x"]) == rows[start:end]
    assert listed(concat_ragged([columns, columns])["x"]) == rows + rows


def test_long_rows_are_taken_like_short_ones() -> None:
    columns = share_offsets({"ids": ragged_from_list([torch.arange(size) for size in (3000, 0, 1000)])})
    columns["x"] = ragged_from_values(values_of(columns["ids"]).float()[:, None], offsets_of(columns["ids"]))
    taken = take_ragged(columns, torch.tensor([2, 0, 1, 2]))
    assert listed(taken["ids"]) == [list(range(size)) for size in (1000, 3000, 0, 1000)]
    assert torch.equal(values_of(taken["x"])[:, 0], values_of(taken["ids"]).float())
    assert offsets_of(taken["x"]) is offsets_of(taken["ids"])


def test_values_that_are_no_ragged_column_raise() -> None:
    with pytest.raises(SchemaError, match=r"row 1 is torch\.int64"):
        ragged_from_list([torch.zeros(1), torch.zeros(1, dtype=torch.int64)])
    with pytest.raises(SchemaError, match="row 0 of a ragged column has no dimension"):
        ragged_from_list([torch.tensor(1)])
    for offsets in ([1, 3], [0, 2], [0, 2, 1, 3]):
        with pytest.raises(SchemaError, match="begin at 0, never decrease and end at 3"):
            check_offsets(torch.tensor(offsets), 3)
    with pytest.raises(SchemaError, match="one-dimensional int64"):
        check_offsets(torch.tensor([0.0, 3.0]), 3)
    transposed = ragged_from_list([torch.zeros(1, 2), torch.zeros(3, 2)]).transpose(1, 2)
    with pytest.raises(SchemaError, match="column 'x' is ragged in dimension 2"):
        normalise_ragged(transposed, "x")


def test_offsets_that_leave_values_out_are_closed() -> None:
    open_ends = torch.nested.nested_tensor_from_jagged(torch.arange(6), torch.tensor([1, 3, 5]))
    assert listed(normalise_ragged(open_ends, "x")) == [[1, 2], [3, 4]]
    assert values_of(normalise_ragged(open_ends, "x")).tolist() == [1, 2, 3, 4]


@pytest.mark.slow
def test_torch_warns_of_no_call_of_its_own() -> None:
    code = "import torch; from asyncrl.data.ragged import ragged_from_list; ragged_from_list([torch.ones(2)])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "is_fx_tracing" not in ran.stderr
