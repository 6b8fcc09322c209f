"""A rollout engine as a worker: on another machine, where the pool has no process of its own to start.

    pool's process                                worker (a Ray actor, or a thread in tests)
    WorkerEngine  -- calls, streams of chunks -->  EngineWorker  -->  the engine, perhaps in a process of its own

Weights travel as one batch: each tensor is a column with one row. The worker checks every one against the manifest
before the engine sees it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import xxhash

from asyncrl.data import DataProto
from asyncrl.errors import EngineError, WeightMismatchError
from asyncrl.interfaces import (
    EngineHealth,
    GenerationChunk,
    GenerationRequest,
    KVCachePolicy,
    PauseMode,
    RolloutEngine,
    RolloutEngineStatistics,
)
from asyncrl.owned_folder import OwnedFolder
from asyncrl.parts import make_part
from asyncrl.rollout.model_source import made_model
from asyncrl.single_controller import Dispatch, Worker, register
from asyncrl.weights.manifest import WeightManifest

if TYPE_CHECKING:
    import torch

__all__ = ["EngineSpec", "EngineWorker", "weight_batch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """What a worker makes its engine from, on its own machine.

    Attributes:
        engine: entry point or dotted path.
        model: its first argument; ``SOURCE:NAME`` is made into a folder on the worker's machine.
        options: its keyword arguments.
        given: keyword arguments that no user wrote.
    """

    engine: str
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)

    def make(self, folder: Path) -> RolloutEngine:
        """The engine, not started; what has to be made for it lies in ``folder``. Blocks."""
        made: RolloutEngine = make_part(
            "asyncrl.rollout_engines",
            self.engine,
            made_model(self.model, folder),
            options=dict(self.options),
            path="engine",
            **self.given,
        )
        return made


class EngineWorker(Worker):
    """Hosts the engine of a spec. Everything is ``async``: its methods run side by side."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__()
        self._folder = OwnedFolder("model")
        self._engine = spec.make(self._folder.path)
        self._for_ever = asyncio.Event()

    async def aclose(self) -> None:
        """Close the engine."""
        await self._engine.close()
        await asyncio.to_thread(self._folder.close)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def start(self) -> RolloutEngineStatistics:
        """Load the model."""
        await self._engine.start()
        return self._engine.statistics()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def generate(
        self, request: GenerationRequest
    ) -> AsyncGenerator[tuple[GenerationChunk, RolloutEngineStatistics], None]:
        """Stream one request."""
        stream = cast("AsyncGenerator[GenerationChunk, None]", self._engine.generate(request))
        async with aclosing(stream):
            async for chunk in stream:
                yield chunk, self._engine.statistics()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def abort(self, request_id: str) -> bool:
        """As the engine's."""
        return await self._engine.abort(request_id)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def pause(self, mode: PauseMode) -> RolloutEngineStatistics:
        """As the engine's."""
        await self._engine.pause(mode)
        return self._engine.statistics()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def resume(self) -> RolloutEngineStatistics:
        """As the engine's."""
        await self._engine.resume()
        return self._engine.statistics()

    @register(dispatch_mode=Dispatch.RANK_ZERO, read_only=True)
    async def prepare_weights(self, weights: DataProto) -> None:
        """Check a :func:`weight_batch`, and have the engine prepare it.

        Raises:
            WeightMismatchError: a tensor is not the manifest's.
        """
        manifest = WeightManifest.decode(weights.meta_info["manifest"])
        tensors = await asyncio.to_thread(_checked, weights, manifest)
        await self._engine.prepare_weights(tensors, version=manifest.version)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def commit_weights(self, version: int, kv_cache: KVCachePolicy) -> RolloutEngineStatistics:
        """As the engine's."""
        await self._engine.commit_weights(version, kv_cache=kv_cache)
        return self._engine.statistics()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def health(self, deadline_s: float) -> EngineHealth:
        """As the engine's."""
        return await self._engine.health(deadline_s)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def wait_ended(self) -> str:
        """Wait until an engine in a process of its own is gone; the worker's own end is told by its backend."""
        from asyncrl.interfaces import SeparateEngine

        if isinstance(self._engine, SeparateEngine):
            return await self._engine.wait_ended()
        await self._for_ever.wait()
        raise EngineError("it waits for ever")


def weight_batch(tensors: Mapping[str, torch.Tensor], manifest: WeightManifest) -> DataProto:
    """One row: a column for each tensor, and the manifest."""
    columns = {name: tensor.unsqueeze(0) for name, tensor in tensors.items()}
    return DataProto.from_dict(columns, meta_info={"manifest": manifest.encode()})


def _checked(weights: DataProto, manifest: WeightManifest) -> dict[str, torch.Tensor]:
    import torch

    assert weights.batch is not None
    tensors: dict[str, torch.Tensor] = {}
    for entry in manifest.tensors:
        tensor = weights.batch[entry.name][0]
        found = xxhash.xxh3_64_intdigest(tensor.contiguous().flatten().view(torch.uint8).numpy())
        if found != entry.checksum or tuple(tensor.shape) != entry.shape:
            raise WeightMismatchError(f"{entry.name} of version {manifest.version} did not arrive as it was published")
        tensors[entry.name] = tensor
    return tensors
