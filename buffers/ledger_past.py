"""What the events of a ledger say of its past: who was rolled out, scored, trained on, given up; and by whom."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile

from asyncrl.interfaces import GroupSummary
from asyncrl.ledger import (
    Began,
    Completed,
    Consumed,
    Dropped,
    GivenUp,
    LedgerEvent,
    Lost,
    Published,
    Rebased,
    RecordedGroup,
    RecordedTurns,
    Resumed,
    Reused,
    Rewarded,
    SampledTurn,
    TurnsAppended,
)
from asyncrl.rollout.record import decode_rows
from asyncrl.rollout.turns import TurnRecord, decode_turns, encode_turns, last_chains
from buffers.ledger_file import read_rows, read_turns

__all__ = ["Past"]


@dataclass(frozen=True, slots=True)
class Unfinished:
    """What prompts under way have sampled: turns by slot, and the prompts of which some cannot be read."""

    turns: Mapping[int, RecordedTurns]
    unreadable: tuple[int, ...]


class Past:
    """Read from events in order; what a resumption undid is not in it.

    Attributes:
        completed: by slot, the attempt whose rows count.
        rewards: by slot, what a reward model said of them.
        batches: by step, the prompts it trained on, in order.
        undone: the same of steps that a resumption undid, as far as nothing after it says otherwise: what a process
            that died before it trained on them again was to do, and the next one is.
        lives: processes that trained, in order. Step ``s`` was trained by the last one that began before it.
        weights: fingerprints by version.
        dropped_tokens: tokens given up, by reason.
        first_step: step that the ledger begins after: 0, or that of the checkpoint it was begun anew from.
        under_way: by number of the event that told of turns, the prompts among them that are neither rolled out nor
            given up.
    """

    def __init__(self, events: Iterable[LedgerEvent]) -> None:
        self.completed: dict[int, Completed] = {}
        self.rewards: dict[int, tuple[float, ...]] = {}
        self.weights: dict[int, str] = {}
        self.first_step = 0
        told: dict[int, TurnsAppended] = {}
        waits: dict[int, dict[int, list[SampledTurn]]] = {}  # by slot and event
        dropped: Counter[str] = Counter()
        lives: list[Began] = []
        places: dict[int, dict[int, int]] = {}
        undone: dict[int, dict[int, int]] = {}
        for sequence, event in enumerate(events, 1):
            match event:
                case TurnsAppended():
                    if event.digest:
                        told[sequence] = event
                        for turn in event.turns:
                            waits.setdefault(turn.slot, {}).setdefault(sequence, []).append(turn)
                case Completed():
                    waits.pop(event.slot, None)
                    self.completed[event.slot] = event
                    self.rewards.pop(event.slot, None)
                    dropped["environment_failed"] += event.wasted
                case Rewarded():
                    self.rewards[event.slot] = event.rewards
                case Consumed() | Reused():
                    places.setdefault(event.step, {})[event.position] = event.slot
                    again = undone.get(event.step)
                    if again is not None and again.setdefault(event.position, event.slot) != event.slot:
                        undone = _before(undone, event.step)  # another batch, so other weights from here on
                case Resumed():
                    undone = {step: batch for step, batch in {**places, **undone}.items() if step > event.step}
                    places = {step: batch for step, batch in places.items() if step <= event.step}
                    self.weights = {version: each for version, each in self.weights.items() if version <= event.step}
                case Rebased():
                    dropped.update(event.dropped_tokens)
                    self.first_step = event.step
                    undone = {}
                case Lost():
                    undone = _before(undone, _first_with(event.slot, undone))
                case Dropped():
                    waits.pop(event.slot, None)
                    undone = _before(undone, _first_with(event.slot, undone))
                    dropped[event.reason] += event.tokens
                case GivenUp():
                    waits.pop(event.slot, None)
                    undone = _before(undone, _first_with(event.slot, undone))
                    dropped[event.failure] += event.tokens
                case Began():
                    lives.append(event)
                case Published():
                    self.weights[event.version] = event.weights
                case _:
                    pass
        # A process that began at or before the step of an earlier one did its work anew.
        self.lives = tuple(
            life for place, life in enumerate(lives) if all(later.step > life.step for later in lives[place + 1 :])
        )
        self.batches, self.undone = _in_order(places), _in_order(undone)
        self.under_way: dict[int, set[int]] = {}
        for slot, found in waits.items():
            for sequence in found:
                self.under_way.setdefault(sequence, set()).add(slot)
        self._waits = waits
        self._digests = {sequence: told[sequence].digest for sequence in self.under_way}
        self.dropped_tokens = {reason: count for reason, count in dropped.items() if count}

    def unfinished(self, slots: Iterable[int], *, newest_version: int, connection: sqlite3.Connection) -> Unfinished:
        """What rows of prompts under way have sampled, as far as it can be read, up to this version."""
        wanted = set(slots)
        counted = {
            (told.slot, told.attempt, told.row, told.turn)
            for slot in wanted
            for turns in self._waits.get(slot, {}).values()
            for told in turns
        }
        by_slot: dict[int, list[TurnRecord]] = {}
        unreadable: set[int] = set()
        for sequence, digest in self._digests.items():
            concerned = self.under_way[sequence] & wanted
            if not concerned:
                continue
            content = read_turns(connection, sequence, expected=digest)
            if content is None:
                unreadable |= concerned
                continue
            for turn in decode_turns(content):
                if (turn.slot, turn.attempt, turn.row, turn.turn) in counted:
                    by_slot.setdefault(turn.slot, []).append(turn)
        found: dict[int, RecordedTurns] = {}
        for slot, turns in sorted(by_slot.items()):
            chains = [
                list(takewhile(lambda turn: turn.newest_version <= newest_version, chain))
                for chain in last_chains(turns).values()
            ]
            kept = [turn for chain in chains for turn in chain]
            if kept:
                found[slot] = RecordedTurns(content=encode_turns(kept), tokens=sum(turn.tokens for turn in kept))
        return Unfinished(found, tuple(sorted(unreadable)))

    def group(self, slot: int, *, connection: sqlite3.Connection, uses: int = 0) -> RecordedGroup | None:
        """A completed group as it was, or None if its rows cannot be read."""
        completed = self.completed[slot]
        if not completed.digest:
            return None
        content = read_rows(connection, slot=slot, attempt=completed.attempt, expected=completed.digest)
        if content is None:
            return None
        rows = decode_rows(content, slot=slot)
        fields = dict(rows.meta_info["summary"])
        rewards = self.rewards.get(slot)
        if rewards is not None:
            fields["rewards"] = rewards
        return RecordedGroup(summary=GroupSummary(**fields), rows=rows, rewarded=rewards is not None, uses=uses)


_Places = dict[int, dict[int, int]]
"""By step and position, the prompt."""


def _in_order(places: _Places) -> dict[int, tuple[int, ...]]:
    return {step: tuple(batch[place] for place in sorted(batch)) for step, batch in sorted(places.items())}


def _before(places: _Places, step: int | None) -> _Places:
    """Without this step and those after it."""
    return places if step is None else {each: batch for each, batch in places.items() if each < step}


def _first_with(slot: int, places: _Places) -> int | None:
    return min((step for step, batch in places.items() if slot in batch.values()), default=None)
