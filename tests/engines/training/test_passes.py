"""The gradient of the micro-batched loss against the plain thing: one padded batch, full logits, autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from asyncrl.algorithms import PolicyObjective, TokenLosses, token_weights
from asyncrl.data import DataProto
from asyncrl.data.ragged import rows_of
from engines.training.log_probs import TokenScores
from engines.training.model import load_policy_model, shard
from engines.training.packing import PackedRows
from engines.training.passes import Passes
from engines.training.rank_group import RankGroup

LENGTHS = [9, 4, 17, 6, 6, 12, 3, 1]
"""Rows 6 and 7 have no token to train (prompts are three tokens)."""


@pytest.fixture
def ranks() -> Iterator[RankGroup]:
    group = RankGroup(device="cpu")
    yield group
    group.close()


def _plain_gradients(folder: str, batch: DataProto, objective: PolicyObjective) -> tuple[float, dict[str, Tensor]]:
    assert batch.batch is not None
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    rows = rows_of(batch.batch["input_ids"])
    ids = pad_sequence(rows, batch_first=True)
    attended = torch.arange(ids.shape[1]) < torch.tensor([[len(row)] for row in rows])
    logits = model(input_ids=ids, attention_mask=attended.long()).logits
    log_p = logits[:, :-1].log_softmax(dim=-1)
    current = log_p.gather(-1, ids[:, 1:, None]).squeeze(-1)
    padded = {
        name: pad_sequence(rows_of(batch.batch[name]), batch_first=True)[:, 1:]
        for name in ("loss_mask", "behaviour_log_probs")
    }
    losses = objective.token_losses(
        current_log_probs=current,
        proximal_log_probs=current.detach(),
        behaviour_log_probs=padded["behaviour_log_probs"].double(),
        advantages=batch.batch["advantages"].double()[:, None].expand_as(current),
        mask=padded["loss_mask"],
        entropy=-(log_p.exp() * log_p).sum(dim=-1),
    ).loss
    scored = padded["loss_mask"].sum(dim=1)
    weights = objective.token_weights(scored, total_tokens=int(scored.sum()), total_rows=int((scored > 0).sum()))
    loss = (losses * weights[:, None]).sum()
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("family", "tied", "objective", "max_tokens"),
    [
        ("llama", True, PolicyObjective(), 10_000),
        ("llama", False, PolicyObjective(entropy_coef=0.1), 20),
        ("qwen2", True, PolicyObjective(loss_agg_mode="sequence_mean"), 30),
        ("qwen3", True, PolicyObjective(loss_agg_mode="fixed_length", fixed_length=20), 1),
    ],
)
def test_gradient_equals_that_of_one_padded_batch(
    model_folder: Callable[..., str],
    trajectories: Callable[..., DataProto],
    ranks: RankGroup,
    family: str,
    tied: bool,
    objective: PolicyObjective,
    max_tokens: int,
    checkpointing: bool,
) -> None:
    folder, batch = model_folder(family, tied=tied), trajectories(LENGTHS)
    expected_loss, expected = _plain_gradients(folder, batch, objective)

    model = load_policy_model(folder, gradient_checkpointing=checkpointing)
    shard(model, ranks, dtype="float32")
    passes = Passes(model, ranks, max_tokens=max_tokens, temperature=1.0)
    rows = PackedRows.read(batch, vocabulary=model.vocabulary, required=["behaviour_log_probs", "advantages"])
    mini_batch = passes.plan(rows, range(len(rows)))
    assert mini_batch.tokens == sum(max(0, length - 3) for length in LENGTHS)
    assert mini_batch.rows == 6
    assert (mini_batch.microbatches == 1) == (max_tokens == 10_000)
    weights = objective.token_weights(rows.scored, total_tokens=mini_batch.tokens, total_rows=mini_batch.rows)

    def loss_fn(scores: TokenScores, columns: Mapping[str, Tensor], mask: Tensor) -> TokenLosses:
        return objective.token_losses(
            current_log_probs=scores.log_probs,
            proximal_log_probs=scores.log_probs.detach(),
            behaviour_log_probs=columns["behaviour_log_probs"],
            advantages=columns["advantages"],
            mask=mask,
            entropy=scores.entropy,
        )

    extras = "entropy_gradient" if objective.entropy_coef else "entropy"
    gradients = passes.accumulate(rows, mini_batch, weights, loss_fn=loss_fn, squared_norm=lambda: 0.0, extras=extras)
    assert gradients.loss == pytest.approx(expected_loss, rel=1e-5)
    found = {name: parameter.grad for name, parameter in model.parameters_by_name()}
    assert found.keys() == expected.keys()
    scale = max(gradient.abs().max().item() for gradient in expected.values())
    for name, gradient in expected.items():
        mine = found[name]
        assert mine is not None
        assert torch.allclose(mine.double(), gradient, rtol=1e-4, atol=1e-6 * scale), name


def test_weights_of_rows_without_a_token_to_train_are_zero(trajectories: Callable[..., DataProto]) -> None:
    rows = PackedRows.read(trajectories(LENGTHS), vocabulary=61)
    weights = token_weights(rows.scored, loss_agg_mode="sequence_mean", total_tokens=37, total_rows=6)
    assert weights[6:].tolist() == [0.0, 0.0]
