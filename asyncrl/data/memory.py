"""The memory of tensors and arrays: their bytes, without a copy where possible, and tensors and arrays over bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from asyncrl.errors import CodecError

# torch leaves what from_numpy takes unknown.
# pyright: reportUnknownMemberType=false


_TORCH_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    )
}

_NAMES = {dtype: name for name, dtype in _TORCH_DTYPES.items()}

_NUMPY_DTYPES = {
    dtype: np.dtype(name)
    for name, dtype in _TORCH_DTYPES.items()
    if not name.startswith(("bfloat", "float8", "complex"))
}
"""Dtypes that numpy has too: numpy makes and cuts its arrays in a fraction of the time."""

_NUMPY_DTYPE = re.compile(
    r"[<>|](?:b1|[iu][1248]|f[248]|c(?:8|16)|[US][1-9]\d{0,8}|[mM]8(?:\[\d{0,6}[a-zA-Z]{1,2}\])?)"
)

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class _Borrowed:
    """Read-only memory that is declared writable to torch, which has no read-only tensors and would only warn."""

    def __init__(self, data: _Bytes) -> None:
        self._owner = data
        self.__array_interface__ = {
            "data": (data.__array_interface__["data"][0], False),
            "shape": data.shape,
            "typestr": "|u1",
            "version": 3,
        }


def cat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate along the first dimension, in memory from numpy where that is possible.

    numpy requests huge pages, torch does not: 64 MB take a fifth of the time in memory that is new to the process.
    """
    first = tensors[0]
    if first.dtype in _NUMPY_DTYPES and all(
        each.is_cpu and each.dtype == first.dtype and not each.requires_grad and not each.is_neg() for each in tensors
    ):
        return torch.from_numpy(np.concatenate([each.numpy() for each in tensors]))
    return torch.cat(list(tensors))


def object_array(elements: Sequence[object]) -> np.ndarray[Any, np.dtype[Any]]:
    array = np.empty(len(elements), dtype=object)
    # Element by element: numpy would turn lists of equal length into a second dimension.
    for position, element in enumerate(elements):
        array[position] = element
    return array


def dtype_name(tensor: torch.Tensor) -> str:
    """Return ``int64`` for ``torch.int64``; raise :class:`CodecError` for a dtype that the codec lacks (quantised)."""
    name = _NAMES.get(tensor.dtype)
    if name is None:
        raise CodecError(f"tensors of {tensor.dtype} cannot be encoded; convert to one of {sorted(_TORCH_DTYPES)}")
    return name


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a dense tensor in row order: a view if it is contiguous and on the host, otherwise a copy.

    Raises:
        CodecError: sparse, or without data (the meta device).
    """
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise CodecError(f"a {tensor.layout} tensor on {tensor.device} cannot be encoded; make it dense and real first")
    if tensor.dtype in _NUMPY_DTYPES and tensor.is_cpu and not tensor.is_neg():
        array: np.ndarray[Any, Any] = (tensor.detach() if tensor.requires_grad else tensor).numpy()
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.size else memoryview(b"")
    host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if host.numel() == 0:
        return memoryview(b"")
    if host.is_complex():
        host = torch.view_as_real(host)
    # A single row counts as contiguous whatever its stride is.
    return host.as_strided((host.numel(),), (1,)).view(torch.uint8).numpy().data


def array_bytes(array: np.ndarray[Any, Any]) -> tuple[str, memoryview]:
    """Return the dtype (numpy's ``dtype.str``) and bytes of an array in row order: a view if it is contiguous.

    Raises:
        CodecError: masked arrays, structured and other unusual dtypes.
    """
    if isinstance(array, np.ma.MaskedArray) or not _NUMPY_DTYPE.fullmatch(array.dtype.str):
        raise CodecError(f"a {type(array).__name__} of {array.dtype} cannot be encoded; convert it to a plain array")
    if array.size == 0:
        return array.dtype.str, memoryview(b"")
    return array.dtype.str, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def as_bytes(buffer: Any) -> _Bytes:
    """Return any contiguous buffer as an array of its bytes; writable only if the buffer is."""
    view = memoryview(buffer)
    if not view.contiguous:
        raise CodecError("a buffer must be contiguous")
    return np.frombuffer(view.cast("B") if view.nbytes else b"", dtype=np.uint8)


def tensor_over(data: _Bytes, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor over these bytes, not copied unless they are not aligned for the dtype.

    torch has no read-only tensors: over read-only bytes the tensor is made in inference mode, so that writing to it at
    least raises, if only after the fact.

    Raises:
        CodecError: unknown dtype, or a shape that needs another number of bytes.
    """
    torch_dtype = _TORCH_DTYPES.get(dtype)
    if torch_dtype is None:
        raise CodecError(f"unknown tensor dtype {dtype!r}")
    _check_size(data, torch_dtype.itemsize, shape)
    try:
        if len(data) == 0:
            return torch.empty(tuple(shape), dtype=torch_dtype)
        if data.__array_interface__["data"][0] % torch_dtype.itemsize:
            data = data.copy()
        if data.flags.writeable:
            if torch_dtype in _NUMPY_DTYPES:
                return torch.from_numpy(data.view(_NUMPY_DTYPES[torch_dtype]).reshape(tuple(shape)))
            return torch.from_numpy(data).view(torch_dtype).view(tuple(shape))
        with torch.inference_mode():
            return torch.from_numpy(np.asarray(_Borrowed(data))).view(torch_dtype).view(tuple(shape))
    except (RuntimeError, OverflowError) as error:
        raise CodecError(f"no tensor of shape {tuple(shape)}: {error}") from error


def array_over(data: _Bytes, dtype: str, shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return an array over these bytes, not copied; read-only if they are.

    Raises:
        CodecError: unknown dtype, or a shape that needs another number of bytes.
    """
    if not _NUMPY_DTYPE.fullmatch(dtype):
        raise CodecError(f"unknown array dtype {dtype!r}")
    try:
        numpy_dtype = np.dtype(dtype)
        _check_size(data, numpy_dtype.itemsize, shape)
        if len(data) == 0:
            return np.empty(tuple(shape), dtype=numpy_dtype)
        array: np.ndarray[Any, Any] = data.view(numpy_dtype).reshape(tuple(shape))
    except (TypeError, ValueError, OverflowError) as error:
        raise CodecError(f"no array of {dtype} and shape {tuple(shape)}: {error}") from error
    return array if array.flags.aligned else array.copy()


def _check_size(data: _Bytes, item_bytes: int, shape: Sequence[int]) -> None:
    needed = math.prod(shape) * item_bytes
    if needed != len(data) or any(size < 0 for size in shape):
        raise CodecError(f"shape {tuple(shape)} of {item_bytes}-byte items needs {needed} bytes, there are {len(data)}")
