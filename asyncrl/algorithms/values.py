"""The value loss: what a critic minimises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.algorithms.aggregation import (
    TokenLosses,
    check_options,
    check_range,
    check_tokens,
    keep,
    option,
    token_weights,
)


def value_token_losses(
    values: Tensor, *, old_values: Tensor, returns: Tensor, mask: Tensor, cliprange_value: float | None = 0.2
) -> TokenLosses:
    """Return half the squared distance from the return, held near the critic of the start of the step.

        loss = max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2) / 2

    PPO's value clipping (arXiv:2005.12729); the larger of the two, so a value that has moved far towards its return
    gets no further gradient, one that has moved away does.

        >>> new, old, returns = torch.tensor([[0.5, 0.5], [0.4, 0.0], [1.0, 1.0]])
        >>> both = torch.tensor([True, True])
        >>> value_token_losses(new, old_values=old, returns=returns, mask=both).loss  # (0.5 - 1)^2 / 2, (0.2 - 1)^2 / 2
        tensor([0.1250, 0.3200])

    All tensors have one shape, usually [T]: values v of the critic being trained, v_old of the one at the start of the
    step, returns R (:func:`~asyncrl.algorithms.gae`). Metrics are ``value_clip_fraction``, 1 where the clip took the
    gradient away, and ``value_error``, |v - R|. ``cliprange_value`` is above 0, or None for the plain square.

    Raises:
        SchemaError: shapes or dtypes differ.
        ConfigError: ``cliprange_value`` is not positive.
    """
    check_tokens(mask, values=values, old_values=old_values, returns=returns)
    value, old, target = keep(values, mask), keep(old_values.detach(), mask), keep(returns.detach(), mask)
    free = (value - target).square()
    loss, stopped = free, torch.zeros_like(free)
    if cliprange_value is not None:
        check_range("cliprange_value", cliprange_value, low=0.0, open_low=True)
        clipped = (value.clamp(old - cliprange_value, old + cliprange_value) - target).square()
        loss, stopped = torch.maximum(free, clipped), (clipped > free).to(free.dtype)
    return TokenLosses(
        loss=keep(0.5 * loss, mask),
        metrics={"value_clip_fraction": stopped.detach(), "value_error": (value - target).abs().detach()},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueObjective:
    """What a critic minimises: :func:`value_token_losses`, every token counting the same.

    ``cliprange_value`` bounds how far the optimizer steps on *one* batch move a value; with a single step it has no
    effect.

        >>> ValueObjective(cliprange_value=None)
        ValueObjective(cliprange_value=None)

    Raises:
        ConfigError: ``cliprange_value`` is not positive.
    """

    cliprange_value: float | None = option(0.2, low=0.0, open_low=True, optional=True)

    def __post_init__(self) -> None:
        check_options(self)

    def token_losses(self, values: Tensor, *, old_values: Tensor, returns: Tensor, mask: Tensor) -> TokenLosses:
        """Return :func:`value_token_losses` with the moments that :meth:`report` needs."""
        losses = value_token_losses(
            values, old_values=old_values, returns=returns, mask=mask, cliprange_value=self.cliprange_value
        )
        # Squares of float32 would lose in their difference a variance below a millionth of them.
        value, target = keep(values.detach().double(), mask), keep(returns.detach().double(), mask)
        moments = {
            "value": value,
            "return": target,
            "return_squared": target.square(),
            "residual": target - value,
            "residual_squared": (target - value).square(),
        }
        return TokenLosses(loss=losses.loss, metrics=losses.metrics | moments)

    def token_weights(self, lengths: Tensor, total_tokens: int, total_rows: int) -> Tensor:
        """Return :func:`~asyncrl.algorithms.token_weights` by ``token_mean``."""
        return token_weights(lengths, loss_agg_mode="token_mean", total_tokens=total_tokens, total_rows=total_rows)

    def report(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of a step, from the averages of :meth:`token_losses`' metrics over all its tokens.

        ``explained_variance`` is 1 - Var(return - value) / Var(return): 1 for a critic that is always right, 0 for one
        that predicts the mean, below 0 for one that is worse than the mean; 0 where all returns are equal.
        """
        known = dict(means)
        squared = known.pop("return_squared")
        spread = squared - known["return"] ** 2
        left = known.pop("residual_squared") - known.pop("residual") ** 2
        known["explained_variance"] = 1.0 - left / spread if spread > 1e-12 * max(1.0, squared) else 0.0
        return known
