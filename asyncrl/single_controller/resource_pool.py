"""ResourcePool: how many workers there are on how many nodes; and ResourcePoolManager: which role uses which pool."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from asyncrl.errors import ConfigError, ResourceError

if TYPE_CHECKING:
    from asyncrl.single_controller.ray.resource_pool import RayResourcePool


PlacementStrategy: TypeAlias = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


class ResourcePool:
    """``process_on_nodes[i]`` workers on node i, for up to ``max_colocate_count`` worker groups of ``world_size`` each.

        >>> pool = ResourcePool([2, 3])
        >>> pool.world_size, pool.local_rank_list(), pool.local_world_size_list()
        (5, [0, 1, 0, 1, 2], [2, 2, 3, 3, 3])

    Raises:
        ResourceError: an entry of ``process_on_nodes`` or ``max_colocate_count`` is below 1.
    """

    def __init__(self, process_on_nodes: Sequence[int] | None = None, max_colocate_count: int = 1) -> None:
        if max_colocate_count < 1:
            raise ResourceError(f"max_colocate_count must be at least 1, got {max_colocate_count}")
        self.max_colocate_count = max_colocate_count
        self._store = list(process_on_nodes or ())
        if any(count < 1 for count in self._store):
            raise ResourceError(f"process_on_nodes needs at least one worker on each node, got {self._store}")

    def add_node(self, process_count: int) -> None:
        """Add a node with ``process_count`` workers.

        Raises:
            ResourceError: ``process_count`` is below 1.
        """
        if process_count < 1:
            raise ResourceError(f"a node needs at least one worker, got {process_count}")
        self._store.append(process_count)

    @property
    def process_on_nodes(self) -> tuple[int, ...]:
        return tuple(self._store)

    @property
    def world_size(self) -> int:
        return sum(self.process_on_nodes)

    @property
    def store(self) -> list[int]:
        """``process_on_nodes``, under verl's name."""
        return list(self.process_on_nodes)

    def __call__(self) -> list[int]:
        return self.store

    def local_world_size_list(self) -> list[int]:
        """Return for each worker the number of workers on its node."""
        return [count for count in self.process_on_nodes for _ in range(count)]

    def local_rank_list(self) -> list[int]:
        """Return for each worker its rank on its node."""
        return [rank for count in self.process_on_nodes for rank in range(count)]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.process_on_nodes)})"


@dataclass(frozen=True, slots=True)
class NodeResources:
    """The resources of one node, all and unused ones (``CPU``, ``GPU``, custom resources)."""

    name: str
    total: Mapping[str, float]
    available: Mapping[str, float]


Bundles: TypeAlias = Sequence[Mapping[str, float]]
"""The bundles of one placement group."""


def check_capacity(groups: Sequence[Bundles], strategy: PlacementStrategy, nodes: Sequence[NodeResources]) -> None:
    """Raise :class:`ResourceError` if the nodes cannot hold the bundles of all groups, even with nothing else on them.

    Only what is certain is refused: bundles that need more than all nodes with a resource have together, or more of
    one kind, or of larger ones, than there is room for. Resources that others use may become free: placing the groups
    waits for them, with a deadline.
    """
    apart = strategy == "STRICT_SPREAD"
    counts: Counter[tuple[tuple[str, float], ...]] = Counter()
    for number, bundles in enumerate(groups):
        units = [_sum(bundles)] if strategy == "STRICT_PACK" else bundles
        counts.update(tuple(sorted(unit.items())) for unit in units)
        most = number + 1 if apart else math.inf  # of a node: one of each group
        fits = all(
            sum(min(_room(unit, node.total), most) for node in nodes)
            >= sum(count for other, count in counts.items() if _room(unit, dict(other)) >= 1)
            for unit in map(dict, counts)
        )
        for name in {name for unit in counts for name, amount in unit if amount}:
            having = _sum([node.total for node in nodes if node.total.get(name)])
            needing = _sum([dict(unit) for unit in counts.elements() if dict(unit).get(name)])
            fits &= _room(needing, having) >= 1
        if apart:
            fits &= sum(any(_room(unit, node.total) >= 1 for unit in units) for node in nodes) >= len(units)
        if not fits:
            raise ResourceError(
                f"placement group {number} does not fit ({strategy}, {len(bundles)} bundles, {table(_sum(bundles))})\n"
                + describe(groups, nodes)
            )


def describe(groups: Sequence[Bundles], nodes: Sequence[NodeResources]) -> str:
    """Describe the requested and the existing resources, in total and by node."""
    total, available = _sum([node.total for node in nodes]), _sum([node.available for node in nodes])
    lines = [
        f"requested: {table(_sum([bundle for bundles in groups for bundle in bundles]))}",
        f"in total:  {table(total)}, available now: {table(available)}",
        *(f"node {node.name}: {table(node.total)}, available now: {table(node.available)}" for node in nodes),
    ]
    return "\n".join(lines)


def _room(bundle: Mapping[str, float], resources: Mapping[str, float]) -> float:
    """Return how many such bundles these resources hold."""
    rooms = [(resources.get(name, 0.0) + 1e-6) // amount for name, amount in bundle.items() if amount]
    return min(rooms, default=math.inf)


def _sum(bundles: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for bundle in bundles for name in bundle)
    return {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in names}


def table(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items() if amount) or "nothing"


class Role(Enum):
    """The parts of a training run. ``str(role)`` is its short name, as in configurations.

    >>> str(Role.RefPolicy), Role.from_string("rm")
    ('ref', <Role.RewardModel: 'rm'>)
    """

    Actor = "actor"
    Rollout = "rollout"
    ActorRollout = "actor_rollout"
    Critic = "critic"
    RefPolicy = "ref"
    RewardModel = "rm"
    ActorRolloutRef = "actor_rollout_ref"
    Env = "env"

    def __str__(self) -> str:
        return self.value

    @classmethod
    def from_string(cls, name: str) -> Role:
        """Return the role with this short name.

        Raises:
            ConfigError: no role has this name.
        """
        try:
            return cls(name.lower())
        except ValueError:
            known = [role.value for role in cls]
            raise ConfigError(f"no role is named {name!r}", remedy=f"one of {known}") from None


class ResourcePoolManager:
    """The pools of a run on a Ray cluster, which are checked together before anything starts.

        >>> manager = ResourcePoolManager(
        ...     {"training": [1, 1], "generation": [1]},
        ...     {Role.Actor: "training", Role.Critic: "training", Role.Rollout: "generation"},
        ... )
        >>> manager.create_resource_pool()  # after ray.init()
        >>> manager.get_resource_pool(Role.Actor).max_colocate_count
        2

    Args:
        resource_pool_spec: by the pool's name, the workers in each of its placement groups.
        mapping: the pool of each role (a :class:`Role`, or any other name).
        max_colocate_count: worker groups that may share a pool. Default: the number of roles in it. Roles that share
            processes (``create_colocated_worker_cls``) are one group.
        use_gpu, cpus_per_worker, gpus_per_worker, resources_per_worker, strategy, placement_timeout_s: of every pool,
            as for :class:`RayResourcePool`.

    Raises:
        ResourceError: ``mapping`` names a pool that is not in ``resource_pool_spec``.
    """

    def __init__(
        self,
        resource_pool_spec: Mapping[str, Sequence[int]],
        mapping: Mapping[Any, str],  # keys are hashable; a Mapping[Hashable, str] would refuse dict[Role, str]
        *,
        use_gpu: bool = False,
        cpus_per_worker: float = 1.0,
        gpus_per_worker: float | None = None,
        resources_per_worker: Mapping[str, float] | None = None,
        max_colocate_count: int | None = None,
        strategy: PlacementStrategy = "PACK",
        placement_timeout_s: float = 60.0,
    ) -> None:
        self.resource_pool_spec = {name: tuple(counts) for name, counts in resource_pool_spec.items()}
        self.mapping = dict(mapping)
        for role, pool in self.mapping.items():
            if pool not in self.resource_pool_spec:
                raise ResourceError(
                    f"role {role} is mapped to pool {pool!r}, "
                    f"and resource_pool_spec has {list(self.resource_pool_spec)}"
                )
        self.resource_pool_dict: dict[str, RayResourcePool] = {}
        self._gpus_per_worker = float(use_gpu) if gpus_per_worker is None else gpus_per_worker
        self._max_colocate_count = max_colocate_count
        self._strategy: PlacementStrategy = strategy
        self._options: dict[str, Any] = {
            "gpus_per_worker": self._gpus_per_worker,
            "cpus_per_worker": cpus_per_worker,
            "resources_per_worker": resources_per_worker,
            "strategy": strategy,
            "placement_timeout_s": placement_timeout_s,
        }

    def create_resource_pool(self) -> None:
        """Check that the cluster can hold all pools together, and create them. They take no resources until used.

        Raises:
            ResourceError: Ray is not initialised, or the cluster could not hold the pools if nothing else ran on it.
        """
        from asyncrl.single_controller.ray.resource_pool import RayResourcePool, check_together

        groups = Counter(self.mapping.values())
        pools = {
            name: RayResourcePool(
                counts,
                name_prefix=name,
                max_colocate_count=self._max_colocate_count or groups[name] or 1,
                **self._options,
            )
            for name, counts in self.resource_pool_spec.items()
        }
        check_together(pools, strategy=self._strategy)
        self.resource_pool_dict = pools

    def get_resource_pool(self, role: Hashable) -> RayResourcePool:
        """Return the pool of a role.

        Raises:
            ResourceError: the role is not in ``mapping``, or the pools are not created yet.
        """
        if role not in self.mapping:
            raise ResourceError(f"role {role} has no pool: mapping has {[str(each) for each in self.mapping]}")
        if not self.resource_pool_dict:
            raise ResourceError("the pools are not created yet: call create_resource_pool() first")
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> float:
        """Return the number of GPUs of all pools together."""
        return self._gpus_per_worker * sum(sum(counts) for counts in self.resource_pool_spec.values())

    def __repr__(self) -> str:
        pools = {name: list(counts) for name, counts in self.resource_pool_spec.items()}
        return f"ResourcePoolManager({pools}, { ({str(role): pool for role, pool in self.mapping.items()}) })"
