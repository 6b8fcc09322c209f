"""The ledger of a run: every prompt from issue to use, on the disk, with the rows that were sampled for it.

What may happen is decided in :mod:`buffers.ledger_state`, at once and in memory; a thread of
:mod:`buffers.ledger_writer` brings it to the disk in groups; :mod:`buffers.ledger_file` finds out what a file still
holds. Events become durable in the order in which they were appended, so whatever a crash leaves is a moment that
really was.

What a crash can take:

    death of the process        events of the last ``commit_latency_s``; their prompts are dispatched again
    death of the machine        the same with ``fsync = "commit"``; with ``"checkpoint"`` what came since the last
                                checkpoint of the run, which is brought to the disk with the ledger
    a damaged file              what comes after the damage; it is found out when the run is resumed, and told
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, Self

import msgspec

from asyncrl.data import DataProto
from asyncrl.durable import DurableFiles
from asyncrl.errors import InvalidDataError, LedgerError
from asyncrl.interfaces import LedgerArchive
from asyncrl.ledger import (
    Completed,
    Dropped,
    GivenUp,
    Issued,
    LedgerBase,
    LedgerEvent,
    LedgerPosition,
    LedgerStatistics,
    Lost,
    Rebased,
    RecordedGroup,
    Recovered,
    Resumed,
    TurnsAppended,
)
from buffers.ledger_archive import SQLiteLedgerArchive
from buffers.ledger_file import Connect, Contents, Witness, discard, open_file, read, read_rows, read_turns, set_aside
from buffers.ledger_past import Past
from buffers.ledger_query import query
from buffers.ledger_schema import digest, encode_event
from buffers.ledger_state import LedgerState, PromptState
from buffers.ledger_writer import Entry, LedgerWriter, Rows, Unfinished

__all__ = ["SQLiteLedger", "query"]

_WAL_BYTES = 1 << 26


class SQLiteLedger:
    """Implements :class:`asyncrl.interfaces.Ledger` in one SQLite file. Used from one event loop.

    Args:
        path: the file; made if it is not there.
        resume: None begins a ledger, and a file that is there already is refused; a checkpoint's
            :class:`LedgerBase` goes on with it (:attr:`recovered` says what was found).
        commit_latency_s: longest time an event waits for others to be committed with.
        fsync: ``commit`` brings every commit to the disk (survives the machine), ``checkpoint`` leaves that to the
            operating system until :meth:`durable` is awaited (survives the process).
        queue_bytes: what may wait to be written before :meth:`room` waits.
        threaded: False commits inside :meth:`append`.
        connect: makes connections; ``sqlite3.connect``, or what stands in for it.
        files: likewise for other files.

    Raises:
        LedgerError: the file cannot be made, or is of another kind.
    """

    def __init__(
        self,
        path: Path,
        *,
        resume: LedgerBase | None = None,
        commit_latency_s: float = 0.2,
        fsync: Literal["commit", "checkpoint"] = "commit",
        queue_bytes: int = _WAL_BYTES,
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
        self._recovered: Recovered | None = None
        if resume is None and path.exists():
            raise LedgerError(f"{path} is there already: a run begins with a ledger of its own")
        contents = Contents((), (), ())
        notes: tuple[str, ...] = ()
        if resume is not None:
            contents, notes = self._salvaged(resume)
        else:
            self._witness.create()
        try:
            self._connection = open_file(path, connect=connect, fsync=fsync)
        except sqlite3.Error as error:
            raise LedgerError(f"{path} cannot be opened: {error}") from error
        self._writer = LedgerWriter(
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
                self._recovered = self._go_on(resume, contents, notes)
            except BaseException:
                self._writer.close()
                raise

    @classmethod
    def archive(cls, path: Path) -> LedgerArchive:
        """As :meth:`asyncrl.interfaces.Ledger.archive`."""
        return SQLiteLedgerArchive(path)

    # -------------------------------------------------------------------------------------------------------- writing

    def append(self, event: LedgerEvent, *more: LedgerEvent, rows: bytes | None = None) -> bool:
        """Let ``event`` happen; it is on the disk a little later. Never waits.

        Args:
            event: what happened. Its ``digest`` is filled in from ``rows``.
            more: what happened with it: a crash leaves all of these events or none.
            rows: of a completed group, by :func:`asyncrl.rollout.record.encode_rows`; or turns, by
                :func:`asyncrl.rollout.turns.encode_turns`.

        Returns:
            False if it came late or twice: then its result must not be used. Of turns, False if all of them did.

        Raises:
            InvalidDataError: the life of a prompt does not have it, or rows come with another event.
            LedgerError: the ledger cannot be written.
        """
        self._writer.check()
        happened: LedgerEvent = event
        attached: Rows | Unfinished | None = None
        # What came late or twice is not written down: nobody who reads the file must find out that it did not count.
        if isinstance(event, TurnsAppended):
            happened = self._state.in_time(event)
        if rows is not None:
            if isinstance(happened, Completed):
                attached = Rows(happened.slot, happened.attempt, rows)
            elif isinstance(happened, TurnsAppended):
                attached = _unfinished(happened, rows)
            else:
                raise InvalidDataError(f"rows come with a completed group or turns, not with {type(event).__name__}")
            happened = msgspec.structs.replace(happened, digest=digest(rows))
        entries = [_entry(happened, attached)] if self._state.apply(event) else []
        entries += [_entry(other) for other in more if self._state.apply(other)]
        if entries:
            self._writer.submit(*entries)
        return len(entries) == 1 + len(more)

    async def room(self) -> None:
        """Wait while more events wait to be written than should."""
        await self._until(lambda: not self._writer.full)

    async def durable(self) -> LedgerPosition:
        """Wait until everything appended so far is committed (to the disk, with either ``fsync``); where that is."""
        wanted = self._writer.submitted
        if self._writer.position.sequence < wanted:
            self._writer.hurry()
            await self._until(lambda: self._writer.position.sequence >= wanted)
        position = self._writer.position  # what comes while files are brought to the disk may not be on it
        if self._fsync == "checkpoint":
            wal = self._path.with_name(self._path.name + "-wal")
            for path in (wal, self._path):
                if path.exists():
                    await asyncio.to_thread(self._files.sync, path)
        return position

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that a commit brings about."""
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
        """Write what is left and close the file (blocks). Idempotent.

        Raises:
            LedgerError: something could not be written.
        """
        self._writer.close()

    async def aclose(self) -> None:
        """As :meth:`close`, for an event loop."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -------------------------------------------------------------------------------------------------------- reading

    @property
    def recovered(self) -> Recovered | None:
        """What a resumed ledger found; None of one that began here."""
        return self._recovered

    @property
    def position(self) -> LedgerPosition:
        """The end of what is committed."""
        return self._writer.position

    @property
    def commits(self) -> int:
        """Transactions so far."""
        return self._writer.commits

    def attempt(self, slot: int) -> int:
        """Number of the newest attempt at a live prompt; -1 before the first."""
        return self._state.attempt(slot)

    def statistics(self) -> LedgerStatistics:
        """Counts in prompts."""
        return self._state.statistics()

    def query(
        self, where: str = "", parameters: Mapping[str, Any] | None = None, *, limit: int | None = None
    ) -> DataProto:
        """As :func:`query`, with everything that is committed."""
        return query(self._path, where, parameters, limit=limit)

    # ------------------------------------------------------------------------------------------------------- recovery

    def _salvaged(self, base: LedgerBase) -> tuple[Contents, tuple[str, ...]]:
        """What can be trusted; a damaged file is set aside, and its good part, copied before, takes its place."""
        path = self._path
        salvaged = path.with_name(path.name + ".salvaged")  # complete, if there is one: a process died putting it here
        if salvaged.exists():
            self._put_in_place(salvaged)
        if not path.exists():
            self._witness.create()
            lost = base.position.sequence > 0
            return Contents((), (), ()), ((f"{path} is not there; the checkpoint alone counts",) if lost else ())
        contents = read(path, witness=self._witness, connect=self._connect)
        keeps = contents.reaches(base.position) and (base.position.sequence > 0 or base.step == 0)
        if not contents.problems and keeps:
            return contents, ()
        problems = contents.problems or ("the checkpoint does not belong to it",)
        if keeps:
            draft = path.with_name(path.name + ".salvage")
            discard(draft)  # one that was not finished
            self._copy(path, draft, contents)
            self._files.rename(draft, salvaged)
        aside = self._put_in_place(salvaged) if keeps else set_aside(path, files=self._files)
        what = f"its first {len(contents.events)} events count" if keeps else "the checkpoint alone counts"
        note = f"the ledger was damaged ({'; '.join(problems)}): {what}; the damaged file is {aside.name}"
        if not keeps:
            self._witness.create()
        return (contents if keeps else Contents((), (), ())), (note,)

    def _put_in_place(self, salvaged: Path) -> Path:
        """Set aside what is there, and give the salvaged file its name; returns where the damaged one is."""
        aside = set_aside(self._path, files=self._files)
        self._files.rename(salvaged, self._path)
        self._witness.create()
        self._witness.write(read(self._path, witness=self._witness, connect=self._connect).end)
        return aside

    def _copy(self, damaged: Path, draft: Path, contents: Contents) -> None:
        """The good events and the rows that can be read, into a new file."""
        witness = Witness(draft, files=self._files)
        witness.create()
        pace: dict[str, Any] = {"commit_latency_s": 1.0, "queue_bytes": _WAL_BYTES, "threaded": False}
        file = open_file(draft, connect=self._connect, fsync=self._fsync)
        writer = LedgerWriter(file, witness, position=LedgerPosition(), on_commit=lambda: None, **pace)
        with closing(writer), closing(self._connect(damaged, isolation_level=None)) as source:
            for sequence, event in enumerate(contents.events, 1):
                content: bytes | None = None
                attached: Rows | Unfinished | None = None
                if isinstance(event, Completed) and event.digest:
                    content = read_rows(source, slot=event.slot, attempt=event.attempt, expected=event.digest)
                    attached = Rows(event.slot, event.attempt, content) if content is not None else None
                elif isinstance(event, TurnsAppended) and event.digest:
                    content = read_turns(source, sequence, expected=event.digest)
                    attached = _unfinished(event, content) if content is not None else None
                writer.submit(_entry(event, attached))

    def _go_on(self, base: LedgerBase, contents: Contents, notes: tuple[str, ...]) -> Recovered:
        """Take up the run at ``base``: undo what it does not know, keep what was sampled."""
        state = self._state.replay(contents.events)
        if not contents.events and base.next_slot:
            self._rebase(base)
        past = Past(contents.events)
        for sequence, slots in past.under_way.items():
            self._writer.needs(sequence, slots)
        # Also what a life that died before it got so far was to take again.
        batches = {step: batch for step, batch in {**past.batches, **past.undone}.items() if step > base.step}
        self.append(Resumed(base.step))
        completed = {slot for slot, where in state.live().items() if where is PromptState.COMPLETED}
        used = {slot for batch in batches.values() for slot in batch}
        groups: dict[int, RecordedGroup] = {}
        for slot in sorted(completed | used):
            uses = int(slot not in completed)
            if (group := past.group(slot, connection=self._connection, uses=uses)) is not None:
                groups[slot] = group
        # A batch is taken again whole or not at all, and only if all before it are: their weights made its rows.
        whole: dict[int, tuple[int, ...]] = {}
        for step in range(base.step + 1, max(batches, default=0) + 1):
            if not all(slot in groups for slot in batches.get(step, (-1,))):
                break
            whole[step] = batches[step]
        newest = base.step + len(whole)
        for slot in sorted(completed):
            why = "cannot be read"
            if slot in groups and max(groups[slot].summary.version_tokens) > newest:
                why = f"are of weights after version {newest}, which cannot be made again"
                del groups[slot]
            if slot not in groups:
                self.append(Lost(slot=slot, attempt=past.completed[slot].attempt))
                notes = (*notes, f"the rows of prompt {slot} {why}; it is rolled out again")
        waiting = {slot: state.attempt(slot) + 1 for slot, where in state.live().items() if where is PromptState.ISSUED}
        unfinished = past.unfinished(waiting, newest_version=newest, connection=self._connection)
        if unfinished.unreadable:
            which = ", ".join(map(str, unfinished.unreadable))
            notes = (*notes, f"turns of prompts under way ({which}) cannot be read; they are sampled again")
        return Recovered(
            next_slot=state.next_slot,
            waiting=waiting,
            batches=whole,
            groups=groups,
            turns=unfinished.turns,
            dropped_tokens=past.dropped_tokens or base.dropped_tokens,
            notes=notes,
        )

    def _rebase(self, base: LedgerBase) -> None:
        live = base.outstanding
        dropped = base.next_slot - base.consumed - len(live)
        self.append(
            Rebased(
                step=base.step,
                next_slot=base.next_slot,
                consumed=base.consumed,
                dropped=dropped,
                live=live,
                dropped_tokens=base.dropped_tokens,
            ),
            *(Issued(slot) for slot in live),
        )


def _unfinished(event: TurnsAppended, content: bytes) -> Unfinished:
    return Unfinished(frozenset(turn.slot for turn in event.turns), content)


def _entry(event: LedgerEvent, attached: Rows | Unfinished | None = None) -> Entry:
    """With its end, a prompt's turns are needed no more: its rows have them, or nobody will train on it."""
    settles = event.slot if isinstance(event, Completed | Dropped | GivenUp) else None
    return Entry(encode_event(event), attached, settles)
