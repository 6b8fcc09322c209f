"""Where worker groups live: processes on a Ray cluster, or this one; several roles in the same ones where asked."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from asyncrl.config import ClusterConfig
from asyncrl.single_controller import ClassWithInitArgs, Restart, Worker, WorkerGroup, create_colocated_worker_cls

__all__ = ["GroupRequest", "MakeGroup", "group_maker", "local_group", "together"]

C = TypeVar("C", bound=ClassWithInitArgs)


@dataclass(slots=True)
class GroupRequest:
    """A worker group to be made: what, how many ranks, on which share of a machine.

    ``shared`` is what lives in its processes where several roles do; then ``restart`` does not count.
    """

    role: Any
    name: str
    worker: type[Worker]
    spec: Any
    world_size: int
    num_cpus: float
    num_gpus: float
    shared: Mapping[str, GroupRequest] = field(default_factory=dict)
    restart: Restart | None = None

    def class_with_arguments(self, kind: type[C]) -> C:
        """The worker's class, or one that holds a worker of every role."""
        if not self.shared:
            return kind(self.worker, self.spec)
        return create_colocated_worker_cls(
            {role: request.class_with_arguments(kind) for role, request in self.shared.items()}
        )


MakeGroup: TypeAlias = Callable[[GroupRequest], WorkerGroup]


def together(requests: list[GroupRequest], roles: Collection[str]) -> list[GroupRequest]:
    """The same groups, those of ``roles`` in the processes of one, which gets the largest share of a machine."""
    shared = {request.role: request for request in requests if request.role in roles}
    if len(shared) < 2:
        return requests
    first, *others = shared.values()
    host = GroupRequest(
        first.role,
        "+".join(shared),
        first.worker,
        None,
        first.world_size,
        max(request.num_cpus for request in shared.values()),
        max(request.num_gpus for request in shared.values()),
        shared=dict(shared),
    )
    return [host if request is first else request for request in requests if request not in others]


def group_maker(
    cluster: ClusterConfig, requests: Sequence[GroupRequest], *, log_folder: Path, stack: AsyncExitStack
) -> MakeGroup:
    """What makes the groups of ``requests``; a cluster that it starts for them is left again by ``stack``."""
    return _ray_groups(cluster, requests, log_folder, stack) if cluster.backend == "ray" else local_group


def _ray_groups(
    cluster: ClusterConfig, requests: Sequence[GroupRequest], log_folder: Path, stack: AsyncExitStack
) -> MakeGroup:
    from asyncrl.single_controller.ray_cluster import RayCluster

    needed = sum(request.world_size * request.num_cpus for request in requests)
    stack.enter_context(
        RayCluster(
            address=cluster.address,
            num_cpus=cluster.num_cpus or max(float(os.cpu_count() or 1), needed),
            log_folder=log_folder,
        )
    )
    from asyncrl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    def make(request: GroupRequest) -> WorkerGroup:
        made = request.class_with_arguments(RayClassWithInitArgs)
        # Threads that wait for one another must sleep, not spin: other workers compute on these cores.
        made = made.options(env_vars={"OMP_WAIT_POLICY": "PASSIVE"})
        seats = RayResourcePool(
            [request.world_size], cpus_per_worker=request.num_cpus, gpus_per_worker=request.num_gpus
        )
        return RayWorkerGroup(resource_pool=seats, ray_cls_with_init=made, name=request.name, restart=request.restart)

    return make


def local_group(request: GroupRequest) -> WorkerGroup:
    """A group in this process."""
    from asyncrl.single_controller.local import LocalWorkerGroup

    return LocalWorkerGroup(
        request.class_with_arguments(ClassWithInitArgs),
        world_size=request.world_size,
        name=request.name,
        restart=request.restart,
    )
