"""Rows are divided over ranks at nearly equal cost."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import ConfigError
from engines.training.partition import RowCost, assign_ranks, balanced_partition

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


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(1, 99), max_size=5), min_size=17, max_size=40), st.randoms())
def test_many_parts_are_near_the_best_one_and_have_every_row_once(cuts: list[list[int]], order: Random) -> None:
    """Rows that can be divided into parts of 100 each."""
    costs = [b - a for each in cuts for a, b in pairwise([0, *sorted(each), 100])]
    order.shuffle(costs)
    found = balanced_partition(costs, len(cuts))
    assert len(found) == len(cuts)
    assert sorted(row for part in found for row in part) == list(range(len(costs)))
    assert all(part == sorted(part) for part in found)
    assert max(sum(costs[row] for row in part) for part in found) <= (4 / 3 - 1 / (3 * len(cuts))) * 100


def test_many_parts_take_memory_for_rows_and_parts_not_for_their_product() -> None:
    tracemalloc.start()
    balanced_partition(range(1024), 256)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1e6


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(0, 2)), max_size=12))
def test_one_rank_after_another_gets_the_part_with_most_of_its_tokens(rows: list[tuple[int, int, int]]) -> None:
    holders, lengths, scored = ([row[column] for row in rows] for column in range(3))
    cost = RowCost(per_token=1.0, per_scored_token=0.0, per_pair=0.0)
    assigned = assign_ranks(holders, lengths, scored, ranks=4, cost=cost)
    busy = [row for row, tokens in enumerate(scored) if tokens]
    assert all(assigned[row] == holders[row] for row in range(len(rows)) if row not in busy)
    left = [[busy[i] for i in part] for part in balanced_partition([lengths[row] for row in busy], 4)]
    for rank in range(4):
        mine = [row for row in busy if assigned[row] == rank]
        owned = [sum(lengths[row] for row in part if holders[row] == rank) for part in left]
        assert mine == left.pop(owned.index(max(owned)))


def test_a_long_row_costs_more_than_its_tokens() -> None:
    cost = RowCost(per_token=10, per_scored_token=5, per_pair=1)
    assert cost.of(4, 2) == 40 + 10 + 10
    assert cost.of(8, 4) > 2 * cost.of(4, 2)
