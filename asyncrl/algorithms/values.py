"""What a critic is trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.algorithms.aggregation import token_weights
from asyncrl.algorithms.policy_loss import check_range
from asyncrl.algorithms.token_losses import TokenLosses, check_tokens, keep

__all__ = ["ValueObjective", "value_token_losses"]


def value_token_losses(
    values: Tensor, *, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None = 0.2
) -> TokenLosses:
    """Half the squared distance from the return, held near the critic of the start of the step.

        loss = max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2) / 2

    PPO's value clipping (arXiv:2005.12729); the larger of the two, so a value that has moved far towards its
    return gets no further gradient, one that has moved away does.

        >>> losses = value_token_losses(
        ...     torch.tensor([0.5, 0.5]),
        ...     old_values=torch.tensor([0.4, 0.0]),
        ...     returns=torch.tensor([1.0, 1.0]),
        ...     mask=torch.tensor([True, True]),
        ... )
        >>> losses.loss  # (0.5 - 1)^2 / 2; the second has moved too far, and counts as (0.2 - 1)^2 / 2
        tensor([0.1250, 0.3200])

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueObjective:
    """What a critic minimises: :func:`value_token_losses`, every token counting the same.

        >>> ValueObjective(clip=None)
        ValueObjective(clip=None)

    Attributes:
        clip: above 0, or None for the plain square. It bounds what the optimizer steps on *one* batch do to a value;
            with a single step there is nothing to hold.

    Raises:
        ConfigError: ``clip`` is not positive.
    """

    clip: float | None = 0.2

    def __post_init__(self) -> None:
        if self.clip is not None:
            check_range("clip", self.clip, low=0.0, open_low=True)

    def token_losses(self, values: Tensor, *, old_values: Tensor, returns: Tensor, mask: Tensor) -> TokenLosses:
        """As :func:`value_token_losses`, with the moments that :meth:`report` needs.

            >>> one = torch.ones(1)
            >>> losses = ValueObjective().token_losses(0 * one, old_values=0 * one, returns=one, mask=one > 0)
            >>> losses.loss, losses.metrics["residual"]
            (tensor([0.5000]), tensor([1.]))

        Raises:
            SchemaError: shapes or dtypes differ.
        """
        losses = value_token_losses(values, old_values=old_values, returns=returns, mask=mask, clip=self.clip)
        value, target = keep(values.detach(), mask), keep(returns.detach(), mask)
        moments = {
            "value": value,
            "return": target,
            "return_squared": target.square(),
            "residual": target - value,
            "residual_squared": (target - value).square(),
        }
        return TokenLosses(loss=losses.loss, metrics=losses.metrics | moments)

    def token_weights(self, lengths: Tensor, total_tokens: int, total_rows: int) -> Tensor:
        """Weight of each trained token of every row, see :func:`~asyncrl.algorithms.token_weights`.

            >>> ValueObjective().token_weights(torch.tensor([1, 3]), total_tokens=4, total_rows=2)
            tensor([0.2500, 0.2500])

        Raises:
            SchemaError: as :func:`~asyncrl.algorithms.token_weights`.
            InvalidDataError: likewise.
        """
        return token_weights(lengths, aggregation="token_mean", total_tokens=total_tokens, total_rows=total_rows)

    def report(self, means: Mapping[str, float]) -> dict[str, float]:
        """Metrics of a step, from the averages of :meth:`token_losses`' metrics over all its tokens.

        ``explained_variance`` is 1 - Var(return - value) / Var(return): 1 for a critic that knows, 0 for one that says
        the mean, below 0 for one that does harm; 0 where all returns are equal.

        >>> means = {"return": 1.0, "return_squared": 3.0, "residual": 0.0, "residual_squared": 0.5}
        >>> ValueObjective().report(means)["explained_variance"]  # 1 - 0.5 / 2
        0.75
        """
        known = dict(means)
        spread = known.pop("return_squared") - known["return"] ** 2
        left = known.pop("residual_squared") - known.pop("residual") ** 2
        known["explained_variance"] = 1.0 - left / spread if spread > 1e-12 else 0.0
        return known
