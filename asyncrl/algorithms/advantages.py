"""Advantages of whole rows, relative to the other rows of the same prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from asyncrl.errors import ConfigError, InvalidDataError, SchemaError

__all__ = [
    "ADVANTAGES",
    "Advantage",
    "dr_grpo_advantages",
    "get_advantage",
    "grpo_advantages",
    "register_advantage",
    "rloo_advantages",
]


class Advantage(Protocol):
    """From rewards to advantages.

    Args (of the call):
        rewards: [B] floating, one per row.
        groups: [B] integer; rows with the same number answer the same prompt. Any order, any sizes, but a group must
            be whole: its baseline is made of the rows that are here.

    Returns:
        [B] float32 on the device of ``rewards``. A group of one row, or of equal rewards, gets exactly 0.

    Raises:
        InvalidDataError: a reward is not finite; the message names the row.
    """

    def __call__(self, rewards: Tensor, groups: Tensor) -> Tensor: ...


ADVANTAGES: dict[str, Advantage] = {}
"""Estimators by the name they have in configurations."""

_A = TypeVar("_A", bound=Advantage)


def register_advantage(name: str) -> Callable[[_A], _A]:
    """Give an estimator a name: ``@register_advantage("mine")``. A name can be given once."""

    def register(estimator: _A) -> _A:
        if name in ADVANTAGES:
            raise ConfigError(f"advantage {name!r} is registered already", remedy="choose another name")
        ADVANTAGES[name] = estimator
        return estimator

    return register


def get_advantage(name: str) -> Advantage:
    """The estimator registered under ``name``, or :class:`ConfigError` with the names there are."""
    if name not in ADVANTAGES:
        raise ConfigError(f"advantage {name!r} does not exist", remedy=f"one of {', '.join(sorted(ADVANTAGES))}")
    return ADVANTAGES[name]


@register_advantage("grpo")
def grpo_advantages(rewards: Tensor, groups: Tensor, *, epsilon: float = 1e-6) -> Tensor:
    """Group-relative: (reward - mean) / (standard deviation + epsilon). GRPO, arXiv:2402.03300, section 4.1.

    The deviation is the sample one (divided by G - 1), as in the implementations in wide use. See :class:`Advantage`.

    >>> grpo_advantages(torch.tensor([0.0, 1.0, 5.0]), torch.tensor([7, 7, 8]))
    tensor([-0.7071,  0.7071,  0.0000])
    """
    centred = _Groups(rewards, groups)
    variance = centred.sum(centred.deviations.square()) / (centred.sizes - 1).clamp(min=1)
    return (centred.deviations / (variance.sqrt() + epsilon)).float()


@register_advantage("dr_grpo")
def dr_grpo_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """Reward minus the group's mean, not divided by anything. Dr. GRPO, arXiv:2503.20783, section 3.2.

    Dividing by the deviation gives more weight to prompts that are nearly always or nearly never solved; this does not.
    """
    return _Groups(rewards, groups).deviations.float()


@register_advantage("rloo")
def rloo_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """Reward minus the mean of the *other* rows: G / (G - 1) times Dr. GRPO's. RLOO, arXiv:2402.14740."""
    centred = _Groups(rewards, groups)
    return (centred.deviations * centred.sizes / (centred.sizes - 1).clamp(min=1)).float()


class _Groups:
    """Rewards around the mean of their group, in float64.

    Attributes:
        deviations: [B], exactly 0 in groups whose rewards are all equal.
        sizes: [B], rows in the group of each row.
    """

    def __init__(self, rewards: Tensor, groups: Tensor) -> None:
        if rewards.ndim != 1 or not rewards.dtype.is_floating_point:
            raise SchemaError(f"rewards must be [B] floating, got {rewards.dtype} of shape {tuple(rewards.shape)}")
        if groups.shape != rewards.shape or groups.dtype.is_floating_point or groups.dtype == torch.bool:
            raise SchemaError(
                f"groups must be {tuple(rewards.shape)} integers like rewards, "
                f"got {groups.dtype} of shape {tuple(groups.shape)}"
            )
        wide = rewards.detach().double()
        bad = (~wide.isfinite()).nonzero().flatten().tolist()
        if bad:
            raise InvalidDataError(
                f"reward of row {bad[0]} (group {int(groups[bad[0]])}) is {float(wide[bad[0]])}"
                + (f"; rows {bad[1:]} are not finite either" if bad[1:] else "")
                + ": a reward must be a finite number, and a row without one must not reach the advantages"
            )
        self._index = torch.unique(groups, return_inverse=True)[1].to(wide.device)
        self.sizes = self.sum(torch.ones_like(wide))
        deviations = wide - self.sum(wide) / self.sizes
        # The mean of equal numbers need not be that number in floating point (three times 0.1), so equality is asked.
        self.deviations = torch.where(self._extreme(wide, "amax") == self._extreme(wide, "amin"), 0.0, deviations)

    def sum(self, values: Tensor) -> Tensor:
        """[B]: for each row, the sum of ``values`` over its group."""
        return torch.zeros_like(values).index_add_(0, self._index, values)[self._index]

    def _extreme(self, values: Tensor, reduce: str) -> Tensor:
        extremes = torch.empty_like(values).scatter_reduce_(0, self._index, values, reduce, include_self=False)
        return extremes[self._index]
