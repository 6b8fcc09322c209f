"""Shares of a batch for each environment, whatever each of them takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from asyncrl.errors import ConfigError, InvalidDataError
from asyncrl.interfaces import GroupSummary
from buffers.selection import Selection

__all__ = ["QuotaOrder", "apportion"]


def apportion(groups: int, shares: Mapping[str, float]) -> dict[str, int]:
    """``groups`` places by shares that add up to 1: largest remainders, the first of equals first.

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
    """Takes each environment's share of a batch, in the order of a selection of its own.

    Args:
        shares: by environment; all above 0, together 1.
        make: makes the selection of one environment.

    Raises:
        ConfigError: shares that are none.
    """

    def __init__(self, shares: Mapping[str, float], make: Callable[[], Selection]) -> None:
        check_shares(shares)
        self._shares = dict(shares)
        self._orders = {name: make() for name in shares}
        self._home: dict[int, str] = {}
        self._ready = dict.fromkeys(shares, 0)

    def admitted(self, slot: int) -> None:
        """Whose a pending group is is not known yet."""

    def ready(self, summary: GroupSummary) -> None:
        order = self._orders.get(summary.environment)
        if order is None:
            raise InvalidDataError(
                f"group {summary.slot} is of environment {summary.environment!r}, which has no quota: "
                f"give it one beside {', '.join(self._orders)}"
            )
        self._home[summary.slot] = summary.environment
        self._ready[summary.environment] += 1
        order.admitted(summary.slot)
        order.ready(summary)

    def forget(self, slot: int) -> None:
        name = self._home.pop(slot, None)
        if name is not None:
            self._ready[name] -= 1
            self._orders[name].forget(slot)

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
        """Environments that have fewer ready groups than their share of a batch, and that share."""
        return {name: count for name, count in apportion(groups, self._shares).items() if self._ready[name] < count}


def check_shares(shares: Mapping[str, float]) -> None:
    """Raise :class:`ConfigError` unless the shares are above 0 and add up to 1."""
    if not shares or min(shares.values()) <= 0 or abs(sum(shares.values()) - 1.0) > 1e-6:
        raise ConfigError(
            f"quotas {dict(shares)} must be above 0 and add up to 1",
            path="buffer.options.quotas",
            remedy="for example { math = 0.7, code = 0.3 }",
        )
