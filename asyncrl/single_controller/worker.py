"""Worker: the class behind one rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import DispatchError
from asyncrl.single_controller.mesh import MeshPlace

__all__ = ["Worker", "WorkerContext"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """A worker's place in its group. ``local_rank`` counts the group's workers on one node."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    group_name: str
    master_addr: str
    master_port: int

    def environment(self) -> dict[str, str]:
        """The variables that SPMD programs (``torch.distributed``) read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }

    @staticmethod
    def of_environment() -> WorkerContext:
        """The place that ``torchrun`` or nobody has given this process."""
        return WorkerContext(
            rank=int(os.environ.get("RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            group_name="",
            master_addr=os.environ.get("MASTER_ADDR", "127.0.0.1"),
            master_port=int(os.environ.get("MASTER_PORT", "0")),
        )


constructing: ContextVar[WorkerContext] = ContextVar("constructing")
"""The place of the worker that is being constructed."""


class Worker:
    """Derive from it, and mark methods with ``@register``.

    ``async def`` methods run side by side on the worker's event loop. Plain methods run one after another, in the
    order of the calls, in one thread of their own, in which the worker was constructed too: collectives keep their
    order and the loop stays free. An ``aclose`` or ``close`` method is called at shutdown.

        >>> worker = Worker()  # outside of a group
        >>> worker.rank, worker.world_size
        (0, 1)

    Attributes:
        rank, world_size, local_rank, local_world_size: as in ``torchrun``. On Ray each worker sees its own GPUs only,
            so its device is ``cuda:0`` whatever its ``local_rank``.
        group_name: name of the worker group; empty outside of one.
        master_addr, master_port: where rank 0 may listen.
        colocated: workers of all roles in this process, by role; empty unless roles share one.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    group_name: str
    master_addr: str
    master_port: int
    colocated: Mapping[str, Any]
    _meshes: dict[str, MeshPlace]

    # In __new__, so that a subclass that forgets super().__init__() still knows its place.
    def __new__(cls, *_args: Any, **_kwargs: Any) -> Worker:  # noqa: PYI034  typing.Self would bind subclasses' arguments
        worker = super().__new__(cls)
        context = constructing.get(None) or WorkerContext.of_environment()
        worker.rank = context.rank
        worker.world_size = context.world_size
        worker.local_rank = context.local_rank
        worker.local_world_size = context.local_world_size
        worker.group_name = context.group_name
        worker.master_addr = context.master_addr
        worker.master_port = context.master_port
        worker.colocated = {}
        worker._meshes = {}
        return worker

    def __init__(self, cuda_visible_devices: str | None = None) -> None:
        if cuda_visible_devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = cuda_visible_devices

    @property
    def fused_worker_dict(self) -> Mapping[str, Any]:
        """:attr:`colocated`, under verl's name.

        >>> Worker().fused_worker_dict
        {}
        """
        return self.colocated

    def get_fused_worker_by_name(self, worker_name: str) -> Any:
        """The worker of role ``worker_name`` in this process, or None.

        >>> Worker().get_fused_worker_by_name("critic") is None
        True
        """
        return self.colocated.get(worker_name)

    def get_master_addr_port(self) -> tuple[str, str]:
        """Where rank 0 may listen, as the environment variables say it.

        >>> address, port = Worker().get_master_addr_port()
        >>> port.isdigit()
        True
        """
        return self.master_addr, str(self.master_port)

    def get_cuda_visible_devices(self) -> str:
        """The GPUs that this process sees, or ``not set``.

        >>> Worker().get_cuda_visible_devices()
        'not set'
        """
        return os.environ.get("CUDA_VISIBLE_DEVICES", "not set")

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Tell this worker's place in a mesh: which part of the rows it gets, and whether its result is taken.

        Raises:
            DispatchError: told before, or ``dp_rank`` is negative.
        """
        if mesh_name in self._meshes:
            raise DispatchError(f"mesh {mesh_name!r} was registered on rank {self.rank}: {self._meshes[mesh_name]}")
        if dp_rank < 0:
            raise DispatchError(f"dp_rank in mesh {mesh_name!r} must be at least 0, got {dp_rank}")
        self._meshes[mesh_name] = MeshPlace(int(dp_rank), bool(is_collect))

    def query_dispatch_info(self, mesh_name: str) -> int:
        """This worker's dp rank in a mesh.

            >>> worker = Worker()
            >>> worker._register_dispatch_collect_info("actor", dp_rank=1, is_collect=True)
            >>> worker.query_dispatch_info("actor")
            1

        Raises:
            DispatchError: it is not in the mesh.
        """
        return self._place_in(mesh_name).dp_rank

    def query_collect_info(self, mesh_name: str) -> bool:
        """Whether this worker's results are taken in a mesh.

            >>> worker = Worker()
            >>> worker._register_dispatch_collect_info("actor", dp_rank=1, is_collect=False)
            >>> worker.query_collect_info("actor")
            False

        Raises:
            DispatchError: it is not in the mesh.
        """
        return self._place_in(mesh_name).is_collect

    def get_dispatch_collect(self) -> dict[str, dict[str, Any]]:
        """This worker's dp rank in every mesh, and whether its results are taken there.

        >>> worker = Worker()
        >>> worker._register_dispatch_collect_info("actor", dp_rank=1, is_collect=True)
        >>> worker.get_dispatch_collect()
        {'dispatch_dp_rank': {'actor': 1}, 'collect_dp_rank': {'actor': True}}
        """
        return {
            "dispatch_dp_rank": {name: place.dp_rank for name, place in self._meshes.items()},
            "collect_dp_rank": {name: place.is_collect for name, place in self._meshes.items()},
        }

    def set_dispatch_collect(
        self, mesh_name: str, dispatch_dp_rank: Mapping[str, int], collect_dp_rank: Mapping[str, bool]
    ) -> None:
        """Take the place that a worker inside this one has in its only mesh: ``**inner.get_dispatch_collect()``.

            >>> inner, outer = Worker(), Worker()
            >>> inner._register_dispatch_collect_info("actor", dp_rank=1, is_collect=True)
            >>> outer.set_dispatch_collect("reference", **inner.get_dispatch_collect())
            >>> outer.query_dispatch_info("reference")
            1

        Raises:
            DispatchError: it has several places, or none; or this worker has one in the mesh already.
        """
        places = {(dispatch_dp_rank.get(name), collect_dp_rank.get(name)) for name in dispatch_dp_rank}
        if len(places) != 1:
            raise DispatchError(f"mesh {mesh_name!r} needs one place, got {dispatch_dp_rank} and {collect_dp_rank}")
        dp_rank, is_collect = places.pop()
        self._register_dispatch_collect_info(mesh_name, dp_rank=int(dp_rank or 0), is_collect=bool(is_collect))

    def _place_in(self, mesh_name: str) -> MeshPlace:
        place = self._meshes.get(mesh_name)
        if place is None:
            raise DispatchError(f"rank {self.rank} is not in mesh {mesh_name!r}, only in {sorted(self._meshes)}")
        return place

    async def _mesh_place(self, mesh_name: str) -> MeshPlace | None:
        return self._meshes.get(mesh_name)

    def _mesh_place_in_line(self, mesh_name: str) -> MeshPlace | None:
        return self._meshes.get(mesh_name)
