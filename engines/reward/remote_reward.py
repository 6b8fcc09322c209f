"""Rewards that somebody else computes: rows as JSON over HTTP, numbers back."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from asyncrl.data import DataProto
from asyncrl.errors import ConfigError, RewardError
from engines.reward.row_texts import RowTexts

if TYPE_CHECKING:
    from aiohttp import ClientSession

__all__ = ["RemoteReward"]

_ANSWER_BYTES = 1 << 24
_ERROR_CHARACTERS = 300


class RemoteReward:
    """Asks an HTTP server for the reward of every row (:class:`asyncrl.interfaces.RewardModel`).

    One request has up to ``batch_size`` rows:

        POST url  {"rows": [{"completion": ..., "prompt": ..., "task": {...}, "reply": ..., "info": {...}, ...}, ...]}
        answer    {"rewards": [1.0, ...]}

    ``completion`` is the text of the sampled tokens, ``prompt`` that before the first of them; the rest are the
    trajectory's columns of objects. A request that is not answered in time, refused with a 5xx or 429, or broken off,
    is sent again after a pause that doubles, ``attempts`` times in all; anything else is an error at once. No failure
    becomes a number.

    Args:
        url: where to post.
        tokenizer: the policy's, given by the run, for the texts; None leaves them out.
        deadline_s: longest time for one request.
        attempts: how often it is sent.
        pause_s: before the second attempt.
        concurrency: requests at once.
        batch_size: rows of a request.
        headers: sent with each, for authorisation.

    Raises:
        ConfigError: a value that cannot be used.
    """

    def __init__(
        self,
        *,
        url: str,
        tokenizer: str | None = None,
        deadline_s: float = 60.0,
        attempts: int = 3,
        pause_s: float = 0.5,
        concurrency: int = 16,
        batch_size: int = 64,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"url is {url!r}", path="url", remedy="http://... or https://...")
        for name, value in (("deadline_s", deadline_s), ("pause_s", pause_s)):
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{name} is {value}", path=name, remedy="a positive number of seconds")
        for name, count in (("attempts", attempts), ("concurrency", concurrency), ("batch_size", batch_size)):
            if count < 1:
                raise ConfigError(f"{name} is {count}", path=name, remedy="1 or more")
        self._url = url
        self._deadline_s = deadline_s
        self._attempts = attempts
        self._pause_s = pause_s
        self._batch_size = batch_size
        self._headers = dict(headers or {})
        self._texts = RowTexts(tokenizer) if tokenizer is not None else None
        self._places = asyncio.Semaphore(concurrency)
        self._session: ClientSession | None = None
        self._closed = False

    async def score(self, batch: DataProto) -> DataProto:
        """Column ``rewards`` ([B] float32) in the rows' order.

        Raises:
            RewardError: the server could not be asked, or its answer is not one finite number for each row.
        """
        if self._closed:
            raise RewardError(f"{self._url} was asked for rewards after it was closed")
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
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _rows(self, batch: DataProto) -> list[dict[str, Any]]:
        columns = batch.non_tensor_batch
        rows: list[dict[str, Any]] = [{name: columns[name][row] for name in columns} for row in range(len(batch))]
        if self._texts is not None:
            for row, (prompt, completion) in zip(rows, self._texts.of(batch), strict=True):
                row.update({"prompt": prompt, "completion": completion})
        return rows

    async def _ask(self, rows: list[dict[str, Any]]) -> list[float]:
        body = json.dumps({"rows": rows}, default=str).encode()
        pause_s = self._pause_s
        async with self._places:
            for attempt in range(1, self._attempts + 1):
                try:
                    return self._rewards(await self._post(body), rows=len(rows))
                except _TryAgainError as error:
                    if attempt == self._attempts:
                        raise RewardError(f"{self._url} gave no rewards in {attempt} attempts: {error}") from error
                await asyncio.sleep(pause_s)
                pause_s *= 2
        raise AssertionError("attempts is at least 1")

    async def _post(self, body: bytes) -> bytes:
        from aiohttp import ClientError, ClientSession, ClientTimeout

        if self._session is None:
            self._session = ClientSession(headers={"Content-Type": "application/json", **self._headers})
        deadline = ClientTimeout(total=self._deadline_s)
        try:
            async with self._session.post(self._url, data=body, timeout=deadline) as response:
                answer = await response.content.read(_ANSWER_BYTES + 1)
                status = response.status
        except TimeoutError as error:
            raise _TryAgainError(f"no answer within {self._deadline_s:g} s") from error
        except ClientError as error:
            raise _TryAgainError(f"{type(error).__name__}: {error}") from error
        if status >= 500 or status == 429:
            raise _TryAgainError(f"status {status}: {_shown(answer)}")
        if status != 200:
            raise RewardError(f"{self._url} answered with status {status}: {_shown(answer)}")
        if len(answer) > _ANSWER_BYTES:
            raise RewardError(f"{self._url} answered with more than {_ANSWER_BYTES} bytes")
        return answer

    def _rewards(self, answer: bytes, *, rows: int) -> list[float]:
        try:
            record = json.loads(answer)
        except ValueError as error:
            raise RewardError(f"{self._url} answered no JSON: {_shown(answer)}") from error
        rewards = record.get("rewards") if isinstance(record, dict) else None
        if not isinstance(rewards, list) or len(rewards) != rows:
            raise RewardError(f'{self._url} must answer {{"rewards": [...]}} of {rows} numbers: {_shown(answer)}')
        for row, reward in enumerate(rewards):
            if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
                raise RewardError(f"{self._url} gave row {row} the reward {reward!r}, which is no finite number")
        return [float(reward) for reward in rewards]


class _TryAgainError(Exception):
    """The request may be sent again: scoring changes nothing on the server."""


def _shown(answer: bytes) -> str:
    return answer[:_ERROR_CHARACTERS].decode("utf-8", errors="replace")
