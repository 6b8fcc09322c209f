"""A modelled decoder: requests that run side by side share its speed, and every token has its version."""

from __future__ import annotations

import asyncio
import heapq
import math
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass

__all__ = ["ModelledDecoder"]


@dataclass(slots=True, eq=False)
class _Request:
    begin: float
    end: float
    done: asyncio.Future[None]
    left: bool = False


class ModelledDecoder:
    """Requests are decoded at ``tokens_per_s`` each, as long as at most ``saturation`` run; then they share.

    *Work* is the number of tokens that a request which had run from the beginning would have by now. A request that
    begins at work ``b`` samples its token k at work ``b + k``, so only the earliest end needs a timer.

    Args:
        tokens_per_s: speed of one request alone.
        saturation: requests from which on the sum of their speeds grows no more; inf for never.
        weight_version: version to begin with.
    """

    def __init__(self, *, tokens_per_s: float, saturation: float = math.inf, weight_version: int = 0) -> None:
        self._tokens_per_s = tokens_per_s
        self._saturation = saturation
        self._pace = 1.0
        self._work = 0.0
        self._used_s = 0.0
        self._as_of_s = asyncio.get_running_loop().time()
        self._running = 0
        self._ends: list[tuple[float, int, _Request]] = []
        self._number = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s = math.inf
        self._commits: list[float] = [-math.inf]  # work at which each version came in
        self._versions: list[int] = [weight_version]

    @property
    def running(self) -> int:
        """Requests that are being decoded."""
        return self._running

    @property
    def weight_version(self) -> int:
        """Version that the next token is sampled under."""
        return self._versions[-1]

    def used_until_now(self) -> float:
        """Seconds at full speed that what was decoded took: at half of it, half of the time."""
        self._advance()
        return self._used_s

    async def generate(self, tokens: int) -> Counter[int]:
        """Decode ``tokens`` tokens; how many were sampled under each version. Cancelling it ends the request."""
        self._advance()
        loop = asyncio.get_running_loop()
        request = _Request(self._work, self._work + tokens, loop.create_future())
        self._number += 1
        heapq.heappush(self._ends, (request.end, self._number, request))
        self._running += 1
        self._arm()
        try:
            await request.done
        finally:
            if not request.left:
                self._advance()
                request.left = True
                self._running -= 1
                self._arm()
        return self._counts(request.begin, tokens)

    def commit(self, version: int) -> None:
        """Tokens from now on are sampled under ``version``."""
        self._advance()
        self._commits.append(self._work)
        self._versions.append(version)

    def set_pace(self, pace: float) -> None:
        """Go on at ``pace`` times the speed; 0 stands still."""
        self._advance()
        self._pace = pace
        self._arm()

    def _most(self) -> float:
        """Requests at which the decoder is at full speed; one without a saturation is so with any."""
        return self._saturation if self._saturation < math.inf else 1.0

    def _speed(self) -> float:
        shared = min(1.0, self._saturation / self._running) if self._running else 1.0
        return self._tokens_per_s * self._pace * shared

    def _advance(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._running:
            self._work += (now_s - self._as_of_s) * self._speed()
            self._used_s += (now_s - self._as_of_s) * min(1.0, self._running / self._most())
        self._as_of_s = now_s

    def _arm(self) -> None:
        while self._ends and self._ends[0][2].left:
            heapq.heappop(self._ends)
        speed = self._speed()
        at_s = self._as_of_s + max(0.0, self._ends[0][0] - self._work) / speed if self._ends and speed else math.inf
        if at_s == self._timer_at_s:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at_s = at_s
        if at_s < math.inf:
            self._timer = asyncio.get_running_loop().call_at(at_s, self._finish)

    def _finish(self) -> None:
        self._timer, self._timer_at_s = None, math.inf
        self._advance()
        if self._ends:  # rounding must not leave the first one a hair short of its end
            self._work = max(self._work, self._ends[0][0])
        while self._ends and self._ends[0][0] <= self._work:
            request = heapq.heappop(self._ends)[2]
            if not request.left:
                request.left = True
                self._running -= 1
                if not request.done.done():
                    request.done.set_result(None)
        self._arm()

    def _counts(self, begin: float, tokens: int) -> Counter[int]:
        """Tokens 1..``tokens``, sampled at work begin + k, by the last version that came in before."""
        counts: Counter[int] = Counter()
        first = bisect_left(self._commits, begin + 1) - 1
        before = 0
        for index in range(first, len(self._commits)):
            last = index + 1 == len(self._commits)
            until = tokens if last else min(tokens, max(0, math.floor(self._commits[index + 1] - begin + 1e-9)))
            if until > before:
                counts[self._versions[index]] += until - before
                before = until
            if before == tokens:
                break
        return counts
