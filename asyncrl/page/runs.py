"""What the page knows of runs, from their folders."""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from asyncrl.page.follow import LineFollower, read_object
from asyncrl.page.timeline import BinnedTimeline, read_timeline, thinned
from asyncrl.telemetry.run_directory import is_locked

MOST_RUNS = 1000
MOST_POINTS = 1000
"""Points of a curve."""
MOST_LISTED = 200
"""Rollouts of one answer."""
_LOG_BYTES = 1 << 16
_WATCHED = ("metrics.jsonl", "trajectories.jsonl", "status.json", "summary.json", "timeline.json", "logs/driver.log")


@dataclass(frozen=True, slots=True)
class _Rollout:
    """Where a line of ``trajectories.jsonl`` is, and what it is chosen by."""

    offset: int
    size: int
    step: int
    reward: float | None
    tokens: int
    finish: str
    title: str


class RunFolder:
    """One run. Its methods block (they read files), and may be called from any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._lines = LineFollower(path / "metrics.jsonl")
        self._steps: list[dict[str, Any]] = []
        self._others: list[dict[str, Any]] = []
        self._trajectories = LineFollower(path / "trajectories.jsonl")
        self._rollouts: list[_Rollout] = []
        self._timeline: tuple[int, BinnedTimeline] | None = None

    def stamps(self) -> dict[str, int]:
        """Return for each file that is there a number which changes when it does."""
        found: dict[str, int] = {}
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
            last = self._steps[-1] if self._steps else {}
            scores = [line["eval/success"] for line in self._others if _is_number(line.get("eval/success"))]
        return {
            "state": self.state(),
            "step": last.get("step", 0),
            "steps": self._planned_steps(),
            "reward": last.get("reward_mean"),
            "success": scores[-1] if scores else None,
            "time_s": last.get("time_s"),
        }

    def overview(self) -> dict[str, Any]:
        """Return curves by step, what the run waits for, its advice, its results, and what of its files is damaged."""
        with self._lock:
            self._read_metrics()
            steps, others = list(self._steps), list(self._others)
            damaged = {each.path.name: each.damaged for each in (self._lines, self._trajectories) if each.damaged}
        status, summary = read_object(self.path / "status.json"), read_object(self.path / "summary.json")
        for name, found in (("status.json", status), ("summary.json", summary)):
            if found is None and (self.path / name).exists():
                damaged[name] = 1
        known = summary if summary is not None else status or {}
        return {
            "state": self.state(),
            "step": steps[-1]["step"] if steps else 0,
            "steps": self._planned_steps(status),
            "curves": thinned(_columns(steps, "step"), MOST_POINTS),
            "scores": thinned(_columns([line for line in others if "eval/success" in line], "step"), MOST_POINTS),
            "warm_start": thinned(_columns([line for line in others if "sft/loss" in line], None), MOST_POINTS),
            "idle": known.get("idle") or {},
            "advice": known.get("advice"),
            "status": status,
            "summary": summary,
            "damaged": damaged,
        }

    def failures(self) -> dict[str, Any]:
        """Return causes of failed attempts with a traceback each, and the end of the log."""
        summary = read_object(self.path / "summary.json") or {}
        try:
            with (self.path / "logs" / "driver.log").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
                log = file.read().decode(errors="replace")
        except OSError:
            log = ""
        return {"failures": summary.get("failures") or {}, "tokens": summary.get("tokens") or {}, "log": log}

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
        """Return ``count`` rollouts, the newest first, of those that fit.

        These are of ``step``, have a reward from ``least`` to ``most`` and at least ``longer`` tokens, contain ``text``
        (in any case) and have a number below ``before``.
        """
        with self._lock:
            self._read_rollouts()
            known = list(self._rollouts)
        found: list[dict[str, Any]] = []
        more = False
        for number in range(min(before if before is not None else len(known), len(known)) - 1, -1, -1):
            each = known[number]
            if (step is not None and each.step != step) or each.tokens < longer:
                continue
            if least is not None and (each.reward is None or each.reward < least):
                continue
            if most is not None and (each.reward is None or each.reward > most):
                continue
            if text and not self._contains(each, text.casefold()):
                continue
            if len(found) == min(count, MOST_LISTED):
                more = True
                break
            about = {"number": number, "step": each.step, "reward": each.reward, "tokens": each.tokens}
            found.append({**about, "finish": each.finish, "title": each.title})
        return {"rollouts": found, "more": more, "all": len(known)}

    def rollout(self, number: int) -> dict[str, Any] | None:
        """Return one line of ``trajectories.jsonl``; None if there is none of this number."""
        with self._lock:
            self._read_rollouts()
            if not 0 <= number < len(self._rollouts):
                return None
            each = self._rollouts[number]
            return self._trajectories.record_at(each.offset, each.size)

    def _contains(self, rollout: _Rollout, text: str) -> bool:
        record = self._trajectories.record_at(rollout.offset, rollout.size) or {}
        return text in str(record.get("text", "")).casefold() or text in str(record.get("task", "")).casefold()

    def _planned_steps(self, status: Mapping[str, Any] | None = None) -> int | None:
        status = status if status is not None else read_object(self.path / "status.json") or {}
        steps = status.get("steps")
        return steps if isinstance(steps, int) else None

    def _read_metrics(self) -> None:
        generation = self._lines.generation
        for _offset, _size, record in self._lines.new_records():
            if generation != self._lines.generation:
                generation = self._lines.generation
                self._steps, self._others = [], []
            is_step = isinstance(record.get("step"), int) and record.get("reward_mean") is not None
            (self._steps if is_step else self._others).append(record)

    def _read_rollouts(self) -> None:
        generation = self._trajectories.generation
        for offset, size, record in self._trajectories.new_records():
            if generation != self._trajectories.generation:
                generation = self._trajectories.generation
                self._rollouts = []
            step, reward, tokens = record.get("step"), record.get("reward"), record.get("tokens")
            self._rollouts.append(
                _Rollout(
                    offset=offset,
                    size=size,
                    step=step if isinstance(step, int) else 0,
                    reward=float(reward) if _is_number(reward) else None,
                    tokens=len(tokens) if isinstance(tokens, list) else 0,
                    finish=str(record.get("finish", ""))[:40],
                    title=str(record.get("text", ""))[:100],
                )
            )


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
        self._known = {path.resolve().name: self._known.get(path.resolve().name) or RunFolder(path) for path in paths}
        return self._known


def _is_run(path: Path) -> bool:
    return (path / "config.toml").is_file()


def _begun_s(path: Path) -> float:
    try:
        return (path / "config.toml").stat().st_mtime
    except OSError:
        return time.time()


def _columns(lines: list[dict[str, Any]], index: str | None) -> dict[str, list[float | None]]:
    """Return the numbers of lines by name, None where a line lacks one; ``index`` comes first, or the line's number."""
    names = dict.fromkeys(name for line in lines for name, value in line.items() if _is_number(value))
    columns: dict[str, list[float | None]] = {}
    if index is None:
        columns["line"] = [float(number) for number in range(1, len(lines) + 1)]
    for name in names:
        columns[name] = [float(line[name]) if _is_number(line.get(name)) else None for line in lines]
    return columns


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")
