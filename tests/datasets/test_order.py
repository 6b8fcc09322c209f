"""Orders: each pass has every row once and depends only on the seed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.datasets import Order


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 40), seed=st.integers(0, 99), number=st.integers(0, 5))
def test_each_pass_has_every_row_once(rows: int, seed: int, number: int):
    order = Order(rows, seed=seed)
    one_pass = [order.row(index) for index in range(number * rows, (number + 1) * rows)]
    assert sorted(one_pass) == list(range(rows))


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 40), seed=st.integers(0, 99), indices=st.lists(st.integers(0, 400), max_size=20))
def test_a_row_depends_on_index_and_seed_alone(rows: int, seed: int, indices: list[int]):
    wandering = Order(rows, seed=seed)
    assert [wandering.row(index) for index in indices] == [Order(rows, seed=seed).row(index) for index in indices]


def test_passes_differ_and_seeds_differ():
    def rows(seed: int, first: int) -> list[int]:
        order = Order(20, seed=seed)
        return [order.row(index) for index in range(first, first + 20)]

    assert len({tuple(rows(seed, first)) for seed in (0, 1) for first in (0, 20, 40)}) == 6


def test_the_order_of_the_file_and_a_given_first_pass():
    plain = Order(3, shuffled=False)
    assert [plain.row(index) for index in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    curriculum = Order(3, shuffled=False, first_pass=[2, 0, 1])
    assert [curriculum.row(index) for index in range(6)] == [2, 0, 1, 0, 1, 2]


def test_invalid_orders_are_refused():
    with pytest.raises(ValueError, match="at least one row"):
        Order(0)
    with pytest.raises(ValueError, match="each of the 3 rows once"):
        Order(3, first_pass=[0, 1, 1])
