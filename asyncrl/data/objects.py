"""Python values as msgpack trees: exactly the types named here, each coming back as the type it was.

None, bool, int of any size, float, str, bytes, list, tuple, dict, numpy scalars and arrays, tensors (dense or ragged).
Anything else is refused rather than turned into something similar, subclasses included.
"""

# Trees of plain values: what is in a list or a dictionary is known only once it has been looked at.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch

from asyncrl.data.buffers import array_bytes, array_over, as_bytes, dtype_name, tensor_bytes, tensor_over
from asyncrl.data.ragged import check_offsets, normalise_ragged, offsets_of, ragged_from_values, values_of
from asyncrl.errors import CodecError, SchemaError

__all__ = ["MALFORMED", "extension", "packed"]

MALFORMED = (msgspec.MsgspecError, SchemaError, TypeError, ValueError, LookupError, OverflowError, RuntimeError)
"""What decoding bytes of no meaning may raise, to be turned into :class:`CodecError`."""

_TUPLE, _DICT, _INTEGER, _TEXT, _OBJECTS, _ARRAY, _SCALAR, _TENSOR, _RAGGED = range(1, 10)

_SAFE = {type(None), bool, float, bytes}
_DEEPEST = 100


def packed(value: Any, depth: int = 0) -> Any:
    """``value`` as a tree that msgpack encodes without loss.

    Raises:
        CodecError: naming the type that cannot be encoded.
    """
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
    """Counterpart of :func:`packed` for msgpack's extension types. Arrays and tensors own their memory."""
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
        return object_array(shape, items)
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


def object_array(shape: Any, items: Any) -> np.ndarray[Any, Any]:
    """An object array of this shape with these elements in row order."""
    sizes = _sizes(shape)
    if not isinstance(items, list):
        raise CodecError("the elements of an object array must be a list")
    array = np.empty(len(items), dtype=object)
    for position, item in enumerate(items):
        array[position] = item
    return array.reshape(sizes)


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
    """Whether UTF-8 can hold it: lone surrogates are str but not text."""
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
