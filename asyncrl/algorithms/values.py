"""What a critic is trained on."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.policy_loss import check_range
from asyncrl.algorithms.token_losses import TokenLosses, check_tokens, keep

__all__ = ["value_token_losses"]


def value_token_losses(
    values: Tensor, *, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None = 0.2
) -> TokenLosses:
    """Half the squared distance from the return, held near the critic of the start of the step.

        loss = max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2) / 2

    PPO's value clipping (arXiv:2005.12729); the larger of the two, so a value that has moved far towards its
    return gets no further gradient, one that has moved away does.

    Args:
        values: [T] (or any shape) of the critic being trained; the gradient goes here.
        old_values: same shape, at the start of the step.
        returns: same shape, see :func:`~asyncrl.algorithms.gae`.
        mask: boolean, True where a token was sampled.
        clip: above 0, or None for the plain square.

    Returns:
        Losses and ``value_clip_fraction``, 1 where the clip took the gradient away, and ``value_error``, |v - R|.

    Raises:
        SchemaError: shapes or dtypes differ.
        ConfigError: ``clip`` is not positive.
    """
    check_tokens(mask, values=values, old_values=old_values, returns=returns)
    value, old, target = keep(values, mask), keep(old_values.detach(), mask), keep(returns.detach(), mask)
    free = (value - target).square()
    loss, stopped = free, torch.zeros_like(free)
    if clip is not None:
        check_range("clip", clip, low=0.0, open_low=True)
        clipped = (old + (value - old).clamp(-clip, clip) - target).square()
        loss, stopped = torch.maximum(free, clipped), (clipped > free).to(free.dtype)
    return TokenLosses(
        loss=keep(0.5 * loss, mask),
        metrics={"value_clip_fraction": stopped.detach(), "value_error": (value - target).abs().detach()},
    )
