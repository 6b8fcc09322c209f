"""The actor of the Ray backend: a :class:`WorkerHost` behind Ray's calls.

A worker process loads this module first: it imports neither torch nor numpy.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import ray

from asyncrl.errors import InfrastructureError
from asyncrl.single_controller.call import Call, Failed, Reply, ReturnedBatch
from asyncrl.single_controller.host import WorkerHost
from asyncrl.single_controller.ray_store import RayValue
from asyncrl.single_controller.worker import WorkerContext

if TYPE_CHECKING:
    from asyncrl.data.proto import DataProto

__all__ = ["INLINE_BYTES", "InlineBatch", "RayHost", "Seat", "sealed"]


@dataclass(frozen=True, slots=True)
class Seat:
    """Where an actor lives, and a port that was free there."""

    node_id: str
    address: str
    free_port: int


INLINE_BYTES = 64 * 1024
"""Batches and arrays up to this size travel inside a call or reply; larger ones through the object store, once."""

Message: TypeAlias = "bytes | tuple[Call, int]"
"""A call and its number: as bytes, or as objects that Ray pickles."""


@dataclass(frozen=True, slots=True)
class InlineBatch:
    """A small batch in a reply."""

    pickled: bytes


def sealed(call: Call, sequence: int) -> Message:
    """A call and its number for one rank."""
    packed = call.packed()
    return (call, sequence) if packed is None else sequence.to_bytes(8, "little") + packed


def opened(message: Message) -> tuple[Call, int]:
    """Counterpart of :func:`sealed`."""
    if isinstance(message, bytes):
        return Call.unpacked(memoryview(message)[8:]), int.from_bytes(message[:8], "little")
    return message


class RayHost:
    """The methods that a group calls on its actors."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._host = WorkerHost()

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

    async def call(self, message: Message) -> Reply:
        return _portable(await self._host.call(*opened(message)))

    @ray.method(num_returns=2)
    async def call_keeping_batch(self, message: Message) -> tuple[Reply, DataProto | None]:
        """The reply, and the batch if it is large. A small one travels in the reply, as bytes."""
        reply = await self._host.call(*opened(message))
        if not _is_batch(reply):
            return _portable(reply), None
        if reply.size_bytes <= INLINE_BYTES:
            return InlineBatch(pickle.dumps(reply, protocol=5)), None
        from asyncrl.data.plan import Header

        return ReturnedBatch(Header.of(reply)), reply

    async def cancel(self, call_id: int, sequence: int) -> None:
        self._host.cancel(call_id, sequence)

    async def skip(self, sequence: int) -> None:
        self._host.skip(sequence)

    async def close(self) -> Failed | None:
        return cast("Failed | None", _portable(await self._host.close()))

    def __repr__(self) -> str:
        return self._label


def _portable(reply: Any) -> Any:
    return reply.portable() if isinstance(reply, Failed) else reply


def _is_batch(reply: Reply) -> bool:
    # Without loading torch for a worker that never sees one.
    module = sys.modules.get("asyncrl.data.proto")
    return module is not None and isinstance(reply, module.DataProto)
