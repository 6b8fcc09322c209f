"""Rewards from an HTTP service: it receives rows as JSON and answers numbers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import torch

from asyncrl.data import DataProto
from asyncrl.errors import EnvironmentDeadlineError, EnvironmentFailure, RewardError
from asyncrl.rewards.scoring import check_count
from asyncrl.rewards.scoring_program import as_number
from asyncrl.rewards.service import JSONService
from asyncrl.runtime import run_all
from asyncrl.telemetry.run_directory import to_json
from engines.reward.function import RowTexts

_SHOWN_CHARACTERS = 300


class RemoteReward:
    """Requests the reward of every row from an HTTP server (:class:`asyncrl.interfaces.RewardModel`).

    One request has up to ``batch_size`` rows:

        POST url  {"rows": [{"completion": ..., "prompt": ..., "task": {...}, "reply": ..., "info": {...}, ...}, ...]}
        answer    {"rewards": [1.0, ...]}

    ``completion`` is the text of the sampled tokens, ``prompt`` that before the first of them; the rest are the
    trajectory's columns of objects. :class:`~asyncrl.rewards.service.JSONService` retries transient failures.

    Args:
        tokenizer: the policy's, given by the run, for the two texts; None leaves them out.
        batch_size: rows of a request.
        url, deadline_s, concurrency, api_key_env: as for :class:`~asyncrl.rewards.service.JSONService`.
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
        check_count("batch_size", batch_size)
        self._service = JSONService(url, deadline_s=deadline_s, concurrency=concurrency, key_variable=api_key_env)
        self._batch_size = batch_size
        self._texts = RowTexts(tokenizer) if tokenizer is not None else None
        self._closed = False

    @classmethod
    def check_options(cls, **options: Any) -> None:
        """Raise ConfigError as the constructor, which connects to nothing."""
        cls(**options)

    async def score(self, batch: DataProto) -> DataProto:
        """Return the column ``rewards`` ([B] float32); raise RewardError if the answer lacks a number for each row."""
        if self._closed:
            raise RewardError(f"score() of {self._service.url} was called after close()")
        rows = await asyncio.to_thread(self._rows, batch)
        parts = [rows[begin : begin + self._batch_size] for begin in range(0, len(rows), self._batch_size)]
        rewards = [reward for part in await run_all(self._request(part) for part in parts) for reward in part]
        return DataProto.from_dict(tensors={"rewards": torch.tensor(rewards, dtype=torch.float32)})

    async def close(self) -> None:
        self._closed = True
        await self._service.close()

    def _rows(self, batch: DataProto) -> list[dict[str, Any]]:
        columns = batch.non_tensor_batch
        rows: list[dict[str, Any]] = [{name: columns[name][row] for name in columns} for row in range(len(batch))]
        if self._texts is not None:
            for row, (prompt, completion) in zip(rows, self._texts.of(batch), strict=True):
                row.update({"prompt": prompt, "completion": completion})
        return rows

    async def _request(self, rows: list[dict[str, Any]]) -> list[float]:
        try:
            record = await self._service.post({"rows": to_json(rows)})
        except EnvironmentFailure as error:
            how = "deadline" if isinstance(error, EnvironmentDeadlineError) else "raised"
            raise RewardError(str(error), how=how) from error
        rewards = record.get("rewards") if isinstance(record, dict) else None
        url, shown = self._service.url, json.dumps(record)[:_SHOWN_CHARACTERS]
        if not isinstance(rewards, list) or len(rewards) != len(rows):
            raise RewardError(f'{url} must answer {{"rewards": [...]}} of {len(rows)} numbers: {shown}', how="value")
        for row, reward in enumerate(rewards):
            if isinstance(reward, bool) or "value" not in as_number(reward):
                shown = repr(reward)[:_SHOWN_CHARACTERS]
                raise RewardError(f"{url} gave row {row} the reward {shown}, not a finite float32", how="value")
        return [float(reward) for reward in rewards]
