"""Colocation: workers of several roles in the same processes, each role called as a group of its own.

::

    colocated = create_colocated_worker_cls({"actor": ClassWithInitArgs(Actor), "critic": ClassWithInitArgs(Critic)})
    group = LocalWorkerGroup(colocated, world_size=2, name="trainer")  # or RayWorkerGroup(pool, colocated)
    roles = group.spawn({"actor", "critic"})
    roles["actor"].update(batch)  # the same call as group.actor_update(batch)
"""

# ruff: noqa: SLF001  a role is a view of another group of its own base class

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from asyncrl.data.future import Future
from asyncrl.errors import DispatchError, InfrastructureError, ResourceError
from asyncrl.single_controller.call import Arguments, Call, Failed
from asyncrl.single_controller.decorator import Registration, mark, registrations
from asyncrl.single_controller.invocation import Invocation, Unwatched
from asyncrl.single_controller.mesh import MeshDispatch, MeshPlace
from asyncrl.single_controller.streams import Source
from asyncrl.single_controller.worker import Worker
from asyncrl.single_controller.worker_group import ClassWithInitArgs, WorkerGroup

__all__ = [
    "ColocatedWorker",
    "RoleWorkerGroup",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
    "fuse",
    "spawn",
]

if TYPE_CHECKING:
    from asyncrl.data.plan import Rows
    from asyncrl.data.proto import DataProto

C = TypeVar("C", bound=ClassWithInitArgs)


class ColocatedWorker(Worker):
    """The worker that holds one worker of every role; made by :func:`create_colocated_worker_cls`.

    The roles' workers are constructed in the order of the roles, know the same rank, and see each other in
    :attr:`Worker.colocated`. Their plain methods run one after another in one thread, whichever role they are of; their
    ``async def`` methods side by side. At shutdown each role's worker is closed, in the opposite order.

        >>> init = create_colocated_worker_cls({"left": ClassWithInitArgs(Greeter)})
        >>> init().left.greet("hi")
        'hi, from 0 of 1'
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

    async def _mesh_place(self, mesh_name: str) -> MeshPlace | None:
        return self._mesh_place_in_line(mesh_name)

    def _mesh_place_in_line(self, mesh_name: str) -> MeshPlace | None:
        role, _, name = mesh_name.partition(".")
        worker = self.colocated.get(role)
        return worker._meshes.get(name) if isinstance(worker, Worker) else None

    async def aclose(self) -> None:
        """Close every role's worker, also after one of them fails; plain ``close`` methods run in a thread.

            >>> init = create_colocated_worker_cls({"left": ClassWithInitArgs(Greeter)})
            >>> asyncio.run(ColocatedWorker.aclose(init()))

        Raises:
            ExceptionGroup: several of them failed; the error itself if only one did.
        """
        errors: list[Exception] = []
        for worker in reversed(self._workers.values()):
            try:
                if hasattr(worker, "aclose"):
                    await worker.aclose()
                elif hasattr(worker, "close"):
                    await asyncio.to_thread(worker.close)
            except Exception as error:  # noqa: BLE001  raised below, once all are closed
                errors.append(error)
        _raise(errors)

    def close(self) -> None:
        """:meth:`aclose` where no role has an ``aclose``: in the thread of plain methods, as without colocation.

            >>> create_colocated_worker_cls({"left": ClassWithInitArgs(Greeter)})().close()

        Raises:
            ExceptionGroup: as :meth:`aclose`.
        """
        errors: list[Exception] = []
        for worker in reversed(self._workers.values()):
            try:
                if hasattr(worker, "close"):
                    worker.close()
            except Exception as error:  # noqa: BLE001  raised below, once all are closed
                errors.append(error)
        _raise(errors)


def _raise(errors: Sequence[Exception]) -> None:
    if len(errors) > 1:
        raise ExceptionGroup("workers of several roles failed to close", errors)
    if errors:
        raise errors[0]


def create_colocated_worker_cls(class_dict: Mapping[str, C]) -> C:
    """One class, with arguments, that holds a worker of every role; ``spawn`` gives a group for each.

    A registered method ``update`` of role ``actor`` is ``actor_update`` of the group made of this.

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

    Args:
        class_dict: class and arguments by role. Options of actors (``num_gpus``, ``env_vars``, ...) are put together:
            they are those of the one process that all roles share.

    Raises:
        DispatchError: no role, a role that is no name, or methods of two roles that get the same name.
        ResourceError: two roles give different values for one option.
    """
    if not class_dict:
        raise DispatchError("create_colocated_worker_cls needs at least one role")
    methods: dict[str, Any] = {}
    for role, made in class_dict.items():
        if not role.isidentifier() or role.startswith("_"):
            raise DispatchError(f"a role must be a name that does not begin with an underscore, got {role!r}")
        for name, registration in registrations(made.cls).items():
            both = f"{role}_{name}"
            if both in methods or hasattr(ColocatedWorker, both):
                raise DispatchError(f"method {name} of role {role!r} is called {both} in the group, and so is another")
            delegate = _delegate(role, name, inspect.getattr_static(made.cls, name))
            mode = registration.dispatch_mode
            if isinstance(mode, MeshDispatch):
                mode = MeshDispatch(f"{role}.{mode.mesh_name}")
            methods[both] = mark(delegate, replace(registration, name=both, dispatch_mode=mode))
    if not any(hasattr(made.cls, "aclose") for made in class_dict.values()):
        methods["aclose"] = None
    plain = {role: ClassWithInitArgs(made.cls, *made.args, **made.kwargs) for role, made in class_dict.items()}
    colocated = type(f"Colocated_{'_'.join(class_dict)}", (ColocatedWorker,), {"role_classes": plain, **methods})
    together = type(next(iter(class_dict.values())))(colocated)
    options = _options(class_dict)
    if options:
        together.update_options(options)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    return together


def create_colocated_worker_cls_fused(class_dict: Mapping[str, C]) -> C:
    """:func:`create_colocated_worker_cls`, under the name of verl's second one: there is one way to share a process.

        >>> create_colocated_worker_cls_fused({"actor": ClassWithInitArgs(Worker)})
        ClassWithInitArgs(Colocated_actor)

    Raises:
        DispatchError: as :func:`create_colocated_worker_cls`.
        ResourceError: likewise.
    """
    return create_colocated_worker_cls(class_dict)


def fuse(group: WorkerGroup, roles: Iterable[str]) -> None:
    """Make the group of each role an attribute of ``group``: ``group.actor.update(batch)``.

        >>> fuse(colocated, {"left", "right"})
        >>> colocated.left.greet("hi").result()
        ['hi, from 0 of 1']

    Raises:
        DispatchError: the group has no such role.
    """
    for role, spawned in group.spawn(roles).items():
        setattr(group, role, spawned)


def _options(class_dict: Mapping[str, ClassWithInitArgs]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for role, made in class_dict.items():
        given: Mapping[str, Any] = getattr(made, "actor_options", {})
        for name, value in given.items():
            if name == "env_vars":
                _add(options.setdefault(name, {}), value, role=role)
            else:
                _add(options, {name: value}, role=role)
    return options


def _add(options: dict[str, Any], given: Mapping[str, Any], *, role: str) -> None:
    for name, value in given.items():
        if options.setdefault(name, value) != value:
            raise ResourceError(
                f"role {role!r} asks for {name}={value!r} and another role of the same processes for "
                f"{options[name]!r}: give the same to all, or to one only"
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
    """A group for each role, on the workers of ``group``; of another ``kind`` than :class:`RoleWorkerGroup`, if given.

        >>> sorted(spawn(colocated, {"left", "right"}))
        ['left', 'right']

    Raises:
        DispatchError: the group has no such role.
    """
    made = kind or RoleWorkerGroup
    known: Mapping[str, ClassWithInitArgs] = getattr(group.cls_with_init.cls, "role_classes", {})
    wanted = sorted({roles} if isinstance(roles, str) else set(roles))
    if unknown := [role for role in wanted if role not in known]:
        raise DispatchError(
            f"{group.name} has no roles {unknown}, only {list(known)}: "
            "roles come from the dictionary given to create_colocated_worker_cls"
        )
    return {role: made(group, role, known[role]) for role in wanted}


class RoleWorkerGroup(WorkerGroup):
    """One role of a colocated group. The workers are those of ``group``, and end with it.

    Calls of all roles reach the workers in the order of the program (but for a role's first call in a mesh, which other
    roles do not wait for). Shutting this group down ends its own calls only.

        >>> colocated.spawn({"left"})["left"].name
        'Colocated_left_right.left'
    """

    def __init__(self, group: WorkerGroup, role: str, made: ClassWithInitArgs) -> None:
        self._group = group
        self._role = role
        super().__init__(made, world_size=group.world_size, name=f"{group.name}.{role}", loop=group._loop)
        self._ready = group.ready()
        self._line = group._line
        group._roles.add(self)

    def _execute(self, registration: Registration, arguments: Arguments, *, plain: bool = True) -> Future[Any]:
        if self._group._closed:
            raise InfrastructureError(
                f"worker group {self._group.name} is closed: its role {self._role} takes no calls"
            )
        return super()._execute(registration, arguments, plain=plain)

    def _may_send_here(self) -> bool:
        return self._group._may_send_here()

    @property
    def _home(self) -> WorkerGroup:
        return self._group

    def _method_of(self, registration: Registration) -> str:
        return f"{self._role}.{registration.name}"

    async def _start(self) -> list[Failed | None]:
        raise AssertionError("the workers are started by the group they belong to")

    def _submit(self, rank: int, call: Call, sequence: int, invocation: Invocation) -> Unwatched | None:
        return self._group._submit(rank, call, sequence, invocation)

    def _open_stream(self, rank: int, call: Call, sequence: int) -> Source:
        return self._group._open_stream(rank, call, sequence)

    def _take_now(self, replies: Sequence[Unwatched], timeout_s: float) -> bool:
        return self._group._take_now(replies, timeout_s)

    def _sent(self) -> None:
        self._group._sent()

    def _explain(self, rank: int, method: str, sequence: int, error: BaseException) -> BaseException:
        return self._group._explain(rank, method, sequence, error)

    def _cancel(self, rank: int, sequence: int) -> None:
        self._group._cancel(rank, sequence)

    def _skip(self, rank: int, sequence: int) -> None:
        self._group._skip(rank, sequence)

    def _store(self, value: Any) -> Any:
        return self._group._store(value)

    def _store_parts(self, data: DataProto, parts: Sequence[Rows]) -> list[Any]:
        return self._group._store_parts(data, parts)

    async def _close_workers(self) -> list[Failed | None]:
        return []

    def _kill(self) -> None:
        """The workers belong to another group."""
