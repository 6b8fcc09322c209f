from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.errors import CheckpointError
from engines.training.checkpoint import (
    TensorSpec,
    check_tensors,
    read_json,
    read_tensors,
    replace_folder,
    seal,
    verify,
    write_json,
    write_tensors,
)

TENSORS = {
    "matrix": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "scalar": torch.tensor(7),
    "nothing": torch.zeros(0, 4, dtype=torch.bfloat16),
    "transposed": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T,
    "flags": torch.tensor([True, False, True]),
}
SPECS = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()]


def test_what_is_streamed_is_a_safetensors_file(tmp_path: Path) -> None:
    alive: list[str] = []

    def stream() -> Iterator[torch.Tensor]:
        for name, tensor in TENSORS.items():
            alive.append(name)
            yield tensor

    path = tmp_path / "model.safetensors"
    write_tensors(path, SPECS, stream(), metadata={"format": "pt"})
    assert alive == list(TENSORS)
    loaded = load_file(path)
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(loaded[name], tensor)
        assert loaded[name].dtype == tensor.dtype
    check_tensors(path, SPECS)
    assert [tensor.shape for tensor in read_tensors(path, ["scalar", "matrix"])] == [(), (2, 3)]


def test_a_file_of_another_model_is_told_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_tensors(path, SPECS, TENSORS.values())
    with pytest.raises(CheckpointError, match="it has no bias"):
        check_tensors(path, [*SPECS, TensorSpec("bias", torch.float32, (2,))])
    with pytest.raises(CheckpointError, match="it has scalar"):
        check_tensors(path, [spec for spec in SPECS if spec.name != "scalar"])
    with pytest.raises(CheckpointError, match=r"matrix is F32 \(2, 3\), here it is F32 \(3, 2\)"):
        check_tensors(path, [TensorSpec("matrix", torch.float32, (3, 2)), *SPECS[1:]])
    with pytest.raises(CheckpointError, match="was announced as"):
        write_tensors(path, SPECS[:1], [torch.zeros(3)])


def _sealed(folder: Path) -> Path:
    folder.mkdir()
    write_tensors(folder / "model.safetensors", SPECS, TENSORS.values())
    write_json(folder / "trainer.json", {"step": 3})
    seal(folder)
    verify(folder)
    return folder


@pytest.mark.parametrize("name", ["model.safetensors", "trainer.json"])
def test_damage_is_found(tmp_path: Path, name: str) -> None:
    folder = _sealed(tmp_path / "checkpoint")
    content = (folder / name).read_bytes()

    (folder / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=f"{name} is damaged"):
        verify(folder)
    (folder / name).write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=f"{name} has {len(content) - 1} bytes, the manifest says {len(content)}"):
        verify(folder)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        verify(folder)


def test_a_damaged_manifest_is_found(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no such folder"):
        verify(tmp_path / "nowhere")
    folder = _sealed(tmp_path / "checkpoint")
    manifest = folder / "manifest.json"
    for content, message in (
        ("{", "cannot be read"),
        ("[]", "is not a manifest of format 1"),
        (json.dumps({"format": 2, "files": {}}), "is not a manifest of format 1"),
        (json.dumps({"format": 1, "files": {"trainer.json": {}}}), "is damaged: KeyError"),
    ):
        manifest.write_text(content)
        with pytest.raises(CheckpointError, match=message):
            verify(folder)
    manifest.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        verify(folder)


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    with replace_folder(folder) as partial:
        write_json(partial / "old.json", 1)
        assert not folder.exists()

    def fail() -> None:
        with replace_folder(folder) as partial:
            write_json(partial / "new.json", 2)
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        fail()
    assert [path.name for path in folder.iterdir()] == ["old.json"]
    with replace_folder(folder) as partial:
        write_json(partial / "new.json", 2)
    assert [path.name for path in folder.iterdir()] == ["new.json"]
    assert read_json(folder / "new.json") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step"]
