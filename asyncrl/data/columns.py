"""The columns of a batch: tensors, ragged tensors and numpy arrays, cut, taken, joined, named and compared alike.

:class:`Columns` is what the methods of :class:`asyncrl.data.DataProto` compute on: no device moves, no ``meta_info``,
nothing changed in place. Beside it: bitwise equality, indices of rows, columns from values, and the ``meta_info`` of
batches that are put together.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from asyncrl.data.memory import cat, object_array
from asyncrl.data.ragged import (
    concat_ragged,
    is_ragged,
    normalise_ragged,
    offsets_of,
    ragged_from_list,
    share_offsets,
    slice_ragged,
    take_ragged,
    values_of,
)
from asyncrl.data.schema import Schema, column_of, common_schema
from asyncrl.errors import SchemaError

# Plain values: what is in a list or a dictionary is known only once it has been looked at.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

# ------------------------------------------------------------------------------- equality: NaN equals NaN, 0.0 not -0.0

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_Pairs: TypeAlias = tuple[tuple[int, int], ...]
"""Ids of the pairs that are being compared, outermost first: a pair that occurs again contains itself."""


def tensors_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether kind, dtype, shape and bits are the same; devices may differ."""
    if left.dtype != right.dtype or left.is_nested != right.is_nested or left.dim() != right.dim():
        return False
    if left.is_nested:
        return _dense_equal(offsets_of(left), offsets_of(right)) and _dense_equal(values_of(left), values_of(right))
    return _dense_equal(left, right)


def _dense_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape:
        return False
    if left.device != right.device:
        left, right = left.cpu(), right.cpu()
    left, right = left.detach(), right.detach()
    if left.is_complex():
        left, right = torch.view_as_real(left.resolve_conj()), torch.view_as_real(right.resolve_conj())
    if left.is_floating_point():
        integer = _INTEGER_OF_SIZE[left.element_size()]
        left, right = (side.resolve_neg().contiguous().view(integer) for side in (left, right))
    return torch.equal(left, right)


def arrays_equal(left: Array, right: Array) -> bool:
    """Whether dtype (the width of text aside), shape and bits are the same.

    Elements of object arrays are compared by :func:`values_equal`.
    """
    return _arrays_equal(left, right, ())


def values_equal(left: object, right: object) -> bool:
    """Compare plain values (numbers, text, lists, dicts, arrays, tensors) deeply; their types must be the same.

    Values that contain themselves are equal if nothing else differs.
    """
    return _equal(left, right, ())


def _arrays_equal(left: Array, right: Array, inside: _Pairs) -> bool:
    is_text = left.dtype.kind in "US" and left.dtype.kind == right.dtype.kind
    if left.shape != right.shape or (left.dtype != right.dtype and not is_text):
        return False
    if left.dtype == object:
        inside = (*inside, (id(left), id(right)))
        return all(map(_equal, left.flat, right.flat, repeat(inside)))
    if left.dtype.kind in "fcmM" and left.dtype.itemsize in (2, 4, 8, 16) and left.dtype.char not in "gG":
        # Bits, so that NaN and NaT equal themselves. complex128 is compared as pairs of 8 bytes.
        unit = np.dtype(f"u{min(left.dtype.itemsize, 8)}")
        left, right = np.ascontiguousarray(left), np.ascontiguousarray(right)
        return bool(np.array_equal(left.reshape(-1).view(unit), right.reshape(-1).view(unit)))
    return bool(np.array_equal(left, right))


def _equal(left: Any, right: Any, inside: _Pairs) -> bool:
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)
    if isinstance(left, torch.Tensor):
        return tensors_equal(left, right)
    if isinstance(left, np.generic):
        return arrays_equal(np.asarray(left), np.asarray(right))
    if not isinstance(left, np.ndarray | Mapping | list | tuple):
        return bool(left == right)
    pair = (id(left), id(right))
    if pair in inside:
        return True
    if isinstance(left, np.ndarray):
        return _arrays_equal(left, right, inside)
    inside = (*inside, pair)
    if isinstance(left, Mapping):
        return left.keys() == right.keys() and all(_equal(left[key], right[key], inside) for key in left)
    return len(left) == len(right) and all(map(_equal, left, right, repeat(inside)))


# -------------------------------------------------------------------------------------------------------------- columns


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

    def apply(self, function: Callable[[Any], Any], *, rows: int) -> Columns:
        """Apply ``function`` to every tensor and array, of which it makes one with ``rows`` rows."""
        return Columns(
            tensors={name: function(each) for name, each in self.tensors.items()},
            arrays={name: function(each) for name, each in self.arrays.items()},
            rows=rows,
        )

    def _replaced(
        self,
        dense: Mapping[str, torch.Tensor],
        ragged: Mapping[str, torch.Tensor],
        arrays: Mapping[str, Array],
        rows: int,
    ) -> Columns:
        tensors = {name: dense[name] if name in dense else ragged[name] for name in self.tensors}
        return Columns(tensors=tensors, arrays=arrays, rows=rows)

    # --------------------------------------------------------------------------------------------------------- rows

    def slice(self, start: int, end: int, step: int = 1) -> Columns:
        """Slice the rows, bounds within 0..rows and ``step >= 1``: views; ragged columns are copied for other steps."""
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
        """Copy the rows ``index`` (int64 ``[N]``, each within 0..rows-1)."""
        positions: torch.Tensor = torch.from_numpy(np.ascontiguousarray(index))  # pyright: ignore[reportUnknownMemberType]
        return self._replaced(
            {name: each.index_select(0, positions.to(each.device)) for name, each in self.dense.items()},
            take_ragged(self.ragged, positions),
            {name: each[index] for name, each in self.arrays.items()},
            len(index),
        )

    @staticmethod
    def concat(parts: Sequence[Columns]) -> Columns:
        """Copy all rows of all parts, whose columns must be the same (:func:`common_schema`)."""
        common_schema([part.schema for part in parts])
        first = parts[0]
        dense, ragged = [part.dense for part in parts], [part.ragged for part in parts]
        return first._replaced(  # noqa: SLF001  of this class
            {name: cat([part[name] for part in dense]) for name in dense[0]},
            concat_ragged(ragged),
            {name: np.concatenate([part.arrays[name] for part in parts]) for name in first.arrays},
            sum(part.rows for part in parts),
        )

    def unfold(self, parts: int, names: Sequence[str]) -> Columns:
        """Cut the second dimension of the named columns into ``parts`` rows each, and repeat the rows of the others.

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
        """Raise :class:`SchemaError` naming the columns that are missing."""
        missing = [name for name in names if name not in self.tensors and name not in self.arrays]
        if missing:
            raise SchemaError(f"columns {missing} are not in the batch: it has {self.names}")

    def without(self, names: Iterable[str]) -> Columns:
        names = set(names)
        return Columns(
            tensors={name: each for name, each in self.tensors.items() if name not in names},
            arrays={name: each for name, each in self.arrays.items() if name not in names},
            rows=self.rows,
        )

    def rename(self, old: Sequence[str], new: Sequence[str]) -> Columns:
        """Rename column ``old[i]`` to ``new[i]``.

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
        """Return the columns of both; those in both must be equal, bit by bit. A side without columns fits any.

        Raises:
            SchemaError: rows differ in number, or naming the column that differs.
        """
        for names in (self.tensors.keys() & other.arrays.keys(), self.arrays.keys() & other.tensors.keys()):
            if names:
                raise SchemaError(f"columns {sorted(names)} are tensors in one batch and arrays in the other")
        if self.names and other.names and self.rows != other.rows:
            raise SchemaError(f"union needs the same number of rows on both sides, got {self.rows} and {other.rows}")
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
        """Whether columns (in any order), rows and bits are the same."""
        return (
            self.rows == other.rows
            and self.tensors.keys() == other.tensors.keys()
            and self.arrays.keys() == other.arrays.keys()
            and all(tensors_equal(value, other.tensors[name]) for name, value in self.tensors.items())
            and all(arrays_equal(array, other.arrays[name]) for name, array in self.arrays.items())
        )


def chunk_bounds(rows: int, chunks: int, *, uneven: bool) -> list[range]:
    """Cut ``rows`` rows into ``chunks`` ranges of equal size, or if ``uneven`` of sizes that differ by at most one.

    Raises:
        SchemaError: ``chunks`` is below 1, or does not divide the rows although it must.
    """
    if chunks < 1:
        raise SchemaError(f"chunks must be at least 1, got {chunks}")
    size, larger = divmod(rows, chunks)
    if larger and not uneven:
        raise SchemaError(
            f"{rows} rows cannot be cut into {chunks} equal chunks: pad them (pad_dataproto_to_divisor), cut them with "
            "slice or split, or create the batch with auto_padding=True to allow chunks that differ by one row"
        )
    starts = [number * size + min(number, larger) for number in range(chunks + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def row_index(index: object, rows: int) -> Array:
    """Return positions 0..rows-1 for a list, tuple, range, array or tensor of integers (also negative) or booleans.

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
    """Return a non-tensor column: an array as it is, any other sequence as a 1-d object array of its elements."""
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
    return object_array(list(cast("Iterable[object]", value)))


def _lists_as_dimension(array: Array) -> Array:
    lists = array.ndim == 1 and len(array) > 0 and all(isinstance(each, list | tuple) for each in array)
    if not lists or len({len(each) for each in array}) != 1:
        return array
    return object_array([element for each in array for element in each]).reshape(len(array), len(array[0]))


def is_list_of_tensors(value: object) -> bool:
    if not isinstance(value, list | tuple):
        return False
    rows = cast("Sequence[object]", value)
    return bool(rows) and all(isinstance(row, torch.Tensor) for row in rows)


def tensor_columns(tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Check tensors; lists of tensors become ragged columns, and ragged columns with equal lengths share offsets.

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
                "all columns of a batch must have the same number of rows"
            )
    return _sharing_offsets(columns, order=list(columns))


def _sharing_offsets(columns: Mapping[str, torch.Tensor], *, order: Sequence[str]) -> dict[str, torch.Tensor]:
    shared = share_offsets({name: columns[name] for name in order if columns[name].is_nested})
    return {name: shared[name] if name in shared else columns[name] for name in order}


def union_meta_info(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of both; raise :class:`SchemaError` naming a key in both whose values differ."""
    for key in left.keys() & right.keys():
        if not values_equal(left[key], right[key]):
            raise SchemaError(f"meta_info {key!r} differs: {_short(left[key])} here, {_short(right[key])} in the other")
    return {**left, **right}


def concat_meta_info(infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the entries of all batches by the rule of :meth:`asyncrl.data.DataProto.concat`.

    Raises:
        SchemaError: naming the key and the batches whose values differ.
    """
    merged: dict[str, Any] = {}
    owner: dict[str, int] = {}
    for number, info in enumerate(infos):
        for key, value in info.items():
            if key == "metrics":
                for record in _metric_records(value, number):
                    metrics = merged.setdefault("metrics", {})
                    for name, metric in record.items():
                        metrics.setdefault(name, []).append(metric)
            elif key not in merged:
                merged[key], owner[key] = value, number
            elif not values_equal(merged[key], value):
                raise SchemaError(
                    f"meta_info {key!r} differs: {_short(merged[key])} in batch {owner[key]}, "
                    f"{_short(value)} in batch {number}"
                )
    return merged


def _metric_records(value: Any, number: int) -> list[Mapping[str, Any]]:
    if value is None:
        return []
    records = cast("list[object]", value) if isinstance(value, list) else [value]
    for record in records:
        if not isinstance(record, Mapping):
            raise SchemaError(
                f"meta_info 'metrics' of batch {number} must be a dict or a list of dicts, got {type(record).__name__}"
            )
    return cast("list[Mapping[str, Any]]", records)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
