"""Which replica gets the next group: a pure decision over what each replica has in flight."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from asyncrl.errors import ResourceError

__all__ = ["ReplicaLoad", "least_expected_work"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """What the router knows of a replica.

    Attributes:
        name: the replica's name.
        rows: rollouts sent to it and not answered yet.
        weight: its speed relative to the others (1.0 for equal replicas).
        serving: False while it is fenced, draining or gone.
    """

    name: str
    rows: int
    weight: float = 1.0
    serving: bool = True


def least_expected_work(replicas: Iterable[ReplicaLoad]) -> str:
    """Name of the serving replica with the least work per speed; the first by name among equals.

    Raises:
        ResourceError: no replica serves.
    """
    serving = sorted((load.rows / load.weight, load.name) for load in replicas if load.serving)
    if not serving:
        raise ResourceError("no rollout replica serves: every one is fenced, draining or gone")
    return serving[0][1]
