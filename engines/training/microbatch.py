"""Which rows are computed together, and how they lie in memory: pure plans, no tensors."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from asyncrl.errors import ConfigError

__all__ = ["Layout", "MicroBatch", "Rectangle", "assign_minibatches", "plan_microbatches"]

Layout: TypeAlias = Literal["packed", "padded"]
"""``packed``: rows of all lengths in one stream; ``padded``: one rectangle, for models that know nothing else."""


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Rows side by side, each in as many cells as the longest of them has tokens.

    Attributes:
        rows: indices of the rows, longest first.
        length: cells of each row.
    """

    rows: tuple[int, ...]
    length: int

    @property
    def cells(self) -> int:
        return len(self.rows) * self.length


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows computed at once: rectangles, one after the other.

    Attributes:
        rectangles: longest rows first.
        tokens: tokens of all rows, without padding.
    """

    rectangles: tuple[Rectangle, ...]
    tokens: int

    @property
    def rows(self) -> tuple[int, ...]:
        """Indices of all rows, in the order they lie in."""
        return tuple(row for rectangle in self.rectangles for row in rectangle.rows)

    @property
    def cells(self) -> int:
        """What is computed: tokens and padding."""
        return sum(rectangle.cells for rectangle in self.rectangles)

    @property
    def padding(self) -> int:
        """Cells that hold no token."""
        return self.cells - self.tokens


def plan_microbatches(
    lengths: Sequence[int], *, max_tokens: int, layout: Layout = "packed", overhead_tokens: int
) -> list[MicroBatch]:
    """Cut rows, sorted by length, into micro-batches of at most ``max_tokens`` cells.

    A rectangle is closed when its padding has grown to what one more rectangle costs (``overhead_tokens``; with 0 there
    is no padding at all: only rows of equal length share one). As in ski rental, padding and overhead together then
    cost at most twice what the best cut of the sorted rows costs: wherever this plan opens a rectangle, the best one
    either opens one too or pads as much. A micro-batch is closed when it is full; in the ``padded`` layout, with its
    rectangle. Longest first, so that a budget that is too large for the memory fails at once and not later.

    Args:
        lengths: tokens of each row, 0 or more; empty rows are left out.
        max_tokens: budget of cells. A row that is longer by itself is computed alone.
        layout: how rows may lie.
        overhead_tokens: fixed cost of a rectangle, in tokens.

    >>> [plan.rows for plan in plan_microbatches([3, 9, 2, 8], max_tokens=20, overhead_tokens=4)]
    [(1, 3), (0, 2)]
    >>> [plan.rows for plan in plan_microbatches([3, 9, 2, 8], max_tokens=21, overhead_tokens=0)]
    [(1, 3, 0), (2,)]
    """
    if max_tokens < 1:
        raise ConfigError(f"max_tokens is {max_tokens}", remedy="at least 1 token per micro-batch")
    plans: list[MicroBatch] = []
    closed: list[Rectangle] = []
    rows: list[int] = []  # of the open rectangle
    longest = padding = cells = tokens = 0  # cells: of the whole micro-batch

    def close_rectangle() -> None:
        if rows:
            closed.append(Rectangle(tuple(rows), longest))
            rows.clear()

    def close_microbatch() -> None:
        close_rectangle()
        if closed:
            plans.append(MicroBatch(tuple(closed), tokens))
            closed.clear()

    for row in sorted((row for row, length in enumerate(lengths) if length > 0), key=lambda row: (-lengths[row], row)):
        length = lengths[row]
        fits = bool(rows) and padding + longest - length <= overhead_tokens
        if cells + (longest if fits else length) > max_tokens or (not fits and layout == "padded"):
            close_microbatch()
            cells = tokens = 0
            fits = False
        if not fits:
            close_rectangle()
            longest, padding = length, 0
        rows.append(row)
        cells += longest
        tokens += length
        padding += longest - length
    close_microbatch()
    return plans


def assign_minibatches(total_rows: int, *, minibatches: int, seed: int) -> list[int]:
    """The minibatch (0..minibatches-1) of each row of the global batch.

    Rows are dealt out in blocks of ``minibatches`` neighbours, each block in a random order of its own. Every minibatch
    so gets a near-equal share of any stretch of rows: of every rank, and of every group of rollouts. The numbers depend
    on the position in the global batch only, not on how its rows are split over ranks.
    """
    if minibatches < 1:
        raise ConfigError(f"minibatches is {minibatches}", remedy="at least 1")
    shuffle = random.Random(seed)  # noqa: S311  # reproducible, not secret
    order = list(range(minibatches))
    assigned: list[int] = []
    while len(assigned) < total_rows:
        shuffle.shuffle(order)
        assigned += order
    return assigned[:total_rows]
