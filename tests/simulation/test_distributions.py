"""Distributions of durations: means, excesses and parsing."""

from __future__ import annotations

import doctest
import random

import pytest

import asyncrl.simulation.model
from asyncrl.errors import ConfigError
from asyncrl.simulation import Distribution


@pytest.mark.parametrize("text", ["3", "uniform(1, 5)", "exponential(2)", "lognormal(1, 0.5)"])
def test_mean_and_excess_match_samples(text: str):
    distribution = Distribution.parse(text)
    dice = random.Random(0)
    samples = [distribution.sample(dice) for _ in range(40_000)]
    assert sum(samples) / len(samples) == pytest.approx(distribution.mean, rel=0.02)
    for bound in (0.0, 1.0, 2.5, 4.0):
        measured = sum(max(0.0, sample - bound) for sample in samples) / len(samples)
        assert measured == pytest.approx(distribution.excess(bound), rel=0.05, abs=0.01)
    below = sum(sample <= distribution.quantile(0.8) for sample in samples) / len(samples)
    assert below == pytest.approx(1.0 if text == "3" else 0.8, abs=0.02)


@pytest.mark.parametrize(
    "text",
    ["", "lognormal(1)", "gauss(1, 2)", "lognormal(1, 2", "-3", "uniform(5, 1)", "nan", "1, 2", "lognormal(1e9, 1)"],
)
def test_invalid_distributions_are_refused(text: str):
    with pytest.raises(ConfigError):
        Distribution.parse(text)


def test_parse_reads_the_text_of_a_distribution():
    for text in ("constant(3)", "uniform(1, 5)", "lognormal(4.5, 0.8)"):
        assert str(Distribution.parse(text)) == text


def test_the_examples_in_the_docstring_run():
    assert doctest.testmod(asyncrl.simulation.model).failed == 0
