"""Whether a replica may serve: a pure state machine over the starts and failures of one replica.

    starting --started--> stale --verified--> healthy <--> suspect
        ^                   ^                    |  fenced    |
        |                   '--------------------+------------'
        '---- restart ---- dead <--- ended, or too many failures, from any state

There is no clock and no I/O in it. Laws:

- ``healthy`` is reached only through ``verified``: the instance that runs *now* holds the current version, checked.
- Failures of probes, of generation and of weight updates are counted apart; a success resets its own kind only. The
  first failure of the former two makes a replica suspect (it still serves); a limit of failures in a row makes it dead.
- While a lease is held, weights are being transferred: timeouts prove nothing then and are not counted.
- Each start has a number, the *incarnation*. Events of an earlier incarnation change nothing, so that no late event
  revives a dead replica.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

HealthState: TypeAlias = Literal["starting", "stale", "healthy", "suspect", "dead"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthPolicy:
    """When a replica is declared dead, and when it is started again.

    Attributes:
        probe_failures, generation_failures: consecutive ones after which it is dead.
        weight_failures: likewise; None for no limit.
        restart_s: seconds before it is started again, up to ``max_restart_s``; the delay doubles after each failed
            start: one whose instance never held the current version.
        max_failed_starts: consecutive failed starts after which it is given up; None for no limit.

    Raises:
        ValueError: a limit of failures is below 1, or ``restart_s`` is negative or above ``max_restart_s``.
    """

    probe_failures: int = 3
    generation_failures: int = 3
    weight_failures: int | None = 3
    restart_s: float = 1.0
    max_restart_s: float = 60.0
    max_failed_starts: int | None = None

    def __post_init__(self) -> None:
        limits = (self.probe_failures, self.generation_failures, self.weight_failures)
        if any(limit is not None and limit < 1 for limit in limits):
            raise ValueError("a replica fails at least once before it is dead: limits must be at least 1")
        if not 0 <= self.restart_s <= self.max_restart_s:
            raise ValueError(f"restart_s must lie in 0..{self.max_restart_s:g} (max_restart_s), got {self.restart_s:g}")


class ReplicaHealth:
    """The state of one replica. Methods are events; each returns whether it changed the state.

    >>> health = ReplicaHealth(HealthPolicy(probe_failures=2))
    >>> first = health.start()
    >>> health.started(first), health.verified(first), health.state
    (True, True, 'healthy')
    >>> health.probe_failed(first, "no token"), health.probe_failed(first, "no token"), health.state
    (True, True, 'dead')
    >>> second = health.start()
    >>> health.verified(first), health.state  # a late event of the first incarnation
    (False, 'starting')
    """

    def __init__(self, policy: HealthPolicy | None = None) -> None:
        self._policy = policy or HealthPolicy()
        self._probe_failures = 0
        self._generation_failures = 0
        self._weight_failures = 0
        self._leases = 0
        self._failed_starts = 0
        self._hopeless = False
        self.incarnation = -1
        """Number of the newest start; -1 before the first."""
        self.state: HealthState = "dead"
        self.reason = "not started"

    @property
    def serves(self) -> bool:
        return self.state in ("healthy", "suspect")

    @property
    def leased(self) -> bool:
        return self._leases > 0

    @property
    def given_up(self) -> bool:
        limit = self._policy.max_failed_starts
        failed = self._hopeless or (limit is not None and self._failed_starts >= limit)
        return self.state == "dead" and self.incarnation >= 0 and failed

    @property
    def coming_back(self) -> bool:
        """Whether it does not serve yet and will, without a new version of the weights."""
        if self.state == "stale":
            return not self._weight_failures
        return self.state == "starting" or (self.state == "dead" and not self.given_up)

    @property
    def restart_delay_s(self) -> float:
        """Seconds to wait before the next start; 0 before the first."""
        if self.incarnation < 0:
            return 0.0
        return min(self._policy.restart_s * 2.0 ** min(self._failed_starts, 60), self._policy.max_restart_s)

    def start(self) -> int:
        """Begin an incarnation, which every event names; return its number.

        Raises:
            ValueError: the replica is not dead.
        """
        if self.state != "dead":
            raise ValueError(f"a replica that is {self.state} has an instance: only a dead one is started")
        self.incarnation += 1
        self._failed_starts += 1  # until it is verified
        self._probe_failures = self._generation_failures = self._weight_failures = self._leases = 0
        self._become("starting", "starting")
        return self.incarnation

    def started(self, incarnation: int) -> bool:
        """Enter ``stale``: the instance runs, with weights that are not verified yet."""
        return self._is(incarnation, "starting") and self._become("stale", "waits for the current weights")

    def verified(self, incarnation: int) -> bool:
        """Enter ``healthy``: the instance holds the current version."""
        if not self._is(incarnation, "stale"):
            return False
        self._probe_failures = self._generation_failures = self._weight_failures = self._failed_starts = 0
        return self._become("healthy", "")

    def fenced(self, incarnation: int, reason: str) -> bool:
        """Count a version that the instance failed to take: it runs, and serves nothing until it is verified."""
        if not self._is(incarnation, "healthy", "suspect", "stale"):
            return False
        self._weight_failures += 1
        limit = self._policy.weight_failures
        return self._become("dead" if limit is not None and self._weight_failures >= limit else "stale", reason)

    def probe_succeeded(self, incarnation: int) -> bool:
        if not self._is(incarnation, "healthy", "suspect", "stale"):
            return False
        self._probe_failures = 0
        return self._recover()

    def probe_failed(self, incarnation: int, reason: str) -> bool:
        """Count a probe without a token in time."""
        if self._leases or not self._is(incarnation, "healthy", "suspect", "stale"):
            return False
        self._probe_failures += 1
        return self._doubt(reason)

    def generation_succeeded(self, incarnation: int) -> bool:
        if not self._is(incarnation, "healthy", "suspect"):
            return False
        self._generation_failures = 0
        return self._recover()

    def generation_failed(self, incarnation: int, reason: str) -> bool:
        """Count a request that failed by the instance's fault."""
        if self._leases or not self._is(incarnation, "healthy", "suspect"):
            return False
        self._generation_failures += 1
        return self._doubt(reason)

    def ended(self, incarnation: int, reason: str, *, hopeless: bool = False) -> bool:
        """Enter ``dead``: the instance is gone for certain (its process ended, or it could not be started).

        A ``hopeless`` end, which another start would not mend, gives the replica up.
        """
        if self.state == "dead" or incarnation != self.incarnation:
            return False
        self._hopeless = hopeless
        return self._become("dead", reason)

    def lease(self, incarnation: int) -> None:
        """Begin a transfer of weights; :meth:`release` ends it, well or not."""
        if incarnation == self.incarnation:
            self._leases += 1

    def release(self, incarnation: int) -> None:
        if incarnation == self.incarnation and self._leases:
            self._leases -= 1

    def _is(self, incarnation: int, *states: HealthState) -> bool:
        return incarnation == self.incarnation and self.state in states

    def _doubt(self, reason: str) -> bool:
        policy = self._policy
        if self._probe_failures >= policy.probe_failures or self._generation_failures >= policy.generation_failures:
            return self._become("dead", reason)
        return self.state != "stale" and self._become("suspect", reason)

    def _recover(self) -> bool:
        if self.state == "suspect" and not self._probe_failures and not self._generation_failures:
            return self._become("healthy", "")
        return False

    def _become(self, state: HealthState, reason: str) -> bool:
        changed, self.state, self.reason = self.state != state, state, reason
        return changed
