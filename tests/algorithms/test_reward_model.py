"""Bradley-Terry against plain Python."""

import math
import random

import pytest
import torch

from asyncrl.algorithms import bradley_terry_losses
from asyncrl.errors import ConfigError, SchemaError


def plain(chosen: float, rejected: float, margin: float, center_rewards_coefficient: float) -> float:
    return math.log1p(math.exp(-(chosen - rejected - margin))) + center_rewards_coefficient * (chosen + rejected) ** 2


@pytest.mark.parametrize("center_rewards_coefficient", [0.0, 0.01])
@pytest.mark.parametrize("with_margins", [False, True])
def test_equals_plain_python_and_finite_differences(center_rewards_coefficient: float, with_margins: bool) -> None:
    draw = random.Random(5)
    rows = [(draw.uniform(-3, 3), draw.uniform(-3, 3), draw.uniform(0, 1) if with_margins else 0.0) for _ in range(20)]
    chosen, rejected, margins = (
        torch.tensor(c, dtype=torch.float64, requires_grad=True) for c in zip(*rows, strict=True)
    )
    got = bradley_terry_losses(
        chosen,
        rejected,
        margins=margins if with_margins else None,
        center_rewards_coefficient=center_rewards_coefficient,
    )
    assert got.loss.tolist() == pytest.approx([plain(*row, center_rewards_coefficient) for row in rows])
    got.loss.sum().backward()
    for leaf, place in ((chosen, 0), (rejected, 1)):
        slopes = []
        for row in rows:
            up, down = list(row), list(row)
            up[place] += 1e-6
            down[place] -= 1e-6
            slopes.append((plain(*up, center_rewards_coefficient) - plain(*down, center_rewards_coefficient)) / 2e-6)
        assert leaf.grad is not None
        assert leaf.grad.tolist() == pytest.approx(slopes, rel=1e-5, abs=1e-7)
    assert margins.grad is None


def test_correct_and_distance_of_a_pair() -> None:
    got = bradley_terry_losses(torch.tensor([2.0, 0.0, 1.0], requires_grad=True), torch.tensor([0.0, 0.0, 3.0]))
    assert got.correct.tolist() == [1.0, 0.5, 0.0]
    assert got.distance.tolist() == [2.0, 0.0, -2.0]
    assert not got.distance.requires_grad
    assert float(got.loss[1].detach()) == pytest.approx(math.log(2))


def test_what_does_not_fit_is_refused() -> None:
    column = torch.zeros(2)
    with pytest.raises(
        SchemaError, match=r"rejected_rewards must be \[P\] floating, got torch.float32 of shape \(3,\)"
    ):
        bradley_terry_losses(column, torch.zeros(3))
    with pytest.raises(SchemaError, match=r"^chosen_rewards must be"):
        bradley_terry_losses(torch.zeros(2, 1), torch.zeros(2, 1))
    with pytest.raises(SchemaError, match=r"^margins must be"):
        bradley_terry_losses(column, column, margins=torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ConfigError, match=r"^center_rewards_coefficient is"):
        bradley_terry_losses(column, column, center_rewards_coefficient=-0.1)
