"""Corrections: the weight of tokens that another policy than the centre of the trust region sampled.

All weigh by x = log(anchor / behaviour), known without a gradient. With weight w and ratio r = current / anchor the
whole importance ratio is r * w = current / behaviour, as long as nothing is truncated: the loss bounds how far this
step moves (r), the correction how old and how foreign the sample is (w).

A token of weight 0 still counts in the denominator of the aggregation, so that the weights of all others stay known
before the batch is cut.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from asyncrl.algorithms.aggregation import check_options, option
from asyncrl.algorithms.kl import probability_ratio
from asyncrl.algorithms.losses import PolicyTokens
from asyncrl.errors import ConfigError

Level: TypeAlias = Literal["token", "sequence", "geometric"]
"""What is compared with a bound: the token's ratio, the product over its row, or the geometric mean over its row."""


class Correction(ABC):
    """A weight per token. A subclass is a frozen dataclass whose fields are its options.

    Found by name in the entry-point group ``asyncrl.corrections``, or as ``package.module:Class``. ``corrects`` is
    False for one that leaves samples of another policy as they are.

        >>> class Half(Correction):
        ...     def __call__(self, tokens):
        ...         return torch.full_like(tokens.behaviour, 0.5)
        >>> Half()(tokens)  # the tokens of PolicyTokens' example, as below
        tensor([0.5000, 0.5000, 0.5000])

    Raises:
        ConfigError: an option outside its range.
    """

    corrects: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_options(self)

    @abstractmethod
    def __call__(self, tokens: PolicyTokens) -> Tensor:
        """Return the weight of each token, 0 or more, without gradient."""


@dataclass(frozen=True)
class FunctionCorrection(Correction):
    """A function of tokens that returns the weight of each.

    >>> FunctionCorrection(lambda tokens: 1.0 / (1.0 + tokens.advantages.abs()))(tokens)
    tensor([0.5000, 0.5000, 0.5000])
    """

    function: Callable[..., Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, tokens: PolicyTokens) -> Tensor:
        return self.function(tokens, **self.options)


@dataclass(frozen=True, kw_only=True)
class NoCorrection(Correction):
    """Weight 1: right only where the anchor is the policy that sampled.

    >>> NoCorrection()(tokens)
    tensor([1., 1., 1.])
    """

    corrects: ClassVar[bool] = False

    def __call__(self, tokens: PolicyTokens) -> Tensor:
        return torch.ones_like(tokens.behaviour)


@dataclass(frozen=True, kw_only=True)
class ImportanceCorrection(Correction):
    """A correction by anchor / behaviour, of the token or over its row."""

    level: Level = "token"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.level not in get_args(Level):
            raise ConfigError(
                f"level {self.level!r} does not exist", path="level", remedy=f"one of {', '.join(get_args(Level))}"
            )

    def ratio(self, tokens: PolicyTokens) -> Tensor:
        """Return anchor / behaviour at :attr:`level`, without gradient; nan stays nan."""
        log_ratio = (tokens.anchor - tokens.behaviour).detach()
        if self.level == "sequence":
            log_ratio = tokens.rows().sum(log_ratio)
        elif self.level == "geometric":
            log_ratio = tokens.rows().mean(log_ratio)
        return probability_ratio(log_ratio)


@dataclass(frozen=True, kw_only=True)
class TruncatedImportance(ImportanceCorrection):
    """TIS: w = min(anchor / behaviour, cap).

    Per token: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025); with the
    trust region kept apart it is decoupled PPO (arXiv:2110.00641; AReaL, arXiv:2505.24298, eq. 5). Per ``sequence`` the
    ratios of the row's tokens are multiplied first: no bias, more variance. A cap below 1 would scale down on-policy
    tokens too: a second learning rate in disguise.

        >>> TruncatedImportance(cap=1.5)(tokens)  # anchor / behaviour is 1, 2, 1
        tensor([1.0000, 1.5000, 1.0000])
    """

    cap: float = option(2.0, low=1.0)

    def __call__(self, tokens: PolicyTokens) -> Tensor:
        return self.ratio(tokens).clamp(max=self.cap)


@dataclass(frozen=True, kw_only=True)
class MaskedImportance(ImportanceCorrection):
    """MIS: w = anchor / behaviour where that lies in [low, high], else 0; per ``sequence`` as published.

    Liu, Li et al., "When speed kills stability" (2025): a cap would keep the least informative samples at the cap; here
    they are left out.

        >>> MaskedImportance(high=1.5)(tokens)  # the first row's ratio is 1 * 2
        tensor([0., 0., 1.])
    """

    low: float = option(0.0, low=0.0, high=1.0)
    high: float = option(2.0, low=1.0)
    level: Level = "sequence"

    def __call__(self, tokens: PolicyTokens) -> Tensor:
        ratio = self.ratio(tokens)
        return torch.where(_outside(ratio, self.low, self.high), 0.0, ratio)


@dataclass(frozen=True, kw_only=True)
class IcePop(MaskedImportance):
    """IcePop: token by token, w = anchor / behaviour inside [0.5, 5], else 0. Ring-1T, arXiv:2510.18855.

    Made for trainer and engine that disagree on the same weights: both too likely and too unlikely tokens are dropped.

    >>> IcePop(high=1.5)(tokens)
    tensor([1., 0., 1.])
    """

    low: float = option(0.5, low=0.0, high=1.0)
    high: float = option(5.0, low=1.0)
    level: Level = "token"


@dataclass(frozen=True, kw_only=True)
class Rejection(ImportanceCorrection):
    """Rejection: w = 1 where the ratio lies in [low, high], else 0; nothing is reweighted.

    ``token`` drops single tokens, ``sequence`` whole rows by the product of their ratios, ``geometric`` whole rows by
    the geometric mean, which does not shrink with the row's length. Li and Liu, "When math meets reality: toxic tails
    and length traps" (2025).

        >>> Rejection(high=1.2)(tokens)  # the first row's geometric mean is the square root of 1 * 2
        tensor([0., 0., 1.])
    """

    low: float = option(0.5, low=0.0, high=1.0)
    high: float = option(2.0, low=1.0)
    level: Level = "geometric"

    def __call__(self, tokens: PolicyTokens) -> Tensor:
        ratio = self.ratio(tokens)
        return torch.where(_outside(ratio, self.low, self.high), 0.0, torch.where(ratio.isnan(), ratio, 1.0))


def _outside(ratio: Tensor, low: float, high: float) -> Tensor:
    # Compared this way round, a ratio that is nan is not left out: it stays visible in the loss.
    return (ratio < low) | (ratio > high)
