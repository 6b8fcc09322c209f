"""Rows of JSON lines, found by their place in the file and read when they are asked for."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.errors import InvalidDataError

__all__ = ["JsonLinesSource"]

_NEWLINE = 0x0A
_BLANK = b" \t\r\n"
_BLOCK_BYTES = 2**24


class JsonLinesSource:
    """A file with one JSON object per line (blank lines do not count), or with one array of objects.

    Lines are only found at first; what a line holds is read, and checked, when it is asked for. An array is read whole.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._records: list[Any] | None = None
        try:
            with path.open("rb") as file:
                empty = not file.read(1)
                self._map = None if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise InvalidDataError(f"{path} cannot be read: {error.strerror}") from error
        if self._map is not None and self._map[:64].lstrip(_BLANK)[:1] == b"[":
            self._records = self._array()
            return
        self._starts, self._ends, self._numbers = self._lines()

    def __len__(self) -> int:
        return len(self._records) if self._records is not None else len(self._starts)

    def __getitem__(self, number: int) -> dict[str, Any]:
        if self._records is not None:
            record = self._records[number]
        else:
            assert self._map is not None
            try:
                record = json.loads(self._map[self._starts[number] : self._ends[number]].decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                raise InvalidDataError(f"no UTF-8 text: {error}") from error
            except (json.JSONDecodeError, RecursionError) as error:
                raise InvalidDataError(f"not JSON ({error})") from error
        if not isinstance(record, dict):
            raise InvalidDataError(f"a row is an object with columns, not a {type(record).__name__}")
        return record

    def where(self, number: int) -> str:
        """``FILE:LINE``, from 1; ``FILE, row NUMBER``, from 0, of an array."""
        return f"{self.name}, row {number}" if self._records is not None else f"{self.name}:{self._numbers[number]}"

    def _array(self) -> list[Any]:
        assert self._map is not None
        try:
            records = json.loads(self._map[:])
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise InvalidDataError(f"{self.name} begins like an array of rows but is none: {error}") from error
        if not isinstance(records, list):
            raise InvalidDataError(f"{self.name} begins like an array of rows but is none")
        return records

    def _lines(self) -> tuple[list[int], list[int], list[int]]:
        """Where each line that is not blank begins and ends, and its number in the file, from 1."""
        starts, ends, numbers = [], [], []
        start = 0
        for number, end in enumerate(self._line_ends(), start=1):
            assert self._map is not None
            if self._map[start : min(end, start + 64)].strip(_BLANK) or self._map[start:end].strip(_BLANK):
                starts.append(start)
                ends.append(end)
                numbers.append(number)
            start = end + 1
        return starts, ends, numbers

    def _line_ends(self) -> list[int]:
        if self._map is None:
            return []
        size = len(self._map)
        found: list[int] = []
        for offset in range(0, size, _BLOCK_BYTES):
            block = np.frombuffer(self._map[offset : offset + _BLOCK_BYTES], dtype=np.uint8)
            found += (np.flatnonzero(block == _NEWLINE) + offset).tolist()
        return found if self._map[size - 1] == _NEWLINE else [*found, size]
