"""What a ledger is told, in the words of a prompt's life (the picture and its laws: ``buffers/ledger_state.py``).

A prompt is known by its ``slot``, one try at it by ``attempt``, a rollout of it by ``row``; a result is known by all
three, so one that comes late or twice is recognised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import msgspec

if TYPE_CHECKING:
    from asyncrl.data import DataProto
    from asyncrl.interfaces import GroupSummary

__all__ = [
    "Aborted",
    "AttemptFailed",
    "Began",
    "Committed",
    "Completed",
    "Consumed",
    "Dispatched",
    "Dropped",
    "GivenUp",
    "Issued",
    "LedgerBase",
    "LedgerEvent",
    "LedgerPosition",
    "LedgerStatistics",
    "Lost",
    "Published",
    "Rebased",
    "RecordedGroup",
    "RecordedTurns",
    "Recovered",
    "Resumed",
    "Reused",
    "Rewarded",
    "SampledTurn",
    "TurnsAppended",
]


class Issued(msgspec.Struct, frozen=True, tag="issued"):
    """A prompt got its number."""

    slot: int


class Dispatched(msgspec.Struct, frozen=True, tag="dispatched", kw_only=True):
    """Its rollouts were sent out, to be sampled under ``version`` or newer."""

    slot: int
    attempt: int
    version: int
    replica: str = ""


class SampledTurn(msgspec.Struct, frozen=True, array_like=True):
    """One rollout has sampled ``tokens`` more, up to the end of its turn number ``turn``."""

    slot: int
    attempt: int
    row: int
    turn: int
    tokens: int


class TurnsAppended(msgspec.Struct, frozen=True, tag="turns", kw_only=True):
    """Rollouts under way have sampled these turns, of each row in order.

    ``digest`` is that of the turns as recorded (further ones may be recorded with them), 0 where none were given.
    """

    turns: tuple[SampledTurn, ...]
    digest: int = 0


class Completed(msgspec.Struct, frozen=True, tag="completed", kw_only=True):
    """All rollouts of the attempt are here, with ``tokens``; ``wasted`` more went into rows that had to be begun again.

    ``digest`` is that of the rows as recorded, 0 where none were given.
    """

    slot: int
    attempt: int
    tokens: int
    wasted: int = 0
    digest: int = 0


class AttemptFailed(msgspec.Struct, frozen=True, tag="failed", kw_only=True):
    """The attempt failed after ``tokens`` were sampled for it; the prompt may be dispatched again."""

    slot: int
    attempt: int
    failure: str
    tokens: int


class Aborted(msgspec.Struct, frozen=True, tag="aborted", kw_only=True):
    """The attempt was called off after ``tokens`` were sampled for it; the prompt may be dispatched again."""

    slot: int
    attempt: int
    tokens: int


class Rewarded(msgspec.Struct, frozen=True, tag="rewarded", kw_only=True):
    """A reward model has scored its rows; without this event the environment's rewards count."""

    slot: int
    rewards: tuple[float, ...]


class Consumed(msgspec.Struct, frozen=True, tag="consumed", kw_only=True):
    """A training step took it, as group number ``position`` of its batch."""

    slot: int
    step: int
    position: int


class Reused(msgspec.Struct, frozen=True, tag="reused", kw_only=True):
    """A later step took it once more."""

    slot: int
    step: int
    position: int


class Dropped(msgspec.Struct, frozen=True, tag="dropped", kw_only=True):
    """It will not be trained on: a decision (``stale``, ``zero_variance``, ...)."""

    slot: int
    reason: str
    tokens: int


class GivenUp(msgspec.Struct, frozen=True, tag="given_up", kw_only=True):
    """It will not be trained on: every attempt failed (``environment_failed``, ``rollouts_lost``)."""

    slot: int
    failure: str
    tokens: int


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    """A checkpoint of ``step`` is on disk."""

    step: int


class Resumed(msgspec.Struct, frozen=True, tag="resumed"):
    """A run goes on from the checkpoint of ``step``; what later steps consumed is there again."""

    step: int


class Lost(msgspec.Struct, frozen=True, tag="lost", kw_only=True):
    """The recorded rows of a completed prompt cannot be read; it must be dispatched again, after ``attempt``."""

    slot: int
    attempt: int


class Rebased(msgspec.Struct, frozen=True, tag="rebased", kw_only=True):
    """The beginning of a ledger that takes the place of one that lost what a checkpoint relies on.

    The prompts in ``live`` are issued next, under their numbers; the others below ``next_slot`` are over.
    """

    step: int
    next_slot: int
    consumed: int
    dropped: int
    live: tuple[int, ...]
    dropped_tokens: dict[str, int] = {}


class Began(msgspec.Struct, frozen=True, tag="began", kw_only=True):
    """A process trains from ``step`` on: what its updates are a function of, beside the rows.

    Attributes:
        step: training steps done before; 0 where the run begins.
        config: the resolved configuration, as TOML.
        model: folder or hub id that the policy was built from, relative to the run's folder if it lies there.
        weights: fingerprint of the weights it trains from (:mod:`asyncrl.weights.fingerprint`).
    """

    step: int
    config: str
    model: str
    weights: str


class Published(msgspec.Struct, frozen=True, tag="published", kw_only=True):
    """A step has made the weights of ``version``, with this fingerprint."""

    version: int
    weights: str


LedgerEvent: TypeAlias = (
    Issued
    | Dispatched
    | TurnsAppended
    | Completed
    | AttemptFailed
    | Aborted
    | Rewarded
    | Consumed
    | Reused
    | Dropped
    | GivenUp
    | Committed
    | Resumed
    | Lost
    | Rebased
    | Began
    | Published
)


class LedgerPosition(msgspec.Struct, frozen=True, kw_only=True):
    """A place in a ledger: how many events come before it, and the checksum over all of them."""

    sequence: int = 0
    checksum: int = 0


class LedgerBase(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint knows of prompts by itself: enough to go on should the ledger be lost.

    Attributes:
        step: training steps done.
        next_slot: number of the first prompt never issued.
        consumed: prompts trained on.
        outstanding: prompts issued, neither trained on nor dropped.
        dropped_tokens: tokens given up, by reason.
        position: the ledger's end when the checkpoint was made.
    """

    step: int
    next_slot: int
    consumed: int
    outstanding: tuple[int, ...]
    dropped_tokens: dict[str, int] = {}
    position: LedgerPosition = LedgerPosition()


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerStatistics:
    """Counts in prompts: ``issued = consumed + dropped + failed + live``, always.

    Attributes:
        waiting: issued, not under way.
        dispatched: under way.
        completed: rolled out, not trained on.
        reused: how often prompts were trained on again.
        superseded: events that came late or twice and changed nothing, to this process.
        lives: processes that have written here.
        committed_step: step of the newest checkpoint.
    """

    issued: int
    consumed: int
    dropped: Mapping[str, int]
    failed: Mapping[str, int]
    waiting: int
    dispatched: int
    completed: int
    reused: int
    superseded: int
    lives: int
    committed_step: int

    @property
    def live(self) -> int:
        """Prompts that are still to be trained on."""
        return self.waiting + self.dispatched + self.completed

    @property
    def unaccounted(self) -> int:
        """Prompts nobody can account for: 0 unless one was lost or counted twice."""
        return self.issued - self.consumed - sum(self.dropped.values()) - sum(self.failed.values()) - self.live


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedGroup:
    """A group that needs no new rollouts: rows as they were sampled.

    Attributes:
        summary: as it was when the group was completed, with a reward model's rewards if it was rewarded.
        rows: the trajectory columns of :mod:`asyncrl.interfaces`.
        rewarded: whether a reward model had scored it.
        uses: 0 for one that no step up to the checkpoint trained on.
    """

    summary: GroupSummary
    rows: DataProto
    rewarded: bool
    uses: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTurns:
    """Turns of a group that was under way.

    Attributes:
        content: as :func:`asyncrl.rollout.turns.encode_turns` gives it: for each row the chain that counts.
        tokens: sampled tokens in it.
    """

    content: bytes
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What a resumed run finds.

    Attributes:
        next_slot: number of the first prompt never issued.
        waiting: prompts to be dispatched again, in slot order, with the number of the attempt to come.
        batches: by step after the checkpoint: the prompts it had consumed, in order. They are consumed again so.
        groups: by slot, every prompt that is completed, and those of ``batches`` that were used before.
        dropped_tokens: tokens given up so far, by reason.
        turns: by slot, what rows of ``waiting`` prompts have sampled already.
        notes: damage that was found, and what was done about it, in words; empty as a rule.
    """

    next_slot: int
    waiting: Mapping[int, int]
    batches: Mapping[int, tuple[int, ...]]
    groups: Mapping[int, RecordedGroup]
    dropped_tokens: Mapping[str, int]
    turns: Mapping[int, RecordedTurns] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
