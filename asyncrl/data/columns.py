"""Rows of columns: tensors, ragged columns and numpy arrays cut, taken, joined and reshaped alike.

A batch is handed around as :class:`Columns`: its tensors (dense and ragged) and its arrays, all with the same rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from asyncrl.data.ragged import (
    concat_ragged,
    is_ragged,
    normalise_ragged,
    ragged_from_list,
    share_offsets,
    slice_ragged,
    take_ragged,
)
from asyncrl.errors import SchemaError

__all__ = ["Array", "Columns", "array_column", "row_index", "tensor_columns"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a batch with ``rows`` rows."""

    tensors: Mapping[str, torch.Tensor]
    arrays: Mapping[str, Array]
    rows: int

    def _parted(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Dense and ragged tensors, apart."""
        dense = {name: each for name, each in self.tensors.items() if not each.is_nested}
        ragged = {name: each for name, each in self.tensors.items() if each.is_nested}
        return dense, ragged

    def _joined(self, dense: dict[str, torch.Tensor], ragged: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Dense and ragged tensors in the order of the columns."""
        return {name: dense[name] if name in dense else ragged[name] for name in self.tensors}

    def slice(self, start: int, end: int, step: int = 1) -> Columns:
        """Rows ``start, start + step, ...`` before ``end``, all within 0..rows, ``step >= 1``.

        Views; a ragged column is copied when ``step`` is not 1.
        """
        dense, ragged = self._parted()
        rows = len(range(start, end, step))
        if step == 1:
            cut = slice_ragged(ragged, start, start + rows)
        else:
            cut = take_ragged(ragged, torch.arange(start, max(start, end), step))
        return Columns(
            tensors=self._joined({name: each[start:end:step] for name, each in dense.items()}, cut),
            arrays={name: each[start:end:step] for name, each in self.arrays.items()},
            rows=rows,
        )

    def take(self, index: Array) -> Columns:
        """Rows ``index`` (int64 ``[N]``, each within 0..rows-1), copied."""
        dense, ragged = self._parted()
        positions = torch.from_numpy(np.ascontiguousarray(index))
        taken: dict[str, torch.Tensor] = {}
        for name, each in dense.items():
            taken[name] = each.index_select(0, positions.to(each.device))
        return Columns(
            tensors=self._joined(taken, take_ragged(ragged, positions)),
            arrays={name: each[index] for name, each in self.arrays.items()},
            rows=len(index),
        )

    @staticmethod
    def concat(parts: Sequence[Columns]) -> Columns:
        """All rows of parts that have the same columns."""
        first = parts[0]
        dense, ragged = zip(*(part._parted() for part in parts), strict=True)
        return Columns(
            tensors=first._joined(
                {name: torch.cat([part[name] for part in dense]) for name in dense[0]}, concat_ragged(ragged)
            ),
            arrays={name: np.concatenate([part.arrays[name] for part in parts]) for name in first.arrays},
            rows=sum(part.rows for part in parts),
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
    if array.size == 0 and array.dtype != bool:
        return np.zeros(0, dtype=np.int64)
    if array.dtype == bool:
        if len(array) != rows:
            raise IndexError(f"a boolean index needs one entry for each of the {rows} rows, got {len(array)}")
        return np.flatnonzero(array)
    if array.dtype.kind not in "iu":
        raise TypeError(f"rows are selected by integers or booleans, got {array.dtype}")
    low, high = int(array.min()), int(array.max())
    if low < -rows or high >= rows:
        raise IndexError(f"row {high if high >= rows else low} is out of range for {rows} rows")
    array = array.astype(np.int64)
    return np.where(array < 0, array + rows, array)


def array_column(name: str, value: object) -> Array:
    """A non-tensor column. Arrays stay as they are; any other sequence becomes a 1-d object array of its elements."""
    if isinstance(value, np.ndarray):
        if value.ndim == 0:
            raise SchemaError(f"column {name!r} has no rows: it is a 0-d array")
        return value
    if isinstance(value, torch.Tensor):
        raise SchemaError(f"column {name!r} is a tensor and belongs to the batch, not to non_tensor_batch")
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise SchemaError(
            f"column {name!r} must be an array or a list with one element for each row, got {type(value).__name__}"
        )
    elements = list(value)
    column = np.empty(len(elements), dtype=object)
    # Element by element: numpy would turn lists of equal length into a second dimension.
    for row, element in enumerate(elements):
        column[row] = element
    return column


def tensor_columns(tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Checked tensors; lists of tensors become ragged columns, and ragged columns with equal lengths share offsets."""
    dense: dict[str, torch.Tensor] = {}
    ragged: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        if isinstance(value, list | tuple) and all(isinstance(row, torch.Tensor) for row in value):
            try:
                ragged[name] = ragged_from_list(value)
            except SchemaError as error:
                raise SchemaError(f"column {name!r}: {error}") from error
        elif not isinstance(value, torch.Tensor):
            raise SchemaError(
                f"column {name!r} of the batch must be a tensor or a list of tensors (ragged), "
                f"got {type(value).__name__}"
            )
        elif is_ragged(value):
            ragged[name] = normalise_ragged(value, name)
        elif value.dim() == 0:
            raise SchemaError(f"column {name!r} has no rows: it is a 0-d tensor")
        else:
            dense[name] = value
    ragged = share_offsets(ragged)
    return {name: dense[name] if name in dense else ragged[name] for name in tensors}
