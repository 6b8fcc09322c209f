"""Resource pools with verl's defaults: GPUs, room for several groups, seats of a place on one node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from asyncrl.errors import ResourceError
from asyncrl.single_controller import ray_resource_pool, resource_pool_manager

if TYPE_CHECKING:
    from asyncrl.single_controller.ray_resource_pool import PlacementGroup
    from asyncrl.single_controller.resource_pool import PlacementStrategy

__all__ = ["RayResourcePool", "ResourcePoolManager", "require_device"]


class RayResourcePool(ray_resource_pool.RayResourcePool):
    """:class:`asyncrl.single_controller.ray.RayResourcePool` with verl's defaults.

    GPUs, room for ten worker groups, seats of a place on one node. The groups share one CPU a seat: verl asks for one
    each, which on a machine without as many waits for ever.

        >>> RayResourcePool([8, 8]).bundle()
        {'CPU': 1.0, 'GPU': 1.0}

    Raises:
        ResourceError: a place without workers, or ``max_colocate_count`` below 1.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int] | None = None,
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        detached: bool = False,
        accelerator_type: str | None = None,
    ) -> None:
        super().__init__(
            process_on_nodes,
            use_gpu,
            name_prefix,
            max_colocate_count,
            cpus_per_worker=1.0 / max_colocate_count,
            accelerator_type=accelerator_type,
            strategy="STRICT_PACK",
            detached=detached,
        )

    @property
    def pgs(self) -> list[PlacementGroup] | None:
        """The placement groups; None before they are made.

        >>> RayResourcePool([1]).pgs is None
        True
        """
        return list(self._groups) or None

    def get_placement_groups(
        self, strategy: PlacementStrategy | None = None, name: str | None = None, device_name: str = "cuda"
    ) -> list[PlacementGroup]:
        """The placement groups, placed and kept, in the order of ``process_on_nodes``.

        Args:
            strategy: how a group's seats lie over the nodes; default ``STRICT_PACK``.
            name: begins the names of the groups.
            device_name: ``cuda`` or ``cpu``; whether a seat has a GPU is said by ``use_gpu``.

        Raises:
            ResourceError: another device, or no room within ``placement_timeout_s``.

        Example, with Ray:
            >>> groups = RayResourcePool([1, 1], use_gpu=False).get_placement_groups(device_name="cpu")
            >>> for group in groups:
            ...     ray.util.remove_placement_group(group)
        """
        require_device(device_name)
        if not self._groups:
            self.strategy = strategy or self.strategy
            self.name_prefix = name or self.name_prefix
        return super().get_placement_groups()


def require_device(device_name: str) -> None:
    """Raise :class:`ResourceError` for devices that workers cannot have."""
    if device_name not in ("cuda", "cpu"):
        raise ResourceError(f"device_name must be 'cuda' or 'cpu', got {device_name!r}")


class ResourcePoolManager(resource_pool_manager.ResourcePoolManager):
    """:class:`asyncrl.single_controller.ResourcePoolManager` of GPU pools, three groups in each, as in verl.

        >>> ResourcePoolManager({"global": [8, 8]}, {Role.ActorRollout: "global"}).get_n_gpus()
        16

    Raises:
        ResourceError: a role is in a pool that is not specified.
    """

    def __init__(self, resource_pool_spec: Mapping[str, Sequence[int]], mapping: Mapping[Any, str]) -> None:
        super().__init__(
            resource_pool_spec,
            mapping,
            use_gpu=True,
            max_colocate_count=3,
            cpus_per_worker=1.0 / 3,
            strategy="STRICT_PACK",
        )

    def get_n_gpus(self) -> int:
        """GPUs of all pools together: one for each seat.

        >>> ResourcePoolManager({"training": [8, 8], "generation": [8]}, {}).get_n_gpus()
        24
        """
        return sum(map(sum, self.resource_pool_spec.values()))
