"""Plans: which rows and columns of which blocks make a batch, known exactly, with no payload touched.

A worker's result lies where it was made, as a :class:`Block`; what travels is its :class:`Header`. A plan is an
immutable tree over blocks (``nodes.py``) with the header of the whole, which follows from the headers below it by the
rules of :class:`DataProto`: what does not fit together is found there, before any transfer.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncrl.data.auto_padding import DataProtoConfig
from asyncrl.data.columns import Columns
from asyncrl.data.meta_info import concat_meta_info, union_meta_info
from asyncrl.data.nodes import (
    Block,
    Coded,
    Given,
    Mapped,
    Node,
    Renamed,
    Rows,
    Selected,
    United,
    Whole,
    assemble,
    bare,
    blocks_of,
    is_computed,
    is_fresh,
    join,
    take,
)
from asyncrl.data.proto import DataProto
from asyncrl.data.ragged import own_tensors
from asyncrl.data.row_function import RowFunction
from asyncrl.data.schema import Schema
from asyncrl.data.tensordicts import tensordict_of
from asyncrl.errors import SchemaError

if TYPE_CHECKING:
    from asyncrl.data.codec import Encoded

__all__ = ["Block", "Header", "Plan", "Rows"]

COPY_INLINE_BYTES = 256 * 1024
"""Up to this size, copying rows takes less time than handing the copy to a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What is known of a batch without its payload.

    ``size_bytes`` is exact for whole results of workers, in proportion to rows and columns for parts of them, and that
    of what it is made of where a function is applied.
    """

    rows: int
    schema: Schema
    meta_info: dict[str, Any]
    size_bytes: int
    auto_padding: bool = False
    has_batch: bool = True
    """Whether it has a TensorDict, which has rows even without columns."""

    @staticmethod
    def of(data: DataProto) -> Header:
        return Header(
            rows=len(data),
            schema=data.schema,
            meta_info=dict(data.meta_info),
            size_bytes=data.size_bytes,
            auto_padding=data.auto_padding,
            has_batch=data.batch is not None,
        )

    @staticmethod
    def coded(encoded: Encoded) -> Header:
        """Of a batch that is there as bytes.

        Raises:
            CodecError: these bytes are no batch.
        """
        from asyncrl.data.codec import schema_of

        fields = encoded.fields
        return Header(
            rows=fields.rows,
            schema=schema_of(fields),
            meta_info=fields.meta_info,
            size_bytes=sum(len(each) for each in encoded.buffers),
            auto_padding=fields.auto_padding,
            has_batch=fields.has_batch,
        )

    def resized(self, rows: int) -> Header:
        """The header of ``rows`` rows of this batch."""
        return replace(
            self,
            rows=rows,
            schema=Schema(columns=self.schema.columns, rows=rows),
            meta_info=dict(self.meta_info),
            size_bytes=round(self.size_bytes * rows / self.rows) if self.rows else 0,
        )

    def template(self) -> DataProto:
        """A batch of no rows with these columns' names and this ``meta_info``, to try a selection of columns on."""
        tensors = {each.name: torch.empty(0) for each in self.schema.columns if each.kind in ("tensor", "ragged")}
        arrays = {each.name: np.empty(0) for each in self.schema.columns if each.name not in tensors}
        columns = Columns(tensors=tensors, arrays=arrays, rows=0)
        return DataProto.from_columns(columns, meta_info=self.meta_info, has_batch=self.has_batch)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A batch that can be put together from blocks; ``header`` says what it will be."""

    node: Node
    header: Header

    @staticmethod
    def of(data: DataProto) -> Plan:
        """A batch that is here: its tensors are shared, its containers not (a later ``pop`` does not show)."""
        return Plan(Given(bare(data), len(data)), Header.of(data))

    @staticmethod
    def coded(encoded: Encoded) -> Plan:
        """A small batch that has come as bytes.

        Raises:
            CodecError: these bytes are no batch.
        """
        header = Header.coded(encoded)
        return Plan(Coded(encoded, header.rows), header)

    @staticmethod
    def shard(block: Block, header: Header) -> Plan:
        """The whole result of one worker."""
        return Plan(Whole(block, header.rows), header)

    @staticmethod
    def concat(plans: Sequence[Plan]) -> Plan:
        """The rows of all plans, in order.

        Raises:
            SchemaError: there is none, or columns or ``meta_info`` differ.
        """
        if not plans:
            raise SchemaError("concat needs at least one batch: the columns of none are unknown")
        headers = [plan.header for plan in plans]
        expected = headers[0].schema.any_rows()
        for number, header in enumerate(headers[1:], start=1):
            difference = expected.diff(header.schema)
            if difference:
                raise SchemaError(f"batch {number} does not fit batch 0 in concat:\n{difference}")
        rows = sum(header.rows for header in headers)
        header = Header(
            rows=rows,
            schema=Schema(columns=expected.columns, rows=rows),
            meta_info=concat_meta_info([header.meta_info for header in headers]),
            size_bytes=sum(header.size_bytes for header in headers),
            auto_padding=any(header.auto_padding for header in headers),
            has_batch=headers[0].has_batch,
        )
        return Plan(join([plan.node for plan in plans]), header)

    def take(self, index: Rows) -> Plan:
        """The rows ``index``, in this order."""
        return Plan(take(self.node, index), self.header.resized(len(index)))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Plan:
        return self.take(range(*builtins.slice(start, end, step).indices(self.header.rows)))

    def chunk(self, chunks: int) -> list[Plan]:
        """As :meth:`DataProto.chunk`.

        Raises:
            SchemaError: ``chunks`` does not divide the rows, and padding is not enabled.
        """
        size, larger = divmod(self.header.rows, chunks)
        if larger and not (self.header.auto_padding or DataProtoConfig.auto_padding):
            raise SchemaError(
                f"{self.header.rows} rows cannot be cut into {chunks} equal chunks: use slice or split, "
                "or let the worker return a batch with auto_padding=True to allow chunks that differ by one row"
            )
        ends = list(accumulate(size + (number < larger) for number in range(chunks)))
        return [self.take(range(start, end)) for start, end in zip([0, *ends], ends, strict=False)]

    def repeat(self, repeat_times: int, *, interleave: bool) -> Plan:
        """As :meth:`DataProto.repeat`."""
        rows = np.arange(self.header.rows)
        return self.take(np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times))

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> Plan:
        """As :meth:`DataProto.select`.

        Raises:
            SchemaError: naming a key that is not there.
        """
        return self._selected(self.header.template().select(batch_keys, non_tensor_batch_keys, meta_info_keys))

    def pop(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> tuple[Plan, Plan]:
        """What :meth:`DataProto.pop` returns, and what it leaves.

        Raises:
            SchemaError: naming a key that is not there.
        """
        rest = self.header.template()
        popped = self._selected(rest.pop(batch_keys, non_tensor_batch_keys, meta_info_keys))
        return popped, self._selected(rest)

    def _selected(self, selected: DataProto) -> Plan:
        """The columns and ``meta_info`` that are left of the header's template."""
        tensors = tuple(selected.columns().tensors)
        arrays = tuple(selected.non_tensor_batch)
        mine = self.header.schema.columns
        columns = tuple(column for column in mine if column.name in {*tensors, *arrays})
        header = replace(
            self.header,
            schema=Schema(columns=columns, rows=self.header.rows),
            meta_info=selected.meta_info,
            size_bytes=round(self.header.size_bytes * len(columns) / max(1, len(mine))),
            has_batch=selected.batch is not None,
        )
        if not columns and not header.has_batch:
            # Without a column and without a TensorDict, a batch has no rows.
            return Plan(Given(DataProto(), 0), header.resized(0))
        return Plan(self.node if len(columns) == len(mine) else Selected(self.node, tensors, arrays), header)

    def rename(self, old: Sequence[str], new: Sequence[str]) -> Plan:
        """As :meth:`DataProto.rename`, without changing this.

        Raises:
            SchemaError: an old name is missing, a new one taken, or their numbers differ.
        """
        self.header.template().rename(old, new)
        names = dict(zip(old, new, strict=True))
        columns = tuple(replace(each, name=names.get(each.name, each.name)) for each in self.header.schema.columns)
        header = replace(self.header, schema=Schema(columns=columns, rows=self.header.rows))
        return Plan(Renamed(self.node, tuple(old), tuple(new)), header)

    def then(self, function: Callable[[DataProto], DataProto], *, name: str) -> Plan:
        """What ``function`` gives for these rows; see :meth:`DataProtoFuture.then`."""
        header = self.header
        rows = RowFunction.tried(
            function,
            header.schema,
            name=name,
            meta_info=header.meta_info,
            auto_padding=header.auto_padding,
            has_batch=header.has_batch,
        )
        header = Header(
            rows=header.rows,
            schema=replace(rows.gives, rows=header.rows),
            meta_info=dict(rows.gives_meta_info),
            size_bytes=header.size_bytes,
            auto_padding=rows.gives_auto_padding,
            has_batch=rows.gives_batch,
        )
        return Plan(Mapped(self.node, rows), header)

    def union(self, other: Plan) -> Plan:
        """As :meth:`DataProto.union`. That columns of both are equal is checked when the rows are put together.

        Raises:
            SchemaError: rows differ in number, or naming the column or entry that differs.
        """
        mine, theirs = self.header, other.header
        if mine.rows != theirs.rows and mine.schema.columns and theirs.schema.columns:
            raise SchemaError(f"union needs as many rows on both sides, got {mine.rows} and {theirs.rows}")
        columns = {column.name: column for column in mine.schema.columns}
        for column in theirs.schema.columns:
            if columns.setdefault(column.name, column) != column:
                raise SchemaError(
                    f"column {column.name!r} differs between the two batches of a union: "
                    f"{columns[column.name]} and {column}"
                )
        rows = mine.rows if mine.schema.columns else theirs.rows
        ordered = sorted(columns.values(), key=lambda column: column.kind in ("array", "object"))
        header = Header(
            rows=rows,
            schema=Schema(columns=tuple(ordered), rows=rows),
            meta_info=union_meta_info(mine.meta_info, theirs.meta_info),
            size_bytes=mine.size_bytes + theirs.size_bytes,
            auto_padding=mine.auto_padding,
            has_batch=mine.has_batch or any(each.kind in ("tensor", "ragged") for each in ordered),
        )
        return Plan(United(self.node, other.node, rows), header)

    # ------------------------------------------------------------------------------------------------- the payload

    def blocks(self) -> list[Block]:
        """The blocks this plan needs, each once."""
        return list({id(block): block for block in blocks_of(self.node)}.values())

    def get(self, *, read_only: bool = False) -> DataProto:
        """Fetch the blocks and put the batch together. Blocks the thread until they are here.

        The tensors and arrays belong to the caller alone, unless it promises to be ``read_only``: then they may be
        those of the block, which others read too. (The objects in an object column may be shared in any case.)
        """
        payloads: dict[int, DataProto] = {}
        for kind, blocks in self._kinds().items():
            found = kind.get_all(blocks)
            payloads.update({id(block): payload for block, payload in zip(blocks, found, strict=True)})
        return self._assembled(payloads, read_only)

    async def fetch(self, *, read_only: bool = False, inline: bool = False) -> DataProto:
        """:meth:`get` without blocking the loop; rows are copied in a thread, or on the loop if ``inline``."""
        payloads: dict[int, DataProto] = {}
        for kind, blocks in self._kinds().items():
            found = await kind.fetch_all(blocks)
            payloads.update({id(block): payload for block, payload in zip(blocks, found, strict=True)})
        at_once = self.header.size_bytes < COPY_INLINE_BYTES or (read_only and not is_fresh(self.node))
        if inline or (at_once and not is_computed(self.node)):
            return self._assembled(payloads, read_only)
        return await asyncio.to_thread(self._assembled, payloads, read_only)

    def _kinds(self) -> dict[type[Block], list[Block]]:
        kinds: dict[type[Block], list[Block]] = {}
        for block in self.blocks():
            kinds.setdefault(type(block), []).append(block)
        return kinds

    def _assembled(self, payloads: dict[int, DataProto], read_only: bool) -> DataProto:
        data = assemble(self.node, payloads)
        tensors, arrays = data.batch, data.non_tensor_batch
        if not (read_only or is_fresh(self.node)):
            tensors = None if tensors is None else tensordict_of(own_tensors(data.columns().tensors), rows=len(data))
            arrays = {name: array.copy() for name, array in arrays.items()}
        return DataProto(
            batch=tensors,
            non_tensor_batch=arrays,
            meta_info=self.header.meta_info,
            auto_padding=self.header.auto_padding,
        )
