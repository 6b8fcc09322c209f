"""Which packed tokens belong together: sums and means over the rows of a micro-batch."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.errors import SchemaError

__all__ = ["Rows"]


class Rows:
    """Sums over rows, given back to each of their tokens. Differentiable.

    Rows are never cut: a micro-batch holds all trained tokens of a row or none, so what is summed here is the same
    whatever micro-batches and ranks the rows are spread over.

    Args:
        index: [T] (or any shape) integer, equal numbers for tokens of the same row. Any numbers, any order.
        mask: same shape, boolean; tokens outside belong to no row.

    Attributes:
        lengths: like ``index``, tokens inside the mask in the row of each token, at least 1, float32.

    Raises:
        SchemaError: shapes or dtypes differ.
    """

    def __init__(self, index: Tensor, mask: Tensor) -> None:
        if index.shape != mask.shape or index.dtype.is_floating_point or index.dtype == torch.bool:
            raise SchemaError(
                f"rows must be {tuple(mask.shape)} integers like the mask, got {index.dtype} of {tuple(index.shape)}"
            )
        unique, inverse = torch.unique(index, return_inverse=True)
        self._count = len(unique)
        self._index = inverse.flatten()
        self._mask = mask
        self.lengths = self.sum(torch.ones(index.shape, device=index.device)).clamp(min=1.0)

    def sum(self, values: Tensor) -> Tensor:
        """For each token, the sum of ``values`` over the tokens of its row inside the mask."""
        kept = torch.where(self._mask, values, 0.0).flatten()
        sums = kept.new_zeros(self._count).index_add(0, self._index, kept)
        return sums[self._index].view(values.shape)

    def mean(self, values: Tensor) -> Tensor:
        """For each token, the mean of ``values`` over the tokens of its row inside the mask; 0 for an empty row."""
        return self.sum(values) / self.lengths.to(values.dtype)
