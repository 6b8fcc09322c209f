"""Selections that draw: which ready groups are trained on is left to chance, in proportion to a weight.

All draw without replacement, from a generator of their own, so a seed and the order of events decide what is drawn.
What was drawn is written to the ledger with its step: a resumed run takes the same batches.
"""

from __future__ import annotations

import math
import random
from typing import Literal

from asyncrl.interfaces import GroupSummary
from buffers.sum_tree import SumTree

__all__ = ["PrioritizedOrder", "UniformOrder", "advantage_magnitude"]


class UniformOrder:
    """``uniform``: any ready group, each as likely as any other. A choice of k costs O(k)."""

    def __init__(self, *, seed: int = 0) -> None:
        self._dice = random.Random(seed)  # noqa: S311  no secret
        self._slots: list[int] = []
        self._places: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def admitted(self, slot: int) -> None:
        """Pending groups play no part."""

    def ready(self, summary: GroupSummary) -> None:
        self._places[summary.slot] = len(self._slots)
        self._slots.append(summary.slot)

    def forget(self, slot: int) -> None:
        place = self._places.pop(slot, None)
        if place is not None:
            last = self._slots.pop()
            if last != slot:
                self._slots[place] = last
                self._places[last] = place

    def choose(self, groups: int, *, weight_version: int) -> tuple[int, ...] | None:
        if len(self._slots) < groups:
            return None
        return tuple(self._slots[place] for place in self._dice.sample(range(len(self._slots)), groups))

    def explain(self, groups: int) -> str:
        return f"{len(self._slots)} of {groups} groups are ready"


class PrioritizedOrder:
    """``prioritized``: groups in proportion to a weight (arXiv:1511.05952). A choice of k costs O(k log n).

    Args:
        priority: ``advantage``: weight ``(mean |r - mean r| + 0.01) ** exponent``, so groups whose rewards tell most
            come first and those that tell nothing come last. ``age``: weight ``exp(exponent * age)``, so groups that
            wait grow likelier by the same factor with every version.
        exponent: 0 is uniform.
        seed: of the draws.
    """

    def __init__(
        self, *, priority: Literal["advantage", "age"] = "advantage", exponent: float = 1.0, seed: int = 0
    ) -> None:
        if priority not in ("advantage", "age"):
            raise ValueError(f"priority must be advantage or age, got {priority!r}")
        if not 0.0 <= exponent <= 10.0:
            raise ValueError(f"exponent must lie in 0..10, got {exponent}")
        self._priority = priority
        self._exponent = exponent
        self._dice = random.Random(seed)  # noqa: S311  no secret
        self._tree = SumTree()
        self._versions: dict[int, int] = {}
        self._reference = 0

    def admitted(self, slot: int) -> None:
        """Pending groups play no part."""

    def ready(self, summary: GroupSummary) -> None:
        if self._priority == "advantage":
            self._tree.set(summary.slot, (advantage_magnitude(summary) + 0.01) ** self._exponent)
            return
        version = self._versions[summary.slot] = summary.oldest_version
        if abs(self._exponent * (version - self._reference)) > 300:  # near the end of what a float holds
            self._reference = version
            for slot, of_slot in self._versions.items():
                self._tree.set(slot, self._weight_of_age(of_slot))
        else:
            self._tree.set(summary.slot, self._weight_of_age(version))

    def forget(self, slot: int) -> None:
        self._tree.discard(slot)
        self._versions.pop(slot, None)

    def choose(self, groups: int, *, weight_version: int) -> tuple[int, ...] | None:
        tree = self._tree
        if len(tree) < groups:
            return None
        drawn: list[tuple[int, float]] = []
        for _ in range(groups):
            slot = tree.find(self._dice.random() * tree.total)
            drawn.append((slot, tree.weight(slot)))
            tree.discard(slot)
        for slot, weight in drawn:
            tree.set(slot, weight)
        return tuple(slot for slot, _ in drawn)

    def explain(self, groups: int) -> str:
        return f"{len(self._tree)} of {groups} groups are ready"

    def _weight_of_age(self, version: int) -> float:
        """Weights relative to one another do not depend on the version at which they are compared."""
        return math.exp(max(-700.0, min(700.0, self._exponent * (self._reference - version))))


def advantage_magnitude(summary: GroupSummary) -> float:
    """Mean distance of the group's rewards from their mean: 0 where no row is better than another."""
    mean = sum(summary.rewards) / len(summary.rewards)
    return sum(abs(reward - mean) for reward in summary.rewards) / len(summary.rewards)
