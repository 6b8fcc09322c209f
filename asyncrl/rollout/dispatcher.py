"""The requests of a pool: who waits at the door, who is on which replica, who goes on elsewhere."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass, replace

from asyncrl.errors import (
    DeadlineError,
    EngineClosedError,
    EngineError,
    InfrastructureError,
    InvalidDataError,
    OverloadedError,
)
from asyncrl.interfaces import FinishReason, GenerationChunk, GenerationRequest, PauseMode
from asyncrl.rollout.admission import Admission, Ticket
from asyncrl.rollout.attempt import Attempt, Lost
from asyncrl.rollout.continuation import Continuation
from asyncrl.rollout.pool_options import PoolOptions
from asyncrl.rollout.replica import Replica
from asyncrl.rollout.routing import LengthEstimate, affinity_key, choose

__all__ = ["Dispatcher"]

_ABORTED = GenerationChunk(token_ids=(), log_probs=(), weight_versions=(), finish_reason="abort")


@dataclass(slots=True, eq=False)
class _Held:
    """A request that the pool holds."""

    request: GenerationRequest
    continuation: Continuation
    ticket: Ticket
    key: str | None
    door: asyncio.Future[None]
    attempt: Attempt | None = None
    begun: bool = False
    aborted: bool = False
    vain: int = 0
    failed_at: str = ""

    @property
    def finished(self) -> bool:
        """Whether an engine has said its last chunk, read or not."""
        reason = None if self.attempt is None else self.attempt.finish_reason
        return reason is not None and (reason != "abort" or self.aborted)

    def open(self) -> None:
        """It need not wait at the door any longer."""
        if not self.door.done():
            self.door.set_result(None)


@dataclass(slots=True)
class RequestCounters:
    accepted: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    left: int = 0
    refused: int = 0
    migrations: int = 0
    tokens: int = 0


class Dispatcher:
    """Takes requests in and sees each through to its end, over as many replicas as it needs.

    Args:
        replicas: by name; the pool's own dictionary, which changes.
        options: the pool's.

    Attributes:
        counters: what became of requests.
        paused: whether and how the pool is paused: nothing begins then, and with ``drain`` only what has begun goes on.
    """

    def __init__(self, replicas: Mapping[str, Replica], options: PoolOptions) -> None:
        self._replicas = replicas
        self._options = options
        self._held: dict[str, _Held] = {}
        self._at_door: dict[Ticket, _Held] = {}
        self._admission = Admission(options.admission)
        self._lengths = LengthEstimate()
        self._ends_s: deque[float] = deque(maxlen=64)
        self._changed = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._closed = False
        self.paused: PauseMode | None = None
        self.counters = RequestCounters()

    @property
    def waiting(self) -> int:
        """Requests that are on no replica."""
        return len(self._held) - self.running

    @property
    def running(self) -> int:
        """Requests that are on one."""
        return sum(held.attempt is not None for held in self._held.values())

    def open(self, tasks: asyncio.TaskGroup) -> None:
        """Requests may come; ``tasks`` owns what reads from engines."""
        self._tasks = tasks

    def close(self) -> None:
        """End every request with :class:`EngineClosedError`. Idempotent."""
        self._closed = True
        for held in self._held.values():
            held.open()
            if held.attempt is not None:
                held.attempt.take_back("the pool is closed")
        self.tell()

    def tell(self) -> None:
        """Wake whoever waits for a replica, or for a pause to end."""
        self._changed.set()
        self._changed = asyncio.Event()

    def pause(self, mode: PauseMode | None) -> None:
        """Begin, change or end a pause."""
        self.paused = mode
        self.tell()

    async def drained(self) -> None:
        """Wait until engines have finished all that has begun, or until the pause is another one.

        What readers have not read yet waits for them.
        """
        while self.paused == "drain" and any(held.begun and not held.finished for held in self._held.values()):
            await self._changed.wait()
            self._open()

    def _open(self) -> asyncio.TaskGroup:
        if self._closed:
            raise EngineClosedError("the pool is closed")
        if self._tasks is None:
            raise EngineError("the pool has not been started: await pool.start() first")
        return self._tasks

    async def generate(
        self, request: GenerationRequest, *, session: str | None = None, tenant: str = ""
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Stream one request from the replica that suits best; see :class:`asyncrl.interfaces.TokenGenerator`.

        Args:
            request: its id is unique among the requests that the pool holds.
            session: requests of one session go to one replica where that costs little.
            tenant: whose request it is; tenants share the pool fairly.

        Raises:
            OverloadedError: the queue is full.
            DeadlineError: no replica serves, and none has come back in time.
            EngineError: replica after replica failed at it.
        """
        tasks = self._open()
        held = self._take_in(request, session=session, tenant=tenant)
        last: GenerationChunk | None = None
        failed = False
        try:
            while last is None:
                chosen = await self._place(held)
                if chosen is None:
                    last = _ABORTED
                    break
                replica, attempt = self._begin(held, chosen, tasks)
                try:
                    while last is None and (chunk := await self._next(held, replica, attempt)) is not None:
                        if chunk.finish_reason is None:
                            yield chunk
                        else:
                            last = chunk
                finally:
                    held.attempt = None
                    attempt.leave()
        except Exception:
            failed = True
            raise
        finally:
            self._let_go(held, None if last is None else last.finish_reason, failed=failed)
        assert last is not None, "the loop ends with it, or with an exception"
        yield last  # everything is settled by then: a reader may stop at it

    def _take_in(self, request: GenerationRequest, *, session: str | None, tenant: str) -> _Held:
        if request.request_id in self._held:
            raise InvalidDataError(f"request id {request.request_id!r} is in use; ids are unique")
        ticket = Ticket(tenant, self._work(request, sampled=0))
        try:
            self._admission.enter(ticket, retry_after_s=self._retry_after_s())
        except OverloadedError:
            self.counters.refused += 1
            raise
        self.counters.accepted += 1
        begun = len(request.prompt_token_ids) - request.continued_tokens
        held = _Held(
            request,
            Continuation(request),
            ticket,
            affinity_key(request.prompt_token_ids[:begun], session=session, prefix_tokens=self._options.prefix_tokens),
            door=asyncio.get_running_loop().create_future(),
        )
        self._held[request.request_id] = held
        if ticket.granted:
            held.open()
        else:
            self._at_door[ticket] = held
        return held

    def _let_go(self, held: _Held, reason: FinishReason | None, *, failed: bool) -> None:
        del self._held[held.request.request_id]
        self._at_door.pop(held.ticket, None)
        counters = self.counters
        if failed:
            counters.failed += 1
        elif reason is None:
            counters.left += 1
        elif reason == "abort":
            counters.aborted += 1
        else:
            counters.finished += 1
            self._lengths.observe(held.request.continued_tokens + held.continuation.tokens)
        self._ends_s.append(asyncio.get_running_loop().time())
        for ticket in self._admission.leave(held.ticket):
            self._at_door.pop(ticket).open()
        if self.paused == "drain":
            self.tell()

    def _work(self, request: GenerationRequest, *, sampled: int) -> float:
        return self._lengths.work(
            prompt=len(request.prompt_token_ids) + sampled,
            sampled=request.continued_tokens + sampled,
            limit=request.sampling.max_new_tokens,
        )

    def _retry_after_s(self) -> float:
        """When a place is likely to be free, at the rate at which requests have ended lately."""
        if len(self._ends_s) < 2:
            return 1.0
        lasted_s = asyncio.get_running_loop().time() - self._ends_s[0]
        return min(max(1.0, lasted_s / len(self._ends_s) * (self._admission.waiting + 1)), 60.0)

    async def _place(self, held: _Held) -> Replica | None:
        """Wait at the door, and for a replica; None if the request is aborted meanwhile.

        Raises:
            DeadlineError: no replica was there for ``wait_s``.
        """
        await held.door
        loop = asyncio.get_running_loop()
        since: float | None = None
        while True:
            changed = self._changed
            self._open()
            if held.aborted:
                return None
            if self.paused is not None and not (self.paused == "drain" and held.begun):
                since = None
                await changed.wait()
                continue
            name = self._choose(held)
            if name is not None:
                return self._replicas[name]
            since = loop.time() if since is None else since
            try:
                async with asyncio.timeout_at(since + self._options.wait_s):
                    await changed.wait()
            except TimeoutError:
                reasons = "; ".join(f"{name}: {one.health.reason}" for name, one in self._replicas.items())
                raise DeadlineError(
                    f"no replica has served for {self._options.wait_s:g} s: {reasons or 'there is none'}",
                    waiting_for="a replica",
                    timeout_s=self._options.wait_s,
                ) from None

    def _choose(self, held: _Held) -> str | None:
        """The replica it goes to; one that has just failed at it only if there is no other."""
        loads = [replica.load for replica in self._replicas.values()]
        others = [load for load in loads if load.name != held.failed_at]
        for candidates in (others, loads):
            name = choose(candidates, key=held.key, margin=self._options.margin, min_version=held.continuation.version)
            if name is not None:
                return name
        return None

    def _begin(self, held: _Held, replica: Replica, tasks: asyncio.TaskGroup) -> tuple[Replica, Attempt]:
        assert replica.engine is not None, "a replica that serves has an engine"
        state = held.continuation

        def ended(attempt: Attempt) -> None:
            replica.end(attempt)
            if self.paused == "drain":
                self.tell()

        attempt = Attempt(
            replica.engine,
            state.request(),
            number=replica.health.engine,
            work=self._work(held.request, sampled=state.tokens),
            ended=ended,
            tasks=tasks,
        )
        self.counters.migrations += held.begun
        held.begun = True
        held.attempt = attempt
        replica.begin(attempt)
        return replica, attempt

    async def _next(self, held: _Held, replica: Replica, attempt: Attempt) -> GenerationChunk | None:
        """The next chunk of this attempt; None if another replica has to go on."""
        number = attempt.engine_number
        try:
            chunk = held.continuation.take(await attempt.next_chunk())
        except Lost as lost:
            if lost.vain:
                held.failed_at = replica.name
            self._give_up_on(held, lost, vain=lost.vain)
            return None
        except InfrastructureError as error:
            if not self._closed:
                replica.generation_failed(number, str(error))
            held.failed_at = replica.name
            self._give_up_on(held, error, vain=True)
            return None
        tokens = len(chunk.token_ids)
        if tokens:
            held.vain, held.failed_at = 0, ""
            replica.heard(attempt, tokens)
            self.counters.tokens += tokens
        if chunk.finish_reason is None:
            return chunk
        if chunk.finish_reason == "abort" and not held.aborted:  # the engine's own doing: Lost comes next
            return replace(chunk, finish_reason=None) if tokens else await self._next(held, replica, attempt)
        replica.generation_succeeded(number)
        return chunk

    def _give_up_on(self, held: _Held, error: InfrastructureError, *, vain: bool) -> None:
        """The attempt failed. Raise if the request has had its share of them."""
        held.vain += vain
        if held.vain >= self._options.vain_attempts and not held.aborted:
            raise EngineError(
                f"{held.vain} replicas in a row failed at request {held.request.request_id!r}; the last one: {error}"
            ) from error

    async def abort_all(self) -> None:
        """End every request that is held."""
        await self._abort(list(self._held.values()))

    async def abort(self, request_id: str) -> bool:
        """End a request with finish reason ``abort``; what it has generated is delivered. False if it is unknown."""
        held = self._held.get(request_id)
        if held is None or held.aborted:
            return False
        await self._abort([held])
        return True

    async def _abort(self, requests: Iterable[_Held]) -> None:
        attempts = []
        for held in requests:
            held.aborted = True
            held.open()
            if held.attempt is not None:
                attempts.append(held.attempt)
        self.tell()
        await asyncio.gather(*(attempt.abort() for attempt in attempts))
