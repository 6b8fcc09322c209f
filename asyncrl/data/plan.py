"""Plans: which rows and columns of which blocks make a batch, known exactly, with no payload touched.

A worker's result stays where it was made, as a :class:`Block`; what travels is its :class:`Header`. A :class:`Plan` is
an immutable tree over blocks with the header of the whole, which follows from the headers below it by the rules of
:class:`DataProto`: what does not fit together raises there, before any transfer.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import torch

from asyncrl.data.columns import Columns, chunk_bounds, concat_meta_info, union_meta_info, values_equal
from asyncrl.data.proto import DataProto, DataProtoConfig, tensordict_of
from asyncrl.data.ragged import own_tensors
from asyncrl.data.schema import Column, Schema, common_schema
from asyncrl.errors import SchemaError, UserCodeError

if TYPE_CHECKING:
    from asyncrl.data.codec import Encoded

COPY_INLINE_BYTES = 256 * 1024
"""Up to this size, copying rows takes less time than handing the copy to a thread."""

# ------------------------------------------------------------------------------------------------------------- headers


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What is known of a batch without its payload.

    ``size_bytes`` is exact for whole results of workers, in proportion to rows and columns for parts of them, and that
    of the input where a function is applied. ``has_batch``: whether it has a TensorDict, which has rows even without
    columns.
    """

    rows: int
    schema: Schema
    meta_info: dict[str, Any]
    size_bytes: int
    auto_padding: bool = False
    has_batch: bool = True

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
        """Return the header of an encoded batch; raise :class:`CodecError` if the bytes are no batch."""
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
        return replace(
            self,
            rows=rows,
            schema=replace(self.schema, rows=rows),
            meta_info=dict(self.meta_info),
            size_bytes=round(self.size_bytes * rows / self.rows) if self.rows else 0,
        )

    def template(self) -> DataProto:
        """Return a batch of no rows with these columns' names and this ``meta_info``, to try a selection on."""
        return self._batch_of(lambda column: torch.empty(0), lambda column: np.empty(0))

    def without_rows(self) -> DataProto:
        return self._batch_of(_tensor_without_rows, lambda column: np.empty((0, *column.shape), dtype=column.dtype))

    def _batch_of(self, tensor: Callable[[Column], torch.Tensor], array: Callable[[Column], Any]) -> DataProto:
        tensors = {each.name: tensor(each) for each in self.schema.columns if each.is_tensor}
        arrays = {each.name: array(each) for each in self.schema.columns if not each.is_tensor}
        return self.give(Columns(tensors=tensors, arrays=arrays, rows=0))

    def give(self, columns: Columns) -> DataProto:
        return DataProto.from_columns(
            columns, meta_info=self.meta_info, has_batch=self.has_batch, auto_padding=self.auto_padding
        )


def _tensor_without_rows(column: Column) -> torch.Tensor:
    values = torch.empty(0, *column.shape, dtype=getattr(torch, column.dtype))
    if column.kind == "tensor":
        return values
    return torch.nested.nested_tensor_from_jagged(values, torch.zeros(1, dtype=torch.int64))


# ------------------------------------------------------------------------------------------------------- row functions


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowFunction:
    """A function of rows, and what it takes and returns besides them. Pickles if ``function`` does.

    Attributes:
        name: for messages.
        takes: header of the batch that it is applied to; the number of rows does not matter.
        returns: header that it returned for no rows, and must return for any.
    """

    function: Callable[[DataProto], DataProto]
    name: str
    takes: Header
    returns: Header

    @staticmethod
    def tried(function: Callable[[DataProto], DataProto], takes: Header, *, name: str) -> RowFunction:
        """Apply ``function`` to a batch without rows, to learn what it returns.

        Raises:
            UserCodeError: it raised, or returned something other than a batch.
            SchemaError: it returned rows.
        """
        result = _applied(function, takes.without_rows(), name, rows="no rows, to learn its columns")
        if len(result):
            raise SchemaError(f"{name} must return one row for each row, and returned {len(result)} for none")
        return RowFunction(function=function, name=name, takes=takes, returns=Header.of(result))

    def __call__(self, data: DataProto) -> DataProto:
        """Apply it to a batch (columns without ``meta_info``) whose memory it may write to.

        Raises:
            UserCodeError: it raised, or returned something other than a batch.
            SchemaError: not one row for each row, or other columns or ``meta_info`` than for no rows.
        """
        rows = len(data)
        result = _applied(self.function, self.takes.give(data.columns()), self.name, rows=f"{rows} rows")
        if len(result) != rows:
            raise SchemaError(f"{self.name} must return one row for each row, and returned {len(result)} for {rows}")
        difference = self.returns.schema.any_rows().diff(result.schema)
        if difference:
            raise SchemaError(f"{self.name} returned other columns for {rows} rows than for none:\n{difference}")
        if not values_equal(self.returns.meta_info, result.meta_info):
            raise SchemaError(
                f"{self.name} returned other meta_info for {rows} rows than for none: what depends on the rows belongs "
                "in a column, since every consumer has only some of the rows"
            )
        return bare(result)


def _applied(function: Callable[[DataProto], DataProto], data: DataProto, name: str, *, rows: str) -> DataProto:
    try:
        result: object = function(data)
    except Exception as error:
        raise UserCodeError(f"{name} raised {type(error).__name__} for {rows}: {error}") from error
    if not isinstance(result, DataProto):  # pyright: ignore[reportUnnecessaryIsInstance]  programs without types
        raise UserCodeError(f"{name} must return a DataProto, and returned {type(result).__name__} for {rows}")
    return result


# ---------------------------------------------------------------------------------------------- the tree below a plan
#
# Nodes are immutable and hold rows and columns only: meta_info is in the headers of plans. Selections of rows are
# pushed down to the blocks while the tree grows, so that assembling it fetches only the blocks that hold its rows.

Rows: TypeAlias = "range | np.ndarray[Any, np.dtype[Any]]"
"""Row numbers, none negative: a range (evenly spaced: a view where it ascends) or an int64 array (a copy)."""


class Block(Protocol):
    """The payload of one worker's result, where it lies."""

    @classmethod
    def get_all(cls, blocks: Sequence[Any]) -> list[DataProto]:
        """Return the payloads of several blocks of this class. Blocks the thread until they have arrived."""
        ...

    @classmethod
    async def fetch_all(cls, blocks: Sequence[Any]) -> list[DataProto]:
        """As :meth:`get_all`, without blocking the loop; does not suspend if the payloads are in this process."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    block: Block
    rows: int


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    data: DataProto
    rows: int


@dataclass(frozen=True, slots=True, eq=False)
class Coded:
    """A small batch in this process that is still encoded. Pickles as :class:`Given`."""

    encoded: Encoded
    rows: int

    def decoded(self) -> DataProto:
        from asyncrl.data.codec import decode

        return decode(self.encoded.header, self.encoded.buffers)

    def __reduce__(self) -> tuple[Any, ...]:
        return Given, (self.encoded, self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """Some rows of a node, in some order."""

    source: Whole | Joined
    index: Rows

    @property
    def rows(self) -> int:
        return len(self.index)


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """The rows of several nodes, in order; none of them is Joined itself."""

    parts: tuple[Node, ...]
    rows: int


@dataclass(frozen=True, slots=True, eq=False)
class Selected:
    """Column ``old[i]`` of a node under the name ``new[i]``, for some of its columns."""

    source: Node
    old: tuple[str, ...]
    new: tuple[str, ...]

    @property
    def rows(self) -> int:
        return self.source.rows


@dataclass(frozen=True, slots=True, eq=False)
class United:
    """The columns of two nodes, whose rows are the same rows."""

    left: Node
    right: Node
    rows: int


@dataclass(frozen=True, slots=True, eq=False)
class Mapped:
    source: Node
    function: RowFunction

    @property
    def rows(self) -> int:
        return self.source.rows


Node: TypeAlias = "Whole | Given | Coded | Taken | Joined | Selected | United | Mapped"


def join(nodes: Sequence[Node]) -> Node:
    """Concatenate nodes, without the empty ones, and with nested ones flattened."""
    parts: list[Node] = []
    for node in nodes:
        parts += node.parts if isinstance(node, Joined) else (node,)
    filled = [part for part in parts if part.rows] or parts[:1]
    return filled[0] if len(filled) == 1 else Joined(tuple(filled), sum(part.rows for part in filled))


def take(node: Node, index: Rows) -> Node:
    """Return the rows ``index`` of a node, taken as near to the blocks as possible."""
    if isinstance(index, range) and index == range(node.rows):
        return node
    match node:
        case Whole():
            return Taken(node, index)
        case Given():
            return Given(rows_of(node.data, index), len(index))
        case Coded():
            return Given(rows_of(node.decoded(), index), len(index))
        case Taken():
            return take(node.source, _compose(node.index, index))
        case Selected() | Mapped():
            return replace(node, source=take(node.source, index))
        case United():
            sides = [side if side.rows != node.rows else take(side, index) for side in (node.left, node.right)]
            return United(sides[0], sides[1], len(index))
        case Joined():
            return _take_of_parts(node, index)


def _take_of_parts(node: Joined, index: Rows) -> Node:
    ends = np.cumsum([part.rows for part in node.parts])
    starts = ends - [part.rows for part in node.parts]
    if len(index) == 0:
        return take(node.parts[0], range(0))
    if isinstance(index, range) and index.step == 1:
        cuts = [
            take(part, range(max(index.start, start) - start, min(index.stop, end) - start))
            for part, start, end in zip(node.parts, starts.tolist(), ends.tolist(), strict=True)
            if start < index.stop and end > index.start
        ]
        return join(cuts)
    rows = np.asarray(index, dtype=np.int64)
    owners = np.searchsorted(ends, rows, side="right")
    borders = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(rows)]
    if len(borders) - 1 <= 2 * len(node.parts):
        runs = [(int(owners[start]), rows[start:end]) for start, end in pairwise(borders)]
        return join([take(node.parts[owner], _evenly(run - starts[owner])) for owner, run in runs])
    # The rows alternate between the parts: take each part's rows once, in order, then shuffle what was taken.
    needed, places = np.unique(rows, return_inverse=True)
    taken = _take_of_parts(node, needed)
    if isinstance(taken, Joined | Whole):
        return Taken(taken, places)
    return take(taken, places)


def _compose(outer: Rows, inner: Rows) -> Rows:
    """Return the row numbers of "the rows ``inner`` of the rows ``outer``"."""
    if isinstance(outer, range):
        if isinstance(inner, range):
            return outer[inner.start : inner.stop : inner.step] if inner.step > 0 else _evenly(_array(outer)[inner])
        return np.asarray(outer.start + outer.step * inner)
    return np.asarray(outer[_array(inner)])


def _array(rows: Rows) -> np.ndarray[Any, np.dtype[Any]]:
    return np.asarray(rows, dtype=np.int64)


def _evenly(rows: np.ndarray[Any, np.dtype[Any]]) -> Rows:
    """Return a range if the rows are consecutive."""
    if len(rows) and int(rows[-1]) - int(rows[0]) == len(rows) - 1 and bool((np.diff(rows) == 1).all()):
        return range(int(rows[0]), int(rows[-1]) + 1)
    return rows


def sources(node: Node) -> tuple[Node, ...]:
    match node:
        case Whole() | Given() | Coded():
            return ()
        case Taken() | Selected() | Mapped():
            return (node.source,)
        case Joined():
            return node.parts
        case United():
            return node.left, node.right


def blocks_of(node: Node) -> Iterator[Block]:
    """Yield the blocks that a node needs; one that is needed twice, twice."""
    if isinstance(node, Whole):
        yield node.block
    for source in sources(node):
        yield from blocks_of(source)


def is_computed(node: Node) -> bool:
    """Whether putting it together runs functions of users, which may take long."""
    return isinstance(node, Mapped) or any(map(is_computed, sources(node)))


def is_fresh(node: Node) -> bool:
    """Whether putting it together copies every column, so that no other view of them exists."""
    match node:
        case Whole() | Given() | Coded() | Mapped():  # what a function returns may be part of something that it keeps
            return False
        case Joined():
            return True
        case Taken() if not (isinstance(node.index, range) and node.index.step > 0):
            return True
        case _:
            return all(map(is_fresh, sources(node)))


def assemble(node: Node, payloads: dict[int, DataProto]) -> DataProto:
    """Put the batch together from the payloads of the blocks by their ``id``, whose tensors it may share."""
    match node:
        case Whole():
            return bare(payloads[id(node.block)])
        case Given():
            return node.data
        case Coded():
            return node.decoded()
        case Taken():
            return rows_of(assemble(node.source, payloads), node.index)
        case Selected():
            data = bare(assemble(node.source, payloads))
            columns = data.columns()
            kept = columns.without({*columns.names} - {*node.old})
            return data.with_rows(kept.rename(node.old, node.new))
        case Mapped():
            given = bare(assemble(node.source, payloads))
            return node.function(given if is_fresh(node.source) else given.clone())
        case Joined() if all(isinstance(part, Coded) for part in node.parts):
            from asyncrl.data.codec import decode_joined

            return decode_joined([part.encoded for part in node.parts if isinstance(part, Coded)])
        case Joined():
            return DataProto.concat([bare(assemble(part, payloads)) for part in node.parts])  # meta_info: the header's
        case United():
            return bare(assemble(node.left, payloads)).union(assemble(node.right, payloads))


def rows_of(data: DataProto, index: Rows) -> DataProto:
    """Return rows of a batch in this process: a view if they are evenly spaced and ascend."""
    if isinstance(index, range) and index.step > 0:
        return data.slice(index.start, index.stop, index.step)
    return data.select_idxs(_array(index))


def bare(data: DataProto) -> DataProto:
    """Return a batch of the same columns with containers of its own, without ``meta_info``."""
    return DataProto(batch=data.batch, non_tensor_batch=data.non_tensor_batch)


# --------------------------------------------------------------------------------------------------------------- plans


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A batch that can be put together from blocks; ``header`` is the header that it will have.

    The operations are those of :class:`DataProto`, with the same errors; they return new plans.
    """

    node: Node
    header: Header

    @staticmethod
    def of(data: DataProto) -> Plan:
        """Plan a batch of this process. Its tensors are shared, its containers are copied."""
        return Plan(Given(bare(data), len(data)), Header.of(data))

    @staticmethod
    def coded(encoded: Encoded) -> Plan:
        """Plan a small encoded batch; raise :class:`CodecError` if the bytes are no batch."""
        header = Header.coded(encoded)
        return Plan(Coded(encoded, header.rows), header)

    @staticmethod
    def shard(block: Block, header: Header) -> Plan:
        return Plan(Whole(block, header.rows), header)

    @staticmethod
    def concat(plans: Sequence[Plan]) -> Plan:
        headers = [plan.header for plan in plans]
        schema = common_schema([header.schema for header in headers])
        rows = sum(header.rows for header in headers)
        header = Header(
            rows=rows,
            schema=replace(schema, rows=rows),
            meta_info=concat_meta_info([header.meta_info for header in headers]),
            size_bytes=sum(header.size_bytes for header in headers),
            auto_padding=any(header.auto_padding for header in headers),
            has_batch=headers[0].has_batch,
        )
        return Plan(join([plan.node for plan in plans]), header)

    def take(self, index: Rows) -> Plan:
        return Plan(take(self.node, index), self.header.resized(len(index)))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Plan:
        return self.take(range(*builtins.slice(start, end, step).indices(self.header.rows)))

    def chunk(self, chunks: int) -> list[Plan]:
        uneven = self.header.auto_padding or DataProtoConfig.auto_padding
        return [self.take(rows) for rows in chunk_bounds(self.header.rows, chunks, uneven=uneven)]

    def repeat(self, repeat_times: int, *, interleave: bool) -> Plan:
        rows = np.arange(self.header.rows)
        return self.take(np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times))

    def select(self, *keys: Iterable[str] | None) -> Plan:
        return self._selected(self.header.template().select(*keys))  # type: ignore[arg-type]  # at most three

    def pop(self, *keys: Iterable[str] | None) -> tuple[Plan, Plan]:
        rest = self.header.template()
        popped = self._selected(rest.pop(*keys))
        return popped, self._selected(rest)

    def _selected(self, selected: DataProto) -> Plan:
        """Select what is left of the header's template."""
        mine = self.header.schema.columns
        columns = tuple(column for column in mine if column.name in selected.columns().names)
        header = replace(
            self.header,
            schema=replace(self.header.schema, columns=columns),
            meta_info=selected.meta_info,
            size_bytes=round(self.header.size_bytes * len(columns) / max(1, len(mine))),
            has_batch=selected.batch is not None,
        )
        if not columns and not header.has_batch:
            # Without a column and without a TensorDict, a batch has no rows.
            return Plan(Given(DataProto(), 0), header.resized(0))
        names = tuple(column.name for column in columns)
        return Plan(self.node if len(columns) == len(mine) else Selected(self.node, names, names), header)

    def rename(self, old: Sequence[str], new: Sequence[str]) -> Plan:
        self.header.template().rename(old, new)
        renamed = dict(zip(old, new, strict=True))
        mine = self.header.schema
        columns = tuple(replace(each, name=renamed.get(each.name, each.name)) for each in mine.columns)
        header = replace(self.header, schema=replace(mine, columns=columns))
        return Plan(Selected(self.node, mine.names, header.schema.names), header)

    def then(self, function: Callable[[DataProto], DataProto], *, name: str) -> Plan:
        applied = RowFunction.tried(function, self.header, name=name)
        rows = self.header.rows
        header = replace(
            applied.returns,
            rows=rows,
            schema=replace(applied.returns.schema, rows=rows),
            meta_info=dict(applied.returns.meta_info),
            size_bytes=self.header.size_bytes,
        )
        return Plan(Mapped(self.node, applied), header)

    def union(self, other: Plan) -> Plan:
        """As :meth:`DataProto.union`; whether columns of both are equal is checked when the rows are put together."""
        mine, theirs = self.header, other.header
        if mine.rows != theirs.rows and mine.schema.columns and theirs.schema.columns:
            raise SchemaError(f"union needs the same number of rows on both sides, got {mine.rows} and {theirs.rows}")
        columns = {column.name: column for column in mine.schema.columns}
        for column in theirs.schema.columns:
            if columns.setdefault(column.name, column) != column:
                raise SchemaError(
                    f"column {column.name!r} differs between the two batches of a union: "
                    f"{columns[column.name]} and {column}"
                )
        rows = mine.rows if mine.schema.columns else theirs.rows
        ordered = sorted(columns.values(), key=lambda column: not column.is_tensor)
        header = Header(
            rows=rows,
            schema=Schema(columns=tuple(ordered), rows=rows),
            meta_info=union_meta_info(mine.meta_info, theirs.meta_info),
            size_bytes=mine.size_bytes + theirs.size_bytes,
            auto_padding=mine.auto_padding,
            has_batch=mine.has_batch or any(each.is_tensor for each in ordered),
        )
        return Plan(United(self.node, other.node, rows), header)

    # ------------------------------------------------------------------------------------------------- the payload

    def blocks(self) -> list[Block]:
        """Return the blocks that this plan needs, each once."""
        return list({id(block): block for block in blocks_of(self.node)}.values())

    def get(self, *, read_only: bool = False) -> DataProto:
        """Fetch the blocks and put the batch together. Blocks the thread until they have arrived.

        The tensors and arrays belong to the caller alone, unless it promises to be ``read_only``: then they may be
        those of the block, which others read too. (The objects in an object column may be shared in any case.)
        """
        kinds = self._blocks_by_class()
        return self._assembled(kinds, [type(blocks[0]).get_all(blocks) for blocks in kinds], read_only)

    async def fetch(self, *, read_only: bool = False, inline: bool = False) -> DataProto:
        """As :meth:`get`, without blocking the loop; rows are copied in a thread, or on the loop if ``inline``."""
        kinds = self._blocks_by_class()
        found = [await type(blocks[0]).fetch_all(blocks) for blocks in kinds]
        at_once = self.header.size_bytes < COPY_INLINE_BYTES or (read_only and not is_fresh(self.node))
        if inline or (at_once and not is_computed(self.node)):
            return self._assembled(kinds, found, read_only)
        return await asyncio.to_thread(self._assembled, kinds, found, read_only)

    def _blocks_by_class(self) -> list[list[Block]]:
        kinds: dict[type[Block], list[Block]] = {}
        for block in self.blocks():
            kinds.setdefault(type(block), []).append(block)
        return list(kinds.values())

    def _assembled(self, kinds: list[list[Block]], found: list[list[DataProto]], read_only: bool) -> DataProto:
        payloads: dict[int, DataProto] = {}
        for blocks, batches in zip(kinds, found, strict=True):
            payloads.update({id(block): payload for block, payload in zip(blocks, batches, strict=True)})
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
