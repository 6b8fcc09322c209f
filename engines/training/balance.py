"""Rows spread over ranks so that all finish at about the same time: a pure plan.

Every rank waits for the slowest one at each optimizer step. Rows of one batch may differ tenfold in length, so equal
numbers of rows are far from equal work.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.errors import ConfigError

__all__ = ["RowCost", "balanced_partition"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCost:
    """What a row costs to compute, in multiply-adds of a forward pass (the backward pass costs twice that).

    Attributes:
        per_token: weights that every token meets.
        per_scored_token: weights of the output head, which only scored tokens meet.
        per_pair: of attention, for each pair of a token and one it sees.
    """

    per_token: float
    per_scored_token: float
    per_pair: float

    def of(self, length: int, scored: int) -> float:
        """Cost of a row of ``length`` tokens, ``scored`` of which are scored."""
        pairs = length * (length + 1) / 2
        return self.per_token * length + self.per_scored_token * scored + self.per_pair * pairs


def balanced_partition(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Split indices of ``costs`` into ``parts`` lists of nearly equal sums, by differencing.

    Largest differencing method (Karmarkar and Karp 1982, for several parts): start with every cost as a partition of
    its own, whose other parts are empty; join the two partitions of largest spread, largest part to smallest, until one
    is left. Its largest sum is at most 4/3 - 1/(3 * parts) times the best one (Michiels et al. 2003, "Performance
    ratios for the differencing method"). O(n log n) for few parts.

    The result depends on the arguments only: ties are broken by index.

    Args:
        costs: 0 or more each.
        parts: at least 1.

    Returns:
        Sorted indices of each part; parts may be empty.

    >>> balanced_partition([8, 7, 6, 5, 4], 2)  # 14 and 16; the best is 15 and 15
    [[0, 2], [1, 3, 4]]
    """
    if parts < 1:
        raise ConfigError(f"parts is {parts}", remedy="at least 1")
    if any(cost < 0 for cost in costs):
        raise ConfigError(f"a cost is {min(costs)}", remedy="0 or more")
    # A partition: (-spread, first index as tie break, sums from largest to smallest, indices of each sum).
    heap = [
        (-float(cost), index, [float(cost)] + [0.0] * (parts - 1), [[index]] + [[] for _ in range(parts - 1)])
        for index, cost in enumerate(costs)
    ]
    if not heap:
        return [[] for _ in range(parts)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first, sums, members = heapq.heappop(heap)
        _, second, other_sums, other_members = heapq.heappop(heap)
        joined = [
            (sums[part] + other_sums[-1 - part], members[part] + other_members[-1 - part]) for part in range(parts)
        ]
        joined.sort(key=lambda part: (-part[0], min(part[1], default=len(costs))))
        spread = joined[0][0] - joined[-1][0]
        heapq.heappush(heap, (-spread, min(first, second), [each[0] for each in joined], [each[1] for each in joined]))
    return sorted((sorted(part) for part in heap[0][3]), key=lambda part: min(part, default=len(costs)))
