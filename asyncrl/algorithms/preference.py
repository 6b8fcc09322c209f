"""Learning from pairs: direct preference optimisation, DPO and IPO."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, sigmoid
from torch.nn.functional import logsigmoid

from asyncrl.algorithms.token_losses import keep
from asyncrl.data.ragged import rows_of
from asyncrl.errors import ConfigError, InvalidDataError, SchemaError

__all__ = ["PairLosses", "PreferenceObjective", "answer_log_probs", "preference_pairs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLosses:
    """Losses of single pairs.

        >>> one = torch.ones(1)
        >>> PairLosses(loss=one, chosen_reward=one, rejected_reward=-one, correct=one, advantage=one).correct
        tensor([1.])

    Attributes:
        loss: [P], differentiable in the policy's log-probs.
        chosen_reward: [P] detached, beta * log(policy / reference) of the chosen answer: DPO's implicit reward.
        rejected_reward: [P] detached, the same of the rejected answer.
        correct: [P] detached, 1 where the implicit reward prefers the chosen answer, 0 where not, 0.5 where equal.
        advantage: [P] detached, minus the loss's derivative in the chosen answer's log-prob; in the rejected one's it
            is the opposite. The gradient of the loss is therefore that of a policy step on both answers, with
            ``advantage`` for every token of the chosen and ``-advantage`` for every token of the rejected one.
    """

    loss: Tensor
    chosen_reward: Tensor
    rejected_reward: Tensor
    correct: Tensor
    advantage: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceObjective:
    """What is minimised for every pair, with x = log(policy / reference)(chosen) - log(policy / reference)(rejected).

    dpo: -(1 - smoothing) log sigmoid(beta x) - smoothing log sigmoid(-beta x). arXiv:2305.18290, eq. 7, with the
        conservative label smoothing of its authors (cDPO).
    ipo: (x - 1 / (2 beta))^2. arXiv:2310.12036, eq. 17: a distance to reach, not to grow for ever, so pairs that all
        agree cannot make the policy certain.

        >>> PreferenceObjective(kind="ipo", beta=0.2)
        PreferenceObjective(kind='ipo', beta=0.2, label_smoothing=0.0)

    Attributes:
        kind: ``dpo`` or ``ipo``.
        beta: > 0, how tightly the policy is held to the reference.
        label_smoothing: 0 to below 0.5, the probability that a preference is the wrong way round; DPO's only.

    Raises:
        ConfigError: a value outside its range.
    """

    kind: Literal["dpo", "ipo"] = "dpo"
    beta: float = 0.1
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("dpo", "ipo"):
            raise ConfigError(f"kind {self.kind!r} does not exist", path="kind", remedy="dpo or ipo")
        if self.kind == "ipo" and self.label_smoothing:
            raise ConfigError("label_smoothing is DPO's", path="label_smoothing", remedy="leave it out for ipo")
        if not (self.beta > 0 and math.isfinite(self.beta)):
            raise ConfigError(f"beta is {self.beta}", path="beta", remedy="a positive number, usually 0.01 to 0.5")
        if not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(
                f"label_smoothing is {self.label_smoothing}",
                path="label_smoothing",
                remedy="0 to below 0.5: above, the rejected answers would be the preferred ones",
            )

    def pair_losses(
        self,
        *,
        chosen_log_probs: Tensor,
        rejected_log_probs: Tensor,
        reference_chosen_log_probs: Tensor,
        reference_rejected_log_probs: Tensor,
    ) -> PairLosses:
        """Loss of each pair.

            >>> same = torch.tensor([-3.0])
            >>> losses = PreferenceObjective(beta=0.1).pair_losses(
            ...     chosen_log_probs=same,
            ...     rejected_log_probs=same,
            ...     reference_chosen_log_probs=same,
            ...     reference_rejected_log_probs=same,
            ... )
            >>> losses.loss, losses.correct  # log 2: it has learnt nothing yet
            (tensor([0.6931]), tensor([0.5000]))

        Args:
            chosen_log_probs: [P] log-prob of the whole preferred answer under the policy: its tokens' log-probs summed.
            rejected_log_probs: [P] the same of the other answer to the same prompt.
            reference_chosen_log_probs: [P] the same under the frozen reference policy.
            reference_rejected_log_probs: [P]

        Raises:
            SchemaError: the four are not floating tensors of one shape [P].
        """
        columns = {
            "chosen_log_probs": chosen_log_probs,
            "rejected_log_probs": rejected_log_probs,
            "reference_chosen_log_probs": reference_chosen_log_probs,
            "reference_rejected_log_probs": reference_rejected_log_probs,
        }
        for name, column in columns.items():
            if column.ndim != 1 or column.shape != chosen_log_probs.shape or not column.dtype.is_floating_point:
                raise SchemaError(
                    f"{name} must be [P] floating, one sum per pair, got {column.dtype} of shape {tuple(column.shape)}"
                )
        chosen = self.beta * (chosen_log_probs - reference_chosen_log_probs.detach())
        rejected = self.beta * (rejected_log_probs - reference_rejected_log_probs.detach())
        margin = chosen - rejected
        distance = margin.detach()
        if self.kind == "ipo":
            gap = margin / self.beta - 1.0 / (2.0 * self.beta)
            loss, advantage = gap.square(), -2.0 * gap.detach()
        else:
            loss = -(1 - self.label_smoothing) * logsigmoid(margin) - self.label_smoothing * logsigmoid(-margin)
            # d/dm log sigmoid(m) = sigmoid(-m); (1 - s) sigmoid(-m) - s sigmoid(m) = sigmoid(-m) - s
            advantage = self.beta * (sigmoid(-distance) - self.label_smoothing)
        return PairLosses(
            loss=loss,
            chosen_reward=chosen.detach(),
            rejected_reward=rejected.detach(),
            correct=(distance.sign() + 1) / 2,
            advantage=advantage,
        )


def preference_pairs(rewards: Tensor, groups: Tensor) -> Tensor:
    """Rows to be compared, as indices: chosen, rejected, chosen, rejected, ... ([2 P] int64).

    In every group the best row is paired with the worst, the second best with the second worst and so on, as long as
    their rewards differ. Groups come in the order of their numbers, rows of equal reward in their own order.

    >>> preference_pairs(torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0]), torch.tensor([8, 8, 8, 5, 5]))
    tensor([1, 2])

    Args:
        rewards: [B] floating.
        groups: [B] integer; rows with the same number answer the same prompt.

    Raises:
        SchemaError: the two are not of one shape [B].
        InvalidDataError: a reward is not finite; the message names the row.
    """
    if rewards.ndim != 1 or groups.shape != rewards.shape:
        raise SchemaError(f"rewards and groups must be [B], got {tuple(rewards.shape)} and {tuple(groups.shape)}")
    members: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)
    for row, (reward, group) in enumerate(zip(rewards.tolist(), groups.tolist(), strict=True)):
        if not math.isfinite(reward):
            raise InvalidDataError(f"reward of row {row} (group {group}) is {reward}: it cannot be compared")
        members[group].append((reward, row))
    pairs: list[int] = []
    for group in sorted(members):
        best_first = sorted(members[group], key=lambda member: -member[0])
        worst_first = sorted(members[group], key=lambda member: (member[0], -member[1]))
        for (better, chosen), (worse, rejected) in zip(best_first, worst_first, strict=True):
            if better <= worse:
                break
            pairs += [chosen, rejected]
    return torch.tensor(pairs, dtype=torch.int64)


def answer_log_probs(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Log-prob of whole answers [B]: in every row, the sum over the tokens where ``mask``.

        >>> log_probs = torch.nested.nested_tensor([[-1.0, -2.0], [-4.0]], layout=torch.jagged)
        >>> sampled = torch.nested.nested_tensor([[False, True], [True]], layout=torch.jagged)
        >>> answer_log_probs(log_probs, sampled)
        tensor([-2., -4.])

    Args:
        log_probs: ragged column of B rows, differentiable.
        mask: ragged boolean column of the same lengths, True where the policy sampled the token.

    Raises:
        SchemaError: the rows differ in length.
    """
    rows, masks = rows_of(log_probs), rows_of(mask)
    if [len(row) for row in rows] != [len(row) for row in masks]:
        raise SchemaError("log_probs and mask must have rows of the same lengths")
    if not rows:
        return log_probs.values().new_zeros(0).float()
    return torch.stack([keep(row, chosen).sum() for row, chosen in zip(rows, masks, strict=True)])
