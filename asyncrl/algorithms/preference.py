"""Learning from given answers: supervised, from preferences (DPO, IPO, KTO), and of reward models (Bradley-Terry)."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, sigmoid
from torch.nn.functional import logsigmoid

from asyncrl.algorithms.aggregation import TokenLosses, check_options, check_range, check_tokens, keep, option
from asyncrl.data.ragged import rows_of
from asyncrl.errors import ConfigError, InvalidDataError, SchemaError


def supervised_token_losses(log_probs: Tensor, *, mask: Tensor) -> TokenLosses:
    """Return each token's cross-entropy in nats, 0 outside ``mask``; its mean over the mask is the log-perplexity.

        >>> supervised_token_losses(torch.tensor([-0.5, -2.0]), mask=torch.tensor([False, True])).loss
        tensor([0., 2.])

    Raises:
        SchemaError: shapes or dtypes differ.
    """
    check_tokens(mask, log_probs=log_probs)
    return TokenLosses(loss=keep(-log_probs, mask))


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLosses:
    """Losses of single pairs of answers.

    Attributes:
        loss: [P], differentiable in the policy's log-probs.
        chosen_reward: [P] detached, beta * log(policy / reference): DPO's implicit reward; so ``rejected_reward``.
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

        >>> same = torch.tensor([-3.0])
        >>> losses = PreferenceObjective(beta=0.1).pair_losses(
        ...     chosen_log_probs=same,
        ...     rejected_log_probs=same,
        ...     reference_chosen_log_probs=same,
        ...     reference_rejected_log_probs=same,
        ... )
        >>> losses.loss, losses.correct  # log 2: nothing is learnt yet
        (tensor([0.6931]), tensor([0.5000]))

    Attributes:
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
        """Return the loss of each pair.

        All are log-probs [P] of whole answers (:func:`~asyncrl.algorithms.answer_log_probs`), those of the reference
        under the frozen reference policy.

        Raises:
            SchemaError: the four are not floating tensors of one shape [P].
        """
        _check(
            "[P] floating, one sum per pair",
            chosen_log_probs=chosen_log_probs,
            rejected_log_probs=rejected_log_probs,
            reference_chosen_log_probs=reference_chosen_log_probs,
            reference_rejected_log_probs=reference_rejected_log_probs,
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
    """Return the rows to be compared, as indices: chosen, rejected, chosen, rejected, ... ([2 P] int64).

    In every group the best row is paired with the worst, the second best with the second worst and so on, as long as
    their rewards differ. Groups come in the order of their numbers, rows of equal reward in their own order.

    >>> preference_pairs(torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0]), torch.tensor([8, 8, 8, 5, 5]))
    tensor([1, 2])

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
    """Return the log-prob of whole answers [B], differentiable: in each row of ragged columns the sum where ``mask``.

        >>> log_probs = torch.nested.nested_tensor([[-1.0, -2.0], [-4.0]], layout=torch.jagged)
        >>> sampled = torch.nested.nested_tensor([[False, True], [True]], layout=torch.jagged)
        >>> answer_log_probs(log_probs, sampled)
        tensor([-2., -4.])

    Raises:
        SchemaError: the rows differ in length.
    """
    rows, masks = rows_of(log_probs), rows_of(mask)
    if [len(row) for row in rows] != [len(row) for row in masks]:
        raise SchemaError("log_probs and mask must have rows of the same lengths")
    if not rows:
        return log_probs.values().new_zeros(0).float()
    return torch.stack([keep(row, chosen).sum() for row, chosen in zip(rows, masks, strict=True)])


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLosses:
    """Losses of single answers.

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

        loss = desirable_weight   (1 - sigmoid(beta (x - z)))    for a desirable answer
        loss = undesirable_weight (1 - sigmoid(beta (z - x)))    for an undesirable one
        x = log(policy / reference) of the answer

    The reference point z is a number known before the batch is cut (:meth:`reference_point`). The paper balances the
    two weights by the counts of answers.

        >>> same = torch.tensor([-2.0, -2.0])
        >>> KTOObjective(beta=1.0).answer_losses(
        ...     log_probs=same, reference_log_probs=same, desirable=torch.tensor([True, False]), reference_point=0.0
        ... ).loss  # 1 - sigmoid(0)
        tensor([0.5000, 0.5000])

    Raises:
        ConfigError: an option outside its range.
    """

    beta: float = option(0.1, low=0.0, open_low=True)
    desirable_weight: float = option(1.0, low=0.0)
    undesirable_weight: float = option(1.0, low=0.0)

    def __post_init__(self) -> None:
        check_options(self)

    @staticmethod
    def reference_point(log_probs: Tensor, reference_log_probs: Tensor) -> float:
        """Return an estimate of KL(policy || reference), at least 0, from log-probs [M] of answers to *other* prompts.

        Raises:
            SchemaError: they are not floating tensors of one shape [M].
        """
        _check("[B] floating", log_probs=log_probs, reference_log_probs=reference_log_probs)
        if not len(log_probs):
            return 0.0
        return max(0.0, float((log_probs.detach() - reference_log_probs.detach()).double().mean()))

    def answer_losses(
        self, *, log_probs: Tensor, reference_log_probs: Tensor, desirable: Tensor, reference_point: float
    ) -> AnswerLosses:
        """Return the loss of each answer [B], from log-probs of whole answers under policy and frozen reference.

        ``desirable`` [B] is boolean, ``reference_point`` is z.

        Raises:
            ConfigError: ``reference_point`` is negative.
            SchemaError: shapes or dtypes are others.
        """
        _check("[B] floating", log_probs=log_probs, reference_log_probs=reference_log_probs)
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


def _check(rule: str, **columns: Tensor | None) -> None:
    first = next(iter(columns.values()))
    assert first is not None
    for name, column in columns.items():
        if column is None:
            continue
        if column.ndim != 1 or column.shape != first.shape or not column.dtype.is_floating_point:
            raise SchemaError(f"{name} must be {rule}, got {column.dtype} of shape {tuple(column.shape)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonLosses:
    """Losses of single comparisons.

    Attributes:
        loss: [P], differentiable in the rewards.
        correct: [P] detached, 1 where the chosen answer has the higher reward, 0 where not, 0.5 where equal.
        distance: [P] detached, chosen minus rejected reward.
    """

    loss: Tensor
    correct: Tensor
    distance: Tensor


def bradley_terry_losses(
    chosen_rewards: Tensor,
    rejected_rewards: Tensor,
    *,
    margins: Tensor | None = None,
    center_rewards_coefficient: float = 0.0,
) -> ComparisonLosses:
    """Return the losses -log sigmoid(chosen - rejected - margin) + center_rewards_coefficient (chosen + rejected)^2.

    The Bradley-Terry likelihood (arXiv:2203.02155, eq. 1), with a margin for pairs that differ more (Llama 2,
    arXiv:2307.09288, eq. 2) and a pull to mean 0, which the likelihood leaves free (arXiv:2312.09244).

        >>> losses = bradley_terry_losses(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0]))
        >>> losses.loss, losses.correct
        (tensor([0.3133, 0.6931]), tensor([1.0000, 0.5000]))

    Raises:
        SchemaError: not floating tensors of one shape [P].
        ConfigError: ``center_rewards_coefficient`` is negative.
    """
    check_range("center_rewards_coefficient", center_rewards_coefficient, low=0.0)
    _check("[P] floating", chosen_rewards=chosen_rewards, rejected_rewards=rejected_rewards, margins=margins)
    distance = chosen_rewards - rejected_rewards
    loss = -logsigmoid(distance if margins is None else distance - margins.detach())
    if center_rewards_coefficient:
        loss = loss + center_rewards_coefficient * (chosen_rewards + rejected_rewards).square()
    return ComparisonLosses(loss=loss, correct=(distance.detach().sign() + 1) / 2, distance=distance.detach())
