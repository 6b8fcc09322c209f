"""The line that calls of a group stand in."""

from __future__ import annotations

import threading
from collections.abc import Sequence

__all__ = ["Line"]


class Line:
    """In which order calls reach the workers: that of the program, and the same on all ranks.

    A group and the roles that live in its workers share one.

    Attributes:
        lock: held while a call is sent.
        ahead: calls that are made, not sent, and not to be passed.
    """

    __slots__ = ("_sequences", "ahead", "lock")

    def __init__(self, ranks: int) -> None:
        self.lock = threading.Lock()
        self.ahead = 0
        self._sequences = [0] * ranks

    def sequence(self, rank: int) -> int:
        """The number of the next call to a rank. Under the lock."""
        number = self._sequences[rank]
        self._sequences[rank] += 1
        return number

    def next(self, rank: int) -> int:
        """The number that the next call to a rank will get. Under the lock."""
        return self._sequences[rank]

    def begin_at(self, numbers: Sequence[int]) -> None:
        """The numbers of the next calls to each rank. Under the lock."""
        self._sequences = list(numbers)

    def leave(self) -> None:
        """A call has been sent, or may be passed."""
        with self.lock:
            self.ahead -= 1
