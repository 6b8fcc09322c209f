"""Whether the processes of a worker group answer, apart from what they work on.

    answering --a ping is out for named_after_s--> silent --it is out for ended_after_s--> ended
        ^                                            |
        '----------------- answered -----------------'

A process that is stopped, swapped out, or in a call that never returns the interpreter lock answers nothing, and looks
like one that works. It is named first, in the log and in ``asyncrl why``; past the deadline its process is killed, and
what follows is what follows a death: its calls fail, and a policy for deaths replaces it. :class:`Silence` decides,
without clock or I/O; the backend sends the pings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """When a process that does not answer is named, and when it is ended; a ping is sent every ``every_s``.

    Raises:
        ValueError: the times do not follow one another.
    """

    every_s: float = 5.0
    named_after_s: float = 20.0
    ended_after_s: float = 120.0

    def __post_init__(self) -> None:
        if not 0 < self.every_s <= self.named_after_s <= self.ended_after_s:
            raise ValueError(f"times must rise: {self.every_s:g}, {self.named_after_s:g}, {self.ended_after_s:g} s")

    @classmethod
    def of(cls, timeout_s: float) -> Liveness:
        """Return the times for a process that is ended after ``timeout_s``: named after 20 s, or a third of that."""
        named_s = min(20.0, timeout_s / 3)
        return cls(every_s=named_s / 4, named_after_s=named_s, ended_after_s=timeout_s)


@dataclass(slots=True)
class Silence:
    """Pings of one group's ranks. Times are seconds of any one clock.

    >>> silence = Silence(Liveness(every_s=5, named_after_s=20, ended_after_s=60))
    >>> silence.sent(0, now_s=100.0)
    >>> silence.silent(now_s=119.0), silence.silent(now_s=121.0), [*silence.overdue(now_s=161.0)]
    ({}, {0: 21.0}, [0])
    >>> silence.answered(0)
    >>> silence.silent(now_s=121.0)
    {}
    """

    liveness: Liveness
    _out: dict[int, float] = field(default_factory=dict[int, float])
    _ended: set[int] = field(default_factory=set[int])

    def waits(self, rank: int) -> bool:
        """Return whether a ping of the rank is out: no other is sent."""
        return rank in self._out

    def sent(self, rank: int, *, now_s: float) -> None:
        self._out.setdefault(rank, now_s)

    def answered(self, rank: int) -> None:
        """Note an answer, or that the process is gone: either way it is not silent."""
        self._out.pop(rank, None)
        self._ended.discard(rank)

    def silent(self, *, now_s: float) -> dict[int, float]:
        """Return for how long each rank has not answered that is past ``named_after_s``."""
        return {
            rank: now_s - since for rank, since in self._out.items() if now_s - since >= self.liveness.named_after_s
        }

    def overdue(self, *, now_s: float) -> Iterator[int]:
        """Yield ranks whose processes are to be ended now, each once."""
        for rank, for_s in self.silent(now_s=now_s).items():
            if for_s >= self.liveness.ended_after_s and rank not in self._ended:
                self._ended.add(rank)
                yield rank
