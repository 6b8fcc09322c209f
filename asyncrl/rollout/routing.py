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

from asyncrl.errors import ResourceError

__all__ = ["LengthEstimate", "ReplicaLoad", "affinity_key", "choose", "least_expected_work", "rendezvous"]

_READING_COST = 0.1  # of a prompt's token: many are read in the time in which one is sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """What the router knows of a replica.

        >>> choose([ReplicaLoad(name="slow", rows=4), ReplicaLoad(name="fast", rows=6, weight=2.0)])
        'fast'

    Attributes:
        name: the replica's name.
        rows: what it has to do still: expected tokens, or rollouts not answered.
        weight: its speed relative to the others, above 0 (1.0 for equal replicas).
        serving: False while it is fenced, draining or gone.
        weight_version: version it samples under.
    """

    name: str
    rows: float
    weight: float = 1.0
    serving: bool = True
    weight_version: int = 0

    @property
    def wait(self) -> float:
        """Work per speed, in the unit of ``rows``.

        >>> ReplicaLoad(name="fast", rows=6, weight=2.0).wait
        3.0
        """
        return self.rows / self.weight


def choose(
    replicas: Iterable[ReplicaLoad], *, key: str | None = None, margin: float = 0.0, min_version: int = 0
) -> str | None:
    """Name of the replica that a request goes to; None if there is none at the moment.

        >>> loads = [ReplicaLoad(name="a", rows=10), ReplicaLoad(name="b", rows=7)]
        >>> choose(loads), rendezvous("session 7", ["a", "b"])
        ('b', ['a', 'b'])
        >>> choose(loads, key="session 7", margin=3), choose(loads, key="session 7", margin=2)
        ('a', 'b')
        >>> choose(loads, min_version=1) is None  # they sample under version 0
        True

    Args:
        replicas: all of them, in any order.
        key: what makes one replica better than another for this request; see :func:`affinity_key`.
        margin: how much more than the least busy one the preferred replica may have to do, in units of
            :attr:`ReplicaLoad.wait`.
        min_version: only replicas that sample under this version or a newer one: the versions of one request's tokens
            never fall.
    """
    able = [load for load in replicas if load.serving and load.weight_version >= min_version]
    if not able:
        return None
    least = min(load.wait for load in able)
    if key is None:
        return min(
            (load for load in able if load.wait == least), key=lambda load: (-load.weight_version, load.name)
        ).name
    near = {load.name for load in able if load.wait <= least + margin}
    return rendezvous(key, sorted(near))[0]


def rendezvous(key: str, names: Sequence[str]) -> list[str]:
    """The names in the order in which ``key`` prefers them. The same everywhere: it depends on nothing else.

    >>> rendezvous("session 7", ["a", "b", "c"])
    ['a', 'c', 'b']
    >>> rendezvous("session 7", ["b", "c"])  # a is gone: what it had goes to c, and the others keep their order
    ['c', 'b']
    """
    return sorted(names, key=lambda name: (hashlib.blake2b(f"{name}\0{key}".encode(), digest_size=8).digest(), name))


def affinity_key(prompt_token_ids: Sequence[int], *, session: str | None = None, prefix_tokens: int = 0) -> str | None:
    """The session, or else the prompt's first ``prefix_tokens`` ids if it has as many; 0 switches these off.

    >>> affinity_key([5, 6, 7], session="ann", prefix_tokens=2)
    'session ann'
    >>> affinity_key([5, 6, 7], prefix_tokens=2) == affinity_key([5, 6, 8, 9], prefix_tokens=2)
    True
    >>> affinity_key([5], prefix_tokens=2) is None
    True
    """
    if session is not None:
        return f"session {session}"
    if 0 < prefix_tokens <= len(prompt_token_ids):
        return f"prefix {array('q', prompt_token_ids[:prefix_tokens]).tobytes().hex()}"
    return None


def least_expected_work(replicas: Iterable[ReplicaLoad]) -> str:
    """Name of the serving replica with the least work per speed.

    Among equals the one with the newest weights, and then the first by name.

        >>> least_expected_work([ReplicaLoad(name="b", rows=1), ReplicaLoad(name="a", rows=1)])
        'a'
        >>> least_expected_work([ReplicaLoad(name="a", rows=0, serving=False)])
        Traceback (most recent call last):
        asyncrl.errors.ResourceError: no rollout replica serves: every one is fenced, draining or gone

    Raises:
        ResourceError: no replica serves.
    """
    name = choose(replicas)
    if name is None:
        raise ResourceError("no rollout replica serves: every one is fenced, draining or gone")
    return name


class LengthEstimate:
    """How many tokens requests turn out to have: a moving average over those that ended by themselves.

        >>> lengths = LengthEstimate(memory=2.0)
        >>> for tokens in (20, 40, 40):
        ...     lengths.observe(tokens)  # 20, then 30, then 35 on average
        >>> lengths.work(prompt=0, sampled=5, limit=100)
        30.0

    Args:
        memory: weight of the past against each new length, in requests: 1 or more.
    """

    def __init__(self, *, memory: float = 64.0) -> None:
        self._memory = memory
        self._seen = 0
        self._mean = 0.0

    def observe(self, tokens: int) -> None:
        """A request ended after ``tokens`` tokens.

        >>> lengths = LengthEstimate()
        >>> lengths.observe(20)
        >>> lengths.observe(40)
        >>> lengths.work(prompt=0, sampled=0, limit=100)
        30.0
        """
        self._seen += 1
        self._mean += (tokens - self._mean) / min(self._seen, self._memory)

    def work(self, *, prompt: int, sampled: int, limit: int) -> float:
        """Expected work of a request, in sampled tokens: its prompt to be read, and what it will probably sample still.

        To read a token of the prompt is a tenth of the work of sampling one. A request that has outlived the average is
        expected to go on for half of it again, and never past its limit.

        >>> lengths = LengthEstimate()
        >>> lengths.work(prompt=10, sampled=0, limit=100)  # nothing ended yet: it may use up its limit
        101.0
        >>> lengths.observe(40)
        >>> [lengths.work(prompt=0, sampled=sampled, limit=100) for sampled in (0, 30, 60, 95)]
        [40.0, 20.0, 20.0, 5.0]
        """
        left: float = limit - sampled
        if self._seen:
            left = min(left, max(self._mean - sampled, self._mean / 2))
        return prompt * _READING_COST + max(left, 0.0)
