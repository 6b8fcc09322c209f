r"""Estimators of a KL divergence from the log-probs of sampled tokens.

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
"""

from __future__ import annotations

from typing import Literal, TypeAlias, assert_never

import torch
from torch import Tensor

__all__ = ["LOG_RATIO_LIMIT", "LOW_VARIANCE_LIMIT", "KLEstimator", "kl_estimate", "probability_ratio"]

KLEstimator: TypeAlias = Literal["k1", "k2", "k3", "low_variance"]

LOW_VARIANCE_LIMIT = 10.0
"""Nats a ``low_variance`` estimate of one token is held below."""

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are held within ± this before they are exponentiated: e^20 is 5e8, which float32 still multiplies safely.

Beyond the limit the gradient is 0: a token whose probability changed 5e8-fold says nothing useful about direction.
"""


def probability_ratio(log_ratio: Tensor) -> Tensor:
    """``exp(log_ratio)``, always finite (see :data:`LOG_RATIO_LIMIT`); nan stays nan.

    >>> probability_ratio(torch.tensor([0.0, 1000.0]))
    tensor([1.0000e+00, 4.8517e+08])
    """
    return torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def kl_estimate(sampled_log_probs: Tensor, other_log_probs: Tensor, *, estimator: KLEstimator = "k3") -> Tensor:
    """Estimate KL(q || p) for every token.

        >>> q, p = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()  # log r is -0.6931
        >>> [round(kl_estimate(q, p, estimator=each).item(), 4) for each in ("k1", "k2", "k3")]
        [0.6931, 0.2402, 0.1931]

    Args:
        sampled_log_probs: log q(x), the distribution the tokens were drawn from.
        other_log_probs: log p(x), same shape.
        estimator: see the table at the top of this module.

    Returns:
        One estimate per token, differentiable in both; exactly 0 where the two are equal.
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
