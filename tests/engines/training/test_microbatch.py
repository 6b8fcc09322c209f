from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import ConfigError
from engines.training.microbatch import Layout, Rectangle, assign_minibatches, plan_microbatches

LENGTHS = st.lists(st.integers(0, 60), max_size=40)


def test_rows_of_similar_length_go_together_longest_first() -> None:
    # 9 + 8 fit 20 cells as 2 x 9; a row of 3 would make 27. The short ones follow as 2 x 3.
    plans = plan_microbatches([3, 9, 2, 8], max_tokens=20, overhead_tokens=100)
    assert [(plan.rectangles, plan.tokens, plan.cells, plan.padding) for plan in plans] == [
        ((Rectangle((1, 3), 9),), 17, 18, 1),
        ((Rectangle((0, 2), 3),), 5, 6, 1),
    ]


def test_packed_rows_of_different_lengths_share_a_microbatch_without_padding() -> None:
    plans = plan_microbatches([3, 9, 3, 8], max_tokens=23, overhead_tokens=0)
    assert [plan.rectangles for plan in plans] == [
        (Rectangle((1,), 9), Rectangle((3,), 8), Rectangle((0, 2), 3)),
    ]
    assert plans[0].rows == (1, 3, 0, 2)
    assert plans[0].padding == 0
    assert [plan.rows for plan in plan_microbatches([3, 9, 3, 8], max_tokens=22, overhead_tokens=0)] == [
        (1, 3, 0),
        (2,),
    ]


def test_padding_beyond_the_cost_of_a_rectangle_opens_a_new_one() -> None:
    def shapes(layout: Layout, overhead: int) -> list[list[tuple[int, ...]]]:
        plans = plan_microbatches([10, 6, 5], max_tokens=1000, layout=layout, overhead_tokens=overhead)
        return [[each.rows for each in plan.rectangles] for plan in plans]

    assert shapes("packed", 8) == [[(0, 1), (2,)]]
    assert shapes("packed", 9) == [[(0, 1, 2)]]
    assert shapes("padded", 8) == [[(0, 1)], [(2,)]]


def test_a_row_over_the_budget_is_computed_alone_and_an_empty_one_not_at_all() -> None:
    plans = plan_microbatches([4, 30, 0, 4], max_tokens=8, overhead_tokens=128)
    assert [plan.rows for plan in plans] == [(1,), (0, 3)]
    assert plan_microbatches([], max_tokens=8, overhead_tokens=0) == []
    with pytest.raises(ConfigError, match="max_tokens is 0"):
        plan_microbatches([1], max_tokens=0, overhead_tokens=0)


@settings(max_examples=150, deadline=None)
@given(LENGTHS, st.integers(1, 200), st.integers(0, 100), st.sampled_from(["packed", "padded"]))
def test_every_row_once_within_the_budget(lengths: list[int], max_tokens: int, overhead: int, layout: Layout) -> None:
    plans = plan_microbatches(lengths, max_tokens=max_tokens, layout=layout, overhead_tokens=overhead)
    assert sorted(row for plan in plans for row in plan.rows) == [row for row, length in enumerate(lengths) if length]
    for plan in plans:
        assert plan.tokens == sum(lengths[row] for row in plan.rows)
        assert len(plan.rows) == 1 or plan.cells <= max_tokens
        assert len(plan.rectangles) == 1 or layout == "packed"
        for each in plan.rectangles:
            assert each.length == max(lengths[row] for row in each.rows)
            assert each.cells - sum(lengths[row] for row in each.rows) <= overhead


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=9), st.integers(0, 20), st.sampled_from(["packed", "padded"]))
def test_costs_less_than_twice_the_best_plan(lengths: list[int], overhead: int, layout: Layout) -> None:
    """Against all ways to cut the sorted rows, with a budget that never binds."""
    ordered = sorted(lengths, reverse=True)

    def best(start: int) -> int:
        if start == len(ordered):
            return 0
        return min(
            overhead + sum(ordered[start] - length for length in ordered[start:end]) + best(end)
            for end in range(start + 1, len(ordered) + 1)
        )

    plans = plan_microbatches(lengths, max_tokens=10**6, layout=layout, overhead_tokens=overhead)
    assert sum(overhead * len(plan.rectangles) + plan.padding for plan in plans) <= 2 * best(0)


def test_minibatches_are_dealt_evenly_to_every_stretch_of_rows() -> None:
    dealt = assign_minibatches(11, minibatches=3, seed=5)
    assert [sorted(dealt[start : start + 3]) for start in (0, 3, 6)] == [[0, 1, 2]] * 3
    assert len(dealt) == 11
    assert dealt == assign_minibatches(11, minibatches=3, seed=5)
    assert any(dealt != assign_minibatches(11, minibatches=3, seed=seed) for seed in range(6, 9))
    # More rows do not change what the first ones got.
    assert assign_minibatches(20, minibatches=3, seed=5)[:11] == dealt
