"""Endless streams of rows: the rows of sources, their order, and mixtures of several data sets."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncrl.datasets.source import Record, RowSource
from asyncrl.errors import ConfigError, InvalidDataError

RowT = TypeVar("RowT")
ReadT = TypeVar("ReadT")


class Dataset(Generic[RowT]):
    """The rows of several sources as one sequence; ``read`` converts records to rows on demand.

    ``numbers`` selects rows, in its order; all by default.
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
        """Return the row at a place, 0 to ``len - 1``; the InvalidDataError of an invalid row names file and row."""
        return self._row(place, self._read)

    def record(self, place: int) -> Record:
        return self._row(place, lambda record: record)

    def __iter__(self) -> Iterator[RowT]:
        return (self[place] for place in range(len(self)))

    def where(self, place: int) -> str:
        """Return the file and place of a row, for messages."""
        source, number = self._find(place)
        return source.where(number)

    def filtered(self, wanted: Callable[[RowT], bool]) -> Dataset[RowT]:
        """Read all rows and return those for which ``wanted`` holds."""
        kept = [number for place, number in enumerate(self._numbers) if wanted(self[place])]
        return Dataset(self._sources, self._read, numbers=kept)

    def first(self, rows: int) -> Dataset[RowT]:
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
        except RecursionError as error:
            raise InvalidDataError(f"{source.where(number)}: nested too deeply") from error


class Order:
    """Row numbers for every index from 0, in passes that have every row once; a pure function of index and seed.

    Each pass is shuffled differently, or keeps the order of the file. ``first_pass`` is the order of the first (easy
    to hard).
    """

    def __init__(
        self,
        rows: int,
        *,
        seed: int | Sequence[int] = 0,
        shuffled: bool = True,
        first_pass: Sequence[int] | None = None,
    ) -> None:
        if rows < 1:
            raise ValueError(f"an order needs at least one row, got {rows}")
        if first_pass is not None and sorted(first_pass) != list(range(rows)):
            raise ValueError(f"the first pass must have each of the {rows} rows once")
        self.rows = rows
        self._seed = [seed] if isinstance(seed, int) else list(seed)
        self._shuffled = shuffled
        self._first_pass = first_pass
        self._passes: dict[int, NDArray[np.int64]] = {}

    def row(self, index: int) -> int:
        number, place = divmod(index, self.rows)
        if number == 0 and self._first_pass is not None:
            return int(self._first_pass[place])
        return int(self._pass(number)[place]) if self._shuffled else place

    def _pass(self, number: int) -> NDArray[np.int64]:
        if number not in self._passes:
            while len(self._passes) > 1:  # two: requests may be slightly out of order where a pass ends
                del self._passes[min(self._passes)]
            self._passes[number] = np.random.default_rng([*self._seed, number]).permutation(self.rows)
        return self._passes[number]


_BLOCK = 4096
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class Draw:
    """A draw of a mixture: the ``number``-th row (from 0) of ``part``."""

    part: int
    number: int


class Weight:
    """A part's share of the mixture by index: linear between points (index, weight), constant outside of them."""

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        if not points or not all(math.isfinite(at) and 0 <= weight < math.inf for at, weight in points):
            raise ValueError(f"a weight must be 0 or more at every point, all numbers finite, got {list(points)}")
        if any(later <= earlier for (earlier, _), (later, _) in pairwise(points)):
            raise ValueError(f"the points of a weight must have increasing indices, got {list(points)}")
        self.at = [float(at) for at, _ in points]
        self._weights = [float(weight) for _, weight in points]

    def __call__(self, indices: NDArray[np.int64] | NDArray[np.float64]) -> NDArray[np.float64]:
        return np.interp(indices, self.at, self._weights)


class Mixture:
    """Draws parts in proportion to their weights, which may change with the index (a curriculum).

    The draws follow the multiples of the golden ratio instead of random numbers (Weyl, 1916): among any n draws, a part
    has n times its share except for a few. A pure function of index and seed.

    Raises:
        ValueError: all weights are 0 at an index.
    """

    def __init__(self, weights: Sequence[Weight], *, seed: int = 0) -> None:
        self._weights = tuple(weights)
        self._check()
        self._offset = float(np.random.default_rng([seed, 0x6D6978]).random())
        self._blocks: list[NDArray[np.int64]] = []  # part of each index
        self._before: list[NDArray[np.int64]] = [np.zeros(len(self._weights), dtype=np.int64)]  # counts up to a block

    def draw(self, index: int) -> Draw:
        """Return the draw at ``index``."""
        block, place = divmod(index, _BLOCK)
        while len(self._blocks) <= block:
            self._extend()
        parts = self._blocks[block]
        part = int(parts[place])
        return Draw(part, int(self._before[block][part] + np.count_nonzero(parts[:place] == part)))

    def _check(self) -> None:
        # Between two points the sum is a straight line, never negative: 0 inside only if it is 0 throughout. So the
        # indices beside the points find every 0.
        points = np.array([0.0, *(at for weight in self._weights for at in weight.at)])
        indices = np.unique(np.concatenate([np.floor(points), np.ceil(points)]).clip(min=0.0))
        zeros = indices[~np.any([weight(indices) > 0 for weight in self._weights], axis=0)]
        if self._weights and len(zeros):
            raise ValueError(f"all weights are 0 at index {int(zeros[0])}")

    def _extend(self) -> None:
        first = len(self._blocks) * _BLOCK
        indices = np.arange(first, first + _BLOCK, dtype=np.int64)
        weights = np.stack([weight(indices) for weight in self._weights])
        ends = weights.cumsum(axis=0)
        points = (self._offset + indices * _GOLDEN) % 1.0 * ends[-1]
        parts = (points >= ends).sum(axis=0).clip(max=len(self._weights) - 1)
        # A point that was rounded up to the end belongs to the last part with a positive weight.
        last = len(self._weights) - 1 - np.argmax(weights[::-1] > 0, axis=0)
        parts = np.minimum(parts, last).astype(np.int64)
        self._blocks.append(parts)
        self._before.append(self._before[-1] + np.bincount(parts, minlength=len(self._weights)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(Generic[RowT]):
    """One data set of a mixture.

    Attributes:
        name: for messages and metrics.
        shuffled: whether every pass is shuffled differently, or keeps the order of the file.
        curriculum_key: a column of numbers; the first pass goes from its smallest to its largest (a curriculum).
    """

    name: str
    rows: Dataset[RowT]
    shuffled: bool = True
    curriculum_key: str | None = None
    weight: Weight


class Stream(Generic[RowT]):
    """Rows of one or more parts (none of them empty), mixed by weight, for every index from 0.

    Raises:
        ConfigError: all weights are 0 at an index; ``key`` is that of the parts in the configuration.
    """

    def __init__(self, parts: Sequence[Part[RowT]], *, seed: int, key: str = "data") -> None:
        self.parts = tuple(parts)
        self._seed, self._key = seed, key
        try:
            self._mixture = Mixture([part.weight for part in self.parts], seed=seed)
        except ValueError as error:
            names = ", ".join(part.name for part in self.parts)
            text = f"{key}: {error}, of the parts that have rows ({names})"
            remedy = "give at least one part a weight above 0 at every index"
            raise ConfigError(text, path=key, remedy=remedy) from error
        self._orders = [_order(part, seed=[seed, number]) for number, part in enumerate(self.parts)]

    def __getitem__(self, index: int) -> RowT:
        """Return the row at ``index``, which depends only on the parts and the seed."""
        part, place = self.find(index)
        return part.rows[place]

    def find(self, index: int) -> tuple[Part[RowT], int]:
        """Return the part of the row at ``index``, and the row's place in the part."""
        draw = self._mixture.draw(index)
        return self.parts[draw.part], self._orders[draw.part].row(draw.number)

    @property
    def rows(self) -> int:
        """Number of rows of all parts."""
        return sum(len(part.rows) for part in self.parts)

    def check(self) -> None:
        """Read every row once, so that an invalid one raises its InvalidDataError before the run."""
        for part in self.parts:
            for _ in part.rows:
                pass

    def filtered(self, wanted: Callable[[RowT], bool]) -> Stream[RowT]:
        """Read all rows and keep those for which ``wanted`` holds; parts without rows are removed."""
        kept = [replace(part, rows=part.rows.filtered(wanted)) for part in self.parts]
        return Stream([part for part in kept if len(part.rows)], seed=self._seed, key=self._key)


def _order(part: Part[RowT], *, seed: Sequence[int]) -> Order:
    rows = part.rows
    first_pass = None
    if part.curriculum_key is not None:
        from asyncrl.datasets.rows import column_number

        keys = [
            column_number(rows.record(place), part.curriculum_key, where=rows.where(place))
            for place in range(len(rows))
        ]
        first_pass = sorted(range(len(rows)), key=keys.__getitem__)  # stable: equal keys keep the order of the file
    return Order(len(rows), seed=seed, shuffled=part.shuffled, first_pass=first_pass)
