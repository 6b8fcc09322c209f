"""Reading a ledger: the history in its events, trajectories by SQL, and the archive of a finished or running run."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.data import DataProto
from asyncrl.errors import LedgerError
from asyncrl.interfaces import GroupSummary
from asyncrl.io import DurableFiles
from asyncrl.ledger import (
    AttemptLost,
    Completed,
    Consumed,
    Dropped,
    GroupFailed,
    LedgerEvent,
    Published,
    Rebased,
    RecordedGroup,
    RecordedTurns,
    Resumed,
    Reused,
    Rewarded,
    RunStarted,
    SampledTurn,
    TurnsAppended,
)
from asyncrl.rollout.trajectory import RowRecord, decode_rows, read_trajectory, trajectories_to_batch
from asyncrl.rollout.turns import TurnRecord, decode_turns, encode_turns, last_chains
from buffers.ledger_store import Witness, read, read_rows, read_turns

_Positions = dict[int, dict[int, int]]
"""By step and position in its batch, the group."""


@dataclass(frozen=True, slots=True)
class RunningTurns:
    """What running groups have sampled: turns by group_id, and the groups with turns that cannot be read."""

    turns: Mapping[int, RecordedTurns]
    unreadable: tuple[int, ...]


class History:
    """The contents of a ledger's events, without what a resumption has undone.

    Attributes:
        completed: by group_id, the attempt whose rows count.
        rewards: by group_id, the rewards of a reward model.
        batches: by step, the groups that it trained on, in order.
        undone: the same for steps that a resumption has undone and that are to be repeated, unless a later event rules
            that out: a process that died before it had repeated them leaves them to the next one.
        processes: processes that trained, in order. Step ``s`` was trained by the last one that began before it.
        weights: fingerprints by version: of what was published, and of what a process started from.
        dropped_tokens: tokens of groups that were not trained on, by reason.
        first_step: step after which the ledger begins: 0, or that of the checkpoint that it was rebased on.
        running: by number of a ``turns_appended`` event, the groups in it that are neither completed nor ended.
    """

    def __init__(self, events: Iterable[LedgerEvent]) -> None:
        self.completed: dict[int, Completed] = {}
        self.rewards: dict[int, tuple[float, ...]] = {}
        self.weights: dict[int, str] = {}
        self.first_step = 0
        digests: dict[int, int] = {}
        turns: dict[int, dict[int, list[SampledTurn]]] = {}  # by group_id and event
        dropped: Counter[str] = Counter()
        started: list[RunStarted] = []
        batches: _Positions = {}
        undone: _Positions = {}
        for sequence, event in enumerate(events, 1):
            match event:
                case TurnsAppended() if event.digest:
                    digests[sequence] = event.digest
                    for turn in event.turns:
                        turns.setdefault(turn.group_id, {}).setdefault(sequence, []).append(turn)
                case Completed():
                    turns.pop(event.group_id, None)
                    self.completed[event.group_id] = event
                    self.rewards.pop(event.group_id, None)
                    dropped["environment_failed"] += event.wasted
                case Rewarded():
                    self.rewards[event.group_id] = event.rewards
                case Consumed() | Reused():
                    batches.setdefault(event.step, {})[event.position] = event.group_id
                    before = undone.get(event.step)
                    if before is not None and before.setdefault(event.position, event.group_id) != event.group_id:
                        undone = _before(undone, event.step)  # another batch, so other weights from here on
                case Resumed():
                    undone = {step: batch for step, batch in {**batches, **undone}.items() if step > event.step}
                    batches = _before(batches, event.step + 1)
                    self.weights = {version: each for version, each in self.weights.items() if version <= event.step}
                case Rebased():
                    dropped.update(event.dropped_tokens)
                    self.first_step = event.step
                    undone = {}
                case AttemptLost():
                    del self.completed[event.group_id]
                    self.rewards.pop(event.group_id, None)
                    undone = _before_use(undone, event.group_id)
                case Dropped() | GroupFailed():
                    turns.pop(event.group_id, None)
                    undone = _before_use(undone, event.group_id)
                    dropped[event.reason if isinstance(event, Dropped) else event.failure] += event.tokens
                case RunStarted():
                    started.append(event)
                    # A process may have died between a checkpoint and the commit of that version's publication.
                    self.weights.setdefault(event.step, event.weights)
                case Published():
                    self.weights[event.version] = event.weights
                case _:
                    pass
        # A process that began at or before the step of an earlier one has repeated its work.
        self.processes = tuple(
            process
            for index, process in enumerate(started)
            if all(later.step > process.step for later in started[index + 1 :])
        )
        self.batches, self.undone = _in_order(batches), _in_order(undone)
        self.running: dict[int, set[int]] = {}
        for group_id, by_event in turns.items():
            for sequence in by_event:
                self.running.setdefault(sequence, set()).add(group_id)
        self._turns = turns
        self._digests = {sequence: digests[sequence] for sequence in self.running}
        self.dropped_tokens = {reason: count for reason, count in dropped.items() if count}

    def running_turns(
        self, group_ids: Iterable[int], *, newest_version: int, connection: sqlite3.Connection
    ) -> RunningTurns:
        """Return what rows of running groups have sampled under versions up to ``newest_version``."""
        wanted = set(group_ids)
        counted = {
            (turn.group_id, turn.attempt, turn.row, turn.turn)
            for group_id in wanted
            for turns in self._turns.get(group_id, {}).values()
            for turn in turns
        }
        by_group: dict[int, list[TurnRecord]] = {}
        unreadable: set[int] = set()
        for sequence, digest in self._digests.items():
            concerned = self.running[sequence] & wanted
            if not concerned:
                continue
            content = read_turns(connection, sequence, expected=digest)
            if content is None:
                unreadable |= concerned
                continue
            for record in decode_turns(content):
                if (record.group_id, record.attempt, record.row, record.turn) in counted:
                    by_group.setdefault(record.group_id, []).append(record)
        found: dict[int, RecordedTurns] = {}
        for group_id, records in sorted(by_group.items()):
            kept = [
                record
                for chain in last_chains(records).values()
                for record in takewhile(lambda record: record.newest_version <= newest_version, chain)
            ]
            if kept:
                tokens = sum(record.tokens for record in kept)
                found[group_id] = RecordedTurns(content=encode_turns(kept), tokens=tokens)
        return RunningTurns(found, tuple(sorted(unreadable)))

    def group(self, group_id: int, *, connection: sqlite3.Connection, uses: int = 0) -> RecordedGroup | None:
        """Return a completed group as it was, or None if its rows cannot be read."""
        completed = self.completed[group_id]
        if not completed.digest:
            return None
        content = read_rows(connection, group_id=group_id, attempt=completed.attempt, expected=completed.digest)
        if content is None:
            return None
        rows = decode_rows(content, group_id=group_id)
        fields = dict(rows.meta_info["summary"])
        rewards = self.rewards.get(group_id)
        if rewards is not None:
            fields["rewards"] = rewards
        return RecordedGroup(summary=GroupSummary(**fields), rows=rows, rewarded=rewards is not None, uses=uses)


def _in_order(batches: _Positions) -> dict[int, tuple[int, ...]]:
    return {step: tuple(batch[position] for position in sorted(batch)) for step, batch in sorted(batches.items())}


def _before(batches: _Positions, step: int) -> _Positions:
    return {each: batch for each, batch in batches.items() if each < step}


def _before_use(batches: _Positions, group_id: int) -> _Positions:
    first = min((step for step, batch in batches.items() if group_id in batch.values()), default=None)
    return batches if first is None else _before(batches, first)


def query(
    path: Path, where: str = "", parameters: Mapping[str, Any] | None = None, *, limit: int | None = None
) -> DataProto:
    """As :meth:`asyncrl.ledger.Ledger.query`, of a ledger's file, which another process may be writing.

    ``where`` is a condition on the view ``rows`` of ``buffers/ledger_store.py``.

    Raises:
        LedgerError: there is no such file, or the condition is not valid SQL.
    """
    fields = RowRecord.__struct_fields__
    condition = f"WHERE {where}" if where else ""
    text = (
        f"SELECT {', '.join(fields)}, group_id, attempt, step, position, state FROM rows {condition} "  # noqa: S608
        f"ORDER BY group_id, row LIMIT {-1 if limit is None else int(limit)}"
    )
    try:
        with closing(_connect_to_read(path)) as connection:
            lines = connection.execute(text, dict(parameters or {})).fetchall()
    except sqlite3.Error as error:
        raise LedgerError(f"{path} cannot be queried for {where!r}: {error}") from error
    if not lines:
        return DataProto()
    records = [RowRecord(**dict(zip(fields, line[: len(fields)], strict=True))) for line in lines]
    batch = trajectories_to_batch([read_trajectory(record) for record in records], group_id=0).select(meta_info_keys=[])
    *numbers, states = zip(*(line[len(fields) :] for line in lines), strict=True)
    columns = {
        name: torch.tensor([-1 if value is None else value for value in values], dtype=torch.int64)
        for name, values in zip(("group_id", "attempt", "step", "position"), numbers, strict=True)
    }
    columns["row"] = torch.tensor([record.row for record in records], dtype=torch.int64)
    batch.pop(["group_id", "row"])
    return batch.union(DataProto.from_dict(tensors=columns, non_tensors={"state": np.array(states)}))


class SQLiteLedgerArchive:
    """Implements :class:`asyncrl.ledger.LedgerArchive`. Events are checked at once, rows when they are read.

    Raises:
        LedgerError: there is no such file.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise LedgerError(f"{path}: no such ledger")
        contents = read(path, witness=Witness(path, files=DurableFiles()), connect=_connect_to_read)
        self._path = path
        self._history = history = History(contents.events)
        self.problems = contents.problems
        self.first_step = history.first_step
        self.batches: Mapping[int, tuple[int, ...]] = history.batches
        self.processes = history.processes
        self.weights: Mapping[int, str] = history.weights
        try:
            self._connection = _connect_to_read(path)
        except sqlite3.Error as error:
            raise LedgerError(f"{path} cannot be opened: {error}") from error

    def group(self, group_id: int) -> RecordedGroup | None:
        if group_id not in self._history.completed:
            return None
        return self._history.group(group_id, connection=self._connection)

    def missing_rows(self) -> tuple[int, ...]:
        held = set(self._connection.execute("SELECT DISTINCT group_id, attempt FROM trajectories"))
        recorded = {
            group_id
            for group_id, completed in self._history.completed.items()
            if completed.digest and (group_id, completed.attempt) in held
        }
        return tuple(sorted({group_id for batch in self.batches.values() for group_id in batch} - recorded))

    def query(
        self, where: str = "", parameters: Mapping[str, Any] | None = None, *, limit: int | None = None
    ) -> DataProto:
        return query(self._path, where, parameters, limit=limit)

    def close(self) -> None:
        self._connection.close()


def _connect_to_read(path: Path, **options: object) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, check_same_thread=False)
