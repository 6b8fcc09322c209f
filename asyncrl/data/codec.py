"""A batch as bytes, without pickle: a small header and the buffers of its columns.

The header (msgpack) says what the buffers are; the buffers are the memory of the tensors and arrays themselves. Nothing
is copied to encode contiguous host tensors, a slice encodes its own bytes and not its parent's, and decoding makes
tensors over the buffers it is given. Bytes that are not a batch raise :class:`asyncrl.errors.CodecError`: no code is
run, and nothing is allocated beyond the bytes that are there.

    >>> import torch
    >>> from asyncrl.data import DataProto
    >>> data = DataProto.from_dict(tensors={"rewards": torch.tensor([1.0, 0.0])}, meta_info={"step": 3})
    >>> encoded = encode(data)
    >>> [buffer.nbytes for buffer in encoded.buffers]
    [8]
    >>> decode(encoded.header, encoded.buffers) == data
    True
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
import torch

from asyncrl.data.buffers import array_bytes, array_over, as_bytes, dtype_name, tensor_bytes, tensor_over
from asyncrl.data.columns import Columns
from asyncrl.data.objects import MALFORMED, extension, object_array, packed
from asyncrl.data.proto import DataProto
from asyncrl.data.ragged import check_offsets, offsets_of, ragged_from_values, values_of
from asyncrl.errors import CodecError

__all__ = ["Encoded", "decode", "encode"]

_VERSION = 1

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class _Tensor(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A tensor column; ``shape`` is that of the values, ``offsets`` the buffer of a ragged column's offsets."""

    name: str
    dtype: str
    shape: list[_Count]
    values: _Count
    offsets: _Count | None


class _Array(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A numpy column, in ``buffer``, or as ``items`` if it holds objects."""

    name: str
    dtype: str
    shape: list[_Count]
    buffer: _Count | None
    items: list[Any] | None


class _Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    version: int
    rows: _Count
    has_batch: bool
    auto_padding: bool
    buffer_bytes: list[_Count]
    tensors: list[_Tensor]
    arrays: list[_Array]
    meta_info: Any


@dataclass(frozen=True, slots=True)
class Encoded:
    """A batch as bytes. The buffers are views of the batch's memory: use them before it changes."""

    header: bytes
    buffers: list[memoryview]

    @property
    def size_bytes(self) -> int:
        return len(self.header) + sum(buffer.nbytes for buffer in self.buffers)


def encode(data: DataProto) -> Encoded:
    """Header and buffers of ``data``. Tensors on a device are copied to the host.

    Raises:
        CodecError: naming the column or the entry of ``meta_info`` that holds something that is no data.
    """
    columns = data.columns()
    buffers: list[memoryview] = []

    def added(buffer: memoryview) -> int:
        buffers.append(buffer)
        return len(buffers) - 1

    tensors: list[_Tensor] = []
    arrays: list[_Array] = []
    offsets_buffer: dict[int, int] = {}
    for name, value in columns.tensors.items():
        try:
            dense, offsets = value, None
            if value.is_nested:
                dense, shared = values_of(value), offsets_of(value)
                if id(shared) not in offsets_buffer:
                    offsets_buffer[id(shared)] = added(tensor_bytes(shared))
                offsets = offsets_buffer[id(shared)]
            tensors.append(_Tensor(name, dtype_name(dense), list(dense.shape), added(tensor_bytes(dense)), offsets))
        except CodecError as error:
            raise CodecError(f"column {name!r}: {error}") from error
    for name, array in columns.arrays.items():
        try:
            if array.dtype == object:
                arrays.append(_Array(name, "object", list(array.shape), None, packed(list(array.flat))))
            else:
                dtype, buffer = array_bytes(array)
                arrays.append(_Array(name, dtype, list(array.shape), added(buffer), None))
        except CodecError as error:
            raise CodecError(f"column {name!r}: {error}") from error
    meta_info: dict[str, Any] = {}
    for key, entry in data.meta_info.items():
        try:
            meta_info[key] = packed(entry)
        except CodecError as error:
            raise CodecError(f"meta_info {key!r}: {error}") from error
    header = _Header(
        version=_VERSION,
        rows=columns.rows,
        has_batch=data.batch is not None,
        auto_padding=data.auto_padding,
        buffer_bytes=[buffer.nbytes for buffer in buffers],
        tensors=tensors,
        arrays=arrays,
        meta_info=meta_info if all(type(key) is str and key.isascii() for key in meta_info) else packed(data.meta_info),
    )
    try:
        return Encoded(header=_ENCODER.encode(header), buffers=buffers)
    except UnicodeEncodeError as error:
        raise CodecError(f"the name of a column is not text: {error}") from error


def decode(header: Any, buffers: Sequence[Any], *, copy: bool = False) -> DataProto:
    """The batch of a header and its buffers (anything with the buffer protocol).

    Tensors and arrays are made over the buffers and keep them alive. Over read-only buffers (Ray's object store) the
    batch is :attr:`DataProto.read_only`; with ``copy`` it owns its memory.

    Raises:
        CodecError: these bytes are no batch.
    """
    try:
        fields = _DECODER.decode(header)
        if fields.version != _VERSION:
            raise CodecError(f"version {fields.version} of the header is not known, expected {_VERSION}")
        memory = [as_bytes(buffer) for buffer in buffers]
        if [len(each) for each in memory] != fields.buffer_bytes:
            raise CodecError(
                f"the header tells of {len(fields.buffer_bytes)} buffers of {sum(fields.buffer_bytes)} bytes, "
                f"there are {len(memory)} of {sum(map(len, memory))}"
            )
        if copy:
            memory = [each.copy() for each in memory]
        return _batch(fields, memory)
    except MALFORMED as error:
        if isinstance(error, CodecError):
            raise
        raise CodecError(f"not a batch: {error}") from error


def _batch(fields: _Header, memory: list[np.ndarray[Any, Any]]) -> DataProto:
    def buffer(number: int | None) -> np.ndarray[Any, Any]:
        if number is None or number >= len(memory):
            raise CodecError(f"buffer {number} does not exist")
        return memory[number]

    tensors: dict[str, torch.Tensor] = {}
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    known_offsets: dict[int, torch.Tensor] = {}
    for column in fields.tensors:
        value = tensor_over(buffer(column.values), column.dtype, column.shape)
        if column.offsets is not None:
            if value.dim() == 0:
                raise CodecError(f"ragged column {column.name!r} has no values")
            if column.offsets not in known_offsets:
                # Copied, for torch computes with them whenever a ragged column is used.
                own = buffer(column.offsets).copy()
                known_offsets[column.offsets] = tensor_over(own, "int64", [len(own) // 8])
            check_offsets(known_offsets[column.offsets], len(value))
            value = ragged_from_values(value, known_offsets[column.offsets])
        if value.dim() == 0 or value.shape[0] != fields.rows:
            raise CodecError(f"column {column.name!r} has not the {fields.rows} rows of the batch")
        tensors[column.name] = value
    for field in fields.arrays:
        if field.items is not None:
            arrays[field.name] = object_array(field.shape, field.items)
        else:
            arrays[field.name] = array_over(buffer(field.buffer), field.dtype, field.shape)
    if len(tensors) != len(fields.tensors) or len(arrays) != len(fields.arrays) or type(fields.meta_info) is not dict:
        raise CodecError("two columns have one name, or meta_info is no dictionary")
    if fields.tensors and not fields.has_batch:
        raise CodecError("tensors without a batch")
    if not fields.has_batch and fields.rows != (len(next(iter(arrays.values()))) if arrays else 0):
        raise CodecError(f"no column has {fields.rows} rows")
    data = DataProto.from_columns(
        Columns(tensors=tensors, arrays=arrays, rows=fields.rows),
        meta_info=fields.meta_info,
        has_batch=fields.has_batch,
        auto_padding=fields.auto_padding,
    )
    data.check_consistency()
    return data


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Header, ext_hook=extension)
