"""Trees of turns as rows: an agent that goes back, compacts its context or has sub-agents makes a tree of tokens.

A tree is one row of a batch, with one reward: each turn's own tokens are in it once, in the order in which the turns
ended. The column ``branches`` says for each turn where its tokens begin and end and which turn it continues; it is
empty for a line. A model has to see whole sequences, so what computes with one unfolds the rows first, and folds what
it has computed for their tokens.

    row       p a b c     a follows p, b and c follow a        branches   p a b   p a c
    trained     1 1 1                                                       1 1         1

Branches have the tokens that they share, to be seen, and each sampled token is trained on in the first branch that has
it. An engine may compute what branches share once, as it does for the prompt of a group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from asyncrl.data import DataProto
from asyncrl.data.ragged import lengths, offsets_from_lengths, offsets_of, ragged_from_values, rows_of, values_of

_LINE = -2
"""In place of a parent: the row is no tree."""


@dataclass(frozen=True, slots=True)
class _Stretch:
    """The own tokens ``begin <= t < end`` of a turn in its row; ``first`` if no branch before this one has them."""

    turn: int
    begin: int
    end: int
    first: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfolded:
    """The branches of a batch of rows, one row each; ``source`` and ``first`` are None if no row was a tree.

    Attributes:
        source: [T'] for each of their tokens the place of the same token among those of the batch.
        first: [T'] whether no branch before has that token.
        offsets: [B + 1] of the tokens of the batch.
    """

    rows: DataProto
    source: torch.Tensor | None = None
    first: torch.Tensor | None = None
    offsets: torch.Tensor | None = None

    def fold(self, computed: DataProto) -> DataProto:
        """Return ragged columns of the branches' tokens as columns of the batch's: of each token the first value."""
        if self.source is None or self.first is None or self.offsets is None:
            return computed
        assert computed.batch is not None
        folded: dict[str, torch.Tensor] = {}
        scored: dict[str, Any] = dict(computed.batch.items())
        for name, column in scored.items():
            values = values_of(column)
            whole = values.new_zeros(int(self.offsets[-1]))
            whole[self.source[self.first]] = values[self.first]
            folded[name] = ragged_from_values(whole, self.offsets)
        return DataProto.from_dict(tensors=folded, meta_info=computed.meta_info)


def unfold(batch: DataProto) -> Unfolded:
    """Return the branches of all rows, in order, with the columns of ``batch`` but ``branches``.

    Columns of tokens are those as long as ``input_ids``. ``loss_mask`` is False where an earlier branch has the token.
    Of ``turn_rewards`` those of other branches are 0, and missing in the ``rewards`` of the row.
    """
    assert batch.batch is not None
    columns: dict[str, Any] = dict(batch.batch.items())
    trees = columns.pop("branches", None)
    batch = batch.select(list(columns))
    if trees is None or not len(values_of(trees)):
        return Unfolded(rows=batch)
    offsets = offsets_of(columns["input_ids"])
    owners: list[int] = []
    stretches: list[_Stretch] = []
    sizes: list[int] = []
    turns: list[set[int]] = []
    begins: list[int] = []
    for row, ((start, end), places) in enumerate(zip(pairwise(offsets.tolist()), rows_of(trees), strict=True)):
        for branch in _branches(places.tolist(), length=end - start):
            owners.append(row)
            sizes.append(sum(stretch.end - stretch.begin for stretch in branch))
            turns.append({stretch.turn for stretch in branch})
            stretches += branch
            begins += [start] * len(branch)
    source = torch.cat(
        [torch.arange(at + each.begin, at + each.end) for at, each in zip(begins, stretches, strict=True)]
    )
    first = torch.cat([torch.full((each.end - each.begin,), each.first) for each in stretches])
    of_tokens = {
        name: ragged_from_values(values_of(column)[source], offsets_from_lengths(sizes))
        for name, column in columns.items()
        if column.is_nested and torch.equal(lengths(column), lengths(columns["input_ids"]))
    }
    if "loss_mask" in of_tokens:
        mask = torch.logical_and(values_of(of_tokens["loss_mask"]), first)
        of_tokens["loss_mask"] = ragged_from_values(mask, offsets_from_lengths(sizes))
    others = [name for name in columns if name not in of_tokens]  # a copy of a whole row for each branch is too large
    rows = batch.select(others).select_idxs(owners).with_columns(**of_tokens)
    if "turn_rewards" in columns:
        rows = _rewards_of_branches(rows, turns)
    return Unfolded(rows=rows, source=source, first=first, offsets=offsets)


def _branches(places: Sequence[int], *, length: int) -> Iterator[list[_Stretch]]:
    """Yield for each leaf, in the order of the leaves, the turns from its root; a line is one branch."""
    if not places:
        yield [_Stretch(turn=_LINE, begin=0, end=length, first=True)]
        return
    turns = list(zip(places[::3], places[1::3], places[2::3], strict=True))
    parents = {parent for _, _, parent in turns}
    seen: set[int] = set()
    for leaf in range(len(turns)):
        if leaf in parents:
            continue
        path: list[_Stretch] = []
        turn = leaf
        while turn >= 0:
            begin, end, parent = turns[turn]
            path.append(_Stretch(turn=turn, begin=begin, end=end, first=turn not in seen))
            seen.add(turn)
            turn = parent
        yield path[::-1]


def _rewards_of_branches(rows: DataProto, turns: Sequence[set[int]]) -> DataProto:
    """Leave out of each row the rewards of turns that are not in it."""
    assert rows.batch is not None
    earned = [row.clone() for row in rows_of(rows.batch["turn_rewards"])]
    missing = torch.zeros(len(earned))
    for row, (rewards, own) in enumerate(zip(earned, turns, strict=True)):
        if _LINE not in own:
            others = [turn for turn in range(len(rewards)) if turn not in own]
            missing[row] = rewards[others].sum()
            rewards[others] = 0.0
    changed = {"turn_rewards": earned}
    if "rewards" in rows.batch.keys():  # noqa: SIM118  a TensorDict iterates rows
        return rows.with_columns(**changed, rewards=rows.batch["rewards"] - missing)
    return rows.with_columns(**changed)
