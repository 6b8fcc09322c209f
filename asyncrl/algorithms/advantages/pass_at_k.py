"""Advantages for the best of several answers: pass@k and best-of-group."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.advantages.groups import Groups
from asyncrl.errors import ConfigError, InvalidDataError

__all__ = ["best_of_group_advantages", "pass_at_k_advantages"]


def pass_at_k_advantages(rewards: Tensor, groups: Tensor, *, k: int = 4, success_reward: float = 1.0) -> Tensor:
    """Advantage of a row when ``k`` answers may be given and one right one is enough. arXiv:2508.10751, eq. 14, 15.

    All subsets of k rows of the group are averaged over in closed form. With F failures among G rows, a subset fails
    with probability q = C(F, k) / C(G, k), its mean reward is 1 - q and its deviation s = sqrt(q (1 - q)):

        success: q / s        failure: (q - C(F - 1, k - 1) / C(G - 1, k - 1)) / s

    A failure is only blamed for the subsets that fail without it as well, and prompts that k answers always or never
    solve teach nothing.

        >>> pass_at_k_advantages(torch.tensor([1.0, 0.0]), torch.tensor([7, 7]), k=1)
        tensor([ 1., -1.])
        >>> pass_at_k_advantages(torch.tensor([1.0, 0.0]), torch.tensor([7, 7]), k=2)  # two answers always solve it
        tensor([0., 0.])

    Args:
        rewards: [B]
        groups: [B]
        k: at least 1, answers in a subset.
        success_reward: reward from which a row counts as a success.

    Raises:
        SchemaError: shapes or dtypes are others.
        ConfigError: ``k`` is below 1.
        InvalidDataError: a group has fewer than ``k`` rows.
    """
    if k < 1:
        raise ConfigError(f"k is {k}", path="k", remedy="at least 1")
    found = Groups(rewards, groups)
    if len(found.sizes) and int(found.sizes.min()) < k:
        row = int(found.sizes.argmin())
        raise InvalidDataError(f"group {int(groups[row])} has {int(found.sizes[row])} rows; pass@{k} needs {k}")
    failed = (found.rewards < success_reward).double()
    failures = found.sum(failed)
    all_fail = _chosen(failures, found.sizes, k)
    deviation = (all_fail * (1.0 - all_fail)).sqrt()
    others_fail = _chosen(failures - 1.0, found.sizes - 1.0, k - 1)
    centred = all_fail - failed * others_fail
    return torch.where(deviation > 0, centred / deviation.clamp(min=1e-300), 0.0).float()


def best_of_group_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """What the group's best reward would lose without the row: best - second best for the best, 0 for all others.

    The leave-one-out baseline of the maximum over the whole group. arXiv:2503.19595. Among several equally
    good best rows none is missed, so all get 0.

        >>> best_of_group_advantages(torch.tensor([0.25, 1.0, 0.5]), torch.tensor([7, 7, 7]))
        tensor([0.0000, 0.5000, 0.0000])

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
    best = found.extreme(found.rewards, "amax")
    is_best = found.rewards == best
    alone = is_best & (found.sum(is_best.double()) == 1.0) & (found.sizes > 1.0)
    second = found.extreme(torch.where(is_best, -torch.inf, found.rewards), "amax")
    return torch.where(alone, best - second, 0.0).float()


def _chosen(of: Tensor, among: Tensor, k: int) -> Tensor:
    """C(of, k) / C(among, k) as a product; 0 where ``of`` < k. ``among`` >= k."""
    share = torch.ones_like(of)
    for taken in range(k):
        share = share * ((of - taken).clamp(min=0.0) / (among - taken))
    return share
