"""Rows of one kind out of several sources, as one sequence."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

from asyncrl.errors import InvalidDataError

from .source import Record, RowSource

__all__ = ["Dataset"]

RowT = TypeVar("RowT")
ReadT = TypeVar("ReadT")


class Dataset(Generic[RowT]):
    """The rows of ``sources``, one after the other, read when they are asked for.

    Args:
        sources: files and the like, in their order.
        read: makes a row of a record, or raises :class:`InvalidDataError` in words.
        numbers: which rows, and in which order; all by default.
    """

    def __init__(
        self,
        sources: Sequence[RowSource],
        read: Callable[[Record], RowT],
        *,
        numbers: Sequence[int] | None = None,
    ) -> None:
        self._sources = tuple(sources)
        self._read = read
        self._ends = list(accumulate(len(source) for source in self._sources))
        self._numbers = numbers if numbers is not None else range(self._ends[-1] if self._ends else 0)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, place: int) -> RowT:
        """The row at a place, 0 to ``len - 1``.

        Raises:
            InvalidDataError: it is not what it should be; names file and row.
        """
        return self._row(place, self._read)

    def record(self, place: int) -> Record:
        """The record behind a row."""
        return self._row(place, lambda record: record)

    def __iter__(self) -> Iterator[RowT]:
        return (self[place] for place in range(len(self)))

    def where(self, place: int) -> str:
        """A row's file, and its place there."""
        source, number = self._find(place)
        return source.where(number)

    def filtered(self, wanted: Callable[[RowT], bool]) -> Dataset[RowT]:
        """Only the rows for which ``wanted`` holds. Reads them all."""
        kept = [number for place, number in enumerate(self._numbers) if wanted(self[place])]
        return Dataset(self._sources, self._read, numbers=kept)

    def first(self, rows: int) -> Dataset[RowT]:
        """Only the first rows."""
        return Dataset(self._sources, self._read, numbers=self._numbers[:rows])

    def _find(self, place: int) -> tuple[RowSource, int]:
        number = self._numbers[place]
        source = bisect_right(self._ends, number)
        return self._sources[source], number - (self._ends[source - 1] if source else 0)

    def _row(self, place: int, read: Callable[[Record], ReadT]) -> ReadT:
        source, number = self._find(place)
        try:
            return read(source[number])
        except InvalidDataError as error:
            raise type(error)(f"{source.where(number)}: {error}") from error.__cause__
