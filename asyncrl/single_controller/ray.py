"""The Ray backend: every worker an actor of its own, placed by placement groups."""

# Ray leaves the types of handles, references and placement groups partly unknown.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import asyncio
import pickle
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Self, cast

import ray
import ray.exceptions
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncrl.data.plan import Rows
from asyncrl.data.proto import DataProto
from asyncrl.errors import DeadlineError, DispatchError, GroupClosedError, ResourceError, WorkerDiedError, WorkerError
from asyncrl.single_controller.call import Arguments, Call, Failed
from asyncrl.single_controller.decorator import registrations
from asyncrl.single_controller.invocation import Invocation, Unwatched
from asyncrl.single_controller.ray_actors import (
    NAMESPACE,
    Actors,
    Handle,
    Standing,
    StandingPool,
    check_detached,
    check_first,
    end,
    find,
    new_name,
)
from asyncrl.single_controller.ray_arguments import referred, stored, stored_parts
from asyncrl.single_controller.ray_class import RayClassWithInitArgs, demand_of
from asyncrl.single_controller.ray_errors import explained
from asyncrl.single_controller.ray_host import Seat, actor_class, contexts_of, name_without_arguments
from asyncrl.single_controller.ray_message import Sealer
from asyncrl.single_controller.ray_reply import RayReply, items_of
from asyncrl.single_controller.ray_resource_pool import (
    RayResourcePool,
    SubRayResourcePool,
    any_removed,
    merge_resource_pool,
    split_resource_pool,
)
from asyncrl.single_controller.ray_resource_pool import Seat as PoolSeat
from asyncrl.single_controller.ray_store import RayBlock, RayValue
from asyncrl.single_controller.restart import Restart
from asyncrl.single_controller.streams import AHEAD, Source
from asyncrl.single_controller.worker import WorkerContext
from asyncrl.single_controller.worker_group import ClassWithInitArgs, WorkerGroup

__all__ = [
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "SubRayResourcePool",
    "merge_resource_pool",
    "split_resource_pool",
]

MAX_CALLS = 1_000_000
"""Calls that one actor holds at a time, running or in line; Ray keeps further ones back."""


class RayWorkerGroup(WorkerGroup):
    """Workers as Ray actors, one on every seat of a pool.

    The constructor checks the pool against the cluster and returns; placing and constructing go on meanwhile.

        >>> with RayWorkerGroup(RayResourcePool([2]), RayClassWithInitArgs(Greeter)) as greeters:  # after ray.init()
        ...     greeters.greet("hi").result()
        ['hi, from 0 of 2', 'hi, from 1 of 2']

    Args:
        resource_pool: the seats.
        ray_cls_with_init: class, arguments, options.
        name: for messages and logs; the class's name if empty.
        restart: what to do when a worker's process dies; None leaves it dead.
        detached: the workers outlive this program, until somebody shuts the group down; :meth:`attach` finds them by
            the group's name. The pool must be detached too.

    Raises:
        ResourceError: the cluster can never hold the pool, a worker asks for more than its seat has, the name of a
            detached group is missing or taken, or Ray is not initialised. Resources that others use are waited for; if
            they do not become free, :meth:`ready` fails.
        DispatchError: as :class:`LocalWorkerGroup`.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: ClassWithInitArgs,
        *,
        name: str = "",
        restart: Restart | None = None,
        detached: bool = False,
    ) -> None:
        if not ray.is_initialized():
            raise ResourceError("Ray is not initialised: call ray.init() before making worker groups")
        if not isinstance(ray_cls_with_init, RayClassWithInitArgs):
            init = ray_cls_with_init
            ray_cls_with_init = RayClassWithInitArgs(init.cls, *init.args, **init.kwargs)
        resource_pool.check()
        if detached:
            check_detached(name, resource_pool)
        self._set_up(resource_pool, ray_cls_with_init, name, restart=restart, detached=detached)

    @classmethod
    def attach(
        cls,
        name: str,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        *,
        restart: Restart | None = None,
        timeout_s: float = 60.0,
    ) -> Self:
        """Go on with a detached group that another program made, or this one earlier. Waits for a round trip.

        The program that called it before, if it still runs, is refused from now on: the calls that its workers have
        begun go on, all others fail with :class:`GroupClosedError`.

            >>> pool = RayResourcePool([1], detached=True)
            >>> made = RayWorkerGroup(pool, RayClassWithInitArgs(Greeter), name="kept", detached=True)
            >>> made.ready().result()
            >>> found = RayWorkerGroup.attach("kept")  # in another program, too
            >>> found.greet("hi").result()
            ['hi, from 0 of 1']
            >>> found.detach()  # it goes on
            >>> RayWorkerGroup.end_detached("kept")
            1

        Args:
            name: of the group.
            ray_cls_with_init: class, arguments and options; those that the group was made with if None.
            restart: what to do when a worker's process dies; None leaves it dead.
            timeout_s: for the answer of its rank 0.

        Raises:
            ResourceError: there is no such group, or not all of it; Ray is not initialised.
            WorkerDiedError: its rank 0 died just now.
            DeadlineError: its rank 0 does not answer: it waits for a seat that it may never get, or hangs.
        """
        if not ray.is_initialized():
            raise ResourceError("Ray is not initialised: call ray.init(address=...) before attaching to worker groups")
        handles = find(name)
        try:
            standing: Standing = ray.get(handles[0].standing.remote(), timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise DeadlineError(
                f"rank 0 of the detached group {name!r} has not answered within {timeout_s:g} s; if it never will, "
                f"RayWorkerGroup.end_detached({name!r}) ends what there is of it",
                waiting_for=f"the first rank of {name}",
                timeout_s=timeout_s,
            ) from None
        except ray.exceptions.RayError as error:
            raise explained(error, group=name, rank=0, method="attach", node="") from error
        group = cls.__new__(cls)
        pool = StandingPool(standing.seats, group=name)
        made = ray_cls_with_init or standing.made
        found = (handles, standing)
        group._set_up(pool, made, name, restart=restart, detached=True, found=found)  # noqa: SLF001  of this class
        return group

    @staticmethod
    def end_detached(name: str) -> int:
        """Kill the workers of a detached group, or what is left of them, and free their seats; how many there were.

        The program that calls it is told: whatever its :class:`Restart` says, nothing is made again, and its calls fail
        with :class:`GroupClosedError`.

        >>> RayWorkerGroup.end_detached("nobody")
        0
        """
        return end(name)

    def detach(self) -> None:
        """Leave a detached group to itself. What its workers are doing goes on; calls of this program fail.

            >>> with RayWorkerGroup(RayResourcePool([1]), RayClassWithInitArgs(Greeter)) as greeters:
            ...     greeters.detach()  # it was not made for that  # doctest: +ELLIPSIS
            Traceback (most recent call last):
            asyncrl.errors.ResourceError: Greeter ends with this program: ...

        Raises:
            ResourceError: the group was not made with ``detached=True``.
        """
        if not self.detached:
            raise ResourceError(f"{self.name} ends with this program: only a group made with detached=True can be left")
        self._leave("this program has detached itself from it")
        self.shutdown()

    def _leave(self, why: str) -> None:
        self._farewell = why
        self._closed = True
        self._actors.let_go()
        self._loop.notify(self._lives.left)

    def _set_up(
        self,
        resource_pool: RayResourcePool,
        made: RayClassWithInitArgs,
        name: str,
        *,
        restart: Restart | None,
        detached: bool,
        found: tuple[list[Handle], Standing] | None = None,
    ) -> None:
        super().__init__(made, world_size=resource_pool.world_size, name=name, restart=restart)
        self.resource_pool = resource_pool
        self.detached = detached
        self._options = made.actor_options
        self._found = found
        self._demand = demand_of(made, resource_pool, group=self.name) if found is None else found[1].demand
        self._names = [""] * self.world_size
        self._nodes: list[str] = []
        self._contexts_given: list[WorkerContext] = []
        self._made: RayValue | None = None
        self._actors = Actors()
        self._alone = {name: name_without_arguments(name) for name in registrations(made.cls)}
        self._under_way_to = [0] * self.world_size
        # Calls without a number would be taken for this program's whoever sends them.
        self._skipped = [detached] * self.world_size
        self._count_lock = threading.Lock()
        self._sealer = Sealer()
        self._small: set[str] = set()
        if not detached:
            weakref.finalize(self, self._actors.free)
        self._begin()

    # ---------------------------------------------------------------------------------------------------------- start

    async def _start(self) -> list[Failed | None]:
        if self._found is not None:
            return await self._take_over(*self._found)
        handles = await self._place()
        ranks = range(len(handles))
        seats = await self._seated(ranks, handles)
        self._nodes = [seat.address for seat in seats]
        self._put_made()
        self._contexts_given = contexts_of(seats, group_name=self.name)
        failures = await self._construct(ranks, handles)
        if self.detached:
            await self._stand(handles)
            await asyncio.to_thread(check_first, self.name, self._names[0])
        for rank, handle in enumerate(handles):
            self._watch_life(rank, handle)
        return failures

    def _put_made(self) -> None:
        init = self.cls_with_init
        given: Any = (init.cls, init.args, init.kwargs)
        self._made = RayValue(ray.put(given))

    async def _take_over(self, handles: list[Handle], standing: Standing) -> list[Failed | None]:
        """Be the program whose calls these workers take."""
        ranks = range(len(handles))
        numbers = await self._all("attach", ranks, [handle.take_over.remote() for handle in handles])
        with self._line.lock:
            self._line.begin_at(numbers)
        self._put_made()
        self._nodes, self._contexts_given = list(standing.nodes), list(standing.contexts)
        self._actors.handles, self._actors.pool = list(handles), self.resource_pool
        for rank, handle in enumerate(handles):
            self._watch_life(rank, handle)
        return [None] * len(handles)

    async def _stand(self, handles: Sequence[Handle]) -> None:
        """Tell the workers what the next program has to know."""
        standing = Standing(
            made=cast("RayClassWithInitArgs", self.cls_with_init),
            contexts=self._contexts_given,
            seats=await asyncio.to_thread(self.resource_pool.seats),
            nodes=self._nodes,
            demand=self._demand,
        )
        await self._all("__init__", range(len(handles)), [handle.stand.remote(standing) for handle in handles])

    async def _construct(self, ranks: Sequence[int], handles: Sequence[Handle]) -> list[Failed | None]:
        variables = {str(name): str(value) for name, value in self._options.get("env_vars", {}).items()}
        calls = [
            handle.construct.remote(self._made, self._contexts_given[rank], variables)
            for rank, handle in zip(ranks, handles, strict=True)
        ]
        return await self._all("__init__", ranks, calls)

    def _watch_life(self, rank: int, handle: Handle) -> None:
        """Have the group told when this process dies."""
        incarnation = self._lives.incarnations[rank]
        reference = weakref.ref(self)

        def ended(value: Any) -> None:
            group = reference()
            if group is None:
                return
            if not isinstance(value, ray.exceptions.RayError):
                group._leave(value)  # noqa: SLF001  of this class
                return
            error = group._explained(rank, "its life", value)  # noqa: SLF001  of this class
            if isinstance(error, WorkerDiedError):
                group._loop.notify(group._lives.died, rank, incarnation, error)  # noqa: SLF001

        handle.live.remote()._on_completed(ended)  # noqa: SLF001

    async def _replace(self, ranks: Sequence[int], prepare: str) -> list[Failed | None]:
        if not self._actors.reachable:
            raise GroupClosedError(f"the workers of {self.name} are not made again: {self._farewell}")
        for rank in ranks:
            ray.kill(self._actors.handles[rank])  # of a group, those that still live
        seats = await asyncio.to_thread(self.resource_pool.seats)
        handles = [self._actor(rank, seats[rank]) for rank in ranks]
        try:
            places = await self._seated(ranks, handles)
            if len(ranks) == self.world_size:
                self._contexts_given = contexts_of(places, group_name=self.name)
            for rank, place in zip(ranks, places, strict=True):
                self._nodes[rank] = place.address
            failures = await self._construct(ranks, handles)
            if prepare and not any(failures):
                failures = await self._all(prepare, ranks, [handle.prepare.remote(prepare) for handle in handles])
        except BaseException:
            for handle in handles:
                ray.kill(handle)
            raise
        with self._line.lock:
            for rank, handle in zip(ranks, handles, strict=True):
                self._actors.handles[rank] = handle
                # Calls keep their numbers, so that what is still said of old ones does not meet new ones.
                self._skipped[rank] = True
                handle.begin_at.remote(self._line.next(rank))
        if self.detached:
            await self._stand(self._actors.handles)
        for rank, handle in zip(ranks, handles, strict=True):
            self._watch_life(rank, handle)
        return failures

    async def _place(self) -> list[Handle]:
        pool = self.resource_pool
        groups = pool.acquire()
        self._actors.pool = pool
        waits = [asyncio.to_thread(group.wait, pool.placement_timeout_s) for group in groups]
        if not all(await asyncio.gather(*waits)):
            raise await asyncio.to_thread(pool.no_room)
        for rank, seat in enumerate(await asyncio.to_thread(pool.seats)):
            self._actors.handles.append(self._actor(rank, seat))
        return list(self._actors.handles)

    async def _seated(self, ranks: Sequence[int], handles: Sequence[Handle]) -> list[Seat]:
        """Where new actors are. Who ends the group meanwhile has removed their seats by now, or sees their names."""
        if await asyncio.to_thread(lambda: any_removed(seat.group for seat in self.resource_pool.seats())):
            raise GroupClosedError(
                f"the workers of {self.name} are not made: their seats are gone, since somebody has ended the group or "
                "removed its placement group"
            )
        return await self._all("seat", ranks, [handle.seat.remote() for handle in handles])

    def _actor(self, rank: int, seat: PoolSeat) -> Handle:
        label = f"{self.name}[{rank}]"
        cls: Any = ray.remote(actor_class(label, self._alone))
        lasting: dict[str, Any] = {}
        if self.detached:
            self._names[rank] = new_name(self.name, rank, seat)
            lasting = {"name": self._names[rank], "namespace": NAMESPACE, "lifetime": "detached"}
        return cls.options(
            **self._demand,
            **lasting,
            runtime_env=self._options.get("runtime_env"),
            max_concurrency=MAX_CALLS,
            enable_task_events=self._options.get("enable_task_events", False),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                seat.group, placement_group_bundle_index=seat.bundle_index
            ),
        ).remote(label)

    async def _all(self, method: str, ranks: Sequence[int], refs: Sequence[ray.ObjectRef[Any]]) -> list[Any]:
        """Values of one call on these ranks; the first failure is raised at once."""
        return await asyncio.gather(*(self._value(rank, method, ref) for rank, ref in zip(ranks, refs, strict=True)))

    # ---------------------------------------------------------------------------------------------------------- calls

    def _may_send_here(self) -> bool:
        return self._ready.outcome.state == "done"

    def _submit(self, rank: int, call: Call, sequence: int, invocation: Invocation) -> Unwatched | None:
        handle: Any = self._actors.handles[rank]
        block: RayBlock | None = None
        try:
            if self._is_alone(rank, call):
                reply = getattr(handle, self._alone[call.method]).remote()
            elif call.keep_batch and call.method not in self._small:
                message, refs = self._sealer.sealed(call, sequence)
                reply, batch = handle.call_keeping_batch.remote(message, *refs)
                block = RayBlock(batch)
            else:
                message, refs = self._sealer.sealed(call, sequence)
                reply = handle.call.remote(message, *refs)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise DispatchError(f"an argument of {self.name}.{call.method} cannot be pickled: {error}") from error
        with self._count_lock:
            self._under_way_to[rank] += 1
        return RayReply(self, rank, call.method if call.keep_batch else None, reply, block, invocation)

    def _sent(self) -> None:
        self._sealer.forget()

    def _open_stream(self, rank: int, call: Call, sequence: int) -> Source:
        method = self._actors.handles[rank].stream.options(
            num_returns="streaming", _generator_backpressure_num_objects=AHEAD
        )
        try:
            message, refs = self._sealer.sealed(call, sequence)
            items = method.remote(message, *refs)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            self._skip(rank, sequence)
            raise DispatchError(f"an argument of {self.name}.{call.method} cannot be pickled: {error}") from error
        with self._count_lock:
            self._under_way_to[rank] += 1

        def over(through: bool) -> None:
            if not through and self._actors.reachable:
                # Closes the generator there; or it has not arrived yet, and must not be waited for.
                ray.cancel(items)
                self._skip(rank, sequence)
            self._replied(rank, None, small=False)

        return Source(items_of(items), over)

    def _is_alone(self, rank: int, call: Call) -> bool:
        """Whether a call needs neither arguments nor a number: whatever was sent before has been answered."""
        return not (
            self._under_way_to[rank]
            or self._skipped[rank]
            or call.keep_batch
            or call.arguments.args
            or call.arguments.kwargs
            or call.method not in self._alone
        )

    def _replied(self, rank: int, keeping: str | None, *, small: bool) -> None:
        """A reply has come; whether the batch of a method was small tells how its next one will travel."""
        with self._count_lock:
            self._under_way_to[rank] -= 1
        if keeping is not None:
            (self._small.add if small else self._small.discard)(keeping)

    def _take_now(self, replies: Sequence[Unwatched], timeout_s: float) -> bool:
        coming = cast("Sequence[RayReply]", replies)
        try:
            values: Any = ray.get([each.ref for each in coming], timeout=timeout_s)
        except ray.exceptions.RayError:
            return False  # not there yet, or failed: whoever watches tells which
        for each, value in zip(coming, values, strict=True):
            each(value)
        return True

    def _explain(self, rank: int, method: str, sequence: int, error: BaseException) -> BaseException:
        failure = self._explained(rank, method, error)
        if isinstance(failure, WorkerError):
            # The call did not reach the host, or its value could not leave it: later ones must not wait for it.
            self._skip(rank, sequence)
        return failure

    def _explained(self, rank: int, method: str, error: BaseException) -> BaseException:
        node = self._nodes[rank] if rank < len(self._nodes) else ""
        return explained(error, group=self.name, rank=rank, method=method, node=node)

    async def _value(self, rank: int, method: str, ref: ray.ObjectRef[Any]) -> Any:
        try:
            return await asyncio.wrap_future(ref.future())
        except ray.exceptions.RayError as error:
            raise self._explained(rank, method, error) from error

    def _cancel(self, rank: int, sequence: int) -> None:
        # A call through a handle would start another cluster where this one is gone.
        if rank < len(self._actors.handles) and self._actors.reachable:
            self._actors.handles[rank].cancel.remote(sequence)

    def _skip(self, rank: int, sequence: int) -> None:
        self._skipped[rank] = True
        if rank < len(self._actors.handles) and self._actors.reachable:
            self._actors.handles[rank].skip.remote(sequence)

    def _store(self, value: Any) -> Any:
        return stored(value)

    def _refer(self, arguments: Arguments) -> Arguments:
        return referred(arguments)

    def _store_parts(self, data: DataProto, parts: Sequence[Rows]) -> list[Any]:
        return stored_parts(data, parts) or super()._store_parts(data, parts)

    async def _close_workers(self) -> list[Failed | None]:
        if not self._actors.reachable:
            return []

        async def close(rank: int, handle: Handle) -> Failed | None:
            try:
                return cast("Failed | None", await self._value(rank, "close", handle.close.remote()))
            except WorkerDiedError:
                return None

        return await asyncio.gather(*(close(rank, handle) for rank, handle in enumerate(self._actors.handles)))

    def _kill(self) -> None:
        self._actors.free()
