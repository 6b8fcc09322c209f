"""From the options of a configuration to the policies of a buffer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.errors import ConfigError, InvalidDataError
from asyncrl.interfaces import GroupSummary
from buffers.eviction import Eviction, Evictions, OverQuota, StalenessBound, make_eviction
from buffers.quotas import QuotaOrder, apportion
from buffers.selection import OPTIONS, Selection, make_selection

__all__ = ["ZeroVariance", "compose_eviction", "compose_selection"]


_IN_ORDER = ("fifo", "windowed_fifo")
"""Selections that wait for certain groups."""


class ZeroVariance:
    """Refuses groups whose rewards are all equal: every advantage would be 0 (arXiv:2503.14476).

    Args:
        limit: of them in a row; then nothing can be learned from these tasks, and going on would never end.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"zero_variance_limit must be at least 1, got {limit}")
        self._limit = limit
        self._in_a_row = 0

    def __call__(self, summary: GroupSummary) -> str | None:
        if max(summary.rewards) > min(summary.rewards):
            self._in_a_row = 0
            return None
        self._in_a_row += 1
        if self._in_a_row >= self._limit:
            raise InvalidDataError(
                f"{self._in_a_row} groups in a row got the same reward for every row (the last: "
                f"{summary.rewards[0]:g}): the tasks are all too easy or all too hard to learn from"
            )
        return "zero_variance"


def compose_selection(selection: str | Selection, quotas: Mapping[str, float] | None, **options: Any) -> Selection:
    """The selection called so, or the object itself; with quotas, one of it for each environment.

    Raises:
        ConfigError: unknown name or option, quotas that are none, an order that cannot be kept within quotas, or
            anything to be told to an object that is made already.
    """
    if not isinstance(selection, str):
        for name, value in {"quotas": quotas, **options}.items():
            if value is not None and name != "seed":
                raise ConfigError(
                    f"{name} cannot be told to a selection that is an object",
                    path=f"buffer.options.{name}",
                    remedy="make the object with it, or name one of the selections",
                )
        return selection
    if "seed" not in OPTIONS.get(selection, ()):
        options.pop("seed", None)  # it may be meant for the eviction
    if quotas is None:
        return make_selection(selection, **options)
    if selection in _IN_ORDER:
        raise ConfigError(
            f"selection {selection!r} waits for the next prompt, whichever environment it is of: quotas cannot hold",
            path="buffer.options.quotas",
            remedy="use buffer.selection = 'fifo_ready'",
        )
    return QuotaOrder(quotas, lambda: make_selection(selection, **options))


def compose_eviction(
    eviction: str | Eviction | None,
    *,
    selection: str | Selection,
    max_staleness: int,
    quotas: Mapping[str, float] | None,
    batch_groups: int,
    capacity: int,
    keep_groups: int | None,
    seed: int | None,
) -> Eviction:
    """What passed the bound, what is over its quota, and what the eviction called so gives up.

    Raises:
        ConfigError: unknown name, or an order or numbers with which a step would wait for ever.
    """
    if eviction is not None and not isinstance(eviction, str):
        if keep_groups is not None:
            raise ConfigError(
                "keep_groups cannot be told to an eviction that is an object",
                path="buffer.options.keep_groups",
                remedy="make the object with it, or name one of oldest, dullest, reservoir",
            )
        return eviction
    policies: list[Eviction] = [StalenessBound(max_staleness)]
    if quotas is not None:
        needs = apportion(batch_groups, quotas)
        if never := [name for name, count in needs.items() if not count]:
            raise ConfigError(
                f"{quotas[never[0]]:g} of {batch_groups} groups is none: environment {never[0]!r} would never be used",
                path="buffer.options.quotas",
                remedy="give it a larger share, or train on more groups a step",
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
            raise ConfigError(
                f"eviction {eviction!r} keeps keep_groups ready groups; a step takes {batch_groups} at once",
                path="buffer.options.keep_groups",
                remedy=f"use at least {batch_groups}",
            )
        policies.append(make_eviction(eviction, keep_groups=keep_groups, seed=seed or 0))
        if selection in _IN_ORDER:
            raise ConfigError(
                f"selection {selection!r} waits for the next prompt, and eviction {eviction!r} gives up ready groups, "
                "that one among them: a batch might never be complete",
                path="buffer.options.eviction",
                remedy="use buffer.selection = 'fifo_ready', or no eviction",
            )
    elif keep_groups is not None:
        raise ConfigError(
            "keep_groups belongs to an eviction",
            path="buffer.options.keep_groups",
            remedy="name one of oldest, dullest, reservoir as buffer.options.eviction",
        )
    return policies[0] if len(policies) == 1 else Evictions(policies)
