"""A base of 8 bits beside adapters is the float base that it stands for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from asyncrl.algorithms import PolicyObjective
from asyncrl.data import DataProto
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.mesh import MeshShape
from engines.training.fsdp_engine import FSDPEngine
from engines.training.lora import LoRA
from engines.training.model import check_mesh, load_policy_model
from engines.training.quantised import QuantisedEmbedding, QuantisedLinear, dequantised, quantised

LORA = {"rank": 4, "alpha": 8.0}


def engine(folder: str | Path, *, base: str = "int8", **options: Any) -> FSDPEngine:
    options = {"eps": 1e-3, "objective": PolicyObjective(), "lr": 1e-2, "device": "cpu"} | options
    return FSDPEngine(str(folder), lora=LORA | {"base": base}, **options)


def test_codes_and_scales_by_hand() -> None:
    weight = torch.tensor([[127.0, -1.4, 0.0, 63.6], [0.0, 0.0, 0.0, 0.0]])  # one group of 4 inputs: a scale each row
    codes, scales = quantised(weight)
    assert codes.tolist() == [[127, -1, 0, 64], [0, 0, 0, 0]]
    assert scales.tolist() == [[1.0], [0.0]]
    assert dequantised(codes, scales).tolist() == [[127.0, -1.0, 0.0, 64.0], [0.0, 0.0, 0.0, 0.0]]


def test_a_shard_without_rows_has_codes_and_scales_without_rows() -> None:
    codes, scales = quantised(torch.empty(0, 128))
    assert (codes.shape, scales.shape) == ((0, 128), (0, 2))
    assert dequantised(codes, scales).shape == (0, 128)


def test_layers_compute_with_what_codes_stand_for_and_so_do_gradients() -> None:
    torch.manual_seed(0)
    linear, embedding = nn.Linear(128, 6), nn.Embedding(5, 128)
    both = QuantisedLinear(linear), QuantisedEmbedding(embedding)
    weights = [dequantised(each.weight, each.scales) for each in both]
    assert (
        float((weights[0] - linear.weight.detach()).abs().max() / linear.weight.detach().abs().max())
        <= 0.5 / 127 * 1.01
    )
    ids = torch.tensor([4, 0, 4])
    assert torch.equal(both[1](ids), weights[1][ids])
    hidden = weights[1][ids].requires_grad_()
    (found,) = torch.autograd.grad(both[0](hidden).square().sum(), hidden)
    (expected,) = torch.autograd.grad(nn.functional.linear(hidden, weights[0], linear.bias).square().sum(), hidden)
    assert torch.allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_updates_publish_and_export_as_those_of_the_float_base(
    model_folder: Callable[..., str], trajectories: Callable[..., DataProto], tmp_path: Path, tied: bool
) -> None:
    folder = model_folder("llama", tied=tied)
    ours = engine(folder)
    base = {name: tensor.clone() for name, tensor in ours.base_tensors()}
    shutil.copytree(folder, tmp_path / "float")
    assert base.keys() == load_file(tmp_path / "float" / "model.safetensors").keys()
    save_file(base, tmp_path / "float" / "model.safetensors", metadata={"format": "pt"})
    theirs = engine(tmp_path / "float", base="float")
    for seed in range(2):
        batch = trajectories([9, 4, 17, 6], seed=seed)
        assert ours.update(batch) == pytest.approx(theirs.update(batch), rel=1e-4, abs=1e-6)
    for of in (FSDPEngine.adapter_tensors, FSDPEngine.named_tensors, FSDPEngine.base_tensors):
        expected = dict(of(theirs))
        for name, tensor in of(ours):
            assert torch.allclose(tensor, expected.pop(name), rtol=1e-4, atol=1e-5), name
        assert not expected
    published = {name: tensor.clone() for name, tensor in ours.named_tensors()}
    ours.export(tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert all(torch.equal(tensor, exported[name]) for name, tensor in published.items())
    ours.close()
    theirs.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_goes_on_bit_for_bit_behind_a_checkpoint_and_sleep(
    model_folder: Callable[..., str], trajectories: Callable[..., DataProto], tmp_path: Path, dtype: str
) -> None:
    folder = model_folder("llama")
    first, second = engine(folder, dtype=dtype), engine(folder, dtype=dtype, seed=7)
    first.update(trajectories([9, 4, 17, 6]))
    first.save(tmp_path / "saved")
    second.load(tmp_path / "saved")
    second.sleep()
    second.wake()

    def state(of: FSDPEngine) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in of.named_tensors()}

    assert first.update(trajectories([9, 4, 17, 6], seed=1)) == second.update(trajectories([9, 4, 17, 6], seed=1))
    expected = state(first)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state(second).items())
    assert json.loads((tmp_path / "saved" / "trainer.json").read_text())["lora"]["base"] == "int8"
    whole = engine(folder, base="float")
    with pytest.raises(CheckpointError, match="was written with lora"):
        whole.load(tmp_path / "saved")
    for each in (first, second, whole):
        each.close()


def test_a_quarter_of_the_bytes_and_what_is_refused(model_folder: Callable[..., str]) -> None:
    folder = model_folder("llama", hidden_size=64, intermediate_size=128)

    def frozen(**options: Any) -> int:
        model = load_policy_model(folder, lora=LoRA(rank=4, alpha=8.0, **options))
        return sum(each.nbytes for each in model.parameters() if not each.requires_grad)

    assert frozen(base="int8") <= 0.28 * frozen()
    with pytest.raises(ConfigError, match="'int4'"):
        LoRA(rank=4, alpha=8.0, base="int4")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="products with weights of 8 bits"):
        check_mesh(load_policy_model(folder, lora=LoRA(rank=4, alpha=8.0, base="int8")), MeshShape(tp=2))
