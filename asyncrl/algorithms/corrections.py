"""Corrections: how much a token counts that another policy than the trust region's centre sampled.

All weigh by x = log(anchor / behaviour), known without a gradient. With weight w and ratio r = current / anchor the
whole importance ratio is r * w = current / behaviour, as long as nothing is truncated: the loss bounds how far this
step moves (r), the correction how old and how foreign the sample is (w).

A token of weight 0 still counts in the denominator of the aggregation, so that the weights of all others stay known
before the batch is cut.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from asyncrl.algorithms.kl import probability_ratio
from asyncrl.algorithms.policy_loss import check_range
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.errors import ConfigError

__all__ = [
    "Correction",
    "IcePop",
    "Level",
    "MaskedImportance",
    "NoCorrection",
    "Rejection",
    "TruncatedImportance",
]

Level: TypeAlias = Literal["token", "sequence", "geometric"]
"""What is compared with a bound: the token's ratio, the product over its row, or the geometric mean over its row."""


class Correction(ABC):
    """A weight per token. A subclass is a frozen dataclass whose fields are its options.

    Found by name in the entry-point group ``asyncrl.corrections``, or as ``package.module:Class``.

        >>> class Half(Correction):
        ...     def __call__(self, tokens):
        ...         return torch.full_like(tokens.behaviour, 0.5)
        >>> Half()(tokens)  # the tokens of PolicyTokens' example, as below
        tensor([0.5000, 0.5000, 0.5000])

    Attributes:
        corrects: False for one that leaves samples of another policy as they are.
    """

    corrects: ClassVar[bool] = True

    @abstractmethod
    def __call__(self, tokens: PolicyTokens) -> Tensor:
        """Weight of each token, 0 or more, without gradient."""


@dataclass(frozen=True, kw_only=True)
class NoCorrection(Correction):
    """Weight 1: right only where the anchor is the policy that sampled.

    >>> NoCorrection()(tokens)
    tensor([1., 1., 1.])
    """

    corrects: ClassVar[bool] = False

    def __call__(self, tokens: PolicyTokens) -> Tensor:
        """See :class:`Correction`."""
        return torch.ones_like(tokens.behaviour)


@dataclass(frozen=True, kw_only=True)
class TruncatedImportance(Correction):
    """TIS: w = min(anchor / behaviour, cap).

    Per token: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025); with
    the trust region kept apart it is decoupled PPO (arXiv:2110.00641; AReaL, arXiv:2505.24298, eq. 5). Per
    sequence the ratios of the row's tokens are multiplied first: no bias, more variance.

        >>> TruncatedImportance(cap=1.5)(tokens)  # anchor / behaviour is 1, 2, 1
        tensor([1.0000, 1.5000, 1.0000])

    Attributes:
        cap: 1 or more; a cap below 1 would scale down on-policy tokens too: a second learning rate in disguise.
        level: ``token`` or ``sequence``.

    Raises:
        ConfigError: an option outside its range.
    """

    cap: float = 2.0
    level: Level = "token"

    def __post_init__(self) -> None:
        check_range("cap", self.cap, low=1.0)
        _check_level(self.level)

    def __call__(self, tokens: PolicyTokens) -> Tensor:
        """See :class:`Correction`."""
        return _ratio(tokens, self.level).clamp(max=self.cap)


@dataclass(frozen=True, kw_only=True)
class MaskedImportance(Correction):
    """MIS: w = anchor / behaviour where that lies in [low, high], else 0.

    Liu, Li et al., "When speed kills stability" (2025): what a cap would keep at the cap, where the sample says least,
    is thrown away instead.

        >>> MaskedImportance(high=1.5)(tokens)  # the first row's ratio is 1 * 2
        tensor([0., 0., 1.])

    Attributes:
        low: 0 to 1.
        high: 1 or more.
        level: what is weighed and compared; ``sequence`` as published.

    Raises:
        ConfigError: an option outside its range.
    """

    low: float = 0.0
    high: float = 2.0
    level: Level = "sequence"

    def __post_init__(self) -> None:
        _check_band(self.low, self.high)
        _check_level(self.level)

    def __call__(self, tokens: PolicyTokens) -> Tensor:
        """See :class:`Correction`."""
        ratio = _ratio(tokens, self.level)
        return torch.where(_outside(ratio, self.low, self.high), 0.0, ratio)


@dataclass(frozen=True, kw_only=True)
class IcePop(MaskedImportance):
    """IcePop: token by token, w = anchor / behaviour inside [0.5, 5], else 0. Ring-1T, arXiv:2510.18855.

    Made for trainer and engine that disagree on the same weights: both too likely and too unlikely tokens are dropped.

    >>> IcePop(high=1.5)(tokens)
    tensor([1., 0., 1.])
    """

    low: float = 0.5
    high: float = 5.0
    level: Level = "token"


@dataclass(frozen=True, kw_only=True)
class Rejection(Correction):
    """Rejection: w = 1 where the ratio lies in [low, high], else 0; nothing is reweighted.

        >>> Rejection(high=1.2)(tokens)  # the first row's geometric mean is the square root of 1 * 2
        tensor([0., 0., 1.])

    Attributes:
        low: 0 to 1.
        high: 1 or more.
        level: ``token`` drops single tokens, ``sequence`` whole rows by the product of their ratios, ``geometric``
            whole rows by the geometric mean, which does not shrink with the row's length. Li and Liu, "When math meets
            reality: toxic tails and length traps" (2025).

    Raises:
        ConfigError: an option outside its range.
    """

    low: float = 0.5
    high: float = 2.0
    level: Level = "geometric"

    def __post_init__(self) -> None:
        _check_band(self.low, self.high)
        _check_level(self.level)

    def __call__(self, tokens: PolicyTokens) -> Tensor:
        """See :class:`Correction`."""
        ratio = _ratio(tokens, self.level)
        return torch.where(_outside(ratio, self.low, self.high), 0.0, torch.where(ratio.isnan(), ratio, 1.0))


def _ratio(tokens: PolicyTokens, level: Level) -> Tensor:
    log_ratio = (tokens.anchor - tokens.behaviour).detach()
    if level == "sequence":
        log_ratio = tokens.rows().sum(log_ratio)
    elif level == "geometric":
        log_ratio = tokens.rows().mean(log_ratio)
    return probability_ratio(log_ratio)


def _outside(ratio: Tensor, low: float, high: float) -> Tensor:
    # Asked this way round a ratio that is nan is not thrown away: it stays visible in the loss.
    return (ratio < low) | (ratio > high)


def _check_level(level: str) -> None:
    if level not in get_args(Level):
        raise ConfigError(
            f"level {level!r} does not exist", path="level", remedy=f"one of {', '.join(get_args(Level))}"
        )


def _check_band(low: float, high: float) -> None:
    check_range("low", low, low=0.0, high=1.0)
    check_range("high", high, low=1.0)
