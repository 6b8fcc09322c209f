"""A manifest that does not fit the model is refused before any byte is pulled."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from asyncrl.errors import WeightError, WeightMismatchError, WeightVersionError
from asyncrl.weights import Adapter, TensorEntry, WeightManifest, entries_of
from engines.rollout.model_tensors import ModelTensors, check_base, folder_checksums


def manifest_of(tensors: Mapping[str, torch.Tensor]) -> WeightManifest:
    entries = tuple(
        TensorEntry(
            name=name,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            offset=0,
            size_bytes=tensor.nbytes,
            checksum=hash(float(tensor.detach().float().sum())) & 0xFFFF,
        )
        for name, tensor in tensors.items()
    )
    return WeightManifest(version=3, transport="shared_memory", location="", tensors=entries)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_what_a_trainer_publishes_fits(folder_of: Callable[..., Path], tied: bool) -> None:
    model, tensors = ModelTensors.of_config(str(folder_of(tied=tied))), tensors_of(folder_of(tied=tied))
    assert model.check_manifest(manifest_of(tensors), held=2) == {name: name for name in tensors}
    assert ("lm_head.weight" in tensors) is not tied
    half = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    assert model.check_manifest(manifest_of(half), held=2) == {name: name for name in tensors}


def test_tied_tensors_come_under_either_name_and_agree(folder_of: Callable[..., Path]) -> None:
    model, tensors = ModelTensors.of_config(str(folder_of(tied=True))), tensors_of(folder_of(tied=True))
    embedding = tensors.pop("model.embed_tokens.weight")
    renamed = model.check_manifest(manifest_of({**tensors, "lm_head.weight": embedding}), held=2)
    assert renamed["lm_head.weight"] == "model.embed_tokens.weight"
    both = {**tensors, "lm_head.weight": embedding, "model.embed_tokens.weight": embedding}
    assert "model.embed_tokens.weight" in model.check_manifest(manifest_of(both), held=2).values()
    with pytest.raises(WeightMismatchError, match="are one tensor in the model, but differ in version 3"):
        model.check_manifest(manifest_of({**both, "lm_head.weight": embedding + 1}), held=2)


def test_what_does_not_fit(folder_of: Callable[..., Path], tmp_path: Path) -> None:
    model, tensors = ModelTensors.of_config(str(folder_of())), tensors_of(folder_of())
    with pytest.raises(WeightVersionError, match="version 3 does not follow version 3"):
        model.check_manifest(manifest_of(tensors), held=3)
    with pytest.raises(WeightMismatchError, match="unknown names extra, missing names none"):
        model.check_manifest(manifest_of({**tensors, "extra": torch.ones(1)}), held=2)
    norm = tensors.pop("model.norm.weight")
    with pytest.raises(WeightMismatchError, match=r"unknown names none, missing names model\.norm\.weight"):
        model.check_manifest(manifest_of(tensors), held=2)
    with pytest.raises(WeightMismatchError, match=r"model\.norm\.weight of version 3 has shape \(5,\)"):
        model.check_manifest(manifest_of({**tensors, "model.norm.weight": torch.ones(5)}), held=2)
    with pytest.raises(WeightMismatchError, match=r"has dtype torch\.int64, the model's is torch\.float32"):
        model.check_manifest(manifest_of({**tensors, "model.norm.weight": norm.long()}), held=2)
    with pytest.raises(WeightError, match="is no causal language model"):
        ModelTensors.of_config(str(tmp_path))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_base_of_an_adapter_is_compared_with_a_folder_of_another_dtype(
    folder_of: Callable[..., Path],
    dtype: torch.dtype,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = folder_of()
    base = entries_of((name, tensor.to(dtype)) for name, tensor in tensors_of(folder).items())
    manifest = WeightManifest(
        version=1, transport="", location="", tensors=(), adapter=Adapter(rank=1, alpha=1.0, base=base)
    )
    served = folder_checksums(str(folder), {entry.name: entry.dtype for entry in base})
    kept = tmp_path / "hub" / "models--somebody--model"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("1" * 40)
    shutil.copytree(folder, kept / "snapshots" / ("1" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert served == folder_checksums("somebody/model", {entry.name: entry.dtype for entry in base})
    check_base(manifest, served)
    for name in served:
        with pytest.raises(WeightMismatchError, match=f"its {name} is not what the engine serves"):
            check_base(manifest, {**served, name: (served[name][0], 1)})
    assert not caplog.records
    check_base(manifest, {name: ("float16", checksum) for name, (_, checksum) in served.items()})
    assert "no tensor of its base is compared" in caplog.text
