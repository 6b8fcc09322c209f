"""The shape of a trainer's mesh, and the models that it divides."""

from __future__ import annotations

import re
from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig, MixtralConfig, Qwen3Config, Qwen3MoeConfig

from asyncrl.errors import ConfigError
from asyncrl.mesh import MeshShape

SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96, "vocab_size": 64}


def test_what_the_other_sizes_leave_is_sharded_over() -> None:
    shape = MeshShape.of({"dp_replicate": 2, "tp": 2}, world_size=12)
    assert shape == MeshShape(dp_replicate=2, dp_shard=3, tp=2)
    assert MeshShape.of(shape, world_size=12) == shape
    assert MeshShape.of(None, world_size=5) == MeshShape(dp_shard=5)
    assert MeshShape.of({"cp": 2, "ep": 4}, world_size=8) == MeshShape(dp_shard=4, cp=2, ep=4)


def test_ranks_that_follow_one_another_have_the_same_rows() -> None:
    shape = MeshShape.of({"cp": 2, "tp": 2}, world_size=12)
    assert (shape.data_size, shape.copies) == (3, 4)
    assert [shape.data_rank(rank) for rank in range(12)] == [0] * 4 + [1] * 4 + [2] * 4
    assert [rank for rank in range(12) if shape.answers(rank)] == [0, 4, 8]


def test_stages_have_the_rows_of_the_first_one_which_answers() -> None:
    shape = MeshShape.of({"pp": 2, "tp": 2}, world_size=12)
    assert (shape.data_size, shape.ranks) == (3, 12)
    assert [shape.data_rank(rank) for rank in range(12)] == [0, 0, 1, 1, 2, 2] * 2
    assert [rank for rank in range(12) if shape.answers(rank)] == [0, 2, 4]


@pytest.mark.parametrize(
    ("sizes", "path", "words"),
    [
        ({"tp": 3}, "mesh", "tp 3 is 3 ranks, there are 4"),
        ({"dp_shard": 2, "cp": 4}, "mesh", "dp_shard 2 \\* cp 4 is 8 ranks"),
        ({"tp": 8}, "mesh", "tp 8 is 8 ranks"),
        ({"tp": 0}, "mesh.tp", "mesh.tp is 0"),
        ({"pp": 3}, "mesh", "pp 3 is 3 ranks, there are 4"),
        ({"ep": 3}, "mesh.ep", "mesh.ep = 3 does not divide the 4 ranks of dp_shard"),
        ({"dp_replicate": 2, "tp": 2, "ep": 2}, "mesh.ep", "mesh.ep = 2 does not divide the 1 ranks"),
        ({"ep": 0}, "mesh.ep", "mesh.ep is 0"),
        ({"dp": 2}, "mesh.dp", "there is no such dimension"),
    ],
)
def test_a_mesh_of_another_number_of_ranks_is_refused(sizes: dict[str, int], path: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        MeshShape.of(sizes, world_size=4)
    assert caught.value.path == path
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("mesh", "config", "words"),
    [
        ({"tp": 8}, LlamaConfig(**SIZES), "tp = 8 does not divide the model's num_key_value_heads, 4; .* of 4"),
        ({"tp": 2}, LlamaConfig(**SIZES | {"vocab_size": 61}), "does not divide the model's vocab_size, 61"),
        ({"tp": 4}, LlamaConfig(**SIZES | {"intermediate_size": 90}), "intermediate_size, 90; use a divisor of 2"),
        ({"cp": 8, "tp": 2}, LlamaConfig(**SIZES), "cp = 8 does not divide the 4 attention heads of a rank"),
        ({"tp": 2}, Qwen3MoeConfig(**SIZES), "plan of qwen3_moe in transformers has moe_tp_experts, packed_colwise"),
        ({"tp": 2}, GPT2Config(), "plan of gpt2 in transformers has no entry"),
        (
            {"pp": 3},
            LlamaConfig(**SIZES | {"num_hidden_layers": 4}),
            "pp = 3 does not divide the model's 4 layers; .* 4",
        ),
        ({"pp": 2}, LlamaConfig(**SIZES | {"tie_word_embeddings": True}), "embeddings are its head .*; use pp = 1, or"),
        ({"dp_shard": 2, "ep": 2}, LlamaConfig(**SIZES), "llama has no expert-parallel plan .*; use ep = 1, or"),
        (
            {"dp_shard": 3, "ep": 3},
            Qwen3MoeConfig(**SIZES, num_experts=8),
            "ep = 3 does not divide .* 8 experts; .* of 8",
        ),
        ({"dp_shard": 2, "tp": 2, "ep": 2}, Qwen3MoeConfig(**SIZES), "plan of qwen3_moe .* has moe_tp_experts"),
    ],
)
def test_a_model_that_a_mesh_does_not_divide_is_refused(mesh: dict[str, int], config: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MeshShape(**mesh).check_model(config, path="trainer.mesh")
    assert caught.value.path in [f"trainer.mesh.{name}" for name in ("pp", "tp", "cp", "ep")]
    assert re.search(words, f"{caught.value}; {caught.value.remedy}")


def test_models_that_are_divided() -> None:
    MeshShape(dp_shard=64, cp=4, tp=2).check_model(LlamaConfig(**SIZES))
    tied = LlamaConfig(**SIZES | {"num_hidden_layers": 4, "tie_word_embeddings": True})
    MeshShape(pp=2).check_model(tied, own_head=True)
    MeshShape(pp=4, cp=4, tp=2).check_model(LlamaConfig(**SIZES | {"num_hidden_layers": 80}))
    MeshShape(cp=2, tp=4).check_model(Qwen3Config(**SIZES))
    MeshShape(dp_replicate=2, cp=8).check_model(Qwen3MoeConfig(**SIZES))
    MeshShape(dp_shard=8, cp=2, ep=16).check_model(Qwen3MoeConfig(**SIZES))
    MeshShape(dp_shard=8, ep=8).check_model(MixtralConfig(**SIZES))
