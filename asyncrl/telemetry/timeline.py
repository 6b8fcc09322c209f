"""What happened when: spans of work, waits with their reasons, counters; saved as a Chrome trace.

timeline = Timeline()
with timeline.span("trainer", "update", step=3):
    ...
async with timeline.wait("trainer", "groups"):
    batch = await buffer.select(...)
timeline.counter("queue", ready=4, pending=12)
timeline.save(Path("timeline.json"))        # opens in https://ui.perfetto.dev and chrome://tracing
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from .json_form import to_json
from .occupancy import Occupancy

__all__ = ["Span", "Timeline", "TimelineEvent", "lanes"]

MOST_EVENTS = 200_000


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """One entry. ``start_s`` counts from the making of the timeline; ``duration_s`` is that of spans and waits."""

    kind: Literal["span", "wait", "counter", "instant"]
    stage: str
    name: str
    start_s: float
    duration_s: float = 0.0
    args: Mapping[str, Any] = field(default_factory=dict)


class Span:
    """One stretch of work or waiting; ``with`` and ``async with`` mean the same. Not to be entered twice."""

    __slots__ = ("_on_begin", "_on_end", "args", "kind", "name", "stage", "start_s")

    def __init__(
        self,
        kind: Literal["span", "wait"],
        stage: str,
        name: str,
        args: Mapping[str, Any],
        *,
        on_begin: Callable[[Span], float],
        on_end: Callable[[Span, Mapping[str, Any]], None],
    ) -> None:
        self.kind: Literal["span", "wait"] = kind
        self.stage = stage
        self.name = name
        self.args = args
        self.start_s: float | None = None
        self._on_begin = on_begin
        self._on_end = on_end

    def __enter__(self) -> Self:
        if self.start_s is not None:
            raise RuntimeError(f"the span {self.stage}/{self.name} was entered before")
        self.start_s = self._on_begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._on_end(self, {} if kind is None else {"error": kind.__name__})

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, traceback)


class Timeline:
    """Thread-safe record of a run.

    The sums (:meth:`overlap_share`, :meth:`busy_s`, :meth:`wait_s`) are exact for the whole run. Of the events
    themselves only the newest ``max_events`` are held; how many older ones are gone is counted in ``dropped_events``.

    Waiting is no work: a span stays open while something inside it waits, so close it before, or count it as work.

    Args:
        clock: seconds that never go back; injectable for tests and for the virtual clock.
        max_events: bound of memory, about 300 bytes for each.
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter, max_events: int = MOST_EVENTS) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._zero_s = clock()
        self._events: deque[TimelineEvent] = deque(maxlen=max_events)
        self._recorded = 0
        self._occupancy = Occupancy()
        self._waited_s: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._open_waits: dict[Span, float] = {}
        self._open_spans: dict[Span, float] = {}
        self._stages: dict[str, None] = {}

    def span(self, stage: str, name: str, **args: Any) -> Span:
        """Work of ``stage`` for as long as the ``with`` block lasts; ``args`` are shown beside it."""
        return Span("span", stage, name, args, on_begin=self._begin, on_end=self._end)

    def wait(self, stage: str, reason: str) -> Span:
        """``stage`` can do nothing for ``reason`` for as long as the ``with`` block lasts."""
        return Span("wait", stage, reason, {}, on_begin=self._begin, on_end=self._end)

    def counter(self, name: str, **values: float) -> None:
        """Values at this moment, drawn as a curve."""
        self._record("counter", "", name, values)

    def instant(self, stage: str, name: str, **args: Any) -> None:
        """Something without duration: a publication, a failure."""
        self._record("instant", stage, name, args)

    @property
    def events(self) -> tuple[TimelineEvent, ...]:
        """The events held, in the order they ended."""
        with self._lock:
            return tuple(self._events)

    @property
    def dropped_events(self) -> int:
        """Events that are not held any more."""
        with self._lock:
            return self._recorded - len(self._events)

    def overlap_share(self, stages: Collection[str] | None = None) -> float:
        """Share of the time from the first span to the last in which spans of two stages or more are open."""
        with self._lock:
            return self._occupancy.overlap_share(stages, now_s=self._now_s())

    def busy_s(self, stage: str) -> float:
        """Time in which at least one span of ``stage`` was open."""
        with self._lock:
            return self._occupancy.busy_s(stage, now_s=self._now_s())

    @property
    def stages(self) -> tuple[str, ...]:
        """Stages in the order they were first heard of."""
        with self._lock:
            return tuple(self._stages)

    def wait_s(self) -> dict[str, dict[str, float]]:
        """Seconds waited, by stage and reason, those still waiting included. Waits side by side add up."""
        with self._lock:
            now_s = self._now_s()
            total = {stage: dict(reasons) for stage, reasons in self._waited_s.items()}
            for span, start_s in self._open_waits.items():
                reasons = total.setdefault(span.stage, {})
                reasons[span.name] = reasons.get(span.name, 0.0) + now_s - start_s
            return total

    def current_waits(self) -> dict[str, dict[str, float]]:
        """What waits at this moment: stage, reason, and for how long the longest has."""
        with self._lock:
            now_s = self._now_s()
            current: dict[str, dict[str, float]] = {}
            for span, start_s in self._open_waits.items():
                reasons = current.setdefault(span.stage, {})
                reasons[span.name] = max(reasons.get(span.name, 0.0), now_s - start_s)
            return current

    def open_spans(self) -> list[tuple[str, str, float]]:
        """Work that goes on at this moment: stage, name, and seconds since it began; the longest first."""
        with self._lock:
            now_s = self._now_s()
            return [(span.stage, span.name, now_s - start_s) for span, start_s in self._open_spans.items()]

    def save(self, path: Path) -> None:
        """Write Chrome's trace format: a row for each stage, more where its spans lie side by side.

        Written beside ``path`` and moved into place, so a reader never sees half of it.
        """
        with self._lock:
            events, stages, dropped = list(self._events), list(self._stages), self._recorded - len(self._events)
        draft = path.with_name(path.name + ".part")
        with draft.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "otherData": ' + json.dumps({"dropped_events": dropped}))
            file.write(', "traceEvents": [\n')
            file.write(",\n".join(json.dumps(record) for record in _trace(events, stages)))
            file.write("\n]}\n")
        draft.replace(path)

    def _now_s(self) -> float:
        return self._clock() - self._zero_s

    def _begin(self, span: Span) -> float:
        with self._lock:
            now_s = self._now_s()
            self._stages.setdefault(span.stage)
            if span.kind == "span":
                self._occupancy.begin(span.stage, now_s)
                self._open_spans[span] = now_s
            else:
                self._open_waits[span] = now_s
            return now_s

    def _end(self, span: Span, failed: Mapping[str, Any]) -> None:
        with self._lock:
            now_s = self._now_s()
            start_s = span.start_s
            assert start_s is not None
            if span.kind == "span":
                self._occupancy.end(span.stage, now_s)
                del self._open_spans[span]
            else:
                del self._open_waits[span]
                self._waited_s[span.stage][span.name] += now_s - start_s
            self._add(
                TimelineEvent(span.kind, span.stage, span.name, start_s, now_s - start_s, {**span.args, **failed})
            )

    def _record(self, kind: Literal["counter", "instant"], stage: str, name: str, args: Mapping[str, Any]) -> None:
        with self._lock:
            if stage:
                self._stages.setdefault(stage)
            self._add(TimelineEvent(kind, stage, name, self._now_s(), 0.0, args))

    def _add(self, event: TimelineEvent) -> None:
        self._events.append(event)
        self._recorded += 1


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
        slices = [event for event in events if event.stage == stage and event.kind in {"span", "wait"}]
        placed = lanes(slices)
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
            if event.stage == stage and event.kind == "instant":
                at = _microseconds(event.start_s)
                args = to_json(event.args)
                yield {
                    "name": event.name,
                    "cat": stage,
                    "ph": "i",
                    "s": "t",
                    "pid": 1,
                    "tid": first,
                    "ts": at,
                    "args": args,
                }
    for event in events:
        if event.kind == "counter":
            at = _microseconds(event.start_s)
            yield {"name": event.name, "ph": "C", "pid": 1, "tid": 0, "ts": at, "args": to_json(event.args)}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
