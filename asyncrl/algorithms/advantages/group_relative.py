"""Advantages relative to the other rows of the same prompt: GRPO, Dr. GRPO, RLOO, OPO."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.advantages.groups import Groups, check_rewards

__all__ = ["dr_grpo_advantages", "grpo_advantages", "opo_advantages", "rloo_advantages"]


def grpo_advantages(rewards: Tensor, groups: Tensor, *, epsilon: float = 1e-6) -> Tensor:
    """Group-relative: (reward - mean) / (standard deviation + epsilon). GRPO, arXiv:2402.03300, section 4.1.2.

    The deviation is the sample one (divided by G - 1), as in the implementations in wide use.

    >>> grpo_advantages(torch.tensor([0.0, 1.0, 5.0]), torch.tensor([7, 7, 8]))
    tensor([-0.7071,  0.7071,  0.0000])

    Args:
        rewards: [B] floating.
        groups: [B] integer, equal for the rows of one prompt.
        epsilon: added to the deviation.

    Returns:
        [B] float32.

    Raises:
        SchemaError: shapes or dtypes are others.
        InvalidDataError: a reward is not finite; the message names the row.
    """
    found = Groups(rewards, groups)
    variance = found.sum(found.deviations.square()) / (found.sizes - 1).clamp(min=1)
    return (found.deviations / (variance.sqrt() + epsilon)).float()


def dr_grpo_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """Reward minus the group's mean, not divided by anything. Dr. GRPO, arXiv:2503.20783, section 3.2.

    Dividing by the deviation gives more weight to prompts that are nearly always or nearly never solved; this does not.

        >>> dr_grpo_advantages(torch.tensor([0.0, 1.0, 5.0]), torch.tensor([7, 7, 8]))
        tensor([-0.5000,  0.5000,  0.0000])

    Args:
        rewards: [B] floating.
        groups: [B] integer, equal for the rows of one prompt.

    Returns:
        [B] float32.

    Raises:
        SchemaError: shapes or dtypes are others.
        InvalidDataError: a reward is not finite; the message names the row.
    """
    return Groups(rewards, groups).deviations.float()


def rloo_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """Reward minus the mean of the *other* rows: G / (G - 1) times Dr. GRPO's. RLOO, arXiv:2402.14740.

        >>> rloo_advantages(torch.tensor([0.0, 0.0, 3.0]), torch.tensor([7, 7, 7]))
        tensor([-1.5000, -1.5000,  3.0000])

    Args:
        rewards: [B] floating.
        groups: [B] integer, equal for the rows of one prompt.

    Returns:
        [B] float32.

    Raises:
        SchemaError: shapes or dtypes are others.
        InvalidDataError: a reward is not finite; the message names the row.
    """
    found = Groups(rewards, groups)
    return (found.deviations * found.sizes / (found.sizes - 1).clamp(min=1)).float()


def opo_advantages(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """Reward minus the group's length-weighted mean. OPO, arXiv:2505.23585.

    That is the baseline of least variance where a row's squared gradient grows with its length.

        >>> opo_advantages(torch.tensor([0.0, 1.0]), torch.tensor([7, 7]), torch.tensor([3, 1]))
        tensor([-0.2500,  0.7500])

    Args:
        rewards: [B]
        groups: [B]
        lengths: [B] integer, sampled tokens of each row. A group without any gets the plain mean as its baseline.

    Raises:
        SchemaError: shapes or dtypes are others.
        InvalidDataError: a reward is not finite; the message names the row.
    """
    found = Groups(rewards, groups)
    check_rewards(rewards, lengths=lengths)
    wide = lengths.to(found.rewards.device).double()
    weights = torch.where(found.sum(wide) > 0, wide, 1.0)
    baseline = found.sum(weights * found.rewards) / found.sum(weights)
    return torch.where(found.equal, 0.0, found.rewards - baseline).float()
