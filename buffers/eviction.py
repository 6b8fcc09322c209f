"""Which groups are given up without being trained on: pure policies, like those of selection."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from asyncrl.errors import ConfigError
from asyncrl.interfaces import GroupSummary
from buffers.sampling import UniformOrder, advantage_magnitude
from buffers.slots import SlotHeap, SlotRanges

__all__ = ["Evicted", "Eviction", "Evictions", "OverQuota", "Overflow", "Reservoir", "StalenessBound", "make_eviction"]


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

    def evict(self, *, weight_version: int | None) -> tuple[Evicted, ...]:
        """What to drop before a choice at ``weight_version``, or (None) after a group got ready.

        Changes nothing; :meth:`forget` follows.
        """
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

    def evict(self, *, weight_version: int | None) -> tuple[Evicted, ...]:
        oldest = self._by_age.least_priority()
        if weight_version is None or oldest is None or weight_version - oldest <= self.max_staleness:
            return ()
        slot = self._by_age.least()
        return () if slot is None else (Evicted(slot, "stale"),)


class Overflow:
    """Keeps at most ``groups`` ready groups: ``oldest`` goes by version, ``dullest`` by the magnitude of advantages."""

    def __init__(self, groups: int, *, first: Literal["oldest", "dullest"]) -> None:
        if groups < 1:
            raise ValueError(f"keep_groups must be at least 1, got {groups}")
        self._groups = groups
        self._by_version = first == "oldest"
        self._ready = SlotHeap()

    def ready(self, summary: GroupSummary) -> None:
        magnitude = summary.oldest_version if self._by_version else int(advantage_magnitude(summary) * 1e6)
        self._ready.push(summary.slot, magnitude)

    def forget(self, slot: int) -> None:
        self._ready.discard(slot)

    def evict(self, *, weight_version: int | None) -> tuple[Evicted, ...]:
        slot = self._ready.least()
        return () if slot is None or len(self._ready) <= self._groups else (Evicted(slot, "overflow"),)


class Reservoir:
    """Keeps a uniform sample of at most ``groups`` of all groups that ever got ready (algorithm R, Vitter 1985).

    The n-th group takes the place of a random one with probability ``groups / n``, and goes itself otherwise. One that
    is ready again, after a step that did not happen or to be used once more, is no new group.
    """

    def __init__(self, groups: int, *, seed: int = 0) -> None:
        if groups < 1:
            raise ValueError(f"keep_groups must be at least 1, got {groups}")
        self._groups = groups
        self._dice = random.Random(seed)  # noqa: S311  no secret
        self._ready = UniformOrder(seed=seed)
        self._seen = 0
        self._met = SlotRanges()
        self._leaving: int | None = None

    def ready(self, summary: GroupSummary) -> None:
        new = summary.slot not in self._met
        if new:
            self._met.add(summary.slot)
            self._seen += 1
        if len(self._ready) >= self._groups:
            stays = not new or self._dice.random() * self._seen < self._groups
            others = self._ready.choose(1, weight_version=0)
            self._leaving = others[0] if stays and others is not None else summary.slot
        self._ready.ready(summary)

    def forget(self, slot: int) -> None:
        self._ready.forget(slot)
        if slot == self._leaving or len(self._ready) <= self._groups:
            self._leaving = None

    def evict(self, *, weight_version: int | None) -> tuple[Evicted, ...]:
        return () if self._leaving is None else (Evicted(self._leaving, "overflow"),)


class OverQuota:
    """Drops the oldest groups of an environment that has filled all places but those the others' shares need.

    Without it, a buffer full of one environment would wait for another that finds no place.

    Args:
        places: by environment, how many ready groups it may have.
    """

    def __init__(self, places: Mapping[str, int]) -> None:
        self._places = dict(places)
        self._ready = {name: SlotHeap() for name in places}
        self._home: dict[int, str] = {}

    def ready(self, summary: GroupSummary) -> None:
        self._home[summary.slot] = summary.environment
        self._ready[summary.environment].push(summary.slot, summary.slot)

    def forget(self, slot: int) -> None:
        name = self._home.pop(slot, None)
        if name is not None:
            self._ready[name].discard(slot)

    def evict(self, *, weight_version: int | None) -> tuple[Evicted, ...]:
        for name, ready in self._ready.items():
            slot = ready.least()
            if slot is not None and len(ready) > self._places[name]:
                return (Evicted(slot, "over_quota"),)
        return ()


class Evictions:
    """Several policies, one after the other."""

    def __init__(self, policies: Sequence[Eviction]) -> None:
        self._policies = tuple(policies)

    def ready(self, summary: GroupSummary) -> None:
        for policy in self._policies:
            policy.ready(summary)

    def forget(self, slot: int) -> None:
        for policy in self._policies:
            policy.forget(slot)

    def evict(self, *, weight_version: int | None) -> tuple[Evicted, ...]:
        for policy in self._policies:
            if evicted := policy.evict(weight_version=weight_version):
                return evicted
        return ()


def make_eviction(name: str, *, keep_groups: int, seed: int = 0) -> Eviction:
    """The policy called ``name``, for at most ``keep_groups`` ready groups.

    Raises:
        ConfigError: there is none.
    """
    if name == "reservoir":
        return Reservoir(keep_groups, seed=seed)
    if name == "oldest":
        return Overflow(keep_groups, first="oldest")
    if name == "dullest":
        return Overflow(keep_groups, first="dullest")
    raise ConfigError(
        f"no eviction is called {name!r}", path="buffer.options.eviction", remedy="one of oldest, dullest, reservoir"
    )
