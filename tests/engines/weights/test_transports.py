"""What every weight transport keeps, whatever carries the bytes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from asyncrl.errors import WeightError, WeightMismatchError, WeightVersionError
from asyncrl.storage import Store
from asyncrl.weights import TransportSpec, WeightManifest, WeightTransport
from engines.weights.transport import Removals

Make = Callable[..., WeightTransport]


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(
    params=[
        "shared_memory",
        "disk",
        "collective",
        "store",
        pytest.param("object_store", marks=[pytest.mark.ray, pytest.mark.slow]),
    ]
)
def spec(request: pytest.FixtureRequest, tmp_path: Path) -> TransportSpec:
    options: dict[str, Any] = {"directory": str(tmp_path)}
    if request.param == "object_store":
        request.getfixturevalue("ray_cluster")
    if request.param in ("object_store", "collective"):
        options = {}
    if request.param == "store":
        options = {"url": f"file://{tmp_path}/store"}
    return TransportSpec(name=request.param, namespace=f"test-{os.getpid()}", options=options)


@pytest.fixture
def publisher(spec: TransportSpec) -> Iterator[WeightTransport]:
    transport = spec.make()
    yield transport
    transport.close()


@pytest.fixture
def reader(spec: TransportSpec) -> Iterator[WeightTransport]:
    transport = spec.make()
    yield transport
    transport.close()


def a_model(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(7, 5, generator=generator)
    return {
        "matrix": matrix,
        "tied": matrix,
        "transposed": matrix.t(),
        "half": torch.randn(33, generator=generator).bfloat16(),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "flags": torch.tensor([True, False, True]),
        "numbers": torch.arange(9),
        "large": torch.randn(1000, 1300, generator=generator),
    }


def copies(transport: WeightTransport, manifest: WeightManifest) -> dict[str, torch.Tensor]:
    with transport.pull(manifest) as tensors:
        return {name: tensor.clone() for name, tensor in tensors.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def removed(transport: Any) -> None:
    """Wait until released versions are gone: some transports remove them in a thread, one after another."""
    if hasattr(transport, "_removals"):
        last = threading.Event()
        transport._removals.add(last.set)
        assert last.wait(10.0)


def test_what_is_published_is_pulled_elsewhere(publisher: WeightTransport, reader: WeightTransport) -> None:
    for version in (0, 1, 5):
        model = a_model(version)
        manifest = publisher.publish(model.items(), version=version)
        assert same(copies(reader, WeightManifest.decode(manifest.encode())), model)
        publisher.release(version - 1)
        publisher.release(1)


def test_a_version_in_many_pieces(spec: TransportSpec, reader: WeightTransport) -> None:
    sizes = {
        "disk": {"shard_size_bytes": 100},
        "store": {"shard_size_bytes": 100},
        "object_store": {"batch_size_bytes": 100},
        "collective": {"bucket_bytes": 200_000},
    }
    small = TransportSpec(
        name=spec.name, namespace=spec.namespace, options={**spec.options, **sizes.get(spec.name, {})}
    ).make()
    model = a_model()
    assert same(copies(reader, small.publish(model.items(), version=0)), model)
    small.close()


def test_writing_to_a_pulled_tensor_changes_no_other(publisher: WeightTransport, reader: WeightTransport) -> None:
    manifest = publisher.publish(a_model().items(), version=0)
    with reader.pull(manifest) as one, reader.pull(manifest) as other:
        one["large"].fill_(1)
        assert torch.equal(other["large"], a_model()["large"])
    assert same(copies(reader, manifest), a_model())


def test_versions_grow_and_only_so_many_are_held(publisher: WeightTransport) -> None:
    publisher.publish(a_model().items(), version=3)
    with pytest.raises(WeightVersionError, match="3 cannot be published after 3"):
        publisher.publish(a_model().items(), version=3)
    publisher.publish(a_model().items(), version=7)
    with pytest.raises(WeightError, match=r"2 versions are held \(3, 7\); release one first"):
        publisher.publish(a_model().items(), version=8)
    publisher.release(3)
    publisher.release(3)
    publisher.publish(a_model().items(), version=8)


def test_a_released_version_is_gone_and_the_others_are_not(publisher: WeightTransport, reader: WeightTransport) -> None:
    first = publisher.publish(a_model(0).items(), version=0)
    second = publisher.publish(a_model(1).items(), version=1)
    with reader.pull(first) as held:
        publisher.release(0)
        removed(publisher)
        publisher.publish(a_model(2).items(), version=2)
        assert same(dict(held), a_model(0)), "its readers are not disturbed"
    with pytest.raises(WeightError, match=r"version 0 (is not available|was released)"):
        copies(reader, first)
    assert same(copies(reader, second), a_model(1))


def test_a_removal_waits_for_the_next_one_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    removals, done = Removals(), [threading.Event() for _ in range(2)]
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        removals.add(done[0].set)
    assert not done[0].is_set()
    removals.add(done[1].set)
    assert all(each.wait(10.0) for each in done)


@pytest.mark.parametrize("delta", [False, True])
def test_a_removal_that_hangs_holds_neither_publications_nor_the_end(
    spec: TransportSpec, monkeypatch: pytest.MonkeyPatch, delta: bool
) -> None:
    """What is removed is on a share that does not answer; with differences a publication frees a whole chain, too."""
    if spec.name not in ("disk", "store"):
        pytest.skip("it removes nothing that could hang")
    forever = threading.Event()
    real = shutil.rmtree

    def hangs(path: Path, **options: Any) -> None:
        if spec.name == "disk" and not Path(path).name.startswith("."):  # those are being written
            forever.wait()
        real(path, **options)

    monkeypatch.setattr(shutil, "rmtree", hangs)
    monkeypatch.setattr(Store, "remove", lambda *_: forever.wait())
    monkeypatch.setattr("engines.weights.transport._REMOVING_S", 0.1)

    def story() -> None:
        transport: Any = replace(spec, options={**spec.options, "delta": delta}).make()
        for version in range(4):
            manifest = transport.publish(a_model().items(), version=version)
            transport.release(version - 1)
            if version == 2 and delta:
                transport.release(2)
                transport.rebase()
        assert transport.versions == (3,)
        assert same(copies(transport, manifest), a_model())
        transport.close()
        done.set()

    done = threading.Event()
    threading.Thread(target=story, daemon=True).start()
    try:
        assert done.wait(30.0)
    finally:
        forever.set()


def test_a_failed_publication_is_not_available_and_can_be_tried_again(
    publisher: WeightTransport, reader: WeightTransport
) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "fine", torch.ones(3)
        raise RuntimeError("the trainer failed")

    with pytest.raises(RuntimeError, match="the trainer failed"):
        publisher.publish(broken(), version=0)
    with pytest.raises(WeightError, match="w was published twice"):
        publisher.publish([("w", torch.ones(1)), ("w", torch.ones(1))], version=0)
    with pytest.raises(WeightError, match="odd is not a plain tensor"):
        publisher.publish([("odd", torch.empty(2, device="meta"))], version=0)
    assert same(copies(reader, publisher.publish(a_model().items(), version=0)), a_model())


def test_another_transports_version_is_refused(publisher: WeightTransport, reader: WeightTransport) -> None:
    manifest = publisher.publish(a_model().items(), version=0)
    for change in (
        {"transport": "elsewhere"},
        {"location": manifest.location.replace("test-", "other-")},
        {"location": f"../{manifest.location}"},
        {"location": ""},
    ):
        with pytest.raises(WeightError, match="of namespace 'test-"):
            copies(reader, msgspec.structs.replace(manifest, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"checksum": 7},
        {"name": "other"},
        {"dtype": "int32"},
        {"dtype": "nonsense"},
        {"shape": (1300, 1000)},
        {"shape": (-1,)},
        {"size_bytes": 4},
        {"offset": 0},
    ],
    ids=str,
)
def test_a_manifest_that_is_not_the_published_one_is_refused(
    publisher: WeightTransport, reader: WeightTransport, change: dict[str, Any]
) -> None:
    manifest = publisher.publish(a_model().items(), version=0)
    *others, large = manifest.tensors
    wrong = msgspec.structs.replace(manifest, tensors=(*others, msgspec.structs.replace(large, **change)))
    with pytest.raises(WeightMismatchError):
        copies(reader, wrong)
    assert same(copies(reader, manifest), a_model())


CHILD = """
import sys, msgspec, torch
from asyncrl.weights import WeightManifest
from asyncrl.weights import TransportSpec
spec = TransportSpec(**msgspec.json.decode(sys.argv[1]))
manifest = WeightManifest.decode(sys.stdin.buffer.read())
transport = spec.make()
with transport.pull(manifest) as tensors:
    print(sum(float(tensor.double().sum()) for tensor in tensors.values()))
transport.close()
"""


@pytest.mark.slow
def test_another_process_pulls(spec: TransportSpec, publisher: WeightTransport) -> None:
    model = a_model()
    manifest = publisher.publish(model.items(), version=0)
    encoded = msgspec.json.encode({"name": spec.name, "namespace": spec.namespace, "options": dict(spec.options)})
    command = [sys.executable, "-c", CHILD, encoded.decode()]
    ran = subprocess.run(command, input=manifest.encode(), capture_output=True, timeout=100, check=True)
    expected = sum(float(tensor.double().sum()) for tensor in model.values())
    assert float(ran.stdout.split()[-1]) == pytest.approx(expected)


def test_a_closed_transport_refuses(spec: TransportSpec, publisher: WeightTransport, reader: WeightTransport) -> None:
    manifest = publisher.publish(a_model().items(), version=0)
    publisher.close()
    publisher.close()
    with pytest.raises(WeightError, match="not available"):
        copies(reader, manifest)
    with pytest.raises(WeightError, match="the transport is closed"):
        publisher.publish(a_model().items(), version=1)


@pytest.mark.parametrize("namespace", ["", "a/b", "a" * 101])
def test_a_bad_namespace_is_refused(spec: TransportSpec, namespace: str) -> None:
    from asyncrl.errors import ConfigError

    with pytest.raises((ConfigError, ValueError), match="namespace"):
        TransportSpec(name=spec.name, namespace=namespace, options=spec.options).make()
