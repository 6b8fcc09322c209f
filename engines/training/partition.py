"""The partition of a batch into mini-batches, and of each mini-batch over the ranks.

Every rank waits for the slowest one at each optimizer step. Rows of one batch may differ tenfold in length, so equal
numbers of rows are far from equal work: rows are exchanged between ranks, and their results are sent back.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.errors import ConfigError
from engines.training.packing import PackedRows, assign_minibatches
from engines.training.rank_group import RankGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCost:
    """Cost of a row, in multiply-adds of a forward pass (the backward pass costs twice that)."""

    per_token: float  # weights that are applied to every token
    per_scored_token: float  # weights of the output head, which is applied to scored tokens only
    per_pair: float  # attention, for each pair of a token and one it attends to

    def of(self, length: int, scored: int) -> float:
        pairs = length * (length + 1) / 2
        return self.per_token * length + self.per_scored_token * scored + self.per_pair * pairs


_MOST_DIFFERENCED = 16  # parts


def balanced_partition(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Split indices of ``costs`` (0 or more each) into ``parts`` sorted lists of nearly equal sums.

    Up to 16 parts by the largest differencing method (Karmarkar and Karp 1982, for several parts): start with every
    cost as a partition of its own, whose other parts are empty; join the two partitions of largest spread, largest part
    to smallest, until one is left. That takes O(n (parts log parts + log n)) and memory for n * parts sums, so more
    parts are filled longest cost first, each into the smallest sum, in O(n log n). By either, the largest sum is at
    most 4/3 - 1/(3 * parts) times the best one (Michiels et al. 2003, "Performance ratios for the differencing method";
    Graham 1969, "Bounds on multiprocessing timing anomalies"). Ties are broken by index.

    >>> balanced_partition([8, 7, 6, 5, 4], 2)  # 14 and 16; the best is 15 and 15
    [[0, 2], [1, 3, 4]]
    """
    if parts < 1:
        raise ConfigError(f"parts is {parts}", remedy="at least 1")
    if any(cost < 0 for cost in costs):
        raise ConfigError(f"a cost is {min(costs)}", remedy="0 or more")
    if parts > _MOST_DIFFERENCED:
        return _longest_first(costs, parts)
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
    return _in_order(heap[0][3], len(costs))


def _longest_first(costs: Sequence[float], parts: int) -> list[list[int]]:
    members: list[list[int]] = [[] for _ in range(parts)]
    sums = [(0.0, part) for part in range(parts)]
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        smallest, part = sums[0]
        members[part].append(index)
        heapq.heapreplace(sums, (smallest + costs[index], part))
    return _in_order(members, len(costs))


def _in_order(members: list[list[int]], rows: int) -> list[list[int]]:
    return sorted((sorted(part) for part in members), key=lambda part: min(part, default=rows))


def assign_ranks(
    holders: Sequence[int], lengths: Sequence[int], scored: Sequence[int], *, ranks: int, cost: RowCost
) -> list[int]:
    """Return the rank that computes each row of one mini-batch. Rows without a token to score stay where they are.

    ``holders`` are the ranks that have the rows, ``lengths`` and ``scored`` their tokens and tokens to score.
    """
    assigned = list(holders)
    busy = [row for row, tokens in enumerate(scored) if tokens]
    parts = balanced_partition([cost.of(lengths[row], scored[row]) for row in busy], ranks)
    # Any part may go to any rank: one rank after another gets the part with most of its own tokens.
    owned = [Counter[int]() for _ in range(ranks)]  # tokens of each part
    for part, members in enumerate(parts):
        for i in members:
            owned[holders[busy[i]]][part] += lengths[busy[i]]
    left = set(range(ranks))
    for rank, tokens in enumerate(owned):
        chosen = min((tokens.keys() & left) or left, key=lambda part: (-tokens[part], part))
        left.remove(chosen)
        for i in parts[chosen]:
            assigned[busy[i]] = rank
    return assigned


class RowExchange:
    """One exchange of rows between all data ranks. Every method is collective.

    ``held`` counts the rows of each rank; ``lengths`` and ``destinations`` are the tokens and the new rank of each row,
    rank after rank.
    """

    def __init__(
        self, ranks: RankGroup, *, held: Sequence[int], lengths: Sequence[int], destinations: Sequence[int]
    ) -> None:
        self._ranks = ranks
        first = sum(held[: ranks.data_rank])
        mine = range(first, first + held[ranks.data_rank])
        holders = [rank for rank, rows in enumerate(held) for _ in range(rows)]
        # Indices, among the rows of all ranks, of this rank's rows after the exchange; increasing.
        self.origins = [row for row, rank in enumerate(destinations) if rank == ranks.data_rank]
        self._lengths = torch.tensor([lengths[row] for row in self.origins], dtype=torch.int64)
        self._sends = [0] * ranks.data_size
        self._receives = [0] * ranks.data_size
        for row in mine:
            self._sends[destinations[row]] += lengths[row]
        for row in self.origins:
            self._receives[holders[row]] += lengths[row]
        # Tokens in the order they are sent in: by destination, rows in their order.
        order = sorted(mine, key=lambda row: destinations[row])
        starts = dict(zip(mine, torch.tensor([0, *(lengths[row] for row in mine)]).cumsum(0).tolist(), strict=False))
        pieces = [torch.arange(starts[row], starts[row] + lengths[row]) for row in order]
        self._order = torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int64)

    def send(self, rows: PackedRows) -> PackedRows:
        """Return this rank's rows after the exchange, in the order of :attr:`origins`."""
        names = sorted(rows.columns)
        table = torch.stack(
            [rows.input_ids.int(), rows.mask.int(), *(rows.columns[name].view(torch.int32) for name in names)], dim=1
        )
        found = self._ranks.all_to_all(table[self._order], sends=self._sends, receives=self._receives)
        columns = {name: found[:, 2 + place].clone().view(torch.float32) for place, name in enumerate(names)}
        return PackedRows(
            input_ids=found[:, 0].long(),
            mask=found[:, 1].bool(),
            columns=columns,
            lengths=self._lengths,
            back=rows.back,
        )

    def restore(self, column: Tensor) -> Tensor:
        """Send results [T'] float32 of this rank's rows after the exchange back: [T] of its rows before it."""
        found = self._ranks.all_to_all(column[:, None], sends=self._receives, receives=self._sends)
        restored = torch.empty(len(self._order), dtype=column.dtype)
        restored[self._order] = found[:, 0]
        return restored


class BatchPartition:
    """Divides the rows of all ranks into mini-batches, and each mini-batch over the ranks, at about equal cost.

    The rows of a mini-batch depend on their places in the global batch only, not on which ranks hold or compute them.
    All methods are collective.
    """

    def __init__(self, rows: PackedRows, ranks: RankGroup, *, cost: RowCost) -> None:
        self._mine = rows
        self._ranks = ranks
        self._cost = cost
        lengths = ranks.gather_lists(rows.lengths)
        scored = ranks.gather_lists(rows.scored.tolist())
        self.row_counts = [len(each) for each in lengths]  # by rank
        self.token_counts = [sum(each) for each in scored]  # tokens to score, by rank
        self._lengths = list(itertools.chain(*lengths))
        self._scored = list(itertools.chain(*scored))
        self._last_exchange: RowExchange | None = None
        self.rows = sum(self.row_counts)
        self.scored = sum(self._scored)

    def mini_batches(self, count: int, *, seed: int) -> Iterator[tuple[PackedRows, list[int]]]:
        """Yield, for each of ``count`` mini-batches, the rows this rank computes and the indices of its members."""
        step_of = assign_minibatches(self.rows, num_mini_batches=count, seed=seed)
        rows, origins = self._mine, list(range(self.rows))
        if self._ranks.data_size > 1:
            self._last_exchange = self._exchange(count, step_of)
            rows, origins = self._last_exchange.send(self._mine), self._last_exchange.origins
        for step in range(count):
            yield rows, [place for place, origin in enumerate(origins) if step_of[origin] == step]

    def restore(self, column: Tensor) -> Tensor:
        """Return a column [T] of the rows last yielded as the column of the rows that this rank holds."""
        return column if self._last_exchange is None else self._last_exchange.restore(column)

    def _exchange(self, count: int, step_of: list[int]) -> RowExchange:
        holders = [rank for rank, rows in enumerate(self.row_counts) for _ in range(rows)]
        destinations = list(holders)
        for step in range(count):
            members = [row for row, its in enumerate(step_of) if its == step]
            assigned = assign_ranks(
                [holders[row] for row in members],
                [self._lengths[row] for row in members],
                [self._scored[row] for row in members],
                ranks=self._ranks.data_size,
                cost=self._cost,
            )
            for row, rank in zip(members, assigned, strict=True):
                destinations[row] = rank
        return RowExchange(self._ranks, held=self.row_counts, lengths=self._lengths, destinations=destinations)
