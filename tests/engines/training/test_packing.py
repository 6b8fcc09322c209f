"""Plans of mini-batches and micro-batches, and the packed columns of a batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.data import DataProto
from asyncrl.errors import ConfigError, InvalidDataError, SchemaError
from engines.training.packing import (
    Layout,
    MicroBatch,
    PackedMicroBatch,
    PackedRows,
    Rectangle,
    assign_minibatches,
    plan_microbatches,
)

LENGTHS = st.lists(st.integers(0, 60), max_size=40)


def cells(plan: MicroBatch) -> int:
    """The tokens of all rows, padding included."""
    return sum(len(each.rows) * each.length for each in plan.rectangles)


def test_rows_of_similar_length_go_together_longest_first() -> None:
    # 9 + 8 fit 20 cells as 2 x 9; a row of 3 would make 27. The short ones follow as 2 x 3.
    plans = plan_microbatches([3, 9, 2, 8], max_tokens=20, overhead_tokens=100)
    assert [(plan.rectangles, cells(plan)) for plan in plans] == [
        ((Rectangle((1, 3), 9),), 18),
        ((Rectangle((0, 2), 3),), 6),
    ]


def test_packed_rows_of_different_lengths_share_a_microbatch_without_padding() -> None:
    plans = plan_microbatches([3, 9, 3, 8], max_tokens=23, overhead_tokens=0)
    assert [plan.rectangles for plan in plans] == [
        (Rectangle((1,), 9), Rectangle((3,), 8), Rectangle((0, 2), 3)),
    ]
    assert plans[0].rows == (1, 3, 0, 2)
    assert cells(plans[0]) == 23
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
        assert len(plan.rows) == 1 or cells(plan) <= max_tokens
        assert len(plan.rectangles) == 1 or layout == "packed"
        for each in plan.rectangles:
            assert each.length == max(lengths[row] for row in each.rows)
            assert len(each.rows) * each.length - sum(lengths[row] for row in each.rows) <= overhead


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
    padding = sum(cells(plan) for plan in plans) - sum(lengths)
    assert sum(overhead * len(plan.rectangles) for plan in plans) + padding <= 2 * best(0)


def test_mini_batches_are_spread_evenly_over_every_stretch_of_rows() -> None:
    dealt = assign_minibatches(11, num_mini_batches=3, seed=5)
    assert [sorted(dealt[start : start + 3]) for start in (0, 3, 6)] == [[0, 1, 2]] * 3
    assert len(dealt) == 11
    assert dealt == assign_minibatches(11, num_mini_batches=3, seed=5)
    assert any(dealt != assign_minibatches(11, num_mini_batches=3, seed=seed) for seed in range(6, 9))
    # More rows do not change what the first ones got.
    assert assign_minibatches(20, num_mini_batches=3, seed=5)[:11] == dealt


def _batch(**changes: object) -> DataProto:
    columns = {
        "input_ids": [torch.tensor([5, 6, 7]), torch.tensor([8]), torch.tensor([1, 2, 3, 4])],
        "loss_mask": [torch.tensor([0, 0, 1]), torch.tensor([0]), torch.tensor([0, 1, 0, 1])],
        "advantages": torch.tensor([0.5, 1.5, 2.5]),
        "log_probs": [torch.tensor([0.0, -1, -2]), torch.tensor([-3.0]), torch.tensor([-4.0, -5, -6, -7])],
    }
    columns["loss_mask"] = [mask.bool() for mask in columns["loss_mask"]]
    return DataProto.from_dict(tensors=columns | changes)  # type: ignore[arg-type]


def test_rows_are_packed_into_a_micro_batch() -> None:
    rows = PackedRows.read(_batch(), vocabulary=10, required=["advantages"], optional=["log_probs", "absent"])
    assert len(rows) == 3
    assert rows.lengths == [3, 1, 4]
    assert rows.scored.tolist() == [1, 0, 2]

    micro_batch = rows.pack(MicroBatch((Rectangle((2,), 4), Rectangle((0,), 3))))
    assert micro_batch.rectangles == ((1, 4), (1, 3))
    assert micro_batch.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert micro_batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 2]
    # The trained tokens 2, 4 and 7 are predicted at the cells of 1, 3 and 6.
    assert micro_batch.targets.tolist() == [2, 4, 7]
    assert micro_batch.predictors.tolist() == [0, 2, 5]
    assert micro_batch.rows.tolist() == [2, 2, 0]
    assert micro_batch.token_values(rows.columns["log_probs"]).tolist() == [-5.0, -7.0, -2.0]
    assert micro_batch.token_values(rows.columns["advantages"]).tolist() == [2.5, 2.5, 0.5]
    assert micro_batch.row_values(torch.tensor([10.0, 20.0, 30.0])).tolist() == [30.0, 30.0, 10.0]
    assert "absent" not in rows.columns


def test_a_rectangle_pads_its_shorter_rows() -> None:
    rows = PackedRows.read(_batch(), vocabulary=10)
    micro_batch = rows.pack(MicroBatch((Rectangle((2, 0), 4), Rectangle((1,), 1))))
    assert micro_batch.rectangles == ((2, 4), (1, 1))
    assert micro_batch.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 0, 8]
    assert micro_batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert micro_batch.predictors.tolist() == [0, 2, 5]


def test_a_token_may_be_scored_by_the_state_behind_it() -> None:
    mask = torch.tensor([False, False, True, True])
    rows = PackedRows(input_ids=torch.tensor([5, 6, 7, 8]), mask=mask, columns={}, lengths=torch.tensor([3, 1]), back=0)
    micro_batch = rows.pack(MicroBatch((Rectangle((0,), 3), Rectangle((1,), 1))))
    assert micro_batch.input_ids.tolist() == [5, 6, 7, 8]
    assert micro_batch.predictors.tolist() == [2, 3]


def test_without_a_mask_every_token_but_the_first_is_scored() -> None:
    rows = PackedRows.read(_batch(), vocabulary=10, loss_mask=False)
    assert rows.scored.tolist() == [2, 0, 3]
    assert rows.pack(MicroBatch((Rectangle((0, 1), 3),))).targets.tolist() == [6, 7]


def test_a_dummy_has_weight_zero() -> None:
    dummy = PackedMicroBatch.dummy()
    assert dummy.is_dummy
    assert dummy.token_values(torch.tensor([], dtype=torch.float32)).tolist() == [0.0]
    assert dummy.row_values(torch.tensor([7.0])).tolist() == [0.0]


def test_no_rows_at_all() -> None:
    rows = PackedRows.read(_batch()[0:0], vocabulary=10, required=["advantages", "log_probs"])
    assert len(rows) == 0
    assert rows.scored.tolist() == []


def test_batches_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(SchemaError, match="'advantages' is missing; the batch has"):
        PackedRows.read(_batch().pop(batch_keys=["input_ids", "loss_mask"]), vocabulary=10, required=["advantages"])
    with pytest.raises(InvalidDataError, match=r"holds 1\.\.8, the vocabulary is 0\.\.7"):
        PackedRows.read(_batch(), vocabulary=8)
    first = [torch.tensor([False] * 3), torch.tensor([True]), torch.tensor([False] * 4)]
    with pytest.raises(InvalidDataError, match="loss_mask of row 1 is True for its first token"):
        PackedRows.read(_batch(loss_mask=first), vocabulary=10)
    with pytest.raises(SchemaError, match="log_probs and input_ids differ in row lengths"):
        PackedRows.read(
            _batch(log_probs=[torch.zeros(3), torch.zeros(2), torch.zeros(4)]), vocabulary=10, required=["log_probs"]
        )
    with pytest.raises(SchemaError, match="input_ids must be ragged"):
        PackedRows.read(_batch(input_ids=torch.zeros(3, 4, dtype=torch.int64)), vocabulary=10)
    with pytest.raises(SchemaError, match=r"advantages must be ragged like input_ids, or \[B\]; got shape \(3, 2\)"):
        PackedRows.read(_batch(advantages=torch.zeros(3, 2)), vocabulary=10, required=["advantages"])
