"""Who joins, who leaves, who sits where: pure, no tensors, no clock.

A row waits, then runs in a *slot* of the cache. Running rows are of two kinds:

    ready       one pending token: takes part in the decode step
    prefilling  more pending tokens (a prompt, or a whole row whose cache is computed again)

Ready rows always sit in slots ``0 .. ready-1``, so that a decode step reads one contiguous part of the cache and a
row that has left costs nothing.

Laws: at most ``max_running_requests`` rows run (probes come on top); rows join in the order of submission; a step
reads at most ``prefill_tokens_per_step`` tokens of prefilling rows; while paused or asleep nothing is planned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from asyncrl.interfaces import PauseMode
from engines.rollout.embedded.row import Row

__all__ = ["Chunk", "Move", "Schedule", "Step", "in_batches"]

_PADDING_SHARE = 0.25
_PADDING_FLOOR_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Move:
    """The cache of slot ``source`` goes to slot ``target``. The moves of a step happen all at once."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Read the next ``tokens`` pending tokens of ``row``."""

    row: Row
    tokens: int

    @property
    def completes(self) -> bool:
        """After this the row's next token can be sampled."""
        return self.tokens == self.row.pending


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What to do next, in this order.

    Attributes:
        moves: cache contents that change their slot.
        prefills: batches of chunks, each for one forward pass.
        ready: rows of the decode step, in slot order; slot i is ``ready[i]``.
        changed: whether ``ready`` differs from the last step's.
    """

    moves: tuple[Move, ...]
    prefills: tuple[tuple[Chunk, ...], ...]
    ready: Sequence[Row]
    changed: bool


class Schedule:
    """The state machine. Events: :meth:`submit`, :meth:`leave`, :meth:`pause`, :meth:`resume`, :meth:`reread`."""

    def __init__(self, *, max_running_requests: int, prefill_tokens_per_step: int) -> None:
        self._max_running = max_running_requests
        self._prefill_tokens = prefill_tokens_per_step
        self._probes: deque[Row] = deque()
        self._waiting: deque[Row] = deque()
        self._running: list[Row] = []
        self._ready: list[Row] = []
        self._stale = False
        self._next_order = 0
        self._drain_before = 0
        self.state: Literal["running", "draining", "paused"] = "running"
        self.asleep = False

    @property
    def running(self) -> Sequence[Row]:
        """Rows that have a slot."""
        return self._running

    @property
    def waiting(self) -> int:
        """Rows without a slot."""
        return len(self._waiting) + len(self._probes)

    @property
    def rows(self) -> list[Row]:
        """Every row held, running ones first."""
        return [*self._running, *self._probes, *self._waiting]

    @property
    def has_work(self) -> bool:
        """Whether the next step would do anything."""
        if self.asleep or self.state == "paused":
            return False
        return bool(self._running or self._probes or (self._waiting and self._may_join(self._waiting[0])))

    def submit(self, row: Row) -> None:
        """Queue a row; a probe goes before all others."""
        row.order = self._next_order
        self._next_order += 1
        (self._probes if row.probe else self._waiting).append(row)

    def leave(self, row: Row) -> None:
        """Forget a row that has ended, wherever it is."""
        if row.slot >= 0:
            self._running.remove(row)
            row.slot = -1
            row.cached = 0
            self._stale = True
        elif row in self._probes:
            self._probes.remove(row)
        elif row in self._waiting:
            self._waiting.remove(row)
        self._settle()

    def pause(self, mode: PauseMode) -> None:
        """Stop at once, or for ``drain`` when the rows submitted until now have left.

        Ending the rows for ``abort`` is the caller's part.
        """
        if mode != "drain":
            self.state = "paused"
        elif self.state != "draining":
            self.state = "draining"
            self._drain_before = self._next_order
            self._settle()

    def resume(self) -> None:
        """Go on, whatever the pause was."""
        self.state = "running"

    def sleep(self) -> None:
        """The whole cache is given up, whatever the state; nothing is planned until :meth:`wake`."""
        for row in self._running:
            row.cached = 0
        self._stale = True
        self.asleep = True

    def wake(self) -> None:
        """Go on as the state says."""
        self.asleep = False

    def reread(self, row: Row) -> None:
        """What the cache holds of ``row`` is not valid any more: all its tokens are pending again."""
        if row.cached:
            row.cached = 0
            self._stale = True

    def next(self) -> Step:
        """Plan a step and give joining rows their slots."""
        if self.asleep or self.state == "paused":
            return Step(moves=(), prefills=(), ready=(), changed=True)
        if not (self._stale or self._waiting or self._probes) and len(self._ready) == len(self._running):
            return Step(moves=(), prefills=(), ready=self._ready, changed=False)
        budget = self._prefill_tokens
        prefilling = sorted((row for row in self._running if row.pending > 1), key=_order)
        chunks: list[Chunk] = []
        for row in prefilling:
            if budget <= 0:
                break
            chunks.append(Chunk(row, min(row.pending, budget)))
            budget -= chunks[-1].tokens
        while budget > 0 and (joining := self._next_joining()) is not None:
            self._running.append(joining)  # its slot comes from the arrangement below
            self._stale = True
            if joining.pending > 1:
                chunks.append(Chunk(joining, min(joining.pending, budget)))
                budget -= chunks[-1].tokens
        changed = self._stale
        moves = self._arrange() if changed else ()
        self._stale = False
        return Step(moves=moves, prefills=in_batches(chunks), ready=self._ready, changed=changed)

    def read(self, row: Row, tokens: int) -> None:
        """``tokens`` more tokens of ``row`` are in the cache; told before the sampled token is appended."""
        if row.pending > 1:
            self._stale = True
        row.cached += tokens

    def _next_joining(self) -> Row | None:
        if self._probes:
            return self._probes.popleft()
        ordinary = sum(not row.probe for row in self._running)
        if self._waiting and ordinary < self._max_running and self._may_join(self._waiting[0]):
            return self._waiting.popleft()
        return None

    def _may_join(self, row: Row) -> bool:
        return self.state == "running" or (self.state == "draining" and row.order < self._drain_before)

    def _settle(self) -> None:
        if self.state == "draining" and not self._running and not (self._waiting and self._may_join(self._waiting[0])):
            self.state = "paused"

    def _arrange(self) -> tuple[Move, ...]:
        """Ready rows first, moving as few as possible; then the rest."""
        ready = [row for row in self._running if row.pending == 1]
        rest = [row for row in self._running if row.pending != 1]
        places: list[Row | None] = [None] * len(self._running)
        for group, low, high in ((ready, 0, len(ready)), (rest, len(ready), len(places))):
            strangers = []
            for row in group:
                if low <= row.slot < high:
                    places[row.slot] = row
                else:
                    strangers.append(row)
            free = (slot for slot in range(low, high) if places[slot] is None)
            for stranger, slot in zip(strangers, free, strict=False):
                places[slot] = stranger
        arranged = [row for row in places if row is not None]
        moves = tuple(Move(row.slot, slot) for slot, row in enumerate(arranged) if row.slot != slot and row.cached)
        for slot, row in enumerate(arranged):
            row.slot = slot
        self._running = arranged
        self._ready = arranged[: len(ready)]
        return moves


def in_batches(chunks: Sequence[Chunk]) -> tuple[tuple[Chunk, ...], ...]:
    """Group chunks for right-padded forward passes, sorted by length, with little padding.

    A chunk that continues a partly read row stands alone: it attends to the cache, the others only to themselves.
    """
    batches: list[tuple[Chunk, ...]] = [(chunk,) for chunk in chunks if chunk.row.cached]
    fresh = sorted((chunk for chunk in chunks if not chunk.row.cached), key=lambda chunk: chunk.tokens)
    batch: list[Chunk] = []
    total = 0
    for chunk in fresh:
        padding = (len(batch) + 1) * chunk.tokens - (total + chunk.tokens)
        if batch and padding > _PADDING_FLOOR_TOKENS + _PADDING_SHARE * total:
            batches.append(tuple(batch))
            batch, total = [], 0
        batch.append(chunk)
        total += chunk.tokens
    if batch:
        batches.append(tuple(batch))
    return tuple(batches)


def _order(row: Row) -> int:
    return row.order
