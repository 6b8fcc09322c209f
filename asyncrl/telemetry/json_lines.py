"""Append-only JSON lines, written by a thread of their own so that no event loop ever waits for a disk."""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .json_form import to_json

__all__ = ["JsonLines", "cut_torn_tail", "read_json_lines", "rewrite_json_lines"]

CLOSE_TIMEOUT_S = 60.0


class JsonLines:
    """Appends one JSON object per line to ``path``, in the order of the calls, from any thread.

    :meth:`append` returns at once; a line is on its way to the disk microseconds later, and certainly after
    :meth:`flush`. An error of the disk is raised by the next call of any method.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        cut_torn_tail(path)
        self._file = path.open("a", encoding="utf-8")
        self._queue: queue.SimpleQueue[str | threading.Event | None] = queue.SimpleQueue()
        self._error: OSError | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._write, name=f"write {path.name}", daemon=True)
        self._thread.start()

    def append(self, record: Mapping[str, Any]) -> None:
        """Put a record in line; what it holds is read before this returns."""
        self._check()
        if self._closed:
            raise ValueError(f"{self.path} is closed")
        self._queue.put(json.dumps(to_json(record), ensure_ascii=False) + "\n")

    def flush(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Wait until everything appended so far is in the file (blocks: not for the event loop)."""
        if not self._closed:
            done = threading.Event()
            self._queue.put(done)
            if not done.wait(timeout_s):
                raise TimeoutError(f"{self.path} was not written within {timeout_s} s")
        self._check()

    def close(self) -> None:
        """Write what is left and close the file (blocks). Idempotent."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join(CLOSE_TIMEOUT_S)
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _write(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                self._write_one(item)
        finally:
            try:
                self._file.close()
            except OSError as error:
                self._error = error

    def _write_one(self, item: str | threading.Event) -> None:
        try:
            if isinstance(item, str):
                self._file.write(item)
            if isinstance(item, threading.Event) or self._queue.empty():
                self._file.flush()
        except OSError as error:  # a full disk: told to the next caller
            self._error = error
        finally:
            if isinstance(item, threading.Event):
                item.set()


def cut_torn_tail(path: Path) -> int:
    """Cut off a last line that a crash left without its end; returns how many bytes that were."""
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
    """All whole records of a file; a torn last line is left out. An absent file has none."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines if line]


def rewrite_json_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> int:
    """Keep only the records for which ``keep`` holds; returns how many went. Atomic."""
    records = read_json_lines(path)
    kept = [record for record in records if keep(record)]
    if len(kept) < len(records):
        draft = path.with_name(path.name + ".part")
        draft.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept), encoding="utf-8")
        draft.replace(path)
    return len(records) - len(kept)
