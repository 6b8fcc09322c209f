"""In which order the rows of one data set come."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["Order"]


class Order:
    """Row numbers for every index from 0, pass after pass; each pass has every row once.

    A pure function of index and seed: nothing has to be kept to go on anywhere.

    Args:
        rows: how many there are, 1 or more.
        seed: of the shuffling; every pass is shuffled anew.
        shuffled: whether it is at all; otherwise each pass goes in the order of the file.
        first_pass: row numbers of the first pass, each once, where that is to go another way (from easy to hard).
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
            raise ValueError(f"the first pass must have each of {rows} rows once")
        self.rows = rows
        self._seed = [seed] if isinstance(seed, int) else list(seed)
        self._shuffled = shuffled
        self._first_pass = first_pass
        self._passes: dict[int, NDArray[np.int64]] = {}

    def row(self, index: int) -> int:
        """Number of the row that comes at ``index``."""
        number, place = divmod(index, self.rows)
        if number == 0 and self._first_pass is not None:
            return int(self._first_pass[place])
        return int(self._pass(number)[place]) if self._shuffled else place

    def _pass(self, number: int) -> NDArray[np.int64]:
        if number not in self._passes:
            while len(self._passes) > 1:  # two: runs ask a little out of order where one pass ends
                del self._passes[min(self._passes)]
            self._passes[number] = np.random.default_rng([*self._seed, number]).permutation(self.rows)
        return self._passes[number]
