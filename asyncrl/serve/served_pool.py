"""What the server needs of whatever it serves: :class:`asyncrl.rollout.replica_pool.ReplicaPool`, or an echo of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from asyncrl.interfaces import GenerationChunk, GenerationRequest, PauseMode, RolloutEngine
from asyncrl.rollout.pool_status import PoolStatistics, ReplicaStatus
from asyncrl.weights.manifest import WeightManifest
from asyncrl.weights.publication import Ended

__all__ = ["ServedPool"]


class ServedPool(Protocol):
    """Replicas that are asked as one. The methods' contracts are those of ``ReplicaPool``."""

    @property
    def weight_version(self) -> int: ...

    @property
    def needed_versions(self) -> frozenset[int]: ...

    def generate(
        self, request: GenerationRequest, *, session: str | None = None, tenant: str = ""
    ) -> AsyncIterator[GenerationChunk]: ...

    async def abort(self, request_id: str) -> bool: ...

    async def pause(self, mode: PauseMode = "keep") -> None: ...

    async def resume(self) -> None: ...

    async def publish(self, manifest: WeightManifest) -> Ended: ...

    async def add(self, name: str, factory: Callable[[], RolloutEngine]) -> None: ...

    async def drain(self, name: str) -> None: ...

    async def remove(self, name: str) -> None: ...

    def replicas(self) -> Sequence[ReplicaStatus]: ...

    def statistics(self) -> PoolStatistics: ...
