"""Which sessions may have their keys and values in an engine's cache: pure decisions, and a shell that acts on them.

An episode is a *session* of turns. Between two of them it waits for a tool, and its keys and values pay only if they
are still there when it comes back. With more sessions than the cache holds, an engine that evicts the least recently
used one evicts the one that comes back next, and reads every prompt again. Three decisions prevent that
(:class:`SessionAdmission`):

- *Admission.* A session holds a part of the cache, or waits. The one that entered first begins as soon as the expected
  peak of what is held fits: every session grows to the mean of those past ones that became longer than it is, and is
  then gone (:func:`expected_peak`; Gong et al., Past-Future Scheduler, ASPLOS 2025). Before any session has had a
  second turn all begin, since waiting gains nothing.
- *Retention.* A session holds its part while a tool runs, unless another waits and the tool is expected to run for
  longer than the engine takes to read the whole cache anew. Then memory times time that is lost by keeping exceeds what
  is lost by reading again (the smaller waste of Abhyankar et al., InferCept, ICML 2024). If what is held does not fit
  any more, the session whose tool is expected to run longest loses its part.
- *Foresight.* A tool is expected to run for the mean of its past runs that took longer than this one has taken so far,
  and past the longest of them as long again (:class:`ThinkTimes`).

Laws: no session begins before one that entered earlier and waits; if no session holds a part, the first one that waits
begins. So each begins after finitely many turns, if the sessions before it end, and their tools return or run for ever.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from msgspec.structs import replace

from asyncrl.interfaces import GenerationChunk, GenerationRequest, Message, RolloutEngine, SessionEngine

_MOST_TOOLS = 256
_BLOCK_TOKENS = 16  # an engine's cache is divided into blocks, and each session leaves a part of one empty
_TICK_S = 0.001  # later than it is due: differences of times are rounded


class Past:
    """The last ``memory`` values of a quantity.

    >>> past = Past()
    >>> for value in (1.0, 2.0, 6.0):
    ...     past.observe(value)
    >>> past.mean_above(0.5), past.mean_above(1.0), past.mean_above(6.0)
    (3.0, 4.0, None)
    """

    def __init__(self, *, memory: int = 256) -> None:
        self._memory = memory
        self._values: deque[float] = deque()
        self._sorted: list[float] = []
        self._sums: list[float] = []

    def observe(self, value: float) -> None:
        self._values.append(value)
        insort(self._sorted, value)
        if len(self._values) > self._memory:
            self._sorted.remove(self._values.popleft())
        self._sums = list(accumulate(reversed(self._sorted)))[::-1]

    def mean_above(self, bound: float) -> float | None:
        """Return the mean of the values above ``bound``; None if there are none."""
        first = bisect_right(self._sorted, bound)
        above = len(self._sorted) - first
        return self._sums[first] / above if above else None

    @property
    def largest(self) -> float:
        return self._sorted[-1] if self._sorted else 0.0

    @property
    def low(self) -> float:
        """Return a value that one in eight is below; infinite without values."""
        return self._sorted[len(self._sorted) // 8] if self._sorted else math.inf


class ThinkTimes:
    """How long tools run, by name.

    >>> times = ThinkTimes()
    >>> for seconds in (1.0, 3.0):
    ...     times.observe("search", seconds)
    >>> times.remaining("search", elapsed_s=0.0), times.remaining("search", elapsed_s=2.0)
    (2.0, 1.0)
    >>> times.remaining("search", elapsed_s=5.0), times.remaining("another", elapsed_s=0.0)
    (5.0, 2.0)
    """

    def __init__(self) -> None:
        self._all = Past()
        self._tools: dict[str, Past] = {}

    def observe(self, tool: str, seconds: float) -> None:
        self._all.observe(seconds)
        if tool in self._tools or len(self._tools) < _MOST_TOOLS:  # a policy may make names up
            self._tools.setdefault(tool, Past()).observe(seconds)

    def remaining(self, tool: str, *, elapsed_s: float) -> float:
        """Return the seconds that a tool is expected to run beyond ``elapsed_s``."""
        mean_s = self._of(tool).mean_above(elapsed_s)
        return elapsed_s if mean_s is None else mean_s - elapsed_s

    def exceeds_after(self, tool: str, seconds: float) -> float:
        """Return a time of running from which on the remaining time exceeds ``seconds``, and grows."""
        return max(self._of(tool).largest, seconds)

    def _of(self, tool: str) -> Past:
        return self._tools.get(tool, self._all)


def expected_peak(sessions: Iterable[tuple[float, float]]) -> float:
    """Return the peak of the tokens held by sessions of ``(tokens, growth)`` that grow side by side, and free all then.

    Just before a session ends, those that grow further have grown as much as it has.

    >>> expected_peak([(10, 0), (10, 20), (5, 5)])  # 25 now, 15 + 10 when the last one ends, 30 when the second does
    30.0
    """
    peak = tokens = 0.0
    for count, (held, growth) in enumerate(sorted(sessions, key=lambda each: -each[1]), start=1):
        tokens += held
        peak = max(peak, tokens + count * growth)
    return peak


@dataclass(frozen=True, slots=True)
class Decision:
    """Sessions whose turns may begin now, and sessions that do not hold a part of the cache any more."""

    granted: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class _Session:
    """``tokens`` of the cache are held, or needed to begin; ``open`` turns have begun or wait.

    Between turns ``tool`` runs, since ``away_s``.
    """

    name: str
    order: int
    tokens: int = 0
    open: int = 0
    holds: bool = False
    waits: bool = False
    tool: str = ""
    away_s: float = 0.0

    @property
    def charge(self) -> int:
        return self.tokens + _BLOCK_TOKENS


class SessionAdmission:
    """The state machine for a cache of ``capacity_tokens``.

    Events: :meth:`begin_turn`, :meth:`end_turn`, :meth:`leave`, :meth:`tick`, :meth:`observe_reading`.

    >>> admission = SessionAdmission(capacity_tokens=100)
    >>> for name in "ab":
    ...     _ = admission.begin_turn(name, 20, now_s=0.0), admission.end_turn(name, 30, now_s=1.0)
    >>> admission.begin_turn("a", 50, now_s=2.0)  # 80 tokens would fit, but for the blocks that are partly empty
    Decision(granted=('a',), dropped=('b',))
    >>> admission.begin_turn("b", 40, now_s=3.0)
    Decision(granted=(), dropped=())
    >>> admission.leave("a", now_s=4.0)
    Decision(granted=('b',), dropped=('a',))
    """

    def __init__(self, *, capacity_tokens: float) -> None:
        self._capacity_tokens = capacity_tokens
        self._sessions: dict[str, _Session] = {}  # in the order in which they entered
        self._entered = 0
        self._returned = False
        self._lengths = Past()
        self._think = ThinkTimes()
        self._reading = Past()
        self._whole = Past()

    def begin_turn(self, name: str, tokens: int, *, now_s: float) -> Decision:
        """Ask for a turn with a prompt of ``tokens``; a session that is not known enters."""
        session = self._sessions.get(name)
        if session is None:
            session = self._sessions[name] = _Session(name, self._entered)
            self._entered += 1
        elif not session.open:
            self._think.observe(session.tool, now_s - session.away_s)
            self._returned = True
        session.tokens = max(tokens, session.tokens) if session.open else tokens
        session.open += 1
        if session.holds:
            return Decision((name,), self._fit(now_s))
        session.waits = True
        return self._admit(now_s)

    def end_turn(self, name: str, tokens: int, *, now_s: float) -> Decision:
        """End a turn, which may wait still: the session has ``tokens`` now, and with its last open turn a tool runs.

        A session that has left meanwhile is not known any more.
        """
        session = self._sessions.get(name)
        if session is None:
            return Decision()
        session.open -= 1
        session.tokens = max(tokens, session.tokens) if session.open else tokens
        if not session.open:
            session.waits, session.tool, session.away_s = False, "", now_s
        dropped = self._fit(now_s)
        admitted = self._admit(now_s)
        return Decision(admitted.granted, dropped + admitted.dropped)

    def name_tool(self, name: str, tool: str) -> None:
        """Name the tool that the last turn of a session has sent it to."""
        if name in self._sessions:
            self._sessions[name].tool = tool

    def leave(self, name: str, *, now_s: float) -> Decision:
        """Remove a session that has ended, if it is known."""
        session = self._sessions.pop(name, None)
        if session is None:
            return Decision()
        self._lengths.observe(session.tokens)
        admitted = self._admit(now_s)
        return Decision(admitted.granted, (name, *admitted.dropped))

    def tick(self, *, now_s: float) -> Decision:
        """Decide again, as time has passed."""
        return self._admit(now_s)

    def next_tick_s(self, *, now_s: float) -> float:
        """Return when :meth:`tick` is due if there is no other event before: a session that waits may begin then."""
        if not any(each.waits for each in self._sessions.values()):
            return math.inf
        worth_s = self._worth_s()
        due = (each.away_s + self._think.exceeds_after(each.tool, worth_s) for each in self._away())
        return min((at_s for at_s in due if at_s > now_s), default=math.inf)

    def observe_reading(self, tokens: int, seconds: float, *, whole: bool = False) -> None:
        """Note that ``tokens`` of a prompt, its ``whole`` or what was not cached of it, were read within ``seconds``.

        The quick ones count, as the others waited. Of a whole prompt another session may have read a part, so the
        slowest of these is a bound.
        """
        (self._whole if whole else self._reading).observe(seconds / max(tokens, 1))

    # -------------------------------------------------------------------------------------------------- decisions

    def _worth_s(self) -> float:
        """Return the longest run of a tool that is worth keeping a part for, if another session waits."""
        return min(self._reading.low, self._whole.largest or math.inf) * self._capacity_tokens

    def _peak(self, sessions: Iterable[_Session]) -> float:
        def growth(tokens: int) -> float:
            final = self._lengths.mean_above(tokens)
            return 0.0 if final is None else final - tokens

        return expected_peak((each.charge, growth(each.tokens)) for each in sessions)

    def _away(self) -> list[_Session]:
        return [each for each in self._sessions.values() if each.holds and not each.open]

    def _remaining(self, session: _Session, now_s: float) -> float:
        return self._think.remaining(session.tool, elapsed_s=now_s - session.away_s)

    def _longest_away(self, now_s: float) -> list[_Session]:
        return sorted(self._away(), key=lambda each: (-self._remaining(each, now_s), -each.order))

    def _fit(self, now_s: float) -> tuple[str, ...]:
        """Drop sessions that are away until what is held fits, as far as that is possible."""
        excess = sum(each.charge for each in self._sessions.values() if each.holds) - self._capacity_tokens
        dropped: list[str] = []
        for each in self._longest_away(now_s) if excess > 0 else ():
            if excess <= 0:
                break
            each.holds = False
            dropped.append(each.name)
            excess -= each.charge
        return tuple(dropped)

    def _admit(self, now_s: float) -> Decision:
        granted: list[str] = []
        dropped: list[str] = []
        for first in [each for each in self._sessions.values() if each.waits]:
            spare = self._spare(first, now_s)
            if spare is None:
                break
            for each in spare:
                each.holds = False
                dropped.append(each.name)
            first.waits, first.holds = False, True
            granted.append(first.name)
        return Decision(tuple(granted), tuple(dropped))

    def _spare(self, first: _Session, now_s: float) -> Sequence[_Session] | None:
        """Return the sessions that lose their part so that the first one that waits begins; None if it waits on."""
        held = [each for each in self._sessions.values() if each.holds]
        spare: list[_Session] = []
        away = iter(self._longest_away(now_s))
        while self._returned and held and self._peak([*held, first]) > self._capacity_tokens:
            each = next(away, None)
            if each is None or self._remaining(each, now_s) < self._worth_s():
                return None
            held.remove(each)
            spare.append(each)
        return spare


class SessionCache:
    """A :class:`~asyncrl.interfaces.TokenGenerator` over an engine: turns begin as :class:`SessionAdmission` decides.

    Requests without a session pass. An engine that is no :class:`~asyncrl.interfaces.SessionEngine` does not get the
    sessions, since it could not free what it kept of them: it evicts by itself what was not used for the longest time.
    """

    def __init__(self, engine: RolloutEngine, *, capacity_tokens: int) -> None:
        self._engine = engine
        self._forget = engine.forget_session if isinstance(engine, SessionEngine) else None
        self._admission = SessionAdmission(capacity_tokens=capacity_tokens or math.inf)
        self._holds: dict[str, asyncio.Event] = {}
        self._cached: dict[str, int] = {}
        self._timer: asyncio.TimerHandle | None = None

    def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        return self._turn(request) if request.session else self._engine.generate(request)

    async def _turn(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        name, tokens = request.session, len(request.prompt_token_ids)
        now_s = asyncio.get_running_loop().time
        if self._forget is None:
            request = replace(request, session="")
        holds = self._holds.setdefault(name, asyncio.Event())
        self._apply(self._admission.begin_turn(name, tokens, now_s=now_s()))
        try:
            await holds.wait()
            cached = self._cached.get(name, 0)
            begun_s, unread = now_s(), tokens - cached
            stream = self._engine.generate(request)
            try:
                async for chunk in stream:
                    if unread > 0 and chunk.token_ids:
                        self._admission.observe_reading(unread, now_s() - begun_s, whole=not cached)
                        unread = 0
                    tokens += len(chunk.token_ids)
                    yield chunk
            finally:
                if isinstance(stream, AsyncGenerator):  # an AsyncIterator need not be one
                    await stream.aclose()
        finally:
            if name in self._holds:  # it has not left
                self._cached[name] = tokens
            self._apply(self._admission.end_turn(name, tokens, now_s=now_s()))

    async def abort(self, request_id: str) -> bool:
        return await self._engine.abort(request_id)

    def name_tools(self, session: str, reply: Message) -> None:
        """Note which tools the reply of a session's last turn calls."""
        names = {call["function"]["name"] for call in reply.get("tool_calls", ())}
        self._admission.name_tool(session, " ".join(sorted(names)))

    def leave(self, session: str) -> None:
        """Free what is held of a session, which has ended."""
        self._apply(self._admission.leave(session, now_s=asyncio.get_running_loop().time()))

    def _apply(self, decision: Decision) -> None:
        for name in decision.dropped:
            self._holds.pop(name, None)
            self._cached.pop(name, None)
            if self._forget is not None:
                self._forget(name)
        for name in decision.granted:
            self._holds[name].set()
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at_s = self._admission.next_tick_s(now_s=loop.time())
        if at_s < math.inf:
            self._timer = loop.call_at(at_s + _TICK_S, self._tick)

    def _tick(self) -> None:
        self._apply(self._admission.tick(now_s=asyncio.get_running_loop().time()))
