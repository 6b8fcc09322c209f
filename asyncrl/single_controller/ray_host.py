"""The actor of the Ray backend: a :class:`WorkerHost` behind Ray's calls.

A worker process loads this module first: it imports neither torch nor numpy.
"""

# Ray leaves the types of handles, references and placement groups partly unknown.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import ray

from asyncrl.errors import InfrastructureError
from asyncrl.single_controller.call import Arguments, Call, Failed, Reply, ReturnedBatch
from asyncrl.single_controller.host import WorkerHost
from asyncrl.single_controller.ray_message import Message, opened
from asyncrl.single_controller.ray_store import RayValue
from asyncrl.single_controller.worker import WorkerContext

if TYPE_CHECKING:
    from asyncrl.data.proto import DataProto
    from asyncrl.single_controller.ray_actors import Standing

__all__ = ["INLINE_BYTES", "RayHost", "Seat", "actor_class", "contexts_of", "name_without_arguments", "value_of"]


@dataclass(frozen=True, slots=True)
class Seat:
    """Where an actor lives, and a port that was free there."""

    node_id: str
    address: str
    free_port: int


INLINE_BYTES = 64 * 1024
"""Batches and arrays up to this size travel inside a call or reply; larger ones through the object store, once."""

BATCH, VALUE = b"B", b"V"
"""What the bytes behind them are, where a call keeps its batch and replies with bytes: a small batch, or a value."""


def value_of(reply: Reply) -> Reply:
    """What a call that keeps its batch has replied: a small batch as a :class:`Plan`."""
    if not isinstance(reply, bytes):
        return reply
    if reply[:1] == VALUE:
        return reply[1:]
    from asyncrl.data.codec import Encoded
    from asyncrl.data.plan import Plan

    return Plan.coded(Encoded(*pickle.loads(memoryview(reply)[1:])))  # noqa: S301  from our own worker


class RayHost:
    """The methods that a group calls on its actors."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._host = WorkerHost()
        self._standing: Standing | None = None
        self._left = asyncio.Event()
        self._farewell = ""

    async def seat(self) -> Seat:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = int(probe.getsockname()[1])
        return Seat(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), port)

    async def construct(self, made: RayValue, context: WorkerContext, variables: Mapping[str, str]) -> Failed | None:
        # The class is loaded after the environment is set: modules may read it when they are imported.
        os.environ.update({**context.environment(), **variables})
        try:
            worker_class, args, kwargs = await made.fetch()
        except InfrastructureError as error:
            return Failed.of(error).portable()
        return cast("Failed | None", _portable(await self._host.construct(worker_class, args, kwargs, context)))

    async def call(self, message: Message, *values: Any) -> Reply:
        """Run a call. Its value, as it is, if the call does not keep batches."""
        call, sequence = opened(message, values)
        reply = await self._host.call(call, sequence)
        if not call.keep_batch:
            return _portable(reply)
        small, batch = _kept(reply)
        # Nobody expected a large one, or there would be a place for it.
        return small if batch is None else (small, ray.put(batch))

    @ray.method(num_returns=2)
    async def call_keeping_batch(self, message: Message, *values: Any) -> tuple[Reply, DataProto | None]:
        """Run a call whose result may be a large batch: the reply, and that batch."""
        return _kept(await self._host.call(*opened(message, values)))

    async def call_without_arguments(self, method: str) -> Reply:
        """Run a call that is alone, and therefore needs no number."""
        call = Call(method=method, arguments=Arguments((), {}), to_fetch=False)
        return _portable(await self._host.call(call, None))

    async def stream(self, message: Message, *values: Any) -> AsyncGenerator[Reply, None]:
        """The items of a generator method."""
        async with contextlib.aclosing(self._host.stream(*opened(message, values))) as items:
            async for item in items:
                yield _portable(item)

    async def begin_at(self, sequence: int) -> None:
        self._host.begin_at(sequence)

    async def take_over(self) -> int:
        self._leave("another program has attached itself to it")
        return self._host.take_over()

    async def dismiss(self, why: str) -> None:
        """Tell whoever calls this worker that it is about to be killed, and is not to be made again."""
        self._leave(why)
        await asyncio.sleep(0)  # `live` returns first: who kills this worker when it has the answer is not faster

    def _leave(self, why: str) -> None:
        self._farewell = why
        left, self._left = self._left, asyncio.Event()
        left.set()

    async def stand(self, standing: Standing) -> None:
        self._standing = standing

    async def standing(self) -> Standing | None:
        return self._standing

    async def prepare(self, method: str) -> Failed | None:
        return cast("Failed | None", _portable(await self._host.prepare(method)))

    async def live(self) -> str:
        """That it fails is the news of this process's death; that it returns, why the caller has to let go of it."""
        await self._left.wait()
        return self._farewell

    async def cancel(self, sequence: int) -> None:
        self._host.cancel(sequence)

    async def skip(self, sequence: int) -> None:
        self._host.skip(sequence)

    async def close(self) -> Failed | None:
        return cast("Failed | None", _portable(await self._host.close()))

    def __repr__(self) -> str:
        return self._label


def actor_class(name: str, methods: Iterable[str]) -> type[RayHost]:
    """The class of a group's actors; Ray names the processes after it.

    Ray loads arguments of asynchronous actors in a round trip of their own between two threads, a fifth of the whole
    call. So that a call without arguments has none, each of ``methods`` is a method of the actor too.
    """
    return type(name, (RayHost,), {name_without_arguments(method): _without_arguments(method) for method in methods})


def name_without_arguments(method: str) -> str:
    """The actor's method that calls the worker's ``method`` without arguments."""
    return f"alone_{method}"


def _without_arguments(method: str) -> Callable[[RayHost], Awaitable[Reply]]:
    async def call(self: RayHost) -> Reply:
        return await self.call_without_arguments(method)

    return call


def _kept(reply: Reply) -> tuple[Reply, DataProto | None]:
    """The reply for the driver, and a large batch that stays here. A small one travels in the reply, as bytes."""
    if not _is_batch(reply):
        return (VALUE + reply if isinstance(reply, bytes) else _portable(reply)), None
    if reply.size_bytes <= INLINE_BYTES:
        from asyncrl.data.codec import encode

        encoded = encode(reply)
        return BATCH + pickle.dumps((encoded.header, [*map(bytes, encoded.buffers)]), protocol=5), None
    from asyncrl.data.plan import Header

    return ReturnedBatch(Header.of(reply)), reply


def _portable(reply: Any) -> Any:
    return reply.portable() if isinstance(reply, Failed) else reply


def _is_batch(reply: Reply) -> bool:
    # Without loading torch for a worker that never sees one.
    module = sys.modules.get("asyncrl.data.proto")
    return module is not None and isinstance(reply, module.DataProto)


def contexts_of(seats: Sequence[Seat], *, group_name: str) -> list[WorkerContext]:
    """Who each worker is, given where they all are."""
    on_node = Counter(seat.node_id for seat in seats)
    before: Counter[str] = Counter()
    contexts: list[WorkerContext] = []
    for rank, seat in enumerate(seats):
        contexts.append(
            WorkerContext(
                rank=rank,
                world_size=len(seats),
                local_rank=before[seat.node_id],
                local_world_size=on_node[seat.node_id],
                group_name=group_name,
                master_addr=seats[0].address,
                master_port=seats[0].free_port,
            )
        )
        before[seat.node_id] += 1
    return contexts
