"""Rows as packed columns, and the plans by which they are cut into mini-batches and micro-batches."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from asyncrl.data import DataProto
from asyncrl.data.ragged import lengths as lengths_of
from asyncrl.errors import ConfigError, InvalidDataError, SchemaError

Layout: TypeAlias = Literal["packed", "padded"]
"""``packed``: rows of all lengths in one sequence; ``padded``: one rectangle, for models that need it."""


@dataclass(frozen=True, slots=True)
class Rectangle:
    rows: tuple[int, ...]  # indices, longest first; none in a prefix that rows of later rectangles share
    length: int  # of every row, padded; without its prefix
    prefix: int | None = None  # the rectangle, before this one, that holds the first tokens of these rows


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows that are computed at once, as rectangles one after another."""

    rectangles: tuple[Rectangle, ...]  # longest rows first

    @property
    def rows(self) -> tuple[int, ...]:
        """Return the indices of all rows, in their order in memory."""
        return tuple(row for rectangle in self.rectangles for row in rectangle.rows)


def plan_microbatches(
    lengths: Sequence[int], *, max_tokens: int, layout: Layout = "packed", overhead_tokens: int
) -> list[MicroBatch]:
    """Cut rows, sorted by length, into micro-batches of at most ``max_tokens`` cells.

    A rectangle is closed when its padding has grown to what one more rectangle costs (``overhead_tokens``; with 0 there
    is no padding at all: only rows of equal length share one). As in ski rental, padding and overhead together then
    cost at most twice what the best cut of the sorted rows costs: wherever this plan opens a rectangle, the best one
    either opens one too or pads as much. A micro-batch is closed when it is full; in the ``padded`` layout, with its
    rectangle. Longest first, so that a budget that is too large for the memory fails at once and not later. Empty rows
    are left out; a row of more than ``max_tokens`` is computed alone.

    >>> [plan.rows for plan in plan_microbatches([3, 9, 2, 8], max_tokens=20, overhead_tokens=4)]
    [(1, 3), (0, 2)]
    """
    if max_tokens < 1:
        raise ConfigError(f"max_tokens is {max_tokens}", remedy="at least 1 token per micro-batch")
    plans: list[MicroBatch] = []
    closed: list[Rectangle] = []
    rows: list[int] = []  # of the open rectangle
    longest = padding = cells = 0  # cells: of the whole micro-batch

    def close_rectangle() -> None:
        if rows:
            closed.append(Rectangle(tuple(rows), longest))
            rows.clear()

    def close_microbatch() -> None:
        close_rectangle()
        if closed:
            plans.append(MicroBatch(tuple(closed)))
            closed.clear()

    for row in sorted((row for row, length in enumerate(lengths) if length > 0), key=lambda row: (-lengths[row], row)):
        length = lengths[row]
        fits = bool(rows) and padding + longest - length <= overhead_tokens
        if cells + (longest if fits else length) > max_tokens or (not fits and layout == "padded"):
            close_microbatch()
            cells = 0
            fits = False
        if not fits:
            close_rectangle()
            longest, padding = length, 0
        rows.append(row)
        cells += longest
        padding += longest - length
    close_microbatch()
    return plans


def assign_minibatches(total_rows: int, *, num_mini_batches: int, seed: int) -> list[int]:
    """Return the mini-batch (0..num_mini_batches-1) of each row of the global batch.

    Each block of ``num_mini_batches`` neighbouring rows is assigned in a random order of its own, so every mini-batch
    gets a near-equal share of any stretch of rows: of every rank, and of every group of rollouts. The numbers depend on
    the position in the global batch only, not on how its rows are split over ranks.
    """
    if num_mini_batches < 1:
        raise ConfigError(f"num_mini_batches is {num_mini_batches}", remedy="at least 1")
    shuffle = random.Random(seed)  # noqa: S311  # reproducible, not secret
    order = list(range(num_mini_batches))
    assigned: list[int] = []
    while len(assigned) < total_rows:
        shuffle.shuffle(order)
        assigned += order
    return assigned[:total_rows]


_PADDING_ROW = 128
"""Cells of a row of padding: attention to one long row would cost more than the rows that it is to be as long as."""


@dataclass(frozen=True, slots=True)
class PackedMicroBatch:
    """The tensors of a micro-batch: T cells, with N tokens to score."""

    rectangles: tuple[tuple[int, int], ...]  # (rows, length) in the order of the cells; T = sum of rows * length
    prefixes: tuple[int | None, ...]  # of each rectangle, the one with the first tokens of its rows, if there is one
    input_ids: Tensor  # [T], 0 in cells of padding, which lie behind their row
    positions: Tensor  # [T] place of each cell in its row, from 0
    predictors: Tensor  # [N] cells of the states that score each token; rows of a prefix may have some in common
    targets: Tensor  # [N] the scored tokens
    tokens: Tensor  # [N] index of each scored token in the packed columns
    rows: Tensor  # [N] row of each scored token, among all rows of the rank
    is_dummy: bool = False  # it belongs to no row

    @staticmethod
    def dummy() -> PackedMicroBatch:
        """Make a micro-batch of one token of weight zero, for a rank without rows while others still have some."""
        zero = torch.zeros(1, dtype=torch.int64)
        return PackedMicroBatch(
            rectangles=((1, 2),),
            prefixes=(None,),
            input_ids=zero.new_zeros(2),
            positions=torch.arange(2),
            predictors=zero,
            targets=zero,
            tokens=zero,
            rows=zero,
            is_dummy=True,
        )

    def padded(self, cells: int) -> PackedMicroBatch:
        """Return it with short rows behind the others, if it has fewer cells; a packed one.

        They repeat its own tokens: those of one id would all be sent to the same experts of a mixture.
        """
        padding = cells - len(self.input_ids)
        if not padding:
            return self
        repeated = self.input_ids.repeat(-(-padding // len(self.input_ids)))[:padding]
        rows, rest = divmod(padding, _PADDING_ROW)
        rectangles = [(rows, _PADDING_ROW)] * (rows > 0) + [(1, rest)] * (rest > 0)
        places = torch.arange(padding, device=self.positions.device) % _PADDING_ROW
        return replace(
            self,
            input_ids=torch.cat([self.input_ids, repeated]),
            positions=torch.cat([self.positions, places]),
            rectangles=(*self.rectangles, *rectangles),
            prefixes=(*self.prefixes, *(None for _ in rectangles)),
        )

    def token_values(self, column: Tensor) -> Tensor:
        """Select from a packed column [T] for the scored tokens [N]; zeros for a dummy."""
        return column.new_zeros(1) if self.is_dummy else column[self.tokens]

    def row_values(self, column: Tensor) -> Tensor:
        """Select from a column [B] for the rows of the scored tokens [N]; zeros for a dummy."""
        return column.new_zeros(1) if self.is_dummy else column[self.rows]


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on ``device``.

    From memory that is not pinned, a copy would wait for all that the device still computes, which then idles until the
    host has launched what comes next.
    """
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class PackedRows:
    """The columns of a batch, row after row without padding; T tokens in B rows.

    ``mask`` [T] bool marks the tokens to score, ``columns`` are [T] float32, and ``lengths`` [B] int64 counts the
    tokens of each row. A token is scored by the state ``back`` tokens before it: 1, or 0 where the state behind a
    token counts.
    """

    def __init__(
        self, *, input_ids: Tensor, mask: Tensor, columns: dict[str, Tensor], lengths: Tensor, back: int = 1
    ) -> None:
        self.input_ids = input_ids
        self.mask = mask
        self.columns = columns
        self.back = back
        self.lengths: list[int] = lengths.tolist()
        self._lengths = lengths
        self._starts = torch.cumsum(lengths, 0) - lengths
        self.row_of = torch.repeat_interleave(torch.arange(len(lengths)), lengths)  # [T]
        # [B] tokens to score of each row
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
        """Read a batch; the result is on the CPU.

        Without ``loss_mask`` all tokens but the first of each row are scored. ``optional`` columns are read if the
        batch has them.

        Raises:
            SchemaError: a column is missing or misshapen.
            InvalidDataError: a row's first token is to be scored, or an id is outside the vocabulary.
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
                f"input_ids holds {int(input_ids.min())}..{int(input_ids.max())}, the vocabulary is 0..{vocabulary - 1}"
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

    def pack(self, microbatch: MicroBatch) -> PackedMicroBatch:
        """Copy the rows of a micro-batch to their places, and select their scored tokens."""
        rectangles = microbatch.rectangles
        shapes = tuple((len(each.rows) or 1, each.length) for each in rectangles)
        starts = [0, *itertools.accumulate(count * length for count, length in shapes)]
        begins: list[int] = []  # first cell of each row, behind its prefix
        prefixes: list[tuple[int, int]] = []  # first cell and length of each row's prefix
        for each, start in zip(rectangles, starts, strict=False):
            begins += [start + place * each.length for place in range(len(each.rows))]
            prefix = (0, 0) if each.prefix is None else (starts[each.prefix], rectangles[each.prefix].length)
            prefixes += [prefix] * len(each.rows)
        index = torch.tensor(microbatch.rows, dtype=torch.int64)
        row_lengths = self._lengths[index]
        in_batch = torch.repeat_interleave(torch.arange(len(index)), row_lengths)
        within = torch.arange(len(in_batch)) - (torch.cumsum(row_lengths, 0) - row_lengths)[in_batch]
        source = self._starts[index][in_batch] + within
        begin = torch.tensor(begins)[in_batch]
        shared_begin, shared = torch.tensor(prefixes)[in_batch].unbind(1)

        def cells(place: Tensor) -> Tensor:
            return torch.where(place < shared, shared_begin + place, begin + place - shared)

        widths = torch.repeat_interleave(torch.tensor([w for _, w in shapes]), torch.tensor([n for n, _ in shapes]))
        positions = torch.arange(starts[-1]) - torch.repeat_interleave(torch.cumsum(widths, 0) - widths, widths)
        filled = cells(within)
        positions[filled] = within
        input_ids = torch.zeros_like(positions)
        input_ids[filled] = self.input_ids[source]
        wanted = self.mask[source]
        tokens = source[wanted]
        return PackedMicroBatch(
            rectangles=shapes,
            prefixes=tuple(each.prefix for each in rectangles),
            input_ids=input_ids,
            positions=positions,
            predictors=cells(within - self.back)[wanted],
            targets=self.input_ids[tokens],
            tokens=tokens,
            rows=index[in_batch[wanted]],
        )


def _packed(tensors: Mapping[str, Tensor], name: str, lengths: Tensor) -> Tensor:
    """Return a ragged column as [T]; a number per row is repeated over the row's tokens."""
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
