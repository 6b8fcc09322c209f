"""``asyncrl train-reward-model``: comparisons in, a model that scores answers out."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import AsyncExitStack
from itertools import pairwise
from typing import Any

import numpy as np

from asyncrl.agents.chat import ChatRenderer
from asyncrl.config import RewardTrainingConfig
from asyncrl.datasets import Preference, open_dataset, read_preference
from asyncrl.errors import InvalidDataError
from asyncrl.interfaces import Message, Tracker
from asyncrl.parts import make_part
from asyncrl.pipeline.critic_worker import CriticSpec, CriticWorker
from asyncrl.pipeline.placement import GroupRequest, group_maker
from asyncrl.pipeline.preferences import EncodedPair, encode_pairs, pair_rows, split_held_out
from asyncrl.telemetry.progress import Progress
from asyncrl.telemetry.run_directory import RunDirectory
from asyncrl.telemetry.trackers import open_trackers

__all__ = ["train_reward_model"]

_AHEAD = 2
"""Batches handed to the trainer at once: one runs, one waits."""

_PAIRS_ASKED = 64
"""Pairs of one call where nothing is learned from them."""


async def train_reward_model(config: RewardTrainingConfig, run: RunDirectory, progress: Progress) -> dict[str, Any]:
    """Learn from the configured comparisons; returns the summary, which is also written.

    The model is written to the run's folder ``model``: for sequence classification with one label, with the tokenizer.

    Raises:
        InvalidDataError: the file holds no comparisons that can be used.
    """
    began_s = time.monotonic()
    tracker = open_trackers(
        config.telemetry.trackers, run.path, name=config.name, config=config.model_dump(mode="json")
    )
    async with AsyncExitStack() as stack:
        stack.callback(tracker.close)
        preferences = await asyncio.to_thread(_preferences, config)
        model = await asyncio.to_thread(_model, config, run, preferences)
        pairs, left_out = await asyncio.to_thread(_encoded, model, preferences, max_tokens=config.max_tokens)
        if not pairs:
            raise InvalidDataError(f"every preference is longer than max_tokens = {config.max_tokens}")
        if left_out:
            progress.note(f"{left_out} pairs are longer than max_tokens = {config.max_tokens} and left out")
        learned, asked = split_held_out(pairs, share=config.preferences.held_out_share, seed=config.seed)
        batches = _batches(learned, config)
        group = await _trainer(config, run, stack)
        await group.build(model, _settings(config, steps=len(batches)))
        before = await _ask(group, asked)
        last = await _learn(group, batches, run, progress, tracker)
        after = await _ask(group, asked)
        folder = run.path / "model"
        exported = folder if model != str(folder) else run.path / "reward_model"
        await group.export(exported)
        summary = {
            "model": str(exported),
            "pairs": len(learned),
            "pairs_left_out": left_out,
            "steps": len(batches),
            "loss": last["loss"],
            "accuracy": last["accuracy"],
            "held_out_pairs": len(asked),
            "held_out_accuracy_before": before,
            "held_out_accuracy": after,
            "wall_s": time.monotonic() - began_s,
        }
        run.write_summary(summary)
        return summary


def _preferences(config: RewardTrainingConfig) -> list[Preference]:
    wanted = config.preferences
    return list(open_dataset(wanted.files, read_preference, columns=wanted.columns, key="preferences.files"))


def _model(config: RewardTrainingConfig, run: RunDirectory, preferences: list[Preference]) -> str:
    """Where the model to begin with is; one from scratch gets its tokenizer from the better answers."""
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


def _encoded(model: str, preferences: list[Preference], *, max_tokens: int) -> tuple[list[EncodedPair], int]:
    from transformers import AutoTokenizer

    return encode_pairs(ChatRenderer(AutoTokenizer.from_pretrained(model)), preferences, max_tokens=max_tokens)


def _batches(pairs: list[EncodedPair], config: RewardTrainingConfig) -> list[list[EncodedPair]]:
    """All batches of all epochs, each pass in an order of its own; the last of a pass may be smaller."""
    batches: list[list[EncodedPair]] = []
    for epoch in range(config.epochs):
        order = np.random.default_rng([config.seed, epoch]).permutation(len(pairs)).tolist()
        cuts = [*range(0, len(pairs), config.batch_size), len(pairs)]
        batches += [[pairs[place] for place in order[begin:end]] for begin, end in pairwise(cuts)]
    return batches


async def _trainer(config: RewardTrainingConfig, run: RunDirectory, stack: AsyncExitStack) -> Any:
    trainer = config.trainer
    spec = CriticSpec(engine=trainer.engine, engine_options=dict(trainer.options), path="trainer.engine")
    request = GroupRequest(
        "trainer", "trainer", CriticWorker, spec, trainer.world_size, trainer.num_cpus, trainer.num_gpus
    )
    group: Any = group_maker(config.cluster, [request], log_folder=run.logs, stack=stack)(request)
    stack.push_async_callback(group.aclose)
    await group.ready()
    return group


def _settings(config: RewardTrainingConfig, *, steps: int) -> dict[str, Any]:
    trainer = config.trainer
    return {
        "lr": trainer.lr,
        "schedule": trainer.schedule,
        "warmup_steps": min(trainer.warmup_steps, steps - 1),
        "total_steps": steps,
        "weight_decay": trainer.weight_decay,
        "max_grad_norm": trainer.max_grad_norm,
        "threads": trainer.threads,
        "centring": config.centring,
        "dtype": config.model.dtype,
        "max_tokens_per_microbatch": config.max_tokens_per_microbatch,
        "gradient_checkpointing": config.gradient_checkpointing,
        "seed": config.seed,
    }


async def _learn(
    group: Any, batches: list[list[EncodedPair]], run: RunDirectory, progress: Progress, tracker: Tracker
) -> dict[str, float]:
    """One step a batch; returns the metrics of the last."""
    progress.stage("reward model", len(batches))
    running: deque[tuple[int, Any]] = deque()
    metrics: dict[str, float] = {}

    async def finish_oldest() -> dict[str, float]:
        step, future = running.popleft()
        told: dict[str, float] = (await future)[0]
        named = {f"train/{name}": value for name, value in told.items()}
        run.log_metrics(named, step=step, version=step)
        tracker.log(named, step=step)
        progress.update(loss=told["loss"])
        progress.advance()
        return told

    for step, batch in enumerate(batches, start=1):
        if len(running) == _AHEAD:
            metrics = await finish_oldest()
        running.append((step, group.compare(await asyncio.to_thread(pair_rows, batch))))
    while running:
        metrics = await finish_oldest()
    return metrics


async def _ask(group: Any, pairs: list[EncodedPair]) -> float | None:
    """Share of pairs whose chosen answer has the higher score, ties half; None without pairs."""
    if not pairs:
        return None
    right = 0.0
    for begin in range(0, len(pairs), _PAIRS_ASKED):
        rows = await asyncio.to_thread(pair_rows, pairs[begin : begin + _PAIRS_ASKED])
        scored = await group.scores(rows)
        scores = scored.batch["scores"]
        right += float(((scores[0::2] - scores[1::2]).sign() + 1).sum()) / 2
    return right / len(pairs)
