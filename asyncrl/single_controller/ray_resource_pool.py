"""RayResourcePool: seats for workers on a Ray cluster."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping, Sequence

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from asyncrl.errors import ResourceError
from asyncrl.single_controller.resource_pool import (
    NodeResources,
    PlacementStrategy,
    ResourcePool,
    check_room,
    describe,
)

__all__ = ["RayResourcePool", "cluster_nodes"]


class RayResourcePool(ResourcePool):
    """Seats for workers on a Ray cluster: a placement group for each entry of ``process_on_nodes``.

    The placement groups are made when the first worker group needs them and removed with the last one.

    Args:
        process_on_nodes: workers in each placement group.
        use_gpu: one GPU for each seat, unless ``gpus_per_worker`` says otherwise.
        cpus_per_worker, gpus_per_worker: resources of one worker.
        resources_per_worker: custom resources of one worker.
        max_colocate_count: worker groups that may share the seats; each worker gets this share of the seat's GPUs.
        strategy: how a placement group's seats lie over the nodes; ``STRICT_PACK`` keeps them on one.
        name_prefix: begins the names of the placement groups.
        placement_timeout_s: how long to wait for resources that others use.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        use_gpu: bool = False,
        name_prefix: str = "",
        max_colocate_count: int = 1,
        *,
        cpus_per_worker: float = 1.0,
        gpus_per_worker: float | None = None,
        resources_per_worker: Mapping[str, float] | None = None,
        strategy: PlacementStrategy = "PACK",
        placement_timeout_s: float = 60.0,
    ) -> None:
        super().__init__(process_on_nodes, max_colocate_count=max_colocate_count)
        self.cpus_per_worker = cpus_per_worker
        self.gpus_per_worker = float(use_gpu) if gpus_per_worker is None else gpus_per_worker
        self.resources_per_worker = dict(resources_per_worker or {})
        self.strategy: PlacementStrategy = strategy
        self.name_prefix = name_prefix
        self.placement_timeout_s = placement_timeout_s
        self._lock = threading.Lock()
        self._groups: list[PlacementGroup] = []
        self._users = 0

    def bundle(self) -> dict[str, float]:
        """Resources of one seat."""
        shared = {"CPU": self.cpus_per_worker, **self.resources_per_worker}
        whole = {name: amount * self.max_colocate_count for name, amount in shared.items()}
        return {name: amount for name, amount in {**whole, "GPU": self.gpus_per_worker}.items() if amount}

    def check(self) -> None:
        """Raise :class:`ResourceError` if the cluster could not hold the pool even with nothing else on it."""
        check_room(self.places(), self.strategy, cluster_nodes())

    def places(self) -> list[list[dict[str, float]]]:
        return [[self.bundle()] * count for count in self.process_on_nodes]

    def acquire(self) -> list[PlacementGroup]:
        """The placement groups, for one more worker group. They may still be pending."""
        with self._lock:
            if self._users >= self.max_colocate_count:
                raise ResourceError(
                    f"{self!r} is shared by {self._users} worker groups already: max_colocate_count is "
                    f"{self.max_colocate_count}"
                )
            if not self._groups:
                self._groups = [
                    placement_group(bundles, strategy=self.strategy, name=self._new_name()) for bundles in self.places()
                ]
            self._users += 1
            return list(self._groups)

    def _new_name(self) -> str:
        return f"{self.name_prefix}{uuid.uuid4().hex[:8]}" if self.name_prefix else ""

    def release(self) -> None:
        """One worker group less; with the last one the placement groups go."""
        with self._lock:
            self._users -= 1
            groups, self._groups = (self._groups, []) if self._users == 0 else ([], self._groups)
        for group in groups:
            remove_placement_group(group)

    def no_room(self) -> ResourceError:
        """What to say when the placement groups were not placed in time."""
        return ResourceError(
            f"the cluster did not free the resources of {self!r} within {self.placement_timeout_s:g} s\n"
            + describe(self.places(), cluster_nodes())
        )


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
        if name not in hidden and ":" not in name and "_group_" not in name
    }
