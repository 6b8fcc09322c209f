"""The one thread that writes a ledger: what is handed over is committed together, in order.

Group commit: while one transaction is brought to the disk the next one gathers, and it gathers for at most
``commit_latency_s``, or until somebody waits for it. A queue that is full is told by :attr:`LedgerWriter.full`; the
handing over itself never waits.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from asyncrl.errors import LedgerError
from asyncrl.ledger import LedgerPosition
from asyncrl.rollout.record import RowRecord, read_records
from buffers.ledger_file import Witness
from buffers.ledger_schema import chain

__all__ = ["Entry", "LedgerWriter", "Rows", "Unfinished"]

_EVENT = "INSERT INTO events (sequence, body, checksum) VALUES (?, ?, ?)"
_ROW = (
    f"INSERT INTO trajectories (slot, attempt, {', '.join(RowRecord.__struct_fields__)}) "  # noqa: S608
    f"VALUES (?, ?{', ?' * len(RowRecord.__struct_fields__)})"
)
_TURNS = "INSERT INTO unfinished (sequence, body) VALUES (?, ?)"
_FORGET = "DELETE FROM unfinished WHERE sequence = ?"
_CLOSE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of an attempt, as :func:`asyncrl.rollout.record.encode_rows` gave them."""

    slot: int
    attempt: int
    content: bytes


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Turns of prompts under way, and of which ones."""

    slots: frozenset[int]
    content: bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """An event's ``body``, the rows or the turns that come with it, and whose turns are needed no more."""

    body: str
    attached: Rows | Unfinished | None = None
    settles: int | None = None

    @property
    def size_bytes(self) -> int:
        return len(self.body) + (len(self.attached.content) if self.attached is not None else 0)


class LedgerWriter:
    """Owns the connection and, unless ``threaded`` is False, a thread. Used by one thread; :meth:`close` ends it.

    Args:
        connection: of :func:`buffers.ledger_file.open_file`.
        witness: told after every commit.
        position: where the ledger ends now.
        commit_latency_s: longest time an entry waits for others to be committed with.
        queue_bytes: from here on :attr:`full` says so.
        on_commit: called after every commit, and once after a failure, in the writer's thread.
        threaded: False commits in :meth:`submit` itself, for programs whose time is not the clock's.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        witness: Witness,
        *,
        position: LedgerPosition,
        commit_latency_s: float,
        queue_bytes: int,
        on_commit: Callable[[], None],
        threaded: bool = True,
    ) -> None:
        self._connection = connection
        self._witness = witness
        self._commit_latency_s = commit_latency_s
        self._queue_bytes = queue_bytes
        self._on_commit = on_commit
        self._changed = threading.Condition()
        self._queue: list[Entry] = []
        self._queued_bytes = 0
        self._hurry = self._closing = False
        self._submitted = position.sequence
        self._position = position
        self._error: BaseException | None = None
        self._events_of: dict[int, set[int]] = {}  # by prompt under way: events whose turns are kept for it
        self._prompts_of: dict[int, set[int]] = {}  # and the other way round
        self.commits = 0
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True) if threaded else None
        if self._thread is not None:
            self._thread.start()

    @property
    def submitted(self) -> int:
        """Sequence number of the newest entry handed over."""
        return self._submitted

    @property
    def position(self) -> LedgerPosition:
        """The end of what is on the disk."""
        return self._position

    @property
    def full(self) -> bool:
        """True while more waits to be written than should."""
        return self._queued_bytes > self._queue_bytes

    def check(self) -> None:
        """Raise :class:`LedgerError` if nothing can be written any more."""
        if self._error is not None:
            raise LedgerError(f"the ledger cannot be written: {self._error}") from self._error

    def submit(self, *entries: Entry) -> None:
        """Hand entries over, to be committed together.

        Raises:
            LedgerError: an earlier one could not be written, or the writer is closed.
        """
        self.check()
        if self._closing:
            raise LedgerError("the ledger is closed")
        with self._changed:
            self._queue += entries
            self._queued_bytes += sum(entry.size_bytes for entry in entries)
            self._submitted += len(entries)
            self._changed.notify()
        if self._thread is None:
            self._commit_all()
            self.check()

    def needs(self, sequence: int, slots: Iterable[int]) -> None:
        """The turns of this event are kept until all these prompts are settled. From outside: before any entry."""
        self._prompts_of[sequence] = set(slots)
        for slot in self._prompts_of[sequence]:
            self._events_of.setdefault(slot, set()).add(sequence)

    def _settle(self, slot: int) -> list[int]:
        """A prompt needs its turns no more; events whose turns nobody needs now."""
        needless = []
        for sequence in sorted(self._events_of.pop(slot, ())):
            self._prompts_of[sequence].discard(slot)
            if not self._prompts_of[sequence]:
                del self._prompts_of[sequence]
                needless.append(sequence)
        return needless

    def hurry(self) -> None:
        """Somebody waits: commit what there is now."""
        with self._changed:
            self._hurry = True
            self._changed.notify()

    def close(self) -> None:
        """Write what is left, end the thread and close the connection (blocks). Idempotent.

        Raises:
            LedgerError: something could not be written.
        """
        if not self._closing:
            with self._changed:
                self._closing = True
                self._changed.notify()
            if self._thread is not None:
                self._thread.join(_CLOSE_TIMEOUT_S)
                if self._thread.is_alive():
                    raise LedgerError(f"the ledger was not written within {_CLOSE_TIMEOUT_S:g} s")
            self._connection.close()
        self.check()

    def _run(self) -> None:
        while self._gather():
            self._commit_all()

    def _gather(self) -> bool:
        """Wait for entries, then for others to come with them; False when there is nothing more to do."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            deadline_s = time.monotonic() + self._commit_latency_s
            while not (self._hurry or self._closing or self.full) and (left_s := deadline_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
            return bool(self._queue)

    def _commit_all(self) -> None:
        with self._changed:
            entries, self._queue = self._queue, []
            self._queued_bytes = 0
            self._hurry = False
        if self._error is None:
            try:
                position = self._commit(entries)
                self._witness.write(position)
                self._position = position
                self.commits += 1
            except BaseException as error:  # noqa: BLE001  it is raised by the next call of whoever writes
                self._error = error
        self._on_commit()

    def _commit(self, entries: list[Entry]) -> LedgerPosition:
        """One transaction: these entries, and nothing or all of them."""
        sequence, checksum = self._position.sequence, self._position.checksum
        events: list[tuple[int, str, int]] = []
        rows: list[tuple[object, ...]] = []
        turns: dict[int, bytes] = {}
        settled: list[tuple[int]] = []
        for entry in entries:
            sequence += 1
            checksum = chain(checksum, sequence, entry.body)
            events.append((sequence, entry.body, checksum))
            attached = entry.attached
            if isinstance(attached, Rows):
                key = (attached.slot, attached.attempt)
                rows += [(*key, *msgspec.structs.astuple(record)) for record in read_records(attached.content)]
            elif attached is not None:
                turns[sequence] = attached.content
                self.needs(sequence, attached.slots)
            if entry.settles is not None:
                needless = self._settle(entry.settles)
                # Told and settled within one commit: never written.
                settled += [(number,) for number in needless if turns.pop(number, None) is None]
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            if rows:
                connection.executemany(_ROW, rows)
            if turns:
                connection.executemany(_TURNS, list(turns.items()))
            if settled:
                connection.executemany(_FORGET, settled)
            connection.executemany(_EVENT, events)
            connection.commit()
        except BaseException:
            connection.rollback()
            raise
        return LedgerPosition(sequence=sequence, checksum=checksum)
