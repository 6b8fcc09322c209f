"""What an objective needs of the tokens of all ranks at once, before rows are dealt to ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asyncrl.algorithms import PolicyObjective
from engines.training.packed_rows import PackedRows
from engines.training.rank_group import RankGroup

__all__ = ["prepared_columns"]


def prepared_columns(
    objective: PolicyObjective,
    rows: PackedRows,
    ranks: RankGroup,
    *,
    row_counts: Sequence[int],
    token_counts: Sequence[int],
    seed: int,
) -> dict[str, Tensor]:
    """[T] float32 columns that the objective prepared, for this rank's rows; 0 for tokens that are not trained.

    Collective. Every rank computes the same from the tokens of all, in the order of their rows.

    Args:
        objective: one that prepares something.
        rows: this rank's own rows, with ``proximal_log_probs``.
        ranks: all of them.
        row_counts: rows of each rank.
        token_counts: trained tokens of each rank.
        seed: equal on all ranks.
    """
    mine, rank = rows.mask, ranks.rank
    row_of = (rows.row_of[mine] + sum(row_counts[:rank])).double()
    batch = {
        name: ranks.concatenated(rows.columns[name][mine], token_counts)
        for name in ("proximal_log_probs", "behaviour_log_probs", "advantages")
    }
    whole = objective.prepare(**batch, rows=ranks.concatenated(row_of, token_counts).long(), seed=seed)
    first = sum(token_counts[:rank])
    prepared: dict[str, Tensor] = {}
    for name, column in whole.items():
        prepared[name] = torch.zeros(len(mine))
        prepared[name][mine] = column[first : first + token_counts[rank]].float()
    return prepared
