"""Engines that are used as one, outlive the death of any of them, and get new weights without stopping.

    async with ReplicaPool({"a": make_engine, "b": make_engine}, transport=transport) as pool:
        async for chunk in pool.generate(request, session="chat-7"):
            ...
        await pool.publish(manifest)

A replica is a :class:`~asyncrl.interfaces.RolloutEngine` made by a factory, so that it can be made again
(:mod:`asyncrl.rollout.replica` has its life). :mod:`asyncrl.rollout.admission` decides which request begins next,
:mod:`asyncrl.rollout.router` on which replica, and :mod:`asyncrl.rollout.dispatcher` carries it out. When a replica
dies, its requests go on elsewhere from the tokens they have: no token is delivered twice, none is left out, and a
seeded request gets the tokens that it would have got.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from types import TracebackType
from typing import Self

from asyncrl.errors import EngineClosedError, ResourceError, WeightError
from asyncrl.interfaces import GenerationChunk, GenerationRequest, PauseMode, RolloutEngine
from asyncrl.rollout.dispatcher import Dispatcher
from asyncrl.rollout.engine_replica import EngineFactory, EngineReplica
from asyncrl.rollout.publication import Ended
from asyncrl.rollout.replica import PoolOptions, PoolStatistics, ReplicaSet, ReplicaStatus, fetch_into
from asyncrl.runtime import shield_until_done
from asyncrl.weights import WeightManifest, WeightTransport


class ReplicaPool:
    """A :class:`~asyncrl.interfaces.TokenGenerator` over named replicas. Used from one event loop.

    ``transport`` is for engines that do not fetch weights themselves; the factories' engines begin with
    ``weight_version``.
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
        self._set: ReplicaSet[EngineReplica] = ReplicaSet(
            "pool",
            self._options.supervision,
            deadline_s=self._options.weights_s,
            max_committing=self._options.max_committing,
            on_close=lambda: self._requests.close(),  # noqa: PLW0108 - they are made with the set
        )
        self._replicas = self._set.replicas
        self._requests = Dispatcher(self._set, self._options)
        self._engines_paused = False
        """Whether every engine shall be paused, those to come included."""

    # ------------------------------------------------------------------------------------------------------- life

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Start every replica, all at once; return when each serves or has failed to start.

        Raises:
            EngineClosedError: the pool was closed meanwhile, or broke.
            Exception: what the first replica failed with, if none serves. The pool is closed then.
        """
        await self._set.open(weight_version=self._first_version)
        try:
            await asyncio.gather(*(self.add(name, factory) for name, factory in self._factories.items()))
            replicas = list(self._replicas.values())
            await asyncio.gather(*(replica.settled.wait() for replica in replicas))
            self._set.open_tasks()
            if replicas and not any(replica.serves for replica in replicas):
                failures = [replica.failure for replica in replicas if replica.failure is not None]
                raise failures[0] if failures else ResourceError("no replica serves")
        except BaseException:
            try:
                await self._set.close()
            except ExceptionGroup as defect:
                raise EngineClosedError(f"the pool broke while it started: {defect}") from defect
            raise

    async def close(self) -> None:
        """End every request and close every engine. Idempotent."""
        await self._set.close()

    # --------------------------------------------------------------------------------------------------- requests

    def generate(
        self, request: GenerationRequest, *, session: str | None = None, tenant: str = ""
    ) -> AsyncIterator[GenerationChunk]:
        """Stream one request from the replica that suits best; its id is unique among the requests that the pool holds.

        Requests of one ``session`` go to one replica where that costs little; tenants share the pool fairly.

        Raises:
            DeadlineError: no replica serves, and none has come back in time.
            EngineError: replica after replica failed at it.
        """
        return self._requests.generate(request, session=session, tenant=tenant)

    async def abort(self, request_id: str) -> bool:
        """End a request with finish reason ``abort``; deliver what it has generated. False if it is unknown."""
        return await self._requests.abort(request_id)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop decoding on every replica. New requests wait until :meth:`resume`.

        ``keep`` freezes requests where they are, ``abort`` ends all that are held, ``drain`` lets those finish that
        have begun; :meth:`resume`, another pause or :meth:`close` meanwhile end that wait, a cancellation does not.
        It needs no reader, but for requests whose replica is lost meanwhile: they go on elsewhere when they are read.
        """
        self._set.open_tasks()
        await shield_until_done(self._pause(mode))

    async def _pause(self, mode: PauseMode) -> None:
        self._requests.pause(mode)
        if mode == "abort":
            await self._requests.abort_all()
        elif mode == "drain":
            await self._pause_engines(False)  # an earlier pause may have frozen what is to finish
            await self._requests.drained()
        if self._requests.paused == mode:
            await self._pause_engines(True)

    async def resume(self) -> None:
        """Go on. Idempotent. A pause meanwhile ends the wait, and stays."""
        self._set.open_tasks()
        self._requests.pause(None)
        await self._pause_engines(False)

    async def _pause_engines(self, paused: bool) -> None:
        """Pause or resume the engines; return when they have reached the state of the newest call.

        An engine that does not obey is given up, and not waited for.
        """
        self._engines_paused = paused
        self._set.changes.notify()
        while any(each.engine is not None and each.paused != self._engines_paused for each in self._replicas.values()):
            await self._set.changes.wait()

    # ---------------------------------------------------------------------------------------------------- weights

    @property
    def weight_version(self) -> int:
        """Version that every serving replica holds, or is just getting."""
        return self._set.updates.version if self._set.opened else self._first_version

    @property
    def needed_versions(self) -> frozenset[int]:
        """Versions whose bytes must stay available: the current one, for replicas that join, and the one under way."""
        return self._set.updates.needed_versions if self._set.opened else frozenset()

    async def publish(self, manifest: WeightManifest) -> Ended:
        """Bring a published version into every replica, in two phases; they go on generating meanwhile.

        One that fails is fenced: its requests go on elsewhere, and it serves again when it holds the current version.
        A version that none can prepare is withdrawn: all serve the current one as before. Where none served,
        ``committed`` is empty, and those that come back have to take the version.
        The bytes have to stay available while :attr:`needed_versions` has the version.

        Raises:
            WeightVersionError: the version is not newer than the one served.
            WeightError: every replica that served failed to take it; or another publication is running.
        """
        ended = await self._set.publish(manifest, tentative=True)
        if ended.fenced and not ended.committed:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in ended.fenced.items())
            raise WeightError(f"no replica could take weight version {manifest.version}: {reasons}")
        return ended

    async def _fetch(self, engine: RolloutEngine, manifest: WeightManifest) -> None:
        await fetch_into(engine, manifest, transport=self._transport)

    # --------------------------------------------------------------------------------------------------- replicas

    async def add(self, name: str, factory: EngineFactory) -> None:
        """Add a replica; return at once. It serves when it holds the current version, verified.

        Raises:
            ResourceError: a replica of that name exists.
        """
        self._set.open_tasks()
        self._set.add(
            EngineReplica(
                name,
                self._set,
                factory,
                fetch=self._fetch,
                kv_cache=self._options.kv_cache,
                pause_engines=lambda: self._engines_paused,
            )
        )

    async def drain(self, name: str, *, deadline_s: float | None = None) -> None:
        """Send the replica nothing more; wait until it is idle. After ``deadline_s`` its requests go on elsewhere.

        If the wait is cancelled, the replica serves again.
        """
        replica = self._set.find(name)
        replica.drains += 1
        try:
            async with asyncio.timeout(deadline_s):
                await replica.idle.wait()
        except TimeoutError:
            replica.requeue(f"replica {name} is drained")
            await replica.idle.wait()
        except asyncio.CancelledError:
            replica.drains -= 1
            self._set.changes.notify()
            raise

    async def remove(self, name: str) -> None:
        """Remove a replica and close its engine; then its name is free, even if this wait is cancelled."""
        await self._set.remove(self._set.find(name))

    # ----------------------------------------------------------------------------------------------- observation

    def replicas(self) -> list[ReplicaStatus]:
        return [replica.status() for replica in self._replicas.values()]

    def statistics(self) -> PoolStatistics:
        requests = self._requests
        replicas = tuple(self.replicas())
        return PoolStatistics(
            weight_version=self.weight_version,
            paused=requests.paused is not None,
            running=requests.running,
            waiting=requests.waiting,
            **asdict(requests.counters),
            restarts=sum(replica.restarts for replica in replicas),
            replicas=replicas,
        )
