"""Tensors in the order and at the places that a publisher gives them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from asyncrl.errors import WeightError
from asyncrl.weights.manifest import TensorEntry

__all__ = ["ALIGNMENT", "HEADER_SIZE_BYTES", "PlacedTensor", "aligned", "in_batches", "tensor_bytes"]

ALIGNMENT = 64
HEADER_SIZE_BYTES = 64


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor, its first byte in the version's block, and its bytes."""

    name: str
    tensor: torch.Tensor
    offset: int
    data: memoryview

    def entry(self, checksum: int) -> TensorEntry:
        """What the manifest says of it."""
        return TensorEntry(
            name=self.name,
            shape=tuple(self.tensor.shape),
            dtype=str(self.tensor.dtype).removeprefix("torch."),
            offset=self.offset,
            size_bytes=len(self.data),
            checksum=checksum,
        )


def aligned(size_bytes: int) -> int:
    """``size_bytes`` rounded up to the alignment."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def in_batches(tensors: Iterable[tuple[str, torch.Tensor]], *, size_bytes: int) -> Iterator[list[PlacedTensor]]:
    """The tensors one behind the other, in batches that have reached ``size_bytes`` (the last one may be empty).

    Raises:
        WeightError: a name comes twice, or as :func:`tensor_bytes`.
    """
    batch: list[PlacedTensor] = []
    reached = 0
    names: set[str] = set()
    offset = HEADER_SIZE_BYTES
    for name, tensor in tensors:
        if name in names:
            raise WeightError(f"tensor {name} was published twice in one version")
        names.add(name)
        data = tensor_bytes(name, tensor)
        batch.append(PlacedTensor(name, tensor, offset, data))
        offset = aligned(offset + len(data))
        reached += len(data)
        if reached >= size_bytes:
            yield batch
            batch, reached = [], 0
    yield batch


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
