"""What the page knows of runs, from their folders."""

from __future__ import annotations

import heapq
import json
import mmap
import os
import sys
import threading
import time
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import msgspec
import numpy as np

from asyncrl.page.timeline import BinnedTimeline, read_timeline, thinned
from asyncrl.telemetry.follow import LineFollower, read_form
from asyncrl.telemetry.run_directory import is_locked, sound_record

MOST_RUNS = 1000
MOST_POINTS = 600
"""Points of a curve."""
MOST_NAMES = 1000
"""Metrics that are kept."""
MOST_LISTED = 200
"""Rollouts of one answer."""
SEARCH_S = 0.08
"""Time after which a search for a text answers with what it has found, and where to go on."""
_LOG_BYTES = 1 << 16
_LISTED = ("step", "reward_mean", "time_s", "eval/success")
"""Metrics that a list of runs shows."""
_WATCHED = ("metrics.jsonl", "trajectories.jsonl", "status.json", "summary.json", "timeline.json", "logs/driver.log")


class _Heading(msgspec.Struct):
    """What a list of rollouts takes of a line. Its checksum is looked at when the rollout is."""

    step: int = 0
    reward: float | None = None
    finish: str = ""
    text: str = ""
    tokens: list[msgspec.Raw] = []


class _Wait(msgspec.Struct):
    owner: str
    reason: str
    for_s: float


class _Work(msgspec.Struct):
    stage: str
    name: str
    for_s: float


class _Advice(msgspec.Struct):
    sentence: str
    cause: str = ""


class _Status(msgspec.Struct):
    """What is shown of ``status.json``."""

    steps: int | None = None
    waits: list[_Wait] = []
    work: list[_Work] = []
    causes: list[str] = []
    idle: dict[str, dict[str, float]] = {}
    advice: _Advice | None = None
    failed: str = ""


class _Failure(msgspec.Struct):
    count: int
    example: str = ""


class _Tokens(msgspec.Struct):
    dropped: dict[str, int] = {}


class _Staleness(msgspec.Struct):
    histogram: dict[str, int] = {}


class _Summary(msgspec.Struct):
    """What is shown of ``summary.json``."""

    steps: int | None = None
    weight_version: int | None = None
    max_staleness: int | None = None
    staleness: _Staleness = msgspec.field(default_factory=_Staleness)
    tokens: _Tokens = msgspec.field(default_factory=_Tokens)
    failures: dict[str, _Failure] = {}
    idle: dict[str, dict[str, float]] = {}
    advice: _Advice | None = None


class _Columns:
    """Numbers of lines by name, of one length; None where a line lacks one. If not ``whole``, the newest of a few."""

    def __init__(self, *, whole: bool) -> None:
        self.whole = whole
        self.length = 0
        self.by_name: dict[str, list[float | None]] = {}

    def append(self, record: Mapping[str, Any]) -> None:
        if not self.whole:
            self.by_name |= {name: [float(record[name])] for name in _LISTED if _is_number(record.get(name))}
            return
        for name, value in record.items():
            if _is_number(value):
                column = self.by_name.get(name)
                if column is None:
                    if len(self.by_name) == MOST_NAMES:
                        continue
                    column = self.by_name[name] = [None] * self.length
                column.append(float(value))
        self.length += 1
        for column in self.by_name.values():
            if len(column) < self.length:
                column.append(None)

    def last(self, name: str) -> float | None:
        """Return the newest value."""
        return next((value for value in reversed(self.by_name.get(name, [])) if value is not None), None)


class _Rollouts:
    """Where the lines of ``trajectories.jsonl`` are, and what they are chosen by."""

    def __init__(self) -> None:
        self.offsets, self.sizes, self.steps, self.tokens = array("q"), array("q"), array("q"), array("q")
        self.rewards = array("d")
        self.finishes: list[str] = []
        self.titles: list[str] = []

    def append(self, offset: int, size: int, heading: _Heading) -> None:
        self.offsets.append(offset)
        self.sizes.append(size)
        self.steps.append(heading.step)
        self.tokens.append(len(heading.tokens))
        self.rewards.append(float("nan") if heading.reward is None else heading.reward)
        self.finishes.append(heading.finish[:40])
        self.titles.append(heading.text[:100])


class RunFolder:
    """One run. Its methods block (they read files), and may be called from any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._whole = False
        self._follow_metrics()
        self._trajectories = LineFollower(path / "trajectories.jsonl", _heading, again=self._forget_rollouts)
        self._forget_rollouts()
        self._timeline: tuple[int, BinnedTimeline] | None = None

    def stamps(self) -> dict[str, int]:
        """Return for each file that is there a number which changes when it does; ``run.lock``: whether it is held."""
        found = {"run.lock": int(is_locked(self.path))}
        for name in _WATCHED:
            try:
                status = (self.path / name).stat()
            except OSError:
                continue
            found[name] = status.st_mtime_ns ^ status.st_size
        return found

    def state(self) -> str:
        """Return ``training``, ``finished`` (it has a summary), or ``ended`` (it was stopped, killed, or failed)."""
        if is_locked(self.path):
            return "training"
        return "finished" if (self.path / "summary.json").is_file() else "ended"

    def line(self) -> dict[str, Any]:
        """Return what a list of runs says of it."""
        with self._lock:
            self._read_metrics()
            steps = self._steps
            return {
                "state": self.state(),
                "step": int(steps.last("step") or 0),
                "steps": self._planned_steps(),
                "reward": steps.last("reward_mean"),
                "success": self._scores.last("eval/success"),
                "time_s": steps.last("time_s"),
            }

    def overview(self) -> dict[str, Any]:
        """Return curves by step, what the run waits for, its advice, its results, and what of its files is damaged."""
        with self._lock:
            if not self._whole:
                self._whole = True
                self._follow_metrics()
            self._read_metrics()
            step = int(self._steps.last("step") or 0)
            columns = (self._steps, self._scores, self._warm_start)
            curves, scores, warm_start = (thinned(each.by_name, MOST_POINTS) for each in columns)
            damaged = {each.path.name: each.damaged for each in (self._lines, self._trajectories) if each.damaged}
        status, summary = read_form(self.path / "status.json", _Status), read_form(self.path / "summary.json", _Summary)
        for name, found in (("status.json", status), ("summary.json", summary)):
            if found is None and (self.path / name).exists():
                damaged[name] = 1
        known = summary or status or _Status()
        shown: dict[str, Any] = msgspec.to_builtins(
            {"idle": known.idle, "advice": known.advice, "status": status, "summary": summary}
        )
        return {
            "state": self.state(),
            "step": step,
            "steps": self._planned_steps(status),
            "curves": curves,
            "scores": scores,
            "warm_start": warm_start,
            "damaged": damaged,
            **shown,
        }

    def failures(self) -> dict[str, Any]:
        """Return causes of failed attempts with a traceback each, and the end of the log."""
        summary = read_form(self.path / "summary.json", _Summary) or _Summary()
        try:
            with (self.path / "logs" / "driver.log").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
                log = file.read().decode(errors="replace")
        except OSError:
            log = ""
        found: dict[str, Any] = msgspec.to_builtins({"failures": summary.failures, "tokens": summary.tokens})
        return {**found, "log": log}

    def timeline(self, start_s: float, end_s: float | None, bins: int) -> dict[str, Any]:
        """Return :meth:`asyncrl.page.timeline.BinnedTimeline.view`; without rows where there is no sound timeline.

        Raises:
            ValueError: the view is invalid.
        """
        path = self.path / "timeline.json"
        with self._lock:
            try:
                stamp = path.stat().st_mtime_ns
                if self._timeline is None or self._timeline[0] != stamp:
                    self._timeline = stamp, read_timeline(path)
            except (OSError, ValueError):
                return {"start_s": 0.0, "end_s": 0.0, "whole_s": 0.0, "rows": [], "damaged": path.exists()}
            timeline = self._timeline[1]
        return timeline.view(start_s, end_s if end_s is not None else max(timeline.end_s, 1e-6), bins)

    def rollouts(
        self,
        *,
        step: int | None = None,
        least: float | None = None,
        most: float | None = None,
        longer: int = 0,
        text: str = "",
        before: int | None = None,
        count: int = 50,
    ) -> dict[str, Any]:
        """Return rollouts, the newest first.

        They are those of ``step``, of rewards from ``least`` to ``most``, with ``longer`` tokens or more, whose text or
        task contains ``text`` (any case), with a number below ``before``.
        A search for a text ends after :data:`SEARCH_S`. ``before`` of the answer is where to go on, None at the end.
        """
        with self._lock:
            self._read_rollouts()
            known = self._rollouts
            chosen = np.array(known.tokens) >= longer
            if step is not None:
                chosen &= np.array(known.steps) == step
            if least is not None:
                chosen &= np.array(known.rewards) >= least
            if most is not None:
                chosen &= np.array(known.rewards) <= most
            numbers = np.flatnonzero(chosen[: max(before, 0) if before is not None else None])[::-1].tolist()
            count = min(count, MOST_LISTED)
            found, rest = self._search(numbers, text, count) if text else (numbers[:count], numbers[count:])
            return {
                "rollouts": [self._rollout_line(number) for number in found],
                "before": rest[0] + 1 if rest else None,
                "all": len(known.offsets),
                "damaged": {"trajectories.jsonl": self._trajectories.damaged} if self._trajectories.damaged else {},
            }

    def _rollout_line(self, number: int) -> dict[str, Any]:
        known, reward = self._rollouts, self._rollouts.rewards[number]
        about = {"number": number, "step": known.steps[number], "tokens": known.tokens[number]}
        return {
            **about,
            "reward": reward if reward == reward else None,
            "finish": known.finishes[number],
            "title": known.titles[number],
        }

    def rollout(self, number: int) -> dict[str, Any] | None:
        """Return one line of ``trajectories.jsonl``; None if there is none of this number, or it is damaged."""
        with self._lock:
            self._read_rollouts()
            if not 0 <= number < len(self._rollouts.offsets):
                return None
            return self._trajectories.record_at(self._rollouts.offsets[number], self._rollouts.sizes[number])

    def _search(self, numbers: Sequence[int], text: str, count: int) -> tuple[list[int], Sequence[int]]:
        """Return the rollouts whose text or task contains ``text``, and those that were not looked at."""
        found: list[int] = []
        folded, deadline_s = text.casefold(), time.monotonic() + SEARCH_S
        # Letters outside ASCII have several forms of one case: then every line is decoded.
        needle = json.dumps(text, ensure_ascii=False)[1:-1].encode().lower() if text.isascii() else b""
        try:
            with self._trajectories.path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as lines:
                for place, number in enumerate(numbers):
                    if len(found) == count or time.monotonic() > deadline_s:
                        return found, numbers[place:]
                    start = self._rollouts.offsets[number]
                    line = lines[start : start + self._rollouts.sizes[number]]
                    if needle in line.lower():
                        record = sound_record(line) or {}
                        if any(folded in str(record.get(name, "")).casefold() for name in ("text", "task")):
                            found.append(number)
        except (OSError, ValueError):  # removed, or emptied, a moment ago
            return found, []
        return found, []

    def _planned_steps(self, status: _Status | None = None) -> int | None:
        status = status or read_form(self.path / "status.json", _Status)
        return status.steps if status is not None else None

    def _follow_metrics(self) -> None:
        self._lines = LineFollower(self.path / "metrics.jsonl", sound_record, again=self._forget_metrics)
        self._forget_metrics()

    def _forget_metrics(self) -> None:
        self._steps, self._scores, self._warm_start = (_Columns(whole=self._whole) for _ in range(3))

    def _read_metrics(self) -> None:
        for _offset, _size, record in self._lines.new_records():
            if isinstance(record.get("step"), int) and record.get("reward_mean") is not None:
                masked, trained = record.get("masked_tokens"), record.get("train/tokens_trained")
                if _is_number(masked) and _is_number(trained) and masked + trained > 0:
                    record["masked_share"] = masked / (masked + trained)
                self._steps.append(record)
            elif "eval/success" in record:
                self._scores.append(record)
            elif "sft/loss" in record:
                self._warm_start.append({"line": self._warm_start.length + 1, "sft/loss": record["sft/loss"]})

    def _forget_rollouts(self) -> None:
        self._rollouts = _Rollouts()

    def _read_rollouts(self) -> None:
        for offset, size, heading in self._trajectories.new_records():
            self._rollouts.append(offset, size, heading)


_headings = msgspec.json.Decoder(_Heading)


def _heading(line: bytes) -> _Heading | None:
    try:
        heading = _headings.decode(line)
    except (ValueError, RecursionError):
        return None
    return heading if abs(heading.step) < 1 << 53 else None


class RunFolders:
    """The run in a folder, or the runs in it. A run is known by the name of its folder, never by a path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[str, RunFolder] = {}

    @property
    def alone(self) -> bool:
        """Whether the folder is a run itself."""
        return _is_run(self.folder)

    def find(self, name: str) -> RunFolder | None:
        """Return the run of this name, if there is one."""
        run = self._known.get(name)
        if run is None or not run.path.is_dir():
            run = self._scan().get(name)
        return run

    def lines(self) -> list[dict[str, Any]]:
        """Return a line for every run, the newest first; at most :data:`MOST_RUNS`."""
        return [{"name": name, **run.line()} for name, run in self._scan().items()]

    def _scan(self) -> dict[str, RunFolder]:
        if self.alone:
            paths = [self.folder]
        else:
            try:
                found = [path for path in self.folder.iterdir() if _is_run(path)]
            except OSError:
                found = []
            paths = heapq.nlargest(MOST_RUNS, found, key=_begun_s)
        named = {_name(path): path for path in paths}
        self._known = {name: self._known.get(name) or RunFolder(path) for name, path in named.items()}
        return self._known


def _name(path: Path) -> str:
    """Return the name of a folder; bytes that are no text become escapes."""
    return path.resolve().name.encode("utf-8", "backslashreplace").decode()


def _is_run(path: Path) -> bool:
    return (path / "config.toml").is_file()


def _begun_s(path: Path) -> float:
    try:
        return (path / "config.toml").stat().st_mtime
    except OSError:
        return time.time()


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
