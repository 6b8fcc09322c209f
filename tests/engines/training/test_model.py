from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from asyncrl.algorithms import PolicyObjective
from asyncrl.data import DataProto
from asyncrl.errors import ConfigError, InvalidDataError
from asyncrl.model_folder import RotaryChange, rotary_change
from engines.training.fsdp_engine import FSDPEngine
from engines.training.model import PolicyModel, load_policy_model
from engines.training.value_engine import FSDPValueEngine, load_value_model


def _scores(model: PolicyModel, row: Tensor, predictors: Tensor) -> Tensor:
    """Log-probs of the tokens after ``predictors`` of a single row."""
    positions = torch.arange(len(row))
    scores = model(row, positions, predictors, row[predictors + 1], rectangles=((1, len(row)),))
    log_probs: Tensor = scores.log_probs
    return log_probs


@pytest.mark.parametrize(
    ("family", "options"),
    [("llama", {}), ("gemma2", {"final_logit_softcapping": 2.0}), ("granite", {"logits_scaling": 3.0}), ("cohere", {})],
)
def test_scores_are_those_of_the_models_own_logits(
    model_folder: Callable[..., str], family: str, options: dict[str, Any]
) -> None:
    folder = model_folder(family, **options)
    ids = torch.tensor([[5, 9, 2, 7, 1]])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(input_ids=ids).logits[0]
        found = _scores(load_policy_model(folder), ids[0], torch.tensor([1, 3]))
    assert torch.allclose(found, logits.log_softmax(dim=-1)[[1, 3], ids[0, [2, 4]]], atol=1e-5)


def test_a_model_with_an_unsupported_head_is_refused(model_folder: Callable[..., str], tmp_path: Path) -> None:
    """A config that announces a soft cap, on a model that has none."""
    for path in Path(model_folder("llama")).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"final_logit_softcapping": 0.5}))
    with pytest.raises(ConfigError, match="LlamaForCausalLM changes its logits by more"):
        load_policy_model(str(tmp_path))


ROPE: dict[str, dict[str, Any]] = {
    "longrope": {
        "original_max_position_embeddings": 8,
        "short_factor": [1.0] * 4,
        "long_factor": [9.0] * 4,
        "factor": 4.0,
    },
    "dynamic": {"factor": 4.0},
}


@pytest.mark.parametrize(("kind", "most"), [("longrope", 8), ("dynamic", 32)])
def test_rows_that_change_the_positions_of_those_beside_them_are_refused(
    model_folder: Callable[..., str], trajectories: Callable[..., DataProto], kind: str, most: int
) -> None:
    rope = {"rope_type": kind, "rope_theta": 100.0, **ROPE[kind]}
    folder = model_folder("llama", max_position_embeddings=32, rope_parameters=rope)
    engine = FSDPEngine(folder, lr=0.0, device="cpu", objective=PolicyObjective())
    values = FSDPValueEngine(folder, device="cpu")
    engine.log_probs(trajectories([most, 5]))
    words = rf"{most + 1} tokens: rotary positions of Llama.* \({kind}\) are others in rows of more than {most}"
    values.scores(trajectories([most, 5]))
    for refused in (engine.log_probs, engine.update, engine.supervise, values.scores):
        with pytest.raises(InvalidDataError, match=words):
            refused(trajectories([5, most + 1]))
    engine.close()
    values.close()


def test_the_positions_of_every_kind_of_layer_count() -> None:
    rope = {"rope_theta": 100.0, **ROPE["longrope"], "rope_type": "longrope"}
    kinds = {"sliding_attention": {"rope_type": "default", "rope_theta": 10.0}, "full_attention": rope}
    assert rotary_change(Gemma3TextConfig(rope_parameters=kinds, head_dim=8)) == RotaryChange("longrope", 8)
    assert rotary_change(Gemma3TextConfig()) is None


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"attention_dropout": 0.5}),
        ("mixtral", {"router_jitter_noise": 0.5}),
        ("phimoe", {"router_jitter_noise": 0.5, "input_jitter_noise": 0.5}),
    ],
)
def test_nothing_is_drawn_in_a_pass(
    model_folder: Callable[..., str], family: str, options: dict[str, Any], gradient_checkpointing: bool
) -> None:
    model = load_policy_model(model_folder(family, **options), gradient_checkpointing=gradient_checkpointing)
    values = load_value_model(model_folder(family, **options), gradient_checkpointing=gradient_checkpointing)
    ids = torch.arange(12)
    for each in (model, values):
        torch.nn.init.normal_(each.causal_lm.get_output_embeddings().weight)
        first, second = (_scores(each, ids, torch.arange(11)) for _ in range(2))
        assert torch.equal(first, second)


def test_checkpointed_layers_are_computed_twice(model_folder: Callable[..., str]) -> None:
    for gradient_checkpointing, times in ((False, 1), (True, 2)):
        model = load_policy_model(model_folder("qwen3"), gradient_checkpointing=gradient_checkpointing)
        calls: list[int] = []
        layer: Any = model.causal_lm.get_submodule("model.layers.0.mlp")
        # Before, not after: recomputing stops where nothing more is needed.
        layer.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        _scores(model, torch.arange(12), torch.arange(11)).sum().backward()
        assert len(calls) == times
