"""The embedded rollout engine: continuous batching over a transformers model in this process, on CPU or GPU.

    async with contextlib.AsyncExitStack() as stack:
        engine = TransformersEngine("path/to/model")
        stack.push_async_callback(engine.close)
        await engine.start()
        async for chunk in engine.generate(request):
            ...

Requests join and leave between decode steps. Weights are exchanged between two steps; requests in flight go on, with
their keys and values kept or computed again. Those of a session's last request are kept for its next one while there is
room. What requests begin with alike is read once, as long as one of them runs or a session keeps it. A request that
begins after a commit shares nothing with those before it, so it never meets an entry of older weights.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
import threading
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, ClassVar, TypeVar

import torch

from asyncrl.errors import EngineClosedError, EngineError, InvalidDataError, WeightError
from asyncrl.interfaces import (
    DeviceShare,
    EngineHealth,
    GenerationChunk,
    GenerationRequest,
    KVCachePolicy,
    RolloutEngineStatistics,
    SamplingParams,
)
from asyncrl.runtime import shield_until_done
from asyncrl.weights import WeightManifest
from engines.rollout.checks import check_health, check_options
from engines.rollout.model_tensors import DTYPES
from engines.rollout.request import ModelTokens, Reader, Row
from engines.rollout.transformers.generation import Generation, Stepping
from engines.rollout.transformers.schedule import Schedule
from engines.rollout.transformers.weights import ShadowWeights

_T = TypeVar("_T")


class TransformersEngine:
    """A :class:`~asyncrl.interfaces.RolloutEngine` over any transformers causal language model with full attention.

    Args:
        model_path: Hugging Face folder or hub id, with weights of version ``weight_version``.
        dtype: ``float32``, ``bfloat16`` or ``float16``: of weights and KV cache. Sampling is in float32 or better.
        device: ``auto`` (CUDA where there is one), or torch's name of a device.
        max_running_requests: most rows in a decode step; others wait.
        max_model_tokens: context length, prompt included; the model's own by default.
        kv_cache_bytes: size of the paged KV cache: requests wait for room in it, and the latest ones are read again
            where it does not suffice. 4 GiB by default, or what one request of ``max_model_tokens`` needs if that is
            more. On a CPU only what is in use takes memory.
        prefill_tokens_per_step: most prompt tokens read between two decode steps. With small values other requests wait
            less while a long prompt is read, with large ones the prompt is read sooner.
        max_adapter_rank: largest rank of adapters that are taken; None for any.
        threads: torch threads of the forward pass; torch's default when None.
        seed: for requests without a seed of their own.
    """

    pulls_weights: ClassVar[bool] = False
    sleep_options: ClassVar[Mapping[str, Any]] = {}

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str = "float32",
        device: str = "auto",
        max_running_requests: int = 64,
        max_model_tokens: int | None = None,
        kv_cache_bytes: int | None = None,
        prefill_tokens_per_step: int = 2048,
        max_adapter_rank: int | None = None,
        weight_version: int = 0,
        threads: int | None = None,
        seed: int = 0,
    ) -> None:
        check_options(
            dtype,
            DTYPES,
            max_running_requests=max_running_requests,
            prefill_tokens_per_step=prefill_tokens_per_step,
            threads=threads,
        )
        self._model_path = model_path
        self._dtype = DTYPES[dtype]
        self._device = device
        self._max_running_requests = max_running_requests
        self._max_model_tokens = max_model_tokens
        self._kv_cache_bytes = kv_cache_bytes
        self._prefill_tokens_per_step = prefill_tokens_per_step
        self._max_adapter_rank = max_adapter_rank
        self._first_version = weight_version
        self._threads = threads
        self._seeds = random.Random(seed)  # noqa: S311 - sampling, not secrets
        self._generation: Generation | None = None
        self._stepping: Stepping | None = None
        self._model_tokens: ModelTokens | None = None
        self._held: dict[str, Row] = {}
        self._readers: dict[Row, Reader] = {}
        self._starting = asyncio.Lock()
        self._updating = asyncio.Lock()
        self._closed = False

    @classmethod
    def check_options(cls, *arguments: Any, **options: Any) -> None:
        """Raise ConfigError as the constructor, which loads nothing."""
        cls(*arguments, **options)

    @classmethod
    def device_share(cls, *, device: str = "auto", **_others: Any) -> DeviceShare:
        return DeviceShare(count=int(device in ("auto", "cuda")))

    # -------------------------------------------------------------------------------------------- start and close

    @property
    def weight_version(self) -> int:
        return self._first_version if self._generation is None else self._generation.version

    @property
    def commit_pause_s(self) -> float:
        """Return the seconds that decoding waited for the last commit (without computing caches again)."""
        return self._running().commit_pause_s

    async def start(self) -> None:
        async with self._starting:
            if self._closed:
                raise EngineClosedError("the engine is closed")
            if self._generation is None:
                await self._start()

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        generation = await asyncio.to_thread(self._load)
        if self._closed:
            raise EngineClosedError("the engine was closed while it started")
        self._generation = generation
        self._stepping = Stepping(generation, loop=loop, deliver=self._deliver, setup=self._limit_threads)
        self._stepping.start()

    def _limit_threads(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)

    def _load(self) -> Generation:
        from engines.rollout.transformers.decoder import load
        from engines.rollout.transformers.kv_cache import BLOCK_TOKENS

        self._limit_threads()
        decoder, self._model_tokens = load(
            self._model_path,
            dtype=self._dtype,
            device=self._device,
            max_model_tokens=self._max_model_tokens,
            max_running_requests=self._max_running_requests,
            kv_cache_bytes=self._kv_cache_bytes,
            max_adapter_rank=self._max_adapter_rank,
        )
        schedule = Schedule(
            max_running_requests=self._max_running_requests,
            prefill_tokens_per_step=self._prefill_tokens_per_step,
            blocks=range(1, decoder.cache.blocks),
            block_tokens=BLOCK_TOKENS,
            on_free=decoder.cache.give_back,
        )
        return Generation(decoder, schedule, ShadowWeights(decoder.model, version=self._first_version))

    async def close(self) -> None:
        self._closed = True
        generation, stepping = self._generation, self._stepping
        if generation is None or stepping is None:
            return
        closed = EngineClosedError("the engine is closed")
        stepping.post(lambda: generation.fail(closed))
        await stepping.close()
        generation.decoder.cache.free_memory()
        async with self._updating:
            generation.weights.close()

    def _running(self) -> Generation:
        if self._closed:
            raise EngineClosedError("the engine is closed")
        if self._generation is None:
            raise EngineError("the engine has not been started: await engine.start() first")
        return self._generation

    def _post(self, event: Callable[[], object]) -> None:
        assert self._stepping is not None
        self._stepping.post(event)

    async def _call(self, event: Callable[[], _T]) -> _T:
        """Call ``event`` between two steps and return its result.

        A caller that is cancelled takes the event back if it has not begun, and else waits for its end.
        """
        self._running()
        called: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def call() -> None:
            if not called.set_running_or_notify_cancel():
                return
            try:
                called.set_result(event())
            except Exception as error:  # noqa: BLE001 - raised by the caller
                called.set_exception(error)

        self._post(call)
        return await shield_until_done(asyncio.wrap_future(called), on_cancel=called.cancel)

    # --------------------------------------------------------------------------------------------------- requests

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        generation, tokens = self._running(), self._model_tokens
        assert tokens is not None
        if generation.failure is not None:
            raise EngineError(str(generation.failure)) from generation.failure.__cause__
        tokens.check(request, held=self._held)
        if request.adapter and request.adapter not in self.adapters:
            raise InvalidDataError(f"request {request.request_id!r} is for adapter {request.adapter!r}: none is served")
        seed = self._seeds.getrandbits(64) if request.sampling.seed is None else request.sampling.seed
        guide = await tokens.guide(request, held=self._held)
        self._running()
        row = self._held[request.request_id] = tokens.row(request, seed=seed, guide=guide)
        reader = self._submit(row, generation)
        try:
            while True:
                chunk = await reader.next_chunk()
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            del self._held[request.request_id]
            self._withdraw(row, generation)

    def _submit(self, row: Row, generation: Generation) -> Reader:
        reader = self._readers[row] = Reader(row)
        self._post(lambda: generation.submit(row))
        return reader

    def _withdraw(self, row: Row, generation: Generation) -> None:
        del self._readers[row]
        if not row.ended and not self._closed:
            self._post(lambda: generation.abort(row))

    def _deliver(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if (reader := self._readers.get(row)) is not None:
                reader.wake()

    async def abort(self, request_id: str) -> bool:
        generation = self._running()
        row = self._held.get(request_id)
        return row is not None and await self._call(lambda: generation.abort(row))

    def forget_session(self, session: str) -> None:
        if not self._closed:
            schedule = self._running().schedule
            self._post(lambda: schedule.forget(session))

    # ------------------------------------------------------------------------------------------------------ pause

    async def pause(self) -> None:
        await self._call(self._running().schedule.pause)

    async def resume(self) -> None:
        await self._call(self._running().schedule.resume)

    async def sleep(self) -> None:
        """Free the memory of the KV cache, and on an accelerator move the weights to the host."""
        async with self._updating:  # a version that is being prepared would lie on both sides
            await self._call(self._running().sleep)

    async def wake(self) -> None:
        async with self._updating:
            await self._call(self._running().wake)

    # ---------------------------------------------------------------------------------------------------- weights

    async def prepare_weights(self, tensors: Mapping[str, torch.Tensor], *, version: int) -> None:
        weights = self._weights_alone()
        await self._prepare(lambda stop: weights.write(tensors, version=version, stop=stop))

    async def prepare_shared_weights(
        self, leased: AbstractContextManager[Mapping[str, torch.Tensor]], *, version: int
    ) -> None:
        """As :meth:`prepare_weights`, without copying tensors whose device, dtype and layout are the model's."""
        weights = self._weights_alone()

        def write(stop: threading.Event) -> None:
            with ExitStack() as lease:
                weights.write(lease.enter_context(leased), version=version, stop=stop, lease=lease)

        await self._prepare(write)

    def _weights_alone(self) -> ShadowWeights:
        generation = self._running()
        if served := sorted(self.adapters):
            raise WeightError(
                f"the engine serves adapters ({', '.join(map(repr, served))}) beside its weights, which are therefore "
                "not replaced: an adapter is for the weights that it was trained beside"
            )
        return generation.weights

    @property
    def adapters(self) -> Mapping[str, int]:
        return {name: each.version for name, each in self._running().decoder.adapters.serving.items()}

    async def prepare_adapters(
        self, parts: Sequence[tuple[WeightManifest, Mapping[str, torch.Tensor]]], *, version: int
    ) -> None:
        generation = self._running()
        prepare = generation.decoder.adapters.prepare
        await self._prepare(lambda stop: prepare(parts, version=version, weights=generation.weights.version, stop=stop))

    async def adapter_checksums(self, name: str) -> Mapping[str, tuple[str, int]]:
        async with self._updating:
            return await shield_until_done(asyncio.to_thread(self._running().decoder.adapters.checksums, name))

    async def _prepare(self, write: Callable[[threading.Event], None]) -> None:
        """Fill the shadow in a thread."""
        stop = threading.Event()
        async with self._updating:
            await shield_until_done(asyncio.to_thread(write, stop), on_cancel=stop.set)

    async def commit_weights(self, version: int, *, kv_cache: KVCachePolicy = "keep") -> None:
        generation = self._running()
        async with self._updating:
            await self._call(lambda: generation.commit(version, kv_cache=kv_cache))

    async def live_checksums(self, names: Collection[str]) -> Mapping[str, tuple[str, int]]:
        async with self._updating:  # no swap, sleep or end meanwhile
            weights = self._running().weights
            return await shield_until_done(asyncio.to_thread(weights.checksums, names))

    # ----------------------------------------------------------------------------------------------- observation

    async def health(self, deadline_s: float) -> EngineHealth:
        """Generate one real token, before all waiting requests."""
        return await check_health(self._probe, lambda: self.weight_version, deadline_s=deadline_s)

    async def _probe(self) -> None:
        generation = self._running()
        if generation.failure is not None:
            raise generation.failure
        if generation.schedule.asleep:
            raise EngineError("the engine is asleep: it decodes nothing until wake()")
        if generation.schedule.paused:
            raise EngineError("the engine is paused: it decodes nothing until resume()")
        row = Row(
            request_id="probe",
            tokens=[0],
            prompt_length=1,
            length_limit=2,
            sampling=SamplingParams(max_new_tokens=1, temperature=0.0),
            seed=0,
            probe=True,
        )
        reader = self._submit(row, generation)
        try:
            await reader.next_chunk()
        finally:
            self._withdraw(row, generation)

    def statistics(self) -> RolloutEngineStatistics:
        generation = self._generation
        if generation is None:
            raise EngineError("the engine has not been started: await engine.start() first")
        schedule, counters, cache = generation.schedule, generation.counters, generation.decoder.cache
        running = [row for row in list(schedule.running) if not row.probe]
        return RolloutEngineStatistics(
            running=len(running),
            waiting=max(sum(not row.ended for row in self._held.values()) - len(running), 0),
            paused=schedule.paused,
            weight_version=generation.version,
            tokens_generated=counters.tokens_generated,
            prompt_tokens=counters.prompt_tokens,
            requests_finished=counters.requests_finished,
            requests_aborted=counters.requests_aborted,
            kv_cache_tokens=schedule.used_tokens,
            kv_cache_capacity_tokens=cache.capacity_tokens,
            decode_steps=counters.decode_steps,
            busy_s=counters.busy_s,
        )
