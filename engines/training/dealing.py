"""The rows of a batch, dealt to optimizer steps and to the ranks that compute them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from engines.training.balance import RowCost
from engines.training.microbatch import assign_minibatches
from engines.training.packed_rows import PackedRows
from engines.training.rank_group import RankGroup
from engines.training.row_exchange import RowExchange, assign_ranks

__all__ = ["Dealing"]


class Dealing:
    """Spreads the rows that ranks came with over optimizer steps, and those of each step evenly over the ranks.

    Which rows make a step depends on their places in the global batch only, never on who holds or computes them. All
    methods are collective.

    Args:
        rows: this rank's rows.
        ranks: the ranks.
        cost: of a row, what is evened out.

    Attributes:
        rows: rows of all ranks.
        scored: tokens to be scored of all ranks.
        row_counts: rows that each rank came with.
        token_counts: tokens to be scored in them.
    """

    def __init__(self, rows: PackedRows, ranks: RankGroup, *, cost: RowCost) -> None:
        self._mine = rows
        self._ranks = ranks
        self._cost = cost
        flat: list[int] = [*rows.lengths, *rows.scored.tolist()]
        everyone = ranks.gather_lists(flat)
        self.row_counts = [len(each) // 2 for each in everyone]
        self._lengths = [length for each in everyone for length in each[: len(each) // 2]]
        self._scored = [tokens for each in everyone for tokens in each[len(each) // 2 :]]
        self._last: RowExchange | None = None
        self.token_counts = [sum(each[len(each) // 2 :]) for each in everyone]
        self.rows = sum(self.row_counts)
        self.scored = sum(self._scored)

    def minibatches(self, count: int, *, seed: int) -> Iterator[tuple[PackedRows, list[int]]]:
        """The rows this rank computes, and which of them belong to the step; for each of ``count`` steps."""
        step_of = assign_minibatches(self.rows, minibatches=count, seed=seed)
        rows, origins = self._mine, list(range(self.rows))
        if self._ranks.world_size > 1:
            self._last = self._exchange(count, step_of)
            rows, origins = self._last.send(self._mine), self._last.origins
        for step in range(count):
            yield rows, [place for place, origin in enumerate(origins) if step_of[origin] == step]

    def give_back(self, column: Tensor) -> Tensor:
        """A column [T] of the rows last dealt to this rank, as the column of the rows it came with."""
        return column if self._last is None else self._last.give_back(column)

    def _exchange(self, count: int, step_of: list[int]) -> RowExchange:
        holders = [rank for rank, rows in enumerate(self.row_counts) for _ in range(rows)]
        destinations = list(holders)
        for step in range(count):
            members = [row for row, its in enumerate(step_of) if its == step]
            assigned = assign_ranks(
                [holders[row] for row in members],
                [self._lengths[row] for row in members],
                [self._scored[row] for row in members],
                ranks=self._ranks.world_size,
                cost=self._cost,
            )
            for row, rank in zip(members, assigned, strict=True):
                destinations[row] = rank
        return RowExchange(self._ranks, held=self.row_counts, lengths=self._lengths, destinations=destinations)
