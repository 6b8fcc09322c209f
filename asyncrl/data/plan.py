"""Plans: which rows and columns of which blocks make a batch, known exactly, with no payload touched.

A worker's result lies where it was made, as a :class:`Block`; what travels is its :class:`Header`. A plan is an
immutable tree over blocks. Row selections are pushed down to the blocks while the tree is built, so whoever assembles
a plan fetches only the blocks that hold its rows. The header of a plan follows from the headers below it by the rules
of :class:`DataProto`: what does not fit together is found there, before any transfer.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from asyncrl.data.meta_info import concat_meta_info, union_meta_info
from asyncrl.data.proto import DataProto
from asyncrl.data.schema import Schema
from asyncrl.errors import SchemaError

__all__ = ["Block", "Header", "Plan", "Rows"]

COPY_INLINE_BYTES = 256 * 1024
"""Up to this size, copying rows takes less time than handing the copy to a thread."""

Rows: TypeAlias = "range | np.ndarray[Any, np.dtype[Any]]"
"""Row numbers, none negative: a range (evenly spaced: a view where it ascends) or an int64 array (a copy)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What is known of a batch without its payload.

    ``size_bytes`` is exact for whole results of workers, and in proportion to rows and columns for parts of them.
    """

    rows: int
    schema: Schema
    meta_info: dict[str, Any]
    size_bytes: int
    auto_padding: bool = False

    @staticmethod
    def of(data: DataProto) -> Header:
        return Header(
            rows=len(data),
            schema=data.schema,
            meta_info=dict(data.meta_info),
            size_bytes=data.size_bytes,
            auto_padding=data.is_padding_enabled(),
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
        return DataProto.from_dict(tensors=tensors, non_tensors=arrays, meta_info=self.meta_info)


class Block(Protocol):
    """The payload of one worker's result, where it lies."""

    @classmethod
    def get_all(cls, blocks: Sequence[Any]) -> list[DataProto]:
        """Payloads of several blocks of this class. Blocks the thread until they are here."""
        ...

    @classmethod
    async def fetch_all(cls, blocks: Sequence[Any]) -> list[DataProto]:
        """:meth:`get_all` without blocking the loop. Does not suspend if the payloads are objects of this process."""
        ...


# ------------------------------------------------------------------------------------------------------------ nodes
# meta_info lives in the headers only; below, rows and columns.


@dataclass(frozen=True, slots=True, eq=False)
class _Whole:
    block: Block
    rows: int


@dataclass(frozen=True, slots=True, eq=False)
class _Given:
    data: DataProto
    rows: int


@dataclass(frozen=True, slots=True, eq=False)
class _Take:
    source: _Whole | _Concat
    index: Rows

    @property
    def rows(self) -> int:
        return len(self.index)


@dataclass(frozen=True, slots=True, eq=False)
class _Concat:
    parts: tuple[_Node, ...]
    rows: int


@dataclass(frozen=True, slots=True, eq=False)
class _Columns:
    source: _Node
    tensors: tuple[str, ...]
    arrays: tuple[str, ...]

    @property
    def rows(self) -> int:
        return self.source.rows


@dataclass(frozen=True, slots=True, eq=False)
class _Union:
    left: _Node
    right: _Node
    rows: int


_Node: TypeAlias = "_Whole | _Given | _Take | _Concat | _Columns | _Union"


# ------------------------------------------------------------------------------------------------------------- plan


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A batch that can be put together from blocks; ``header`` says what it will be."""

    node: _Node
    header: Header

    @staticmethod
    def of(data: DataProto) -> Plan:
        """A batch that is here: its tensors are shared, its containers not (a later ``pop`` does not show)."""
        return Plan(_Given(_bare(data), len(data)), Header.of(data))

    @staticmethod
    def shard(block: Block, header: Header) -> Plan:
        """The whole result of one worker."""
        return Plan(_Whole(block, header.rows), header)

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
        )
        return Plan(_join([plan.node for plan in plans]), header)

    def take(self, index: Rows) -> Plan:
        """The rows ``index``, in this order."""
        return Plan(_take(self.node, index), self.header.resized(len(index)))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Plan:
        return self.take(range(*builtins.slice(start, end, step).indices(self.header.rows)))

    def chunk(self, chunks: int) -> list[Plan]:
        """As :meth:`DataProto.chunk`.

        Raises:
            SchemaError: ``chunks`` does not divide the rows, and padding is not enabled.
        """
        size, larger = divmod(self.header.rows, chunks)
        if larger and not self.header.auto_padding:
            raise SchemaError(
                f"{self.header.rows} rows cannot be cut into {chunks} equal chunks: use slice or split, "
                "or let the worker return a batch with auto_padding=True to allow chunks that differ by one row"
            )
        ends = list(accumulate(size + (number < larger) for number in range(chunks)))
        return [self.take(range(start, end)) for start, end in zip([0, *ends], ends, strict=False)]

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
        selected = self.header.template().select(batch_keys, non_tensor_batch_keys, meta_info_keys)
        tensors = () if selected.batch is None else tuple(map(str, selected.batch.keys()))
        arrays = tuple(selected.non_tensor_batch)
        mine = self.header.schema.columns
        columns = tuple(column for column in mine if column.name in {*tensors, *arrays})
        header = replace(
            self.header,
            schema=Schema(columns=columns, rows=self.header.rows),
            meta_info=selected.meta_info,
            size_bytes=round(self.header.size_bytes * len(columns) / max(1, len(mine))),
        )
        return Plan(self.node if len(columns) == len(mine) else _Columns(self.node, tensors, arrays), header)

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
        )
        return Plan(_Union(self.node, other.node, rows), header)

    # ------------------------------------------------------------------------------------------------- the payload

    def blocks(self) -> list[Block]:
        """The blocks this plan needs, each once."""
        return list({id(block): block for block in _blocks(self.node)}.values())

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
        if inline or self.header.size_bytes < COPY_INLINE_BYTES or (read_only and not _fresh(self.node)):
            return self._assembled(payloads, read_only)
        return await asyncio.to_thread(self._assembled, payloads, read_only)

    def _kinds(self) -> dict[type[Block], list[Block]]:
        kinds: dict[type[Block], list[Block]] = {}
        for block in self.blocks():
            kinds.setdefault(type(block), []).append(block)
        return kinds

    def _assembled(self, payloads: dict[int, DataProto], read_only: bool) -> DataProto:
        data = _assemble(self.node, payloads)
        tensors, arrays = data.batch, data.non_tensor_batch
        if not (read_only or _fresh(self.node)):
            tensors = None if tensors is None else tensors.clone()
            arrays = {name: array.copy() for name, array in arrays.items()}
        return DataProto(
            batch=tensors,
            non_tensor_batch=arrays,
            meta_info=self.header.meta_info,
            auto_padding=self.header.auto_padding,
        )


# ------------------------------------------------------------------------------------------------- rows pushed down


def _join(nodes: Sequence[_Node]) -> _Node:
    """Nodes one after another; empty ones are left out, nested ones joined flat."""
    parts: list[_Node] = []
    for node in nodes:
        parts += node.parts if isinstance(node, _Concat) else (node,)
    filled = [part for part in parts if part.rows] or parts[:1]
    return filled[0] if len(filled) == 1 else _Concat(tuple(filled), sum(part.rows for part in filled))


def _take(node: _Node, index: Rows) -> _Node:
    if isinstance(index, range) and index == range(node.rows):
        return node
    match node:
        case _Whole():
            return _Take(node, index)
        case _Given():
            data = _rows_of(node.data, index)
            return _Given(data, len(index))
        case _Take():
            return _take(node.source, _compose(node.index, index))
        case _Columns():
            return _Columns(_take(node.source, index), node.tensors, node.arrays)
        case _Union():
            sides = [side if side.rows != node.rows else _take(side, index) for side in (node.left, node.right)]
            return _Union(sides[0], sides[1], len(index))
        case _Concat():
            return _take_of_parts(node, index)


def _take_of_parts(node: _Concat, index: Rows) -> _Node:
    ends = np.cumsum([part.rows for part in node.parts])
    starts = ends - [part.rows for part in node.parts]
    if len(index) == 0:
        return _take(node.parts[0], range(0))
    if isinstance(index, range) and index.step == 1:
        cuts = [
            _take(part, range(max(index.start, start) - start, min(index.stop, end) - start))
            for part, start, end in zip(node.parts, starts.tolist(), ends.tolist(), strict=True)
            if start < index.stop and end > index.start
        ]
        return _join(cuts)
    rows = np.asarray(index, dtype=np.int64)
    owners = np.searchsorted(ends, rows, side="right")
    borders = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(rows)]
    if len(borders) - 1 <= 2 * len(node.parts):
        runs = [(int(owners[start]), rows[start:end]) for start, end in pairwise(borders)]
        return _join([_take(node.parts[owner], _evenly(run - starts[owner])) for owner, run in runs])
    # Rows jump to and fro between the parts: take each part's rows once, in order, then shuffle what was taken.
    needed, places = np.unique(rows, return_inverse=True)
    taken = _take_of_parts(node, needed)
    if isinstance(taken, _Concat | _Whole):
        return _Take(taken, places)
    return _take(taken, places)


def _compose(outer: Rows, inner: Rows) -> Rows:
    """Row numbers of "the rows ``inner`` of the rows ``outer``"."""
    if isinstance(outer, range):
        if isinstance(inner, range):
            return outer[inner.start : inner.stop : inner.step] if inner.step > 0 else _evenly(_array(outer)[inner])
        return np.asarray(outer.start + outer.step * inner)
    return np.asarray(outer[_array(inner)])


def _array(rows: Rows) -> np.ndarray[Any, np.dtype[Any]]:
    return np.asarray(rows, dtype=np.int64)


def _evenly(rows: np.ndarray[Any, np.dtype[Any]]) -> Rows:
    """A range if the rows are consecutive."""
    if len(rows) and int(rows[-1]) - int(rows[0]) == len(rows) - 1 and bool((np.diff(rows) == 1).all()):
        return range(int(rows[0]), int(rows[-1]) + 1)
    return rows


# --------------------------------------------------------------------------------------------------------- payload


def _blocks(node: _Node) -> Iterator[Block]:
    match node:
        case _Whole():
            yield node.block
        case _Given():
            return
        case _Take() | _Columns():
            yield from _blocks(node.source)
        case _Concat():
            for part in node.parts:
                yield from _blocks(part)
        case _Union():
            yield from _blocks(node.left)
            yield from _blocks(node.right)


def _assemble(node: _Node, payloads: dict[int, DataProto]) -> DataProto:
    match node:
        case _Whole():
            return _bare(payloads[id(node.block)])
        case _Given():
            return node.data
        case _Take():
            return _rows_of(_assemble(node.source, payloads), node.index)
        case _Columns():
            return _assemble(node.source, payloads).select(node.tensors, node.arrays)
        case _Concat():
            return DataProto.concat([_assemble(part, payloads) for part in node.parts])
        case _Union():
            left = _assemble(node.left, payloads)
            return DataProto(left.batch, left.non_tensor_batch).union(_assemble(node.right, payloads))


def _fresh(node: _Node) -> bool:
    """Whether putting it together copies every column, so that nobody else has a view of them."""
    match node:
        case _Whole() | _Given():
            return False
        case _Take():
            return not (isinstance(node.index, range) and node.index.step > 0) or _fresh(node.source)
        case _Columns():
            return _fresh(node.source)
        case _Union():
            return _fresh(node.left) and _fresh(node.right)
        case _Concat():
            return True


def _rows_of(data: DataProto, index: Rows) -> DataProto:
    if isinstance(index, range) and index.step > 0:
        return data.slice(index.start, index.stop, index.step)
    return data.select_idxs(_array(index))


def _bare(data: DataProto) -> DataProto:
    """The same columns in containers of its own, without ``meta_info``."""
    return DataProto(batch=data.batch, non_tensor_batch=data.non_tensor_batch)
