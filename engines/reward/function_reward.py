"""Rewards by a Python function that somebody wrote: one row in, one number out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from asyncrl.data import DataProto
from asyncrl.errors import ConfigError, RewardError, SchemaError
from asyncrl.rewards.user_function import UserFunction
from engines.reward.row_texts import RowTexts, sampled_tokens

__all__ = ["FunctionReward"]

_TEXTS = ("completion", "prompt")


class FunctionReward:
    """Calls a function for every row of a trajectory batch (:class:`asyncrl.interfaces.RewardModel`).

    The function names what it wants to know as parameters, and gets it by keyword:

    ============== ====================================================================================================
    completion     text of the tokens that the policy sampled (special tokens left out); needs ``tokenizer``
    prompt         text of the tokens before the first sampled one; needs ``tokenizer``
    token_ids      list of the sampled tokens' ids
    any column     the row's value in a column of ``batch.non_tensor_batch``. Trajectories bring ``task`` (dict),
                   ``reply`` (text of the last turn), ``info`` (of the environment's last step), ``finish_reason``
    ``**others``   everything above (the texts only with a tokenizer)
    ============== ====================================================================================================

    A column named like one of the first three is passed instead of them. The function returns a finite number (a
    boolean counts as 0 or 1):

        def exact(completion: str, task: dict[str, Any]) -> float:
            return float(completion.strip() == task["answer"])

    A plain function runs in processes of its own, one row at a time each, so it may block, set alarms, leak or crash;
    one that passes its deadline is killed with everything it started. A process that somebody kills is replaced, and
    asked for its row again; three that die under the same row are the function's doing.

    An ``async def`` function runs on the event loop, ``concurrency`` rows at a time, and is cancelled at its deadline.

    Args:
        function: ``package.module:name``. The module is imported here too, to learn the parameters.
        deadline_s: longest time for one row, in one process.
        processes: at most so many run; they start when needed.
        tokenizer: name or folder, as ``transformers.AutoTokenizer`` takes it.
        concurrency: rows of an ``async def`` function that run at once.
        start_deadline_s: longest time for starting a process and importing the module there.

    Raises:
        ConfigError: the function cannot be imported or called like this, or a number is out of range.
    """

    def __init__(
        self,
        *,
        function: str,
        deadline_s: float = 10.0,
        processes: int = 1,
        tokenizer: str | None = None,
        concurrency: int = 64,
        start_deadline_s: float = 60.0,
    ) -> None:
        self._name = function
        self._function = UserFunction(
            function,
            deadline_s=deadline_s,
            processes=processes,
            concurrency=concurrency,
            start_deadline_s=start_deadline_s,
        )
        self._wanted, self._required = self._function.wanted, self._function.required
        self._takes_others = self._function.takes_others
        missing = [name for name in _TEXTS if name in self._required]
        if missing and tokenizer is None:
            raise ConfigError(
                f"{function} wants the text {missing[0]!r}, but there is no tokenizer to decode with",
                path="tokenizer",
                remedy="name the model's tokenizer, or let the function take token_ids",
            )
        self._texts = RowTexts(tokenizer) if tokenizer is not None else None
        self._closed = False

    async def score(self, batch: DataProto) -> DataProto:
        """Column ``rewards`` ([B] float32) in the rows' order. Rows are scored at once, as far as there are places.

        Raises:
            RewardError: for one row the function raised, returned no finite number, passed its deadline or took its
                processes along; the message names row and function. The other rows' calls are cancelled.
            SchemaError: the batch lacks a column that the function requires.
        """
        if self._closed:
            raise RewardError(f"{self._name} was asked for rewards after it was closed")
        # Decoding and the first load of the tokenizer take longer than an event loop may stand still.
        rows = await asyncio.to_thread(lambda: list(self._arguments(batch)))
        try:
            async with asyncio.TaskGroup() as calls:
                running = [calls.create_task(self._score_row(batch, row, given)) for row, given in enumerate(rows)]
        except BaseExceptionGroup as group:
            first = group.exceptions[0]
            raise first from first.__cause__
        rewards = torch.tensor([call.result() for call in running], dtype=torch.float32)
        return DataProto.from_dict({"rewards": rewards})

    async def close(self) -> None:
        """End all processes and what they started; calls that still run fail. Idempotent."""
        self._closed = True
        await self._function.close()

    async def _score_row(self, batch: DataProto, row: int, arguments: dict[str, Any]) -> float:
        try:
            value = await self._function.call(arguments)
        except RewardError as error:
            raise RewardError(
                f"no reward for {_row_name(batch, row)}: {self._name} {error}", how=error.how
            ) from error.__cause__
        return value["score"] if isinstance(value, dict) else value

    def _arguments(self, batch: DataProto) -> Iterator[dict[str, Any]]:
        """What the function gets for each row."""
        columns = batch.non_tensor_batch
        derived = {"token_ids", *(_TEXTS if self._texts is not None else ())} - set(columns)
        unknown = sorted(self._required - derived - set(columns))
        if unknown:
            raise SchemaError(
                f"{self._name} requires {', '.join(unknown)}, which the batch has not: its columns of objects are "
                f"{', '.join(sorted(columns)) or 'none'}"
            )
        wanted = derived | set(columns) if self._takes_others else (derived | set(columns)) & self._wanted
        tokens = list(sampled_tokens(batch)) if wanted & derived else [((), ())] * len(batch)
        for row, (prompt, sampled) in enumerate(tokens):
            given: dict[str, Any] = {name: _plain(columns[name][row]) for name in wanted & set(columns)}
            if "token_ids" in wanted & derived:
                given["token_ids"] = list(sampled)
            for name, ids in (("completion", sampled), ("prompt", prompt)):
                if self._texts is not None and name in wanted & derived:
                    given[name] = self._texts.text(ids)
            yield given


def _plain(value: object) -> object:
    """Numpy scalars as Python's own, so that a scoring process need not import numpy for them."""
    return value.item() if isinstance(value, np.generic) else value


def _row_name(batch: DataProto, row: int) -> str:
    columns = batch.batch.keys() if batch.batch is not None else ()
    if batch.batch is not None and "slot" in columns and "row" in columns:
        return f"row {row} (slot {int(batch.batch['slot'][row])}, row {int(batch.batch['row'][row])} of its group)"
    return f"row {row}"
