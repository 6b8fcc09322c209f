"""Whether what was read is what the manifest says."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import xxhash

from asyncrl.errors import WeightMismatchError
from asyncrl.weights.manifest import TensorEntry, WeightManifest
from engines.weights.placement import ALIGNMENT, HEADER_SIZE_BYTES

__all__ = ["DTYPES", "check_layout", "check_tensors", "checked_copy"]

DTYPES: Mapping[str, torch.dtype] = {
    name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)
}

# xxh3, copies and page faults run without the interpreter lock; beyond four threads the memory is the limit.
_THREADS = min(4, os.cpu_count() or 1)
_THREADS_PAY_FROM_BYTES = 16 << 20
_CHUNK_SIZE_BYTES = 1 << 20  # stays in the second-level cache between copy and checksum


def check_layout(manifest: WeightManifest) -> None:
    """Check the entries of a manifest against each other.

    Raises:
        WeightMismatchError: dtypes and shapes do not fill the bytes, places overlap, or a name comes twice.
    """
    names: set[str] = set()
    end = HEADER_SIZE_BYTES
    for entry in manifest.tensors:
        dtype = DTYPES.get(entry.dtype)
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


def check_tensors(
    entries: Sequence[TensorEntry], is_right: Callable[[TensorEntry], bool], *, manifest: WeightManifest
) -> None:
    """Ask ``is_right`` for every entry, in several threads where that pays.

    Raises:
        WeightMismatchError: some are not, with the first of their names.
    """
    rest = iter(entries)  # one tensor at a time to whichever thread is free: the largest may be half of the model

    def ask() -> list[str]:
        return [entry.name for entry in rest if not is_right(entry)]

    if _THREADS == 1 or sum(entry.size_bytes for entry in entries) < _THREADS_PAY_FROM_BYTES:
        wrong = set(ask())
    else:
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="verify-weights") as threads:
            asked = [threads.submit(ask) for _ in range(_THREADS)]
        wrong = {name for each in asked for name in each.result()}
    damaged = [entry.name for entry in entries if entry.name in wrong]
    if damaged:
        raise WeightMismatchError(
            f"version {manifest.version}: {len(damaged)} of {len(manifest.tensors)} tensors differ from their "
            f"checksum ({', '.join(damaged[:3])}{', ...' if len(damaged) > 3 else ''}); publish the version again"
        )


def checked_copy(data: memoryview, entry: TensorEntry) -> torch.Tensor | None:
    """A tensor of this process with these bytes, checked as they are copied; None if they are not the entry's."""
    if len(data) != entry.size_bytes:
        return None
    copy = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    if entry.size_bytes == 0:
        return copy
    target = copy.reshape(-1).view(torch.uint8)
    checksum = xxhash.xxh3_64()
    for start in range(0, len(data), _CHUNK_SIZE_BYTES):
        chunk = data[start : start + _CHUNK_SIZE_BYTES]
        target.numpy()[start : start + len(chunk)] = chunk
        checksum.update(chunk)
    return copy if checksum.intdigest() == entry.checksum else None
