"""However a batch is split, the parts sum to the same loss."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms import token_weights
from asyncrl.errors import ConfigError, InvalidDataError, SchemaError

MODES: list[dict[str, Any]] = [
    {"loss_agg_mode": "token_mean"},
    {"loss_agg_mode": "sequence_mean"},
    {"loss_agg_mode": "fixed_length", "fixed_length": 16},
]


def plain_loss(rows: list[list[float]], loss_agg_mode: str, fixed_length: int | None = None) -> float:
    trained = [row for row in rows if row]
    if not trained:
        return 0.0
    match loss_agg_mode:
        case "token_mean":
            return sum(map(math.fsum, trained)) / sum(map(len, trained))
        case "sequence_mean":
            return sum(math.fsum(row) / len(row) for row in trained) / len(trained)
        case _:
            assert fixed_length is not None
            return sum(math.fsum(row) / fixed_length for row in trained) / len(trained)


def test_two_rows_of_one_and_three_tokens() -> None:
    lengths, totals = torch.tensor([1, 3, 0]), {"total_tokens": 4, "total_rows": 2}
    assert token_weights(lengths, loss_agg_mode="token_mean", **totals).tolist() == [0.25, 0.25, 0.0]
    torch.testing.assert_close(
        token_weights(lengths, loss_agg_mode="sequence_mean", **totals), torch.tensor([1 / 2, 1 / 6, 0.0])
    )
    assert token_weights(lengths, loss_agg_mode="fixed_length", fixed_length=8, **totals).tolist() == [
        1 / 16,
        1 / 16,
        0,
    ]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode["loss_agg_mode"])
@given(
    rows=st.lists(st.lists(st.floats(-5, 5), max_size=9), max_size=8),
    cuts=st.lists(st.integers(0, 8), max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_every_split_sums_to_the_loss_of_the_whole(
    mode: dict[str, Any], rows: list[list[float]], cuts: list[int]
) -> None:
    total_tokens, total_rows = sum(map(len, rows)), sum(1 for row in rows if row)
    edges = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    total = 0.0
    for start, end in itertools.pairwise(edges):
        part = rows[start:end]
        lengths = torch.tensor([len(row) for row in part], dtype=torch.int64)
        weights = token_weights(lengths, total_tokens=total_tokens, total_rows=total_rows, **mode)
        total += sum(weight * math.fsum(row) for weight, row in zip(weights.tolist(), part, strict=True))
    assert total == pytest.approx(plain_loss(rows, **mode), rel=1e-5, abs=1e-5)


def test_totals_of_a_part_instead_of_the_whole_are_noticed() -> None:
    with pytest.raises(InvalidDataError, match="5 trained tokens in 2 rows, the whole batch only 4 in 2"):
        token_weights(torch.tensor([2, 3]), loss_agg_mode="token_mean", total_tokens=4, total_rows=2)
    with pytest.raises(InvalidDataError, match="5 trained tokens in 2 rows, the whole batch only 5 in 1"):
        token_weights(torch.tensor([2, 3]), loss_agg_mode="sequence_mean", total_tokens=5, total_rows=1)


def test_arguments_that_do_not_fit_are_refused() -> None:
    totals = {"total_tokens": 4, "total_rows": 2}
    with pytest.raises(ConfigError, match="which is None"):
        token_weights(torch.tensor([1]), loss_agg_mode="fixed_length", **totals)
    with pytest.raises(ConfigError, match="which is 0"):
        token_weights(torch.tensor([1]), loss_agg_mode="fixed_length", fixed_length=0, **totals)
    with pytest.raises(ConfigError, match="fixed_length=5 has no effect"):
        token_weights(torch.tensor([1]), loss_agg_mode="token_mean", fixed_length=5, **totals)
    with pytest.raises(ConfigError, match="'mean' does not exist"):
        token_weights(torch.tensor([1]), loss_agg_mode="mean", **totals)  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match="lengths must be"):
        token_weights(torch.tensor([1.0]), loss_agg_mode="token_mean", **totals)
