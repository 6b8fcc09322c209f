"""Weights through a store: what a crash leaves, stores that refuse, and versions that are made of changes."""

from __future__ import annotations

import subprocess
import sys
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


KILLED = """
import os, signal, sys, torch
from engines.weights.store import StoreTransport
transport = StoreTransport(namespace="test", url=sys.argv[1])
transport.publish([("weight", torch.ones(3))], version=0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_publisher_left_is_removed_and_what_a_living_one_has_is_not(
    url: str, transport: StoreTransport
) -> None:
    living = transport.publish(a_model().items(), version=0)
    subprocess.run([sys.executable, "-c", KILLED, url], check=False, timeout=60)
    elsewhere = "asyncrl.test.0123456789abcdef.1.01234567/0/complete"  # of another machine, or before its last start
    Store(url).write(elsewhere, b"x")
    left = {name.partition("/")[0] for name in Store(url).names()} - {living.location.partition("/")[0]}
    assert len(left) == 2
    another = StoreTransport(namespace="test", url=url)
    manifest = another.publish(a_model(1).items(), version=0)
    kept = {name.partition("/")[0] for name in Store(url).names()}
    assert kept == {each.location.partition("/")[0] for each in (living, manifest)} | {elsewhere.partition("/")[0]}
    assert copies(transport, living).keys() == a_model().keys()
    another.close()


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
