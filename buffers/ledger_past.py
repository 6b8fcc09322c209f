"""What the events of a ledger say of its past: who was rolled out, scored, trained on, given up; and by whom."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable
from itertools import takewhile

from asyncrl.interfaces import GroupSummary
from asyncrl.ledger import (
    Began,
    Completed,
    Consumed,
    Dropped,
    GivenUp,
    LedgerEvent,
    Published,
    Rebased,
    RecordedGroup,
    RecordedTurns,
    Resumed,
    Reused,
    Rewarded,
    TurnAppended,
)
from asyncrl.rollout.record import decode_rows
from asyncrl.rollout.turns import TurnRecord, decode_turns, encode_turns, last_chains
from buffers.ledger_file import read_rows, read_turn

__all__ = ["Past"]


class Past:
    """Read from events in order; what a resumption undid is not in it.

    Attributes:
        completed: by slot, the attempt whose rows count.
        rewards: by slot, what a reward model said of them.
        batches: by step, the prompts it trained on, in order.
        lives: processes that trained, in order. Step ``s`` was trained by the last one that began before it.
        weights: fingerprints by version.
        dropped_tokens: tokens given up, by reason.
        first_step: step that the ledger begins after: 0, or that of the checkpoint it was begun anew from.
    """

    def __init__(self, events: Iterable[LedgerEvent]) -> None:
        self.completed: dict[int, Completed] = {}
        self.rewards: dict[int, tuple[float, ...]] = {}
        self.weights: dict[int, str] = {}
        self.first_step = 0
        self._turns: dict[int, list[TurnAppended]] = {}
        dropped: Counter[str] = Counter()
        lives: list[Began] = []
        places: dict[int, dict[int, int]] = {}
        for event in events:
            match event:
                case TurnAppended():
                    if event.digest:
                        self._turns.setdefault(event.slot, []).append(event)
                case Completed():
                    self._turns.pop(event.slot, None)
                    self.completed[event.slot] = event
                    self.rewards.pop(event.slot, None)
                    dropped["environment_failed"] += event.wasted
                case Rewarded():
                    self.rewards[event.slot] = event.rewards
                case Consumed() | Reused():
                    places.setdefault(event.step, {})[event.position] = event.slot
                case Resumed():
                    places = {step: batch for step, batch in places.items() if step <= event.step}
                    self.weights = {version: each for version, each in self.weights.items() if version <= event.step}
                case Rebased():
                    dropped.update(event.dropped_tokens)
                    self.first_step = event.step
                case Dropped():
                    dropped[event.reason] += event.tokens
                case GivenUp():
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
        self.batches = {step: tuple(batch[place] for place in sorted(batch)) for step, batch in sorted(places.items())}
        self.dropped_tokens = {reason: count for reason, count in dropped.items() if count}

    def unfinished(
        self, slots: Iterable[int], *, newest_version: int, connection: sqlite3.Connection
    ) -> dict[int, RecordedTurns]:
        """What rows of prompts under way have sampled, as far as it can be read, up to this version."""
        found: dict[int, RecordedTurns] = {}
        for slot in slots:
            turns: list[TurnRecord] = []
            for told in self._turns.get(slot, ()):
                key = (slot, told.attempt, told.row, told.turn)
                content = read_turn(connection, key, expected=told.digest)
                turns += decode_turns(content) if content is not None else []
            chains = [
                list(takewhile(lambda turn: turn.newest_version <= newest_version, chain))
                for chain in last_chains(turns).values()
            ]
            kept = [turn for chain in chains for turn in chain]
            if kept:
                found[slot] = RecordedTurns(content=encode_turns(kept), tokens=sum(turn.tokens for turn in kept))
        return found

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
