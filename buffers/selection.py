"""Which groups are trained on next: pure policies that are told what happens to slots and asked to choose.

A policy sees slots and summaries, never rows. It keeps whatever index makes its choice cheap. A policy that weighs
groups (by reward, length or loss) fits the same four calls: it has the summary, and the weight version at the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from asyncrl.errors import ConfigError
from asyncrl.interfaces import GroupSummary
from buffers.slots import SlotHeap

__all__ = ["SELECTIONS", "ReadyOrder", "Selection", "SlotOrder", "make_selection"]


class Selection(Protocol):
    """Chooses among ready groups. Every call names a slot in the state that the call implies."""

    def admitted(self, slot: int) -> None:
        """The group is pending now."""
        ...

    def ready(self, summary: GroupSummary) -> None:
        """The group is ready: it was pending, or it was chosen and its step did not happen."""
        ...

    def forget(self, slot: int) -> None:
        """A pending or ready group is gone: chosen, dropped or withdrawn."""
        ...

    def choose(self, groups: int, *, weight_version: int) -> tuple[int, ...] | None:
        """``groups`` ready slots in training order, or None to wait. Changes nothing; :meth:`forget` follows."""
        ...

    def explain(self, groups: int) -> str:
        """What :meth:`choose` waits for, in words."""
        ...


class SlotOrder:
    """``fifo``: the next live slots in slot order; one that is not ready is waited for.

    Which groups make up a batch does not depend on who finished first, so runs can be repeated and compared. Dropped
    slots are skipped. Order holds among admitted slots: admit them in order.

    Ready slots below every pending one are *in line*, the others *behind*; a choice is the first ones in line.
    """

    def __init__(self) -> None:
        self._pending = SlotHeap()
        self._in_line = SlotHeap()
        self._behind = SlotHeap()
        self._highest_in_line = -1

    def admitted(self, slot: int) -> None:
        if slot < self._highest_in_line:
            # Out of order: what was in line above it has to wait for it.
            for other in [other for other in self._in_line if other > slot]:
                self._in_line.discard(other)
                self._behind.push(other, other)
            self._highest_in_line = slot
        self._pending.push(slot, slot)

    def ready(self, summary: GroupSummary) -> None:
        self._pending.discard(summary.slot)
        self._behind.push(summary.slot, summary.slot)
        self._line_up()

    def forget(self, slot: int) -> None:
        self._in_line.discard(slot)
        self._behind.discard(slot)
        self._pending.discard(slot)
        self._line_up()

    def choose(self, groups: int, *, weight_version: int) -> tuple[int, ...] | None:
        return self._in_line.first(groups) if len(self._in_line) >= groups else None

    def explain(self, groups: int) -> str:
        pending = self._pending.least()
        what = "more groups must be admitted" if pending is None else f"slot {pending} is not finished"
        return f"{len(self._in_line)} of {groups} groups are next in line; {what}"

    def _line_up(self) -> None:
        pending = self._pending.least()
        while (slot := self._behind.least()) is not None and (pending is None or slot < pending):
            self._behind.pop()
            self._in_line.push(slot, slot)
            self._highest_in_line = max(self._highest_in_line, slot)


class ReadyOrder:
    """``fifo_ready``: the lowest slots among those that are ready; nothing slow is waited for.

    Slow groups grow old behind fast ones and may pass the staleness bound: batches lean towards short answers.
    """

    def __init__(self) -> None:
        self._ready = SlotHeap()

    def admitted(self, slot: int) -> None:
        """Pending groups play no part."""

    def ready(self, summary: GroupSummary) -> None:
        self._ready.push(summary.slot, summary.slot)

    def forget(self, slot: int) -> None:
        self._ready.discard(slot)

    def choose(self, groups: int, *, weight_version: int) -> tuple[int, ...] | None:
        return self._ready.first(groups) if len(self._ready) >= groups else None

    def explain(self, groups: int) -> str:
        return f"{len(self._ready)} of {groups} groups are ready"


SELECTIONS: Mapping[str, Callable[[], Selection]] = MappingProxyType({"fifo": SlotOrder, "fifo_ready": ReadyOrder})
"""The policies that a configuration can name."""


def make_selection(name: str) -> Selection:
    """The policy called ``name``.

    Raises:
        ConfigError: there is none.
    """
    if name not in SELECTIONS:
        raise ConfigError(
            f"no selection is called {name!r}", path="buffer.selection", remedy=f"one of {', '.join(SELECTIONS)}"
        )
    return SELECTIONS[name]()
