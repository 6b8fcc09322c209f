"""SGLang as a rollout engine, in a process of its own that starts no server.

    engine = RemoteEngine("path/to/model", engine="sglang", python=".venv-sglang/bin/python", transport=spec)

Token ids go in and come out; SGLang neither tokenises nor detokenises here. What it samples is appended piece by piece
to rows (:class:`engines.rollout.request.Row`), where stop strings and lengths are watched.

SGLang's scheduler stamps versions (:mod:`engines.rollout.sglang.scheduler`). Its prefix cache ignores them, so
each request carries the version it begins under as its cache's salt: an entry of older weights is never found.
Requests that have not sampled anything when weights are committed begin again under the new ones.

Log-probs are SGLang's own of the distribution sampled from: after temperature; under top-p or top-k, of the truncated
and renormalised one. Greedy ones are those of the untempered distribution.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from asyncrl.errors import (
    AsyncRLError,
    EngineClosedError,
    EngineError,
    InvalidDataError,
    WeightError,
    WeightMismatchError,
)
from asyncrl.interfaces import (
    DeviceShare,
    EngineHealth,
    GenerationChunk,
    GenerationRequest,
    KVCachePolicy,
    RolloutEngineStatistics,
)
from asyncrl.io import LockedTemporaryDirectory
from asyncrl.runtime import shield_until_done
from asyncrl.weights import Adapter, WeightManifest
from engines.rollout.checks import check_adapters_awake, check_health, check_sleep_mode
from engines.rollout.model_tensors import AdapterVersions, ModelTensors, adapted_module, check_prepared
from engines.rollout.request import ModelTokens, load_tokenizer
from engines.rollout.sglang.launch import SGLangOptions, launch
from engines.rollout.sglang.request import SGLangRequest
from engines.rollout.sglang.weights import StagedWeights, completed

# SGLang lives in an environment of its own, where the type checkers do not look.
# pyright: reportMissingImports=false

_log = logging.getLogger(__name__)


class SGLangControl:
    """A running SGLang, which carries out each order between two of its steps. Made as ``launch`` demands; blocks.

    ``manager`` is SGLang's TokenizerManager, which takes requests. Any: it has no typed interface.
    """

    def __init__(self, options: SGLangOptions, *, adaptable: Sequence[str] = ()) -> None:
        self._ranks = options.tensor_parallel
        self._folder = LockedTemporaryDirectory("sglang")
        self._engine = launch(options, self._folder.path, adaptable=adaptable)
        self.manager: Any = self._engine.tokenizer_manager
        loads = self.manager.load_snapshot_reader
        if loads.read_all():  # both sides have mapped the file, and SGLang would leave it behind
            Path(loads.path).unlink(missing_ok=True)
        self.manager.auto_create_handle_loop()
        self._half_loaded = False

    async def close(self) -> None:
        tasks = list(self.manager.asyncio_tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._engine.shutdown)
        await asyncio.to_thread(self._folder.close)

    async def freeze(self, mode: Literal["in_place", "retract"]) -> None:
        """Take no more steps. ``retract`` frees the KV cache of running requests, which is computed again later."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        await self.manager.pause_generation(PauseGenerationReqInput(mode=mode))

    async def wait_carried_out(self) -> None:
        await self.manager.get_internal_state()

    async def thaw(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self.manager.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    async def release_memory(self) -> None:
        """Have it free the memory of weights and KV cache, while it is frozen and has retracted what was running."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        await self.manager.release_memory_occupation(ReleaseMemoryOccupationReqInput())

    async def resume_memory(self) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        await self.manager.resume_memory_occupation(ResumeMemoryOccupationReqInput())

    async def load(self, named: Sequence[tuple[str, torch.Tensor]], *, version: int, flush: bool) -> None:
        """Have it load tensors in shared memory, while it is frozen. ``flush`` empties the cache.

        Raises:
            WeightError: SGLang did not; its weights are unknown then.
        """
        from sglang.srt.managers.io_struct import (
            BeginWeightUpdateReqInput,
            EndWeightUpdateReqInput,
            UpdateWeightsFromTensorReqInput,
        )
        from sglang.srt.utils import MultiprocessingSerializer

        manager = self.manager
        if self._half_loaded:  # SGLang takes one update at a time
            await manager.end_weight_update(EndWeightUpdateReqInput(), None)
        payloads = [MultiprocessingSerializer.serialize(list(named)) for _ in range(self._ranks)]
        update = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads, flush_cache=flush, weight_version=str(version)
        )
        self._half_loaded = True
        for call, order in (
            (manager.begin_weight_update, BeginWeightUpdateReqInput()),
            (manager.update_weights_from_tensor, update),
            (manager.end_weight_update, EndWeightUpdateReqInput()),
        ):
            done, message = await call(order, None)
            if not done:
                raise WeightError(f"SGLang did not take version {version}: {message}")
        self._half_loaded = False

    async def load_adapter(self, name: str, adapter: Adapter, tensors: Mapping[str, torch.Tensor]) -> None:
        """Have it load an adapter, whose tensors are in shared memory, under a name that is new to it.

        Raises:
            WeightError: it does not take the adapter.
        """
        from sglang.srt.managers.io_struct import LoadLoRAAdapterFromTensorsReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        modules = sorted({adapted_module(each).rpartition(".")[2] for each in tensors})
        config = {"peft_type": "LORA", "r": adapter.rank, "lora_alpha": adapter.alpha, "target_modules": modules}
        order = LoadLoRAAdapterFromTensorsReqInput(
            lora_name=name,
            config_dict=config,
            serialized_named_tensors=[MultiprocessingSerializer.serialize(dict(tensors)) for _ in range(self._ranks)],
        )
        done = await self.manager.load_lora_adapter_from_tensors(order, None)
        if not done.success:
            raise WeightError(f"SGLang did not take adapter {name}: {done.error_message}")

    async def unload_adapter(self, name: str) -> None:
        """Free an adapter, once its last request has ended."""
        from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

        done = await self.manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=name), None)
        if not done.success:
            raise WeightError(f"SGLang did not free adapter {name}: {done.error_message}")

    async def probe(self, number: int) -> None:
        async with aclosing(self.manager.generate_request(SGLangRequest.probe(number), None)) as pieces:
            async for piece in pieces:
                if piece["output_ids"]:
                    return
        raise EngineError("SGLang generated no token for the probe")

    @property
    def capacity_tokens(self) -> int:
        return sum(load.max_total_num_tokens for load in self._loads())

    @property
    def decode_steps(self) -> int:
        """Return the steps since the start, as of SGLang's last report."""
        return int(sum(load.decode_moments[0] for load in self._loads() if load.decode_moments))

    def _loads(self) -> list[Any]:
        return list(self.manager.load_snapshot_reader.read_all())


def _sglang_name(adapter: str, version: int) -> str:
    return f"{adapter}@{version}"


class SGLangEngine:
    """A :class:`~asyncrl.interfaces.RolloutEngine` over SGLang (0.5.23 is what it was tested with).

    Args:
        model_path: Hugging Face folder or hub id, with weights of version ``weight_version``.
        dtype: ``float32``, ``bfloat16`` or ``float16``.
        device: ``auto`` (CUDA where there is one), ``cuda`` or ``cpu``.
        max_running_requests: most rows in a decode step; others wait.
        max_model_tokens: context length, prompt included; the model's own by default. SGLang keeps two of them back.
        kv_cache_tokens: size of the KV cache; by default what memory allows, on CPU 16,384.
        tensor_parallel: devices that the model is spread over.
        deterministic: SGLang's deterministic inference, which not every device has. Without it seeds are not followed.
        max_adapter_rank: largest rank of adapters that are taken, and then no full weights; None: no adapters.
        max_adapters: number of adapters that can be served; each takes memory from the start.
        truncation_tokens: most tokens that top-p leaves: it chooses among so many of the likeliest.
        threads: compute threads on CPU.
        sleep_mode: allocate memory so that :meth:`sleep` can free it (not on a CPU).
        sglang: further arguments of SGLang's server.
    """

    pulls_weights: ClassVar[bool] = False
    sleep_options: ClassVar[Mapping[str, Any]] = {"sleep_mode": True}
    package: ClassVar[str] = "sglang"
    package_remedy: ClassVar[str] = (
        "make an environment with `asyncrl engine install sglang` and name its interpreter: rollout.python"
    )

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str = "float32",
        device: str = "auto",
        max_running_requests: int = 64,
        max_model_tokens: int | None = None,
        kv_cache_tokens: int | None = None,
        tensor_parallel: int = 1,
        deterministic: bool = False,
        max_adapter_rank: int | None = None,
        max_adapters: int = 4,
        truncation_tokens: int = 4096,
        weight_version: int = 0,
        threads: int | None = None,
        seed: int = 0,
        sleep_mode: bool = False,
        sglang: Mapping[str, Any] | None = None,
    ) -> None:
        check_adapters_awake(max_adapter_rank, sleep_mode=sleep_mode)
        self._options = SGLangOptions(
            model_path=model_path,
            dtype=dtype,
            device=device,
            weight_version=weight_version,
            max_running_requests=max_running_requests,
            max_model_tokens=max_model_tokens,
            kv_cache_tokens=kv_cache_tokens,
            tensor_parallel=tensor_parallel,
            deterministic=deterministic,
            max_adapter_rank=max_adapter_rank,
            max_adapters=max_adapters,
            truncation_tokens=truncation_tokens,
            threads=threads,
            seed=seed,
            sleep_mode=sleep_mode,
            more=sglang or {},
        )
        self._version = weight_version
        self._sglang: SGLangControl | None = None
        self._model_tokens: ModelTokens | None = None
        self._staged: StagedWeights | None = None
        self._adapters: AdapterVersions | None = None
        self._replaced: list[str] = []
        """SGLang's names of adapters that are not needed any more."""
        self._unloading: asyncio.Task[None] | None = None
        self._prepared: tuple[int, list[tuple[WeightManifest, dict[str, torch.Tensor]]]] | None = None
        self._held: dict[str, SGLangRequest] = {}
        self._begun: Counter[SGLangRequest] = Counter()  # twice while one that begins again is not yet out of SGLang
        self._seeds = random.Random(seed)  # noqa: S311 - sampling, not secrets
        self._numbers = count()
        self._paused = False
        self._asleep = False
        self._committing = False
        self._changed = asyncio.Event()
        self._starting = asyncio.Lock()
        self._updating = asyncio.Lock()
        self._ordering = asyncio.Lock()
        self._fenced = ""
        self._closed = False
        self._ended: asyncio.Future[None] | None = None
        """Done when a started engine is closed."""
        self._warned_of_seeds = False
        self._tokens = self._prompt_tokens = self._finished = self._aborted = 0
        self._busy_s = 0.0
        self._busy_since: float | None = None

    @classmethod
    def device_share(
        cls,
        *,
        device: str = "auto",
        kv_cache_tokens: int | None = None,
        tensor_parallel: int = 1,
        sglang: Mapping[str, Any] | None = None,
        **_others: Any,
    ) -> DeviceShare:
        given = sglang or {}
        bounded = kv_cache_tokens is not None or "mem_fraction_static" in given
        return DeviceShare(
            count=0 if device == "cpu" else tensor_parallel * given.get("pp_size", 1),
            room="" if bounded else "kv_cache_tokens, or sglang = {mem_fraction_static = 0.4}",
        )

    # -------------------------------------------------------------------------------------------- start and close

    @property
    def weight_version(self) -> int:
        return self._version

    async def start(self) -> None:
        async with self._starting:
            if self._closed:
                raise EngineClosedError("the engine is closed")
            if self._sglang is not None:
                return
            # Not in a thread: see launch(). Nothing else runs in this process yet.
            options, adaptable = self._options, list[str]()
            if options.max_adapter_rank is not None:
                tensors = ModelTensors.of_config(options.model_path, dtype=options.torch_dtype)
                adaptable = tensors.adaptable
                self._adapters = AdapterVersions(
                    tensors,
                    options.model_path,
                    weights=self._version,
                    max_rank=options.max_adapter_rank,
                    most=options.max_adapters,
                )
            self._ended = asyncio.get_running_loop().create_future()
            self._sglang = SGLangControl(options, adaptable=adaptable)
            self._model_tokens = self._read_tokens(self._sglang.manager.model_config)
            await self._sglang.probe(next(self._numbers))

    def _read_tokens(self, config: Any) -> ModelTokens:  # Any: SGLang's ModelConfig
        from transformers import AutoConfig, GenerationConfig

        model_path = self._options.model_path
        try:
            generation = GenerationConfig.from_pretrained(model_path)
        except OSError:  # the folder has none
            generation = GenerationConfig.from_model_config(AutoConfig.from_pretrained(model_path))
        return ModelTokens(
            model_path,
            load_tokenizer(model_path),
            eos_token_ids=[generation.eos_token_id],
            vocabulary=int(config.vocab_size),
            max_model_tokens=int(config.context_len),
        )

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._fail_held(EngineClosedError("the engine is closed"))
        if self._unloading is not None:
            self._unloading.cancel()
        if self._ended is not None:
            self._ended.set_result(None)
        if self._sglang is not None:
            await self._sglang.close()

    def _serving(self) -> SGLangControl:
        if self._closed:
            raise EngineClosedError("the engine is closed")
        if self._sglang is None:
            raise EngineError("the engine has not been started: await engine.start() first")
        return self._sglang

    async def _finish(self, order: Awaitable[None]) -> None:
        """Carry out an order even if the caller is cancelled, but not once the engine is closed."""
        await shield_until_done(order, ended=self._ended, ended_error=EngineClosedError("the engine is closed"))

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _fail_held(self, error: EngineError) -> None:
        for held in self._held.values():
            held.fail(error)
        self._notify()

    # --------------------------------------------------------------------------------------------------- requests

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        self._serving()
        if self._fenced:
            raise EngineError(self._fenced)
        tokens = self._model_tokens
        assert tokens is not None, "it serves"
        self._check(request, tokens)
        if request.adapter and request.adapter not in self.adapters:
            raise InvalidDataError(f"request {request.request_id!r} is for adapter {request.adapter!r}: none is served")
        await tokens.guide(request, held=self._held)  # within limits, which SGLang does not set
        seed = self._seeds.getrandbits(64) if request.sampling.seed is None else request.sampling.seed
        row = tokens.row(request, seed=seed)
        held = self._held[row.request_id] = SGLangRequest(row, vocabulary=tokens.vocabulary)
        self._prompt_tokens += row.prompt_length + row.continued
        self._count_busy()
        row.end_if_complete()
        if not row.ended:
            held.begin(self._read(held))
        try:
            while True:
                chunk = await held.reader.next_chunk()
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            del self._held[row.request_id]
            if row.finish_reason in ("stop", "length"):
                self._finished += 1
            else:
                self._aborted += 1
            self._count_busy()
            self._notify()
            await held.stop()

    def _check(self, request: GenerationRequest, tokens: ModelTokens) -> None:
        sampling, name = request.sampling, f"request {request.request_id!r}"
        tokens.check(request, held=self._held)
        if sampling.top_log_probs and sampling.temperature and (sampling.top_p < 1.0 or sampling.top_k):
            raise InvalidDataError(
                f"{name} asks for the likeliest tokens with top_p or top_k, which the sglang engine does not return"
            )
        if self._options.truncation_tokens < sampling.top_k < tokens.vocabulary:
            raise InvalidDataError(
                f"{name} asks for top_k={sampling.top_k}; the engine was started with "
                f"truncation_tokens={self._options.truncation_tokens}"
            )
        if sampling.seed is not None and not self._options.deterministic and not self._warned_of_seeds:
            self._warned_of_seeds = True
            _log.warning("seeds are not followed: SGLang does so only with deterministic=True")

    async def _read(self, held: SGLangRequest) -> None:
        row = held.row
        begun = Counter[SGLangRequest]()
        try:
            await self._wait_until_admitted(held)
            if not row.probe:
                begun[held] = 1
                self._begun += begun
            version = self.adapters.get(row.adapter)  # kept until the request begins again under another
            adapter = None if version is None else _sglang_name(row.adapter, version)
            if self._adapters is not None and version is None:
                version = self._adapters.version_of(row.adapter, at=self._version)
            salt = str(self._version if version is None else version)
            order = held.order(next(self._numbers), salt=salt, options=self._options, adapter=adapter)
            async with aclosing(self._serving().manager.generate_request(order, None)) as pieces:
                async for piece in pieces:
                    self._tokens += held.take(piece, version=version)
                    if row.ended:
                        break  # leaving the stream makes SGLang drop the request, if it would go on
            if not row.ended:
                raise EngineError("SGLang's stream ended before the request did")
        except AsyncRLError as error:
            held.fail(error)
        except ValueError as error:  # SGLang raises it for a request that it does not take
            held.fail(InvalidDataError(f"request {row.request_id!r}: {error}"))
        except Exception as error:  # noqa: BLE001 - raised by the reader
            held.fail(EngineError(f"{type(error).__name__}: {error}"))
        finally:
            self._begun -= begun
            self._count_busy()
            self._notify()

    async def _wait_until_admitted(self, held: SGLangRequest) -> None:
        while self._committing or self._paused or self._asleep or not (held.row.probe or self._has_room(held)):
            self._serving()
            if self._fenced:
                break
            await self._changed.wait()
        if self._fenced:
            raise EngineError(self._fenced)

    def _has_room(self, held: SGLangRequest) -> bool:
        """Return whether fewer others are in SGLang than may run: in its queue a probe would wait behind them."""
        return len(self._begun) - (held in self._begun) < self._options.max_running_requests

    async def abort(self, request_id: str) -> bool:
        manager = self._serving().manager
        held = self._held.get(request_id)
        if held is None or held.row.ended:
            return False
        if held.sglang_id is None or self._paused or self._asleep:  # SGLang sends nothing about it now
            held.end_here()
        else:
            held.aborted = True
            manager.abort_request(held.sglang_id)
        self._notify()
        return True

    # ------------------------------------------------------------------------------------------------------ pause

    async def pause(self) -> None:
        sglang = self._serving()
        async with self._ordering:
            await self._finish(self._pause(sglang))

    async def _pause(self, sglang: SGLangControl) -> None:
        self._paused = True
        self._count_busy()
        await sglang.freeze("in_place")
        await sglang.wait_carried_out()
        self._end_aborted()
        self._notify()

    def _end_aborted(self) -> None:
        """End the requests that are being aborted: SGLang ends them a step later, and takes none while it is frozen."""
        for held in self._held.values():
            if held.aborted:
                held.end_here()

    async def resume(self) -> None:
        sglang = self._serving()
        async with self._ordering:
            await self._finish(self._resume(sglang))

    async def _resume(self, sglang: SGLangControl) -> None:
        if not (self._fenced or self._asleep):
            await sglang.thaw()
        self._paused = False
        self._count_busy()
        self._notify()

    # ------------------------------------------------------------------------------------------------------ sleep

    async def sleep(self) -> None:
        """Have SGLang move the weights to the host and drop its KV cache; on a CPU it only stops."""
        check_sleep_mode(self._options.sleep_mode)
        await self._finish(self._sleep(self._serving()))

    async def _sleep(self, sglang: SGLangControl) -> None:
        async with self._updating, self._ordering:
            if self._asleep:
                return
            self._asleep = True
            self._count_busy()
            # SGLang ends where one waits for its grammar as the memory is freed: these begin again afterwards.
            self._restart_early()
            await sglang.wait_carried_out()  # the order to drop them has arrived
            await sglang.wait_carried_out()  # and a step has passed, which drops them
            await sglang.freeze("retract")
            self._end_aborted()
            await sglang.release_memory()

    async def wake(self) -> None:
        await self._finish(self._wake(self._serving()))

    async def _wake(self, sglang: SGLangControl) -> None:
        async with self._updating, self._ordering:
            if self._asleep:
                await sglang.resume_memory()
                if not (self._paused or self._fenced):
                    await sglang.thaw()
                self._asleep = False
                self._count_busy()
        self._notify()

    # ---------------------------------------------------------------------------------------------------- weights

    @property
    def adapters(self) -> Mapping[str, int]:
        return {} if self._adapters is None else self._adapters.serving

    async def prepare_adapters(
        self, parts: Sequence[tuple[WeightManifest, Mapping[str, torch.Tensor]]], *, version: int
    ) -> None:
        sglang, adapters = self._serving(), self._adapters
        if adapters is None:
            raise WeightMismatchError(
                f"version {version} is an adapter, and SGLang was started without adapters (max_adapter_rank)"
            )
        async with self._updating:
            self._prepared = None
            while self._unloading or (self._replaced and not self._paused):
                await self._unload(sglang)
            await asyncio.to_thread(adapters.check, parts[-1][0])  # it has those before beside it
            self._prepared = (
                version,
                [
                    (manifest, completed(tensors, adapters.tensors.live, rank=manifest.adapter.rank))
                    for manifest, tensors in parts
                    if manifest.adapter is not None
                ],
            )

    async def _unload(self, sglang: SGLangControl) -> None:
        """Free a replaced adapter. SGLang does so when its last request has ended, and takes no such order twice.

        So one whose caller is cancelled goes on, and the next call waits for it. In a pause, where no request ends,
        that call fails.
        """
        if self._unloading is None:
            self._unloading = asyncio.create_task(sglang.unload_adapter(self._replaced.pop()))
        elif self._paused and not self._unloading.done():
            raise WeightError(
                "the engine is paused, and an adapter that was replaced is freed first, when its last request has "
                "ended: resume() it, and prepare again"
            )
        await asyncio.wait([self._unloading])
        self._serving()
        ended, self._unloading = self._unloading, None
        await ended

    async def _commit_adapters(self, adapters: AdapterVersions, version: int) -> None:
        """Load the prepared adapters beside those that serve, while decoding goes on, then move requests to them.

        SGLang does not exchange an adapter that has requests: these begin again under the new one, after their tokens.
        """
        sglang, before = self._serving(), adapters.serving
        check_prepared(version, None if self._prepared is None else self._prepared[0])
        assert self._prepared is not None
        parts = self._prepared[1]
        loaded: list[str] = []
        try:
            for manifest, tensors in parts:
                assert manifest.adapter is not None
                name = _sglang_name(manifest.adapter.name, manifest.version)
                await sglang.load_adapter(name, manifest.adapter, tensors)
                loaded.append(name)
        except Exception:
            for name in loaded:  # SGLang takes no name twice, and the commit may be repeated
                try:
                    await sglang.unload_adapter(name)
                except WeightError:
                    self._replaced.append(name)
            raise
        changed = adapters.committed([manifest for manifest, _ in parts])
        self._version, self._prepared = version, None
        for held in self._held.values():
            if held.row.adapter in changed and held.sglang_id is not None and not held.row.ended:
                if held.aborted:
                    held.end_here()
                else:
                    held.begin(self._read(held))
        self._replaced += [_sglang_name(name, before[name]) for name in changed & before.keys()]
        self._notify()

    async def prepare_weights(self, tensors: Mapping[str, torch.Tensor], *, version: int) -> None:
        self._serving()
        if self._adapters is not None:
            raise WeightMismatchError(
                f"version {version} is full weights, and SGLang was started for adapters, which it takes alone"
            )
        stop = threading.Event()

        def write() -> None:
            if self._staged is None:
                self._staged = StagedWeights.of_model(
                    self._options.model_path, dtype=self._options.torch_dtype, version=self._version
                )
            self._staged.write(tensors, version=version, stop=stop)

        async with self._updating:
            await shield_until_done(asyncio.to_thread(write), on_cancel=stop.set)

    async def commit_weights(self, version: int, *, kv_cache: KVCachePolicy = "keep") -> None:
        """Have SGLang load the prepared tensors between two steps.

        With ``recompute`` its whole cache is emptied. A commit that has begun is finished even if the caller is
        cancelled. One that fails half-way (:class:`WeightError`) leaves unknown weights: the engine is fenced then, and
        serves again after a commit that succeeds.
        """
        sglang, adapters = self._serving(), self._adapters
        async with self._updating, self._ordering:
            if adapters is not None:
                await self._finish(self._commit_adapters(adapters, version))
            else:
                await self._finish(self._commit(sglang, version, kv_cache=kv_cache))

    async def _commit(self, sglang: SGLangControl, version: int, *, kv_cache: KVCachePolicy) -> None:
        staged = self._staged
        if staged is None:
            raise WeightError(f"cannot commit weight version {version}: none is prepared")
        if self._asleep:
            raise WeightError(f"weight version {version} cannot be loaded while the engine is asleep: wake it first")
        named = staged.staged(version)
        self._committing = True
        try:
            try:
                await sglang.freeze("in_place" if kv_cache == "keep" else "retract")
            except Exception:
                if not (self._paused or self._fenced):  # SGLang may have taken the order
                    try:
                        await sglang.thaw()
                    except Exception:  # noqa: BLE001 - raised is why it was to thaw
                        self._fenced = f"it stopped to load version {version}, and does not go on"
                        self._fail_held(EngineError(self._fenced))
                raise
            try:
                await sglang.load(named, version=version, flush=kv_cache == "recompute")
            except Exception as error:
                self._fenced = f"version {version} was loaded only in part: {str(error) or type(error).__name__}"
                self._fail_held(EngineError(self._fenced))
                raise
            self._fenced = ""
            self._version = version
            staged.committed(version)
            self._restart_early()
            if not self._paused:
                await sglang.thaw()
        finally:
            self._committing = False
            self._notify()

    def _restart_early(self) -> None:
        """Begin requests that have sampled nothing again, under the new weights; end those that are being aborted."""
        for held in self._held.values():
            if held.sglang_id is not None and not held.row.versions and not held.row.ended:
                if held.aborted:
                    held.end_here()
                else:
                    held.begin(self._read(held))

    # ----------------------------------------------------------------------------------------------- observation

    async def health(self, deadline_s: float) -> EngineHealth:
        return await check_health(self._probe, lambda: self._version, deadline_s=deadline_s)

    async def _probe(self) -> None:
        sglang = self._serving()
        if self._fenced:
            raise EngineError(self._fenced)
        if self._asleep:
            raise EngineError("the engine is asleep: it decodes nothing until wake()")
        if self._paused:
            raise EngineError("the engine is paused: it decodes nothing until resume()")
        await sglang.probe(next(self._numbers))

    def _count_busy(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._busy_since is not None:
            self._busy_s += now - self._busy_since
        busy = not (self._paused or self._asleep) and any(not held.row.ended for held in self._held.values())
        self._busy_since = now if busy else None

    def statistics(self) -> RolloutEngineStatistics:
        sglang = self._serving()
        live = [held.row for held in self._held.values() if not held.row.ended]
        running = [row for row in live if row.versions]
        return RolloutEngineStatistics(
            running=len(running),
            waiting=len(live) - len(running),
            paused=self._paused,
            weight_version=self._version,
            tokens_generated=self._tokens,
            prompt_tokens=self._prompt_tokens,
            requests_finished=self._finished,
            requests_aborted=self._aborted,
            kv_cache_tokens=sum(len(row.tokens) for row in running),
            kv_cache_capacity_tokens=sglang.capacity_tokens,
            decode_steps=sglang.decode_steps,
            busy_s=self._busy_s,
        )
