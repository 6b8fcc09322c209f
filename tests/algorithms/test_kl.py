"""Estimators of a divergence, summed over a whole vocabulary instead of sampled."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms import KLEstimator, kl_estimate, probability_ratio
from asyncrl.algorithms.kl import LOW_VARIANCE_LIMIT

Q = [0.5, 0.3, 0.15, 0.05]
P = [0.25, 0.25, 0.4, 0.1]


def divergence(q: list[float], p: list[float]) -> float:
    return math.fsum(a * math.log(a / b) for a, b in zip(q, p, strict=True))


def softmax(logits: list[float]) -> list[float]:
    total = math.fsum(map(math.exp, logits))
    return [math.exp(x) / total for x in logits]


def finite_difference(function: Callable[[list[float]], float], at: list[float]) -> list[float]:
    step = 1e-6
    slopes = []
    for i in range(len(at)):
        up, down = list(at), list(at)
        up[i] += step
        down[i] -= step
        slopes.append((function(up) - function(down)) / (2 * step))
    return slopes


def log(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).log()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator: KLEstimator) -> None:
    estimates = kl_estimate(log(Q), log(P), estimator=estimator).tolist()
    expected = math.fsum(q * e for q, e in zip(Q, estimates, strict=True))
    assert expected == pytest.approx(divergence(Q, P), rel=1e-12)


def test_k2_is_biased_by_little() -> None:
    estimates = kl_estimate(log(Q), log(P), estimator="k2").tolist()
    by_hand = [0.5 * math.log(p / q) ** 2 for q, p in zip(Q, P, strict=True)]
    assert estimates == pytest.approx(by_hand, rel=1e-12)
    assert math.fsum(q * e for q, e in zip(Q, estimates, strict=True)) != pytest.approx(divergence(Q, P), rel=1e-3)


@pytest.mark.parametrize(
    ("estimator", "true_gradient"),
    [
        ("k1", lambda theta: [0.0] * 4),
        ("k2", lambda theta: finite_difference(lambda at: divergence(softmax(at), P), theta)),
        ("k3", lambda theta: finite_difference(lambda at: divergence(P, softmax(at)), theta)),
    ],
)
def test_gradient_of_each_estimator_as_a_loss(
    estimator: KLEstimator, true_gradient: Callable[[list[float]], list[float]]
) -> None:
    theta = [0.4, -0.3, 0.1, -1.0]
    logits = torch.tensor(theta, dtype=torch.float64, requires_grad=True)
    q = logits.log_softmax(-1)
    loss = (q.detach().exp() * kl_estimate(q, log(P), estimator=estimator)).sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.tolist() == pytest.approx(true_gradient(theta), rel=1e-6, abs=1e-9)


@given(st.floats(-30, 0, width=32), st.floats(-30, 0, width=32))
@settings(max_examples=100, deadline=None)
def test_k3_is_never_negative_and_zero_only_between_equals(a: float, b: float) -> None:
    estimate = float(kl_estimate(torch.tensor(a), torch.tensor(b)))
    assert estimate >= 0.0
    assert float(kl_estimate(torch.tensor(a), torch.tensor(a))) == 0.0


def test_k3_keeps_its_digits_between_near_equals() -> None:
    # d = 1e-4: (e^d - 1) - d = d^2/2 + d^3/6, far below float32's 1.2e-7 around 1
    near = float(kl_estimate(torch.tensor(0.0), torch.tensor(1e-4)))
    assert near == pytest.approx(5.0001667e-09, rel=2e-3)


def test_ratios_stay_finite_and_nan_stays_visible() -> None:
    ratios = probability_ratio(torch.tensor([-1000.0, 0.0, 1000.0, math.nan]))
    assert ratios[:3].tolist() == pytest.approx([math.exp(-20), 1.0, math.exp(20)])
    assert ratios[3].isnan()
    assert kl_estimate(torch.tensor(-1000.0), torch.tensor(0.0)).isfinite()


def test_low_variance_is_k3_held_below_ten_nats() -> None:
    # r = e^1 and e^3: k3 is e - 2 and e^3 - 4 = 16.1, which is held at 10 and gets no gradient
    sampled = torch.tensor([-1.0, -3.0, 0.0], dtype=torch.float64, requires_grad=True)
    other = torch.tensor([0.0, 0.0, -3.0], dtype=torch.float64)
    got = kl_estimate(sampled, other, estimator="low_variance")
    assert got.tolist() == pytest.approx([math.e - 2, 10.0, math.exp(-3) + 2])
    got.sum().backward()
    assert sampled.grad is not None
    assert sampled.grad.tolist() == pytest.approx([1 - math.e, 0.0, 1 - math.exp(-3)])
    assert LOW_VARIANCE_LIMIT == 10.0
