"""M2PO: the batch's second moment as trust region."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from asyncrl.algorithms.kl import probability_ratio
from asyncrl.algorithms.policy_loss import PolicyLoss, check_range
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.algorithms.token_losses import TokenLosses

__all__ = ["M2PO"]


@dataclass(frozen=True, kw_only=True)
class M2PO(PolicyLoss):
    """Second-moment trust policy optimisation. Zheng et al., "Prosperity before collapse", arXiv:2510.01161.

        loss = -M r A,  r = current / behaviour

    M is 0 for the tokens with the largest log(proximal / behaviour)^2, as few of them as bring the mean over the rest
    of the batch below ``threshold``; at least one token stays. Unlike a clip it takes away outliers only, however old
    the batch is. The whole ratio to the policy that sampled is in the loss, so it takes no correction.

        >>> M2PO().prepare(tokens, seed=0)  # squared log-ratios 0, 0.48, 0
        {'kept': tensor([1., 0., 1.])}

    Attributes:
        threshold: above 0, bound of the mean squared log-ratio; the paper's 0.04.

    Raises:
        ConfigError: an option outside its range.
    """

    threshold: float = 0.04
    corrects: ClassVar[bool] = True
    prepares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_range("threshold", self.threshold, low=0.0, open_low=True)

    def prepare(self, tokens: PolicyTokens, *, seed: int) -> Mapping[str, Tensor]:
        """Column ``kept``: 1 for the tokens that are trained on.

        >>> M2PO(threshold=0.5).prepare(tokens, seed=0)
        {'kept': tensor([1., 1., 1.])}
        """
        moments = (tokens.proximal.double() - tokens.behaviour.double()).square()
        ascending = torch.sort(moments, stable=True)
        means = ascending.values.cumsum(0) / torch.arange(1, len(moments) + 1, device=moments.device)
        # Means of growing prefixes of a sorted list grow: those below the bound are the first ones.
        count = max(1, int((means < self.threshold).sum()))
        kept = torch.zeros(len(moments), device=moments.device)
        kept[ascending.indices[:count]] = 1.0
        return {"kept": kept}

    def __call__(self, tokens: PolicyTokens) -> TokenLosses:
        """See :class:`PolicyLoss`; ``clip_fraction`` is 1 for the tokens left out."""
        kept = tokens.prepared["kept"]
        ratio = probability_ratio(tokens.current - tokens.behaviour)
        return TokenLosses(loss=-kept * ratio * tokens.advantages, metrics={"clip_fraction": 1.0 - kept})
