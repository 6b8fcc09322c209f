"""The manifest on the wire."""

from __future__ import annotations

import pickle

import msgspec
import pytest
import torch
import xxhash

from asyncrl.errors import WeightMismatchError
from asyncrl.weights import TensorEntry, WeightManifest, dtype_and_checksum, host_chunks

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ENTRY = TensorEntry(name="w", shape=(2, 3), dtype="bfloat16", offset=64, size_bytes=12, checksum=2**64 - 1)
MANIFEST = WeightManifest(version=3, transport="shared_memory", location="block", tensors=(ENTRY,))


def test_a_manifest_survives_the_wire_and_pickle():
    assert WeightManifest.decode(MANIFEST.encode()) == MANIFEST
    assert pickle.loads(pickle.dumps(MANIFEST)) == MANIFEST
    assert (ENTRY.numel, MANIFEST.size_bytes) == (6, 12)


def test_every_proper_prefix_and_other_bytes_are_refused():
    data = MANIFEST.encode()
    for end in range(len(data)):
        with pytest.raises(WeightMismatchError, match="are no weight manifest"):
            WeightManifest.decode(data[:end])
    with pytest.raises(WeightMismatchError, match="are no weight manifest"):
        WeightManifest.decode(b'{"version": 3}')


def test_the_digest_stands_for_version_and_entries_but_not_for_the_place():
    assert len(MANIFEST.digest) == 16
    assert msgspec.structs.replace(MANIFEST, location="elsewhere").digest == MANIFEST.digest
    assert msgspec.structs.replace(MANIFEST, version=4).digest != MANIFEST.digest
    for change in ({"dtype": "float16"}, {"shape": (3, 2)}, {"checksum": 0}, {"name": "v"}, {"offset": 128}):
        changed = msgspec.structs.replace(MANIFEST, tensors=(msgspec.structs.replace(ENTRY, **change),))
        assert changed.digest != MANIFEST.digest


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_the_chunks_of_a_tensor_are_its_bytes_in_row_major_order(device: str):
    """On CUDA a chunk lies in one of two buffers, which the next but one is copied into while the next is read."""
    rows = torch.arange(2000, dtype=torch.int16, device=device).reshape(40, 50)
    for tensor in (rows, rows.t(), rows[::3, 1::2], rows[0, 0], rows[:0], rows[:1].expand(3, 50)):
        expected = tensor.cpu().contiguous().numpy().tobytes()
        assert b"".join(bytes(chunk) for chunk in host_chunks(tensor)) == expected
        for size_bytes in (7, 1000):
            found = [bytes(chunk) for chunk in host_chunks(tensor, size_bytes=size_bytes)]
            assert b"".join(found) == expected
            assert all(len(chunk) == size_bytes for chunk in found[:-1])
        assert dtype_and_checksum(tensor) == ("int16", xxhash.xxh3_64_intdigest(expected))


def test_chunks_of_row_major_host_memory_are_no_copies():
    tensor = torch.zeros(6, dtype=torch.uint8)
    _, second = host_chunks(tensor, size_bytes=4)
    tensor[5] = 7
    assert bytes(second) == b"\0\7"
