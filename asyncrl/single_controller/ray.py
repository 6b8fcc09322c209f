"""The Ray backend: every worker an actor of its own, placed by placement groups."""

from __future__ import annotations

import asyncio
import pickle
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import ray
import ray.exceptions
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncrl.data.codec import encode_slices
from asyncrl.data.plan import Header, Plan, Rows
from asyncrl.data.proto import DataProto
from asyncrl.errors import DispatchError, Origin, ResourceError, WorkerDiedError, WorkerError
from asyncrl.single_controller.call import Call, Failed
from asyncrl.single_controller.decorator import registrations
from asyncrl.single_controller.invocation import Invocation, Unwatched
from asyncrl.single_controller.ray_class import RayClassWithInitArgs
from asyncrl.single_controller.ray_host import INLINE_BYTES, Seat, actor_class, name_without_arguments
from asyncrl.single_controller.ray_message import Sealer
from asyncrl.single_controller.ray_reply import RayReply, items_of
from asyncrl.single_controller.ray_resource_pool import (
    RayResourcePool,
    SubRayResourcePool,
    merge_resource_pool,
    split_resource_pool,
)
from asyncrl.single_controller.ray_resource_pool import Seat as PoolSeat
from asyncrl.single_controller.ray_store import RayBlock, RayValue, first_line
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

DEATHS = (
    ray.exceptions.RayActorError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.ActorUnschedulableError,
    ray.exceptions.ActorPlacementGroupRemoved,
)

MAX_CALLS = 1_000_000
"""Calls that one actor holds at a time, running or in line; Ray keeps further ones back."""


# ------------------------------------------------------------------------------------------------------ in the driver


# Ray types the handle of a class that it decorates; it would take RayHost's methods for ordinary ones.
_Handle: TypeAlias = Any


class _Actors:
    """What has to be freed: actors, and a share of a pool."""

    def __init__(self) -> None:
        self.handles: list[_Handle] = []
        self.pool: RayResourcePool | None = None
        self._lock = threading.Lock()
        self._session = _session()

    @property
    def reachable(self) -> bool:
        """Whether this process is still connected to the cluster they were started on."""
        return ray.is_initialized() and _session() == self._session

    def free(self) -> None:
        with self._lock:
            handles, self.handles = self.handles, []
            pool, self.pool = self.pool, None
        if not self.reachable:
            return
        for handle in handles:
            ray.kill(handle)
        if pool is not None:
            pool.release()


def _session() -> str:
    return str(ray.get_runtime_context().get_node_id())


class RayWorkerGroup(WorkerGroup):
    """Workers as Ray actors, one on every seat of a pool.

    The constructor checks the pool against the cluster and returns; placing and constructing go on meanwhile.

    Args:
        resource_pool: the seats.
        ray_cls_with_init: class, arguments, options.
        name: for messages and logs; the class's name if empty.
        restart: what to do when a worker's process dies; None leaves it dead.

    Raises:
        ResourceError: the cluster can never hold the pool, a worker asks for more than its seat has, or Ray is not
            initialised. Resources that others use are waited for; if they do not become free, :meth:`ready` fails.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: ClassWithInitArgs,
        *,
        name: str = "",
        restart: Restart | None = None,
    ) -> None:
        if not ray.is_initialized():
            raise ResourceError("Ray is not initialised: call ray.init() before making worker groups")
        if not isinstance(ray_cls_with_init, RayClassWithInitArgs):
            init = ray_cls_with_init
            ray_cls_with_init = RayClassWithInitArgs(init.cls, *init.args, **init.kwargs)
        super().__init__(ray_cls_with_init, world_size=resource_pool.world_size, name=name, restart=restart)
        self.resource_pool = resource_pool
        self._options = ray_cls_with_init.actor_options
        resource_pool.check()
        self._demand = self._actor_resources()
        self._nodes: list[str] = []
        self._contexts_given: list[WorkerContext] = []
        self._made: RayValue | None = None
        self._actors = _Actors()
        self._alone = {name: name_without_arguments(name) for name in registrations(ray_cls_with_init.cls)}
        self._under_way_to = [0] * self.world_size
        self._skipped = [False] * self.world_size
        self._count_lock = threading.Lock()
        self._sealer = Sealer()
        self._small: set[str] = set()
        self._finalizer = weakref.finalize(self, self._actors.free)
        self._begin()

    def _actor_resources(self) -> dict[str, Any]:
        """``num_cpus``, ``num_gpus`` and ``resources`` of one actor, checked against its seat."""
        pool, options = self.resource_pool, self._options
        demand = {
            "num_cpus": options.get("num_cpus", pool.cpus_per_worker),
            "num_gpus": options.get("num_gpus", pool.gpus_per_worker / pool.max_colocate_count),
            "resources": options.get("resources", pool.resources_per_worker),
        }
        seat = pool.bundle()
        asked = {"CPU": demand["num_cpus"], "GPU": demand["num_gpus"], **demand["resources"]}
        for resource, amount in asked.items():
            if amount > seat.get(resource, 0.0) + 1e-6:
                raise ResourceError(
                    f"a worker of {self.name} asks for {amount:g} {resource}, and its seat in {pool!r} has "
                    f"{seat.get(resource, 0.0):g}: raise the pool's resources per worker or lower the worker's options"
                )
        return demand

    # ---------------------------------------------------------------------------------------------------------- start

    async def _start(self) -> list[Failed | None]:
        handles = await self._place()
        ranks = range(len(handles))
        seats: list[Seat] = await self._all("seat", ranks, [handle.seat.remote() for handle in handles])
        self._nodes = [seat.address for seat in seats]
        init = self.cls_with_init
        given: Any = (init.cls, init.args, init.kwargs)
        self._made = RayValue(ray.put(given))
        self._contexts_given = self._contexts(seats)
        failures = await self._construct(ranks, handles)
        for rank, handle in enumerate(handles):
            self._watch_life(rank, handle)
        return failures

    async def _construct(self, ranks: Sequence[int], handles: Sequence[_Handle]) -> list[Failed | None]:
        variables = {str(name): str(value) for name, value in self._options.get("env_vars", {}).items()}
        calls = [
            handle.construct.remote(self._made, self._contexts_given[rank], variables)
            for rank, handle in zip(ranks, handles, strict=True)
        ]
        return await self._all("__init__", ranks, calls)

    def _watch_life(self, rank: int, handle: _Handle) -> None:
        """Have the group told when this process dies."""
        incarnation = self._lives.incarnations[rank]
        reference = weakref.ref(self)

        def ended(value: Any) -> None:
            group = reference()
            if group is None or not isinstance(value, ray.exceptions.RayError):
                return
            error = group._explained(rank, "its life", value)  # noqa: SLF001  of this class
            if isinstance(error, WorkerDiedError):
                group._loop.notify(group._lives.died, rank, incarnation, error)  # noqa: SLF001

        handle.live.remote()._on_completed(ended)  # noqa: SLF001

    async def _replace(self, ranks: Sequence[int], prepare: str) -> list[Failed | None]:
        for rank in ranks:
            ray.kill(self._actors.handles[rank])  # of a group, those that still live
        seats = await asyncio.to_thread(self.resource_pool.seats)
        handles = [self._actor(rank, seats[rank]) for rank in ranks]
        places: list[Seat] = await self._all("seat", ranks, [handle.seat.remote() for handle in handles])
        if len(ranks) == self.world_size:
            self._contexts_given = self._contexts(places)
        for rank, place in zip(ranks, places, strict=True):
            self._nodes[rank] = place.address
        failures = await self._construct(ranks, handles)
        if prepare and not any(failures):
            failures = await self._all(prepare, ranks, [handle.prepare.remote(prepare) for handle in handles])
        with self._line.lock:
            for rank, handle in zip(ranks, handles, strict=True):
                self._actors.handles[rank] = handle
                # Calls keep their numbers, so that what is still said of old ones does not meet new ones.
                self._skipped[rank] = True
                handle.begin_at.remote(self._line.next(rank))
        for rank, handle in zip(ranks, handles, strict=True):
            self._watch_life(rank, handle)
        return failures

    async def _place(self) -> list[_Handle]:
        pool = self.resource_pool
        groups = pool.acquire()
        self._actors.pool = pool
        waits = [asyncio.to_thread(group.wait, pool.placement_timeout_s) for group in groups]
        if not all(await asyncio.gather(*waits)):
            raise await asyncio.to_thread(pool.no_room)
        for rank, seat in enumerate(await asyncio.to_thread(pool.seats)):
            self._actors.handles.append(self._actor(rank, seat))
        return list(self._actors.handles)

    def _actor(self, rank: int, seat: PoolSeat) -> _Handle:
        label = f"{self.name}[{rank}]"
        cls: Any = ray.remote(actor_class(label, self._alone))
        return cls.options(
            **self._demand,
            runtime_env=self._options.get("runtime_env"),
            max_concurrency=MAX_CALLS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                seat.group, placement_group_bundle_index=seat.bundle_index
            ),
        ).remote(label)

    def _contexts(self, seats: Sequence[Seat]) -> list[WorkerContext]:
        on_node = Counter(seat.node_id for seat in seats)
        before: Counter[str] = Counter()
        contexts: list[WorkerContext] = []
        for rank, seat in enumerate(seats):
            contexts.append(
                WorkerContext(
                    rank=rank,
                    world_size=self.world_size,
                    local_rank=before[seat.node_id],
                    local_world_size=on_node[seat.node_id],
                    group_name=self.name,
                    master_addr=seats[0].address,
                    master_port=seats[0].free_port,
                )
            )
            before[seat.node_id] += 1
        return contexts

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
        explained = self._explained(rank, method, error)
        if isinstance(explained, WorkerError):
            # The call did not reach the host, or its value could not leave it: later ones must not wait for it.
            self._skip(rank, sequence)
        return explained

    def _explained(self, rank: int, method: str, error: BaseException) -> BaseException:
        explained: BaseException
        if isinstance(error, DEATHS):
            cause = _cause(error)
            message = f"the process of rank {rank} of {self.name} died during {method}: {cause}"
            node = self._nodes[rank] if rank < len(self._nodes) else ""
            explained = WorkerDiedError(message, group=self.name, rank=rank, method=method, cause=cause, node=node)
            explained.origin = Origin(group=self.name, rank=rank, method=method, node=node)
        elif isinstance(error, ray.exceptions.RayError):
            message = (
                f"{self.name}.{method} failed on rank {rank} on the way there or back: {first_line(error)}\n"
                "(an argument that cannot be loaded there, or a value that cannot be pickled or loaded here)"
            )
            explained = WorkerError(message, group=self.name, rank=rank, method=method, remote_traceback=str(error))
        else:
            return error
        explained.__cause__ = error
        return explained

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
        if isinstance(value, DataProto):
            if value.size_bytes > INLINE_BYTES:
                return Plan.shard(RayBlock(ray.put(value)), Header.of(value))
            return value
        if isinstance(value, np.ndarray | bytes) and _size_bytes(value) > INLINE_BYTES:
            return RayValue(ray.put(value))
        return value

    def _store_parts(self, data: DataProto, parts: Sequence[Rows]) -> list[Any]:
        slices = [part for part in parts if isinstance(part, range)]
        if len(slices) < len(parts) or data.size_bytes > INLINE_BYTES:
            return super()._store_parts(data, parts)
        return list(encode_slices(data, slices))

    async def _close_workers(self) -> list[Failed | None]:
        if not self._actors.reachable:
            return []

        async def close(rank: int, handle: _Handle) -> Failed | None:
            try:
                return cast("Failed | None", await self._value(rank, "close", handle.close.remote()))
            except WorkerDiedError:
                return None

        return await asyncio.gather(*(close(rank, handle) for rank, handle in enumerate(self._actors.handles)))

    def _kill(self) -> None:
        self._finalizer()


def _size_bytes(value: np.ndarray[Any, Any] | bytes) -> int:
    return len(value) if isinstance(value, bytes) else value.nbytes


def _cause(error: ray.exceptions.RayError) -> str:
    """What Ray knows of a death, in one line."""
    text = str(error)
    for marker in ("Worker exit detail:", "Worker exit type:", "The actor is dead because"):
        _, found, rest = text.partition(marker)
        if found:
            return rest.strip().splitlines()[0].split(" Some common causes")[0]
    return first_line(error)
