"""What a loss per token looks like, and how masked-out tokens are kept out of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from asyncrl.errors import SchemaError

__all__ = ["TokenLosses", "check_tokens", "keep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """Losses of single tokens; what they are summed to is decided by :func:`~asyncrl.algorithms.token_weights`.

        >>> TokenLosses(loss=torch.tensor([0.5, 0.0])).metrics
        {}

    Attributes:
        loss: [T] (or the shape of the inputs), differentiable, exactly 0 where the mask is False.
        metrics: detached quantities of the same shape, 0 where the mask is False, to be averaged over the mask.
    """

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


def keep(values: Tensor, mask: Tensor) -> Tensor:
    """``values`` in at least float32 where ``mask``, 0 elsewhere.

    Selects instead of multiplying, so that inf and nan outside the mask reach neither the value nor the gradient.
    """
    wide = values if values.dtype == torch.float64 else values.float()
    return torch.where(mask, wide, 0.0)


def check_tokens(mask: Tensor, **columns: Tensor | None) -> None:
    """Every column that is there must be floating and have the shape of the boolean ``mask``.

    Raises:
        SchemaError: it does not; the message names the column.
    """
    if mask.dtype != torch.bool:
        raise SchemaError(f"mask must be boolean (True where a token is trained on), got {mask.dtype}")
    for name, column in columns.items():
        if column is None:
            continue
        if column.shape != mask.shape:
            raise SchemaError(
                f"{name} has shape {tuple(column.shape)}, the mask {tuple(mask.shape)}: "
                "all columns hold one entry per token (a number per row must be repeated over its tokens first)"
            )
        if not column.dtype.is_floating_point:
            raise SchemaError(f"{name} must be floating, got {column.dtype}")
