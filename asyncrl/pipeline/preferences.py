"""Comparisons of answers as rows that take turns: chosen, rejected, chosen, rejected, ..."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from asyncrl.agents.chat import ChatRenderer
from asyncrl.data import DataProto
from asyncrl.data.ragged import ragged_from_list
from asyncrl.datasets import Preference
from asyncrl.errors import InvalidDataError

__all__ = ["EncodedPair", "encode_pairs", "pair_rows", "split_held_out"]


@dataclass(frozen=True, slots=True)
class EncodedPair:
    """The tokens of a preference, and by how much the first answer is better (0 where nobody has said)."""

    chosen: tuple[int, ...]
    rejected: tuple[int, ...]
    margin: float = 0.0


def encode_pairs(
    renderer: ChatRenderer, preferences: Iterable[Preference], *, max_tokens: int
) -> tuple[list[EncodedPair], int]:
    """Each answer, up to its last turn of the assistant, as the tokens it would have been sampled as.

    Pairs with a row above ``max_tokens`` are left out; returns how many.

    Raises:
        InvalidDataError: a margin is below 0.
    """
    pairs: list[EncodedPair] = []
    left_out = 0
    for number, each in enumerate(preferences):
        if each.margin is not None and each.margin < 0:
            raise InvalidDataError(
                f"preference {number} has the margin {each.margin}: one below 0 says that the rejected answer is better"
            )
        chosen, rejected = (
            renderer.encode_conversation([*each.prompt, *answer]).token_ids for answer in (each.chosen, each.rejected)
        )
        if max(len(chosen), len(rejected)) > max_tokens:
            left_out += 1
        else:
            pairs.append(EncodedPair(chosen, rejected, each.margin or 0.0))
    return pairs, left_out


def split_held_out(
    pairs: Sequence[EncodedPair], *, share: float, seed: int
) -> tuple[list[EncodedPair], list[EncodedPair]]:
    """Pairs to learn from, and ``share`` of all to be asked about, drawn by ``seed``; at least one to learn from."""
    order = np.random.default_rng(seed).permutation(len(pairs)).tolist()
    asked = min(round(share * len(pairs)), len(pairs) - 1)
    return [pairs[place] for place in sorted(order[asked:])], [pairs[place] for place in sorted(order[:asked])]


def pair_rows(pairs: Sequence[EncodedPair]) -> DataProto:
    """Rows [2 P] with ``input_ids`` (ragged) and ``margins``: chosen, rejected, chosen, rejected, ..."""
    rows = [torch.tensor(ids, dtype=torch.int64) for pair in pairs for ids in (pair.chosen, pair.rejected)]
    margins = torch.tensor([pair.margin for pair in pairs for _ in range(2)], dtype=torch.float32)
    return DataProto.from_dict(tensors={"input_ids": ragged_from_list(rows, dtype=torch.int64), "margins": margins})
