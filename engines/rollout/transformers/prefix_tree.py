"""What the blocks of the cache hold, and who uses them: pure, no tensors, no clock.

Rows have blocks in their tables, and sessions keep blocks for their next rows. Whole blocks are found by their tokens:
they form a tree for each adapter, in which a block follows the one whose tokens come before its own (a prefix tree as
in SGLang, Zheng et al. 2024, by whole blocks). So a row finds what it shares with others in one lookup for each block.

Laws: who uses a block of a tree uses the one before it, so the last blocks are let go first; no two blocks of a tree
hold the same tokens after the same ones; a block is in a tree from the moment at which a row is to read it, and
``read`` once all of its keys and values are in the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TypeAlias

Siblings: TypeAlias = "dict[tuple[int, ...], Block]"


@dataclass(slots=True, eq=False)
class Block:
    """A block that ``rows`` running rows have in their tables, and ``sessions`` sessions keep.

    ``tokens`` are those of a block of a tree, or of a session's last one. ``siblings`` are the blocks of the tree that
    follow the same one, this one among them; None outside.
    """

    id: int
    rows: int = 0
    sessions: int = 0
    read: bool = False
    tokens: tuple[int, ...] = ()
    siblings: Siblings | None = None
    following: Siblings = field(default_factory=dict)

    @property
    def idle(self) -> bool:
        """Return whether sessions alone use it."""
        return not self.rows and self.sessions > 0


class PrefixTree:
    """The blocks in use, by their ids, in the tree or outside. ``idle`` of them are used by sessions alone."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._blocks: dict[int, Block] = {}
        self._roots: dict[str, Siblings] = {}
        self.idle = 0

    def __getitem__(self, block: int) -> Block:
        return self._blocks[block]

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, adapter: str, tokens: Sequence[int]) -> list[int]:
        """Return the blocks with which ``tokens`` begin, as far as they are in the adapter's tree, read or not."""
        found: list[int] = []
        siblings = self._roots.get(adapter, {})
        for begin in range(0, len(tokens) - self._block_tokens + 1, self._block_tokens):
            block = siblings.get(tuple(tokens[begin : begin + self._block_tokens]))
            if block is None:
                break
            found.append(block.id)
            siblings = block.following
        return found

    def grow(self, adapter: str, tokens: Sequence[int], blocks: Sequence[int]) -> list[int]:
        """Put a row's blocks into the tree, as far as ``tokens`` fill them; return the blocks there that hold these.

        Where another one holds the same, the row's own stays outside. If that is not read yet, the way ends before it.
        """
        own = [self._blocks[each] for each in blocks[: len(tokens) // self._block_tokens]]
        way = list(takewhile(lambda each: each.siblings is not None, own))
        siblings = way[-1].following if way else self._roots.setdefault(adapter, {})
        for block in own[len(way) :]:
            begin = len(way) * self._block_tokens
            block.tokens = tuple(tokens[begin : begin + self._block_tokens])
            held = siblings.setdefault(block.tokens, block)
            if held is block:
                block.siblings = siblings
            elif not held.read:
                break
            way.append(held)
            siblings = held.following
        return [each.id for each in way]

    def note_read(self, blocks: Sequence[int]) -> None:
        """Note that the first blocks of a row have all of their keys and values in the cache."""
        for block in reversed(blocks):
            if self._blocks[block].read:
                break  # and so have those before
            self._blocks[block].read = True

    def count(self, blocks: Iterable[int], *, rows: int = 0, sessions: int = 0) -> list[int]:
        """Add to the users of blocks; return those that have none left, and are not in use any more."""
        freed: list[int] = []
        for block in blocks:
            used = self._blocks.get(block)
            if used is None:
                used = self._blocks[block] = Block(block)
            self.idle -= used.idle
            used.rows += rows
            used.sessions += sessions
            self.idle += used.idle
            if not (used.rows or used.sessions):
                self.take_out(block)
                del self._blocks[block]
                freed.append(block)
        return freed

    def take_out(self, block: int) -> None:
        """Take a block that none follows out of the tree, for one row to write in it."""
        out = self._blocks[block]
        if out.siblings is not None:
            del out.siblings[out.tokens]
        out.siblings, out.read = None, False

    def forget(self, adapters: Iterable[str] | None = None) -> None:
        """Begin the trees of all adapters, or of these, anew: no row finds what has been put into them so far."""
        for adapter in list(self._roots) if adapters is None else adapters:
            self._roots.pop(adapter, None)
