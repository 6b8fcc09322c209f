"""How a pool of replicas behaves."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.interfaces import KVCachePolicy
from asyncrl.rollout.admission import AdmissionLimits
from asyncrl.rollout.replica import Supervision

__all__ = ["PoolOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """How a pool behaves.

    Attributes:
        admission: how much is taken in.
        supervision: how replicas are watched.
        kv_cache: what running requests do with keys and values of older weights when new ones are committed.
        weights_s: seconds each replica has for each phase of a weight update; past it, it is fenced.
        max_away: replicas that swap weights at the same time.
        wait_s: how long a request may wait for any replica to serve, while the pool is not paused.
        vain_attempts: replicas in a row that may fail a request without one token, before the request itself fails.
        prefix_tokens: prompts that share so many first tokens prefer the same replica; 0 for none.
        margin: how much more than the least busy one, in tokens, a preferred replica may have to do.
    """

    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    supervision: Supervision = field(default_factory=Supervision)
    kv_cache: KVCachePolicy = "keep"
    weights_s: float = 300.0
    max_away: int = 1
    wait_s: float = 120.0
    vain_attempts: int = 3
    prefix_tokens: int = 64
    margin: float = 2048.0
