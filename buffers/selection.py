"""Which ready groups are trained on next: pure policies over the numbers and summaries of groups, never their rows.

Events update whatever index makes a policy's choice cheap.

``uniform`` and ``prioritized`` draw at random, without replacement, from generators of their own: the seed and the
order of events determine the draws. The ledger records what each step has trained on, so a resumed run takes the same
batches.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sized
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy as np

from asyncrl.errors import ConfigError
from asyncrl.interfaces import GroupSummary
from buffers.group_ids import GroupIdHeap


class Selection(Protocol):
    """Chooses among ready groups."""

    def admitted(self, group_id: int) -> None:
        """Record that the group is pending."""

    def ready(self, summary: GroupSummary) -> None:
        """Record that the group is ready: it was pending, or it was chosen and its step did not happen."""

    def forget(self, group_id: int) -> None:
        """Record that a pending or ready group was chosen, dropped, or its admission cancelled."""

    def choose(self, groups: int, *, weight_version: int) -> tuple[int, ...] | None:
        """Return ``groups`` ready groups in training order, or None to wait. Calls of :meth:`forget` follow."""
        ...

    def explain(self, groups: int) -> str:
        """Return in words what :meth:`choose` waits for."""
        ...


class GroupIdOrder:
    """``fifo``: the next live groups in group_id order; one that is not ready is waited for.

    Which groups make up a batch does not depend on which finished first, so runs can be repeated and compared. Dropped
    groups are skipped. The order holds among admitted groups: admit them in order.

    ``windowed_fifo``: while the lowest pending group is ``p``, ready groups below ``p + window`` may be taken before
    it, the lowest first. So at most ``window - 1`` groups pass a slow one, and then everything waits for it; ``fifo``
    is a window of 1.

    Bound on staleness. Let group ``i`` be issued at version ``u`` with rank ``r`` (the number of live groups below
    it), under the law ``r // g - u <= lead`` of :mod:`asyncrl.staleness`, with ``g`` groups a step. While ``i`` is
    pending, nothing at or above ``i + window`` is taken; once it is ready, it is taken before everything above it. So
    at most ``r + window - 1`` live groups are taken before it, and it is trained on at a version ``w <= (r + window -
    1) // g``. Each of its tokens was sampled at ``u`` or later, so its staleness is at most ``w - u <= lead +
    ceil((window - 1) / g)`` (:func:`windowed_staleness`). With a lead of ``max_staleness - ceil((window - 1) / g)``
    nothing ever passes ``max_staleness``; with a larger one the buffer drops groups that do.
    """

    def __init__(self, *, window: int = 1) -> None:
        if window < 1:
            raise ValueError(f"window must be at least 1 group, got {window}")
        self._window = window
        self._pending = GroupIdHeap()
        self._eligible = GroupIdHeap()
        """Ready groups below the lowest pending one + window."""
        self._held_back = GroupIdHeap()
        """The other ready groups."""
        self._highest_eligible = -1

    def admitted(self, group_id: int) -> None:
        if group_id + self._window <= self._highest_eligible:
            # Admitted out of order: eligible groups above its window have to wait for it.
            for other in [other for other in self._eligible if other >= group_id + self._window]:
                self._eligible.discard(other)
                self._held_back.push(other)
            self._highest_eligible = group_id + self._window - 1
        self._pending.push(group_id)

    def ready(self, summary: GroupSummary) -> None:
        self._pending.discard(summary.group_id)
        self._held_back.push(summary.group_id)
        self._advance()

    def forget(self, group_id: int) -> None:
        self._eligible.discard(group_id)
        self._held_back.discard(group_id)
        self._pending.discard(group_id)
        self._advance()

    def choose(self, groups: int, *, weight_version: int) -> tuple[int, ...] | None:
        return self._eligible.first(groups) if len(self._eligible) >= groups else None

    def explain(self, groups: int) -> str:
        pending = self._pending.least()
        what = "more groups must be admitted" if pending is None else f"group_id {pending} is not finished"
        return f"{len(self._eligible)} of {groups} groups are next in order; {what}"

    def _advance(self) -> None:
        pending = self._pending.least()
        while (group_id := self._held_back.least()) is not None and (
            pending is None or group_id < pending + self._window
        ):
            self._held_back.pop()
            self._eligible.push(group_id)
            self._highest_eligible = max(self._highest_eligible, group_id)


class _ReadyOnly(Sized):
    """Base of selections in which pending groups play no part."""

    def admitted(self, group_id: int) -> None: ...

    def explain(self, groups: int) -> str:
        return f"{len(self)} of {groups} groups are ready"


class ReadyOrder(_ReadyOnly):
    """``fifo_ready``: the lowest ready groups; a slow group is not waited for, so batches lean towards short answers.

    ``freshest``: the groups with the highest ``oldest_version``, the lowest first among equals. Training stays as
    close to on-policy as the ready groups allow; groups that are passed over may pass the staleness bound.
    """

    def __init__(self, *, freshest: bool = False) -> None:
        self._freshest = freshest
        self._ready = GroupIdHeap()

    def __len__(self) -> int:
        return len(self._ready)

    def ready(self, summary: GroupSummary) -> None:
        self._ready.push(summary.group_id, -summary.oldest_version if self._freshest else 0)

    def forget(self, group_id: int) -> None:
        self._ready.discard(group_id)

    def choose(self, groups: int, *, weight_version: int) -> tuple[int, ...] | None:
        return self._ready.first(groups) if len(self._ready) >= groups else None


class UniformOrder(_ReadyOnly):
    """``uniform``: any ready group, each with the same probability. A choice of k costs O(k)."""

    def __init__(self, *, seed: int = 0) -> None:
        self._random = random.Random(seed)  # noqa: S311  no secret
        self._group_ids: list[int] = []
        self._places: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._group_ids)

    def ready(self, summary: GroupSummary) -> None:
        self._places[summary.group_id] = len(self._group_ids)
        self._group_ids.append(summary.group_id)

    def forget(self, group_id: int) -> None:
        place = self._places.pop(group_id, None)
        if place is not None:
            last = self._group_ids.pop()
            if last != group_id:
                self._group_ids[place] = last
                self._places[last] = place

    def choose(self, groups: int, *, weight_version: int) -> tuple[int, ...] | None:
        if len(self._group_ids) < groups:
            return None
        return tuple(self._group_ids[place] for place in self._random.sample(range(len(self._group_ids)), groups))


class PrioritizedOrder(_ReadyOnly):
    """``prioritized``: groups in proportion to a weight (arXiv:1511.05952). A choice costs O(n).

    Args:
        priority: ``advantage``: weight ``(mean |r - mean r| + 0.01) ** exponent``, so groups with the largest
            advantages are drawn most often. ``staleness``: weight ``exp(exponent * staleness)``, so the probability
            of a waiting group grows by the same factor with every version.
        exponent: 0 is uniform.
        seed: of the draws.
    """

    def __init__(
        self, *, priority: Literal["advantage", "staleness"] = "advantage", exponent: float = 1.0, seed: int = 0
    ) -> None:
        if priority not in ("advantage", "staleness"):
            raise ValueError(f"priority must be advantage or staleness, got {priority!r}")
        if not 0.0 <= exponent <= 10.0:
            raise ValueError(f"exponent must lie in 0..10, got {exponent}")
        self._priority = priority
        self._exponent = exponent
        self._random = np.random.default_rng(seed)
        self._log_weights: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._log_weights)

    def ready(self, summary: GroupSummary) -> None:
        # Ratios of weights do not depend on the trainer's version, so the group's own stands for its staleness.
        by_advantage = self._priority == "advantage"
        size = math.log(advantage_magnitude(summary) + 0.01) if by_advantage else -summary.oldest_version
        self._log_weights[summary.group_id] = self._exponent * size

    def forget(self, group_id: int) -> None:
        self._log_weights.pop(group_id, None)

    def choose(self, groups: int, *, weight_version: int) -> tuple[int, ...] | None:
        if len(self) < groups:
            return None
        # The largest of log-weights plus Gumbel noise are draws in proportion without replacement (arXiv:1903.06059).
        keys = np.fromiter(self._log_weights.values(), float) + self._random.gumbel(size=len(self))
        group_ids = list(self._log_weights)
        return tuple(group_ids[place] for place in np.argsort(-keys)[:groups])


def advantage_magnitude(summary: GroupSummary) -> float:
    """Return the mean distance of the group's rewards from their mean: 0 where all rewards are equal."""
    mean = sum(summary.rewards) / len(summary.rewards)
    return sum(abs(reward - mean) for reward in summary.rewards) / len(summary.rewards)


def windowed_staleness(lead: int, *, window: int, groups_per_step: int) -> int:
    """Return the highest staleness under ``windowed_fifo`` with an admission lead of ``lead`` versions (proof above).

    >>> windowed_staleness(2, window=1, groups_per_step=16), windowed_staleness(2, window=17, groups_per_step=16)
    (2, 3)
    """
    return lead + -(-(window - 1) // groups_per_step)


SELECTIONS: Mapping[str, tuple[Callable[..., Selection], tuple[str, ...]]] = MappingProxyType(
    {
        "fifo": (GroupIdOrder, ()),
        "windowed_fifo": (GroupIdOrder, ("window",)),
        "fifo_ready": (ReadyOrder, ()),
        "freshest": (lambda: ReadyOrder(freshest=True), ()),
        "uniform": (UniformOrder, ("seed",)),
        "prioritized": (PrioritizedOrder, ("priority", "exponent", "seed")),
    }
)
"""The policies that a configuration can name, and the options of each."""


def make_selection(name: str, **options: Any) -> Selection:
    """Make the policy called ``name``; an option that is None keeps the policy's default.

    Raises:
        ConfigError: the name is unknown, or the policy does not have an option.
    """
    if name not in SELECTIONS:
        raise ConfigError(
            f"no selection is called {name!r}", path="buffer.selection", remedy=f"one of {', '.join(SELECTIONS)}"
        )
    make, allowed = SELECTIONS[name]
    given = {key: value for key, value in options.items() if value is not None}
    for key in given:
        if key not in allowed:
            having = [repr(other) for other, (_, keys) in SELECTIONS.items() if key in keys]
            raise ConfigError(
                f"selection {name!r} has no {key}",
                path=f"buffer.options.{key}",
                remedy=f"remove it, or use buffer.selection = {' or '.join(having)}",
            )
    if name == "windowed_fifo" and "window" not in given:
        raise ConfigError(
            "selection 'windowed_fifo' needs its window, in groups",
            path="buffer.options.window",
            remedy="for example groups_per_step: one batch may overtake",
        )
    return make(**given)
