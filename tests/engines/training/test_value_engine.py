"""The critic and the reward model: against plain loops over transformers' own models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from asyncrl.algorithms import ValueObjective, bradley_terry_losses
from asyncrl.data import DataProto
from asyncrl.data.ragged import rows_of
from asyncrl.errors import CheckpointError, ConfigError, InvalidDataError
from engines.training.value_engine import FSDPValueEngine

MakeFolder = Callable[..., str]
LENGTHS = (9, 4, 14, 6)


@pytest.fixture
def engine(model_folder: MakeFolder) -> Iterator[Callable[..., FSDPValueEngine]]:
    made: list[FSDPValueEngine] = []

    def make(path: str = "", **options: Any) -> FSDPValueEngine:
        made.append(FSDPValueEngine(path or model_folder(), device="cpu", **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def set_head(engine: FSDPValueEngine, *, seed: int = 0) -> torch.Tensor:
    """Set a head that is not 0, and return it."""
    head = dict(engine._model.parameters_by_name())["score.weight"]
    with torch.no_grad():
        head.copy_(torch.randn(head.shape, generator=torch.Generator().manual_seed(seed)))
    return head.detach().clone()


def batch_of(*, seed: int = 1, **columns: Any) -> DataProto:
    draw = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, 61, (length,), generator=draw) for length in LENGTHS]
    masks = [torch.arange(length) >= 3 for length in LENGTHS]
    masks[0][5:7] = False  # a turn of the environment
    return DataProto.from_dict(tensors={"input_ids": rows, "loss_mask": masks, **columns})


def hidden_states(folder: str, batch: DataProto) -> tuple[Any, list[torch.Tensor]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, [
        model.base_model(input_ids=row[None], use_cache=False).last_hidden_state[0]
        for row in rows_of(batch.batch["input_ids"])
    ]


def test_a_value_is_computed_before_its_token(model_folder: MakeFolder, engine: Callable[..., Any]) -> None:
    critic, batch = engine(max_tokens_per_microbatch=16), batch_of()
    assert all(float(row.abs().max()) == 0.0 for row in rows_of(critic.values(batch).batch["values"]))
    head = set_head(critic)
    _, states = hidden_states(model_folder(), batch)
    found = rows_of(critic.values(batch).batch["values"])
    for row, mask, hidden in zip(found, rows_of(batch.batch["loss_mask"]), states, strict=True):
        expected = torch.zeros(len(row))
        for token in range(1, len(row)):
            if mask[token]:
                expected[token] = float(hidden[token - 1].detach() @ head[0])
        assert torch.allclose(row, expected, atol=1e-5)


@pytest.mark.parametrize("clip", [pytest.param(None, marks=pytest.mark.slow), 0.3])
def test_a_step_is_the_gradient_of_the_plain_loop(
    model_folder: MakeFolder, engine: Callable[..., Any], clip: float | None
) -> None:
    """One step, in micro-batches of all sizes: loss and gradient norm of one graph over single rows."""
    draw = torch.Generator().manual_seed(4)
    returns = [torch.randn(length, generator=draw) for length in LENGTHS]
    batch = batch_of(returns=returns)
    model, states = hidden_states(model_folder(), batch)
    critic = engine(lr=1e-3, objective=ValueObjective(cliprange_value=clip))
    head = set_head(critic).requires_grad_()
    tokens = [
        (hidden[:-1] @ head[0])[mask[1:]] - target[1:][mask[1:]]
        for hidden, mask, target in zip(states, rows_of(batch.batch["loss_mask"]), returns, strict=True)
    ]
    loss = torch.cat(tokens).square().mean() / 2  # the first step's values are the old ones: nothing is clipped
    loss.backward()
    gradients = [p.grad for p in (head, *model.base_model.parameters()) if p.grad is not None]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    for max_tokens in (14, 64):
        again = engine(lr=1e-3, objective=ValueObjective(cliprange_value=clip), max_tokens_per_microbatch=max_tokens)
        set_head(again)
        metrics = again.update(batch)
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        errors = torch.cat(tokens).detach()
        targets = torch.cat([r[m] for r, m in zip(returns, rows_of(batch.batch["loss_mask"]), strict=True)])
        explained = 1 - float(errors.var(correction=0) / targets.var(correction=0))
        assert metrics["explained_variance"] == pytest.approx(explained, rel=1e-4)
        assert metrics["tokens_trained"] == len(errors)


def test_a_critic_learns_the_returns(engine: Callable[..., Any]) -> None:
    batch = batch_of(returns=[torch.full((length,), float(length)) / 10 for length in LENGTHS])
    critic = engine(lr=1e-2, num_mini_batches=2, objective=ValueObjective(cliprange_value=None))
    first, *_, last = [critic.update(batch) for _ in range(25)]
    assert last["value_error"] < first["value_error"] / 3
    assert last["explained_variance"] > 0.7


def test_training_continues_from_a_checkpoint(engine: Callable[..., Any], tmp_path: Path) -> None:
    batch = batch_of(returns=[torch.ones(length) for length in LENGTHS])
    critic = engine(lr=1e-2)
    critic.update(batch)
    critic.save(tmp_path / "critic")
    again = engine(lr=1e-2)
    again.load(tmp_path / "critic")
    assert critic.update(batch) == again.update(batch)
    assert torch.equal(critic.values(batch).batch["values"].values(), again.values(batch).batch["values"].values())


def test_a_critic_refuses_the_checkpoint_of_a_policy(
    model_folder: MakeFolder, engine: Callable[..., Any], tmp_path: Path
) -> None:
    from asyncrl.algorithms import PolicyObjective
    from engines.training.fsdp_engine import FSDPEngine

    policy = FSDPEngine(model_folder(tied=False), objective=PolicyObjective(), lr=0.0, device="cpu")
    policy.save(tmp_path / "policy")
    policy.close()
    with pytest.raises(CheckpointError, match=r"another model: it has no score\.weight"):
        engine().load(tmp_path / "policy")


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_it_is_exported_as_a_model_for_sequence_classification(
    model_folder: MakeFolder, engine: Callable[..., Any], tmp_path: Path, family: str
) -> None:
    critic, batch = engine(model_folder(family)), batch_of()
    set_head(critic)
    scores = critic.scores(batch).batch["scores"]
    critic.export(tmp_path / "exported")
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    for row, score in zip(rows_of(batch.batch["input_ids"]), scores, strict=True):
        assert float(theirs(input_ids=row[None]).logits[0, 0]) == pytest.approx(float(score), abs=1e-4)
    again = engine(str(tmp_path / "exported"))
    assert torch.allclose(again.scores(batch).batch["scores"], scores, atol=1e-6)


def test_a_head_of_several_labels_is_refused(tmp_path: Path, engine: Callable[..., Any]) -> None:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_labels=3
    )
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"the head of the value model is \(3, 16\)"):
        engine(str(tmp_path))


def test_a_head_that_is_not_in_the_files_is_an_error(tmp_path: Path, engine: Callable[..., Any]) -> None:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_labels=1
    )
    model = LlamaForSequenceClassification(config)
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"LlamaForSequenceClassification without score\.weight"):
        engine(str(tmp_path))


def test_a_comparison_is_the_gradient_of_bradley_terry(model_folder: MakeFolder, engine: Callable[..., Any]) -> None:
    batch = batch_of(margins=torch.tensor([0.5, 9.0, 0.0, 9.0]))
    model, states = hidden_states(model_folder(), batch)
    judge = engine(lr=1e-3, center_rewards_coefficient=0.1)
    head = set_head(judge).requires_grad_()
    scores = torch.stack([hidden[-1] @ head[0] for hidden in states])
    losses = bradley_terry_losses(
        scores[0::2], scores[1::2], margins=torch.tensor([0.5, 0.0]), center_rewards_coefficient=0.1
    )
    losses.loss.mean().backward()
    gradients = [p.grad for p in (head, *model.base_model.parameters()) if p.grad is not None]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    for max_tokens in (15, 64):  # pairs lie in different micro-batches, or in one
        again = engine(lr=1e-3, center_rewards_coefficient=0.1, max_tokens_per_microbatch=max_tokens)
        set_head(again)
        metrics = again.compare(batch)
        assert metrics["loss"] == pytest.approx(float(losses.loss.mean()), rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert metrics["pairs"] == 2
        assert metrics["accuracy"] == pytest.approx(float(losses.correct.mean()))


def test_a_reward_model_learns_comparisons(engine: Callable[..., Any]) -> None:
    batch, judge = batch_of(), engine(lr=1e-2)
    *_, last = [judge.compare(batch) for _ in range(15)]
    assert last["accuracy"] == 1.0
    assert last["distance"] > 1.0


def test_rows_that_are_not_pairs_are_refused(engine: Callable[..., Any]) -> None:
    judge = engine()
    with pytest.raises(InvalidDataError, match="3 rows are not pairs"):
        judge.compare(batch_of().slice(0, 3))
    with pytest.raises(InvalidDataError, match="row 1 has no token"):
        judge.scores(DataProto.from_dict(tensors={"input_ids": [torch.tensor([3]), torch.zeros(0, dtype=torch.int64)]}))
