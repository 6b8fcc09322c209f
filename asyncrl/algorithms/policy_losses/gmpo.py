"""GMPO: the geometric mean of clipped ratios."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncrl.algorithms.kl import probability_ratio
from asyncrl.algorithms.policy_loss import PolicyLoss, check_range
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.algorithms.token_losses import TokenLosses

__all__ = ["GMPO"]


@dataclass(frozen=True, kw_only=True)
class GMPO(PolicyLoss):
    """Geometric-mean policy optimisation: outliers weigh as logs. Zhao et al., arXiv:2507.20673.

        loss of a row = -A exp(mean over its tokens of min(sgn(A) x, sgn(A) clip(x, -clip_low, clip_high)) sgn(A))
        x = log(current / anchor)

    A is the row's mean advantage; every token carries the row's loss, so with ``sequence_mean``, as published, a row
    counts once.

        >>> GMPO()(tokens).loss  # a log-ratio of 0.41 counts as 0.4, one of -0.69 as -0.4
        tensor([-1.2214, -1.2214,  0.6703])

    Attributes:
        clip_low: 0 or more, bound of the log-ratio below; the paper's (e^-0.4, e^0.4).
        clip_high: 0 or more, above.

    Raises:
        ConfigError: an option outside its range.
    """

    clip_low: float = 0.4
    clip_high: float = 0.4

    def __post_init__(self) -> None:
        check_range("clip_low", self.clip_low, low=0.0)
        check_range("clip_high", self.clip_high, low=0.0)

    def __call__(self, tokens: PolicyTokens) -> TokenLosses:
        """See :class:`PolicyLoss`."""
        rows = tokens.rows()
        advantage = rows.mean(tokens.advantages)
        free = tokens.log_ratio
        clipped = free.clamp(-self.clip_low, self.clip_high)
        stopped = torch.where(advantage < 0, clipped > free, clipped < free)
        ratio = probability_ratio(rows.mean(torch.where(stopped, clipped, free)))
        return TokenLosses(loss=-advantage * ratio, metrics={"clip_fraction": stopped.to(ratio.dtype)})
