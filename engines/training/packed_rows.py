"""The rows a rank holds, as packed columns, and the micro-batches cut from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncrl.data import DataProto
from asyncrl.data.ragged import lengths as lengths_of
from asyncrl.errors import InvalidDataError, SchemaError

__all__ = ["PackedRows", "PaddedRows"]


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """What the model computes at once, with N tokens to score.

    Attributes:
        input_ids: [B, L], padded on the right with 0.
        predictors: [N] positions in [B * L] just before each scored token.
        targets: [N] the scored tokens.
        tokens: [N] where each scored token lies in the packed columns.
        rows: [N] row of each scored token, among all rows of the rank.
        real: False for a stand-in that belongs to no row.
    """

    input_ids: Tensor
    predictors: Tensor
    targets: Tensor
    tokens: Tensor
    rows: Tensor
    real: bool = True

    @staticmethod
    def stand_in() -> PaddedRows:
        """One token to score that counts for nothing: what a rank computes while others still have rows."""
        zero = torch.zeros(1, dtype=torch.int64)
        return PaddedRows(
            input_ids=zero.new_zeros(1, 2), predictors=zero, targets=zero, tokens=zero, rows=zero, real=False
        )

    def of_tokens(self, column: Tensor) -> Tensor:
        """[N]: the entries of a packed column [T] for the scored tokens; zeros for a stand-in."""
        return column[self.tokens] if self.real else column.new_zeros(1)

    def of_rows(self, column: Tensor) -> Tensor:
        """[N]: the entries of a column [B] for the rows of the scored tokens; zeros for a stand-in."""
        return column[self.rows] if self.real else column.new_zeros(1)


class PackedRows:
    """Columns of a batch, row after row without padding; T tokens in B rows.

    Attributes:
        input_ids: [T] int64.
        mask: [T] bool, the tokens to be scored.
        columns: other columns by name, [T] float32.
        lengths: tokens of each row.
        row_of: [T] int64, row of each token.
        scored: [B] int64, tokens to be scored of each row.

    Raises:
        SchemaError: a column is missing, dense where it must be ragged, or of other row lengths than ``input_ids``.
        InvalidDataError: a row's first token is to be scored (nothing predicts it), or an id is outside the vocabulary.
    """

    def __init__(
        self,
        batch: DataProto,
        *,
        vocabulary: int,
        loss_mask: bool = True,
        required: Sequence[str] = (),
        optional: Sequence[str] = (),
    ) -> None:
        # tensordict allows nested collections as values; a DataProto has only tensors.
        tensors: dict[str, Any] = {} if batch.batch is None else dict(batch.batch.items())
        ids = _column(tensors, "input_ids")
        if not ids.is_nested:
            raise SchemaError("input_ids must be ragged (a jagged nested tensor), got a dense tensor")
        row_lengths = lengths_of(ids).cpu()
        self.lengths: list[int] = row_lengths.tolist()
        self.input_ids = ids.values().cpu().to(torch.int64)
        self._lengths = row_lengths
        self._starts = torch.cumsum(row_lengths, 0) - row_lengths
        total = len(self.input_ids)
        if total and (int(self.input_ids.min()) < 0 or int(self.input_ids.max()) >= vocabulary):
            raise InvalidDataError(
                f"input_ids holds {int(self.input_ids.min())}..{int(self.input_ids.max())}, "
                f"the model knows 0..{vocabulary - 1}"
            )
        first = self._starts[row_lengths > 0]
        if loss_mask:
            self.mask = self._packed(tensors, "loss_mask").to(torch.bool)
            if bool(self.mask[first].any()):
                row = int((row_lengths > 0).nonzero()[int(self.mask[first].nonzero()[0])])
                raise InvalidDataError(f"loss_mask of row {row} is True for its first token, which nothing predicts")
        else:
            self.mask = torch.ones(total, dtype=torch.bool)
            self.mask[first] = False
        self.row_of = torch.repeat_interleave(torch.arange(len(row_lengths)), row_lengths)
        self.scored = torch.zeros(len(row_lengths), dtype=torch.int64)
        self.scored.index_add_(0, self.row_of, self.mask.to(torch.int64))
        self.columns: dict[str, Tensor] = {}
        for name in (*required, *(name for name in optional if name in tensors)):
            self.columns[name] = self._packed(tensors, name).to(torch.float32)

    def __len__(self) -> int:
        return len(self.lengths)

    def padded(self, rows: Sequence[int]) -> PaddedRows:
        """These rows as one rectangle, with their scored tokens."""
        index = torch.tensor(rows, dtype=torch.int64)
        row_lengths = self._lengths[index]
        width = int(row_lengths.max())
        in_batch = torch.repeat_interleave(torch.arange(len(index)), row_lengths)
        within = torch.arange(len(in_batch)) - (torch.cumsum(row_lengths, 0) - row_lengths)[in_batch]
        source = self._starts[index][in_batch] + within
        cells = in_batch * width + within
        input_ids = torch.zeros(len(index) * width, dtype=torch.int64)
        input_ids[cells] = self.input_ids[source]
        wanted = self.mask[source]
        tokens = source[wanted]
        return PaddedRows(
            input_ids=input_ids.view(len(index), width),
            predictors=cells[wanted] - 1,
            targets=self.input_ids[tokens],
            tokens=tokens,
            rows=index[in_batch[wanted]],
        )

    def _packed(self, tensors: Mapping[str, Tensor], name: str) -> Tensor:
        """[T]: a ragged column as it is, a number per row repeated over the row's tokens."""
        column = _column(tensors, name)
        if column.is_nested:
            if not torch.equal(lengths_of(column).cpu(), self._lengths):
                raise SchemaError(f"{name} and input_ids differ in row lengths")
            return column.values().cpu()
        if column.shape != (len(self.lengths),) or name == "loss_mask":
            raise SchemaError(f"{name} must be ragged like input_ids, or [B]; got shape {tuple(column.shape)}")
        return torch.repeat_interleave(column.cpu(), self._lengths)


def _column(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise SchemaError(f"column {name!r} is missing; the batch has {sorted(tensors)}")
    return tensors[name]
