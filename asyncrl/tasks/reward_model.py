"""``asyncrl train-reward-model``: comparisons in, a model that scores answers out.

Comparisons of answers as rows that take turns: chosen, rejected, chosen, rejected, ...
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch

from asyncrl.config import RewardTrainingConfig
from asyncrl.data import DataProto
from asyncrl.data.ragged import ragged_from_list
from asyncrl.datasets import Preference, open_dataset, read_preference
from asyncrl.datasets.rows import PREFERENCE_COLUMNS
from asyncrl.errors import InvalidDataError
from asyncrl.interfaces import Message
from asyncrl.plugins import make_part
from asyncrl.rollout.chat import ChatRenderer, load_renderer
from asyncrl.runtime import in_thread
from asyncrl.telemetry.progress import Progress
from asyncrl.telemetry.run_directory import RunDirectory
from asyncrl.telemetry.trackers import open_trackers
from asyncrl.trainer.assembly import WorkerGroupRequest, group_maker
from asyncrl.trainer.sft import train_ahead
from asyncrl.trainer.workers import CriticGroup, CriticSpec, CriticWorker


@dataclass(frozen=True, slots=True)
class EncodedPair:
    """The tokens of a preference, and how much better the chosen answer is (0 if that is not known)."""

    chosen: tuple[int, ...]
    rejected: tuple[int, ...]
    margin: float = 0.0


def encode_pairs(
    renderer: ChatRenderer, preferences: Iterable[Preference], *, max_seq_len: int
) -> tuple[list[EncodedPair], int]:
    """Return each pair's answers, up to their last assistant turn, as the tokens they would have been sampled as.

    Pairs with a row above ``max_seq_len`` are left out, and their number is returned, too.

    Raises:
        InvalidDataError: a margin is below 0.
    """
    pairs: list[EncodedPair] = []
    left_out = 0
    for number, each in enumerate(preferences):
        if each.margin is not None and each.margin < 0:
            raise InvalidDataError(
                f"preference {number} has the margin {each.margin}: below 0 the rejected answer would be better"
            )
        chosen, rejected = (
            renderer.encode_conversation([*each.prompt, *answer]).token_ids for answer in (each.chosen, each.rejected)
        )
        if max(len(chosen), len(rejected)) > max_seq_len:
            left_out += 1
        else:
            pairs.append(EncodedPair(chosen, rejected, each.margin or 0.0))
    return pairs, left_out


def split_held_out(
    pairs: Sequence[EncodedPair], *, share: float, seed: int
) -> tuple[list[EncodedPair], list[EncodedPair]]:
    """Split off a ``share`` of all pairs, drawn by ``seed``, as held out; at least one is left to train on."""
    order = np.random.default_rng(seed).permutation(len(pairs)).tolist()
    held_out = min(round(share * len(pairs)), len(pairs) - 1)
    return [pairs[place] for place in sorted(order[held_out:])], [pairs[place] for place in sorted(order[:held_out])]


def pair_rows(pairs: Sequence[EncodedPair]) -> DataProto:
    """Return rows [2 P] with ``input_ids`` (ragged) and ``margins``: chosen, rejected, chosen, rejected, ..."""
    rows = [torch.tensor(ids, dtype=torch.int64) for pair in pairs for ids in (pair.chosen, pair.rejected)]
    margins = torch.tensor([pair.margin for pair in pairs for _ in range(2)], dtype=torch.float32)
    return DataProto.from_dict(tensors={"input_ids": ragged_from_list(rows, dtype=torch.int64), "margins": margins})


_PAIRS_PER_CALL = 64
"""Pairs of one call that only scores them."""


async def train_reward_model(config: RewardTrainingConfig, run: RunDirectory, progress: Progress) -> dict[str, Any]:
    """Train on the configured comparisons; return the summary, which is also written.

    The run's folder ``reward_model`` gets a model for sequence classification with one label, and the tokenizer.

    Raises:
        InvalidDataError: no comparison of the file can be used.
    """
    began_s = time.monotonic()
    tracker = open_trackers(
        config.telemetry.trackers, run.path, name=config.name, config=config.model_dump(mode="json")
    )

    def learned(step: int, metrics: Mapping[str, float]) -> None:
        named = {f"train/{name}": value for name, value in metrics.items()}
        run.log_metrics(named, step=step, version=step)
        tracker.log(named, step=step)
        progress.update(loss=metrics["loss"])
        progress.advance()

    async with AsyncExitStack() as stack:
        stack.callback(tracker.close)
        preferences = await asyncio.to_thread(_preferences, config)
        model = await in_thread(_model, config, run, preferences)
        pairs, left_out = await asyncio.to_thread(_encoded, model, preferences, max_seq_len=config.max_seq_len)
        if not pairs:
            raise InvalidDataError(f"every preference is longer than max_seq_len = {config.max_seq_len}")
        if left_out:
            progress.note(f"{left_out} pairs are longer than max_seq_len = {config.max_seq_len} and left out")
        trained, held_out = split_held_out(pairs, share=config.preferences.held_out_share, seed=config.seed)
        batches = _batches(trained, config)
        group = await _trainer(config, run, stack)
        await group.build(model, _settings(config, steps=len(batches)))
        before = await _accuracy(group, held_out)
        progress.stage("reward model", len(batches))
        last = await train_ahead(batches, pair_rows, group.compare, on_step=learned)
        after = await _accuracy(group, held_out)
        exported = run.path / "reward_model"
        await group.export(exported)
        summary = {
            "model": str(exported),
            "pairs": len(trained),
            "pairs_left_out": left_out,
            "steps": len(batches),
            "loss": last["loss"],
            "accuracy": last["accuracy"],
            "held_out_pairs": len(held_out),
            "held_out_accuracy_before": before,
            "held_out_accuracy": after,
            "wall_s": time.monotonic() - began_s,
        }
        run.write_summary(summary)
        return summary


def _preferences(config: RewardTrainingConfig) -> list[Preference]:
    wanted = config.preferences
    columns, known = wanted.columns, PREFERENCE_COLUMNS
    return list(open_dataset(wanted.files, read_preference, columns=columns, known=known, key="preferences.files"))


def _model(config: RewardTrainingConfig, run: RunDirectory, preferences: list[Preference]) -> str:
    """Return where the model to begin with is; one from scratch gets its tokenizer from the better answers."""
    if config.model.path is not None:
        return config.model.path
    assert config.model.source is not None

    def conversation(index: int) -> list[Message]:
        pair = preferences[index % len(preferences)]
        return [*pair.prompt, *pair.chosen]

    folder = run.path / "model"
    make_part(
        "asyncrl.model_sources",
        config.model.source,
        folder,
        options=config.model.options,
        path="model.source",
        seed=config.seed,
        demonstrations=conversation,
    )
    return str(folder)


def _encoded(model: str, preferences: list[Preference], *, max_seq_len: int) -> tuple[list[EncodedPair], int]:
    return encode_pairs(load_renderer(model), preferences, max_seq_len=max_seq_len)


def _batches(pairs: list[EncodedPair], config: RewardTrainingConfig) -> list[list[EncodedPair]]:
    """Return all batches of all epochs, each pass in an order of its own; the last of a pass may be smaller."""
    batches: list[list[EncodedPair]] = []
    for epoch in range(config.epochs):
        order = np.random.default_rng([config.seed, epoch]).permutation(len(pairs)).tolist()
        cuts = [*range(0, len(pairs), config.batch_size), len(pairs)]
        batches += [[pairs[place] for place in order[begin:end]] for begin, end in pairwise(cuts)]
    return batches


async def _trainer(config: RewardTrainingConfig, run: RunDirectory, stack: AsyncExitStack) -> CriticGroup:
    trainer = config.trainer
    spec = CriticSpec(
        engine=trainer.engine,
        engine_options=dict(trainer.options),
        path="trainer.engine",
        mesh=trainer.mesh_shape(),
    )
    request = WorkerGroupRequest(
        role="trainer",
        name="trainer",
        worker=CriticWorker,
        spec=spec,
        world_size=trainer.world_size,
        num_cpus=trainer.num_cpus,
        num_gpus=trainer.num_gpus,
    )
    group = group_maker(config.cluster, [request], log_folder=run.logs, stack=stack)(request)
    stack.push_async_callback(group.aclose)
    await group.ready()
    return cast("CriticGroup", group)


def _settings(config: RewardTrainingConfig, *, steps: int) -> dict[str, Any]:
    trainer = config.trainer
    return {
        "lr": trainer.lr,
        "lr_scheduler_type": trainer.lr_scheduler_type,
        "warmup_steps": min(trainer.warmup_steps, steps - 1),
        "total_steps": steps,
        "weight_decay": trainer.weight_decay,
        "max_grad_norm": trainer.max_grad_norm,
        "threads": trainer.threads,
        "center_rewards_coefficient": config.center_rewards_coefficient,
        "dtype": config.model.dtype,
        "max_tokens_per_microbatch": config.max_tokens_per_microbatch,
        "gradient_checkpointing": config.gradient_checkpointing,
        "seed": config.seed,
    }


async def _accuracy(group: CriticGroup, pairs: list[EncodedPair]) -> float | None:
    """Return the share of pairs whose chosen answer has the higher score, ties half; None without pairs."""
    if not pairs:
        return None
    right = 0.0
    for begin in range(0, len(pairs), _PAIRS_PER_CALL):
        rows = await asyncio.to_thread(pair_rows, pairs[begin : begin + _PAIRS_PER_CALL])
        scored = await group.scores(rows)
        assert scored.batch is not None
        scores = scored.batch["scores"]
        right += float(((scores[0::2] - scores[1::2]).sign() + 1).sum()) / 2
    return right / len(pairs)
