"""RowFunction: what :meth:`DataProtoFuture.then` does to rows, wherever they are consumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from asyncrl.data.equality import values_equal
from asyncrl.data.proto import DataProto
from asyncrl.data.schema import Column, Schema
from asyncrl.errors import SchemaError, UserCodeError

__all__ = ["RowFunction"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowFunction:
    """A function of rows, with what it takes and gives besides them. Pickles if ``function`` does.

    Attributes:
        name: for messages.
        takes_meta_info, takes_auto_padding, takes_batch: of the batch that it is applied to; the last is whether that
            has a TensorDict.
        gives: the columns, in order, and ``meta_info`` that it was seen to give for no rows, and keeps to.
    """

    function: Callable[[DataProto], DataProto]
    name: str
    takes_meta_info: dict[str, Any]
    takes_auto_padding: bool
    takes_batch: bool
    gives: Schema
    gives_meta_info: dict[str, Any]
    gives_auto_padding: bool
    gives_batch: bool

    @staticmethod
    def tried(
        function: Callable[[DataProto], DataProto],
        schema: Schema,
        *,
        name: str,
        meta_info: dict[str, Any],
        auto_padding: bool,
        has_batch: bool,
    ) -> RowFunction:
        """Apply ``function`` to a batch of these columns without rows, to learn what it gives.

        Raises:
            UserCodeError: it raised, or gave something else than a batch.
            SchemaError: it gave rows.
        """
        given = _without_rows(schema, meta_info=meta_info, auto_padding=auto_padding, has_batch=has_batch)
        result = _applied(function, given, name, rows="no rows, to learn its columns")
        if len(result):
            raise SchemaError(f"{name} must give one row for each row, and gave {len(result)} for none")
        return RowFunction(
            function=function,
            name=name,
            takes_meta_info=meta_info,
            takes_auto_padding=auto_padding,
            takes_batch=has_batch,
            gives=result.schema.any_rows(),
            gives_meta_info=dict(result.meta_info),
            gives_auto_padding=result.auto_padding,
            gives_batch=result.batch is not None,
        )

    def __call__(self, data: DataProto) -> DataProto:
        """Apply it to a batch (columns without ``meta_info``) that nobody else writes to.

        Raises:
            UserCodeError: it raised, or gave something else than a batch.
            SchemaError: not one row for each row, or other columns or ``meta_info`` than it gave for no rows.
        """
        rows = len(data)
        given = _given(
            data, meta_info=self.takes_meta_info, auto_padding=self.takes_auto_padding, has_batch=self.takes_batch
        )
        result = _applied(self.function, given, self.name, rows=f"{rows} rows")
        if len(result) != rows:
            raise SchemaError(f"{self.name} must give one row for each row, and gave {len(result)} for {rows}")
        difference = self.gives.diff(result.schema)
        if difference:
            raise SchemaError(f"{self.name} gave other columns for {rows} rows than for none:\n{difference}")
        if not values_equal(self.gives_meta_info, result.meta_info):
            raise SchemaError(
                f"{self.name} gave other meta_info for {rows} rows than for none: what depends on the rows belongs in "
                "a column, since every consumer has some of the rows only"
            )
        return DataProto(batch=result.batch, non_tensor_batch=result.non_tensor_batch)


def _applied(function: Callable[[DataProto], DataProto], data: DataProto, name: str, *, rows: str) -> DataProto:
    try:
        result: object = function(data)
    except Exception as error:
        raise UserCodeError(f"{name} raised {type(error).__name__} for {rows}: {error}") from error
    if not isinstance(result, DataProto):  # pyright: ignore[reportUnnecessaryIsInstance]  programs without types
        raise UserCodeError(f"{name} must return a DataProto, and returned {type(result).__name__} for {rows}")
    return result


def _without_rows(schema: Schema, *, meta_info: dict[str, Any], auto_padding: bool, has_batch: bool) -> DataProto:
    tensors = {each.name: _tensor(each) for each in schema.columns if each.kind in ("tensor", "ragged")}
    arrays = {each.name: _array(each) for each in schema.columns if each.name not in tensors}
    empty = DataProto.from_dict(tensors=tensors, non_tensors=arrays)
    return _given(empty, meta_info=meta_info, auto_padding=auto_padding, has_batch=has_batch)


def _given(data: DataProto, *, meta_info: dict[str, Any], auto_padding: bool, has_batch: bool) -> DataProto:
    return DataProto.from_columns(data.columns(), meta_info=meta_info, has_batch=has_batch, auto_padding=auto_padding)


def _tensor(column: Column) -> torch.Tensor:
    values = torch.empty(0, *column.shape, dtype=getattr(torch, column.dtype))
    if column.kind == "tensor":
        return values
    return torch.nested.nested_tensor_from_jagged(values, torch.zeros(1, dtype=torch.int64))


def _array(column: Column) -> np.ndarray[Any, np.dtype[Any]]:
    return np.empty((0, *column.shape), dtype=np.dtype(column.dtype))
