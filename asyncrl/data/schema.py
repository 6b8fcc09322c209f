"""The schema of a batch: which columns it has, of which kind, dtype and shape per row, and how many rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch

from asyncrl.data.ragged import is_ragged, values_of
from asyncrl.errors import SchemaError

if TYPE_CHECKING:
    from asyncrl.data.proto import DataProto

__all__ = ["Column", "ColumnKind", "Schema", "column_of"]

ColumnKind: TypeAlias = Literal["tensor", "ragged", "array", "object"]
"""``tensor`` dense torch, ``ragged`` jagged torch, ``array`` numpy, ``object`` numpy of Python objects."""

_KINDS = ("tensor", "ragged", "array", "object")


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

    def __str__(self) -> str:
        sizes = ["*"] if self.kind == "ragged" else []
        sizes += [str(size) for size in self.shape]
        kind = "object" if self.kind == "object" else f"{self.kind} {self.dtype}"
        return kind + (f"[{', '.join(sizes)}]" if sizes else "")


@dataclass(frozen=True, slots=True)
class Schema:
    """Columns in order, tensors first. ``rows`` is None where any number is meant.

    >>> print(data.schema)
    rows: 3
    x: tensor int64
    name: object
    """

    columns: tuple[Column, ...]
    rows: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns.

        >>> data.schema.names
        ('x', 'name')
        """
        return tuple(column.name for column in self.columns)

    def __getitem__(self, name: str) -> Column:
        for column in self.columns:
            if column.name == name:
                return column
        raise KeyError(name)

    @staticmethod
    def of(data: DataProto) -> Schema:
        """The schema that ``data`` has, with its number of rows.

        >>> Schema.of(data).rows
        3
        """
        return data.schema

    def any_rows(self) -> Schema:
        """The same columns for any number of rows.

        >>> data.schema.any_rows() == data[:1].schema.any_rows()
        True
        """
        return Schema(columns=self.columns, rows=None)

    def diff(self, other: Schema) -> str:
        """What differs between this schema (expected) and ``other`` (found), one line each; empty if nothing does.

        The order of columns does not matter; rows matter only where both are given.

            >>> print(data.schema.diff(data[:1].schema))
            1 rows, expected 3
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

    def check(self, data: DataProto) -> None:
        """Check that ``data`` has this schema.

            >>> data.schema.any_rows().check(data[:1])

        Raises:
            SchemaError: listing every difference.
        """
        difference = self.diff(Schema.of(data))
        if difference:
            raise SchemaError("the batch does not have the declared schema:\n" + difference)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON: ``{"rows": ..., "columns": [{"name", "kind", "dtype", "shape"}]}``.

        >>> data.schema.to_json()["columns"][0]
        {'name': 'x', 'kind': 'tensor', 'dtype': 'int64', 'shape': []}
        """
        return {
            "rows": self.rows,
            "columns": [
                {"name": each.name, "kind": each.kind, "dtype": each.dtype, "shape": list(each.shape)}
                for each in self.columns
            ],
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Schema:
        """Counterpart of :meth:`to_json`.

            >>> Schema.from_json(data.schema.to_json()) == data.schema
            True

        Raises:
            SchemaError: ``value`` has another form.
        """
        try:
            rows = value["rows"]
            columns = tuple(
                Column(each["name"], each["kind"], each["dtype"], tuple(each["shape"])) for each in value["columns"]
            )
        except (KeyError, TypeError) as error:
            raise SchemaError(f"not a schema: {error!r}") from error
        for column in columns:
            if column.kind not in _KINDS:
                raise SchemaError(f"column {column.name!r} is of kind {column.kind!r}, expected one of {_KINDS}")
        return Schema(columns=columns, rows=rows)

    def __str__(self) -> str:
        rows = "any" if self.rows is None else str(self.rows)
        return "\n".join([f"rows: {rows}", *(f"{column.name}: {column}" for column in self.columns)])


def column_of(name: str, value: torch.Tensor | np.ndarray[Any, Any]) -> Column:
    """The schema of one column."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if is_ragged(value):
            return Column(name, "ragged", dtype, tuple(values_of(value).shape[1:]))
        return Column(name, "tensor", dtype, tuple(value.shape[1:]))
    shape = tuple(value.shape[1:])
    if value.dtype == object:
        return Column(name, "object", "object", shape)
    return Column(name, "array", {"U": "str", "S": "bytes"}.get(value.dtype.kind, str(value.dtype)), shape)
