"""Ragged columns: jagged nested tensors, whose rows differ in length.

A ragged column is ``values [T, ...]`` and ``offsets [B + 1]``: row i is ``values[offsets[i]:offsets[i + 1]]``, offsets
begin at 0, never decrease and end at T. Everything here works on these two, because indexing and slicing of nested
tensors is incomplete in torch and tensordict.

Two columns can be added or compared by torch only when they hold the *same* offsets tensor. Functions that change rows
therefore take several columns at once and keep shared offsets shared.

    >>> import torch
    >>> column = ragged_from_list([torch.tensor([1, 2, 3]), torch.tensor([], dtype=torch.int64), torch.tensor([4])])
    >>> lengths(column).tolist()
    [3, 0, 1]
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias, TypeGuard

import torch

from asyncrl.data.memory import cat
from asyncrl.errors import SchemaError

# torch leaves the elements of Tensor.tolist unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false


_LONG_ROW = 1024
"""Mean length from which rows are copied one by one, which is then as fast as memcpy and needs no list of positions."""

_OfValues: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""How the values of a changed column are made of its values ``[T, ...]``."""


def is_ragged(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.is_nested


def _is_not_about_tracing(record: logging.LogRecord) -> bool:
    return "is_fx_tracing" not in record.getMessage()


# torch makes a jagged tensor by a call of its own that it has deprecated, and warns of it. Not by the logger's level,
# which torch sets again.
logging.getLogger("torch.fx._symbolic_trace").addFilter(_is_not_about_tracing)


def ragged_from_values(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Make a ragged column over ``values [T, ...]``, which is not copied.

    The offsets are not checked: use :func:`check_offsets` for those from outside. A column over values that must not be
    written to (:attr:`asyncrl.data.DataProto.read_only`) is protected in the same way.
    """
    if values.is_inference():
        with torch.inference_mode():
            return torch.nested.nested_tensor_from_jagged(values, offsets)
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def check_offsets(offsets: torch.Tensor, total: int) -> None:
    """Raise :class:`SchemaError` unless offsets begin at 0, never decrease and end at ``total``."""
    if offsets.dim() != 1 or offsets.dtype != torch.int64 or len(offsets) == 0:
        raise SchemaError(
            f"ragged offsets must be one-dimensional int64 with rows + 1 entries, got {offsets.dtype} "
            f"of shape {tuple(offsets.shape)}"
        )
    host = offsets.cpu()
    if int(host[0]) != 0 or int(host[-1]) != total or bool((host[1:] < host[:-1]).any()):
        raise SchemaError(f"ragged offsets must begin at 0, never decrease and end at {total} (the number of values)")


def ragged_from_list(rows: Sequence[torch.Tensor], *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Copy rows ``[length, ...]`` into a ragged column.

    Without rows the column is one-dimensional of ``dtype`` (float32 if that is not given).

    Raises:
        SchemaError: rows differ in dtype, device or trailing shape, or a row has no dimension.
    """
    if not rows:
        empty = torch.zeros(0, dtype=dtype or torch.float32)
        return ragged_from_values(empty, torch.zeros(1, dtype=torch.int64))
    first = rows[0]
    for number, row in enumerate(rows):
        if not isinstance(row, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]  programs without types
            raise SchemaError(f"row {number} of a ragged column must be a tensor, got {type(row).__name__}")
        if row.dim() == 0:
            raise SchemaError(f"row {number} of a ragged column has no dimension; give a tensor of shape [length, ...]")
        if row.dtype != first.dtype or row.shape[1:] != first.shape[1:] or row.device != first.device:
            raise SchemaError(
                f"rows of a ragged column must agree in dtype, device and trailing shape: row 0 is {first.dtype} "
                f"{tuple(first.shape[1:])} on {first.device}, row {number} is {row.dtype} {tuple(row.shape[1:])} "
                f"on {row.device}"
            )
    values = torch.cat(list(rows))
    if dtype is not None:
        values = values.to(dtype)
    return ragged_from_values(values, offsets_from_lengths([len(row) for row in rows]).to(first.device))


def offsets_from_lengths(row_lengths: Sequence[int] | torch.Tensor) -> torch.Tensor:
    """Return offsets ``[B + 1]`` of rows with these lengths, on their device."""
    row_lengths = torch.as_tensor(row_lengths, dtype=torch.int64)
    return torch.cat([torch.zeros(1, dtype=torch.int64, device=row_lengths.device), row_lengths.cumsum(0)])


def offsets_of(column: torch.Tensor) -> torch.Tensor:
    """Return the offsets ``[B + 1]`` that a column holds, not a copy."""
    nested: Any = column  # torch's annotations lack the methods of nested tensors
    offsets: torch.Tensor = nested.offsets()
    return offsets


def values_of(column: torch.Tensor) -> torch.Tensor:
    """Return all values of a column, row after row, ``[T, ...]``, as a view."""
    # The attribute behind values(), which takes 35 us in five layers of dispatch that only autograd needs.
    values: torch.Tensor | None = getattr(column, "_values", None)
    return column.values() if values is None or column.requires_grad else values


def lengths(column: torch.Tensor) -> torch.Tensor:
    """Return the length of each row, int64 ``[B]``."""
    return offsets_of(column).diff()


def rows_of(column: torch.Tensor) -> list[torch.Tensor]:
    """Return the rows ``[length, ...]``, as views."""
    values = values_of(column)
    bounds: list[int] = offsets_of(column).tolist()
    return [values[start:end] for start, end in pairwise(bounds)]


def row_of(column: torch.Tensor, index: int) -> torch.Tensor:
    """Return row ``index`` (0..B-1), as a view."""
    start, end = offsets_of(column)[index : index + 2].tolist()
    return values_of(column)[start:end]


def normalise_ragged(column: torch.Tensor, name: str) -> torch.Tensor:
    """Return ``column`` in the one form used here: jagged, ragged in dimension 1, no holes, offsets from 0 to T.

    It is copied unless it has that form already.

    Raises:
        SchemaError: ragged in another dimension than 1.
    """
    ragged_dim = getattr(column, "_ragged_idx", None)  # of jagged tensors only
    if ragged_dim is None:
        return ragged_from_list(list(column.unbind()), dtype=column.dtype)
    if ragged_dim != 1:
        raise SchemaError(
            f"column {name!r} is ragged in dimension {ragged_dim}; rows may differ in length in dimension 1 only"
        )
    nested: Any = column
    values, offsets, row_lengths = values_of(column), offsets_of(column).to(torch.int64), nested.lengths()
    if row_lengths is None:
        if offsets is offsets_of(column) and [int(offsets[0]), int(offsets[-1])] == [0, len(values)]:
            return column
        row_lengths = offsets.diff()
    positions, offsets = _positions(offsets[:-1], row_lengths.to(torch.int64))
    return ragged_from_values(values.index_select(0, positions), offsets)


def share_offsets(columns: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Let columns with equal lengths hold the same offsets tensor, so that torch can compute between them."""
    seen: list[torch.Tensor] = []
    shared: dict[str, torch.Tensor] = {}
    for name, column in columns.items():
        own = offsets_of(column)
        for known in seen:
            if known is own:
                shared[name] = column
                break
            if known.device == own.device and torch.equal(known, own):
                shared[name] = ragged_from_values(values_of(column), known)
                break
        else:
            seen.append(own)
            shared[name] = column
    return shared


def own_tensors(columns: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy dense and ragged columns; offsets that are shared stay shared."""
    ragged = _changed(
        {name: column for name, column in columns.items() if column.is_nested},
        lambda offsets: (offsets.clone(), lambda values: cat([values])),
    )
    return {name: ragged[name] if column.is_nested else cat([column]) for name, column in columns.items()}


def slice_ragged(columns: Mapping[str, torch.Tensor], start: int, end: int) -> dict[str, torch.Tensor]:
    """Slice rows ``start <= i < end`` (both within 0..B) of each column; values are views."""
    end = max(start, end)

    def change(offsets: torch.Tensor) -> tuple[torch.Tensor, _OfValues]:
        first, last = offsets[[start, end]].tolist()
        return offsets[start : end + 1] - first, lambda values: values[first:last]

    return _changed(columns, change)


def take_ragged(columns: Mapping[str, torch.Tensor], index: torch.Tensor) -> dict[str, torch.Tensor]:
    """Copy rows ``index`` (int64 ``[N]``, each within 0..B-1) of each column."""

    def change(offsets: torch.Tensor) -> tuple[torch.Tensor, _OfValues]:
        sizes, rows = offsets.diff(), index.to(offsets.device)
        if offsets.device.type == "cpu" and len(rows) and int(offsets[-1]) >= _LONG_ROW * len(sizes):
            sizes_before: list[int] = sizes.tolist()
            wanted: list[int] = rows.tolist()

            def by_rows(values: torch.Tensor) -> torch.Tensor:
                parts = values.split(sizes_before)
                return torch.cat([parts[row] for row in wanted])

            return offsets_from_lengths(sizes[rows]), by_rows
        positions, new_offsets = _positions(offsets[:-1][rows], sizes[rows])
        return new_offsets, lambda values: values.index_select(0, positions)

    return _changed(columns, change)


def _changed(
    columns: Mapping[str, torch.Tensor], change: Callable[[torch.Tensor], tuple[torch.Tensor, _OfValues]]
) -> dict[str, torch.Tensor]:
    """Change the rows of ragged columns, once for all columns that share offsets, which share the new ones.

    Given offsets, ``change`` returns the new offsets and how the new values are made of the values of a column.
    """
    known: dict[int, tuple[torch.Tensor, _OfValues]] = {}
    result: dict[str, torch.Tensor] = {}
    for name, column in columns.items():
        offsets = offsets_of(column)
        if id(offsets) not in known:
            known[id(offsets)] = change(offsets)
        new_offsets, of_values = known[id(offsets)]
        result[name] = ragged_from_values(of_values(values_of(column)), new_offsets)
    return result


def _positions(starts: torch.Tensor, row_lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions in ``values`` of rows that start there, and the offsets that these rows get."""
    offsets = offsets_from_lengths(row_lengths)
    shift = torch.repeat_interleave(starts - offsets[:-1], row_lengths)
    return torch.arange(len(shift), device=starts.device) + shift, offsets


def concat_ragged(parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Concatenate parts with the same column names; columns that share offsets in every part do so in the result."""
    known: dict[tuple[int, ...], torch.Tensor] = {}
    result: dict[str, torch.Tensor] = {}
    for name in parts[0]:
        columns = [part[name] for part in parts]
        offsets = [offsets_of(column) for column in columns]
        key = tuple(id(each) for each in offsets)
        if key not in known:
            known[key] = offsets_from_lengths(torch.cat([each.diff() for each in offsets]))
        result[name] = ragged_from_values(cat([values_of(column) for column in columns]), known[key])
    return result
