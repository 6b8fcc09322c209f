"""The tree below a plan: blocks, and what is done with their rows and columns.

Nodes are immutable and know rows and columns only: ``meta_info`` lives in the headers of plans. Selections of rows are
pushed down to the blocks while the tree grows, so whoever assembles it fetches only the blocks that hold its rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from asyncrl.data.proto import DataProto
from asyncrl.data.row_function import RowFunction

if TYPE_CHECKING:
    from asyncrl.data.codec import Encoded

__all__ = [
    "Block",
    "Coded",
    "Given",
    "Joined",
    "Mapped",
    "Node",
    "Renamed",
    "Rows",
    "Selected",
    "Taken",
    "United",
    "Whole",
    "assemble",
    "bare",
    "blocks_of",
    "is_computed",
    "is_fresh",
    "join",
    "take",
]

Rows: TypeAlias = "range | np.ndarray[Any, np.dtype[Any]]"
"""Row numbers, none negative: a range (evenly spaced: a view where it ascends) or an int64 array (a copy)."""


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


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """The whole payload of a block."""

    block: Block
    rows: int


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """A batch that is here."""

    data: DataProto
    rows: int


@dataclass(frozen=True, slots=True, eq=False)
class Coded:
    """A small batch that is here as it came: as bytes. Pickles as :class:`Given`."""

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
    """Some columns of a node."""

    source: Node
    tensors: tuple[str, ...]
    arrays: tuple[str, ...]

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
class Renamed:
    """Column ``old[i]`` of a node under the name ``new[i]``."""

    source: Node
    old: tuple[str, ...]
    new: tuple[str, ...]

    @property
    def rows(self) -> int:
        return self.source.rows


@dataclass(frozen=True, slots=True, eq=False)
class Mapped:
    """What a function gives for the rows of a node."""

    source: Node
    function: RowFunction

    @property
    def rows(self) -> int:
        return self.source.rows


Node: TypeAlias = "Whole | Given | Coded | Taken | Joined | Selected | United | Renamed | Mapped"


# ------------------------------------------------------------------------------------------------- rows pushed down


def join(nodes: Sequence[Node]) -> Node:
    """Nodes one after another; empty ones are left out, nested ones joined flat."""
    parts: list[Node] = []
    for node in nodes:
        parts += node.parts if isinstance(node, Joined) else (node,)
    filled = [part for part in parts if part.rows] or parts[:1]
    return filled[0] if len(filled) == 1 else Joined(tuple(filled), sum(part.rows for part in filled))


def take(node: Node, index: Rows) -> Node:
    """The rows ``index`` of a node, taken as near to the blocks as can be."""
    if isinstance(index, range) and index == range(node.rows):
        return node
    match node:
        case Whole():
            return Taken(node, index)
        case Given():
            data = _rows_of(node.data, index)
            return Given(data, len(index))
        case Coded():
            return Given(_rows_of(node.decoded(), index), len(index))
        case Taken():
            return take(node.source, _compose(node.index, index))
        case Selected():
            return Selected(take(node.source, index), node.tensors, node.arrays)
        case Renamed():
            return Renamed(take(node.source, index), node.old, node.new)
        case Mapped():
            return Mapped(take(node.source, index), node.function)
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
    # Rows jump to and fro between the parts: take each part's rows once, in order, then shuffle what was taken.
    needed, places = np.unique(rows, return_inverse=True)
    taken = _take_of_parts(node, needed)
    if isinstance(taken, Joined | Whole):
        return Taken(taken, places)
    return take(taken, places)


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


def blocks_of(node: Node) -> Iterator[Block]:
    """The blocks it needs, those that it needs twice twice."""
    match node:
        case Whole():
            yield node.block
        case Given() | Coded():
            return
        case Taken() | Selected() | Renamed() | Mapped():
            yield from blocks_of(node.source)
        case Joined():
            for part in node.parts:
                yield from blocks_of(part)
        case United():
            yield from blocks_of(node.left)
            yield from blocks_of(node.right)


def assemble(node: Node, payloads: dict[int, DataProto]) -> DataProto:
    """The batch, from the payloads of the blocks by their ``id``. Its tensors may be those of a payload."""
    match node:
        case Whole():
            return bare(payloads[id(node.block)])
        case Given():
            return node.data
        case Coded():
            return node.decoded()
        case Taken():
            return _rows_of(assemble(node.source, payloads), node.index)
        case Selected():
            return assemble(node.source, payloads).select(node.tensors, node.arrays)
        case Renamed():
            return bare(assemble(node.source, payloads)).rename(node.old, node.new)
        case Mapped():
            given = bare(assemble(node.source, payloads))
            return node.function(given if is_fresh(node.source) else given.clone())
        case Joined() if all(isinstance(part, Coded) for part in node.parts):
            from asyncrl.data.codec import decode_joined

            return decode_joined([part.encoded for part in node.parts if isinstance(part, Coded)])
        case Joined():
            return DataProto.concat([bare(assemble(part, payloads)) for part in node.parts])  # meta_info: the header's
        case United():
            left = assemble(node.left, payloads)
            return DataProto(left.batch, left.non_tensor_batch).union(assemble(node.right, payloads))


def is_fresh(node: Node) -> bool:
    """Whether putting it together copies every column, so that nobody else has a view of them."""
    match node:
        case Whole() | Given() | Coded() | Mapped():
            # What a function gives may be part of something that it keeps.
            return False
        case Taken():
            return not (isinstance(node.index, range) and node.index.step > 0) or is_fresh(node.source)
        case Selected() | Renamed():
            return is_fresh(node.source)
        case United():
            return is_fresh(node.left) and is_fresh(node.right)
        case Joined():
            return True


def is_computed(node: Node) -> bool:
    """Whether putting it together runs functions of users, which may take their time."""
    match node:
        case Mapped():
            return True
        case Whole() | Given() | Coded() | Taken(source=Whole()):
            return False
        case Taken() | Selected() | Renamed():
            return is_computed(node.source)
        case Joined():
            return any(is_computed(part) for part in node.parts)
        case United():
            return is_computed(node.left) or is_computed(node.right)


def _rows_of(data: DataProto, index: Rows) -> DataProto:
    if isinstance(index, range) and index.step > 0:
        return data.slice(index.start, index.stop, index.step)
    return data.select_idxs(_array(index))


def bare(data: DataProto) -> DataProto:
    """The same columns in containers of its own, without ``meta_info``."""
    return DataProto(batch=data.batch, non_tensor_batch=data.non_tensor_batch)
