"""The divergence from a reference as a part of the reward, and how strongly it counts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from asyncrl.algorithms.kl import KLEstimator, kl_estimate
from asyncrl.algorithms.policy_loss import check_range
from asyncrl.algorithms.token_losses import keep
from asyncrl.data.ragged import rows_of
from asyncrl.errors import SchemaError

__all__ = [
    "AdaptiveKL",
    "FixedKL",
    "KLController",
    "penalised_rewards",
    "penalised_token_rewards",
    "row_divergences",
]


class KLController(Protocol):
    """How strongly the divergence counts. Immutable: an update makes the next one.

    >>> controller: KLController = FixedKL(coefficient=0.1)
    >>> controller.updated(0.5, rows=64).coefficient
    0.1
    """

    @property
    def coefficient(self) -> float:
        """What a nat of divergence costs.

        >>> controller: KLController = FixedKL(coefficient=0.1)
        >>> controller.coefficient
        0.1
        """
        ...

    def updated(self, divergence: float, *, rows: int) -> KLController:
        """The controller after a step with this mean divergence per token, of ``rows`` rows.

        >>> AdaptiveKL(coefficient=0.1, target=0.5).updated(0.5, rows=64).coefficient  # on target
        0.1
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedKL:
    """The same coefficient for ever.

        >>> FixedKL(coefficient=0.1).coefficient
        0.1

    Raises:
        ConfigError: an option outside its range.
    """

    coefficient: float

    def __post_init__(self) -> None:
        check_range("coefficient", self.coefficient, low=0.0)

    def updated(self, divergence: float, *, rows: int) -> FixedKL:
        """See :class:`KLController`.

        >>> FixedKL(coefficient=0.1).updated(9.9, rows=64).coefficient
        0.1
        """
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveKL:
    """Proportional control in logs. Ziegler et al., arXiv:1909.08593, section 2.2.

        coefficient *= 1 + clip(divergence / target - 1, -0.2, 0.2) * rows / horizon

        >>> AdaptiveKL(coefficient=0.5, target=0.1, horizon=1000.0).updated(0.2, rows=1000).coefficient
        0.6

    Attributes:
        coefficient: above 0; a coefficient of 0 would stay there.
        target: above 0, nats per token.
        horizon: above 0, rows over which the coefficient can change by a fifth.

    Raises:
        ConfigError: an option outside its range.
    """

    coefficient: float
    target: float
    horizon: float = 10_000.0

    def __post_init__(self) -> None:
        check_range("coefficient", self.coefficient, low=0.0, open_low=True)
        check_range("target", self.target, low=0.0, open_low=True)
        check_range("horizon", self.horizon, low=0.0, open_low=True)

    def updated(self, divergence: float, *, rows: int) -> AdaptiveKL:
        """See :class:`KLController`.

        >>> AdaptiveKL(coefficient=0.5, target=0.1, horizon=1000.0).updated(0.0, rows=500).coefficient
        0.45
        """
        error = min(max(divergence / self.target - 1.0, -0.2), 0.2)
        # More rows than five horizons at once would turn the coefficient negative.
        return replace(self, coefficient=self.coefficient * max(1.0 + error * rows / self.horizon, 0.1))


def row_divergences(
    behaviour_log_probs: Tensor, reference_log_probs: Tensor, mask: Tensor, *, estimator: KLEstimator = "k1"
) -> Tensor:
    """What each row diverged from the reference [B] float32: estimates of its sampled tokens, summed, in nats.

        >>> behaviour = torch.nested.nested_tensor([[-1.0, -2.0], [-1.0]], layout=torch.jagged)
        >>> reference = torch.nested.nested_tensor([[-1.5, -3.0], [-1.0]], layout=torch.jagged)
        >>> sampled = torch.nested.nested_tensor([[True, True], [False]], layout=torch.jagged)
        >>> row_divergences(behaviour, reference, sampled)
        tensor([1.5000, 0.0000])

    Args:
        behaviour_log_probs: ragged, under the policy that sampled.
        reference_log_probs: ragged, of the same lengths.
        mask: ragged boolean, True where a token was sampled.
        estimator: see :mod:`asyncrl.algorithms.kl`; a reward has no gradient, so k1 is unbiased and enough.

    Raises:
        SchemaError: the rows differ in length.
    """
    columns = [rows_of(each) for each in (behaviour_log_probs, reference_log_probs, mask)]
    if any([len(row) for row in column] != [len(row) for row in columns[0]] for column in columns):
        raise SchemaError("behaviour_log_probs, reference_log_probs and mask must have rows of the same lengths")
    found = [
        kl_estimate(keep(behaviour, chosen), keep(reference, chosen), estimator=estimator).double().sum()
        for behaviour, reference, chosen in zip(*columns, strict=True)
    ]
    return torch.stack(found).float() if found else torch.zeros(0)


def penalised_rewards(rewards: Tensor, divergences: Tensor, *, coefficient: float) -> Tensor:
    """Return of each row: ``rewards - coefficient * divergences``. arXiv:2203.02155, eq. 2.

        >>> penalised_rewards(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 1.0]), coefficient=0.5)
        tensor([ 0.0000, -0.5000])

    Args:
        rewards: [B]
        divergences: [B] of each row, its sampled tokens' estimates summed.
        coefficient: 0 or more.

    Raises:
        SchemaError: the two differ in shape.
        ConfigError: ``coefficient`` is negative.
    """
    if divergences.shape != rewards.shape:
        raise SchemaError(f"divergences must be {tuple(rewards.shape)} like rewards, got {tuple(divergences.shape)}")
    check_range("coefficient", coefficient, low=0.0)
    return (rewards.detach().double() - coefficient * divergences.detach().double()).float()


def penalised_token_rewards(rewards: Tensor, divergences: Tensor, lengths: Tensor, *, coefficient: float) -> Tensor:
    """Reward of each token: ``-coefficient * divergence``, and the row's own reward at its last token.

        >>> penalised_token_rewards(
        ...     torch.tensor([1.0, 5.0]), torch.tensor([2.0, 0.0, 4.0]), torch.tensor([2, 1]), coefficient=0.5
        ... )
        tensor([-1.,  1.,  3.])

    Args:
        rewards: [B]
        divergences: [T] of each sampled token, row after row.
        lengths: [B] integer, sampled tokens of each row; they sum to T.
        coefficient: 0 or more.

    Returns:
        [T] float32. The reward of a row without tokens is lost: there is no token to give it to.

    Raises:
        SchemaError: shapes do not fit together.
        ConfigError: ``coefficient`` is negative.
    """
    if divergences.shape != (int(lengths.sum()),) or rewards.shape != lengths.shape:
        raise SchemaError(
            f"divergences must be [{int(lengths.sum())}] and rewards {tuple(lengths.shape)}, "
            f"got {tuple(divergences.shape)} and {tuple(rewards.shape)}"
        )
    check_range("coefficient", coefficient, low=0.0)
    found = -coefficient * divergences.detach().double()
    present = lengths > 0
    last = torch.cumsum(lengths, 0)[present] - 1
    found[last.to(found.device)] += rewards.detach().double()[present]
    return found.float()
