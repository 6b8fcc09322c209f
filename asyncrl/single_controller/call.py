"""What travels between a group and its workers: calls, replies, and the description of arguments in error messages.

A worker process imports this module first; it loads neither torch nor numpy.
"""

from __future__ import annotations

import os
import pickle
import platform
import reprlib
import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import thread
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from asyncrl.errors import AsyncRLError, Origin, WorkerError

if TYPE_CHECKING:
    from asyncrl.data.plan import Header


@dataclass(frozen=True, slots=True)
class Arguments:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class StoredValue(ABC):
    """An argument that a backend keeps where workers fetch it. A batch is one as the :class:`Block` of a plan."""

    @abstractmethod
    async def fetch(self) -> Any:
        """Return the value, without blocking the loop."""


class HeldValue(StoredValue):
    """A value in this process."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    async def fetch(self) -> Any:
        return self.value

    @classmethod
    def get_all(cls, blocks: Sequence[HeldValue]) -> list[Any]:
        return [each.value for each in blocks]

    @classmethod
    async def fetch_all(cls, blocks: Sequence[HeldValue]) -> list[Any]:
        return cls.get_all(blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a worker's method, as it is sent to a rank.

    Attributes:
        arguments: with a Plan for every batch that is stored elsewhere.
        to_fetch: whether the worker has to fetch an argument, or to turn one into a future.
        materialize_futures, read_only: as registered.
        keep_batch: a batch that the method returns stays with the worker.
    """

    method: str
    arguments: Arguments
    to_fetch: bool
    materialize_futures: bool = True
    read_only: bool = False
    keep_batch: bool = False


@dataclass(frozen=True, slots=True)
class ReturnedBatch:
    """The reply of a method that returned a batch, which stays with its worker."""

    header: Header


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The reply of a call that was cancelled before it returned."""


@dataclass(frozen=True, slots=True)
class AttemptLost:
    """Stands for a reply that never came; the backend that waited for it got ``error``."""

    error: BaseException


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The reply of a method that raised. ``arguments`` describes what it was called with, ``node`` where it ran.

    Between processes the exception travels as ``pickled``, so that a class that one side cannot load costs only the
    class, not the reply.
    """

    error: BaseException | None
    kind: str
    message: str
    remote_traceback: str
    arguments: str = ""
    node: str = ""
    pickled: bytes | None = None

    @staticmethod
    def of(error: BaseException, *, hidden: Sequence[str] = (), arguments: str = "") -> Failed:
        """Describe ``error``; leading frames of the files ``hidden`` are left out of its traceback."""
        trace = _without_hidden(error.__traceback__, hidden=(*hidden, thread.__file__))
        text = "".join(traceback.format_exception(type(error), error, trace))
        return Failed(
            error=error,
            kind=type(error).__qualname__,
            message=_message(error),
            remote_traceback=text,
            arguments=arguments,
            node=f"{platform.node()}, process {os.getpid()}",
        )

    def portable(self) -> Failed:
        if self.error is None:
            return self
        try:
            data = pickle.dumps(self.error)
            pickle.loads(data)  # noqa: S301  our own, to check that it loads
        except Exception:  # noqa: BLE001  exceptions of users fail to pickle in any way; the traceback goes as text
            return replace(self, error=None)
        return replace(self, error=None, pickled=data)

    def _original(self) -> BaseException | None:
        if self.pickled is None:
            return self.error
        try:
            error = pickle.loads(self.pickled)  # noqa: S301  from our own worker
        except Exception:  # noqa: BLE001  as above
            return None
        return error if isinstance(error, BaseException) else None

    def to_error(self, *, group: str, rank: int, method: str) -> BaseException:
        """Return the exception to raise: the worker's own if it is asyncrl's, otherwise a :class:`WorkerError`."""
        original = self._original()
        origin = Origin(
            group=group,
            rank=rank,
            method=method,
            node=self.node,
            arguments=self.arguments,
            remote_traceback=self.remote_traceback,
        )
        called = f"called with {self.arguments or 'no arguments'} on {self.node}"
        if isinstance(original, AsyncRLError):
            note = f"raised by {group}.{method} on rank {rank}, {called}; traceback there:\n{self.remote_traceback}"
            original.add_note(note)
            original.origin = origin
            return original
        error = WorkerError(
            f"{group}.{method} raised {self.kind} on rank {rank}: {self.message}\n\n"
            f"{called}\ntraceback on rank {rank}:\n{self.remote_traceback}",
            group=group,
            rank=rank,
            method=method,
            remote_traceback=self.remote_traceback,
            node=self.node,
            arguments=self.arguments,
        )
        error.origin = origin
        error.__cause__ = original
        return error


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  the __str__ of a user's exception may do anything
        return "(its message cannot be made)"


def _without_hidden(trace: TracebackType | None, *, hidden: tuple[str, ...]) -> TracebackType | None:
    """Return the traceback from the first frame on that is not of a hidden file."""
    first = trace
    while first is not None and first.tb_frame.f_code.co_filename in hidden:
        first = first.tb_next
    return first or trace


Reply: TypeAlias = Any
"""The returned value, or a :class:`ReturnedBatch`, :class:`Cancelled`, :class:`Failed` or :class:`AttemptLost`.

(A method that itself returns an object of one of these classes would be misread; they are not part of any interface.)
"""

NO_VALUE = (Failed, Cancelled, AttemptLost)
"""Replies without a value."""

MAX_CHARACTERS = 1_000
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60


def shapes_of(arguments: Arguments) -> str:
    """Describe arguments: ``(4 rows: prompts int64[16], answer object; times=2)``.

    Batches and arrays by their shapes, all else by a shortened repr. Fetches nothing, needs no torch, and never raises.
    """
    listed = [_described(each) for each in arguments.args]
    listed += [f"{name}={_described(each)}" for name, each in arguments.kwargs.items()]
    text = f"({'; '.join(listed)})"
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} ...)"


def _described(value: Any) -> str:
    try:
        return _shape(value)
    except Exception:  # noqa: BLE001  a value's own attributes may do anything, and an error is being reported
        return type(value).__name__


def _shape(value: Any) -> str:
    if type(value) in (list, tuple):
        inner = ", ".join(_shape(each) for each in value[:6]) + (", ..." if len(value) > 6 else "")
        return f"[{inner}]" if type(value) is list else f"({inner})"
    if type(value) is dict:
        entries = cast("dict[object, object]", value)
        return "{" + ", ".join(f"{key!r}: {_shape(each)}" for key, each in entries.items()) + "}"
    if isinstance(value, StoredValue):
        return "a large value"
    schema = getattr(getattr(value, "header", value), "schema", None)  # of a plan, or of a batch
    columns = getattr(schema, "columns", None)
    if columns is not None:
        rows = getattr(schema, "rows", None)
        return f"{rows} rows: " + ", ".join(f"{each.name} {_without_kind(str(each))}" for each in columns)
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        return f"{type(value).__name__} {dtype}{list(shape)}".replace("torch.", "")
    return _short.repr(value)


def _without_kind(column: str) -> str:
    return column.removeprefix("tensor ").removeprefix("array ")
