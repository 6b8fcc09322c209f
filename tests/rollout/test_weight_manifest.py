"""The manifest on the wire."""

from __future__ import annotations

import pickle

import msgspec
import pytest

from asyncrl.errors import WeightMismatchError
from asyncrl.weights import TensorEntry, WeightManifest

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
