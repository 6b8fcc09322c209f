"""Engines that are asked as one, go on when one of them dies, and get new weights without stopping.

    async with ReplicaPool({"a": make_engine, "b": make_engine}, transport=transport) as pool:
        async for chunk in pool.generate(request, session="chat-7"):
            ...
        await pool.publish(manifest)

A replica is a :class:`~asyncrl.interfaces.RolloutEngine` made by a factory, so that it can be made again. Who may
begin is decided in :mod:`asyncrl.rollout.admission`, where in :mod:`asyncrl.rollout.routing`, who serves in
:mod:`asyncrl.rollout.replica_health`, who holds which weights in :mod:`asyncrl.weights.publication`; here the decisions
are carried out. When a replica dies, its requests go on elsewhere from the tokens they have: nothing is delivered
twice, nothing is left out, and a seeded request says what it would have said.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Self

from asyncrl.errors import EngineClosedError, EngineError, ResourceError, WeightError
from asyncrl.interfaces import GenerationChunk, GenerationRequest, PauseMode, WeightTransport
from asyncrl.rollout.dispatcher import Dispatcher
from asyncrl.rollout.pool_options import PoolOptions
from asyncrl.rollout.pool_status import PoolStatistics, ReplicaStatus
from asyncrl.rollout.replica import EngineFactory, Replica
from asyncrl.rollout.weight_fetch import fetch_into
from asyncrl.rollout.weight_updates import WeightUpdates
from asyncrl.weights.manifest import WeightManifest
from asyncrl.weights.publication import Ended

__all__ = ["EngineFactory", "PoolOptions", "ReplicaPool"]


class _Closed(Exception):
    """Ends the pool's tasks."""


class ReplicaPool:
    """A :class:`~asyncrl.interfaces.TokenGenerator` over named replicas. Used from one event loop.

    Args:
        replicas: factories of engines, by name.
        transport: where weights are pulled from for engines that do not fetch them themselves.
        weight_version: version that the factories' engines begin with.
        options: see :class:`PoolOptions`.
    """

    def __init__(
        self,
        replicas: Mapping[str, EngineFactory],
        *,
        transport: WeightTransport | None = None,
        weight_version: int = 0,
        options: PoolOptions | None = None,
    ) -> None:
        self._factories = dict(replicas)
        self._transport = transport
        self._first_version = weight_version
        self._options = options or PoolOptions()
        self._replicas: dict[str, Replica] = {}
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._requests = Dispatcher(self._replicas, self._options)
        self._asked: PauseMode | None = None
        self._stopped = False
        self._tasks: asyncio.TaskGroup | None = None
        self._updates: WeightUpdates | None = None
        self._life: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    # ------------------------------------------------------------------------------------------------------- life

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Start every replica, all at once; returns when each serves or has failed to start.

        Raises:
            EngineClosedError: the pool was closed meanwhile, or broke.
            Exception: what the first replica failed with, if none serves. The pool is closed then.
        """
        if self._life is not None:
            raise EngineError("the pool was started before")
        opened = asyncio.Event()
        self._life = asyncio.create_task(self._run(opened), name="replica pool")
        await opened.wait()
        try:
            await asyncio.gather(*(self.add(name, factory) for name, factory in self._factories.items()))
            replicas = list(self._replicas.values())
            await asyncio.gather(*(replica.settled.wait() for replica in replicas))
            self._running()
            if replicas and not any(replica.serves for replica in replicas):
                failures = [replica.failure for replica in replicas if replica.failure is not None]
                raise failures[0] if failures else ResourceError("no replica serves")
        except BaseException:
            if (defect := await self._finish()) is not None:
                raise EngineClosedError(f"the pool broke while it started: {defect}") from defect
            raise

    async def close(self) -> None:
        """End what runs, close every engine. Idempotent."""
        if (defect := await self._finish()) is not None:
            raise defect

    async def _finish(self) -> BaseException | None:
        """Close; returns what broke the pool."""
        self._closing.set()
        if self._life is None:
            return None
        await asyncio.wait([self._life])
        return None if self._life.cancelled() else self._life.exception()

    async def _run(self, opened: asyncio.Event) -> None:
        """Own every task of the pool. The first one to fail, which is a defect, ends all of them."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                self._updates = WeightUpdates(
                    version=self._first_version,
                    prepare=self._prepare,
                    commit=self._commit,
                    serve=lambda name, _version: self._replicas[name].verified(),
                    fence=lambda name, reason: self._replicas[name].fenced(reason),
                    tasks=tasks,
                    deadline_s=self._options.weights_s,
                    max_away=self._options.max_away,
                )
                self._requests.open(tasks)
                opened.set()
                await self._closing.wait()
                self._requests.close()
                for life in self._lives.values():
                    life.cancel()
                if self._lives:
                    await asyncio.wait(self._lives.values())
                raise _Closed
        except* _Closed:
            pass
        finally:
            self._closing.set()
            opened.set()
            self._requests.close()

    def _running(self) -> tuple[asyncio.TaskGroup, WeightUpdates]:
        if self._closing.is_set():
            raise EngineClosedError("the pool is closed")
        if self._tasks is None or self._updates is None:
            raise EngineError("the pool has not been started: await pool.start() first")
        return self._tasks, self._updates

    # --------------------------------------------------------------------------------------------------- requests

    def generate(
        self, request: GenerationRequest, *, session: str | None = None, tenant: str = ""
    ) -> AsyncIterator[GenerationChunk]:
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
        return self._requests.generate(request, session=session, tenant=tenant)

    async def abort(self, request_id: str) -> bool:
        """End a request with finish reason ``abort``; what it has generated is delivered. False if it is unknown."""
        return await self._requests.abort(request_id)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop decoding on every replica. New requests wait until :meth:`resume`.

        ``keep`` freezes requests where they are, ``abort`` ends all that are held, ``drain`` lets those finish that
        have begun; :meth:`resume`, another pause or :meth:`close` meanwhile end that wait.
        """
        self._running()
        self._asked = mode
        self._requests.pause(mode)
        if mode == "abort":
            await self._requests.abort_all()
        elif mode == "drain":
            await self._order(pause=False)  # an earlier pause may have frozen what is to finish
            await self._requests.drained()
        if self._asked == mode:
            await self._order(pause=True)

    async def resume(self) -> None:
        """Go on. Idempotent. A pause meanwhile ends the wait, and stays."""
        self._running()
        self._asked = None
        await self._order(pause=False)
        if self._asked is None:
            self._requests.pause(None)

    async def _order(self, *, pause: bool) -> None:
        """Have every engine stop or go on, also those that join later; returns when they do as they are told by now."""
        self._stopped = pause
        for replica in self._replicas.values():
            replica.order(pause=pause)
        await asyncio.gather(*(replica.obeyed() for replica in self._replicas.values()))

    # ---------------------------------------------------------------------------------------------------- weights

    @property
    def weight_version(self) -> int:
        """Version that every serving replica holds, or is just getting."""
        return self._first_version if self._updates is None else self._updates.version

    @property
    def needed_versions(self) -> frozenset[int]:
        """Versions whose bytes must stay available: the current one, for replicas that join, and the one under way."""
        return frozenset() if self._updates is None else self._updates.needed_versions

    async def publish(self, manifest: WeightManifest) -> Ended:
        """Bring a published version into every replica, in two phases; they go on generating meanwhile.

        Every replica fetches and verifies it before the first one samples from it. One that fails is fenced: its
        requests go on elsewhere, and it serves again when it holds the current version. The bytes have to stay
        available for as long as :attr:`needed_versions` says.

        Raises:
            WeightVersionError: the version is not newer than the one served.
            WeightError: every replica that served failed to take it, or another publication is running.
        """
        _, updates = self._running()
        ended = await updates.publish(manifest)
        if ended.fenced and not ended.committed:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in ended.fenced.items())
            raise WeightError(f"no replica could take weight version {manifest.version}: {reasons}")
        return ended

    async def _prepare(self, name: str, manifest: WeightManifest) -> None:
        replica = self._replicas[name]
        if replica.engine is None:
            raise EngineError("it is gone")
        number = replica.health.engine
        replica.health.lease(number)
        try:
            await fetch_into(replica.engine, manifest, transport=self._transport)
        finally:
            replica.health.lease_over(number)

    async def _commit(self, name: str, version: int) -> None:
        replica = self._replicas[name]
        if replica.engine is None:
            raise EngineError("it is gone")
        number = replica.health.engine
        replica.health.lease(number)
        try:
            await replica.engine.commit_weights(version, kv_cache=self._options.kv_cache)
        finally:
            replica.health.lease_over(number)
        if replica.engine is None or replica.engine.weight_version != version:
            raise WeightError(f"it says that it committed version {version}, and does not hold it")
        self._requests.tell()  # requests that have tokens of this version may go there now

    # --------------------------------------------------------------------------------------------------- replicas

    async def add(self, name: str, factory: EngineFactory) -> None:
        """Let a replica join. Returns at once; it serves when it holds the current version, verified.

        Raises:
            ResourceError: a replica of that name is there.
        """
        tasks, updates = self._running()
        if name in self._replicas:
            raise ResourceError(f"replica {name} is there already; remove it first")
        replica = self._replicas[name] = Replica(
            name,
            factory,
            supervision=self._options.supervision,
            joined=lambda name, version: updates.joined(name, holds=version),
            left=updates.left,
            retry=updates.retry,
            changed=self._requests.tell,
        )
        replica.paused = self._stopped
        life = self._lives[name] = tasks.create_task(replica.live(), name=f"replica {name}")
        life.add_done_callback(lambda _: self._left(replica))

    async def drain(self, name: str, *, deadline_s: float | None = None) -> None:
        """Send the replica nothing more, and wait until it has finished what it has.

        What it has not finished after ``deadline_s`` goes on elsewhere.
        """
        replica = self._known(name)
        replica.draining = True
        try:
            async with asyncio.timeout(deadline_s):
                await replica.idle.wait()
        except TimeoutError:
            replica.take_back(f"replica {name} is drained")
            await replica.idle.wait()

    async def remove(self, name: str) -> None:
        """Take a replica out and close its engine; its requests go on elsewhere.

        Its name is free when that is done, whether or not somebody still waits for it.
        """
        replica = self._known(name)
        replica.draining = True
        replica.take_back(f"replica {name} is removed")
        life = self._lives[name]
        life.cancel()
        await asyncio.wait([life])

    def _left(self, replica: Replica) -> None:
        """Its life is over: it was removed, the pool is closing, or a defect ends the pool."""
        replica.settled.set()
        if not self._lives[replica.name].cancelled():
            self._closing.set()
        if not self._closing.is_set():  # a closed pool still tells of those it had
            del self._replicas[replica.name], self._lives[replica.name]

    def _known(self, name: str) -> Replica:
        self._running()
        try:
            return self._replicas[name]
        except KeyError:
            raise ResourceError(f"no replica {name}; there are {', '.join(self._replicas) or 'none'}") from None

    # ----------------------------------------------------------------------------------------------- observation

    def replicas(self) -> list[ReplicaStatus]:
        """Every replica, in the order in which they joined."""
        return [replica.status() for replica in self._replicas.values()]

    def statistics(self) -> PoolStatistics:
        """What the pool holds and has done."""
        requests = self._requests
        counters = requests.counters
        replicas = tuple(self.replicas())
        return PoolStatistics(
            weight_version=self.weight_version,
            paused=requests.paused is not None,
            running=requests.running,
            waiting=requests.waiting,
            accepted=counters.accepted,
            finished=counters.finished,
            aborted=counters.aborted,
            failed=counters.failed,
            left=counters.left,
            refused=counters.refused,
            migrations=counters.migrations,
            tokens=counters.tokens,
            restarts=sum(replica.restarts for replica in replicas),
            replicas=replicas,
        )
