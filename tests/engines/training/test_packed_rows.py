from __future__ import annotations

import pytest
import torch

from asyncrl.data import DataProto
from asyncrl.errors import InvalidDataError, SchemaError
from engines.training.packed_rows import PackedRows, PaddedRows


def _batch(**changes: object) -> DataProto:
    columns = {
        "input_ids": [torch.tensor([5, 6, 7]), torch.tensor([8]), torch.tensor([1, 2, 3, 4])],
        "loss_mask": [torch.tensor([0, 0, 1]), torch.tensor([0]), torch.tensor([0, 1, 0, 1])],
        "advantages": torch.tensor([0.5, 1.5, 2.5]),
        "log_probs": [torch.tensor([0.0, -1, -2]), torch.tensor([-3.0]), torch.tensor([-4.0, -5, -6, -7])],
    }
    columns["loss_mask"] = [mask.bool() for mask in columns["loss_mask"]]
    return DataProto.from_dict(tensors=columns | changes)  # type: ignore[arg-type]


def test_rows_become_one_rectangle() -> None:
    rows = PackedRows(_batch(), vocabulary=10, required=["advantages"], optional=["log_probs", "absent"])
    assert len(rows) == 3
    assert rows.lengths == [3, 1, 4]
    assert rows.scored.tolist() == [1, 0, 2]

    padded = rows.padded([2, 0])
    assert padded.input_ids.tolist() == [[1, 2, 3, 4], [5, 6, 7, 0]]
    # The trained tokens 2, 4 and 7 are predicted at the positions of 1, 3 and 6.
    assert padded.targets.tolist() == [2, 4, 7]
    assert padded.predictors.tolist() == [0, 2, 5]
    assert padded.rows.tolist() == [2, 2, 0]
    assert padded.of_tokens(rows.columns["log_probs"]).tolist() == [-5.0, -7.0, -2.0]
    assert padded.of_tokens(rows.columns["advantages"]).tolist() == [2.5, 2.5, 0.5]
    assert padded.of_rows(torch.tensor([10.0, 20.0, 30.0])).tolist() == [30.0, 30.0, 10.0]
    assert "absent" not in rows.columns


def test_without_a_mask_every_token_but_the_first_is_scored() -> None:
    rows = PackedRows(_batch(), vocabulary=10, loss_mask=False)
    assert rows.scored.tolist() == [2, 0, 3]
    assert rows.padded([0, 1]).targets.tolist() == [6, 7]


def test_a_stand_in_counts_for_nothing() -> None:
    stand_in = PaddedRows.stand_in()
    assert not stand_in.real
    assert stand_in.of_tokens(torch.tensor([], dtype=torch.float32)).tolist() == [0.0]
    assert stand_in.of_rows(torch.tensor([7.0])).tolist() == [0.0]


def test_no_rows_at_all() -> None:
    rows = PackedRows(_batch()[0:0], vocabulary=10, required=["advantages", "log_probs"])
    assert len(rows) == 0
    assert rows.scored.tolist() == []


def test_batches_that_cannot_be_used() -> None:
    with pytest.raises(SchemaError, match="'advantages' is missing; the batch has"):
        PackedRows(_batch().pop(batch_keys=["input_ids", "loss_mask"]), vocabulary=10, required=["advantages"])
    with pytest.raises(InvalidDataError, match=r"holds 1\.\.8, the model knows 0\.\.7"):
        PackedRows(_batch(), vocabulary=8)
    first = [torch.tensor([False] * 3), torch.tensor([True]), torch.tensor([False] * 4)]
    with pytest.raises(InvalidDataError, match="loss_mask of row 1 is True for its first token"):
        PackedRows(_batch(loss_mask=first), vocabulary=10)
    with pytest.raises(SchemaError, match="log_probs and input_ids differ in row lengths"):
        PackedRows(
            _batch(log_probs=[torch.zeros(3), torch.zeros(2), torch.zeros(4)]), vocabulary=10, required=["log_probs"]
        )
    with pytest.raises(SchemaError, match="input_ids must be ragged"):
        PackedRows(_batch(input_ids=torch.zeros(3, 4, dtype=torch.int64)), vocabulary=10)
    with pytest.raises(SchemaError, match=r"advantages must be ragged like input_ids, or \[B\]; got shape \(3, 2\)"):
        PackedRows(_batch(advantages=torch.zeros(3, 2)), vocabulary=10, required=["advantages"])
