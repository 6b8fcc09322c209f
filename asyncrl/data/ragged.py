"""Ragged columns: jagged nested tensors whose row i has a length of its own.

A ragged column is ``values [T, ...]`` and ``offsets [B + 1]``: row i is ``values[offsets[i]:offsets[i + 1]]``, offsets
begin at 0, never fall and end at T. Everything here works on these two, because indexing and slicing of nested tensors
is incomplete in torch and tensordict.

Two columns can be added or compared by torch only when they hold the *same* offsets tensor. Functions that change rows
therefore take several columns at once and keep shared offsets shared.

    >>> import torch
    >>> column = ragged_from_list([torch.tensor([1, 2, 3]), torch.tensor([], dtype=torch.int64), torch.tensor([4])])
    >>> lengths(column).tolist()
    [3, 0, 1]
    >>> to_padded(column, -1).tolist()
    [[1, 2, 3], [-1, -1, -1], [4, -1, -1]]
"""

# torch leaves the elements of Tensor.tolist unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeGuard

import torch

from asyncrl.data.buffers import cat
from asyncrl.errors import SchemaError

__all__ = [
    "check_offsets",
    "concat_ragged",
    "is_ragged",
    "lengths",
    "normalise_ragged",
    "offsets_from_lengths",
    "offsets_of",
    "own_tensors",
    "ragged_from_list",
    "ragged_from_padded",
    "ragged_from_values",
    "row_of",
    "rows_of",
    "share_offsets",
    "slice_ragged",
    "take_ragged",
    "to_padded",
    "values_of",
]


_LONG_ROW = 1024
"""Mean length from which rows are copied one by one: then that is as fast as memcpy and needs no list of positions."""


def is_ragged(value: object) -> TypeGuard[torch.Tensor]:
    """Whether ``value`` is a nested tensor."""
    return isinstance(value, torch.Tensor) and value.is_nested


def ragged_from_values(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """A ragged column over ``values [T, ...]``, which is not copied.

    The offsets are trusted: check them first if they come from outside (:func:`check_offsets`). A column over values
    that must not be written to (:attr:`asyncrl.data.DataProto.read_only`) is itself protected in the same way.
    """
    if values.is_inference():
        with torch.inference_mode():
            return torch.nested.nested_tensor_from_jagged(values, offsets)
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def check_offsets(offsets: torch.Tensor, total: int) -> None:
    """Raise :class:`SchemaError` unless offsets begin at 0, never fall and end at ``total``."""
    if offsets.dim() != 1 or offsets.dtype != torch.int64 or len(offsets) == 0:
        raise SchemaError(
            f"ragged offsets must be one-dimensional int64 with rows + 1 entries, got {offsets.dtype} "
            f"of shape {tuple(offsets.shape)}"
        )
    host = offsets.cpu()
    if int(host[0]) != 0 or int(host[-1]) != total or bool((host[1:] < host[:-1]).any()):
        raise SchemaError(f"ragged offsets must begin at 0, never fall and end at {total} (the number of values)")


def ragged_from_list(rows: Sequence[torch.Tensor], *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A ragged column of the given rows ``[length, ...]``, copied into one tensor.

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


def ragged_from_padded(padded: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Rows ``padded[i][mask[i]]`` of ``padded [B, L, ...]`` and a boolean ``mask [B, L]``."""
    if mask.dtype != torch.bool or mask.shape != padded.shape[:2]:
        raise SchemaError(f"mask must be bool of shape {tuple(padded.shape[:2])}, got {mask.dtype} {tuple(mask.shape)}")
    return ragged_from_values(padded[mask], offsets_from_lengths(mask.sum(dim=1)))


def offsets_from_lengths(row_lengths: Sequence[int] | torch.Tensor) -> torch.Tensor:
    """Offsets ``[B + 1]`` of rows with these lengths, on their device."""
    row_lengths = torch.as_tensor(row_lengths, dtype=torch.int64)
    return torch.cat([torch.zeros(1, dtype=torch.int64, device=row_lengths.device), row_lengths.cumsum(0)])


def offsets_of(column: torch.Tensor) -> torch.Tensor:
    """Offsets ``[B + 1]`` of a column: the very tensor it holds."""
    nested: Any = column  # torch's annotations do not know the methods of nested tensors
    offsets: torch.Tensor = nested.offsets()
    return offsets


def values_of(column: torch.Tensor) -> torch.Tensor:
    """All values of a column, row after row: ``[T, ...]``, a view."""
    # The attribute behind values(): that goes through five layers of dispatch for 35 us, which only autograd needs.
    values: torch.Tensor | None = getattr(column, "_values", None)
    return column.values() if values is None or column.requires_grad else values


def lengths(column: torch.Tensor) -> torch.Tensor:
    """Length of each row: int64 ``[B]``."""
    return offsets_of(column).diff()


def rows_of(column: torch.Tensor) -> list[torch.Tensor]:
    """The rows ``[length, ...]``, as views."""
    values = values_of(column)
    bounds: list[int] = offsets_of(column).tolist()
    return [values[start:end] for start, end in pairwise(bounds)]


def row_of(column: torch.Tensor, index: int) -> torch.Tensor:
    """Row ``index`` (0..B-1), as a view."""
    start, end = offsets_of(column)[index : index + 2].tolist()
    return values_of(column)[start:end]


def normalise_ragged(column: torch.Tensor, name: str) -> torch.Tensor:
    """``column`` in the one form used here: jagged, ragged in dimension 1, no holes, offsets from 0 to T.

    Returned as it is when it has that form already, otherwise copied.

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
    positions, offsets = _plan(offsets[:-1], row_lengths.to(torch.int64))
    return ragged_from_values(values.index_select(0, positions), offsets)


def share_offsets(columns: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same columns; those with equal lengths hold one offsets tensor, so that torch can compute between them."""
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
    """Copies of dense and ragged columns; offsets that were shared are shared again."""
    known: dict[int, torch.Tensor] = {}
    result: dict[str, torch.Tensor] = {}
    for name, column in columns.items():
        if not column.is_nested:
            result[name] = cat([column])
            continue
        offsets = offsets_of(column)
        if id(offsets) not in known:
            known[id(offsets)] = offsets.clone()
        result[name] = ragged_from_values(cat([values_of(column)]), known[id(offsets)])
    return result


def slice_ragged(columns: Mapping[str, torch.Tensor], start: int, end: int) -> dict[str, torch.Tensor]:
    """Rows ``start <= i < end`` (both within 0..B) of each column; values are views."""
    end = max(start, end)
    cut: dict[int, tuple[torch.Tensor, int, int]] = {}
    result: dict[str, torch.Tensor] = {}
    for name, column in columns.items():
        offsets = offsets_of(column)
        if id(offsets) not in cut:
            first, last = offsets[[start, end]].tolist()
            cut[id(offsets)] = (offsets[start : end + 1] - first, first, last)
        new_offsets, first, last = cut[id(offsets)]
        result[name] = ragged_from_values(values_of(column)[first:last], new_offsets)
    return result


def take_ragged(columns: Mapping[str, torch.Tensor], index: torch.Tensor) -> dict[str, torch.Tensor]:
    """Rows ``index`` (int64 ``[N]``, each within 0..B-1) of each column, copied."""
    known: dict[int, tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]] = {}
    result: dict[str, torch.Tensor] = {}
    for name, column in columns.items():
        offsets = offsets_of(column)
        if id(offsets) not in known:
            known[id(offsets)] = _taking(offsets, index.to(offsets.device))
        new_offsets, take = known[id(offsets)]
        result[name] = ragged_from_values(take(values_of(column)), new_offsets)
    return result


def concat_ragged(parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The columns of all parts, one after the other. Every part has the same column names.

    Columns whose offsets are shared in every part share them in the result.
    """
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


def to_padded(column: torch.Tensor, padding: float, *, length: int | None = None, left: bool = False) -> torch.Tensor:
    """Dense ``[B, L, ...]``: rows followed by ``padding`` (preceded by it with ``left``), L the longest row.

    Raises:
        SchemaError: ``length`` is given and a row is longer.
    """
    values, offsets = values_of(column), offsets_of(column)
    row_lengths = offsets.diff()
    longest = int(row_lengths.max()) if len(row_lengths) else 0
    if length is None:
        length = longest
    elif longest > length:
        raise SchemaError(f"a row of {longest} values does not fit the padded length {length}")
    padded = torch.full(
        (len(row_lengths), length, *values.shape[1:]), padding, dtype=values.dtype, device=values.device
    )
    rows = torch.repeat_interleave(torch.arange(len(row_lengths), device=values.device), row_lengths)
    positions = torch.arange(len(values), device=values.device) - offsets[:-1][rows]
    if left:
        positions = positions + (length - row_lengths)[rows]
    return padded.index_put((rows, positions), values)


def _taking(offsets: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """The offsets of the rows ``index``, and how their values are copied out of the values of a column."""
    sizes = offsets.diff()
    if offsets.device.type == "cpu" and len(index) and int(offsets[-1]) >= _LONG_ROW * len(sizes):
        lengths_before: list[int] = sizes.tolist()
        wanted: list[int] = index.tolist()

        def by_rows(values: torch.Tensor) -> torch.Tensor:
            rows = values.split(lengths_before)
            return torch.cat([rows[row] for row in wanted])

        return offsets_from_lengths(sizes[index]), by_rows
    positions, new_offsets = _plan(offsets[:-1][index], sizes[index])
    return new_offsets, lambda values: values.index_select(0, positions)


def _plan(starts: torch.Tensor, row_lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions in ``values`` of the wanted rows, and the offsets they will have."""
    offsets = offsets_from_lengths(row_lengths)
    shift = torch.repeat_interleave(starts - offsets[:-1], row_lengths)
    return torch.arange(len(shift), device=starts.device) + shift, offsets
