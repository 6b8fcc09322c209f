"""The contract of a policy loss: from ratios and advantages to one number per token."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.algorithms.token_losses import TokenLosses
from asyncrl.errors import ConfigError

__all__ = ["PolicyLoss", "check_range"]


class PolicyLoss(ABC):
    """What is minimised for every token, before corrections, KL and entropy terms.

    A subclass is a frozen dataclass: its fields are its options (``[algorithm.loss_options]``), checked in
    ``__post_init__``. It is found by name in the entry-point group ``asyncrl.policy_losses``, or as
    ``package.module:Class``.

    The loss of a batch is a weighted sum of token losses whose weights are known before the batch is cut
    (:func:`~asyncrl.algorithms.token_weights`). A loss must therefore depend on nothing but the token, its row
    (``tokens.rows()``) and the columns it prepared over the whole batch: never on which rows share a micro-batch.

        >>> class Reinforce(PolicyLoss):
        ...     def __call__(self, tokens):
        ...         return TokenLosses(loss=-tokens.advantages * tokens.current)
        >>> Reinforce()(tokens).loss  # the tokens of PolicyTokens' example
        tensor([ 0.6931,  0.2877, -1.3863])

    Attributes:
        corrects: True if the loss itself weighs tokens by how likely the policy that *sampled* them found them. Such a
            loss takes no further correction; any other needs one on stale data.
        prepares: True if :meth:`prepare` is to be called. It costs a forward pass before the first optimizer step.
        moves: True if the loss is that of one step from the anchor and does nothing new until the weights have moved.
    """

    corrects: ClassVar[bool] = False
    prepares: ClassVar[bool] = False
    moves: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, tokens: PolicyTokens) -> TokenLosses:
        """Loss of each token, differentiable in ``tokens.current``, and metrics to be averaged over tokens."""

    def prepare(self, tokens: PolicyTokens, *, seed: int) -> Mapping[str, Tensor]:
        """Columns that need the whole batch: quantiles, covariances.

        Called once per update with all trained tokens of all ranks, in the order of their rows, where ``current`` and
        ``anchor`` are those of the start of the step. Every rank computes the same from the same.

            >>> M2PO().prepare(tokens, seed=0)
            {'kept': tensor([1., 0., 1.])}

        Args:
            tokens: [T] of the whole batch.
            seed: for what is drawn at random; equal on all ranks.

        Returns:
            Columns [T] by name; the entries of a micro-batch's tokens come back as ``tokens.prepared``.
        """
        raise NotImplementedError(f"{type(self).__name__} prepares nothing")


def check_range(name: str, value: float, *, low: float, high: float = math.inf, open_low: bool = False) -> None:
    """Raise :class:`ConfigError` unless ``low <= value <= high`` (``low < value`` if ``open_low``) and finite."""
    huge = isinstance(value, int) and abs(value) > sys.float_info.max
    if (
        isinstance(value, bool)
        or huge
        or not math.isfinite(value)
        or not low <= value <= high
        or (open_low and value == low)
    ):
        bound = f"above {low:g}" if open_low else f"of at least {low:g}"
        allowed = f"a finite number {bound}" + (f" and at most {high:g}" if math.isfinite(high) else "")
        raise ConfigError(f"{name} is {value}; {allowed} is needed", path=name, remedy=allowed)
