"""Shared prefixes: what rows of a micro-batch begin with is computed once for all of them.

    apart     p p p p a a   p p p p b b   p p p p c c      18 cells
    shared    p p p p   a a   b b   c c                    10 cells, in which a, b and c attend to p

Rows are found by their tokens, so a group's prompt is shared, and so is whatever else rows begin with; it does not
matter which tokens are scored, since equal tokens after equal ones have equal hidden states. A token of the prefix is a
cell of one row only: gradients of all rows that need it are added there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engines.training.packing import MicroBatch, PackedRows, Rectangle
from engines.training.partition import RowCost

_LONGEST_BUNCH = 64  # rows; bounds the time that it takes to find bunches
_LEAST_SAVED = 0.05  # share of the work of a bunch's rows; a mask makes the kernels a little slower


@dataclass(frozen=True, slots=True)
class Bunch:
    """Rows that begin with the same ``prefix`` tokens; one row alone has a prefix of 0."""

    rows: tuple[int, ...]
    prefix: int


def plan_shared(rows: PackedRows, members: Sequence[int], *, max_tokens: int, cost: RowCost) -> list[MicroBatch] | None:
    """Cut rows into micro-batches of at most ``max_tokens`` cells in which prefixes are shared where that is less work.

    Longest row first, as in :func:`~engines.training.packing.plan_microbatches`. A bunch is never cut; a row of more
    than ``max_tokens`` is computed alone. None if no prefix is worth sharing.
    """
    bunches = bunches_of(rows, members, max_tokens=max_tokens, cost=cost)
    if all(len(bunch.rows) == 1 for bunch in bunches):
        return None
    lengths = rows.lengths
    bunches.sort(key=lambda bunch: (-max(lengths[row] for row in bunch.rows), bunch.rows))
    plans: list[MicroBatch] = []
    taken: list[Bunch] = []
    cells = 0
    for bunch in bunches:
        needed = _cells(bunch, lengths)
        if taken and cells + needed > max_tokens:
            plans.append(_micro_batch(taken, lengths))
            taken, cells = [], 0
        taken.append(bunch)
        cells += needed
    return [*plans, _micro_batch(taken, lengths)]


def bunches_of(rows: PackedRows, members: Sequence[int], *, max_tokens: int, cost: RowCost) -> list[Bunch]:
    """Divide rows into bunches so that the work saved is the most that one prefix a bunch can save.

    In the order of their tokens, rows with a common beginning are neighbours, and what a stretch of them has in common
    is the least that two neighbours have: so the best division is found stretch by stretch.
    """
    order, common = _sorted_by_tokens(rows, members)
    lengths = [rows.lengths[row] for row in order]
    best = [0.0]  # saved by the first rows of the order
    begins = [0]  # of the last stretch of that division
    for end in range(1, len(order) + 1):
        saved, begin = best[end - 1], end - 1
        prefix = total = lengths[end - 1]
        squares, apart = total**2, cost.of(total, 0)
        for first in range(end - 2, max(-1, end - 1 - _LONGEST_BUNCH), -1):
            prefix = min(prefix, common[first])
            if prefix == 0:
                break
            total += lengths[first]
            squares += lengths[first] ** 2
            apart += cost.of(lengths[first], 0)
            cells = total - (end - first - 1) * prefix
            if cells > max_tokens:
                break
            # A suffix is attended with a mask: for each of its tokens the whole row is computed.
            pairs = squares - prefix * total
            shared = cost.of(prefix, 0) + cost.per_token * (cells - prefix) + cost.per_pair * pairs
            gain = best[first] + (1.0 - _LEAST_SAVED) * apart - shared
            if gain > saved:
                saved, begin = gain, first
        best.append(saved)
        begins.append(begin)
    bunches: list[Bunch] = []
    end = len(order)
    while end:
        begin = begins[end]
        bunches.append(Bunch(tuple(order[begin:end]), min(common[begin : end - 1], default=0)))
        end = begin
    return bunches


def _sorted_by_tokens(rows: PackedRows, members: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return rows by their tokens, and how many tokens each has in common with the next one."""
    ids = rows.input_ids.numpy().astype(">u4")  # big-endian bytes are in the order of the numbers
    ends = np.cumsum(rows.lengths)
    tokens = {row: ids[ends[row] - rows.lengths[row] : ends[row]] for row in members}
    order = sorted(members, key=lambda row: (tokens[row].tobytes(), row))
    return order, [_common(tokens[one], tokens[other]) for one, other in itertools.pairwise(order)]


def _common(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length


def _cells(bunch: Bunch, lengths: Sequence[int]) -> int:
    return bunch.prefix + sum(lengths[row] - bunch.prefix for row in bunch.rows)


def _micro_batch(bunches: Sequence[Bunch], lengths: Sequence[int]) -> MicroBatch:
    rectangles: list[Rectangle] = []

    def add(rows: Sequence[int], prefix: int, place: int | None) -> None:
        for length in sorted({lengths[row] for row in rows}, reverse=True):
            alike = tuple(row for row in rows if lengths[row] == length)
            rectangles.append(Rectangle(alike, length - prefix, place))

    add([row for bunch in bunches if not bunch.prefix for row in bunch.rows], 0, None)
    for bunch in bunches:
        if bunch.prefix:
            rectangles.append(Rectangle((), bunch.prefix))
            add(bunch.rows, bunch.prefix, len(rectangles) - 1)
    return MicroBatch(tuple(rectangles))
