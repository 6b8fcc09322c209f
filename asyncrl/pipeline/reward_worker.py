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
    """Scores rows with the reward model ``source`` names (entry point or dotted path), made from ``options``.

    It knows nothing but its model, so one whose process died is made again, and is asked the same again.
    """

    def __init__(self, spec: tuple[str, dict[str, Any]]) -> None:
        super().__init__()
        self._source, self._options = spec
        self._model: RewardModel | None = None
        self._making = asyncio.Lock()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, idempotent=True)
    async def start(self, model_path: str) -> None:
        """Make the reward model. One that takes a ``tokenizer`` is given the policy's, unless options name another."""
        await self._made(model_path)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, idempotent=True)
    async def score(self, batch: DataProto, model_path: str) -> DataProto:
        """Column ``scores`` [B] float32. A worker that was made again makes its model first, as :meth:`start`."""
        model = await self._made(model_path)
        scored = await model.score(batch)
        assert scored.batch is not None
        return DataProto.from_dict(tensors={"scores": scored.batch["rewards"]})

    async def _made(self, model_path: str) -> RewardModel:
        async with self._making:
            if self._model is None:
                self._model = await self._make(model_path)
        return self._model

    async def _make(self, model_path: str) -> RewardModel:
        part = load_part("asyncrl.reward_models", self._source, path="reward.source")
        takes_tokenizer = "tokenizer" in signature(part).parameters
        options = {"tokenizer": model_path, **self._options} if takes_tokenizer else self._options
        # In a thread: a model is loaded for seconds, and this loop serves others.
        model: RewardModel = await asyncio.to_thread(
            make_part, "asyncrl.reward_models", self._source, options=options, path="reward.source"
        )
        return model

    async def aclose(self) -> None:
        """Close the reward model."""
        if self._model is not None:
            await self._model.close()
