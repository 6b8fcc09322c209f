"""WorkerGroup: workers that are called as one, and answer with futures."""

from __future__ import annotations

import asyncio
import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from asyncrl.data.declared import Declared
from asyncrl.data.future import DataProtoFuture, Future
from asyncrl.data.outcome import Outcome
from asyncrl.data.progress import Progress
from asyncrl.errors import DeadlineError, DispatchError, GroupClosedError, RankErrors
from asyncrl.single_controller.call import Arguments, Call, Failed
from asyncrl.single_controller.controller_loop import ControllerLoop, TaskOwner
from asyncrl.single_controller.decorator import Registration, registrations
from asyncrl.single_controller.dispatch import Dispatch, Execute
from asyncrl.single_controller.group_method import GroupMethod, declared_rows
from asyncrl.single_controller.interruption import joins
from asyncrl.single_controller.invocation import Invocation, Unwatched
from asyncrl.single_controller.line import Line
from asyncrl.single_controller.mesh import MeshDispatch, MeshPlace
from asyncrl.single_controller.mesh_inquiry import Meshes
from asyncrl.single_controller.restart import Lives, Restart
from asyncrl.single_controller.retry import Repeats
from asyncrl.single_controller.scatter import Scatter, rows_of
from asyncrl.single_controller.statistics import GroupStatistics, Tally
from asyncrl.single_controller.streams import Source, Stream, Streaming
from asyncrl.single_controller.worker import Worker

if TYPE_CHECKING:
    from asyncrl.data.plan import Rows
    from asyncrl.data.proto import DataProto

__all__ = ["ClassWithInitArgs", "WorkerGroup"]


class ClassWithInitArgs:
    """A worker class and the arguments every rank is constructed with.

    >>> ClassWithInitArgs(dict, x=1)()
    {'x': 1}
    """

    def __init__(self, cls: type[Any], *args: Any, **kwargs: Any) -> None:
        self.cls = cls
        self.args = args
        self.kwargs = kwargs

    def __call__(self) -> Any:
        """Construct one here."""
        return self.cls(*self.args, **self.kwargs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.cls.__name__})"


class WorkerGroup(ABC):
    """``world_size`` workers of one class, whose registered methods are methods of the group.

    A method of the group returns a future at once: :class:`DataProtoFuture` where batches are joined (or the method is
    annotated ``-> DataProto`` and one rank runs it), :class:`Future` otherwise. Constructing a group does not wait for
    its workers either; calls wait their turn, and :meth:`ready` tells.

    Calls whose arguments are there reach the workers in the order of the program; a call that waits for a future lets
    later ones pass. All ranks see calls in one order.

    ``async with group:`` (or ``with``) waits until it is ready, and shuts it down at the end.

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

    The examples of the methods are about such a group.

    Raises:
        DispatchError: a registered method has the name of one that groups have of their own, or is split over a mesh
            and its class is no :class:`Worker`.
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
        self.cls_with_init = cls_with_init
        self.name = name or cls_with_init.cls.__name__
        self.world_size = world_size
        self._loop = loop or ControllerLoop.default()
        self._owner = TaskOwner(self._loop, name=self.name)
        self._line = Line(world_size)
        self._under_way: set[Invocation] = set()
        self._labels: dict[str, str] = {}
        self._roles: weakref.WeakSet[WorkerGroup] = weakref.WeakSet()
        self._meshes = Meshes(self._ask_mesh, self._owner, group_name=self.name)
        self._lives = Lives(self, restart)
        self._tally = Tally()
        self._closed = False
        self._farewell = "it takes no more calls"
        self._shutdown: Future[None] | None = None
        self._ready: Future[None] = Future(self._loop, f"start of {self.name}")
        for registration in registrations(cls_with_init.cls).values():
            self._bind(registration)
        joins(self)

    if TYPE_CHECKING:
        # Registered methods of the worker class.
        def __getattr__(self, name: str) -> GroupMethod: ...

    # ------------------------------------------------------------------------------------------- what a backend does

    @abstractmethod
    async def _start(self) -> list[Failed | None]:
        """Place and construct the workers; what became of each rank's ``__init__``."""

    @abstractmethod
    def _submit(self, rank: int, call: Call, sequence: int, invocation: Invocation) -> Unwatched | None:
        """Send a call to a rank, without waiting; tell the ``invocation`` in any thread when the reply has come.

        ``sequence`` numbers the calls to that rank; ``block`` will hold the batch, if the reply says that there is one.
        If a reply has to be watched to be seen, it is returned.
        """

    def _sent(self) -> None:  # noqa: B027  most backends have nothing to do
        """The call has been submitted to all its ranks."""

    @abstractmethod
    def _open_stream(self, rank: int, call: Call, sequence: int) -> Source:
        """Send a call of a generator method to a rank, without waiting."""

    @abstractmethod
    def _explain(self, rank: int, method: str, sequence: int, error: BaseException) -> BaseException:
        """What it means that no reply came, but ``error``."""

    @abstractmethod
    def _cancel(self, rank: int, sequence: int) -> None:
        """Cancel a call in its worker, without waiting."""

    @abstractmethod
    def _skip(self, rank: int, sequence: int) -> None:
        """Tell a worker not to wait for the call of this number."""

    @abstractmethod
    def _store(self, value: Any) -> Any:
        """Put one argument where the workers can fetch it. In the caller's thread.

        A large batch becomes a :class:`Plan`, anything else large a StoredValue. What is small stays as it is.
        """

    def _refer(self, arguments: Arguments) -> Arguments:
        """What a method gets, with what the backend's own references among its arguments stand for."""
        return arguments

    def _store_parts(self, data: DataProto, parts: Sequence[Rows]) -> list[Any]:
        """:meth:`_store` for parts of a batch."""
        return [self._store(rows_of(data, rows)) for rows in parts]

    @abstractmethod
    async def _close_workers(self) -> list[Failed | None]:
        """Let every worker close itself."""

    async def _replace(self, ranks: Sequence[int], prepare: str) -> list[Failed | None]:
        """New workers for these ranks, with ``prepare`` run if it names a method; what became of each.

        Raises:
            WorkerDiedError: one died again.
        """
        raise NotImplementedError

    @abstractmethod
    def _kill(self) -> None:
        """Free everything at once. Idempotent; from any thread."""

    # ------------------------------------------------------------------------------------------------------ life cycle

    def ready(self) -> Future[None]:
        """Done when every worker is constructed.

        If one cannot be, this fails, and with it every call made before or later; the workers are gone then. While
        workers are made again after a death (:class:`Restart`), it is not done.

            >>> group.ready().result()
        """
        return self._ready

    def _is_ready_with(self, ready: Future[None]) -> None:
        self._ready = ready
        for role in list(self._roles):
            role._is_ready_with(ready)  # noqa: SLF001  of this class

    def _begin(self) -> None:
        self._ready.run(self._start_all, self._owner)

    async def _start_all(self) -> None:
        try:
            failures = await self._start()
            errors = [
                failure.to_error(group=self.name, rank=rank, method="__init__")
                for rank, failure in enumerate(failures)
                if failure is not None
            ]
            if errors:
                raise RankErrors.of(errors, call=f"the start of {self.name}", ranks=self.world_size)
            self._lives.begin()
        except BaseException:
            self._kill()
            raise

    def shutdown(self, timeout_s: float = 10.0) -> None:
        """:meth:`aclose`, blocking this thread.

            >>> greeters = LocalWorkerGroup(ClassWithInitArgs(Greeter))
            >>> greeters.shutdown()

        Raises:
            DeadlineError: as :meth:`aclose`.
            WorkerError: likewise.
        """
        self._close(timeout_s).result()

    async def aclose(self, timeout_s: float = 10.0) -> None:
        """End running calls, let the workers close themselves for at most ``timeout_s``, then end them. Idempotent.

            >>> greeters = LocalWorkerGroup(ClassWithInitArgs(Greeter))
            >>> asyncio.run(greeters.aclose(timeout_s=5.0))

        Raises:
            DeadlineError: a worker did not close itself in time. The group is gone all the same.
            WorkerError: a worker's ``close`` or ``aclose`` raised. The group is gone all the same.
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
            for invocation in list(self._under_way):
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
            message = f"{label} took longer than {timeout_s:g} s; they were ended"
            raise DeadlineError(message, waiting_for=label, timeout_s=timeout_s) from None
        finally:
            self._kill()

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

    def statistics(self) -> GroupStatistics:
        """What its calls are doing and have done.

        >>> group.statistics().deaths
        0
        """
        tally, lives = self._tally, self._home._lives  # noqa: SLF001  of this class
        under_way = list(self._under_way)
        sent = [each for each in under_way if each.is_sent]
        missing = [rank for each in sent for rank in each.missing]
        return GroupStatistics(
            done=tally.done,
            failed=tally.failed,
            cancelled=tally.cancelled,
            waiting=len(under_way) - len(sent),
            running=len(sent),
            outstanding=tuple(missing.count(rank) for rank in range(self.world_size)),
            returned_bytes=tally.returned_bytes,
            deaths=lives.deaths,
            restarts=lives.restarts,
            dead=lives.dead,
        )

    def __repr__(self) -> str:
        state = (
            "closed"
            if self._closed
            else {"pending": "starting", "done": "ready"}.get(self._ready.outcome.state, "failed")
        )
        return f"<{type(self).__name__} {self.name}: {self.world_size} x {self.cls_with_init.cls.__name__}, {state}>"

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, WorkerGroup]:
        """A group for each of these roles, on the workers of this one, made by ``create_colocated_worker_cls``.

            >>> colocated.spawn({"left"})["left"].greet("hi").result()
            ['hi, from 0 of 1']

        Raises:
            DispatchError: the group has no such role.
        """
        from asyncrl.single_controller.colocation import spawn

        return spawn(self, prefix_set)

    # ----------------------------------------------------------------------------------------------------------- calls

    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> Future[list[Any]]:
        """Call a method, registered or not, on every rank with the same arguments.

            >>> group.execute_all("get_cuda_visible_devices").result()
            ['not set', 'not set']

        Raises:
            GroupClosedError: the group was shut down.
        """
        registration = Registration(name=method_name, dispatch_mode=Dispatch.ONE_TO_ALL)
        return self._execute(registration, Arguments(args, kwargs))

    def execute_rank_zero(self, method_name: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method, registered or not, on rank 0.

            >>> group.execute_rank_zero("get_cuda_visible_devices").result()
            'not set'

        Raises:
            GroupClosedError: the group was shut down.
        """
        registration = Registration(name=method_name, dispatch_mode=Dispatch.RANK_ZERO, execute_mode=Execute.RANK_ZERO)
        return self._execute(registration, Arguments(args, kwargs))

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> Future[list[Any]]:
        """:meth:`execute_all`, under verl's name.

        >>> group.execute_all_async("greet", "hi").result()[1]
        'hi, from 1 of 2'
        """
        return self.execute_all(method_name, *args, **kwargs)

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """:meth:`execute_all`, waiting for the values.

        >>> group.execute_all_sync("greet", "hi")[1]
        'hi, from 1 of 2'
        """
        return self.execute_all(method_name, *args, **kwargs).result()

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """:meth:`execute_rank_zero`, under verl's name.

        >>> group.execute_rank_zero_async("greet", "hi").result()
        'hi, from 0 of 2'
        """
        return self.execute_rank_zero(method_name, *args, **kwargs)

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """:meth:`execute_rank_zero`, waiting for the value.

        >>> group.execute_rank_zero_sync("greet", "hi")
        'hi, from 0 of 2'
        """
        return self.execute_rank_zero(method_name, *args, **kwargs).result()

    def _bind(self, registration: Registration) -> None:
        name = registration.name
        if hasattr(type(self), name):
            raise DispatchError(
                f"{self.cls_with_init.cls.__name__}.{name} cannot be registered: "
                f"worker groups have a {name} of their own"
            )
        method = inspect.getattr_static(self.cls_with_init.cls, name)
        if isinstance(registration.dispatch_mode, MeshDispatch) and not issubclass(self.cls_with_init.cls, Worker):
            raise DispatchError(
                f"{self.cls_with_init.cls.__name__}.{name} is split over a mesh: its class must be a Worker"
            )
        signature = inspect.signature(method)
        own = list(signature.parameters.values())[1:]
        kind: Any = DataProtoFuture if registration.returns_batch else Future
        if registration.streams:
            kind = Stream
        offered = signature.replace(parameters=own, return_annotation=kind)
        checked = not isinstance(registration.dispatch_mode, dict)
        plain = not (inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method))
        takes_blocking = "blocking" in offered.parameters

        def method_with(registration: Registration) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                blocking = registration.blocking if takes_blocking else kwargs.pop("blocking", registration.blocking)
                if checked:
                    offered.bind(*args, **kwargs)
                if registration.streams:
                    return self._stream(registration, Arguments(args, kwargs), plain=plain)
                future = self._execute(registration, Arguments(args, kwargs), plain=plain)
                return future.result() if blocking else future

            def options(**given: Any) -> Callable[..., Any]:
                """The method for calls with other ``deadline_s``, ``retries`` or ``blocking`` than registered."""
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
        if self._closed:
            raise GroupClosedError(f"worker group {self.name} is closed: {self._farewell}")
        mode = registration.dispatch_mode
        return Scatter(
            mode,
            arguments,
            ranks=1 if registration.execute_mode is Execute.RANK_ZERO else self.world_size,
            pad=registration.pad,
            store=self._store,
            store_parts=self._store_parts,
            refer=self._refer,
            group=self,
            mesh=self._meshes.known(mode.mesh_name) if isinstance(mode, MeshDispatch) else None,
        )

    def _stream(self, registration: Registration, arguments: Arguments, *, plain: bool) -> Stream[Any]:
        outcome: Outcome[None] = Outcome(f"{self.name}.{registration.name}")
        scatter = self._scatter(registration, arguments)
        streaming = Streaming(self, registration, scatter, outcome, Progress(self._loop.now), plain=plain)
        streaming.begin()
        return Stream(streaming, self._loop)

    def _execute(self, registration: Registration, arguments: Arguments, *, plain: bool = True) -> Future[Any]:
        scatter = self._scatter(registration, arguments)
        progress = Progress(self._loop.now)
        kind: type[Future[Any]] = DataProtoFuture if registration.returns_batch else Future
        label = self._labels.setdefault(registration.name, f"{self.name}.{registration.name}")
        future = kind(self._loop, label, inputs=scatter.futures, progress=progress)
        repeats = self._repeats(registration) if registration.idempotent else None
        declared: Declared | None = None
        if registration.rows is not None or registration.schema is not None:
            # Before there is a call: the function that tells the rows is the user's, and may raise.
            declared = Declared(declared_rows(registration, arguments), registration.schema)
        invocation = Invocation(self, registration, scatter, future.outcome, progress, plain=plain, repeats=repeats)
        future.made_by(invocation)
        if declared is not None:
            cast("DataProtoFuture", future).declared = invocation.declared = declared
        invocation.begin()
        if registration.deadline_s is not None:
            future.deadline(registration.deadline_s)
        return future

    def _repeats(self, registration: Registration) -> Repeats | None:
        lives = self._home._lives  # noqa: SLF001  of this class
        never = registration.retry is None and lives.policy is None
        return None if never else Repeats(registration.retry, lives)

    def _may_send_here(self) -> bool:
        """Whether calls may be sent in the caller's thread; otherwise they are on the controller loop."""
        return False

    def _take_now(self, replies: Sequence[Unwatched], timeout_s: float) -> bool:
        """Wait for all of these in this thread and hand them on; False if one failed or they took longer."""
        raise NotImplementedError

    @property
    def _home(self) -> WorkerGroup:
        """The group that the workers belong to."""
        return self

    def _method_of(self, registration: Registration) -> str:
        """The worker's method."""
        return registration.name

    async def _ask_mesh(self, mesh_name: str, in_line: bool) -> list[MeshPlace | None]:
        method = "_mesh_place_in_line" if in_line else "_mesh_place"
        question = Registration(name=method, dispatch_mode=Dispatch.ONE_TO_ALL)
        arguments = Arguments((mesh_name,), {})
        scatter = Scatter(Dispatch.ONE_TO_ALL, arguments, ranks=self.world_size, pad=False, store=self._store)
        outcome: Outcome[list[MeshPlace | None]] = Outcome(f"{self.name}.{method}")
        invocation = Invocation(self, question, scatter, outcome, Progress(self._loop.now))
        with self._line.lock:
            invocation.send()
        await outcome.completion()
        return outcome.get()
