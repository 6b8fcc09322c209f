"""Which of several data sets the next row comes from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

__all__ = ["Draw", "Mixture", "Weight"]

_BLOCK = 4096
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class Draw:
    """The row at an index: the ``number``-th (from 0) that comes from ``part``."""

    part: int
    number: int


class Weight:
    """How much of the mixture a part is, at every index: straight lines between points, level outside of them.

    Args:
        points: pairs of an index and a weight, indices growing.
    """

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        if not points or any(weight < 0 or not math.isfinite(weight) for _, weight in points):
            raise ValueError(f"a weight is 0 or more at every point, got {list(points)}")
        if any(later <= earlier for (earlier, _), (later, _) in pairwise(points)):
            raise ValueError(f"the points of a weight have growing indices, got {list(points)}")
        self._at = [float(at) for at, _ in points]
        self._weights = [float(weight) for _, weight in points]

    def __call__(self, indices: NDArray[np.int64]) -> NDArray[np.float64]:
        """Weights at these indices."""
        return np.interp(indices, self._at, self._weights)


class Mixture:
    """Draws parts in proportion to their weights, which may change with the index (a curriculum).

    The draws follow the multiples of the golden ratio instead of dice (Weyl, 1916): among any n of them a part is drawn
    n times its share, but for a few. A pure function of index and seed, like :class:`asyncrl.datasets.Order`.

    Raises:
        ValueError: at some index all weights are 0; told when a row is asked for there.
    """

    def __init__(self, weights: Sequence[Weight], *, seed: int = 0) -> None:
        self._weights = tuple(weights)
        self._offset = float(np.random.default_rng([seed, 0x6D6978]).random())
        self._blocks: list[NDArray[np.int64]] = []  # part of each index
        self._before: list[NDArray[np.int64]] = [np.zeros(len(self._weights), dtype=np.int64)]  # counts up to a block

    def draw(self, index: int) -> Draw:
        """Where the row at ``index`` comes from."""
        block, place = divmod(index, _BLOCK)
        while len(self._blocks) <= block:
            self._extend()
        parts = self._blocks[block]
        part = int(parts[place])
        return Draw(part, int(self._before[block][part] + np.count_nonzero(parts[:place] == part)))

    def _extend(self) -> None:
        first = len(self._blocks) * _BLOCK
        indices = np.arange(first, first + _BLOCK, dtype=np.int64)
        weights = np.stack([weight(indices) for weight in self._weights])
        ends = weights.cumsum(axis=0)
        if not np.all(ends[-1] > 0):
            raise ValueError(f"all weights are 0 at index {int(indices[int(np.argmin(ends[-1] > 0))])}")
        points = (self._offset + indices * _GOLDEN) % 1.0 * ends[-1]
        parts = (points >= ends).sum(axis=0).clip(max=len(self._weights) - 1)
        # A point that rounding put onto the end goes to the last part that has a weight there.
        last = len(self._weights) - 1 - np.argmax(weights[::-1] > 0, axis=0)
        parts = np.minimum(parts, last).astype(np.int64)
        self._blocks.append(parts)
        self._before.append(self._before[-1] + np.bincount(parts, minlength=len(self._weights)))
