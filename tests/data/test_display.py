"""Batches as text and as HTML."""

from __future__ import annotations

import numpy as np
import torch

from asyncrl.data import DataProto
from asyncrl.data.display import size_text


def test_text() -> None:
    data = DataProto.from_dict(
        tensors={"input_ids": [torch.tensor([1, 2, 3]), torch.tensor([4])], "rewards": torch.zeros(2)},
        non_tensors={"answer": ["yes", "no"]},
        meta_info={"step": 1, "metrics": {}},
        auto_padding=True,
    )
    assert repr(data).splitlines() == [
        "DataProto: 2 rows, 80 B, auto padding",
        "  input_ids  ragged int64[*]  lengths 1..3, 4 in all",
        "  rewards    tensor float32",
        "  answer     object",
        "  meta_info: step, metrics",
    ]
    assert repr(DataProto()) == "DataProto: 0 rows, 0 B"
    assert repr(data[:0]).splitlines()[1] == "  input_ids  ragged int64[*]"


def test_html_escapes_names() -> None:
    page = DataProto(non_tensor_batch={"<script>": np.zeros(1)}, meta_info={"<b>": 1})._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "<b>" not in page.replace("<b>DataProto: 1 row, 8 B</b>", "")


def test_sizes() -> None:
    assert [size_text(size) for size in (0, 1023, 1536, 3 << 20, 5 << 30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3 MiB",
        "5 GiB",
    ]


def test_data_info_names_every_column_and_entry(capsys: object) -> None:
    data = DataProto.from_dict(tensors={"x": torch.zeros(2, 3)}, non_tensors={"o": [1, 2]}, meta_info={"step": 1})
    data.meta_info |= {"mixed": [1, 2.0], "nested": {"key": (1, "x")}, "array": np.zeros((2, 3)), "none": []}
    assert data.get_data_info().splitlines() == [
        "batch",
        "  x: (2, 3) (torch.float32) cpu",
        "non_tensor_batch",
        "  o: ndarray(2,) (object)",
        "meta_info",
        "  step: int",
        "  mixed: list[float|int]",
        "  nested: dict[str: tuple(int, str)]",
        "  array: ndarray(2, 3) (float64)",
        "  none: list[...]",
    ]
    data.print_size("before")
    assert capsys.readouterr().out == "before, 2 rows, 40 bytes\n"  # type: ignore[attr-defined]
