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


@dataclass(frozen=True, slots=True)
class _Row:
    """Events of one stage and name, by their start. Seconds."""

    stage: str
    kind: str
    name: str
    starts: NDArray[np.float64]
    ends: NDArray[np.float64]


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
        width_s = (end_s - start_s) / bins
        found: list[dict[str, Any]] = []
        for row in self.rows:
            begin = np.clip((row.starts - start_s) / width_s, 0, bins)
            end = np.clip((row.ends - start_s) / width_s, 0, bins)
            shares = _covered(begin, end, bins)
            total_s = float((end - begin).sum() * width_s)
            if total_s > 0:
                about = {"stage": row.stage, "kind": row.kind, "name": row.name, "seconds": round(total_s, 4)}
                found.append({**about, "shares": [round(share, 3) for share in shares.tolist()]})
        return {"start_s": start_s, "end_s": end_s, "whole_s": self.end_s, "rows": found}


def _covered(begin: NDArray[np.float64], end: NDArray[np.float64], bins: int) -> NDArray[np.float64]:
    """Return how much of each bin the intervals cover, added up. Bins are [0, 1), [1, 2), ..."""
    # The integral of the number of open intervals, at each whole number, is the sum of what begins left of it.
    first, last = np.floor(begin).astype(np.intp), np.floor(end).astype(np.intp)
    size = bins + 2
    covered = np.bincount(first, weights=first + 1 - begin, minlength=size)
    covered -= np.bincount(last, weights=last + 1 - end, minlength=size)
    whole = np.bincount(first, minlength=size) - np.bincount(last, minlength=size)
    covered[1:] += np.cumsum(whole)[:-1]
    shares: NDArray[np.float64] = np.maximum(covered[:bins], 0.0)
    return shares


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
    rows: list[_Row] = []
    for (stage, kind, name), pairs in sorted(by_row.items()):
        times = np.array(pairs, np.float64)
        rows.append(_Row(stage, kind, name, times[:, 0], times[:, 1]))
    return BinnedTimeline(tuple(rows), max((float(row.ends.max()) for row in rows), default=0.0))


def thinned(series: Mapping[str, list[float | None]], most: int) -> dict[str, list[float | None]]:
    """Return every n-th value of columns of one length, the last one included, so that at most ``most`` are left."""
    length = max((len(column) for column in series.values()), default=0)
    step = -(-length // most) if length else 1
    first = (length - 1) % step if length else 0
    return {name: column[first::step] for name, column in series.items()}
