"""What travels between a group and its workers: a call on its way there, a reply on its way back.

A worker process reads this module first; it loads neither torch nor numpy.
"""

from __future__ import annotations

import os
import pickle
import platform
import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import thread
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from asyncrl.errors import AsyncRLError, Origin, WorkerError

if TYPE_CHECKING:
    from asyncrl.data.plan import Header

__all__ = ["Arguments", "Call", "Cancelled", "Failed", "Lost", "Reply", "ReturnedBatch", "StoredValue"]


@dataclass(frozen=True, slots=True)
class Arguments:
    """What one rank is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class StoredValue(ABC):
    """An argument, not a batch, that a backend keeps where workers fetch it."""

    @abstractmethod
    async def fetch(self) -> Any:
        """The value, without blocking the loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call on its way to the ranks: the same for all of them, but for the arguments.

    Attributes:
        method: of the worker.
        arguments: with a Plan for every batch that lies elsewhere.
        to_fetch: whether there is something in them that the worker has to fetch, or to make a future of.
        materialize_futures: give the method batches, not futures.
        read_only: the method does not write into its batches.
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
    """The method returned a batch, which stays with its worker."""

    header: Header


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The call was cancelled before it returned."""


@dataclass(frozen=True, slots=True)
class Lost:
    """No reply came, but ``error``. Made by the backend that waited."""

    error: BaseException


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The method raised. ``arguments`` says what it was called with, ``node`` where.

    Between processes the exception travels as ``pickled``, so that a class that one side cannot load costs the class
    only, not the reply.
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
        """What became of a method that raised ``error``; frames of the files ``hidden`` are left out."""
        trace = _users(error.__traceback__, hidden=(*hidden, thread.__file__))
        text = "".join(traceback.format_exception(type(error), error, trace))
        return Failed(
            error=error,
            kind=type(error).__qualname__,
            message=str(error),
            remote_traceback=text,
            arguments=arguments,
            node=f"{platform.node()}, process {os.getpid()}",
        )

    def portable(self) -> Failed:
        """The same for another process."""
        if self.error is None:
            return self
        try:
            data = pickle.dumps(self.error)
            pickle.loads(data)  # noqa: S301  our own, to see whether it loads
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
        """The exception for the driver: the worker's own if asyncrl made it, else a :class:`WorkerError`."""
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


def _users(trace: TracebackType | None, *, hidden: tuple[str, ...]) -> TracebackType | None:
    """The traceback from the first frame on that is not of a hidden file."""
    first = trace
    while first is not None and first.tb_frame.f_code.co_filename in hidden:
        first = first.tb_next
    return first or trace


Reply: TypeAlias = Any
"""The value that the method returned, or a :class:`ReturnedBatch`, :class:`Cancelled`, :class:`Failed`, :class:`Lost`.

(A method that itself returns an object of one of these classes would be misread; they are not part of any interface.)
"""

NO_VALUE = (Failed, Cancelled, Lost)
"""Replies of calls that gave no value."""
