"""SAPO: a soft gate instead of a clip."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncrl.algorithms.policy_loss import PolicyLoss, check_range
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.algorithms.token_losses import TokenLosses

__all__ = ["SAPO"]


@dataclass(frozen=True, kw_only=True)
class SAPO(PolicyLoss):
    """Soft adaptive policy optimisation. Gao et al., arXiv:2511.20347.

        loss = -A (4 / t) sigmoid(t (r - 1)),  t = positive_temperature where A > 0, else negative_temperature

    At r = 1 the gradient is that of r A; it fades smoothly on both sides, faster for bad tokens, whose gradient spreads
    over the whole vocabulary. Published with ``sequence_mean``.

        >>> SAPO()(tokens).loss
        tensor([-2.0000, -2.4898,  1.4159])

    Attributes:
        positive_temperature: above 0.
        negative_temperature: above 0; larger fades faster.

    Raises:
        ConfigError: an option outside its range.
    """

    positive_temperature: float = 1.0
    negative_temperature: float = 1.05

    def __post_init__(self) -> None:
        check_range("positive_temperature", self.positive_temperature, low=0.0, open_low=True)
        check_range("negative_temperature", self.negative_temperature, low=0.0, open_low=True)

    def __call__(self, tokens: PolicyTokens) -> TokenLosses:
        """See :class:`PolicyLoss`; ``gate`` is the gradient's share of that of r A."""
        advantages = tokens.advantages
        negative = torch.full_like(advantages, self.negative_temperature)
        temperature = torch.where(advantages > 0, self.positive_temperature, negative)
        sigmoid = torch.sigmoid(temperature * (tokens.ratio - 1.0))
        gate = 4.0 * sigmoid * (1.0 - sigmoid)
        return TokenLosses(loss=-advantages * sigmoid * 4.0 / temperature, metrics={"gate": gate.detach()})
