"""A replica whose instances are engines: it is probed, paused and drained, and streams one request per attempt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, TypeAlias, cast

from asyncrl.errors import EngineError, InfrastructureError, LiveWeightsError, WeightError
from asyncrl.interfaces import (
    FinishReason,
    GenerationChunk,
    GenerationRequest,
    KVCachePolicy,
    OutOfProcessEngine,
    RolloutEngine,
    TokenGenerator,
)
from asyncrl.rollout.live_weights import commit_into
from asyncrl.rollout.replica import Replica, ReplicaSet, ReplicaStatus
from asyncrl.rollout.router import ReplicaLoad
from asyncrl.weights import WeightManifest

_SUSPECT_TOKENS = 4096.0
"""Tokens that a suspect replica must have less to do than others to be preferred: one that fails quickly is never busy,
and would attract all requests."""

EngineFactory: TypeAlias = Callable[[], RolloutEngine]
FetchWeights: TypeAlias = Callable[[RolloutEngine, WeightManifest], Awaitable[None]]


class AttemptEnded(InfrastructureError):
    """The attempt ended before the request did: its replica cannot or may not continue. Tokens before that count.

    The request may be the cause if ``blames_request``: the replica died, or aborted it before the first token.
    """

    def __init__(self, message: str, *, blames_request: bool = False) -> None:
        super().__init__(message)
        self.blames_request = blames_request


class Attempt:
    """One request on one engine: a task reads the stream into an inbox until it ends or the request is requeued.

    Args:
        incarnation: of the engine among its replica's.
        work: expected work, in tokens.
        proven: set unless a version is being committed and is not proven: what is sampled then waits for that.
        ended: called when the engine is done with it, or was stopped; perhaps more than once.
        spawn: starts the reading task (:meth:`ReplicaSet.spawn`).

    Attributes:
        finish_reason: the engine's, once it has arrived, read or not.
    """

    def __init__(
        self,
        engine: TokenGenerator,
        request: GenerationRequest,
        *,
        incarnation: int,
        work: float,
        proven: asyncio.Event,
        ended: Callable[[Attempt], None],
        spawn: Callable[..., asyncio.Task[None]],
    ) -> None:
        self.request_id = request.request_id
        self.incarnation = incarnation
        self.work = work
        self.finish_reason: FinishReason | None = None
        self._engine = engine
        self._proven = proven
        self._ended = ended
        self._inbox: asyncio.Queue[GenerationChunk | Exception] = asyncio.Queue()
        self._over = False
        self._task = spawn(self._read(request), name=f"reading {request.request_id}")

    async def next_chunk(self) -> GenerationChunk:
        """Wait for the next chunk.

        Raises:
            AttemptEnded: it was requeued, or the engine has aborted it.
            EngineError: the stream ended without a finish reason.
            Exception: what the engine raised.
        """
        received = await self._inbox.get()
        if isinstance(received, Exception):
            raise received
        return received

    def requeue(self, reason: str, *, died: bool = False) -> None:
        """Stop it: the reader gets the chunks that have arrived, then :class:`AttemptEnded`."""
        if not self._over:
            self._over = True
            self._inbox.put_nowait(AttemptEnded(reason, blames_request=died))
            self._task.cancel()
            # Later than the task's cancellation: when the replica is idle, its engine has been stopped.
            asyncio.get_running_loop().call_soon(self._ended, self)

    def leave(self) -> None:
        """Stop it; no reader is left."""
        self._over = True
        self._task.cancel()
        self._ended(self)

    async def abort(self) -> None:
        """Abort the request in the engine; stop it here if the engine does not hold it, or is gone."""
        try:
            known = await self._engine.abort(self.request_id)
        except InfrastructureError:
            known = False
        if not known:
            self.requeue("aborted")

    async def _read(self, request: GenerationRequest) -> None:
        tokens = 0
        try:
            async with aclosing(
                cast("AsyncGenerator[GenerationChunk, None]", self._engine.generate(request))
            ) as chunks:
                async for chunk in chunks:
                    await self._proven.wait()
                    tokens += len(chunk.token_ids)
                    self._receive(chunk)
        except asyncio.CancelledError:
            if self._task.cancelling():
                raise
            self._receive(EngineError("the engine cancelled the stream"))
        except Exception as error:  # noqa: BLE001 - raised again in next_chunk
            self._receive(error)
        else:
            if self.finish_reason is None:
                self._receive(EngineError("the stream ended without a finish reason"))
            elif self.finish_reason == "abort":  # read only if the pool did not ask for the abort
                self._receive(AttemptEnded("the engine aborted it", blames_request=not tokens))
        self._over = True
        self._ended(self)

    def _receive(self, received: GenerationChunk | Exception) -> None:
        if self._over:
            return
        if isinstance(received, GenerationChunk):
            self.finish_reason = self.finish_reason or received.finish_reason
        self._inbox.put_nowait(received)


class EngineReplica(Replica[RolloutEngine]):
    """A replica of engines.

    ``factory`` makes each engine, ``fetch`` prepares a version on one (:func:`~asyncrl.rollout.replica.fetch_into`);
    ``pause_engines``: whether engines shall be paused; its changes are among the set's.
    """

    def __init__(
        self,
        name: str,
        owner: ReplicaSet[EngineReplica],
        factory: EngineFactory,
        *,
        fetch: FetchWeights,
        kv_cache: KVCachePolicy,
        pause_engines: Callable[[], bool],
    ) -> None:
        super().__init__(name, owner)
        self.attempts: set[Attempt] = set()
        self.work = 0.0
        self.idle = asyncio.Event()
        self.idle.set()
        self.paused: bool | None = False
        """Whether its engine is paused; None while that changes."""
        self._pause_engines = pause_engines
        self._chunks = 0
        self._committing = False
        self._factory = factory
        self._fetch = fetch
        self._kv_cache: KVCachePolicy = kv_cache
        self._manifest: WeightManifest | None = None
        self.proven = asyncio.Event()
        """Unset from a commit to its proof; for ever, if that fails."""

    @property
    def engine(self) -> RolloutEngine | None:
        return self.instance

    # ---------------------------------------------------------------------------------------------------- requests

    @property
    def load(self) -> ReplicaLoad:
        version = 0 if self.engine is None else self.engine.weight_version
        penalty = _SUSPECT_TOKENS if self.health.state == "suspect" else 0.0
        return ReplicaLoad(name=self.name, work=self.work + penalty, serving=self.serves, weight_version=version)

    def begin(self, attempt: Attempt) -> None:
        self.attempts.add(attempt)
        self.work += attempt.work
        self.idle.clear()

    def count_tokens(self, attempt: Attempt, tokens: int) -> None:
        self._chunks += 1
        done = min(attempt.work, tokens)
        attempt.work -= done
        self.work -= done

    def end(self, attempt: Attempt) -> None:
        """Remove a request that is not on it any more. Idempotent."""
        self.attempts.discard(attempt)
        self.work -= attempt.work
        attempt.work = 0.0
        if not self.attempts:
            self.work = 0.0  # sums of differences of floats drift
            self.idle.set()

    def requeue(self, reason: str, *, died: bool = False) -> None:
        for attempt in list(self.attempts):
            attempt.requeue(reason, died=died)

    def status(self) -> ReplicaStatus:
        engine, health = self.engine, self.health
        return ReplicaStatus(
            name=self.name,
            state="draining" if self.drains and health.serves else health.state,
            serving=self.serves,
            weight_version=None if engine is None else engine.weight_version,
            requests=len(self.attempts),
            expected_tokens=round(self.work),
            restarts=max(health.incarnation, 0),
            reason=health.reason,
            engine=None if engine is None else engine.statistics(),
        )

    # ---------------------------------------------------------------------------------------------- pause and resume

    async def _follow_pauses(self, engine: RolloutEngine, incarnation: int) -> None:
        try:
            while True:
                await self._apply_pause(engine)
                await self._changes.wait()
        except Exception as error:  # noqa: BLE001 - it is the engine's fault, and counted as such
            self.mark_dead(incarnation, f"it could not be paused or resumed: {str(error) or type(error).__name__}")

    async def _apply_pause(self, engine: RolloutEngine) -> None:
        while self.paused != (paused := self._pause_engines()):
            self.paused = None
            await self._in_time(engine.pause() if paused else engine.resume())
            self.paused = paused
            self._changes.notify()

    async def _in_time(self, order: Coroutine[Any, Any, None]) -> None:
        """Raise TimeoutError if an order takes longer than a probe may, unless weights are committed meanwhile."""
        ordered = asyncio.ensure_future(order)
        try:
            while True:
                committing = self._committing
                done, _ = await asyncio.wait([ordered], timeout=self._supervision.probe_s)
                if done:
                    return await ordered
                if not (committing or self._committing):
                    raise TimeoutError(f"no answer within {self._supervision.probe_s:g} s")
        finally:
            ordered.cancel()

    # -------------------------------------------------------------------------------------------------------- life

    async def make(self) -> RolloutEngine:
        engine = self._factory()
        try:
            await engine.start()
            self.proven = asyncio.Event()
            self.proven.set()
            self.paused = False
            await self._apply_pause(engine)
        except BaseException:
            await self.close(engine)
            raise
        return engine

    def watchers(self, instance: RolloutEngine) -> Sequence[Coroutine[Any, Any, None]]:
        incarnation = self.health.incarnation
        watching = [self._probe(instance, incarnation), self._follow_pauses(instance, incarnation)]
        if isinstance(instance, OutOfProcessEngine):
            watching.append(self._await_end(instance, incarnation))
        return watching

    async def _await_end(self, engine: OutOfProcessEngine, incarnation: int) -> None:
        try:
            reason = await engine.wait_ended()
        except Exception as error:  # noqa: BLE001 - it is the engine's fault, and counted as such
            reason = f"{type(error).__name__}: {error}"
        self.mark_dead(incarnation, reason)

    async def _probe(self, engine: RolloutEngine, incarnation: int) -> None:
        while True:
            before = self._chunks
            await asyncio.sleep(self._supervision.probe_every_s)
            if self._may_be_paused:  # it samples no token, and may take no weights: some wait for a request to end
                continue
            if self.health.state == "stale":
                self._updates.retry(self.name)
            if self.health.leased or self._chunks != before:
                continue
            error = await self._probe_error(engine)
            if error is None:
                self.react(self.health.probe_succeeded(incarnation))
            elif not self._may_be_paused:  # a paused engine samples no token
                self.react(self.health.probe_failed(incarnation, error))

    @property
    def _may_be_paused(self) -> bool:
        return self._pause_engines() or self.paused is not False

    async def _probe_error(self, engine: RolloutEngine) -> str | None:
        try:
            answer = await engine.health(self._supervision.probe_s)
        except Exception as error:  # noqa: BLE001 - it is the engine's fault, and counted as such
            return f"{type(error).__name__}: {error}"
        return None if answer.healthy else answer.error

    # ----------------------------------------------------------------------------------------------------- weights

    async def prepare_weights(self, manifest: WeightManifest) -> None:
        engine = self.running()
        self._manifest = manifest
        with self._lease():
            await self._fetch(engine, manifest)

    async def commit_weights(self, version: int) -> None:
        engine = self.running()
        incarnation = self.health.incarnation
        self.proven.clear()
        with self._lease():
            self._committing = True
            try:
                await commit_into(engine, version, kv_cache=self._kv_cache, manifest=self._manifest)
            except LiveWeightsError as error:
                self.mark_dead(incarnation, str(error))
                raise
            finally:
                self._committing = False
        if self.engine is None or self.engine.weight_version != version:
            raise WeightError(f"the engine does not hold version {version}, although it committed it")
        self.proven.set()
        self._changes.notify()  # requests that have tokens of this version may go there now

    @contextmanager
    def _lease(self) -> Iterator[None]:
        """Hold a lease: while weights are transferred, timeouts are no failures."""
        incarnation = self.health.incarnation
        self.health.lease(incarnation)
        try:
            yield
        finally:
            self.health.release(incarnation)
