"""The clipped surrogate: PPO, dual clip, clip-higher."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.algorithms.policy_loss import PolicyLoss, check_range
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.algorithms.token_losses import TokenLosses

__all__ = ["DAPO", "PPO", "clipped_surrogate"]


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> TokenLosses:
    """Loss -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), for A < 0 at most -dual_clip * A.

    The metric ``clip_fraction`` is 1 where a clip took the token's gradient away.
    """
    free = -ratio * advantages
    clipped = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = torch.maximum(free, clipped)
    stopped = clipped > free
    if dual_clip is not None:
        ceiling = torch.where(advantages < 0, -dual_clip * advantages, torch.inf)
        stopped = stopped | (loss > ceiling)
        loss = torch.minimum(loss, ceiling)
    return TokenLosses(loss=loss, metrics={"clip_fraction": stopped.to(ratio.dtype)})


@dataclass(frozen=True, kw_only=True)
class PPO(PolicyLoss):
    """PPO's clipped surrogate, token by token. Schulman et al., arXiv:1707.06347, eq. 7.

        >>> PPO()(tokens).loss  # the tokens of PolicyTokens' example: ratios 1, 1.5, 0.5, the last one bad
        tensor([-1.0000, -1.2000,  0.8000])

    Attributes:
        clip_low: 0..1, how far below 1 the ratio may fall before a bad token's gradient stops.
        clip_high: 0 or more, how far above 1 it may rise before a good token's gradient stops.
        dual_clip: above 1: a bad token's ratio stops counting beyond it. Ye et al., arXiv:1912.09729, eq. 5. None
            leaves it unbounded.

    Raises:
        ConfigError: an option outside its range.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        check_range("clip_low", self.clip_low, low=0.0, high=1.0)
        check_range("clip_high", self.clip_high, low=0.0)
        if self.dual_clip is not None:
            check_range("dual_clip", self.dual_clip, low=1.0, open_low=True)

    def __call__(self, tokens: PolicyTokens) -> TokenLosses:
        """See :class:`PolicyLoss`."""
        return clipped_surrogate(
            tokens.ratio,
            tokens.advantages,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )


@dataclass(frozen=True, kw_only=True)
class DAPO(PPO):
    """PPO with more room above than below, so that unlikely tokens can gain: clip-higher. arXiv:2503.14476, eq. 10.

    >>> DAPO()(tokens).loss
    tensor([-1.0000, -1.2800,  0.8000])
    """

    clip_high: float = 0.28
