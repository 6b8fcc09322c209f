"""RayResourcePool: resources for workers on a Ray cluster, as bundles of placement groups."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from asyncrl.errors import ResourceError
from asyncrl.single_controller.resource_pool import (
    NodeResources,
    PlacementStrategy,
    ResourcePool,
    check_capacity,
    describe,
    table,
)

# Ray leaves the types of handles, references and placement groups partly unknown.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownLambdaType=false, reportPrivateUsage=false
# ruff: noqa: SLF001  a sub-pool uses the private methods of its pools

EMPTY_BUNDLE = {"memory": 1.0}
"""One byte: the bundle of a worker without resources, since Ray places no empty ones. Every node has it."""

ACCELERATOR_FRACTION = 1e-4
"""Amount of an accelerator type in a bundle: enough to be placed on such a node, and never used up."""

PLACED_WITHIN_S = 1
"""A placement group that fits the cluster is placed within this time."""


@dataclass(frozen=True, slots=True)
class Placement:
    group: PlacementGroup
    bundle_index: int


class RayResourcePool(ResourcePool):
    """Bundles for workers on a Ray cluster: a placement group for each entry of ``process_on_nodes``.

    The placement groups are created when the first worker group needs them and removed with the last one. Ranks are
    assigned in the order of the nodes' addresses, so that they find their files again in the next run.

        >>> pool = RayResourcePool([4, 4], use_gpu=True, max_colocate_count=2)
        >>> pool.bundle()  # of one worker of each group: a CPU each, and one shared GPU
        {'CPU': 2.0, 'GPU': 1.0}

    Args:
        use_gpu: one GPU for each bundle, unless ``gpus_per_worker`` is given.
        resources_per_worker: custom resources of one worker.
        max_colocate_count: worker groups that may share the bundles; each worker gets this share of its bundle's GPUs.
        accelerator_type: custom resource that marks the nodes of a kind; every bundle takes a small amount of it.
        strategy: how the bundles of a placement group are distributed over the nodes; ``STRICT_PACK``: on one node.
        name_prefix: of the names of the placement groups.
        placement_timeout_s: how long to wait for resources that others use.
        detached: the placement groups outlive the program, for detached worker groups.

    Raises:
        ResourceError: an entry below 1, or ``max_colocate_count`` below 1.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int] | None = None,
        use_gpu: bool = False,
        name_prefix: str | None = None,
        max_colocate_count: int = 1,
        *,
        cpus_per_worker: float = 1.0,
        gpus_per_worker: float | None = None,
        resources_per_worker: Mapping[str, float] | None = None,
        accelerator_type: str | None = None,
        strategy: PlacementStrategy = "PACK",
        placement_timeout_s: float = 60.0,
        detached: bool = False,
    ) -> None:
        super().__init__(process_on_nodes, max_colocate_count=max_colocate_count)
        self.cpus_per_worker = cpus_per_worker
        self.gpus_per_worker = float(use_gpu) if gpus_per_worker is None else gpus_per_worker
        self.resources_per_worker = dict(resources_per_worker or {})
        self.accelerator_type = accelerator_type
        self.strategy: PlacementStrategy = strategy
        self.name_prefix = name_prefix or ""
        self.placement_timeout_s = placement_timeout_s
        self.detached = detached
        self._lock = threading.Lock()
        self._groups: list[PlacementGroup] = []
        self._users: list[int] = []
        self._placed: list[Placement] = []
        """By rank, fixed when the groups were first seen placed: Ray moves a group whose node dies."""
        self._kept = False

    @property
    def use_gpu(self) -> bool:
        return self.gpus_per_worker > 0

    def add_node(self, process_count: int) -> None:
        """Add a placement group with ``process_count`` workers.

        Raises:
            ResourceError: the placement groups exist already, or ``process_count`` is below 1.
        """
        if self._groups:
            raise ResourceError(f"{self!r} is in use: add nodes before the first worker group is made")
        super().add_node(process_count)

    def bundle(self) -> dict[str, float]:
        shared = {"CPU": self.cpus_per_worker, **self.resources_per_worker}
        whole = {name: amount * self.max_colocate_count for name, amount in shared.items()}
        if self.accelerator_type is not None:
            whole[self.accelerator_type] = ACCELERATOR_FRACTION
        return {name: amount for name, amount in {**whole, "GPU": self.gpus_per_worker}.items() if amount}

    def check(self) -> None:
        """Check that the cluster could hold the pool if nothing else ran on it.

        Raises:
            ResourceError: it could not, or the pool has no workers.
        """
        if not self.process_on_nodes:
            raise ResourceError(f"{self!r} has no workers: process_on_nodes is empty")
        for pool in self._owners():
            check_capacity(pool.bundles(), pool.strategy, cluster_nodes())

    def bundles(self) -> list[list[dict[str, float]]]:
        """Return the bundles of each placement group."""
        return [[self.bundle()] * count for count in self.process_on_nodes]

    def acquire(self) -> list[PlacementGroup]:
        """Return the placement groups, for one more worker group. They may still be pending.

        Raises:
            ResourceError: ``max_colocate_count`` worker groups use one of the bundles already; then none is acquired.
        """
        acquired: list[tuple[RayResourcePool, range]] = []
        groups: dict[int, PlacementGroup] = {}
        try:
            for pool, ranks in self._parts():
                groups.update({id(group): group for group in pool._acquire(ranks)})
                acquired.append((pool, ranks))
        except ResourceError:
            for pool, ranks in acquired:
                pool._release(ranks)
            raise
        return list(groups.values())

    def release(self) -> None:
        """Count a worker group less, and remove the placement groups after the last one."""
        for pool, ranks in self._parts():
            pool._release(ranks)

    def placements(self) -> list[Placement]:
        """Return the bundle of each rank, between :meth:`acquire` and :meth:`release`, once the groups are placed.

        The first time it blocks for some milliseconds if there are several placement groups: it queries the cluster.
        """
        return [each for pool, ranks in self._parts() for each in pool._placements()[ranks.start : ranks.stop]]

    def _placements(self) -> list[Placement]:
        if self._placed:
            return self._placed
        groups = self._groups
        pairs = list(zip(groups, self.process_on_nodes, strict=True))
        if len(pairs) > 1:
            addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
            nodes = {group.id: placement_group_table(group)["bundles_to_node_id"][0] for group, _ in pairs}
            pairs.sort(key=lambda pair: addresses.get(nodes[pair[0].id], ""))
        placed = [Placement(group, index) for group, count in pairs for index in range(count)]
        with self._lock:
            if self._groups is groups:  # not released meanwhile
                self._placed = placed
        return placed

    def get_placement_groups(self) -> list[PlacementGroup]:
        """Wait until the groups are placed, and return them for actors of the program's own; they stay until it ends.

        Raises:
            ResourceError: they could not be placed within ``placement_timeout_s``.
        """
        groups: list[PlacementGroup] = []
        for pool in self._owners():
            pool._kept = True
            groups += pool._acquire(range(0))
        if not all(group.wait(self.placement_timeout_s) for group in groups):
            raise self.placement_timeout_error()
        return groups

    def placement_timeout_error(self) -> ResourceError:
        return ResourceError(
            f"the cluster did not free the resources of {self!r} within {self.placement_timeout_s:g} s\n"
            + describe(self.bundles(), cluster_nodes())
        )

    def _parts(self) -> list[tuple[RayResourcePool, range]]:
        """Return the pools that own the placement groups, with the ranks in those pools."""
        return [(self, range(self.world_size))]

    def _owners(self) -> list[RayResourcePool]:
        return list({id(pool): pool for pool, _ in self._parts()}.values())

    def _acquire(self, ranks: range) -> list[PlacementGroup]:
        with self._lock:
            users = self._users or [0] * self.world_size
            if any(users[rank] >= self.max_colocate_count for rank in ranks):
                raise ResourceError(
                    f"{self!r} is shared by {max(users)} worker groups already, and max_colocate_count is "
                    f"{self.max_colocate_count}: raise it, or shut a group down"
                )
            if not self._groups:
                lifetime = "detached" if self.detached else None
                self._groups = [
                    placement_group(
                        [bundle or EMPTY_BUNDLE for bundle in bundles],
                        strategy=self.strategy,
                        name=self._new_name(),
                        lifetime=lifetime,
                    )
                    for bundles in self.bundles()
                ]
            self._users = [count + (rank in ranks) for rank, count in enumerate(users)]
            return list(self._groups)

    def _release(self, ranks: range) -> None:
        with self._lock:
            self._users = [count - (rank in ranks) for rank, count in enumerate(self._users)]
            free = not any(self._users) and not self._kept
            groups = self._groups if free else []
            if free:
                self._groups, self._placed = [], []
        for group in groups:
            _remove(group)

    def _new_name(self) -> str:
        return f"{self.name_prefix}{uuid.uuid4().hex[:8]}" if self.name_prefix else ""


class SubRayResourcePool(RayResourcePool):
    """Some bundles of other pools, in the same placement groups: made by the two functions below.

    >>> split_resource_pool(RayResourcePool([4]), [1, 3])
    [SubRayResourcePool([1]), SubRayResourcePool([3])]
    """

    def __init__(self, parts: Sequence[tuple[RayResourcePool, range]]) -> None:
        first = parts[0][0]
        super().__init__(
            [],
            name_prefix=first.name_prefix,
            max_colocate_count=first.max_colocate_count,
            cpus_per_worker=first.cpus_per_worker,
            gpus_per_worker=first.gpus_per_worker,
            resources_per_worker=first.resources_per_worker,
            accelerator_type=first.accelerator_type,
            strategy=first.strategy,
            placement_timeout_s=first.placement_timeout_s,
            detached=first.detached,
        )
        self._of = list(parts)

    @property
    def process_on_nodes(self) -> tuple[int, ...]:
        """The workers of this pool in each placement group in which it has any."""
        counts: list[int] = []
        for pool, ranks in self._of:
            start = 0
            for count in pool.process_on_nodes:
                own = len(range(max(start, ranks.start), min(start + count, ranks.stop)))
                counts += [own] if own else []
                start += count
        return tuple(counts)

    def add_node(self, process_count: int) -> None:
        """Refuse: the bundles belong to other pools.

        Raises:
            ResourceError: always.
        """
        raise ResourceError(f"{self!r} consists of bundles of other pools: add nodes to those before it is made")

    def _parts(self) -> list[tuple[RayResourcePool, range]]:
        return self._of


def split_resource_pool(resource_pool: RayResourcePool, split_size: int | Sequence[int]) -> list[SubRayResourcePool]:
    """Split a pool into pools of consecutive bundles, ``split_size`` each or of these sizes. They may be split again.

    The placement groups stay the same: a worker group on the whole pool and others on its parts share them, up to
    ``max_colocate_count``.

        >>> halves = split_resource_pool(RayResourcePool([4, 4]), 4)
        >>> [pool.world_size for pool in split_resource_pool(halves[1], [1, 3])]
        [1, 3]

    Raises:
        ResourceError: the sizes do not sum up to the workers of the pool, or ``split_size`` does not divide them.
    """
    workers = resource_pool.world_size
    if isinstance(split_size, int):
        if split_size < 1 or workers % split_size:
            raise ResourceError(f"{workers} workers of {resource_pool!r} cannot be split into parts of {split_size}")
        sizes = [split_size] * (workers // split_size)
    else:
        sizes = list(split_size)
        if any(size < 1 for size in sizes) or sum(sizes) != workers:
            raise ResourceError(f"parts of {sizes} workers do not sum up to the {workers} of {resource_pool!r}")
    single = [(pool, range(rank, rank + 1)) for pool, ranks in resource_pool._parts() for rank in ranks]
    ends = list(accumulate(sizes))
    return [SubRayResourcePool(_joined(single[start:end])) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def merge_resource_pool(rp1: RayResourcePool, rp2: RayResourcePool) -> RayResourcePool:
    """Make a pool of the bundles of both, those of ``rp1`` first. Groups on it share bundles with groups on either.

        >>> merge_resource_pool(RayResourcePool([2]), RayResourcePool([3, 1])).store
        [2, 3, 1]

    Raises:
        ResourceError: their bundles differ in resources, ``max_colocate_count``, ``strategy`` or ``detached``; or a
            bundle is in both.
    """
    for name, first, second in (
        ("bundle", rp1.bundle(), rp2.bundle()),
        ("max_colocate_count", rp1.max_colocate_count, rp2.max_colocate_count),
        ("strategy", rp1.strategy, rp2.strategy),
        ("detached", rp1.detached, rp2.detached),
    ):
        if first != second:
            raise ResourceError(f"{rp1!r} and {rp2!r} cannot be merged: their {name} are {first} and {second}")
    parts = [*rp1._parts(), *rp2._parts()]
    bundles = [(id(pool), rank) for pool, ranks in parts for rank in ranks]
    if len(set(bundles)) < len(bundles):
        raise ResourceError(f"{rp1!r} and {rp2!r} cannot be merged: some bundles are in both")
    return SubRayResourcePool(_joined(parts))


def _remove(group: PlacementGroup) -> None:
    # Ray loses the resources of a group that is removed while it is being placed (ray-project/ray#64693).
    with contextlib.suppress(Exception):  # Ray raises if the group has been removed elsewhere
        group.wait(PLACED_WITHIN_S)
    remove_placement_group(group)


def any_removed(groups: Iterable[PlacementGroup]) -> bool:
    """Return whether one of these was removed. Ray never places an actor in such a group, without an error. Blocks."""
    distinct = {group.id: group for group in groups}.values()
    return any(placement_group_table(group).get("state", "REMOVED") == "REMOVED" for group in distinct)


def _joined(parts: Sequence[tuple[RayResourcePool, range]]) -> list[tuple[RayResourcePool, range]]:
    joined: list[tuple[RayResourcePool, range]] = []
    for pool, ranks in parts:
        if joined and joined[-1][0] is pool and joined[-1][1].stop == ranks.start:
            joined[-1] = (pool, range(joined[-1][1].start, ranks.stop))
        else:
            joined.append((pool, ranks))
    return joined


def check_together(pools: Mapping[str, RayResourcePool], *, strategy: PlacementStrategy = "PACK") -> None:
    """Check that the cluster could hold all pools at a time if nothing else ran on it.

    Raises:
        ResourceError: it could not, or Ray is not initialised.
    """
    try:
        check_capacity([bundles for pool in pools.values() for bundles in pool.bundles()], strategy, cluster_nodes())
    except ResourceError as error:
        lines = [f"the cluster cannot hold the {len(pools)} pools together: {error}"]
        for name, pool in pools.items():
            shared = f", for {pool.max_colocate_count} groups" if pool.max_colocate_count > 1 else ""
            lines.append(f"pool {name}: {list(pool.process_on_nodes)} bundles of {table(pool.bundle())}{shared}")
        raise ResourceError("\n".join(lines)) from error


def cluster_nodes() -> list[NodeResources]:
    """Return the resources of every living node; raise :class:`ResourceError` if Ray is not initialised."""
    if not ray.is_initialized():
        raise ResourceError("Ray is not initialised: call ray.init() before using its resources")
    from ray._private.state import available_resources_per_node

    available = available_resources_per_node()
    return [
        NodeResources(
            name=node["NodeManagerAddress"],
            total=_schedulable(node["Resources"]),
            available=_schedulable(available.get(node["NodeID"], {})),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def _schedulable(resources: Mapping[str, float]) -> dict[str, float]:
    """Remove Ray's internal resources, and memory."""
    hidden = ("memory", "object_store_memory")
    return {
        name: amount
        for name, amount in resources.items()
        if name not in hidden and not name.startswith("node:") and "_group_" not in name
    }
