"""Which rows run, which blocks of the cache they have, and what the next pass reads: pure, no tensors, no clock.

A row waits, then runs. Running rows are of two kinds:

    ready       one pending token: read in every step
    prefilling  more pending tokens (a prompt, or a whole row whose cache is computed again)

A row joins when there are blocks for all its tokens. Blocks with its first tokens may be in use already
(:mod:`~engines.rollout.transformers.prefix_tree`): the row gets these, and reads only what no other one has read. Where
several rows need the same block read, the first of them reads it, and the others wait for that step.

If a running row needs a block and none is free, the row that joined last loses its blocks and waits again, before all
others (preemption by recomputation, Kwon et al. 2023, section 4.5): its tokens are read again when there is room.

When a row of a session has finished, the blocks of its cached tokens are kept for the session's next row. A row that
needs blocks gets free ones first, then those that sessions alone use, from their ends, of the session that ended its
last row first, and only then those of rows.

Laws: at most ``max_running_requests`` rows run (probes come on top); rows join in the order of submission, as soon as
there is room; a row that joins meets no keys and values from before the last :meth:`forget_all`; the last token of a
row, and a prompt whose log-probs are requested, is read by the row itself; a row waits only in steps in which another
reads what it needs; the oldest row is never preempted, and a cache holds at least one row of any length, so some row
always goes on; a step reads at most ``prefill_tokens_per_step`` tokens of prefilling rows, and at most
``SCORED_TOKENS`` of those whose prompt's log-probs are requested, which keep none from joining; while paused or asleep
nothing is planned.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile

from asyncrl.errors import EngineError
from engines.rollout.request import Row
from engines.rollout.transformers.prefix_tree import Block, PrefixTree

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


@dataclass(slots=True)
class KeptCache:
    """What a session's last row left: blocks with the keys and values of its tokens, under an adapter or none."""

    adapter: str
    blocks: list[int]


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

    Events: :meth:`submit`, :meth:`note_read`, :meth:`leave`, :meth:`pause`, :meth:`resume`, :meth:`reread`,
    :meth:`forget`.

    Args:
        blocks: ids of the cache's blocks, of ``block_tokens`` tokens each.
        on_free: called with blocks that are not in use any more.
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
        self._shares = max_running_requests > 1  # a row that runs alone is computed in one way, to the last bit
        self._prefill_tokens = prefill_tokens_per_step
        self._free = list(reversed(blocks))
        self._block_tokens = block_tokens
        self._on_free = on_free
        self._tree = PrefixTree(block_tokens)
        self._waiting: list[Row] = []  # both in the order of _rank
        self._running: list[Row] = []
        self._ready: list[Row] = []
        self.kept: dict[str, KeptCache] = {}
        """By session; the one whose row ended last is at the end."""
        self._stale = True
        self._without_room: Row | None = None
        self._next_order = 0
        self.preemptions = 0
        self.reused_tokens = 0
        """Tokens that rows did not read, because they were read before."""
        self.paused = False
        self.asleep = False

    @property
    def running(self) -> Sequence[Row]:
        return self._running

    @property
    def rows(self) -> list[Row]:
        return [*self._running, *self._waiting]

    @property
    def used_tokens(self) -> int:
        """Return for how many tokens the blocks in use have room. May be called in any thread."""
        return len(self._tree) * self._block_tokens

    @property
    def has_work(self) -> bool:
        return not (self.asleep or self.paused) and bool(self._running or self._waiting)

    def submit(self, row: Row) -> None:
        """Queue a row; a probe goes before all others."""
        row.order = self._next_order
        self._next_order += 1
        insort(self._waiting, row, key=_rank)

    def note_read(self, step: Step) -> None:
        """Note that the keys and values of a step's tokens are in the cache."""
        for row in step.ready:
            row.cached += 1  # the block that this fills is in no tree yet
        for chunk in step.prefills:
            chunk.row.cached += chunk.tokens
            self._tree.note_read(chunk.row.blocks[: chunk.row.cached // self._block_tokens])

    def leave(self, row: Row) -> None:
        """Remove a row that has ended, wherever it is; keep its cache if it has finished and is of a session.

        What was computed under several versions is not kept: a row that begins later must not meet the older ones.
        """
        if row in self._running:
            finished = row.finish_reason in ("stop", "length")
            if row.session and finished and row.versions[0] == row.versions[-1] and self._shares:
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
        """Have a running row let its cache go, and read again what it does not share (:meth:`forget_all`)."""
        if row in self._running:
            self._back_to_waiting(row)

    def forget(self, session: str) -> None:
        """Free what is kept of a session, and no row uses."""
        self._shorten(session, 0)

    def forget_all(self, adapters: Collection[str] | None = None) -> None:
        """Forget all sessions, or those with one of ``adapters``, and share nothing with rows that join later.

        Rows that run go on with the blocks that they have, shared among them or not.
        """
        for session, kept in list(self.kept.items()):
            if adapters is None or kept.adapter in adapters:
                self.forget(session)
        self._tree.forget(adapters)

    def next(self) -> Step:
        """Plan a step, and give blocks to the rows that need them.

        Raises:
            EngineError: rows wait, and none can go on. A law of this module does not hold then.
        """
        if self.asleep or self.paused:
            self._stale = True
            return Step()
        taken: list[int] = []
        for row in list(self._running):
            if row.blocks:  # an earlier one may have preempted it
                self._pass_read(row)
                self._extend(row, taken)
        unread = sum(row.pending for row in self._readers() if not _is_scored(row))
        while (joined := self._join(taken, only_probe=unread >= self._prefill_tokens)) is not None:
            if joined.pending > 1 and not _is_scored(joined):
                own = sum(self._tree[block].rows == 1 for block in joined.blocks)
                unread += min(joined.pending, own * self._block_tokens)
        taken = [block for block in taken if block in self._tree]
        if not self._stale:
            return Step(ready=self._ready, changed=False, taken=taken)
        self._ready = sorted((row for row in self._running if row.pending == 1), key=lambda row: row.cached)
        budget, scored_budget, prefills = self._prefill_tokens, SCORED_TOKENS, list[Chunk]()
        for row in self._readers():
            count = min(row.pending, budget, scored_budget if _is_scored(row) else budget)
            if count > 0:
                prefills.append(Chunk(row, count))
                budget -= count
                scored_budget -= len(prefills[-1].scored)
        if self.has_work and not (self._ready or prefills):
            raise EngineError(
                f"a defect of the schedule: {len(self.rows)} requests are there and none can go on, the first with "
                f"{self.rows[0].pending} tokens to read and {len(self._free)} free blocks; start the engine again"
            )
        self._stale = bool(prefills)
        return Step(ready=self._ready, prefills=prefills, taken=taken)

    # ----------------------------------------------------------------------------------------------------- reading

    def _next_block(self, row: Row) -> Block:
        """Return the block of the first pending token; there is one if more than one is pending."""
        return self._tree[row.blocks[row.cached // self._block_tokens]]

    def _pass_read(self, row: Row) -> None:
        """Move a row on, past the blocks that others have read."""
        begin = row.cached
        while row.pending > 1 and self._next_block(row).read:
            row.cached += self._block_tokens - row.cached % self._block_tokens
        self.reused_tokens += row.cached - begin

    def _readers(self) -> list[Row]:
        """Return the prefilling rows that do not wait: the first of all that need the same block read."""
        readers: dict[Block, Row] = {}
        for row in self._running:
            if row.pending > 1:
                readers.setdefault(self._next_block(row), row)
        return list(readers.values())

    # -------------------------------------------------------------------------------------------------------- room

    def _join(self, taken: list[int], *, only_probe: bool) -> Row | None:
        """Have the first waiting row run, if it may and there is room."""
        row = self._waiting[0] if self._waiting else None
        if row is None or row is self._without_room:
            return None
        if not row.probe and (only_probe or sum(not other.probe for other in self._running) >= self._max_running):
            return None
        shares = self._shares and not _is_scored(row)
        shared = self._tree.find(row.adapter, row.tokens[:-1]) if shares else []
        begun = self._begun(row, shared) if shares else 0
        missing = self._blocks_of(row) - len(shared) - bool(begun)
        reachable = len(self._free) + self._tree.idle - bool(begun) - sum(self._tree[block].idle for block in shared)
        if row.probe:
            stay = set(shared).union(*(other.blocks for other in self._running if other.probe))
            reachable += len(set[int]().union(*(other.blocks for other in self._running if not other.probe)) - stay)
        if missing > reachable:
            self._without_room = row
            return None
        insort(self._running, self._waiting.pop(0), key=_rank)
        self._stale = True
        self._take_over(row, shared, begun)
        self._extend(row, taken)
        if shares:
            self._tree.grow(row.adapter, row.tokens[:-1], row.blocks)
        self._pass_read(row)
        return row

    def _begun(self, row: Row, shared: Sequence[int]) -> int:
        """Return with how many tokens of the row the block after ``shared`` begins, if its session alone keeps that."""
        kept, at = self.kept.get(row.session), len(shared)
        if kept is None or kept.adapter != row.adapter or len(kept.blocks) <= at or kept.blocks[:at] != shared:
            return 0
        block = self._tree[kept.blocks[at]]
        if block.rows or block.sessions > 1:
            return 0
        pairs = zip(block.tokens, row.tokens[at * self._block_tokens : -1], strict=False)
        return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))

    def _take_over(self, row: Row, shared: Sequence[int], begun: int) -> None:
        """Give a row the blocks that it shares, and its session's next one if ``begun`` tokens there are its own."""
        self._tree.count(shared, rows=1)
        row.blocks = list(shared)
        if begun:
            self._shorten(row.session, len(shared) + 1)
            block = self.kept[row.session].blocks[-1]
            self._tree.take_out(block)
            self._tree.count([block], rows=1)
            row.blocks.append(block)
            row.cached = len(shared) * self._block_tokens + begun
            self.reused_tokens += row.cached
        self.forget(row.session)

    def _extend(self, row: Row, taken: list[int]) -> None:
        """Give a running row the blocks for all of its tokens; rows that joined last lose theirs where none is free."""
        missing = self._blocks_of(row) - len(row.blocks)
        while missing > len(self._free) and row in self._running:
            if not self._free_kept(missing):
                self.preemptions += 1
                self._back_to_waiting(self._running[-1])
        if missing and row in self._running:
            new = [self._free.pop() for _ in range(missing)]
            self._tree.count(new, rows=1)
            row.blocks += new
            taken += new

    def _free_kept(self, missing: int) -> bool:
        """Free blocks that sessions alone keep, until ``missing`` are free; return False if there is none of them."""
        if not self._tree.idle:
            return False
        for session, kept in list(self.kept.items()):
            short, count = missing - len(self._free), len(kept.blocks)
            if short <= 0:
                break
            while short > 0 and count and self._tree[kept.blocks[count - 1]].idle:
                count -= 1
                short -= 1
            if count == len(kept.blocks) and self._tree[kept.blocks[-1]].sessions > 1:
                count = 0  # rows use all that is left, and another session keeps the same
            self._shorten(session, count)
        return True

    def _keep(self, row: Row) -> None:
        self.forget(row.session)
        blocks = self._tree.grow(row.adapter, row.tokens[: row.cached], row.blocks)
        self._tree.note_read(blocks)
        full, rest = divmod(row.cached, self._block_tokens)
        if rest and len(blocks) == full:
            blocks.append(row.blocks[full])
            self._tree[blocks[-1]].tokens = tuple(row.tokens[full * self._block_tokens : row.cached])
        self._tree.count(blocks, sessions=1)
        if blocks:
            self.kept[row.session] = KeptCache(row.adapter, blocks)

    def _shorten(self, session: str, count: int) -> None:
        """Forget what is kept of a session behind its first ``count`` blocks."""
        if (kept := self.kept.get(session)) is None:
            return
        ends = kept.blocks[count:]
        del kept.blocks[count:]
        if not kept.blocks:
            del self.kept[session]
        self._release(ends, sessions=1)

    def _back_to_waiting(self, row: Row) -> None:
        self._stop(row)
        insort(self._waiting, row, key=_rank)

    def _stop(self, row: Row) -> None:
        self._running.remove(row)
        self._stale = True
        row.cached = 0
        blocks, row.blocks = row.blocks, []
        self._release(blocks, rows=1)

    def _release(self, blocks: Sequence[int], *, rows: int = 0, sessions: int = 0) -> None:
        """Take ``rows`` and ``sessions`` from the users of blocks, the last one first; free those without any."""
        freed = self._tree.count(reversed(blocks), rows=-rows, sessions=-sessions)
        self._free += freed
        if rows:  # what sessions alone use has been counted as room
            self._without_room = None
        if freed:
            self._on_free(freed)

    def _blocks_of(self, row: Row) -> int:
        return -(-len(row.tokens) // self._block_tokens)


def _is_scored(row: Row) -> bool:
    return row.sampling.prompt_log_probs is not None and not row.versions


def _rank(row: Row) -> tuple[bool, int]:
    """Probes first, then the order of submission."""
    return not row.probe, row.order
