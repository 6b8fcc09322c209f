"""The ledger of a run that is over, or still goes on, for those who only read it."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.data import DataProto
from asyncrl.durable import DurableFiles
from asyncrl.errors import LedgerError
from asyncrl.ledger import Began, RecordedGroup
from buffers.ledger_file import Witness, read
from buffers.ledger_past import Past
from buffers.ledger_query import query

__all__ = ["SQLiteLedgerArchive"]


class SQLiteLedgerArchive:
    """Implements :class:`asyncrl.interfaces.LedgerArchive`. Events are checked at once, rows when they are read.

    Raises:
        LedgerError: there is no such file.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise LedgerError(f"{path}: no such ledger")
        contents = read(path, witness=Witness(path, files=DurableFiles()), connect=_connect_to_read)
        self._path = path
        self._past = Past(contents.events)
        self._problems = contents.problems
        try:
            self._connection = _connect_to_read(path)
        except sqlite3.Error as error:
            raise LedgerError(f"{path} cannot be opened: {error}") from error

    @property
    def problems(self) -> tuple[str, ...]:
        """Damage, in words; what comes before it can be trusted."""
        return self._problems

    @property
    def first_step(self) -> int:
        """Step after which it begins; 0 unless an earlier ledger was lost."""
        return self._past.first_step

    @property
    def batches(self) -> Mapping[int, tuple[int, ...]]:
        """Prompts by the step that trained on them, in order."""
        return self._past.batches

    @property
    def lives(self) -> tuple[Began, ...]:
        """Processes that trained; each counts from its step to that of the next."""
        return self._past.lives

    @property
    def weights(self) -> Mapping[int, str]:
        """Fingerprints of the weights that were published, by version."""
        return self._past.weights

    def group(self, slot: int) -> RecordedGroup | None:
        """The rows of a completed prompt; None if they were not kept, or are not what was written. Blocks."""
        if slot not in self._past.completed:
            return None
        return self._past.group(slot, connection=self._connection)

    def missing_rows(self) -> tuple[int, ...]:
        """Prompts that a step trained on, and whose rows are not here. Rows that are here were not read yet."""
        used = {slot for batch in self._past.batches.values() for slot in batch}
        held = {
            (slot, attempt)
            for slot, attempt in self._connection.execute("SELECT DISTINCT slot, attempt FROM trajectories")
        }
        completed = self._past.completed
        return tuple(
            sorted(
                slot
                for slot in used
                if slot not in completed or not completed[slot].digest or (slot, completed[slot].attempt) not in held
            )
        )

    def query(
        self, where: str = "", parameters: Mapping[str, Any] | None = None, *, limit: int | None = None
    ) -> DataProto:
        """As :func:`buffers.ledger_query.query`."""
        return query(self._path, where, parameters, limit=limit)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._connection.close()


def _connect_to_read(path: Path, **options: object) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, check_same_thread=False)
