"""RayWorkerGroup with verl's arguments and the names that groups have in verl."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from tensordict import TensorDictBase

from asyncrl.errors import DispatchError, ResourceError
from asyncrl.single_controller import colocation
from asyncrl.single_controller import ray as ray_backend
from asyncrl.single_controller.call import Arguments
from asyncrl.single_controller.decorator import Registration
from asyncrl.single_controller.dispatch import Dispatch
from asyncrl.single_controller.ray_class import RayClassWithInitArgs
from asyncrl.single_controller.worker import WorkerContext
from asyncrl.single_controller.worker_group import ClassWithInitArgs, WorkerGroup
from asyncrl.verl.decorator import ALL_TO_ALL
from asyncrl.verl.resource_pool import require_device

if TYPE_CHECKING:
    from asyncrl.data.future import Future

__all__ = ["RayWorkerGroup", "create_colocated_worker_raw_cls"]

IGNORED = {"ray_wait_register_center_timeout", "use_gpu"}
"""Arguments that have nothing to do here, whatever they are."""

PROFILING = {"profile_steps", "worker_nsight_options"}


class _Names(WorkerGroup):
    """What groups have in verl, whether their workers are their own or a role's."""

    @property
    def name_prefix(self) -> str:
        """The name of the group.

        >>> workers.name_prefix
        'workers'
        """
        return self.name

    @property
    def worker_names(self) -> list[str]:
        """A name for each rank, as in Ray's dashboard.

        >>> workers.worker_names
        ['workers[0]', 'workers[1]']
        """
        return [f"{self.name}[{rank}]" for rank in range(self.world_size)]

    @property
    def _dispatch_info(self) -> dict[str, list[int]]:
        """By mesh, the dp rank of each rank; of the meshes that calls have needed so far."""
        return {name: list(mesh.dp_ranks) for name, mesh in self._meshes.all_known().items()}

    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> Future[list[Any]]:
        """Call a method, registered or not, on every rank; lists as long as the group are scattered if all are.

            >>> workers.execute_all("__getattribute__", ["rank", "world_size"]).result()
            [0, 2]

        Raises:
            GroupClosedError: the group was shut down.
        """
        return super()._execute(Registration(name=method_name, dispatch_mode=ALL_TO_ALL), Arguments(args, kwargs))

    def _execute(self, registration: Registration, arguments: Arguments, *, plain: bool = True) -> Future[Any]:
        # Copied to all ranks, as whatever is no batch, each would do all of the work.
        splits = registration.returns_batch or registration.dispatch_mode is Dispatch.DP_COMPUTE_METRIC
        if splits and any(isinstance(each, TensorDictBase) for each in (*arguments.args, *arguments.kwargs.values())):
            raise DispatchError(
                f"{self.name}.{registration.name} splits batches, and was given a TensorDict: "
                "DataProto.from_tensordict(...) makes it one"
            )
        return super()._execute(registration, arguments, plain=plain)

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, WorkerGroup]:
        """A group for each of these roles, on the workers of this one.

            >>> workers.spawn({"actor"})["actor"].execute_func_rank_zero(len, "abc")
            3

        Raises:
            DispatchError: the group has no such role.
        """
        return colocation.spawn(self, prefix_set, kind=_RoleWorkerGroup)

    def spawn_fused(self, prefix_set: Iterable[str]) -> dict[str, WorkerGroup]:
        """:meth:`spawn`: there is one way to share a process.

            >>> list(workers.spawn_fused({"actor"}))
            ['actor']

        Raises:
            DispatchError: the group has no such role.
        """
        return self.spawn(prefix_set)

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Make the group of each role an attribute of this one.

            >>> workers.fuse({"actor"})
            >>> workers.actor.execute_func_rank_zero(len, "abc")
            3

        Raises:
            DispatchError: the group has no such role.
        """
        colocation.fuse(self, prefix_set)

    def start_worker_aliveness_check(self, every_n_seconds: float = 1) -> None:
        """Nothing to start: calls of a worker that died fail by themselves, at once.

        >>> workers.start_worker_aliveness_check()
        """


class _RoleWorkerGroup(_Names, colocation.RoleWorkerGroup):
    """A role of a colocated group."""


class RayWorkerGroup(_Names, ray_backend.RayWorkerGroup):
    """:class:`asyncrl.single_controller.ray.RayWorkerGroup` with verl's arguments.

        >>> pool = RayResourcePool([2], use_gpu=False)
        >>> init = create_colocated_worker_cls({"actor": RayClassWithInitArgs(Worker)})
        >>> with RayWorkerGroup(pool, init, name_prefix="workers") as workers:
        ...     workers.actor_execute_func_rank_zero(len, "abc")
        3

    The examples of the methods are about such a group.

    Args:
        resource_pool, ray_cls_with_init: the seats; the class, its arguments and options.
        bin_pack: False lets the seats of a place lie on several nodes.
        name_prefix: name of the group.
        detached: the workers outlive the program; :meth:`from_detached` goes on with them.
        worker_env: environment variables of the workers.
        device_name: ``cuda`` or ``cpu``; what a worker gets is said by its pool.
        ignored: of verl's other arguments those that have nothing to do here: ``ray_wait_register_center_timeout``,
            ``use_gpu``, and, if they are None, ``profile_steps`` and ``worker_nsight_options``.

    Raises:
        ResourceError: an argument that asks for what is not supported, or a variable in ``worker_env`` that tells
            workers their place.
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
            raise ResourceError("workers that are there already: use RayWorkerGroup.from_detached(worker_names=...)")
        if resource_pool is None or ray_cls_with_init is None:
            raise ResourceError("a group needs a pool and a class")
        unknown = ignored.keys() - IGNORED - {name for name in PROFILING if ignored.get(name) is None}
        if unknown:
            raise ResourceError(f"{sorted(unknown)} is not supported by worker groups")
        require_device(device_name)
        if not isinstance(ray_cls_with_init, RayClassWithInitArgs):
            init = ray_cls_with_init
            ray_cls_with_init = RayClassWithInitArgs(init.cls, *init.args, **init.kwargs)
        if not bin_pack and resource_pool.strategy == "STRICT_PACK":
            resource_pool.strategy = "PACK"
        given = ray_cls_with_init.actor_options.get("env_vars", {})
        variables = {**given, **_variables(name_prefix or "", resource_pool, worker_env or {})}
        made = ray_cls_with_init.options(env_vars=variables)
        super().__init__(resource_pool, made, name=name_prefix or "", detached=detached)

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

        The names may also be those that verl gives workers, ``PREFIXCLASS_0:1``, together with ``ray_cls_with_init``.

            >>> pool = RayResourcePool([1], use_gpu=False, detached=True)
            >>> made = RayWorkerGroup(pool, RayClassWithInitArgs(Worker), name_prefix="kept", detached=True)
            >>> made.ready().result()
            >>> again = RayWorkerGroup.from_detached(worker_names=made.worker_names)  # in another program, too
            >>> again.execute_func_rank_zero(len, "abc")
            3
            >>> again.shutdown()

        Raises:
            ResourceError: neither is given, the names are of several groups, or there is no such group.
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
    """The group of a worker, by its name: ``GROUP[1]``, or verl's ``GROUPCLASS_0:1``; empty if it is neither."""
    label = "" if made is None else made.cls.__name__
    found = re.fullmatch(rf"(.*)(?:\[\d+\]|{re.escape(label)}_\d+:\d+)", worker, re.DOTALL)
    return found[1] if found and (label or worker.endswith("]")) else ""


def _variables(name: str, pool: ray_backend.RayResourcePool, worker_env: Mapping[str, str]) -> dict[str, str]:
    place = WorkerContext.of_environment().environment().keys()
    own = {"WG_PREFIX": name, "WG_BACKEND": "ray", "RAY_LOCAL_WORLD_SIZE": str(pool.store[0])}
    if taken := sorted(worker_env.keys() & {*place, *own}):
        raise ResourceError(f"worker_env cannot set {taken}: they tell workers their place in the group")
    return {**own, **worker_env}


def create_colocated_worker_raw_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> type[Any]:
    """The class of :func:`create_colocated_worker_cls`, to derive from: ``self.actor`` is the worker of a role.

        >>> both = create_colocated_worker_raw_cls(
        ...     {"left": ClassWithInitArgs(Worker), "right": ClassWithInitArgs(Worker)}
        ... )
        >>> both().left.rank
        0

    Raises:
        DispatchError: as :func:`create_colocated_worker_cls`.
        ResourceError: likewise.
    """
    made: type[Any] = colocation.create_colocated_worker_cls(class_dict).cls
    return made
