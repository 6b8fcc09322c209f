"""``@register``: which methods of a worker class its group offers, and how their calls are split and collected."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from asyncrl.errors import DispatchError
from asyncrl.single_controller.dispatch import PROTO_MODES, Dispatch, DispatchMode, Execute
from asyncrl.single_controller.mesh import MeshDispatch
from asyncrl.single_controller.retry import Retry

if TYPE_CHECKING:
    from asyncrl.data.schema import Schema

__all__ = ["Registration", "mark", "register", "registration_of", "registrations"]

F = TypeVar("F", bound=Callable[..., Any])
_ATTRIBUTE = "__asyncrl_registration__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """How a worker group calls one method. ``returns_batch``: its result is a DataProtoFuture."""

    name: str
    dispatch_mode: DispatchMode
    execute_mode: Execute = Execute.ALL
    blocking: bool = False
    materialize_futures: bool = True
    pad: bool = True
    read_only: bool = False
    returns_batch: bool = False
    rows: Callable[..., int] | None = None
    schema: Schema | None = None
    idempotent: bool = False
    retry: Retry | None = None
    deadline_s: float | None = None
    max_concurrency: int | None = None
    priority: int = 0
    streams: bool = False

    def with_options(
        self,
        *,
        blocking: bool | None = None,
        deadline_s: float | None = None,
        retries: int | Retry | None = None,
    ) -> Registration:
        """The same for calls with these options; None leaves what was registered.

        Raises:
            DispatchError: retries of a method that is not idempotent, or a deadline that is not positive.
        """
        retry = self.retry if retries is None else _retry(retries)
        changed = replace(
            self,
            blocking=self.blocking if blocking is None else blocking,
            deadline_s=self.deadline_s if deadline_s is None else deadline_s,
            retry=retry,
        )
        changed.check()
        return changed

    def check(self) -> None:
        """Raise :class:`DispatchError` if no call can be made like this."""
        if self.retry is not None and not self.idempotent:
            raise DispatchError(f"{self.name} cannot be called again after a failure: it is not registered idempotent")
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise DispatchError(f"the deadline of {self.name} must be positive, got {self.deadline_s:g} s")
        if (self.rows is not None or self.schema is not None) and not self.returns_batch:
            raise DispatchError(f"{self.name} declares rows or a schema, and its result is no batch")
        if self.streams and (self.retry is not None or self.deadline_s is not None or self.blocking):
            raise DispatchError(f"{self.name} is a generator: streams have no retries, deadline or blocking")
        if self.streams and isinstance(self.dispatch_mode, dict):
            raise DispatchError(f"{self.name} is a generator: its items are not collected by a function")


def _retry(retries: int | Retry) -> Retry | None:
    if isinstance(retries, Retry):
        return retries
    return Retry(times=retries) if retries else None


def register(
    dispatch_mode: DispatchMode = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = False,
    materialize_futures: bool = True,
    *,
    pad: bool = True,
    read_only: bool = False,
    rows: Callable[..., int] | None = None,
    schema: Schema | None = None,
    idempotent: bool = False,
    retries: int | Retry = 0,
    deadline_s: float | None = None,
    max_concurrency: int | None = None,
    priority: int = 0,
) -> Callable[[F], F]:
    """Offer a worker method (``def`` or ``async def``) through its group. The method itself stays as it is.

    A method with ``yield`` gives a :class:`~asyncrl.single_controller.streams.Stream` of its items.

        >>> from asyncrl import ClassWithInitArgs, Dispatch, Worker, register
        >>> from asyncrl.single_controller.local import LocalWorkerGroup
        >>> class Greeter(Worker):
        ...     @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        ...     def greet(self, name):
        ...         return f"{name}, from {self.rank} of {self.world_size}"

        >>> with LocalWorkerGroup(ClassWithInitArgs(Greeter), world_size=2) as group:
        ...     group.greet("hello").result()
        ['hello, from 0 of 2', 'hello, from 1 of 2']

    Args:
        dispatch_mode: how arguments are split and results collected.
        execute_mode: which ranks run it.
        blocking: wait for the value instead of returning a future; ``group.method(..., blocking=...)`` overrides it.
        materialize_futures: give the method batches. If False, it gets a DataProtoFuture for every batch and awaits
            what it needs.
        pad: where rows do not divide, repeat rows so that all ranks get equally many, and take theirs off the result.
            If False, shares differ by one row.
        read_only: the method promises not to write into the tensors of its batches, nor to train on them: it gets them
            as they lie in shared memory, without a copy (see :attr:`DataProto.read_only`).
        rows: how many rows the result has, from the arguments of the call: ``rows=lambda batch, n: len(batch) * n``.
            Then ``len(future)`` is known before the data, unless an argument's rows are not. Rows that differ when the
            data comes are a :class:`SchemaError`.
        schema: the columns of the result: ``future.schema`` is known before the data, and checked when it comes.
        idempotent: doing it twice is doing it once. Only such calls are ever sent again: after a failure of the
            infrastructure if there are ``retries``, after a death if the group has a :class:`Restart`.
        retries: how often, or a :class:`Retry`. Errors of the method's own code are never retried.
        deadline_s: of each call, from when it is made; ``group.method.options(deadline_s=...)`` overrides it.
        max_concurrency: how many calls of this ``async def`` method a worker runs at a time; others wait in order.
        priority: of a plain method: its calls pass waiting ones of lower priority in each worker. Ranks may then
            run calls in different orders: not for methods with collectives.

    Raises:
        DispatchError: options that do not go together.
    """
    if not isinstance(dispatch_mode, Dispatch | MeshDispatch) and not (
        isinstance(dispatch_mode, dict)  # pyright: ignore[reportUnnecessaryIsInstance]  programs without types
        and dispatch_mode.keys() == {"dispatch_fn", "collect_fn"}
    ):
        raise DispatchError(
            f"dispatch_mode must be a Dispatch or {{'dispatch_fn': ..., 'collect_fn': ...}}, got {dispatch_mode!r}"
        )
    if isinstance(dispatch_mode, MeshDispatch) and execute_mode is Execute.RANK_ZERO:
        raise DispatchError(f"mesh {dispatch_mode.mesh_name!r} needs all its ranks: execute_mode must be Execute.ALL")
    if not isinstance(execute_mode, Execute):  # pyright: ignore[reportUnnecessaryIsInstance]  programs without types
        raise DispatchError(f"execute_mode must be an Execute, got {execute_mode!r}")

    def decorate(method: F) -> F:
        custom = isinstance(dispatch_mode, dict)
        streams = inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method)
        joins = not custom and (isinstance(dispatch_mode, MeshDispatch) or dispatch_mode in PROTO_MODES)
        single = custom or dispatch_mode is Dispatch.RANK_ZERO or execute_mode is Execute.RANK_ZERO
        registration = Registration(
            name=method.__name__,
            dispatch_mode=dispatch_mode,
            execute_mode=Execute.RANK_ZERO if dispatch_mode is Dispatch.RANK_ZERO else execute_mode,
            blocking=blocking,
            materialize_futures=materialize_futures,
            pad=pad,
            read_only=read_only,
            returns_batch=not streams and (joins or (single and _returns_batch(method))),
            streams=streams,
            rows=rows,
            schema=schema,
            idempotent=idempotent,
            retry=_retry(retries),
            deadline_s=deadline_s,
            max_concurrency=max_concurrency,
            priority=priority,
        )
        registration.check()
        runs_side_by_side = inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)
        if max_concurrency is not None and (max_concurrency < 1 or not runs_side_by_side):
            raise DispatchError(
                f"max_concurrency of {method.__name__} must be positive, and plain methods run one by one"
            )
        if priority and runs_side_by_side:
            raise DispatchError(f"priority of {method.__name__}: async methods do not wait for each other")
        return mark(method, registration)

    return decorate


def mark(method: F, registration: Registration) -> F:
    """Offer a method as ``registration`` says."""
    setattr(method, _ATTRIBUTE, registration)
    return method


def registration_of(method: Callable[..., Any]) -> Registration | None:
    """How a method is offered, if it is."""
    registration = getattr(method, _ATTRIBUTE, None)
    return registration if isinstance(registration, Registration) else None


def registrations(worker_class: type) -> dict[str, Registration]:
    """Registered methods of a class and its parents, by name."""
    found: dict[str, Registration] = {}
    for name, member in inspect.getmembers(worker_class):
        registration = getattr(member, _ATTRIBUTE, None)
        if isinstance(registration, Registration):
            found[name] = registration
    return found


def _returns_batch(method: Callable[..., Any]) -> bool:
    annotation = inspect.signature(method).return_annotation
    # By name: a worker class that never sees a batch is loaded without torch.
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__qualname__", "")
    return bool(name.split(".")[-1] == "DataProto")
