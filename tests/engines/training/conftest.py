from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Ernie4_5_MoeConfig,
    Gemma2Config,
    Glm4MoeConfig,
    GraniteConfig,
    HunYuanMoEV1Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from asyncrl.data import DataProto

VOCABULARY = 61
_ModelT = TypeVar("_ModelT", bound=nn.Module)

_CONFIGS: dict[str, Callable[..., PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "gemma2": Gemma2Config,
    "granite": GraniteConfig,
    "cohere": CohereConfig,
    "mistral": MistralConfig,
    "mixtral": MixtralConfig,
    "olmo2": Olmo2Config,
    "phimoe": PhimoeConfig,
    "ernie4_5_moe": Ernie4_5_MoeConfig,
    "glm4_moe": Glm4MoeConfig,
    "hunyuan_v1_moe": HunYuanMoEV1Config,
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Folder of a tiny model with random weights, wide enough that its distributions are not uniform."""
    made: dict[str, str] = {}

    def make(family: str = "llama", *, tied: bool = True, **options: Any) -> str:
        key = f"{family} {tied} {options}"
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            torch.manual_seed(3)
            sizes: dict[str, Any] = {
                "vocab_size": VOCABULARY,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "initializer_range": 0.2,
                "tie_word_embeddings": tied,
                "bos_token_id": 1,
                "eos_token_id": 2,
            }
            config = _CONFIGS[family](**(sizes | options))
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            made[key] = str(folder)
        return made[key]

    return make


@pytest.fixture(scope="session")
def trajectories() -> Callable[..., DataProto]:
    """Rows of these lengths: a prompt of 3 tokens, then tokens sampled with made-up log-probs."""

    def make(lengths: Sequence[int], *, seed: int = 0, **columns: Any) -> DataProto:
        draw = torch.Generator().manual_seed(seed)
        mask = [torch.arange(length) >= 3 for length in lengths]
        return DataProto.from_dict(
            tensors={
                "input_ids": [torch.randint(0, VOCABULARY, (length,), generator=draw) for length in lengths],
                "loss_mask": mask,
                "behaviour_log_probs": [
                    torch.where(each, -4.0 + torch.rand(len(each), generator=draw), 0.0) for each in mask
                ],
                "advantages": torch.randn(len(lengths), generator=draw),
                **columns,
            }
        )

    return make


@pytest.fixture
def a_folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


def in_float64(model: _ModelT) -> _ModelT:
    """Norms too, which transformers computes in float32 whatever the model's precision."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            norm: Any = module
            eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
            offset = 1.0 if type(module).__name__.startswith("Gemma") else 0.0

            def forward(states: Tensor, norm: Any = norm, eps: float = eps, offset: float = offset) -> Tensor:
                return nn.functional.rms_norm(states, states.shape[-1:], norm.weight + offset, eps)

            norm.forward = forward
    return model.double()
