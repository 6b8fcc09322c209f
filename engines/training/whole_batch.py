"""What an objective needs of the tokens of all ranks at once, before rows are dealt to ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asyncrl.algorithms import PolicyObjective
from engines.training.packed_rows import PackedRows
from engines.training.rank_group import RankGroup

_SEEDS = 2**63 - 25  # a prime: every bit of the seed counts, in the 64 bits that torch takes

__all__ = ["prepared_columns", "whitened"]


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
    whole = objective.prepare(**batch, rows=ranks.concatenated(row_of, token_counts).long(), seed=seed % _SEEDS)
    first = sum(token_counts[:rank])
    prepared: dict[str, Tensor] = {}
    for name, column in whole.items():
        prepared[name] = torch.zeros(len(mine))
        prepared[name][mine] = column[first : first + token_counts[rank]].float()
    return prepared


def whitened(column: Tensor, mask: Tensor, ranks: RankGroup) -> Tensor:
    """``column`` [T] with mean 0 and variance 1 over the tokens inside ``mask`` of all ranks; others as they are.

    Collective. The variance is the sample one (divided by T - 1); numbers that are all equal become 0.
    """
    inside = column[mask].double()
    count, total = ranks.sum([float(len(inside)), float(inside.sum())])
    deviations = inside - total / max(count, 1.0)
    squares, largest = ranks.sum([float(deviations.square().sum()), float(inside.abs().sum())])
    deviation = (squares / max(count - 1.0, 1.0)) ** 0.5
    # The mean of equal numbers need not be that number in floating point, and a deviation of 1e-17 is none.
    scale = 1.0 / deviation if deviation > 1e-12 * largest else 0.0
    changed = column.clone()
    changed[mask] = (deviations * scale).to(column.dtype)
    return changed
