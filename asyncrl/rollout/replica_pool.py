"""Engines that are asked as one, go on when one of them dies, and get new weights without stopping.

    async with ReplicaPool({"a": make_engine, "b": make_engine}, transport=transport) as pool:
        async for chunk in pool.generate(request, session="chat-7"):
            ...
        await pool.publish(manifest)

A replica is a :class:`~asyncrl.interfaces.RolloutEngine` made by a factory, so that it can be made again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Self, TypeAlias, cast

from asyncrl.errors import EngineClosedError, ResourceError, WeightError
from asyncrl.interfaces import (
    GenerationChunk,
    GenerationRequest,
    KVCachePolicy,
    PauseMode,
    RolloutEngine,
    WeightTransport,
)
from asyncrl.rollout.pool_status import PoolStatistics, ReplicaStatus
from asyncrl.rollout.routing import ReplicaLoad, least_expected_work
from asyncrl.weights.manifest import WeightManifest
from asyncrl.weights.publication import Ended

__all__ = ["EngineFactory", "ReplicaPool"]

EngineFactory: TypeAlias = Callable[[], RolloutEngine]


class _Replica:
    def __init__(self, name: str, factory: EngineFactory) -> None:
        self.name = name
        self.factory = factory
        self.engine = factory()
        self.requests: set[str] = set()
        self.draining = False
        self.idle = asyncio.Event()


class ReplicaPool:
    """A :class:`~asyncrl.interfaces.TokenGenerator` over named replicas. Used from one event loop.

    Args:
        replicas: factories of engines, by name.
        transport: where weights are pulled from for engines that do not fetch them themselves.
        kv_cache: what running requests do with keys and values of older weights when new ones are committed.
    """

    def __init__(
        self,
        replicas: Mapping[str, EngineFactory],
        *,
        transport: WeightTransport | None = None,
        kv_cache: KVCachePolicy = "keep",
    ) -> None:
        self._factories = dict(replicas)
        self._transport = transport
        self._kv_cache: KVCachePolicy = kv_cache
        self._replicas: dict[str, _Replica] = {}
        self._version = 0
        self._paused = False
        self._accepted = self._finished = self._aborted = self._failed = self._left = self._tokens = 0
        self._closed = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def weight_version(self) -> int:
        """Version that the pool serves."""
        return self._version

    async def start(self) -> None:
        """Start every replica; returns when requests are served."""
        for name, factory in self._factories.items():
            self._replicas[name] = _Replica(name, factory)
        await asyncio.gather(*(replica.engine.start() for replica in self._replicas.values()))
        self._version = max((replica.engine.weight_version for replica in self._replicas.values()), default=0)

    async def close(self) -> None:
        """End what runs, close every engine. Idempotent."""
        self._closed = True
        await asyncio.gather(*(replica.engine.close() for replica in self._replicas.values()))

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
            ResourceError: no replica serves, and none has come back in time.
        """
        if self._closed:
            raise EngineClosedError("the pool is closed")
        replica = self._route()
        self._accepted += 1
        replica.requests.add(request.request_id)
        reason = None
        try:
            async with aclosing(
                cast(AsyncGenerator[GenerationChunk, None], replica.engine.generate(request))
            ) as stream:
                async for chunk in stream:
                    self._tokens += len(chunk.token_ids)
                    reason = chunk.finish_reason
                    yield chunk
        finally:
            replica.requests.discard(request.request_id)
            if not replica.requests:
                replica.idle.set()
            self._finished += reason in ("stop", "length")
            self._aborted += reason == "abort"
            self._left += reason is None

    def _route(self) -> _Replica:
        return self._replicas[
            least_expected_work(
                ReplicaLoad(name=name, rows=len(replica.requests), serving=not replica.draining)
                for name, replica in self._replicas.items()
            )
        ]

    async def abort(self, request_id: str) -> bool:
        """End a request with finish reason ``abort``. False if it is unknown."""
        for replica in self._replicas.values():
            if request_id in replica.requests:
                return await replica.engine.abort(request_id)
        return False

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop decoding on every replica, as :meth:`asyncrl.interfaces.RolloutEngine.pause`."""
        self._paused = True
        await asyncio.gather(*(replica.engine.pause(mode) for replica in self._replicas.values()))

    async def resume(self) -> None:
        """Go on. Idempotent."""
        self._paused = False
        await asyncio.gather(*(replica.engine.resume() for replica in self._replicas.values()))

    async def publish(self, manifest: WeightManifest) -> Ended:
        """Bring a published version into every replica, in two phases; they go on generating meanwhile.

        Raises:
            WeightVersionError: the version is not newer than the one served.
            WeightError: no replica could take it, or another publication is running.
        """
        if self._transport is None:
            raise WeightError("the pool was made without a transport: it cannot fetch weights")
        pulled = self._transport.pull(manifest)
        tensors = await asyncio.to_thread(pulled.__enter__)
        try:
            for replica in self._replicas.values():
                await replica.engine.prepare_weights(tensors, version=manifest.version)
        finally:
            del tensors
            pulled.__exit__(None, None, None)
        for replica in self._replicas.values():
            await replica.engine.commit_weights(manifest.version, kv_cache=self._kv_cache)
        self._version = manifest.version
        return Ended(version=manifest.version, committed=tuple(self._replicas), fenced={})

    async def add(self, name: str, factory: EngineFactory) -> None:
        """Let a replica join; it serves when it holds the current version. Returns when it is known.

        Raises:
            ResourceError: a replica of that name is there.
        """
        if name in self._replicas:
            raise ResourceError(f"replica {name} is there already; remove it first")
        replica = _Replica(name, factory)
        await replica.engine.start()
        self._replicas[name] = replica

    async def drain(self, name: str) -> None:
        """Send the replica nothing more, and wait until it has finished what it has."""
        replica = self._known(name)
        replica.draining = True
        if replica.requests:
            replica.idle.clear()
            await replica.idle.wait()

    async def remove(self, name: str) -> None:
        """Take a replica out; its requests go on elsewhere."""
        replica = self._known(name)
        await self.drain(name)
        await replica.engine.close()
        del self._replicas[name]

    def _known(self, name: str) -> _Replica:
        try:
            return self._replicas[name]
        except KeyError:
            raise ResourceError(f"no replica {name}; there are {', '.join(self._replicas) or 'none'}") from None

    def replicas(self) -> list[ReplicaStatus]:
        """Every replica, in the order in which they joined."""
        return [
            ReplicaStatus(
                name=name,
                state="draining" if replica.draining else "healthy",
                serving=not replica.draining,
                weight_version=replica.engine.weight_version,
                requests=len(replica.requests),
                expected_tokens=0,
                restarts=0,
                reason="",
                engine=replica.engine.statistics(),
            )
            for name, replica in self._replicas.items()
        ]

    def statistics(self) -> PoolStatistics:
        """What the pool holds and has done."""
        return PoolStatistics(
            weight_version=self._version,
            paused=self._paused,
            running=sum(len(replica.requests) for replica in self._replicas.values()),
            waiting=0,
            accepted=self._accepted,
            finished=self._finished,
            aborted=self._aborted,
            failed=self._failed,
            left=self._left,
            refused=0,
            migrations=0,
            tokens=self._tokens,
            restarts=0,
            replicas=tuple(self.replicas()),
        )
