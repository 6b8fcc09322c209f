"""Rows folded into a second dimension, and back."""

from __future__ import annotations

from typing import Any

from asyncrl.data.columns import Columns
from asyncrl.data.proto import DataProto
from asyncrl.errors import SchemaError

__all__ = ["fold_batch_dim", "unfold_batch_dim"]


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """``new_batch_size`` rows of ``B / new_batch_size`` consecutive ones each: columns ``[B, ...]`` gain a dimension.

        >>> fold_batch_dim(data.repeat(2), 3).batch["x"].tolist()
        [[1, 1], [2, 2], [3, 3]]

    Raises:
        SchemaError: ``new_batch_size`` does not divide the rows, or a column is ragged.
    """
    columns = data.columns()
    if new_batch_size < 1 or columns.rows % new_batch_size:
        raise SchemaError(f"{columns.rows} rows cannot be folded into {new_batch_size}")
    inner = columns.rows // new_batch_size

    def folded(value: Any) -> Any:
        return value.reshape(new_batch_size, inner, *value.shape[1:])

    _require_dense(columns)
    return data.with_rows(
        Columns(
            tensors={name: folded(each) for name, each in columns.tensors.items()},
            arrays={name: folded(each) for name, each in columns.arrays.items()},
            rows=new_batch_size,
        )
    )


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Counterpart of :func:`fold_batch_dim`: the first ``batch_dims`` dimensions of every column become rows.

        >>> unfold_batch_dim(fold_batch_dim(data.repeat(2), 3)) == data.repeat(2)
        True

    Raises:
        SchemaError: columns differ in these dimensions or have fewer, or a column is ragged.
    """
    columns = data.columns()
    _require_dense(columns)
    values: dict[str, Any] = {**columns.tensors, **columns.arrays}
    leading = {name: tuple(each.shape[:batch_dims]) for name, each in values.items()}
    if batch_dims < 1 or not leading or len(set(leading.values())) > 1 or len(min(leading.values())) < batch_dims:
        raise SchemaError(f"columns must agree in their first {batch_dims} dimensions, got {leading}")

    def unfolded(value: Any) -> Any:
        return value.reshape(rows, *value.shape[batch_dims:])

    rows = 1
    for size in next(iter(leading.values())):
        rows *= size
    return data.with_rows(
        Columns(
            tensors={name: unfolded(each) for name, each in columns.tensors.items()},
            arrays={name: unfolded(each) for name, each in columns.arrays.items()},
            rows=rows,
        )
    )


def _require_dense(columns: Columns) -> None:
    if columns.ragged:
        raise SchemaError(f"ragged columns {list(columns.ragged)} cannot be folded")
