"""What travels between a group and its Ray actors: calls, replies, stored values, and Ray's errors.

Most calls are plain data, batches and plans. Such a call is pickled once for all ranks, and the objects that it refers
to travel beside the bytes as arguments of Ray's: Ray then has them on the worker's node when the call starts, and frees
them when it ends. Any other call (functions, classes of a script) is pickled by Ray, references included.

A worker process imports this module first: it loads neither torch nor numpy.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import ray
import ray.exceptions

from asyncrl.errors import InfrastructureError, Origin, WorkerDiedError, WorkerError
from asyncrl.single_controller.call import Arguments, Call, Failed, HeldValue, Reply, ReturnedBatch, StoredValue

if TYPE_CHECKING:
    from asyncrl.data.proto import DataProto

# Ray leaves the types of handles, references and placement groups partly unknown.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

INLINE_BYTES = 64 * 1024
"""Batches and arrays up to this size travel inside a call or reply; larger ones through the object store, once."""


# --------------------------------------------------------------------------------------------------------------- calls

Message: TypeAlias = "bytes | tuple[Call, int]"
"""A call and its number."""


class _Attachments(threading.local):
    """The objects beside a message: their references while it is encoded, their values while it is decoded."""

    refs: dict[ray.ObjectRef[Any], int] | None = None
    values: tuple[Any, ...] = ()


_attachments = _Attachments()


def _attach(ref: ray.ObjectRef[Any]) -> int | None:
    """Attach an object to the message that is encoded, and return its index; None if none is encoded."""
    return None if _attachments.refs is None else _attachments.refs.setdefault(ref, len(_attachments.refs))


class CallEncoder:
    """Encodes calls as messages; keeps the last one, which the next rank most often gets too."""

    __slots__ = ("_body", "_call", "_refs")

    def __init__(self) -> None:
        self._call: Call | None = None
        self._body: bytes | None = None
        self._refs: tuple[ray.ObjectRef[Any], ...] = ()

    def encode(self, call: Call, sequence: int) -> tuple[Message, tuple[ray.ObjectRef[Any], ...]]:
        """Return the message for one rank, and the references that travel beside it."""
        if call is not self._call:
            self._call = call
            self._body, self._refs = _encoded(call)
        if self._body is None:
            return (call, sequence), ()
        return sequence.to_bytes(8, "little") + self._body, self._refs

    def forget(self) -> None:
        """Free the last call's arguments."""
        self._call, self._body, self._refs = None, None, ()


def decode_call(message: Message, values: tuple[Any, ...]) -> tuple[Call, int]:
    """Return the call and its number; ``values`` are the attached objects."""
    if not isinstance(message, bytes):
        return message
    _attachments.values = values
    try:
        method, args, kwargs, *flags = pickle.loads(memoryview(message)[8:])  # noqa: S301  from our own driver
    finally:
        _attachments.values = ()
    to_fetch, materialize_futures, read_only, keep_batch = flags
    call = Call(
        method=method,
        arguments=Arguments(args, kwargs),
        to_fetch=to_fetch,
        materialize_futures=materialize_futures,
        read_only=read_only,
        keep_batch=keep_batch,
    )
    return call, int.from_bytes(message[:8], "little")


def _encoded(call: Call) -> tuple[bytes | None, tuple[ray.ObjectRef[Any], ...]]:
    arguments = call.arguments
    if not (call.materialize_futures and _is_plain(arguments.args) and _is_plain(arguments.kwargs)):
        return None, ()
    flags = (call.to_fetch, call.materialize_futures, call.read_only, call.keep_batch)
    refs = _attachments.refs = {}
    try:
        body = pickle.dumps((call.method, arguments.args, arguments.kwargs, *flags), protocol=5)
    finally:
        _attachments.refs = None
    return body, tuple(refs)


_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_OURS = frozenset(
    {
        ("asyncrl.data.proto", "DataProto"),
        ("asyncrl.data.codec", "Encoded"),
        ("asyncrl.single_controller.ray.messages", "RayValue"),
    }
)


def _is_plain(tree: Any) -> bool:
    """Return whether pickle suffices; Ray's pickler can also write functions, and classes of a script."""
    kind = type(tree)
    if kind in _PLAIN:
        return True
    if kind is tuple or kind is list:
        return all(map(_is_plain, tree))
    if kind is dict:
        return all(map(_is_plain, tree.values())) and all(map(_is_plain, tree))
    name = (kind.__module__, kind.__name__)
    if name == ("asyncrl.data.plan", "Plan"):
        return not sys.modules["asyncrl.data.plan"].is_computed(tree.node)
    return name in _OURS


# ------------------------------------------------------------------------------------------------------ stored objects


class RayValue(StoredValue):
    """A value or a batch in Ray's object store. Pickles as its reference, or as an attachment of the message."""

    __slots__ = ("ref",)

    def __init__(self, ref: ray.ObjectRef[Any]) -> None:
        self.ref = ref

    async def fetch(self) -> Any:
        try:
            return await asyncio.wrap_future(self.ref.future())
        except ray.exceptions.RayError as error:
            raise _lost(error) from error

    @classmethod
    def get_all(cls, blocks: Sequence[RayValue]) -> list[Any]:
        try:
            found: Any = ray.get([each.ref for each in blocks])
            return cast("list[Any]", found)
        except ray.exceptions.RayError as error:
            raise _lost(error) from error

    @classmethod
    async def fetch_all(cls, blocks: Sequence[RayValue]) -> list[Any]:
        return await asyncio.gather(*(each.fetch() for each in blocks))

    def __reduce__(self) -> Any:
        index = _attach(self.ref)
        return (RayValue, (self.ref,)) if index is None else (_attached, (index,))


def _attached(index: int) -> HeldValue:
    return HeldValue(_attachments.values[index])


def _lost(error: ray.exceptions.RayError) -> InfrastructureError:
    what = "cannot be loaded here" if isinstance(error, ray.exceptions.RaySystemError) else "is lost"
    return InfrastructureError(f"an object in Ray's store {what}: {_first_line(error)}")


# ------------------------------------------------------------------------------------------------------------- replies

_BATCH, _VALUE = b"B", b"V"
"""First byte of replies that are bytes, of calls that keep their batch: an encoded small batch, or a value."""


def portable(reply: Any) -> Any:
    return reply.portable() if isinstance(reply, Failed) else reply


def encode_reply(reply: Reply) -> tuple[Reply, DataProto | None]:
    """Encode the reply of a call that keeps its batch: what to send, and a large batch that stays in the worker."""
    module = sys.modules.get("asyncrl.data.proto")  # a worker without batches does not load torch
    if module is None or not isinstance(reply, module.DataProto):
        return (_VALUE + reply if isinstance(reply, bytes) else portable(reply)), None
    if reply.size_bytes <= INLINE_BYTES:
        from asyncrl.data.codec import encode

        encoded = encode(reply)
        return _BATCH + pickle.dumps((encoded.header, [*map(bytes, encoded.buffers)]), protocol=5), None
    from asyncrl.data.plan import Header

    return ReturnedBatch(Header.of(reply)), reply


def decode_reply(reply: Reply) -> Reply:
    """Decode what :func:`encode_reply` made; a small batch becomes a :class:`Plan`."""
    if not isinstance(reply, bytes):
        return reply
    if reply[:1] == _VALUE:
        return reply[1:]
    from asyncrl.data.codec import Encoded
    from asyncrl.data.plan import Plan

    return Plan.coded(Encoded(*pickle.loads(memoryview(reply)[1:])))  # noqa: S301  from our own worker


# -------------------------------------------------------------------------------------------------------- Ray's errors

_DEATHS = (
    ray.exceptions.RayActorError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.OutOfMemoryError,  # Ray's memory monitor killed it
    ray.exceptions.ActorUnschedulableError,
    ray.exceptions.ActorPlacementGroupRemoved,
)


def is_death(error: BaseException) -> bool:
    """Whether the process of a call is gone; not if an object that it was called with was lost in such a way."""
    return isinstance(error, _DEATHS) and not isinstance(error, ray.exceptions.RayTaskError)


def translate_error(error: BaseException, *, group: str, rank: int, method: str, node: str) -> BaseException:
    """Return the failure of ``group.method`` on ``rank`` as an asyncrl error, if it is one of Ray's."""
    translated: BaseException
    if is_death(error):
        cause = _cause(error)
        message = f"the process of rank {rank} of {group} died during {method}: {cause}"
        translated = WorkerDiedError(message, group=group, rank=rank, method=method, cause=cause, node=node)
        translated.origin = Origin(group=group, rank=rank, method=method, node=node)
    elif isinstance(error, ray.exceptions.RayError):
        message = (
            f"{group}.{method} failed on rank {rank} in transit: {_first_line(error)}\n"
            "(an argument that cannot be loaded in the worker, or a value that cannot be pickled or loaded here)"
        )
        translated = WorkerError(message, group=group, rank=rank, method=method, remote_traceback=str(error))
    else:
        return error
    translated.__cause__ = error
    return translated


def _cause(error: BaseException) -> str:
    """Return the cause of a death that Ray reports, in one line."""
    text = str(error)
    for marker in ("Worker exit detail:", "Worker exit type:", "The actor is dead because"):
        _, found, rest = text.partition(marker)
        if found:
            return rest.strip().splitlines()[0].split(" Some common causes")[0]
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
