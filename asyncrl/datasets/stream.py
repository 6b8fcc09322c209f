"""Rows without an end: row number i, for every i."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from .dataset import Dataset
from .mixture import Mixture, Weight
from .order import Order

__all__ = ["Part", "Stream"]

RowT = TypeVar("RowT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(Generic[RowT]):
    """One data set of a mixture: its rows, their order, and how much of the mixture it is.

    Attributes:
        name: for messages and metrics.
        rows: what it holds.
        shuffled: whether every pass is shuffled anew, or goes in the order of the file.
        first_by: a column of numbers; the first pass goes from its smallest to its largest (a curriculum).
        weight: share of the mixture by index.
    """

    name: str
    rows: Dataset[RowT]
    shuffled: bool = True
    first_by: str | None = None
    weight: Weight


class Stream(Generic[RowT]):
    """Rows of one or more parts, mixed by weight, for every index from 0.

    Args:
        parts: none of them empty.
        seed: of shuffling and mixing.
    """

    def __init__(self, parts: Sequence[Part[RowT]], *, seed: int) -> None:
        self.parts = tuple(parts)
        self._seed = seed
        self._mixture = Mixture([part.weight for part in self.parts], seed=seed)
        self._orders = [_order(part, seed=[seed, number]) for number, part in enumerate(self.parts)]

    def __getitem__(self, index: int) -> RowT:
        """Row number ``index``; the same for the same parts and seed."""
        part, place = self.find(index)
        return part.rows[place]

    def find(self, index: int) -> tuple[Part[RowT], int]:
        """The part that row ``index`` comes from, and its place there."""
        draw = self._mixture.draw(index)
        return self.parts[draw.part], self._orders[draw.part].row(draw.number)

    @property
    def rows(self) -> int:
        """Different rows there are."""
        return sum(len(part.rows) for part in self.parts)

    def check(self) -> None:
        """Read every row once, so that what is wrong with one is told now and not in the middle of a run.

        Raises:
            InvalidDataError: the first row that is not what it should be; names file and row.
        """
        for part in self.parts:
            for _ in part.rows:
                pass

    def filtered(self, wanted: Callable[[RowT], bool]) -> Stream[RowT]:
        """Only rows for which ``wanted`` holds; reads them all. A part that has none left is left out."""
        kept = [replace(part, rows=part.rows.filtered(wanted)) for part in self.parts]
        return Stream([part for part in kept if len(part.rows)], seed=self._seed)


def _order(part: Part[RowT], *, seed: Sequence[int]) -> Order:
    rows = part.rows
    first_pass = None
    if part.first_by is not None:
        from .rows import column_number

        keys = [column_number(rows.record(place), part.first_by, where=rows.where(place)) for place in range(len(rows))]
        first_pass = sorted(range(len(rows)), key=keys.__getitem__)  # stable: equal ones in the order of the file
    return Order(len(rows), seed=seed, shuffled=part.shuffled, first_pass=first_pass)
