"""The critic's loss against plain loops."""

import math
import random

import pytest
import torch

from asyncrl.algorithms import ValueObjective, value_token_losses
from asyncrl.errors import ConfigError, SchemaError


def plain(value: float, old: float, target: float, clip: float | None) -> float:
    free = (value - target) ** 2
    if clip is None:
        return free / 2
    held = min(max(value, old - clip), old + clip)
    return max(free, (held - target) ** 2) / 2


@pytest.mark.parametrize("clip", [None, 0.1, 1.0])
def test_equals_plain_loops_and_finite_differences(clip: float | None) -> None:
    draw = random.Random(3)
    rows = [tuple(draw.uniform(-2, 2) for _ in range(3)) for _ in range(60)]
    values, old, targets = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    leaf = values.clone().requires_grad_()
    got = value_token_losses(
        leaf, old_values=old, returns=targets, mask=torch.ones(60, dtype=torch.bool), cliprange_value=clip
    )
    assert got.loss.tolist() == pytest.approx([plain(*row, clip) for row in rows])
    got.loss.sum().backward()
    slopes = [(plain(v + 1e-6, o, t, clip) - plain(v - 1e-6, o, t, clip)) / 2e-6 for v, o, t in rows]
    assert leaf.grad is not None
    assert leaf.grad.tolist() == pytest.approx(slopes, rel=1e-5, abs=1e-6)
    stopped = [
        float(clip is not None and abs(slope) < 1e-9 and v != t) for slope, (v, _, t) in zip(slopes, rows, strict=True)
    ]
    assert got.metrics["value_clip_fraction"].tolist() == stopped
    assert got.metrics["value_error"].tolist() == pytest.approx([abs(v - t) for v, _, t in rows])
    assert not got.metrics["value_error"].requires_grad


def test_by_hand() -> None:
    mask = torch.tensor([True, True, False])
    leaf = torch.tensor([1.0, 1.0, math.nan], requires_grad=True)
    got = value_token_losses(
        leaf, old_values=torch.tensor([0.0, 0.0, math.inf]), returns=torch.tensor([2.0, 0.5, math.nan]), mask=mask
    )
    # Moved from 0 to 1 towards 2: held at 0.2, 1.8 away and without gradient. Past 0.5: the free square is larger? 0.5
    # away, held 0.3 away: the larger is the free one.
    assert got.loss.tolist() == pytest.approx([1.8**2 / 2, 0.125, 0.0])
    got.loss.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == pytest.approx([0.0, 0.5, 0.0])
    assert got.metrics["value_clip_fraction"].tolist() == [1.0, 0.0, 0.0]


def test_a_value_within_the_range_is_not_clipped() -> None:
    value, old, returns = 0.1 * torch.rand(3, 1000, generator=torch.Generator().manual_seed(0)) - 0.05
    got = value_token_losses(value, old_values=old, returns=returns, mask=torch.ones(1000, dtype=torch.bool))
    assert not got.metrics["value_clip_fraction"].any()
    assert got.loss.equal(0.5 * (value - returns).square())


def test_what_does_not_fit_is_refused() -> None:
    column, mask = torch.zeros(2), torch.ones(2, dtype=torch.bool)
    with pytest.raises(SchemaError, match="returns has shape"):
        value_token_losses(column, old_values=column, returns=torch.zeros(3), mask=mask)
    with pytest.raises(ConfigError, match="cliprange_value is 0"):
        value_token_losses(column, old_values=column, returns=column, mask=mask, cliprange_value=0.0)


def test_the_report_of_a_critic() -> None:
    """Moments of tokens, averaged over any split of them, give what they all together are."""
    draw = random.Random(5)
    rows = [(draw.uniform(-2, 2), draw.uniform(-3, 5)) for _ in range(40)]
    values, targets = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    mask = torch.tensor([number % 4 != 0 for number in range(40)])
    objective = ValueObjective(cliprange_value=None)
    sums: dict[str, float] = {}
    for part in (slice(0, 13), slice(13, 40)):
        losses = objective.token_losses(values[part], old_values=values[part], returns=targets[part], mask=mask[part])
        for name, column in losses.metrics.items():
            sums[name] = sums.get(name, 0.0) + float(column.double().sum())
    report = objective.report({name: total / 30 for name, total in sums.items()})
    kept = [row for number, row in enumerate(rows) if number % 4]
    mean = sum(target for _, target in kept) / 30
    left = [target - value for value, target in kept]
    residual = sum(left) / 30
    expected = 1 - sum((each - residual) ** 2 for each in left) / sum((target - mean) ** 2 for _, target in kept)
    assert report["explained_variance"] == pytest.approx(expected, rel=1e-6)
    assert report["return"] == pytest.approx(mean)
    assert report["value_error"] == pytest.approx(sum(map(abs, left)) / 30)
    assert {"return_squared", "residual", "residual_squared"}.isdisjoint(report)
    flat = {"return": 2.0, "return_squared": 4.0, "residual": 1.0, "residual_squared": 3.0}
    assert objective.report(flat)["explained_variance"] == 0.0  # nothing to explain
    for wrong in (-1.0, 0.0):
        with pytest.raises(ConfigError, match=f"cliprange_value is {wrong:g}"):
            ValueObjective(cliprange_value=wrong)
    assert ValueObjective(cliprange_value=0.01).cliprange_value == 0.01


@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7, 3.3, 1000.1])
@pytest.mark.parametrize(("spread", "explained"), [(0.0, 0.0), (0.1, 0.75)])
def test_a_spread_far_below_the_returns_is_seen_and_rounding_is_not(
    reward: float, spread: float, explained: float
) -> None:
    """Of float32, as the engine has them; the critic finds half of each distance from the mean."""
    returns = reward + spread * torch.linspace(-1, 1, 1000)
    values = reward + 0.5 * (returns - reward) if spread else torch.linspace(-1, 1, 1000)
    mask = torch.ones(1000, dtype=torch.bool)
    losses = ValueObjective().token_losses(values, old_values=values, returns=returns, mask=mask)
    report = ValueObjective().report({name: float(column.sum()) / 1000 for name, column in losses.metrics.items()})
    assert report["explained_variance"] == pytest.approx(explained, abs=1e-3)


def test_only_values_get_a_gradient() -> None:
    values, old_values, returns = (torch.tensor([each], requires_grad=True) for each in (0.5, 0.4, 1.0))
    got = ValueObjective().token_losses(values, old_values=old_values, returns=returns, mask=torch.tensor([True]))
    got.loss.sum().backward()
    assert values.grad is not None
    assert (old_values.grad, returns.grad) == (None, None)
    assert not any(column.requires_grad for column in got.metrics.values())


@pytest.mark.parametrize("name", ["values", "old_values", "returns"])
def test_columns_that_are_not_floating_are_named(name: str) -> None:
    columns = {each: torch.zeros(2) for each in ("values", "old_values", "returns")}
    columns[name] = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(SchemaError, match=f"^{name} must be floating"):
        value_token_losses(columns.pop("values"), **columns, mask=torch.tensor([True, True]))
