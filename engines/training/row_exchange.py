"""Rows on their way between ranks, so that every rank has about the same work, and results on their way back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engines.training.balance import RowCost, balanced_partition
from engines.training.packed_rows import PackedRows
from engines.training.rank_group import RankGroup

__all__ = ["RowExchange", "assign_ranks"]


def assign_ranks(
    holders: Sequence[int], lengths: Sequence[int], scored: Sequence[int], *, ranks: int, cost: RowCost
) -> list[int]:
    """The rank that computes each row of one optimizer step. Rows without a token to score stay where they are.

    Args:
        holders: rank that has each row.
        lengths: tokens of each row.
        scored: tokens to be scored of each row.
        ranks: number of ranks.
        cost: of a row.
    """
    assigned = list(holders)
    busy = [row for row, tokens in enumerate(scored) if tokens]
    parts = balanced_partition([cost.of(lengths[row], scored[row]) for row in busy], ranks)
    # Which part goes to which rank is free: each rank, in turn, takes the part that has most of its own tokens.
    left = set(range(ranks))
    for rank in range(ranks):
        owned = {part: sum(lengths[busy[i]] for i in parts[part] if holders[busy[i]] == rank) for part in left}
        chosen = max(sorted(left), key=lambda part: owned[part])
        left.remove(chosen)
        for i in parts[chosen]:
            assigned[busy[i]] = rank
    return assigned


class RowExchange:
    """One redistribution of the rows of all ranks. Every method is collective.

    Args:
        ranks: the ranks.
        held: number of rows of each rank.
        lengths: tokens of each row of all ranks, rank after rank.
        destinations: rank that each of them goes to.

    Attributes:
        origins: number, among the rows of all ranks, of each row that this rank has afterwards; growing.
    """

    def __init__(
        self, ranks: RankGroup, *, held: Sequence[int], lengths: Sequence[int], destinations: Sequence[int]
    ) -> None:
        self._ranks = ranks
        first = sum(held[: ranks.rank])
        mine = range(first, first + held[ranks.rank])
        holders = [rank for rank, rows in enumerate(held) for _ in range(rows)]
        self.origins = [row for row, rank in enumerate(destinations) if rank == ranks.rank]
        self._lengths = torch.tensor([lengths[row] for row in self.origins], dtype=torch.int64)
        self._sends = [0] * ranks.world_size
        self._receives = [0] * ranks.world_size
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
        """This rank's rows after the exchange, in the order of :attr:`origins`."""
        names = sorted(rows.columns)
        table = torch.stack(
            [rows.input_ids.int(), rows.mask.int(), *(rows.columns[name].view(torch.int32) for name in names)], dim=1
        )
        found = self._ranks.all_to_all(table[self._order], sends=self._sends, receives=self._receives)
        columns = {name: found[:, 2 + place].clone().view(torch.float32) for place, name in enumerate(names)}
        return PackedRows(input_ids=found[:, 0].long(), mask=found[:, 1].bool(), columns=columns, lengths=self._lengths)

    def give_back(self, column: Tensor) -> Tensor:
        """[T] of this rank's rows before the exchange, from [T'] of those after it. float32."""
        found = self._ranks.all_to_all(column[:, None], sends=self._receives, receives=self._sends)
        home = torch.empty(len(self._order), dtype=column.dtype)
        home[self._order] = found[:, 0]
        return home
