"""Adapters of several tenants beside one model: each is a model to clients, chosen by its name."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from safetensors.torch import load_file, save_file

import asyncrl
from asyncrl.errors import InfrastructureError, WeightError
from asyncrl.serve.control_client import ControlClient
from asyncrl.serve.server import Binding
from engines.training.scratch import make

RANK, ALPHA = 2, 4.0
MODULES = ("self_attn.q_proj", "mlp.down_proj")
OPTIONS = {"threads": 1, "dtype": "float32"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "tiny-model"
    said = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one two three"}]
    make(folder, seed=0, demonstrations=lambda number: said, tokenizer_conversations=16)
    return folder


def adapter(model: Path, folder: Path, *, seed: int, **config: Any) -> Path:
    """Write an adapter as peft does, with large matrices: what it adds is not overlooked."""
    weights, tensors = load_file(model / "model.safetensors"), {}
    draw = torch.Generator().manual_seed(seed)
    for name, weight in weights.items():
        if any(module in name for module in MODULES):
            (outputs, inputs), path = weight.shape, f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{path}.lora_A.weight"] = torch.empty(RANK, inputs).normal_(std=0.3, generator=draw)
            tensors[f"{path}.lora_B.weight"] = torch.empty(outputs, RANK).normal_(std=0.3, generator=draw)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "base_model_name_or_path": str(model), **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def log_probs(model: Path, folder: Path | None, ids: list[int]) -> torch.Tensor:
    """Log-probs of each next token by the weights with the adapter merged in."""
    from transformers import AutoModelForCausalLM

    made = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tensors = {} if folder is None else load_file(folder / "adapter_model.safetensors")
    with torch.no_grad():
        for name, a in tensors.items():
            if "lora_A" in name:
                b = tensors[name.replace("lora_A", "lora_B")]
                module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                made.get_submodule(module).weight += ALPHA / RANK * b @ a
        logits: torch.Tensor = made(torch.tensor([ids])).logits[0].log_softmax(-1)
        return logits


@pytest.fixture
async def served(model: Path, tmp_path: Path) -> AsyncIterator[Any]:
    binding = Binding(port=0, control_socket=tmp_path / "control.sock")
    async with asyncrl.serve(str(model), binding=binding, engine_options=OPTIONS) as made:
        yield made


async def ask(served: Any, name: str, *, status: int = 200) -> dict[str, Any]:
    body = {"model": name, "prompt": [5, 6, 7], "max_tokens": 6, "temperature": 1, "seed": 3, "logprobs": 0}
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{served.url}/v1/completions", json={**body, "return_token_ids": True}) as answer,
    ):
        assert answer.status == status, await answer.text()
        found: dict[str, Any] = await answer.json()
        return found


async def test_tenants_choose_adapters_by_model_and_late_replicas_have_them(
    served: Any, model: Path, tmp_path: Path
) -> None:
    folders = {"red": adapter(model, tmp_path / "red", seed=1), "blue": adapter(model, tmp_path / "b", seed=2)}
    assert await served.swap(folders["red"]) == 1
    async with ControlClient(str(served.control_socket)) as control:
        swap = {"action": "swap", "folder": str(folders["blue"]), "adapter": "blue"}
        assert (await control.ask("POST", "/weights", swap))["adapters"] == {"red": 1, "blue": 2}
        for replica in ("replica-0", "late"):
            if replica == "late":
                await control.ask("POST", "/replicas", {"name": "late"})
                await control.ask("POST", "/replicas/drain", {"name": "replica-0"})
            for name, folder in (("tiny-model", None), *folders.items()):
                (choice,) = (await ask(served, name))["choices"]
                ids = [5, 6, 7, *choice["token_ids"]]
                expected = log_probs(model, folder, ids)
                wanted = [float(expected[at - 1, ids[at]]) for at in range(3, len(ids))]
                assert choice["logprobs"]["token_logprobs"] == pytest.approx(wanted, abs=1e-4)
        async with aiohttp.ClientSession() as client, client.get(f"{served.url}/v1/models") as answer:
            cards = [(card["id"], card["parent"]) for card in (await answer.json())["data"]]
        assert cards == [("tiny-model", None), ("red", "tiny-model"), ("blue", "tiny-model")]
        assert "these are: 'tiny-model', 'red', 'blue'" in (await ask(served, "green", status=404))["error"]["message"]
        assert await served.swap(adapter(model, tmp_path / "newer", seed=3), adapter="red") == 3
        assert (await control.ask("GET", "/weights"))["adapters"] == {"red": 3, "blue": 2}
        with pytest.raises(InfrastructureError, match=r"adapters \('red', 'blue'\) are served beside the present"):
            await control.ask("POST", "/weights", {"action": "swap", "folder": str(model)})


async def test_adapters_that_cannot_be_served_are_named(served: Any, model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    said = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one two three"}]
    make(other, seed=9, demonstrations=lambda number: said, tokenizer_conversations=16)
    with pytest.raises(WeightError, match="use_dora = True is not served, only False"):
        await served.swap(adapter(model, tmp_path / "dora", seed=1, use_dora=True))
    with pytest.raises(WeightError, match="is no configuration of an adapter"):
        await served.swap(adapter(model, tmp_path / "text", seed=1, r="many"))
    with pytest.raises(WeightError, match="'tiny-model' is the model itself"):
        await served.swap(adapter(model, tmp_path / "tiny-model", seed=1))
    with pytest.raises(WeightError, match="is no adapter"):
        await served.swap(model, adapter="red")
    with pytest.raises(WeightError, match=r"an adapter of rank 4 has \(4, "):
        await served.swap(adapter(model, tmp_path / "rank", seed=1, r=4))
    with pytest.raises(WeightError, match=r"'base' of version \d is for another base: its"):
        await served.swap(adapter(model, tmp_path / "base", seed=1, base_model_name_or_path=str(other)))
    (replica,) = served.pool.replicas()
    assert (replica.state, replica.restarts, replica.weight_version) == ("healthy", 0, 0)
    (choice,) = (await ask(served, "tiny-model"))["choices"]
    assert len(choice["token_ids"]) == 6
