"""The trainer's pool: whole groups of rollouts are dispatched to replicas, and done again when a replica dies.

A replica is a group of one :class:`asyncrl.rollout.worker.RolloutWorker`. Its life, the publication of weights and the
laws of both are those of :mod:`asyncrl.rollout.replica`; this module adds which rollouts are on which replica, and the
token counts of instances, living and dead.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    EnvironmentFailure,
    GroupClosedError,
    InfrastructureError,
    LiveWeightsError,
    RequestAbortedError,
    ResourceError,
    RolloutsLostError,
    VersionLostError,
    WeightError,
    WorkerDiedError,
    WorkerError,
)
from asyncrl.interfaces import KVCachePolicy
from asyncrl.rollout.health import HealthPolicy
from asyncrl.rollout.live_weights import WeightsProof
from asyncrl.rollout.publication import Ended
from asyncrl.rollout.replica import Replica, ReplicaSet, Supervision
from asyncrl.rollout.router import ReplicaLoad, choose
from asyncrl.rollout.work import sum_totals
from asyncrl.rollout.worker import meter_tokens
from asyncrl.weights import WeightManifest

_log = logging.getLogger(__name__)

_LOST_INSTANCE = (WorkerDiedError, GroupClosedError, EngineError, LiveWeightsError)
"""What a call of a worker group raises when the group, or its engine, cannot go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Tokens that the pool's engines delivered for one purpose, those of dead instances included.

    ``in_flight`` are those that running episodes hold, ``lost`` those of episodes that were begun again elsewhere.
    """

    delivered: int
    in_flight: int
    lost: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """Replicas that hold ``version``, whatever is published meanwhile: :meth:`RolloutPool.pinned`."""

    version: int


class _Call(NamedTuple):
    """Rollouts that were sent and not answered: how many rows, and when they were sent, by the loop's clock."""

    rows: int
    sent_s: float


@dataclass(slots=True, eq=False)
class _WorkerGroup:
    """An instance of a replica: a started worker group.

    Attributes:
        meter: file in which its token counts outlive it.
        answered: tokens that its answers account for, by purpose.
        requeued: rollouts of its that are done elsewhere instead.
        reserved: whether it is kept for rollouts under which other replicas died: nothing else is sent to it.
        times: where the time of its episodes went (:class:`asyncrl.rollout.work.EpisodeTimes`), as of its last answer.
    """

    name: str
    group: Any
    weight_version: int
    meter: Path | None = None
    answered: Counter[str] = field(default_factory=Counter)
    calls: dict[DataProtoFuture, _Call] = field(default_factory=dict)
    requeued: set[DataProtoFuture] = field(default_factory=set)
    reserved: bool = False
    times: Mapping[str, float] = field(default_factory=dict[str, float])

    async def close(self) -> None:
        """Do nothing: the pool's owner, which made the group, closes it."""


class WorkerGroupReplica(Replica[_WorkerGroup]):
    """A replica of worker groups; ``start`` makes one and loads the model on it."""

    def __init__(
        self,
        name: str,
        owner: ReplicaSet[WorkerGroupReplica],
        start: Callable[[str], Awaitable[_WorkerGroup]],
        kv_cache: KVCachePolicy,
    ) -> None:
        super().__init__(name, owner)
        self._start_group = start
        self._kv_cache: KVCachePolicy = kv_cache
        self._wrong_tensors = False
        self.proofs: list[WeightsProof] = []
        """Of versions, from all of its ranks, since they were taken."""
        self.pin: Pin | None = None
        """What it is kept for; the rollouts of others pass it by."""
        self.on_state: Callable[[str, str], None] = lambda _name, _state: None
        self.episodes = ""  # where its rollouts were when a slow group made it asked

    def react(self, changed: bool) -> None:
        super().react(changed)
        self.report()

    def report(self) -> None:
        """Report what it does: ``busy`` or ``idle``; ``weights`` while it is fenced, ``restart`` while it is gone."""
        busy = self.instance is not None and self.instance.calls
        state = "weights" if self.health.state == "stale" else "restart"
        self.on_state(self.name, ("busy" if busy else "idle") if self.serves else state)

    def takes(self, pin: Pin | None) -> bool:
        """Return whether rollouts of this pin, or those of none, can be sent to it now."""
        return self.serves and self.pin is pin and self._updates.serves(self.name) and not self.reserved

    def verified(self) -> None:
        super().verified()
        self._changes.notify()  # one that was pinned has served all the time

    @property
    def lasts(self) -> bool:
        """Whether it serves, or may without a new version of the weights."""
        return self.serves or self.health.coming_back or self._updates.updating(self.name)

    @property
    def load(self) -> ReplicaLoad:
        rows = 0 if self.instance is None else sum(call.rows for call in self.instance.calls.values())
        return ReplicaLoad(name=self.name, work=rows, serving=self.serves)

    @property
    def reserved(self) -> bool:
        return self.instance is not None and self.instance.reserved

    async def make(self) -> _WorkerGroup:
        return await self._start_group(self.name)

    def lost(self, instance: _WorkerGroup, error: Exception) -> None:
        """Mark the instance dead, if it still runs: a call of it found it so.

        Where one instance after another serves other tensors than it was sent, no further one is made.
        """
        if self.instance is instance:
            _log.warning("replica %s is lost: %s", self.name, error)
            wrong = isinstance(error, LiveWeightsError)
            hopeless, self._wrong_tensors = wrong and self._wrong_tensors, wrong
            self.mark_dead(self.health.incarnation, str(error).partition("\n")[0], hopeless=hopeless)

    def requeue(self, reason: str, *, died: bool = False) -> None:
        self.pin = None  # it is gone or fenced, and with it the version
        if self.instance is not None:
            for call in self.instance.calls:
                self.instance.requeued.add(call)
                call.cancel()

    async def prepare_weights(self, manifest: WeightManifest) -> None:
        instance = self.running()
        await self._update(instance, instance.group.prepare_weights(manifest))

    async def commit_weights(self, version: int) -> None:
        instance = self.running()
        answers = await self._update(instance, instance.group.commit_weights(version, self._kv_cache))
        self.proofs += [each for each in answers or () if isinstance(each, WeightsProof)]
        self._wrong_tensors = False

    async def _update(self, instance: _WorkerGroup, call: Any) -> Any:
        try:
            return await call
        except _LOST_INSTANCE as error:
            self.lost(instance, error)
            raise
        except asyncio.CancelledError:
            call.cancel()
            raise

    def longest_call_s(self, now_s: float) -> float:
        calls = {} if self.instance is None else self.instance.calls
        return max((now_s - call.sent_s for call in calls.values()), default=0.0)

    def explain(self, now_s: float) -> str:
        state = "serves" if self.serves else "is dead" if self.health.state == "dead" else "does not serve"
        state += ", reserved for rollouts under which other replicas died" if self.reserved else ""
        state += f", pinned to version {self.pin.version}" if self.pin is not None else ""
        if self.serves and not self._updates.serves(self.name):
            state = "was pinned, and waits for the current weights"
        if not self.serves and self.health.coming_back:
            state += " and is being made again"
        held = self._updates.held(self.name)
        state += f", holds version {held}" if held is not None else ""
        calls = {} if self.instance is None else self.instance.calls
        doing = f"{len(calls)} groups on it, the longest for {self.longest_call_s(now_s):.1f} s" if calls else "idle"
        doing += f" ({self.episodes})" if calls and self.episodes else ""
        return f"replica {self.name} {state}, {doing}"


class _Requeued(Exception):
    """The rollouts have to be done on another replica, through no fault of theirs."""


class RolloutPool:
    """Replicas of :class:`asyncrl.rollout.worker.RolloutWorker` that are used as one. Used from one event loop.

    Args:
        replicas: worker groups of one rank by name. Their maker closes them, not the pool.
        deadline_s: seconds each replica has for each phase of a weight update, past which it is fenced, and to sleep or
            to wake, past which it is lost.
        rollout_deadline_s: seconds a call of :meth:`rollout` may take, all attempts together; past it, it fails.
        revive: makes the worker group of a dead replica again, ready for its start; without it, a dead replica stays
            dead.
        attempts: replicas that may die or fail under the same rollouts before these fail, since they may be the cause.
            The last replica has no other work at that time, so that no other rollouts can be mistaken for the cause.
        restarts: consecutive starts that may fail before a replica is given up.
        restart_s: seconds before the first of them; the delay doubles after each that fails.

    Raises:
        ConfigError: a replica has several ranks.
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
        for name, group in replicas.items():
            if group.world_size != 1:
                raise ConfigError(
                    f"replica {name!r} of the rollout pool has {group.world_size} ranks; a replica has one",
                    remedy="make a worker group of world_size = 1 for each replica",
                )
        self._first_groups = dict(replicas)
        self._kv_cache: KVCachePolicy = kv_cache
        self._deadline_s = deadline_s
        self._rollout_deadline_s = rollout_deadline_s
        self._revive = revive
        self._attempts = attempts
        supervision = Supervision(
            health=HealthPolicy(
                weight_failures=None,  # a fenced replica is sent every later version
                restart_s=restart_s,
                max_restart_s=max(restart_s, 60.0),
                max_failed_starts=restarts if revive is not None else 0,
            ),
            start_s=None,
        )
        self._set: ReplicaSet[WorkerGroupReplica] = ReplicaSet("rollout pool", supervision, deadline_s=deadline_s)
        self._replicas = self._set.replicas
        self._instances: list[_WorkerGroup] = []
        """Every instance so far, dead ones included: their tokens count."""
        self._model_path, self._first_version = "", 0
        self._on_turns: Callable[[bytes], None] | None = None
        self._on_state: Callable[[str, str], None] = lambda _name, _state: None
        self._awake = asyncio.Event()
        self._awake.set()
        self._starts = 0
        """Starts of worker groups that are under way."""

    @property
    def weight_version(self) -> int:
        """Version that every serving replica holds, or is just getting."""
        return self._set.updates.version

    @property
    def needed_versions(self) -> frozenset[int]:
        return self._set.updates.needed_versions

    @property
    def serving(self) -> list[str]:
        """Names of the replicas that serve."""
        return [name for name, replica in self._replicas.items() if replica.serves]

    # ------------------------------------------------------------------------------------------------------- life

    async def start(self, model_path: str, *, weight_version: int) -> None:
        """Load the model on every replica, all at once, and serve it as ``weight_version``.

        Raises:
            Exception: what the first replica that cannot start failed with. The pool is closed then.
        """
        self._model_path, self._first_version = model_path, weight_version
        await self._set.open(weight_version=weight_version)
        for name in self._first_groups:
            replica = WorkerGroupReplica(name, self._set, self._start_group, self._kv_cache)
            replica.on_state = self._on_state
            self._set.add(replica)

        async def settled(replica: WorkerGroupReplica) -> None:
            await replica.settled.wait()
            self._set.open_tasks()
            if replica.failure is not None:
                raise replica.failure

        try:
            await asyncio.gather(*(settled(replica) for replica in list(self._replicas.values())))
        except BaseException:
            await self._set.close()
            raise

    def on_turns(self, listener: Callable[[bytes], None]) -> None:
        """Give ``listener`` turns as they end (:mod:`asyncrl.rollout.turns`). Before :meth:`start`."""
        self._on_turns = listener

    def on_state(self, listener: Callable[[str, str], None]) -> None:
        """Give ``listener`` names of replicas with :meth:`WorkerGroupReplica.report`'s states. Before :meth:`start`."""
        self._on_state = listener

    async def aclose(self) -> None:
        """Stop the replicas' supervision and weight updates; pending calls fail. Idempotent.

        Raises:
            ExceptionGroup: what broke the pool before.
        """
        await self._set.close()

    async def _start_group(self, name: str) -> _WorkerGroup:
        """Return the first worker group of a replica, or the next one, with the model loaded."""
        while not self._awake.is_set():
            await self._awake.wait()
        self._starts += 1
        try:
            group = self._first_groups.pop(name, None)
            if group is None:
                assert self._revive is not None, "without it, a replica is given up when its first group is dead"
                group = await self._revive(name)
            await group.start(self._model_path, self._first_version)
            meter = (await group.engine_statistics()).get("meter")
            instance = _WorkerGroup(name, group, self._first_version, Path(meter) if meter else None)
            self._instances.append(instance)
        finally:
            self._starts -= 1
            self._set.changes.notify()
        if self._on_turns is not None:
            self._set.spawn(self._listen(group, self._on_turns), name=f"turns of {name}")
        return instance

    async def _listen(self, group: Any, listener: Callable[[bytes], None]) -> None:
        while True:
            call = group.turns()
            try:
                content: bytes = await call
            except (WorkerDiedError, GroupClosedError):
                return  # the rollouts on it find it dead, and count that
            except asyncio.CancelledError:
                call.cancel()
                raise
            listener(content)

    # ------------------------------------------------------------------------------------------------------ sleep

    async def ready_to_sleep(self) -> None:
        """Wait until no replica is being started, or takes weights that it lacks; none is started until :meth:`wake`.

        A wait that is cancelled has changed nothing.
        """
        was_awake = self._awake.is_set()
        self._awake.clear()
        try:
            while self._starts and not self._set.closing:
                await self._set.changes.wait()
            await self._set.updates.answered()  # those of one that has just started are sent by now
        except asyncio.CancelledError:
            if was_awake:
                self._awake.set()
            raise

    async def sleep(self) -> None:
        """Free the memory of every engine until :meth:`wake`, once all are :meth:`ready_to_sleep`. Idempotent.

        Rollouts lose nothing and go on afterwards; those that are sent meanwhile wait. A replica that dies is started
        again after :meth:`wake`. One that cannot sleep, or does not in time, is lost, and its group is closed by then.
        """
        await self.ready_to_sleep()
        await self._everywhere("sleep")

    async def wake(self) -> None:
        """Go on with what was under way at :meth:`sleep`. Idempotent."""
        await self._everywhere("wake")
        self._awake.set()

    async def _everywhere(self, order: Literal["sleep", "wake"]) -> None:
        async def send(instance: _WorkerGroup) -> None:
            try:
                await getattr(instance.group, order)().deadline(self._deadline_s)
            except Exception as error:  # noqa: BLE001 - whatever it is, it costs this replica, and no other
                for replica in self._replicas.values():
                    replica.lost(instance, error)
                with suppress(InfrastructureError, WorkerError):  # it is freed all the same
                    await instance.group.aclose()

        # Of every instance: one that has just started may not be its replica's yet. Dead ones answer at once.
        await asyncio.gather(*(send(instance) for instance in tuple(self._instances)))

    # ------------------------------------------------------------------------------------------------------- pins

    @asynccontextmanager
    async def pinned(self, replicas: int) -> AsyncIterator[Pin]:
        """Keep so many replicas at the current version, for rollouts with this pin alone, while the block lasts.

        Waits for replicas that serve, the least busy first; one at least is left to the others. Publications pass the
        pinned ones by, which hold the current version again some time after the block.

        Raises:
            ResourceError: there are too few replicas.
            EngineClosedError: the pool is closed.
        """
        while not (taken := self._free(replicas)):
            await self._changed()
        pin = Pin(self.weight_version)
        self._pin(pin, taken)
        try:
            yield pin
        finally:
            for replica in [each for each in self._replicas.values() if each.pin is pin]:
                replica.pin = None
                self._set.updates.unpin(replica.name)
            self._set.changes.notify()

    def _free(self, count: int) -> list[WorkerGroupReplica]:
        """Return ``count`` replicas that can be pinned, with one more left; none if there are too few now.

        Raises:
            ResourceError: there will always be too few.
        """
        self._set.open_tasks()
        replicas = self._replicas.values()
        lasting = [each for each in replicas if each.lasts]
        if len(lasting) <= count:
            gone = "".join(f"; {each.name}: {each.health.reason}" for each in replicas if each not in lasting)
            raise ResourceError(
                f"{count} replicas cannot be pinned and one be left for the others: {len(lasting)} serve or are coming "
                f"back{gone}"
            )
        free = [each for each in replicas if each.takes(None) and self._set.updates.can_pin(each.name)]
        free.sort(key=lambda each: (each.load.work, each.name))
        return free[:count] if len(free) > count else []

    def _pin(self, pin: Pin, replicas: Sequence[WorkerGroupReplica]) -> None:
        for replica in replicas:
            replica.pin = pin
        self._set.updates.pin(*(replica.name for replica in replicas))

    def _replace(self, pin: Pin) -> bool:
        """Pin another replica in place of those that are gone; return False if none can be pinned now.

        Raises:
            VersionLostError: newer weights have replaced the version, or no replica will ever be free for it.
        """
        if pin.version != self.weight_version:
            raise VersionLostError(
                f"version {pin.version} is lost: the replicas that were pinned to it are gone, and the others serve "
                f"version {self.weight_version}"
            )
        try:
            free = self._free(1)
        except ResourceError as error:
            raise VersionLostError(f"version {pin.version} is lost: {error}") from error
        self._pin(pin, free)
        return bool(free)

    async def _changed(self) -> None:
        """Wait for the end of the running publication, or else for a replica that serves, or does so no more."""
        if self._set.updates.publishing:
            await self._set.updates.settled()
        else:
            await self._set.changes.wait()

    # --------------------------------------------------------------------------------------------------- rollouts

    async def rollout(
        self,
        prompts: DataProto,
        *,
        again: Callable[[], Awaitable[DataProto]] | None = None,
        pin: Pin | None = None,
    ) -> DataProtoFuture:
        """Roll the rows out on the replica that has least to do; return a future of them when they are complete.

        Rollouts of a replica that dies or is fenced meanwhile are done again on another, with the prompts that
        ``again`` gives for each further attempt, if it is given. Those with a ``pin`` use its replicas alone.

        Raises:
            ResourceError: no replica serves, and none is coming back.
            VersionLostError: no replica has the version of the pin any more.
            EngineClosedError: the pool is closed.
            RolloutsLostError: ``attempts`` replicas died or failed under these rows.
            EnvironmentFailure: as :meth:`asyncrl.rollout.worker.RolloutWorker.rollout`.
            DeadlineError: they were not complete in time.
        """
        failures = 0
        attempt = 0
        deadline_s = self._rollout_deadline_s
        ends_s = None if deadline_s is None else asyncio.get_running_loop().time() + deadline_s
        while True:
            if attempt and again is not None:
                prompts = await again()
            attempt += 1
            alone = 0 < failures == self._attempts - 1
            replica, instance = await self._place(pin, alone=alone, ends_s=ends_s)
            try:
                return await self._send(replica, instance, prompts, ends_s=ends_s)
            except DeadlineError as error:
                message = f"rollouts were not complete after {deadline_s:g} s, in attempt {attempt}: {error}"
                raise DeadlineError(message, waiting_for=error.waiting_for, timeout_s=deadline_s or 0.0) from error
            except _Requeued:
                self._set.open_tasks()  # raises if it is the pool that closes
            except RequestAbortedError:  # an EngineError, but no sign of a dead engine
                raise
            except _LOST_INSTANCE as error:
                replica.lost(instance, error)
                failures += 1
                if self._set.closing:
                    raise
                if failures >= self._attempts:
                    reason = f"{failures} replicas died or failed under the same rollouts; the last one: {error}"
                    _log.warning("rollouts are given up: %s", reason)
                    raise RolloutsLostError(reason) from error
            finally:
                if instance.reserved:
                    instance.reserved = not alone  # other rollouts wait until it has nothing to do
                    self._set.changes.notify()

    async def _send(
        self, replica: WorkerGroupReplica, instance: _WorkerGroup, prompts: DataProto, *, ends_s: float | None
    ) -> DataProtoFuture:
        """Send the rollouts to one worker group; count the tokens that its answer accounts for."""
        purpose: str = prompts.meta_info["purpose"]
        now_s = asyncio.get_running_loop().time()
        left_s = None if ends_s is None else max(ends_s - now_s, 1e-3)
        if left_s is not None:
            prompts = prompts.with_rows(prompts.columns(), meta_info={**prompts.meta_info, "deadline_s": left_s})
        call: DataProtoFuture = instance.group.rollout(prompts)
        if left_s is not None:
            call.deadline(left_s)
        instance.calls[call] = _Call(len(prompts), now_s)
        replica.report()
        try:
            header = await call.header()
        except (EnvironmentFailure, RequestAbortedError) as error:
            instance.answered[purpose] += error.tokens_generated
            raise
        except (asyncio.CancelledError, concurrent.futures.CancelledError, LiveWeightsError):
            task = asyncio.current_task()
            if call in instance.requeued and not (task is not None and task.cancelling()):
                raise _Requeued from None
            call.cancel()
            raise
        finally:
            del instance.calls[call]
            replica.report()
        meta = header.meta_info
        instance.times = max(instance.times, meta.get("times", {}), key=lambda times: times.get("requests", 0))
        tokens = meta.get("summary", {}).get("tokens", 0) + meta.get("wasted_tokens", 0)
        instance.answered[purpose] += tokens - meta.get("continued", {}).get("tokens", 0)  # sampled by another instance
        return call

    async def _place(
        self, pin: Pin | None, *, alone: bool, ends_s: float | None
    ) -> tuple[WorkerGroupReplica, _WorkerGroup]:
        """Wait for the replica with the fewest rows that takes them, and with ``alone`` until it has none."""
        try:
            async with asyncio.timeout_at(ends_s):
                while True:
                    name = choose(replica.load for replica in self._replicas.values() if replica.takes(pin))
                    if name is not None:
                        replica = self._replicas[name]
                        instance = replica.running()
                        if not alone or await self._reserve(replica, instance):
                            return replica, instance
                        continue
                    self._set.open_tasks()
                    replicas = self._replicas.values()
                    if pin is not None and not any(each.pin is pin for each in replicas):
                        if not self._replace(pin):
                            await self._changed()
                        continue
                    if not any(each.lasts for each in replicas):
                        reasons = "; ".join(f"{each.name}: {each.health.reason}" for each in replicas)
                        raise ResourceError(f"no rollout replica serves: {reasons or 'the pool has none'}")
                    await self._set.changes.wait()
        except TimeoutError:
            raise DeadlineError(
                f"no rollout replica served until the rollouts' {self._rollout_deadline_s:g} s were over",
                waiting_for="a replica",
                timeout_s=self._rollout_deadline_s or 0.0,
            ) from None

    async def _reserve(self, replica: WorkerGroupReplica, instance: _WorkerGroup) -> bool:
        """Wait until the instance has nothing to do, and reserve it; False if it stops serving before."""
        instance.reserved = True
        reserved = False
        try:
            while instance.calls and replica.serves and not self._set.closing:
                await self._set.changes.wait()
            reserved = replica.serves and replica.instance is instance
        finally:
            if not reserved:
                instance.reserved = False
                self._set.changes.notify()
        return reserved

    # ---------------------------------------------------------------------------------------------------- weights

    async def publish(self, manifest: WeightManifest) -> Ended:
        """Bring a version into every serving replica, while they generate; fence those that fail until the next one.

        Raises:
            WeightError: no replica is left that serves, and none is coming back.
            WeightVersionError: the version is not newer than the one served.
            EngineClosedError: the pool is closed, or closes meanwhile.
        """
        ended = await self._set.publish(manifest)
        if not any(replica.lasts for replica in self._replicas.values()):
            reasons = "; ".join(f"{each.name}: {each.health.reason}" for each in self._replicas.values())
            raise WeightError(f"no replica could take weight version {manifest.version}: {reasons}")
        return ended

    def take_proofs(self) -> list[WeightsProof]:
        """Return the proofs of versions on replicas since the last call."""
        taken = [proof for replica in self._replicas.values() for proof in replica.proofs]
        for replica in self._replicas.values():
            replica.proofs.clear()
        return taken

    # ----------------------------------------------------------------------------------------------- observation

    def explain(self) -> tuple[str, ...]:
        """Return one sentence for every replica: whether it serves, what it holds and does, and for how long."""
        now_s = asyncio.get_running_loop().time()
        return tuple(replica.explain(now_s) for replica in self._replicas.values())

    async def token_counts(self, purpose: str = "train") -> TokenCounts:
        """Add up the token meters of instances, living and dead. Exact when nothing is being generated.

        What was lost is what an instance delivered beyond its answers, if calls of it were requeued; no worker can
        know, because an answer may cross the cancellation.
        """
        delivered = in_flight = lost = 0
        answers = dict((await self._engine_statistics()).values())
        living = {replica.instance for replica in self._replicas.values()}  # one may have died after it had answered
        for instance in tuple(self._instances):
            answered = instance.answered[purpose]
            if instance in living and instance in answers:
                counts = answers[instance]
                delivered += counts["delivered"][purpose]
                in_flight += counts["in_flight"][purpose]
                if instance.requeued:
                    lost += counts["delivered"][purpose] - counts["in_flight"][purpose] - answered
                continue
            counted = answered  # all that is known of a dead instance without a file, or with one that lags
            if instance.meter is not None:
                counted = max(counted, await asyncio.to_thread(meter_tokens, instance.meter, purpose))
            delivered += counted
            lost += counted - answered
        return TokenCounts(delivered=delivered, in_flight=in_flight, lost=lost)

    def times(self) -> dict[str, dict[str, float]]:
        """Return by replica where the time of its episodes went (:class:`asyncrl.rollout.work.EpisodeTimes`)."""
        found: dict[str, dict[str, float]] = {}
        for each in self._instances:
            found[each.name] = sum_totals((found.get(each.name, {}), each.times))
        return found

    async def ask_slow(self, *, after_s: float = 10.0) -> None:
        """Ask replicas that have had a group for so long where their rollouts are, for :meth:`explain`."""
        now_s = asyncio.get_running_loop().time()
        slow = [each for each in self._replicas.values() if each.longest_call_s(now_s) > after_s]
        answers = await self._engine_statistics(slow)
        for replica in self._replicas.values():
            _, answer = answers.get(replica.name, (None, {}))
            replica.episodes = answer.get("episodes", "")

    async def statistics(self) -> dict[str, dict[str, Any]]:
        """Return each living replica's :meth:`asyncrl.rollout.worker.RolloutWorker.engine_statistics`, by name."""
        return {name: answer for name, (_, answer) in (await self._engine_statistics()).items()}

    async def _engine_statistics(
        self, replicas: Iterable[WorkerGroupReplica] | None = None
    ) -> dict[str, tuple[_WorkerGroup, dict[str, Any]]]:
        """Return the statistics of living instances; this may find a replica dead."""
        found = {}

        async def ask(replica: WorkerGroupReplica, instance: _WorkerGroup) -> None:
            try:
                found[replica.name] = instance, await instance.group.engine_statistics()
            except _LOST_INSTANCE as error:
                replica.lost(instance, error)

        asked = self._replicas.values() if replicas is None else replicas
        await asyncio.gather(*(ask(each, each.instance) for each in asked if each.instance is not None))
        return found
