"""Divergences: estimators of a KL per token, and a KL to the reference policy as a part of the reward.

Schulman, "Approximating KL divergence" (2020). For x drawn from q and r = p(x) / q(x), all three estimate KL(q || p):

    ===  ================  ========  ===============  ==========================================================
    .    value             unbiased  never negative   gradient in q's parameters when used as a loss (x from q)
    ===  ================  ========  ===============  ==========================================================
    k1   -log r            yes       no               0 on average: pure noise, no restoring force
    k2   (log r)^2 / 2     no        yes              that of KL(q || p)
    k3   (r - 1) - log r   yes       yes              that of KL(p || q)
    ===  ================  ========  ===============  ==========================================================

A fourth, ``low_variance``, is k3 held below 10 nats, as wide-spread implementations of GRPO (arXiv:2402.03300, eq. 4)
do: tokens beyond get no gradient from it.

The last column is about the gradient through the estimator alone (the samples are held fixed), which is what a loss
term per token has; ``tests/algorithms/test_kl.py`` sums it over a whole vocabulary. With q the policy being trained
and p the frozen reference, k2 therefore pulls towards the reference's mode and k3 towards covering all of it.

A reward acts through the score function instead. E_q[k1 grad log q] is the gradient of KL(q || p); with k3 that of
KL(p || q) is subtracted from it, so that near the reference nothing is left, and k2 is no better
(``tests/algorithms/test_kl_reward.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, assert_never

import torch
from torch import Tensor

from asyncrl.algorithms.aggregation import check_range, keep
from asyncrl.data.ragged import rows_of
from asyncrl.errors import SchemaError

KLEstimator: TypeAlias = Literal["k1", "k2", "k3", "low_variance"]

LOW_VARIANCE_LIMIT = 10.0
"""Nats a ``low_variance`` estimate of one token is held below."""

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are held within ± this before they are exponentiated: e^20 is 5e8, which float32 still multiplies safely.

Beyond the limit the gradient is 0: a token whose probability changed 5e8-fold has no useful direction.
"""


def probability_ratio(log_ratio: Tensor) -> Tensor:
    """Return ``exp(log_ratio)``, always finite (see :data:`LOG_RATIO_LIMIT`); nan stays nan.

    >>> probability_ratio(torch.tensor([0.0, 1000.0]))
    tensor([1.0000e+00, 4.8517e+08])
    """
    return torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def kl_estimate(sampled_log_probs: Tensor, other_log_probs: Tensor, *, estimator: KLEstimator = "k3") -> Tensor:
    """Estimate KL(q || p) for every token, differentiable in both; exactly 0 where the two are equal.

        >>> q, p = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()  # log r is -0.6931
        >>> [round(kl_estimate(q, p, estimator=each).item(), 4) for each in ("k1", "k2", "k3")]
        [0.6931, 0.2402, 0.1931]

    ``sampled_log_probs`` are log q(x), of the distribution the tokens were drawn from, ``other_log_probs`` log p(x) of
    the same shape; for ``estimator`` see the table of :mod:`asyncrl.algorithms.kl`.
    """
    log_ratio = other_log_probs - sampled_log_probs
    match estimator:
        case "k1":
            return -log_ratio
        case "k2":
            return 0.5 * log_ratio.square()
        case "k3":
            # Not (r - 1) - log r: near r = 1 the subtraction would cancel what little there is.
            limited = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            return torch.expm1(limited) - limited
        case "low_variance":
            return kl_estimate(sampled_log_probs, other_log_probs, estimator="k3").clamp(max=LOW_VARIANCE_LIMIT)
        case _:
            assert_never(estimator)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedKL:
    """A coefficient that never changes.

        >>> FixedKL(coefficient=0.1).updated(9.9, rows=64).coefficient
        0.1

    Raises:
        ConfigError: the coefficient is negative.
    """

    coefficient: float

    def __post_init__(self) -> None:
        check_range("coefficient", self.coefficient, low=0.0)

    def updated(self, divergence: float, *, rows: int) -> FixedKL:
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveKL:
    """Proportional control in logs. Ziegler et al., arXiv:1909.08593, section 2.2.

        coefficient *= 1 + clip(divergence / target - 1, -0.2, 0.2) * rows / horizon

    ``target`` is in nats per token, ``horizon`` in rows, over which the coefficient can change by a fifth. All three
    are above 0: a coefficient of 0 would stay there. ``start`` is the coefficient that a run was configured with.

        >>> AdaptiveKL(coefficient=0.5, target=0.1, horizon=1000.0).updated(0.2, rows=1000).coefficient
        0.6

    Raises:
        ConfigError: an option outside its range.
    """

    coefficient: float
    target: float
    horizon: float = 10_000.0
    start: float | None = None

    def __post_init__(self) -> None:
        for name in ("coefficient", "target", "horizon"):
            check_range(name, getattr(self, name), low=0.0, open_low=True)

    def updated(self, divergence: float, *, rows: int) -> AdaptiveKL:
        error = min(max(divergence / self.target - 1.0, -0.2), 0.2)
        # More rows than five horizons at once would turn the coefficient negative.
        return replace(self, coefficient=self.coefficient * max(1.0 + error * rows / self.horizon, 0.1))


KLController: TypeAlias = FixedKL | AdaptiveKL
"""The coefficient of a KL penalty in the reward. Immutable: an update returns the next controller."""


def row_divergences(
    behaviour_log_probs: Tensor, reference_log_probs: Tensor, mask: Tensor, *, estimator: KLEstimator = "k1"
) -> Tensor:
    """Return the divergence of each row from the reference [B] float32: its sampled tokens' estimates summed, in nats.

    All columns are ragged, of the same lengths. In a reward only k1 has the gradient of the divergence.

        >>> behaviour = torch.nested.nested_tensor([[-1.0, -2.0], [-1.0]], layout=torch.jagged)
        >>> reference = torch.nested.nested_tensor([[-1.5, -3.0], [-1.0]], layout=torch.jagged)
        >>> sampled = torch.nested.nested_tensor([[True, True], [False]], layout=torch.jagged)
        >>> row_divergences(behaviour, reference, sampled)
        tensor([1.5000, 0.0000])

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
    """Return the penalised return of each row: ``rewards - coefficient * divergences``. arXiv:2203.02155, eq. 2.

        >>> penalised_rewards(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 1.0]), coefficient=0.5)
        tensor([ 0.0000, -0.5000])

    Raises:
        SchemaError: the two differ in shape.
        ConfigError: ``coefficient`` is negative.
    """
    if divergences.shape != rewards.shape:
        raise SchemaError(f"divergences must be {tuple(rewards.shape)} like rewards, got {tuple(divergences.shape)}")
    check_range("coefficient", coefficient, low=0.0)
    return (rewards.detach().double() - coefficient * divergences.detach().double()).float()


def penalised_token_rewards(rewards: Tensor, divergences: Tensor, lengths: Tensor, *, coefficient: float) -> Tensor:
    """Return the reward of each token [T]: ``-coefficient * divergence``, and the row's reward at its last token.

    ``divergences`` [T] are those of all sampled tokens, row after row, ``lengths`` [B] the sampled tokens of each row.
    The reward of a row without tokens is lost: no token can carry it.

        >>> penalised_token_rewards(
        ...     torch.tensor([1.0, 5.0]), torch.tensor([2.0, 0.0, 4.0]), torch.tensor([2, 1]), coefficient=0.5
        ... )
        tensor([-1.,  1.,  3.])

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
