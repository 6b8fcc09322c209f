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

    Attributes:
        name: the replica's name.
        rows: what it has to do still: expected tokens, or rollouts not answered.
        weight: its speed relative to the others (1.0 for equal replicas).
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
        """Work per speed."""
        return self.rows / self.weight


def choose(
    replicas: Iterable[ReplicaLoad], *, key: str | None = None, margin: float = 0.0, min_version: int = 0
) -> str | None:
    """Name of the replica that a request goes to; None if there is none at the moment.

    Args:
        replicas: all of them, in any order.
        key: what makes one replica better than another for this request; see :func:`affinity_key`.
        margin: how much more than the least busy one the preferred replica may have to do.
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
    """The names in the order in which ``key`` prefers them."""
    return sorted(names, key=lambda name: (hashlib.blake2b(f"{name}\0{key}".encode(), digest_size=8).digest(), name))


def affinity_key(prompt_token_ids: Sequence[int], *, session: str | None = None, prefix_tokens: int = 0) -> str | None:
    """The session, or else the prompt's first ``prefix_tokens`` ids if it has as many; 0 switches these off."""
    if session is not None:
        return f"session {session}"
    if 0 < prefix_tokens <= len(prompt_token_ids):
        return f"prefix {array('q', prompt_token_ids[:prefix_tokens]).tobytes().hex()}"
    return None


def least_expected_work(replicas: Iterable[ReplicaLoad]) -> str:
    """Name of the serving replica with the least work per speed; the first by name among equals.

    Raises:
        ResourceError: no replica serves.
    """
    name = choose(replicas)
    if name is None:
        raise ResourceError("no rollout replica serves: every one is fenced, draining or gone")
    return name


class LengthEstimate:
    """How many tokens requests turn out to have: a moving average over those that ended by themselves.

    Args:
        memory: weight of the past against each new length, in requests.
    """

    def __init__(self, *, memory: float = 64.0) -> None:
        self._memory = memory
        self._seen = 0
        self._mean = 0.0

    def observe(self, tokens: int) -> None:
        """A request ended after ``tokens`` tokens."""
        self._seen += 1
        self._mean += (tokens - self._mean) / min(self._seen, self._memory)

    def work(self, *, prompt: int, sampled: int, limit: int) -> float:
        """Expected work of a request: its prompt to be read, and what it will probably sample still.

        One that has outlived the average is expected to go on for half of it again, and never past its limit.
        """
        left: float = limit - sampled
        if self._seen:
            left = min(left, max(self._mean - sampled, self._mean / 2))
        return prompt * _READING_COST + max(left, 0.0)
