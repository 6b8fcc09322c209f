"""A run that trains adapters: what the engines get of them, the frozen base as the reference, and resumption."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.config import Config
from asyncrl.tasks.run import train
from asyncrl.trainer.assembly import Assembly
from asyncrl.trainer.driver import Driver
from asyncrl.weights import WeightManifest
from engines.weights.shared_memory import SharedMemoryTransport

pytest.importorskip("peft")

LORA = {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "o_proj"]}


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[WeightManifest]:
    """The manifests that every transport makes, in order."""
    made: list[WeightManifest] = []
    publish = SharedMemoryTransport.publish

    def noted(self: SharedMemoryTransport, *arguments: Any, **named: Any) -> WeightManifest:
        made.append(publish(self, *arguments, **named))
        return made[-1]

    monkeypatch.setattr(SharedMemoryTransport, "publish", noted)
    return made


def test_adapters_learn_beside_the_reference_they_stand_on(
    small_config: Callable[..., Config], published: list[WeightManifest]
) -> None:
    config = small_config(
        steps=3,
        max_staleness=1,
        trainer={"lora": LORA, "lr": 0.1},
        algorithm={"kl_coef": 0.1},
        eval={"tasks": 0},
        checkpoint={"every": 3},
    )
    assert "reference" not in {request.role for request in Assembly(config, log_folder=Path("unused"))._requests()}
    train(config)
    (run,) = config.runs.glob("small-2*")
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {entry.name for manifest in published for entry in manifest.tensors} == {
        f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{matrix}.weight"
        for layer in (0, 1)
        for name in LORA["target_modules"]
        for matrix in "AB"
    }
    assert sum(step.get("weights_proofs", 0) for step in steps) >= 2
    assert max(step.get("weights_canary", 0.0) for step in steps) < 1
    divergence = [step["train/reference_kl"] for step in steps if "train/reference_kl" in step]
    assert divergence[0] == pytest.approx(0.0, abs=1e-6)
    assert divergence[-1] > 1e-4

    first = load_file(run / "model" / "model.safetensors")
    folder = max((run / "checkpoints").glob("step-*/model"))
    last = load_file(folder / "model.safetensors")
    changed = {name for name in first if not torch.equal(first[name], last[name])}
    assert first.keys() == last.keys()
    assert changed == {
        f"model.layers.{layer}.self_attn.{name}.weight" for layer in (0, 1) for name in LORA["target_modules"]
    }
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("adapters", ["apart", "merged"])
def test_a_resumed_run_goes_on_with_the_adapters_it_had(
    small_config: Callable[..., Config],
    published: list[WeightManifest],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    adapters: str,
) -> None:
    def config(folder: str) -> Config:
        return small_config(
            runs=str(tmp_path / folder),
            steps=4,
            max_staleness=0,
            rollout={"options": {"max_running_requests": 1}},
            trainer={"lora": LORA, "lr": 0.1},
            weights={"adapters": adapters},
            eval={"tasks": 0},
            checkpoint={"every": 2},
        )

    def last(folder: str) -> dict[str, torch.Tensor]:
        (file,) = (tmp_path / folder).glob("*/checkpoints/step-*4/model/model.safetensors")
        return load_file(file)

    train(config("calm"))
    with monkeypatch.context() as patch:
        update = Driver._update

        async def stopping(self: Driver, at: int, groups: Any) -> Any:
            if at == 4:
                raise RuntimeError("stopped")
            return await update(self, at, groups)

        patch.setattr(Driver, "_update", stopping)
        with pytest.raises(RuntimeError, match="stopped"):
            train(config("hurt"))
    (run,) = (tmp_path / "hurt").glob("small-2*")
    published.clear()
    train(config("hurt"), resume=run)
    # Engines that start beside the base get the version of the checkpoint before any token is sampled.
    assert [manifest.version for manifest in published] == ([2, 3, 4] if adapters == "apart" else [3, 4])
    calm, hurt = last("calm"), last("hurt")
    assert all(torch.equal(tensor, hurt[name]) for name, tensor in calm.items())


@pytest.mark.parametrize(("key", "value"), [("rank", 0), ("alpha", -1.0), ("depth", 3)])
def test_a_slip_in_the_table_is_told_with_its_path(small_config: Callable[..., Config], key: str, value: Any) -> None:
    with pytest.raises(Exception, match=rf"trainer\.lora\.{key}"):
        small_config(trainer={"lora": LORA | {key: value}})
