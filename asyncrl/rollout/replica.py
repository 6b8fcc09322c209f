"""One replica of a pool: an engine that is made, watched, and made again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from asyncrl.cancellation import to_its_end
from asyncrl.errors import InfrastructureError, WeightError
from asyncrl.interfaces import RolloutEngine, SeparateEngine
from asyncrl.rollout.attempt import Attempt
from asyncrl.rollout.pool_status import ReplicaStatus
from asyncrl.rollout.replica_health import HealthPolicy, ReplicaHealth
from asyncrl.rollout.routing import ReplicaLoad

__all__ = ["EngineFactory", "Replica", "Supervision"]

_log = logging.getLogger(__name__)

_DOUBT_TOKENS = 4096.0  # how much less than others a suspect replica must have to do before it is preferred

EngineFactory: TypeAlias = Callable[[], RolloutEngine]


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """How replicas are watched.

    Attributes:
        health: when one is given up and when it is tried again.
        start_s: how long an engine may take to start.
        close_s: how long it may take to close before it is left to itself.
        probe_every_s: how often a replica that says nothing by itself is asked for a token.
        probe_s: how long that token may take.
    """

    health: HealthPolicy = field(default_factory=HealthPolicy)
    start_s: float = 600.0
    close_s: float = 15.0
    probe_every_s: float = 10.0
    probe_s: float = 30.0


class Replica:
    """An engine over its lives. What it decides about others it tells through the three callbacks.

    Args:
        name: in the pool.
        factory: makes the engine of each life.
        supervision: how it is watched.
        joined: called with the version a new engine began with.
        left: called when the engine is gone.
        retry: called to bring a fenced replica to the current version.
        changed: called when it may serve now, or may not any more.
    """

    def __init__(
        self,
        name: str,
        factory: EngineFactory,
        *,
        supervision: Supervision,
        joined: Callable[[str, int], None],
        left: Callable[[str], None],
        retry: Callable[[str], None],
        changed: Callable[[], None],
    ) -> None:
        self.name = name
        self.engine: RolloutEngine | None = None
        self.health = ReplicaHealth(supervision.health)
        self.attempts: set[Attempt] = set()
        self.work = 0.0
        self.draining = False
        self.idle = asyncio.Event()
        self.idle.set()
        self.settled = asyncio.Event()
        """Set when the first start has come to something, or to nothing, or the replica has left."""
        self.failure: Exception | None = None
        self._factory = factory
        self._supervision = supervision
        self._joined = joined
        self._left = left
        self._retry = retry
        self._changed = changed
        self._dead = asyncio.Event()
        self._heard = 0
        self.paused = False
        """Whether its engine shall stand still, in this life and in later ones."""
        self._halted = False  # whether it does
        self._ordered = asyncio.Event()
        self._obeyed = asyncio.Event()

    # ------------------------------------------------------------------------------------------------ what it does

    @property
    def serves(self) -> bool:
        """Whether new requests may go to it."""
        return self.health.serves and not self.draining and self.engine is not None

    @property
    def load(self) -> ReplicaLoad:
        """For the router."""
        version = 0 if self.engine is None else self.engine.weight_version
        # One that fails quickly is never busy, and would draw all requests to itself.
        doubt = _DOUBT_TOKENS if self.health.state == "suspect" else 0.0
        return ReplicaLoad(name=self.name, rows=self.work + doubt, serving=self.serves, weight_version=version)

    def begin(self, attempt: Attempt) -> None:
        """A request is on it."""
        self.attempts.add(attempt)
        self.work += attempt.work
        self.idle.clear()

    def heard(self, attempt: Attempt, tokens: int) -> None:
        """So many tokens of the request came."""
        self._heard += 1
        done = min(attempt.work, tokens)
        attempt.work -= done
        self.work -= done

    def end(self, attempt: Attempt) -> None:
        """The request is not on it any more."""
        self.attempts.discard(attempt)
        self.work -= attempt.work
        attempt.work = 0.0
        if not self.attempts:
            self.work = 0.0  # sums of differences of floats drift
            self.idle.set()

    def take_back(self, reason: str, *, died: bool = False) -> None:
        """All requests on it go on elsewhere."""
        for attempt in list(self.attempts):
            attempt.take_back(reason, died=died)

    def generation_failed(self, engine: int, reason: str) -> None:
        """A request failed on engine number ``engine``, by its fault."""
        self._tell(self.health.generation_failed(engine, reason))

    def generation_succeeded(self, engine: int) -> None:
        """A request ended as it should."""
        self._tell(self.health.generation_succeeded(engine))

    def verified(self) -> None:
        """It holds the current version."""
        self._tell(self.health.verified(self.health.engine))
        self.settled.set()

    def fenced(self, reason: str) -> None:
        """It failed to take the current version: it serves nothing until it has."""
        self.failure = self.failure or WeightError(reason)
        self._tell(self.health.fenced(self.health.engine, reason))
        self.take_back(reason)
        self.settled.set()

    def order(self, *, pause: bool) -> None:
        """Stop decoding, or go on, now and in any later life. The newest order counts."""
        self.paused = pause
        self._ordered.set()

    async def obeyed(self) -> None:
        """Wait until the engine does as it is told by now. One that does not is given up, and not waited for."""
        while self.engine is not None and self._halted != self.paused:
            await self._obeyed.wait()

    def status(self) -> ReplicaStatus:
        """As of now."""
        engine, health = self.engine, self.health
        return ReplicaStatus(
            name=self.name,
            state="draining" if self.draining and health.serves else health.state,
            serving=self.serves,
            weight_version=None if engine is None else engine.weight_version,
            requests=len(self.attempts),
            expected_tokens=round(self.work),
            restarts=max(health.engine, 0),
            reason=health.reason,
            engine=None if engine is None else engine.statistics(),
        )

    # ----------------------------------------------------------------------------------------------- life and death

    async def live(self) -> None:
        """Make engines, one after the other, until cancelled; closes the last one."""
        while True:
            await asyncio.sleep(self.health.restart_delay_s)
            number = self.health.start()
            self._dead.clear()
            engine = await self._start(number)
            if engine is None:
                continue
            try:
                await self._watch(engine, number)
            finally:
                self.engine = None
                reason = f"replica {self.name}: {self.health.reason or 'it leaves'}"
                self.take_back(reason)
                self._left(self.name)
                self._changed()
                self._tell_obeyed()
                await self._close(engine)
            _log.warning("%s; it is started again in %.3g s", reason, self.health.restart_delay_s)

    async def _start(self, number: int) -> RolloutEngine | None:
        engine: RolloutEngine | None = None
        try:
            engine = self._factory()
            async with asyncio.timeout(self._supervision.start_s):
                await engine.start()
                self._halted = False
                await self._follow(engine)
        except BaseException as error:
            if engine is not None:
                await self._close(engine)
            self.health.ended(number, f"it could not be started: {error or type(error).__name__}")
            if not isinstance(error, Exception):
                raise
            self.failure = error
            self.settled.set()
            _log.warning("replica %s: %s", self.name, self.health.reason)
            return None
        self.engine = engine
        self.health.started(number)
        self._joined(self.name, engine.weight_version)
        return engine

    async def _watch(self, engine: RolloutEngine, number: int) -> None:
        """Return when the engine is given up."""
        async with asyncio.TaskGroup() as watches:
            watching = [
                watches.create_task(self._probe(engine, number), name=f"probing {self.name}"),
                watches.create_task(self._obey(engine, number), name=f"ordering {self.name}"),
            ]
            if isinstance(engine, SeparateEngine):
                watching.append(watches.create_task(self._await_end(engine, number), name=f"watching {self.name}"))
            await self._dead.wait()
            for watch in watching:
                watch.cancel()

    async def _await_end(self, engine: SeparateEngine, number: int) -> None:
        self._tell(self.health.ended(number, await engine.wait_ended()))

    async def _obey(self, engine: RolloutEngine, number: int) -> None:
        """Pass orders on to the engine; one that does not follow them is no good."""
        try:
            while True:
                self._ordered.clear()
                await self._follow(engine)
                await self._ordered.wait()
        except Exception as error:  # noqa: BLE001 - it is the engine's fault, and counted as such
            self._tell(self.health.ended(number, f"it did not follow an order: {error or type(error).__name__}"))

    async def _follow(self, engine: RolloutEngine) -> None:
        """Order what is wanted, one thing after the other, until the engine does it."""
        while self._halted != (pause := self.paused):
            async with asyncio.timeout(self._supervision.probe_s):
                await (engine.pause("keep") if pause else engine.resume())
            self._halted = pause
        self._tell_obeyed()

    def _tell_obeyed(self) -> None:
        self._obeyed.set()
        self._obeyed = asyncio.Event()

    async def _probe(self, engine: RolloutEngine, number: int) -> None:
        """Ask a silent replica for a token; bring a stale one to the current version."""
        supervision = self._supervision
        while True:
            heard = self._heard
            await asyncio.sleep(supervision.probe_every_s)
            if self.health.state == "stale":
                self._retry(self.name)
            if self.paused or self._halted or self.health.leased:
                continue
            if heard == self._heard:
                error = await self._probed(engine)
                if error is None:
                    self._tell(self.health.probe_succeeded(number))
                elif not (self.paused or self._halted):  # a paused engine gives no token by order
                    self._tell(self.health.probe_failed(number, error))

    async def _probed(self, engine: RolloutEngine) -> str | None:
        """Why the probe failed."""
        try:
            answer = await engine.health(self._supervision.probe_s)
        except Exception as error:  # noqa: BLE001 - it is the engine's fault, and counted as such
            return f"{type(error).__name__}: {error}"
        return None if answer.healthy else answer.error

    def _tell(self, changed: bool) -> None:
        if not changed:
            return
        if self.health.state == "dead":
            self.take_back(f"replica {self.name}: {self.health.reason}", died=True)
            self._dead.set()
        self._changed()

    async def _close(self, engine: RolloutEngine) -> None:
        """Close the engine, to its end even when cancelled meanwhile."""
        await to_its_end(self._close_in_time(engine))

    async def _close_in_time(self, engine: RolloutEngine) -> None:
        """One that does not close in time is left to itself, which is told."""
        try:
            async with asyncio.timeout(self._supervision.close_s):
                await engine.close()
        except (TimeoutError, InfrastructureError) as error:
            _log.warning("the engine of replica %s did not close: %s", self.name, error or type(error).__name__)
