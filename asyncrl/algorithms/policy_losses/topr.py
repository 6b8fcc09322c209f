"""TOPR: good samples as they are, bad ones by how likely they still are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from asyncrl.algorithms.kl import probability_ratio
from asyncrl.algorithms.policy_loss import PolicyLoss, check_range
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.algorithms.token_losses import TokenLosses

__all__ = ["TOPR"]


@dataclass(frozen=True, kw_only=True)
class TOPR(PolicyLoss):
    """Tapered off-policy REINFORCE. Le Roux et al., arXiv:2503.14286.

        loss = -w A log current,  w = 1 where A >= 0, else clip(current(row) / behaviour(row), 0, cap) without gradient

    Good answers are imitated however unlikely they have become; bad ones are pushed away only while the policy would
    still give them, which keeps the objective bounded. Uses the policy that sampled, so it takes no correction.

        >>> TOPR()(tokens).loss  # the bad row is half as likely as when it was sampled
        tensor([ 0.6931,  0.2877, -0.6931])

    Attributes:
        cap: above 0, bound of a bad row's weight; 1 as published.

    Raises:
        ConfigError: an option outside its range.
    """

    cap: float = 1.0
    corrects: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_range("cap", self.cap, low=0.0, open_low=True)

    def __call__(self, tokens: PolicyTokens) -> TokenLosses:
        """See :class:`PolicyLoss`; ``clip_fraction`` is 1 where the weight was cut to ``cap``."""
        ratio = probability_ratio(tokens.rows().sum((tokens.current - tokens.behaviour).detach()))
        bad = tokens.advantages < 0
        weight = torch.where(bad, ratio.clamp(max=self.cap), 1.0)
        return TokenLosses(
            loss=-weight * tokens.advantages * tokens.current,
            metrics={"clip_fraction": (bad & (ratio > self.cap)).to(ratio.dtype)},
        )
