"""The columns of a batch: tensors, ragged tensors and numpy arrays cut, taken, joined and named alike.

:class:`Columns` is what the methods of :class:`asyncrl.data.DataProto` compute on: no device moves, no ``meta_info``,
nothing changed in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from asyncrl.data.buffers import cat
from asyncrl.data.equality import arrays_equal, tensors_equal
from asyncrl.data.ragged import (
    concat_ragged,
    is_ragged,
    normalise_ragged,
    ragged_from_list,
    share_offsets,
    slice_ragged,
    take_ragged,
)
from asyncrl.data.schema import Schema, column_of
from asyncrl.errors import SchemaError

__all__ = ["Array", "Columns", "array_column", "is_list_of_tensors", "row_index", "tensor_columns"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a batch with ``rows`` rows."""

    tensors: Mapping[str, torch.Tensor]
    arrays: Mapping[str, Array]
    rows: int

    @property
    def names(self) -> list[str]:
        return [*self.tensors, *self.arrays]

    @property
    def schema(self) -> Schema:
        columns = [column_of(name, value) for each in (self.tensors, self.arrays) for name, value in each.items()]
        return Schema(columns=tuple(columns), rows=self.rows)

    @property
    def dense(self) -> dict[str, torch.Tensor]:
        return {name: each for name, each in self.tensors.items() if not each.is_nested}

    @property
    def ragged(self) -> dict[str, torch.Tensor]:
        return {name: each for name, each in self.tensors.items() if each.is_nested}

    def _replaced(
        self,
        dense: Mapping[str, torch.Tensor],
        ragged: Mapping[str, torch.Tensor],
        arrays: Mapping[str, Array],
        rows: int,
    ) -> Columns:
        """Other rows of the same columns, in the same order."""
        tensors = {name: dense[name] if name in dense else ragged[name] for name in self.tensors}
        return Columns(tensors=tensors, arrays=arrays, rows=rows)

    # --------------------------------------------------------------------------------------------------------- rows

    def slice(self, start: int, end: int, step: int = 1) -> Columns:
        """Rows ``start, start + step, ...`` before ``end``, all within 0..rows, ``step >= 1``.

        Views; a ragged column is copied when ``step`` is not 1.
        """
        rows = len(range(start, end, step))
        if step == 1:
            ragged = slice_ragged(self.ragged, start, start + rows)
        else:
            ragged = take_ragged(self.ragged, torch.arange(start, max(start, end), step))
        return self._replaced(
            {name: each[start:end:step] for name, each in self.dense.items()},
            ragged,
            {name: each[start:end:step] for name, each in self.arrays.items()},
            rows,
        )

    def take(self, index: Array) -> Columns:
        """Rows ``index`` (int64 ``[N]``, each within 0..rows-1), copied."""
        positions: torch.Tensor = torch.from_numpy(np.ascontiguousarray(index))  # pyright: ignore[reportUnknownMemberType]
        return self._replaced(
            {name: each.index_select(0, positions.to(each.device)) for name, each in self.dense.items()},
            take_ragged(self.ragged, positions),
            {name: each[index] for name, each in self.arrays.items()},
            len(index),
        )

    @staticmethod
    def concat(parts: Sequence[Columns]) -> Columns:
        """All rows of all parts, copied.

        Raises:
            SchemaError: naming the part by its position and its columns that differ from those of part 0.
        """
        first = parts[0]
        expected = first.schema.any_rows()
        for number, part in enumerate(parts[1:], start=1):
            difference = expected.diff(part.schema)
            if difference:
                raise SchemaError(f"batch {number} does not fit batch 0 in concat:\n{difference}")
        dense, ragged = [part.dense for part in parts], [part.ragged for part in parts]
        return first._replaced(  # noqa: SLF001  of this class
            {name: cat([part[name] for part in dense]) for name in dense[0]},
            concat_ragged(ragged),
            {name: np.concatenate([part.arrays[name] for part in parts]) for name in first.arrays},
            sum(part.rows for part in parts),
        )

    def unfold(self, parts: int, names: Sequence[str]) -> Columns:
        """The second dimension of the named columns cut into ``parts`` rows each, rows of the others repeated.

        Lists of one length in an object array count as its second dimension.

        Raises:
            SchemaError: a named column is missing, ragged, or its second dimension is no multiple of ``parts``.
        """
        if parts < 1:
            raise SchemaError(f"a column can be cut into 1 or more parts, got {parts}")
        self.require(names)
        arrays = {name: _lists_as_dimension(each) if name in names else each for name, each in self.arrays.items()}
        for name in names:
            value: Any = self.tensors.get(name, arrays.get(name))
            if is_ragged(value) or value.ndim < 2 or value.shape[1] % parts:
                raise SchemaError(
                    f"column {name!r} ({self.schema[name]}) cannot be cut into {parts}: "
                    "its second dimension must be dense and a multiple of that"
                )
        rest = self.without(names).take(np.repeat(np.arange(self.rows), parts))

        def unfolded(value: Any) -> Any:
            return value.reshape(self.rows * parts, value.shape[1] // parts, *value.shape[2:])

        return Columns(
            tensors={k: unfolded(each) if k in names else rest.tensors[k] for k, each in self.tensors.items()},
            arrays={k: unfolded(each) if k in names else rest.arrays[k] for k, each in arrays.items()},
            rows=self.rows * parts,
        )

    # -------------------------------------------------------------------------------------------------------- names

    def require(self, names: Iterable[str]) -> None:
        """Raise :class:`SchemaError` naming the columns that are not here."""
        missing = [name for name in names if name not in self.tensors and name not in self.arrays]
        if missing:
            raise SchemaError(f"columns {missing} are not in the batch: it has {self.names}")

    def without(self, names: Iterable[str]) -> Columns:
        """All columns but these."""
        names = set(names)
        return Columns(
            tensors={name: each for name, each in self.tensors.items() if name not in names},
            arrays={name: each for name, each in self.arrays.items() if name not in names},
            rows=self.rows,
        )

    def rename(self, old: Sequence[str], new: Sequence[str]) -> Columns:
        """Column ``old[i]`` under the name ``new[i]``, in its place.

        Raises:
            SchemaError: an old name is missing, a new one taken, or their numbers differ.
        """
        if len(old) != len(new):
            raise SchemaError(f"as many new names as old ones are needed, got {len(old)} old and {len(new)} new")
        self.require(old)
        renamed = dict(zip(old, new, strict=True))
        after = {renamed.get(name, name) for name in self.names}
        if len(after) != len(self.names) or len(renamed) != len(old):
            raise SchemaError(f"renaming {list(old)} to {list(new)} would give two columns one name")
        return Columns(
            tensors={renamed.get(name, name): each for name, each in self.tensors.items()},
            arrays={renamed.get(name, name): each for name, each in self.arrays.items()},
            rows=self.rows,
        )

    def union(self, other: Columns) -> Columns:
        """Columns of both; those in both must be equal, bit by bit. Without any column, the rows are the other's.

        Raises:
            SchemaError: rows differ in number, or naming the column that differs.
        """
        for names in (self.tensors.keys() & other.arrays.keys(), self.arrays.keys() & other.tensors.keys()):
            if names:
                raise SchemaError(f"columns {sorted(names)} are tensors in one batch and arrays in the other")
        if self.names and other.names and self.rows != other.rows:
            raise SchemaError(f"union needs as many rows on both sides, got {self.rows} and {other.rows}")
        differing = [
            n for n in self.tensors if n in other.tensors and not tensors_equal(self.tensors[n], other.tensors[n])
        ]
        differing += [n for n in self.arrays if n in other.arrays and not arrays_equal(self.arrays[n], other.arrays[n])]
        if differing:
            raise SchemaError(f"columns {differing} are in both batches of a union and differ")
        return Columns(
            tensors=_sharing_offsets({**other.tensors, **self.tensors}, order=[*self.tensors, *other.tensors]),
            arrays={**self.arrays, **{name: each for name, each in other.arrays.items() if name not in self.arrays}},
            rows=self.rows if self.names else other.rows,
        )

    def equal(self, other: Columns) -> bool:
        """Same columns in any order, same rows, same bits."""
        return (
            self.rows == other.rows
            and self.tensors.keys() == other.tensors.keys()
            and self.arrays.keys() == other.arrays.keys()
            and all(tensors_equal(value, other.tensors[name]) for name, value in self.tensors.items())
            and all(arrays_equal(array, other.arrays[name]) for name, array in self.arrays.items())
        )


def row_index(index: object, rows: int) -> Array:
    """Positions 0..rows-1 for a list, tuple, range, array or tensor of integers (negative from the end) or booleans.

    Raises:
        TypeError: neither integers nor booleans.
        IndexError: out of range, not one-dimensional, or a mask of another length.
    """
    if isinstance(index, torch.Tensor):
        index = index.detach().cpu().numpy()
    array = np.asarray(index)
    if array.ndim != 1:
        raise IndexError(f"rows are selected by a one-dimensional index, got one of shape {array.shape}")
    if array.dtype == bool:
        if len(array) != rows:
            raise IndexError(f"a boolean index needs one entry for each of the {rows} rows, got {len(array)}")
        return np.flatnonzero(array)
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"rows are selected by integers or booleans, got {array.dtype}")
    low, high = int(array.min()), int(array.max())
    if low < -rows or high >= rows:
        raise IndexError(f"row {high if high >= rows else low} is out of range for {rows} rows")
    array = array.astype(np.int64)
    return np.where(array < 0, array + rows, array)


def array_column(name: str, value: object) -> Array:
    """A non-tensor column. Arrays stay as they are; any other sequence becomes a 1-d object array of its elements."""
    kind = type(value).__name__
    if isinstance(value, np.ndarray):
        array = cast("Array", value)
        if array.ndim == 0:
            raise SchemaError(f"column {name!r} has no rows: it is a 0-d array")
        return array
    if isinstance(value, torch.Tensor):
        raise SchemaError(f"column {name!r} is a tensor and belongs to the batch, not to non_tensor_batch")
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise SchemaError(f"column {name!r} must be an array or a list with one element for each row, got {kind}")
    elements = list(cast("Iterable[object]", value))
    column = np.empty(len(elements), dtype=object)
    # Element by element: numpy would turn lists of equal length into a second dimension.
    for row, element in enumerate(elements):
        column[row] = element
    return column


def _lists_as_dimension(array: Array) -> Array:
    """``[B]`` lists of N elements as ``[B, N]``; anything else as it is."""
    lists = array.ndim == 1 and len(array) > 0 and all(isinstance(each, list | tuple) for each in array)
    if not lists or len({len(each) for each in array}) != 1:
        return array
    flat = array_column("", [element for each in array for element in each])
    return flat.reshape(len(array), len(array[0]))


def is_list_of_tensors(value: object) -> bool:
    """Whether ``value`` means a ragged column."""
    if not isinstance(value, list | tuple):
        return False
    rows = cast("Sequence[object]", value)
    return bool(rows) and all(isinstance(row, torch.Tensor) for row in rows)


def tensor_columns(tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Checked tensors; lists of tensors become ragged columns, and ragged columns with equal lengths share offsets.

    Raises:
        SchemaError: naming what is no column, or the first that has another number of rows.
    """
    columns: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        if is_list_of_tensors(value):
            try:
                columns[name] = ragged_from_list(value)
            except SchemaError as error:
                raise SchemaError(f"column {name!r}: {error}") from error
        elif not isinstance(value, torch.Tensor):
            raise SchemaError(
                f"column {name!r} of the batch must be a tensor or a list of tensors (ragged), "
                f"got {type(value).__name__}"
            )
        elif value.is_nested:
            columns[name] = normalise_ragged(value, name)
        elif value.dim() == 0:
            raise SchemaError(f"column {name!r} has no rows: it is a 0-d tensor")
        else:
            columns[name] = value
    first = next(iter(columns), "")
    for name, column in columns.items():
        if column.shape[0] != columns[first].shape[0]:
            raise SchemaError(
                f"column {name!r} has {column.shape[0]} rows, column {first!r} has {columns[first].shape[0]}: "
                "all columns of a batch have as many"
            )
    return _sharing_offsets(columns, order=list(columns))


def _sharing_offsets(columns: Mapping[str, torch.Tensor], *, order: Sequence[str]) -> dict[str, torch.Tensor]:
    shared = share_offsets({name: columns[name] for name in order if columns[name].is_nested})
    return {name: shared[name] if name in shared else columns[name] for name in order}
