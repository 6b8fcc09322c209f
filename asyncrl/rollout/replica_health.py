"""Whether a replica may serve: a pure state machine. Events go in, the state comes out; there is no clock in it.

    starting --started--> stale --verified--> healthy <--> suspect
        ^                   ^                    |  fenced    |
        |                   '--------------------+------------'
        '---- restart ---- dead <--- ended, or too many failures, from any state

- ``healthy`` is reached only through ``verified``: the engine that runs *now* holds the current version, checked.
- Failures of probes, of generation and of weight updates are counted apart; a success takes back its own kind only.
  The first of the former two makes a replica suspect (it serves still); so many in a row of one kind make it dead.
- While a lease is held, weights are being carried over: what times out then says nothing, and is not counted.
- Each start has a number of its own. News of an earlier engine change nothing, so nothing late brings the dead back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["HealthPolicy", "HealthState", "ReplicaHealth"]

HealthState: TypeAlias = Literal["starting", "stale", "healthy", "suspect", "dead"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthPolicy:
    """When a replica is given up, and when it is tried again.

        >>> health = ReplicaHealth(HealthPolicy(restart_s=1.0, max_restart_s=5.0))
        >>> delays_s = []
        >>> for _ in range(4):
        ...     delays_s.append(health.restart_delay_s)
        ...     came_to_nothing = health.ended(health.start(), "out of memory")
        >>> delays_s
        [0.0, 2.0, 4.0, 5.0]

    Attributes:
        probe_failures: probes in a row that fail before it is dead.
        generation_failures: requests in a row that fail on it before it is dead.
        weight_failures: weight updates in a row that fail on it before it is dead.
        restart_s: seconds before it is started again; doubled after each start that came to nothing: whose engine never
            held the current version.
        max_restart_s: most that this grows to.

    Raises:
        ValueError: a limit is below 1, or ``restart_s`` is negative or above ``max_restart_s``.
    """

    probe_failures: int = 3
    generation_failures: int = 3
    weight_failures: int = 3
    restart_s: float = 1.0
    max_restart_s: float = 60.0

    def __post_init__(self) -> None:
        if min(self.probe_failures, self.generation_failures, self.weight_failures) < 1:
            raise ValueError("a replica fails at least once before it is dead: limits must be at least 1")
        if not 0 <= self.restart_s <= self.max_restart_s:
            raise ValueError(f"restart_s must lie in 0..{self.max_restart_s:g} (max_restart_s), got {self.restart_s:g}")


class ReplicaHealth:
    """One replica's state. Methods are events; each returns whether the state is another one afterwards.

    ``state`` and ``reason`` say how it is, and why.

    >>> health = ReplicaHealth(HealthPolicy(probe_failures=2))
    >>> engine = health.start()
    >>> health.started(engine), health.state
    (True, 'stale')
    >>> health.verified(engine), health.state
    (True, 'healthy')
    >>> health.probe_failed(engine, "no token"), health.probe_failed(engine, "no token"), health.state
    (True, True, 'dead')
    >>> health.verified(engine), health.state
    (False, 'dead')
    """

    def __init__(self, policy: HealthPolicy | None = None) -> None:
        self._policy = policy or HealthPolicy()
        self._engine = -1
        self._probes = 0
        self._generations = 0
        self._weights = 0
        self._leases = 0
        self._vain_starts = 0
        self.state: HealthState = "dead"
        self.reason = "not started"

    @property
    def serves(self) -> bool:
        """Whether requests may be sent to it.

        >>> health = ReplicaHealth()
        >>> engine = health.start()
        >>> health.started(engine), health.serves
        (True, False)
        >>> health.verified(engine), health.serves
        (True, True)
        """
        return self.state in ("healthy", "suspect")

    @property
    def engine(self) -> int:
        """Number of the newest start; -1 before the first.

        >>> health = ReplicaHealth()
        >>> health.engine, health.start(), health.engine
        (-1, 0, 0)
        """
        return self._engine

    @property
    def leased(self) -> bool:
        """Whether weights are being carried over.

        >>> health = ReplicaHealth()
        >>> health.lease(health.start())
        >>> health.leased
        True
        """
        return self._leases > 0

    @property
    def restart_delay_s(self) -> float:
        """How long to wait before the next start.

        >>> health = ReplicaHealth(HealthPolicy(restart_s=1.0))
        >>> health.restart_delay_s  # the first
        0.0
        >>> health.ended(health.start(), "out of memory"), health.restart_delay_s
        (True, 2.0)
        """
        if self._engine < 0:
            return 0.0
        return min(self._policy.restart_s * 2.0 ** min(self._vain_starts, 60), self._policy.max_restart_s)

    def start(self) -> int:
        """An engine is being made; only a dead replica gets one. Returns its number, for all that is told of it.

            >>> health = ReplicaHealth()
            >>> old = health.start()
            >>> health.ended(old, "out of memory")
            True
            >>> new = health.start()
            >>> health.started(old), health.state  # late news of an engine that is gone
            (False, 'starting')
            >>> health.started(new), health.state
            (True, 'stale')

        Raises:
            ValueError: there is an engine.
        """
        if self.state != "dead":
            raise ValueError(f"a replica that is {self.state} has an engine: only a dead one is started")
        self._engine += 1
        self._vain_starts += 1  # until it is verified
        self._probes = self._generations = self._weights = self._leases = 0
        self._become("starting", "starting")
        return self._engine

    def started(self, engine: int) -> bool:
        """It runs, with weights that nobody has verified yet.

        >>> health = ReplicaHealth()
        >>> health.started(health.start()), health.state, health.reason
        (True, 'stale', 'waits for the current weights')
        """
        return self._is(engine, "starting") and self._become("stale", "waits for the current weights")

    def verified(self, engine: int) -> bool:
        """It holds the current version.

        >>> health = ReplicaHealth()
        >>> engine = health.start()
        >>> health.verified(engine), health.state  # it does not run yet
        (False, 'starting')
        >>> health.started(engine), health.verified(engine), health.state
        (True, True, 'healthy')
        """
        if not self._is(engine, "stale"):
            return False
        self._probes = self._generations = self._weights = self._vain_starts = 0
        return self._become("healthy", "")

    def fenced(self, engine: int, reason: str) -> bool:
        """It failed to take a version: it runs, and serves nothing until it is verified.

        >>> health = ReplicaHealth(HealthPolicy(weight_failures=2))
        >>> engine = health.start()
        >>> health.started(engine), health.verified(engine)
        (True, True)
        >>> health.fenced(engine, "checksum differs"), health.state, health.serves
        (True, 'stale', False)
        >>> health.fenced(engine, "checksum differs"), health.state
        (True, 'dead')
        """
        if not self._is(engine, "healthy", "suspect", "stale"):
            return False
        self._weights += 1
        return self._become("dead" if self._weights >= self._policy.weight_failures else "stale", reason)

    def probe_succeeded(self, engine: int) -> bool:
        """A real token came, in time.

        >>> health = ReplicaHealth()
        >>> engine = health.start()
        >>> health.started(engine), health.verified(engine)
        (True, True)
        >>> health.probe_failed(engine, "no token"), health.state
        (True, 'suspect')
        >>> health.probe_succeeded(engine), health.state
        (True, 'healthy')
        """
        if not self._is(engine, "healthy", "suspect", "stale"):
            return False
        self._probes = 0
        return self._recover()

    def probe_failed(self, engine: int, reason: str) -> bool:
        """None came.

        >>> health = ReplicaHealth(HealthPolicy(probe_failures=3))
        >>> engine = health.start()
        >>> health.started(engine), health.verified(engine)
        (True, True)
        >>> [(health.probe_failed(engine, "no token"), health.state) for _ in range(3)]
        [(True, 'suspect'), (False, 'suspect'), (True, 'dead')]
        """
        if self._leases or not self._is(engine, "healthy", "suspect", "stale"):
            return False
        self._probes += 1
        return self._doubt(reason)

    def generation_succeeded(self, engine: int) -> bool:
        """A request ended as it should.

        >>> health = ReplicaHealth()
        >>> engine = health.start()
        >>> health.started(engine), health.verified(engine)
        (True, True)
        >>> health.probe_failed(engine, "no token")
        True
        >>> health.generation_succeeded(engine), health.state  # that says nothing of probes
        (False, 'suspect')
        """
        if not self._is(engine, "healthy", "suspect"):
            return False
        self._generations = 0
        return self._recover()

    def generation_failed(self, engine: int, reason: str) -> bool:
        """A request failed by the engine's fault.

        >>> health = ReplicaHealth(HealthPolicy(generation_failures=2))
        >>> engine = health.start()
        >>> health.started(engine), health.verified(engine)
        (True, True)
        >>> health.generation_failed(engine, "no answer"), health.generation_succeeded(engine), health.state
        (True, True, 'healthy')
        >>> health.generation_failed(engine, "no answer"), health.generation_failed(engine, "no answer"), health.state
        (True, True, 'dead')
        """
        if self._leases or not self._is(engine, "healthy", "suspect"):
            return False
        self._generations += 1
        return self._doubt(reason)

    def ended(self, engine: int, reason: str) -> bool:
        """It is gone for certain: its process ended, or it could not be started.

        >>> health = ReplicaHealth()
        >>> engine = health.start()
        >>> health.ended(engine, "killed by SIGKILL"), health.state, health.reason
        (True, 'dead', 'killed by SIGKILL')
        """
        if self.state == "dead" or engine != self._engine:
            return False
        return self._become("dead", reason)

    def lease(self, engine: int) -> None:
        """Weights begin to be carried over; balanced by :meth:`lease_over`.

        >>> health = ReplicaHealth(HealthPolicy(probe_failures=1))
        >>> engine = health.start()
        >>> health.started(engine), health.verified(engine)
        (True, True)
        >>> health.lease(engine)
        >>> health.probe_failed(engine, "no token"), health.state  # not counted: it may be busy with the weights
        (False, 'healthy')
        """
        if engine == self._engine:
            self._leases += 1

    def lease_over(self, engine: int) -> None:
        """They have been, or could not be.

        >>> health = ReplicaHealth(HealthPolicy(probe_failures=1))
        >>> engine = health.start()
        >>> health.started(engine), health.verified(engine)
        (True, True)
        >>> health.lease(engine)
        >>> health.lease_over(engine)
        >>> health.probe_failed(engine, "no token"), health.state
        (True, 'dead')
        """
        if engine == self._engine and self._leases:
            self._leases -= 1

    def _is(self, engine: int, *states: HealthState) -> bool:
        return engine == self._engine and self.state in states

    def _doubt(self, reason: str) -> bool:
        policy = self._policy
        if self._probes >= policy.probe_failures or self._generations >= policy.generation_failures:
            return self._become("dead", reason)
        return self.state != "stale" and self._become("suspect", reason)

    def _recover(self) -> bool:
        if self.state == "suspect" and not self._probes and not self._generations:
            return self._become("healthy", "")
        return False

    def _become(self, state: HealthState, reason: str) -> bool:
        changed, self.state, self.reason = self.state != state, state, reason
        return changed
