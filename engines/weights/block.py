"""One version of the weights as one block of bytes: what is written, and what is checked when it is read.

    0          64            offset of tensor 0 (a multiple of 64)         ...          end (a multiple of 64)
    | header   | bytes, zeros up to the next multiple of 64 | bytes, zeros | ...        |

The header follows from the manifest, so a reader knows every byte of it beforehand. It is written last: a block whose
writer died half-way has none.
"""

from __future__ import annotations

import struct

import torch
import xxhash

from asyncrl.errors import WeightMismatchError
from asyncrl.weights.manifest import TensorEntry, WeightManifest
from engines.weights.checking import DTYPES, check_layout, check_tensors
from engines.weights.placement import ALIGNMENT, HEADER_SIZE_BYTES, aligned

__all__ = ["block_size", "header", "tensor_views", "verify"]

_HEADER = struct.Struct("<8sIIQQ16s")  # magic, format, tensors, version, size of the block, digest of the manifest
_MAGIC = b"asyncrlW"
_FORMAT = 1


def block_size(manifest: WeightManifest) -> int:
    """Bytes of the whole block, header included."""
    if not manifest.tensors:
        return HEADER_SIZE_BYTES
    last = manifest.tensors[-1]
    return aligned(last.offset + last.size_bytes)


def header(manifest: WeightManifest) -> bytes:
    """The header that a complete block of this manifest begins with."""
    fields = _HEADER.pack(
        _MAGIC, _FORMAT, len(manifest.tensors), manifest.version, block_size(manifest), manifest.digest
    )
    return fields.ljust(HEADER_SIZE_BYTES, b"\0")


def verify(block: memoryview, manifest: WeightManifest) -> None:
    """Check every byte of the block against the manifest.

    Raises:
        WeightMismatchError: anything differs.
    """
    check_layout(manifest)
    if len(block) != block_size(manifest):
        raise WeightMismatchError(
            f"version {manifest.version}: the block has {len(block)} bytes, its manifest says {block_size(manifest)}"
        )
    if block[:HEADER_SIZE_BYTES] != header(manifest):
        raise WeightMismatchError(
            f"version {manifest.version}: the block at {manifest.location} is not complete, or not the manifest's"
        )
    end = HEADER_SIZE_BYTES
    for entry in manifest.tensors:
        _check_zeros(block[end : entry.offset], before=entry.name)
        end = entry.offset + entry.size_bytes
    _check_zeros(block[end:], before="the end")

    def is_right(entry: TensorEntry) -> bool:
        return xxhash.xxh3_64_intdigest(block[entry.offset : entry.offset + entry.size_bytes]) == entry.checksum

    check_tensors(manifest.tensors, is_right, manifest=manifest)


def tensor_views(block: memoryview, manifest: WeightManifest) -> tuple[dict[str, torch.Tensor], list[memoryview]]:
    """Tensors over the bytes of a verified block, and the slices of it that they keep alive."""
    tensors: dict[str, torch.Tensor] = {}
    slices: list[memoryview] = []
    for entry in manifest.tensors:
        dtype = DTYPES[entry.dtype]
        if entry.size_bytes == 0:
            tensors[entry.name] = torch.empty(entry.shape, dtype=dtype)
            continue
        part = block[entry.offset : entry.offset + entry.size_bytes]
        slices.append(part)
        tensors[entry.name] = torch.frombuffer(part, dtype=dtype).reshape(entry.shape)
    return tensors, slices


def _check_zeros(gap: memoryview, *, before: str) -> None:
    if len(gap) >= ALIGNMENT or any(gap):
        raise WeightMismatchError(f"the {len(gap)} bytes before {before} must be padding")
