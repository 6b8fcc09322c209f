"""The schema of a batch: which columns it has, of which kind, dtype and shape per row, and how many rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch

from asyncrl.data.ragged import is_ragged, values_of
from asyncrl.errors import SchemaError

if TYPE_CHECKING:
    from asyncrl.data.plan import Header


ColumnKind: TypeAlias = Literal["tensor", "ragged", "array", "object"]
"""``tensor`` dense torch, ``ragged`` jagged torch, ``array`` numpy, ``object`` numpy of Python objects."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column. ``shape`` is that of one row; for a ragged column, the shape after the ragged dimension.

    ``dtype`` is torch's name without the prefix (``int64``, ``bfloat16``) or numpy's (``float64``, ``str``, ``bytes``,
    ``datetime64[ns]``, ``object``). Widths of text and bytes are not part of the schema.
    """

    name: str
    kind: ColumnKind
    dtype: str
    shape: tuple[int, ...] = ()

    @property
    def is_tensor(self) -> bool:
        return self.kind in ("tensor", "ragged")

    def __str__(self) -> str:
        sizes = ["*"] if self.kind == "ragged" else []
        sizes += [str(size) for size in self.shape]
        kind = "object" if self.kind == "object" else f"{self.kind} {self.dtype}"
        return kind + (f"[{', '.join(sizes)}]" if sizes else "")


@dataclass(frozen=True, slots=True)
class Schema:
    """Columns in order, tensors first. ``rows`` is None if any number is meant.

    >>> print(data.schema)
    rows: 3
    x: tensor int64
    name: object
    """

    columns: tuple[Column, ...]
    rows: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    def __getitem__(self, name: str) -> Column:
        for column in self.columns:
            if column.name == name:
                return column
        raise KeyError(name)

    def any_rows(self) -> Schema:
        return Schema(columns=self.columns, rows=None)

    def diff(self, other: Schema) -> str:
        """Return the differences between this schema (expected) and ``other`` (found), one line each; "" if equal.

        The order of columns does not matter; rows matter only where both are given.
        """
        lines: list[str] = []
        found = {column.name: column for column in other.columns}
        for column in self.columns:
            match = found.pop(column.name, None)
            if match is None:
                lines.append(f"column {column.name!r} is missing (expected {column})")
            elif match != column:
                lines.append(f"column {column.name!r} is {match}, expected {column}")
        lines += [f"column {column.name!r} ({column}) is not expected" for column in found.values()]
        if self.rows is not None and other.rows is not None and self.rows != other.rows:
            lines.append(f"{other.rows} rows, expected {self.rows}")
        return "\n".join(lines)

    def __str__(self) -> str:
        rows = "any" if self.rows is None else str(self.rows)
        return "\n".join([f"rows: {rows}", *(f"{column.name}: {column}" for column in self.columns)])


def common_schema(schemas: Sequence[Schema]) -> Schema:
    """Return the columns that all batches to be concatenated have.

    Raises:
        SchemaError: there is no batch, or naming the first one that differs from batch 0, and each difference.
    """
    if not schemas:
        raise SchemaError("concat needs at least one batch: the columns of none are unknown")
    expected = schemas[0].any_rows()
    for number, schema in enumerate(schemas[1:], start=1):
        difference = expected.diff(schema)
        if difference:
            raise SchemaError(f"batch {number} does not fit batch 0 in concat:\n{difference}")
    return expected


def column_of(name: str, value: torch.Tensor | np.ndarray[Any, Any]) -> Column:
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if is_ragged(value):
            return Column(name, "ragged", dtype, tuple(values_of(value).shape[1:]))
        return Column(name, "tensor", dtype, tuple(value.shape[1:]))
    shape = tuple(value.shape[1:])
    if value.dtype == object:
        return Column(name, "object", "object", shape)
    return Column(name, "array", array_dtype_name(value.dtype), shape)


def array_dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the dtype's name in a :class:`Column`, without the width of text and bytes."""
    return {"U": "str", "S": "bytes"}.get(dtype.kind, str(dtype))


@dataclass(frozen=True, slots=True)
class Declared:
    """The number of rows and the columns that a method declares for its result; None if it does not."""

    rows: int | None = None
    schema: Schema | None = None

    def check(self, header: Header, label: str) -> None:
        """Raise :class:`SchemaError` if the batch that ``label`` returned differs."""
        found: list[str] = []
        if self.rows is not None and header.rows != self.rows:
            found.append(f"{header.rows} rows, declared were {self.rows}")
        if self.schema is not None and (difference := self.schema.any_rows().diff(header.schema)):
            found.append(difference)
        if found:
            raise SchemaError(f"{label} returned another batch than it declares:\n" + "\n".join(found))

    def with_rows(self, count: Callable[[int], int]) -> Declared | None:
        """Return what is known of a batch with ``count(rows)`` rows and other columns made of this one."""
        return None if self.rows is None else Declared(count(self.rows))
