"""Which requests may begin: a bounded number at a time, in the order they came, and none while decoding is stopped.

vLLM has a queue of its own, but a request in it has chosen the prefix cache it reads from, and an update of the weights
may come before its turn. So requests wait here instead, and choose when they begin.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Literal, TypeVar

__all__ = ["Gate"]

_T = TypeVar("_T")


class Gate(Generic[_T]):
    """Events in, decisions out.

    running <-> paused
       |          ^
       '-> draining   those that came before the order go on and begin; the last one's end is the pause

    An update of the weights holds the gate besides, in any of these states.

    Args:
        capacity: most requests at a time.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._waiting: deque[tuple[int, _T]] = deque()
        self._inside: dict[int, _T] = {}
        self._came = 0
        self._drain_before = 0
        self._held = False
        self.state: Literal["running", "draining", "paused"] = "running"

    @property
    def waiting(self) -> int:
        """Requests that have not begun."""
        return len(self._waiting)

    @property
    def inside(self) -> int:
        """Requests that have."""
        return len(self._inside)

    @property
    def drained(self) -> bool:
        """While draining: whether everything that came before the order has ended."""
        before = self._drain_before
        return all(number >= before for number in (*self._inside, *(number for number, _ in self._waiting)))

    def arrive(self, request: _T) -> int:
        """A request has come; returns its number."""
        number, self._came = self._came, self._came + 1
        self._waiting.append((number, request))
        return number

    def admit(self) -> list[_T]:
        """Those that begin now."""
        admitted: list[_T] = []
        while self._waiting and len(self._inside) < self._capacity and self._may_begin(self._waiting[0][0]):
            number, request = self._waiting.popleft()
            self._inside[number] = request
            admitted.append(request)
        return admitted

    def leave(self, number: int) -> None:
        """A request has ended, wherever it was."""
        if self._inside.pop(number, None) is None:
            self._waiting = deque(each for each in self._waiting if each[0] != number)
        if self.state == "draining" and self.drained:
            self.state = "paused"

    def pause(self) -> None:
        """Nothing begins."""
        self.state = "paused"

    def drain(self) -> None:
        """Only what has come by now begins."""
        if self.state != "draining":
            self._drain_before = self._came
        self.state = "paused" if self.drained else "draining"

    def resume(self) -> None:
        """Go on."""
        self.state = "running"

    def hold(self, held: bool) -> None:
        """Begin or end an update of the weights."""
        self._held = held

    def _may_begin(self, number: int) -> bool:
        if self._held or self.state == "paused":
            return False
        return self.state == "running" or number < self._drain_before
