"""Which groups are given up without being trained on: pure policies, like those of selection."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from asyncrl.interfaces import GroupSummary
from buffers.slots import SlotHeap

__all__ = ["Evicted", "Eviction", "StalenessBound"]


class Evicted(NamedTuple):
    """A slot to drop, and the reason it is counted under."""

    slot: int
    reason: str


class Eviction(Protocol):
    """Names ready groups that are to be dropped."""

    def ready(self, summary: GroupSummary) -> None:
        """The group is ready."""
        ...

    def forget(self, slot: int) -> None:
        """The group is not ready any more: chosen or dropped. Unknown slots change nothing."""
        ...

    def evict(self, *, weight_version: int) -> tuple[Evicted, ...]:
        """What to drop before a choice at ``weight_version``. Changes nothing; :meth:`forget` follows."""
        ...


class StalenessBound:
    """Drops what was sampled more than ``max_staleness`` versions ago: it can never be trained on any more.

    It goes at once, not when its turn comes: its place is free for a group that can be used.
    """

    def __init__(self, max_staleness: int) -> None:
        self.max_staleness = max_staleness
        self._by_age = SlotHeap()

    def ready(self, summary: GroupSummary) -> None:
        self._by_age.push(summary.slot, summary.oldest_version)

    def forget(self, slot: int) -> None:
        self._by_age.discard(slot)

    def evict(self, *, weight_version: int) -> tuple[Evicted, ...]:
        oldest = self._by_age.least_priority()
        if oldest is None or weight_version - oldest <= self.max_staleness:
            return ()
        slot = self._by_age.least()
        return () if slot is None else (Evicted(slot, "stale"),)
