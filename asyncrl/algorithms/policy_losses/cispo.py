"""CISPO: clip the weight, never drop the token."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.algorithms.policy_loss import PolicyLoss, check_range
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.algorithms.token_losses import TokenLosses

__all__ = ["CISPO"]


@dataclass(frozen=True, kw_only=True)
class CISPO(PolicyLoss):
    """REINFORCE with a clipped importance weight. MiniMax-M1, arXiv:2506.13585, eq. 4 and 5.

        loss = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log current

    Every token keeps a gradient, also rare ones that a clipped surrogate would silence after one step.

        >>> CISPO()(tokens).loss  # the tokens of PolicyTokens' example; 1.5 counts as 1.28
        tensor([ 0.6931,  0.3682, -0.6931])

    Attributes:
        clip_low: 0..1; at 1 the weight is not bounded below, as published.
        clip_high: 0 or more.

    Raises:
        ConfigError: an option outside its range.
    """

    clip_low: float = 1.0
    clip_high: float = 0.28

    def __post_init__(self) -> None:
        check_range("clip_low", self.clip_low, low=0.0, high=1.0)
        check_range("clip_high", self.clip_high, low=0.0)

    def __call__(self, tokens: PolicyTokens) -> TokenLosses:
        """See :class:`PolicyLoss`; ``clip_fraction`` is 1 where the weight was clipped."""
        ratio = tokens.ratio.detach()
        weight = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        return TokenLosses(
            loss=-weight * tokens.advantages * tokens.current,
            metrics={"clip_fraction": (weight != ratio).to(ratio.dtype)},
        )
