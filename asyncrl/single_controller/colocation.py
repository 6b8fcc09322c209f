"""Colocation: workers of several roles share processes, and each role is called as a separate group."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from asyncrl.errors import DispatchError, ResourceError
from asyncrl.single_controller.call import Failed
from asyncrl.single_controller.decorator import Registration, mark, registrations
from asyncrl.single_controller.host import workers_of
from asyncrl.single_controller.mesh import MeshDispatch, MeshPosition
from asyncrl.single_controller.worker import Worker
from asyncrl.single_controller.worker_group import ClassWithInitArgs, WorkerGroup

# ruff: noqa: SLF001  a role delegates to the private methods of its group

C = TypeVar("C", bound=ClassWithInitArgs)


class ColocatedWorker(Worker):
    """A worker that holds one worker of every role; made by :func:`create_colocated_worker_cls`.

    The roles' workers are constructed in the order of the roles, have the same rank, and find each other in
    :attr:`Worker.colocated`. The synchronous methods of all roles run one after another in one thread; their
    ``async def`` methods run concurrently. At shutdown each role's worker is closed, in the opposite order.
    """

    role_classes: ClassVar[Mapping[str, ClassWithInitArgs]] = {}

    def __init__(self) -> None:
        super().__init__()
        self._workers: dict[str, Any] = {}
        for role, made in self.role_classes.items():
            self._workers[role] = made()
        self.colocated = self._workers
        for worker in self._workers.values():
            if isinstance(worker, Worker):
                worker.colocated = self._workers

    def __getattr__(self, name: str) -> Any:
        role, dot, method = name.partition(".")
        workers: dict[str, Any] = self.__dict__.get("_workers", {})
        if name in workers:
            return workers[name]
        if dot and role in workers:
            return getattr(workers[role], method)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _mesh_position(self, mesh_name: str) -> MeshPosition | None:
        role, _, name = mesh_name.partition(".")
        worker = self.colocated.get(role)
        return worker._meshes.get(name) if isinstance(worker, Worker) else None

    @property
    def _workers_to_close(self) -> list[Any]:
        return [each for worker in reversed(self._workers.values()) for each in workers_of(worker)]


def create_colocated_worker_cls(class_dict: Mapping[str, C]) -> C:
    """Make a class that holds a worker of every role; ``spawn`` of its group returns a group for each role.

    A registered method ``update`` of role ``actor`` is ``actor_update`` of the colocated group. Options of actors
    (``num_gpus``, ``env_vars``, ...) are merged for the process that all roles share.

        >>> from asyncrl.single_controller import ClassWithInitArgs, Dispatch, register
        >>> from asyncrl.single_controller.local import LocalWorkerGroup
        >>> class Greeter(Worker):
        ...     @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        ...     def greet(self):
        ...         return f"rank {self.rank} beside {sorted(self.colocated)}"
        >>> both = create_colocated_worker_cls(
        ...     {"left": ClassWithInitArgs(Greeter), "right": ClassWithInitArgs(Greeter)}
        ... )
        >>> with LocalWorkerGroup(both, world_size=1) as group:
        ...     group.left_greet().result(), group.spawn({"right"})["right"].greet().result()
        (["rank 0 beside ['left', 'right']"], ["rank 0 beside ['left', 'right']"])

    Raises:
        DispatchError: there is no role, a role is not an identifier, or methods of two roles get the same name.
        ResourceError: two roles have different values for one option.
    """
    if not class_dict:
        raise DispatchError("create_colocated_worker_cls needs at least one role")
    methods: dict[str, Any] = {}
    for role, made in class_dict.items():
        if not role.isidentifier() or role.startswith("_"):
            raise DispatchError(f"a role must be an identifier without a leading underscore, got {role!r}")
        for name, registration in registrations(made.cls).items():
            both = f"{role}_{name}"
            if both in methods or hasattr(ColocatedWorker, both):
                raise DispatchError(
                    f"method {name} of role {role!r} would be {both} in the group, which exists already"
                )
            delegate = _delegate(role, name, inspect.getattr_static(made.cls, name))
            mode = registration.dispatch_mode
            if isinstance(mode, MeshDispatch):
                mode = replace(mode, mesh_name=f"{role}.{mode.mesh_name}")
            methods[both] = mark(delegate, replace(registration, name=both, dispatch_mode=mode))
    plain = {role: ClassWithInitArgs(made.cls, *made.args, **made.kwargs) for role, made in class_dict.items()}
    colocated = type(f"Colocated_{'_'.join(class_dict)}", (ColocatedWorker,), {"role_classes": plain, **methods})
    together = type(next(iter(class_dict.values())))(colocated)
    together.actor_options = _merged_options(class_dict)
    return together


def create_colocated_worker_cls_fused(class_dict: Mapping[str, C]) -> C:
    """:func:`create_colocated_worker_cls`, under the name of verl's second one: both share processes the same way.

    >>> create_colocated_worker_cls_fused({"actor": ClassWithInitArgs(Worker)})
    ClassWithInitArgs(Colocated_actor)
    """
    return create_colocated_worker_cls(class_dict)


def fuse(group: WorkerGroup, roles: Iterable[str]) -> None:
    """Make the group of each role an attribute of ``group``: ``group.actor.update(batch)``. Errors as :func:`spawn`."""
    for role, spawned in group.spawn(roles).items():
        setattr(group, role, spawned)


def _merged_options(class_dict: Mapping[str, ClassWithInitArgs]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for role, made in class_dict.items():
        for name, value in made.actor_options.items():
            if name == "env_vars":
                _add(options.setdefault(name, {}), value, role=role)
            else:
                _add(options, {name: value}, role=role)
    return options


def _add(options: dict[str, Any], given: Mapping[str, Any], *, role: str) -> None:
    for name, value in given.items():
        if options.setdefault(name, value) != value:
            raise ResourceError(
                f"role {role!r} has {name}={value!r} and another role of the same processes has {options[name]!r}: "
                "set the same value for all roles, or set it for one only"
            )


def _delegate(role: str, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def call_async(self: ColocatedWorker, *args: Any, **kwargs: Any) -> Any:
            return await getattr(self.colocated[role], name)(*args, **kwargs)

        return call_async

    @functools.wraps(method)
    def call(self: ColocatedWorker, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.colocated[role], name)(*args, **kwargs)

    return call


def spawn(
    group: WorkerGroup, roles: Iterable[str], *, kind: type[RoleWorkerGroup] | None = None
) -> dict[str, WorkerGroup]:
    """Return a group of class ``kind`` for each role, on the workers of ``group``.

    Raises:
        DispatchError: the group does not have such a role.
    """
    cls = group.cls_with_init.cls
    known: Mapping[str, ClassWithInitArgs] = cls.role_classes if issubclass(cls, ColocatedWorker) else {}
    wanted = sorted({roles} if isinstance(roles, str) else set(roles))
    if unknown := [role for role in wanted if role not in known]:
        raise DispatchError(
            f"{group.name} has no roles {unknown}, only {list(known)}: "
            "roles are the keys of the dictionary passed to create_colocated_worker_cls"
        )
    return {role: (kind or RoleWorkerGroup)(group, role, known[role]) for role in wanted}


class _OfGroup:
    """A method of a role that is the one of its group."""

    def __set_name__(self, _owner: type, name: str) -> None:
        self._name = name

    def __get__(self, role: RoleWorkerGroup | None, _owner: type) -> Any:
        return self if role is None else getattr(role._group, self._name)  # pyright: ignore[reportPrivateUsage]


class RoleWorkerGroup(WorkerGroup):
    """One role of a colocated group, on the workers of ``group``, which end with that group.

    Calls of all roles reach the workers in the order of the program (except that other roles do not wait for a role's
    first call in a mesh). Shutting this group down ends only its own calls.
    """

    _can_send_from_caller: Any = _OfGroup()
    _submit: Any = _OfGroup()
    _sent: Any = _OfGroup()
    _open_stream: Any = _OfGroup()
    _wait_for_replies: Any = _OfGroup()
    _explain: Any = _OfGroup()
    _cancel: Any = _OfGroup()
    _skip: Any = _OfGroup()
    _store: Any = _OfGroup()
    _store_parts: Any = _OfGroup()
    _dereference: Any = _OfGroup()

    def __init__(self, group: WorkerGroup, role: str, made: ClassWithInitArgs) -> None:
        self._group = group
        self._role = role
        super().__init__(made, world_size=group.world_size, name=f"{group.name}.{role}", loop=group._loop)
        self._ready = group.ready()
        self._order = group._order
        group._roles.add(self)

    @property
    def _worker_owner(self) -> WorkerGroup:
        return self._group

    def _method_of(self, registration: Registration) -> str:
        return f"{self._role}.{registration.name}"

    async def _start(self) -> list[Failed | None]:
        raise AssertionError("the workers are started by the group they belong to")

    async def _close_workers(self) -> list[Failed | None]:
        return []

    async def _kill(self) -> None:
        """The workers belong to another group."""
