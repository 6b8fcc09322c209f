"""The rollout engine on vLLM: its AsyncLLM behind our contract, with our weight transport and our versions.

    engine = RemoteEngine("path/to/model", engine="vllm", python=".venv-vllm/bin/python", transport=spec)

vLLM needs an environment of its own (``asyncrl engine install vllm``), so this class is made in a process of that
environment (:mod:`engines.rollout.remote.process`), which other processes use through RemoteEngine.

- vLLM's engine core stamps versions on every step; they change only while no step runs.
- The prefix cache is salted with the version, so nothing computed by older weights serves a request that begins later.
  Requests in flight keep their keys and values, or have them computed again, as requested.
- A request chooses its salt when it begins. One whose first token has not been sampled when the weights change begins
  once more.
- Weights are fetched and verified by every rank in a thread while decoding goes on. The pause is vLLM's layer-wise
  load out of memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, ClassVar, Generic, TypeVar

import torch

from asyncrl.errors import (
    ContinuationError,
    EngineClosedError,
    EngineError,
    InfrastructureError,
    InvalidDataError,
    LiveWeightsError,
    WeightError,
)
from asyncrl.interfaces import (
    DeviceShare,
    EngineHealth,
    GenerationChunk,
    GenerationRequest,
    KVCachePolicy,
    RolloutEngineStatistics,
    SamplingParams,
)
from asyncrl.io import LockedTemporaryDirectory
from asyncrl.runtime import shield_until_done
from asyncrl.weights import TransportSpec, WeightManifest
from engines.rollout.checks import check_adapters_awake, check_heads, check_health, check_options, check_sleep_mode
from engines.rollout.model_tensors import AdapterVersions
from engines.rollout.remote.engine import publish_into
from engines.rollout.request import Row
from engines.rollout.vllm.launch import GONE, StartedLLM, VLLMSettings, start
from engines.rollout.vllm.request import VLLMRequest
from engines.rollout.vllm.weights import NOT_PROVEN, WeightUpdates

# vLLM lives in an environment of its own, where the type checkers do not look.
# pyright: reportMissingImports=false

_T = TypeVar("_T")
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_ABORTED = GenerationChunk(token_ids=(), log_probs=(), weight_versions=(), finish_reason="abort")


class AdmissionQueue(Generic[_T]):
    """Decides which requests begin: a bounded number at a time, in the order they came, and none while paused.

    vLLM has a queue of its own, but a request in it has chosen the prefix cache it reads from, and an update of the
    weights may come before it begins. So requests wait here instead, and choose when they begin. An update of the
    weights sets ``held``, and sleep ``asleep``, during which none begins either.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._waiting: deque[_T] = deque()
        self._admitted: set[_T] = set()
        self._probes: set[_T] = set()
        self.paused = False
        self.held = False
        self.asleep = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def admitted(self) -> int:
        return len(self._admitted)

    def arrive(self, request: _T, *, probe: bool = False) -> None:
        """Queue a request; a probe goes before all others, beside the bounded number."""
        if probe:
            self._waiting.appendleft(request)
            self._probes.add(request)
        else:
            self._waiting.append(request)

    def admit(self) -> list[_T]:
        begin: list[_T] = []
        while self._waiting and not (self.paused or self.held or self.asleep):
            if len(self._admitted - self._probes) >= self._capacity and self._waiting[0] not in self._probes:
                break
            begin.append(self._waiting.popleft())
            self._admitted.add(begin[-1])
        return begin

    def leave(self, request: _T) -> None:
        """Remove a request that has ended, waiting or not."""
        self._probes.discard(request)
        if request in self._admitted:
            self._admitted.remove(request)
        else:
            self._waiting.remove(request)


class VLLMEngine:
    """A :class:`~asyncrl.interfaces.OutOfProcessEngine` over vLLM.

    Args:
        model_path: Hugging Face folder or hub id, with weights of version ``weight_version``.
        dtype: ``auto`` (as vLLM chooses), ``float32``, ``bfloat16`` or ``float16``: of weights and KV cache.
        max_running_requests: most requests in vLLM at a time; others wait.
        max_model_tokens: context length, prompt included; the model's own by default.
        kv_cache_bytes: size of the paged KV cache; by default vLLM's choice on GPUs, 1 GiB on a CPU. With a size vLLM
            starts whatever others have of the device: ``gpu_memory_utilization`` is 0.01, unless ``arguments`` has it.
        prefix_caching: share keys and values of equal beginnings, among requests of one weight version.
        max_adapter_rank: largest rank of adapters that are taken, and then no full weights; None: no adapters.
        max_adapters: number of adapters that can be served; each takes memory from the start.
        compile: torch.compile and CUDA graphs; by default on GPUs and not on a CPU, where it costs a minute per start.
        sleep_mode: allocate memory so that :meth:`sleep` can free it, where vLLM can (not on a CPU).
        arguments: further arguments of vLLM's ``AsyncEngineArgs`` (``tensor_parallel_size``).
        threads: OpenMP threads of each rank.
        seed: of requests without a seed of their own.
        transport: where versions are fetched from; None if it never gets any.
    """

    pulls_weights: ClassVar[bool] = True
    sleep_options: ClassVar[Mapping[str, Any]] = {"sleep_mode": True}
    package: ClassVar[str] = "vllm"
    package_remedy: ClassVar[str] = (
        "make an environment with `asyncrl engine install vllm` and name its interpreter: rollout.python"
    )

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str = "float32",
        max_running_requests: int = 64,
        max_model_tokens: int | None = None,
        kv_cache_bytes: int | None = None,
        prefix_caching: bool = True,
        compile: bool | None = None,  # noqa: A002 - vLLM's and torch's word
        sleep_mode: bool = False,
        max_adapter_rank: int | None = None,
        max_adapters: int = 4,
        arguments: Mapping[str, Any] | None = None,
        weight_version: int = 0,
        threads: int = 1,
        seed: int = 0,
        transport: TransportSpec | None = None,
    ) -> None:
        check_options(
            dtype, _DTYPES, max_running_requests=max_running_requests, max_adapters=max_adapters, threads=threads
        )
        check_adapters_awake(max_adapter_rank, sleep_mode=sleep_mode)
        self._settings = VLLMSettings(
            model_path=model_path,
            dtype=dtype,
            threads=threads,
            seed=seed & (2**31 - 1),
            max_running_requests=max_running_requests,
            max_model_tokens=max_model_tokens,
            kv_cache_bytes=kv_cache_bytes,
            prefix_caching=prefix_caching,
            compile=compile,
            sleep_mode=sleep_mode,
            max_adapter_rank=max_adapter_rank,
            max_adapters=max_adapters,
            arguments=dict(arguments or {}),
        )
        self._transport = transport
        self._version = weight_version
        self._folder: LockedTemporaryDirectory | None = None
        self._started: StartedLLM | None = None
        self._updates: WeightUpdates | None = None
        self._adapters: AdapterVersions | None = None
        self._queue: AdmissionQueue[VLLMRequest] = AdmissionQueue(max_running_requests)
        self._held: dict[str, VLLMRequest] = {}
        self._submitted = 0
        self._starting = asyncio.Lock()
        self._updating = asyncio.Lock()
        self._ordering = asyncio.Lock()
        self._submitting = asyncio.Lock()
        self._closed = False
        self._broken = ""
        self._tokens_generated = self._prompt_tokens = self._finished = self._aborted = 0
        self.commit_pause_s = 0.0
        """Seconds that decoding waited for the last commit."""

    @classmethod
    def device_share(
        cls, *, kv_cache_bytes: int | None = None, arguments: Mapping[str, Any] | None = None, **_others: Any
    ) -> DeviceShare:
        given = arguments or {}
        bounded = kv_cache_bytes is not None or "gpu_memory_utilization" in given
        return DeviceShare(
            count=given.get("tensor_parallel_size", 1) * given.get("pipeline_parallel_size", 1),
            room="" if bounded else "kv_cache_bytes, or arguments = {gpu_memory_utilization = 0.4}",
        )

    @classmethod
    def check_options(cls, model_path: str, *, arguments: Mapping[str, Any] | None = None, **others: Any) -> None:
        """Raise ConfigError as the constructor, or where the model's heads cannot be spread over the ranks."""
        cls(model_path, arguments=arguments, **others)
        check_heads(model_path, (arguments or {}).get("tensor_parallel_size", 1), key="arguments.tensor_parallel_size")

    # -------------------------------------------------------------------------------------------- start and close

    @property
    def weight_version(self) -> int:
        return self._version

    async def start(self) -> None:
        async with self._starting:
            if self._closed:
                raise EngineClosedError("the engine is closed")
            if self._started is None:
                await self._start()

    async def _start(self) -> None:
        folder = self._folder = await asyncio.to_thread(LockedTemporaryDirectory, "vllm")
        started = self._started = await asyncio.to_thread(start, self._settings, folder.path)
        llm = started.llm
        try:
            settings = self._settings
            if settings.max_adapter_rank is not None:
                self._adapters = AdapterVersions(
                    started.tensors,
                    settings.model_path,
                    weights=self._version,
                    max_rank=settings.max_adapter_rank,
                    most=settings.max_adapters,
                )
            if self._transport is not None:
                self._updates = WeightUpdates(started, folder.path, adapters=self._adapters)
                await self._updates.open(self._transport)
            await llm.update_weight_version(str(self._version))
            await self._probe_vllm(started)
        except Exception as error:
            await self.close()
            raise EngineError(f"vLLM did not start: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        self._closed = True
        started, self._started = self._started, None
        self._fail_held(EngineClosedError("the engine is closed"))
        if self._updates is not None:
            await self._updates.close()
        if started is not None:
            # vLLM cancels its reader after the engine core has ended: a slow machine logs that end as a failure.
            if started.llm.output_handler is not None:  # vLLM starts it with the first request
                started.llm.output_handler.cancel()
            await asyncio.to_thread(started.llm.shutdown)
            # Its __del__ calls it again, which fails where the interpreter ends first.
            started.llm.shutdown = lambda: None
        if self._folder is not None:
            await asyncio.to_thread(self._folder.close)

    async def wait_ended(self) -> str:
        started = self._running()
        await asyncio.wait([started.llm.output_handler])
        return "it was closed" if self._closed else GONE

    def _running(self) -> StartedLLM:
        if self._closed:
            raise EngineClosedError("the engine is closed")
        if self._started is None:
            raise EngineError("the engine has not been started: await engine.start() first")
        if self._broken:
            raise EngineError(self._broken)
        return self._started

    def _fail_held(self, error: InfrastructureError) -> None:
        for held in self._held.values():
            if not held.admission.done():
                held.admission.set_exception(error)
            elif held.collector is not None:
                held.collector.put(error)

    # --------------------------------------------------------------------------------------------------- requests

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        started = self._running()
        started.tokens.check(request, held=self._held)
        # vLLM takes what another engine sampled for a part of the prompt.
        depends = ("grammar", "presence_penalty", "frequency_penalty", "bad_words")
        named = [name for name in depends if getattr(request.sampling, name)]
        if named and request.continued_tokens:
            raise ContinuationError(
                f"request {request.request_id!r} was begun with {', '.join(named)} by a replica that is gone, and vLLM "
                "cannot go on in the middle of that: send the request again"
            )
        # In a thread and within limits: vLLM would compile any grammar, on its event loop.
        await started.tokens.guide(request, held=self._held)
        if request.adapter and request.adapter not in self._served_adapters():
            raise InvalidDataError(f"request {request.request_id!r} is for adapter {request.adapter!r}: none is served")
        held = VLLMRequest(
            started.tokens.row(request), version_at=lambda version: self._version_at(request.adapter, version)
        )
        held.row.end_if_complete()
        if held.row.finish_reason is not None:
            self._finished += 1
            yield GenerationChunk(token_ids=(), log_probs=(), weight_versions=(), finish_reason=held.row.finish_reason)
            return
        self._held[request.request_id] = held
        self._queue.arrive(held, probe=request.probe)
        self._admit()
        ended = False
        try:
            if not await held.admission:
                ended = True
                self._aborted += 1
                yield _ABORTED
                return
            self._prompt_tokens += len(request.prompt_token_ids)
            while not ended:
                chunk = await self._next_chunk(held, started)
                self._tokens_generated += len(chunk.token_ids)
                ended = chunk.finish_reason is not None
                if ended:
                    self._aborted += chunk.finish_reason == "abort"
                    self._finished += chunk.finish_reason != "abort"
                    self._release(held)
                yield chunk
        finally:
            self._release(held)
            if not ended and held.collector is not None and not self._closed:
                await started.llm.abort([held.collector.request_id], internal=True)

    def _served_adapters(self) -> Mapping[str, int]:
        return {} if self._adapters is None else self._adapters.serving

    def _version_at(self, adapter: str, version: int) -> int:
        return version if self._adapters is None else self._adapters.version_of(adapter, at=version)

    def _admit(self) -> None:
        for held in self._queue.admit():
            if not held.admission.done():
                held.admission.set_result(True)

    def _release(self, held: VLLMRequest) -> None:
        if self._held.get(held.row.request_id) is held:
            del self._held[held.row.request_id]
            self._queue.leave(held)
            self._admit()

    async def _next_chunk(self, held: VLLMRequest, started: StartedLLM) -> GenerationChunk:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            while True:
                if held.collector is None:
                    await self._submit(held, started)
                    if held.collector is None:
                        return _ABORTED
                output = await held.collector.get()
                if held.restart and not held.aborted:
                    held.restart, held.collector, held.state = False, None, None
                    continue
                chunk = held.take(output)
                if held.row.ended and not output.finished:  # at a stop string, which vLLM does not have
                    await started.llm.abort([held.collector.request_id], internal=True)
                if chunk is not None:
                    return chunk
        except EngineDeadError as error:
            raise EngineError(GONE) from error

    async def _submit(self, held: VLLMRequest, started: StartedLLM) -> None:
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input
        from vllm.lora.request import LoRARequest

        async with self._submitting:  # an update of the weights meets each request either submitted or not
            self._running()
            if held.aborted:
                return
            self._submitted += 1
            name = f"{self._submitted}-{held.row.request_id}"
            adapter, lora = held.row.adapter, None
            if self._adapters is not None and adapter in self._adapters.serving:
                # vLLM reads the path of an adapter that is not loaded: there is none.
                lora = LoRARequest(adapter or "policy", self._adapters.numbers[adapter], lora_path="loaded")
            salt = f"v{self._version_at(adapter, self._version)}"
            prompt = tokens_input(list(held.row.tokens), cache_salt=salt)
            try:
                priority = -1 if held.row.probe else 0
                held.collector = await started.llm.add_request(
                    name, prompt, held.sampling_params(), lora_request=lora, priority=priority
                )
            except (ValueError, VLLMClientError) as error:
                raise InvalidDataError(f"vLLM does not take request {held.row.request_id!r}: {error}") from error
            except asyncio.CancelledError:
                await started.llm.abort(name)
                raise
            held.state = started.llm.output_processor.request_states.get(held.collector.request_id)

    async def abort(self, request_id: str) -> bool:
        started = self._running()
        held = self._held.get(request_id)
        if held is None:
            return False
        held.aborted = True
        if not held.admission.done():
            held.admission.set_result(False)
        async with self._submitting:
            if held.collector is not None:
                await started.llm.abort([held.collector.request_id], internal=True)
        return True

    # ------------------------------------------------------------------------------------------------------ pause

    async def pause(self) -> None:
        await self._set_paused(True)

    async def resume(self) -> None:
        await self._set_paused(False)

    async def _set_paused(self, paused: bool) -> None:
        started = self._running()
        self._queue.paused = paused

        async def follow() -> None:
            async with self._ordering:
                if self._queue.asleep:
                    return  # wake() follows it
                if self._queue.paused:
                    await started.llm.pause_generation(mode="keep", clear_cache=False)
                else:
                    await started.llm.resume_generation()
                    self._admit()

        await self._shield(follow(), started)

    # ------------------------------------------------------------------------------------------------------ sleep

    async def sleep(self) -> None:
        """Have vLLM move the weights to the host and drop its KV cache; on a CPU it only stops."""
        check_sleep_mode(self._settings.sleep_mode)
        await self._set_asleep(True)

    async def wake(self) -> None:
        await self._set_asleep(False)

    async def _set_asleep(self, asleep: bool) -> None:
        started = self._running()
        llm, queue = started.llm, self._queue

        async def follow() -> None:
            async with self._updating, self._ordering:
                if asleep and not queue.asleep:
                    queue.asleep = True
                    await llm.sleep(level=1, mode="keep")
                elif not asleep and queue.asleep:
                    await llm.wake_up()
                    if queue.paused:  # vLLM resumes as it wakes up
                        await llm.pause_generation(mode="keep", clear_cache=False)
                    queue.asleep = False
                    self._admit()

        await self._shield(follow(), started)

    async def _shield(self, operation: Coroutine[Any, Any, None], started: StartedLLM) -> None:
        """Finish an operation even if the caller is cancelled, but not once vLLM's engine core is gone."""
        await shield_until_done(operation, ended=started.llm.output_handler, ended_error=EngineError(GONE))

    # ---------------------------------------------------------------------------------------------------- weights

    async def prepare_weights(self, tensors: Mapping[str, torch.Tensor], *, version: int) -> None:
        """Publish the tensors through the engine's transport, and have the ranks pull them."""
        self._running()
        await publish_into(self, tensors, version=version, spec=self._transport)

    async def fetch_weights(self, manifest: WeightManifest) -> None:
        self._running()
        updates = self._weight_updates()
        async with self._updating:
            await updates.fetch(manifest, after=self._version)

    def _weight_updates(self) -> WeightUpdates:
        if self._updates is None:
            raise WeightError("the engine was made without a transport, so it takes no weights: give transport=")
        return self._updates

    async def commit_weights(self, version: int, *, kv_cache: KVCachePolicy = "keep") -> None:
        """Load the fetched version while no step runs.

        A commit that has begun is finished even if the caller is cancelled. After one that fails half-way the engine
        does not serve any more.
        """
        started = self._running()
        await self._shield(self._commit(started, version, recompute=kv_cache == "recompute"), started)

    async def _commit(self, started: StartedLLM, version: int, *, recompute: bool) -> None:
        llm, clock, updates = started.llm, asyncio.get_running_loop().time, self._weight_updates()
        async with self._updating, self._ordering:
            updates.check(version)
            if self._queue.asleep:
                raise WeightError(
                    f"weight version {version} cannot be loaded while the engine is asleep: wake it first"
                )
            self._queue.held = True
            try:
                async with self._submitting:
                    begin = clock()
                    await llm.pause_generation(mode="keep", clear_cache=recompute)
                    changed = await updates.load(version)
                    self._version = version
                    await self._restart_early(started, changed)
                    if not self._queue.paused:
                        await llm.resume_generation()
                    self.commit_pause_s = clock() - begin
            except Exception as error:
                self._broken = f"weight version {version} was loaded in part: {type(error).__name__}: {error}"
                failure = (LiveWeightsError if NOT_PROVEN in str(error) else EngineError)(self._broken)
                self._fail_held(failure)
                raise failure from error
            finally:
                self._queue.held = False
                self._admit()

    async def _restart_early(self, started: StartedLLM, adapters: frozenset[str] | None) -> None:
        """Have requests without a token begin again: they read the prefix cache of the weights before.

        Those of ``adapters`` only, where only these have changed.
        """
        early = [each for each in self._held.values() if each.collector is not None and not each.began]
        early = [each for each in early if adapters is None or each.row.adapter in adapters]
        for held in early:
            held.restart = True
        await started.llm.abort([held.collector.request_id for held in early], internal=True)

    # ----------------------------------------------------------------------------------------------- observation

    async def health(self, deadline_s: float) -> EngineHealth:
        """Generate one real token, before all waiting requests and beside ``max_running_requests`` others."""
        return await check_health(self._probe, lambda: self._version, deadline_s=deadline_s)

    async def _probe(self) -> None:
        started = self._running()
        if self._queue.asleep:
            raise EngineError("the engine is asleep: it decodes nothing until wake()")
        if self._queue.paused:
            raise EngineError("the engine is paused: it decodes nothing until resume()")
        await self._probe_vllm(started)

    async def _probe_vllm(self, started: StartedLLM) -> None:
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        row = Row(
            request_id="probe",
            tokens=[0],
            prompt_length=1,
            length_limit=2,
            sampling=SamplingParams(max_new_tokens=1, temperature=0.0),
            seed=0,
        )
        self._submitted += 1
        name, prompt = f"{self._submitted}-probe", tokens_input([0], cache_salt="probe")
        try:
            collector = await started.llm.add_request(name, prompt, VLLMRequest(row).sampling_params(), priority=-1)
            output = await collector.get()
        except EngineDeadError as error:
            raise EngineError(GONE) from error
        except asyncio.CancelledError:
            await started.llm.abort(name)
            raise
        if not output.outputs[0].token_ids:
            raise EngineError("the probe was aborted")

    def statistics(self) -> RolloutEngineStatistics:
        started, queue = self._started, self._queue
        if started is None:
            raise EngineError("the engine has not been started: await engine.start() first")
        meter, capacity = started.meter, started.kv_cache_capacity_tokens
        return RolloutEngineStatistics(
            running=queue.admitted,
            waiting=queue.waiting,
            paused=queue.paused,
            weight_version=self._version,
            tokens_generated=self._tokens_generated,
            prompt_tokens=self._prompt_tokens,
            requests_finished=self._finished,
            requests_aborted=self._aborted,
            kv_cache_tokens=round(meter.kv_cache_usage * capacity),
            kv_cache_capacity_tokens=capacity,
            decode_steps=meter.decode_steps,
            busy_s=meter.busy_s,
        )
