"""Asking a ledger for trajectories, in SQL."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.data import DataProto
from asyncrl.errors import LedgerError
from asyncrl.rollout.record import RowRecord, read_trajectory
from asyncrl.rollout.trajectory import trajectories_to_batch

__all__ = ["query"]


def query(
    path: Path, where: str = "", parameters: Mapping[str, Any] | None = None, *, limit: int | None = None
) -> DataProto:
    """Recorded trajectories as a batch: the trajectory columns of :mod:`asyncrl.interfaces`.

    Further columns: ``attempt``, ``step`` (that trained on it, or -1) and ``position`` [B] int64, ``state`` (str). Rows
    come in the order of prompt and row. The file may be another process's that is writing it.

    Args:
        path: a ledger's file.
        where: an SQL condition on the view ``rows`` (``buffers/ledger_schema.py``), with ``:name`` for parameters.
        parameters: by name.
        limit: rows at most.

    Raises:
        LedgerError: there is no such file, or the condition is none.

    >>> query(run / "ledger.sqlite", "reward > :least AND step = 3", {"least": 0.5})  # doctest: +SKIP
    """
    fields = RowRecord.__struct_fields__
    condition = f"WHERE {where}" if where else ""
    text = (
        f"SELECT {', '.join(fields)}, slot, attempt, step, position, state FROM rows {condition} "  # noqa: S608
        f"ORDER BY slot, row LIMIT {-1 if limit is None else int(limit)}"
    )
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            lines = connection.execute(text, dict(parameters or {})).fetchall()
    except sqlite3.Error as error:
        raise LedgerError(f"{path} cannot be asked for {where!r}: {error}") from error
    if not lines:
        return DataProto()
    records = [RowRecord(**dict(zip(fields, line[: len(fields)], strict=True))) for line in lines]
    batch = trajectories_to_batch([read_trajectory(record) for record in records], slot=0).select(meta_info_keys=[])
    extra = list(zip(*(line[len(fields) :] for line in lines), strict=True))
    slots, attempts, steps, positions, states = extra
    numbers = {"slot": slots, "attempt": attempts, "step": steps, "position": positions}
    columns = {
        name: torch.tensor([-1 if value is None else value for value in values], dtype=torch.int64)
        for name, values in numbers.items()
    }
    columns["row"] = torch.tensor([record.row for record in records], dtype=torch.int64)
    batch.pop(["slot", "row"])
    return batch.union(DataProto.from_dict(tensors=columns, non_tensors={"state": np.array(states)}))
