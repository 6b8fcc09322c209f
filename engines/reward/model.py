"""Rewards from a sequence classification model, such as ``asyncrl train-reward-model`` trains."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from asyncrl.data import DataProto
from asyncrl.errors import ConfigError, RewardError
from asyncrl.model_folder import check_model
from asyncrl.rollout.branches import unfold
from asyncrl.runtime import shield_until_done
from asyncrl.storage import local_model

if TYPE_CHECKING:
    from engines.training.model import ComputeDtype
    from engines.training.value_engine import FSDPValueEngine


class ModelReward:
    """Scores every trajectory by its last token (:class:`asyncrl.interfaces.RewardModel`).

    Of a tree of turns, the branch counts that ends with the last turn.

    It reads the policy's tokens, so the model must have the policy's tokenizer; serve a model with another one behind
    a :class:`~engines.reward.remote.RemoteReward`. Calls are computed one after another in a thread of the worker;
    ``reward.workers`` sets the number of workers.

    Args:
        path: folder or hub id of a model for sequence classification with one label.
        tokenizer: the policy's, given by the run; None skips the comparison of vocabularies.
        device: ``cpu``, ``cuda``, ``cuda:N`` or ``auto`` (CUDA if available).
        threads: CPU threads of torch, for the whole process; None leaves them unchanged.
        scale, shift: the reward is ``score * scale + shift``.

    Raises:
        ConfigError: a value is out of range, or the tokenizer is not the policy's.
        OSError: the model does not exist.
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

        path = local_model(path)
        if tokenizer is not None:
            _check_tokenizer(path, tokenizer)
        self._path = path
        self._scale, self._shift = scale, shift
        self._lock = asyncio.Lock()
        self._engine: FSDPValueEngine | None = FSDPValueEngine(
            path,
            device=device,
            dtype=dtype,
            max_tokens_per_microbatch=max_tokens_per_microbatch,
            threads=threads,
        )

    @classmethod
    def check_options(cls, *, path: str, **others: object) -> None:
        """Raise ConfigError unless there is such a model."""
        del others
        check_model(path, key="reward.options.path")

    async def score(self, batch: DataProto) -> DataProto:
        """Return the column ``rewards`` ([B] float32); raise RewardError if a score is not finite."""
        async with self._lock:
            engine = self._engine
            if engine is None:
                raise RewardError(f"score() of the reward model {self._path} was called after close()")
            scored = await shield_until_done(asyncio.to_thread(lambda: engine.scores(_last_branches(batch))))
        assert scored.batch is not None
        rewards: torch.Tensor = scored.batch["scores"] * self._scale + self._shift
        bad = (~rewards.isfinite()).nonzero().flatten().tolist()
        if bad:
            raise RewardError(f"the reward model {self._path} gave row {bad[0]} the score {float(rewards[bad[0]])}")
        return DataProto.from_dict(tensors={"rewards": rewards})

    async def close(self) -> None:
        """Free the model after the running call. Idempotent."""
        async with self._lock:
            engine, self._engine = self._engine, None
            if engine is not None:
                engine.close()


def _last_branches(batch: DataProto) -> DataProto:
    """Return of each row the branch that ends with its last turn."""
    branches = unfold(batch.with_columns(row=torch.arange(len(batch)))).rows
    assert branches.batch is not None
    return branches.select_idxs(branches.batch["row"].bincount().cumsum(0) - 1)


def _check_tokenizer(path: str, policy: str) -> None:
    """Raise :class:`ConfigError` unless both models have the same vocabulary."""
    from transformers import AutoTokenizer

    if Path(path).is_dir() and not (Path(path) / "tokenizer_config.json").is_file():
        raise ConfigError(
            f"reward model {path} has no tokenizer, so its vocabulary cannot be compared with the policy's",
            path="reward.options.path",
            remedy="copy the tokenizer's files into its folder",
        )
    own, theirs = AutoTokenizer.from_pretrained(path).get_vocab(), AutoTokenizer.from_pretrained(policy).get_vocab()
    if own != theirs:
        raise ConfigError(
            f"reward model {path} has a different vocabulary ({len(own)} tokens) than the policy ({len(theirs)})",
            path="reward.options.path",
            remedy="train one from the policy's model, or serve this one behind reward.source = 'remote'",
        )
