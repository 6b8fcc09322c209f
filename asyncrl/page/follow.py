"""Files of JSON lines that grow: each line is read once, and can be read again by its number."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.telemetry.run_directory import sound_record

MOST_LINE_BYTES = 1 << 24
"""A longer line is damage."""


class LineFollower:
    """Reads the whole lines of a file that another process appends to.

    A file that was replaced or has become shorter, as after a resume, is read again from its beginning:
    :attr:`generation` grows then. Lines that are no JSON objects, or fail their checksum, are counted in
    :attr:`damaged` and left out. Not safe to use from several threads at once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        self._identity: tuple[int, int] | None = None
        self._forget()

    def _forget(self) -> None:
        self.damaged = 0
        self._offset = 0
        self._skipping = False

    def new_records(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Yield what was appended since the last call: the offset and the bytes of each line, and its object.

        An absent file has no lines. Look at :attr:`generation` before the first record: if it has grown, the records
        begin again.
        """
        try:
            file = self.path.open("rb")
        except OSError:
            return
        with file:
            found = os.fstat(file.fileno())
            identity = (found.st_dev, found.st_ino)
            if identity != self._identity or found.st_size < self._offset:
                self.generation += self._identity is not None
                self._identity = identity
                self._forget()
            file.seek(self._offset)
            while line := file.readline(MOST_LINE_BYTES):
                if not line.endswith(b"\n"):
                    if len(line) < MOST_LINE_BYTES:
                        return  # it is being written
                    self.damaged += not self._skipping
                    self._skipping = True
                    self._offset += len(line)
                    continue
                at, self._offset = self._offset, self._offset + len(line)
                if self._skipping:  # the end of a line that was too long
                    self._skipping = False
                    continue
                record = sound_record(line)
                if record is not None:
                    yield at, len(line), record
                elif line.strip():
                    self.damaged += 1

    def record_at(self, offset: int, size: int) -> dict[str, Any] | None:
        """Read one line again; None if it is not there any more."""
        try:
            with self.path.open("rb") as file:
                file.seek(offset)
                return sound_record(file.read(size))
        except OSError:
            return None


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if it is absent or damaged."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
