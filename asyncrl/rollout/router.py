"""Which replica gets a request: a pure decision over what each replica has to do.

Without a reason to prefer one, the replica with the least expected work gets it. A *key* is a reason: requests of one
session, or with one prefix, find their keys and values where they were computed. Each key ranks all replicas by a hash
of its own (rendezvous hashing: Thaler and Ravishankar, 1998), so that a replica that joins or leaves moves only the
keys that rank it first. The first in that order wins unless it has ``margin`` more to do than the least busy one: then
the next, and so on (Mirrokni, Thorup and Zadimoghaddam, Consistent Hashing with Bounded Loads, 2016).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_READING_COST = 0.1  # of a prompt's token: many are read in the time in which one is sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """The input of the router: ``work`` is what a replica has to do still, in expected tokens or in rows not answered.

    It is not ``serving`` while it is fenced, draining or gone.
    """

    name: str
    work: float
    serving: bool = True
    weight_version: int = 0


def choose(
    replicas: Iterable[ReplicaLoad], *, key: str | None = None, margin: float = 0.0, min_version: int = 0
) -> str | None:
    """Return the name of the replica that a request goes to; None if no replica can take it now.

    Among replicas with equal work, the one with the newest weights is chosen, then the first by name.

        >>> loads = [ReplicaLoad(name="a", work=10), ReplicaLoad(name="b", work=7)]
        >>> choose(loads), rendezvous("session 7", ["a", "b"])
        ('b', ['a', 'b'])
        >>> choose(loads, key="session 7", margin=3), choose(loads, key="session 7", margin=2)
        ('a', 'b')

    Only replicas of ``min_version`` or newer weights qualify: the versions of one request's tokens never fall.
    """
    able = [load for load in replicas if load.serving and load.weight_version >= min_version]
    if not able:
        return None
    if key is None:
        return min(able, key=lambda load: (load.work, -load.weight_version, load.name)).name
    least = min(load.work for load in able)
    near = {load.name for load in able if load.work <= least + margin}
    return rendezvous(key, sorted(near))[0]


def rendezvous(key: str, names: Sequence[str]) -> list[str]:
    """Return the names in the order in which ``key`` prefers them, which depends on nothing else."""
    return sorted(names, key=lambda name: (hashlib.blake2b(f"{name}\0{key}".encode(), digest_size=8).digest(), name))


def session_margin(prompt_tokens: int, *, least: float) -> float:
    """Return the margin of a session whose prompt is in the cache where it was: the work of reading it elsewhere.

    It is at least ``least``.

    >>> session_margin(50_000, least=2048.0), session_margin(400, least=2048.0)
    (5000.0, 2048.0)
    """
    return max(least, prompt_tokens * _READING_COST)


def affinity_key(prompt_token_ids: Sequence[int], *, session: str | None = None, prefix_tokens: int = 0) -> str | None:
    """Return the session, or else the prompt's first ``prefix_tokens`` ids if it has as many; 0 switches these off."""
    if session is not None:
        return f"session {session}"
    if 0 < prefix_tokens <= len(prompt_token_ids):
        return f"prefix {array('q', prompt_token_ids[:prefix_tokens]).tobytes().hex()}"
    return None


class LengthEstimate:
    """How many tokens requests turn out to have: a moving average over those that ended by themselves.

    ``memory``, 1 or more, is the weight of the past against each new length, in requests.

        >>> lengths = LengthEstimate(memory=2.0)
        >>> for tokens in (20, 40, 40):
        ...     lengths.observe(tokens)  # 20, then 30, then 35 on average
        >>> lengths.work(prompt=0, sampled=5, limit=100)
        30.0
    """

    def __init__(self, *, memory: float = 64.0) -> None:
        self._memory = memory
        self._seen = 0
        self._mean = 0.0

    def observe(self, tokens: int) -> None:
        self._seen += 1
        self._mean += (tokens - self._mean) / min(self._seen, self._memory)

    def work(self, *, prompt: int, sampled: int, limit: int) -> float:
        """Return the expected work of a request, in sampled tokens: to read its prompt, and to sample what is left.

        Reading a token of the prompt is a tenth of the work of sampling one. A request that has exceeded the average is
        expected to go on for half of it again, and never past its limit.
        """
        left: float = limit - sampled
        if self._seen:
            left = min(left, max(self._mean - sampled, self._mean / 2))
        return prompt * _READING_COST + max(left, 0.0)
