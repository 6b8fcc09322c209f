"""An update that does not fit is known before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from asyncrl.errors import EngineError, WeightMismatchError
from asyncrl.weights.manifest import TensorEntry, WeightManifest
from engines.rollout.vllm_adapter.checkpoint import CheckpointLayout


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
    layout, tensors = CheckpointLayout.of(str(folder_of(tied=tied))), tensors_of(folder_of(tied=tied))
    assert layout.check(manifest_of(tensors)) == {name: name for name in tensors}
    assert ("lm_head.weight" in tensors) is not tied
    half = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    assert layout.check(manifest_of(half)) == {name: name for name in tensors}


def test_tied_tensors_come_under_either_name_and_agree(folder_of: Callable[..., Path]) -> None:
    layout, tensors = CheckpointLayout.of(str(folder_of(tied=True))), tensors_of(folder_of(tied=True))
    embedding = tensors.pop("model.embed_tokens.weight")
    renamed = layout.check(manifest_of({**tensors, "lm_head.weight": embedding}))
    assert renamed["lm_head.weight"] == "model.embed_tokens.weight"
    both = {**tensors, "lm_head.weight": embedding, "model.embed_tokens.weight": embedding}
    assert "model.embed_tokens.weight" in layout.check(manifest_of(both)).values()
    with pytest.raises(WeightMismatchError, match="are one tensor in the model, but differ in version 3"):
        layout.check(manifest_of({**both, "lm_head.weight": embedding + 1}))


def test_what_does_not_fit(folder_of: Callable[..., Path], tmp_path: Path) -> None:
    layout, tensors = CheckpointLayout.of(str(folder_of())), tensors_of(folder_of())
    with pytest.raises(WeightMismatchError, match="unknown names extra, missing names none"):
        layout.check(manifest_of({**tensors, "extra": torch.ones(1)}))
    norm = tensors.pop("model.norm.weight")
    with pytest.raises(WeightMismatchError, match=r"unknown names none, missing names model\.norm\.weight"):
        layout.check(manifest_of(tensors))
    with pytest.raises(WeightMismatchError, match=r"model\.norm\.weight of version 3 has shape \(5,\)"):
        layout.check(manifest_of({**tensors, "model.norm.weight": torch.ones(5)}))
    with pytest.raises(WeightMismatchError, match=r"has dtype int64, the model's is torch\.float32"):
        layout.check(manifest_of({**tensors, "model.norm.weight": norm.long()}))
    with pytest.raises(EngineError, match="is no causal language model"):
        CheckpointLayout.of(str(tmp_path))
