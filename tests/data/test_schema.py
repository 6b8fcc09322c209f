"""Schemas: what a batch must look like."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncrl.data import DataProto, Schema
from asyncrl.data.schema import Column


def made() -> DataProto:
    return DataProto.from_dict(
        tensors={
            "ids": [torch.tensor([1]), torch.tensor([2, 3])],
            "pixels": torch.zeros(2, 3, 4, dtype=torch.bfloat16),
        },
        non_tensors={"o": [1, None], "name": np.array(["a", "bcd"]), "when": np.zeros((2, 2), "datetime64[s]")},
    )


def test_the_schema_of_a_batch() -> None:
    assert made().schema == Schema(
        columns=(
            Column("ids", "ragged", "int64"),
            Column("pixels", "tensor", "bfloat16", (3, 4)),
            Column("o", "object", "object"),
            Column("name", "array", "str"),
            Column("when", "array", "datetime64[s]", (2,)),
        ),
        rows=2,
    )
    assert made().schema["pixels"].shape == (3, 4)
    assert str(made().schema["pixels"]) == "tensor bfloat16[3, 4]"
    with pytest.raises(KeyError):
        made().schema["absent"]


def test_diff_lists_every_difference() -> None:
    schema = made().schema
    other = made()[:1]
    other.pop(["ids"])
    assert schema.diff(made().schema) == schema.any_rows().diff(made()[:1].schema) == ""
    found = other.with_columns(pixels=torch.zeros(1, 3), extra=torch.zeros(1)).schema
    assert schema.diff(found).splitlines() == [
        "column 'ids' is missing (expected ragged int64[*])",
        "column 'pixels' is tensor float32[3], expected tensor bfloat16[3, 4]",
        "column 'extra' (tensor float32) is not expected",
        "1 rows, expected 2",
    ]
