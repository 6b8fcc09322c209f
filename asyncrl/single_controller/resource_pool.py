"""ResourcePool: how many workers there are and on how many nodes, and whether a cluster has room for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from asyncrl.errors import ResourceError

__all__ = ["NodeResources", "PlacementStrategy", "ResourcePool", "check_room"]

PlacementStrategy: TypeAlias = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


class ResourcePool:
    """``process_on_nodes[i]`` workers in the i-th place of the pool.

    ``max_colocate_count`` worker groups may share the pool, each with a worker on every seat.

        >>> pool = ResourcePool([2, 3])
        >>> pool.world_size
        5
        >>> pool.local_rank_list()
        [0, 1, 0, 1, 2]

    Raises:
        ResourceError: a place without workers, or ``max_colocate_count`` below 1.
    """

    def __init__(self, process_on_nodes: Sequence[int] | None = None, max_colocate_count: int = 1) -> None:
        if max_colocate_count < 1:
            raise ResourceError(f"max_colocate_count must be at least 1, got {max_colocate_count}")
        self.max_colocate_count = max_colocate_count
        self._store = list(process_on_nodes or ())
        if any(count < 1 for count in self._store):
            raise ResourceError(f"process_on_nodes needs at least one worker in each place, got {self._store}")

    def add_node(self, process_count: int) -> None:
        """One more place, with ``process_count`` workers.

            >>> pool = ResourcePool([2])
            >>> pool.add_node(3)
            >>> pool.process_on_nodes
            (2, 3)

        Raises:
            ResourceError: ``process_count`` is below 1.
        """
        if process_count < 1:
            raise ResourceError(f"a place needs at least one worker, got {process_count}")
        self._store.append(process_count)

    @property
    def process_on_nodes(self) -> tuple[int, ...]:
        """Workers in each place.

        >>> ResourcePool([2, 3]).process_on_nodes
        (2, 3)
        """
        return tuple(self._store)

    @property
    def world_size(self) -> int:
        """Workers in total.

        >>> ResourcePool([2, 3]).world_size
        5
        """
        return sum(self._store)

    @property
    def store(self) -> list[int]:
        """``process_on_nodes``, under verl's name.

        >>> ResourcePool([2, 3]).store
        [2, 3]
        """
        return list(self._store)

    def __call__(self) -> list[int]:
        """:attr:`store`."""
        return self.store

    def local_world_size_list(self) -> list[int]:
        """For each worker, the workers of its place.

        >>> ResourcePool([2, 3]).local_world_size_list()
        [2, 2, 3, 3, 3]
        """
        return [count for count in self._store for _ in range(count)]

    def local_rank_list(self) -> list[int]:
        """For each worker, its number in its place.

        >>> ResourcePool([2, 3]).local_rank_list()
        [0, 1, 0, 1, 2]
        """
        return [number for count in self._store for number in range(count)]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.process_on_nodes)})"


@dataclass(frozen=True, slots=True)
class NodeResources:
    """What one node has in all, and what nobody uses at the moment (``CPU``, ``GPU``, custom resources)."""

    name: str
    total: Mapping[str, float]
    available: Mapping[str, float]


def check_room(
    places: Sequence[Sequence[Mapping[str, float]]], strategy: PlacementStrategy, nodes: Sequence[NodeResources]
) -> None:
    """Raise unless the nodes could hold the bundles of all places if nothing else ran on them.

    What others use at the moment may become free: that is waited for, with a deadline, when the bundles are placed.

    Raises:
        ResourceError: showing what was asked for and what there is, in total and for each node.
    """
    free = [dict(node.total) for node in nodes]
    for number, bundles in enumerate(places):
        taken = _place(bundles, strategy, free)
        if taken is None:
            raise ResourceError(
                f"no room for place {number} ({strategy}, {len(bundles)} bundles, {_table(_sum(bundles))})\n"
                + describe(places, nodes)
            )


def describe(places: Sequence[Sequence[Mapping[str, float]]], nodes: Sequence[NodeResources]) -> str:
    """What is asked for and what there is, in total and for each node."""
    everything = [bundle for bundles in places for bundle in bundles]
    lines = [
        f"asked for: {_table(_sum(everything))}",
        (
            f"in total:  {_table(_sum([node.total for node in nodes]))}, "
            f"free now: {_table(_sum([node.available for node in nodes]))}"
        ),
    ]
    lines += [f"node {node.name}: {_table(node.total)}, free now: {_table(node.available)}" for node in nodes]
    return "\n".join(lines)


def _place(
    bundles: Sequence[Mapping[str, float]], strategy: PlacementStrategy, free: list[dict[str, float]]
) -> list[int] | None:
    """Take the bundles out of ``free``; the node of each, or None where they do not fit."""
    if strategy == "STRICT_PACK":
        whole = _sum(bundles)
        for number, node in enumerate(free):
            if _fits(whole, node):
                _subtract(whole, node)
                return [number] * len(bundles)
        return None
    chosen: list[int] = []
    for bundle in bundles:
        candidates = [
            number
            for number, node in enumerate(free)
            if _fits(bundle, node) and not (strategy == "STRICT_SPREAD" and number in chosen)
        ]
        if not candidates:
            return None
        chosen.append(candidates[0])
        _subtract(bundle, free[candidates[0]])
    return chosen


def _fits(bundle: Mapping[str, float], node: Mapping[str, float]) -> bool:
    return all(amount <= node.get(name, 0.0) + 1e-6 for name, amount in bundle.items())


def _subtract(bundle: Mapping[str, float], node: dict[str, float]) -> None:
    for name, amount in bundle.items():
        node[name] = node.get(name, 0.0) - amount


def _sum(bundles: Sequence[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def _table(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items() if amount) or "nothing"
