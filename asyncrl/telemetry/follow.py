"""Files of JSON lines that grow: each line is read once, and can be read again by its number."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from asyncrl.telemetry.run_directory import sound_record

_Record = TypeVar("_Record")
_Form = TypeVar("_Form")

MOST_LINE_BYTES = 1 << 24
"""A longer line is damage."""


class LineFollower(Generic[_Record]):
    """Reads the whole lines of a file that another process appends to.

    A file that was replaced or has become shorter, as after a resume, is read again from its beginning: ``again`` is
    called before. ``read`` makes a record of a line, or returns None for a damaged one, which is counted in
    :attr:`damaged` and left out. Not safe to use from several threads at once.
    """

    def __init__(
        self, path: Path, read: Callable[[bytes], _Record | None], *, again: Callable[[], None] = lambda: None
    ) -> None:
        self.path = path
        self._read = read
        self._again = again
        self._identity: tuple[int, int] | None = None
        self._forget()

    def _forget(self) -> None:
        self.damaged = 0
        self._offset = 0
        self._skipping = False

    def new_records(self) -> Iterator[tuple[int, int, _Record]]:
        """Yield what was appended since the last call: the offset and the bytes of each line, and its record.

        An absent file has no lines.
        """
        try:
            file = self.path.open("rb")
        except OSError:
            return
        with file:
            found = os.fstat(file.fileno())
            identity = (found.st_dev, found.st_ino)
            if identity != self._identity or found.st_size < self._offset:
                if self._identity is not None:
                    self._again()
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
                record = self._read(line)
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


def read_form(path: Path, form: type[_Form]) -> _Form | None:
    """Return the JSON object in a file as a ``form`` of msgspec; None if it is absent, damaged, or of another shape."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=form)
    except (OSError, ValueError, RecursionError):
        return None
