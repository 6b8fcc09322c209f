"""From a model folder to a running AsyncLLM: the only place that knows vLLM's arguments and environment variables."""

# vLLM lives in an environment of its own, where the type checkers do not look.
# pyright: reportMissingImports=false

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError, EngineError
from engines.rollout.embedded.grammar import Grammars
from engines.rollout.vllm_adapter.checkpoint import CheckpointLayout
from engines.rollout.vllm_adapter.first_act import FirstAct

__all__ = ["StartedLLM", "VLLMSettings", "start"]

_WORKER_EXTENSION = "engines.rollout.vllm_adapter.worker.WorkerExtension"


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMSettings:
    """What is asked of vLLM. The fields are those of :class:`engines.rollout.vllm_engine.VLLMEngine`."""

    model_path: str
    dtype: str
    threads: int
    seed: int
    max_running_requests: int
    max_model_tokens: int | None
    kv_cache_bytes: int | None
    prefix_caching: bool
    compile: bool | None
    arguments: Mapping[str, Any]

    def __post_init__(self) -> None:
        for name, value in self.arguments.items():
            if name.startswith("data_parallel") and (name, value) != ("data_parallel_size", 1):
                remedy = "leave it out and run several replicas (rollout.replicas)"
                raise ConfigError(
                    f"vLLM's argument {name}={value!r} is about several engines in one, which an update of the weights "
                    f"would not reach together: {remedy}",
                    path=f"arguments.{name}",
                    remedy=remedy,
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedLLM:
    """A running vLLM and what the engine has to know of its model. Any: classes of vendors without types.

    Attributes:
        llm: the AsyncLLM.
        meter: its SchedulerMeter.
        layout: what updates must look like.
        tokenizer: None if the folder has none; only stop strings and grammars need it.
        grammars: looks at grammars before vLLM does; None without a tokenizer.
        stop_token_ids: end-of-sequence ids of the generation config and the tokenizer.
        vocabulary: V.
        max_model_tokens: context length, prompt included.
        ranks: worker processes, each of which fetches weights.
        kv_cache_capacity_tokens: of the paged cache.
    """

    llm: Any
    meter: Any
    layout: CheckpointLayout
    tokenizer: Any
    grammars: Grammars | None
    stop_token_ids: frozenset[int]
    vocabulary: int
    max_model_tokens: int
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
    from engines.rollout.vllm_adapter.meter import SchedulerMeter
    from engines.rollout.vllm_adapter.worker import BACKEND

    cpu = current_platform.is_cpu()
    if cpu and settings.arguments.get("tensor_parallel_size", 1) == 1:
        # vLLM moves a single CPU worker into one more process to set its OpenMP variables; ours are set already. This
        # is the variable that it asks. It halves the time to start.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    tokenizer = _tokenizer(settings.model_path)
    compiled = settings.compile if settings.compile is not None else not cpu
    given: dict[str, Any] = {
        "model": settings.model_path,
        "dtype": settings.dtype,
        "seed": settings.seed,
        "max_model_len": settings.max_model_tokens,
        "max_num_seqs": settings.max_running_requests + 1,  # the last one is for health probes
        "scheduling_policy": "priority",  # which go first
        "enable_prefix_caching": settings.prefix_caching,
        "enforce_eager": not compiled,
        "skip_tokenizer_init": tokenizer is None,  # texts are ours; vLLM's grammars need it
        "structured_outputs_config": {"backend": "guidance"},
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "worker_extension_cls": _WORKER_EXTENSION,
    }
    if settings.kv_cache_bytes is not None or cpu:  # on a CPU vLLM's own choice is nearly all memory
        given["kv_cache_memory_bytes"] = settings.kv_cache_bytes or _CPU_KV_CACHE_BYTES
    meter = SchedulerMeter()
    try:
        layout = CheckpointLayout.of(settings.model_path)
        arguments = AsyncEngineArgs(**{**given, **settings.arguments})
        act = FirstAct(str(folder) if _holds_sockets(folder) else None)
        arguments.additional_config = {**(arguments.additional_config or {}), "asyncrl": act}
        llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[meter.factory])
    except (OSError, ValueError, RuntimeError, TypeError, AssertionError) as error:
        raise EngineError(f"vLLM does not serve {settings.model_path}: {type(error).__name__}: {error}") from error
    config, cache = llm.vllm_config, llm.vllm_config.cache_config
    stop = set(_ids(llm.model_config.try_get_generation_config().get("eos_token_id")))
    stop.update(_ids(getattr(llm.model_config.hf_config, "eos_token_id", None)))
    stop.update(_ids(getattr(tokenizer, "eos_token_id", None)))
    return StartedLLM(
        llm=llm,
        meter=meter,
        layout=layout,
        tokenizer=tokenizer,
        grammars=None if tokenizer is None else Grammars(tokenizer, vocabulary=llm.model_config.get_vocab_size()),
        stop_token_ids=frozenset(stop),
        vocabulary=llm.model_config.get_vocab_size(),
        max_model_tokens=llm.model_config.max_model_len,
        ranks=config.parallel_config.world_size,
        kv_cache_capacity_tokens=(cache.num_gpu_blocks or 0) * cache.block_size,
    )


_CPU_KV_CACHE_BYTES = 1 << 30
_SOCKET_PATH_LENGTH = 107  # of Unix sockets on Linux
_SOCKET_NAME_LENGTH = 37  # vLLM names them by a UUID


def _set_environment(settings: VLLMSettings, folder: Path) -> None:
    """For this process and vLLM's own; what the user has set stays, but for the number of threads."""
    os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    # Where it does not fit, vLLM's own choice, which nobody clears away after a killed process.
    if _holds_sockets(folder):
        os.environ["VLLM_RPC_BASE_PATH"] = str(folder)
    for name, value in {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # pinned threads of several replicas would share the first cores
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings, by the hundred, are about what was decided here
    }.items():
        os.environ.setdefault(name, value)


def _holds_sockets(folder: Path) -> bool:
    return len(str(folder)) + _SOCKET_NAME_LENGTH <= _SOCKET_PATH_LENGTH


def _tokenizer(model_path: str) -> Any:
    """The folder's tokenizer; None if it has none, which only requests with stop strings will mind."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
    except (OSError, ValueError, ImportError, KeyError):
        return None
    # For some families transformers makes an empty tokenizer up; its end-of-sequence id would cut texts short.
    return tokenizer if len(tokenizer) > len(tokenizer.all_special_ids) else None


def _ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)
