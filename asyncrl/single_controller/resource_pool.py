"""ResourcePool: how many workers there are, and on how many nodes."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.errors import ResourceError

__all__ = ["ResourcePool"]


class ResourcePool:
    """``process_on_nodes[i]`` workers on node i.

    ``max_colocate_count`` worker groups may share the pool, each with a worker in every place.

    Raises:
        ResourceError: no node, or a node without workers.
    """

    def __init__(self, process_on_nodes: Sequence[int], *, max_colocate_count: int = 1) -> None:
        if not process_on_nodes or any(count < 1 for count in process_on_nodes):
            raise ResourceError(
                f"process_on_nodes needs at least one worker on each node, got {list(process_on_nodes)}"
            )
        if max_colocate_count < 1:
            raise ResourceError(f"max_colocate_count must be at least 1, got {max_colocate_count}")
        self.process_on_nodes = tuple(process_on_nodes)
        self.max_colocate_count = max_colocate_count

    @property
    def world_size(self) -> int:
        """Workers in total."""
        return sum(self.process_on_nodes)

    @property
    def store(self) -> list[int]:
        """``process_on_nodes``, under verl's name."""
        return list(self.process_on_nodes)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.process_on_nodes)})"
