"""WorkerGroup: workers that are called like one object, and return futures.

The path of a call: the group's method -> ``_execute`` -> :class:`Invocation` (``begin``, ``send``) -> ``_submit`` of
the backend -> :class:`WorkerHost` in the worker's process -> ``Invocation.handle_reply`` -> the future's outcome.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, cast

from asyncrl.data.future import DataProtoFuture, Future, Outcome, OutcomeState, Progress
from asyncrl.data.schema import Declared
from asyncrl.errors import DeadlineError, DispatchError, GroupClosedError, RankErrors
from asyncrl.runtime import CancellableCall, ControllerLoop, TaskOwner, register_for_cancellation
from asyncrl.single_controller.call import Arguments, Call, Failed
from asyncrl.single_controller.decorator import Dispatch, Execute, Registration, registrations
from asyncrl.single_controller.invocation import CallOrder, Invocation, PendingReply
from asyncrl.single_controller.mesh import MeshDispatch, Meshes, MeshPosition
from asyncrl.single_controller.restart import Restart, WorkerRestarts
from asyncrl.single_controller.scatter import Scatter, leaves
from asyncrl.single_controller.streams import RankStream, Stream, StreamInvocation
from asyncrl.single_controller.worker import Worker

if TYPE_CHECKING:
    from asyncrl.data.plan import Rows
    from asyncrl.data.proto import DataProto

# ruff: noqa: SLF001  private attributes of other groups


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatistics:
    """Counts of one group; the roles in its workers have their own.

    Attributes:
        done, failed, cancelled: finished calls and streams. A call past its deadline has failed.
        waiting: calls that are not sent yet: their arguments or workers are not ready.
        running: calls that are sent and not finished.
        outstanding: for each rank, calls sent to it without a reply: running there, or in its queue.
        returned_bytes: of the batches that calls returned, most of which stay with the workers.
        deaths, restarts: of workers' processes; ``dead`` are the ranks without one now.
    """

    done: int
    failed: int
    cancelled: int
    waiting: int
    running: int
    outstanding: tuple[int, ...]
    returned_bytes: int
    deaths: int
    restarts: int
    dead: tuple[int, ...]


class CallCounts:
    """Finished calls by the state of their outcome. Written from any thread."""

    __slots__ = ("_lock", "calls", "returned_bytes")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.calls: Counter[OutcomeState] = Counter()
        self.returned_bytes = 0

    def add(self, state: OutcomeState, size_bytes: int = 0) -> None:
        with self._lock:
            self.calls[state] += 1
            self.returned_bytes += size_bytes


class GroupMethod(Protocol):
    """A registered method of the workers, as a method of their group."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return a future of the result; a stream, if the method yields; the result itself, if it is ``blocking``."""

    def options(self, *, blocking: bool | None = None, deadline_s: float | None = None) -> GroupMethod:
        """Return the method for calls with these options; None keeps what was registered.

        Raises:
            DispatchError: the options do not suit the method.
        """
        ...


class ClassWithInitArgs:
    """A worker class and the arguments that every rank is constructed with.

    ``actor_options`` are options of the workers' processes, for backends that start processes.

        >>> ClassWithInitArgs(dict, x=1)()
        {'x': 1}
    """

    def __init__(self, cls: type[Any], *args: Any, **kwargs: Any) -> None:
        self.cls = cls
        self.args = args
        self.kwargs = kwargs
        self.actor_options: dict[str, Any] = {}

    def __call__(self) -> Any:
        return self.cls(*self.args, **self.kwargs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.cls.__name__})"


class WorkerGroup(ABC):
    """``world_size`` workers of one class, whose registered methods are methods of the group.

    A method of the group returns a future at once: :class:`DataProtoFuture` where batches are joined (or the method is
    annotated ``-> DataProto`` and only one rank runs it), :class:`Future` otherwise. The constructor does not wait for
    the workers either: calls wait until :meth:`ready` is done. ``async with group:`` (or ``with``) waits for that, and
    shuts the group down at the end.

    Calls whose arguments are ready reach the workers in the order of the program, the same on all ranks; later calls
    overtake a call that waits for a future.

        >>> from asyncrl import ClassWithInitArgs, Dispatch, Worker, register
        >>> from asyncrl.single_controller.local import LocalWorkerGroup
        >>> class Greeter(Worker):
        ...     @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        ...     def greet(self, name):
        ...         return f"{name}, from {self.rank} of {self.world_size}"

        >>> with LocalWorkerGroup(ClassWithInitArgs(Greeter), world_size=2) as group:
        ...     (
        ...         group.greet("hi").result(),
        ...         group.greet("hi", blocking=True)[1],
        ...         group.execute_rank_zero("greet", "hi").result(),
        ...     )
        (['hi, from 0 of 2', 'hi, from 1 of 2'], 'hi, from 1 of 2', 'hi, from 0 of 2')

    Raises:
        DispatchError: a registered method has the name of one of WorkerGroup's own, or is split over a mesh and its
            class is not a :class:`Worker`.
        GroupClosedError: a method is called after :meth:`shutdown`.
    """

    def __init__(
        self,
        cls_with_init: ClassWithInitArgs,
        *,
        world_size: int,
        name: str,
        loop: ControllerLoop | None = None,
        restart: Restart | None = None,
    ) -> None:
        given: Any = cls_with_init
        if not isinstance(given, ClassWithInitArgs):
            raise DispatchError(f"a worker group is made of ClassWithInitArgs(Class, ...), got {given!r:.80}")
        count: Any = world_size
        if not isinstance(count, Integral) or count < 1:
            raise DispatchError(f"world_size must be a whole number, at least 1, got {count!r:.80}")
        self.cls_with_init = cls_with_init
        self.name = name or cls_with_init.cls.__name__
        self.world_size = world_size
        self._loop = loop or ControllerLoop.default()
        self._owner = TaskOwner(self._loop)
        self._order = CallOrder(world_size)
        self._active: set[Invocation] = set()
        self._labels: dict[str, str] = {}
        self._roles: weakref.WeakSet[WorkerGroup] = weakref.WeakSet()
        self._meshes = Meshes(self._ask_mesh, self._owner, group_name=self.name)
        self._restarts = WorkerRestarts(self, restart)
        self._counts = CallCounts()
        self._closed = False
        self._closed_reason = "it was shut down"
        self._shutdown: Future[None] | None = None
        self._ready: Future[None] = Future(self._loop, f"start of {self.name}")
        for registration in registrations(cls_with_init.cls).values():
            self._bind(registration)
        register_for_cancellation(self)

    if TYPE_CHECKING:
        # Registered methods of the worker class.
        def __getattr__(self, name: str) -> GroupMethod: ...

    # ------------------------------------------------------------------------------------------- what a backend does

    @abstractmethod
    async def _start(self) -> list[Failed | None]:
        """Place and construct the workers; return the failure of each rank's ``__init__``, or None."""

    @abstractmethod
    def _submit(self, rank: int, call: Call, sequence: int, invocation: Invocation) -> PendingReply | None:
        """Send a call to a rank without waiting, and pass its reply to ``invocation.handle_reply`` in any thread.

        ``sequence`` numbers the calls to that rank. A reply that has to be watched to be received is returned.
        """

    def _sent(self) -> None:  # noqa: B027  most backends have nothing to do
        """Release what was kept while one call was submitted to all its ranks."""

    @abstractmethod
    def _open_stream(self, rank: int, call: Call, sequence: int) -> RankStream:
        """Send a call of a generator method to a rank, without waiting."""

    @abstractmethod
    def _explain(self, rank: int, method: str, error: BaseException) -> BaseException:
        """Return the error to raise where ``error`` came instead of a reply."""

    @abstractmethod
    def _cancel(self, rank: int, sequence: int) -> None:
        """Cancel a call in its worker, without waiting."""

    @abstractmethod
    def _skip(self, rank: int, sequence: int) -> None:
        """Make a worker not wait for the call of this number, which will not arrive."""

    @abstractmethod
    def _store(self, value: Any) -> Any:
        """Put one argument where the workers can fetch it. In the caller's thread.

        A large batch becomes a :class:`Plan`, anything else large a StoredValue. What is small stays as it is.
        """

    def _dereference(self, arguments: Arguments) -> Arguments:
        """Replace the backend's own references among the arguments."""
        return arguments

    def _store_parts(self, data: DataProto, parts: Sequence[Rows]) -> list[Any]:
        from asyncrl.data.plan import rows_of

        return [self._store(rows_of(data, rows)) for rows in parts]

    @abstractmethod
    async def _close_workers(self) -> list[Failed | None]:
        """Call every worker's ``aclose`` or ``close``."""

    async def _replace(self, ranks: Sequence[int], prepare: str) -> list[Failed | None]:
        """Construct new workers for these ranks, and run the method ``prepare`` if it is not empty.

        Raises:
            WorkerDiedError: one died again.
        """
        raise NotImplementedError

    @abstractmethod
    async def _kill(self) -> None:
        """Kill the workers at once, and free everything. Idempotent."""

    def _can_send_from_caller(self) -> bool:
        """Whether calls may be sent in the caller's thread; otherwise they are sent on the controller loop."""
        return False

    def _wait_for_replies(self, replies: Sequence[PendingReply], timeout_s: float) -> bool:
        """Wait for all of these in this thread and handle them; return False if one failed or the time passed."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------------ life cycle

    def ready(self) -> Future[None]:
        """Return a future that is done when every worker is constructed.

        If a constructor fails, the future fails, every call made before or later fails with it, and the workers are
        freed. While workers are replaced (:class:`Restart`), the future is pending.
        """
        return self._ready

    def _set_ready(self, ready: Future[None]) -> None:
        self._ready = ready
        for role in list(self._roles):
            role._set_ready(ready)

    def _begin(self) -> None:
        self._ready.run(self._start_all, self._owner)

    async def _start_all(self) -> None:
        try:
            self._raise_failures(range(self.world_size), await self._start(), what="start")
            self._restarts.begin()
        except BaseException:
            await self._kill()
            raise

    def _raise_failures(self, ranks: Sequence[int], failures: Sequence[Failed | None], *, what: str) -> None:
        errors = [
            failure.to_error(group=self.name, rank=rank, method="__init__")
            for rank, failure in zip(ranks, failures, strict=True)
            if failure is not None
        ]
        if errors:
            raise RankErrors.of(errors, call=f"the {what} of {self.name}", ranks=len(ranks))

    @property
    def node_addresses(self) -> Sequence[str]:
        """The addresses of the ranks' nodes, once it is ready; empty where all are in this process."""
        return ()

    def explain_silence(self) -> list[str]:
        """Name the ranks whose processes do not answer, for how long, and what that may be."""
        return []

    def shutdown(self, timeout_s: float = 10.0) -> None:
        """:meth:`aclose`, blocking this thread.

        Raises:
            DeadlineError: as :meth:`aclose`.
            WorkerError: likewise.
        """
        self._close(timeout_s).result()

    async def aclose(self, timeout_s: float = 10.0) -> None:
        """End active calls, call the workers' ``aclose`` or ``close``, and free the workers. Idempotent.

        Raises:
            DeadlineError: a worker did not close within ``timeout_s``. The group is freed all the same.
            WorkerError: a worker's ``close`` or ``aclose`` raised. The group is freed all the same.
        """
        await self._close(timeout_s)

    def _close(self, timeout_s: float) -> Future[None]:
        if self._shutdown is None:
            self._closed = True
            self._shutdown = Future(self._loop, f"shutdown of {self.name}")
            self._shutdown.run(lambda: self._end(timeout_s), self._loop.owner)
        return self._shutdown

    async def _end(self, timeout_s: float) -> None:
        try:
            for role in list(self._roles):
                await role.aclose()
            for invocation in list(self._active):
                invocation.close()
            await self._owner.cancel_all()
            if self._ready.outcome.state == "done":
                async with asyncio.timeout(timeout_s):
                    failures = await self._close_workers()
                for rank, failure in enumerate(failures):
                    if failure is not None:
                        raise failure.to_error(group=self.name, rank=rank, method="close")
        except TimeoutError:
            label = f"closing the workers of {self.name}"
            message = f"{label} took longer than {timeout_s:g} s; the workers were killed"
            raise DeadlineError(message, waiting_for=label, timeout_s=timeout_s) from None
        finally:
            await self._kill()

    def __enter__(self) -> Self:
        self._ready.result()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    async def __aenter__(self) -> Self:
        await self._ready
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def unfinished_calls(self) -> list[CancellableCall]:
        return list(self._active)

    def statistics(self) -> GroupStatistics:
        """Count the calls of this group, and the deaths and restarts of its workers."""
        counts, restarts = self._counts, self._worker_owner._restarts
        active = list(self._active)
        sent = [each for each in active if each.is_sent]
        missing = [rank for each in sent for rank in each.missing_ranks]
        return GroupStatistics(
            done=counts.calls["done"],
            failed=counts.calls["failed"],
            cancelled=counts.calls["cancelled"],
            waiting=len(active) - len(sent),
            running=len(sent),
            outstanding=tuple(missing.count(rank) for rank in range(self.world_size)),
            returned_bytes=counts.returned_bytes,
            deaths=restarts.deaths,
            restarts=restarts.restarts,
            dead=restarts.dead,
        )

    def __repr__(self) -> str:
        started = {"pending": "starting", "done": "ready"}.get(self._ready.outcome.state, "failed")
        state = "closed" if self._closed else started
        return f"<{type(self).__name__} {self.name}: {self.world_size} x {self.cls_with_init.cls.__name__}, {state}>"

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, WorkerGroup]:
        """Return a group for each of these roles, on the workers of this one (``create_colocated_worker_cls``).

        Raises:
            DispatchError: the group does not have such a role.
        """
        from asyncrl.single_controller.colocation import spawn

        return spawn(self, prefix_set)

    # ----------------------------------------------------------------------------------------------------------- calls

    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> Future[list[Any]]:
        """Call a method, registered or not, on every rank with the same arguments.

        Raises:
            GroupClosedError: the group was shut down.
        """
        registration = Registration(name=method_name, dispatch_mode=Dispatch.ONE_TO_ALL)
        return self._execute(registration, Arguments(args, kwargs))

    def execute_rank_zero(self, method_name: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method, registered or not, on rank 0.

        Raises:
            GroupClosedError: the group was shut down.
        """
        registration = Registration(name=method_name, dispatch_mode=Dispatch.RANK_ZERO, execute_mode=Execute.RANK_ZERO)
        return self._execute(registration, Arguments(args, kwargs))

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> Future[list[Any]]:
        """:meth:`execute_all`, under verl's name."""
        return self.execute_all(method_name, *args, **kwargs)

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """:meth:`execute_all`, returning the values."""
        return self.execute_all(method_name, *args, **kwargs).result()

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """:meth:`execute_rank_zero`, under verl's name."""
        return self.execute_rank_zero(method_name, *args, **kwargs)

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """:meth:`execute_rank_zero`, returning the value."""
        return self.execute_rank_zero(method_name, *args, **kwargs).result()

    def _bind(self, registration: Registration) -> None:
        name, cls = registration.name, self.cls_with_init.cls
        if hasattr(type(self), name):
            raise DispatchError(f"{cls.__name__}.{name} cannot be registered: {name} is a method of worker groups")
        if isinstance(registration.dispatch_mode, MeshDispatch) and not issubclass(cls, Worker):
            raise DispatchError(f"{cls.__name__}.{name} is split over a mesh: its class must be a Worker")
        method = inspect.getattr_static(cls, name)
        signature = inspect.signature(method)
        returned = Stream if registration.streams else DataProtoFuture if registration.returns_batch else Future
        offered = signature.replace(
            parameters=list(signature.parameters.values())[1:], return_annotation=cast("Any", returned)
        )
        checked = not isinstance(registration.dispatch_mode, dict)
        takes_blocking = "blocking" in offered.parameters

        def method_with(registration: Registration) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                blocking = registration.blocking if takes_blocking else kwargs.pop("blocking", registration.blocking)
                if checked:
                    try:
                        offered.bind(*args, **kwargs)
                    except TypeError as error:
                        error.args = (f"{self.name}.{name}{offered}: {error}",)
                        raise
                if registration.streams:
                    return self._stream(registration, Arguments(args, kwargs))
                future = self._execute(registration, Arguments(args, kwargs))
                return future.result() if blocking else future

            def options(**given: Any) -> Callable[..., Any]:
                return method_with(registration.with_options(**given))

            call.__name__ = name
            call.__qualname__ = f"{self.name}.{name}"
            call.__doc__ = method.__doc__
            call.__module__ = method.__module__
            call.__signature__ = offered  # type: ignore[attr-defined]
            call.options = options  # type: ignore[attr-defined]
            return call

        setattr(self, name, method_with(registration))

    def _scatter(self, registration: Registration, arguments: Arguments) -> Scatter:
        closed = self if self._closed else self._worker_owner
        if closed._closed:
            raise GroupClosedError(f"worker group {closed.name} is closed: {closed._closed_reason}")
        mode = registration.dispatch_mode
        return Scatter(
            mode,
            arguments,
            ranks=1 if registration.execute_mode is Execute.RANK_ZERO else self.world_size,
            pad=registration.pad,
            group=self,
            mesh=self._meshes.known(mode.mesh_name) if isinstance(mode, MeshDispatch) else None,
        )

    def _stream(self, registration: Registration, arguments: Arguments) -> Stream[Any]:
        outcome: Outcome[None] = Outcome(f"{self.name}.{registration.name}")
        scatter = self._scatter(registration, arguments)
        invocation = StreamInvocation(self, registration, scatter, outcome, Progress(self._loop.now))
        invocation.begin()
        return Stream(invocation, self._loop)

    def _execute(self, registration: Registration, arguments: Arguments) -> Future[Any]:
        scatter = self._scatter(registration, arguments)
        progress = Progress(self._loop.now)
        kind: type[Future[Any]] = DataProtoFuture if registration.returns_batch else Future
        label = self._labels.setdefault(registration.name, f"{self.name}.{registration.name}")
        future = kind(self._loop, label, inputs=scatter.futures, progress=progress)
        restarts = self._worker_owner._restarts
        again = restarts if registration.idempotent and restarts.policy is not None else None
        declared: Declared | None = None
        if registration.rows is not None or registration.schema is not None:
            # Before there is an invocation: the function that computes the rows is the user's, and may raise.
            declared = Declared(_declared_rows(registration, arguments), registration.schema)
        invocation = Invocation(self, registration, scatter, future.outcome, progress, again)
        future.made_by(invocation)
        if declared is not None:
            cast("DataProtoFuture", future).declared = invocation.declared = declared
        invocation.begin()
        if registration.deadline_s is not None:
            future.deadline(registration.deadline_s)
        return future

    @property
    def _worker_owner(self) -> WorkerGroup:
        """The group that the workers belong to: for a role, the colocated group."""
        return self

    def _method_of(self, registration: Registration) -> str:
        return registration.name

    async def _ask_mesh(self, mesh_name: str, queued: bool) -> list[MeshPosition | None]:
        method = "_mesh_position" if queued else "_mesh_position_now"
        query = Registration(name=method, dispatch_mode=Dispatch.ONE_TO_ALL)
        scatter = Scatter(
            Dispatch.ONE_TO_ALL, Arguments((mesh_name,), {}), ranks=self.world_size, pad=False, group=self
        )
        outcome: Outcome[list[MeshPosition | None]] = Outcome(f"{self.name}.{method}")
        invocation = Invocation(self, query, scatter, outcome, Progress(self._loop.now))
        with self._order.lock:
            invocation.send()
        await outcome.completion()
        return outcome.get()


def _declared_rows(registration: Registration, arguments: Arguments) -> int | None:
    """Return the rows that the result of a call will have, if they are known already."""
    if registration.rows is None:
        return None
    for leaf in leaves(arguments):
        if isinstance(leaf, DataProtoFuture) and not leaf.knows_rows:
            return None
    return registration.rows(*arguments.args, **arguments.kwargs)
