"""Which groups are dropped early, how often groups are used, and how batches are shared between environments.

All policies are pure, like those of :mod:`buffers.selection`. :func:`compose_selection` and :func:`compose_evictions`
make them from the options of a configuration.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from asyncrl.algorithms.credit import Credit, earned_in_group
from asyncrl.errors import ConfigError, InvalidDataError
from asyncrl.interfaces import GroupSummary
from buffers.group_ids import GroupIdHeap, GroupIdSet
from buffers.selection import SELECTIONS, Selection, UniformOrder, advantage_magnitude, make_selection


def _refused(message: str, option: str, remedy: str) -> ConfigError:
    return ConfigError(message, path=f"buffer.options.{option}", remedy=remedy)


# ---------------------------------------------------------------------------------------------------------- evictions


class Evicted(NamedTuple):
    """A group to drop, and the reason under which it is counted."""

    group_id: int
    reason: str


class Eviction(Protocol):
    """Chooses ready groups that are dropped."""

    def ready(self, summary: GroupSummary) -> None: ...

    def forget(self, group_id: int) -> None:
        """Record that the group was chosen or dropped. Unknown groups change nothing."""

    def evict(self, *, weight_version: int | None) -> Evicted | None:
        """Return a group to drop before a choice at ``weight_version``, or (None) after a group became ready.

        Changes nothing: a call of :meth:`forget` follows, then :meth:`evict` is called again, until it returns None.
        """
        ...


class StalenessBound:
    """Drops groups whose oldest token is more than ``max_staleness`` versions old: they can never be trained on again.

    A group is dropped as soon as it passes the bound, so that its place is free for another.
    """

    def __init__(self, max_staleness: int) -> None:
        self.max_staleness = max_staleness
        self._by_version = GroupIdHeap()

    def ready(self, summary: GroupSummary) -> None:
        self._by_version.push(summary.group_id, summary.oldest_version)

    def forget(self, group_id: int) -> None:
        self._by_version.discard(group_id)

    def evict(self, *, weight_version: int | None) -> Evicted | None:
        oldest = self._by_version.least_priority()
        if weight_version is None or oldest is None or weight_version - oldest <= self.max_staleness:
            return None
        group_id = self._by_version.least()
        return None if group_id is None else Evicted(group_id, "stale")


class Overflow:
    """Keeps at most ``groups`` ready groups: drops the ``oldest`` version or the ``lowest_advantage`` first."""

    def __init__(self, groups: int, *, first: Literal["oldest", "lowest_advantage"]) -> None:
        if groups < 1:
            raise ValueError(f"keep_groups must be at least 1, got {groups}")
        self._groups = groups
        self._by_version = first == "oldest"
        self._ready = GroupIdHeap()

    def ready(self, summary: GroupSummary) -> None:
        priority = summary.oldest_version if self._by_version else int(advantage_magnitude(summary) * 1e6)
        self._ready.push(summary.group_id, priority)

    def forget(self, group_id: int) -> None:
        self._ready.discard(group_id)

    def evict(self, *, weight_version: int | None) -> Evicted | None:
        group_id = self._ready.least()
        return None if group_id is None or len(self._ready) <= self._groups else Evicted(group_id, "overflow")


class Reservoir:
    """Keeps a uniform sample of at most ``groups`` of all groups that were ever ready (algorithm R, Vitter 1985).

    The n-th group replaces a random one with probability ``groups / n``, and is dropped itself otherwise. A group
    that is ready again, after a step that did not happen or to be used once more, is not counted again.
    """

    def __init__(self, groups: int, *, seed: int = 0) -> None:
        if groups < 1:
            raise ValueError(f"keep_groups must be at least 1, got {groups}")
        self._groups = groups
        self._random = random.Random(seed)  # noqa: S311  no secret
        self._ready = UniformOrder(seed=seed)
        self._seen = GroupIdSet()
        self._seen_count = 0
        self._leaving: int | None = None

    def ready(self, summary: GroupSummary) -> None:
        new = summary.group_id not in self._seen
        if new:
            self._seen.add(summary.group_id)
            self._seen_count += 1
        if len(self._ready) >= self._groups:
            stays = not new or self._random.random() * self._seen_count < self._groups
            others = self._ready.choose(1, weight_version=0)
            self._leaving = others[0] if stays and others is not None else summary.group_id
        self._ready.ready(summary)

    def forget(self, group_id: int) -> None:
        self._ready.forget(group_id)
        if len(self._ready) <= self._groups:
            self._leaving = None
        elif group_id == self._leaving:  # several became ready again at once
            (self._leaving,) = self._ready.choose(1, weight_version=0) or (None,)

    def evict(self, *, weight_version: int | None) -> Evicted | None:
        return None if self._leaving is None else Evicted(self._leaving, "overflow")


class OverQuota:
    """Drops the oldest groups of an environment that has more ready groups than its ``places``.

    Without it, a buffer full of one environment would wait for another that finds no place.
    """

    def __init__(self, places: Mapping[str, int]) -> None:
        self._places = dict(places)
        self._ready = {name: GroupIdHeap() for name in places}
        self._environments: dict[int, str] = {}

    def ready(self, summary: GroupSummary) -> None:
        self._environments[summary.group_id] = summary.environment
        self._ready[summary.environment].push(summary.group_id)

    def forget(self, group_id: int) -> None:
        name = self._environments.pop(group_id, None)
        if name is not None:
            self._ready[name].discard(group_id)

    def evict(self, *, weight_version: int | None) -> Evicted | None:
        for name, ready in self._ready.items():
            group_id = ready.least()
            if group_id is not None and len(ready) > self._places[name]:
                return Evicted(group_id, "over_quota")
        return None


class ZeroVariance:
    """Refuses groups in which all that is compared earned the same: every advantage would be 0 (arXiv:2503.14476).

    What is compared depends on ``credit``: rows, branches or turns (:mod:`asyncrl.algorithms.credit`). ``by_turns`` is
    False where one score of the whole row counts instead of the environment's rewards.

    After ``limit`` refused groups in a row it fails: these tasks teach nothing, and replacing them would never end.
    """

    def __init__(self, limit: int, *, credit: Credit = "outcome", by_turns: bool = True) -> None:
        if limit < 1:
            raise ValueError(f"zero_variance_limit must be at least 1, got {limit}")
        self._limit = limit
        self._credit: Credit = credit
        self._by_turns = by_turns
        self._in_a_row = 0

    def __call__(self, summary: GroupSummary) -> str | None:
        compared: Sequence[float] = summary.rewards
        if self._credit != "outcome":
            rows = earned_in_group(self._credit, summary, rewards=compared, by_turns=self._by_turns)
            compared = [each.reward for row in rows for each in row]
        if np.unique(np.asarray(compared, np.float32)).size > 1:  # as advantages are computed from them
            self._in_a_row = 0
            return None
        self._in_a_row += 1
        if self._in_a_row >= self._limit:
            unit = "row" if self._credit == "outcome" else self._credit
            last = f" (the last: {compared[0]:g})" if compared else ""
            raise InvalidDataError(
                f"{self._in_a_row} groups in a row got the same reward for every {unit}{last}: the tasks are all too "
                "easy or all too hard to learn from"
            )
        return "zero_variance"


# ------------------------------------------------------------------------------------------------------- rate of use


class RateLimit:
    """Limits how far admissions and uses of groups may run ahead of each other; by default not at all. Pure.

        may insert   iff  samples_per_insert * (inserts + 1) - samples <= tolerance
        may sample k iff  samples_per_insert * inserts - samples - k >= -tolerance

    The meaning is that of Reverb's SampleToInsertRatio (arXiv:2102.04736); an insert is an admission here. A group that
    leaves early is settled: an unused one takes its insert back, a used one counts as if it had had its share.

    No deadlock, for k groups a sample and r samples an insert. Let ``owed = r * inserts - samples``.

    - Inserting and sampling are never both forbidden: inserting is only if ``owed > tolerance - r``, and then
      sampling is allowed as long as ``2 * tolerance >= r + k``.
    - When inserting is forbidden, k groups are in the buffer: those that left owe nothing, so ``owed <= r * groups``,
      and ``owed > tolerance - r >= r * (k - 1)`` as long as ``tolerance >= r * k``.
    - With ``r > max_uses`` groups would be gone before they had had their share: refused.
    - With ``r < max_uses`` groups stay when they have had it and fill the places; then the most used one makes room
      (``BufferState.make_room``). If none was used, at least the k groups of the last sample were replaced since, and
      owe at least k together, so sampling is allowed again. With ``r < 1`` they would owe less: refused.

    Counts are exact: rounded ones could forbid both where a bound is met.
    """

    def __init__(self, samples_per_insert: float = 0.0, *, tolerance: float = math.inf) -> None:
        self._tolerance = tolerance
        self._inserts = 0
        self.limits = tolerance < math.inf
        self._ratio = Fraction(samples_per_insert) if self.limits else 0
        self._samples: Fraction | int = 0

    def may_insert(self) -> bool:
        return self._ratio * (self._inserts + 1) - self._samples <= self._tolerance

    def may_sample(self, groups: int) -> bool:
        return self._ratio * self._inserts - self._samples - groups >= -self._tolerance

    def inserted(self, groups: int = 1) -> None:
        """Count groups that were admitted, or (below 0) left without a use."""
        self._inserts += groups

    def sampled(self, groups: int) -> None:
        """Count groups that were used, or (below 0) whose step did not happen."""
        self._samples += groups

    def settled(self, uses: int) -> None:
        """Count the missing uses of a group that left before it had had its share."""
        self._samples += max(0, self._ratio - uses)

    def __str__(self) -> str:
        return f"{float(self._samples):g} uses of {self._inserts} groups"


# ------------------------------------------------------------------------------------------------------------ quotas


def apportion(groups: int, shares: Mapping[str, float]) -> dict[str, int]:
    """Divide ``groups`` by shares that add up to 1: largest remainders, the first of equals first.

    >>> apportion(5, {"math": 0.5, "code": 0.3, "chat": 0.2})
    {'math': 3, 'code': 1, 'chat': 1}
    """
    exact = {name: groups * share for name, share in shares.items()}
    counts = {name: int(value + 1e-9) for name, value in exact.items()}
    by_remainder = sorted(shares, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[: groups - sum(counts.values())]:
        counts[name] += 1
    return counts


class QuotaOrder:
    """A selection that takes each environment's share of a batch, in the order of a selection per environment.

    Raises:
        ConfigError: the shares are not positive or do not add up to 1.
    """

    def __init__(self, shares: Mapping[str, float], make: Callable[[], Selection]) -> None:
        if not shares or min(shares.values()) <= 0 or abs(sum(shares.values()) - 1.0) > 1e-6:
            raise _refused(
                f"quotas {dict(shares)} must be above 0 and add up to 1",
                "quotas",
                "for example { math = 0.7, code = 0.3 }",
            )
        self._shares = dict(shares)
        self._orders = {name: make() for name in shares}
        self._environments: dict[int, str] = {}
        self._ready = dict.fromkeys(shares, 0)

    def admitted(self, group_id: int) -> None:
        """Do nothing: the environment of a pending group is not known."""

    def ready(self, summary: GroupSummary) -> None:
        order = self._orders.get(summary.environment)
        if order is None:
            raise InvalidDataError(
                f"group {summary.group_id} is of environment {summary.environment!r}, which has no quota: "
                f"give it one beside {', '.join(self._orders)}"
            )
        self._environments[summary.group_id] = summary.environment
        self._ready[summary.environment] += 1
        order.admitted(summary.group_id)
        order.ready(summary)

    def forget(self, group_id: int) -> None:
        name = self._environments.pop(group_id, None)
        if name is not None:
            self._ready[name] -= 1
            self._orders[name].forget(group_id)

    def choose(self, groups: int, *, weight_version: int) -> tuple[int, ...] | None:
        if self._short(groups):
            return None  # before any order has drawn
        chosen: list[int] = []
        for name, count in apportion(groups, self._shares).items():
            if count:
                some = self._orders[name].choose(count, weight_version=weight_version)
                if some is None:
                    return None
                chosen += some
        return tuple(chosen)

    def explain(self, groups: int) -> str:
        return "; ".join(f"{name}: {self._orders[name].explain(count)}" for name, count in self._short(groups).items())

    def _short(self, groups: int) -> dict[str, int]:
        return {name: count for name, count in apportion(groups, self._shares).items() if self._ready[name] < count}


# ------------------------------------------------------------------------------------------------------- composition

_IN_ORDER = ("fifo", "windowed_fifo")
"""Selections that wait for certain groups."""

_EVICTIONS = ("oldest", "lowest_advantage", "reservoir")


def compose_selection(selection: str | Selection, quotas: Mapping[str, float] | None, **options: Any) -> Selection:
    """Make the selection of this name (with quotas, one for each environment), or return the object itself.

    Raises:
        ConfigError: the name, an option or the quotas are invalid, the selection's order cannot be kept within
            quotas, or options were given for a selection that is an object already.
    """
    if not isinstance(selection, str):
        for name, value in {"quotas": quotas, **options}.items():
            if value is not None and name != "seed":
                raise _refused(
                    f"{name} cannot be applied to a selection that is an object",
                    name,
                    "make the object with it, or name one of the selections",
                )
        return selection
    if selection in SELECTIONS and "seed" not in SELECTIONS[selection][1]:
        options.pop("seed", None)  # it may be meant for the eviction
    if quotas is None:
        return make_selection(selection, **options)
    if selection in _IN_ORDER:
        raise _refused(
            f"selection {selection!r} waits for the next prompt, whichever environment it is of: quotas cannot hold",
            "quotas",
            "use buffer.selection = 'fifo_ready'",
        )
    return QuotaOrder(quotas, lambda: make_selection(selection, **options))


def compose_evictions(
    eviction: str | Eviction | None,
    *,
    selection: str | Selection,
    max_staleness: int,
    quotas: Mapping[str, float] | None,
    batch_groups: int,
    capacity: int,
    keep_groups: int | None,
    seed: int | None,
) -> list[Eviction]:
    """Return the staleness bound, the quotas and the eviction of this name; or the eviction object alone.

    Raises:
        ConfigError: the name is unknown, or a step would wait forever with this order or these numbers.
    """
    if eviction is not None and not isinstance(eviction, str):
        if keep_groups is not None:
            raise _refused(
                "keep_groups cannot be applied to an eviction that is an object",
                "keep_groups",
                f"make the object with it, or name one of {', '.join(_EVICTIONS)}",
            )
        return [eviction]
    policies: list[Eviction] = [StalenessBound(max_staleness)]
    if quotas is not None:
        needs = apportion(batch_groups, quotas)
        if never := [name for name, count in needs.items() if not count]:
            raise _refused(
                f"{quotas[never[0]]:g} of {batch_groups} groups is none: environment {never[0]!r} would never be used",
                "quotas",
                "give it a larger share, or train on more groups a step",
            )
        places = {name: capacity - (batch_groups - needs[name]) for name in quotas}
        if min(places[name] - needs[name] for name in quotas) < 0:
            raise ConfigError(
                f"{capacity} places cannot hold a batch of {batch_groups} groups by quota",
                path="buffer.capacity_groups",
                remedy=f"use at least {batch_groups}",
            )
        policies.append(OverQuota(places))
    if eviction is not None:
        if keep_groups is None or keep_groups < batch_groups:
            raise _refused(
                f"eviction {eviction!r} keeps keep_groups ready groups; a step takes {batch_groups} at once",
                "keep_groups",
                f"use at least {batch_groups}",
            )
        if eviction not in _EVICTIONS:
            raise _refused(f"no eviction is called {eviction!r}", "eviction", f"one of {', '.join(_EVICTIONS)}")
        if selection in _IN_ORDER:
            raise _refused(
                f"selection {selection!r} waits for the next prompt, and eviction {eviction!r} drops ready groups, "
                "that one among them: a batch might never be complete",
                "eviction",
                "use buffer.selection = 'fifo_ready', or no eviction",
            )
        if eviction == "reservoir":
            policies.append(Reservoir(keep_groups, seed=seed or 0))
        else:
            policies.append(Overflow(keep_groups, first="oldest" if eviction == "oldest" else "lowest_advantage"))
    elif keep_groups is not None:
        raise _refused(
            "keep_groups belongs to an eviction",
            "keep_groups",
            f"name one of {', '.join(_EVICTIONS)} as buffer.options.eviction",
        )
    return policies


def compose_rate_limit(
    samples_per_insert: float | None, tolerance: float | None, *, batch_groups: int, max_uses: int, capacity: int
) -> RateLimit:
    """Make the rate limit of a buffer with ``samples_per_insert`` uses of a group; None for no limit.

    ``tolerance`` (how far either side may be ahead) is by default ``samples_per_insert * (batch_groups + 1)`` groups.

    Raises:
        ConfigError: these numbers would deadlock.
    """
    if samples_per_insert is None:
        if tolerance is not None:
            raise _refused("insert_tolerance belongs to samples_per_insert", "insert_tolerance", "give both, or none")
        return RateLimit()
    if samples_per_insert < 1:
        raise _refused(
            f"samples_per_insert = {samples_per_insert:g} would deadlock: groups never used fill the places",
            "samples_per_insert",
            "use 1 or more; groups that are not worth a use are dropped by an eviction or by zero_variance",
        )
    if samples_per_insert > max_uses:
        raise _refused(
            f"samples_per_insert = {samples_per_insert:g} would deadlock: a group is released after {max_uses} uses",
            "samples_per_insert",
            f"use at most {max_uses}, or raise max_uses",
        )
    tolerance = samples_per_insert * (batch_groups + 1) if tolerance is None else tolerance
    least = max(samples_per_insert * batch_groups, (samples_per_insert + batch_groups) / 2)
    if tolerance < least:
        raise _refused(
            f"insert_tolerance = {tolerance:g} would deadlock: a step takes {batch_groups} groups at once",
            "insert_tolerance",
            f"use at least {least:g}",
        )
    if capacity < batch_groups:
        raise _refused(
            f"{capacity} places never hold the {batch_groups} groups of a step",
            "samples_per_insert",
            "raise buffer.capacity_groups",
        )
    return RateLimit(samples_per_insert, tolerance=tolerance)
