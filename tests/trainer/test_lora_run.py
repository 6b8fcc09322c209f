"""A run that trains adapters: merged weights for the servers, the frozen base as the reference, and resumption."""

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

pytest.importorskip("peft")

LORA = {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "o_proj"]}


def test_adapters_learn_beside_the_reference_they_stand_on(small_config: Callable[..., Config]) -> None:
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


@pytest.mark.parametrize(("key", "value"), [("rank", 0), ("alpha", -1.0), ("depth", 3)])
def test_a_slip_in_the_table_is_told_with_its_path(small_config: Callable[..., Config], key: str, value: Any) -> None:
    with pytest.raises(Exception, match=rf"trainer\.lora\.{key}"):
        small_config(trainer={"lora": LORA | {key: value}})
