"""The folder of a run: its files, which plain tools can read.

runs/first-20260102-030405/
    config.toml          the resolved configuration; config-STEP.toml is an earlier one, changed by a resume after STEP
    metrics.jsonl        one object per line: step, time_s, version, and the metrics
    trajectories.jsonl   conversations to read
    ledger.sqlite        every prompt, and what was sampled for it (SQL: buffers/ledger_store.py): asyncrl replay
    meters/              tokens sampled, counted by each rollout worker
    timeline.json        Chrome trace: https://ui.perfetto.dev
    status.json          what it does and waits for now: asyncrl why
    summary.json         its results
    logs/driver.log
    checkpoints/
    run.lock             held by the process that works on the run; names it

JSON lines are appended by a thread of their own, so that no event loop waits for a disk; numbers that are not finite
become null. The log file has records of asyncrl, engines and buffers from INFO up, of other packages from WARNING up.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import logging
import logging.handlers
import math
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Self

import xxhash

from asyncrl.errors import ConfigError
from asyncrl.io import written_when_there_is_room

_log = logging.getLogger(__name__)


def to_json(value: Any) -> Any:
    """Convert a value to valid JSON types; a number that is not finite becomes None.

    Scalars and arrays of numpy and torch become Python's, dataclasses dictionaries, anything else its text.
    """
    if value is None or isinstance(value, bool | int | str):
        return value if not isinstance(value, str) else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {to_json(str(key)): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | AbstractSet):
        return [to_json(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: to_json(getattr(value, each.name)) for each in fields(value)}
    if not isinstance(value, Path | type) and hasattr(value, "tolist"):  # numpy and torch, scalars and arrays
        return to_json(value.tolist())
    return to_json(str(value))


def not_finite(values: Mapping[str, Any]) -> dict[str, str]:
    """Return which numbers are NaN or infinite."""
    found: dict[str, str] = {}
    for key, value in values.items():
        plain = value.tolist() if hasattr(value, "tolist") and not isinstance(value, type) else value
        if isinstance(plain, float) and not math.isfinite(plain):
            found[key] = "nan" if math.isnan(plain) else ("inf" if plain > 0 else "-inf")
    return found


CLOSE_TIMEOUT_S = 60.0


class JsonLines:
    """Appends one JSON object per line to ``path``, in the order of the calls, from any thread.

    :meth:`append` returns at once; a line is on its way to the disk microseconds later, and certainly after
    :meth:`close`. Lines wait for room on a full disk (:func:`asyncrl.io.written_when_there_is_room`). What keeps a line
    from the disk is raised by the next call of any method.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        cut_torn_tail(path)
        self._file = path.open("ab", buffering=0)
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._write, name=f"write {path.name}", daemon=True)
        self._thread.start()

    def append(self, record: Mapping[str, Any]) -> None:
        """Queue a record; it is serialised before this returns."""
        self._check()
        if self._closed.is_set():
            raise ValueError(f"{self.path} is closed")
        self._queue.put(json.dumps(to_json(record), ensure_ascii=False) + "\n")

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._queue.put(None)
            self._thread.join(CLOSE_TIMEOUT_S)
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _write(self) -> None:
        try:
            with self._file:
                while (line := self._queue.get()) is not None:
                    left = line.encode()
                    while left:  # a disk that fills up takes a part
                        write = functools.partial(self._file.write, left)
                        left = left[written_when_there_is_room(write, path=self.path, ends=self._closed.wait) :]
        except Exception as error:  # noqa: BLE001  a full disk, for one: raised by the next call
            self._error = error


def cut_torn_tail(path: Path) -> int:
    """Cut off a last line that a crash left incomplete; return its bytes."""
    if not path.is_file():
        return 0
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        whole = size
        while whole > 0:  # backwards: the file of a long run is large, its last line is not
            start = max(0, whole - 65_536)
            file.seek(start)
            newline = file.read(whole - start).rfind(b"\n")
            if newline >= 0:
                whole = start + newline + 1
                break
            whole = start
        file.truncate(whole)
    return size - whole


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read the complete records of a file. An absent file has none; damaged lines are left out, with a warning."""
    return [record for _line, record in _sound_lines(path)]


def _sound_lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    if not path.exists():
        return []
    lines, damaged = _json_lines(path)
    if damaged:
        _log.warning("%s: %d damaged lines are left out", path, damaged)
    if _last_byte(path) not in (b"", b"\n"):
        _log.warning("%s: the last line is left out: it was cut off, or is being written", path)
    return lines


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        return file.read(1)


def _json_lines(path: Path) -> tuple[list[tuple[bytes, dict[str, Any]]], int]:
    """Return the lines that are JSON objects and have their checksum, if any, and how many do not. It is taken out."""
    sound: list[tuple[bytes, dict[str, Any]]] = []
    lines = [line for line in path.read_bytes().split(b"\n")[:-1] if line]
    for line in lines:
        record = sound_record(line)
        if record is not None:
            sound.append((line, record))
    return sound, len(lines) - len(sound)


def sound_record(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line, without its checksum; None if it is none, or its checksum is wrong."""
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(line.decode())
        if isinstance(record, dict) and record.pop(_CHECKSUM, None) in (None, _checksum(record)):
            return record
    return None


_CHECKSUM = "xxh3_64"


def _checksum(record: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(record).encode())


def replace_text(path: Path, text: str) -> None:
    """Write a text beside ``path`` and rename it, so that a reader sees the file complete."""
    draft = path.with_name(path.name + ".part")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def rewrite_json_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> int:
    """Keep only the records for which ``keep`` holds; return how many were removed. Atomic."""
    lines = _sound_lines(path)
    kept = [line.decode() + "\n" for line, record in lines if keep(record)]
    if len(kept) < len(lines):
        replace_text(path, "".join(kept))
    return len(lines) - len(kept)


def set_aside(path: Path) -> Path:
    """Rename a damaged file to ``NAME.damaged``, with ``-2``, ``-3``, ... if that exists; return its new path."""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged{f'-{number}' if number > 1 else ''}")).exists():
        number += 1
    return path.rename(aside)


def mend_json_lines(path: Path) -> None:
    """Keep the lines of ``path`` that are JSON objects, and a damaged file beside it (:func:`set_aside`)."""
    if not path.exists():
        return
    kept, broken = _json_lines(path)
    if broken:
        aside = set_aside(path)
        path.write_bytes(b"".join(line + b"\n" for line, _record in kept))
        _log.warning("%s: %d damaged lines are left out; the file as it was is %s", path, broken, aside.name)


OWN = ("asyncrl", "engines", "buffers")


@contextlib.contextmanager
def open_log(path: Path, *, show: Callable[[str], None] | None = None) -> Iterator[None]:
    """Append log records to ``path`` inside the ``with`` block; ``show`` gets the first line of each own warning.

    Records are queued and written by a thread, so logging never blocks an event loop. Handlers that the program has
    installed itself keep working; levels are put back when no log is open any more. A log has the records of the whole
    process: those of runs that overlap are in each other's.
    """
    file = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    file.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s", "%F %T"))
    records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    handler = logging.handlers.QueueHandler(records)
    handler.addFilter(lambda record: record.levelno >= logging.WARNING or record.name.partition(".")[0] in OWN)
    listener = logging.handlers.QueueListener(records, file, *([_Shown(show)] if show is not None else []))
    with _levels:
        if not _open:
            _levels_before.update((name, logging.getLogger(name).level) for name in OWN)
            for name in OWN:
                logging.getLogger(name).setLevel(logging.INFO)
        _open.add(handler)
    listener.start()
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        listener.stop()
        file.close()
        with _levels:
            _open.remove(handler)
            if not _open:
                for name, level in _levels_before.items():
                    logging.getLogger(name).setLevel(level)


_levels = threading.Lock()
_levels_before: dict[str, int] = {}
_open: set[logging.Handler] = set()


class _Shown(logging.Handler):
    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__()
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING and record.name.partition(".")[0] in OWN:
            try:
                self._show(record.getMessage().partition("\n")[0])
            except Exception:  # noqa: BLE001  as every handler does: an error would end the thread of the log
                self.handleError(record)


_OWN_KEYS = ("step", "time_s", "version", "not_finite")


class RunDirectory:
    """The files of a run. :meth:`create` makes a new folder, :meth:`open` resumes one (and sets ``resumed``).

    Appending never blocks; :meth:`close`, :meth:`rewind` and the whole-file writers do.

    ``stale_after`` is the step behind which a resumed run trains again what its files have, until :meth:`rewind` has
    removed that; else None.
    """

    def __init__(self, path: Path, *, resumed: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self.config_path = path / "config.toml"
        self.metrics_path = path / "metrics.jsonl"
        self.trajectories_path = path / "trajectories.jsonl"
        self.timeline_path = path / "timeline.json"
        self.status_path = path / "status.json"
        self.summary_path = path / "summary.json"
        self.ledger_path = path / "ledger.sqlite"
        self.logs = path / "logs"
        self.meters = path / "meters"
        self.checkpoints = path / "checkpoints"
        self.resumed = resumed
        self.stale_after: int | None = None
        self._lock = _lock_folder(path)
        self.logs.mkdir(exist_ok=True)
        self.checkpoints.mkdir(exist_ok=True)
        self._clock = clock
        if resumed:
            files = (self.metrics_path, self.trajectories_path, self.timeline_path, self.status_path)
            for each in (*files, self.logs / "driver.log"):
                if each.is_dir():
                    _log.warning("%s is a folder, and set aside as %s", each, set_aside(each).name)
            mend_json_lines(self.metrics_path)
            mend_json_lines(self.trajectories_path)
        self._metrics = JsonLines(self.metrics_path)
        self._trajectories = JsonLines(self.trajectories_path)
        earlier = [record["time_s"] for record in self.metrics() if record.get("time_s") is not None]
        self._zero_s = clock() - max(earlier, default=0.0)

    @classmethod
    def create(cls, root: Path, name: str, *, clock: Callable[[], float] = time.monotonic) -> Self:
        """Make ``root/name-YYYYmmdd-HHMMSS``, with ``-2``, ``-3``, ... if that exists.

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
                f"runs = {str(root)!r}: a folder cannot be made there: {error.strerror}",
                path="runs",
                remedy="give a writable folder with --runs",
            ) from error

    @classmethod
    def open(cls, path: Path, *, clock: Callable[[], float] = time.monotonic) -> Self:
        """Resume a run: metrics are appended, and time continues from the last line.

        Damaged lines of metrics and trajectories, and a damaged summary, are set aside: results do not depend on them.

        Raises:
            ConfigError: it is not the folder of a run, or another process works on it.
        """
        if not (path / "config.toml").is_file():
            raise ConfigError(
                f"{path}: no run to resume: it has no config.toml",
                path=str(path),
                remedy="give the folder that the run printed at its start",
            )
        return cls(path, resumed=True, clock=clock)

    @property
    def elapsed_s(self) -> float:
        """Seconds of running, earlier pieces of a resumed run included."""
        return self._clock() - self._zero_s

    def write_config(self, text: str, *, step: int | None = None) -> None:
        """Write the configuration; after a ``step``, keep another one that was there as ``config-STEP.toml``.

        The first one of a step stays: it is what trained up to it; later ones trained nothing that is kept.
        """
        if step is not None and (before := self.config_path.read_text(encoding="utf-8")) != text:
            kept = self.path / f"config-{step}.toml"
            if not kept.exists():
                replace_text(kept, before)
        replace_text(self.config_path, text)

    def configs_until_after(self, step: int) -> list[Path]:
        """Return the files of earlier configurations that trained steps after ``step``."""
        kept = self.path.glob("config-*.toml")
        return [each for each in kept if (until := each.stem.rpartition("-")[2]).isdecimal() and int(until) > step]

    def log_metrics(self, metrics: Mapping[str, Any], *, step: int, version: int) -> None:
        """Append a line to ``metrics.jsonl``; ``step`` 0 is before the first, ``version`` is of the weights measured.

        Numbers that are not finite are written as null and named under ``not_finite``; that name, ``step``, ``time_s``
        and ``version`` are taken.
        """
        taken = [key for key in _OWN_KEYS if key in metrics]
        if taken:
            raise ValueError(f"{', '.join(taken)}: every line of metrics has these names itself")
        record: dict[str, Any] = {"step": step, "time_s": round(self.elapsed_s, 6), "version": version, **metrics}
        note = not_finite(metrics)
        if note:
            record["not_finite"] = note
        self._metrics.append(record)

    def log_trajectory(self, record: Mapping[str, Any]) -> None:
        """Append a line with a checksum to ``trajectories.jsonl``; a ``step`` in it lets :meth:`rewind` find it."""
        plain = to_json(record)
        self._trajectories.append({**plain, _CHECKSUM: _checksum(plain)})

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        replace_text(self.summary_path, json.dumps(to_json(summary), indent=2, ensure_ascii=False) + "\n")

    def summary(self) -> dict[str, Any] | None:
        """Read ``summary.json``; return None if the run has not ended."""
        try:
            summary: dict[str, Any] = json.loads(self.summary_path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (ValueError, IsADirectoryError):
            _log.warning("%s is damaged, and set aside as %s", self.summary_path, set_aside(self.summary_path).name)
            return None
        return summary

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of ``metrics.jsonl`` that are on disk."""
        return read_json_lines(self.metrics_path)

    def rewind(self, step: int, *, kept: Container[int] | None = None) -> int:
        """Remove the lines of what will be done again; return how many lines of metrics were removed.

        Metrics of steps after ``step`` go, and configurations that trained them are set aside. Trajectories stay only
        of group ids in ``kept``, which are not rolled out again (None: up to ``step``).
        """
        self._metrics.close()
        self._trajectories.close()
        for path in self.configs_until_after(step):
            path.replace(path.with_suffix(".toml.undone"))

        def keep(record: dict[str, Any]) -> bool:
            return not isinstance(record.get("step"), int) or record["step"] <= step

        def stays(record: dict[str, Any]) -> bool:
            return keep(record) if kept is None else record.get("group_id", -1) in kept

        gone = rewrite_json_lines(self.metrics_path, keep)
        rewrite_json_lines(self.trajectories_path, stays)
        self.stale_after = None
        self._metrics = JsonLines(self.metrics_path)
        self._trajectories = JsonLines(self.trajectories_path)
        return gone

    def close(self) -> None:
        try:
            self._metrics.close()
            self._trajectories.close()
        finally:
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_locked(path: Path) -> bool:
    """Return whether a process works on the run."""
    try:
        with (path / "run.lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # it is not there, or the file system has no locks
        pass
    return False


def _lock_folder(path: Path) -> IO[str]:
    """Lock the folder of a run until the file is closed, or this process has ended.

    Raises:
        ConfigError: another process holds the lock.
    """
    file = (path / "run.lock").open("a+", encoding="utf-8")
    for left in reversed(range(20)):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if left:  # who only asks whether it is locked holds it for a moment, too
                time.sleep(0.01)
                continue
            file.seek(0)
            owner = file.read().strip() or "another process"
            file.close()
            raise ConfigError(
                f"{path} is in use by {owner}", path=str(path), remedy="wait for its end, or stop it"
            ) from None
        except OSError as error:  # a file system without locks
            _log.warning("%s cannot be locked (%s): see that no other process works on this run", path, error.strerror)
            break
    file.truncate(0)
    now = datetime.now().astimezone()
    file.write(f"process {os.getpid()} on {socket.gethostname()} since {now:%Y-%m-%d %H:%M:%S}\n")
    file.flush()
    return file
