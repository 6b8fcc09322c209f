"""The divergence as a part of the reward, and its controllers, by hand."""

import pytest
import torch

from asyncrl.algorithms import AdaptiveKL, FixedKL, gae, penalised_rewards, penalised_token_rewards, row_divergences
from asyncrl.algorithms.kl import KLEstimator, kl_estimate
from asyncrl.data.ragged import ragged_from_list
from asyncrl.errors import ConfigError, SchemaError


def test_rows_lose_what_they_diverged() -> None:
    got = penalised_rewards(torch.tensor([1.0, 0.0]), torch.tensor([2.0, -1.0]), coefficient=0.25)
    assert got.tolist() == [0.5, 0.25]
    assert got.dtype == torch.float32
    with pytest.raises(SchemaError, match="divergences"):
        penalised_rewards(torch.zeros(2), torch.zeros(3), coefficient=0.1)
    with pytest.raises(ConfigError, match=r"^coefficient is"):
        penalised_rewards(torch.zeros(2), torch.zeros(2), coefficient=-0.1)


def test_tokens_lose_their_own_share_and_the_last_one_gets_the_reward() -> None:
    rewards, divergences, lengths = (
        torch.tensor([1.0, 7.0, 2.0]),
        torch.tensor([4.0, 8.0, 2.0]),
        torch.tensor([2, 0, 1]),
    )
    got = penalised_token_rewards(rewards, divergences, lengths, coefficient=0.125)
    assert got.tolist() == [-0.5, 0.0, 1.75]
    assert got.dtype == torch.float32
    # Summed over a row it is the row's penalised return.
    rows = penalised_rewards(rewards[[0, 2]], torch.tensor([12.0, 2.0]), coefficient=0.125)
    assert [float(got[:2].sum()), float(got[2])] == rows.tolist()
    advantages, _ = gae(got, torch.zeros(3), lengths, gae_lambda=1.0)
    assert advantages.tolist() == [-0.5, 0.0, 1.75]
    with pytest.raises(SchemaError, match=r"divergences must be \[3\]"):
        penalised_token_rewards(rewards, divergences[:2], lengths, coefficient=0.1)
    with pytest.raises(SchemaError, match="rewards"):
        penalised_token_rewards(rewards[:2], divergences, lengths, coefficient=0.1)
    with pytest.raises(ConfigError, match=r"^coefficient is"):
        penalised_token_rewards(rewards, divergences, lengths, coefficient=-1.0)
    nothing = torch.zeros(0)
    assert penalised_token_rewards(nothing, nothing, nothing.long(), coefficient=0.1).tolist() == []


def test_a_fixed_coefficient_stays() -> None:
    fixed = FixedKL(coefficient=0.1)
    assert fixed.updated(9.0, rows=1000) is fixed
    assert FixedKL(coefficient=0.0).coefficient == 0.0
    with pytest.raises(ConfigError, match=r"^coefficient is"):
        FixedKL(coefficient=-0.1)


def test_an_adaptive_one_is_drawn_to_its_target() -> None:
    control = AdaptiveKL(coefficient=0.1, target=2.0, horizon=1000.0)
    assert control.updated(2.0, rows=100).coefficient == pytest.approx(0.1)
    assert control.updated(2.2, rows=100).coefficient == pytest.approx(0.1 * 1.01)  # a tenth too much
    assert control.updated(100.0, rows=100).coefficient == pytest.approx(0.1 * 1.02)  # held at a fifth
    assert control.updated(0.0, rows=100).coefficient == pytest.approx(0.1 * 0.98)
    assert control.updated(0.0, rows=100_000).coefficient == pytest.approx(0.01)  # never through 0
    assert (control.updated(5.0, rows=1).target, control.updated(5.0, rows=1).horizon) == (2.0, 1000.0)
    assert AdaptiveKL(coefficient=1.0, target=1.0).horizon == 10_000.0
    for wrong in ({"coefficient": 0.0}, {"target": 0.0}, {"horizon": 0.0}):
        with pytest.raises(ConfigError, match=f"^{next(iter(wrong))} is"):
            AdaptiveKL(**{"coefficient": 0.1, "target": 1.0, **wrong})


def test_a_row_diverges_by_what_it_sampled() -> None:
    behaviour = ragged_from_list([torch.tensor([0.0, -1.0, -2.0]), torch.tensor([-3.0])])
    reference = ragged_from_list([torch.tensor([9.0, -1.5, -4.0]), torch.tensor([-3.0])])
    mask = ragged_from_list([torch.tensor([False, True, True]), torch.tensor([False])])
    assert row_divergences(behaviour, reference, mask).tolist() == [2.5, 0.0]
    assert row_divergences(behaviour, reference, mask, estimator="k2").tolist() == [2.125, 0.0]
    assert row_divergences(behaviour, reference, mask).dtype == torch.float32
    with pytest.raises(SchemaError, match="rows of the same lengths"):
        row_divergences(behaviour, ragged_from_list([torch.zeros(3), torch.zeros(2)]), mask)


def test_of_the_estimators_only_k1_pulls_to_the_reference() -> None:
    """What a penalty in the reward teaches: E_q[penalty * grad log q], over a whole vocabulary."""
    q, p = torch.tensor([[0.1, 0.9], [0.2, 0.8]], dtype=torch.float64)
    logits = q.log().requires_grad_()
    log_q = logits.log_softmax(0)

    def gradient(loss: torch.Tensor) -> list[float]:
        return torch.autograd.grad(loss, logits, retain_graph=True)[0].tolist()

    def taught(estimator: KLEstimator) -> list[float]:
        return gradient((q * kl_estimate(q.log(), p.log(), estimator=estimator) * log_q).sum())

    towards, covering = gradient((log_q.exp() * (log_q - p.log())).sum()), gradient(-(p * log_q).sum())
    assert taught("k1") == pytest.approx(towards)
    assert taught("k3") == pytest.approx([each - other for each, other in zip(towards, covering, strict=True)])
    assert taught("k1")[0] < 0  # the first token becomes likelier, as in the reference
    assert min(taught(each)[0] for each in ("k2", "k3", "low_variance")) > 0
