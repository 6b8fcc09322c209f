"""Mixtures: parts are drawn in proportion to their weights, and each part's rows without a gap."""

from __future__ import annotations

from collections import Counter
from math import log2
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.datasets import Mixture
from asyncrl.datasets.stream import Weight

weights_ = st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any)


def mixture(weights: list[float], seed: int = 0) -> Mixture:
    return Mixture([Weight([(0, weight)]) for weight in weights], seed=seed)


@settings(max_examples=20, deadline=None)
@given(weights=weights_, seed=st.integers(0, 99), rows=st.integers(1, 6000))
def test_shares_are_kept_at_every_length(weights: list[float], seed: int, rows: int):
    mixed = mixture(weights, seed)
    drawn = Counter(mixed.draw(index).part for index in range(rows))
    for part, weight in enumerate(weights):
        assert abs(drawn[part] - rows * weight / sum(weights)) <= 2 + log2(rows)
    assert not any(drawn[part] for part, weight in enumerate(weights) if weight == 0)


@settings(max_examples=10, deadline=None)
@given(weights=weights_, seed=st.integers(0, 99))
def test_each_part_counts_from_zero_without_a_gap(weights: list[float], seed: int):
    mixed = mixture(weights, seed)
    numbers: dict[int, list[int]] = {}
    for index in range(5000):  # over the border of a block
        draw = mixed.draw(index)
        numbers.setdefault(draw.part, []).append(draw.number)
    assert all(found == list(range(len(found))) for found in numbers.values())


def test_a_draw_depends_on_its_index_alone():
    one = mixture([1, 2, 3], seed=5)
    assert [one.draw(index) for index in (9000, 3, 4096)] == [mixture([1, 2, 3], 5).draw(i) for i in (9000, 3, 4096)]
    assert [one.draw(index) for index in range(50)] != [mixture([1, 2, 3], 6).draw(index) for index in range(50)]


def test_a_weight_may_change_with_the_index():
    easy, hard = Weight([(0, 1), (1000, 0)]), Weight([(0, 0), (1000, 1)])
    mixed = Mixture([easy, hard], seed=0)
    drawn = [mixed.draw(index).part for index in range(2000)]
    assert drawn[:1] == [0]
    # The weights sum to 1 at every index, so hard rows among the first 1000 are the area of a triangle: 500.
    assert sum(drawn[:1000]) == pytest.approx(500, abs=8)
    assert sum(drawn[:250]) == pytest.approx(31, abs=6)
    assert drawn[1000:] == [1] * 1000


def test_invalid_weights_are_refused():
    for points in ([], [(0, -1)], [(0, 1), (0, 2)], [(0, float("nan"))], [(float("nan"), 1)]):
        with pytest.raises(ValueError, match=r"a weight|points of a weight"):
            Weight(points)


@pytest.mark.parametrize(
    ("points", "index"),
    [
        ([[(0, 1), (1e9, 0)]], 10**9),
        ([[(99.25, 0), (99.75, 1)]], 0),
        ([[(0, 1), (99.5, 0)], [(99.75, 0), (120, 1)]], None),
        ([[(0, 1), (99.5, 0)], [(100.5, 0), (120, 1)]], 100),
        ([[(0, 1), (50.5, 0), (70.5, 0), (71, 1)], [(60, 0), (60.5, 1), (61, 0)]], 51),
    ],
)
def test_weights_that_are_all_0_anywhere_are_refused_at_once(points: Any, index: int | None):
    weights = [Weight(each) for each in points]
    if index is None:
        assert Mixture(weights).draw(100).part == 1
    else:
        with pytest.raises(ValueError, match=f"all weights are 0 at index {index}$"):
            Mixture(weights)
