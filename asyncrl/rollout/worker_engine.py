"""An engine in a worker group, as the pool sees engines: see :mod:`asyncrl.rollout.engine_worker`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from asyncrl.errors import EngineClosedError, EngineError, GroupClosedError, ResourceError, WeightError, WorkerDiedError
from asyncrl.interfaces import (
    EngineHealth,
    GenerationChunk,
    GenerationRequest,
    KVCachePolicy,
    PauseMode,
    RolloutEngineStatistics,
    WeightTransport,
)
from asyncrl.rollout.engine_worker import weight_batch
from asyncrl.weights.manifest import WeightManifest

if TYPE_CHECKING:
    import torch

__all__ = ["WorkerEngine"]

_T = TypeVar("_T")
_HEALTH_GRACE_S = 5.0  # what the answer to a probe may need beyond the probe's own deadline


class WorkerEngine:
    """A :class:`~asyncrl.interfaces.SeparateEngine` over a worker group of one :class:`EngineWorker`.

    Args:
        make_group: makes the group; called in a thread, since it may wait for a place. Any: its methods are bound at
            run time.
        transport: this side of the weights' transport: they are pulled here and sent on.
        weight_version: version of the weights that the engine begins with.
    """

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
        """Version the next token will be sampled under, as of the last message."""
        return self._version

    async def start(self) -> None:
        """Make the group and load the model there.

        Raises:
            EngineError: there is no place for it, or it could not be started.
        """
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
        """Close the engine and free the worker. Idempotent."""
        self._closed = True
        async with self._starting:
            if self._group is not None:
                await self._group.aclose()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine is closed")

    def _serving(self) -> Any:
        self._check_open()
        if self._group is None or self._statistics is None:
            raise EngineError("the engine has not been started: await engine.start() first")
        return self._group

    def _take(self, statistics: RolloutEngineStatistics) -> None:
        self._statistics = statistics
        self._version = max(self._version, statistics.weight_version)

    @contextmanager
    def _naming_its_end(self) -> Iterator[None]:
        try:
            yield
        except (WorkerDiedError, GroupClosedError) as error:
            raise self._gone(error) from error

    def _gone(self, error: Exception) -> EngineError:
        return EngineClosedError("the engine was closed meanwhile") if self._closed else EngineError(str(error))

    async def _ask(self, call: Awaitable[_T]) -> _T:
        """The answer; a caller that goes away takes the call back."""
        future: Any = call  # Any: a worker group's future can be cancelled
        with self._naming_its_end():
            try:
                return await call
            except asyncio.CancelledError:
                future.cancel()
                raise

    # --------------------------------------------------------------------------------------------------- requests

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        with self._naming_its_end():
            async with self._serving().generate(request) as stream:
                async for chunk, statistics in stream:
                    self._take(statistics)
                    yield chunk

    async def abort(self, request_id: str) -> bool:
        return await self._ask(self._serving().abort(request_id))

    async def pause(self, mode: PauseMode = "keep") -> None:
        self._take(await self._ask(self._serving().pause(mode)))

    async def resume(self) -> None:
        self._take(await self._ask(self._serving().resume()))

    # ---------------------------------------------------------------------------------------------------- weights

    async def prepare_weights(self, tensors: Mapping[str, torch.Tensor], *, version: int) -> None:
        """Not offered: what is sent has to be checked against a manifest, so :meth:`fetch_weights` is the way."""
        raise WeightError(f"version {version} has to come by a manifest: publish it through the pool")

    async def fetch_weights(self, manifest: WeightManifest) -> None:
        """Pull the tensors here, and send them to the worker, which checks them again."""
        group = self._serving()
        if self._transport is None:
            raise WeightError("the engine was made without a transport: it cannot be given weights")
        pulled = self._transport.pull(manifest)
        tensors = await asyncio.to_thread(pulled.__enter__)
        try:
            await self._ask(await asyncio.to_thread(_send, group, tensors, manifest))
        finally:
            del tensors
            pulled.__exit__(None, None, None)

    async def commit_weights(self, version: int, *, kv_cache: KVCachePolicy = "keep") -> None:
        self._take(await self._ask(self._serving().commit_weights(version, kv_cache)))

    # ----------------------------------------------------------------------------------------------- observation

    async def health(self, deadline_s: float) -> EngineHealth:
        loop = asyncio.get_running_loop()
        begin = loop.time()
        try:
            async with asyncio.timeout(deadline_s + _HEALTH_GRACE_S):
                answer: EngineHealth = await self._ask(self._serving().health(deadline_s))
                return answer
        except TimeoutError:
            error = f"no answer within {deadline_s + _HEALTH_GRACE_S:g} s"
        except EngineError as failure:
            error = str(failure)
        return EngineHealth(healthy=False, latency_s=loop.time() - begin, weight_version=self._version, error=error)

    async def wait_ended(self) -> str:
        try:
            return await self._ask(self._serving().wait_ended())
        except EngineError as error:
            return str(error)

    def statistics(self) -> RolloutEngineStatistics:
        """As of the last chunk or answer."""
        if self._statistics is None:
            raise EngineError("the engine has not been started: await engine.start() first")
        return self._statistics


def _send(group: Any, tensors: Mapping[str, torch.Tensor], manifest: WeightManifest) -> Awaitable[None]:
    """Any: a worker group."""
    sent: Awaitable[None] = group.prepare_weights(weight_batch(tensors, manifest))
    return sent
