"""How SGLang is started for rollouts: its arguments, its environment, its processes.

All of them use Unix sockets of this user: no HTTP server is started, so none of SGLang's routes exists.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing

from asyncrl.errors import ConfigError, EngineError
from engines.rollout.checks import check_options
from engines.rollout.model_tensors import DTYPES

# SGLang lives in an environment of its own, where the type checkers do not look.
# pyright: reportMissingImports=false

_OURS = frozenset(
    {
        "device",
        "disable_overlap_schedule",
        "dp_size",
        "dtype",
        "enable_custom_logit_processor",
        "incremental_streaming_output",
        "model_path",
        "sampling_mask_max_tokens",
        "skip_tokenizer_init",
        "stream_interval",
        "weight_version",
    }
)
"""Arguments of SGLang that the engine's tokens, log-probs and versions depend on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangOptions:
    model_path: str
    dtype: str
    device: str
    weight_version: int
    max_running_requests: int
    max_model_tokens: int | None
    kv_cache_tokens: int | None
    tensor_parallel: int
    deterministic: bool
    truncation_tokens: int
    threads: int | None
    seed: int
    sleep_mode: bool
    max_adapter_rank: int | None = None
    max_adapters: int = 4
    more: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_options(
            self.dtype,
            DTYPES,
            max_running_requests=self.max_running_requests,
            max_model_tokens=self.max_model_tokens,
            kv_cache_tokens=self.kv_cache_tokens,
            tensor_parallel=self.tensor_parallel,
            truncation_tokens=self.truncation_tokens,
            threads=self.threads,
            max_adapter_rank=self.max_adapter_rank,
            max_adapters=self.max_adapters,
        )
        for name in self.more:
            if name in _OURS:
                raise ConfigError(f"sglang.{name} is set by the engine: leave it out", path=f"sglang.{name}")

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def computes_on(self) -> str:
        return ("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device

    def arguments(self, adaptable: Sequence[str] = ()) -> dict[str, Any]:
        """Return SGLang's arguments; adapters may lie beside modules whose names end with ``adaptable``."""
        given: dict[str, Any] = {
            "model_path": self.model_path,
            "dtype": self.dtype,
            "device": self.computes_on,
            "weight_version": str(self.weight_version),
            "max_running_requests": self.max_running_requests + 2,  # the last ones are for a canary
            "tp_size": self.tensor_parallel,
            "enable_deterministic_inference": self.deterministic,
            "sampling_mask_max_tokens": self.truncation_tokens,
            "random_seed": self.seed % (1 << 31),
            # Token ids in, token ids out, a piece for each step.
            "skip_tokenizer_init": True,
            "incremental_streaming_output": True,
            "stream_interval": 1,
            # With overlap, a step's tokens are counted one step later: after a change of the weights, under the new
            # version.
            "disable_overlap_schedule": True,
            # SGLang loads pickles out of requests with it: ours come from this process alone.
            "enable_custom_logit_processor": True,
            "sleep_on_idle": True,
            "enable_memory_saver": self.sleep_mode and self.computes_on != "cpu",
            "log_level": "error",  # its warnings are about these arguments
        }
        if self.max_model_tokens is not None:
            given["context_length"] = self.max_model_tokens
        if self.kv_cache_tokens is not None:
            given["max_total_tokens"] = self.kv_cache_tokens
        if self.max_adapter_rank is not None:
            given |= {
                "enable_lora": True,
                "max_lora_rank": self.max_adapter_rank,
                "max_loras_per_batch": self.max_adapters + 1,  # requests without an adapter count as one
                "lora_target_modules": list(adaptable),
            }
            if self.computes_on == "cpu":
                given["lora_backend"] = "torch_native"
        if self.computes_on == "cpu":
            given |= {
                "attention_backend": "torch_native",
                "sampling_backend": "pytorch",
                "grammar_backend": "none",
                "disable_cuda_graph": True,
                "max_total_tokens": self.kv_cache_tokens or 16_384,
            }
        return {**given, **self.more}

    def environment(self, folder: Path) -> dict[str, str]:
        """Return environment variables for SGLang's processes, which find each other in ``folder``."""
        # By default they do so over a port that listens on every interface, and so do gloo and NCCL.
        given = {
            "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{folder}/processes",
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
        }
        if self.threads is not None:
            given["OMP_NUM_THREADS"] = str(self.threads)
        if self.computes_on == "cpu":
            cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
            given["SGLANG_USE_CPU_ENGINE"] = "1"
            given["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join([cores] * self.tensor_parallel)
        return given


def launch(options: SGLangOptions, folder: Path, *, adaptable: Sequence[str] = ()) -> Any:
    """Start an ``sglang.Engine``, which uses ``folder``. Any: SGLang has no typed interface.

    Blocks until the model is loaded, and has to be called in the main thread of a process of its own: SGLang replaces
    signal handlers, its processes end with the thread that started them, and this process ends when one of them dies.

    Raises:
        ConfigError: SGLang is not installed here.
        EngineError: it does not start.
    """
    if threading.current_thread() is not threading.main_thread():
        raise EngineError(
            "SGLang runs only in the main thread of a process of its own: host it with the engine 'remote' "
            '(options = {engine = "sglang", python = ".venv-sglang/bin/python"})'
        )
    os.environ.update(options.environment(folder))
    try:
        from sglang.srt.entrypoints.engine import Engine
    except ImportError as error:
        remedy = "make an environment for it (asyncrl engine install sglang) and name its python"
        raise ConfigError(
            f"SGLang cannot be imported: {error}; {remedy}", path="rollout.engine", remedy=remedy
        ) from error
    from engines.rollout.sglang.scheduler import run_scheduler

    # By name, not by descriptor: these can be opened by processes that did not inherit them.
    multiprocessing.set_sharing_strategy("file_system")

    class RolloutEngine(Engine):
        run_scheduler_process_func = staticmethod(run_scheduler)

    elsewhere = tempfile.gettempdir()
    tempfile.tempdir = str(folder)  # SGLang makes its sockets here, and leaves them behind
    try:
        return RolloutEngine(**options.arguments(adaptable))
    except Exception as error:
        raise EngineError(f"SGLang does not start: {type(error).__name__}: {error}") from error
    finally:
        tempfile.tempdir = elsewhere
