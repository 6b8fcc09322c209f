"""The file of a batch: written completely or not at all, and no bit of it changes unnoticed."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from asyncrl.data import DataProto
from asyncrl.data.disk import from_bytes
from asyncrl.errors import CodecError


def made() -> DataProto:
    return DataProto.from_dict(
        tensors={"x": torch.arange(9).reshape(3, 3), "ids": [torch.ones(size) for size in (2, 0, 1)]},
        non_tensors={"o": ["a", None, [1]], "n": np.arange(3, dtype=np.int8)},
        meta_info={"step": 7},
    )


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("disk") / "batch"
    made().save_to_disk(path)
    return path.read_bytes()


@pytest.mark.parametrize("mmap", [False, True])
def test_there_and_back(tmp_path: Path, mmap: bool) -> None:
    for data in (made(), DataProto(), made()[:0], made().select([], ["o"])):
        data.save_to_disk(tmp_path / "batch")
        loaded = DataProto.load_from_disk(tmp_path / "batch", mmap=mmap)
        assert loaded == data
        assert not loaded.read_only
        assert [path.name for path in tmp_path.iterdir()] == ["batch"]


def test_a_mapped_batch_never_writes_to_the_file(tmp_path: Path) -> None:
    made().save_to_disk(tmp_path / "batch")
    loaded = DataProto.load_from_disk(tmp_path / "batch", mmap=True)
    assert loaded.batch is not None
    loaded.batch["x"].zero_()
    assert loaded.batch["x"].sum() == 0
    assert DataProto.load_from_disk(str(tmp_path / "batch")) == made()


def test_buffers_are_aligned(tmp_path: Path) -> None:
    made().save_to_disk(tmp_path / "batch")
    loaded = DataProto.load_from_disk(tmp_path / "batch", mmap=True)
    assert loaded.batch is not None
    assert loaded.batch["x"].data_ptr() % 64 == 0


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "batch"
    made().save_to_disk(path)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("asyncrl.data.disk.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        made()[:1].save_to_disk(path)
    with pytest.raises(CodecError, match="column 'o'"):
        DataProto.from_dict(non_tensors={"o": [object()]}).save_to_disk(path)
    assert DataProto.load_from_disk(path) == made()
    assert [file.name for file in tmp_path.iterdir()] == ["batch"]


def test_every_single_bit_counts(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "changed"
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= 1 << (position % 8)
        path.write_bytes(changed)
        with pytest.raises(CodecError):
            DataProto.load_from_disk(path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(draw=st.data(), mmap=st.booleans())
def test_damage_of_any_kind_is_a_codec_error(tmp_path: Path, content: bytes, draw: st.DataObject, mmap: bool) -> None:
    cut = st.integers(0, len(content) - 1)
    flips = st.lists(st.tuples(cut, st.integers(1, 255)), min_size=1, max_size=4, unique_by=lambda flip: flip[0])
    damage = draw.draw(cut | flips | st.binary(min_size=1, max_size=70))
    if isinstance(damage, int):
        changed = content[:damage]
    elif isinstance(damage, bytes):
        changed = content + damage
    else:
        flipped = bytearray(content)
        for position, mask in damage:
            flipped[position] ^= mask
        changed = bytes(flipped)
    path = tmp_path / "changed"
    path.write_bytes(changed)
    with pytest.raises(CodecError, match="changed"):
        DataProto.load_from_disk(path, mmap=mmap)


@pytest.mark.parametrize("size", [0, 63])
def test_the_beginning_of_a_batch_is_none(tmp_path: Path, content: bytes, size: int) -> None:
    path = tmp_path / "cut"
    path.write_bytes(content[:size])
    for load in (lambda: from_bytes(content[:size]), lambda: DataProto.load_from_disk(path, mmap=True)):
        with pytest.raises(CodecError, match=f"{size} bytes are too few for a batch"):
            load()


def test_a_missing_file_is_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        DataProto.load_from_disk(tmp_path / "absent")
