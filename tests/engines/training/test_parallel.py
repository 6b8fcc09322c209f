"""Tokens on their way to experts and back, as far as one rank shows it; see test_mesh_oracle.py for several."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig

from engines.training.model import _shard, load_policy_model
from engines.training.parallel import divide_experts, experts_of
from engines.training.rank_group import RankGroup


@pytest.fixture
def ranks() -> Iterator[RankGroup]:
    group = RankGroup(device="cpu")
    yield group
    group.close()


@pytest.fixture
def model(model_folder: Callable[..., str]) -> Any:
    folder = model_folder("qwen3_moe", tied=False, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _gradients(model: Any, ids: Tensor) -> dict[str, Tensor]:
    model(ids).logits.square().mean().backward()
    return {name: getattr(each.grad, "_local_tensor", each.grad) for name, each in model.named_parameters()}


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_tokens_come_back_from_their_experts(ranks: RankGroup, model: Any, implementation: str) -> None:
    model.set_experts_implementation(implementation)
    divided = copy.deepcopy(model)
    assert len(experts_of(divided)) == 2
    divide_experts(experts_of(divided), init_device_mesh("cpu", (1,)))
    ids = torch.randint(0, 61, (3, 9), generator=torch.Generator().manual_seed(0))
    assert torch.allclose(divided(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
    found = _gradients(divided, ids)
    for name, expected in _gradients(model, ids).items():
        assert torch.allclose(found[name], expected, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_experts_without_a_token_have_gradients_of_zero(ranks: RankGroup, model: Any, implementation: str) -> None:
    model.set_experts_implementation(implementation)
    experts = experts_of(model)[0]
    divide_experts([experts], init_device_mesh("cpu", (1,)))
    states = torch.zeros(0, 32, requires_grad=True)
    done = experts(states, torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2))
    done.sum().backward()
    assert done.shape == (0, 32)
    for parameter in experts.parameters():
        assert float(parameter.grad.to_local().abs().sum()) == 0.0


def test_the_weights_of_experts_are_not_rounded(ranks: RankGroup, model: Any) -> None:
    """Weights are bfloat16 then, and what multiplies the results of experts is float32, as on one rank."""
    experts = experts_of(model)[0]
    whole = copy.deepcopy(experts).bfloat16()
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("shard", "ep"))
    divide_experts([experts], mesh["ep"])
    _shard([(experts, mesh["shard"])], dtype="bfloat16")
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(9, 32, generator=draw).bfloat16()
    chosen, weights = torch.arange(9)[:, None] % 4, torch.rand(9, 1, generator=draw)
    assert torch.equal(experts(states, chosen, weights), whole(states, chosen, weights))


def test_a_token_costs_the_experts_that_it_has(model_folder: Callable[..., str]) -> None:
    sizes = {"tied": False, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    costs = [
        load_policy_model(model_folder("qwen3_moe", num_experts=count, **sizes)).row_cost.per_token for count in (4, 12)
    ]
    assert costs[1] - costs[0] == 2 * 8 * 32  # of the router: layers, experts, sizes of a hidden state


def test_a_dense_model_has_no_experts() -> None:
    sizes = {
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    assert experts_of(AutoModelForCausalLM.from_config(LlamaConfig(**sizes))) == []
