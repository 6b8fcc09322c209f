"""Rows added so that a batch can be cut into equal parts, and taken off again."""

from __future__ import annotations

import numpy as np

from asyncrl.data.proto import DataProto
from asyncrl.errors import SchemaError

__all__ = ["pad_dataproto_to_divisor", "unpad_dataproto"]


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """``data`` with rows repeated from its beginning until ``size_divisor`` divides their number, and how many.

    A batch that fits already is returned as it is; otherwise the result is a copy and ``data`` stays as it was.
    A batch without rows fits every divisor.

        >>> padded, pad_size = pad_dataproto_to_divisor(data, 4)
        >>> padded.batch["x"].tolist(), pad_size
        ([1, 2, 3, 1], 1)

    Raises:
        SchemaError: ``size_divisor`` is below 1.
    """
    if size_divisor < 1:
        raise SchemaError(f"size_divisor must be at least 1, got {size_divisor}")
    rows = len(data)
    pad_size = -rows % size_divisor
    if pad_size == 0:
        return data, 0
    return DataProto.concat([data, data.select_idxs(np.arange(pad_size) % rows)]), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """``data`` without its last ``pad_size`` rows: a view, nothing is copied.

        >>> unpad_dataproto(data, 1).batch["x"].tolist()
        [1, 2]

    Raises:
        SchemaError: there are not as many rows.
    """
    if not 0 <= pad_size <= len(data):
        raise SchemaError(f"pad_size must lie in 0..{len(data)} (the rows there are), got {pad_size}")
    return data if pad_size == 0 else data.slice(0, len(data) - pad_size)
