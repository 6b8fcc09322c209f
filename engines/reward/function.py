"""Rewards from a user's Python function, which scores one row at a time; and the texts of trajectories."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncrl.data import DataProto
from asyncrl.data.ragged import rows_of
from asyncrl.errors import ConfigError, RewardError, SchemaError
from asyncrl.rewards.scoring import UserFunction
from asyncrl.runtime import run_all

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def sampled_tokens(batch: DataProto) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield for each row the tokens before the first sampled one, and the sampled tokens.

    The column ``weight_versions`` marks the sampled tokens; without it, ``loss_mask`` does, which may leave some out.

    Raises:
        SchemaError: the batch lacks ``input_ids``, or both of these columns.
    """
    columns: Mapping[str, torch.Tensor] = batch.batch if batch.batch is not None else {}
    marks = next((name for name in ("weight_versions", "loss_mask") if name in columns.keys()), None)  # noqa: SIM118
    if marks is None or "input_ids" not in columns.keys():  # noqa: SIM118  a TensorDict iterates over rows
        raise SchemaError("token_ids and texts need the columns input_ids and weight_versions (or loss_mask)")
    for ids, mark in zip(rows_of(columns["input_ids"]), rows_of(columns[marks]), strict=True):
        sampled = mark >= 0 if marks == "weight_versions" else mark.bool()
        first = int(sampled.int().argmax()) if bool(sampled.any()) else len(ids)
        yield tuple(ids[:first].tolist()), tuple(ids[sampled].tolist())


class RowTexts:
    """Decodes tokens with a tokenizer (name or folder) that is loaded at the first use. Thread-safe."""

    def __init__(self, tokenizer: str) -> None:
        self._name = tokenizer
        self._lock = threading.Lock()
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def of(self, batch: DataProto) -> Iterator[tuple[str, str]]:
        """Yield the prompt and the completion of each row, without special tokens."""
        for prompt, sampled in sampled_tokens(batch):
            yield self.text(prompt), self.text(sampled)

    def text(self, token_ids: tuple[int, ...]) -> str:
        """Decode tokens, without special ones."""
        with self._lock:
            if self._tokenizer is None:
                from transformers import AutoTokenizer  # in the lock: two threads cannot import it at a time

                tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self._name)
                self._tokenizer = tokenizer
            decoded = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        assert isinstance(decoded, str)
        return decoded


_TEXTS = ("completion", "prompt")
_TRAJECTORY_COLUMNS = ("task", "reply", "info", "finish_reason")


class FunctionReward:
    """Calls a function for every row of a trajectory batch (:class:`asyncrl.interfaces.RewardModel`).

    The names of the function's parameters select its arguments, which are passed by keyword:

    ============== ====================================================================================================
    completion     text of the tokens that the policy sampled (special tokens left out); needs ``tokenizer``
    prompt         text of the tokens before the first sampled one; needs ``tokenizer``
    token_ids      list of the sampled tokens' ids
    any column     the row's value in a column of ``batch.non_tensor_batch``. Trajectories have ``task`` (dict),
                   ``reply`` (text of the last turn), ``info`` (of the environment's last step), ``finish_reason``
    ``**others``   all of the above (the texts only with a tokenizer)
    ============== ====================================================================================================

    A column with one of the first three names takes its place. The function returns a finite number or a boolean:

        def exact(completion: str, task: dict[str, Any]) -> float:
            return float(completion.strip() == task["answer"])

    :class:`asyncrl.rewards.scoring.UserFunction` runs it, and documents the limits, the processes and their deaths.

    Args:
        function: ``package.module:name``.
        tokenizer: name or folder, as ``transformers.AutoTokenizer`` takes it.
        deadline_s, processes, concurrency, start_deadline_s: as for the user function.
        deterministic: declares that a row gets the same score again; a share of the rows is scored twice, to compare.

    Raises:
        ConfigError: as for the user function; or it takes texts, and no tokenizer is given.
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
        deterministic: bool = False,
    ) -> None:
        self.deterministic = deterministic
        self._name = function
        self._function = UserFunction(
            function,
            deadline_s=deadline_s,
            processes=processes,
            concurrency=concurrency,
            start_deadline_s=start_deadline_s,
        )
        missing = [name for name in _TEXTS if name in self._function.required]
        if missing and tokenizer is None:
            raise ConfigError(
                f"{function} takes the text {missing[0]!r}, which needs a tokenizer to decode the tokens",
                path="tokenizer",
                remedy="name the model's tokenizer, or let the function take token_ids",
            )
        self._texts = RowTexts(tokenizer) if tokenizer is not None else None
        self._closed = False

    @classmethod
    def check_options(cls, *, function: str, **options: Any) -> None:
        """Raise ConfigError unless the function can score trajectories: no process is started for that."""
        cls(function=function, **options)
        if unknown := sorted(UserFunction(function).required - {"token_ids", *_TEXTS, *_TRAJECTORY_COLUMNS}):
            raise ConfigError(
                f"{function} requires {', '.join(unknown)}, which a trajectory lacks",
                path="function",
                remedy=f"it may take {', '.join((*_TEXTS, 'token_ids', *_TRAJECTORY_COLUMNS))}",
            )

    async def score(self, batch: DataProto) -> DataProto:
        """Score all rows concurrently; return the column ``rewards`` ([B] float32) in the rows' order.

        Raises:
            RewardError: one row failed (:meth:`asyncrl.rewards.scoring.ScoringProcess.call`); the message names row and
                function. The other rows' calls are cancelled.
            SchemaError: the batch lacks a column that the function requires.
        """
        if self._closed:
            raise RewardError(f"score() of {self._name} was called after close()")
        # Decoding and loading the tokenizer would block the event loop.
        rows = await asyncio.to_thread(lambda: list(self._arguments(batch)))
        rewards = await run_all(self._score_row(batch, row, arguments) for row, arguments in enumerate(rows))
        return DataProto.from_dict({"rewards": torch.tensor(rewards, dtype=torch.float32)})

    async def close(self) -> None:
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
        """Yield the keyword arguments of each row."""
        function = self._function
        columns = batch.non_tensor_batch
        derived = {"token_ids", *(_TEXTS if self._texts is not None else ())} - set(columns)
        unknown = sorted(function.required - derived - set(columns))
        if unknown:
            raise SchemaError(
                f"{self._name} requires {', '.join(unknown)}, which the batch lacks: its columns of objects are "
                f"{', '.join(sorted(columns)) or 'none'}"
            )
        wanted = derived | set(columns)
        if not function.takes_any:
            wanted &= function.parameters
        tokens = list(sampled_tokens(batch)) if wanted & derived else [((), ())] * len(batch)
        for row, (prompt, sampled) in enumerate(tokens):
            arguments: dict[str, Any] = {name: _plain(columns[name][row]) for name in wanted & set(columns)}
            if "token_ids" in wanted & derived:
                arguments["token_ids"] = list(sampled)
            for name, ids in (("completion", sampled), ("prompt", prompt)):
                if self._texts is not None and name in wanted & derived:
                    arguments[name] = self._texts.text(ids)
            yield arguments


def _plain(value: object) -> object:
    """Convert numpy scalars to Python's, so that a scoring process need not import numpy."""
    return value.item() if isinstance(value, np.generic) else value


def _row_name(batch: DataProto, row: int) -> str:
    columns = batch.batch.keys() if batch.batch is not None else ()
    if batch.batch is not None and "group_id" in columns and "row" in columns:
        group_id, place = int(batch.batch["group_id"][row]), int(batch.batch["row"][row])
        return f"row {row} (group_id {group_id}, row {place} of its group)"
    return f"row {row}"
