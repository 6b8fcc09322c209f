"""The timeline of a run, as shares of bins: as much as a screen can show, however many events there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

MOST_BINS = 2000


class _Event(msgspec.Struct):
    ph: str
    name: str = ""
    tid: int = 0
    ts: float = 0.0
    dur: float = 0.0
    cat: str = ""


class _Trace(msgspec.Struct):
    traceEvents: list[_Event]  # noqa: N815  Chrome's name


class _Row:
    """Events of one stage and name. Asking for bins takes time by the bins, not by the events."""

    def __init__(
        self, stage: str, kind: str, name: str, starts: NDArray[np.float64], ends: NDArray[np.float64]
    ) -> None:
        self.about = {"stage": stage, "kind": kind, "name": name}
        self._starts, self._ends = np.sort(starts), np.sort(ends)
        self._sums = _sums(self._starts), _sums(self._ends)

    def covered_s(self, at_s: NDArray[np.longdouble]) -> NDArray[np.longdouble]:
        """Return the time that all events together take before each of ``at_s``."""
        at = at_s.astype(np.float64)
        began, ended = np.searchsorted(self._starts, at), np.searchsorted(self._ends, at)
        covered: NDArray[np.longdouble] = (began - ended) * at_s - self._sums[0][began] + self._sums[1][ended]
        return covered


def _sums(times: NDArray[np.float64]) -> NDArray[np.longdouble]:
    """Return the sum of the first 0, 1, ... times; differences of these sums are small beside them."""
    sums = np.zeros(len(times) + 1, np.longdouble)
    np.cumsum(times, out=sums[1:])
    return sums


@dataclass(frozen=True, slots=True)
class BinnedTimeline:
    """Spans and waits of a run."""

    rows: tuple[_Row, ...]
    end_s: float

    def view(self, start_s: float, end_s: float, bins: int) -> dict[str, Any]:
        """Return for each stage, kind (span, wait) and name: the share of each bin, and its seconds in the view.

        Spans that overlap, as those of several groups, count once each: a share may be above 1.

        Raises:
            ValueError: the view is empty, or there are no bins or more than :data:`MOST_BINS`.
        """
        if not (0 <= start_s < end_s) or not 1 <= bins <= MOST_BINS:
            raise ValueError(f"a view is from 0 <= start < end, in 1 to {MOST_BINS} bins")
        edges = np.linspace(start_s, end_s, bins + 1, dtype=np.longdouble)
        found: list[dict[str, Any]] = []
        for row in self.rows:
            covered_s = row.covered_s(edges)
            total_s = float(covered_s[-1] - covered_s[0])
            if total_s > 0:
                shares = np.maximum(np.diff(covered_s) / np.diff(edges), 0.0).astype(np.float64)
                found.append({**row.about, "seconds": round(total_s, 4), "shares": shares.round(3).tolist()})
        return {"start_s": start_s, "end_s": end_s, "whole_s": self.end_s, "rows": found}


def read_timeline(path: Path) -> BinnedTimeline:
    """Read the timeline of a run as :meth:`asyncrl.telemetry.timeline.Timeline.save` wrote it.

    Names of spans that only count (``step 12``) become one.

    Raises:
        OSError: there is none.
        ValueError: it is damaged.
    """
    events = msgspec.json.decode(path.read_bytes(), type=_Trace).traceEvents
    by_row: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for event in events:
        if event.ph == "X":
            kind, _, stage = event.cat.partition(",")
            name = event.name.removeprefix("wait: ") if kind == "wait" else event.name.rstrip("0123456789 ")
            start_s = event.ts / 1e6
            by_row.setdefault((stage, kind, name), []).append((start_s, start_s + event.dur / 1e6))
    rows = [(about, np.array(pairs, np.float64)) for about, pairs in sorted(by_row.items())]
    end_s = max((float(times[:, 1].max()) for _about, times in rows), default=0.0)
    return BinnedTimeline(tuple(_Row(*about, times[:, 0], times[:, 1]) for about, times in rows), end_s)


def thinned(series: Mapping[str, list[float | None]], most: int) -> dict[str, list[float | None]]:
    """Return every n-th value of columns of one length, the last one included, so that at most ``most`` are left."""
    length = max((len(column) for column in series.values()), default=0)
    step = -(-length // most) if length else 1
    first = (length - 1) % step if length else 0
    return {name: column[first::step] for name, column in series.items()}
