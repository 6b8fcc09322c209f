"""Which groups are trained on next: pure policies that are told what happens to slots and asked to choose.

A policy sees slots and summaries, never rows. It keeps whatever index makes its choice cheap. A policy that weighs
groups (by reward, length or loss) fits the same four calls: it has the summary, and the weight version at the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from asyncrl.errors import ConfigError
from asyncrl.interfaces import GroupSummary
from buffers.sampling import PrioritizedOrder, UniformOrder
from buffers.slots import SlotHeap

__all__ = [
    "OPTIONS",
    "SELECTIONS",
    "FreshestOrder",
    "ReadyOrder",
    "Selection",
    "SlotOrder",
    "make_selection",
    "windowed_staleness",
]


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

    ``windowed_fifo``: as long as the lowest pending slot is ``p``, ready slots below ``p + window`` may go before it,
    the lowest first. A slow group lets at most ``window - 1`` others pass, and then everything waits for it; ``fifo``
    is a window of 1.

    How old a group gets. Let slot ``i`` be issued at version ``u`` with rank ``r`` (live slots below it), under the law
    ``r // g - u <= lead`` of :mod:`asyncrl.pipeline.staleness`, ``g`` groups a step. While ``i`` is pending, nothing at
    or above ``i + window`` is taken; once it is ready, it goes before everything above it. So at most
    ``r + window - 1`` live groups are taken before it, and it is trained on at a version
    ``w <= (r + window - 1) // g``. Each of its tokens was sampled at ``u`` or later, so its staleness is at most
    ``w - u <= lead + ceil((window - 1) / g)`` (:func:`windowed_staleness`). With a lead of
    ``max_staleness - ceil((window - 1) / g)`` nothing ever passes ``max_staleness``; with a larger one the buffer drops
    what does.

    Ready slots below ``p + window`` are *in line*, the others *behind*; a choice is the first ones in line.
    """

    def __init__(self, *, window: int = 1) -> None:
        if window < 1:
            raise ValueError(f"window must be at least 1 group, got {window}")
        self._window = window
        self._pending = SlotHeap()
        self._in_line = SlotHeap()
        self._behind = SlotHeap()
        self._highest_in_line = -1

    def admitted(self, slot: int) -> None:
        if slot + self._window <= self._highest_in_line:
            # Out of order: what was in line above its window has to wait for it.
            for other in [other for other in self._in_line if other >= slot + self._window]:
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
        while (slot := self._behind.least()) is not None and (pending is None or slot < pending + self._window):
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


class FreshestOrder:
    """``freshest``: the groups whose oldest token is youngest, lower slots first among equals.

    Training stays as close to on-policy as what is ready allows; what was passed over grows old and passes the bound.
    """

    def __init__(self) -> None:
        self._ready = SlotHeap()

    def admitted(self, slot: int) -> None:
        """Pending groups play no part."""

    def ready(self, summary: GroupSummary) -> None:
        self._ready.push(summary.slot, -summary.oldest_version)

    def forget(self, slot: int) -> None:
        self._ready.discard(slot)

    def choose(self, groups: int, *, weight_version: int) -> tuple[int, ...] | None:
        return self._ready.first(groups) if len(self._ready) >= groups else None

    def explain(self, groups: int) -> str:
        return f"{len(self._ready)} of {groups} groups are ready"


SELECTIONS: Mapping[str, Callable[..., Selection]] = MappingProxyType(
    {
        "fifo": SlotOrder,
        "windowed_fifo": SlotOrder,
        "fifo_ready": ReadyOrder,
        "freshest": FreshestOrder,
        "uniform": UniformOrder,
        "prioritized": PrioritizedOrder,
    }
)
"""The policies that a configuration can name."""

OPTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"windowed_fifo": ("window",), "uniform": ("seed",), "prioritized": ("priority", "exponent", "seed")}
)
"""What each of them can be told."""


def make_selection(name: str, **options: Any) -> Selection:
    """The policy called ``name``; an option that is None is left to the policy.

    Raises:
        ConfigError: there is none, or it does not take an option.
    """
    if name not in SELECTIONS:
        raise ConfigError(
            f"no selection is called {name!r}", path="buffer.selection", remedy=f"one of {', '.join(SELECTIONS)}"
        )
    given = {key: value for key, value in options.items() if value is not None}
    for key in given:
        if key not in OPTIONS.get(name, ()):
            takers = [other for other, keys in OPTIONS.items() if key in keys]
            raise ConfigError(
                f"selection {name!r} has no {key}",
                path=f"buffer.options.{key}",
                remedy=f"take it away, or use buffer.selection = {' or '.join(map(repr, takers))}",
            )
    if name == "windowed_fifo" and "window" not in given:
        raise ConfigError(
            "selection 'windowed_fifo' needs its window, in groups",
            path="buffer.options.window",
            remedy="for example groups_per_step: one batch may overtake",
        )
    return SELECTIONS[name](**given)


def windowed_staleness(lead: int, *, window: int, groups_per_step: int) -> int:
    """Highest staleness under ``windowed_fifo`` with an admission lead of ``lead`` versions: the proof is above.

    >>> windowed_staleness(2, window=1, groups_per_step=16), windowed_staleness(2, window=17, groups_per_step=16)
    (2, 3)
    """
    return lead + -(-(window - 1) // groups_per_step)
