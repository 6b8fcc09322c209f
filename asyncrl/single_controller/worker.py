"""Worker: the base class of the objects whose methods a worker group calls."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any

from asyncrl.errors import DispatchError
from asyncrl.single_controller.mesh import MeshPosition


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """The position of a worker in its group. ``local_rank`` counts the group's workers on one node."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    group_name: str
    master_addr: str
    master_port: int

    def environment(self) -> dict[str, str]:
        """Return the variables that SPMD programs (``torch.distributed``) read."""
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
        """Read the variables that ``torchrun`` sets; without them, return the context of a single worker."""
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
"""The context of the worker that is being constructed."""


class Worker:
    """Base class of workers: derive from it, and mark methods with ``@register``.

    ``async def`` methods run concurrently on the worker's event loop. Synchronous methods run one after another, in the
    order of the calls, in one thread, in which the worker was constructed too: collectives keep their order and the
    loop stays free. An ``aclose`` or ``close`` method is called at shutdown.

    The next method may begin before the batch that one returned is copied: a worker that goes on to write into the same
    tensors returns a ``clone()``.

        >>> worker = Worker()  # outside of a group
        >>> worker.rank, worker.world_size
        (0, 1)

    Attributes:
        rank, world_size, local_rank, local_world_size: as in ``torchrun``. On Ray each worker sees only its own GPUs,
            so its device is ``cuda:0`` whatever its ``local_rank``.
        group_name: empty outside of a worker group.
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
    _meshes: dict[str, MeshPosition]

    # In __new__, so that a subclass that does not call super().__init__() still has its rank.
    def __new__(cls, *_args: Any, **_kwargs: Any) -> Worker:  # noqa: PYI034  typing.Self would bind subclasses' arguments
        worker = super().__new__(cls)
        context = constructing.get(None) or WorkerContext.of_environment()
        for field in fields(context):
            setattr(worker, field.name, getattr(context, field.name))
        worker.colocated = {}
        worker._meshes = {}
        return worker

    def __init__(self, cuda_visible_devices: str | None = None) -> None:
        if cuda_visible_devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = cuda_visible_devices

    @property
    def fused_worker_dict(self) -> Mapping[str, Any]:
        """:attr:`colocated`, under verl's name."""
        return self.colocated

    def get_fused_worker_by_name(self, worker_name: str) -> Any:
        """Return the worker of role ``worker_name`` in this process, or None."""
        return self.colocated.get(worker_name)

    def get_master_addr_port(self) -> tuple[str, str]:
        """Return the address and port where rank 0 may listen, as in the environment variables."""
        return self.master_addr, str(self.master_port)

    def get_cuda_visible_devices(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "not set")

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Register this worker's position in a mesh: which rows it gets, and whether its result is collected.

        Raises:
            DispatchError: the mesh is registered already, or ``dp_rank`` is negative.
        """
        if mesh_name in self._meshes:
            raise DispatchError(
                f"mesh {mesh_name!r} is already registered on rank {self.rank}: {self._meshes[mesh_name]}"
            )
        if dp_rank < 0:
            raise DispatchError(f"dp_rank in mesh {mesh_name!r} must be at least 0, got {dp_rank}")
        self._meshes[mesh_name] = MeshPosition(int(dp_rank), bool(is_collect))

    def query_dispatch_info(self, mesh_name: str) -> int:
        """Return this worker's dp rank in a mesh.

        Raises:
            DispatchError: the worker is not in the mesh.
        """
        return self._position_in(mesh_name).dp_rank

    def query_collect_info(self, mesh_name: str) -> bool:
        """Return whether this worker's results are collected in a mesh.

        Raises:
            DispatchError: the worker is not in the mesh.
        """
        return self._position_in(mesh_name).is_collect

    def get_dispatch_collect(self) -> dict[str, dict[str, Any]]:
        """Return this worker's dp rank in every mesh, and whether its results are collected there."""
        return {
            "dispatch_dp_rank": {name: position.dp_rank for name, position in self._meshes.items()},
            "collect_dp_rank": {name: position.is_collect for name, position in self._meshes.items()},
        }

    def set_dispatch_collect(
        self, mesh_name: str, dispatch_dp_rank: Mapping[str, int], collect_dp_rank: Mapping[str, bool]
    ) -> None:
        """Copy the position of a worker inside this one, which is in one mesh: ``**inner.get_dispatch_collect()``.

        Raises:
            DispatchError: it has several positions, or none; or the mesh is registered already.
        """
        positions = {(dispatch_dp_rank.get(name), collect_dp_rank.get(name)) for name in dispatch_dp_rank}
        if len(positions) != 1:
            raise DispatchError(f"mesh {mesh_name!r} needs one position, got {dispatch_dp_rank} and {collect_dp_rank}")
        dp_rank, is_collect = positions.pop()
        self._register_dispatch_collect_info(mesh_name, dp_rank=int(dp_rank or 0), is_collect=bool(is_collect))

    def _position_in(self, mesh_name: str) -> MeshPosition:
        position = self._meshes.get(mesh_name)
        if position is None:
            raise DispatchError(f"rank {self.rank} is not in mesh {mesh_name!r}, only in {sorted(self._meshes)}")
        return position

    async def _mesh_position_now(self, mesh_name: str) -> MeshPosition | None:
        """Return the position whatever synchronous method runs at the moment."""
        return self._mesh_position(mesh_name)

    def _mesh_position(self, mesh_name: str) -> MeshPosition | None:
        """Return the position once the synchronous methods called before have run."""
        return self._meshes.get(mesh_name)
