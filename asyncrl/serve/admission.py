"""How much may be under way at a time, for everybody and for each key. It counts, and says no."""

from __future__ import annotations

import asyncio
from collections import Counter

from asyncrl.serve.failure import Refusal
from asyncrl.serve.limits import Limits

__all__ = ["Admission"]


class Admission:
    """Counts choices being generated. Past a bound a request is refused at once; none waits here.

    One key at its bound is told 429, everybody at the server's bound 503, both with ``Retry-After``.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._by_holder: Counter[str] = Counter()
        self._total = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False
        """Set when the server takes no more work."""

    @property
    def under_way(self) -> int:
        return self._total

    async def idle(self) -> None:
        """Wait until nothing is under way."""
        await self._idle.wait()

    def enter(self, holder: str) -> None:
        """Take a place; :meth:`leave` gives it back.

        Raises:
            Refusal: there is none.
        """
        if self.draining:
            raise Refusal(503, "the server is shutting down", retry_after_s=5)
        held = self._by_holder[holder]
        if held >= self._limits.concurrent_requests_per_key:
            raise Refusal(429, f"{held} generations of this key are under way, as many as may be", retry_after_s=1)
        if self._total >= self._limits.concurrent_requests:
            raise Refusal(503, "the server is full", retry_after_s=1)
        self._by_holder[holder] = held + 1
        self._total += 1
        self._idle.clear()

    def leave(self, holder: str) -> None:
        """Give a place back."""
        self._total -= 1
        if not self._total:
            self._idle.set()
        self._by_holder[holder] -= 1
        if not self._by_holder[holder]:
            del self._by_holder[holder]
