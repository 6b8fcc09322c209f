"""The file of a ledger: SQLite in WAL mode, its witness beside it, and what can be read of it when it was damaged.

    ledger.sqlite           tables of ``buffers/ledger_schema.py``; with -wal and -shm beside it while it is open
    ledger.sqlite-witness   the end of the ledger (sequence and checksum), twice in turn, each with its own checksum

SQLite's pages carry no checksums, and a write-ahead log that is cut or changed ends silently at the last frame that is
whole. So events form a chain of checksums, each completed group carries the digest of its rows, and the witness,
written after every commit, says how far the chain must reach. Whatever is wrong is told by :func:`read`; the events
before it are good. A flipped bit in a byte that means nothing (a freed page) changes nothing and is not told.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from asyncrl.durable import DurableFiles
from asyncrl.errors import CodecError, LedgerError
from asyncrl.ledger import LedgerEvent, LedgerPosition
from asyncrl.rollout.record import RowRecord, write_records
from buffers.ledger_schema import FORMAT, SCHEMA, chain, decode_event, digest

__all__ = ["Connect", "Contents", "Witness", "discard", "open_file", "read", "read_rows", "read_turns", "set_aside"]

Connect = Callable[..., sqlite3.Connection]
"""``sqlite3.connect``, or what stands in for it."""

_SUFFIXES = ("-wal", "-shm", "-witness", "")
"""Of a ledger's files; the ledger itself last: until then it is still the ledger."""
_SLOT = struct.Struct("<QqQ")
_ROW_COLUMNS = ", ".join(RowRecord.__struct_fields__)


class Witness:
    """Says how far a ledger reached, from outside of it."""

    def __init__(self, ledger: Path, *, files: DurableFiles) -> None:
        self._path = ledger.with_name(ledger.name + "-witness")
        self._files = files

    def create(self) -> None:
        """Begin anew, at the beginning of a ledger."""
        self._files.write(self._path, self._line(LedgerPosition()) * 2)

    def write(self, position: LedgerPosition) -> None:
        """The ledger is committed up to here. The line before stays, in case this one is cut short."""
        self._files.overwrite(self._path, self._line(position), position=position.sequence % 2 * _SLOT.size)

    def read(self) -> LedgerPosition | None:
        """The farthest position that was written; None if none can be read."""
        try:
            content = self._path.read_bytes()
        except OSError:
            return None
        found = []
        for start in range(0, len(content) - _SLOT.size + 1, _SLOT.size):
            sequence, checksum, seal = _SLOT.unpack_from(content, start)
            if seal == _seal(sequence, checksum):
                found.append(LedgerPosition(sequence=sequence, checksum=checksum))
        return max(found, key=lambda position: position.sequence, default=None)

    def is_whole(self) -> bool:
        """True if both lines are as they were written."""
        try:
            content = self._path.read_bytes()
        except OSError:
            return False
        lines = [content[: _SLOT.size], content[_SLOT.size :]]
        return all(len(line) == _SLOT.size and _unpacked(line) is not None for line in lines)

    def _line(self, position: LedgerPosition) -> bytes:
        return _SLOT.pack(position.sequence, position.checksum, _seal(position.sequence, position.checksum))


def _seal(sequence: int, checksum: int) -> int:
    return xxhash.xxh3_64_intdigest(struct.pack("<Qq", sequence, checksum))


def _unpacked(line: bytes) -> LedgerPosition | None:
    sequence, checksum, seal = _SLOT.unpack(line)
    return LedgerPosition(sequence=sequence, checksum=checksum) if seal == _seal(sequence, checksum) else None


@dataclass(frozen=True, slots=True)
class Contents:
    """What a file holds.

    Attributes:
        events: those that can be trusted, from the first on.
        checksums: theirs.
        problems: what is wrong, in words; empty for a whole ledger.
    """

    events: tuple[LedgerEvent, ...]
    checksums: tuple[int, ...]
    problems: tuple[str, ...]

    @property
    def end(self) -> LedgerPosition:
        """Where the good events end."""
        return LedgerPosition(sequence=len(self.events), checksum=self.checksums[-1] if self.checksums else 0)

    def reaches(self, position: LedgerPosition) -> bool:
        """True if the ledger has been at ``position``."""
        if position.sequence == 0:
            return True
        return position.sequence <= len(self.events) and self.checksums[position.sequence - 1] == position.checksum


def open_file(path: Path, *, connect: Connect, fsync: str) -> sqlite3.Connection:
    """A connection that writes; tables are made in a new file.

    Raises:
        LedgerError: the file is of another kind.
    """
    connection = connect(path, isolation_level=None, check_same_thread=False)
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            connection.execute("PRAGMA page_size = 8192")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = " + ("FULL" if fsync == "commit" else "NORMAL"))
        connection.execute("PRAGMA wal_autocheckpoint = 4096")
        connection.execute("PRAGMA cache_size = -8000")
        if version == 0:
            connection.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {FORMAT}; COMMIT;")
        elif version != FORMAT:
            raise LedgerError(f"{path} is a ledger of format {version}; this version knows format {FORMAT}")
    except BaseException:
        connection.close()
        raise
    return connection


def read(path: Path, *, witness: Witness, connect: Connect) -> Contents:
    """Every event that can be trusted, and what is wrong with the rest."""
    events: list[LedgerEvent] = []
    checksums: list[int] = []
    problems: list[str] = []
    try:
        connection = connect(path, isolation_level=None)
        try:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version != FORMAT:
                problems.append(f"format {version}, not {FORMAT}")
            before = 0
            for sequence, body, checksum in connection.execute(
                "SELECT sequence, body, checksum FROM events ORDER BY sequence"
            ):
                if sequence != len(events) + 1:
                    problems.append(f"event {len(events) + 1} is missing")
                    break
                if checksum != chain(before, sequence, body):
                    problems.append(f"event {sequence} is not what was written")
                    break
                events.append(decode_event(body))
                checksums.append(checksum)
                before = checksum
            if not problems:
                problems += [
                    f"SQLite: {line}" for (line,) in connection.execute("PRAGMA integrity_check(3)") if line != "ok"
                ]
        finally:
            connection.close()
    except (sqlite3.DatabaseError, CodecError, UnicodeError, TypeError, OverflowError) as error:
        problems.append(f"{type(error).__name__}: {error}")
    expected = witness.read()
    if expected is None or not witness.is_whole():
        problems.append("the witness cannot be read")
    if expected is not None and expected.sequence > len(events):
        problems.append(f"it ends after event {len(events)} and had {expected.sequence}")
    return Contents(tuple(events), tuple(checksums), tuple(problems))


def read_rows(connection: sqlite3.Connection, *, slot: int, attempt: int, expected: int) -> bytes | None:
    """The rows of a completed attempt as they were handed over; None if they are not what ``expected`` digests."""
    try:
        lines = connection.execute(
            f"SELECT {_ROW_COLUMNS} FROM trajectories WHERE slot = ? AND attempt = ? ORDER BY row",  # noqa: S608
            (slot, attempt),
        ).fetchall()
        rows = write_records([RowRecord(**dict(zip(RowRecord.__struct_fields__, line, strict=True))) for line in lines])
    except (sqlite3.DatabaseError, UnicodeError, TypeError, OverflowError):
        return None
    return rows if digest(rows) == expected else None


def read_turns(connection: sqlite3.Connection, sequence: int, *, expected: int) -> bytes | None:
    """The turns of event ``sequence`` as they were handed over; None if they are not what ``expected`` digests."""
    try:
        line = connection.execute("SELECT body FROM unfinished WHERE sequence = ?", (sequence,)).fetchone()
    except sqlite3.DatabaseError:
        return None
    return line[0] if line is not None and digest(line[0]) == expected else None


def set_aside(path: Path, *, files: DurableFiles) -> Path:
    """Give a damaged ledger another name, with all its files; returns it."""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    for suffix in _SUFFIXES:
        part = path.with_name(path.name + suffix)
        if part.exists():
            files.rename(part, aside.with_name(aside.name + suffix))
    return aside


def discard(path: Path) -> None:
    """Remove what there is of a ledger that nobody relies on."""
    for suffix in _SUFFIXES:
        path.with_name(path.name + suffix).unlink(missing_ok=True)
