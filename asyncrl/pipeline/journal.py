"""The driver's record points: what it tells the ledger, and what a resumed run finds there."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.interfaces import DroppedGroup, Ledger, SelectedGroup
from asyncrl.ledger import (
    Began,
    Committed,
    Completed,
    Consumed,
    Dispatched,
    Dropped,
    GivenUp,
    Issued,
    Published,
    Recovered,
    Reused,
    Rewarded,
    TurnsAppended,
)
from asyncrl.rollout.turns import sampled_turns

__all__ = ["FAILURES", "Journal"]

FAILURES = frozenset({"environment_failed", "rollouts_lost"})
"""Reasons under which a group is dropped because it failed, not by a decision."""

_NOTHING = Recovered(next_slot=0, waiting={}, batches={}, groups={}, dropped_tokens={})


class Journal:
    """Keeps a ledger told. Without one, nothing is kept and nothing is found."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self.ledger = ledger

    @property
    def recovered(self) -> Recovered:
        """What a resumed run finds; empty for one that begins."""
        found = self.ledger.recovered if self.ledger is not None else None
        return found if found is not None else _NOTHING

    def began(self, step: int, *, config: str, model: str, weights: str) -> None:
        """A process trains from ``step`` on, under this configuration (:class:`asyncrl.ledger.Began`)."""
        if self.ledger is not None:
            self.ledger.append(Began(step=step, config=config, model=model, weights=weights))

    def published(self, version: int, *, weights: str) -> None:
        """A step has made these weights."""
        if self.ledger is not None:
            self.ledger.append(Published(version=version, weights=weights))

    def issued(self, slot: int) -> None:
        """The law gave out a number, for the first time or, to a resumed run, again."""
        if self.ledger is not None and slot not in self.recovered.waiting:
            self.ledger.append(Issued(slot))

    async def dispatched(self, slot: int, *, version: int) -> int | None:
        """The rollouts of a prompt are about to be sent out; returns the number of the attempt, None without a ledger.

        Waits while the ledger has more to write than it should.
        """
        if self.ledger is None:
            return None
        await self.ledger.room()
        attempt = self.ledger.attempt(slot) + 1
        self.ledger.append(Dispatched(slot=slot, attempt=attempt, version=version))
        return attempt

    def turns(self, content: bytes) -> None:
        """Turns of rollouts under way have ended (:mod:`asyncrl.rollout.turns`)."""
        if self.ledger is not None:
            self.ledger.append(TurnsAppended(turns=sampled_turns(content)), rows=content)

    def completed(self, slot: int, *, attempt: int, tokens: int, wasted: int, rows: bytes | None) -> None:
        """The rollouts of a prompt are here; ``wasted`` tokens went into rows that had to be begun again."""
        if self.ledger is not None:
            self.ledger.append(Completed(slot=slot, attempt=attempt, tokens=tokens, wasted=wasted), rows=rows)

    def rewarded(self, slot: int, rewards: Sequence[float]) -> None:
        """A reward model has scored them."""
        if self.ledger is not None:
            self.ledger.append(Rewarded(slot=slot, rewards=tuple(rewards)))

    def consumed(self, step: int, groups: Sequence[SelectedGroup]) -> None:
        """A step was trained on these groups."""
        if self.ledger is not None:
            self.ledger.append(
                *[
                    (Reused if group.uses else Consumed)(slot=group.summary.slot, step=step, position=position)
                    for position, group in enumerate(groups)
                ]
            )

    def committed(self, step: int) -> None:
        """A checkpoint of ``step`` is on the disk."""
        if self.ledger is not None:
            self.ledger.append(Committed(step))

    def dropped(self, group: DroppedGroup) -> None:
        """A group will not be trained on."""
        if self.ledger is None:
            return
        if group.reason in FAILURES:
            self.ledger.append(GivenUp(slot=group.slot, failure=group.reason, tokens=group.tokens))
        else:
            self.ledger.append(Dropped(slot=group.slot, reason=group.reason, tokens=group.tokens))
