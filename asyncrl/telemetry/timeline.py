"""What happened when: spans of work, waits with their reasons, counters; saved as a Chrome trace.

    timeline = Timeline()
    with timeline.span("trainer", "update", step=3):
        ...
    with timeline.wait("trainer", "groups"):
        batch = await buffer.select(...)
    timeline.counter("queue", ready=4, pending=12)
    timeline.save(Path("timeline.json"))        # opens in https://ui.perfetto.dev and chrome://tracing

:class:`Occupancy` sums up which stages work at the same time, in constant memory.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from asyncrl.telemetry.idle import Activity, ProcessTimes
from asyncrl.telemetry.run_directory import replace_text, to_json

PAUSED = "pause"
"""Reason of a wait that only a user ends."""


class Occupancy:
    """Time with each set of busy stages. Pure: the caller brings the times, which must not go back.

    A stage is busy while at least one of its spans is open. Every question about overlap is a sum over the sets of busy
    stages, so memory is constant: no history of intervals is kept, however long the run.
    """

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()
        self._busy: frozenset[str] = frozenset()
        self._time_s: dict[frozenset[str], float] = {}
        self._first_s: dict[str, float] = {}
        self._last_s: dict[str, float] = {}
        self._now_s = float("-inf")

    def begin(self, stage: str, at_s: float) -> None:
        self._advance(at_s)
        self._first_s.setdefault(stage, at_s)
        self._open[stage] += 1
        if self._open[stage] == 1:
            self._busy |= {stage}

    def end(self, stage: str, at_s: float) -> None:
        """End a span of ``stage``.

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

    def busy_s(self, stage: str, *, now_s: float) -> float:
        """Return the time with at least one span of ``stage`` open, those open at ``now_s`` included."""
        return sum(time_s for busy, time_s in self._times(now_s) if stage in busy)

    def overlap_share(self, stages: Collection[str] | None = None, *, now_s: float) -> float:
        """Return the share of the time from the first begin to the last end in which two or more stages are busy.

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


MOST_EVENTS = 200_000


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """One entry. ``start_s`` counts from the making of the timeline; ``duration_s`` is that of spans and waits."""

    kind: Literal["span", "wait", "counter"]
    stage: str
    name: str
    start_s: float
    duration_s: float = 0.0
    args: Mapping[str, Any] = field(default_factory=dict)


class Timeline:
    """Thread-safe record of a run.

    The sums (:meth:`overlap_share`, :meth:`busy_s`, :meth:`wait_s`) are exact for the whole run. Of the events
    themselves only the newest ``max_events``, about 300 bytes each, are held.

    A span that stays open while something inside it waits counts as work: close it before. ``clock`` returns seconds
    that never go back.
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter, max_events: int = MOST_EVENTS) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._zero_s = clock()
        self._events: deque[TimelineEvent] = deque(maxlen=max_events)
        self._occupancy = Occupancy()
        self._spans_s: defaultdict[str, float] = defaultdict(float)
        self._waited_s: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._open: dict[int, TimelineEvent] = {}  # by identity, in the order in which they began
        self._stages: dict[str, None] = {}
        self._processes = ProcessTimes()
        self._going_on: Counter[Activity] = Counter()

    def span(self, stage: str, name: str, **args: Any) -> AbstractContextManager[None]:
        """Return a span in which ``stage`` works while the ``with`` block lasts; ``args`` are shown with it."""
        return self._during("span", stage, name, args)

    def wait(self, stage: str, reason: str) -> AbstractContextManager[None]:
        """Return a span in which ``stage`` waits for ``reason`` while the ``with`` block lasts."""
        return self._during("wait", stage, reason, {})

    def counter(self, name: str, **values: float) -> None:
        """Record values, drawn as a curve."""
        with self._lock:
            self._events.append(TimelineEvent("counter", "", name, self._now_s(), 0.0, values))

    @property
    def events(self) -> tuple[TimelineEvent, ...]:
        with self._lock:
            return tuple(self._events)

    def overlap_share(self, stages: Collection[str] | None = None) -> float:
        """Return :meth:`Occupancy.overlap_share` until now."""
        with self._lock:
            return self._occupancy.overlap_share(stages, now_s=self._now_s())

    def busy_s(self, stage: str) -> float:
        with self._lock:
            return self._occupancy.busy_s(stage, now_s=self._now_s())

    def spans_s(self) -> dict[str, float]:
        """Return the seconds of all spans that have ended, by stage. Spans side by side add up."""
        with self._lock:
            return dict(self._spans_s)

    @property
    def stages(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(self._stages)

    def wait_s(self) -> dict[str, dict[str, float]]:
        """Return the seconds waited, by stage and reason, those still waiting included. Waits side by side add up."""
        with self._lock:
            total = {stage: dict(reasons) for stage, reasons in self._waited_s.items()}
            for stage, reason, time_s in self._open_for("wait"):
                reasons = total.setdefault(stage, {})
                reasons[reason] = reasons.get(reason, 0.0) + time_s
            return total

    def current_waits(self) -> dict[str, dict[str, float]]:
        """Return what waits now: stage, reason, and the seconds of the longest wait."""
        with self._lock:
            current: dict[str, dict[str, float]] = {}
            for stage, reason, time_s in self._open_for("wait"):  # the longest first
                current.setdefault(stage, {}).setdefault(reason, time_s)
            return current

    def open_spans(self) -> list[tuple[str, str, float]]:
        """Return the spans open now: stage, name, and seconds since they began; the longest first."""
        with self._lock:
            return self._open_for("span")

    @contextmanager
    def processes(self) -> Iterator[None]:
        """Count the time of every process by cause while the block lasts; a block before it counts no more."""
        with self._lock:
            self._processes.begin(self._now_s())
        try:
            yield
        finally:
            with self._lock:
                self._processes.end(self._now_s())

    def replica_state(self, name: str, state: str) -> None:
        """Take the state of a replica, as :meth:`asyncrl.telemetry.idle.ProcessTimes.replica`."""
        with self._lock:
            self._processes.replica(name, state, self._now_s())

    def process_s(self) -> dict[str, dict[str, float]]:
        """Return the seconds of every process by cause (:mod:`asyncrl.telemetry.idle`)."""
        with self._lock:
            return self._processes.seconds(self._now_s())

    def save(self, path: Path) -> None:
        """Write Chrome's trace format: a row for each stage, more where its spans overlap."""
        with self._lock:
            events, stages = list(self._events), list(self._stages)
        records = ",\n".join(json.dumps(record) for record in _trace(events, stages))
        replace_text(path, f'{{"displayTimeUnit": "ms", "traceEvents": [\n{records}\n]}}\n')

    def _now_s(self) -> float:
        return self._clock() - self._zero_s

    def _open_for(self, kind: Literal["span", "wait"]) -> list[tuple[str, str, float]]:
        now_s = self._now_s()
        return [(each.stage, each.name, now_s - each.start_s) for each in self._open.values() if each.kind == kind]

    def _count(self, event: TimelineEvent, change: int, at_s: float) -> None:
        activity = event.stage if event.kind == "span" else (event.stage, event.name)
        self._going_on[activity] += change
        if self._going_on[activity] == (change > 0):  # the first began, or the last ended
            self._processes.changed(frozenset(+self._going_on), at_s)

    @contextmanager
    def _during(self, kind: Literal["span", "wait"], stage: str, name: str, args: Mapping[str, Any]) -> Iterator[None]:
        with self._lock:
            event = TimelineEvent(kind, stage, name, self._now_s(), args=args)
            self._stages.setdefault(stage)
            if kind == "span":
                self._occupancy.begin(stage, event.start_s)
            self._open[id(event)] = event
            self._count(event, 1, event.start_s)
        try:
            yield
        except BaseException as error:
            args = {**args, "error": type(error).__name__}
            raise
        finally:
            with self._lock:
                now_s = self._now_s()
                del self._open[id(event)]
                self._count(event, -1, now_s)
                if kind == "span":
                    self._occupancy.end(stage, now_s)
                    self._spans_s[stage] += now_s - event.start_s
                else:
                    self._waited_s[stage][name] += now_s - event.start_s
                self._events.append(replace(event, duration_s=now_s - event.start_s, args=args))


def lanes(events: Iterable[TimelineEvent]) -> list[tuple[TimelineEvent, int]]:
    """Give events of one stage lanes from 0 so that in each lane they follow or enclose one another.

    Trace viewers draw nested slices of a row as a stack and cannot draw slices that overlap half.
    """
    placed: list[tuple[TimelineEvent, int]] = []
    open_ends: list[list[float]] = []  # for each lane the ends of the slices open there, outermost first
    for event in sorted(events, key=lambda event: (event.start_s, -event.duration_s)):
        end_s = event.start_s + event.duration_s
        for ends in open_ends:
            while ends and ends[-1] <= event.start_s:
                ends.pop()
        free = (lane for lane, ends in enumerate(open_ends) if not ends or end_s <= ends[-1])
        lane = next(free, len(open_ends))
        if lane == len(open_ends):
            open_ends.append([])
        open_ends[lane].append(end_s)
        placed.append((event, lane))
    return placed


def _trace(events: list[TimelineEvent], stages: list[str]) -> Iterator[dict[str, Any]]:
    yield {"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": "asyncrl"}}
    thread = 0
    for stage in stages:
        placed = lanes(event for event in events if event.stage == stage)
        first = thread + 1
        for lane in range(1 + max((lane for _, lane in placed), default=0)):
            thread += 1
            label = stage if lane == 0 else f"{stage} ({lane + 1})"
            yield {"name": "thread_name", "ph": "M", "pid": 1, "tid": thread, "args": {"name": label}}
            yield {"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": thread, "args": {"sort_index": thread}}
        for event, lane in placed:
            yield {
                "name": event.name if event.kind == "span" else f"wait: {event.name}",
                "cat": f"{event.kind},{stage}",
                "ph": "X",
                "pid": 1,
                "tid": first + lane,
                "ts": _microseconds(event.start_s),
                "dur": _microseconds(event.duration_s),
                "args": to_json(event.args),
            }
    for event in events:
        if event.kind == "counter":
            at = _microseconds(event.start_s)
            yield {"name": event.name, "ph": "C", "pid": 1, "tid": 0, "ts": at, "args": to_json(event.args)}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
