from __future__ import annotations

import pytest
import torch

from asyncrl.data import DataProto
from asyncrl.errors import InvalidDataError, SchemaError
from engines.training.microbatch import MicroBatch, Rectangle
from engines.training.packed_rows import PackedRows, RowStream


def _batch(**changes: object) -> DataProto:
    columns = {
        "input_ids": [torch.tensor([5, 6, 7]), torch.tensor([8]), torch.tensor([1, 2, 3, 4])],
        "loss_mask": [torch.tensor([0, 0, 1]), torch.tensor([0]), torch.tensor([0, 1, 0, 1])],
        "advantages": torch.tensor([0.5, 1.5, 2.5]),
        "log_probs": [torch.tensor([0.0, -1, -2]), torch.tensor([-3.0]), torch.tensor([-4.0, -5, -6, -7])],
    }
    columns["loss_mask"] = [mask.bool() for mask in columns["loss_mask"]]
    return DataProto.from_dict(tensors=columns | changes)  # type: ignore[arg-type]


def test_rows_become_a_stream() -> None:
    rows = PackedRows.read(_batch(), vocabulary=10, required=["advantages"], optional=["log_probs", "absent"])
    assert len(rows) == 3
    assert rows.lengths == [3, 1, 4]
    assert rows.scored.tolist() == [1, 0, 2]

    stream = rows.stream(MicroBatch((Rectangle((2,), 4), Rectangle((0,), 3)), tokens=7))
    assert stream.rectangles == ((1, 4), (1, 3))
    assert stream.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert stream.positions.tolist() == [0, 1, 2, 3, 0, 1, 2]
    # The trained tokens 2, 4 and 7 are predicted at the cells of 1, 3 and 6.
    assert stream.targets.tolist() == [2, 4, 7]
    assert stream.predictors.tolist() == [0, 2, 5]
    assert stream.rows.tolist() == [2, 2, 0]
    assert stream.of_tokens(rows.columns["log_probs"]).tolist() == [-5.0, -7.0, -2.0]
    assert stream.of_tokens(rows.columns["advantages"]).tolist() == [2.5, 2.5, 0.5]
    assert stream.of_rows(torch.tensor([10.0, 20.0, 30.0])).tolist() == [30.0, 30.0, 10.0]
    assert "absent" not in rows.columns


def test_a_rectangle_pads_its_shorter_rows() -> None:
    rows = PackedRows.read(_batch(), vocabulary=10)
    stream = rows.stream(MicroBatch((Rectangle((2, 0), 4), Rectangle((1,), 1)), tokens=8))
    assert stream.rectangles == ((2, 4), (1, 1))
    assert stream.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 0, 8]
    assert stream.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert stream.predictors.tolist() == [0, 2, 5]


def test_without_a_mask_every_token_but_the_first_is_scored() -> None:
    rows = PackedRows.read(_batch(), vocabulary=10, loss_mask=False)
    assert rows.scored.tolist() == [2, 0, 3]
    assert rows.stream(MicroBatch((Rectangle((0, 1), 3),), tokens=4)).targets.tolist() == [6, 7]


def test_a_stand_in_counts_for_nothing() -> None:
    stand_in = RowStream.stand_in()
    assert not stand_in.real
    assert stand_in.of_tokens(torch.tensor([], dtype=torch.float32)).tolist() == [0.0]
    assert stand_in.of_rows(torch.tensor([7.0])).tolist() == [0.0]


def test_no_rows_at_all() -> None:
    rows = PackedRows.read(_batch()[0:0], vocabulary=10, required=["advantages", "log_probs"])
    assert len(rows) == 0
    assert rows.scored.tolist() == []


def test_batches_that_cannot_be_used() -> None:
    with pytest.raises(SchemaError, match="'advantages' is missing; the batch has"):
        PackedRows.read(_batch().pop(batch_keys=["input_ids", "loss_mask"]), vocabulary=10, required=["advantages"])
    with pytest.raises(InvalidDataError, match=r"holds 1\.\.8, the model knows 0\.\.7"):
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
