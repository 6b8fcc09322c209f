"""Packed equals padded equals a plain forward pass of transformers, row by row, for every family; weights come back."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncrl.algorithms import PolicyObjective
from asyncrl.data import DataProto
from asyncrl.data.ragged import rows_of
from asyncrl.errors import ConfigError
from engines.training.fsdp_engine import FSDPEngine
from engines.training.model import load_policy_model

LENGTHS = [9, 4, 17, 6, 6, 12, 3, 14, 1]

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"tied": False, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gemma2": {"sliding_window": 5},
    "mistral": {"sliding_window": 4},
    "qwen2 windowed": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "custom": {},
}
KEEPS_FLOAT32: dict[str, dict[str, Any]] = {
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0},  # weights of routers
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},  # weights of routers; only its code says so
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},  # a buffer of each
}
"""Mixtures with tensors that are float32 whatever the dtype of the model."""
PADDED = {"custom"}
"""Families that cannot be packed."""


def _custom_model() -> Any:
    spec = importlib.util.spec_from_file_location(
        "asyncrl_test_custom_model", Path(__file__).with_name("custom_model.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def family_folder(model_folder: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    custom = tmp_path_factory.mktemp("custom")
    module = _custom_model()
    module.register()
    torch.manual_seed(3)
    module.DecayForCausalLM(module.DecayConfig()).save_pretrained(custom)
    return lambda name: str(custom) if name == "custom" else model_folder(name.split()[0], **FAMILIES[name])


@pytest.fixture
def engine(family_folder: Callable[[str], str]) -> Iterator[Callable[..., FSDPEngine]]:
    made: list[FSDPEngine] = []

    def make(path: str, **options: Any) -> FSDPEngine:
        settings = {"lr": 1e-2, "eps": 1e-3, "device": "cpu", "objective": PolicyObjective()} | options
        made.append(FSDPEngine(path, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def _plain_log_probs(folder: str, batch: DataProto) -> list[Tensor]:
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert batch.batch is not None
    with torch.no_grad():
        return [
            plain(input_ids=ids[None]).logits[0, :-1].log_softmax(dim=-1).gather(1, ids[1:, None]).squeeze(1)
            for ids in rows_of(batch.batch["input_ids"])
        ]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_padded_equals_plain(
    engine: Callable[..., FSDPEngine],
    family_folder: Callable[[str], str],
    trajectories: Callable[..., DataProto],
    family: str,
) -> None:
    folder, batch = family_folder(family), trajectories(LENGTHS)
    expected = _plain_log_probs(folder, batch)
    assert load_policy_model(folder).layout == ("padded" if family in PADDED else "packed")
    trained: list[dict[str, float]] = []
    for layout in ("auto", "padded"):
        trainer = engine(folder, layout=layout, max_tokens_per_microbatch=40)
        scored = trainer.log_probs(batch).batch
        assert scored is not None
        for found, plain in zip(rows_of(scored["log_probs"]), expected, strict=True):
            assert torch.allclose(found[1:], plain, rtol=0, atol=1e-5)
        trained.append(trainer.update(batch))
    assert trained[0] == pytest.approx(trained[1], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_sharded_by_fsdp_are_published_and_loaded_unchanged(
    engine: Callable[..., FSDPEngine],
    family_folder: Callable[[str], str],
    trajectories: Callable[..., DataProto],
    family: str,
    tmp_path: Path,
) -> None:
    """bfloat16 makes even one rank shard its model; its weights stay float32."""
    folder, batch = family_folder(family), trajectories(LENGTHS)
    trainer = engine(folder, dtype="bfloat16")
    published = {name: tensor.clone() for name, tensor in trainer.named_tensors()}
    on_disk = load_file(Path(folder) / "model.safetensors")
    assert published.keys() == on_disk.keys()
    assert all(torch.equal(published[name], on_disk[name]) for name in published)

    trainer.update(batch)
    trainer.save(tmp_path / "checkpoint")
    trainer.export(tmp_path / "export")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    assert type(plain).__name__ == type(AutoModelForCausalLM.from_pretrained(folder)).__name__
    exported = engine(str(tmp_path / "export"), dtype="bfloat16")
    for (name, mine), (_, theirs) in zip(trainer.named_tensors(), exported.named_tensors(), strict=True):
        assert torch.equal(mine, theirs), name
    exported.load(tmp_path / "checkpoint")
    assert exported.update(batch) == trainer.update(batch)


@pytest.mark.parametrize("family", ["llama", "olmo2", "mixtral", *KEEPS_FLOAT32])
def test_layers_in_bfloat16_are_those_of_transformers(
    engine: Callable[..., FSDPEngine], model_folder: Callable[..., str], family: str
) -> None:
    """Bit for bit: OLMo's angles of positions are float32 whatever the states are, and Ernie's routers."""
    folder = model_folder(family, tied=False, **KEEPS_FLOAT32.get(family, {}))
    row = torch.arange(40)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = plain.base_model(input_ids=row[None], use_cache=False).last_hidden_state
    trainer = engine(folder, dtype="bfloat16", layout="padded")
    found: list[Tensor] = []
    trainer._model.causal_lm.base_model.register_forward_hook(
        lambda _module, _args, output: found.append(output.last_hidden_state)
    )
    trainer.log_probs(DataProto.from_dict(tensors={"input_ids": [row]}))
    assert torch.equal(found[0], expected)


@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4.0, "target_modules": ["q_proj"]}])
@pytest.mark.parametrize("family", KEEPS_FLOAT32)
def test_what_a_family_keeps_in_float32_is_published_and_exported_so(
    engine: Callable[..., FSDPEngine],
    model_folder: Callable[..., str],
    trajectories: Callable[..., DataProto],
    family: str,
    lora: dict[str, Any] | None,
    tmp_path: Path,
) -> None:
    folder = model_folder(family, tied=False, **KEEPS_FLOAT32[family])
    expected = {
        name: tensor.dtype
        for name, tensor in AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict().items()
    }
    assert set(expected.values()) == {torch.float32, torch.bfloat16}
    trainer = engine(folder, dtype="bfloat16", publish_dtype="bfloat16", lora=lora)
    trainer.update(trajectories(LENGTHS))
    before = load_file(Path(folder) / "model.safetensors")
    for name, tensor in trainer.named_tensors():
        if "gate.weight" in name or "gate.wg" in name or "e_score" in name:
            of_module = name.replace("mlp.moe_statics", "mlp.gate.moe_statics")  # in files it is elsewhere
            assert tensor.dtype == expected[of_module], name
            if lora is not None:
                assert torch.equal(tensor, before[name].to(tensor.dtype))  # it was rounded nowhere
        else:
            assert tensor.dtype == torch.bfloat16, name
    trainer.export(tmp_path / "export")
    trainer.save(tmp_path / "saved")
    trainer.snapshot().export(tmp_path / "saved", tmp_path / "from snapshot")
    published = {name: tensor.clone() for name, tensor in trainer.named_tensors()}
    for exported in ("export", "from snapshot"):
        written = load_file(tmp_path / exported / "model.safetensors")
        assert written.keys() == published.keys()
        assert all(_same(written[name], published[name]) for name in written)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def test_a_weight_that_fsdp_would_cast_although_the_family_keeps_it_is_refused_by_name(
    engine: Callable[..., FSDPEngine], model_folder: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.Qwen2PreTrainedModel._keep_in_fp32_modules_strict", ["q_proj.weight"])
    with pytest.raises(ConfigError, match=r"keeps model\.layers\.0\.self_attn\.q_proj\.weight of Qwen2.* in float32"):
        engine(model_folder("qwen2"), dtype="bfloat16")  # its q_proj has a bias, too
    engine(model_folder("qwen2"))


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_variable_length_kernel_agrees_with_float32(
    engine: Callable[..., FSDPEngine],
    family_folder: Callable[[str], str],
    trajectories: Callable[..., DataProto],
    family: str,
) -> None:
    folder, batch = family_folder(family), trajectories(LENGTHS)
    expected = torch.cat(_plain_log_probs(folder, batch))
    trained: list[dict[str, float]] = []
    for dtype, tolerance in (("float32", 1e-3), ("bfloat16", 0.2)):
        trainer = engine(folder, device="cuda", dtype=dtype, layout="packed", max_tokens_per_microbatch=40)
        scored = trainer.log_probs(batch).batch
        assert scored is not None
        found = torch.cat([row[1:] for row in rows_of(scored["log_probs"])])
        assert torch.allclose(found, expected, atol=tolerance)
        trained.append(trainer.update(batch))
    assert trained[1]["grad_norm"] == pytest.approx(trained[0]["grad_norm"], rel=0.1)


def test_a_model_that_cannot_be_packed_is_reported(
    family_folder: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="DecayForCausalLM mixes packed rows"):
        load_policy_model(family_folder("custom"), layout="packed")
    with caplog.at_level(logging.WARNING):
        load_policy_model(family_folder("custom"))
    assert "rows are padded, not packed: DecayForCausalLM mixes packed rows" in caplog.text


def test_recomputed_layers_get_the_same_rows(
    family_folder: Callable[[str], str], trajectories: Callable[..., DataProto]
) -> None:
    gradients: list[dict[str, Tensor]] = []
    for checkpointing in (False, True):
        model = load_policy_model(family_folder("qwen3"), gradient_checkpointing=checkpointing, layout="packed")
        ids = torch.arange(20) % 61
        positions = torch.cat([torch.arange(7), torch.arange(7), torch.arange(6)])
        predictors = torch.tensor([2, 5, 9, 15, 18])
        scores = model(ids, positions, predictors, ids[predictors + 1], rectangles=((2, 7), (1, 6)))
        scores.log_probs.sum().backward()
        gradients.append(
            {name: each.grad.clone() for name, each in model.parameters_by_name() if each.grad is not None}
        )
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
