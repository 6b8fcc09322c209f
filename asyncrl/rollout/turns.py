"""Turns of episodes under way: told to the ledger as they end, and taken up again where a run was killed.

A rollout worker tells each turn when it has sampled it (:class:`TurnFeed`); whoever keeps the ledger asks for the new
ones (:meth:`asyncrl.rollout.worker.RolloutWorker.turns`). A resumed run hands a prompt's recorded turns out with it.
Its worker takes tokens, log-probs and versions from them instead of the engine, and shows them to the environment anew.
As long as that answers as it did, the trajectory goes on, token for token; where it does not, it is begun again
(:class:`Continuation` counts why).

An episode that is begun again, after a failure of its environment or because that answered differently, begins another
*chain* of turns. Turns are numbered through all chains of a row, and the last chain is the one that counts.
"""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import msgspec
import numpy as np

from asyncrl.errors import CodecError
from asyncrl.interfaces import FinishReason, Generation
from asyncrl.ledger import SampledTurn

__all__ = [
    "Continuation",
    "Continued",
    "RowTurns",
    "TurnFeed",
    "TurnRecord",
    "decode_turns",
    "encode_turns",
    "last_chains",
    "sampled_turns",
]


class TurnRecord(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A sampled turn, and what the model read before it. It begins as :class:`asyncrl.ledger.SampledTurn` does.

    Attributes:
        slot: number of the prompt.
        attempt: at that prompt.
        row: number of the rollout in its group.
        turn: how many turns this row had sampled before, in all chains of this attempt.
        tokens: sampled ones.
        chain: how often the row was begun before.
        place: number of the turn in its chain.
        trial: how often its environment had failed; seeds depend on it.
        heard: int32, little-endian: tokens since the turn before (prompt, or the environment's answer).
        token_ids: int32, little-endian: the sampled ones.
        log_probs: float32, little-endian, of these.
        spans: ``(version, end)`` of runs of one weight version among them, in order.
        finish_reason: of the turn.
    """

    slot: int
    attempt: int
    row: int
    turn: int
    tokens: int
    chain: int
    place: int
    trial: int
    heard: bytes
    token_ids: bytes
    log_probs: bytes
    spans: tuple[tuple[int, int], ...]
    finish_reason: FinishReason

    @property
    def newest_version(self) -> int:
        """Highest version that sampled one of them; -1 without any."""
        return max((version for version, _end in self.spans), default=-1)

    def heard_ids(self) -> tuple[int, ...]:
        """Tokens the model read before the turn."""
        return tuple(np.frombuffer(self.heard, dtype="<i4").tolist())

    def generation(self) -> Generation:
        """What the engine had answered."""
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
    """Turns as bytes."""
    return _ENCODER.encode(list(turns))


def decode_turns(content: bytes) -> list[TurnRecord]:
    """Counterpart of :func:`encode_turns`.

    Raises:
        CodecError: these bytes are no turns.
    """
    try:
        return _DECODER.decode(content)
    except (UnicodeError, msgspec.MsgspecError) as error:
        raise CodecError(f"not the turns of a rollout: {error}") from error


def sampled_turns(content: bytes) -> tuple[SampledTurn, ...]:
    """Which turns these bytes hold, without their tokens.

    Raises:
        CodecError: these bytes are no turns.
    """
    try:
        return _HEADS.decode(content)
    except (UnicodeError, msgspec.MsgspecError) as error:
        raise CodecError(f"not the turns of a rollout: {error}") from error


def last_chains(turns: Iterable[TurnRecord]) -> dict[int, list[TurnRecord]]:
    """By row: the last chain of the newest attempt that has one, in order, as far as it has no gap."""
    found: dict[int, list[TurnRecord]] = {}
    for turn in sorted(turns, key=lambda each: (each.row, each.attempt, each.turn)):
        chain = found.setdefault(turn.row, [])
        if chain and (chain[-1].attempt, chain[-1].chain) != (turn.attempt, turn.chain):
            chain.clear()
        chain.append(turn)
    return {row: [turn for place, turn in enumerate(chain) if turn.place == place] for row, chain in found.items()}


class _Sampled(msgspec.Struct, kw_only=True):
    """A turn as it was sampled. Turns of a group that is complete by the time they are asked for are never encoded."""

    slot: int
    attempt: int
    row: int
    turn: int
    chain: int
    place: int
    trial: int
    heard: Sequence[int]
    generation: Generation

    def record(self) -> TurnRecord:
        told = self.generation
        ends: list[tuple[int, int]] = []
        end = 0
        for version, run in groupby(told.weight_versions):
            end += sum(1 for _ in run)
            ends.append((version, end))
        return TurnRecord(
            slot=self.slot,
            attempt=self.attempt,
            row=self.row,
            turn=self.turn,
            tokens=len(told.token_ids),
            chain=self.chain,
            place=self.place,
            trial=self.trial,
            heard=struct.pack(f"<{len(self.heard)}i", *self.heard),
            token_ids=struct.pack(f"<{len(told.token_ids)}i", *told.token_ids),
            log_probs=struct.pack(f"<{len(told.log_probs)}f", *told.log_probs),
            spans=tuple(ends),
            finish_reason=told.finish_reason,
        )


class TurnFeed:
    """New turns of this worker, until somebody asks for them.

    Args:
        gather_s: how long turns are gathered after the first, so that many travel together.
    """

    def __init__(self, *, gather_s: float) -> None:
        self._gather_s = gather_s
        self._turns: dict[tuple[int, int], list[_Sampled]] = {}  # by slot and attempt
        self._some = asyncio.Event()

    def tell(self, turn: _Sampled) -> None:
        """A turn has ended."""
        self._turns.setdefault((turn.slot, turn.attempt), []).append(turn)
        self._some.set()

    def forget(self, slot: int, attempt: int) -> None:
        """The group is complete: its rows tell its turns."""
        self._turns.pop((slot, attempt), None)

    async def drain(self) -> bytes:
        """Wait for turns; those that were told since the last time, in order within their group, encoded."""
        while not self._turns:
            self._some.clear()
            await self._some.wait()
            await asyncio.sleep(self._gather_s)
        groups, self._turns = self._turns, {}
        return encode_turns(turn.record() for turns in groups.values() for turn in turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """What became of the recorded turns of a group.

    Attributes:
        rows: trajectories that went on from them.
        tokens: sampled tokens of theirs that are part of these.
        restarted: trajectories that were begun again instead, by reason.
    """

    rows: int = 0
    tokens: int = 0
    restarted: Mapping[str, int] = field(default_factory=dict)


class Continuation:
    """Recorded turns on their way back into episodes, and the count of what became of them."""

    def __init__(self, content: bytes = b"") -> None:
        self._chains = last_chains(decode_turns(content)) if content else {}
        self._tokens: dict[int, int] = {}
        self._restarted: Counter[str] = Counter()

    def of_row(self, row: int) -> Sequence[TurnRecord]:
        """Recorded turns of a row; none as a rule."""
        return self._chains.get(row, ())

    def went_on(self, row: int, *, tokens: int) -> None:
        """The trajectory of the row has these recorded tokens in it, if there are any."""
        if tokens:
            self._tokens[row] = tokens

    def restarted(self, why: str) -> None:
        """A row was begun again without them."""
        self._restarted[why] += 1

    def outcome(self) -> Continued:
        """What became of them, when the group is done."""
        return Continued(rows=len(self._tokens), tokens=sum(self._tokens.values()), restarted=dict(self._restarted))


class RowTurns:
    """Writes down the turns of one row of one attempt, chain by chain.

    Args:
        feed: told of every turn; None where nobody keeps them.
        slot: number of the prompt.
        attempt: at it.
        row: number in its group.
    """

    def __init__(self, feed: TurnFeed | None, *, slot: int, attempt: int, row: int) -> None:
        self._feed = feed
        self._slot, self._attempt, self._row = slot, attempt, row
        self._turn, self._chain, self._place, self._trial = 0, -1, 0, 0

    def begin(self, *, trial: int) -> None:
        """The episode begins, for the first time or again."""
        self._chain += 1
        self._place, self._trial = 0, trial

    def sampled(self, heard: Sequence[int], generation: Generation) -> None:
        """A turn has ended."""
        if self._feed is None:
            return
        self._feed.tell(
            _Sampled(
                slot=self._slot,
                attempt=self._attempt,
                row=self._row,
                turn=self._turn,
                chain=self._chain,
                place=self._place,
                trial=self._trial,
                heard=heard,
                generation=generation,
            )
        )
        self._turn += 1
        self._place += 1


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[TurnRecord])
_HEADS = msgspec.msgpack.Decoder(tuple[SampledTurn, ...])
