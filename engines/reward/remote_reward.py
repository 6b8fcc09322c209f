"""Rewards that somebody else computes: rows as JSON over HTTP, numbers back."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import torch

from asyncrl.data import DataProto
from asyncrl.errors import ConfigError, EnvironmentDeadlineError, RewardError
from asyncrl.rewards.json_service import JSONService
from asyncrl.telemetry.json_form import to_json
from engines.reward.row_texts import RowTexts

__all__ = ["RemoteReward"]

_SHOWN_CHARACTERS = 300


class RemoteReward:
    """Asks an HTTP server for the reward of every row (:class:`asyncrl.interfaces.RewardModel`).

    One request has up to ``batch_size`` rows:

        POST url  {"rows": [{"completion": ..., "prompt": ..., "task": {...}, "reply": ..., "info": {...}, ...}, ...]}
        answer    {"rewards": [1.0, ...]}

    ``completion`` is the text of the sampled tokens, ``prompt`` that before the first of them; the rest are the
    trajectory's columns of objects. Requests that fail in passing are sent again until the deadline
    (:class:`~asyncrl.rewards.json_service.JSONService`); anything else is an error at once. No failure becomes a
    number.

    Args:
        url: where to post.
        tokenizer: the policy's, given by the run, for the texts; None leaves them out.
        deadline_s: for one answer, all tries together.
        concurrency: requests at once.
        batch_size: rows of a request.
        api_key_env: environment variable that holds a bearer token.

    Raises:
        ConfigError: a value that cannot be used.
    """

    def __init__(
        self,
        *,
        url: str,
        tokenizer: str | None = None,
        deadline_s: float = 180.0,
        concurrency: int = 16,
        batch_size: int = 64,
        api_key_env: str = "",
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}", path="batch_size", remedy="1 or more")
        self._service = JSONService(url, deadline_s=deadline_s, concurrency=concurrency, key_variable=api_key_env)
        self._batch_size = batch_size
        self._texts = RowTexts(tokenizer) if tokenizer is not None else None
        self._closed = False

    async def score(self, batch: DataProto) -> DataProto:
        """Column ``rewards`` ([B] float32) in the rows' order.

        Raises:
            RewardError: the server could not be asked, or its answer is not one finite number for each row.
        """
        if self._closed:
            raise RewardError(f"{self._service.url} was asked for rewards after it was closed")
        rows = await asyncio.to_thread(self._rows, batch)
        parts = [rows[begin : begin + self._batch_size] for begin in range(0, len(rows), self._batch_size)]
        try:
            async with asyncio.TaskGroup() as calls:
                running = [calls.create_task(self._ask(part)) for part in parts]
        except BaseExceptionGroup as group:
            first = group.exceptions[0]
            raise first from first.__cause__
        rewards = [reward for call in running for reward in call.result()]
        return DataProto.from_dict(tensors={"rewards": torch.tensor(rewards, dtype=torch.float32)})

    async def close(self) -> None:
        """Leave the server. Idempotent."""
        self._closed = True
        await self._service.close()

    def _rows(self, batch: DataProto) -> list[dict[str, Any]]:
        columns = batch.non_tensor_batch
        rows: list[dict[str, Any]] = [{name: columns[name][row] for name in columns} for row in range(len(batch))]
        if self._texts is not None:
            for row, (prompt, completion) in zip(rows, self._texts.of(batch), strict=True):
                row.update({"prompt": prompt, "completion": completion})
        return rows

    async def _ask(self, rows: list[dict[str, Any]]) -> list[float]:
        try:
            record = await self._service.post({"rows": to_json(rows)})
        except EnvironmentDeadlineError as error:
            raise RewardError(str(error), how="deadline") from error
        rewards = record.get("rewards") if isinstance(record, dict) else None
        url, said = self._service.url, json.dumps(record)[:_SHOWN_CHARACTERS]
        if not isinstance(rewards, list) or len(rewards) != len(rows):
            raise RewardError(f'{url} must answer {{"rewards": [...]}} of {len(rows)} numbers: {said}', how="value")
        for row, reward in enumerate(rewards):
            if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
                raise RewardError(f"{url} gave row {row} the reward {reward!r}, which is no finite number", how="value")
        return [float(reward) for reward in rewards]
