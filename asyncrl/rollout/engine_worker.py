"""Engines on other machines: a rollout engine in a worker group, for ``asyncrl serve --join``.

An engine in another process of this machine is reached over a local socket (``engines.rollout.remote``), which does
not reach a machine that joins a running server through Ray. The engine of such a machine runs in a Ray actor, and this
module connects the pool to it.

    pool's process                                worker (a Ray actor, or a thread in tests)
    WorkerGroupEngine  -- calls, streams of chunks -->  EngineWorker  -->  the engine, perhaps in a process of its own

Weights travel as one batch: each tensor is a column with one row. The worker checks every tensor against the manifest
before the engine gets it.

A model is a folder or its URL, a hub id, or ``SOURCE:NAME`` of an installed model source, which makes a folder of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import xxhash

from asyncrl.data import DataProto
from asyncrl.errors import (
    EngineClosedError,
    EngineError,
    GroupClosedError,
    ResourceError,
    WeightError,
    WeightMismatchError,
    WorkerDiedError,
)
from asyncrl.interfaces import (
    EngineHealth,
    GenerationChunk,
    GenerationRequest,
    KVCachePolicy,
    OutOfProcessEngine,
    RolloutEngine,
    RolloutEngineStatistics,
)
from asyncrl.io import LockedTemporaryDirectory
from asyncrl.plugins import is_model_source, make_part
from asyncrl.rollout.live_weights import commit_into
from asyncrl.runtime import in_thread, shield_until_done
from asyncrl.single_controller import Dispatch, Worker, register
from asyncrl.storage import local_model
from asyncrl.weights import WeightManifest, WeightTransport

if TYPE_CHECKING:
    import torch


_SOURCES = "asyncrl.model_sources"


def resolve_model(model: str, into: Path) -> str:
    """Return what engines load for ``model``: itself, or a folder made below ``into``. Blocks.

    Raises:
        ConfigError: the source cannot make the folder.
    """
    if not is_model_source(model):
        return model
    source, _, name = model.partition(":")
    folder = into / "model"
    options = {"source": name}
    make_part(_SOURCES, source, folder, options=options, path="model", table="model", seed=0, demonstrations=None)
    return str(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """What a worker makes its engine from, on its own machine.

    ``engine`` is an entry point or dotted path; a ``model`` of ``SOURCE:NAME``, or at a URL, becomes a folder on the
    worker's machine. The user sets ``options`` (keyword arguments of the engine), the server ``given``.
    """

    engine: str
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)

    def make(self, folder: Path) -> RolloutEngine:
        """Make the engine, not started, with its files in ``folder``. Blocks."""
        made: RolloutEngine = make_part(
            "asyncrl.rollout_engines",
            self.engine,
            local_model(resolve_model(self.model, folder)),
            options=dict(self.options),
            path="engine",
            **self.given,
        )
        return made


class EngineWorker(Worker):
    """Hosts the engine of a spec. Its methods are the engine's, run side by side; most return its statistics."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__()
        self._folder = LockedTemporaryDirectory("model")
        self._engine = spec.make(self._folder.path)
        self._manifest: WeightManifest | None = None

    async def aclose(self) -> None:
        await self._engine.close()
        await asyncio.to_thread(self._folder.close)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def start(self) -> RolloutEngineStatistics:
        await self._engine.start()
        return self._engine.statistics()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def generate(
        self, request: GenerationRequest
    ) -> AsyncGenerator[tuple[GenerationChunk, RolloutEngineStatistics], None]:
        stream = cast("AsyncGenerator[GenerationChunk, None]", self._engine.generate(request))
        async with aclosing(stream):
            async for chunk in stream:
                yield chunk, self._engine.statistics()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def abort(self, request_id: str) -> bool:
        return await self._engine.abort(request_id)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def pause(self) -> RolloutEngineStatistics:
        await self._engine.pause()
        return self._engine.statistics()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def resume(self) -> RolloutEngineStatistics:
        await self._engine.resume()
        return self._engine.statistics()

    @register(dispatch_mode=Dispatch.RANK_ZERO, read_only=True)
    async def prepare_weights(self, weights: DataProto) -> RolloutEngineStatistics:
        """Check a :func:`weight_batch`, then prepare it on the engine, unless that serves it: a commit was cut off.

        Raises:
            WeightMismatchError: a tensor is not the manifest's.
        """
        manifest = WeightManifest.decode(weights.meta_info["manifest"])
        tensors = await asyncio.to_thread(_checked, weights, manifest)
        self._manifest = manifest
        if self._engine.weight_version != manifest.version:
            await self._engine.prepare_weights(tensors, version=manifest.version)
        return self._engine.statistics()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def commit_weights(self, version: int, kv_cache: KVCachePolicy) -> RolloutEngineStatistics:
        await commit_into(self._engine, version, kv_cache=kv_cache, manifest=self._manifest, canary=False)
        return self._engine.statistics()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def health(self, deadline_s: float) -> EngineHealth:
        return await self._engine.health(deadline_s)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def wait_ended(self) -> str:
        """Wait until an engine in a process of its own is gone; the backend reports the worker's own end."""
        if isinstance(self._engine, OutOfProcessEngine):
            return await self._engine.wait_ended()
        await asyncio.Event().wait()
        raise AssertionError("the engine lives as long as this worker: the wait ends by cancellation")


def weight_batch(tensors: Mapping[str, torch.Tensor], manifest: WeightManifest) -> DataProto:
    """Return one row: a column for each tensor, and the manifest."""
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


_T = TypeVar("_T")
_HEALTH_GRACE_S = 5.0  # what the answer to a probe may need beyond the probe's own deadline


class WorkerGroupEngine:
    """A :class:`~asyncrl.interfaces.OutOfProcessEngine` over a worker group of one :class:`EngineWorker`.

    ``make_group`` runs in a thread, since it may wait for a place (Any: the group's methods are bound at run time).
    ``transport`` is this side of the weights' transport: they are pulled here and sent on.
    """

    pulls_weights: ClassVar[bool] = True
    proves_commits: ClassVar[bool] = True

    def __init__(
        self, make_group: Callable[[], Any], *, transport: WeightTransport | None = None, weight_version: int = 0
    ) -> None:
        self._make_group = make_group
        self._transport = transport
        self._version = weight_version
        self._group: Any = None
        self._statistics: RolloutEngineStatistics | None = None
        self._starting = asyncio.Lock()
        self._closed = False

    @property
    def weight_version(self) -> int:
        return self._version

    async def start(self) -> None:
        """Make the group and load the model there; an EngineError if there is no place for it, or it cannot start."""
        async with self._starting:
            self._check_open()
            if self._group is not None:
                return
            try:
                self._group = await asyncio.to_thread(self._make_group)
                await self._group.ready()
                self._take(await self._group.start())
            except (ResourceError, WorkerDiedError) as error:
                raise EngineError(f"no worker could be started for the engine: {error}") from error

    async def close(self) -> None:
        self._closed = True
        async with self._starting:
            if self._group is not None:
                await self._group.aclose()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine is closed")

    def _started_group(self) -> Any:
        self._check_open()
        if self._group is None or self._statistics is None:
            raise EngineError("the engine has not been started: await engine.start() first")
        return self._group

    def _take(self, statistics: RolloutEngineStatistics) -> None:
        self._statistics = statistics
        self._version = max(self._version, statistics.weight_version)

    @contextmanager
    def _loss_as_engine_error(self) -> Iterator[None]:
        try:
            yield
        except (WorkerDiedError, GroupClosedError) as error:
            reason = EngineClosedError("the engine was closed meanwhile") if self._closed else EngineError(str(error))
            raise reason from error

    async def _ask(self, call: Awaitable[_T]) -> _T:
        """Await a call; cancel it when the caller is cancelled."""
        future: Any = call  # Any: a worker group's future can be cancelled
        with self._loss_as_engine_error():
            try:
                return await call
            except asyncio.CancelledError:
                future.cancel()
                raise

    # --------------------------------------------------------------------------------------------------- requests

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        with self._loss_as_engine_error():
            async with self._started_group().generate(request) as stream:
                async for chunk, statistics in stream:
                    self._take(statistics)
                    yield chunk

    async def abort(self, request_id: str) -> bool:
        return await self._ask(self._started_group().abort(request_id))

    async def pause(self) -> None:
        self._take(await self._ask(self._started_group().pause()))

    async def resume(self) -> None:
        self._take(await self._ask(self._started_group().resume()))

    # ---------------------------------------------------------------------------------------------------- weights

    async def prepare_weights(self, tensors: Mapping[str, torch.Tensor], *, version: int) -> None:
        """Raise: what is sent has to be checked against a manifest, so :meth:`fetch_weights` is the way."""
        raise WeightError(f"version {version} has to come by a manifest: publish it through the pool")

    async def fetch_weights(self, manifest: WeightManifest) -> None:
        """Pull the tensors here, and send them to the worker, which checks them again."""
        group = self._started_group()
        if self._transport is None:
            raise WeightError("the engine was made without a transport: it cannot be given weights")
        if manifest.adapter is not None:
            raise WeightError(
                f"version {manifest.version} is an adapter: an engine on another machine takes full versions"
            )
        with ExitStack() as opened:
            tensors = await shield_until_done(in_thread(opened.enter_context, self._transport.pull(manifest)))
            try:
                self._take(await self._ask(await asyncio.to_thread(_send, group, tensors, manifest)))
            finally:
                del tensors

    async def commit_weights(self, version: int, *, kv_cache: KVCachePolicy = "keep") -> None:
        self._take(await self._ask(self._started_group().commit_weights(version, kv_cache)))

    # ----------------------------------------------------------------------------------------------- observation

    async def health(self, deadline_s: float) -> EngineHealth:
        loop = asyncio.get_running_loop()
        begin = loop.time()
        try:
            async with asyncio.timeout(deadline_s + _HEALTH_GRACE_S):
                answer: EngineHealth = await self._ask(self._started_group().health(deadline_s))
                return answer
        except TimeoutError:
            error = f"no answer within {deadline_s + _HEALTH_GRACE_S:g} s"
        except EngineError as failure:
            error = str(failure)
        return EngineHealth(healthy=False, latency_s=loop.time() - begin, weight_version=self._version, error=error)

    async def wait_ended(self) -> str:
        try:
            return await self._ask(self._started_group().wait_ended())
        except EngineError as error:
            return str(error)

    def statistics(self) -> RolloutEngineStatistics:
        """Return the statistics as of the last chunk or answer."""
        if self._statistics is None:
            raise EngineError("the engine has not been started: await engine.start() first")
        return self._statistics


def _send(
    group: Any, tensors: Mapping[str, torch.Tensor], manifest: WeightManifest
) -> Awaitable[RolloutEngineStatistics]:
    """Any: a worker group."""
    sent: Awaitable[RolloutEngineStatistics] = group.prepare_weights(weight_batch(tensors, manifest))
    return sent
