"""Rewards among the rows of the same prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.errors import InvalidDataError, SchemaError

__all__ = ["Groups", "check_rewards"]


def check_rewards(rewards: Tensor, **columns: Tensor) -> Tensor:
    """``rewards`` [B] in float64, without gradient.

    Args:
        rewards: [B] floating.
        columns: integers or further numbers of the rows, of the same shape; named in the message.

    Raises:
        SchemaError: shapes or dtypes are others.
        InvalidDataError: a reward is not finite; the message names the row.
    """
    if rewards.ndim != 1 or not rewards.dtype.is_floating_point:
        raise SchemaError(f"rewards must be [B] floating, got {rewards.dtype} of shape {tuple(rewards.shape)}")
    for name, column in columns.items():
        if column.shape != rewards.shape or column.dtype.is_floating_point or column.dtype == torch.bool:
            raise SchemaError(
                f"{name} must be {tuple(rewards.shape)} integers like rewards, "
                f"got {column.dtype} of shape {tuple(column.shape)}"
            )
    wide = rewards.detach().double()
    bad = (~wide.isfinite()).nonzero().flatten().tolist()
    if bad:
        group = f" (group {int(columns['groups'][bad[0]])})" if "groups" in columns else ""
        raise InvalidDataError(
            f"reward of row {bad[0]}{group} is {float(wide[bad[0]])}"
            + (f"; rows {bad[1:]} are not finite either" if bad[1:] else "")
            + ": a reward must be a finite number, and a row without one must not reach the advantages"
        )
    return wide


class Groups:
    """Rewards and the groups they belong to, in float64.

    Args:
        rewards: [B] floating, one per row.
        groups: [B] integer; rows with the same number answer the same prompt. Any order, any sizes, but a group must
            be whole: its baseline is made of the rows that are here.

    Attributes:
        rewards: [B]
        sizes: [B], rows in the group of each row.
        deviations: [B], reward minus the group's mean; exactly 0 in groups whose rewards are all equal.
        equal: [B] boolean, True in those groups.

    Raises:
        SchemaError: shapes or dtypes are others.
        InvalidDataError: a reward is not finite; the message names the row.
    """

    def __init__(self, rewards: Tensor, groups: Tensor) -> None:
        self.rewards = check_rewards(rewards, groups=groups)
        self._index = torch.unique(groups, return_inverse=True)[1].to(self.rewards.device)
        self.sizes = self.sum(torch.ones_like(self.rewards))
        # The mean of equal numbers need not be that number in floating point (three times 0.1), so equality is asked.
        self.equal = self.extreme(self.rewards, "amax") == self.extreme(self.rewards, "amin")
        self.deviations = torch.where(self.equal, 0.0, self.rewards - self.sum(self.rewards) / self.sizes)

    def sum(self, values: Tensor) -> Tensor:
        """[B]: for each row, the sum of ``values`` over its group."""
        return torch.zeros_like(values).index_add_(0, self._index, values)[self._index]

    def extreme(self, values: Tensor, reduce: str) -> Tensor:
        """[B]: for each row, the largest (``amax``) or smallest (``amin``) of ``values`` in its group."""
        extremes = torch.empty_like(values).scatter_reduce_(0, self._index, values, reduce, include_self=False)
        return extremes[self._index]
