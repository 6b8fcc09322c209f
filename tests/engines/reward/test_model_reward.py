"""Calls of a reward model follow one another, also where a caller leaves."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.data import DataProto
from asyncrl.data.ragged import rows_of
from engines.reward.model import ModelReward


class SlowEngine:
    """Computes a call when the test says so."""

    def __init__(self, path: str, **_: Any) -> None:
        self.may_end = threading.Event()
        self.running = self.most_running = 0

    def scores(self, batch: DataProto) -> DataProto:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.may_end.wait(30.0)
        self.running -= 1
        return DataProto.from_dict(tensors={"scores": torch.ones(len(batch))})


async def test_a_call_begins_after_one_whose_caller_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.training.value_engine.FSDPValueEngine", SlowEngine)
    reward = ModelReward(path=str(tmp_path), scale=2.0)
    engine: Any = reward._engine
    batch = DataProto.from_dict(tensors={"x": torch.zeros(2)})
    left = asyncio.ensure_future(reward.score(batch))
    async with asyncio.timeout(5):
        while not engine.running:
            await asyncio.sleep(0.001)
    left.cancel()
    following = asyncio.ensure_future(reward.score(batch))
    await asyncio.sleep(0.05)
    engine.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await left
    scored = await following
    assert scored.batch is not None
    assert scored.batch["rewards"].tolist() == [2.0, 2.0]
    assert engine.most_running == 1


async def test_of_a_tree_the_branch_with_the_last_turn_is_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LastToken(SlowEngine):
        def scores(self, batch: DataProto) -> DataProto:
            assert batch.batch is not None
            rows = [row.tolist() for row in rows_of(batch.batch["input_ids"])]
            assert rows == [[1, 2, 4], [7, 8]]  # two turns follow the first one; and a line
            return DataProto.from_dict(tensors={"scores": torch.tensor([float(row[-1]) for row in rows])})

    monkeypatch.setattr("engines.training.value_engine.FSDPValueEngine", LastToken)
    batch = DataProto.from_dict(tensors={"x": torch.zeros(2)}).with_columns(
        input_ids=[torch.tensor([1, 2, 3, 4]), torch.tensor([7, 8])],
        branches=[torch.tensor([0, 2, -1, 2, 3, 0, 3, 4, 0]), torch.tensor([], dtype=torch.long)],
    )
    scored = await ModelReward(path=str(tmp_path)).score(batch)
    assert scored.batch is not None
    assert scored.batch["rewards"].tolist() == [4.0, 8.0]
