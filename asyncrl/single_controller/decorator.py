"""``@register``: which methods of a worker class its group has, and how their calls are split and collected.

A worker process imports this module first; it loads neither torch nor numpy.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, TypeVar

from asyncrl.errors import DispatchError
from asyncrl.single_controller.mesh import MeshDispatch

if TYPE_CHECKING:
    from asyncrl.data.schema import Schema


class Dispatch(Enum):
    """How arguments are split over the ranks, and results collected.

    "Batch" is a DataProto or DataProtoFuture, also inside lists, tuples and dicts of the arguments.

        >>> Dispatch["ONE_TO_ALL"].name
        'ONE_TO_ALL'
    """

    RANK_ZERO = "rank_zero"
    """Only rank 0 runs the call; the result is its value."""
    ONE_TO_ALL = "one_to_all"
    """Every rank gets the same arguments; the result is the list of values by rank."""
    ALL_TO_ALL = "all_to_all"
    """Every argument is a list with one entry for each rank; the result is the list of values by rank."""
    DP_COMPUTE = "dp_compute"
    """As ALL_TO_ALL, under the name verl's programs use for data-parallel calls."""
    DP_COMPUTE_PROTO = "dp_compute_proto"
    """Rows of batches are split over the ranks, all else is copied; results are batches, joined."""
    DP_COMPUTE_PROTO_WITH_FUNC = "dp_compute_proto_with_func"
    """As DP_COMPUTE_PROTO, with a function for every rank as first argument."""
    DP_COMPUTE_METRIC = "dp_compute_metric"
    """Batches are split as by DP_COMPUTE_PROTO; the result is the list of values by rank."""


class Execute(Enum):
    """Which ranks run the call. With RANK_ZERO the arguments are those of a group of one, the result the value.

    >>> [mode.name for mode in Execute]
    ['ALL', 'RANK_ZERO']
    """

    ALL = "all"
    RANK_ZERO = "rank_zero"


class CustomDispatch(TypedDict):
    """A dispatch mode made of two functions.

    ``dispatch_fn(worker_group, *args, **kwargs)`` returns ``(args, kwargs)`` in which every argument is a list with one
    entry for each rank. ``collect_fn(worker_group, output)`` makes the result from the values by rank; those of a
    method annotated ``-> DataProto`` are DataProtoFutures.
    """

    dispatch_fn: Callable[..., tuple[Sequence[Any], Mapping[str, Any]]]
    collect_fn: Callable[..., Any]


DispatchMode: TypeAlias = Dispatch | CustomDispatch | MeshDispatch

PROTO_MODES = frozenset({Dispatch.DP_COMPUTE_PROTO, Dispatch.DP_COMPUTE_PROTO_WITH_FUNC})
SPLIT_MODES = PROTO_MODES | {Dispatch.DP_COMPUTE_METRIC}
LIST_MODES = frozenset({Dispatch.ALL_TO_ALL, Dispatch.DP_COMPUTE})

F = TypeVar("F", bound=Callable[..., Any])
_ATTRIBUTE = "__asyncrl_registration__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """The options of one registered method, as :func:`register` takes them, and what its definition shows.

    ``is_async``: an ``async def``; its calls run concurrently in a worker. ``returns_batch``: the group's method
    returns a DataProtoFuture. ``streams``: a generator; the group's method returns a Stream.
    """

    name: str
    dispatch_mode: DispatchMode
    execute_mode: Execute = Execute.ALL
    blocking: bool = False
    materialize_futures: bool = True
    pad: bool = True
    read_only: bool = False
    is_async: bool = False
    returns_batch: bool = False
    rows: Callable[..., int] | None = None
    schema: Schema | None = None
    idempotent: bool = False
    deadline_s: float | None = None
    streams: bool = False

    def with_options(self, *, blocking: bool | None = None, deadline_s: float | None = None) -> Registration:
        """Return a copy with these options; None keeps what was registered.

        Raises:
            DispatchError: the deadline is not positive.
        """
        changed = replace(
            self,
            blocking=self.blocking if blocking is None else blocking,
            deadline_s=self.deadline_s if deadline_s is None else deadline_s,
        )
        changed.check()
        return changed

    def check(self) -> None:
        """Raise :class:`DispatchError` if the options contradict each other."""
        deadline_s: Any = self.deadline_s
        if deadline_s is not None and not (isinstance(deadline_s, int | float) and deadline_s > 0):
            raise DispatchError(f"the deadline of {self.name} must be positive, in seconds, got {deadline_s!r}")
        if (self.rows is not None or self.schema is not None) and not self.returns_batch:
            raise DispatchError(f"{self.name} declares rows or a schema, but does not return a batch")
        if self.streams and (self.deadline_s is not None or self.blocking):
            raise DispatchError(f"{self.name} is a generator: streams have no deadline and no blocking")
        if self.streams and isinstance(self.dispatch_mode, dict):
            raise DispatchError(f"{self.name} is a generator: it cannot have a collect function")


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
    deadline_s: float | None = None,
) -> Callable[[F], F]:
    """Make a worker method (``def`` or ``async def``) a method of its group. The method itself is not changed.

    A method with ``yield`` returns a :class:`~asyncrl.single_controller.streams.Stream` of its items. With
    plain ``def`` no other synchronous method begins on its rank until the stream has ended or is closed.

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
        execute_mode: which ranks run the call.
        blocking: return the value instead of a future; ``group.method(..., blocking=...)`` overrides it.
        materialize_futures: pass batches to the method. If False, it gets a DataProtoFuture for every batch and awaits
            what it needs.
        pad: repeat rows where they do not divide, so that all ranks get equally many, and remove the padding from the
            result. If False, shares differ by one row.
        read_only: the method promises not to write into the tensors of its batches, nor to train on them: it gets them
            as they lie in shared memory, without a copy (see :attr:`DataProto.read_only`).
        rows: computes the number of rows of the result from the arguments: ``rows=lambda batch, n: len(batch) * n``.
            Then ``len(future)`` is known before the data, unless an argument's rows are not. A result with another
            number of rows is a :class:`SchemaError`.
        schema: the columns of the result: ``future.schema`` is known before the data, and the data is checked.
        idempotent: running the call twice has the same effect as once. Only such calls are ever sent again: after a
            worker's death, if the group has a :class:`Restart`.
        deadline_s: of each call, from when it is made; ``group.method.options(deadline_s=...)`` overrides it.

    Raises:
        DispatchError: the options contradict each other.
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
        is_async = inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)
        streams = inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method)
        if isinstance(dispatch_mode, MeshDispatch):
            joins = dispatch_mode.joins
        else:
            joins = not custom and dispatch_mode in PROTO_MODES
        single = custom or dispatch_mode is Dispatch.RANK_ZERO or execute_mode is Execute.RANK_ZERO
        registration = Registration(
            name=method.__name__,
            dispatch_mode=dispatch_mode,
            execute_mode=Execute.RANK_ZERO if dispatch_mode is Dispatch.RANK_ZERO else execute_mode,
            blocking=blocking,
            materialize_futures=materialize_futures,
            pad=pad,
            read_only=read_only,
            is_async=is_async,
            returns_batch=not streams and (joins or (single and _returns_batch(method))),
            streams=streams,
            rows=rows,
            schema=schema,
            idempotent=idempotent,
            deadline_s=deadline_s,
        )
        registration.check()
        return mark(method, registration)

    return decorate


def mark(method: F, registration: Registration) -> F:
    setattr(method, _ATTRIBUTE, registration)
    return method


def registration_of(method: Callable[..., Any]) -> Registration | None:
    registration = getattr(method, _ATTRIBUTE, None)
    return registration if isinstance(registration, Registration) else None


def registrations(worker_class: type) -> dict[str, Registration]:
    """Return the registrations of a class and its parents, by method name."""
    members = ((name, registration_of(member)) for name, member in inspect.getmembers(worker_class))
    return {name: registration for name, registration in members if registration is not None}


def _returns_batch(method: Callable[..., Any]) -> bool:
    annotation = inspect.signature(method).return_annotation
    # By name: a worker class that never sees a batch is loaded without torch.
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__qualname__", "")
    return bool(name.split(".")[-1] == "DataProto")
