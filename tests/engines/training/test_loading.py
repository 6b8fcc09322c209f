"""A model that every rank reads for itself is, bit for bit, the one that is read as a whole."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from asyncrl.algorithms import PolicyObjective
from asyncrl.errors import ConfigError
from engines.training import loading
from engines.training.fsdp_engine import FSDPEngine
from engines.training.lora import LoRA
from engines.training.model import PolicyModel, load_policy_model, local_shard, shard
from engines.training.rank_group import RankGroup
from engines.training.value_engine import SCORE, load_value_model


def test_a_process_group_leaves_the_traceback_of_a_program_as_it_is() -> None:
    before = sys.excepthook
    RankGroup(device="cpu").close()
    assert sys.excepthook is before


@pytest.fixture
def ranks() -> Iterator[RankGroup]:
    group = RankGroup(device="cpu")
    yield group
    group.close()


def _assert_same(found: PolicyModel, expected: PolicyModel) -> None:
    for kind in (nn.Module.named_parameters, nn.Module.named_buffers):
        mine, theirs = dict(kind(found.causal_lm)), dict(kind(expected.causal_lm))
        assert list(mine) == list(theirs)
        for name, tensor in theirs.items():
            assert torch.equal(local_shard(mine[name]), local_shard(tensor)), name
            assert mine[name].dtype == tensor.dtype
            assert mine[name].requires_grad == tensor.requires_grad
    assert found.layout == expected.layout
    assert found.training == expected.training
    assert found.causal_lm.generation_config == expected.causal_lm.generation_config


@pytest.mark.parametrize("lora", [None, LoRA(rank=2, alpha=4.0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"tied": False, "attention_bias": True}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1, "num_hidden_layers": 4}),
        ("gemma2", {"sliding_window": 5, "num_hidden_layers": 3}),
        ("mistral", {}),
        ("qwen3_moe", {"tied": False, "num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
        ("mixtral", {"tied": False, "num_experts": 3, "num_experts_per_tok": 2}),
    ],
)
def test_weights_are_those_of_the_whole_model(
    model_folder: Callable[..., str],
    ranks: RankGroup,
    family: str,
    options: dict[str, Any],
    dtype: Any,
    lora: LoRA | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In bfloat16 even one rank shards its model. Files are mapped anew after every few rows."""
    monkeypatch.setattr(loading, "PIECE_BYTES", 1000)
    folder = model_folder(family, **options)
    if lora is not None and "num_experts" in options:
        lora = replace(lora, target_modules=("q_proj", "o_proj"))  # experts that share one tensor are not adapted
    whole, sharded = (load_policy_model(folder, lora=lora, seed=5, sharded=each) for each in (False, True))
    assert all(each.is_meta for name, each in sharded.causal_lm.named_parameters() if "lora" not in name)
    assert sharded.unread is not None
    for each in (whole, sharded):
        shard(each, ranks, dtype=dtype)
    assert sharded.unread is None
    _assert_same(sharded, whole)
    head, embeddings = sharded.causal_lm.get_output_embeddings(), sharded.causal_lm.get_input_embeddings()
    assert head is not None
    assert (head.weight is embeddings.weight) == options.get("tied", True)  # type: ignore[union-attr]


def test_files_in_another_dtype_and_in_several_parts(
    model_folder: Callable[..., str], ranks: RankGroup, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder("llama", tied=False), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    whole, sharded = (load_policy_model(str(tmp_path), sharded=each) for each in (False, True))
    for each in (whole, sharded):
        shard(each, ranks, dtype="float32")
    _assert_same(sharded, whole)


def test_values_have_their_own_head(model_folder: Callable[..., str], ranks: RankGroup, tmp_path: Path) -> None:
    shutil.copytree(model_folder("llama", tied=False), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors | {SCORE: torch.ones(1, 32)}, tmp_path / "model.safetensors")
    whole, sharded = (load_value_model(str(tmp_path), sharded=each) for each in (False, True))
    for each in (whole, sharded):
        shard(each, ranks, dtype="bfloat16")
    _assert_same(sharded, whole)
    assert float(local_shard(dict(sharded.parameters_by_name())[SCORE]).sum()) == 32.0


def test_an_expert_that_is_missing_is_named(model_folder: Callable[..., str], tmp_path: Path) -> None:
    """The model has one tensor for the experts of a layer, the files have three for each expert."""
    folder = model_folder("qwen3_moe", tied=False, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    for last in (True, False):
        kept = dict(tensors)
        del kept[f"model.layers.1.mlp.experts.{3 if last else 1}.up_proj.weight"]
        save_file(kept, tmp_path / "model.safetensors")
        with pytest.raises(ConfigError, match=r"parts of model\.layers\.1\.mlp\.experts\.gate_up_proj are missing"):
            load_policy_model(str(tmp_path), sharded=True)


def test_nothing_is_drawn_from_the_process_generator(model_folder: Callable[..., str]) -> None:
    torch.manual_seed(9)
    expected = torch.rand(3)
    torch.manual_seed(9)
    load_policy_model(model_folder("llama"), sharded=True)
    assert torch.equal(torch.rand(3), expected)


def test_a_head_that_does_more_is_noticed_without_the_weights(model_folder: Callable[..., str], tmp_path: Path) -> None:
    """A config that announces a soft cap of 30, on a model that has none: logits of the twin are large enough."""
    shutil.copytree(model_folder("llama"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"final_logit_softcapping": 30.0}))
    with pytest.raises(ConfigError, match="LlamaForCausalLM changes its logits by more"):
        load_policy_model(str(tmp_path), sharded=True)


def _without_a_part(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    (folder / sorted(index["weight_map"].values())[0]).unlink()


def _damaged(folder: Path) -> None:
    part = sorted(folder.glob("*.safetensors"))[0]
    part.write_bytes(part.read_bytes()[:-7])


def _without_an_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ')


def _another_shape(folder: Path) -> None:
    part = next(each for each in folder.glob("*.safetensors") if "model.norm.weight" in load_file(each))
    tensors = load_file(part)
    save_file(tensors | {"model.norm.weight": torch.ones(31)}, part, metadata={"format": "pt"})


def _without_a_tensor(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.norm.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_without_a_part, "has no model-00001-of-0.*, which its index names"),
        (_damaged, "model-00001-of-0.* cannot be read"),
        (_without_an_index, "index.json cannot be read"),
        (_another_shape, r"model.norm.weight is \(31,\), the model's is \(32,\)"),
        (_without_a_tensor, "there is no tensor model.norm.weight"),
    ],
)
def test_files_that_do_not_fit_are_refused_before_memory_is_asked_for(
    model_folder: Callable[..., str], tmp_path: Path, harm: Callable[[Path], None], said: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder("llama", tied=False))
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    harm(tmp_path)
    with pytest.raises(ConfigError, match=said):
        load_policy_model(str(tmp_path), sharded=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4.0}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_read_to_the_device_and_not_to_the_host(
    model_folder: Callable[..., str], monkeypatch: pytest.MonkeyPatch, dtype: Any, lora: dict[str, Any] | None
) -> None:
    folder = model_folder("llama", tied=False)
    expected = load_file(Path(folder) / "model.safetensors")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)  # which reads all of them to the host
    engine = FSDPEngine(folder, objective=PolicyObjective(), lr=0.0, device="cuda", dtype=dtype, lora=lora)
    found = dict(engine.base_tensors() if lora else engine.named_tensors())
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.is_cuda
        rounded = expected[name].to(torch.bfloat16).float() if lora and dtype == "bfloat16" else expected[name]
        assert torch.equal(tensor.float().cpu(), rounded), name
    engine.close()
