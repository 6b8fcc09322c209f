"""GiGPO: groups within groups, so that single turns get their own credit."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.advantages.groups import Groups
from asyncrl.errors import InvalidDataError, SchemaError

__all__ = ["gigpo_advantages"]


def gigpo_advantages(
    rewards: Tensor,
    groups: Tensor,
    turn_rewards: Tensor,
    turn_rows: Tensor,
    turn_anchors: Tensor,
    *,
    discount: float = 0.95,
    weight: float = 1.0,
    normalise: bool = True,
    epsilon: float = 1e-6,
) -> Tensor:
    """Advantage of every turn: episode-relative plus ``weight`` times step-relative. arXiv:2505.10978.

    Turns of one group that start from the same state (their *anchor*) are compared with one another by their discounted
    return from there; whole episodes as in GRPO.

        >>> gigpo_advantages(  # two rows of one prompt, a turn each, which begin in the same state
        ...     torch.tensor([1.0, 0.0]),
        ...     torch.tensor([5, 5]),
        ...     torch.tensor([1.0, 0.0]),
        ...     torch.tensor([0, 1]),
        ...     torch.tensor([9, 9]),
        ...     normalise=False,
        ... )
        tensor([ 1., -1.])

    Args:
        rewards: [B] return of each row.
        groups: [B] rows with the same number answer the same prompt.
        turn_rewards: [K] reward each turn earned; the turns of a row in their order, rows in any.
        turn_rows: [K] integer, row of each turn.
        turn_anchors: [K] integer, equal for turns that begin in the same state (a hash of it). Only turns of the same
            group are compared.
        discount: 0..1, per turn.
        weight: 0 or more, of the step-relative part.
        normalise: divide both parts by their group's standard deviation; without it as Dr. GRPO.
        epsilon: added to the deviation.

    Returns:
        [K] float32.

    Raises:
        SchemaError: shapes or dtypes differ.
        InvalidDataError: a reward is not finite, or a turn's row does not exist.
    """
    if turn_rows.shape != turn_rewards.shape or turn_anchors.shape != turn_rewards.shape or turn_rewards.ndim != 1:
        raise SchemaError(
            f"turn_rewards, turn_rows and turn_anchors must be [K], got {tuple(turn_rewards.shape)}, "
            f"{tuple(turn_rows.shape)} and {tuple(turn_anchors.shape)}"
        )
    if len(turn_rows) and not 0 <= int(turn_rows.min()) <= int(turn_rows.max()) < len(rewards):
        raise InvalidDataError(f"turn_rows must lie in 0..{len(rewards) - 1}")
    episodes = _relative(Groups(rewards, groups), normalise=normalise, epsilon=epsilon)
    returns = turn_rewards.detach().double().clone()
    following: dict[int, float] = {}
    for turn in range(len(returns) - 1, -1, -1):
        row = int(turn_rows[turn])
        returns[turn] += discount * following.get(row, 0.0)
        following[row] = float(returns[turn])
    pairs = torch.stack([groups.to(turn_anchors.device)[turn_rows].long(), turn_anchors.long()], dim=1)
    states = torch.unique(pairs, dim=0, return_inverse=True)[1] if len(pairs) else turn_anchors.long()
    steps = _relative(Groups(returns, states), normalise=normalise, epsilon=epsilon)
    return (episodes[turn_rows] + weight * steps).float()


def _relative(found: Groups, *, normalise: bool, epsilon: float) -> Tensor:
    if not normalise:
        return found.deviations
    variance = found.sum(found.deviations.square()) / (found.sizes - 1).clamp(min=1)
    return found.deviations / (variance.sqrt() + epsilon)
