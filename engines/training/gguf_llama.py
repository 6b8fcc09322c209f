"""Llama's kind of model out of a GGUF file: names, shapes and order of heads as transformers has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engines.training.gguf_file import GGUFFile

__all__ = ["write_llama"]

_MODEL = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_HEAD = "output.weight"
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
_OTHER_KEYS = {"rope.freq_base", "rope.dimension_count"}


def write_llama(header: GGUFFile, folder: Path) -> bool:
    """Write configuration and weights (float32) into ``folder``; False, and nothing, if the model has more to it.

    So a scaled rope, experts, biases, or any tensor and key that is not of the plain architecture.
    """
    config = _config(header)
    names = None if config is None else _names(header, config)
    if config is None or names is None:
        return False
    from safetensors.numpy import save_file
    from transformers import GenerationConfig, LlamaConfig

    made = LlamaConfig(**config)
    tensors = {}
    for source, target in names.items():
        tensor = header.tensor(source)
        if target.endswith("q_proj.weight"):
            tensor = _halves_apart(tensor, config["num_attention_heads"])
        elif target.endswith("k_proj.weight"):
            tensor = _halves_apart(tensor, config["num_key_value_heads"])
        tensors[target] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    made.save_pretrained(folder)
    GenerationConfig.from_model_config(made).save_pretrained(folder)
    return True


def _config(header: GGUFFile) -> dict[str, Any] | None:
    """Arguments of LlamaConfig; None if the file says anything else. Any: numbers and names."""
    metadata = header.metadata
    if metadata.get("general.architecture") != "llama" or "mistral" in str(metadata.get("general.name", "")).lower():
        return None
    said = {key.removeprefix("llama."): value for key, value in metadata.items() if key.startswith("llama.")}
    if not set(_KEYS) - {"vocab_size"} <= set(said) <= set(_KEYS) | _OTHER_KEYS:
        return None
    config = {name: said[key] for key, name in _KEYS.items() if key in said}
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    config.setdefault("vocab_size", len(tokens))
    head = config["hidden_size"] // config["num_attention_heads"]
    if said.get("rope.dimension_count", head) != head or config["vocab_size"] != len(tokens):
        return None
    for name in ("bos", "eos"):
        config[f"{name}_token_id"] = metadata.get(f"tokenizer.ggml.{name}_token_id")
    config["pad_token_id"] = metadata.get("tokenizer.ggml.padding_token_id")
    return config | {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "float32",
        "rope_parameters": {"rope_type": "default", "rope_theta": said.get("rope.freq_base", 10_000.0)},
        "tie_word_embeddings": _HEAD not in header.tensors,
    }


def _names(header: GGUFFile, config: dict[str, Any]) -> dict[str, str] | None:
    """Names in transformers by names in the file; None if there is one too many or too few. Any: as above."""
    names = {**_MODEL, **({} if config["tie_word_embeddings"] else {_HEAD: "lm_head.weight"})}
    for layer in range(config["num_hidden_layers"]):
        names |= {f"blk.{layer}.{ours}": f"model.layers.{layer}.{theirs}" for ours, theirs in _LAYER.items()}
    return names if set(names) == set(header.tensors) else None


def _halves_apart(tensor: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of a projection in the order in which transformers rotates them.

    A file has the two numbers that a rope turns side by side, transformers in the two halves of a head.
    """
    pairs = tensor.reshape(heads, tensor.shape[0] // heads // 2, 2, tensor.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(tensor.shape))
