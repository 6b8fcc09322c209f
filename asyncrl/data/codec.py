"""A batch as bytes, without pickle: a small header and the buffers of its columns.

The header (msgpack) describes the buffers; the buffers are the memory of the tensors and arrays themselves. Nothing
is copied to encode contiguous host tensors, a slice encodes its own bytes and not its parent's, and decoding makes
tensors over the buffers it is given. Bytes that are not a batch raise :class:`asyncrl.errors.CodecError`: no code is
run, and nothing is allocated beyond the bytes that arrived.

Python values (``meta_info``, elements of object arrays) become msgpack trees: None, bool, int of any size, float, str,
bytes, list, tuple, dict, numpy scalars and arrays, tensors (dense or ragged), each of which comes back as the type it
was. Any other type, subclasses included, is refused rather than turned into something similar.

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
from dataclasses import dataclass, field
from functools import lru_cache
from pickle import PickleBuffer
from typing import Annotated, Any, SupportsIndex, TypeAlias, cast

import msgspec
import numpy as np
import torch

from asyncrl.data.columns import Columns
from asyncrl.data.memory import array_bytes, array_over, as_bytes, dtype_name, object_array, tensor_bytes, tensor_over
from asyncrl.data.proto import DataProto
from asyncrl.data.ragged import check_offsets, normalise_ragged, offsets_of, ragged_from_values, values_of
from asyncrl.data.schema import Column, ColumnKind, Schema, array_dtype_name
from asyncrl.errors import CodecError, SchemaError

# Trees of plain values: what is in a list or a dictionary is known only once it has been looked at.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false


MALFORMED = (msgspec.MsgspecError, SchemaError, TypeError, ValueError, LookupError, OverflowError, RuntimeError)
"""Errors that decoding meaningless bytes may raise, to be turned into :class:`CodecError`."""

_TUPLE, _DICT, _INTEGER, _TEXT, _OBJECTS, _ARRAY, _SCALAR, _TENSOR, _RAGGED = range(1, 10)

_SAFE = {type(None), bool, float, bytes}
_DEEPEST = 100


def packed(value: Any, depth: int = 0) -> Any:
    """Return ``value`` as a tree that msgpack encodes without loss; raise :class:`CodecError` naming any other type."""
    if depth > _DEEPEST:
        raise CodecError(f"values are nested more than {_DEEPEST} deep")
    kind = type(value)
    if kind in _SAFE:
        return value
    if kind is str:
        return value if _is_text(value) else _extension(_TEXT, value.encode("utf-8", "surrogatepass"))
    if kind is int:
        if -(2**63) <= value < 2**64:
            return value
        return _extension(_INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    if kind is list:
        return _packed_list(value, depth)
    if kind is tuple:
        return _extension(_TUPLE, _packed_list(list(value), depth))
    if kind is dict:
        if all(type(key) is str and _is_text(key) for key in value):
            return {key: packed(item, depth + 1) for key, item in value.items()}
        return _extension(_DICT, [[packed(key, depth + 1), packed(item, depth + 1)] for key, item in value.items()])
    if isinstance(value, np.ndarray):
        if value.dtype == object and kind is np.ndarray:
            return _extension(_OBJECTS, [list(value.shape), _packed_list(list(value.flat), depth)])
        dtype, data = array_bytes(value)
        return _extension(_ARRAY, [dtype, list(value.shape), data])
    if isinstance(value, np.generic):
        dtype, data = array_bytes(np.asarray(value))
        return _extension(_SCALAR, [dtype, data])
    if kind is torch.Tensor or kind is torch.nn.Parameter or (isinstance(value, torch.Tensor) and value.is_nested):
        return _packed_tensor(value)
    raise CodecError(
        f"a value of type {kind.__module__}.{kind.__qualname__} cannot be encoded; use None, bool, int, float, str, "
        "bytes, list, tuple, dict, numpy arrays or tensors"
    )


def extension(code: int, data: memoryview) -> Any:
    """Decode msgpack's extension types, as :func:`packed` makes them. Arrays and tensors own their memory."""
    if code == _TEXT:
        return bytes(data).decode("utf-8", "surrogatepass")
    if code == _INTEGER:
        return int.from_bytes(data, "little", signed=True)
    tree = _DECODER.decode(data)
    if not isinstance(tree, list):
        raise CodecError(f"extension {code} must hold a list")
    if code == _TUPLE:
        return tuple(tree)
    if code == _DICT:
        return {key: item for key, item in tree}  # noqa: C416  unpacking checks that these are pairs
    if code == _OBJECTS:
        shape, items = tree
        return _objects(shape, items)
    if code == _ARRAY:
        dtype, shape, content = tree
        return array_over(as_bytes(_own(content)), dtype, _sizes(shape))
    if code == _SCALAR:
        dtype, content = tree
        return array_over(as_bytes(_own(content)), dtype, ())[()]
    if code == _TENSOR:
        dtype, shape, content = tree
        return tensor_over(as_bytes(_own(content)), dtype, _sizes(shape))
    if code == _RAGGED:
        values, offsets = tree
        if not isinstance(values, torch.Tensor) or not isinstance(offsets, torch.Tensor) or values.dim() == 0:
            raise CodecError("a ragged tensor is made of two tensors")
        check_offsets(offsets, len(values))
        return ragged_from_values(values, offsets)
    raise CodecError(f"unknown extension {code}")


def _objects(shape: Any, items: Any) -> np.ndarray[Any, Any]:
    if not isinstance(items, list):
        raise CodecError("the elements of an object array must be a list")
    return object_array(items).reshape(_sizes(shape))


def _packed_list(items: list[Any], depth: int) -> list[Any]:
    kinds = set(map(type, items))
    if kinds <= _SAFE or (kinds == {str} and all(map(str.isascii, items))):
        return items
    return [packed(item, depth + 1) for item in items]


def _packed_tensor(value: torch.Tensor) -> msgspec.msgpack.Ext:
    if value.is_nested:
        column = normalise_ragged(value, "value")
        return _extension(_RAGGED, [_packed_tensor(values_of(column)), _packed_tensor(offsets_of(column))])
    return _extension(_TENSOR, [dtype_name(value), list(value.shape), tensor_bytes(value)])


def _extension(code: int, content: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, content if isinstance(content, bytes) else _ENCODER.encode(content))


def _is_text(value: str) -> bool:
    """Whether UTF-8 can encode it: lone surrogates are str but not text."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _own(content: Any) -> bytearray:
    if not isinstance(content, bytes):  # a number would be the size of a new bytearray
        raise CodecError(f"expected bytes, got {type(content).__name__}")
    return bytearray(content)


def _sizes(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise CodecError(f"not a shape: {shape!r}")
    return tuple(shape)


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(ext_hook=extension)


COPY_READ_ONLY_BYTES = 64 * 1024
"""Read-only arrays up to this size are copied: pickle passes them by value, and a receiver's own are writable."""

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


@dataclass(slots=True)
class Encoded:
    """A batch as bytes. The buffers are views of the batch's memory: use them before it changes."""

    header: bytes
    buffers: list[memoryview]
    _fields: _Header | None = field(default=None, repr=False, compare=False)

    @property
    def fields(self) -> _Header:
        """The decoded header; raises :class:`CodecError` if it is no header of a batch."""
        if self._fields is None:
            try:
                self._fields = _BATCH_DECODER.decode(self.header)
            except MALFORMED as error:
                raise CodecError(f"not a batch: {error}") from error
        return self._fields

    @property
    def size_bytes(self) -> int:
        return len(self.header) + sum(buffer.nbytes for buffer in self.buffers)

    def own(self) -> Encoded:
        """Return the same over a copy of the memory."""
        return Encoded(self.header, [memoryview(bytearray(buffer)) for buffer in self.buffers])

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        out_of_band = int(protocol) >= 5
        return decode, (
            self.header,
            [PickleBuffer(each) if out_of_band else bytearray(each) for each in self.buffers],
        )


def encode(data: DataProto) -> Encoded:
    """Encode ``data``. Tensors on a device are copied to the host.

    Raises:
        CodecError: naming the column or the entry of ``meta_info`` whose type cannot be encoded.
    """
    return encode_slices(data, [range(len(data))])[0]


def encode_slices(data: DataProto, slices: Sequence[range]) -> list[Encoded]:
    """:func:`encode` the rows of each slice (consecutive ones), for little more than the price of one."""
    columns = data.columns()
    tensors = [_in_memory(name, value) for name, value in columns.tensors.items()]
    arrays = [_in_memory(name, array) for name, array in columns.arrays.items()]
    meta_info: dict[str, Any] = {}
    for key, entry in data.meta_info.items():
        try:
            meta_info[key] = packed(entry)
        except CodecError as error:
            raise CodecError(f"meta_info {key!r}: {error}") from error
    if not all(type(key) is str and key.isascii() for key in meta_info):
        meta_info = packed(data.meta_info)
    parts: list[Encoded] = []
    for rows in slices:
        buffers: list[memoryview] = []
        seen: dict[int, int] = {}
        header = _Header(
            version=_VERSION,
            rows=len(rows),
            has_batch=data.batch is not None,
            auto_padding=data.auto_padding,
            buffer_bytes=[],
            tensors=[_Tensor(each.name, each.dtype, *each.cut(rows, buffers, seen)) for each in tensors],
            arrays=[each.cut_array(rows, buffers) for each in arrays],
            meta_info=meta_info,
        )
        header.buffer_bytes = [buffer.nbytes for buffer in buffers]
        try:
            parts.append(Encoded(header=_ENCODER.encode(header), buffers=buffers))
        except UnicodeEncodeError as error:
            raise CodecError(f"the name of a column is not text: {error}") from error
    return parts


@dataclass(frozen=True, slots=True)
class _InMemory:
    """The bytes of a column, to be cut by rows.

    ``memory`` holds entries of ``entry_bytes`` and ``shape``: one for each row, or for each value of a ragged column;
    ``objects`` are those of an array that has no memory of its own.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    memory: memoryview
    entry_bytes: int
    offsets: torch.Tensor | None = None
    objects: np.ndarray[Any, Any] | None = None

    def cut(self, rows: range, buffers: list[memoryview], seen: dict[int, int]) -> tuple[list[int], int, int | None]:
        """Append what these rows need to ``buffers``; return their shape, and the numbers of values and offsets there.

        ``seen``: numbers of offsets that were appended before, by their id.
        """
        start, stop, place = rows.start, rows.stop, None
        if self.offsets is not None:
            offsets = self.offsets[start : stop + 1]
            start, stop = int(offsets[0]), int(offsets[-1])
            place = seen.get(id(self.offsets))
            if place is None:
                place = seen[id(self.offsets)] = len(buffers)
                buffers.append(tensor_bytes(offsets - start if start else offsets))
        buffers.append(self.memory[start * self.entry_bytes : stop * self.entry_bytes])
        return [stop - start, *self.shape], len(buffers) - 1, place

    def cut_array(self, rows: range, buffers: list[memoryview]) -> _Array:
        if self.objects is not None:
            items = self.objects[rows.start : rows.stop]
            try:
                return _Array(self.name, "object", list(items.shape), None, packed(list(items.flat)))
            except CodecError as error:
                raise CodecError(f"column {self.name!r}: {error}") from error
        shape, buffer, _ = self.cut(rows, buffers, {})
        return _Array(self.name, self.dtype, shape, buffer, None)


def _in_memory(name: str, value: torch.Tensor | np.ndarray[Any, Any]) -> _InMemory:
    try:
        if isinstance(value, np.ndarray):
            if value.dtype == object:
                return _InMemory(name, "object", value.shape[1:], memoryview(b""), 0, objects=value)
            if not value.flags.writeable and value.nbytes <= COPY_READ_ONLY_BYTES:
                value = value.copy()
            dtype, memory = array_bytes(value)
            return _InMemory(name, dtype, value.shape[1:], memory, memory.nbytes // max(1, len(value)))
        offsets = None
        if value.is_nested:
            value, offsets = values_of(value), offsets_of(value)
        memory = tensor_bytes(value)
        entry_bytes = memory.nbytes // max(1, len(value))
        return _InMemory(name, dtype_name(value), tuple(value.shape[1:]), memory, entry_bytes, offsets)
    except CodecError as error:
        raise CodecError(f"column {name!r}: {error}") from error


def decode(header: Any, buffers: Sequence[Any], *, copy: bool = False) -> DataProto:
    """Decode the batch of a header and its buffers (objects with the buffer protocol).

    Tensors and arrays are made over the buffers and keep them alive. Over read-only buffers (Ray's object store) the
    batch is :attr:`DataProto.read_only`; with ``copy`` it owns its memory.

    Raises:
        CodecError: these bytes are no batch.
    """
    try:
        fields = _BATCH_DECODER.decode(header)
        if fields.version != _VERSION:
            raise CodecError(f"unknown version {fields.version} of the header, expected {_VERSION}")
        memory = [as_bytes(buffer) for buffer in buffers]
        if [len(each) for each in memory] != fields.buffer_bytes:
            raise CodecError(
                f"the header declares {len(fields.buffer_bytes)} buffers of {sum(fields.buffer_bytes)} bytes, "
                f"got {len(memory)} of {sum(map(len, memory))}"
            )
        if copy:
            memory = [each.copy() for each in memory]
        return _batch(fields, memory)
    except MALFORMED as error:
        if isinstance(error, CodecError):
            raise
        raise CodecError(f"not a batch: {error}") from error


def schema_of(fields: _Header) -> Schema:
    columns = [
        _column(each.name, "tensor" if each.offsets is None else "ragged", each.dtype, tuple(each.shape[1:]))
        for each in fields.tensors
    ]
    columns += [
        _column(each.name, "array" if each.items is None else "object", each.dtype, tuple(each.shape[1:]))
        for each in fields.arrays
    ]
    return Schema(columns=tuple(columns), rows=fields.rows)


@lru_cache(maxsize=1024)
def _column(name: str, kind: ColumnKind, dtype: str, shape: tuple[int, ...]) -> Column:
    return Column(name, kind, array_dtype_name(np.dtype(dtype)) if kind == "array" else dtype, shape)


def decode_joined(parts: Sequence[Encoded]) -> DataProto:
    """Decode the rows of all parts, in order, into new memory, without ``meta_info``.

    Raises:
        CodecError: these bytes are no batches.
        SchemaError: their columns differ.
    """
    fields = [part.fields for part in parts]
    dense = [[(each.name, each.dtype, each.shape[1:], each.offsets) for each in part.tensors] for part in fields]
    alike = all(each == dense[0] for each in dense) and not any(part.arrays for part in fields)
    if not alike or any(offsets is not None for _, _, _, offsets in dense[0]):
        decoded = [decode(part.header, part.buffers) for part in parts]
        return DataProto.concat([DataProto(each.batch, each.non_tensor_batch) for each in decoded])
    rows = sum(part.rows for part in fields)
    tensors: dict[str, torch.Tensor] = {}
    for number, (name, dtype, shape, _) in enumerate(dense[0]):
        memory = bytearray().join(
            part.buffers[each.tensors[number].values] for part, each in zip(parts, fields, strict=True)
        )
        tensors[name] = tensor_over(as_bytes(memory), dtype, [rows, *shape])
    return DataProto.from_columns(Columns(tensors=tensors, arrays={}, rows=rows), has_batch=fields[0].has_batch)


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
                # A copy, since torch computes with them whenever a ragged column is used.
                own = buffer(column.offsets).copy()
                known_offsets[column.offsets] = tensor_over(own, "int64", [len(own) // 8])
            check_offsets(known_offsets[column.offsets], len(value))
            value = ragged_from_values(value, known_offsets[column.offsets])
        if value.dim() == 0 or value.shape[0] != fields.rows:
            raise CodecError(f"column {column.name!r} does not have the {fields.rows} rows of the batch")
        tensors[column.name] = value
    for array in fields.arrays:
        if array.items is not None:
            arrays[array.name] = _objects(array.shape, array.items)
        else:
            arrays[array.name] = array_over(buffer(array.buffer), array.dtype, array.shape)
    if len(tensors) != len(fields.tensors) or len(arrays) != len(fields.arrays) or type(fields.meta_info) is not dict:
        raise CodecError("two columns have one name, or meta_info is no dictionary")
    if fields.tensors and not fields.has_batch:
        raise CodecError("tensors without a batch")
    if not fields.has_batch and fields.rows != (len(next(iter(arrays.values()))) if arrays else 0):
        raise CodecError(f"no column has {fields.rows} rows")
    data = DataProto.from_columns(
        Columns(tensors=tensors, arrays=arrays, rows=fields.rows),
        meta_info=cast("Any", fields).meta_info,
        has_batch=fields.has_batch,
        auto_padding=fields.auto_padding,
    )
    data.check_consistency()
    return data


_BATCH_DECODER = msgspec.msgpack.Decoder(_Header, ext_hook=extension)
