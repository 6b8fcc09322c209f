"""Where the time of a replica's episodes goes: its engine, its environments, or between the two.

The totals grow only and are part of the answer to every group, so that the pool knows them when the worker dies.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, TypeAlias

Where: TypeAlias = Literal["generate", "environment", "episodes"]

_WHERE: tuple[Where, ...] = ("generate", "environment", "episodes")
_DOING: dict[Where, str] = {
    "generate": "generating",
    "episodes": "between turns",
    "environment": "in the environment or its reward",
}


class EpisodeTimes:
    """Adds up the time of episodes that run side by side. Takes its time from the running loop.

    An episode is in ``episodes`` (templates, encoding) unless it generates or waits for its environment. Totals:

    - ``generate_s``, ``environment_s``, ``episodes_s``: seconds in which at least one episode was there, and none was
      in one named before it.
    - ``rows_generate_s``, ``rows_environment_s``, ``rows_episodes_s``: the same summed over episodes.
    - ``rows``, ``rows_load``: number of episodes that ended; sum of the logarithm of the mean number at a time while
      each of them lasted.
    - ``requests``, ``load``, ``pace``, ``load_load``, ``load_pace``: number of requests; sums, for each, of the
      logarithm of the mean number of requests beside it and of its seconds per token, and of their products.
    """

    def __init__(self) -> None:
        self.totals: dict[str, float] = {}
        self._open = dict.fromkeys(_WHERE, 0)
        self._as_of_s = 0.0
        self._environment_since_s: dict[object, float] = {}
        self._rows_s = 0.0
        self._requests_s = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one episode was anywhere, up to the last change."""
        return sum(self.totals.get(f"{where}_s", 0.0) for where in _WHERE)

    @contextmanager
    def episode(self) -> Iterator[None]:
        self._move(None, "episodes")
        begun_s, rows_s = self._as_of_s, self._rows_s
        try:
            yield
        finally:
            self._move("episodes", None)
            if (took_s := self._as_of_s - begun_s) > 0:
                self._add(rows=1, rows_load=math.log((self._rows_s - rows_s) / took_s))

    @contextmanager
    def at(self, where: Where) -> Iterator[None]:
        """Count the episode there while the block lasts."""
        self._move("episodes", where)
        entry = object()
        if where == "environment":
            self._environment_since_s[entry] = self._as_of_s
        try:
            yield
        finally:
            self._environment_since_s.pop(entry, None)
            self._move(where, "episodes")

    @contextmanager
    def request(self) -> Iterator[list[int]]:
        """Count the episode as generating; the list takes the number of tokens of every chunk."""
        tokens: list[int] = []
        with self.at("generate"):
            begun_s, requests_s = self._as_of_s, self._requests_s
            yield tokens
        took_s = self._as_of_s - begun_s
        if took_s <= 0 or not sum(tokens):
            return
        load = math.log((self._requests_s - requests_s) / took_s)
        pace = math.log(took_s / sum(tokens))
        self._add(requests=1, load=load, pace=pace, load_load=load * load, load_pace=load * pace)

    def explain(self) -> str:
        """Return where rollouts are now: ``3 generating, 1 in the environment or its reward, the longest for 40 s``."""
        parts = [f"{count} {what}" for where, what in _DOING.items() if (count := self._open[where])]
        if self._environment_since_s:
            now_s = asyncio.get_running_loop().time()
            parts[-1] += f", the longest for {now_s - min(self._environment_since_s.values()):.0f} s"
        return ", ".join(parts)

    def _add(self, **values: float) -> None:
        for name, value in values.items():
            self.totals[name] = self.totals.get(name, 0.0) + value

    def _move(self, left: Where | None, entered: Where | None) -> None:
        now_s = asyncio.get_running_loop().time()
        took_s, self._as_of_s = now_s - self._as_of_s, now_s
        self._requests_s += took_s * self._open["generate"]
        busiest = next((where for where in _WHERE if self._open[where]), None)
        if took_s and (rows := sum(self._open.values())):
            self._rows_s += took_s * rows
        for where in _WHERE:
            if took_s and (rows := self._open[where]):
                name = f"rows_{where}_s"
                self.totals[name] = self.totals.get(name, 0.0) + took_s * rows
        if busiest is not None and took_s:
            self.totals[f"{busiest}_s"] = self.totals.get(f"{busiest}_s", 0.0) + took_s
        if left is not None:
            self._open[left] -= 1
        if entered is not None:
            self._open[entered] += 1


def sum_totals(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add up totals, of workers side by side or one after another."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total
