"""A reward model as a worker, so that scoring overlaps with rollouts and training like any other stage."""

from __future__ import annotations

import asyncio
from inspect import signature
from typing import Any

from asyncrl.data import DataProto
from asyncrl.interfaces import RewardModel
from asyncrl.parts import load_part, make_part
from asyncrl.single_controller import Dispatch, Worker, register

__all__ = ["RewardWorker"]


class RewardWorker(Worker):
    """Scores rows with the reward model ``source`` names (entry point or dotted path), made from ``options``."""

    def __init__(self, spec: tuple[str, dict[str, Any]]) -> None:
        super().__init__()
        self._source, self._options = spec
        self._model: RewardModel | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def start(self, model_path: str) -> None:
        """Make the reward model. One that takes a ``tokenizer`` is given the policy's, unless options name another."""
        part = load_part("asyncrl.reward_models", self._source, path="reward.source")
        takes_tokenizer = "tokenizer" in signature(part).parameters
        options = {"tokenizer": model_path, **self._options} if takes_tokenizer else self._options
        # In a thread: a model is loaded for seconds, and this loop serves others.
        self._model = await asyncio.to_thread(
            make_part, "asyncrl.reward_models", self._source, options=options, path="reward.source"
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def score(self, batch: DataProto) -> DataProto:
        """Column ``scores`` [B] float32."""
        if self._model is None:
            raise RuntimeError("the reward worker was not started: call start(model_path) first")
        scored = await self._model.score(batch)
        assert scored.batch is not None
        return DataProto.from_dict(tensors={"scores": scored.batch["rewards"]})

    async def aclose(self) -> None:
        """Close the reward model."""
        if self._model is not None:
            await self._model.close()
