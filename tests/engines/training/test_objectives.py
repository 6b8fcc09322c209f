"""Objectives in the engine: sums over rows and batches do not depend on micro-batches, and the metrics of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from asyncrl.algorithms import (
    GMPO,
    M2PO,
    TOPR,
    ClipCov,
    KLCov,
    MaskedImportance,
    NoCorrection,
    PolicyObjective,
    Rejection,
)
from asyncrl.data import DataProto
from asyncrl.errors import InvalidDataError, SchemaError
from engines.training.fsdp_engine import FSDPEngine

LENGTHS = [9, 4, 17, 6, 6, 12, 3, 14]


def engine(model: str, objective: PolicyObjective, **options: Any) -> FSDPEngine:
    # A large epsilon keeps Adam from magnifying the rounding of gradients that are nearly 0.
    settings: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3, "threads": 1, "device": "cpu"} | options
    return FSDPEngine(model, objective=objective, **settings)


@pytest.mark.parametrize(
    "objective",
    [
        PolicyObjective(loss=GMPO(), correction=MaskedImportance(high=50.0), loss_agg_mode="sequence_mean"),
        PolicyObjective(loss=TOPR(), correction=NoCorrection()),
        PolicyObjective(loss=M2PO(threshold=0.3), correction=NoCorrection()),
        PolicyObjective(loss=ClipCov(share=0.2, low=-0.2), correction=Rejection(low=0.0, high=9.0)),
        PolicyObjective(loss=KLCov(share=0.3)),
    ],
    ids=lambda objective: type(objective.loss).__name__,
)
def test_micro_batches_change_nothing(
    model_folder: Callable[..., str], trajectories: Callable[..., DataProto], objective: PolicyObjective
) -> None:
    found, weights = [], []
    for budget in (1000, 17):
        made = engine(model_folder(), objective, max_tokens_per_microbatch=budget, num_mini_batches=2)
        found.append([made.update(trajectories(LENGTHS, seed=seed)) for seed in (1, 2)])
        weights.append(torch.cat([tensor.flatten().clone() for _, tensor in made.named_tensors()]))
        made.close()
    for one, many in zip(*found, strict=True):
        assert many == pytest.approx(one, rel=1e-4, abs=1e-6)
    assert (weights[0] - weights[1]).norm() <= 1e-6 * weights[0].norm()
    assert any(0.0 < metrics.get("held_back", 0.5) < 1.0 for metrics in found[0])


def test_any_seed_works_for_an_objective_that_draws(
    model_folder: Callable[..., str], trajectories: Callable[..., DataProto]
) -> None:
    found = []
    for seed in (2**32 - 1, 2**32 - 1, 2**31):
        made = engine(model_folder(), PolicyObjective(loss=ClipCov(share=0.2, low=-0.2)), seed=seed, num_mini_batches=2)
        found.append(made.update(trajectories(LENGTHS)))
        made.close()
    assert found[0] == found[1] != found[2]


def test_metrics_of_a_step_have_the_staleness_of_its_tokens(
    model_folder: Callable[..., str], trajectories: Callable[..., DataProto]
) -> None:
    rows = trajectories(LENGTHS, staleness=[torch.full((length,), float(length % 2)) for length in LENGTHS])
    made = engine(model_folder(), PolicyObjective())
    metrics = made.update(rows)
    made.close()
    old = sum(length - 3 for length in LENGTHS if length % 2) / sum(length - 3 for length in LENGTHS)
    assert metrics["share_staleness_1"] == pytest.approx(old)
    assert metrics["share_staleness_0"] == pytest.approx(1 - old)
    mean = old * metrics["behaviour_kl_staleness_1"] + (1 - old) * metrics["behaviour_kl_staleness_0"]
    assert mean == pytest.approx(metrics["behaviour_kl"], rel=1e-5)
    assert 0.0 < metrics["effective_sample_share"] < 1.0
    assert "behaviour_ratio_squared" not in metrics
    assert "share_staleness_2" not in metrics


def test_an_interpolated_anchor_needs_the_staleness(
    model_folder: Callable[..., str], trajectories: Callable[..., DataProto]
) -> None:
    made = engine(model_folder(), PolicyObjective(anchor="interpolated"))
    with pytest.raises(SchemaError, match="column 'staleness' is missing"):
        made.update(trajectories(LENGTHS))
    fresh = made.update(trajectories(LENGTHS, staleness=[torch.zeros(length) for length in LENGTHS]))
    made.close()
    # The centre of fresh samples is the policy that sampled: nothing is left for the correction.
    assert fresh["behaviour_weight"] == pytest.approx(1.0)
    assert fresh["ratio"] == pytest.approx(fresh["behaviour_ratio"], rel=1e-5)


def test_a_batch_without_tokens_is_refused_before_it_is_prepared(
    model_folder: Callable[..., str], trajectories: Callable[..., DataProto]
) -> None:
    made = engine(model_folder(), PolicyObjective(loss=M2PO(), correction=NoCorrection()))
    with pytest.raises(InvalidDataError, match="no token to train on"):
        made.update(trajectories([3, 2]))
    made.close()


def test_advantages_are_whitened_over_the_tokens_that_are_trained(
    model_folder: Callable[..., str], trajectories: Callable[..., DataProto]
) -> None:
    """A batch and the same batch with advantages moved, scaled and masked where nothing is trained: one step."""
    weights = []
    for shift, scale in ((0.0, 1.0), (5.0, 40.0)):
        made = engine(model_folder(), PolicyObjective(correction=NoCorrection(), whiten_advantages=True))
        batch = trajectories(LENGTHS, seed=3)
        assert batch.batch is not None
        metrics = made.update(batch.with_columns(advantages=batch.batch["advantages"] * scale + shift))
        weights.append(torch.cat([tensor.flatten().clone() for _, tensor in made.named_tensors()]))
        made.close()
        # Advantages of mean 0, and ratios of 1 to rounding: the loss is their negative mean.
        assert metrics["loss"] == pytest.approx(0.0, abs=1e-5)
    assert (weights[0] - weights[1]).norm() <= 1e-5 * weights[0].norm()


def test_whitening_is_the_plain_loop_and_leaves_equal_numbers_at_0() -> None:
    from engines.training.fsdp_engine import whitened
    from engines.training.rank_group import RankGroup

    ranks = RankGroup(device="cpu")
    try:
        column, mask = torch.tensor([1.0, 9.0, 2.0, 6.0]), torch.tensor([True, False, True, True])
        # 1, 2, 6: mean 3, variance (4 + 1 + 9) / 2 = 7
        expected = [-2 / 7**0.5, 9.0, -1 / 7**0.5, 3 / 7**0.5]
        assert whitened(column, mask, ranks).tolist() == pytest.approx(expected, rel=1e-6)
        third = torch.full((3,), 0.1)
        assert whitened(third, torch.ones(3, dtype=torch.bool), ranks).tolist() == [0.0, 0.0, 0.0]
        assert whitened(third, torch.zeros(3, dtype=torch.bool), ranks).tolist() == third.tolist()
        assert whitened(third[:1] + 4, torch.ones(1, dtype=torch.bool), ranks).tolist() == [0.0]
    finally:
        ranks.close()
