"""The ledger of a run: every group from issue to use, on disk, with the rows that were sampled for it.

:mod:`buffers.ledger_state` decides at once and in memory which events are legal. The thread of :class:`LedgerWriter`
commits them in groups, in the order in which they were appended, so a crash leaves a state that the run was really
in. When the run is resumed, :mod:`buffers.ledger_store` finds what the file still holds and
:mod:`buffers.ledger_query` reads its history.

What a crash can lose:

    death of the process    events of the last ``commit_latency_s``; their groups are dispatched again
    death of the machine    the same with ``fsync = "commit"``; with ``"checkpoint"`` the events since the run's last
                            checkpoint, which syncs the ledger too
    a damaged file          the events after the damage, which is detected and reported when the run is resumed
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import msgspec

from asyncrl.data import DataProto
from asyncrl.errors import InvalidDataError, LedgerError
from asyncrl.io import DurableFiles, written_when_there_is_room
from asyncrl.ledger import (
    AttemptLost,
    Completed,
    Dropped,
    GroupFailed,
    Issued,
    LedgerArchive,
    LedgerBase,
    LedgerEvent,
    LedgerPosition,
    LedgerStatistics,
    Rebased,
    RecordedGroup,
    Recovered,
    Resumed,
    TurnsAppended,
)
from asyncrl.rollout.trajectory import RowRecord, read_records
from buffers.ledger_query import History, SQLiteLedgerArchive, query
from buffers.ledger_state import GroupState, LedgerState
from buffers.ledger_store import (
    Connect,
    Contents,
    Witness,
    chain,
    digest,
    encode_event,
    open_file,
    read,
    read_rows,
    read_turns,
    remove,
    set_aside,
)

_EVENT = "INSERT INTO events (sequence, body, checksum) VALUES (?, ?, ?)"
_ROW = (
    f"INSERT INTO trajectories (group_id, attempt, {', '.join(RowRecord.__struct_fields__)}) "  # noqa: S608
    f"VALUES (?, ?{', ?' * len(RowRecord.__struct_fields__)})"
)
_TURNS = "INSERT INTO unfinished (sequence, body) VALUES (?, ?)"
_DELETE_TURNS = "DELETE FROM unfinished WHERE sequence = ?"
_CLOSE_TIMEOUT_S = 60.0
_QUEUE_BYTES = 1 << 26


# ------------------------------------------------------------------------------------------------------------ writer


@dataclass(frozen=True, slots=True)
class Entry:
    """An event to write, encoded as ``body``, and the encoded rows or turns that are recorded with it."""

    event: LedgerEvent
    body: str
    content: bytes = b""

    @classmethod
    def of(cls, event: LedgerEvent, content: bytes | None = None) -> Self:
        return cls(event, encode_event(event), content or b"")


class LedgerWriter:
    """Commits entries in the order in which they were submitted, in a thread unless ``threaded`` is False.

    While one transaction is brought to disk, the next one gathers entries, for at most ``commit_latency_s`` or until a
    caller waits for it. All methods are called from one thread, and never wait, except :meth:`close`.

    Args:
        path: of the file, for messages.
        connection: of :func:`buffers.ledger_store.open_file`; owned by the writer.
        witness: written after every commit.
        position: the present end of the ledger.
        queue_bytes: size of the queue above which :attr:`full` is True.
        on_commit: called after every commit, and once after a failure, in the writer's thread.
        threaded: False commits in :meth:`submit` itself, for programs with a simulated clock.
    """

    def __init__(
        self,
        path: Path,
        connection: sqlite3.Connection,
        witness: Witness,
        *,
        position: LedgerPosition,
        commit_latency_s: float,
        queue_bytes: int,
        on_commit: Callable[[], None],
        threaded: bool = True,
    ) -> None:
        self._path = path
        self._connection = connection
        self._witness = witness
        self._commit_latency_s = commit_latency_s
        self._queue_bytes = queue_bytes
        self._on_commit = on_commit
        self._changed = threading.Condition()
        self._queue: list[Entry] = []
        self._queued_bytes = 0
        self._hurry = self._closing = False
        self.submitted = position.sequence
        """Sequence number of the newest entry."""
        self.position = position
        """The end of what is committed."""
        self.commits = 0
        self._error: BaseException | None = None
        self._events_of: dict[int, set[int]] = {}
        """By running group, the events whose turns are kept for it."""
        self._groups_of: dict[int, set[int]] = {}
        """By event, the running groups in it."""
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True) if threaded else None
        if self._thread is not None:
            self._thread.start()

    @property
    def full(self) -> bool:
        return self._queued_bytes > self._queue_bytes

    def check(self) -> None:
        """Raise :class:`LedgerError` if an entry could not be written."""
        if self._error is not None:
            raise LedgerError(f"the ledger cannot be written: {self._error}") from self._error

    def submit(self, *entries: Entry) -> None:
        """Queue entries that are to be committed in one transaction.

        Raises:
            LedgerError: an earlier entry could not be written, or the writer is closed.
        """
        self.check()
        if self._closing:
            raise LedgerError("the ledger is closed")
        with self._changed:
            self._queue += entries
            self._queued_bytes += sum(len(entry.body) + len(entry.content) for entry in entries)
            self.submitted += len(entries)
            self._changed.notify()
        if self._thread is None:
            self._commit_all()
            self.check()

    def hurry(self) -> None:
        """Commit what is queued now, because a caller waits for it."""
        with self._changed:
            self._hurry = True
            self._changed.notify()

    def close(self) -> None:
        """Write what is queued, end the thread and close the connection. Blocks. Idempotent.

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

    def keep_turns(self, sequence: int, group_ids: Iterable[int]) -> None:
        """Keep the turns of this event until all these groups have ended. External calls precede the first entry."""
        self._groups_of[sequence] = set(group_ids)
        for group_id in self._groups_of[sequence]:
            self._events_of.setdefault(group_id, set()).add(sequence)

    def _end_group(self, group_id: int) -> list[int]:
        """Return the events whose turns are no longer needed once the group has ended."""
        unneeded: list[int] = []
        for sequence in sorted(self._events_of.pop(group_id, ())):
            self._groups_of[sequence].discard(group_id)
            if not self._groups_of[sequence]:
                del self._groups_of[sequence]
                unneeded.append(sequence)
        return unneeded

    def _run(self) -> None:
        while self._gather():
            self._commit_all()

    def _gather(self) -> bool:
        """Wait for entries, then for more to commit with them; return False when the writer is closed and done."""
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
                self._commit(entries)
                self.commits += 1
            except BaseException as error:  # noqa: BLE001  raised by the next call of the submitting thread
                self._error = error
        self._on_commit()

    def _commit(self, entries: list[Entry]) -> None:
        sequence, checksum = self.position.sequence, self.position.checksum
        events: list[tuple[int, str, int]] = []
        rows: list[tuple[object, ...]] = []
        turns: dict[int, bytes] = {}
        deleted: list[tuple[int]] = []
        for entry in entries:
            sequence += 1
            checksum = chain(checksum, sequence, entry.body)
            events.append((sequence, entry.body, checksum))
            event = entry.event
            if isinstance(event, Completed) and entry.content:
                key = (event.group_id, event.attempt)
                rows += [(*key, *msgspec.structs.astuple(record)) for record in read_records(entry.content)]
            elif isinstance(event, TurnsAppended) and entry.content:
                turns[sequence] = entry.content
                self.keep_turns(sequence, {turn.group_id for turn in event.turns})
            if isinstance(event, Completed | Dropped | GroupFailed):
                # Turns that are appended and no longer needed within one commit are never written.
                unneeded = self._end_group(event.group_id)
                deleted += [(number,) for number in unneeded if turns.pop(number, None) is None]
        position = LedgerPosition(sequence=sequence, checksum=checksum)
        statements = ((_ROW, rows), (_TURNS, list(turns.items())), (_DELETE_TURNS, deleted), (_EVENT, events))
        for write in (partial(self._transact, statements), partial(self._witness.write, position)):
            written_when_there_is_room(write, path=self._path, ends=self._ends)
        self.position = position

    def _transact(self, statements: Iterable[tuple[str, Sequence[Sequence[object]]]]) -> None:
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statement, lines in statements:
                if lines:
                    connection.executemany(statement, lines)
            connection.commit()
        except BaseException:
            connection.rollback()
            raise

    def _ends(self, timeout_s: float) -> bool:
        """Wait for room on the disk, in the writer's own thread alone; return whether that is over."""
        with self._changed:
            return self._thread is None or self._changed.wait_for(lambda: self._closing, timeout_s)


# ------------------------------------------------------------------------------------------------------------ ledger


class SQLiteLedger:
    """Implements :class:`asyncrl.ledger.Ledger` in one SQLite file. Used from one event loop.

    Args:
        path: the file.
        resume: None creates the file, which must not exist; the :class:`LedgerBase` of a checkpoint resumes from it
            (see :attr:`recovered`), also if the file is damaged or absent.
        commit_latency_s: longest time that an event waits for others to be committed with it.
        fsync: ``commit`` syncs every commit to disk (survives the machine), ``checkpoint`` leaves that to the operating
            system until :meth:`durable` is awaited (survives the process).
        queue_bytes: size of the queue of unwritten events above which :meth:`room` waits.
        threaded: False commits inside :meth:`append`.
        connect, files: ``sqlite3.connect`` and file operations, or replacements.

    Raises:
        LedgerError: the file exists already, cannot be opened, or has another format.
    """

    def __init__(
        self,
        path: Path,
        *,
        resume: LedgerBase | None = None,
        commit_latency_s: float = 0.2,
        fsync: Literal["commit", "checkpoint"] = "commit",
        queue_bytes: int = _QUEUE_BYTES,
        threaded: bool = True,
        connect: Connect = sqlite3.connect,
        files: DurableFiles | None = None,
    ) -> None:
        self._path = path
        self._files = files or DurableFiles()
        self._connect = connect
        self._fsync = fsync
        self._witness = Witness(path, files=self._files)
        self._state = LedgerState()
        self._waiters: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self.recovered: Recovered | None = None
        contents = Contents()
        notes: tuple[str, ...] = ()
        if resume is not None:
            contents, notes = self._salvage(resume)
        elif path.exists():
            raise LedgerError(f"{path} exists already: a run begins with a ledger of its own")
        else:
            self._witness.create()
        try:
            self._connection = open_file(path, connect=connect, fsync=fsync)
        except sqlite3.Error as error:
            raise LedgerError(f"{path} cannot be opened: {error}") from error
        self._writer = LedgerWriter(
            path,
            self._connection,
            self._witness,
            position=contents.end,
            commit_latency_s=commit_latency_s,
            queue_bytes=queue_bytes,
            on_commit=self._committed,
            threaded=threaded,
        )
        if resume is not None:
            try:
                self.recovered = self._recover(resume, contents, notes)
            except BaseException:
                self._writer.close()
                raise

    @classmethod
    def archive(cls, path: Path) -> LedgerArchive:
        return SQLiteLedgerArchive(path)

    def append(self, event: LedgerEvent, *more: LedgerEvent, rows: bytes | None = None) -> bool:
        self._writer.check()
        recorded: LedgerEvent = event
        # Late and duplicate turns are not written, so that readers of the file need not recognise them.
        if isinstance(event, TurnsAppended):
            recorded = self._state.without_superseded(event)
        if rows is not None:
            if not isinstance(recorded, Completed | TurnsAppended):
                raise InvalidDataError(f"only completed groups and turns have rows, not {type(event).__name__}")
            recorded = msgspec.structs.replace(recorded, digest=digest(rows))
        entries = [Entry.of(recorded, rows)] if self._state.apply(event) else []
        entries += [Entry.of(other) for other in more if self._state.apply(other)]
        if entries:
            self._writer.submit(*entries)
        return len(entries) == 1 + len(more)

    async def room(self) -> None:
        await self._until(lambda: not self._writer.full)

    async def durable(self) -> LedgerPosition:
        wanted = self._writer.submitted
        if self._writer.position.sequence < wanted:
            self._writer.hurry()
            await self._until(lambda: self._writer.position.sequence >= wanted)
        position = self._writer.position  # events that are appended while the files are synced may not be on disk
        if self._fsync == "checkpoint":
            for path in (self._path.with_name(self._path.name + "-wal"), self._path):
                if path.exists():
                    await asyncio.to_thread(self._files.sync, path)
        return position

    def copy(self, path: Path) -> None:
        witness = Witness(path, files=self._files)
        witness.create()
        newest = "SELECT sequence, checksum FROM events ORDER BY sequence DESC LIMIT 1"
        try:
            with closing(self._connect(self._path)) as source, closing(self._connect(path)) as target:
                source.backup(target)  # of one moment: it reads in one transaction
                last = target.execute(newest).fetchone()
        except sqlite3.Error as error:
            raise OSError(f"{path} cannot be written: {error}") from error
        if last is not None:
            witness.write(LedgerPosition(sequence=last[0], checksum=last[1]))

    async def _until(self, condition: Callable[[], bool]) -> None:
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        self._waiters.add((loop, changed))
        try:
            while not condition():
                self._writer.check()
                await changed.wait()
                changed.clear()
            self._writer.check()
        finally:
            self._waiters.discard((loop, changed))

    def _committed(self) -> None:
        for loop, changed in tuple(self._waiters):
            loop.call_soon_threadsafe(changed.set)

    def close(self) -> None:
        """As :meth:`aclose`; blocks. Raises :class:`LedgerError` if something could not be written."""
        self._writer.close()

    async def aclose(self) -> None:
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def position(self) -> LedgerPosition:
        return self._writer.position

    @property
    def commits(self) -> int:
        """Return the number of transactions so far."""
        return self._writer.commits

    def attempt(self, group_id: int) -> int:
        return self._state.attempt(group_id)

    def statistics(self) -> LedgerStatistics:
        return self._state.statistics()

    def query(
        self, where: str = "", parameters: Mapping[str, Any] | None = None, *, limit: int | None = None
    ) -> DataProto:
        return query(self._path, where, parameters, limit=limit)

    # ------------------------------------------------------------------------------------------------------ recovery

    def _salvage(self, base: LedgerBase) -> tuple[Contents, tuple[str, ...]]:
        """Return what can be trusted. The good part of a damaged file is copied, and replaces the file."""
        path = self._path
        salvaged = path.with_name(path.name + ".salvaged")  # complete if it exists: a process died before it renamed it
        if salvaged.exists():
            self._replace_file(salvaged)
        if not path.exists():
            self._witness.create()
            lost = base.position.sequence > 0
            return Contents(), ((f"{path} does not exist; only the checkpoint counts",) if lost else ())
        contents = read(path, witness=self._witness, connect=self._connect)
        usable = contents.reaches(base.position) and (base.position.sequence > 0 or base.step == 0)
        if usable and not contents.problems:
            return contents, ()
        problems = "; ".join(contents.problems or ("the checkpoint is not of this ledger",))
        if usable:
            draft = path.with_name(path.name + ".salvage")
            remove(draft)  # an unfinished one
            self._copy(path, draft, contents)
            self._files.rename(draft, salvaged)
            aside = self._replace_file(salvaged)
            counts = f"its first {len(contents.events)} events count"
        else:
            aside = set_aside(path, files=self._files)
            self._witness.create()
            contents = Contents()
            counts = "only the checkpoint counts"
        return contents, (f"the ledger was damaged ({problems}): {counts}; the damaged file is {aside.name}",)

    def _replace_file(self, salvaged: Path) -> Path:
        """Set the damaged file aside and rename the salvaged one to its name; return where the damaged one is."""
        aside = set_aside(self._path, files=self._files)
        self._files.rename(salvaged, self._path)
        self._witness.create()
        self._witness.write(read(self._path, witness=self._witness, connect=self._connect).end)
        return aside

    def _copy(self, damaged: Path, draft: Path, contents: Contents) -> None:
        witness = Witness(draft, files=self._files)
        witness.create()
        writer = LedgerWriter(
            draft,
            open_file(draft, connect=self._connect, fsync=self._fsync),
            witness,
            position=LedgerPosition(),
            commit_latency_s=0.0,
            queue_bytes=_QUEUE_BYTES,
            on_commit=lambda: None,
            threaded=False,
        )
        with closing(writer), closing(self._connect(damaged, isolation_level=None)) as source:
            for sequence, event in enumerate(contents.events, 1):
                content: bytes | None = None
                if isinstance(event, Completed) and event.digest:
                    content = read_rows(source, group_id=event.group_id, attempt=event.attempt, expected=event.digest)
                elif isinstance(event, TurnsAppended) and event.digest:
                    content = read_turns(source, sequence, expected=event.digest)
                writer.submit(Entry.of(event, content))

    def _recover(self, base: LedgerBase, contents: Contents, notes: tuple[str, ...]) -> Recovered:
        """Resume the run at ``base``: undo what the checkpoint does not have, and keep what was sampled."""
        state = self._state.replay(contents.events)
        if not contents.events and base.next_group_id:
            self._rebase(base)
        history = History(contents.events)
        for sequence, group_ids in history.running.items():
            self._writer.keep_turns(sequence, group_ids)
        # Batches that an earlier process was to repeat, and died before, are repeated too.
        batches = {step: batch for step, batch in {**history.batches, **history.undone}.items() if step > base.step}
        self.append(Resumed(base.step))
        completed = {group_id for group_id, where in state.live().items() if where is GroupState.COMPLETED}
        used = {group_id for batch in batches.values() for group_id in batch}
        uses = Counter(group_id for step, batch in history.batches.items() if step <= base.step for group_id in batch)
        groups: dict[int, RecordedGroup] = {}
        for group_id in sorted(completed | used):
            if (group := history.group(group_id, connection=self._connection, uses=uses[group_id])) is not None:
                groups[group_id] = group
        newest_of = {group_id: max(group.summary.version_tokens) for group_id, group in groups.items()}
        # A batch is repeated whole or not at all, and only if all before it are: their weights sampled its rows. Other
        # updates make other weights of them.
        whole: dict[int, tuple[int, ...]] = {}
        newest = base.step
        for step in range(base.step + 1, max(batches, default=0) + 1):
            if not all(newest_of.get(group_id, step) <= newest for group_id in batches.get(step, (-1,))):
                break
            whole[step] = batches[step]
            newest += base.same_updates
        for group_id in sorted(completed):
            why = "cannot be read"
            if newest_of.get(group_id, 0) > newest:
                why = f"are of weights after version {newest}, which cannot be reproduced"
                del groups[group_id]
            if group_id not in groups:
                self.append(AttemptLost(group_id=group_id, attempt=history.completed[group_id].attempt))
                notes = (*notes, f"the rows of group {group_id} {why}; it is rolled out again")
        waiting = {
            group_id: state.attempt(group_id) + 1
            for group_id, where in state.live().items()
            if where is GroupState.ISSUED
        }
        running = history.running_turns(waiting, newest_version=newest, connection=self._connection)
        if running.unreadable:
            which = ", ".join(map(str, running.unreadable))
            notes = (*notes, f"turns of running groups ({which}) cannot be read; they are sampled again")
        return Recovered(
            next_group_id=state.next_group_id,
            waiting=waiting,
            batches=whole,
            groups=groups,
            turns=running.turns,
            tasks={
                event.group_id: event.task
                for event in contents.events
                if isinstance(event, Issued) and event.task is not None and event.group_id in {*waiting, *groups}
            },
            dropped_tokens=history.dropped_tokens or base.dropped_tokens,
            notes=notes,
        )

    def _rebase(self, base: LedgerBase) -> None:
        live = base.outstanding
        self.append(
            Rebased(
                step=base.step,
                next_group_id=base.next_group_id,
                consumed=base.consumed,
                dropped=base.next_group_id - base.consumed - len(live),
                live=live,
                dropped_tokens=base.dropped_tokens,
            ),
            *(Issued(group_id) for group_id in live),
        )
