"""ResourcePoolManager: which pools a run has, and which role lives in which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from asyncrl.errors import ResourceError
from asyncrl.single_controller.resource_pool import PlacementStrategy, check_room

if TYPE_CHECKING:
    from asyncrl.single_controller.ray_resource_pool import RayResourcePool

__all__ = ["ResourcePoolManager"]


class ResourcePoolManager:
    """The pools of a run on a Ray cluster, checked together before anything starts.

        >>> manager = ResourcePoolManager(
        ...     {"training": [1, 1], "generation": [1]},
        ...     {Role.Actor: "training", Role.Critic: "training", Role.Rollout: "generation"},
        ... )
        >>> manager.create_resource_pool()  # after ray.init()
        >>> manager.get_resource_pool(Role.Actor).max_colocate_count
        2

    Args:
        resource_pool_spec: by the pool's name, the workers in each of its placement groups.
        mapping: the pool of each role (a :class:`Role`, or any name of one's own).
        use_gpu, cpus_per_worker, gpus_per_worker, resources_per_worker: of one seat of every pool, see
            :class:`RayResourcePool`.
        max_colocate_count: worker groups that may share a pool. Default: as many as there are roles in it. Roles that
            share processes (``create_colocated_worker_cls``) are one group.
        strategy: how the seats of a placement group lie over the nodes.
        placement_timeout_s: how long to wait for resources that others use.

    Raises:
        ResourceError: a role is in a pool that is not specified.
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
        self._use_gpu = use_gpu
        self._cpus_per_worker = cpus_per_worker
        self._gpus_per_worker = float(use_gpu) if gpus_per_worker is None else gpus_per_worker
        self._resources_per_worker = resources_per_worker
        self._max_colocate_count = max_colocate_count
        self._strategy: PlacementStrategy = strategy
        self._placement_timeout_s = placement_timeout_s

    def create_resource_pool(self) -> None:
        """Make the pools, once the cluster is known to be able to hold all of them. They take nothing until used.

            >>> manager = ResourcePoolManager({"all": [1]}, {Role.Actor: "all"}, use_gpu=True)
            >>> manager.create_resource_pool()  # no node here has a GPU  # doctest: +ELLIPSIS
            Traceback (most recent call last):
            asyncrl.errors.ResourceError: the cluster cannot hold the 1 pools together: ...

        Raises:
            ResourceError: Ray is not initialised, or the cluster could not hold the pools even with nothing else on it:
                in total, or because no node has room for a seat or a placement group. The message shows what each pool
                asks for and what each node has.
        """
        from asyncrl.single_controller.ray_resource_pool import RayResourcePool, cluster_nodes

        nodes = cluster_nodes()
        groups = Counter(self.mapping.values())
        pools = {
            name: RayResourcePool(
                counts,
                use_gpu=self._use_gpu,
                name_prefix=name,
                max_colocate_count=self._max_colocate_count or groups[name] or 1,
                cpus_per_worker=self._cpus_per_worker,
                gpus_per_worker=self._gpus_per_worker,
                resources_per_worker=self._resources_per_worker,
                strategy=self._strategy,
                placement_timeout_s=self._placement_timeout_s,
            )
            for name, counts in self.resource_pool_spec.items()
        }
        places = [place for pool in pools.values() for place in pool.places()]
        try:
            check_room(places, self._strategy, nodes)
        except ResourceError as error:
            lines = [f"the cluster cannot hold the {len(pools)} pools together: {error}"]
            for name, pool in pools.items():
                seat = ", ".join(f"{amount:g} {resource}" for resource, amount in pool.bundle().items())
                shared = f", for {pool.max_colocate_count} groups" if pool.max_colocate_count > 1 else ""
                lines.append(f"pool {name}: {list(pool.process_on_nodes)} seats of {seat}{shared}")
            raise ResourceError("\n".join(lines)) from error
        self.resource_pool_dict = pools

    def get_resource_pool(self, role: Hashable) -> RayResourcePool:
        """The pool of a role.

            >>> manager = ResourcePoolManager({"all": [2]}, {Role.Actor: "all"})
            >>> manager.create_resource_pool()
            >>> manager.get_resource_pool(Role.Actor)
            RayResourcePool([2])

        Raises:
            ResourceError: the role has none, or the pools are not made yet.
        """
        if role not in self.mapping:
            raise ResourceError(f"role {role} has no pool: mapping has {[str(each) for each in self.mapping]}")
        if not self.resource_pool_dict:
            raise ResourceError("the pools are not made yet: call create_resource_pool() first")
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> float:
        """GPUs of all pools together.

        >>> ResourcePoolManager({"training": [8, 8], "generation": [8]}, {}, use_gpu=True).get_n_gpus()
        24.0
        """
        return self._gpus_per_worker * sum(sum(counts) for counts in self.resource_pool_spec.values())

    def __repr__(self) -> str:
        pools = {name: list(counts) for name, counts in self.resource_pool_spec.items()}
        return f"ResourcePoolManager({pools}, { ({str(role): pool for role, pool in self.mapping.items()}) })"
