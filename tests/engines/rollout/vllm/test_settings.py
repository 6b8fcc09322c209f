"""Arguments of vLLM that the engine refuses."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.errors import ConfigError
from engines.rollout.vllm.engine import VLLMEngine


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
