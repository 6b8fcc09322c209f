r"""Batches in files.

    0    magic            8 bytes  b"ASYNCRL\x1a"
    8    format version   u32
    12   0                u32
    16   header bytes     u64
    24   buffers          u64
    32   file bytes       u64
    40   checksum of the index and the header, up to the first buffer
    48   0                u64
    56   checksum of the 56 bytes before
    64   index: for each buffer its position, bytes and checksum, u64 each
         header (msgpack, see asyncrl.data.codec)
         buffers, each beginning at a multiple of 64

Numbers are little-endian, checksums are xxh3-64, gaps are zero and part of the checksum before them: no bit of the
file can change without an error.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from asyncrl.data.codec import Encoded, decode, encode
from asyncrl.data.memory import as_bytes
from asyncrl.data.proto import DataProto
from asyncrl.errors import CodecError
from asyncrl.io import DurableFiles

_MAGIC = b"ASYNCRL\x1a"
_VERSION = 1
_ALIGNMENT = 64
_PREAMBLE = struct.Struct("<8sIIQQQQQQ")
_ENTRY = struct.Struct("<QQQ")


def save(data: DataProto, path: str | os.PathLike[str]) -> None:
    """Write ``data`` to ``path``: completely, or not at all.

    Raises:
        CodecError: naming the column or the entry of ``meta_info`` whose type cannot be encoded.
    """
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    files = DurableFiles()
    try:
        files.write_chunks(unfinished, _pieces(encode(data)))
        files.rename(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def load(path: str | os.PathLike[str], *, mmap: bool = False) -> DataProto:
    """Read the batch in the file ``path``.

    With ``mmap`` columns are mapped instead: pages are read from the file when they are touched, and writing to them
    changes private copies, never the file. The file may be renamed or removed meanwhile, but not shortened.

    Raises:
        CodecError: the file is truncated, changed in any bit, of another format, or no batch.
        OSError: it cannot be read.
    """
    with Path(path).open("rb") as file:
        # An empty file cannot be mapped.
        mapped = mmap and os.fstat(file.fileno()).st_size
        content = _mapped(file.fileno()) if mapped else np.fromfile(file, dtype=np.uint8)
    try:
        return _decoded(content)
    except CodecError as error:
        raise CodecError(f"{path}: {error}") from error


def to_bytes(data: DataProto) -> bytes:
    """Return what :func:`save` would write."""
    return b"".join(_pieces(encode(data)))


def from_bytes(content: Any) -> DataProto:
    """Return the batch of :func:`to_bytes`, over this memory; raise :class:`CodecError` if it is none."""
    return _decoded(as_bytes(content))


def _mapped(descriptor: int) -> np.ndarray[Any, Any]:
    return as_bytes(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY))


def _pieces(encoded: Encoded) -> Iterator[Any]:
    start = _aligned(_PREAMBLE.size + _ENTRY.size * len(encoded.buffers) + len(encoded.header))
    index, position = b"", start
    for buffer in encoded.buffers:
        digest = xxhash.xxh3_64(buffer)
        digest.update(_gap(buffer.nbytes))
        index += _ENTRY.pack(position, buffer.nbytes, digest.intdigest())
        position += _aligned(buffer.nbytes)
    body = index + encoded.header
    body += bytes(start - _PREAMBLE.size - len(body))
    preamble = _PREAMBLE.pack(
        _MAGIC,
        _VERSION,
        0,
        len(encoded.header),
        len(encoded.buffers),
        position,
        xxhash.xxh3_64_intdigest(body),
        0,
        0,
    )[:-8]
    yield preamble + xxhash.xxh3_64_intdigest(preamble).to_bytes(8, "little") + body
    for buffer in encoded.buffers:
        yield buffer
        yield _gap(buffer.nbytes)


def _decoded(content: np.ndarray[Any, Any]) -> DataProto:
    view = content.data
    if len(view) < _PREAMBLE.size:
        raise CodecError(f"{len(view)} bytes are too few for a batch")
    magic, version, _, header_bytes, count, size, body_checksum, _, own_checksum = _PREAMBLE.unpack_from(view)
    if magic != _MAGIC:
        raise CodecError("the file does not begin with the magic of a batch")
    if own_checksum != xxhash.xxh3_64_intdigest(view[: _PREAMBLE.size - 8]):
        raise CodecError("the checksum of the first 64 bytes is wrong")
    if version != _VERSION:
        raise CodecError(f"unknown version {version} of the format, expected {_VERSION}")
    if size != len(view):
        raise CodecError(f"the file has {len(view)} bytes, it was written with {size}")
    header_start = _PREAMBLE.size + _ENTRY.size * count
    start = _aligned(header_start + header_bytes)
    if start > size:
        raise CodecError("the header does not fit the file")
    if body_checksum != xxhash.xxh3_64_intdigest(view[_PREAMBLE.size : start]):
        raise CodecError("the checksum of the header is wrong")
    buffers: list[np.ndarray[Any, Any]] = []
    for number in range(count):
        position, length, checksum = _ENTRY.unpack_from(view, _PREAMBLE.size + _ENTRY.size * number)
        if position != start or start + _aligned(length) > size:
            raise CodecError(f"the position or size of buffer {number} is wrong")
        start += _aligned(length)
        if checksum != xxhash.xxh3_64_intdigest(view[position:start]):
            raise CodecError(f"the checksum of buffer {number} is wrong")
        buffers.append(content[position : position + length])
    if start != size:
        raise CodecError("the file has bytes after the last buffer")
    return decode(view[header_start : header_start + header_bytes], buffers)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _gap(size: int) -> bytes:
    return bytes(_aligned(size) - size)
