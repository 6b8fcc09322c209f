"""KTO against plain Python."""

import math
import random
from typing import Any

import pytest
import torch

from asyncrl.algorithms import KTOObjective
from asyncrl.errors import ConfigError, SchemaError


def plain(objective: KTOObjective, distance: float, desirable: bool, point: float) -> float:
    if desirable:
        return objective.desirable_weight * (1 - 1 / (1 + math.exp(-objective.beta * (distance - point))))
    return objective.undesirable_weight * (1 - 1 / (1 + math.exp(-objective.beta * (point - distance))))


@pytest.mark.parametrize(
    "objective", [KTOObjective(), KTOObjective(beta=0.5, desirable_weight=1.5, undesirable_weight=0.7)]
)
@pytest.mark.parametrize("point", [0.0, 1.25])
def test_loss_and_gradient_equal_plain_python(objective: KTOObjective, point: float) -> None:
    draw = random.Random(2)
    rows = [(draw.uniform(-9, 0), draw.uniform(-9, 0), draw.random() < 0.5) for _ in range(30)]
    policy = torch.tensor([p for p, _, _ in rows], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([r for _, r, _ in rows], dtype=torch.float64, requires_grad=True)
    got = objective.answer_losses(
        log_probs=policy,
        reference_log_probs=reference,
        desirable=torch.tensor([d for _, _, d in rows]),
        reference_point=point,
    )
    assert got.loss.tolist() == pytest.approx([plain(objective, p - r, d, point) for p, r, d in rows])
    got.loss.sum().backward()
    slopes = [
        (plain(objective, p - r + 1e-6, d, point) - plain(objective, p - r - 1e-6, d, point)) / 2e-6 for p, r, d in rows
    ]
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx(slopes, rel=1e-4, abs=1e-8)
    assert reference.grad is None
    assert got.advantage.tolist() == pytest.approx([-slope for slope in slopes], rel=1e-4, abs=1e-8)
    assert got.reward.tolist() == pytest.approx([objective.beta * (p - r) for p, r, _ in rows])


def test_the_reference_point_is_a_divergence_and_so_not_negative() -> None:
    point = KTOObjective.reference_point
    assert point(torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -4.0])) == 1.5
    assert point(torch.tensor([-3.0]), torch.tensor([-1.0])) == 0.0
    assert point(torch.zeros(0), torch.zeros(0)) == 0.0


def test_what_does_not_fit_is_refused() -> None:
    arguments: dict[str, Any] = {
        "log_probs": torch.zeros(2),
        "reference_log_probs": torch.zeros(2),
        "desirable": torch.tensor([True, False]),
        "reference_point": 0.0,
    }
    for wrong, words in (
        ({"log_probs": torch.zeros(2, 1)}, r"log_probs must be \[B\] floating"),
        ({"reference_log_probs": torch.zeros(3)}, r"reference_log_probs must be \[B\] floating"),
        ({"reference_log_probs": torch.zeros(2, dtype=torch.int64)}, "got torch.int64"),
        ({"desirable": torch.zeros(2)}, r"desirable must be \(2,\) boolean, got torch.float32"),
        ({"desirable": torch.tensor([True])}, "desirable must be"),
    ):
        with pytest.raises(SchemaError, match=words):
            KTOObjective().answer_losses(**{**arguments, **wrong})
    with pytest.raises(ConfigError, match=r"^reference_point is"):
        KTOObjective().answer_losses(**{**arguments, "reference_point": -1.0})
    with pytest.raises(SchemaError, match="reference_log_probs"):
        KTOObjective.reference_point(torch.zeros(2), torch.zeros(3))
    for option in ({"beta": 0.0}, {"desirable_weight": -1.0}, {"undesirable_weight": -1.0}):
        with pytest.raises(ConfigError, match=f"^{next(iter(option))} is"):
            KTOObjective(**option)
    KTOObjective(desirable_weight=0.0, undesirable_weight=0.0)
    assert (KTOObjective().beta, KTOObjective().desirable_weight, KTOObjective().undesirable_weight) == (0.1, 1.0, 1.0)
