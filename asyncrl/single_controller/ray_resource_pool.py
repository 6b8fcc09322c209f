"""RayResourcePool: seats for workers on a Ray cluster."""

# Ray leaves the types of handles, references and placement groups partly unknown.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownLambdaType=false, reportPrivateUsage=false

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
    check_room,
    describe,
)

__all__ = [
    "PlacementGroup",
    "RayResourcePool",
    "Seat",
    "SubRayResourcePool",
    "any_removed",
    "cluster_nodes",
    "merge_resource_pool",
    "split_resource_pool",
]

NEXT_TO_NOTHING = {"memory": 1.0}
"""One byte: what a seat without resources takes, since Ray places no empty ones. Every node has it."""

TRACE = 1e-4
"""Of an accelerator type: enough to be placed where there is one, and never used up."""

SETTLES_WITHIN_S = 1
"""A placement group for which there is room has been placed by then."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Where one worker goes."""

    group: PlacementGroup
    bundle_index: int


class RayResourcePool(ResourcePool):
    """Seats for workers on a Ray cluster: a placement group for each entry of ``process_on_nodes``.

    The placement groups are made when the first worker group needs them and removed with the last one. Ranks go
    through them in the order of their nodes' addresses, so that they find their files again in the next run.

        >>> pool = RayResourcePool([4, 4], use_gpu=True, max_colocate_count=2)
        >>> pool.bundle()  # one seat: a CPU for each of the two groups, and one GPU between them
        {'CPU': 2.0, 'GPU': 1.0}

    Args:
        process_on_nodes: workers in each placement group.
        use_gpu: one GPU for each seat, unless ``gpus_per_worker`` says otherwise.
        cpus_per_worker, gpus_per_worker: resources of one worker.
        resources_per_worker: custom resources of one worker.
        max_colocate_count: worker groups that may share the seats; each worker gets this share of the seat's GPUs.
        accelerator_type: custom resource that marks the nodes of a kind; every seat takes a trace of it.
        strategy: how a placement group's seats lie over the nodes; ``STRICT_PACK`` keeps them on one.
        name_prefix: begins the names of the placement groups.
        placement_timeout_s: how long to wait for resources that others use.
        detached: the seats outlive the program, for worker groups that do.

    Raises:
        ResourceError: a place without workers, or ``max_colocate_count`` below 1.
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
        self._kept = False

    @property
    def use_gpu(self) -> bool:
        """Whether a seat has GPUs.

        >>> RayResourcePool([1], gpus_per_worker=0.5).use_gpu
        True
        """
        return self.gpus_per_worker > 0

    def add_node(self, process_count: int) -> None:
        """One more placement group, with ``process_count`` workers.

            >>> pool = RayResourcePool([2])
            >>> pool.add_node(3)
            >>> pool.world_size
            5

        Raises:
            ResourceError: the placement groups are made already, or ``process_count`` is below 1.
        """
        if self._groups:
            raise ResourceError(f"{self!r} is in use: places are added before the first worker group is made")
        super().add_node(process_count)

    def bundle(self) -> dict[str, float]:
        """Resources of one seat.

        >>> RayResourcePool([4], cpus_per_worker=2.0).bundle()
        {'CPU': 2.0}
        """
        shared = {"CPU": self.cpus_per_worker, **self.resources_per_worker}
        whole = {name: amount * self.max_colocate_count for name, amount in shared.items()}
        if self.accelerator_type is not None:
            whole[self.accelerator_type] = TRACE
        return {name: amount for name, amount in {**whole, "GPU": self.gpus_per_worker}.items() if amount}

    def check(self) -> None:
        """Check that the cluster could hold the pool if nothing else were on it.

            >>> RayResourcePool([1]).check()

        Raises:
            ResourceError: it could not, or the pool has no seats.
        """
        if not self.process_on_nodes:
            raise ResourceError(f"{self!r} has no place for a worker")
        check_room(self.places(), self.strategy, cluster_nodes())

    def places(self) -> list[list[dict[str, float]]]:
        """The bundles of each placement group.

        >>> RayResourcePool([2, 1]).places()
        [[{'CPU': 1.0}, {'CPU': 1.0}], [{'CPU': 1.0}]]
        """
        return [[self.bundle()] * count for count in self.process_on_nodes]

    def acquire(self) -> list[PlacementGroup]:
        """The placement groups, for one more worker group. They may still be pending.

            >>> pool = RayResourcePool([1])
            >>> len(pool.acquire())
            1
            >>> pool.release()

        Raises:
            ResourceError: as many groups as may share a seat are there already.
        """
        return self._acquire(range(self.world_size))

    def release(self) -> None:
        """One worker group less; with the last one the placement groups go.

        >>> pool = RayResourcePool([1])
        >>> _ = pool.acquire()
        >>> pool.release()
        """
        self._release(range(self.world_size))

    def seats(self) -> list[Seat]:
        """Where each rank goes. Call it between :meth:`acquire` and :meth:`release`, once the groups are placed.

        Asks the cluster, and so blocks for some milliseconds, if there are several placement groups.

            >>> pool = RayResourcePool([2])
            >>> _ = pool.acquire()
            >>> [seat.bundle_index for seat in pool.seats()]
            [0, 1]
            >>> pool.release()
        """
        pairs = list(zip(self._groups, self.process_on_nodes, strict=True))
        if len(pairs) > 1:
            addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
            nodes = {group.id: placement_group_table(group)["bundles_to_node_id"][0] for group, _ in pairs}
            pairs.sort(key=lambda pair: addresses.get(nodes[pair[0].id], ""))
        return [Seat(group, index) for group, count in pairs for index in range(count)]

    def get_placement_groups(self) -> list[PlacementGroup]:
        """The placement groups, placed: for programs that put actors of their own there.

        They are kept until the program ends, whatever worker groups do.

            >>> (group,) = RayResourcePool([2]).get_placement_groups()
            >>> group.bundle_count
            2
            >>> remove_placement_group(group)

        Raises:
            ResourceError: they could not be placed within ``placement_timeout_s``.
        """
        self._kept = True
        groups = self._acquire(range(0))
        if not all(group.wait(self.placement_timeout_s) for group in groups):
            raise self.no_room()
        return groups

    def no_room(self) -> ResourceError:
        """What to say when the placement groups were not placed in time.

        >>> print(RayResourcePool([1], placement_timeout_s=5).no_room())  # doctest: +ELLIPSIS
        the cluster did not free the resources of RayResourcePool([1]) within 5 s
        asked for: 1 CPU
        ...
        """
        return ResourceError(
            f"the cluster did not free the resources of {self!r} within {self.placement_timeout_s:g} s\n"
            + describe(self.places(), cluster_nodes())
        )

    def _parts(self) -> list[tuple[RayResourcePool, range]]:
        """The pools that own its placement groups, with the numbers of its seats there."""
        return [(self, range(self.world_size))]

    def _acquire(self, seats: range) -> list[PlacementGroup]:
        with self._lock:
            users = self._users or [0] * self.world_size
            if any(users[seat] >= self.max_colocate_count for seat in seats):
                raise ResourceError(
                    f"{self!r} is shared by {max(users)} worker groups already: max_colocate_count is "
                    f"{self.max_colocate_count}"
                )
            if not self._groups:
                lifetime = "detached" if self.detached else None
                self._groups = [
                    placement_group(
                        [bundle or NEXT_TO_NOTHING for bundle in bundles],
                        strategy=self.strategy,
                        name=self._new_name(),
                        lifetime=lifetime,
                    )
                    for bundles in self.places()
                ]
            self._users = [count + (seat in seats) for seat, count in enumerate(users)]
            return list(self._groups)

    def _release(self, seats: range) -> None:
        with self._lock:
            self._users = [count - (seat in seats) for seat, count in enumerate(self._users)]
            free = not any(self._users) and not self._kept
            groups, self._groups = (self._groups, []) if free else ([], self._groups)
        for group in groups:
            _remove(group)

    def _new_name(self) -> str:
        return f"{self.name_prefix}{uuid.uuid4().hex[:8]}" if self.name_prefix else ""


class SubRayResourcePool(RayResourcePool):
    """Some seats of other pools, on the same placement groups: made by the two functions below.

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
        """Its seats in each placement group in which it has any.

        >>> [part.process_on_nodes for part in split_resource_pool(RayResourcePool([2, 2]), [1, 3])]
        [(1,), (1, 2)]
        """
        counts: list[int] = []
        for pool, seats in self._of:
            start = 0
            for count in pool.process_on_nodes:
                mine = len(range(max(start, seats.start), min(start + count, seats.stop)))
                counts += [mine] if mine else []
                start += count
        return tuple(counts)

    @property
    def world_size(self) -> int:
        """Its seats.

        >>> [part.world_size for part in split_resource_pool(RayResourcePool([2, 2]), [1, 3])]
        [1, 3]
        """
        return sum(len(seats) for _, seats in self._of)

    @property
    def store(self) -> list[int]:
        """``process_on_nodes``, under verl's name.

        >>> split_resource_pool(RayResourcePool([2, 2]), [1, 3])[1].store
        [1, 2]
        """
        return list(self.process_on_nodes)

    def local_world_size_list(self) -> list[int]:
        """For each worker, the workers of its place.

        >>> split_resource_pool(RayResourcePool([2, 2]), [1, 3])[1].local_world_size_list()
        [1, 2, 2]
        """
        return [count for count in self.process_on_nodes for _ in range(count)]

    def local_rank_list(self) -> list[int]:
        """For each worker, its number in its place.

        >>> split_resource_pool(RayResourcePool([2, 2]), [1, 3])[1].local_rank_list()
        [0, 0, 1]
        """
        return [number for count in self.process_on_nodes for number in range(count)]

    def add_node(self, process_count: int) -> None:
        """Not here: the seats are those of other pools.

            >>> half, _ = split_resource_pool(RayResourcePool([2]), 1)
            >>> half.add_node(1)  # doctest: +ELLIPSIS
            Traceback (most recent call last):
            asyncrl.errors.ResourceError: SubRayResourcePool([1]) is made of seats of other pools: ...

        Raises:
            ResourceError: always.
        """
        raise ResourceError(f"{self!r} is made of seats of other pools: add places to those, before it is made")

    def check(self) -> None:
        """Check that the cluster could hold the pools whose seats these are.

            >>> split_resource_pool(RayResourcePool([2]), 1)[0].check()

        Raises:
            ResourceError: it could not.
        """
        for pool in self._pools():
            pool.check()

    def acquire(self) -> list[PlacementGroup]:
        """The placement groups of the pools whose seats these are, for one more worker group.

            >>> half, _ = split_resource_pool(RayResourcePool([2]), 1)
            >>> len(half.acquire())
            1
            >>> half.release()

        Raises:
            ResourceError: as many groups as may share one of these seats are there already; nothing is taken then.
        """
        acquired: list[tuple[RayResourcePool, range]] = []
        groups: dict[int, PlacementGroup] = {}
        try:
            for pool, seats in self._of:
                groups.update({id(group): group for group in pool._acquire(seats)})  # noqa: SLF001  of this class
                acquired.append((pool, seats))
        except ResourceError:
            for pool, seats in acquired:
                pool._release(seats)  # noqa: SLF001  of this class
            raise
        return list(groups.values())

    def release(self) -> None:
        """One worker group less on these seats.

        >>> half, _ = split_resource_pool(RayResourcePool([2]), 1)
        >>> _ = half.acquire()
        >>> half.release()
        """
        for pool, seats in self._of:
            pool._release(seats)  # noqa: SLF001  of this class

    def seats(self) -> list[Seat]:
        """Where each rank goes; see :meth:`RayResourcePool.seats`.

        >>> _, half = split_resource_pool(RayResourcePool([2]), 1)
        >>> _ = half.acquire()
        >>> [seat.bundle_index for seat in half.seats()]
        [1]
        >>> half.release()
        """
        return [seat for pool, numbers in self._of for seat in pool.seats()[numbers.start : numbers.stop]]

    def get_placement_groups(self) -> list[PlacementGroup]:
        """The placement groups in which it has seats, placed.

            >>> half, _ = split_resource_pool(RayResourcePool([2]), 1)
            >>> (group,) = half.get_placement_groups()
            >>> remove_placement_group(group)

        Raises:
            ResourceError: as :meth:`RayResourcePool.get_placement_groups`.
        """
        return [group for pool in self._pools() for group in pool.get_placement_groups()]

    def _parts(self) -> list[tuple[RayResourcePool, range]]:
        return self._of

    def _pools(self) -> list[RayResourcePool]:
        return list({id(pool): pool for pool, _ in self._of}.values())


def split_resource_pool(resource_pool: RayResourcePool, split_size: int | Sequence[int]) -> list[SubRayResourcePool]:
    """Pools of consecutive seats of this one: of ``split_size`` seats each, or of these sizes. They may be split again.

    Seats stay where they are: a worker group on the whole pool and others on its parts share them, as far as
    ``max_colocate_count`` goes.

        >>> halves = split_resource_pool(RayResourcePool([4, 4]), 4)
        >>> [pool.world_size for pool in split_resource_pool(halves[1], [1, 3])]
        [1, 3]

    Raises:
        ResourceError: the sizes do not sum up to the seats there are, or ``split_size`` does not divide them.
    """
    seats = resource_pool.world_size
    if isinstance(split_size, int):
        if split_size < 1 or seats % split_size:
            raise ResourceError(f"{seats} seats of {resource_pool!r} cannot be split into parts of {split_size}")
        sizes = [split_size] * (seats // split_size)
    else:
        sizes = list(split_size)
        if any(size < 1 for size in sizes) or sum(sizes) != seats:
            raise ResourceError(f"parts of {sizes} seats are not the {seats} seats of {resource_pool!r}")
    single = [(pool, range(seat, seat + 1)) for pool, numbers in resource_pool._parts() for seat in numbers]  # noqa: SLF001
    ends = list(accumulate(sizes))
    return [SubRayResourcePool(_joined(single[start:end])) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def merge_resource_pool(rp1: RayResourcePool, rp2: RayResourcePool) -> RayResourcePool:
    """A pool of the seats of both, those of ``rp1`` first. Groups on it share seats with groups on either.

        >>> merge_resource_pool(RayResourcePool([2]), RayResourcePool([3, 1])).store
        [2, 3, 1]

    Raises:
        ResourceError: their seats differ in resources, in how many groups may share them, or in how they are placed; or
            both have one seat.
    """
    for name in ("bundle", "max_colocate_count", "strategy", "detached"):
        mine, other = getattr(rp1, name), getattr(rp2, name)
        mine, other = (mine(), other()) if callable(mine) else (mine, other)
        if mine != other:
            raise ResourceError(f"{rp1!r} and {rp2!r} cannot be merged: their {name} are {mine} and {other}")
    parts = [*rp1._parts(), *rp2._parts()]  # noqa: SLF001  of this module
    taken = [(id(pool), seat) for pool, numbers in parts for seat in numbers]
    if len(set(taken)) < len(taken):
        raise ResourceError(f"{rp1!r} and {rp2!r} cannot be merged: some seats are in both")
    return SubRayResourcePool(_joined(parts))


def _remove(group: PlacementGroup) -> None:
    # Ray loses the resources of one that is removed while it is being placed (ray-project/ray#64693).
    with contextlib.suppress(Exception):  # what Ray raises if somebody else has removed it
        group.wait(SETTLES_WITHIN_S)
    remove_placement_group(group)


def any_removed(groups: Iterable[PlacementGroup]) -> bool:
    """Whether one of these is gone. Ray never places an actor that is made in such a one, and never says so. Blocks."""
    each_once = {group.id: group for group in groups}.values()
    return any(placement_group_table(group).get("state", "REMOVED") == "REMOVED" for group in each_once)


def _joined(parts: Sequence[tuple[RayResourcePool, range]]) -> list[tuple[RayResourcePool, range]]:
    """The same with neighbours in one."""
    joined: list[tuple[RayResourcePool, range]] = []
    for pool, numbers in parts:
        if joined and joined[-1][0] is pool and joined[-1][1].stop == numbers.start:
            joined[-1] = (pool, range(joined[-1][1].start, numbers.stop))
        else:
            joined.append((pool, numbers))
    return joined


def cluster_nodes() -> list[NodeResources]:
    """Every living node of the cluster.

    Raises:
        ResourceError: Ray is not initialised.
    """
    if not ray.is_initialized():
        raise ResourceError("Ray is not initialised: call ray.init() before asking for its resources")
    from ray._private.state import available_resources_per_node

    available = available_resources_per_node()
    return [
        NodeResources(
            name=node["NodeManagerAddress"],
            total=_plain(node["Resources"]),
            available=_plain(available.get(node["NodeID"], {})),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def _plain(resources: Mapping[str, float]) -> dict[str, float]:
    """Without what Ray keeps for itself, and without memory."""
    hidden = ("memory", "object_store_memory")
    return {
        name: amount
        for name, amount in resources.items()
        if name not in hidden and not name.startswith("node:") and "_group_" not in name
    }
