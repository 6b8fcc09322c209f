"""Which stages are at work at the same time: a sweep over begins and ends, in constant memory.

At every moment the set of busy stages is known; the time spent with each set is added up. Every question about
overlap is a sum over those sets, so no history of intervals has to be kept, however long the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

__all__ = ["Occupancy", "overlap_share"]


class Occupancy:
    """Time with each set of busy stages. Pure: the caller brings the times, which must not go back.

    A stage is busy while at least one of its spans is open.
    """

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()
        self._busy: frozenset[str] = frozenset()
        self._time_s: dict[frozenset[str], float] = {}
        self._first_s: dict[str, float] = {}
        self._last_s: dict[str, float] = {}
        self._now_s = float("-inf")

    def begin(self, stage: str, at_s: float) -> None:
        """A span of ``stage`` begins."""
        self._advance(at_s)
        self._first_s.setdefault(stage, at_s)
        self._open[stage] += 1
        if self._open[stage] == 1:
            self._busy |= {stage}

    def end(self, stage: str, at_s: float) -> None:
        """A span of ``stage`` ends.

        Raises:
            ValueError: none is open.
        """
        if not self._open[stage]:
            raise ValueError(f"no span of {stage!r} is open")
        self._advance(at_s)
        self._last_s[stage] = at_s
        self._open[stage] -= 1
        if not self._open[stage]:
            self._busy -= {stage}

    @property
    def stages(self) -> tuple[str, ...]:
        """Stages seen, in order of their first span."""
        return tuple(self._first_s)

    def busy_s(self, stage: str, *, now_s: float) -> float:
        """Time with at least one span of ``stage`` open, those open at ``now_s`` included."""
        return sum(time_s for busy, time_s in self._times(now_s) if stage in busy)

    def overlap_share(self, stages: Collection[str] | None = None, *, now_s: float) -> float:
        """Share of the time from the first begin to the last end in which two of the stages or more are busy.

        A span that is still open lasts until ``now_s``. 0 before any time has passed.
        """
        known = [stage for stage in self._first_s if stages is None or stage in stages]
        if not known:
            return 0.0
        first_s = min(self._first_s[stage] for stage in known)
        last_s = max(now_s if self._open[stage] else self._last_s[stage] for stage in known)
        if last_s <= first_s:
            return 0.0
        chosen = frozenset(known)
        return sum(time_s for busy, time_s in self._times(now_s) if len(busy & chosen) >= 2) / (last_s - first_s)

    def _advance(self, at_s: float) -> None:
        if at_s < self._now_s:
            raise ValueError(f"time went back from {self._now_s} to {at_s}")
        if self._busy:
            self._time_s[self._busy] = self._time_s.get(self._busy, 0.0) + at_s - self._now_s
        self._now_s = at_s

    def _times(self, now_s: float) -> Iterable[tuple[frozenset[str], float]]:
        yield from self._time_s.items()
        if self._busy and now_s > self._now_s:
            yield self._busy, now_s - self._now_s


def overlap_share(spans: Iterable[tuple[str, float, float]], stages: Collection[str] | None = None) -> float:
    """The same of finished spans ``(stage, start_s, end_s)``, in any order.

    Example:
        >>> overlap_share([("rollout", 0, 6), ("trainer", 4, 10)])
        0.2
    """
    # At one moment begins come before ends, so that spans that touch count as one stretch of their stage.
    edges = sorted(
        edge for stage, start_s, end_s in spans for edge in ((float(start_s), 0, stage), (float(end_s), 1, stage))
    )
    occupancy = Occupancy()
    for at_s, kind, stage in edges:
        (occupancy.end if kind else occupancy.begin)(stage, at_s)
    return occupancy.overlap_share(stages, now_s=edges[-1][0] if edges else 0.0)
