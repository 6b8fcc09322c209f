"""One version of the weights as one block of bytes: what is written, and what is checked when it is read.

    0          64            offset of tensor 0 (a multiple of 64)         ...          end (a multiple of 64)
    | header   | bytes, zeros up to the next multiple of 64 | bytes, zeros | ...        |

The header follows from the manifest, so a reader knows every byte of it beforehand. It is written last: a block whose
writer died half-way has none.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import xxhash

from asyncrl.errors import WeightError, WeightMismatchError
from asyncrl.weights.manifest import TensorEntry, WeightManifest

__all__ = ["ALIGNMENT", "HEADER_SIZE_BYTES", "block_size", "header", "tensor_bytes", "tensor_views", "verify"]

ALIGNMENT = 64
HEADER_SIZE_BYTES = 64
_HEADER = struct.Struct("<8sIIQQ16s")  # magic, format, tensors, version, size of the block, digest of the manifest
_MAGIC = b"asyncrlW"
_FORMAT = 1
# xxh3 and page faults run without the interpreter lock; beyond four threads the memory is the limit.
_VERIFY_THREADS = min(4, os.cpu_count() or 1)
_THREADS_PAY_FROM_BYTES = 16 << 20


def aligned(size_bytes: int) -> int:
    """``size_bytes`` rounded up to the alignment."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


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


def tensor_bytes(name: str, tensor: torch.Tensor) -> memoryview:
    """The tensor's elements in row-major order, without a copy if they lie in memory like that.

    Raises:
        WeightError: the tensor is no plain strided tensor with data (sharded, sparse, quantised, meta).
    """
    if hasattr(tensor, "full_tensor"):
        raise WeightError(f"{name} is sharded (DTensor); publish full tensors: call full_tensor() on every rank")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
        raise WeightError(f"{name} is no plain tensor with data: {tensor.layout}, {tensor.dtype}, on {tensor.device}")
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data


def verify(block: memoryview, manifest: WeightManifest) -> None:
    """Check every byte of the block against the manifest.

    Raises:
        WeightMismatchError: anything differs.
    """
    _check_layout(manifest)
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

    damaged = _differing(block, manifest.tensors)
    if damaged:
        raise WeightMismatchError(
            f"version {manifest.version}: {len(damaged)} of {len(manifest.tensors)} tensors differ from their "
            f"checksum ({', '.join(damaged[:3])}{', ...' if len(damaged) > 3 else ''}); publish the version again"
        )


def tensor_views(block: memoryview, manifest: WeightManifest) -> tuple[dict[str, torch.Tensor], list[memoryview]]:
    """Tensors over the bytes of a verified block, and the slices of it that they keep alive."""
    tensors: dict[str, torch.Tensor] = {}
    slices: list[memoryview] = []
    for entry in manifest.tensors:
        dtype = _DTYPES[entry.dtype]
        if entry.size_bytes == 0:
            tensors[entry.name] = torch.empty(entry.shape, dtype=dtype)
            continue
        part = block[entry.offset : entry.offset + entry.size_bytes]
        slices.append(part)
        tensors[entry.name] = torch.frombuffer(part, dtype=dtype).reshape(entry.shape)
    return tensors, slices


_DTYPES: Mapping[str, torch.dtype] = {
    name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)
}


def _check_layout(manifest: WeightManifest) -> None:
    names: set[str] = set()
    end = HEADER_SIZE_BYTES
    for entry in manifest.tensors:
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise WeightMismatchError(f"{entry.name} has the unknown dtype {entry.dtype!r}")
        if any(size < 0 for size in entry.shape) or entry.numel * dtype.itemsize != entry.size_bytes:
            raise WeightMismatchError(
                f"{entry.name}: shape {entry.shape} of {entry.dtype} does not fill {entry.size_bytes} bytes"
            )
        if entry.offset % ALIGNMENT or entry.offset < end:
            raise WeightMismatchError(f"{entry.name} begins at byte {entry.offset}; expected a multiple of 64 >= {end}")
        if entry.name in names:
            raise WeightMismatchError(f"{entry.name} is in the manifest twice")
        names.add(entry.name)
        end = entry.offset + entry.size_bytes


def _differing(block: memoryview, entries: Sequence[TensorEntry]) -> list[str]:
    """Names of the tensors whose bytes are not their checksum's."""
    rest = iter(entries)  # one tensor at a time to whichever thread is free: the largest may be half of the model

    def check() -> list[str]:
        return [
            entry.name
            for entry in rest
            if xxhash.xxh3_64_intdigest(block[entry.offset : entry.offset + entry.size_bytes]) != entry.checksum
        ]

    if _VERIFY_THREADS == 1 or len(block) < _THREADS_PAY_FROM_BYTES:
        return check()
    with ThreadPoolExecutor(_VERIFY_THREADS, thread_name_prefix="verify-weights") as threads:
        found = [threads.submit(check) for _ in range(_VERIFY_THREADS)]
    wrong = {name for each in found for name in each.result()}
    return [entry.name for entry in entries if entry.name in wrong]


def _check_zeros(gap: memoryview, *, before: str) -> None:
    if len(gap) >= ALIGNMENT or any(gap):
        raise WeightMismatchError(f"the {len(gap)} bytes before {before} must be padding")
