"""What a pool of replicas tells about itself: frozen records, for logs, dashboards and tests alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from asyncrl.interfaces import RolloutEngineStatistics

__all__ = ["PoolStatistics", "ReplicaState", "ReplicaStatus"]

ReplicaState: TypeAlias = Literal["starting", "stale", "healthy", "suspect", "draining", "dead"]
"""``starting``: its engine is being made (again). ``stale``: it runs, but holds no verified current version.
``healthy`` and ``suspect`` (something failed lately) serve. ``draining``: finishes what it has. ``dead``: waits to be
started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """One replica.

    Attributes:
        name: its name in the pool.
        state: where it stands in its life.
        serving: whether new requests may go to it.
        weight_version: version its engine samples under; None while there is no engine.
        requests: requests on it now.
        expected_tokens: tokens that these are expected to need still, prompts included.
        restarts: how often its engine was made again.
        reason: why it does not serve, or what failed last.
        engine: the engine's own statistics; None while there is no engine.
    """

    name: str
    state: ReplicaState
    serving: bool
    weight_version: int | None
    requests: int
    expected_tokens: int
    restarts: int
    reason: str
    engine: RolloutEngineStatistics | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatistics:
    """What the pool holds and has done. Counters only grow.

    accepted = running + waiting + finished + aborted + failed + left

    Attributes:
        weight_version: the pool's current version.
        paused: whether decoding is stopped by order.
        running: requests on a replica.
        waiting: requests admitted by no replica yet, or between two.
        accepted: requests taken, refused ones not counted.
        finished: ended by a stop or by length.
        aborted: ended by an abort.
        failed: ended with an error.
        left: given up by their reader.
        refused: not taken, because a queue was full.
        migrations: times a request went on on another replica.
        tokens: tokens delivered.
        restarts: engines made again.
        replicas: the replicas, by name.
    """

    weight_version: int
    paused: bool
    running: int
    waiting: int
    accepted: int
    finished: int
    aborted: int
    failed: int
    left: int
    refused: int
    migrations: int
    tokens: int
    restarts: int
    replicas: tuple[ReplicaStatus, ...]
