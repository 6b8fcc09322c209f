"""How often groups are used for each one that comes in: neither side runs away from the other.

    may insert   iff  samples_per_insert * (inserts + 1) - samples <= upper
    may sample k iff  samples_per_insert * inserts - samples - k >= lower

with ``upper = -lower = tolerance``. The meaning is that of Reverb's SampleToInsertRatio (arXiv:2102.04736); an
insert is an admission here. What leaves early is settled: an unused group takes its insert back, a used one counts as
if it had had its share.

No deadlock, for k groups a sample and r samples an insert. Let ``owed = r * inserts - samples``.

- Inserting and sampling are never both forbidden: inserting is only if ``owed > tolerance - r``, and then sampling is
  allowed as long as ``2 * tolerance >= r + k``.
- When inserting is forbidden, k groups are there: those that left owe nothing, so ``owed <= r * groups there``, and
  ``owed > tolerance - r >= r * (k - 1)`` as long as ``tolerance >= r * k``.
- With ``r > max_uses`` groups would be gone before they had had their share: refused.
- With ``r < max_uses`` groups stay when they have had it and fill the places; then the most used one makes room
  (``BufferState.make_room``). If none was used, at least the k groups of the last sample were replaced since, and owe
  at least k together, so sampling is allowed again. With ``r < 1`` they would owe less: refused.
"""

from __future__ import annotations

from asyncrl.errors import ConfigError

__all__ = ["RateLimit"]


class RateLimit:
    """Counts, and says who may go on. Pure.

    Args:
        samples_per_insert: how often a group is used on average; at most ``max_uses``.
        tolerance: groups by which either side may be ahead.
        batch_groups: groups that are sampled at once.
        max_uses: uses after which a group is gone.
        capacity: places of the buffer.

    Raises:
        ConfigError: these numbers must deadlock.
    """

    def __init__(
        self, *, samples_per_insert: float, tolerance: float, batch_groups: int, max_uses: int, capacity: int
    ) -> None:
        def refuse(message: str, key: str, remedy: str) -> ConfigError:
            return ConfigError(message, path=f"buffer.options.{key}", remedy=remedy)

        if samples_per_insert < 1:
            raise refuse(
                f"samples_per_insert = {samples_per_insert:g} would deadlock: groups never used fill the places",
                "samples_per_insert",
                "use 1 or more; what is not worth a use is dropped by an eviction or by zero_variance",
            )
        if samples_per_insert > max_uses:
            raise refuse(
                f"samples_per_insert = {samples_per_insert:g} would wait for ever: {max_uses} uses end a group",
                "samples_per_insert",
                f"use at most {max_uses}, or raise max_uses",
            )
        least = max(samples_per_insert * batch_groups, (samples_per_insert + batch_groups) / 2)
        if tolerance < least:
            raise refuse(
                f"insert_tolerance = {tolerance:g} would deadlock: a step takes {batch_groups} groups at once",
                "insert_tolerance",
                f"use at least {least:g}",
            )
        if capacity < batch_groups:
            raise refuse(
                f"{capacity} places never hold the {batch_groups} groups of a step",
                "samples_per_insert",
                "raise buffer.capacity_groups",
            )
        self._ratio = samples_per_insert
        self._lower = -tolerance
        self._upper = tolerance
        self.inserts = 0
        self.samples = 0.0

    def may_insert(self) -> bool:
        """True if another group may come in."""
        return self._ratio * (self.inserts + 1) - self.samples <= self._upper

    def may_sample(self, groups: int) -> bool:
        """True if ``groups`` may be used."""
        return self._ratio * self.inserts - self.samples - groups >= self._lower

    def inserted(self, groups: int = 1) -> None:
        """Groups came in, or (below 0) went unused."""
        self.inserts += groups

    def settled(self, uses: int) -> None:
        """A group went that had been used, but not as often as its share."""
        self.samples += max(0.0, self._ratio - uses)

    def sampled(self, groups: int) -> None:
        """Groups were used, or (below 0) their step did not happen."""
        self.samples += groups
