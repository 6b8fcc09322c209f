"""Which rows run, which blocks of the cache they have, and what the next pass reads: pure, no tensors, no clock.

A row waits, then runs. Running rows are of two kinds:

    ready       one pending token: read in every step
    prefilling  more pending tokens (a prompt, or a whole row whose cache is computed again)

A row joins when there are blocks for all its tokens. If a running row needs a block and none is free, the row that
joined last loses all of its blocks and waits again, before all others (preemption by recomputation, Kwon et al. 2023,
section 4.5): the tokens it has are read again when there is room.

When a row of a session has finished, the blocks of its cached tokens are kept for the session's next row, which takes
them over as far as its prompt begins with the same tokens. A row that needs blocks gets free ones first, then those
kept, of the session that ended its last row first, and only then those of rows.

Laws: at most ``max_running_requests`` rows run (probes come on top); rows join in the order of submission; a block
belongs to one row or session; the oldest row is never preempted, and a cache holds at least one row of any length, so
some row always goes on; a step reads at most ``prefill_tokens_per_step`` tokens of prefilling rows, and at most
``SCORED_TOKENS`` of those whose prompt's log-probs are requested; while paused or asleep nothing is planned.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from engines.rollout.request import Row

SCORED_TOKENS = 256
"""Each of them has logits of the whole vocabulary: with 150,000 tokens 150 MB in float32."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Read the next ``tokens`` pending tokens of ``row``."""

    row: Row
    tokens: int

    @property
    def completes(self) -> bool:
        """Return whether the row's next token can be sampled afterwards."""
        return self.tokens == self.row.pending

    @property
    def scored(self) -> range:
        """Return the places of the row after which a token of the prompt has a log-prob to be reported."""
        if not _is_scored(self.row):
            return range(0)
        return range(self.row.cached, min(self.row.cached + self.tokens, self.row.prompt_length - 1))


@dataclass(frozen=True, slots=True)
class KeptCache:
    """What a session's last row left: ``blocks`` with the keys and values of ``tokens``, under an adapter or none."""

    tokens: Sequence[int]
    blocks: Sequence[int]
    adapter: str

    def shared(self, row: Row) -> int:
        """Return the number of tokens that the row need not read: all but the last, which gives its next one."""
        if row.adapter != self.adapter or _is_scored(row):
            return 0
        longest = min(len(self.tokens), len(row.tokens) - 1)
        pairs = zip(self.tokens, row.tokens[:longest], strict=False)
        return next((place for place, (kept, wanted) in enumerate(pairs) if kept != wanted), longest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the engine does next: one forward pass over ``ready`` rows (one token each) and ``prefills``.

    ``ready`` is sorted by length. Where ``changed`` is false, the last step had the same ready rows, and no prefills.
    ``taken`` are blocks that rows got for it.
    """

    ready: Sequence[Row] = ()
    prefills: Sequence[Chunk] = ()
    changed: bool = True
    taken: Sequence[int] = ()

    @property
    def rows(self) -> list[Row]:
        """Return the rows whose next token is sampled, in the order of the pass."""
        return [*self.ready, *(chunk.row for chunk in self.prefills if chunk.completes)]


class Schedule:
    """The state machine.

    Events: :meth:`submit`, :meth:`leave`, :meth:`pause`, :meth:`resume`, :meth:`reread`, :meth:`forget`.

    Args:
        blocks: ids of the cache's blocks, of ``block_tokens`` tokens each.
        on_free: called with blocks that belong to no row any more.
    """

    def __init__(
        self,
        *,
        max_running_requests: int,
        prefill_tokens_per_step: int,
        blocks: Sequence[int],
        block_tokens: int,
        on_free: Callable[[Sequence[int]], object],
    ) -> None:
        self._max_running = max_running_requests
        self._prefill_tokens = prefill_tokens_per_step
        self._free = list(reversed(blocks))
        self._block_tokens = block_tokens
        self._on_free = on_free
        self._waiting: list[Row] = []  # both in the order of _rank
        self._running: list[Row] = []
        self._ready: list[Row] = []
        self.kept: dict[str, KeptCache] = {}
        """By session; the one whose row ended last is at the end."""
        self._stale = True
        self._next_order = 0
        self.preemptions = 0
        self.reused_tokens = 0
        """Tokens that rows did not read, because they were kept."""
        self.paused = False
        self.asleep = False

    @property
    def running(self) -> Sequence[Row]:
        return self._running

    @property
    def rows(self) -> list[Row]:
        return [*self._running, *self._waiting]

    @property
    def kept_tokens(self) -> int:
        return sum(len(kept.tokens) for kept in list(self.kept.values()))

    @property
    def has_work(self) -> bool:
        return not (self.asleep or self.paused) and bool(self._running or self._waiting)

    def submit(self, row: Row) -> None:
        """Queue a row; a probe goes before all others."""
        row.order = self._next_order
        self._next_order += 1
        insort(self._waiting, row, key=_rank)

    def leave(self, row: Row) -> None:
        """Remove a row that has ended, wherever it is; keep its cache if it has finished and is of a session.

        What was computed under several versions is not kept: a row that begins later must not meet the older ones. Nor
        is anything where rows run one by one: each is computed in one way then, to the last bit, whatever came before.
        """
        if row in self._running:
            finished = row.finish_reason in ("stop", "length")
            if row.session and finished and row.versions[0] == row.versions[-1] and self._max_running > 1:
                self._keep(row)
            self._stop(row)
        elif row in self._waiting:
            self._waiting.remove(row)

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def sleep(self) -> None:
        """Free all blocks; nothing is planned until :meth:`wake`, paused or not."""
        for row in list(self._running):
            self.reread(row)
        self.forget_all()
        self.asleep = True

    def wake(self) -> None:
        self.asleep = False

    def reread(self, row: Row) -> None:
        """Have a running row read all of its tokens again: what the cache holds of it is not valid any more."""
        if row.cached:
            self._back_to_waiting(row)

    def forget(self, session: str) -> None:
        """Free what is kept of a session."""
        if (kept := self.kept.pop(session, None)) is not None:
            self._give_back(kept.blocks)

    def forget_all(self, adapters: Collection[str] | None = None) -> None:
        """Free what is kept of all sessions, or of those with one of ``adapters``."""
        for session, kept in list(self.kept.items()):
            if adapters is None or kept.adapter in adapters:
                self.forget(session)

    def next(self) -> Step:
        """Plan a step, and give blocks to the rows that need them."""
        if self.asleep or self.paused:
            self._stale = True
            return Step()
        taken: list[int] = []
        unread = 0
        for row in list(self._running):
            if row.pending > 1:
                unread += row.pending
            elif row.blocks:  # an earlier one may have preempted it
                self._extend(row, taken)
        while unread < self._prefill_tokens and (joined := self._join(taken)) is not None:
            unread += joined.pending if joined.pending > 1 else 0
        if not self._stale:
            return Step(ready=self._ready, changed=False, taken=taken)
        self._ready = sorted((row for row in self._running if row.pending == 1), key=lambda row: row.cached)
        budget, scored_budget, prefills = self._prefill_tokens, SCORED_TOKENS, list[Chunk]()
        for row in self._running:
            count = min(row.pending, budget, scored_budget if _is_scored(row) else budget)
            if row.pending > 1 and count > 0:
                prefills.append(Chunk(row, count))
                budget -= count
                scored_budget -= len(prefills[-1].scored)
        self._stale = bool(prefills)
        return Step(ready=self._ready, prefills=prefills, taken=taken)

    def _join(self, taken: list[int]) -> Row | None:
        """Have the first waiting row run, if it may and there are blocks for all of its tokens."""
        if not self._waiting:
            return None
        row = self._waiting[0]
        ordinary = [other for other in self._running if not other.probe]
        reachable = len(self._free) + sum(len(kept.blocks) for kept in self.kept.values())
        if row.probe:
            reachable += sum(len(other.blocks) for other in ordinary)
        elif len(ordinary) >= self._max_running:
            return None
        if self._missing(row) > reachable:
            return None
        insort(self._running, self._waiting.pop(0), key=_rank)
        self._stale = True
        self._take_over(row)
        self._extend(row, taken)
        return row

    def _extend(self, row: Row, taken: list[int]) -> None:
        """Give a running row the blocks for all of its tokens; rows that joined last lose theirs where none is free."""
        missing = self._missing(row)
        while missing > len(self._free) and self.kept:
            self.forget(next(iter(self.kept)))
        while missing > len(self._free) and row in self._running:
            self.preemptions += 1
            self._back_to_waiting(self._running[-1])
        if row in self._running:
            for _ in range(missing):
                row.blocks.append(self._free.pop())
            taken.extend(row.blocks[len(row.blocks) - missing :])

    def _keep(self, row: Row) -> None:
        self.forget(row.session)
        if blocks := row.blocks[: -(-row.cached // self._block_tokens)]:
            self.kept[row.session] = KeptCache(row.tokens[: row.cached], blocks, row.adapter)
            del row.blocks[: len(blocks)]

    def _take_over(self, row: Row) -> None:
        kept = self.kept.pop(row.session, None)
        if kept is None:
            return
        row.cached = kept.shared(row)
        used = -(-row.cached // self._block_tokens)
        row.blocks = list(kept.blocks[:used])
        self.reused_tokens += row.cached
        self._give_back(kept.blocks[used:])

    def _missing(self, row: Row) -> int:
        return -(-len(row.tokens) // self._block_tokens) - len(row.blocks)

    def _back_to_waiting(self, row: Row) -> None:
        self._stop(row)
        insort(self._waiting, row, key=_rank)

    def _stop(self, row: Row) -> None:
        self._running.remove(row)
        self._stale = True
        row.cached = 0
        freed, row.blocks = row.blocks, []
        self._give_back(freed)

    def _give_back(self, blocks: Sequence[int]) -> None:
        self._free.extend(reversed(blocks))
        self._on_free(blocks)


def _is_scored(row: Row) -> bool:
    return row.sampling.prompt_log_probs is not None and not row.versions


def _rank(row: Row) -> tuple[bool, int]:
    """Probes first, then the order of submission."""
    return not row.probe, row.order
