"""The file of a ledger: SQLite in WAL mode, a witness file beside it, and what can be read of a damaged one.

    ledger.sqlite           the tables below; with -wal and -shm beside it while it is open
    ledger.sqlite-witness   the end of the ledger (sequence and checksum), in two alternating slots with a checksum each

SQLite's pages carry no checksums, and a write-ahead log that is cut or changed ends silently at its last intact
frame. So events form a chain of checksums, each completed group carries the digest of its rows, and the witness,
written after every commit, records how far the chain must reach. :func:`read` reports every damage; the events before
it can be trusted. A flipped bit in a byte without meaning (of a freed page) changes nothing and is not reported.

``events``        every event in order, never changed. ``body`` is the event as JSON (:mod:`asyncrl.ledger`); ``kind``,
                  ``group_id`` and ``step`` are read from it. ``checksum`` is the XXH3-64 of sequence and body, seeded
                  with the checksum of the event before: a line that is changed, lost or moved breaks the chain.
``trajectories``  the rows of completed attempts (columns: :class:`asyncrl.rollout.trajectory.RowRecord`); the
                  ``digest`` in the ``completed`` event is the XXH3-64 of all rows of the group, encoded.
``unfinished``    turns of running groups (``body``: :func:`asyncrl.rollout.turns.encode_turns`), by the number of their
                  ``turns_appended`` event, whose ``digest`` is the XXH3-64 of the body. A line is deleted when the last
                  of its groups has ended.
``groups``        view: the state of each group now, and where and when it was used.
``rows``          view: ``trajectories`` of the attempts that count, with the state of their group.
``turns``         view: one line for each sampled turn of ``rows``.
``sampled_turns`` view: one line for each turn that was recorded when it ended, even if its attempt failed later.
``batches``       view: the groups that each step trained on, in order (``use`` > 0: not for the first time).

    sqlite3 "file:RUN/ledger.sqlite?mode=ro" "SELECT state, count(*) FROM groups GROUP BY state"
    sqlite3 "file:RUN/ledger.sqlite?mode=ro" "SELECT step, avg(reward) FROM rows GROUP BY step"
    sqlite3 "file:RUN/ledger.sqlite?mode=ro" "SELECT message FROM turns WHERE group_id = 7 AND row = 0"

All processes that have the file open while it is written must be on one host, which SQLite requires of this mode.

Conditions on ``rows`` select batches: :func:`buffers.ledger_query.query`, or ``query`` of a ledger or a replay buffer.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from asyncrl.errors import LedgerError
from asyncrl.io import DurableFiles
from asyncrl.ledger import LedgerEvent, LedgerPosition
from asyncrl.rollout.trajectory import RowRecord, write_records

FORMAT = 4
"""``PRAGMA user_version`` of a file with these tables."""

_BATCHES = """\
CREATE VIEW batches AS
  WITH resumed AS MATERIALIZED (SELECT sequence, step FROM events WHERE kind = 'resumed')
  SELECT e.step, json_extract(e.body, '$.position') AS position, e.group_id,
         row_number() OVER (PARTITION BY e.group_id ORDER BY e.sequence) - 1 AS use, e.sequence
  FROM events e
  WHERE e.kind IN ('consumed', 'reused')
    AND NOT EXISTS (SELECT 1 FROM resumed r WHERE r.sequence > e.sequence AND r.step < e.step)"""

SCHEMA = f"""
CREATE TABLE events (
  sequence INTEGER PRIMARY KEY,
  body TEXT NOT NULL,
  checksum INTEGER NOT NULL,
  kind TEXT GENERATED ALWAYS AS (json_extract(body, '$.type')) VIRTUAL,
  group_id INTEGER GENERATED ALWAYS AS (json_extract(body, '$.group_id')) VIRTUAL,
  step INTEGER GENERATED ALWAYS AS (json_extract(body, '$.step')) VIRTUAL
) STRICT;

CREATE TABLE trajectories (
  group_id INTEGER NOT NULL,
  attempt INTEGER NOT NULL,
  row INTEGER NOT NULL,
  reward REAL NOT NULL,
  finish_reason TEXT NOT NULL,
  tokens INTEGER NOT NULL,
  oldest_version INTEGER NOT NULL,
  newest_version INTEGER NOT NULL,
  turns TEXT NOT NULL,
  spans TEXT NOT NULL,
  task TEXT NOT NULL,
  info BLOB NOT NULL,
  input_ids BLOB NOT NULL,
  log_probs BLOB NOT NULL,
  PRIMARY KEY (group_id, attempt, row)
) STRICT;

CREATE TABLE unfinished (
  sequence INTEGER PRIMARY KEY,
  body BLOB NOT NULL
) STRICT;

{_BATCHES};

CREATE VIEW groups AS
  WITH result AS (
    SELECT group_id, max(sequence) AS sequence FROM events WHERE kind IN ('completed', 'attempt_lost') GROUP BY group_id
  ), ended AS (
    SELECT group_id, max(sequence) AS sequence FROM events WHERE kind IN ('dropped', 'group_failed') GROUP BY group_id
  ), attempts AS (
    SELECT group_id, max(sequence) AS sequence FROM events WHERE kind = 'dispatched' GROUP BY group_id
  )
  SELECT i.group_id,
         CASE WHEN d.kind = 'group_failed' THEN 'failed'
              WHEN d.kind = 'dropped' THEN 'dropped'
              WHEN b.step <= (SELECT step FROM events WHERE kind IN ('committed', 'resumed', 'rebased')
                              ORDER BY sequence DESC LIMIT 1)
                THEN 'committed'
              WHEN b.step IS NOT NULL THEN 'consumed'
              WHEN c.kind = 'completed' THEN 'completed'
              WHEN u.kind = 'dispatched' AND u.sequence > coalesce(c.sequence, 0)
                AND u.sequence > (SELECT coalesce(max(sequence), 0) FROM events WHERE kind = 'resumed')
                THEN 'dispatched'
              ELSE 'issued' END AS state,
         coalesce(json_extract(d.body, '$.reason'), json_extract(d.body, '$.failure')) AS reason,
         CASE WHEN c.kind = 'completed' THEN json_extract(c.body, '$.attempt') END AS attempt,
         b.step, b.position
  FROM events i
  LEFT JOIN result ON result.group_id = i.group_id LEFT JOIN events c ON c.sequence = result.sequence
  LEFT JOIN ended ON ended.group_id = i.group_id LEFT JOIN events d ON d.sequence = ended.sequence
  LEFT JOIN attempts ON attempts.group_id = i.group_id LEFT JOIN events u ON u.sequence = attempts.sequence
  LEFT JOIN batches b ON b.group_id = i.group_id AND b.use = 0
  WHERE i.kind = 'issued';

CREATE VIEW rows AS
  SELECT t.*, p.state, p.step, p.position
  FROM groups p JOIN trajectories t ON t.group_id = p.group_id AND t.attempt = p.attempt;

CREATE VIEW turns AS
  SELECT r.group_id, r.row, r.attempt, j.key AS turn, json_extract(j.value, '$[0]') AS first_token,
         json_extract(j.value, '$[1]') AS end_token, json_extract(j.value, '$[2]') AS finish_reason,
         json_extract(j.value, '$[3]') AS message
  FROM rows r, json_each(r.turns) j;

CREATE VIEW sampled_turns AS
  SELECT e.sequence, json_extract(j.value, '$[0]') AS group_id, json_extract(j.value, '$[1]') AS attempt,
         json_extract(j.value, '$[2]') AS row, json_extract(j.value, '$[3]') AS turn,
         json_extract(j.value, '$[4]') AS tokens
  FROM events e, json_each(e.body, '$.turns') j WHERE e.kind = 'turns_appended';
"""  # noqa: S608  of constants


_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[LedgerEvent] = msgspec.json.Decoder(LedgerEvent)


def encode_event(event: LedgerEvent) -> str:
    return _ENCODER.encode(event).decode()


def digest(content: bytes, *, seed: int = 0) -> int:
    """Return the XXH3-64 as a signed integer, as SQLite stores them."""
    return int.from_bytes(xxhash.xxh3_64_digest(content, seed=seed % 2**64), "big", signed=True)


def chain(before: int, sequence: int, body: str) -> int:
    """Return the ``checksum`` of an event, given that of the event before (0 for the first)."""
    return digest(sequence.to_bytes(8, "little") + body.encode(), seed=before)


Connect = Callable[..., sqlite3.Connection]
"""``sqlite3.connect``, or a replacement for it."""

_SUFFIXES = ("-wal", "-shm", "-witness", "")
"""Of a ledger's files; the ledger itself last: until it is moved or removed, the ledger exists."""
_SLOT = struct.Struct("<QqQ")
_ROW_COLUMNS = ", ".join(RowRecord.__struct_fields__)


class Witness:
    """Records how far a ledger reached, in a file of its own."""

    def __init__(self, ledger: Path, *, files: DurableFiles) -> None:
        self._path = ledger.with_name(ledger.name + "-witness")
        self._files = files

    def create(self) -> None:
        self._files.write(self._path, self._slot(LedgerPosition()) * 2)

    def write(self, position: LedgerPosition) -> None:
        """Record that the ledger is committed up to here. The other slot stays, in case this write is cut short."""
        self._files.overwrite(self._path, self._slot(position), position=position.sequence % 2 * _SLOT.size)

    def read(self) -> tuple[LedgerPosition | None, bool]:
        """Return the farthest position that can be read (None if none can), and whether both slots are intact."""
        try:
            content = self._path.read_bytes()
        except OSError:
            return None, False
        found: list[LedgerPosition] = []
        for start in range(0, len(content) - _SLOT.size + 1, _SLOT.size):
            slot = content[start : start + _SLOT.size]
            sequence, checksum, _ = _SLOT.unpack(slot)
            position = LedgerPosition(sequence=sequence, checksum=checksum)
            if slot == self._slot(position):
                found.append(position)
        intact = len(content) == 2 * _SLOT.size and len(found) == 2
        return max(found, key=lambda position: position.sequence, default=None), intact

    @staticmethod
    def _slot(position: LedgerPosition) -> bytes:
        seal = xxhash.xxh3_64_intdigest(struct.pack("<Qq", position.sequence, position.checksum))
        return _SLOT.pack(position.sequence, position.checksum, seal)


@dataclass(frozen=True, slots=True)
class Contents:
    """The ``events`` of a file that can be trusted, from the first on, their checksums, and the damage in words."""

    events: tuple[LedgerEvent, ...] = ()
    checksums: tuple[int, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def end(self) -> LedgerPosition:
        return LedgerPosition(sequence=len(self.events), checksum=self.checksums[-1] if self.checksums else 0)

    def reaches(self, position: LedgerPosition) -> bool:
        if position.sequence == 0:
            return True
        return position.sequence <= len(self.events) and self.checksums[position.sequence - 1] == position.checksum


def open_file(path: Path, *, connect: Connect, fsync: str) -> sqlite3.Connection:
    """Open a connection that writes; create the tables in a new file.

    Raises:
        LedgerError: the file has another format.
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
            raise LedgerError(f"{path} is a ledger of format {version}; this version reads format {FORMAT}")
        elif not connection.execute("SELECT 1 FROM sqlite_master WHERE sql = ?", (_BATCHES,)).fetchone():
            # An earlier version's view takes time that grows with the square of the run.
            connection.executescript(f"BEGIN; DROP VIEW IF EXISTS batches; {_BATCHES}; COMMIT;")
    except BaseException:
        connection.close()
        raise
    return connection


def read(path: Path, *, witness: Witness, connect: Connect) -> Contents:
    """Return every event that can be trusted, and what is wrong with the others."""
    expected, intact = witness.read()  # first: a process that writes the ledger is never behind it
    events: list[LedgerEvent] = []
    checksums: list[int] = []
    problems: list[str] = []
    try:
        with closing(connect(path, isolation_level=None)) as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version != FORMAT:
                problems.append(f"format {version}, not {FORMAT}")
            before = 0
            lines = connection.execute("SELECT sequence, body, checksum FROM events ORDER BY sequence")
            for sequence, body, checksum in lines:
                if sequence != len(events) + 1:
                    problems.append(f"event {len(events) + 1} is missing")
                    break
                if checksum != chain(before, sequence, body):
                    problems.append(f"event {sequence} is not what was written")
                    break
                events.append(_DECODER.decode(body))
                checksums.append(checksum)
                before = checksum
            if not problems:
                checks = connection.execute("PRAGMA integrity_check(3)")
                problems += [f"SQLite: {line}" for (line,) in checks if line != "ok"]
    except (sqlite3.DatabaseError, msgspec.MsgspecError, UnicodeError, TypeError, OverflowError) as error:
        problems.append(f"{type(error).__name__}: {error}")
    if not intact:
        problems.append("the witness cannot be read")
    if expected is not None and expected.sequence > len(events):
        problems.append(f"it ends after event {len(events)} and had {expected.sequence}")
    return Contents(tuple(events), tuple(checksums), tuple(problems))


def read_rows(connection: sqlite3.Connection, *, group_id: int, attempt: int, expected: int) -> bytes | None:
    """Return the rows of a completed attempt as they were appended; None if their digest is not ``expected``."""
    try:
        lines = connection.execute(
            f"SELECT {_ROW_COLUMNS} FROM trajectories WHERE group_id = ? AND attempt = ? ORDER BY row",  # noqa: S608
            (group_id, attempt),
        ).fetchall()
        rows = write_records([RowRecord(**dict(zip(RowRecord.__struct_fields__, line, strict=True))) for line in lines])
    except (sqlite3.DatabaseError, UnicodeError, TypeError, OverflowError):
        return None
    return rows if digest(rows) == expected else None


def read_turns(connection: sqlite3.Connection, sequence: int, *, expected: int) -> bytes | None:
    """Return the turns of event ``sequence`` as they were appended; None if their digest is not ``expected``."""
    try:
        line = connection.execute("SELECT body FROM unfinished WHERE sequence = ?", (sequence,)).fetchone()
    except sqlite3.DatabaseError:
        return None
    return line[0] if line is not None and digest(line[0]) == expected else None


def set_aside(path: Path, *, files: DurableFiles) -> Path:
    """Rename a damaged ledger with all its files; return the new path."""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    for suffix in _SUFFIXES:
        part = path.with_name(path.name + suffix)
        if part.exists():
            files.rename(part, aside.with_name(aside.name + suffix))
    return aside


def remove(path: Path) -> None:
    for suffix in _SUFFIXES:
        path.with_name(path.name + suffix).unlink(missing_ok=True)
