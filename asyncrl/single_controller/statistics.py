"""Statistics: what the calls of a group are doing and have done."""

from __future__ import annotations

import threading
from dataclasses import dataclass

__all__ = ["GroupStatistics", "Tally"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatistics:
    """Of one group; the roles in its workers have their own.

        >>> group.statistics().outstanding
        (0, 0)

    Attributes:
        done, failed, cancelled: calls and streams that are over. A call past its deadline has failed.
        waiting: made, but not sent: what they wait for is not there yet.
        running: sent, and not over.
        outstanding: for each rank, calls sent to it that it has not answered: running there, or in its line.
        returned_bytes: of the batches that calls returned, most of which stay with the workers.
        deaths: of workers' processes.
        restarts: how often workers were made again.
        dead: ranks whose process is gone now.
    """

    done: int
    failed: int
    cancelled: int
    waiting: int
    running: int
    outstanding: tuple[int, ...]
    returned_bytes: int
    deaths: int
    restarts: int
    dead: tuple[int, ...]


class Tally:
    """Counts of calls that are over. Written from any thread."""

    __slots__ = ("_lock", "cancelled", "done", "failed", "returned_bytes")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.done = 0
        self.failed = 0
        self.cancelled = 0
        self.returned_bytes = 0

    def add(self, state: str, *, size_bytes: int = 0) -> None:
        """A call is over: ``done``, ``failed`` or ``cancelled``."""
        with self._lock:
            setattr(self, state, getattr(self, state) + 1)
            self.returned_bytes += size_bytes

    def add_done(self, size_bytes: int) -> None:
        """:meth:`add` for the many."""
        with self._lock:
            self.done += 1
            self.returned_bytes += size_bytes
