"""Safetensors files that are written one tensor at a time, and pieces of tensors that are put together again."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from asyncrl.errors import CheckpointError
from asyncrl.io import DurableFiles
from engines.training import checkpoint, loading
from engines.training.checkpoint import HostMemory, SavedTensors, TensorSpec, full_tensor, write_tensors

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
    with pytest.raises(CheckpointError, match="was announced as"):
        write_tensors(path, SPECS[:1], [torch.zeros(3)], files=DurableFiles())


def test_a_copy_is_waited_for_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(checkpoint, "host_memory", lambda sizes, pinned: [torch.empty(sizes[0], dtype=torch.uint8)])
    with FakeTensorMode():
        HostMemory().copy({"weight": torch.empty(2, device="cuda:0")})
    assert waited == [torch.device("cuda:0")]


def saved(folder: Path, *cuts: int) -> SavedTensors:
    """Two rows of a matrix in one file, and the others, cut at columns, in further ones."""
    matrix = torch.arange(20.0).reshape(4, 5)
    pieces = [(matrix[:2], (0, 0)), *((matrix[2:, low:high], (2, low)) for low, high in itertools.pairwise(cuts))]
    for rank, (piece, start) in enumerate(pieces):
        place = {"matrix": {"start": start, "shape": (4, 5)}}
        path = folder / f"rank-{rank:05d}.safetensors"
        save_file({"matrix": piece.contiguous()}, path, metadata={"places": json.dumps(place)})
    return SavedTensors(folder)


MATRIX = TensorSpec("matrix", torch.float32, (4, 5))


@pytest.mark.parametrize("cuts", [(0, 5), (0, 2, 5), (0, 1, 3, 5)])
def test_any_part_is_read_from_whatever_pieces_there_are(tmp_path: Path, cuts: tuple[int, ...]) -> None:
    tensors = saved(tmp_path, *cuts)
    tensors.check([MATRIX])
    whole = torch.arange(20.0).reshape(4, 5)
    ((name, full),) = tensors.full([MATRIX])
    assert name == "matrix"
    assert torch.equal(full, whole)
    for top, bottom in itertools.combinations(range(5), 2):
        for left, right in itertools.combinations(range(6), 2):
            part = torch.full((bottom - top, right - left), torch.nan)
            tensors.read({"matrix": (part, (slice(top, bottom), slice(left, right)))})
            assert torch.equal(part, whole[top:bottom, left:right])


@pytest.mark.parametrize(("size_bytes", "opened"), [(1, 12), (50, 6), (1 << 20, 2)])
def test_a_file_is_opened_for_many_whole_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size_bytes: int, opened: int
) -> None:
    model = {f"layer.{n}": torch.randn(4, 5) for n in range(6)}  # of 80 bytes each
    for rank in range(2):
        half = slice(2 * rank, 2 * rank + 2)
        places = json.dumps({name: {"start": (2 * rank, 0), "shape": (4, 5)} for name in model})
        path = tmp_path / f"rank-{rank:05d}.safetensors"
        save_file({name: each[half].contiguous() for name, each in model.items()}, path, metadata={"places": places})
    tensors, paths = SavedTensors(tmp_path), list[str]()

    def noted(path: str, **options: Any) -> Any:
        paths.append(path)
        return safe_open(path, **options)

    monkeypatch.setattr(loading, "safe_open", noted)
    monkeypatch.setattr(checkpoint, "_OPENED_FOR_BYTES", size_bytes)
    found = tensors.full([TensorSpec(name, torch.float32, (4, 5)) for name in model])
    for (name, tensor), (same, expected) in zip(found, model.items(), strict=True):
        assert name == same
        assert torch.equal(tensor, expected)
    assert len(paths) == opened


def test_a_folder_of_another_model_is_refused_with_the_tensor_that_differs(tmp_path: Path) -> None:
    tensors = saved(tmp_path, 0, 2, 5)
    for specs, message in (
        ([MATRIX, TensorSpec("bias", torch.float32, (2,))], "it has no bias"),
        ([], "it has matrix"),
        (
            [TensorSpec("matrix", torch.float32, (5, 4))],
            r"matrix is torch.float32 \(4, 5\), here torch.float32 \(5, 4\)",
        ),
        ([TensorSpec("matrix", torch.bfloat16, (4, 5))], "here torch.bfloat16"),
    ):
        with pytest.raises(CheckpointError, match=message):
            tensors.check(specs)
    (tmp_path / "rank-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match="a part of matrix is missing"):
        SavedTensors(tmp_path).check([MATRIX])
    (tmp_path / "rank-00000.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors cannot be read"):
        SavedTensors(tmp_path)


def test_what_numpy_reads_of_a_full_tensor_is_no_memory_of_the_shard() -> None:
    """On two replicas the one shard is all of the tensor."""
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2, 1))
        tensor = DTensor.from_local(torch.arange(3.0), mesh, [Replicate(), Shard(0)])
        assert full_tensor(tensor).numpy().tolist() == [0.0, 1.0, 2.0]
        assert tensor.to_local().untyped_storage().resizable()
    finally:
        dist.destroy_process_group()
