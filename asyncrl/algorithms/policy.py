"""The policy objective: a loss, a correction, a KL and an entropy term, put together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

import torch
from torch import Tensor

from asyncrl.algorithms import policy_report
from asyncrl.algorithms.aggregation import Aggregation, check_aggregation, token_weights
from asyncrl.algorithms.anchor import Anchor, anchor_log_probs
from asyncrl.algorithms.corrections import Correction, TruncatedImportance
from asyncrl.algorithms.kl import KLEstimator, kl_estimate
from asyncrl.algorithms.policy_loss import PolicyLoss, check_range
from asyncrl.algorithms.policy_losses.ppo import PPO
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.algorithms.token_losses import TokenLosses, check_tokens, keep
from asyncrl.errors import ConfigError, SchemaError

__all__ = ["PolicyObjective"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyObjective:
    """What is minimised for every token that the policy sampled.

        w * loss(r, A) + kl_coefficient * KL(current || reference) - entropy_coefficient * H

        r = current / anchor        how far this step has moved: bounded by the loss, carries the gradient
        w = correction(anchor / behaviour)      how old and how foreign the sample is: bounded by the correction

    Four policies, never interchangeable:

    behaviour: the distribution the token was really sampled from, as the rollout engine reported it.
    proximal: the trainer's weights at the start of the step.
    anchor: the trust region's centre: one of these two, or between them (:mod:`asyncrl.algorithms.anchor`).
    current: the weights being changed.

    The default is decoupled PPO with a truncated weight.

        >>> objective = PolicyObjective()
        >>> half, most = torch.tensor([0.5]).log(), torch.tensor([0.75]).log()
        >>> objective.token_losses(
        ...     current_log_probs=most,
        ...     proximal_log_probs=half,
        ...     behaviour_log_probs=half,
        ...     advantages=torch.tensor([1.0]),
        ...     mask=torch.tensor([True]),
        ... ).loss  # the ratio of 1.5 counts as 1.2
        tensor([-1.2000])

    The examples of the methods are about this objective.

    Attributes:
        loss: see :class:`~asyncrl.algorithms.PolicyLoss`.
        correction: see :class:`~asyncrl.algorithms.Correction`.
        anchor: see :func:`~asyncrl.algorithms.anchor_log_probs`.
        kl_coefficient: 0 or more, weight of the divergence from the reference policy.
        kl_estimator: see :mod:`asyncrl.algorithms.kl` for what each one's gradient does.
        entropy_coefficient: 0 or more, reward for being undecided.
        aggregation: how tokens are summed to the loss of a batch, see :func:`~asyncrl.algorithms.token_weights`.
        fixed_length: tokens, for the aggregation of that name.
        whiten: advantages of a batch are shifted and scaled to mean 0 and variance 1 over its trained tokens, whatever
            ranks and micro-batches they are spread over.

    Raises:
        ConfigError: a value outside its range.
    """

    loss: PolicyLoss = field(default_factory=PPO)
    correction: Correction = field(default_factory=TruncatedImportance)
    anchor: Anchor = "proximal"
    kl_coefficient: float = 0.0
    kl_estimator: KLEstimator = "k3"
    entropy_coefficient: float = 0.0
    aggregation: Aggregation = "token_mean"
    fixed_length: int | None = None
    whiten: bool = False

    def __post_init__(self) -> None:
        check_range("kl_coefficient", self.kl_coefficient, low=0.0)
        check_range("entropy_coefficient", self.entropy_coefficient, low=0.0)
        for name, value, kind in (("kl_estimator", self.kl_estimator, KLEstimator), ("anchor", self.anchor, Anchor)):
            if value not in get_args(kind):
                raise ConfigError(
                    f"{name} {value!r} does not exist", path=name, remedy=f"one of {', '.join(get_args(kind))}"
                )
        check_aggregation(self.aggregation, self.fixed_length)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns a batch must have for this objective.

        >>> PolicyObjective(kl_coefficient=0.1).columns
        ('behaviour_log_probs', 'advantages', 'reference_log_probs')
        """
        return (
            "behaviour_log_probs",
            "advantages",
            *(["reference_log_probs"] if self.kl_coefficient else []),
            *(["ages"] if self.anchor == "interpolated" else []),
        )

    @property
    def prepares(self) -> bool:
        """True if :meth:`prepare` must be called, with the proximal log-probs, before the batch is cut.

        >>> objective.prepares
        False
        """
        return self.loss.prepares

    def prepare(
        self,
        *,
        proximal_log_probs: Tensor,
        behaviour_log_probs: Tensor,
        advantages: Tensor,
        rows: Tensor,
        seed: int,
    ) -> dict[str, Tensor]:
        """Columns that the loss needs of the whole batch, to be handed to :meth:`token_losses` as ``prepared``.

            >>> PolicyObjective(loss=M2PO()).prepare(
            ...     proximal_log_probs=torch.tensor([-1.0, -1.0]),
            ...     behaviour_log_probs=torch.tensor([-1.0, -4.0]),
            ...     advantages=torch.tensor([1.0, 1.0]),
            ...     rows=torch.tensor([0, 0]),
            ...     seed=0,
            ... )  # the second token is too far from the policy that sampled it
            {'kept': tensor([1., 0.])}

        Args:
            proximal_log_probs: [T], of all trained tokens of all ranks, in the order of their rows; likewise the rest.
            behaviour_log_probs: [T]
            advantages: [T]
            rows: [T] integer, row of each token.
            seed: equal on all ranks, another for every update.

        Raises:
            SchemaError: shapes or dtypes differ.
        """
        mask = torch.ones_like(proximal_log_probs, dtype=torch.bool)
        check_tokens(
            mask,
            proximal_log_probs=proximal_log_probs,
            behaviour_log_probs=behaviour_log_probs,
            advantages=advantages,
        )
        tokens = PolicyTokens(
            current=proximal_log_probs,
            anchor=proximal_log_probs,
            proximal=proximal_log_probs,
            behaviour=behaviour_log_probs,
            advantages=advantages,
            mask=mask,
            row_index=rows,
        )
        return {name: column.float() for name, column in self.loss.prepare(tokens, seed=seed).items()}

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
        ages: Tensor | None = None,
        rows: Tensor | None = None,
        prepared: Mapping[str, Tensor] | None = None,
    ) -> TokenLosses:
        """Loss of every token.

        All tensors have one shape, usually [T] packed tokens: whole rows, in any order. Entries outside ``mask`` may be
        anything, inf and nan included.

            >>> quarter = torch.full((2,), 0.25).log()
            >>> losses = objective.token_losses(
            ...     current_log_probs=quarter,
            ...     proximal_log_probs=quarter,
            ...     behaviour_log_probs=torch.tensor([0.25, 0.05]).log(),
            ...     advantages=torch.tensor([1.0, 1.0]),
            ...     mask=torch.tensor([True, True]),
            ... )
            >>> losses.loss  # five times as likely as when it was sampled, counted twice
            tensor([-1., -2.])

        Args:
            current_log_probs: under the weights being trained; the gradient goes here.
            proximal_log_probs: under the weights at the start of the step. ``current_log_probs.detach()`` when there
                is one update per step.
            behaviour_log_probs: as reported by the engine at the moment of sampling.
            advantages: one per token; a row's advantage repeated over its tokens.
            mask: boolean, True where the token is trained on.
            entropy: of the current policy at that position; differentiable if ``entropy_coefficient`` is not 0.
            reference_log_probs: under the frozen reference policy.
            ages: versions between the weights that sampled the token and those at the start of the step.
            rows: integer, equal for tokens of one row; needed by what sums over rows.
            prepared: these tokens' entries of what :meth:`prepare` returned.

        Returns:
            Losses and metrics, to be averaged over tokens and then finished by :meth:`report`. Beside those of
            :mod:`asyncrl.algorithms.policy_report` and the loss's own:

            ================== ===========================================================================
            ratio              current / anchor, before clipping
            policy_kl          k3 estimate of KL(proximal || current): how far this step has moved
            reference_kl       KL(current || reference) by ``kl_estimator``, if there is a reference
            entropy            if given
            ================== ===========================================================================

        Raises:
            SchemaError: shapes or dtypes differ, or a column that something needs is missing.
        """
        prepared = prepared or {}
        check_tokens(
            mask,
            current_log_probs=current_log_probs,
            proximal_log_probs=proximal_log_probs,
            behaviour_log_probs=behaviour_log_probs,
            advantages=advantages,
            entropy=entropy,
            reference_log_probs=reference_log_probs,
            ages=ages,
            **prepared,
        )
        if self.kl_coefficient and reference_log_probs is None:
            raise SchemaError(f"kl_coefficient is {self.kl_coefficient}, which needs reference_log_probs")
        if self.entropy_coefficient and entropy is None:
            raise SchemaError(f"entropy_coefficient is {self.entropy_coefficient}, which needs entropy")
        if self.prepares and not prepared:
            raise SchemaError(f"{type(self.loss).__name__} needs what prepare() found in the whole batch")

        current = keep(current_log_probs, mask)
        proximal = keep(proximal_log_probs.detach(), mask)
        behaviour = keep(behaviour_log_probs.detach(), mask)
        age = None if ages is None else keep(ages.detach(), mask)
        tokens = PolicyTokens(
            current=current,
            anchor=anchor_log_probs(self.anchor, current=current, proximal=proximal, behaviour=behaviour, ages=age),
            proximal=proximal,
            behaviour=behaviour,
            advantages=keep(advantages.detach(), mask),
            mask=mask,
            row_index=rows,
            prepared={name: keep(column.detach(), mask) for name, column in prepared.items()},
        )
        losses = self.loss(tokens)
        weight = self.correction(tokens).detach()
        loss = weight * losses.loss
        metrics = {
            **losses.metrics,
            **policy_report.moments(
                proximal=proximal,
                behaviour=behaviour,
                clip_fraction=losses.metrics.get("clip_fraction", torch.zeros_like(proximal)),
                weight=weight,
                ages=age,
            ),
            "ratio": tokens.ratio,
            "policy_kl": kl_estimate(proximal, current),
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

    def report(self, means: Mapping[str, float]) -> dict[str, float]:
        """Metrics of a step, from the averages of :meth:`token_losses`' metrics over all its trained tokens.

        >>> objective.report({"behaviour_ratio": 1.0, "behaviour_ratio_squared": 2.0})["effective_sample_share"]
        0.5
        """
        return policy_report.report(means)

    def token_weights(self, lengths: Tensor, *, total_tokens: int, total_rows: int) -> Tensor:
        """:func:`~asyncrl.algorithms.token_weights` with this objective's aggregation.

        >>> objective.token_weights(torch.tensor([1, 3]), total_tokens=4, total_rows=2)
        tensor([0.2500, 0.2500])
        """
        return token_weights(
            lengths,
            aggregation=self.aggregation,
            total_tokens=total_tokens,
            total_rows=total_rows,
            fixed_length=self.fixed_length,
        )
