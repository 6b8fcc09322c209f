"""Learning from single answers that are called good or bad: KTO."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.algorithms.policy_loss import check_range
from asyncrl.errors import SchemaError

__all__ = ["AnswerLosses", "KTOObjective"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLosses:
    """Losses of single answers.

        >>> one = torch.ones(1)
        >>> AnswerLosses(loss=one, reward=one, advantage=one).loss
        tensor([1.])

    Attributes:
        loss: [B], differentiable in the policy's log-probs.
        reward: [B] detached, beta * log(policy / reference): the implicit reward.
        advantage: [B] detached, minus the loss's derivative in the answer's log-prob: the gradient is that of a policy
            step with it on every token.
    """

    loss: Tensor
    reward: Tensor
    advantage: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class KTOObjective:
    """Kahneman-Tversky optimisation. Ethayarajh et al., arXiv:2402.01306.

        loss = desirable_weight   (1 - sigmoid(beta (x - z)))    for an answer that is wanted
        loss = undesirable_weight (1 - sigmoid(beta (z - x)))    for one that is not
        x = log(policy / reference) of the answer

    The reference point z is a number known before the batch is cut (:meth:`reference_point`).

        >>> KTOObjective(undesirable_weight=1.5)
        KTOObjective(beta=0.1, desirable_weight=1.0, undesirable_weight=1.5)

    Attributes:
        beta: above 0.
        desirable_weight: 0 or more.
        undesirable_weight: 0 or more; the paper balances the two by the counts of answers.

    Raises:
        ConfigError: an option outside its range.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        check_range("beta", self.beta, low=0.0, open_low=True)
        check_range("desirable_weight", self.desirable_weight, low=0.0)
        check_range("undesirable_weight", self.undesirable_weight, low=0.0)

    @staticmethod
    def reference_point(log_probs: Tensor, reference_log_probs: Tensor) -> float:
        """Estimate of KL(policy || reference), at least 0.

            >>> KTOObjective.reference_point(torch.tensor([-4.0, -1.0]), torch.tensor([-5.0, -3.0]))
            1.5

        Args:
            log_probs: [M] log-probs of whole answers that belong to *other* prompts, under the policy.
            reference_log_probs: [M] under the reference.

        Raises:
            SchemaError: they are not floating tensors of one shape [M].
        """
        _check(log_probs=log_probs, reference_log_probs=reference_log_probs)
        if not len(log_probs):
            return 0.0
        return max(0.0, float((log_probs.detach() - reference_log_probs.detach()).double().mean()))

    def answer_losses(
        self, *, log_probs: Tensor, reference_log_probs: Tensor, desirable: Tensor, reference_point: float
    ) -> AnswerLosses:
        """Loss of each answer.

            >>> KTOObjective(beta=1.0).answer_losses(
            ...     log_probs=torch.tensor([-2.0, -2.0]),
            ...     reference_log_probs=torch.tensor([-2.0, -2.0]),
            ...     desirable=torch.tensor([True, False]),
            ...     reference_point=0.0,
            ... ).loss  # 1 - sigmoid(0)
            tensor([0.5000, 0.5000])

        Args:
            log_probs: [B] of whole answers under the policy: their tokens' log-probs summed.
            reference_log_probs: [B] under the frozen reference.
            desirable: [B] boolean.
            reference_point: z, 0 or more.

        Raises:
            ConfigError: ``reference_point`` is negative.
            SchemaError: shapes or dtypes are others.
        """
        _check(log_probs=log_probs, reference_log_probs=reference_log_probs)
        if desirable.dtype != torch.bool or desirable.shape != log_probs.shape:
            raise SchemaError(
                f"desirable must be {tuple(log_probs.shape)} boolean, got {desirable.dtype} of {tuple(desirable.shape)}"
            )
        check_range("reference_point", reference_point, low=0.0)
        distance = log_probs - reference_log_probs.detach()
        sign = torch.where(desirable, 1.0, -1.0).to(distance.dtype)
        weight = torch.where(desirable, self.desirable_weight, self.undesirable_weight).to(distance.dtype)
        value = torch.sigmoid(self.beta * sign * (distance - reference_point))
        slope = self.beta * sign * weight * value * (1.0 - value)
        return AnswerLosses(
            loss=weight * (1.0 - value), reward=(self.beta * distance).detach(), advantage=slope.detach()
        )


def _check(**columns: Tensor) -> None:
    shape = next(iter(columns.values())).shape
    for name, column in columns.items():
        if column.ndim != 1 or column.shape != shape or not column.dtype.is_floating_point:
            raise SchemaError(f"{name} must be [B] floating, got {column.dtype} of shape {tuple(column.shape)}")
