"""What weights are, in sixteen bytes: equal for equal tensors, whatever version they are called and where they lie.

A fingerprint is the XXH3-128 of every tensor's name, shape, dtype and XXH3-64 checksum, in publication order. A
manifest has all of that already, so the fingerprint of a published version costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec
import xxhash

from asyncrl.weights.manifest import WeightManifest

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["fingerprint_of", "manifest_fingerprint"]


def manifest_fingerprint(manifest: WeightManifest) -> str:
    """Of the tensors that a manifest describes, as 32 hexadecimal digits."""
    return _digest((entry.name, entry.shape, entry.dtype, entry.checksum) for entry in manifest.tensors)


def fingerprint_of(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Of full tensors in publication order, taken one at a time: equal to that of their manifest."""
    import torch

    def entries() -> Iterable[tuple[str, tuple[int, ...], str, int]]:
        for name, tensor in tensors:
            plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            dtype = str(tensor.dtype).removeprefix("torch.")
            yield name, tuple(tensor.shape), dtype, xxhash.xxh3_64_intdigest(plain.data)

    return _digest(entries())


def _digest(entries: Iterable[tuple[str, tuple[int, ...], str, int]]) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(list(entries)))
