"""The policy loss: decoupled PPO over groups, with KL and entropy terms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from asyncrl.algorithms.aggregation import Aggregation, check_aggregation, token_weights
from asyncrl.algorithms.kl import KLEstimator, kl_estimate, probability_ratio
from asyncrl.algorithms.token_losses import TokenLosses, check_tokens, keep
from asyncrl.errors import ConfigError, SchemaError

__all__ = ["PolicyObjective"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyObjective:
    """What is minimised for every token that the policy sampled.

        loss = -w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) + kl_coefficient * KL - entropy_coefficient * H

        r = current / proximal                     how far this step has moved: clipped, carries the gradient
        w = min(proximal / behaviour, cap)         how old and how foreign the sample is: truncated, no gradient

    Decoupled PPO (Hilton et al., arXiv:2110.00641; AReaL, arXiv:2505.24298, eq. 5), with the behaviour weight truncated
    instead of left unbounded. Three policies, never interchangeable:

    behaviour: the distribution the token was really sampled from, as the rollout engine reported it.
    proximal: the trainer's weights at the start of the step, where the trust region has its centre.
    current: the weights being changed.

    Attributes:
        clip_low: 0..1, how far below 1 the ratio may fall.
        clip_high: 0 or more, how far above 1 it may rise; larger than ``clip_low`` for clip-higher (DAPO,
            arXiv:2503.14476).
        behaviour_weight_cap: 1 or more; None switches the weight off (w = 1).
        kl_coefficient: 0 or more, weight of the divergence from the reference policy.
        kl_estimator: see :mod:`asyncrl.algorithms.kl` for what each one's gradient does.
        entropy_coefficient: 0 or more, reward for being undecided.
        aggregation: how tokens are summed to the loss of a batch, see :func:`~asyncrl.algorithms.token_weights`.
        fixed_length: tokens, for the aggregation of that name.

    Raises:
        ConfigError: a value outside its range.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    behaviour_weight_cap: float | None = 2.0
    kl_coefficient: float = 0.0
    kl_estimator: KLEstimator = "k3"
    entropy_coefficient: float = 0.0
    aggregation: Aggregation = "token_mean"
    fixed_length: int | None = None

    def __post_init__(self) -> None:
        _check("clip_low", self.clip_low, low=0.0, high=1.0)
        _check("clip_high", self.clip_high, low=0.0)
        if self.behaviour_weight_cap is not None:
            # A cap below 1 would scale down on-policy tokens too: a second learning rate in disguise.
            _check("behaviour_weight_cap", self.behaviour_weight_cap, low=1.0)
        _check("kl_coefficient", self.kl_coefficient, low=0.0)
        _check("entropy_coefficient", self.entropy_coefficient, low=0.0)
        if self.kl_estimator not in get_args(KLEstimator):
            raise ConfigError(
                f"kl_estimator {self.kl_estimator!r} does not exist",
                remedy=f"one of {', '.join(get_args(KLEstimator))}",
            )
        check_aggregation(self.aggregation, self.fixed_length)

    def token_losses(
        self,
        *,
        current_log_probs: Tensor,
        proximal_log_probs: Tensor,
        behaviour_log_probs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        entropy: Tensor | None = None,
        reference_log_probs: Tensor | None = None,
    ) -> TokenLosses:
        """Loss of every token.

        All tensors have one shape, usually [T] packed tokens. Entries outside ``mask`` may be anything, inf and nan
        included.

        Args:
            current_log_probs: under the weights being trained; the gradient goes here.
            proximal_log_probs: under the weights at the start of the step. ``current_log_probs.detach()`` when there
                is one update per step.
            behaviour_log_probs: as reported by the engine at the moment of sampling.
            advantages: one per token; a row's advantage repeated over its tokens.
            mask: boolean, True where the token is trained on.
            entropy: of the current policy at that position; differentiable if ``entropy_coefficient`` is not 0.
            reference_log_probs: under the frozen reference policy.

        Returns:
            Losses and these metrics:

            ================== ===========================================================================
            ratio              r, before clipping
            clip_fraction      1 where the clip took the token's gradient away
            policy_kl          k3 estimate of KL(proximal || current): how far this step has moved
            behaviour_weight   w, after truncation
            behaviour_kl       k3 estimate of KL(behaviour || proximal): staleness and engine mismatch
            reference_kl       KL(current || reference) by ``kl_estimator``, if there is a reference
            entropy            if given
            ================== ===========================================================================

        Raises:
            SchemaError: shapes or dtypes differ, or a column that a coefficient needs is missing.
        """
        check_tokens(
            mask,
            current_log_probs=current_log_probs,
            proximal_log_probs=proximal_log_probs,
            behaviour_log_probs=behaviour_log_probs,
            advantages=advantages,
            entropy=entropy,
            reference_log_probs=reference_log_probs,
        )
        if self.kl_coefficient and reference_log_probs is None:
            raise SchemaError(f"kl_coefficient is {self.kl_coefficient}, which needs reference_log_probs")
        if self.entropy_coefficient and entropy is None:
            raise SchemaError(f"entropy_coefficient is {self.entropy_coefficient}, which needs entropy")

        current = keep(current_log_probs, mask)
        proximal = keep(proximal_log_probs.detach(), mask)
        behaviour = keep(behaviour_log_probs.detach(), mask)
        advantage = keep(advantages.detach(), mask)

        ratio = probability_ratio(current - proximal)
        free = ratio * advantage
        clipped = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high) * advantage
        if self.behaviour_weight_cap is None:
            weight = torch.ones_like(proximal)
        else:
            weight = probability_ratio(proximal - behaviour).clamp(max=self.behaviour_weight_cap)
        loss = -weight * torch.minimum(free, clipped)
        metrics = {
            "ratio": ratio,
            "clip_fraction": (clipped < free).to(ratio.dtype),
            "policy_kl": kl_estimate(proximal, current),
            "behaviour_weight": weight,
            "behaviour_kl": kl_estimate(behaviour, proximal),
        }
        if reference_log_probs is not None:
            reference = keep(reference_log_probs.detach(), mask)
            divergence = kl_estimate(current, reference, estimator=self.kl_estimator)
            metrics["reference_kl"] = divergence
            if self.kl_coefficient:
                loss = loss + self.kl_coefficient * divergence
        if entropy is not None:
            metrics["entropy"] = entropy
            if self.entropy_coefficient:
                loss = loss - self.entropy_coefficient * keep(entropy, mask)
        return TokenLosses(
            loss=keep(loss, mask), metrics={name: keep(value.detach(), mask) for name, value in metrics.items()}
        )

    def token_weights(self, lengths: Tensor, *, total_tokens: int, total_rows: int) -> Tensor:
        """:func:`~asyncrl.algorithms.token_weights` with this objective's aggregation."""
        return token_weights(
            lengths,
            aggregation=self.aggregation,
            total_tokens=total_tokens,
            total_rows=total_rows,
            fixed_length=self.fixed_length,
        )


def _check(name: str, value: float, *, low: float, high: float = math.inf) -> None:
    if not (low <= value <= high) or not math.isfinite(value):
        allowed = (
            f"a number from {low:g} to {high:g}" if math.isfinite(high) else f"a finite number of at least {low:g}"
        )
        raise ConfigError(f"{name} is {value}", path=name, remedy=allowed)
