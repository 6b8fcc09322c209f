"""Weights through shared memory: what arrives is what was published, and whatever is damaged is refused."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import random
import signal
import stat
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.errors import ConfigError, WeightError, WeightMismatchError, WeightVersionError
from asyncrl.weights import WeightManifest, WeightTransport
from engines.weights import shared_memory as version_file
from engines.weights.shared_memory import SharedMemoryTransport

QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}  # need more than their bytes
DTYPES = sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)} - QUANTIZED, key=str)


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[SharedMemoryTransport]:
    transport = SharedMemoryTransport(namespace="test", directory=str(tmp_path))
    yield transport
    transport.close()


def a_model(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "matrix": torch.randn(7, 5, generator=generator),
        "half": torch.randn(33, generator=generator).bfloat16(),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "flags": torch.tensor([True, False, True]),
    }


def copies(transport: SharedMemoryTransport, manifest: WeightManifest) -> dict[str, torch.Tensor]:
    with transport.pull(manifest) as tensors:
        return {name: tensor.clone() for name, tensor in tensors.items()}


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    def octets(tensor: torch.Tensor) -> bytes:
        return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    return one.dtype == other.dtype and one.shape == other.shape and octets(one) == octets(other)


def test_it_keeps_the_contract(tmp_path: Path):
    transport: WeightTransport = SharedMemoryTransport(namespace="test", directory=str(tmp_path))
    transport.close()


def test_what_is_published_is_pulled(transport: SharedMemoryTransport):
    model = a_model()
    manifest = transport.publish(model.items(), version=0)
    pulled = copies(transport, WeightManifest.decode(manifest.encode()))
    assert list(pulled) == list(model)
    assert all(same_bytes(pulled[name], model[name]) for name in model)
    assert all(entry.offset % 64 == 0 for entry in manifest.tensors)
    assert manifest.size_bytes == 7 * 5 * 4 + 33 * 2 + 8 + 0 + 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_bit_for_bit(transport: SharedMemoryTransport, dtype: torch.dtype):
    octets = torch.arange(256, dtype=torch.int64).to(torch.uint8)
    tensor = (octets % 2 if dtype is torch.bool else octets).view(dtype)
    with transport.pull(transport.publish([("x", tensor)], version=0)) as tensors:
        assert same_bytes(tensors["x"], tensor)


def test_layouts_that_are_not_row_major_are_put_in_order(transport: SharedMemoryTransport):
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "transposed": base.t(),
        "strided": base[::2, 1::2],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "parameter": torch.nn.Parameter(torch.ones(3)),
    }
    pulled = copies(transport, transport.publish(tensors.items(), version=0))
    for name, tensor in tensors.items():
        assert torch.equal(pulled[name], tensor.detach()), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
def test_tensors_of_a_device_arrive_on_the_host(transport: SharedMemoryTransport):
    """In chunks of 4 MiB, through pinned memory; more batches than threads, each of tensors that nothing else holds."""
    tensors = {
        "small": torch.randn(1000, 3, device="cuda"),
        "transposed": torch.randn(1501, 1003, device="cuda").t(),
        **{str(number): torch.randn(2_500_000 + number, device="cuda") for number in range(12)},
    }
    expected = {name: tensor.bfloat16().cpu() for name, tensor in tensors.items()}
    for version in range(2):
        published = ((name, tensor.bfloat16()) for name, tensor in tensors.items())
        found = copies(transport, transport.publish(published, version=version))
        transport.release(version)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(2, device="meta"),
        torch.eye(2).to_sparse(),
        torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
    ],
    ids=["meta", "sparse", "nested"],
)
def test_a_tensor_without_plain_data_is_refused_and_nothing_is_left(
    transport: SharedMemoryTransport, tmp_path: Path, tensor: torch.Tensor
):
    with pytest.raises(WeightError, match="odd is not a plain tensor"):
        transport.publish([("fine", torch.ones(2)), ("odd", tensor)], version=0)
    assert list(tmp_path.iterdir()) == []
    assert transport.publish([("fine", torch.ones(2))], version=0).version == 0


def test_a_name_published_twice_is_refused(transport: SharedMemoryTransport):
    with pytest.raises(WeightError, match="tensor w was published twice"):
        transport.publish([("w", torch.ones(1)), ("w", torch.ones(1))], version=0)


def test_versions_grow_and_only_so_many_are_held(transport: SharedMemoryTransport):
    transport.publish(a_model().items(), version=3)
    with pytest.raises(WeightVersionError, match="3 cannot be published after 3"):
        transport.publish(a_model().items(), version=3)
    transport.publish(a_model().items(), version=7)
    with pytest.raises(WeightError, match=r"2 versions are held \(3, 7\); release one first"):
        transport.publish(a_model().items(), version=8)
    transport.release(3)
    transport.release(3)
    transport.publish(a_model().items(), version=8)
    assert transport.versions == (7, 8)


def test_a_released_version_is_gone(transport: SharedMemoryTransport):
    manifest = transport.publish(a_model().items(), version=0)
    transport.release(0)
    with pytest.raises(WeightError, match="version 0 is not available"):
        copies(transport, manifest)


def test_memory_is_used_again_and_old_bytes_never_show(transport: SharedMemoryTransport, tmp_path: Path):
    large = {"w": torch.full((50,), 255, dtype=torch.uint8), "v": torch.full((300,), 255, dtype=torch.uint8)}
    small = {"w": torch.ones(3, dtype=torch.uint8), "v": torch.ones(65, dtype=torch.uint8)}
    transport.publish(large.items(), version=0)
    (inode,) = [path.stat().st_ino for path in tmp_path.iterdir()]
    transport.release(0)
    manifest = transport.publish(small.items(), version=1)
    assert [path.stat().st_ino for path in tmp_path.iterdir()] == [inode]
    pulled = copies(transport, manifest)
    assert all(torch.equal(pulled[name], small[name]) for name in small)


def test_a_version_that_is_still_read_is_not_written_over(transport: SharedMemoryTransport):
    manifest = transport.publish([("w", torch.zeros(1000))], version=0)
    with transport.pull(manifest) as tensors:
        transport.release(0)
        transport.publish([("w", torch.ones(1000))], version=1)
        assert not tensors["w"].any()


def test_a_reader_that_locks_only_after_the_release_finds_nothing(
    transport: SharedMemoryTransport, monkeypatch: pytest.MonkeyPatch
):
    manifest = transport.publish([("w", torch.zeros(1000))], version=0)
    opened = os.open

    def open_and_dawdle(path: Path, flags: int, mode: int = 0o777) -> int:
        descriptor = opened(path, flags, mode)
        transport.release(0)  # the file may be written again from here on
        return descriptor

    monkeypatch.setattr(os, "open", open_and_dawdle)
    with pytest.raises(WeightMismatchError, match="is incomplete, or not the manifest's"):
        copies(transport, manifest)


def test_writing_to_a_pulled_tensor_changes_no_other(transport: SharedMemoryTransport):
    manifest = transport.publish([("w", torch.zeros(1000))], version=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with transport.pull(manifest) as tensors:
            tensors["w"].fill_(9)
    assert not copies(transport, manifest)["w"].any()


def test_tensors_that_outlive_their_block_are_safe_and_reported(transport: SharedMemoryTransport):
    manifest = transport.publish([("w", torch.arange(9.0)), ("v", torch.arange(5.0))], version=0)
    with (
        pytest.warns(RuntimeWarning, match="2 tensors of weight version 0 outlive"),
        transport.pull(manifest) as tensors,
    ):
        kept = dict(tensors)
    assert dict(tensors) == {}
    transport.release(0)
    transport.publish([("w", torch.zeros(9)), ("v", torch.zeros(5))], version=1)
    transport.close()
    gc.collect()
    assert torch.equal(kept["w"], torch.arange(9.0))


def test_a_version_in_a_file_that_was_read_before_needs_no_new_map(
    transport: SharedMemoryTransport, monkeypatch: pytest.MonkeyPatch
):
    maps = []
    monkeypatch.setattr(mmap, "mmap", lambda *a, made=mmap.mmap, **k: maps.append(a) or made(*a, **k))
    reader = SharedMemoryTransport(namespace="test", directory=str(transport.directory))
    for version in range(8):  # two files take turns; each is mapped once by the reader, and once by the publisher
        tensors = {"w": torch.full((5000,), version), "v": torch.full((3,), -version)}
        pulled = copies(reader, transport.publish(tensors.items(), version=version))
        assert all(torch.equal(pulled[name], tensors[name]) for name in tensors)
        transport.release(version - 1)
    assert len(maps) == 4


def test_what_was_written_into_a_kept_map_is_not_taken_for_the_next_version(transport: SharedMemoryTransport):
    for version in range(6):
        manifest = transport.publish([("w", torch.full((5000,), version))], version=version)
        for _ in range(2):
            with transport.pull(manifest) as tensors:
                assert (tensors["w"] == version).all()
                tensors["w"][version * 700] = -1  # another page each time
        transport.release(version - 1)


def test_damage_is_noticed_through_a_kept_map_too(transport: SharedMemoryTransport):
    manifest = transport.publish([("w", torch.zeros(5000))], version=0)
    copies(transport, manifest)
    with (transport.directory / manifest.location).open("r+b") as file:
        file.seek(3000)
        file.write(b"x")
    with pytest.raises(WeightMismatchError, match="1 of 1 tensors differ"):
        copies(transport, manifest)


def test_readers_of_one_version_do_not_see_each_other_s_writes(transport: SharedMemoryTransport):
    manifest = transport.publish([("w", torch.zeros(5000))], version=0)
    with transport.pull(manifest) as one, transport.pull(manifest) as other:
        one["w"].fill_(1)
        assert not other["w"].any()
    for _ in range(2):
        assert not copies(transport, manifest)["w"].any()


def test_a_file_that_is_gone_is_not_kept_in_memory(transport: SharedMemoryTransport, tmp_path: Path):
    reader = SharedMemoryTransport(namespace="test", directory=str(tmp_path))

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count(f"{tmp_path}/")

    first = transport.publish([("w", torch.zeros(5000))], version=0)
    with reader.pull(first):
        transport.release(0)  # still read: unlinked
    assert mapped() == 1
    copies(reader, transport.publish([("w", torch.ones(5000))], version=1))
    assert mapped() == 1
    reader.close()
    assert mapped() == 0


def test_a_child_does_not_end_its_parent_s_reading(transport: SharedMemoryTransport):
    manifest = transport.publish([("w", torch.zeros(5000))], version=0)
    with transport.pull(manifest) as tensors:
        child = os.fork()
        if child == 0:
            try:
                dict.clear(gc.get_referents(tensors)[0])  # type: ignore[arg-type]
                gc.collect()
                copies(transport, manifest)
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        transport.release(0)
        transport.publish([("w", torch.ones(5000))], version=1)
        assert not tensors["w"].any()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.lists(st.integers(0, 70_000), max_size=6), min_size=1, max_size=8),
    held=st.sets(st.integers(0, 7)),
    batch_bytes=st.sampled_from([1, 4096, 16 << 20]),
)
def test_versions_of_any_size_follow_each_other_in_the_same_files(
    tmp_path: Path, sizes: list[list[int]], held: set[int], batch_bytes: int
):
    """Smaller and larger ones, some still read when they are released."""
    transport = SharedMemoryTransport(namespace="test", directory=str(tmp_path))
    reader = SharedMemoryTransport(namespace="test", directory=str(tmp_path))
    rng = np.random.default_rng(len(sizes))
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as readings:
        patch.setattr(version_file, "_BATCH_SIZE_BYTES", batch_bytes)
        read: list[tuple[dict[str, torch.Tensor], Mapping[str, torch.Tensor]]] = []
        for version, each in enumerate(sizes):
            tensors = {str(i): torch.from_numpy(rng.integers(0, 255, n, np.uint8)) for i, n in enumerate(each)}
            manifest = transport.publish(tensors.items(), version=version)
            pulled = copies(reader, manifest)
            assert list(pulled) == list(tensors)
            assert all(torch.equal(pulled[name], tensors[name]) for name in tensors)
            if version in held:
                read.append((tensors, readings.enter_context(reader.pull(manifest))))
            transport.release(version - 1)
            for expected, seen in read:
                assert all(torch.equal(seen[name], expected[name]) for name in expected)
        pulled, expected, seen = {}, {}, {}
    transport.close()
    reader.close()
    assert list(tmp_path.iterdir()) == []


def test_files_are_private_and_unlinked_on_close(tmp_path: Path):
    transport = SharedMemoryTransport(namespace="run-1.5", directory=str(tmp_path))
    for version in (0, 1):
        manifest = transport.publish(a_model().items(), version=version)
    transport.release(0)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
    transport.close()
    transport.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(WeightError, match="not available"):
        copies(transport, manifest)
    with pytest.raises(WeightError, match="the transport is closed"):
        transport.publish(a_model().items(), version=2)


def test_a_full_memory_file_system_is_an_error_with_a_remedy(
    transport: SharedMemoryTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(WeightError, match="--shm-size"):
        transport.publish(a_model().items(), version=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("full", [False, True])
def test_a_few_tensors_are_held_at_a_time(
    transport: SharedMemoryTransport, monkeypatch: pytest.MonkeyPatch, full: bool
):
    monkeypatch.setattr(version_file, "_BATCH_SIZE_BYTES", 1)  # a tensor is a batch
    made: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for number in range(20):
            tensor = torch.ones(100)
            made.append(weakref.ref(tensor))
            most = max(most, sum(each() is not None for each in made))
            yield f"w{number}", tensor

    written = os.pwrite

    def slow(descriptor: int, data: memoryview, offset: int) -> int:
        time.sleep(0.005)
        if full:
            raise OSError(28, "No space left on device")
        return written(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", slow)
    with pytest.raises(WeightError, match="--shm-size") if full else contextlib.nullcontext():
        transport.publish(gathered(), version=0)
    assert most <= 5  # four, and the one that is being made
    assert len(made) <= 5 if full else len(made) == 20, "one that cannot be written ends it at once"


def test_other_transports_namespaces_and_paths_are_refused(transport: SharedMemoryTransport, tmp_path: Path):
    manifest = transport.publish(a_model().items(), version=0)
    for change in (
        {"transport": "disk"},
        {"location": manifest.location.replace("test", "other")},
        {"location": f"../{tmp_path.name}/{manifest.location}"},
        {"location": f"{manifest.location}\0"},
    ):
        with pytest.raises(WeightError, match="not in the shared memory of namespace 'test'"):
            copies(transport, msgspec.structs.replace(manifest, **change))


OWNER = """
import sys, torch
from engines.weights import shared_memory as version_file
from engines.weights.shared_memory import SharedMemoryTransport
transport = SharedMemoryTransport(namespace="test", directory=sys.argv[1])
manifest = transport.publish([("w", torch.arange(100.0))], version=0)
sys.stdout.buffer.write(manifest.encode())
sys.stdout.flush()
sys.stdin.read()
"""


def an_owner(tmp_path: Path) -> subprocess.Popen[bytes]:
    """Another process that holds version 0 until its standard input is closed."""
    return subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def die(tmp_path: Path, *, half_way: bool, namespace: str = "test") -> None:
    """A child that publishes version 0 and is killed in the middle of it, or afterwards."""

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name in "abc" if half_way else "w":
            yield name, torch.arange(100.0)
        if half_way:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        try:
            transport = SharedMemoryTransport(namespace=namespace, directory=str(tmp_path))
            transport.publish(tensors(), version=0)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def test_another_process_s_version_lives_as_long_as_it_does_and_is_purged_afterwards(
    transport: SharedMemoryTransport, tmp_path: Path
):
    with an_owner(tmp_path) as owner:
        assert owner.stdout is not None
        manifest = WeightManifest.decode(os.read(owner.stdout.fileno(), 1 << 16))
        assert transport.purge_stale() == ()
        with transport.pull(manifest) as tensors:
            assert torch.equal(tensors["w"], torch.arange(100.0))
            owner.kill()
            owner.wait()
            assert transport.purge_stale() == (), "it is still read here"
        del tensors
        gc.collect()
        assert transport.purge_stale() == (manifest.location,)
    assert list(tmp_path.iterdir()) == []


def test_an_interpreter_that_ends_leaves_nothing(tmp_path: Path):
    with an_owner(tmp_path) as owner:
        assert owner.communicate()[0]
    assert list(tmp_path.iterdir()) == []


def test_an_owner_that_dies_half_way_leaves_nothing_complete_and_the_next_one_cleans_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(version_file, "_BATCH_SIZE_BYTES", 1)
    die(tmp_path, half_way=True)
    (unfinished,) = tmp_path.iterdir()
    assert ".new-" in unfinished.name
    assert not any(unfinished.read_bytes()[:64]), "what is not whole has no header"
    die(tmp_path, half_way=False, namespace="another-run.2")
    (published,) = tmp_path.iterdir()  # the second owner removed what the first had left
    assert published.name.startswith("asyncrl.another-run.2.")
    foreign = tmp_path / "asyncrl.notes.1.txt"
    foreign.write_text("not a transport's file")
    SharedMemoryTransport(namespace="test", directory=str(tmp_path)).close()
    assert list(tmp_path.iterdir()) == [foreign]


def test_a_forked_child_leaves_its_parent_s_files_alone(transport: SharedMemoryTransport):
    manifest = transport.publish(a_model().items(), version=0)
    child = os.fork()
    if child == 0:
        try:
            transport.close()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert set(copies(transport, manifest)) == set(a_model())


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1))
def test_any_damage_is_detected(tmp_path: Path, seed: int):
    draw = random.Random(seed)
    transport = SharedMemoryTransport(namespace="test", directory=str(tmp_path))
    try:
        manifest = transport.publish(a_model(seed).items(), version=draw.randint(0, 9))
        path = tmp_path / manifest.location
        damage = draw.choice(["flip", "flip", "truncate", "extend", "zero", "swap", "missing", "entry"])
        data = bytearray(path.read_bytes())
        if damage == "flip":
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        elif damage == "truncate":
            del data[draw.randrange(len(data)) :]
        elif damage == "extend":
            data += bytes(draw.randint(1, 100))
        elif damage == "zero":
            start = draw.randrange(64)  # at least a part of the header
            data[start : start + 64] = bytes(64)
        elif damage == "swap":
            data[:64], data[64:128] = data[64:128], data[:64]
        if damage == "missing":
            path.unlink()
        elif damage == "entry":
            entries = list(manifest.tensors)
            index = draw.randrange(len(entries))
            change = draw.choice(
                [
                    {"name": "other"},
                    {"dtype": "int32"},
                    {"dtype": "nonsense"},
                    {"dtype": "Tensor"},
                    {"shape": (*entries[index].shape, 1)},
                    {"shape": (-1,)},
                    {"offset": entries[index].offset + 64},
                    {"offset": entries[index].offset - 1},
                    {"size_bytes": entries[index].size_bytes + 1},
                    {"checksum": entries[index].checksum ^ 1},
                ]
            )
            entries[index] = msgspec.structs.replace(entries[index], **change)
            if draw.random() < 0.2:
                del entries[draw.randrange(len(entries))]
            manifest = msgspec.structs.replace(manifest, tensors=tuple(entries))
        else:
            path.write_bytes(data)
        expected = WeightError if damage == "missing" else WeightMismatchError
        with pytest.raises(expected):
            copies(transport, manifest)
    finally:
        transport.close()


@pytest.mark.parametrize(
    "arguments", [{"namespace": ""}, {"namespace": "a/b"}, {"namespace": "a", "max_versions": 0}], ids=str
)
def test_bad_arguments_are_refused(arguments: dict):
    with pytest.raises(ValueError, match=r"namespace|max_versions"):
        SharedMemoryTransport(**arguments)


def test_without_a_directory_it_uses_shared_memory():
    transport = SharedMemoryTransport(namespace=f"test-{os.getpid()}")
    try:
        manifest = transport.publish(a_model().items(), version=0)
        assert (transport.directory / manifest.location).exists()
        assert same_bytes(copies(transport, manifest)["matrix"], a_model()["matrix"])
    finally:
        transport.close()


def test_a_missing_directory_is_an_error_at_once(tmp_path):
    with pytest.raises(ConfigError, match="no such folder") as caught:
        SharedMemoryTransport(namespace="run", directory=str(tmp_path / "absent"))
    assert caught.value.path == "weights.options.directory"
