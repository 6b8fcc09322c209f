"""The supervised warm start: conversations in, an optimizer step per batch, the next batch tokenized meanwhile."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from asyncrl.agents.chat import ChatRenderer
from asyncrl.data import DataProto
from asyncrl.data.ragged import ragged_from_list
from asyncrl.datasets import open_conversations
from asyncrl.interfaces import EnvironmentFactory, Message, Tool

__all__ = ["conversation_rows", "demonstrations", "file_conversations", "supervise"]

Conversations = Callable[[int], Sequence[Message]]
"""Conversation number i, from 0 without an end."""

_AHEAD = 2
"""Batches handed to the trainer at once: one runs, one waits, so the trainer never idles and memory stays bounded."""


class SupervisedTrainer(Protocol):
    """The call the warm start makes on the trainer's worker group."""

    def supervise(self, batch: DataProto) -> Any: ...


def demonstrations(environments: EnvironmentFactory) -> tuple[Conversations, Sequence[Tool]]:
    """The environment's own demonstrations, and the tools its prompts declare."""
    return environments.demonstration, environments.make().tools


def file_conversations(data: Path | Sequence[str], *, seed: int) -> Conversations:
    """Conversations of a file of any kind that :mod:`asyncrl.datasets` reads, shuffled anew each time round.

    Raises:
        InvalidDataError: a row is no conversation; names file and row. Also if there is none.
    """
    stream = open_conversations(data, seed=seed, key="sft.data")
    stream.check()
    return lambda index: stream[index].messages


def conversation_rows(
    renderer: ChatRenderer, conversations: Sequence[Sequence[Message]], tools: Sequence[Tool]
) -> DataProto:
    """Ragged ``input_ids`` and ``loss_mask`` (True on the assistant's own tokens) for B conversations."""
    encoded = [renderer.encode_conversation(messages, tools) for messages in conversations]
    return DataProto.from_dict(
        tensors={
            "input_ids": ragged_from_list([torch.tensor(row.token_ids, dtype=torch.int64) for row in encoded]),
            "loss_mask": ragged_from_list([torch.tensor(row.loss_mask, dtype=torch.bool) for row in encoded]),
        }
    )


async def supervise(
    trainer: SupervisedTrainer,
    conversations: Conversations,
    *,
    renderer: ChatRenderer,
    tools: Sequence[Tool],
    steps: int,
    batch_size: int,
    on_step: Callable[[int, dict[str, float]], None] | None = None,
) -> None:
    """Run ``steps`` optimizer steps on consecutive batches; ``on_step(step, metrics)`` after each, from 1."""

    def rows(step: int) -> DataProto:
        first = step * batch_size
        return conversation_rows(renderer, [conversations(first + row) for row in range(batch_size)], tools)

    running: deque[tuple[int, Any]] = deque()

    async def finish_oldest() -> None:
        step, future = running.popleft()
        metrics: dict[str, float] = (await future)[0]
        if on_step is not None:
            on_step(step, metrics)

    for step in range(steps):
        batch = await asyncio.to_thread(rows, step)
        if len(running) == _AHEAD:
            await finish_oldest()
        running.append((step + 1, trainer.supervise(batch)))
    while running:
        await finish_oldest()
