"""Worker with the methods and names that every worker has in verl."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, cast

from asyncrl.single_controller import worker
from asyncrl.single_controller.dispatch import Dispatch, Execute
from asyncrl.single_controller.ray_cluster import node_address
from asyncrl.verl.decorator import register

__all__ = ["Worker"]


class Worker(worker.Worker):
    """:class:`asyncrl.Worker` with the methods that every group has in verl, and verl's names for a worker's place.

        >>> with LocalWorkerGroup(ClassWithInitArgs(Worker), world_size=2) as workers:
        ...     workers.execute_func_rank_zero(len, "abc")
        3

    Attributes:
        _rank, _world_size, _local_rank, _local_world_size, _master_addr, _master_port: as without the underscore; the
            port is a string.
    """

    fused_worker_attr_name = "fused_worker_dict"

    _rank: int
    _world_size: int
    _local_rank: int
    _local_world_size: int
    _master_addr: str
    _master_port: str

    def __new__(cls, *args: Any, **kwargs: Any) -> Worker:  # noqa: PYI034  as in its base class
        made: Any = super().__new__(cls, *args, **kwargs)
        for name in ("rank", "world_size", "local_rank", "local_world_size", "master_addr"):
            setattr(made, f"_{name}", getattr(made, name))
        setattr(made, "_master_port", str(made.master_port))  # noqa: B010  a private name of the class above
        return cast("Worker", made)

    @classmethod
    def env_keys(cls) -> list[str]:
        """The environment variables that tell a worker its place and its GPUs.

        >>> Worker.env_keys()[:2]
        ['WORLD_SIZE', 'RANK']
        """
        place = ["WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]
        return [*place, "CUDA_VISIBLE_DEVICES"]

    def get_available_master_addr_port(self) -> tuple[str, str]:
        """An address of this machine and a port that is free at the moment, for a process group of one's own.

        >>> address, port = Worker().get_available_master_addr_port()
        >>> port.isdigit()
        True
        """
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        return node_address(), str(port)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_dispatch_info(self, mesh_name: str) -> int:
        return self.query_dispatch_info(mesh_name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_collect_info(self, mesh_name: str) -> bool:
        return self.query_collect_info(mesh_name)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``func(worker, ...)`` on every rank, with its share of the batches' rows; the results are joined.

        >>> with LocalWorkerGroup(ClassWithInitArgs(Worker), world_size=2) as workers:
        ...     workers.execute_with_func_generator(lambda worker, batch: batch, data) == data
        True
        """
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``func(...)`` on rank 0.

        >>> Worker().execute_func_rank_zero(max, 1, 2)
        2
        """
        return func(*args, **kwargs)
