"""The requests of a pool of engines: which are queued, which are on which replica, and how they go on elsewhere."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from asyncrl.errors import ContinuationError, DeadlineError, EngineError, InfrastructureError, InvalidDataError
from asyncrl.interfaces import FinishReason, GenerationChunk, GenerationRequest, PauseMode
from asyncrl.rollout.admission import Admission, Ticket
from asyncrl.rollout.engine_replica import Attempt, AttemptEnded, EngineReplica
from asyncrl.rollout.replica import PoolOptions, ReplicaSet
from asyncrl.rollout.router import LengthEstimate, affinity_key, choose, session_margin

_log = logging.getLogger(__name__)


class RequestContinuation:
    """A request over the engines that work on it, one after another.

    Tokens are taken once, in order, each with its log-prob and version; :meth:`request` is for the next engine: prompt
    and tokens so far, none of which it delivers again.

    >>> from asyncrl.interfaces import SamplingParams
    >>> asked = GenerationRequest(request_id="a", prompt_token_ids=(1,), sampling=SamplingParams(max_new_tokens=3))
    >>> continuation = RequestContinuation(asked)
    >>> continuation.request() is asked
    True
    >>> chunk = continuation.take(GenerationChunk(token_ids=(7,), log_probs=(-1.0,), weight_versions=(4,)))
    >>> again = continuation.request()
    >>> again.request_id, again.prompt_token_ids, again.continued_tokens, continuation.version
    ('a~1', (1, 7), 1, 4)
    """

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._tokens: list[int] = []
        self._attempts = 0
        self.version = 0
        """Version of the newest token: no engine with older weights may go on."""

    @property
    def tokens(self) -> int:
        return len(self._tokens)

    @property
    def left(self) -> int:
        """Tokens that may still come."""
        return self._request.sampling.max_new_tokens - self._request.continued_tokens - len(self._tokens)

    def request(self) -> GenerationRequest:
        """Return the request for the next engine, under an id of its own: the last engine may still hold the old id."""
        asked = self._request
        attempt, self._attempts = self._attempts, self._attempts + 1
        if not attempt and not self._tokens:
            return asked
        if self._tokens:  # the prompt's log-probs came with the first
            asked = replace(asked, sampling=replace(asked.sampling, prompt_log_probs=None))
        return replace(
            asked,
            request_id=f"{asked.request_id}~{attempt}" if attempt else asked.request_id,
            prompt_token_ids=(*asked.prompt_token_ids, *self._tokens),
            continued_tokens=asked.continued_tokens + len(self._tokens),
        )

    def take(self, chunk: GenerationChunk) -> GenerationChunk:
        """Add a chunk, and return it.

        Raises:
            EngineError: no engine may send it (a token without log-prob or version, a version that falls, more tokens
                than were requested). Nothing of it is taken.
            InvalidDataError: the likeliest tokens, or the prompt's log-probs, were requested, and the engine does not
                report them.
        """
        versions = chunk.weight_versions
        if not len(chunk.token_ids) == len(chunk.log_probs) == len(versions):
            raise EngineError(
                f"{len(chunk.token_ids)} tokens came with {len(chunk.log_probs)} log-probs and {len(versions)} versions"
            )
        if len(chunk.token_ids) > self.left:
            raise EngineError(f"{len(chunk.token_ids)} tokens came where {self.left} were left to come")
        if self._request.sampling.top_log_probs and len(chunk.top_log_probs) != len(versions):
            # The request's fault, not the engine's: every replica would refuse it.
            raise InvalidDataError("the engine does not report the likeliest tokens: ask without top_log_probs")
        prompt_tokens = len(self._request.prompt_token_ids) - self._request.continued_tokens
        scored = self._request.sampling.prompt_log_probs is not None and versions and not self._tokens
        if scored and len(chunk.prompt_log_probs) != prompt_tokens:
            raise InvalidDataError("the engine does not report log-probs of prompts: ask without prompt_log_probs")
        before = self.version
        for version in versions:
            if version < before:
                raise EngineError(f"a token of weight version {version} came after one of {before}")
            before = version
        self.version = before
        self._tokens += chunk.token_ids
        return chunk


_ABORTED = GenerationChunk(token_ids=(), log_probs=(), weight_versions=(), finish_reason="abort")


@dataclass(slots=True, eq=False)
class _HeldRequest:
    """A request that the pool holds.

    It waits in the queue until ``admitted`` is done, and has ``begun`` once an engine has a request for it.
    ``failures`` counts consecutive attempts without a token; ``failed_at`` is the replica of the last one.
    """

    request: GenerationRequest
    continuation: RequestContinuation
    ticket: Ticket
    key: str | None
    margin: float
    admitted: asyncio.Future[None]
    attempt: Attempt | None = None
    begun: bool = False
    aborted: bool = False
    failures: int = 0
    failed_at: str = ""

    @property
    def finished(self) -> bool:
        """Whether an engine has sent its last chunk, read or not."""
        reason = None if self.attempt is None else self.attempt.finish_reason
        return reason is not None and (reason != "abort" or self.aborted)

    def admit(self) -> None:
        if not self.admitted.done():
            self.admitted.set_result(None)


@dataclass(slots=True)
class RequestCounters:
    """What became of requests; as :class:`asyncrl.rollout.replica.PoolStatistics`."""

    accepted: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    left: int = 0
    migrations: int = 0
    tokens: int = 0


class Dispatcher:
    """Accepts requests and brings each to its end, over as many replicas as it needs.

    While it is ``paused`` nothing begins, and with ``drain`` only what has begun goes on.
    """

    def __init__(self, replica_set: ReplicaSet[EngineReplica], options: PoolOptions) -> None:
        self._set = replica_set
        self._changes = replica_set.changes
        self._options = options
        self._held: dict[str, _HeldRequest] = {}
        self._queued: dict[Ticket, _HeldRequest] = {}
        self._admission = Admission(max_running=options.max_running)
        self._lengths = LengthEstimate()
        self.paused: PauseMode | None = None
        self.counters = RequestCounters()

    @property
    def waiting(self) -> int:
        return len(self._held) - self.running

    @property
    def running(self) -> int:
        return sum(held.attempt is not None for held in self._held.values())

    def close(self) -> None:
        """End every request with an :class:`EngineClosedError`. Idempotent."""
        for held in self._held.values():
            held.admit()
            if held.attempt is not None:
                held.attempt.requeue("the pool is closed")
        self._changes.notify()

    def pause(self, mode: PauseMode | None) -> None:
        """Begin, change or end a pause."""
        self.paused = mode
        self._changes.notify()

    async def drained(self) -> None:
        """Wait until engines have finished all that has begun, read or not, or until the pause is another one.

        What has lost its replica goes on elsewhere when it is read, and is waited for.
        """
        while self.paused == "drain" and any(held.begun and not held.finished for held in self._held.values()):
            await self._changes.wait()
            self._set.open_tasks()

    async def generate(
        self, request: GenerationRequest, *, session: str | None = None, tenant: str = ""
    ) -> AsyncGenerator[GenerationChunk, None]:
        self._set.open_tasks()
        held = self._accept(request, session=session, tenant=tenant)
        last: GenerationChunk | None = None
        failed = False
        try:
            while last is None:
                replica = await self._place(held)
                if replica is None:
                    last = _ABORTED
                    break
                attempt = self._begin(held, replica)
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
            self._release(held, None if last is None else last.finish_reason, failed=failed)
        assert last is not None, "the loop ends with it, or with an exception"
        yield last  # everything is settled by then: a reader may stop at it

    def _accept(self, request: GenerationRequest, *, session: str | None, tenant: str) -> _HeldRequest:
        if request.request_id in self._held:
            raise InvalidDataError(f"request id {request.request_id!r} is in use; ids are unique")
        ticket = Ticket(tenant, self._work(request, sampled=0), granted=request.probe)
        if not request.probe:  # it waits for no others, and takes no place of theirs
            self._admission.enter(ticket)
        self.counters.accepted += 1
        prompt = len(request.prompt_token_ids) - request.continued_tokens
        held = _HeldRequest(
            request,
            RequestContinuation(request),
            ticket,
            affinity_key(request.prompt_token_ids[:prompt], session=session, prefix_tokens=self._options.prefix_tokens),
            self._options.margin if session is None else session_margin(prompt, least=self._options.margin),
            admitted=asyncio.get_running_loop().create_future(),
        )
        self._held[request.request_id] = held
        if ticket.granted:
            held.admit()
        else:
            self._queued[ticket] = held
        return held

    def _release(self, held: _HeldRequest, reason: FinishReason | None, *, failed: bool) -> None:
        del self._held[held.request.request_id]
        self._queued.pop(held.ticket, None)
        counters = self.counters
        if failed:
            counters.failed += 1
        elif reason is None:
            counters.left += 1
        elif reason == "abort":
            counters.aborted += 1
        else:
            counters.finished += 1
        if not held.request.probe:
            if reason in ("stop", "length"):
                self._lengths.observe(held.request.continued_tokens + held.continuation.tokens)
            for ticket in self._admission.leave(held.ticket):
                self._queued.pop(ticket).admit()
        if self.paused == "drain":
            self._changes.notify()

    def _work(self, request: GenerationRequest, *, sampled: int) -> float:
        return self._lengths.work(
            prompt=len(request.prompt_token_ids) + sampled,
            sampled=request.continued_tokens + sampled,
            limit=request.sampling.max_new_tokens,
        )

    async def _place(self, held: _HeldRequest) -> EngineReplica | None:
        """Wait in the queue, and for a replica; None if the request is aborted meanwhile.

        Raises:
            DeadlineError: no replica served for ``wait_s``.
        """
        await held.admitted
        loop = asyncio.get_running_loop()
        since_s: float | None = None
        while True:
            self._set.open_tasks()
            if held.aborted:
                return None
            if self.paused is not None and not (self.paused == "drain" and held.begun):
                since_s = None
                await self._changes.wait()
                continue
            name = self._choose(held)
            if name is not None:
                return self._set.replicas[name]
            since_s = loop.time() if since_s is None else since_s
            try:
                async with asyncio.timeout_at(since_s + self._options.wait_s):
                    await self._changes.wait()
            except TimeoutError:
                reasons = "; ".join(f"{name}: {one.health.reason}" for name, one in self._set.replicas.items())
                raise DeadlineError(
                    f"no replica has served for {self._options.wait_s:g} s: {reasons or 'the pool has none'}",
                    waiting_for="a replica",
                    timeout_s=self._options.wait_s,
                ) from None

    def _choose(self, held: _HeldRequest) -> str | None:
        """Return the replica for the request; the one that has just failed at it only if no other serves."""
        loads = [replica.load for replica in self._set.replicas.values()]
        others = [load for load in loads if load.name != held.failed_at]
        for candidates in (others, loads):
            name = choose(candidates, key=held.key, margin=held.margin, min_version=held.continuation.version)
            if name is not None:
                return name
        return None

    def _begin(self, held: _HeldRequest, replica: EngineReplica) -> Attempt:
        def ended(attempt: Attempt) -> None:
            replica.end(attempt)
            if self.paused == "drain":
                self._changes.notify()

        attempt = Attempt(
            replica.running(),
            held.continuation.request(),
            incarnation=replica.health.incarnation,
            work=self._work(held.request, sampled=held.continuation.tokens),
            proven=replica.proven,
            ended=ended,
            spawn=self._set.spawn,
        )
        self.counters.migrations += held.begun
        held.begun = True
        held.attempt = attempt
        replica.begin(attempt)
        return attempt

    async def _next(self, held: _HeldRequest, replica: EngineReplica, attempt: Attempt) -> GenerationChunk | None:
        """Return the next chunk of this attempt; None if another replica has to go on."""
        health, incarnation = replica.health, attempt.incarnation
        try:
            chunk = held.continuation.take(await attempt.next_chunk())
        except AttemptEnded as lost:
            self._attempt_failed(held, replica, lost, counts=lost.blames_request)
            return None
        except (InvalidDataError, ContinuationError):  # not the replica's fault
            raise
        except Exception as error:  # noqa: BLE001 - whatever else an engine raises is its replica's failure
            if not isinstance(error, InfrastructureError):
                _log.warning("replica %s failed at request %s", replica.name, held.request.request_id, exc_info=True)
            if not self._set.closing:
                replica.react(health.generation_failed(incarnation, str(error) or type(error).__name__))
            self._attempt_failed(held, replica, error, counts=True)
            return None
        tokens = len(chunk.token_ids)
        if tokens:
            held.failures, held.failed_at = 0, ""
            replica.count_tokens(attempt, tokens)
            self.counters.tokens += tokens
        if chunk.finish_reason is None:
            return chunk
        if chunk.finish_reason == "abort" and not held.aborted:  # the engine's own decision: AttemptEnded comes next
            return replace(chunk, finish_reason=None) if tokens else await self._next(held, replica, attempt)
        replica.react(health.generation_succeeded(incarnation))
        return chunk

    def _attempt_failed(self, held: _HeldRequest, replica: EngineReplica, error: Exception, *, counts: bool) -> None:
        """Raise if the request has failed as often as it may."""
        if counts:
            held.failures += 1
            held.failed_at = replica.name
        if held.failures >= self._options.max_failures and not held.aborted:
            raise EngineError(
                f"{held.failures} replicas in a row failed at request {held.request.request_id!r}; "
                f"the last one: {error}"
            ) from error

    async def abort_all(self) -> None:
        await self._abort(list(self._held.values()))

    async def abort(self, request_id: str) -> bool:
        held = self._held.get(request_id)
        if held is None or held.aborted:
            return False
        await self._abort([held])
        return True

    async def _abort(self, requests: Iterable[_HeldRequest]) -> None:
        attempts = []
        for held in requests:
            held.aborted = True
            held.admit()
            if held.attempt is not None:
                attempts.append(held.attempt)
        self._changes.notify()
        await asyncio.gather(*(attempt.abort() for attempt in attempts))
