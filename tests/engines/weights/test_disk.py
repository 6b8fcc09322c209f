"""Weights through a folder: what a crash leaves, what damage is noticed, and that others can read a version."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.errors import ConfigError, WeightError, WeightMismatchError
from asyncrl.weights import WeightManifest
from engines.weights import disk
from engines.weights.disk import DiskTransport


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[DiskTransport]:
    transport = DiskTransport(namespace="test", directory=str(tmp_path))
    yield transport
    transport.close()


def a_model(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{n}": torch.randn(n + 1, 7, generator=generator) for n in range(6)}


def copies(transport: DiskTransport, manifest: WeightManifest) -> dict[str, torch.Tensor]:
    with transport.pull(manifest) as tensors:
        return dict(tensors)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1))
def test_any_damage_is_noticed(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    transport = DiskTransport(namespace="test", directory=str(tmp_path), shard_size_bytes=draw.choice([1, 200, 9000]))
    try:
        model = a_model(seed)
        manifest = transport.publish(model.items(), version=draw.randint(0, 9))
        files = [path for path in (tmp_path / manifest.location).iterdir() if path.name != "manifest.msgpack"]
        path = draw.choice(sorted(files))
        data = bytearray(path.read_bytes())
        damage = draw.choice(["flip", "flip", "truncate", "extend", "empty", "missing"])
        if damage == "flip":
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        elif damage == "truncate":
            del data[draw.randrange(len(data)) :]
        elif damage == "extend":
            data += bytes(draw.randint(1, 100))
        elif damage == "empty":
            data.clear()
        path.unlink() if damage == "missing" else path.write_bytes(data)
        try:
            pulled = copies(transport, manifest)
        except WeightMismatchError:
            assert damage != "missing"
        except WeightError:
            assert damage == "missing" or path.name.endswith("index.json")
        else:  # a byte of the files' own metadata, on which no tensor depends
            assert path.name not in ("complete",)
            assert all(torch.equal(pulled[name], model[name]) for name in model)
    finally:
        transport.close()


def test_a_version_is_a_folder_that_transformers_can_load(transport: DiskTransport, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    manifest = transport.publish(model.named_parameters(), version=4)
    folder = tmp_path / manifest.location
    config.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))


OWNER = """
import os, signal, sys, torch
from engines.weights.disk import DiskTransport
transport = DiskTransport(namespace="run-1.5", directory=sys.argv[1])
transport.publish([("w", torch.arange(100.0))], version=0)
def tensors():
    yield "w", torch.ones(100)
    if sys.argv[2] == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
transport.publish(tensors(), version=1)
print("published", flush=True)
sys.stdin.read()
"""


def an_owner(tmp_path: Path, how: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


@pytest.mark.slow
def test_what_a_dead_publisher_left_is_removed_and_what_a_living_one_has_is_not(tmp_path: Path) -> None:
    with an_owner(tmp_path, "dies") as owner:
        assert owner.wait() == -signal.SIGKILL
    (dead,) = tmp_path.iterdir()
    assert sorted(path.name for path in dead.iterdir()) == [".1.partial", "0", "owner"]
    elsewhere = tmp_path / "asyncrl.test.another-host.17.0123abcd"
    elsewhere.mkdir()
    (elsewhere / "owner").touch()
    with an_owner(tmp_path, "lives") as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"published\n"
        assert not dead.exists()
        (alive,) = set(tmp_path.iterdir()) - {elsewhere}
        other = DiskTransport(namespace="test", directory=str(tmp_path))
        other.publish(a_model().items(), version=0)
        assert alive.exists()
        owner.communicate()
    assert not alive.exists(), "an interpreter that ends leaves nothing"
    other.close()
    assert list(tmp_path.iterdir()) == [elsewhere], "the other machine's publisher may be alive"


HANGING = """
import shutil, sys, threading, torch
import engines.weights.transport
from engines.weights.disk import DiskTransport
engines.weights.transport._REMOVING_S = 0.1
real = shutil.rmtree
shutil.rmtree = lambda path, **_: real(path, **_) if path.name.startswith(".") else threading.Event().wait()
transport = DiskTransport(namespace="run", directory=sys.argv[1])
for version in range(2):
    transport.publish([("w", torch.arange(100.0))], version=version)
transport.release(0)
print("released", flush=True)
"""


@pytest.mark.slow
def test_a_share_that_hangs_does_not_hold_the_end_of_an_interpreter(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", HANGING, str(tmp_path)], capture_output=True, timeout=60, check=True)
    assert ran.stdout == b"released\n"


def test_a_folder_that_is_purged_before_its_owner_has_locked_it_is_made_again(
    transport: DiskTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = fcntl.flock
    purged: list[Path] = []

    def purge_first(descriptor: int, operation: int) -> None:
        if not purged:
            purged.extend(tmp_path.iterdir())
            shutil.rmtree(purged[0])
        locked(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", purge_first)
    manifest = transport.publish(a_model().items(), version=0)
    assert copies(transport, manifest).keys() == a_model().keys()
    assert [path.name for path in tmp_path.iterdir()] == [manifest.location.partition("/")[0]]
    assert not purged[0].exists()


def test_a_missing_directory_is_an_error(transport: DiskTransport, tmp_path: Path) -> None:
    tmp_path.rmdir()
    with pytest.raises(WeightError, match=r"version 0 cannot be written to .*No such file"):
        transport.publish(a_model().items(), version=0)
    tmp_path.mkdir()


def test_a_forked_child_leaves_its_parents_folder_alone(transport: DiskTransport) -> None:
    manifest = transport.publish(a_model().items(), version=0)
    child = os.fork()
    if child == 0:
        try:
            transport.close()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert copies(transport, manifest).keys() == a_model().keys()


def test_a_full_disk_is_an_error_and_leaves_nothing(
    transport: DiskTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("engines.weights.disk.save_file", full)
        with pytest.raises(WeightError, match=r"version 0 cannot be written to .*No space left"):
            transport.publish(a_model().items(), version=0)
    assert [path.name for home in tmp_path.iterdir() for path in home.iterdir()] == ["owner"]
    transport.publish(a_model().items(), version=0)


def test_a_dtype_that_safetensors_does_not_support_is_refused(transport: DiskTransport) -> None:
    with pytest.raises(WeightError, match=r"safetensors cannot store these tensors \(torch.complex128"):
        transport.publish([("w", torch.ones(3, dtype=torch.complex128))], version=0)


def test_a_reader_maps_no_file(transport: DiskTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another machine removes a mapped file of a network file system, the next page fault kills the reader."""
    manifest = transport.publish(a_model().items(), version=0)
    check, mapped = disk.check_tensors, list[str]()

    def noted(*given: Any, **options: Any) -> None:
        mapped.append(Path("/proc/self/maps").read_text())
        check(*given, **options)

    monkeypatch.setattr(disk, "check_tensors", noted)
    assert copies(transport, manifest).keys() == a_model().keys()
    assert ["model-00001" in each for each in mapped] == [False]


def test_shards_outside_of_the_folder_are_not_read(transport: DiskTransport, tmp_path: Path) -> None:
    manifest = transport.publish(a_model().items(), version=0)
    index = tmp_path / manifest.location / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001", "../0/model-00001"))
    with pytest.raises(WeightMismatchError, match="is not a file of this folder"):
        copies(transport, manifest)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"directory": "/nowhere"}, ConfigError),
        ({"max_versions": 0}, ValueError),
        ({"shard_size_bytes": 0}, ValueError),
        ({"namespace": "a/b"}, ValueError),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(tmp_path: Path, change: dict[str, Any], error: type[Exception]) -> None:
    make: Callable[..., DiskTransport] = DiskTransport
    with pytest.raises(error, match="|".join(change)):
        make(**{"namespace": "test", "directory": str(tmp_path), **change})
