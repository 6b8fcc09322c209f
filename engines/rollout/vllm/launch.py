"""From a model folder to a running AsyncLLM: the only place with vLLM's arguments and environment variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from asyncrl.errors import ConfigError, EngineError, WeightError
from engines.rollout.model_tensors import ModelTensors
from engines.rollout.request import ModelTokens, load_tokenizer
from engines.rollout.vllm.bootstrap import BootstrapHook

# vLLM lives in an environment of its own, where the type checkers do not look.
# pyright: reportMissingImports=false

GONE = "vLLM's engine core is gone; see the engine's log"
_WORKER_EXTENSION = "engines.rollout.vllm.worker.WorkerExtension"
_CPU_KV_CACHE_BYTES = 1 << 30
_FREE_SHARE = 0.01
"""Share of a device that vLLM wants free to start; its own default is nearly all, also where it sizes nothing by it."""
_SOCKET_PATH_LENGTH = 107  # of Unix sockets on Linux
_SOCKET_NAME_LENGTH = 37  # vLLM names them by a UUID


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMSettings:
    model_path: str
    dtype: str
    threads: int
    seed: int
    max_running_requests: int
    max_model_tokens: int | None
    kv_cache_bytes: int | None
    prefix_caching: bool
    compile: bool | None
    sleep_mode: bool
    max_adapter_rank: int | None
    max_adapters: int
    arguments: Mapping[str, Any]

    def __post_init__(self) -> None:
        for name, value in self.arguments.items():
            if name.startswith("data_parallel") and (name, value) != ("data_parallel_size", 1):
                remedy = "leave it out and run several replicas (rollout.replicas)"
                raise ConfigError(
                    f"vLLM's argument {name}={value!r} makes several engines in one, which an update of the weights "
                    f"would not reach together: {remedy}",
                    path=f"arguments.{name}",
                    remedy=remedy,
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedLLM:
    """A running vLLM and its model. Any: classes of a vendor without types.

    Updates are checked against ``tensors`` before vLLM sees them: vLLM merges what a checkpoint has apart (query, key
    and value are one matrix) and finds a wrong name half-way through a load. Each of the ``ranks`` fetches weights.
    """

    llm: Any
    meter: Any
    tensors: ModelTensors
    tokens: ModelTokens
    ranks: int
    kv_cache_capacity_tokens: int


def start(settings: VLLMSettings, folder: Path) -> StartedLLM:
    """Start vLLM's engine core in a process of its own, its sockets and files in ``folder``. Blocks, for many seconds.

    Raises:
        EngineError: vLLM is not installed here, or does not serve this model with these arguments.
    """
    _set_environment(settings, folder)
    try:
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM
    except ImportError as error:
        raise EngineError(
            f"vLLM cannot be imported by {sys.executable} ({error}); make an environment with "
            f"`asyncrl engine install vllm` and name its interpreter: --engine-python, or rollout.python"
        ) from error
    from engines.rollout.vllm.worker import BACKEND, SchedulerMeter

    cpu = current_platform.is_cpu()
    if cpu and settings.arguments.get("tensor_parallel_size", 1) == 1:
        # vLLM moves a single CPU worker into one more process to set its OpenMP variables; ours are set already. It
        # reads this variable, which halves the time to start.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    tokenizer = load_tokenizer(settings.model_path)
    compiled = settings.compile if settings.compile is not None else not cpu
    given: dict[str, Any] = {
        "model": settings.model_path,
        "dtype": settings.dtype,
        "seed": settings.seed,
        "max_model_len": settings.max_model_tokens,
        "max_num_seqs": settings.max_running_requests + 3,  # the last ones are for health probes and a canary
        "scheduling_policy": "priority",  # which go first
        "enable_prefix_caching": settings.prefix_caching,
        "enforce_eager": not compiled,
        "skip_tokenizer_init": tokenizer is None,  # texts are ours; vLLM's grammars need it
        "structured_outputs_config": {"backend": "guidance"},
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "enable_sleep_mode": settings.sleep_mode and current_platform.is_sleep_mode_available(),
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "worker_extension_cls": _WORKER_EXTENSION,
    }
    if settings.max_adapter_rank is not None:
        from vllm.config.lora import MaxLoRARanks

        # vLLM allows some ranks only, and pads smaller ones.
        ranks = [each for each in get_args(MaxLoRARanks) if each >= settings.max_adapter_rank]
        if not ranks:
            raise EngineError(f"vLLM serves no adapters of rank {settings.max_adapter_rank}")
        given |= {"enable_lora": True, "max_lora_rank": ranks[0], "max_loras": settings.max_adapters}
    given |= cache_arguments(settings.kv_cache_bytes, cpu=cpu)
    meter = SchedulerMeter()
    try:
        tensors = ModelTensors.of_config(settings.model_path)
        if settings.max_adapter_rank is not None:
            # Not the head, which vLLM would adapt too: on a CPU it could compute no log-probs of prompts then.
            given["lora_target_modules"] = tensors.adaptable
        arguments = AsyncEngineArgs(**{**given, **settings.arguments})
        hook = BootstrapHook(str(folder) if _holds_sockets(folder) else None)
        arguments.additional_config = {**(arguments.additional_config or {}), "asyncrl": hook}
        llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[meter.factory])
    except (OSError, ValueError, RuntimeError, TypeError, AssertionError, WeightError) as error:
        raise EngineError(f"vLLM does not serve {settings.model_path}: {type(error).__name__}: {error}") from error
    model, cache = llm.model_config, llm.vllm_config.cache_config
    tokens = ModelTokens(
        settings.model_path,
        tokenizer,
        eos_token_ids=[
            model.try_get_generation_config().get("eos_token_id"),
            getattr(model.hf_config, "eos_token_id", None),
        ],
        vocabulary=model.get_vocab_size(),
        max_model_tokens=model.max_model_len,
    )
    return StartedLLM(
        llm=llm,
        meter=meter,
        tensors=tensors,
        tokens=tokens,
        ranks=llm.vllm_config.parallel_config.world_size,
        kv_cache_capacity_tokens=(cache.num_gpu_blocks or 0) * cache.block_size,
    )


def cache_arguments(kv_cache_bytes: int | None, *, cpu: bool) -> dict[str, Any]:
    """Return the arguments of a KV cache of a given size, which fits beside what others have of the device."""
    if kv_cache_bytes is None and not cpu:  # on a CPU vLLM's own choice is nearly all memory
        return {}
    return {
        "kv_cache_memory_bytes": kv_cache_bytes or _CPU_KV_CACHE_BYTES,
        "gpu_memory_utilization": _FREE_SHARE,
    }


def _set_environment(settings: VLLMSettings, folder: Path) -> None:
    """Set variables for this process and vLLM's own; the user's values stay, except for the number of threads."""
    os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    # Where it does not fit, vLLM chooses a folder, whose files a killed process leaves behind.
    if _holds_sockets(folder):
        os.environ["VLLM_RPC_BASE_PATH"] = str(folder)
    for name, value in {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # pinned threads of several replicas would share the first cores
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",  # its hundreds of warnings are about these arguments
    }.items():
        os.environ.setdefault(name, value)


def _holds_sockets(folder: Path) -> bool:
    return len(str(folder)) + _SOCKET_NAME_LENGTH <= _SOCKET_PATH_LENGTH
