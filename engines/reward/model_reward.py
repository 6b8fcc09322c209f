"""Rewards by a model that was trained on comparisons (``asyncrl train-reward-model``, or anybody's)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from asyncrl.data import DataProto
from asyncrl.errors import ConfigError, RewardError

if TYPE_CHECKING:
    from engines.training.model import ComputeDtype
    from engines.training.value_engine import FSDPValueEngine

__all__ = ["ModelReward"]


class ModelReward:
    """Reads a score off the last token of every trajectory (:class:`asyncrl.interfaces.RewardModel`).

    The tokens are those that were sampled, so the model must have the policy's tokenizer; one with another stands
    behind a :class:`~engines.reward.remote_reward.RemoteReward`. Scores are computed one call after another in a thread
    of this worker's; ``reward.workers`` makes several.

    Args:
        path: folder or hub id of a model for sequence classification with one label.
        tokenizer: the policy's, given by the run; None asks nothing.
        device: ``cpu``, ``cuda``, ``cuda:N`` or ``auto``: CUDA if there is any.
        dtype: what matrix products are computed in.
        max_tokens_per_microbatch: tokens computed at once.
        threads: CPU threads of torch, for the whole process; None leaves them as they are.
        scale: the score times this is the reward.
        shift: added to it.

    Raises:
        ConfigError: a value that cannot be used, or a tokenizer that is not the policy's.
        OSError: there is no such model.
    """

    def __init__(
        self,
        *,
        path: str,
        tokenizer: str | None = None,
        device: str = "auto",
        dtype: ComputeDtype = "float32",
        max_tokens_per_microbatch: int = 8192,
        threads: int | None = None,
        scale: float = 1.0,
        shift: float = 0.0,
    ) -> None:
        from engines.training.value_engine import FSDPValueEngine

        if tokenizer is not None:
            _check_tokenizer(path, tokenizer)
        self._path = path
        self._scale, self._shift = scale, shift
        self._turn = asyncio.Lock()
        self._engine: FSDPValueEngine | None = FSDPValueEngine(
            path,
            device=device,
            dtype=dtype,
            max_tokens_per_microbatch=max_tokens_per_microbatch,
            threads=threads,
        )

    async def score(self, batch: DataProto) -> DataProto:
        """Column ``rewards`` ([B] float32).

        Raises:
            RewardError: it was closed, or a score is not finite.
            SchemaError: the batch has no ``input_ids``.
        """
        async with self._turn:
            engine = self._engine
            if engine is None:
                raise RewardError(f"the reward model {self._path} was asked for rewards after it was closed")
            scored = await asyncio.to_thread(engine.scores, batch)
        assert scored.batch is not None
        rewards: torch.Tensor = scored.batch["scores"] * self._scale + self._shift
        bad = (~rewards.isfinite()).nonzero().flatten().tolist()
        if bad:
            raise RewardError(f"the reward model {self._path} gave row {bad[0]} the score {float(rewards[bad[0]])}")
        return DataProto.from_dict(tensors={"rewards": rewards})

    async def close(self) -> None:
        """Free the model, when a call that runs is done. Idempotent."""
        async with self._turn:
            engine, self._engine = self._engine, None
            if engine is not None:
                engine.close()


def _check_tokenizer(path: str, policys: str) -> None:
    """Raise :class:`ConfigError` unless both models mean the same by every token."""
    from transformers import AutoTokenizer

    if Path(path).is_dir() and not (Path(path) / "tokenizer_config.json").is_file():
        raise ConfigError(
            f"reward model {path} has no tokenizer: nobody can tell whether its tokens are the policy's",
            path="reward.options.path",
            remedy="copy the tokenizer's files into its folder",
        )
    own, theirs = AutoTokenizer.from_pretrained(path).get_vocab(), AutoTokenizer.from_pretrained(policys).get_vocab()
    if own != theirs:
        raise ConfigError(
            f"reward model {path} has another vocabulary than the policy ({len(own)} and {len(theirs)} tokens)",
            path="reward.options.path",
            remedy="train one from the policy's model, or serve this one behind reward.source = 'remote'",
        )
