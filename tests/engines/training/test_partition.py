"""Rows are divided over ranks at nearly equal cost."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import ConfigError
from engines.training.partition import RowCost, balanced_partition

COSTS = st.lists(st.integers(0, 40), max_size=7)


def test_by_hand() -> None:
    # 8-7 -> 1, 6-5 -> 1, 4-1 -> 3, 3-1 -> 2: sums of 16 and 14, where 15 and 15 is possible.
    assert balanced_partition([8, 7, 6, 5, 4], 2) == [[0, 2], [1, 3, 4]]
    assert balanced_partition([5, 5, 5, 5], 4) == [[0], [1], [2], [3]]
    assert balanced_partition([9], 3) == [[0], [], []]
    assert balanced_partition([], 2) == [[], []]


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="parts is 0"):
        balanced_partition([1], 0)
    with pytest.raises(ConfigError, match="a cost is -1"):
        balanced_partition([1, -1], 2)


@settings(max_examples=100, deadline=None)
@given(COSTS, st.integers(1, 4))
def test_every_row_once_and_near_the_best_of_all_partitions(costs: list[int], parts: int) -> None:
    found = balanced_partition(costs, parts)
    assert len(found) == parts
    assert sorted(row for part in found for row in part) == list(range(len(costs)))
    best = min(
        max(sum(cost for cost, its in zip(costs, of, strict=True) if its == part) for part in range(parts))
        for of in product(range(parts), repeat=len(costs))
    )
    largest = max(sum(costs[row] for row in part) for part in found)
    assert largest <= (4 / 3 - 1 / (3 * parts)) * best + 1e-9


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 2048), min_size=32, max_size=128), st.sampled_from([2, 4, 8]))
def test_many_rows_leave_a_spread_smaller_than_the_longest(costs: list[int], parts: int) -> None:
    sums = [sum(costs[row] for row in part) for part in balanced_partition(costs, parts)]
    assert max(sums) - min(sums) <= max(costs)


def test_a_long_row_costs_more_than_its_tokens() -> None:
    cost = RowCost(per_token=10, per_scored_token=5, per_pair=1)
    assert cost.of(4, 2) == 40 + 10 + 10
    assert cost.of(8, 4) > 2 * cost.of(4, 2)
