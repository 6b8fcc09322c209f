"""The life of a replica, and the set of replicas that a pool keeps: one implementation for both pools.

A *replica* is a name under which instances follow one another. An instance is an engine
(:class:`~asyncrl.rollout.engine_replica.EngineReplica`, behind ``asyncrl serve``) or a group of rollout workers
(:class:`~asyncrl.rollout.pool.WorkerGroupReplica`, the trainer's); what differs between them is behind the abstract
methods of :class:`Replica`.

Who owns what:

- :class:`ReplicaSet` owns every task, the replicas by name, and the publication of weights to them.
- :class:`Replica` owns the instance that runs now, and makes, watches, replaces and closes it.
- :class:`~asyncrl.rollout.health.ReplicaHealth` owns the replica's state and its transitions.
- :class:`~asyncrl.rollout.publication.Publication` owns which replica holds which version of the weights.
- A pool owns the work: which requests or rollouts are on which replica, and where they go on when it requeues them.

What holds:

1. A replica has one instance at a time. The next one is made when the last one is closed.
2. A replica serves only while its instance runs and holds the current version, or the one that it is pinned to,
   verified by that instance.
3. When an instance dies, is fenced or is removed, its work is requeued at once: nothing waits for a dead replica.
4. A dead replica leaves the running publication at once. The next instance joins with the version it was started with
   and serves when it holds the current one.
5. What an instance raises while it is started, probed, updated or closed costs this replica only. Any other exception
   is a defect: it ends the whole set, and every waiting caller gets an :class:`~asyncrl.errors.EngineClosedError`.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

from asyncrl.errors import EngineClosedError, EngineError, InfrastructureError, ResourceError, WeightError
from asyncrl.interfaces import (
    AdapterEngine,
    KVCachePolicy,
    OutOfProcessEngine,
    RolloutEngine,
    RolloutEngineStatistics,
    ZeroCopyEngine,
)
from asyncrl.rollout.health import HealthPolicy, HealthState, ReplicaHealth
from asyncrl.rollout.publication import Ended, WeightUpdates
from asyncrl.runtime import in_thread, shield_until_done
from asyncrl.weights import WeightManifest, WeightTransport, lacking

_log = logging.getLogger(__name__)


async def fetch_into(engine: RolloutEngine, manifest: WeightManifest, *, transport: WeightTransport | None) -> None:
    """Prepare the published version on ``engine``: by itself if it can, else through ``transport``, from a thread.

    Nothing is left to do where the engine holds it: an earlier commit was over when it was given up.

    Raises:
        WeightError: the bytes are missing or not the manifest's, or there is no transport to pull them.
    """
    if engine.weight_version == manifest.version:
        return
    if isinstance(engine, OutOfProcessEngine):
        await engine.fetch_weights(manifest)
        return
    if transport is None:
        raise WeightError(f"version {manifest.version} cannot be fetched: no transport was given")
    if manifest.adapter is not None:
        await _fetch_adapters(engine, manifest, transport)
        return
    pulled = transport.pull(manifest)
    if isinstance(engine, ZeroCopyEngine):
        await engine.prepare_shared_weights(pulled, version=manifest.version)
        return
    with ExitStack() as opened:  # left by the caller that entered it, even if it is cancelled meanwhile
        tensors = await shield_until_done(in_thread(opened.enter_context, pulled))
        try:
            await engine.prepare_weights(tensors, version=manifest.version)
        finally:
            del tensors


async def _fetch_adapters(engine: RolloutEngine, manifest: WeightManifest, transport: WeightTransport) -> None:
    """Prepare the adapters that the engine lacks of those that serve under a version."""
    if not isinstance(engine, AdapterEngine):
        raise WeightError(
            f"version {manifest.version} is an adapter, and {type(engine).__name__} serves none: publish the weights "
            "with the adapter merged in (weights.adapters)"
        )
    with ExitStack() as opened:
        parts = [
            (part, await shield_until_done(in_thread(opened.enter_context, transport.pull(part))))
            for part in lacking(manifest, engine.adapters)
        ]
        try:
            await engine.prepare_adapters(parts, version=manifest.version)
        finally:
            del parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """Deadlines and limits of a replica's instances.

    An instance may take ``start_s`` to start (None for no limit) and ``close_s`` to close before it is abandoned. An
    engine that delivers nothing gets a request for one token every ``probe_every_s``, which may take ``probe_s``.
    """

    health: HealthPolicy = field(default_factory=HealthPolicy)
    start_s: float | None = 600.0
    close_s: float = 15.0
    probe_every_s: float = 10.0
    probe_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """How a pool of engines behaves.

    Attributes:
        max_running: requests on replicas at a time; the others wait, fairly between tenants.
        weights_s: seconds each replica has for each phase of a weight update; past it, it is fenced.
        max_committing: replicas that swap weights at the same time.
        wait_s: how long a request may wait for any replica to serve, while the pool is not paused.
        max_failures: consecutive attempts without one token after which a request fails.
        prefix_tokens: prompts that share so many first tokens prefer the same replica; 0 for none.
        margin: expected tokens that a preferred replica may have beyond the least busy one; for a session at least what
            reading its prompt elsewhere costs.
    """

    max_running: int = 1024
    supervision: Supervision = field(default_factory=Supervision)
    kv_cache: KVCachePolicy = "keep"
    weights_s: float = 300.0
    max_committing: int = 1
    wait_s: float = 120.0
    max_failures: int = 3
    prefix_tokens: int = 64
    margin: float = 2048.0


ReplicaState: TypeAlias = HealthState | Literal["draining"]
"""A state of :mod:`asyncrl.rollout.health`, or ``draining``: it finishes the requests it has and gets no new ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """One replica of engines; ``weight_version`` and ``engine`` are None while it has no engine.

    Attributes:
        serving: whether new requests may go to it.
        expected_tokens: that its requests are expected to need still, prompts included.
        restarts: how often its engine was made again.
        reason: why it does not serve, or what failed last.
    """

    name: str
    state: ReplicaState
    serving: bool
    weight_version: int | None
    requests: int
    expected_tokens: int
    restarts: int
    reason: str
    engine: RolloutEngineStatistics | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatistics:
    """What a pool of engines holds and has done. Counters only grow.

    accepted = running + waiting + finished + aborted + failed + left

    A waiting request is on no replica: queued, or between two. It is finished by a stop or by length, left if its
    reader abandoned it. A migration moves a request to another replica, where it goes on.
    """

    weight_version: int
    paused: bool
    running: int
    waiting: int
    accepted: int
    finished: int
    aborted: int
    failed: int
    left: int
    migrations: int
    tokens: int
    restarts: int
    replicas: tuple[ReplicaStatus, ...]


class Broadcast:
    """Wakes every task that waits for a change; each checks by itself whether it was the one it waits for."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        await self._event.wait()


class Instance(Protocol):
    """An engine or a worker group that was started."""

    @property
    def weight_version(self) -> int: ...

    async def close(self) -> None: ...


_InstanceT = TypeVar("_InstanceT", bound=Instance)


class Replica(ABC, Generic[_InstanceT]):
    """A replica and its instances, one after another; an :class:`~asyncrl.rollout.publication.UpdatableReplica`."""

    def __init__(self, name: str, owner: ReplicaSet[Any]) -> None:
        self.name = name
        self.health = ReplicaHealth(owner.supervision.health)
        self.instance: _InstanceT | None = None
        self.drains = 0
        """Calls that keep new requests away from it."""
        self.failure: Exception | None = None
        """What failed first, if anything did before it served."""
        self.settled = asyncio.Event()
        """Set when the first start has succeeded or failed, or the replica was removed."""
        self._supervision = owner.supervision
        self._updates = owner.updates
        self._changes = owner.changes
        self._died = asyncio.Event()

    # ------------------------------------------------------------------------------ what a kind of replica defines

    @abstractmethod
    async def make(self) -> _InstanceT:
        """Make an instance and start it; close what was made if that fails or is cancelled."""

    @abstractmethod
    async def prepare_weights(self, manifest: WeightManifest) -> None: ...

    @abstractmethod
    async def commit_weights(self, version: int) -> None: ...

    @abstractmethod
    def requeue(self, reason: str, *, died: bool = False) -> None:
        """Requeue the work of this replica."""

    def watchers(self, instance: _InstanceT) -> Sequence[Coroutine[Any, Any, None]]:
        """Return what runs beside the instance, and is cancelled when it dies."""
        del instance
        return ()

    # ----------------------------------------------------------------------------------------------------- events

    @property
    def serves(self) -> bool:
        return self.health.serves and not self.drains and self.instance is not None

    def running(self) -> _InstanceT:
        """Return the instance; raise an :class:`EngineError` if it is gone."""
        if self.instance is None:
            raise EngineError(f"replica {self.name} is gone")
        return self.instance

    def verified(self) -> None:
        """Serve: the instance holds the current version."""
        if self.health.incarnation and not self.health.serves:
            _log.warning("replica %s is back, with weight version %d", self.name, self._updates.version)
        self.react(self.health.verified(self.health.incarnation))
        self.settled.set()

    def fenced(self, reason: str) -> None:
        """Serve nothing until :meth:`verified`: the instance failed to take the current version."""
        self.failure = self.failure or WeightError(reason)
        self.react(self.health.fenced(self.health.incarnation, reason))
        self.requeue(reason)
        self.settled.set()
        self._changes.notify()  # one that never served may not be coming back any more

    def mark_dead(self, incarnation: int, reason: str, *, hopeless: bool = False) -> None:
        """Requeue the work of this incarnation's instance, which is gone, and replace it, unless that is hopeless."""
        self.react(self.health.ended(incarnation, reason, hopeless=hopeless))

    def react(self, changed: bool) -> None:
        """Act on an event of :attr:`health` that changed the state."""
        if not changed:
            return
        if self.health.state == "dead":
            self._stop(f"replica {self.name}: {self.health.reason}", died=True)
            self._died.set()
        self._changes.notify()

    def _stop(self, reason: str, *, died: bool = False) -> None:
        self.requeue(reason, died=died)
        self.instance = None
        self._updates.left(self.name, self.health.reason or "left")
        self._changes.notify()

    # ------------------------------------------------------------------------------------------------------- life

    async def run(self) -> None:
        """Make instances, one after another, until cancelled; close the last one."""
        while not self.health.given_up:
            await asyncio.sleep(self.health.restart_delay_s)
            incarnation = self.health.start()
            self._died.clear()
            instance = await self._start(incarnation)
            if instance is None:
                continue
            try:
                self.instance = instance
                self.health.started(incarnation)
                self._updates.joined(self.name, holds=instance.weight_version)
                await self._watch(instance)
            finally:
                if self.instance is not None:
                    self._stop(f"replica {self.name}: it leaves")
                await self.close(instance)
            if not self.health.given_up:
                delay_s = self.health.restart_delay_s
                _log.warning("replica %s: %s; it is started again in %.3g s", self.name, self.health.reason, delay_s)
        _log.warning("replica %s is given up: %s", self.name, self.health.reason)
        await asyncio.Event().wait()  # until it is removed

    async def _start(self, incarnation: int) -> _InstanceT | None:
        try:
            async with asyncio.timeout(self._supervision.start_s):
                return await self.make()
        except BaseException as error:
            first_line, _, _ = str(error).partition("\n")
            reason = f"it could not be started: {first_line or type(error).__name__}"
            self.mark_dead(incarnation, reason)
            if not isinstance(error, Exception):
                raise
            self.failure = error
            self.settled.set()
            _log.warning("replica %s: %s", self.name, reason, exc_info=not isinstance(error, InfrastructureError))
            return None

    async def _watch(self, instance: _InstanceT) -> None:
        async with asyncio.TaskGroup() as watches:
            watching = [watches.create_task(each, name=f"watching {self.name}") for each in self.watchers(instance)]
            await self._died.wait()
            for watch in watching:
                watch.cancel()

    async def close(self, instance: _InstanceT) -> None:
        await shield_until_done(self._close_in_time(instance))

    async def _close_in_time(self, instance: _InstanceT) -> None:
        """Abandon an instance that does not close in time or cannot: its fault must not cost the others."""
        try:
            async with asyncio.timeout(self._supervision.close_s):
                await instance.close()
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - it costs this instance only, which is gone
            expected = isinstance(error, TimeoutError | InfrastructureError)
            _log.warning(
                "replica %s was not closed: %s", self.name, str(error) or type(error).__name__, exc_info=not expected
            )


_ReplicaT = TypeVar("_ReplicaT", bound=Replica[Any])


class _Closed(Exception):
    """Ends the tasks of a set."""


class ReplicaSet(Generic[_ReplicaT]):
    """Keeps replicas running and publishes weights to them. Used from one event loop.

    ``label`` names the pool in error messages; ``deadline_s`` and ``max_committing`` are those of
    :class:`WeightUpdates`; ``on_close`` is called when the set begins to close, or breaks, perhaps more than once.
    """

    def __init__(
        self,
        label: str,
        supervision: Supervision,
        *,
        deadline_s: float,
        max_committing: int | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.replicas: dict[str, _ReplicaT] = {}
        self.supervision = supervision
        self.changes = Broadcast()
        """Notified when a replica may serve now, or may not any more."""
        self.failure: Exception | None = None
        """What broke the set."""
        self._label = label
        self._deadline_s = deadline_s
        self._max_committing = max_committing
        self._on_close = on_close
        self._closing = asyncio.Event()
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._updates: WeightUpdates | None = None
        self._owner: asyncio.Task[None] | None = None

    @property
    def opened(self) -> bool:
        """Whether :meth:`open` was called, even if the set is closed by now."""
        return self._updates is not None

    @property
    def closing(self) -> bool:
        return self._closing.is_set()

    @property
    def updates(self) -> WeightUpdates:
        """What publishes weights; its versions can be read even when the set is closed."""
        if self._updates is None:
            raise EngineError(f"the {self._label} has not been started: call start() first")
        return self._updates

    def open_tasks(self) -> asyncio.TaskGroup:
        """Return the owner of every task.

        Raises:
            EngineClosedError: the set is closed or broken.
            EngineError: it was not opened.
        """
        if self.closing:
            state = "is closed" if self.failure is None else f"failed: {self.failure}"
            raise EngineClosedError(f"the {self._label} {state}") from self.failure
        if self._tasks is None:
            raise EngineError(f"the {self._label} has not been started: call start() first")
        return self._tasks

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """Start a task that ends with the set; raise as :meth:`open_tasks`, also while the set is breaking."""
        try:
            return self.open_tasks().create_task(work, name=name)
        except (RuntimeError, EngineError) as error:
            work.close()
            if isinstance(error, EngineError):
                raise
            raise EngineClosedError(f"the {self._label} is ending") from error

    async def open(self, *, weight_version: int) -> None:
        """Begin, without replicas; they will start with ``weight_version``."""
        if self._owner is not None:
            raise EngineError(f"the {self._label} was started before")
        opened = asyncio.Event()
        self._owner = asyncio.create_task(self._run(opened, weight_version), name=self._label)
        await opened.wait()

    async def close(self) -> None:
        """End every task and close every instance. Idempotent.

        Raises:
            ExceptionGroup: what broke the set.
        """
        self._closing.set()
        if self._owner is not None:
            await asyncio.wait([self._owner])
        if self.failure is not None:
            raise self.failure

    async def _run(self, opened: asyncio.Event, weight_version: int) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                self._updates = WeightUpdates(
                    self.replicas,
                    version=weight_version,
                    tasks=tasks,
                    deadline_s=self._deadline_s,
                    max_committing=self._max_committing,
                )
                opened.set()
                await self._closing.wait()
                self._updates.close()
                self._on_close()
                for life in self._lives.values():
                    life.cancel()
                if self._lives:
                    await asyncio.wait(self._lives.values())
                raise _Closed
        except* _Closed:
            pass
        except* Exception as failure:  # noqa: BLE001 - kept for every caller
            self.failure = failure
            _log.exception("the %s ended", self._label)
        finally:
            self._closing.set()
            opened.set()
            self._on_close()
            self.changes.notify()

    def add(self, replica: _ReplicaT) -> None:
        """Run the replica; return at once.

        Raises:
            ResourceError: a replica of that name exists.
        """
        if replica.name in self.replicas:
            raise ResourceError(f"replica {replica.name} is there already; remove it first")
        life = self.spawn(replica.run(), name=f"replica {replica.name}")
        self.replicas[replica.name] = replica
        self._lives[replica.name] = life
        life.add_done_callback(lambda _: self._ended(replica))

    async def remove(self, replica: _ReplicaT) -> None:
        """Take a replica out and close its instance, to the end even when this call is cancelled."""
        replica.drains += 1
        replica.requeue(f"replica {replica.name} is removed")
        life = self._lives[replica.name]
        life.cancel()
        await asyncio.wait([life])

    def _ended(self, replica: _ReplicaT) -> None:
        """Close the set if a defect has ended the replica, forget the replica if it was removed."""
        replica.settled.set()
        if not self._lives[replica.name].cancelled():
            self._closing.set()
        if not self.closing:  # the statistics of a closed set still have its replicas
            del self.replicas[replica.name], self._lives[replica.name]

    def find(self, name: str) -> _ReplicaT:
        """Return the replica of that name; raise a ResourceError if there is none."""
        self.open_tasks()
        try:
            return self.replicas[name]
        except KeyError:
            raise ResourceError(f"no replica {name}; there are {', '.join(self.replicas) or 'none'}") from None

    async def publish(self, manifest: WeightManifest, *, tentative: bool = False) -> Ended:
        """Publish as :meth:`WeightUpdates.publish`; the error of a set that breaks meanwhile has the reason."""
        self.open_tasks()
        try:
            return await self.updates.publish(manifest, tentative=tentative)
        except EngineClosedError:
            assert self._owner is not None, "it publishes once it is opened"
            await asyncio.wait([self._owner])  # its end may have a cause
            self.open_tasks()  # raises
            raise
