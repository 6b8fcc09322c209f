"""Adapters: what they add, what stays, and that all that leaves the engine is a model without them."""

from __future__ import annotations

import json
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
from asyncrl.errors import CheckpointError, ConfigError
from engines.training import fsdp_engine
from engines.training.fsdp_engine import FSDPEngine
from engines.training.lora import LoRA, merged_tensors

pytest.importorskip("peft")

LENGTHS = [9, 4, 17, 6, 12, 14]
OPTIONS = {"rank": 3, "alpha": 6.0, "target_modules": ["q_proj", "v_proj", "down_proj"]}
MODULES = 2 * 3
"""Adapted ones: layers times targets."""

DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
"""One rank in float32 holds plain tensors, in bfloat16 FSDP's."""


@pytest.fixture
def engine(model_folder: Callable[..., str]) -> Iterator[Callable[..., FSDPEngine]]:
    made: list[FSDPEngine] = []

    def make(*, path: str | None = None, lora: Any = OPTIONS, **options: Any) -> FSDPEngine:
        settings = {"lr": 1e-2, "device": "cpu", "objective": PolicyObjective()} | options
        made.append(FSDPEngine(path or model_folder("qwen2"), lora=lora, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def _published(engine: FSDPEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.named_tensors()}


def _same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def _stored(folder: str, dtype: str) -> dict[str, Tensor]:
    """Return the weights of a float32 model as frozen ones are held."""
    tensors = load_file(Path(folder) / "model.safetensors")
    return {name: tensor.to(getattr(torch, dtype)).float() for name, tensor in tensors.items()}


def _log_probs(scored: DataProto) -> Tensor:
    assert scored.batch is not None
    log_probs: Tensor = scored.batch["log_probs"].values()
    return log_probs


def test_merged_weights_by_hand() -> None:
    tensors = {
        "q.base_layer.weight": torch.eye(2),
        "q.base_layer.bias": torch.ones(2),
        "q.lora_A.default.weight": torch.tensor([[1.0, 2.0]]),
        "q.lora_B.default.weight": torch.tensor([[3.0], [0.0]]),
        "norm.weight": torch.zeros(2),
    }
    merged = dict(merged_tensors(iter(tensors.items()), LoRA(rank=1, alpha=0.5)))
    assert sorted(merged) == ["norm.weight", "q.bias", "q.weight"]
    assert merged["q.weight"].tolist() == [[2.5, 3.0], [0.0, 1.0]]


@DTYPES
def test_only_adapters_are_trained_and_they_are_published_merged(
    engine: Callable[..., FSDPEngine],
    trajectories: Callable[..., DataProto],
    model_folder: Callable[..., str],
    dtype: str,
) -> None:
    trainer, batch = engine(dtype=dtype), trajectories(LENGTHS)
    original = _stored(model_folder("qwen2"), dtype)
    assert _same(_published(trainer), original)  # B = 0: nothing is added yet
    for _ in range(2):
        trainer.update(batch)
    changed = {name for name, tensor in _published(trainer).items() if not torch.equal(tensor, original[name])}
    assert len(changed) == MODULES
    assert all(name.rpartition(".")[0].endswith(tuple(OPTIONS["target_modules"])) for name in changed)  # type: ignore[arg-type]
    for name in changed:
        assert torch.linalg.matrix_rank(_published(trainer)[name] - original[name], rtol=1e-3) <= 3


@DTYPES
def test_published_apart_adapters_and_base_give_what_is_published_merged(
    engine: Callable[..., FSDPEngine],
    trajectories: Callable[..., DataProto],
    model_folder: Callable[..., str],
    dtype: str,
) -> None:
    trainer, batch = engine(dtype=dtype), trajectories(LENGTHS)
    trainer.update(batch)
    base = {name: tensor.clone() for name, tensor in trainer.base_tensors()}
    assert _same(base, _stored(model_folder("qwen2"), dtype))
    adapters = {name: tensor.clone() for name, tensor in trainer.adapter_tensors()}
    assert len(adapters) == 2 * MODULES
    for name in [name for name in adapters if "lora_A" in name]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        b, scale = adapters[name.replace("lora_A", "lora_B")], OPTIONS["alpha"] / OPTIONS["rank"]  # type: ignore[operator]
        base[f"{module}.weight"] = torch.addmm(base[f"{module}.weight"], b, adapters[name], alpha=scale)
    assert _same(base, _published(trainer))


def test_a_plain_model_with_the_published_weights_computes_the_same(
    engine: Callable[..., FSDPEngine], trajectories: Callable[..., DataProto], tmp_path: Path
) -> None:
    trainer, batch = engine(), trajectories(LENGTHS)
    trainer.update(batch)
    trainer.export(tmp_path / "export")
    plain = engine(path=str(tmp_path / "export"), lora=None)
    assert _same(_published(plain), _published(trainer))
    assert torch.allclose(_log_probs(plain.log_probs(batch)), _log_probs(trainer.log_probs(batch)), atol=1e-5)


def test_peft_reads_the_exported_adapters(
    engine: Callable[..., FSDPEngine],
    trajectories: Callable[..., DataProto],
    model_folder: Callable[..., str],
    tmp_path: Path,
) -> None:
    from peft import PeftModel

    trainer, batch = engine(), trajectories(LENGTHS)
    trainer.update(batch)
    trainer.export(tmp_path / "export")
    plain = AutoModelForCausalLM.from_pretrained(model_folder("qwen2"), dtype=torch.float32)
    adapted = PeftModel.from_pretrained(plain, str(tmp_path / "export" / "adapter"))
    ids = torch.arange(9)[None]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    with torch.no_grad():
        assert torch.allclose(adapted(ids).logits, exported(ids).logits, atol=1e-5)
        with adapted.disable_adapter():
            assert not torch.allclose(adapted(ids).logits, exported(ids).logits, atol=1e-3)
    assert len(load_file(tmp_path / "export" / "adapter" / "adapter_model.safetensors")) == 2 * MODULES


@DTYPES
def test_the_frozen_model_is_the_reference(
    engine: Callable[..., FSDPEngine], trajectories: Callable[..., DataProto], dtype: str
) -> None:
    trainer, frozen, batch = engine(dtype=dtype, lr=0.1), engine(lora=None, dtype=dtype), trajectories(LENGTHS)
    for _ in range(2):
        trainer.update(batch)
    reference = _log_probs(frozen.log_probs(batch))
    assert torch.equal(_log_probs(trainer.reference_log_probs(batch)), reference)
    assert not torch.allclose(_log_probs(trainer.log_probs(batch)), reference, atol=1e-2)
    with pytest.raises(ConfigError, match="all weights are trained"):
        frozen.reference_log_probs(batch)


def test_frozen_weights_are_held_in_the_dtype_of_the_computation(
    engine: Callable[..., FSDPEngine], trajectories: Callable[..., DataProto], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In half the memory, and bit for bit the same: a pass casts them anyway."""
    load, batch, found = fsdp_engine.load_policy_model, trajectories(LENGTHS), []
    for loading in (load, lambda path, **options: load(path, **{**options, "dtype": "float32"})):
        monkeypatch.setattr(fsdp_engine, "load_policy_model", loading)
        made = engine(dtype="bfloat16")
        updates = [made.update(batch) for _ in range(2)]
        frozen = [each for each in made._model.parameters() if not each.requires_grad]
        found.append((sum(each.nbytes for each in frozen), updates, dict(made.adapter_tensors()), made))
    (half, updates, adapters, made), (whole, same_updates, same_adapters, other) = found
    assert 2 * half == whole
    assert updates == same_updates
    assert _same(adapters, same_adapters)
    scores = [_log_probs(each.reference_log_probs(batch)) for each in (made, other)]
    assert torch.equal(*scores)


@DTYPES
def test_save_load_continue_equals_continue(
    engine: Callable[..., FSDPEngine], trajectories: Callable[..., DataProto], tmp_path: Path, dtype: str
) -> None:
    """Also from the exported model, whose weights have the adapters merged in: as a run that is resumed begins."""
    straight, batches = engine(dtype=dtype), [trajectories(LENGTHS, seed=seed) for seed in range(3)]
    straight.update(batches[0])
    straight.save(tmp_path / "checkpoint")
    straight.export(tmp_path / "export")
    resumed = engine(dtype=dtype, path=str(tmp_path / "export"), seed=5)
    resumed.load(tmp_path / "checkpoint")
    for batch in batches[1:]:
        assert resumed.update(batch) == straight.update(batch)
    assert _same(_published(resumed), _published(straight))
    reference = [_log_probs(each.reference_log_probs(batches[0])) for each in (resumed, straight)]
    assert torch.equal(*reference)


def test_a_checkpoint_of_other_adapters_is_refused(
    engine: Callable[..., FSDPEngine], trajectories: Callable[..., DataProto], tmp_path: Path
) -> None:
    engine().save(tmp_path / "checkpoint")
    for other in (None, OPTIONS | {"rank": 4}, OPTIONS | {"alpha": 1.0}):
        with pytest.raises(CheckpointError, match=r"was written with lora = .*'rank': 3"):
            engine(lora=other).load(tmp_path / "checkpoint")
    assert json.loads((tmp_path / "checkpoint" / "trainer.json").read_text())["lora"]["rank"] == 3


def test_gradient_checkpointing_and_packing_change_nothing(
    engine: Callable[..., FSDPEngine], trajectories: Callable[..., DataProto]
) -> None:
    batch = trajectories(LENGTHS)
    expected = engine().update(batch)
    assert engine(gradient_checkpointing=True).update(batch) == expected
    assert engine(layout="padded", max_tokens_per_microbatch=20).update(batch) == pytest.approx(
        expected, rel=1e-4, abs=1e-6
    )


def test_all_linear_excludes_the_head(engine: Callable[..., FSDPEngine], model_folder: Callable[..., str]) -> None:
    trainer = engine(
        path=model_folder("llama", tied=False), lora={"rank": 2, "alpha": 4, "target_modules": "all-linear"}
    )
    adapted = {name for name, _ in trainer._model.parameters_by_name() if ".lora_A." in name}
    assert len(adapted) == 2 * 7
    assert not any("lm_head" in name for name in adapted)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 0, "alpha": 1}, "lora.rank is 0"),
        ({"rank": 1, "alpha": 0}, "lora.alpha is 0"),
        ({"rank": 1}, "lora.alpha is missing"),
        ({"rank": 1, "alpha": 1, "dropout": 0.1}, "lora.dropout does not exist"),
        ({"rank": 1, "alpha": 1, "target_modules": ["all-linear", "q_proj"]}, "lora.target_modules is"),
        ({"rank": 1, "alpha": 1, "target_modules": ["nowhere"]}, "lora.target_modules is"),
        ({"rank": 1, "alpha": 1, "target_modules": ["lm_head"]}, "lora.target_modules names lm_head.*the output head"),
        (
            {"rank": 1, "alpha": 1, "target_modules": ["embed_tokens"]},
            "lora.target_modules names model.embed_tokens, a Embedding",
        ),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused(
    engine: Callable[..., FSDPEngine], model_folder: Callable[..., str], lora: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        engine(path=model_folder("llama", tied=False), lora=lora)
