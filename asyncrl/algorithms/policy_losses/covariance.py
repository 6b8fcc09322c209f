"""Clip-Cov and KL-Cov: holding back the few tokens that use up the entropy.

Cui et al., "The entropy mechanism of reinforcement learning for reasoning language models", arXiv:2505.22617: entropy
falls by the covariance of log-prob and advantage, and a tiny share of the tokens has nearly all of it.

The covariance is that of the whole batch at the start of the step, so which tokens are held back does not depend on
how the batch is cut. (The published code takes it within whatever is computed at once.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from asyncrl.algorithms.policy_loss import PolicyLoss, check_range
from asyncrl.algorithms.policy_losses.ppo import clipped_surrogate
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.algorithms.token_losses import TokenLosses

__all__ = ["ClipCov", "KLCov"]


ROUNDING = 1e-4
"""Log-ratios this small are no movement: two float32 passes over one row differ by less. |log r| has full slope however
small it is, so without this the sign of a rounding error would decide where a token is pulled."""


def covariances(tokens: PolicyTokens) -> Tensor:
    """[T]: (log-prob - mean) * (advantage - mean); means over all tokens given, in float64."""
    log_probs, advantages = tokens.proximal.double(), tokens.advantages.double()
    return (log_probs - log_probs.mean()) * (advantages - advantages.mean())


@dataclass(frozen=True, kw_only=True)
class ClipCov(PolicyLoss):
    """The clipped surrogate without the gradient of a few tokens of high covariance. arXiv:2505.22617.

        >>> from dataclasses import replace
        >>> spread = replace(tokens, proximal=torch.tensor([0.9, 0.5, 0.1]).log())
        >>> ClipCov().prepare(spread, seed=0)  # covariances 0.62, 0.23 and 1.69
        {'held_back': tensor([0., 0., 1.])}

    Attributes:
        clip_low: as PPO's.
        clip_high: as PPO's.
        share: above 0, at most 1: share of all tokens that are taken out, at least one, drawn at random.
        low: only from tokens whose covariance lies above ...
        high: ... and below.

    Raises:
        ConfigError: an option outside its range.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    share: float = 2e-4
    low: float = 1.0
    high: float = 5.0
    prepares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_range("clip_low", self.clip_low, low=0.0, high=1.0)
        check_range("clip_high", self.clip_high, low=0.0)
        check_range("share", self.share, low=0.0, high=1.0, open_low=True)
        check_range("high", self.high, low=self.low, open_low=True)

    def prepare(self, tokens: PolicyTokens, *, seed: int) -> Mapping[str, Tensor]:
        """Column ``held_back``: 1 for the tokens taken out.

        >>> ClipCov().prepare(tokens, seed=0)  # no token is likelier than another
        {'held_back': tensor([0., 0., 0.])}
        """
        covariance = covariances(tokens)
        candidates = ((covariance > self.low) & (covariance < self.high)).nonzero().flatten()
        count = min(len(candidates), max(1, int(self.share * len(covariance))))
        order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
        held_back = torch.zeros(len(covariance), device=covariance.device)
        held_back[candidates[order[:count].to(candidates.device)]] = 1.0
        return {"held_back": held_back}

    def __call__(self, tokens: PolicyTokens) -> TokenLosses:
        """See :class:`PolicyLoss`; ``held_back`` is 1 for the tokens taken out."""
        surrogate = clipped_surrogate(tokens.ratio, tokens.advantages, clip_low=self.clip_low, clip_high=self.clip_high)
        held_back = tokens.prepared["held_back"]
        return TokenLosses(
            loss=torch.where(held_back > 0, surrogate.loss.detach(), surrogate.loss),
            metrics={**surrogate.metrics, "held_back": held_back},
        )


@dataclass(frozen=True, kw_only=True)
class KLCov(PolicyLoss):
    """The surrogate -r A, with a penalty |log r| on the tokens of highest covariance. arXiv:2505.22617.

    The penalty's gradient is 0 at r = 1 (within :data:`ROUNDING`), so it does something only from the second optimizer
    step on a batch on.

        >>> from dataclasses import replace
        >>> spread = replace(tokens, proximal=torch.tensor([0.9, 0.5, 0.1]).log())
        >>> KLCov()(replace(spread, prepared=KLCov().prepare(spread, seed=0))).loss  # 0.5, and 0.693 for being held
        tensor([-1.0000, -1.5000,  1.1930])

    Attributes:
        share: above 0, at most 1: share of all tokens that are held, at least one.
        coefficient: 0 or more, weight of the penalty.

    Raises:
        ConfigError: an option outside its range.
    """

    share: float = 2e-4
    coefficient: float = 1.0
    prepares: ClassVar[bool] = True
    moves: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_range("share", self.share, low=0.0, high=1.0, open_low=True)
        check_range("coefficient", self.coefficient, low=0.0)

    def prepare(self, tokens: PolicyTokens, *, seed: int) -> Mapping[str, Tensor]:
        """Column ``held_back``: 1 for the tokens that are held.

        >>> KLCov(share=1.0).prepare(tokens, seed=0)
        {'held_back': tensor([1., 1., 1.])}
        """
        covariance = covariances(tokens)
        count = min(len(covariance), max(1, int(self.share * len(covariance))))
        held_back = torch.zeros(len(covariance), device=covariance.device)
        # A stable sort, so that of equal ones the first is taken on every machine.
        held_back[torch.sort(covariance, descending=True, stable=True).indices[:count]] = 1.0
        return {"held_back": held_back}

    def __call__(self, tokens: PolicyTokens) -> TokenLosses:
        """See :class:`PolicyLoss`; ``held_back`` is 1 for the tokens that are held."""
        held_back = tokens.prepared["held_back"]
        distance = (tokens.log_ratio.abs() - ROUNDING).clamp(min=0.0)
        penalty = torch.where(held_back > 0, self.coefficient * distance, 0.0)
        return TokenLosses(loss=penalty - tokens.ratio * tokens.advantages, metrics={"held_back": held_back})
