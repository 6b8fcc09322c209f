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
from engines.training.microbatch import MicroBatch

__all__ = ["PackedRows", "RowStream"]


@dataclass(frozen=True, slots=True)
class RowStream:
    """What the model computes at once: T cells, with N tokens to score.

    Attributes:
        rectangles: ``(rows, length)`` in the order of the cells; T = sum of rows * length.
        input_ids: [T], 0 in cells of padding, which lie behind their row.
        positions: [T] place of each cell in its row, from 0.
        predictors: [N] cells just before each scored token.
        targets: [N] the scored tokens.
        tokens: [N] where each scored token lies in the packed columns.
        rows: [N] row of each scored token, among all rows of the rank.
        real: False for a stand-in that belongs to no row.
    """

    rectangles: tuple[tuple[int, int], ...]
    input_ids: Tensor
    positions: Tensor
    predictors: Tensor
    targets: Tensor
    tokens: Tensor
    rows: Tensor
    real: bool = True

    @staticmethod
    def stand_in() -> RowStream:
        """One token to score that counts for nothing: what a rank computes while others still have rows."""
        zero = torch.zeros(1, dtype=torch.int64)
        return RowStream(
            rectangles=((1, 2),),
            input_ids=zero.new_zeros(2),
            positions=torch.arange(2),
            predictors=zero,
            targets=zero,
            tokens=zero,
            rows=zero,
            real=False,
        )

    def of_tokens(self, column: Tensor) -> Tensor:
        """[N]: the entries of a packed column [T] for the scored tokens; zeros for a stand-in."""
        return column[self.tokens] if self.real else column.new_zeros(1)

    def of_rows(self, column: Tensor) -> Tensor:
        """[N]: the entries of a column [B] for the rows of the scored tokens; zeros for a stand-in."""
        return column[self.rows] if self.real else column.new_zeros(1)


class PackedRows:
    """Columns of a batch, row after row without padding; T tokens in B rows.

    Args:
        input_ids: [T] int64.
        mask: [T] bool, the tokens to be scored.
        columns: other columns by name, [T] float32.
        lengths: [B] int64, tokens of each row.

    Attributes:
        input_ids, mask, columns: as given.
        lengths: tokens of each row, as a list.
        row_of: [T] int64, row of each token.
        scored: [B] int64, tokens to be scored of each row.
    """

    def __init__(self, *, input_ids: Tensor, mask: Tensor, columns: dict[str, Tensor], lengths: Tensor) -> None:
        self.input_ids = input_ids
        self.mask = mask
        self.columns = columns
        self.lengths: list[int] = lengths.tolist()
        self._lengths = lengths
        self._starts = torch.cumsum(lengths, 0) - lengths
        self.row_of = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        self.scored = torch.zeros(len(lengths), dtype=torch.int64).index_add_(0, self.row_of, mask.to(torch.int64))

    @staticmethod
    def read(
        batch: DataProto,
        *,
        vocabulary: int,
        loss_mask: bool = True,
        required: Sequence[str] = (),
        optional: Sequence[str] = (),
    ) -> PackedRows:
        """The rows of a batch, on the CPU.

        Args:
            batch: ``input_ids`` and more, see :mod:`asyncrl.interfaces`.
            vocabulary: ids must be below it.
            loss_mask: score the tokens where ``loss_mask``; else all but the first of each row.
            required: other columns to read.
            optional: likewise, where they are there.

        Raises:
            SchemaError: a column is missing, dense where it must be ragged, or of other row lengths than ``input_ids``.
            InvalidDataError: a row's first token is to be scored (nothing predicts it), or an id is outside the
                vocabulary.
        """
        # tensordict allows nested collections as values; a DataProto has only tensors.
        tensors: dict[str, Any] = {} if batch.batch is None else dict(batch.batch.items())
        ids = _column(tensors, "input_ids")
        if not ids.is_nested:
            raise SchemaError("input_ids must be ragged (a jagged nested tensor), got a dense tensor")
        lengths = lengths_of(ids).cpu()
        input_ids = ids.values().cpu().to(torch.int64)
        if len(input_ids) and (int(input_ids.min()) < 0 or int(input_ids.max()) >= vocabulary):
            raise InvalidDataError(
                f"input_ids holds {int(input_ids.min())}..{int(input_ids.max())}, the model knows 0..{vocabulary - 1}"
            )
        first = (torch.cumsum(lengths, 0) - lengths)[lengths > 0]
        if loss_mask:
            mask = _packed(tensors, "loss_mask", lengths).to(torch.bool)
            if bool(mask[first].any()):
                row = int((lengths > 0).nonzero()[int(mask[first].nonzero()[0])])
                raise InvalidDataError(f"loss_mask of row {row} is True for its first token, which nothing predicts")
        else:
            mask = torch.ones(len(input_ids), dtype=torch.bool)
            mask[first] = False
        columns = {
            name: _packed(tensors, name, lengths).to(torch.float32)
            for name in (*required, *(name for name in optional if name in tensors))
        }
        return PackedRows(input_ids=input_ids, mask=mask, columns=columns, lengths=lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def stream(self, microbatch: MicroBatch) -> RowStream:
        """The rows of a micro-batch where it says they lie, with their scored tokens."""
        shapes = tuple((len(each.rows), each.length) for each in microbatch.rectangles)
        index = torch.tensor(microbatch.rows, dtype=torch.int64)
        widths = torch.repeat_interleave(torch.tensor([w for _, w in shapes]), torch.tensor([n for n, _ in shapes]))
        begins = torch.cumsum(widths, 0) - widths
        positions = torch.arange(int(widths.sum())) - torch.repeat_interleave(begins, widths)
        row_lengths = self._lengths[index]
        in_batch = torch.repeat_interleave(torch.arange(len(index)), row_lengths)
        within = torch.arange(len(in_batch)) - (torch.cumsum(row_lengths, 0) - row_lengths)[in_batch]
        source = self._starts[index][in_batch] + within
        cells = begins[in_batch] + within
        input_ids = torch.zeros_like(positions)
        input_ids[cells] = self.input_ids[source]
        wanted = self.mask[source]
        tokens = source[wanted]
        return RowStream(
            rectangles=shapes,
            input_ids=input_ids,
            positions=positions,
            predictors=cells[wanted] - 1,
            targets=self.input_ids[tokens],
            tokens=tokens,
            rows=index[in_batch[wanted]],
        )


def _packed(tensors: Mapping[str, Tensor], name: str, lengths: Tensor) -> Tensor:
    """[T]: a ragged column as it is, a number per row repeated over the row's tokens."""
    column = _column(tensors, name)
    if column.is_nested:
        if not torch.equal(lengths_of(column).cpu(), lengths):
            raise SchemaError(f"{name} and input_ids differ in row lengths")
        return column.values().cpu()
    if column.shape != (len(lengths),) or name == "loss_mask":
        raise SchemaError(f"{name} must be ragged like input_ids, or [B]; got shape {tuple(column.shape)}")
    return torch.repeat_interleave(column.cpu(), lengths)


def _column(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise SchemaError(f"column {name!r} is missing; the batch has {sorted(tensors)}")
    return tensors[name]
