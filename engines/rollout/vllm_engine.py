"""The rollout engine on vLLM: its AsyncLLM behind our contract, with our weight transport and our versions.

    engine = RemoteEngine("path/to/model", engine="vllm", python=".venv-vllm/bin/python", transport=spec)

vLLM needs an environment of its own (``asyncrl engine install vllm``), so this class is made in the process of that
environment, by :mod:`engines.rollout.engine_process`; RemoteEngine is its face elsewhere.

- Versions are stamped by vLLM's engine core with every step, and change only while no step is under way.
- The prefix cache is salted with the version, so nothing computed by older weights serves a request that begins later.
  Requests in flight keep their keys and values, or have them computed again, as asked.
- A request chooses its salt when it begins. One whose first token has not been sampled when the weights change begins
  once more.
- Weights are fetched and verified by every rank in a thread while decoding goes on. The pause is vLLM's layer-wise
  load out of memory.
"""

# vLLM lives in an environment of its own, where the type checkers do not look.
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from typing import Any

import torch

from asyncrl.errors import (
    ConfigError,
    EngineClosedError,
    EngineError,
    InvalidDataError,
    WeightError,
)
from asyncrl.interfaces import (
    EngineHealth,
    GenerationChunk,
    GenerationRequest,
    KVCachePolicy,
    PauseMode,
    RolloutEngineStatistics,
    SamplingParams,
)
from asyncrl.owned_folder import OwnedFolder
from asyncrl.weights.manifest import WeightManifest
from asyncrl.weights.transport import TransportSpec
from engines.rollout.vllm_adapter.gate import Gate
from engines.rollout.vllm_adapter.orders import carry_out
from engines.rollout.vllm_adapter.request import VLLMRequest, check_request
from engines.rollout.vllm_adapter.starting import StartedLLM, VLLMSettings, start
from engines.rollout.vllm_adapter.updates import GONE, WeightUpdates

__all__ = ["VLLMEngine"]

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_ABORTED = GenerationChunk(token_ids=(), log_probs=(), weight_versions=(), finish_reason="abort")


class VLLMEngine:
    """A :class:`~asyncrl.interfaces.SeparateEngine` over vLLM.

    Args:
        model_path: Hugging Face folder or hub id.
        dtype: ``auto``, ``float32``, ``bfloat16`` or ``float16``: of weights and KV cache.
        max_running_requests: most requests that vLLM works on; others wait.
        max_model_tokens: context length, prompt included; the model's own by default.
        kv_cache_bytes: size of the paged KV cache; by default vLLM's choice on GPUs, 1 GiB on a CPU.
        prefix_caching: share keys and values of equal beginnings, among requests of one weight version.
        compile: torch.compile and CUDA graphs; by default on GPUs and not on a CPU, where it costs a minute a start.
        arguments: further arguments of vLLM's ``AsyncEngineArgs`` (``tensor_parallel_size``).
        weight_version: version of the weights in ``model_path``.
        threads: OpenMP threads of each rank.
        seed: of requests without a seed of their own.
        transport: where versions are fetched from; None if it never gets any.
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str = "auto",
        max_running_requests: int = 64,
        max_model_tokens: int | None = None,
        kv_cache_bytes: int | None = None,
        prefix_caching: bool = True,
        compile: bool | None = None,  # noqa: A002 - what everybody calls it
        arguments: Mapping[str, Any] | None = None,
        weight_version: int = 0,
        threads: int = 1,
        seed: int = 0,
        transport: TransportSpec | None = None,
    ) -> None:
        if dtype not in _DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}", path="dtype")
        for name, value in (("max_running_requests", max_running_requests), ("threads", threads)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}", path=name)
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
            arguments=dict(arguments or {}),
        )
        self._transport = transport
        self._version = weight_version
        self._folder: OwnedFolder | None = None
        self._started: StartedLLM | None = None
        self._updates: WeightUpdates | None = None
        self._gate: Gate[VLLMRequest] = Gate(max_running_requests)
        self._held: dict[str, VLLMRequest] = {}
        self._submitted = 0
        self._changed = asyncio.Event()
        self._starting = asyncio.Lock()
        self._updating = asyncio.Lock()
        self._ordering = asyncio.Lock()
        self._submitting = asyncio.Lock()
        self._closed = False
        self._broken = ""
        self._tokens_generated = self._prompt_tokens = self._finished = self._aborted = 0
        self.commit_pause_s = 0.0
        """How long the last commit kept decoding from going on."""

    # ------------------------------------------------------------------------------------------------------- life

    @property
    def weight_version(self) -> int:
        return self._version

    async def start(self) -> None:
        """Start vLLM and have it generate a token.

        Raises:
            EngineError: vLLM is not installed in this environment, or does not serve the model.
        """
        async with self._starting:
            if self._closed:
                raise EngineClosedError("the engine is closed")
            if self._started is None:
                await self._start()

    async def _start(self) -> None:
        folder = self._folder = await asyncio.to_thread(OwnedFolder, "vllm")
        started = self._started = await asyncio.to_thread(start, self._settings, folder.path)
        llm = started.llm
        try:
            if self._transport is not None:
                self._updates = WeightUpdates(started, folder.path)
                await self._updates.open(self._transport)
            await llm.update_weight_version(str(self._version))
            await self._probe(started)
        except Exception as error:
            await self.close()
            raise EngineError(f"vLLM did not start: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        self._closed = True
        started, self._started = self._started, None
        for held in list(self._held.values()):
            if not held.door.done():
                held.door.set_exception(EngineClosedError("the engine is closed"))
        self._tell()
        if self._updates is not None:
            await self._updates.close()
        if started is not None:
            for held in self._held.values():
                if held.collector is not None:
                    held.collector.put(EngineClosedError("the engine is closed"))
            await asyncio.to_thread(started.llm.shutdown)
        if self._folder is not None:
            await asyncio.to_thread(self._folder.close)

    async def wait_ended(self) -> str:
        """Wait until vLLM's engine core is gone; returns why."""
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

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # --------------------------------------------------------------------------------------------------- requests

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        started = self._running()
        if request.sampling.grammar and started.grammars is not None:
            # In a thread and within limits: vLLM would compile whatever it is given, on its event loop.
            await asyncio.to_thread(
                started.grammars.guide, request.sampling.grammar, (), stop_token_ids=started.stop_token_ids
            )
        held = self._take_in(request, started)
        if (reason := held.complete()) is not None:
            self._finished += 1
            yield GenerationChunk(token_ids=(), log_probs=(), weight_versions=(), finish_reason=reason)
            return
        self._held[request.request_id] = held
        held.number = self._gate.arrive(held)
        self._admit()
        ended = False
        try:
            if not await held.door:
                ended = True
                self._aborted += 1
                yield _ABORTED
                return
            self._prompt_tokens += len(request.prompt_token_ids)
            while not ended:
                chunk = await self._next(held, started)
                self._tokens_generated += len(chunk.token_ids)
                ended = chunk.finish_reason is not None
                if ended:
                    self._aborted += chunk.finish_reason == "abort"
                    self._finished += chunk.finish_reason != "abort"
                    self._let_go(held)
                yield chunk
        finally:
            self._let_go(held)
            if not ended and held.collector is not None and not self._closed:
                await started.llm.abort([held.collector.request_id], internal=True)

    def _take_in(self, request: GenerationRequest, started: StartedLLM) -> VLLMRequest:
        if request.request_id in self._held:
            raise InvalidDataError(
                f"request {request.request_id!r} is already being generated: ids are unique among the requests held"
            )
        check_request(
            request,
            vocabulary=started.vocabulary,
            max_model_tokens=started.max_model_tokens,
            tokenizer=started.tokenizer is not None,
        )
        decode = (
            partial(started.tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if started.tokenizer is not None
            else None
        )
        return VLLMRequest(
            request,
            stop_token_ids=started.stop_token_ids.union(request.sampling.stop_token_ids),
            max_model_tokens=started.max_model_tokens,
            decode=decode,
        )

    def _admit(self) -> None:
        for held in self._gate.admit():
            if not held.door.done():
                held.door.set_result(True)

    def _let_go(self, held: VLLMRequest) -> None:
        if self._held.get(held.request.request_id) is held:
            del self._held[held.request.request_id]
            self._gate.leave(held.number)
            self._admit()
            self._tell()

    async def _next(self, held: VLLMRequest, started: StartedLLM) -> GenerationChunk:
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
                chunk = held.chunk(output)
                if chunk.finish_reason == "stop" and not output.finished:  # a stop string, which vLLM does not know
                    await started.llm.abort([held.collector.request_id], internal=True)
                return chunk
        except EngineDeadError as error:
            raise EngineError(GONE) from error

    async def _submit(self, held: VLLMRequest, started: StartedLLM) -> None:
        """Hand it to vLLM, unless it was aborted meanwhile."""
        from vllm.inputs.engine import tokens_input

        async with self._submitting:  # an update of the weights meets each request either submitted or not
            self._running()
            if held.aborted:
                return
            self._submitted += 1
            name = f"{self._submitted}-{held.request.request_id}"
            prompt = tokens_input(list(held.request.prompt_token_ids), cache_salt=f"v{self._version}")
            try:
                held.collector = await started.llm.add_request(name, prompt, held.sampling_params())
            except ValueError as error:
                raise InvalidDataError(f"vLLM does not take request {held.request.request_id!r}: {error}") from error
            except asyncio.CancelledError:
                await started.llm.abort(name)
                raise
            held.state = started.llm.output_processor.request_states.get(held.collector.request_id)

    async def abort(self, request_id: str) -> bool:
        started = self._running()
        held = self._held.get(request_id)
        if held is None:
            return False
        await self._abort([held], started)
        return True

    async def _abort(self, requests: list[VLLMRequest], started: StartedLLM) -> None:
        """End them; what vLLM has said of them by now is still delivered."""
        for held in requests:
            held.aborted = True
            if not held.door.done():
                held.door.set_result(False)
        async with self._submitting:
            inside = [held.collector.request_id for held in requests if held.collector is not None]
            await started.llm.abort(inside, internal=True)

    # ------------------------------------------------------------------------------------------------------ pause

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop decoding; when this returns no step is running.

        ``drain`` waits until the requests submitted so far have finished; :meth:`resume`, another pause or
        :meth:`close` meanwhile end the wait.
        """
        started, gate = self._running(), self._gate
        if mode == "drain":
            gate.drain()
            if gate.state == "draining":
                await self._go(started)  # it may have been paused
                self._admit()
            while gate.state == "draining":
                await self._changed.wait()
                self._running()
        else:
            gate.pause()
            self._tell()
        if mode == "abort":
            await self._abort(list(self._held.values()), started)
        await self._stop(started)

    async def resume(self) -> None:
        started = self._running()
        self._gate.resume()
        self._tell()
        await self._go(started)
        self._admit()

    async def _stop(self, started: StartedLLM) -> None:
        async def stop() -> None:
            async with self._ordering:
                if self._gate.state == "paused":
                    await started.llm.pause_generation(mode="keep", clear_cache=False)

        await carry_out(stop(), ended=started.llm.output_handler)

    async def _go(self, started: StartedLLM) -> None:
        async def go() -> None:
            async with self._ordering:
                if self._gate.state != "paused":
                    await started.llm.resume_generation()

        await carry_out(go(), ended=started.llm.output_handler)

    # ---------------------------------------------------------------------------------------------------- weights

    async def prepare_weights(self, tensors: Mapping[str, torch.Tensor], *, version: int) -> None:
        """Publish the tensors through a transport of this engine's own, and have the ranks pull them."""
        self._running()
        if self._transport is None:
            raise WeightError("the engine was made without a transport: it cannot be given weights")
        transport = await asyncio.to_thread(self._transport.make)
        try:
            manifest = await asyncio.to_thread(transport.publish, tensors.items(), version=version)
            await self.fetch_weights(manifest)
        finally:
            await asyncio.to_thread(transport.close)

    async def fetch_weights(self, manifest: WeightManifest) -> None:
        self._running()
        updates = self._updates
        if updates is None:
            raise WeightError("the engine was made without a transport: it cannot be given weights")
        async with self._updating:
            await updates.fetch(manifest, after=self._version)

    async def commit_weights(self, version: int, *, kv_cache: KVCachePolicy = "keep") -> None:
        """Load the fetched version while nothing runs; see the contract.

        A commit that has begun is finished whatever becomes of its caller. One that fails half-way leaves an engine
        that serves nothing any more.
        """
        started = self._running()
        commit = self._commit(started, version, recompute=kv_cache == "recompute")
        await carry_out(commit, ended=started.llm.output_handler)

    async def _commit(self, started: StartedLLM, version: int, *, recompute: bool) -> None:
        llm, clock, updates = started.llm, asyncio.get_running_loop().time, self._updates
        if updates is None:
            raise WeightError("the engine was made without a transport: it cannot be given weights")
        async with self._updating, self._ordering:
            updates.check(version)
            self._gate.hold(True)
            try:
                async with self._submitting:
                    begin = clock()
                    await llm.pause_generation(mode="keep", clear_cache=recompute)
                    await updates.load(version)
                    self._version = version
                    await self._begin_again(started)
                    if self._gate.state != "paused":
                        await llm.resume_generation()
                    self.commit_pause_s = clock() - begin
            except Exception as error:
                self._break(f"weight version {version} was loaded in part: {type(error).__name__}: {error}")
                raise WeightError(self._broken) from error
            finally:
                self._gate.hold(False)
                self._admit()

    async def _begin_again(self, started: StartedLLM) -> None:
        """Requests without a token would read the prefix cache of the weights before."""
        early = [each for each in self._held.values() if each.collector is not None and not each.began]
        for held in early:
            held.restart = True
        await started.llm.abort([held.collector.request_id for held in early], internal=True)

    def _break(self, reason: str) -> None:
        """Nothing is served any more."""
        self._broken = reason
        for held in self._held.values():
            if not held.door.done():
                held.door.set_exception(EngineError(reason))
            elif held.collector is not None:
                held.collector.put(EngineError(reason))
        self._tell()

    # ----------------------------------------------------------------------------------------------- observation

    async def health(self, deadline_s: float) -> EngineHealth:
        """Generate one real token, before all requests that wait and in a place of its own.

        A paused engine decodes nothing by order, which a probe does not override: it answers unhealthy at once, with
        the reason.
        """
        clock = asyncio.get_running_loop().time
        begin, error = clock(), ""
        try:
            started = self._running()
            if self._gate.state == "paused":
                error = "the engine is paused: it decodes nothing until resume()"
            else:
                async with asyncio.timeout(deadline_s):
                    await self._probe(started)
        except TimeoutError:
            error = f"no token within {deadline_s} s"
        except EngineError as failure:
            error = str(failure)
        return EngineHealth(healthy=not error, latency_s=clock() - begin, weight_version=self._version, error=error)

    async def _probe(self, started: StartedLLM) -> None:
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        request = GenerationRequest(
            request_id="probe", prompt_token_ids=(0,), sampling=SamplingParams(max_new_tokens=1, temperature=0.0)
        )
        probe = VLLMRequest(request, stop_token_ids=frozenset(), max_model_tokens=2, decode=None)
        self._submitted += 1
        name, prompt = f"{self._submitted}-probe", tokens_input([0], cache_salt="probe")
        try:
            collector = await started.llm.add_request(name, prompt, probe.sampling_params(), priority=-1)
            output = await collector.get()
        except EngineDeadError as error:
            raise EngineError(GONE) from error
        except asyncio.CancelledError:
            await started.llm.abort(name)
            raise
        if not output.outputs[0].token_ids:
            raise EngineError("the probe was aborted")

    def statistics(self) -> RolloutEngineStatistics:
        started, gate = self._started, self._gate
        if started is None:
            raise EngineError("the engine has not been started: await engine.start() first")
        meter, capacity = started.meter, started.kv_cache_capacity_tokens
        return RolloutEngineStatistics(
            running=gate.inside,
            waiting=gate.waiting,
            paused=gate.state != "running",
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
