"""Arguments of vLLM that the engine refuses."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.errors import ConfigError
from engines.rollout.vllm.engine import VLLMEngine
from engines.rollout.vllm.launch import cache_arguments


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("data_parallel_size", 2),
        ("data_parallel_size_local", 2),
        ("data_parallel_rank", 1),
        ("data_parallel_hybrid_lb", True),
        ("data_parallel_backend", "ray"),
    ],
)
def test_one_engine_is_one_copy_of_the_weights(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{name}={value!r} .* replicas") as refused:
        VLLMEngine("model", arguments={name: value})
    assert refused.value.path == f"arguments.{name}"


def test_one_engine_may_have_several_ranks() -> None:
    VLLMEngine("model", arguments={"data_parallel_size": 1, "tensor_parallel_size": 2})


def test_a_cache_of_a_given_size_needs_no_device_that_is_free() -> None:
    given = {"kv_cache_memory_bytes": 16 << 30, "gpu_memory_utilization": 0.01}  # vLLM wants 0.92 free otherwise
    assert cache_arguments(16 << 30, cpu=False) == given
    assert cache_arguments(None, cpu=False) == {}
    assert cache_arguments(None, cpu=True)["kv_cache_memory_bytes"] == 1 << 30
