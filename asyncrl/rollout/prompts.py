"""The rows that ask for rollouts: one per trajectory wanted, each with its task, identity and seed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from asyncrl.data import DataProto
from asyncrl.interfaces import Task

__all__ = ["derive_seed", "prompt_rows"]


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part and on nothing else (BLAKE2b of their text).

    >>> derive_seed(0, "train", 5) == derive_seed(0, "train", 5)
    True
    """
    digest = hashlib.blake2b("/".join(str(part) for part in parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def prompt_rows(
    tasks: Sequence[Task],
    *,
    slot: int,
    seeds: Sequence[int],
    purpose: str,
    sample: bool = False,
    record: bool = False,
    sampling: Mapping[str, Any] | None = None,
    attempt: int | None = None,
    turns: bytes = b"",
) -> DataProto:
    """Rows [B] for :meth:`RolloutWorker.rollout`, all of one slot, numbered 0..B-1.

    Columns: ``slot`` and ``row`` [B] int64, ``seed`` [B] int64, non-tensor ``task``. ``purpose`` names the account the
    tokens are counted to; with ``sample`` the answer's header carries row 0 as readable text, with ``record`` all rows
    as bytes (:mod:`asyncrl.rollout.record`). ``sampling`` replaces fields of the worker's sampling parameters. With
    ``attempt``, the number of this try, turns are told as they end; ``turns`` are those of earlier tries that rows go
    on from (:mod:`asyncrl.rollout.turns`).

    >>> rows = prompt_rows([{"question": "2 + 2"}] * 2, slot=7, seeds=[1, 2], purpose="train")
    >>> rows.batch["slot"].tolist(), rows.batch["row"].tolist(), rows.meta_info["purpose"]
    ([7, 7], [0, 1], 'train')
    """
    rows = len(tasks)
    task_column = np.empty(rows, dtype=object)
    for row, task in enumerate(tasks):
        task_column[row] = task
    return DataProto.from_dict(
        tensors={
            "slot": torch.full((rows,), slot, dtype=torch.int64),
            "row": torch.arange(rows, dtype=torch.int64),
            "seed": torch.tensor(list(seeds), dtype=torch.int64),
        },
        non_tensors={"task": task_column},
        meta_info={
            "purpose": purpose,
            "sample": sample,
            "record": record,
            "sampling": dict(sampling or {}),
            "attempt": attempt,
            "turns": turns,
        },
    )
