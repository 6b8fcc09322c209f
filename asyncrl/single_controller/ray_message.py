"""Calls as messages to Ray actors.

Most calls are plain data, batches and plans. Such a message is bytes, made once for all ranks, and the objects that it
refers to travel beside it as arguments of their own: Ray then has them on the worker's node when the call begins, and
frees them when it ends. Any other call (functions, classes of a script) is pickled by Ray, references and all.
"""

# Ray leaves the types of handles, references and placement groups partly unknown.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import pickle
import sys
import threading
from typing import Any, TypeAlias

import ray

from asyncrl.single_controller.call import Arguments, Call, StoredValue

__all__ = ["HereBlock", "HereValue", "Message", "Sealer", "in_slot", "opened", "slot_of"]

Message: TypeAlias = "bytes | tuple[Call, int]"
"""A call and its number."""


class _Slots(threading.local):
    """While a message is written: the references beside it. While it is read: what they refer to."""

    refs: dict[ray.ObjectRef[Any], int] | None = None
    values: tuple[Any, ...] = ()


_slots = _Slots()


def slot_of(ref: ray.ObjectRef[Any]) -> int | None:
    """Where the message that is being written will find this object; None if none is: the reference goes along."""
    return None if _slots.refs is None else _slots.refs.setdefault(ref, len(_slots.refs))


def in_slot(number: int) -> Any:
    """The object of that number, beside the message that is being read."""
    return _slots.values[number]


class HereBlock:
    """A payload that has come with the call."""

    __slots__ = ("data",)

    def __init__(self, data: Any) -> None:
        self.data = data

    @classmethod
    def get_all(cls, blocks: Any) -> list[Any]:
        return [block.data for block in blocks]

    @classmethod
    async def fetch_all(cls, blocks: Any) -> list[Any]:
        return cls.get_all(blocks)

    @staticmethod
    def in_slot(number: int) -> HereBlock:
        return HereBlock(in_slot(number))


class HereValue(StoredValue):
    """A value that has come with the call."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    async def fetch(self) -> Any:
        return self._value

    @staticmethod
    def in_slot(number: int) -> HereValue:
        return HereValue(in_slot(number))


class Sealer:
    """Makes messages; remembers the last call, which the next rank most often gets too."""

    __slots__ = ("_body", "_call", "_refs")

    def __init__(self) -> None:
        self._call: Call | None = None
        self._body: bytes | None = None
        self._refs: tuple[ray.ObjectRef[Any], ...] = ()

    def sealed(self, call: Call, sequence: int) -> tuple[Message, tuple[ray.ObjectRef[Any], ...]]:
        """The message for one rank, and the references that travel beside it."""
        if call is not self._call:
            self._call = call
            self._body, self._refs = _written(call)
        if self._body is None:
            return (call, sequence), ()
        return sequence.to_bytes(8, "little") + self._body, self._refs

    def forget(self) -> None:
        """Let go of the last call's arguments."""
        self._call, self._body, self._refs = None, None, ()


def opened(message: Message, values: tuple[Any, ...]) -> tuple[Call, int]:
    """The call and its number; ``values`` are what the references refer to."""
    if not isinstance(message, bytes):
        return message
    _slots.values = values
    try:
        method, args, kwargs, *flags = pickle.loads(memoryview(message)[8:])  # noqa: S301  from our own driver
    finally:
        _slots.values = ()
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


def _written(call: Call) -> tuple[bytes | None, tuple[ray.ObjectRef[Any], ...]]:
    arguments = call.arguments
    if not (call.materialize_futures and _is_plain(arguments.args) and _is_plain(arguments.kwargs)):
        return None, ()
    flags = (call.to_fetch, call.materialize_futures, call.read_only, call.keep_batch)
    refs = _slots.refs = {}
    try:
        body = pickle.dumps((call.method, arguments.args, arguments.kwargs, *flags), protocol=5)
    finally:
        _slots.refs = None
    return body, tuple(refs)


_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_OURS = frozenset(
    {
        ("asyncrl.data.proto", "DataProto"),
        ("asyncrl.data.codec", "Encoded"),
        ("asyncrl.single_controller.ray_store", "RayValue"),
    }
)


def _is_plain(tree: Any) -> bool:
    """Whether pickle writes it as well as a pickler that can also write functions, and classes of a script."""
    kind = type(tree)
    if kind in _PLAIN:
        return True
    if kind is tuple or kind is list:
        return all(map(_is_plain, tree))
    if kind is dict:
        return all(map(_is_plain, tree.values())) and all(map(_is_plain, tree))
    where = (kind.__module__, kind.__name__)
    if where == ("asyncrl.data.plan", "Plan"):
        return not sys.modules["asyncrl.data.nodes"].is_computed(tree.node)
    return where in _OURS
