"""The folder of one run: everything it says about itself, in files that plain tools can read.

runs/first-20260102-030405/
    config.toml          the resolved configuration
    metrics.jsonl        one object per line: step, time_s, version, and the metrics
    trajectories.jsonl   conversations to read
    ledger.sqlite        every prompt, and what was sampled for it (SQL: buffers/ledger_schema.py): asyncrl replay
    meters/              tokens sampled, counted by each rollout worker
    timeline.json        Chrome trace: https://ui.perfetto.dev
    status.json          what it does and waits for at this moment: asyncrl why
    summary.json         how it ended
    logs/driver.log
    checkpoints/
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Container, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from asyncrl.errors import ConfigError

from .json_form import not_finite, to_json
from .json_lines import JsonLines, read_json_lines, rewrite_json_lines

__all__ = ["RunDirectory"]

_OWN_KEYS = ("step", "time_s", "version", "not_finite")


class RunDirectory:
    """Owner of the files of a run; made with :meth:`create` or, to go on with one, :meth:`open`.

    Appending never blocks; :meth:`close`, :meth:`flush`, :meth:`rewind` and the whole-file writers do.

    Attributes:
        path: the folder.
        resumed: whether the run had been begun before.
    """

    def __init__(self, path: Path, *, resumed: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self.resumed = resumed
        self.logs.mkdir(exist_ok=True)
        self.checkpoints.mkdir(exist_ok=True)
        self._clock = clock
        self._metrics = JsonLines(self.metrics_path)
        self._trajectories = JsonLines(self.trajectories_path)
        earlier = [record["time_s"] for record in self.metrics() if record.get("time_s") is not None]
        self._zero_s = clock() - max(earlier, default=0.0)

    @classmethod
    def create(cls, root: Path, name: str, *, clock: Callable[[], float] = time.monotonic) -> Self:
        """Make ``root/name-YYYYmmdd-HHMMSS``, with ``-2``, ``-3``, ... behind it where that is taken.

        Raises:
            ConfigError: the folder cannot be made.
        """
        stem = f"{name}-{datetime.now().astimezone():%Y%m%d-%H%M%S}"
        try:
            root.mkdir(parents=True, exist_ok=True)
            number = 1
            while True:
                path = root / (stem if number == 1 else f"{stem}-{number}")
                try:
                    path.mkdir()  # the one atomic step: two runs begun together get two folders
                    return cls(path, resumed=False, clock=clock)
                except FileExistsError:
                    number += 1
        except OSError as error:
            raise ConfigError(
                f"runs = {str(root)!r}: no folder can be made there: {error.strerror}",
                path="runs",
                remedy="give a folder you may write to with --runs",
            ) from error

    @classmethod
    def open(cls, path: Path, *, clock: Callable[[], float] = time.monotonic) -> Self:
        """Go on with a run: metrics are appended, the time goes on from the last line.

        Raises:
            ConfigError: the folder is no run's.
        """
        if not (path / "config.toml").is_file():
            raise ConfigError(
                f"{path}: no run to resume: it has no config.toml",
                path=str(path),
                remedy="give the folder that a run printed when it began",
            )
        return cls(path, resumed=True, clock=clock)

    @property
    def config_path(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def trajectories_path(self) -> Path:
        return self.path / "trajectories.jsonl"

    @property
    def timeline_path(self) -> Path:
        return self.path / "timeline.json"

    @property
    def status_path(self) -> Path:
        return self.path / "status.json"

    @property
    def summary_path(self) -> Path:
        return self.path / "summary.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def ledger_path(self) -> Path:
        return self.path / "ledger.sqlite"

    @property
    def meters(self) -> Path:
        return self.path / "meters"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def elapsed_s(self) -> float:
        """Seconds of running, earlier pieces of a resumed run included."""
        return self._clock() - self._zero_s

    def write_config(self, text: str) -> None:
        """Write ``config.toml`` (whole, atomically)."""
        self._replace(self.config_path, text)

    def log_metrics(self, metrics: Mapping[str, Any], *, step: int, version: int) -> None:
        """Append a line to ``metrics.jsonl``.

        Numbers that are not finite are written as null and named under ``not_finite``.

        Args:
            metrics: by name; the names ``step``, ``time_s``, ``version`` and ``not_finite`` are taken.
            step: training step the metrics belong to; 0 is before the first.
            version: weight version they were measured under.
        """
        taken = [key for key in _OWN_KEYS if key in metrics]
        if taken:
            raise ValueError(f"{', '.join(taken)}: names that every line of metrics has of its own")
        record: dict[str, Any] = {"step": step, "time_s": round(self.elapsed_s, 6), "version": version, **metrics}
        note = not_finite(metrics)
        if note:
            record["not_finite"] = note
        self._metrics.append(record)

    def log_trajectory(self, record: Mapping[str, Any]) -> None:
        """Append a line to ``trajectories.jsonl``; a ``step`` in it lets :meth:`rewind` find it."""
        self._trajectories.append(record)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json`` (whole, atomically)."""
        self._replace(self.summary_path, json.dumps(to_json(summary), indent=2, ensure_ascii=False) + "\n")

    def summary(self) -> dict[str, Any] | None:
        """What ``summary.json`` says; None if the run has not been through its end yet."""
        try:
            summary: dict[str, Any] = json.loads(self.summary_path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return summary

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl`` that are on disk."""
        return read_json_lines(self.metrics_path)

    def rewind(self, step: int, *, kept: Container[int] | None = None, scored: Container[int] | None = None) -> int:
        """Forget lines of what will be done again. Returns how many metrics lines went.

        Args:
            step: metrics of later steps go.
            scored: steps whose scores stay; None keeps those of all steps that do.
            kept: slots whose trajectories stay, since they are not rolled out again; None goes by ``step`` there too.
        """
        self._metrics.close()
        self._trajectories.close()

        def keep(record: dict[str, Any]) -> bool:
            return not isinstance(record.get("step"), int) or record["step"] <= step

        def valid(record: dict[str, Any]) -> bool:
            return keep(record) and (scored is None or "eval/success" not in record or record["step"] in scored)

        def stays(record: dict[str, Any]) -> bool:
            return keep(record) if kept is None else record.get("slot", -1) in kept

        gone = rewrite_json_lines(self.metrics_path, valid)
        rewrite_json_lines(self.trajectories_path, stays)
        self._metrics = JsonLines(self.metrics_path)
        self._trajectories = JsonLines(self.trajectories_path)
        return gone

    def flush(self) -> None:
        """Wait until all lines are in their files."""
        self._metrics.flush()
        self._trajectories.flush()

    def close(self) -> None:
        """Write what is left. Idempotent."""
        self._metrics.close()
        self._trajectories.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _replace(self, path: Path, text: str) -> None:
        draft = path.with_name(path.name + ".part")
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
