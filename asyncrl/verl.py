"""verl's names with verl's defaults, for programs written for its single controller: change the imports, and they run.

::

    from asyncrl.verl import DataProto, Dispatch, Worker, register  # was: from verl..., from verl.single_controller...

Where a default differs from asyncrl's own, this module has verl's: calls block and return values, pools have GPUs and
room for ten groups, ``ALL_TO_ALL`` scatters lists and copies what is none. All else is asyncrl's. What does not run is
listed in ``docs/migrating-from-verl.md``, and is refused by name here instead of being ignored.

    >>> from asyncrl.single_controller.local import LocalWorkerGroup
    >>> class Counter(Worker):
    ...     @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    ...     def add(self, x):
    ...         return self.rank + x
    >>> with LocalWorkerGroup(ClassWithInitArgs(cls=Counter), world_size=3) as group:
    ...     group.add(10)  # blocking, as in verl
    [10, 11, 12]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, TypeVar

from asyncrl.data.folding import fold_batch_dim, unfold_batch_dim
from asyncrl.data.future import DataProtoFuture
from asyncrl.data.padding import pad_dataproto_to_divisor, unpad_dataproto
from asyncrl.data.proto import DataProto, DataProtoItem
from asyncrl.errors import ResourceError
from asyncrl.single_controller import decorator, worker
from asyncrl.single_controller import ray as ray_backend
from asyncrl.single_controller.colocation import create_colocated_worker_cls, create_colocated_worker_cls_fused
from asyncrl.single_controller.decorator import mark, registrations
from asyncrl.single_controller.dispatch import CustomDispatch, Dispatch, DispatchMode, Execute
from asyncrl.single_controller.dispatch_functions import (
    collect_all_to_all,
    collect_dp_compute,
    collect_dp_compute_data_proto,
    collect_nd_compute,
    collect_nd_compute_dataproto,
    dispatch_all_to_all,
    dispatch_dp_compute,
    dispatch_dp_compute_data_proto,
    dispatch_dp_compute_data_proto_with_func,
    dispatch_nd_compute,
    dispatch_nd_compute_dataproto,
    dispatch_one_to_all,
    get_predefined_dispatch_fn,
    get_predefined_execute_fn,
    register_dispatch_mode,
    update_dispatch_mode,
)
from asyncrl.single_controller.mesh import make_nd_compute_dataproto_dispatch_fn
from asyncrl.single_controller.ray import RayClassWithInitArgs
from asyncrl.single_controller.ray_resource_pool import (
    SubRayResourcePool,
    merge_resource_pool,
    split_resource_pool,
)
from asyncrl.single_controller.resource_pool import ResourcePool
from asyncrl.single_controller.resource_pool_manager import ResourcePoolManager as _ResourcePoolManager
from asyncrl.single_controller.role import Role
from asyncrl.single_controller.worker_group import ClassWithInitArgs, WorkerGroup

if TYPE_CHECKING:
    from asyncrl.data.pending import Future

__all__ = [
    "ClassWithInitArgs",
    "DataProto",
    "DataProtoFuture",
    "DataProtoItem",
    "Dispatch",
    "Execute",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePool",
    "ResourcePoolManager",
    "Role",
    "SubRayResourcePool",
    "Worker",
    "WorkerGroup",
    "collect_all_to_all",
    "collect_dp_compute",
    "collect_dp_compute_data_proto",
    "collect_nd_compute",
    "collect_nd_compute_dataproto",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
    "dispatch_all_to_all",
    "dispatch_dp_compute",
    "dispatch_dp_compute_data_proto",
    "dispatch_dp_compute_data_proto_with_func",
    "dispatch_nd_compute",
    "dispatch_nd_compute_dataproto",
    "dispatch_one_to_all",
    "fold_batch_dim",
    "get_predefined_dispatch_fn",
    "get_predefined_execute_fn",
    "make_nd_compute_dataproto_dispatch_fn",
    "merge_resource_pool",
    "pad_dataproto_to_divisor",
    "register",
    "register_dispatch_mode",
    "split_resource_pool",
    "unfold_batch_dim",
    "unpad_dataproto",
    "update_dispatch_mode",
]

F = TypeVar("F", bound=Callable[..., Any])


def _scatter_or_copy(group: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Lists as long as the group are scattered if all arguments are such lists; otherwise all are copied."""
    each = [*args, *kwargs.values()]
    if all(isinstance(value, list) and len(value) == group.world_size for value in each):
        return args, kwargs
    return dispatch_one_to_all(group, *args, **kwargs)


def _scatter_or_copy_rest(group: Any, name: str, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    listed, named = _scatter_or_copy(group, *args, **kwargs)
    return ([name] * group.world_size, *listed), named


_ALL_TO_ALL = CustomDispatch(dispatch_fn=_scatter_or_copy, collect_fn=collect_all_to_all)
_CALL = CustomDispatch(dispatch_fn=_scatter_or_copy_rest, collect_fn=collect_all_to_all)


def register(
    dispatch_mode: DispatchMode = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable[[F], F]:
    """:func:`asyncrl.register` with verl's default, ``blocking=True``, and verl's ``ALL_TO_ALL``."""
    scatters = dispatch_mode is Dispatch.ALL_TO_ALL
    mode = Dispatch.RANK_ZERO if scatters and execute_mode is Execute.RANK_ZERO else dispatch_mode
    offer = decorator.register(mode, execute_mode, blocking, materialize_futures)

    def decorate(method: F) -> F:
        offered = offer(method)
        if mode is Dispatch.ALL_TO_ALL or isinstance(mode, dict):
            # Collect functions written for verl take batches, not futures of them.
            own = mode if isinstance(mode, dict) else _ALL_TO_ALL
            mark(offered, replace(_registration(offered), dispatch_mode=own, returns_batch=False))
        return offered

    return decorate


def _registration(method: Callable[..., Any]) -> decorator.Registration:
    holder = type("Holder", (), {"method": method})
    return registrations(holder)["method"]


class Worker(worker.Worker):
    """:class:`asyncrl.Worker` with the methods that every group has in verl."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``func(worker, ...)`` on every rank, with its share of the batches' rows; the results are joined."""
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``func(...)`` on rank 0."""
        return func(*args, **kwargs)

    @register(dispatch_mode=_CALL, blocking=False)
    def execute_method(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """A method by its name, registered or not; arguments as by :data:`Dispatch.ALL_TO_ALL` of verl."""
        return getattr(self, method_name)(*args, **kwargs)


class RayResourcePool(ray_backend.RayResourcePool):
    """:class:`asyncrl.single_controller.ray.RayResourcePool` with verl's defaults.

    GPUs, room for ten worker groups, seats of a place on one node. The groups share one CPU a seat: verl asks for one
    each, which on a machine without as many waits for ever.
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
            process_on_nodes or (),
            use_gpu,
            name_prefix,
            max_colocate_count,
            cpus_per_worker=1.0 / max_colocate_count,
            accelerator_type=accelerator_type,
            strategy="STRICT_PACK",
            detached=detached,
        )


class RayWorkerGroup(ray_backend.RayWorkerGroup):
    """:class:`asyncrl.single_controller.ray.RayWorkerGroup` with verl's arguments.

    Args:
        resource_pool, ray_cls_with_init: the seats; the class, its arguments and options.
        bin_pack: False lets the seats of a place lie on several nodes.
        name_prefix: name of the group.
        detached: the workers outlive the program; :meth:`from_detached` goes on with them.
        worker_env: environment variables of the workers.
        device_name: ``cuda`` or ``cpu``; what a worker gets is said by its pool.
        ignored: of verl's other arguments those that have nothing to do here: ``ray_wait_register_center_timeout``,
            ``use_gpu``, ``profile_steps``, ``worker_nsight_options``.

    Raises:
        ResourceError: an argument that asks for what is not supported.
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
        unknown = ignored.keys() - {"ray_wait_register_center_timeout", "use_gpu", "profile_steps"}
        unknown -= {"worker_nsight_options"}
        if worker_names or worker_handles:
            raise ResourceError("workers that are there already: use RayWorkerGroup.from_detached(worker_names=...)")
        if resource_pool is None or ray_cls_with_init is None:
            raise ResourceError("a group needs a pool and a class")
        if unknown or any(ignored.get(name) for name in ("profile_steps", "worker_nsight_options")):
            raise ResourceError(f"{sorted(unknown) or 'profiling'} is not supported by worker groups")
        if device_name not in ("cuda", "cpu"):
            raise ResourceError(f"device_name must be 'cuda' or 'cpu', got {device_name!r}")
        if not isinstance(ray_cls_with_init, RayClassWithInitArgs):
            init = ray_cls_with_init
            ray_cls_with_init = RayClassWithInitArgs(init.cls, *init.args, **init.kwargs)
        if worker_env:
            ray_cls_with_init = ray_cls_with_init.options(env_vars=dict(worker_env))
        if not bin_pack and resource_pool.strategy == "STRICT_PACK":
            resource_pool.strategy = "PACK"
        super().__init__(resource_pool, ray_cls_with_init, name=name_prefix or "", detached=detached)

    @classmethod
    def from_detached(
        cls,
        name_prefix: str | None = None,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Any] | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        **ignored: Any,
    ) -> Self:
        """Go on with a detached group, named by ``name_prefix`` or by the ``worker_names`` that it had.

        Raises:
            ResourceError: neither is given, the names are of several groups, or there is no such group.
        """
        if worker_handles is not None:
            raise ResourceError(
                "workers are found by their group's name, not by handles: from_detached(name_prefix=...)"
            )
        names = {name.rpartition("[")[0] for name in worker_names or ()} or {name_prefix or ""}
        if len(names) > 1 or not all(names):
            raise ResourceError(f"from_detached needs the name of one group, got {sorted(names)}")
        return cls.attach(names.pop(), ray_cls_with_init)

    @property
    def worker_names(self) -> list[str]:
        """A name for each rank, as in Ray's dashboard."""
        return [f"{self.name}[{rank}]" for rank in range(self.world_size)]

    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> Future[list[Any]]:
        """Call a method, registered or not, on every rank; lists as long as the group are scattered if all are."""
        each = [*args, *kwargs.values()]
        if each and all(isinstance(value, list) and len(value) == self.world_size for value in each):
            future: Future[list[Any]] = self.execute_method(method_name, *args, **kwargs)
            return future
        return super().execute_all(method_name, *args, **kwargs)

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Make the group of each role an attribute of this one."""
        from asyncrl.single_controller.colocation import fuse

        fuse(self, prefix_set)

    def start_worker_aliveness_check(self, every_n_seconds: float = 1) -> None:
        """Nothing to start: calls of a worker that died fail by themselves, at once."""


class ResourcePoolManager(_ResourcePoolManager):
    """:class:`asyncrl.single_controller.ResourcePoolManager` of GPU pools, three groups in each, as in verl."""

    def __init__(self, resource_pool_spec: Mapping[str, Sequence[int]], mapping: Mapping[Any, str]) -> None:
        super().__init__(
            resource_pool_spec,
            mapping,
            use_gpu=True,
            max_colocate_count=3,
            cpus_per_worker=1.0 / 3,
            strategy="STRICT_PACK",
        )
