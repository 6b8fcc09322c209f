"""Which models are divided into stages, and micro-batches of one shape. What stages compute: test_fsdp_ranks.py."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GraniteConfig, NanoChatConfig

from asyncrl.algorithms import PolicyObjective
from asyncrl.errors import ConfigError
from asyncrl.mesh import MeshShape
from engines.training.fsdp_engine import FSDPEngine
from engines.training.model import PolicyModel, check_mesh, load_policy_model
from engines.training.packing import PackedMicroBatch
from engines.training.pipeline import WINDOW, Pipeline, Stage


def loaded(folder: str, **options: Any) -> PolicyModel:
    return load_policy_model(folder, sharded=True, **options)


@pytest.mark.parametrize(
    ("options", "stages_per_rank", "words"),
    [
        ({"layout": "padded"}, 1, "rows of LlamaForCausalLM are padded"),
        ({}, 2, "the 2 layers of the model are not a multiple of 4, pp \\* stages_per_rank"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    model_folder: Callable[..., str], options: dict[str, Any], stages_per_rank: int, words: str
) -> None:
    model = loaded(model_folder(tied=False), **options)
    with pytest.raises(ConfigError, match=words) as caught:
        check_mesh(model, MeshShape(pp=2), stages_per_rank=stages_per_rank)
    assert caught.value.path == "mesh.pp"


@pytest.mark.parametrize(("family", "options"), [(GraniteConfig, {"embedding_multiplier": 12.0}), (NanoChatConfig, {})])
def test_a_family_that_does_more_than_its_layers_is_refused(
    tmp_path: Any, family: Any, options: dict[str, float]
) -> None:
    """Granite scales embeddings in its body; nanochat has its norm before the first layer, too."""
    config = family(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        **options,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="ForCausalLM does more than layers one after the other"):
        check_mesh(loaded(str(tmp_path)), MeshShape(pp=2))


def test_stages_are_refused_where_layers_are_not_divided() -> None:
    with pytest.raises(ConfigError, match="stages_per_rank is 2, but layers are not divided"):
        FSDPEngine.check_options("", objective=PolicyObjective(), lr=1e-3, world_size=2, stages_per_rank=2)


@pytest.mark.parametrize(("ranks", "stages_per_rank"), [(2, 1), (4, 1), (4, 2), (8, 3)])
def test_a_pass_has_few_dummies(ranks: int, stages_per_rank: int) -> None:
    pipeline = Pipeline(
        SimpleNamespace(size=lambda: ranks),  # type: ignore[arg-type]
        dict.fromkeys(range(stages_per_rank)),  # type: ignore[arg-type]
        {},
        states=torch.zeros(1, 1, 4),
        pieces=1,
    )
    for needed in range(40 * ranks):
        count = pipeline.microbatches(needed)
        windows = -(-count // (WINDOW * ranks))
        size, rest = divmod(count, windows)
        assert rest == 0
        assert ranks <= size <= WINDOW * ranks
        assert size % (size // ranks) == 0 or stages_per_rank == 1  # torch's rule for interleaved stages
        assert max(needed, ranks) <= count <= max(needed + windows * (ranks if stages_per_rank > 1 else 1), ranks)


def test_a_stage_goes_on_where_the_one_before_ended_and_padding_changes_nothing(
    model_folder: Callable[..., str],
) -> None:
    """The scores of two stages, of a batch with padding behind, are those of the model."""
    model = load_policy_model(model_folder("qwen3", tied=False, vocab_size=64))
    ids = torch.randint(0, 64, (9,), generator=torch.Generator().manual_seed(0))
    batch = PackedMicroBatch(
        rectangles=((1, 5), (1, 4)),
        prefixes=(None, None),
        input_ids=ids,
        positions=torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3]),
        predictors=torch.tensor([2, 3, 6, 7]),
        targets=torch.tensor([ids[3], ids[4], ids[7], ids[8]]),
        tokens=torch.arange(4),
        rows=torch.tensor([0, 0, 1, 1]),
    )
    whole = model(
        *(batch.input_ids, batch.positions, batch.predictors, batch.targets),
        rectangles=batch.rectangles,
        prefixes=batch.prefixes,
        extras="entropy",
    )
    padded = batch.padded(300)
    assert (len(padded.input_ids), padded.rectangles) == (300, ((1, 5), (1, 4), (2, 128), (1, 35)))
    assert padded.positions[[8, 9, 136, 137, 265]].tolist() == [3, 0, 127, 0, 0]
    assert batch.padded(9) is batch
    states = torch.zeros(1)
    for first in (0, 1):
        stage = Stage(model, first, first + 1)
        stage.batches, stage.scored, stage.extras = [padded], 6, "entropy"
        states = stage(states, 0)
    assert states.shape == (2, 6)
    assert states[:, 4:].count_nonzero() == 0
    torch.testing.assert_close(states[:, :4], torch.stack([whole.log_probs, whole.entropy]), rtol=1e-5, atol=1e-6)
