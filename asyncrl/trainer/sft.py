"""The supervised warm start: conversations in, an optimizer step per batch, the next batch tokenized meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TypeVar

import torch

from asyncrl.data import DataProto
from asyncrl.data.ragged import ragged_from_list
from asyncrl.datasets import open_conversations
from asyncrl.interfaces import EnvironmentFactory, Message, Tool
from asyncrl.rollout.chat import ChatRenderer
from asyncrl.runtime import in_thread
from asyncrl.trainer.workers import TrainerGroup

_Batch = TypeVar("_Batch")

Conversations = Callable[[int], Sequence[Message]]
"""Conversation number i, from 0 without an end."""

_AHEAD = 2
"""Batches handed to the trainer at once: one runs, one waits, so the trainer never idles and memory stays bounded."""


def demonstrations(environments: EnvironmentFactory) -> tuple[Conversations, Sequence[Tool]]:
    """Return the environment's own demonstrations, and the tools its prompts declare; an agent declares its own."""
    return environments.demonstration, getattr(environments.make(), "tools", ())


def file_conversations(data: Path | Sequence[str], *, seed: int) -> Conversations:
    """Return conversations of files that :mod:`asyncrl.datasets` reads, shuffled anew each time round.

    Raises:
        InvalidDataError: there is no row, or one is no conversation; names file and row.
    """
    stream = open_conversations(data, seed=seed, key="sft.data")
    stream.check()
    return lambda index: stream[index].messages


def conversation_rows(
    renderer: ChatRenderer, conversations: Sequence[Sequence[Message]], tools: Sequence[Tool]
) -> DataProto:
    """Return ragged ``input_ids`` and ``loss_mask`` (True on the assistant's own tokens) of B conversations."""
    encoded = [renderer.encode_conversation(messages, tools) for messages in conversations]
    return DataProto.from_dict(
        tensors={
            "input_ids": ragged_from_list([torch.tensor(row.token_ids, dtype=torch.int64) for row in encoded]),
            "loss_mask": ragged_from_list([torch.tensor(row.loss_mask, dtype=torch.bool) for row in encoded]),
        }
    )


async def supervise(
    trainer: TrainerGroup,
    conversations: Conversations,
    *,
    renderer: ChatRenderer,
    tools: Sequence[Tool],
    steps: int,
    batch_size: int,
    on_step: Callable[[int, Mapping[str, float]], None] = lambda _step, _metrics: None,
) -> None:
    """Run ``steps`` optimizer steps on consecutive batches; ``on_step(step, metrics)`` after each, from 1."""

    def rows(step: int) -> DataProto:
        first = step * batch_size
        return conversation_rows(renderer, [conversations(first + row) for row in range(batch_size)], tools)

    await train_ahead(range(steps), rows, trainer.supervise, on_step=on_step)


async def train_ahead(
    batches: Iterable[_Batch],
    rows: Callable[[_Batch], DataProto],
    train: Callable[[DataProto], Awaitable[Sequence[Mapping[str, float]]]],
    *,
    on_step: Callable[[int, Mapping[str, float]], None],
) -> Mapping[str, float]:
    """Train a step on each batch, whose rows are made in a thread meanwhile; return the metrics of the last step.

    ``on_step(step, metrics)`` is called after each, from 1.
    """
    running: deque[Awaitable[Sequence[Mapping[str, float]]]] = deque()
    metrics: Mapping[str, float] = {}
    done = count(1)

    async def finish_oldest() -> None:
        nonlocal metrics
        (metrics, *_ranks) = await running.popleft()
        on_step(next(done), metrics)

    for batch in batches:
        made = await in_thread(rows, batch)
        if len(running) == _AHEAD:
            await finish_oldest()
        running.append(train(made))
    while running:
        await finish_oldest()
    return metrics
