"""Bitwise equality of columns and of the plain values beside them: NaN equals the same NaN, 0.0 is not -0.0."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from asyncrl.data.ragged import offsets_of, values_of

__all__ = ["arrays_equal", "tensors_equal", "values_equal"]

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensors_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Same kind, dtype, shape and bits; devices may differ."""
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


def arrays_equal(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> bool:
    """Same dtype, shape and bits; elements of object arrays are compared by :func:`values_equal`."""
    return _arrays_equal(left, right, ())


def values_equal(left: object, right: object) -> bool:
    """Deep equality of plain values (numbers, text, lists, dicts, arrays, tensors) of the same types.

    Values that contain themselves are equal if nothing else differs.
    """
    return _equal(left, right, ())


_Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
_Pairs: TypeAlias = tuple[tuple[int, int], ...]
"""What is being compared already, outermost first: whoever meets a pair again has come round."""


def _arrays_equal(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any], inside: _Pairs) -> bool:
    if left.shape != right.shape:
        return False
    if left.dtype != right.dtype:
        return False
    if left.dtype == object:
        inside = (*inside, (id(left), id(right)))
        return all(_equal(one, other, inside) for one, other in zip(left.flat, right.flat, strict=True))
    if left.dtype.kind in "fcmM" and left.dtype.itemsize in (2, 4, 8, 16) and left.dtype.char not in "gG":
        # Bits, so that NaN and NaT equal themselves. complex128 is compared as pairs of 8 bytes.
        unit = np.dtype(f"u{min(left.dtype.itemsize, 8)}")
        left, right = np.ascontiguousarray(left), np.ascontiguousarray(right)
        return bool(np.array_equal(left.reshape(-1).view(unit), right.reshape(-1).view(unit)))
    return bool(np.array_equal(left, right))


def _equal(left: object, right: object, inside: _Pairs) -> bool:
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, float) and isinstance(right, float):
        return struct.pack("d", left) == struct.pack("d", right)
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return tensors_equal(left, right)
    if isinstance(left, np.generic) and isinstance(right, np.generic):
        return arrays_equal(np.asarray(cast("Any", left)), np.asarray(cast("Any", right)))
    if isinstance(left, np.ndarray | Mapping | list | tuple):
        left = cast("object", left)
        return (id(left), id(right)) in inside or _contents_equal(left, right, (*inside, (id(left), id(right))))
    return bool(left == right)


def _contents_equal(left: object, right: object, inside: _Pairs) -> bool:
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return _arrays_equal(cast("_Array", left), cast("_Array", right), inside)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        mine, other = cast("Mapping[Any, object]", left), cast("Mapping[Any, object]", right)
        return mine.keys() == other.keys() and all(_equal(mine[key], other[key], inside) for key in mine)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        ours, theirs = cast("Sequence[object]", left), cast("Sequence[object]", right)
        return len(ours) == len(theirs) and all(map(_equal, ours, theirs, repeat(inside)))
    return False
