"""A reward model as a worker, so that scoring overlaps with rollouts and training like any other stage."""

from __future__ import annotations

from typing import Any

from asyncrl.data import DataProto
from asyncrl.interfaces import RewardModel
from asyncrl.parts import make_part
from asyncrl.single_controller import Dispatch, Worker, register

__all__ = ["RewardWorker"]


class RewardWorker(Worker):
    """Scores rows with the reward model ``source`` names (entry point or dotted path), made from ``options``."""

    def __init__(self, spec: tuple[str, dict[str, Any]]) -> None:
        super().__init__()
        source, options = spec
        self._model: RewardModel = make_part("asyncrl.reward_models", source, options=options, path="reward.source")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def score(self, batch: DataProto) -> DataProto:
        """Column ``scores`` [B] float32; the header's ``meta_info["scores"]`` tells them to the driver."""
        scored = await self._model.score(batch)
        assert scored.batch is not None
        scores = scored.batch["rewards"]
        return DataProto.from_dict(tensors={"scores": scores}, meta_info={"scores": scores.tolist()})

    async def aclose(self) -> None:
        """Close the reward model."""
        await self._model.close()
