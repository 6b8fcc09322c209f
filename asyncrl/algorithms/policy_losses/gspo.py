"""GSPO: one ratio for a whole row."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.algorithms.kl import probability_ratio
from asyncrl.algorithms.policy_loss import PolicyLoss, check_range
from asyncrl.algorithms.policy_losses.ppo import clipped_surrogate
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.algorithms.token_losses import TokenLosses

__all__ = ["GSPO"]


@dataclass(frozen=True, kw_only=True)
class GSPO(PolicyLoss):
    """The clipped surrogate with the row's geometric-mean ratio. Zheng et al., arXiv:2507.18071, eq. 5 to 7.

        s = exp(mean over the row of log(current / anchor))

    In the token form (eq. 13 and 14): every token has value s and, through its own log-prob, gradient s, which for
    equal advantages in a row is the same. Published with ``sequence_mean``.

        >>> GSPO(clip_low=0.2, clip_high=0.2)(tokens).loss  # the first row's ratio is the root of 1 * 1.5
        tensor([-1.2000, -1.2000,  0.8000])

    Attributes:
        clip_low: 0..1; means of logs move far less than single ones, so the bounds are a thousand times narrower.
        clip_high: 0 or more.

    Raises:
        ConfigError: an option outside its range.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __post_init__(self) -> None:
        check_range("clip_low", self.clip_low, low=0.0, high=1.0)
        check_range("clip_high", self.clip_high, low=0.0)

    def __call__(self, tokens: PolicyTokens) -> TokenLosses:
        """See :class:`PolicyLoss`."""
        log_ratio = tokens.rows().mean(tokens.log_ratio.detach()) + tokens.current - tokens.current.detach()
        return clipped_surrogate(
            probability_ratio(log_ratio), tokens.advantages, clip_low=self.clip_low, clip_high=self.clip_high
        )
