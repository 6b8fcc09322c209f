"""The Ray backend: RayWorkerGroup and the options of its actors.

A call goes from ``RayWorkerGroup._submit`` to :class:`RayHost` in the actor; :class:`RayReply` passes the reply on.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
import weakref
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, cast

import numpy as np
import ray
import ray.exceptions
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from asyncrl.data.codec import encode_slices
from asyncrl.data.plan import Header, Plan, Rows
from asyncrl.data.proto import DataProto
from asyncrl.errors import DeadlineError, DispatchError, GroupClosedError, ResourceError, WorkerDiedError
from asyncrl.runtime import ControllerLoop, in_abandonable_thread
from asyncrl.single_controller.call import Arguments, AttemptLost, Call, Failed, Reply, ReturnedBatch
from asyncrl.single_controller.children import kill_stopped
from asyncrl.single_controller.decorator import registrations
from asyncrl.single_controller.invocation import Invocation, PendingReply
from asyncrl.single_controller.liveness import Liveness, Silence
from asyncrl.single_controller.ray import detached as detached_groups
from asyncrl.single_controller.ray.cluster import in_ray_thread, is_head_lost
from asyncrl.single_controller.ray.detached import NAMESPACE, DetachedPool, DetachedState, Handle
from asyncrl.single_controller.ray.host import ActorLocation, actor_class, contexts_of, name_without_arguments
from asyncrl.single_controller.ray.messages import (
    INLINE_BYTES,
    CallEncoder,
    RayValue,
    decode_reply,
    is_death,
    translate_error,
)
from asyncrl.single_controller.ray.resource_pool import Placement, RayResourcePool, any_removed
from asyncrl.single_controller.restart import Restart
from asyncrl.single_controller.streams import PREFETCH, RankStream
from asyncrl.single_controller.worker import WorkerContext
from asyncrl.single_controller.worker_group import ClassWithInitArgs, WorkerGroup

# Ray leaves the types of handles, references and placement groups partly unknown.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false, reportPrivateUsage=false
# ruff: noqa: SLF001  a reply and the callback of an actor work on their group's state

_log = logging.getLogger(__name__)

MAX_CALLS = 1_000_000
"""Calls that one actor holds at a time, running or queued; Ray holds further ones back."""

STARTING_NAMED_S, START_S = 20.0, 60.0
"""When a process is named that has not started, and the least time after which it is given up: importing takes time."""

_OPTIONS = frozenset({"num_cpus", "num_gpus", "resources", "runtime_env", "env_vars", "enable_task_events"})


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class, plain or decorated with ``ray.remote``, the arguments of every rank, and options of the actors.

    Options (:meth:`options`): ``num_cpus``, ``num_gpus``, ``resources`` (of one worker; default: the pool's share),
    ``runtime_env``, ``env_vars`` (environment variables, set before the class is loaded) and ``enable_task_events``:
    whether Ray records every call for its dashboard and ``ray list tasks``; default: False, since it slows calls down.

        >>> RayClassWithInitArgs(Greeter).options(num_cpus=0.5).actor_options
        {'num_cpus': 0.5}

    Raises:
        ResourceError: ``ray.remote`` gave the class options that workers cannot have.
    """

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        options: dict[str, Any] = {}
        metadata = getattr(cls, "__ray_metadata__", None)
        if metadata is not None:
            options = dict(getattr(cls, "_default_options", {}))
            cls = metadata.modified_class
        super().__init__(cls, *args, **kwargs)
        self.update_options(options)

    @staticmethod
    def of(made: ClassWithInitArgs) -> RayClassWithInitArgs:
        if isinstance(made, RayClassWithInitArgs):
            return made
        return RayClassWithInitArgs(made.cls, *made.args, **made.kwargs).options(**made.actor_options)

    def options(self, **options: Any) -> RayClassWithInitArgs:
        """Return a copy with these options added.

        Raises:
            ResourceError: an option that workers cannot have.
        """
        copy = RayClassWithInitArgs(self.cls, *self.args, **self.kwargs)
        copy.update_options({**self.actor_options, **options})
        return copy

    def update_options(self, options: Mapping[str, Any]) -> None:
        """:meth:`options` in place, under verl's name.

        Raises:
            ResourceError: an option that workers cannot have.
        """
        if unknown := sorted(options.keys() - _OPTIONS):
            raise ResourceError(f"options {unknown} cannot be used: a worker takes {sorted(_OPTIONS)}")
        self.actor_options = {**self.actor_options, **options}


def actor_resources(init: RayClassWithInitArgs, pool: RayResourcePool, *, group: str) -> dict[str, Any]:
    """Return ``num_cpus``, ``num_gpus`` and ``resources`` of one actor; raise ResourceError if they exceed a bundle."""
    options = init.actor_options
    demand = {
        "num_cpus": options.get("num_cpus", pool.cpus_per_worker),
        "num_gpus": options.get("num_gpus", pool.gpus_per_worker / pool.max_colocate_count),
        "resources": options.get("resources", pool.resources_per_worker),
    }
    bundle = pool.bundle()
    for resource, amount in {"CPU": demand["num_cpus"], "GPU": demand["num_gpus"], **demand["resources"]}.items():
        if amount > bundle.get(resource, 0.0) + 1e-6:
            raise ResourceError(
                f"a worker of {group} needs {amount:g} {resource}, and its bundle in {pool!r} has "
                f"{bundle.get(resource, 0.0):g}: raise the pool's resources per worker or lower the worker's options"
            )
    return demand


class ActorHandles:
    """The actors of a group and its share of a pool, until they are freed."""

    def __init__(self) -> None:
        self.handles: list[Handle] = []
        self.pool: RayResourcePool | None = None
        self._lock = threading.Lock()
        self._released = False
        self._node = _node_id()

    @property
    def reachable(self) -> bool:
        """Whether this program still controls the actors, and is connected to their cluster."""
        return not self._released and self.connected

    @property
    def connected(self) -> bool:
        """Whether this program is connected to the cluster on which the actors were started."""
        return not is_head_lost() and ray.is_initialized() and _node_id() == self._node

    def free(self) -> None:
        """Kill the actors and release the pool. Idempotent; from any thread."""
        if (pool := self.kill()) is not None:
            pool.release()

    def kill(self) -> RayResourcePool | None:
        """Kill the actors; return the pool if its share is to be released now. Idempotent; from any thread."""
        with self._lock:
            handles, self.handles = self.handles, []
            pool, self.pool = self.pool, None
        if not self.reachable:
            return None
        for handle in handles:
            ray.kill(handle)
        return pool

    def kill_one(self, handle: Handle) -> None:
        """Kill an actor, if this program still controls it."""
        if self.reachable:
            ray.kill(handle)

    def release(self) -> None:
        """Leave the actors running; another program may control them."""
        self._released = True


def _node_id() -> str:
    return str(ray.get_runtime_context().get_node_id())


@ray.remote(num_cpus=0)
def _kill_process(pid: int) -> None:
    """Kill a process of this node that does not answer, so that Ray's own ways to end it fail."""
    kill_stopped(pid)


def _answered(loop: ControllerLoop, silence: Silence, rank: int, reply: object) -> None:
    """Note a reply, also a failure: a process that is gone is not silent. In a thread of Ray's."""
    del reply
    loop.notify(silence.answered, rank)


async def _ask_for_life(group_of: weakref.ref[RayWorkerGroup], silence: Silence) -> None:
    """Ping the ranks of a group until it is closed or not referenced any more."""
    named: set[int] = set()
    while (group := group_of()) is not None and group._actors.reachable:
        group._ping(silence, named)
        del group
        await asyncio.sleep(silence.liveness.every_s)


@dataclass(eq=False, slots=True)
class RayReply:
    """A reply that Ray will deliver. ``keeping``: the method, if the worker keeps its batch."""

    _group: RayWorkerGroup
    _rank: int
    _handle: Handle
    _keeping: str | None
    ref: ray.ObjectRef[Any]
    _block: RayValue | None
    _invocation: Invocation
    _counted: bool = False

    def watch(self) -> None:
        # What ObjectRef.future() uses, without a Future for each rank.
        self.ref._on_completed(self)

    def __call__(self, value: Any) -> None:
        """Pass the reply to the invocation, in the thread that waited or in one of Ray's. Never blocks or raises."""
        if isinstance(value, ray.exceptions.RayError):
            value = self._lost(value)
        block, small = self._block, False
        if self._keeping is not None:
            small = isinstance(value, bytes)
            if type(value) is tuple and len(value) == 2 and isinstance(value[0], ReturnedBatch):
                self._group._loop.notify(self._become_owner, *value)
                return
            try:
                value = decode_reply(value)
            except Exception as error:  # noqa: BLE001  raised here it would be lost, and the call would never end
                value = AttemptLost(error)
        if not self._counted:  # a blocking thread that is interrupted has it delivered again
            self._counted = True
            self._group._count_reply(self._rank, self._keeping, small=small)
        self._invocation.handle_reply(self._rank, value, block)

    def _become_owner(self, reply: ReturnedBatch, batch: ray.ObjectRef[Any]) -> None:
        """Receive the reply again, once this process owns its batch: the worker does, and may die. On the loop."""
        if self._block is None and self._group._actors.connected:
            self.ref, owned = self._handle.owned_by_caller.remote(reply, batch)
            self._block = RayValue(owned)
            self.watch()

    def _lost(self, error: ray.exceptions.RayError) -> AttemptLost:
        if not is_death(error):
            # The call may not have reached the host: later calls, which have numbers from now on, must not wait for it.
            self._group._needs_numbers[self._rank] = True
            self._group._loop.notify(self._group._skip, self._rank, self._invocation._sequences[self._rank])
        return AttemptLost(error.as_instanceof_cause() if isinstance(error, ray.exceptions.RayTaskError) else error)


async def _replies_of(references: Any) -> AsyncGenerator[Reply, None]:
    """Yield the replies of a streaming method; a failure of Ray is the last one."""
    try:
        async for reference in references:
            yield await reference
    except ray.exceptions.RayError as error:
        yield AttemptLost(error)


class RayWorkerGroup(WorkerGroup):
    """Workers as Ray actors, one in every bundle of a pool.

    The constructor checks the pool against the cluster and returns before the actors are placed and constructed.

        >>> with RayWorkerGroup(RayResourcePool([2]), RayClassWithInitArgs(Greeter)) as greeters:  # after ray.init()
        ...     greeters.greet("hi").result()
        ['hi, from 0 of 2', 'hi, from 1 of 2']

    Args:
        restart: the policy for dead processes; None leaves them dead.
        liveness: when a process that does not answer is named and ended; None asks none. It also holds for stopped
            processes that the workers start (:mod:`asyncrl.single_controller.children`).
        detached: the workers outlive this program, until a program shuts the group down; :meth:`attach` finds them by
            the group's name. The pool must be detached too.

    Raises:
        ResourceError: the cluster can never hold the pool, a worker needs more than its bundle has, the name of a
            detached group is missing or exists, or Ray is not initialised. If resources that others use do not become
            free in time, :meth:`ready` fails.
        DispatchError: as :class:`WorkerGroup`.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: ClassWithInitArgs,
        *,
        name: str = "",
        restart: Restart | None = None,
        liveness: Liveness | None = None,
        detached: bool = False,
    ) -> None:
        if not ray.is_initialized():
            raise ResourceError("Ray is not initialised: call ray.init() before making worker groups")
        resource_pool.check()
        if detached:
            detached_groups.check_detached(name, resource_pool)
        self._set_up(
            resource_pool,
            RayClassWithInitArgs.of(ray_cls_with_init),
            name,
            restart=restart,
            liveness=liveness,
            detached=detached,
        )

    @classmethod
    def attach(
        cls,
        name: str,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        *,
        restart: Restart | None = None,
        timeout_s: float = 60.0,
    ) -> Self:
        """Use a detached group that another program created, or this one earlier. Waits for a round trip.

        The program that used it before, if it still runs, is refused from now on: its calls that workers have started
        run on, all others fail with :class:`GroupClosedError`. Without ``ray_cls_with_init``, class, arguments and
        options are those that the group was created with; ``timeout_s`` is for the reply of rank 0.

            >>> pool = RayResourcePool([1], detached=True)
            >>> made = RayWorkerGroup(pool, RayClassWithInitArgs(Greeter), name="kept", detached=True)
            >>> made.ready().result()
            >>> found = RayWorkerGroup.attach("kept")  # in another program, too
            >>> found.greet("hi").result()
            ['hi, from 0 of 1']
            >>> found.detach()  # the workers run on
            >>> RayWorkerGroup.end_detached("kept")
            1

        Raises:
            ResourceError: the group does not exist or is incomplete, or Ray is not initialised.
            WorkerDiedError: rank 0 died at this moment.
            DeadlineError: rank 0 does not reply: it hangs, or waits for resources that it may never get.
        """
        if not ray.is_initialized():
            raise ResourceError("Ray is not initialised: call ray.init(address=...) before attaching to worker groups")
        handles = detached_groups.find(name)
        try:
            state: DetachedState | None = ray.get(handles[0].detached_state.remote(), timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise DeadlineError(
                f"rank 0 of the detached group {name!r} has not replied within {timeout_s:g} s; if it hangs, "
                f"RayWorkerGroup.end_detached({name!r}) ends the group",
                waiting_for=f"rank 0 of {name}",
                timeout_s=timeout_s,
            ) from None
        except ray.exceptions.RayError as error:
            raise translate_error(error, group=name, rank=0, method="attach", node="") from error
        if state is None:
            raise ResourceError(
                f"the detached group {name!r} is incomplete: its workers are still being created, or its program ended "
                f"before they were; attach to it later, or end it with RayWorkerGroup.end_detached({name!r})"
            )
        if len(handles) < len(state.placements):  # names do not show that the last ranks are missing
            raise detached_groups.has_died(name, len(handles))
        group = cls.__new__(cls)
        pool = DetachedPool(state.placements, group=name)
        init = ray_cls_with_init or state.init
        group._set_up(pool, init, name, restart=restart, detached=True, found=(handles, state))
        return group

    @staticmethod
    def end_detached(name: str) -> int:
        """Kill the workers of a detached group, complete or not, and free its resources; return how many there were.

        The program that uses the group does not replace them, whatever its :class:`Restart` policy; its calls fail with
        :class:`GroupClosedError`.
        """
        return detached_groups.end(name)

    def detach(self) -> None:
        """Release a detached group: its workers run on; calls of this program fail.

        Raises:
            ResourceError: the group was not created with ``detached=True``.
        """
        if not self.detached:
            raise ResourceError(f"{self.name} ends with this program: create it with detached=True to detach it")
        self._release("this program has detached from it")
        self.shutdown()

    def _release(self, why: str) -> None:
        self._closed_reason = why
        self._closed = True
        self._actors.release()
        self._loop.notify(self._restarts.stop)

    def _set_up(
        self,
        resource_pool: RayResourcePool,
        init: RayClassWithInitArgs,
        name: str,
        *,
        restart: Restart | None,
        detached: bool,
        liveness: Liveness | None = None,
        found: tuple[list[Handle], DetachedState] | None = None,
    ) -> None:
        super().__init__(init, world_size=resource_pool.world_size, name=name, restart=restart)
        self.resource_pool = resource_pool
        self.detached = detached
        self._options = init.actor_options
        self._found = found
        self._demand = actor_resources(init, resource_pool, group=self.name) if found is None else found[1].demand
        self._names = [""] * self.world_size
        self._nodes: list[str] = []
        self._locations_of: dict[int, ActorLocation] = {}
        self._silence = Silence(liveness) if liveness is not None else None
        self._constructing: dict[int, Handle] = {}
        """By rank, new workers that do not take calls yet."""
        self._contexts: list[WorkerContext] = []
        self._init: RayValue | None = None
        self._actors = ActorHandles()
        self._methods_without_arguments = {name: name_without_arguments(name) for name in registrations(init.cls)}
        self._active_calls_of = [0] * self.world_size
        self._needs_numbers = [detached] * self.world_size
        """By rank, whether every call needs a number: numbers were skipped, or distinguish programs."""
        self._count_lock = threading.Lock()
        self._encoder = CallEncoder()
        self._small: set[str] = set()
        """Methods whose last batch was small: their next reply travels as one object."""
        if not detached:
            weakref.finalize(self, self._actors.free)
        self._begin()

    # ---------------------------------------------------------------------------------------------------------- start

    async def _start(self) -> list[Failed | None]:
        if self._found is not None:
            return await self._take_over(*self._found)
        handles = await self._place()
        ranks = range(len(handles))
        locations = await self._locations(ranks, handles)
        self._locations_of = dict(enumerate(locations))
        self._nodes = [location.address for location in locations]
        self._put_init()
        self._contexts = contexts_of(locations, group_name=self.name)
        if self._silence is not None:
            self._owner.spawn(partial(_ask_for_life, weakref.ref(self), self._silence), lambda _: None)
        failures = await self._construct(ranks, handles)
        if self.detached:
            await self._save_state(handles)
            await in_ray_thread(partial(detached_groups.check_first, self.name, self._names[0]))
        for rank, handle in enumerate(handles):
            self._watch_actor(rank, handle)
        return failures

    def _put_init(self) -> None:
        init = self.cls_with_init
        given: Any = (init.cls, init.args, init.kwargs)
        self._init = RayValue(ray.put(given))

    async def _take_over(self, handles: list[Handle], state: DetachedState) -> list[Failed | None]:
        """Become the program whose calls these workers take."""
        ranks = range(len(handles))
        numbers = await self._all("attach", ranks, [handle.take_over.remote() for handle in handles])
        with self._order.lock:
            self._order.begin_at(numbers)
        self._put_init()
        self._nodes, self._contexts = list(state.nodes), list(state.contexts)
        for rank, handle in enumerate(handles):
            self._watch_actor(rank, handle)
        # Last: a start that fails frees these, and another program may use the workers.
        self._actors.handles, self._actors.pool = list(handles), self.resource_pool
        return [None] * len(handles)

    async def _save_state(self, handles: Sequence[Handle]) -> None:
        """Save in the workers what another program needs to attach."""
        state = DetachedState(
            init=cast("RayClassWithInitArgs", self.cls_with_init),
            contexts=self._contexts,
            placements=await in_ray_thread(self.resource_pool.placements),
            nodes=self._nodes,
            demand=self._demand,
        )
        saved = [handle.save_detached_state.remote(state) for handle in handles]
        await self._all("__init__", range(len(handles)), saved)

    async def _construct(
        self, ranks: Sequence[int], handles: Sequence[Handle], *, prepare: str = ""
    ) -> list[Failed | None]:
        """Construct workers, and prepare them."""
        variables = {str(name): str(value) for name, value in self._options.get("env_vars", {}).items()}
        with self._patience(ranks, handles) as liveness:
            calls = [
                handle.construct.remote(self._init, self._contexts[rank], variables, liveness)
                for rank, handle in zip(ranks, handles, strict=True)
            ]
            failures = await self._all("__init__", ranks, calls)
            if prepare and not any(failures):
                failures = await self._all(prepare, ranks, [handle.prepare.remote(prepare) for handle in handles])
        return failures

    def _watch_actor(self, rank: int, handle: Handle) -> None:
        incarnation = self._restarts.incarnations[rank]
        reference = weakref.ref(self)

        def ended(value: Any) -> None:
            group = reference()
            if group is None:
                return
            if not isinstance(value, ray.exceptions.RayError):
                group._release(value)
                return
            error = group._explain(rank, "its lifetime", value)
            if isinstance(error, WorkerDiedError):
                if isinstance(value, ray.exceptions.ActorUnavailableError):
                    # It may live on, without the calls that were on their way: later ones would wait for their turn.
                    group._loop.notify(group._actors.kill_one, handle)
                group._loop.notify(group._restarts.died, rank, incarnation, error)

        handle.wait_released.remote()._on_completed(ended)

    async def _replace(self, ranks: Sequence[int], prepare: str) -> list[Failed | None]:
        if not self._actors.reachable:
            raise GroupClosedError(f"the workers of {self.name} are not replaced: {self._closed_reason}")
        for rank in ranks:
            ray.kill(self._actors.handles[rank])  # with scope "group", some still run
        placements = await in_ray_thread(self.resource_pool.placements)
        handles = [self._actor(rank, placements[rank]) for rank in ranks]
        try:
            locations = await self._locations(ranks, handles)
            if len(ranks) == self.world_size:
                self._contexts = contexts_of(locations, group_name=self.name)
            for rank, location in zip(ranks, locations, strict=True):
                self._nodes[rank] = location.address
                self._locations_of[rank] = location
            failures = await self._construct(ranks, handles, prepare=prepare)
        except BaseException:
            for handle in handles:
                ray.kill(handle)
            raise
        with self._order.lock:
            for rank, handle in zip(ranks, handles, strict=True):
                self._actors.handles[rank] = handle
                # Numbers continue, so that late messages about calls of the old worker do not match those of the new.
                self._needs_numbers[rank] = True
                handle.begin_at.remote(self._order.next_sequence(rank))
        if self.detached:
            await self._save_state(self._actors.handles)
        for rank, handle in zip(ranks, handles, strict=True):
            self._watch_actor(rank, handle)
        return failures

    # ------------------------------------------------------------------------------------------------------- liveness

    @property
    def node_addresses(self) -> Sequence[str]:
        return tuple(self._nodes)

    def explain_silence(self) -> list[str]:
        if self._silence is None:
            return []
        return [self._named(rank, for_s) for rank, for_s in self._silence.silent(now_s=self._loop.now()).items()]

    def _named(self, rank: int, for_s: float) -> str:
        location = self._locations_of[rank]
        return (
            f"{self.name}[{rank}] (process {location.pid} on {location.address}) has not answered for {for_s:.0f} s: "
            "it is stopped, swapped out, or in a call that keeps the interpreter lock or its event loop (code of an "
            "environment or a tool that computes or waits without await)"
        )

    @contextmanager
    def _patience(self, ranks: Sequence[int], handles: Sequence[Handle]) -> Generator[Liveness | None]:
        """Ask new workers for life with more patience while they are constructed: imports keep the lock."""
        silence = self._silence
        if silence is None:
            yield None
            return
        liveness = silence.liveness
        named_s, ended_s = max(liveness.named_after_s, STARTING_NAMED_S), max(liveness.ended_after_s, START_S)
        silence.liveness = replace(liveness, named_after_s=named_s, ended_after_s=ended_s)
        self._constructing = dict(zip(ranks, handles, strict=True))
        for rank in ranks:  # nor is one of the process before held against the new one
            silence.answered(rank)
        try:
            yield liveness
        finally:
            silence.liveness, self._constructing = liveness, {}
            for rank in ranks:  # a ping that waits since then is not held against the shorter times
                silence.answered(rank)

    def _ping(self, silence: Silence, named: set[int]) -> None:
        """Ask every rank that owes no answer; name those that have been silent, end those past the deadline."""
        for rank, handle in {**dict(enumerate(self._actors.handles)), **self._constructing}.items():
            if not silence.waits(rank):
                silence.sent(rank, now_s=self._loop.now())
                handle.ping.remote()._on_completed(partial(_answered, self._loop, silence, rank))
        now_s = self._loop.now()
        found = silence.silent(now_s=now_s)
        for rank in found.keys() - named:
            _log.warning("%s; it is ended after %g s", self._named(rank, found[rank]), silence.liveness.ended_after_s)
        for rank in named - found.keys():
            _log.warning("%s[%d] answers again", self.name, rank)
        named.clear()
        named.update(found)
        for rank in silence.overdue(now_s=now_s):
            _log.error("%s: its process is killed", self._named(rank, found[rank]))
            location = self._locations_of[rank]
            on_its_node = NodeAffinitySchedulingStrategy(location.node_id, soft=False)
            _kill_process.options(scheduling_strategy=on_its_node).remote(location.pid)

    async def _place(self) -> list[Handle]:
        pool = self.resource_pool

        def acquire() -> list[PlacementGroup]:
            groups = pool.acquire()
            self._actors.pool = pool
            return groups

        # Neither returns where Ray's head has died.
        groups = await in_ray_thread(acquire)
        waits = [in_abandonable_thread(partial(group.wait, pool.placement_timeout_s)) for group in groups]
        if not all(await asyncio.gather(*waits)):
            raise await in_ray_thread(pool.placement_timeout_error)
        for rank, placement in enumerate(await in_ray_thread(pool.placements)):
            self._actors.handles.append(self._actor(rank, placement))
        return list(self._actors.handles)

    async def _locations(self, ranks: Sequence[int], handles: Sequence[Handle]) -> list[ActorLocation]:
        """Return the locations of new actors.

        A program that ends the group at this moment has removed its placement groups by now, or finds the actors.
        """
        if await in_ray_thread(lambda: any_removed(each.group for each in self.resource_pool.placements())):
            raise GroupClosedError(
                f"the workers of {self.name} are not created: the group was ended by another program, or its placement "
                "group was removed"
            )
        return await asyncio.gather(*map(self._location, ranks, handles))

    async def _location(self, rank: int, handle: Handle) -> ActorLocation:
        """Return the location of an actor once its process has started; name one that takes long, give it up later."""
        asked = asyncio.ensure_future(self._value(rank, "__init__", handle.location.remote()))
        try:
            if self._silence is not None:
                limit_s = max(self._silence.liveness.ended_after_s, START_S)
                what = f"the process of {self.name}[{rank}] has not started for"
                await asyncio.wait([asked], timeout=STARTING_NAMED_S)
                if not asked.done():
                    _log.warning("%s %g s: it is stopped, or its machine is busy", what, STARTING_NAMED_S)
                    await asyncio.wait([asked], timeout=limit_s - STARTING_NAMED_S)
                if not asked.done():
                    raise WorkerDiedError(
                        f"{what} {limit_s:g} s and is given up",
                        group=self.name,
                        rank=rank,
                        method="__init__",
                        cause="its process does not start",
                    )
            location: ActorLocation = await asked
        finally:
            asked.cancel()
        return location

    def _actor(self, rank: int, placement: Placement) -> Handle:
        label = f"{self.name}[{rank}]"
        cls: Any = ray.remote(actor_class(label, self._methods_without_arguments))
        lasting: dict[str, Any] = {}
        if self.detached:
            self._names[rank] = detached_groups.new_actor_name(self.name, rank, placement)
            lasting = {"name": self._names[rank], "namespace": NAMESPACE, "lifetime": "detached"}
        return cls.options(
            **self._demand,
            **lasting,
            runtime_env=self._options.get("runtime_env"),
            max_concurrency=MAX_CALLS,
            enable_task_events=self._options.get("enable_task_events", False),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement.group, placement_group_bundle_index=placement.bundle_index
            ),
        ).remote(label)

    async def _all(self, method: str, ranks: Sequence[int], refs: Sequence[ray.ObjectRef[Any]]) -> list[Any]:
        """Return the values of one call on these ranks; raise the first failure at once."""
        return await asyncio.gather(*(self._value(rank, method, ref) for rank, ref in zip(ranks, refs, strict=True)))

    # ---------------------------------------------------------------------------------------------------------- calls

    def _can_send_from_caller(self) -> bool:
        return self._ready.outcome.state == "done"

    def _submit(self, rank: int, call: Call, sequence: int, invocation: Invocation) -> PendingReply | None:
        handle: Any = self._actors.handles[rank]
        block: RayValue | None = None
        try:
            if self._needs_no_message(rank, call):
                reply = getattr(handle, self._methods_without_arguments[call.method]).remote()
            elif call.keep_batch and call.method not in self._small:
                message, refs = self._encoder.encode(call, sequence)
                reply, batch = handle.call_keeping_batch.remote(message, *refs)
                block = RayValue(batch)
            else:
                message, refs = self._encoder.encode(call, sequence)
                reply = handle.call.remote(message, *refs)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise DispatchError(f"an argument of {self.name}.{call.method} cannot be pickled: {error}") from error
        with self._count_lock:
            self._active_calls_of[rank] += 1
        return RayReply(self, rank, handle, call.method if call.keep_batch else None, reply, block, invocation)

    def _sent(self) -> None:
        self._encoder.forget()

    def _open_stream(self, rank: int, call: Call, sequence: int) -> RankStream:
        method = self._actors.handles[rank].stream.options(
            num_returns="streaming", _generator_backpressure_num_objects=PREFETCH
        )
        try:
            message, refs = self._encoder.encode(call, sequence)
            items = method.remote(message, *refs)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise DispatchError(f"an argument of {self.name}.{call.method} cannot be pickled: {error}") from error
        with self._count_lock:
            self._active_calls_of[rank] += 1

        def on_end(by_rank: bool) -> None:
            if not by_rank and self._actors.reachable:
                # Closes the generator in the worker, or makes the worker not wait for the call.
                ray.cancel(items)
                self._skip(rank, sequence)
            self._count_reply(rank, None, small=False)

        return RankStream(_replies_of(items), on_end)

    def _needs_no_message(self, rank: int, call: Call) -> bool:
        """Whether a call has no arguments and needs no number, since every call sent before has its reply."""
        return not (
            self._active_calls_of[rank]
            or self._needs_numbers[rank]
            or call.keep_batch
            or call.arguments.args
            or call.arguments.kwargs
            or call.method not in self._methods_without_arguments
        )

    def _count_reply(self, rank: int, keeping: str | None, *, small: bool) -> None:
        with self._count_lock:
            self._active_calls_of[rank] -= 1
        if keeping is not None:
            (self._small.add if small else self._small.discard)(keeping)

    def _wait_for_replies(self, replies: Sequence[PendingReply], timeout_s: float) -> bool:
        pending = cast("Sequence[RayReply]", replies)
        try:
            values: Any = ray.get([each.ref for each in pending], timeout=timeout_s)
        except ray.exceptions.RayError:
            return False  # not arrived, or failed: watching them shows which
        for each, value in zip(pending, values, strict=True):
            each(value)
        return True

    def _explain(self, rank: int, method: str, error: BaseException) -> BaseException:
        node = self._nodes[rank] if rank < len(self._nodes) else ""
        return translate_error(error, group=self.name, rank=rank, method=method, node=node)

    async def _value(self, rank: int, method: str, ref: ray.ObjectRef[Any]) -> Any:
        try:
            return await asyncio.wrap_future(ref.future())
        except ray.exceptions.RayError as error:
            raise self._explain(rank, method, error) from error

    def _cancel(self, rank: int, sequence: int) -> None:
        # A call through a handle would start another cluster if this one was shut down.
        if rank < len(self._actors.handles) and self._actors.reachable:
            self._actors.handles[rank].cancel.remote(sequence)

    def _skip(self, rank: int, sequence: int) -> None:
        self._needs_numbers[rank] = True
        if rank < len(self._actors.handles) and self._actors.reachable:
            self._actors.handles[rank].skip.remote(sequence)

    def _store(self, value: Any) -> Any:
        if isinstance(value, DataProto):
            if value.size_bytes > INLINE_BYTES:
                return Plan.shard(RayValue(ray.put(value)), Header.of(value))
        elif (isinstance(value, np.ndarray) and value.nbytes > INLINE_BYTES) or (
            isinstance(value, bytes) and len(value) > INLINE_BYTES
        ):
            return RayValue(ray.put(value))
        return value

    def _store_parts(self, data: DataProto, parts: Sequence[Rows]) -> list[Any]:
        slices = [part for part in parts if isinstance(part, range)]
        if len(slices) < len(parts):  # padded shares are not consecutive rows
            return super()._store_parts(data, parts)
        encoded = encode_slices(data, slices)  # slicing batches instead would take a tenth of the time of storing them
        if data.size_bytes <= INLINE_BYTES:
            return list(encoded)
        return [Plan.shard(RayValue(ray.put(each)), Header.coded(each)) for each in encoded]

    def _dereference(self, arguments: Arguments) -> Arguments:
        # As in Ray's own calls: a reference that is itself an argument is replaced, one inside a list is not.
        args, kwargs = arguments.args, arguments.kwargs
        if not any(isinstance(each, ray.ObjectRef) for each in (*args, *kwargs.values())):
            return arguments

        def value(each: Any) -> Any:
            return RayValue(each) if isinstance(each, ray.ObjectRef) else each

        return Arguments(tuple(map(value, args)), {name: value(each) for name, each in kwargs.items()})

    async def _close_workers(self) -> list[Failed | None]:
        if not self._actors.reachable:
            return []

        async def close(rank: int, handle: Handle) -> Failed | None:
            try:
                return cast("Failed | None", await self._value(rank, "close", handle.close.remote()))
            except WorkerDiedError:
                return None

        return await asyncio.gather(*(close(rank, handle) for rank, handle in enumerate(self._actors.handles)))

    async def _kill(self) -> None:
        pool = self._actors.kill()
        if pool is not None:
            await in_ray_thread(pool.release)  # blocks if it could not be placed
