"""Advantages normalised over the whole batch, or against a greedy answer: REINFORCE++, ReMax."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.advantages.groups import Groups, check_rewards
from asyncrl.errors import SchemaError

__all__ = ["reinforce_plus_plus_advantages", "reinforce_plus_plus_baseline_advantages", "remax_advantages"]


def reinforce_plus_plus_advantages(rewards: Tensor, lengths: Tensor, *, epsilon: float = 1e-8) -> Tensor:
    """(reward - mean) / (standard deviation + epsilon) over all tokens of the batch. REINFORCE++, arXiv:2501.03262.

    Every token of a row has the row's return (no discount; a KL penalty belongs into the reward), so a row counts as
    often as it has tokens. No group is needed: the baseline is the whole batch.

        >>> reinforce_plus_plus_advantages(
        ...     torch.tensor([1.0, 0.0]), torch.tensor([2, 2])
        ... )  # deviation: the root of 1 / 3
        tensor([ 0.8660, -0.8660])

    Args:
        rewards: [B] floating.
        lengths: [B] integer, sampled tokens of each row. Rows without tokens take no part and get 0.
        epsilon: against a batch of equal rewards, which gets exactly 0.

    Raises:
        SchemaError: shapes or dtypes are others.
        InvalidDataError: a reward is not finite; the message names the row.
    """
    return _whitened(check_rewards(rewards, lengths=lengths), lengths, epsilon=epsilon)


def reinforce_plus_plus_baseline_advantages(
    rewards: Tensor, groups: Tensor, lengths: Tensor, *, epsilon: float = 1e-8
) -> Tensor:
    """As :func:`reinforce_plus_plus_advantages`, of rewards minus their group's mean. arXiv:2501.03262.

    Unlike GRPO's, the deviation is that of the batch: a prompt does not weigh more because its rewards differ little.

        >>> reinforce_plus_plus_baseline_advantages(
        ...     torch.tensor([6.0, 5.0]), torch.tensor([7, 7]), torch.tensor([2, 2])
        ... )
        tensor([ 0.8660, -0.8660])

    Raises:
        SchemaError: shapes or dtypes are others.
        InvalidDataError: a reward is not finite; the message names the row.
    """
    check_rewards(rewards, lengths=lengths)
    return _whitened(Groups(rewards, groups).deviations, lengths, epsilon=epsilon)


def remax_advantages(rewards: Tensor, greedy_rewards: Tensor) -> Tensor:
    """Reward minus that of the greedy answer to the same prompt. ReMax, arXiv:2310.10505.

        >>> remax_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5]))
        tensor([ 0.5000, -0.5000])

    Args:
        rewards: [B] floating.
        greedy_rewards: [B] floating, reward of the greedy answer to each row's prompt.

    Raises:
        SchemaError: shapes or dtypes are others.
        InvalidDataError: a reward is not finite; the message names the row.
    """
    if greedy_rewards.shape != rewards.shape:
        raise SchemaError(
            f"greedy_rewards must be {tuple(rewards.shape)} like rewards, got {tuple(greedy_rewards.shape)}"
        )
    return (check_rewards(rewards) - check_rewards(greedy_rewards)).float()


def _whitened(values: Tensor, lengths: Tensor, *, epsilon: float) -> Tensor:
    weights = lengths.to(values.device).double()
    total = weights.sum()
    present = values[weights > 0]
    if len(present) == 0 or bool((present == present[0]).all()):
        return torch.zeros_like(values).float()
    mean = (weights * values).sum() / total
    # Divided by T - 1, the sample variance over tokens.
    deviation = ((weights * (values - mean).square()).sum() / (total - 1.0)).sqrt()
    return torch.where(weights > 0, (values - mean) / (deviation + epsilon), 0.0).float()
