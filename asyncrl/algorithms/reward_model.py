"""What a reward model is trained on: which of two answers is better."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import logsigmoid

from asyncrl.algorithms.policy_loss import check_range
from asyncrl.errors import SchemaError

__all__ = ["ComparisonLosses", "bradley_terry_losses"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonLosses:
    """Losses of single pairs.

        >>> one = torch.ones(1)
        >>> ComparisonLosses(loss=one, correct=one, distance=one).distance
        tensor([1.])

    Attributes:
        loss: [P], differentiable in the rewards.
        correct: [P] detached, 1 where the chosen answer has the higher reward, 0 where not, 0.5 where equal.
        distance: [P] detached, chosen minus rejected reward.
    """

    loss: Tensor
    correct: Tensor
    distance: Tensor


def bradley_terry_losses(
    chosen_rewards: Tensor, rejected_rewards: Tensor, *, margins: Tensor | None = None, centring: float = 0.0
) -> ComparisonLosses:
    """Loss -log sigmoid(chosen - rejected - margin) + centring (chosen + rejected)^2.

    The Bradley-Terry likelihood (arXiv:2203.02155, eq. 1), with a margin for pairs that differ more (Llama 2,
    arXiv:2307.09288, eq. 2) and a pull to mean 0, which the likelihood leaves free (arXiv:2312.09244).

        >>> losses = bradley_terry_losses(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0]))
        >>> losses.loss, losses.correct
        (tensor([0.3133, 0.6931]), tensor([1.0000, 0.5000]))

    Args:
        chosen_rewards: [P] of the better answers.
        rejected_rewards: [P] of the others to the same prompts.
        margins: [P] 0 or more; None for 0.
        centring: 0 or more.

    Raises:
        SchemaError: not floating tensors of one shape [P].
        ConfigError: ``centring`` is negative.
    """
    check_range("centring", centring, low=0.0)
    columns = {"chosen_rewards": chosen_rewards, "rejected_rewards": rejected_rewards, "margins": margins}
    for name, column in columns.items():
        if column is None:
            continue
        if column.ndim != 1 or column.shape != chosen_rewards.shape or not column.dtype.is_floating_point:
            raise SchemaError(f"{name} must be [P] floating, got {column.dtype} of shape {tuple(column.shape)}")
    distance = chosen_rewards - rejected_rewards
    loss = -logsigmoid(distance if margins is None else distance - margins.detach())
    if centring:
        loss = loss + centring * (chosen_rewards + rejected_rewards).square()
    return ComparisonLosses(loss=loss, correct=(distance.detach().sign() + 1) / 2, distance=distance.detach())
