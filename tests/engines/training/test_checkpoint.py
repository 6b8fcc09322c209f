"""Safetensors files that are written one tensor at a time, and read for the model they belong to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.errors import CheckpointError
from asyncrl.io import DurableFiles
from engines.training.checkpoint import TensorSpec, check_tensors, read_tensors, write_tensors

TENSORS = {
    "matrix": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "scalar": torch.tensor(7),
    "nothing": torch.zeros(0, 4, dtype=torch.bfloat16),
    "transposed": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T,
    "flags": torch.tensor([True, False, True]),
}
SPECS = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()]


def test_a_streamed_file_is_a_safetensors_file(tmp_path: Path) -> None:
    alive: list[str] = []

    def stream() -> Iterator[torch.Tensor]:
        for name, tensor in TENSORS.items():
            alive.append(name)
            yield tensor

    path = tmp_path / "model.safetensors"
    write_tensors(path, SPECS, stream(), files=DurableFiles())
    assert alive == list(TENSORS)
    loaded = load_file(path)
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(loaded[name], tensor)
        assert loaded[name].dtype == tensor.dtype
    check_tensors(path, SPECS)
    assert [tensor.shape for tensor in read_tensors(path, ["scalar", "matrix"])] == [(), (2, 3)]


def test_a_file_of_another_model_is_refused_with_the_tensor_that_differs(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    files = DurableFiles()
    write_tensors(path, SPECS, TENSORS.values(), files=files)
    with pytest.raises(CheckpointError, match="it has no bias"):
        check_tensors(path, [*SPECS, TensorSpec("bias", torch.float32, (2,))])
    with pytest.raises(CheckpointError, match="it has scalar"):
        check_tensors(path, [spec for spec in SPECS if spec.name != "scalar"])
    with pytest.raises(CheckpointError, match=r"matrix is F32 \(2, 3\), here it is F32 \(3, 2\)"):
        check_tensors(path, [TensorSpec("matrix", torch.float32, (3, 2)), *SPECS[1:]])
    with pytest.raises(CheckpointError, match="was announced as"):
        write_tensors(path, SPECS[:1], [torch.zeros(3)], files=files)
