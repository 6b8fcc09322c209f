"""Differences between versions: bit-exact, refused by name where they are not what they should be, and mended."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.errors import WeightError, WeightMismatchError
from asyncrl.weights import WeightManifest
from engines.weights import delta
from engines.weights.disk import DiskTransport


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[DiskTransport]:
    transport = DiskTransport(namespace="test", directory=str(tmp_path), delta=True, max_versions=4)
    yield transport
    transport.close()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[DiskTransport]:
    transport = DiskTransport(namespace="test", directory=str(tmp_path))
    yield transport
    transport.close()


def a_model(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"layer.{n}": torch.randn(40 * n + 1, 97, generator=generator).to(dtype) for n in range(4)}


def step(model: dict[str, torch.Tensor], share: float, *, seed: int) -> None:
    """Change so many of the elements, most by one unit in the last place and some by anything."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in model.values():
        bits = tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int32)
        chosen = torch.rand(tensor.shape, generator=generator) < share
        bits += chosen * (torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1).to(bits.dtype)
        far = torch.rand(tensor.shape, generator=generator) < share / 8
        bits += far * torch.randint(-(2**14), 2**14, tensor.shape, generator=generator).to(bits.dtype)


def assert_pulled(reader: DiskTransport, manifest: WeightManifest, model: dict[str, torch.Tensor]) -> None:
    with reader.pull(manifest) as tensors:
        assert tensors.keys() == model.keys()
        for name, tensor in model.items():
            assert tensor.view(torch.uint8).equal(tensors[name].view(torch.uint8)), name  # NaNs and zeros, too


def folder_bytes(transport: DiskTransport, manifest: WeightManifest) -> int:
    return sum(file.stat().st_size for file in (transport.directory / manifest.location).iterdir())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_reader_gets_every_version_bit_for_bit(
    transport: DiskTransport, reader: DiskTransport, dtype: torch.dtype
) -> None:
    model = a_model(dtype)
    sizes = []
    for version in range(6):
        manifest = transport.publish(model.items(), version=version)
        transport.release(version - 1)
        assert_pulled(reader, manifest, model)
        sizes.append(folder_bytes(transport, manifest))
        step(model, 0.01, seed=version)
    assert max(sizes[1:]) < 0.2 * sizes[0]


def test_a_reader_that_missed_some_fetches_those_and_a_late_one_all(
    transport: DiskTransport, reader: DiskTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    true = DiskTransport._read

    def noted(self: DiskTransport, manifest: WeightManifest) -> object:
        read.append(manifest.version)
        return true(self, manifest)

    model = a_model()
    first = transport.publish(model.items(), version=0)
    assert_pulled(reader, first, model)
    for version in range(1, 5):
        step(model, 0.01, seed=version)
        manifest = transport.publish(model.items(), version=version)
        transport.release(version - 1)
    monkeypatch.setattr(DiskTransport, "_read", noted)
    reader._readers._read = reader._read
    assert_pulled(reader, manifest, model)
    assert read == [1, 2, 3, 4]
    read.clear()
    transport._readers._read = transport._read
    assert_pulled(transport, manifest, model)
    assert read == [0, 1, 2, 3, 4]


def test_no_more_is_encoded_than_a_delta_may_have(
    transport: DiskTransport, reader: DiskTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    encode = delta._encode

    def noted(*piece: Any) -> Any:
        if (found := encode(*piece)) is not None:
            sizes.append(sum(len(array) for array in found[1]))
        return found

    monkeypatch.setattr(delta, "_encode", noted)
    model = {f"layer.{n}": torch.arange(500.0).bfloat16() for n in range(100)}
    for version, share in enumerate((0.0, 0.01, 0.9, 0.9, 0.01)):
        sizes.clear()
        step(model, share, seed=version)
        manifest = transport.publish(model.items(), version=version)
        transport.release(version - 1)
        assert_pulled(reader, manifest, model)
        # Those of some tensors more, which are encoded at a time.
        assert sum(sizes) <= 500 * 2 * (50 + 10)
        assert [link.version for link in manifest.chain] == [[0], [0, 1], [2], [3], [3, 4]][version]
    transport.rebase()
    sizes.clear()
    step(model, 0.01, seed=5)
    transport.publish(model.items(), version=5)
    assert not sizes


def test_two_versions_in_use_do_not_disturb_one_another(transport: DiskTransport, reader: DiskTransport) -> None:
    model = a_model()
    serving = reader.pull(transport.publish(model.items(), version=0))
    tensors = serving.__enter__()  # as an engine that serves from what it pulled
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    for version in range(1, 4):
        step(model, 0.01, seed=version)
        manifest = transport.publish(model.items(), version=version)
        transport.release(version - 1)
        assert_pulled(reader, manifest, model)
        assert all(torch.equal(tensors[name], tensor) for name, tensor in before.items())
    serving.__exit__(None, None, None)
    step(model, 0.01, seed=9)
    assert_pulled(reader, transport.publish(model.items(), version=4), model)


def test_what_a_version_changes_much_is_published_whole_and_older_ones_are_freed(transport: DiskTransport) -> None:
    model = a_model()
    for version in range(4):
        transport.publish(model.items(), version=version)
        transport.release(version - 1)
        step(model, 0.01, seed=version)
    assert transport.versions == (0, 1, 2, 3)  # links of the last
    step(model, 0.9, seed=5)
    manifest = transport.publish(model.items(), version=4)
    assert [link.version for link in manifest.chain] == [4]
    transport.release(3)
    assert transport.versions == (4,)
    transport.rebase()
    manifest = transport.publish(model.items(), version=5)
    assert [link.version for link in manifest.chain] == [5]
    transport.release(4)
    transport.release(5)
    assert transport.versions == (5,)  # the next one may be a delta to it


def test_a_publication_that_fails_half_way_makes_the_next_one_whole(
    transport: DiskTransport, reader: DiskTransport
) -> None:
    model = a_model()
    transport.publish(model.items(), version=0)
    step(model, 0.01, seed=1)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(model.items())[:2]
        raise OSError("the trainer died")

    with pytest.raises(OSError, match="died"):
        transport.publish(broken(), version=1)
    manifest = transport.publish(model.items(), version=1)
    assert len(manifest.chain) == 1
    assert_pulled(reader, manifest, model)


@pytest.fixture
def three(transport: DiskTransport, reader: DiskTransport) -> tuple[list[WeightManifest], dict[str, torch.Tensor]]:
    model = a_model()
    manifests = []
    for version in range(3):
        step(model, 0.01, seed=version)
        manifests.append(transport.publish(model.items(), version=version))
    return manifests, model


def test_a_delta_out_of_order_or_of_another_run_is_refused_by_name(
    three: tuple[list[WeightManifest], dict[str, torch.Tensor]], transport: DiskTransport, tmp_path: Path
) -> None:
    (_, _, last), model = three
    base, one, two = last.chain
    out_of_order = r"begins at weights \w+, and \w+ are held: it is of another run, or out of order"
    for chain in ((base, two), (base, two, one)):
        with pytest.raises(WeightMismatchError, match=out_of_order):
            transport.pull(msgspec.structs.replace(last, chain=chain)).__enter__()
    transport.rebase()
    full = transport.publish(model.items(), version=3)
    with pytest.raises(WeightMismatchError, match="version 3 in the chain of 3 is no delta"):
        transport.pull(msgspec.structs.replace(full, chain=(base, full.chain[0]))).__enter__()
    elsewhere = DiskTransport(namespace="other", directory=str(tmp_path))
    with pytest.raises(WeightError, match="not on the disk of namespace 'other'"):
        elsewhere.pull(last).__enter__()


def test_a_link_that_cannot_be_fetched_costs_no_more_than_that_link(
    transport: DiskTransport, reader: DiskTransport
) -> None:
    model, fetched = a_model(), []
    assert_pulled(reader, transport.publish(model.items(), version=0), model)
    for version in (1, 2):
        step(model, 0.01, seed=version)
        manifest = transport.publish(model.items(), version=version)
    true = reader._read

    def cut_off(link: WeightManifest) -> Mapping[str, torch.Tensor]:
        fetched.append(link.version)
        if fetched.count(2) == 1 and link.version == 2:
            raise WeightError("the connection was cut off")
        return true(link)

    reader._readers._read = cut_off
    with pytest.raises(WeightError, match="cut off"):
        reader.pull(manifest).__enter__()
    assert_pulled(reader, manifest, model)
    assert fetched == [1, 2, 2]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_delta_never_gives_other_weights(
    three: tuple[list[WeightManifest], dict[str, torch.Tensor]], reader: DiskTransport, data: st.DataObject
) -> None:
    """Also where the damage comes after the checks of the bytes: the result is verified."""
    (_, _, last), model = three
    reader._readers._idle.clear()  # of the example before
    true = reader._read

    def torn(manifest: WeightManifest) -> dict[str, torch.Tensor]:
        tensors = dict(true(manifest))
        if "delta" in tensors and len(tensors) == 1:
            delta = tensors["delta"].numpy().copy()
            at = data.draw(st.integers(0, len(delta) - 1))
            delta[at] ^= np.uint8(data.draw(st.integers(1, 255)))
            tensors["delta"] = torch.from_numpy(delta)
        return tensors

    reader._readers._read = torn
    with contextlib.suppress(WeightMismatchError):
        assert_pulled(reader, last, model)  # the damage was not where it counts
    reader._readers._read = true
    assert_pulled(reader, last, model)


def test_a_reader_whose_tensors_were_written_to_begins_at_the_full_version(
    transport: DiskTransport, reader: DiskTransport, caplog: pytest.LogCaptureFixture
) -> None:
    model = a_model()
    with reader.pull(transport.publish(model.items(), version=0)) as tensors:
        tensors["layer.1"][0, 0] = 7.0
    step(model, 0.01, seed=1)
    manifest = transport.publish(model.items(), version=1)
    with caplog.at_level(logging.WARNING):
        assert_pulled(reader, manifest, model)
    assert "version 1 is fetched from its full version: version 1: 1 of 4 tensors differ" in caplog.text
