"""Weights through a store: what a crash leaves, stores that refuse, and versions that are made of changes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.errors import ConfigError, StorageError, WeightError
from asyncrl.storage import Store
from asyncrl.weights import WeightManifest
from engines.weights.store import StoreTransport


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/weights"


@pytest.fixture
def transport(url: str) -> Iterator[StoreTransport]:
    transport = StoreTransport(namespace="test", url=url)
    yield transport
    transport.close()


def a_model(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{n}": torch.randn(n + 1, 7, generator=generator).bfloat16() for n in range(6)}


def copies(transport: StoreTransport, manifest: WeightManifest) -> dict[str, torch.Tensor]:
    with transport.pull(manifest) as tensors:
        return dict(tensors)


def test_a_publisher_that_ends_without_closing_leaves_nothing(url: str) -> None:
    code = """
import sys, torch
from engines.weights.store import StoreTransport
transport = StoreTransport(namespace="test", url=sys.argv[1])
transport.publish([("weight", torch.ones(3))], version=0)
"""
    ran = subprocess.run([sys.executable, "-c", code, url], check=True, timeout=60, capture_output=True, text=True)
    assert Store(url).names() == [] or "stays in the store" in ran.stderr  # as from Python 3.12 on


def test_an_upload_that_was_given_up_changes_no_later_attempt(
    transport: StoreTransport, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, late = Store.put, []

    def hangs(self: Store, files: dict[str, Path]) -> None:
        late.extend((name, path.read_bytes()) for name, path in files.items())
        raise StorageError("no answer for 1 s")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "put", hangs)
        with pytest.raises(WeightError, match="no answer for 1 s"):
            transport.publish(a_model(7).items(), version=0)
    assert Store.put is put
    manifest = transport.publish(a_model().items(), version=0)
    for name, content in late:
        Store(url).write(name, content)
    assert torch.equal(copies(transport, manifest)["layer.5"], a_model()["layer.5"])


def test_a_publication_that_ends_early_is_no_version(
    transport: StoreTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, sent = Store.put, []

    def breaks(self: Store, files: dict[str, Path]) -> None:
        sent[:] = list(files)
        put(self, dict([*files.items()][:-1]))
        raise StorageError("the network is gone")

    monkeypatch.setattr(Store, "put", breaks)
    with pytest.raises(WeightError, match=r"version 0 cannot be written to file://.*the network is gone"):
        transport.publish(a_model().items(), version=0)
    assert sent[-1].endswith("/complete")
    monkeypatch.setattr(Store, "put", put)
    manifest = transport.publish(a_model().items(), version=0)
    assert torch.equal(copies(transport, manifest)["layer.5"], a_model()["layer.5"])


def test_what_cannot_be_removed_stays_and_is_named(
    transport: StoreTransport, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    transport.publish(a_model().items(), version=0)

    def refuses(self: Store, name: str) -> None:
        raise StorageError("access is refused")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "remove", refuses)
        transport.release(0)
        last = threading.Event()
        transport._removals.add(last.set)
        assert last.wait(10.0)
    assert "version 0 stays in the store: access is refused" in caplog.text
    assert transport.versions == ()


def test_a_version_travels_as_what_it_changes(url: str) -> None:
    publisher, reader = (StoreTransport(namespace="test", url=url, delta=True) for _ in range(2))
    model = {"weight": torch.randn(64, 64).bfloat16()}
    assert torch.equal(copies(reader, publisher.publish(model.items(), version=0))["weight"], model["weight"])
    model["weight"] = model["weight"].clone()
    model["weight"][3, 3] *= 2
    manifest = publisher.publish(model.items(), version=1)
    assert [link.version for link in manifest.chain] == [0, 1]
    assert manifest.chain[1].size_bytes < 200
    assert torch.equal(copies(reader, manifest)["weight"], model["weight"])
    publisher.close()
    assert Store(url).names() == []


def test_an_announced_version_is_found_and_stays_until_newer_ones_are_released(url: str) -> None:
    publisher = StoreTransport(namespace="run", url=url, kept_versions=1)
    follower = StoreTransport(namespace="x", url=url)
    assert follower.announced() is None
    for version in range(3):
        manifest = publisher.publish(a_model(version).items(), version=version)
        publisher.announce(manifest)
        publisher.release(version - 1)
        assert follower.announced() == manifest
        assert torch.equal(copies(follower, manifest)["layer.5"], a_model(version)["layer.5"])
    assert publisher.versions == (1, 2)
    publisher.close()
    newest = follower.announced()
    assert newest is not None
    assert newest.version == 2
    assert torch.equal(copies(follower, newest)["layer.5"], a_model(2)["layer.5"])
    folders = {name.rpartition("/")[0] for name in Store(url).names()}
    assert folders == {"", newest.location}, "the others were removed at the end"


def test_a_version_that_is_released_twice_counts_once(url: str) -> None:
    publisher, model = StoreTransport(namespace="run", url=url, kept_versions=1, delta=True), a_model()
    for version in range(3):
        publisher.publish(model.items(), version=version)
    for version in (0, 1, 0, 0):  # 1 is kept; 0 is a link of it
        publisher.release(version)
    assert publisher._kept == [1]
    publisher.close()


def test_a_follower_reads_what_versions_change_and_goes_on_with_the_next_run(url: str) -> None:
    follower, model = StoreTransport(namespace="x", url=url), {"weight": torch.randn(64, 64).bfloat16()}
    for run in range(2):
        publisher = StoreTransport(namespace=f"run-{run}", url=url, kept_versions=1, delta=True)
        for version in range(3):
            model["weight"] = model["weight"].clone()
            model["weight"][version, run] *= 2
            publisher.announce(publisher.publish(model.items(), version=10 * run + version))
            publisher.release(10 * run + version - 1)
        publisher.close()
        manifest = follower.announced()
        assert manifest is not None
        assert len(manifest.chain) == 3
        assert torch.equal(copies(follower, manifest)["weight"], model["weight"])


def test_nothing_is_announced_by_a_run_that_keeps_nothing(transport: StoreTransport) -> None:
    transport.announce(transport.publish(a_model().items(), version=0))
    assert transport.announced() is None


def test_an_announcement_that_cannot_be_written_or_read_is_named(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = StoreTransport(namespace="run", url=url, kept_versions=1)
    manifest = publisher.publish(a_model().items(), version=0)

    def refuses(self: Store, *given: Any) -> bytes:
        raise StorageError("access is refused")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "write", refuses)
        publisher.announce(manifest)
        assert "version 0 is not announced: access is refused" in caplog.text
        patch.setattr(Store, "read", refuses)
        with pytest.raises(WeightError, match=r"asyncrl\.newest: access is refused"):
            publisher.announced()
    Store(url).write("asyncrl.newest", b"half of one")
    with pytest.raises(WeightError, match="11 bytes are no weight manifest"):
        publisher.announced()
    elsewhere = WeightManifest(version=1, transport="store", location="../secrets/1-1", tensors=manifest.tensors)
    Store(url).write("asyncrl.newest", elsewhere.encode())
    found = publisher.announced()
    assert found is not None
    with pytest.raises(WeightError, match="not in the store"):
        copies(publisher, found)
    publisher.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "nonsense://x"}, "weights.options.url"),
        ({"url": "s3://reader:secret@bucket/x"}, "holds a user, a password or a signature"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        StoreTransport(namespace="test", **options)
