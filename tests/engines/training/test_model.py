from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncrl.errors import ConfigError
from engines.training.model import PolicyModel, load_policy_model


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


def test_dropout_is_off_although_the_model_is_in_training_mode(model_folder: Callable[..., str]) -> None:
    model = load_policy_model(model_folder("llama", attention_dropout=0.5))
    ids = torch.arange(12)
    first, second = (_scores(model, ids, torch.arange(11)) for _ in range(2))
    assert model.training
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
