"""Turns of unfinished episodes: recorded in the ledger as they end, and continued after a run was killed.

A rollout worker puts each turn into its :class:`TurnFeed` when it is sampled; the run fetches new turns with
:meth:`asyncrl.rollout.worker.RolloutWorker.turns` and writes them to the ledger. A resumed run sends the recorded turns
of a prompt along with it. The worker then takes tokens, log-probs and versions from them instead of the engine, and
passes them to the environment anew. While the environment answers as recorded, the trajectory goes on, token for token;
otherwise it is begun again, and :class:`Continuation` counts why.

An episode that is begun again begins another *chain* of turns. Turns are numbered through all chains of a row, and the
last chain is the one that counts.
"""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from asyncrl.errors import CodecError
from asyncrl.interfaces import FinishReason, Generation
from asyncrl.ledger import SampledTurn

_T = TypeVar("_T")


class TurnRecord(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A sampled turn, and what the model read before it. Its first fields are :class:`asyncrl.ledger.SampledTurn`'s.

    Attributes:
        turn: number of the turn in this attempt at the row, counted through all chains.
        chain: how often the row was begun before.
        place: number of the turn in its chain.
        trial: how often its environment had failed; seeds depend on it.
        context: int32, little-endian: tokens since the turn before (prompt, or the environment's answer).
        token_ids: int32, little-endian: the sampled ones.
        log_probs: float32, little-endian, of these.
        spans: ``(version, end)`` of runs of one weight version among them, in order.
    """

    group_id: int
    attempt: int
    row: int
    turn: int
    tokens: int
    chain: int
    place: int
    trial: int
    context: bytes
    token_ids: bytes
    log_probs: bytes
    spans: tuple[tuple[int, int], ...]
    finish_reason: FinishReason

    @property
    def newest_version(self) -> int:
        """Highest version that sampled one of the tokens; -1 without tokens."""
        return max((version for version, _end in self.spans), default=-1)

    def context_ids(self) -> tuple[int, ...]:
        return tuple(np.frombuffer(self.context, dtype="<i4").tolist())

    def generation(self) -> Generation:
        versions: list[int] = []
        for version, end in self.spans:
            versions += [version] * (end - len(versions))
        return Generation(
            token_ids=tuple(np.frombuffer(self.token_ids, dtype="<i4").tolist()),
            log_probs=tuple(np.frombuffer(self.log_probs, dtype="<f4").tolist()),
            weight_versions=tuple(versions),
            finish_reason=self.finish_reason,
        )


def encode_turns(turns: Iterable[TurnRecord]) -> bytes:
    return _ENCODER.encode(list(turns))


def decode_turns(content: bytes) -> list[TurnRecord]:
    """Return the turns that :func:`encode_turns` wrote.

    Raises:
        CodecError: these bytes are not turns.
    """
    return _decode(_DECODER, content)


def sampled_turns(content: bytes) -> tuple[SampledTurn, ...]:
    """Return which turns these bytes hold, without their tokens.

    Raises:
        CodecError: these bytes are not turns.
    """
    return _decode(_HEADS, content)


def _decode(decoder: msgspec.msgpack.Decoder[_T], content: bytes) -> _T:
    try:
        return decoder.decode(content)
    except (UnicodeError, msgspec.MsgspecError) as error:
        raise CodecError(f"not the turns of a rollout: {error}") from error


def last_chains(turns: Iterable[TurnRecord]) -> dict[int, list[TurnRecord]]:
    """Return by row the last chain of the newest attempt that has one, in order, as far as it has no gap."""
    found: dict[int, list[TurnRecord]] = {}
    for turn in sorted(turns, key=lambda each: (each.row, each.attempt, each.turn)):
        chain = found.setdefault(turn.row, [])
        if chain and (chain[-1].attempt, chain[-1].chain) != (turn.attempt, turn.chain):
            chain.clear()
        chain.append(turn)
    return {row: [turn for place, turn in enumerate(chain) if turn.place == place] for row, chain in found.items()}


class _Position(NamedTuple):
    """The place of a turn, as in :class:`TurnRecord`."""

    group_id: int
    attempt: int
    row: int
    turn: int = 0
    chain: int = -1
    place: int = 0
    trial: int = 0


@dataclass(slots=True)
class _SampledTurn:
    """A turn as it was sampled. Turns of a group that is complete when they are fetched are never encoded."""

    position: _Position
    context: Sequence[int]
    generation: Generation

    def record(self) -> TurnRecord:
        generation = self.generation
        spans: list[tuple[int, int]] = []
        end = 0
        for version, run in groupby(generation.weight_versions):
            end += sum(1 for _ in run)
            spans.append((version, end))
        tokens = len(generation.token_ids)
        return TurnRecord(
            **self.position._asdict(),
            tokens=tokens,
            context=struct.pack(f"<{len(self.context)}i", *self.context),
            token_ids=struct.pack(f"<{tokens}i", *generation.token_ids),
            log_probs=struct.pack(f"<{tokens}f", *generation.log_probs),
            spans=tuple(spans),
            finish_reason=generation.finish_reason,
        )


class TurnFeed:
    """New turns of a worker, until they are fetched; gathered for ``gather_s`` after the first, to travel together.

    A turn with a token of an ``unproven`` version is kept, with those of its row that follow; :meth:`proven` is called
    when a version has left these. The owner changes them.
    """

    def __init__(self, *, gather_s: float, unproven: AbstractSet[int] = frozenset()) -> None:
        self._gather_s = gather_s
        self._unproven = unproven
        self._turns: dict[tuple[int, int], list[_SampledTurn]] = {}  # by group_id and attempt
        self._changed = asyncio.Event()

    def add(self, turn: _SampledTurn) -> None:
        self._turns.setdefault((turn.position.group_id, turn.position.attempt), []).append(turn)
        self._changed.set()

    def proven(self) -> None:
        self._changed.set()

    def forget(self, group_id: int, attempt: int) -> None:
        """Drop the turns of rollouts that have ended: their rows contain them, or they are done again."""
        self._turns.pop((group_id, attempt), None)

    async def drain(self) -> bytes:
        """Wait for turns; return those since the last call, in order within their group, encoded."""
        while True:
            self._changed.clear()
            if self._turns:
                await asyncio.sleep(self._gather_s)
                if taken := self._take():  # their groups may have ended meanwhile
                    return encode_turns(turn.record() for turn in taken)
            await self._changed.wait()

    def _take(self) -> list[_SampledTurn]:
        taken: list[_SampledTurn] = []
        kept: dict[tuple[int, int], list[_SampledTurn]] = {}
        kept_rows: set[tuple[int, int, int]] = set()
        for key, turns in self._turns.items():
            for turn in turns:
                row = (*key, turn.position.row)
                if row in kept_rows or not self._unproven.isdisjoint(turn.generation.weight_versions):
                    kept_rows.add(row)
                    kept.setdefault(key, []).append(turn)
                else:
                    taken.append(turn)
        self._turns = kept
        return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """What became of the recorded turns of a group.

    ``rows`` trajectories were continued from them, which hold ``tokens`` recorded tokens; others were ``restarted``, by
    reason.
    """

    rows: int = 0
    tokens: int = 0
    restarted: Mapping[str, int] = field(default_factory=dict)


class Continuation:
    """Recorded turns that the episodes of a group are continued from, and what became of them."""

    def __init__(self, content: bytes = b"") -> None:
        self._chains = last_chains(decode_turns(content)) if content else {}
        self._tokens: dict[int, int] = {}
        self._restarted: Counter[str] = Counter()

    def of_row(self, row: int) -> Sequence[TurnRecord]:
        return self._chains.get(row, ())

    def continued(self, row: int, *, tokens: int) -> None:
        """Count the recorded tokens in the finished trajectory of a row."""
        if tokens:
            self._tokens[row] = tokens

    def restarted(self, why: str) -> None:
        """Count a row that was begun again without recorded turns."""
        self._restarted[why] += 1

    def outcome(self) -> Continued:
        return Continued(rows=len(self._tokens), tokens=sum(self._tokens.values()), restarted=dict(self._restarted))


class TurnRecorder:
    """Records the turns of one row of one attempt, chain by chain, into ``feed``; None where turns are not recorded."""

    def __init__(self, feed: TurnFeed | None, *, group_id: int, attempt: int, row: int) -> None:
        self.row = row
        self._feed = feed
        self._position = _Position(group_id=group_id, attempt=attempt, row=row)

    def begin(self, *, trial: int) -> None:
        """Begin a chain of turns, for an episode that begins, for the first time or again."""
        self._position = self._position._replace(chain=self._position.chain + 1, place=0, trial=trial)

    def sampled(self, context: Sequence[int], generation: Generation) -> None:
        if self._feed is None:
            return
        position = self._position
        self._feed.add(_SampledTurn(position, context, generation))
        self._position = position._replace(turn=position.turn + 1, place=position.place + 1)


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[TurnRecord])
_HEADS = msgspec.msgpack.Decoder(tuple[SampledTurn, ...])
