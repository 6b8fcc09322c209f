"""Weights of slots, for drawing slots in proportion to them."""

from __future__ import annotations

__all__ = ["SumTree"]


class SumTree:
    """A set of slots with weights above 0: setting, taking out and finding cost O(log n).

    A complete binary tree in an array; a node is the sum of its children, computed again on every change below it, so
    rounding errors do not add up.
    """

    __slots__ = ("_free", "_leaf", "_leaves", "_slots", "_sums")

    def __init__(self) -> None:
        self._leaves = 1
        self._sums = [0.0, 0.0]
        self._slots: list[int] = [-1]
        self._leaf: dict[int, int] = {}
        self._free = [0]

    def __len__(self) -> int:
        return len(self._leaf)

    def __contains__(self, slot: int) -> bool:
        return slot in self._leaf

    @property
    def total(self) -> float:
        """Sum of all weights."""
        return self._sums[1]

    def weight(self, slot: int) -> float:
        """The weight of a slot that is in."""
        return self._sums[self._leaves + self._leaf[slot]]

    def set(self, slot: int, weight: float) -> None:
        """Put a slot in, or change its weight."""
        if slot not in self._leaf:
            if not self._free:
                self._grow()
            self._leaf[slot] = self._free.pop()
            self._slots[self._leaf[slot]] = slot
        self._update(self._leaf[slot], weight)

    def discard(self, slot: int) -> None:
        """Take a slot out, if it is in."""
        leaf = self._leaf.pop(slot, None)
        if leaf is not None:
            self._slots[leaf] = -1
            self._update(leaf, 0.0)
            self._free.append(leaf)

    def find(self, place: float) -> int:
        """The slot at ``place`` when all weights lie end to end; ``0 <= place < total``."""
        node = 1
        while node < self._leaves:
            left = 2 * node
            # A place at the very end may lie past the sum by rounding: never walk into an empty half.
            if place < self._sums[left] or self._sums[left + 1] <= 0.0:
                node = left
            else:
                place -= self._sums[left]
                node = left + 1
        return self._slots[node - self._leaves]

    def _update(self, leaf: int, weight: float) -> None:
        node = self._leaves + leaf
        self._sums[node] = weight
        while node > 1:
            node //= 2
            self._sums[node] = self._sums[2 * node] + self._sums[2 * node + 1]

    def _grow(self) -> None:
        weights = self._sums[self._leaves :]
        self._free = list(range(2 * self._leaves - 1, self._leaves - 1, -1))
        self._slots += [-1] * self._leaves
        self._leaves *= 2
        self._sums = [0.0] * self._leaves + weights + [0.0] * len(weights)
        for node in range(self._leaves - 1, 0, -1):
            self._sums[node] = self._sums[2 * node] + self._sums[2 * node + 1]
