"""RayHost: the actor of the Ray backend, a :class:`WorkerHost` that is called through Ray.

A worker process imports this module first: it loads neither torch nor numpy.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import ray

from asyncrl.errors import InfrastructureError, SchemaError
from asyncrl.single_controller.call import Arguments, Call, Failed, Reply, ReturnedBatch, shapes_of
from asyncrl.single_controller.children import children
from asyncrl.single_controller.host import WorkerHost
from asyncrl.single_controller.liveness import Liveness
from asyncrl.single_controller.ray.messages import Message, RayValue, decode_call, encode_reply, portable
from asyncrl.single_controller.worker import WorkerContext

if TYPE_CHECKING:
    from asyncrl.data.proto import DataProto
    from asyncrl.single_controller.ray.detached import DetachedState

# Ray leaves the types of handles, references and placement groups partly unknown.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false


@dataclass(frozen=True, slots=True)
class ActorLocation:
    """The node of an actor, its process there, and a port that is free there."""

    node_id: str
    address: str
    free_port: int
    pid: int


def contexts_of(locations: Sequence[ActorLocation], *, group_name: str) -> list[WorkerContext]:
    """Return the context of each worker of a group, given the locations by rank."""
    on_node = Counter(location.node_id for location in locations)
    before: Counter[str] = Counter()
    contexts: list[WorkerContext] = []
    for rank, location in enumerate(locations):
        contexts.append(
            WorkerContext(
                rank=rank,
                world_size=len(locations),
                local_rank=before[location.node_id],
                local_world_size=on_node[location.node_id],
                group_name=group_name,
                master_addr=locations[0].address,
                master_port=locations[0].free_port,
            )
        )
        before[location.node_id] += 1
    return contexts


class RayHost:
    def __init__(self, label: str) -> None:
        self._label = label
        self._host = WorkerHost()
        self._detached_state: DetachedState | None = None
        self._released = asyncio.Event()
        self._release_reason = ""

    async def location(self) -> ActorLocation:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = int(probe.getsockname()[1])
        node_id, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        return ActorLocation(node_id, address, port, os.getpid())

    async def ping(self) -> None:
        """Answer, on the event loop, whatever the worker's threads compute."""

    async def construct(
        self, init: RayValue, context: WorkerContext, variables: Mapping[str, str], liveness: Liveness | None
    ) -> Failed | None:
        # The class is loaded after the environment is set: modules may read it when they are imported.
        os.environ.update({**context.environment(), **variables})
        if liveness is not None:
            children.configure(liveness)
        try:
            worker_class, args, kwargs = await init.fetch()
        except InfrastructureError as error:
            return Failed.of(error).portable()
        failure = await self._host.construct(worker_class, args, kwargs, context)
        return failure and failure.portable()

    async def call(self, message: Message, *values: Any) -> Reply:
        """Run a call whose result is not expected to be a large batch."""
        call, sequence = decode_call(message, values)
        reply = await self._host.call(call, sequence)
        if not call.keep_batch:
            return portable(reply)
        small, batch = _encoded(reply, call)
        return small if batch is None else (small, ray.put(batch))

    @ray.method(num_returns=2)
    async def owned_by_caller(self, reply: ReturnedBatch, batch: DataProto) -> tuple[ReturnedBatch, DataProto]:
        """Return a batch that :meth:`call` has put into the store, as an object that outlives this process."""
        return reply, batch

    @ray.method(num_returns=2)
    async def call_keeping_batch(self, message: Message, *values: Any) -> tuple[Reply, DataProto | None]:
        """Run a call whose result may be a large batch: return the reply, and that batch as an object of its own."""
        call, sequence = decode_call(message, values)
        return _encoded(await self._host.call(call, sequence), call)

    async def call_without_arguments(self, method: str) -> Reply:
        """Run a call that needs no number, since no other is active."""
        call = Call(method=method, arguments=Arguments((), {}), to_fetch=False)
        return portable(await self._host.call(call, None))

    async def stream(self, message: Message, *values: Any) -> AsyncGenerator[Reply, None]:
        async with contextlib.aclosing(self._host.stream(*decode_call(message, values))) as items:
            async for item in items:
                yield portable(item)

    async def begin_at(self, sequence: int) -> None:
        self._host.begin_at(sequence)

    async def take_over(self) -> int:
        self._release("another program has attached to it")
        return self._host.take_over()

    async def dismiss(self, why: str) -> None:
        """Release this worker before it is killed, so that its group does not replace it."""
        self._release(why)
        await asyncio.sleep(0)  # `wait_released` returns first, before the caller can kill this worker

    def _release(self, why: str) -> None:
        self._release_reason = why
        released, self._released = self._released, asyncio.Event()
        released.set()

    async def wait_released(self) -> str:
        """Return why the calling program must release this worker; the call fails when the process dies."""
        await self._released.wait()
        return self._release_reason

    async def save_detached_state(self, state: DetachedState) -> None:
        self._detached_state = state

    async def detached_state(self) -> DetachedState | None:
        return self._detached_state

    async def prepare(self, method: str) -> Failed | None:
        failure = await self._host.prepare(method)
        return failure and failure.portable()

    async def cancel(self, sequence: int) -> None:
        self._host.cancel(sequence)

    async def skip(self, sequence: int) -> None:
        self._host.skip(sequence)

    async def close(self) -> Failed | None:
        failure = await self._host.close()
        return failure and failure.portable()

    def __repr__(self) -> str:
        return self._label


def _encoded(reply: Reply, call: Call) -> tuple[Reply, DataProto | None]:
    try:
        return encode_reply(reply)
    except Exception as error:  # noqa: BLE001  a batch that is none fails its call
        cause = error
        try:
            cast("DataProto", reply).check_consistency()  # names the column
        except SchemaError as better:
            cause = better
        except Exception:  # noqa: BLE001, S110  the first error stands
            pass
        return Failed.of(cause, arguments=shapes_of(call.arguments)).portable(), None


def actor_class(name: str, methods: Iterable[str]) -> type[RayHost]:
    """Return the class of a group's actors; Ray names the processes after it.

    Ray loads the arguments of asynchronous actors in a round trip between two threads, a fifth of the whole call. So
    that a call without arguments has none, each of ``methods`` is a method of the actor too.
    """
    return type(name, (RayHost,), {name_without_arguments(method): _without_arguments(method) for method in methods})


def name_without_arguments(method: str) -> str:
    """Return the name of the actor's method that calls the worker's ``method`` without arguments."""
    return f"without_arguments_{method}"


def _without_arguments(method: str) -> Callable[[RayHost], Awaitable[Reply]]:
    async def call(self: RayHost) -> Reply:
        return await self.call_without_arguments(method)

    return call
