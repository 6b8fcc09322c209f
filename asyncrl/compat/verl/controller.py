"""verl's ``register``, Worker, resource pools and RayWorkerGroup: asyncrl's, with verl's arguments and defaults."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from tensordict import TensorDictBase

from asyncrl.errors import DispatchError, ResourceError
from asyncrl.single_controller import colocation, decorator, worker
from asyncrl.single_controller import ray as ray_backend
from asyncrl.single_controller import resource_pool as resource_pool_manager
from asyncrl.single_controller.call import Arguments
from asyncrl.single_controller.decorator import (
    CustomDispatch,
    Dispatch,
    DispatchMode,
    Execute,
    Registration,
    mark,
    registration_of,
)
from asyncrl.single_controller.dispatch import collect_all_to_all, dispatch_one_to_all
from asyncrl.single_controller.ray import resource_pool as ray_resource_pool
from asyncrl.single_controller.ray.backend import RayClassWithInitArgs
from asyncrl.single_controller.ray.cluster import node_address
from asyncrl.single_controller.worker import WorkerContext
from asyncrl.single_controller.worker_group import ClassWithInitArgs, WorkerGroup

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from asyncrl.data.future import Future
    from asyncrl.single_controller.resource_pool import PlacementStrategy


F = TypeVar("F", bound=Callable[..., Any])


def _scatter_or_copy(group: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def has_entry_for_each_rank(value: Any) -> bool:
        return isinstance(value, list) and len(cast("list[object]", value)) == group.world_size

    if all(map(has_entry_for_each_rank, (*args, *kwargs.values()))):
        return args, kwargs
    return dispatch_one_to_all(group, *args, **kwargs)


ALL_TO_ALL = CustomDispatch(dispatch_fn=_scatter_or_copy, collect_fn=collect_all_to_all)
"""Arguments are scattered if all of them are lists with one entry for each rank; otherwise all are copied."""


def register(
    dispatch_mode: DispatchMode = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable[[F], F]:
    """:func:`asyncrl.register` with verl's default, ``blocking=True``, and verl's ``ALL_TO_ALL``.

        >>> class Counter(Worker):
        ...     @register()
        ...     def add(self, x):
        ...         return self.rank + x
        >>> with LocalWorkerGroup(ClassWithInitArgs(Counter), world_size=2) as counters:
        ...     counters.add([10, 20]), counters.add(10)  # scattered; copied
        ([10, 21], [10, 11])

    Raises:
        DispatchError: the options contradict each other.
    """
    scatters = dispatch_mode is Dispatch.ALL_TO_ALL
    mode = Dispatch.RANK_ZERO if scatters and execute_mode is Execute.RANK_ZERO else dispatch_mode
    offer = decorator.register(mode, execute_mode, blocking, materialize_futures)

    def decorate(method: F) -> F:
        offered = offer(method)
        registration = registration_of(offered)
        if registration is not None and (mode is Dispatch.ALL_TO_ALL or isinstance(mode, dict)):
            # Collect functions written for verl take batches, not futures.
            own = mode if isinstance(mode, dict) else ALL_TO_ALL
            mark(offered, replace(registration, dispatch_mode=own, returns_batch=False))
        return offered

    return decorate


class Worker(worker.Worker):
    """:class:`asyncrl.Worker` with the methods that every group has in verl, and verl's names for a worker's rank.

    ``_rank``, ``_world_size``, ``_local_rank``, ``_local_world_size``, ``_master_addr`` and ``_master_port`` are as
    without the underscore; the port is a string.

        >>> with LocalWorkerGroup(ClassWithInitArgs(Worker), world_size=2) as workers:
        ...     workers.execute_func_rank_zero(len, "abc")
        3
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
        """Return the names of the environment variables with a worker's rank and GPUs."""
        rank = ["WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]
        return [*rank, "CUDA_VISIBLE_DEVICES"]

    def get_available_master_addr_port(self) -> tuple[str, str]:
        """Return an address of this machine and a port that is free at the moment, for a new process group."""
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
        """Call ``func(worker, ...)`` on every rank, with its share of the batches' rows, and join the results."""
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``func(...)`` on rank 0."""
        return func(*args, **kwargs)


class RayResourcePool(ray_resource_pool.RayResourcePool):
    """:class:`asyncrl.single_controller.ray.RayResourcePool` with verl's defaults, and the same errors.

    One GPU in each bundle, up to ten worker groups, the bundles of a placement group on one node. The groups share one
    CPU in each bundle: verl requests one for each, which a machine without as many can never place.

        >>> RayResourcePool([8, 8]).bundle()
        {'CPU': 1.0, 'GPU': 1.0}
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
        """The placement groups; None before they are created."""
        return list(self._groups) or None

    def get_placement_groups(
        self, strategy: PlacementStrategy | None = None, name: str | None = None, device_name: str = "cuda"
    ) -> list[PlacementGroup]:
        """Wait until the placement groups are placed, and return them in the order of ``process_on_nodes``.

        ``name`` is the prefix of the groups' names. ``device_name`` is ``cuda`` or ``cpu``; ``use_gpu`` of the pool
        determines whether a bundle has a GPU.

        Raises:
            ResourceError: another device, or the groups were not placed within ``placement_timeout_s``.
        """
        require_device(device_name)
        if not self._groups:
            self.strategy = strategy or self.strategy
            self.name_prefix = name or self.name_prefix
        return super().get_placement_groups()


def require_device(device_name: str) -> None:
    """Raise :class:`ResourceError` for an unsupported device."""
    if device_name not in ("cuda", "cpu"):
        raise ResourceError(f"device_name must be 'cuda' or 'cpu', got {device_name!r}")


class ResourcePoolManager(resource_pool_manager.ResourcePoolManager):
    """:class:`asyncrl.single_controller.ResourcePoolManager` of GPU pools for three groups each, as in verl.

    >>> ResourcePoolManager({"global": [8, 8]}, {Role.ActorRollout: "global"}).get_n_gpus()
    16
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
        return sum(map(sum, self.resource_pool_spec.values()))


IGNORED = {"ray_wait_register_center_timeout", "use_gpu"}
"""Arguments of verl's without an effect here."""

PROFILING = {"profile_steps", "worker_nsight_options"}


class _Names(WorkerGroup):
    """Attributes and methods of groups in verl, of whole groups and of roles."""

    @property
    def name_prefix(self) -> str:
        return self.name

    @property
    def worker_names(self) -> list[str]:
        """The name of each rank, as in Ray's dashboard: ``workers[0]``."""
        return [f"{self.name}[{rank}]" for rank in range(self.world_size)]

    @property
    def _dispatch_info(self) -> dict[str, list[int]]:
        """By mesh, the dp rank of each rank, for the meshes that calls have needed so far."""
        return {name: list(mesh.dp_ranks) for name, mesh in self._meshes.all_known().items()}

    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> Future[list[Any]]:
        """Call a method, registered or not, on every rank, with arguments dispatched as by ``ALL_TO_ALL``.

        Raises:
            GroupClosedError: the group was shut down.
        """
        return super()._execute(Registration(name=method_name, dispatch_mode=ALL_TO_ALL), Arguments(args, kwargs))

    def _execute(self, registration: Registration, arguments: Arguments) -> Future[Any]:
        # Values that are not batches are copied to all ranks: each would process the whole TensorDict.
        splits = registration.returns_batch or registration.dispatch_mode is Dispatch.DP_COMPUTE_METRIC
        if splits and any(isinstance(each, TensorDictBase) for each in (*arguments.args, *arguments.kwargs.values())):
            raise DispatchError(
                f"{self.name}.{registration.name} splits batches, and got a TensorDict: "
                "convert it with DataProto.from_tensordict(...)"
            )
        return super()._execute(registration, arguments)

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, WorkerGroup]:
        return colocation.spawn(self, prefix_set, kind=_RoleWorkerGroup)

    def spawn_fused(self, prefix_set: Iterable[str]) -> dict[str, WorkerGroup]:
        """:meth:`spawn`: both share processes the same way."""
        return self.spawn(prefix_set)

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Make the group of each role an attribute of this one, with the errors of :meth:`spawn`."""
        colocation.fuse(self, prefix_set)

    def start_worker_aliveness_check(self, every_n_seconds: float = 1) -> None:
        """Do nothing: calls to a dead worker fail at once without a check."""


class _RoleWorkerGroup(_Names, colocation.RoleWorkerGroup):
    """A role of a colocated group."""


class RayWorkerGroup(_Names, ray_backend.RayWorkerGroup):
    """:class:`asyncrl.single_controller.ray.RayWorkerGroup` with verl's arguments.

        >>> pool = RayResourcePool([2], use_gpu=False)
        >>> init = create_colocated_worker_cls({"actor": RayClassWithInitArgs(Worker)})
        >>> with RayWorkerGroup(pool, init, name_prefix="workers") as workers:
        ...     workers.actor_execute_func_rank_zero(len, "abc")
        3

    Args:
        bin_pack: False allows the bundles of a placement group on several nodes.
        detached: the workers outlive the program; :meth:`from_detached` attaches to them.
        device_name: ``cuda`` or ``cpu``; the pool determines what a worker gets.
        ignored: arguments of verl's without an effect here: ``ray_wait_register_center_timeout``, ``use_gpu``, and, if
            they are None, ``profile_steps`` and ``worker_nsight_options``.

    Raises:
        ResourceError: an argument is not supported, or ``worker_env`` sets a variable that asyncrl sets.
    """

    def __init__(
        self,
        resource_pool: ray_backend.RayResourcePool | None = None,
        ray_cls_with_init: ClassWithInitArgs | None = None,
        bin_pack: bool = True,
        name_prefix: str | None = None,
        detached: bool = False,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Any] | None = None,
        *,
        worker_env: Mapping[str, str] | None = None,
        device_name: str = "cuda",
        **ignored: Any,
    ) -> None:
        if worker_names or worker_handles:
            raise ResourceError("for existing workers, use RayWorkerGroup.from_detached(worker_names=...)")
        if resource_pool is None or ray_cls_with_init is None:
            raise ResourceError("a worker group needs resource_pool and ray_cls_with_init")
        unknown = ignored.keys() - IGNORED - {name for name in PROFILING if ignored.get(name) is None}
        if unknown:
            raise ResourceError(f"{sorted(unknown)} is not supported by worker groups")
        require_device(device_name)
        made = RayClassWithInitArgs.of(ray_cls_with_init)
        if not bin_pack and resource_pool.strategy == "STRICT_PACK":
            resource_pool.strategy = "PACK"
        given = made.actor_options.get("env_vars", {})
        variables = {**given, **_variables(name_prefix or "", resource_pool, worker_env or {})}
        super().__init__(resource_pool, made.options(env_vars=variables), name=name_prefix or "", detached=detached)

    @classmethod
    def from_detached(
        cls,
        name_prefix: str | None = None,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Any] | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        **ignored: Any,
    ) -> Self:
        """Attach to a detached group, by its ``name_prefix`` or the ``worker_names`` that it had.

        The names may also be those of verl's workers, ``PREFIXCLASS_0:1``, together with ``ray_cls_with_init``.

        Raises:
            ResourceError: neither is given, the names belong to several groups, or the group does not exist.
        """
        if worker_handles is not None:
            raise ResourceError(
                "workers are found by their group's name, not by handles: from_detached(name_prefix=...)"
            )
        names = {_group_of(name, ray_cls_with_init) for name in worker_names or ()} or {name_prefix or ""}
        if len(names) > 1 or not all(names):
            raise ResourceError(f"from_detached needs the name of one group, got {sorted(names)}")
        return cls.attach(names.pop(), ray_cls_with_init)


def _group_of(worker: str, made: RayClassWithInitArgs | None) -> str:
    """Return the group in a worker's name, ``GROUP[1]`` or verl's ``GROUPCLASS_0:1``; empty if it is neither."""
    label = "" if made is None else made.cls.__name__
    found = re.fullmatch(rf"(.*)(?:\[\d+\]|{re.escape(label)}_\d+:\d+)", worker, re.DOTALL)
    return found[1] if found and (label or worker.endswith("]")) else ""


def _variables(name: str, pool: ray_backend.RayResourcePool, worker_env: Mapping[str, str]) -> dict[str, str]:
    ranks = WorkerContext.of_environment().environment().keys()
    own = {"WG_PREFIX": name, "WG_BACKEND": "ray", "RAY_LOCAL_WORLD_SIZE": str(pool.store[0])}
    if taken := sorted(worker_env.keys() & {*ranks, *own}):
        raise ResourceError(f"worker_env cannot set {taken}: worker groups set these variables")
    return {**own, **worker_env}


def create_colocated_worker_raw_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> type[Any]:
    """Return the class of :func:`create_colocated_worker_cls`, to derive from: ``self.actor`` is a role's worker.

    >>> both = create_colocated_worker_raw_cls({"left": ClassWithInitArgs(Worker), "right": ClassWithInitArgs(Worker)})
    >>> both().left.rank
    0
    """
    return colocation.create_colocated_worker_cls(class_dict).cls
