"""An advantage and a loss of your own, in twenty lines, used by name.

    PYTHONPATH=examples asyncrl train examples/calculator.toml \
        --algorithm.advantage custom_algorithm:sign_of_the_median --algorithm.loss custom_algorithm:SquaredDistance

A function's positional parameters are the columns it wants (rewards, groups, lengths; greedy_rewards, turn_rewards or
values bring the stage that makes them into the run), its keyword-only ones are options. A loss is a frozen dataclass:
its fields are options, and it sees tokens of whole rows, never the batch, so micro-batches and ranks cannot change it.
Corrections, KL, entropy and aggregation are added around it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.algorithms import PolicyLoss, PolicyTokens, TokenLosses


def sign_of_the_median(rewards: Tensor, groups: Tensor, *, margin: float = 0.0) -> Tensor:
    """1 above the median of the prompt's rewards, -1 below, 0 near it: an outlier weighs like any other."""
    medians = torch.stack([rewards[groups == group].quantile(0.5) for group in groups])
    return torch.where((rewards - medians).abs() <= margin, 0.0, (rewards - medians).sign())


@dataclass(frozen=True, kw_only=True)
class SquaredDistance(PolicyLoss):
    """-A log r + pull (log r)^2: no clip, but a quadratic penalty on the log-ratio to the anchor."""

    pull: float = 0.5

    def __call__(self, tokens: PolicyTokens) -> TokenLosses:
        distance = tokens.log_ratio
        return TokenLosses(loss=self.pull * distance.square() - tokens.advantages * distance)
