"""The pool: rollout replicas that are asked as one, and get new weights without stopping.

Where a call goes is decided in :mod:`asyncrl.rollout.routing`, who may serve in :mod:`asyncrl.weights.publication`;
here the decisions are carried out. A replica is a worker group, so it may span several ranks. What a replica was doing
when it died or was fenced is done again elsewhere, from the prompt; a dead one is made again, and serves when it holds
the current weights.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.errors import (
    DeadlineError,
    EngineClosedError,
    EngineError,
    EnvironmentFailure,
    GroupClosedError,
    InfrastructureError,
    RequestAbortedError,
    ResourceError,
    RolloutsLostError,
    WeightError,
    WorkerDiedError,
)
from asyncrl.interfaces import KVCachePolicy
from asyncrl.rollout.metering import meter_tokens
from asyncrl.rollout.routing import ReplicaLoad, choose
from asyncrl.rollout.weight_updates import WeightUpdates
from asyncrl.weights.manifest import WeightManifest
from asyncrl.weights.publication import Ended

__all__ = ["RolloutPool", "TokenCounts"]

_log = logging.getLogger(__name__)

_LONGEST_DELAY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Tokens that the pool's engines delivered for one purpose.

    Attributes:
        delivered: all of them, by engines that are gone, too.
        in_flight: those that running episodes hold.
        lost: those of episodes that were begun again elsewhere.
    """

    delivered: int
    in_flight: int
    lost: int = 0


@dataclass(slots=True, eq=False)
class _Life:
    """A worker group under a replica's name, from its start to its death.

    Attributes:
        group: a worker group of RolloutWorkers: its methods are bound at run time.
        meter: file in which its token counts outlive it.
        reason: why it does not serve.
        answered: tokens that its answers account for, by purpose.
        calls: rollouts sent and not answered, and how many rows each has.
        placed_s: when they were sent, by the loop's clock.
        taken_back: those that are done elsewhere instead.
        reserved: for rollouts that other replicas died under; nothing else is sent here.
    """

    group: Any
    meter: Path | None = None
    serving: bool = False
    reason: str = ""
    dead: bool = False
    answered: Counter[str] = field(default_factory=Counter)
    calls: dict[DataProtoFuture, int] = field(default_factory=dict)
    placed_s: dict[DataProtoFuture, float] = field(default_factory=dict)
    taken_back: set[DataProtoFuture] = field(default_factory=set)
    reserved: bool = False

    def take_back(self) -> None:
        """What it was doing is done elsewhere."""
        for call in self.calls:
            self.taken_back.add(call)
            call.cancel()


class _Closed(Exception):
    """Ends the pool's tasks."""


class RolloutPool:
    """Replicas of :class:`asyncrl.rollout.worker.RolloutWorker` behind one face. Used from one event loop.

    Args:
        replicas: worker groups by name. The pool does not close them: whoever made them does.
        kv_cache: what running requests do with keys and values of older weights when new ones are committed.
        deadline_s: seconds each replica has for each phase of a weight update; past it, it is fenced.
        rollout_deadline_s: seconds a call of :meth:`rollout` may take; past it, it fails.
        revive: makes the worker group of a dead replica again, ready for its start; None leaves the dead alone.
        attempts: replicas that may die or fail under the same rollouts before these fail: they may be the reason. The
            last one has nothing else to do then, so that no other rollouts are taken for it.
        restarts: starts in a row that may fail before a replica is given up.
        restart_s: seconds before the first of them; doubled after each that fails.
    """

    def __init__(
        self,
        replicas: Mapping[str, Any],
        *,
        kv_cache: KVCachePolicy = "keep",
        deadline_s: float = 300.0,
        rollout_deadline_s: float | None = None,
        revive: Callable[[str], Awaitable[Any]] | None = None,
        attempts: int = 3,
        restarts: int = 5,
        restart_s: float = 0.5,
    ) -> None:
        self._lives = {name: _Life(group) for name, group in replicas.items()}
        self._past: list[_Life] = []
        self._reviving: set[str] = set()
        self._kv_cache: KVCachePolicy = kv_cache
        self._deadline_s = deadline_s
        self._rollout_deadline_s = rollout_deadline_s
        self._revive = revive
        self._attempts = attempts
        self._restarts = restarts
        self._restart_s = restart_s
        self._changed = asyncio.Event()
        self._closing = asyncio.Event()
        self._updates: WeightUpdates | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._owner: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._model_path, self._first_version = "", 0
        self._on_turns: Callable[[bytes], None] | None = None

    @property
    def weight_version(self) -> int:
        """Version that every serving replica holds, or is just getting.

        Raises:
            WeightError: the pool was not started.
        """
        return self._weights().version

    @property
    def needed_versions(self) -> frozenset[int]:
        """Published versions whose bytes must stay available, for replicas that are made again."""
        return self._weights().needed_versions

    def _weights(self) -> WeightUpdates:
        if self._updates is None:
            raise WeightError("the pool serves no weights yet: call start(model_path, weight_version=...) first")
        return self._updates

    # ------------------------------------------------------------------------------------------------------- life

    async def start(self, model_path: str, *, weight_version: int) -> None:
        """Load the model on every replica, all at once, and serve it as ``weight_version``."""
        self._model_path, self._first_version = model_path, weight_version
        await asyncio.gather(*(self._load(life) for life in self._lives.values()))
        opened: asyncio.Future[WeightUpdates] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(self._own(opened, weight_version), name="rollout pool")
        self._updates = await opened
        for name, life in self._lives.items():
            self._listen_to(life)
            self._updates.joined(name, holds=weight_version)

    def on_turns(self, listener: Callable[[bytes], None]) -> None:
        """Tell ``listener`` of turns as they end (:mod:`asyncrl.rollout.turns`). Before :meth:`start`."""
        self._on_turns = listener

    def _listen_to(self, life: _Life) -> None:
        if self._on_turns is not None and self._tasks is not None:
            self._tasks.create_task(self._listen(life, self._on_turns), name="turns")

    async def _listen(self, life: _Life, listener: Callable[[bytes], None]) -> None:
        """Ask for turns for as long as the replica lives."""
        while not life.dead:
            call = life.group.turns()
            try:
                content: bytes = await call
            except (WorkerDiedError, GroupClosedError):
                return  # whoever waits for its rollouts buries it
            except asyncio.CancelledError:
                call.cancel()
                raise
            listener(content)

    async def aclose(self) -> None:
        """Stop reviving replicas and updating weights; who waits for that is told. Idempotent.

        Raises:
            ExceptionGroup: what ended the pool before.
        """
        self._closing.set()
        if self._owner is not None:
            await self._owner

    async def _own(self, opened: asyncio.Future[WeightUpdates], version: int) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                opened.set_result(
                    WeightUpdates(
                        version=version,
                        prepare=self._prepare,
                        commit=self._commit,
                        serve=self._serve,
                        fence=self._fence,
                        tasks=tasks,
                        deadline_s=self._deadline_s,
                    )
                )
                await self._closing.wait()
                raise _Closed
        except* _Closed:
            pass
        except* Exception as failure:
            self._failure = failure
            _log.exception("the rollout pool ended")
            raise
        finally:
            self._closing.set()
            self._tell()

    async def _load(self, life: _Life) -> None:
        await life.group.start(self._model_path, self._first_version)
        answer = await life.group.engine_statistics()
        meter = answer.get("meter")
        life.meter = Path(meter) if meter else None

    def _closed(self) -> EngineClosedError:
        why = "is closed" if self._failure is None else f"failed: {self._failure}"
        return EngineClosedError(f"the rollout pool {why}")

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # --------------------------------------------------------------------------------------------------- rollouts

    async def rollout(
        self, prompts: DataProto, *, again: Callable[[], Awaitable[DataProto]] | None = None
    ) -> DataProtoFuture:
        """Roll the rows out on the replica that has least to do; returns when they are there, as a future of them.

        Rollouts of a replica that dies or is fenced meanwhile are done again on another, with the prompts that
        ``again`` gives, if it is given.

        Raises:
            ResourceError: no replica serves, and none is coming back.
            EngineClosedError: ... because the pool is closed.
            RolloutsLostError: ``attempts`` replicas died or failed under these rows.
            EnvironmentFailure: as :meth:`asyncrl.rollout.worker.RolloutWorker.rollout`.
            DeadlineError: they were not there in time.
        """
        purpose: str = prompts.meta_info["purpose"]
        failures = 0
        sent = False
        while True:
            if sent and again is not None:
                prompts = await again()
            sent = True
            alone = 0 < failures == self._attempts - 1
            name, life = await self._place(alone=alone)
            call: DataProtoFuture = life.group.rollout(prompts)
            if self._rollout_deadline_s is not None:
                call.deadline(self._rollout_deadline_s)
            life.calls[call] = len(prompts)
            life.placed_s[call] = asyncio.get_running_loop().time()
            try:
                header = await call.header()
            except EnvironmentFailure as failure:
                life.answered[purpose] += failure.tokens_generated
                raise
            except RequestAbortedError as error:
                life.answered[purpose] += error.tokens_generated
                raise
            except (WorkerDiedError, GroupClosedError, EngineError) as error:
                self._bury(name, life, str(error))
                failures += 1
                if self._closing.is_set():
                    raise
                if failures >= self._attempts:
                    why = f"{failures} replicas died or failed under the same rollouts; the last one: {error}"
                    _log.warning("rollouts are given up: %s", why)
                    raise RolloutsLostError(why) from error
            except (asyncio.CancelledError, concurrent.futures.CancelledError):
                task = asyncio.current_task()
                if call not in life.taken_back or (task is not None and task.cancelling()):
                    call.cancel()
                    raise
            else:
                meta = header.meta_info
                answered = meta.get("summary", {}).get("tokens", 0) + meta.get("wasted_tokens", 0)
                life.answered[purpose] += answered - meta.get("continued", {}).get("tokens", 0)  # of another life
                return call
            finally:
                del life.calls[call], life.placed_s[call]
                if life.reserved:
                    life.reserved = not alone  # somebody else waits for it to have nothing to do
                    self._tell()

    async def _place(self, *, alone: bool) -> tuple[str, _Life]:
        """The serving replica with the fewest rows; waits while one is coming back, or until it has none."""
        try:
            async with asyncio.timeout(self._rollout_deadline_s):
                while True:
                    changed = self._changed
                    name = choose(
                        ReplicaLoad(name=name, rows=sum(life.calls.values()), serving=life.serving)
                        for name, life in self._lives.items()
                        if not life.reserved
                    )
                    if name is not None and (not alone or await self._emptied(self._lives[name])):
                        return name, self._lives[name]
                    if name is not None:
                        continue
                    reserved = any(life.serving and life.reserved for life in self._lives.values())
                    if self._closing.is_set():
                        raise self._closed() from self._failure
                    if not (self._reviving or reserved):
                        reasons = "; ".join(f"{name}: {life.reason}" for name, life in self._lives.items())
                        raise ResourceError(f"no rollout replica serves: {reasons or 'there is none'}")
                    await changed.wait()
        except TimeoutError:
            raise DeadlineError(
                f"no rollout replica served for {self._rollout_deadline_s:g} s",
                waiting_for="a replica",
                timeout_s=self._rollout_deadline_s or 0.0,
            ) from None

    async def _emptied(self, life: _Life) -> bool:
        """Reserve a replica and wait until it has nothing to do; False, and free again, if it stops serving before."""
        life.reserved = True
        try:
            while life.calls and life.serving and not self._closing.is_set():
                await self._changed.wait()
        except BaseException:
            life.reserved = False
            self._tell()
            raise
        life.reserved = life.serving
        return life.serving

    # ---------------------------------------------------------------------------------------------- life and death

    def _bury(self, name: str, life: _Life, reason: str) -> None:
        """The replica's process or engine is gone: what it had is done elsewhere, and it is made again."""
        if life.dead:
            return
        life.dead, life.serving = True, False
        life.reason = reason.partition("\n")[0]
        life.take_back()
        self._past.append(life)
        if self._updates is not None and not self._closing.is_set():
            self._updates.left(name)
            if self._revive is not None and self._tasks is not None:
                self._reviving.add(name)
                self._tasks.create_task(self._bring_back(name), name=f"bringing {name} back")
        _log.warning("replica %s is lost: %s", name, reason)
        self._tell()

    async def _bring_back(self, name: str) -> None:
        assert self._revive is not None
        delay_s = self._restart_s
        for _ in range(self._restarts):
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
            try:
                life = _Life(await self._revive(name))
                await self._load(life)
            except Exception as error:  # noqa: BLE001 - whatever it is, it costs one start, and not the pool
                first_line, _, _ = str(error).partition("\n")
                reason = self._lives[name].reason = f"it could not be made again: {first_line}"
                _log.warning("replica %s: %s", name, reason, exc_info=not isinstance(error, InfrastructureError))
                continue
            self._lives[name] = life
            self._listen_to(life)
            self._weights().joined(name, holds=self._first_version)
            return
        self._reviving.discard(name)
        self._tell()

    def _serve(self, name: str, version: int) -> None:
        self._lives[name].serving = True
        if name in self._reviving:
            self._reviving.discard(name)
            _log.warning("replica %s is back, with weight version %d", name, version)
        self._tell()

    def _fence(self, name: str, reason: str) -> None:
        self._lives[name].serving = False
        self._lives[name].reason = reason
        self._lives[name].take_back()
        self._reviving.discard(name)
        self._tell()

    # ---------------------------------------------------------------------------------------------------- weights

    async def publish(self, manifest: WeightManifest) -> Ended:
        """Bring a published version into every serving replica; they go on generating meanwhile.

        Every replica fetches and verifies it before the first one samples from it. One that fails is fenced: its
        rollouts are done elsewhere, and it is sent the next version.

        Raises:
            WeightError: no replica is left that serves, and none is coming back.
            WeightVersionError: the version is not newer than the one served.
            EngineClosedError: the pool is closed, or closes meanwhile.
        """
        updates = self._weights()
        if self._closing.is_set():
            raise self._closed() from self._failure
        try:
            ended = await updates.publish(manifest)
        except EngineClosedError:
            assert self._owner is not None, "there are updates once there is an owner"
            await asyncio.wait([self._owner])  # it may have more to say
            raise self._closed() from self._failure
        if not self._reviving and not any(life.serving for life in self._lives.values()):
            reasons = "; ".join(f"{name}: {reason}" for name, reason in ended.fenced.items())
            raise WeightError(f"no replica could take weight version {manifest.version}: {reasons}")
        return ended

    async def _prepare(self, name: str, manifest: WeightManifest) -> None:
        life = self._lives[name]
        await self._ask(name, life, life.group.prepare_weights(manifest))

    async def _commit(self, name: str, version: int) -> None:
        life = self._lives[name]
        await self._ask(name, life, life.group.commit_weights(version, self._kv_cache))

    async def _ask(self, name: str, life: _Life, call: Any) -> None:
        try:
            await call.deadline(self._deadline_s)
        except (WorkerDiedError, GroupClosedError, EngineError) as error:
            self._bury(name, life, str(error))
            raise
        except asyncio.CancelledError:
            call.cancel()
            raise

    def explain(self) -> tuple[str, ...]:
        """One sentence for every replica: whether it serves, what it does, and for how long."""
        now_s = asyncio.get_running_loop().time()
        sentences = []
        for name, life in self._lives.items():
            state = "serves" if life.serving else "is dead" if life.dead else "does not serve"
            state += ", reserved for rollouts that others died under" if life.reserved else ""
            if name in self._reviving:
                state += " and is being made again"
            longest_s = max((now_s - life.placed_s[call] for call in life.calls), default=0.0)
            doing = f", {len(life.calls)} groups on it, the longest for {longest_s:.1f} s" if life.calls else ", idle"
            sentences.append(f"replica {name} {state}{doing}")
        return tuple(sentences)

    # ------------------------------------------------------------------------------------------------ token counts

    async def token_counts(self, purpose: str = "train") -> TokenCounts:
        """Add up the token meters of replicas, living and dead. Exact when nothing is being generated.

        What was lost is what a replica delivered beyond its answers, where calls of it were taken back; no worker can
        tell, because an answer may cross the taking back.
        """
        delivered = in_flight = lost = 0
        for _, life, answer in await self._told():
            if life.dead:  # after it had answered: counted below
                continue
            delivered += answer["delivered"][purpose]
            in_flight += answer["in_flight"][purpose]
            if life.taken_back:
                lost += answer["delivered"][purpose] - answer["in_flight"][purpose] - life.answered[purpose]
        for life in tuple(self._past):
            counted = life.answered[purpose]  # all that is known of the dead without a file
            if life.meter is not None:
                counted = await asyncio.to_thread(meter_tokens, life.meter, purpose)
            delivered += counted
            lost += counted - life.answered[purpose]
        return TokenCounts(delivered=delivered, in_flight=in_flight, lost=lost)

    async def statistics(self) -> dict[str, dict[str, Any]]:
        """Each living replica's :meth:`asyncrl.rollout.worker.RolloutWorker.engine_statistics`, by name."""
        return {name: answer for name, _, answer in await self._told()}

    async def _told(self) -> list[tuple[str, _Life, dict[str, Any]]]:
        """The statistics of those that live; one that is found dead is buried."""

        async def ask(name: str, life: _Life) -> tuple[str, _Life, dict[str, Any]] | None:
            try:
                return name, life, await life.group.engine_statistics()
            except (WorkerDiedError, GroupClosedError, EngineError) as error:
                self._bury(name, life, str(error))
                return None

        asked = [ask(name, life) for name, life in self._lives.items() if not life.dead]
        return [answer for answer in await asyncio.gather(*asked) if answer is not None]
