"""Rows go to the data ranks of a trainer's mesh, whole to each rank of one; the first of them answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncrl.data import DataProto
from asyncrl.data.ragged import ragged_from_values
from asyncrl.mesh import MeshShape
from asyncrl.single_controller import ClassWithInitArgs
from asyncrl.single_controller.local import LocalWorkerGroup
from asyncrl.trainer.workers import TrainerSpec, TrainerWorker

TIMEOUT_S = 30.0


class CountingEngine:
    """Computes nothing: it returns its rank and mesh, and what rows it got."""

    def __init__(self, model_path: str, *, rank: int, mesh: MeshShape, **_settings: Any) -> None:
        self.rank, self.mesh = rank, mesh
        self.seen: list[int] = []

    def update(self, batch: DataProto) -> dict[str, Any]:
        assert batch.batch is not None
        self.seen = batch.batch["input_ids"].values().tolist()
        return {"rank": self.rank, "seen": self.seen, "mesh": self.mesh}

    def log_probs(self, batch: DataProto) -> DataProto:
        assert batch.batch is not None
        ids = batch.batch["input_ids"]
        column = ragged_from_values(ids.values() + 100.0 * self.rank, ids.offsets())
        return DataProto.from_dict(tensors={"log_probs": column, "entropy": column})

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("shape", "second"), [(MeshShape(dp_shard=2, cp=2), 2), (MeshShape(dp_shard=2, pp=2), 1)], ids=["cp", "pp"]
)
def test_ranks_of_one_data_rank_get_its_rows_and_one_of_them_answers(shape: MeshShape, second: int) -> None:
    batch = DataProto.from_dict(tensors={"input_ids": [torch.tensor([row, row]) for row in range(3)]})
    made = ClassWithInitArgs(TrainerWorker, TrainerSpec(engine=CountingEngine, mesh=shape))
    with LocalWorkerGroup(made, world_size=4) as group:
        group.build("", {}).result(TIMEOUT_S)
        answers = group.update(batch).result(TIMEOUT_S)
        assert answers == [
            {"rank": 0, "seen": [0, 0, 1, 1], "mesh": shape},
            {"rank": second, "seen": [2, 2], "mesh": shape},
        ]
        scored = group.log_probs(batch).result(TIMEOUT_S).batch
        assert scored["log_probs"].values().tolist() == [0.0, 0.0, 1.0, 1.0, 100.0 * second + 2, 100.0 * second + 2]
