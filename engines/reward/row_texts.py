"""What a trajectory says, as text: the tokens that were sampled, and those before the first of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from asyncrl.data import DataProto
from asyncrl.data.ragged import rows_of
from asyncrl.errors import SchemaError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["RowTexts", "sampled_tokens"]


def sampled_tokens(batch: DataProto) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """For each row, the tokens before the first sampled one, and the sampled ones.

    What was sampled is told by ``weight_versions`` where there are any: ``loss_mask`` may leave out sampled tokens.

    Raises:
        SchemaError: the batch has no tokens, or nothing tells which were sampled.
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
    """Decodes with a tokenizer that is loaded when it is first needed. Used from any thread.

    Args:
        tokenizer: name or folder, as ``transformers.AutoTokenizer`` takes it.
    """

    def __init__(self, tokenizer: str) -> None:
        self._name = tokenizer
        self._lock = threading.Lock()
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def of(self, batch: DataProto) -> Iterator[tuple[str, str]]:
        """Prompt and completion of each row, special tokens left out."""
        for prompt, sampled in sampled_tokens(batch):
            yield self.text(prompt), self.text(sampled)

    def text(self, token_ids: tuple[int, ...]) -> str:
        """The text of these tokens, special ones left out."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = _load_tokenizer(self._name)
            decoded = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        assert isinstance(decoded, str)
        return decoded


def _load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name)
    return tokenizer
