"""Weights in process groups of two: parts of ranks, and ranks that do not take part any more."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
import xxhash
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from asyncrl.errors import WeightError, WeightMismatchError
from asyncrl.weights import WeightManifest, joined
from engines.weights import collective
from engines.weights.collective import CollectiveTransport
from engines.weights.resharding import divided, whole, within
from engines.weights.transport import tensor_bytes

Make = Callable[..., CollectiveTransport]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[CollectiveTransport] = []

    def transport(**options: Any) -> CollectiveTransport:
        made.append(CollectiveTransport(namespace="test", **options))
        return made[-1]

    yield transport
    for each in made:
        each.close()


def a_model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "colwise": torch.randn(10, 6, generator=generator),
        "rowwise": torch.randn(5, 8, generator=generator).bfloat16(),
        "bias": torch.randn(3, generator=generator),
        "scalar": torch.tensor(2.5),
    }


def published(ranks: list[CollectiveTransport], version: int = 1) -> WeightManifest:
    return joined([rank.publish(a_model().items(), version=version) for rank in ranks])


def test_ranks_of_a_trainer_send_slices_to_ranks_of_an_engine(make: Make) -> None:
    model = a_model()
    manifest = published([make(rank=rank, ranks=3, bucket_bytes=512) for rank in range(3)])
    for rank in range(2):
        wanted = {name: whole(tensor.shape) for name, tensor in model.items()}
        wanted["colwise"] = divided((10, 6), 0, rank=rank, ranks=2)
        wanted["rowwise"] = divided((5, 8), 1, rank=rank, ranks=2)
        found = make().pull_regions(manifest, wanted)
        assert found.keys() == model.keys()
        for name, tensor in model.items():
            assert torch.equal(found[name], tensor[within(wanted[name], whole(tensor.shape))])


def test_the_shards_that_are_published_can_still_be_freed(make: Make) -> None:
    dist.init_process_group("fake", rank=0, world_size=1)
    try:
        model = {"alike": init_device_mesh("cpu", (1,)), "other": init_device_mesh("cpu", (1, 1))}
        shards = {
            name: DTensor.from_local(torch.arange(6.0), mesh, [*[Replicate()] * (mesh.ndim - 1), Shard(0)])
            for name, mesh in model.items()
        }
        manifest = make().publish(shards.items(), version=1)
        expected = xxhash.xxh3_64_intdigest(torch.arange(6.0).numpy().data)
        assert [entry.checksum for entry in manifest.tensors] == [expected] * 2
        assert all(shard.to_local().untyped_storage().resizable() for shard in shards.values())
    finally:
        dist.destroy_process_group()


def sharded_model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"large": (600, 4), "nothing": (0, 4), "row": (1, 7), **{f"bias.{n}": (n,) for n in range(1, 20)}}
    model = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return model | {"half": torch.randn(3, 5, generator=generator).bfloat16()}


def publish_shards(rank: int, store: Store) -> dict[str, tuple[list[WeightManifest], int, int]]:
    """Publish two versions as one of two ranks, beside a group that sends from hosts and one that does not.

    Return the manifests, and how many messages and groups there were.
    """
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    receive, new_group = dist.recv, dist.new_group
    counts = {"messages": 0, "groups": 0}

    def counted(what: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        counts[what] += 1
        return function(*arguments, **options)

    found = {}
    for backend in ("gloo", "nccl"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "get_backend", lambda _, backend=backend: backend)
            patch.setattr(dist, "recv", partial(counted, "messages", receive))
            patch.setattr(dist, "new_group", partial(counted, "groups", new_group))
            transport = CollectiveTransport(namespace="test", rank=rank, ranks=2, bucket_bytes=8 * 512)
            manifests = []
            for version in (1, 2):
                tensors = {
                    name: DTensor.from_local(
                        tensor[within(divided(tensor.shape, 0, rank=rank, ranks=2), whole(tensor.shape))],
                        mesh,
                        [Shard(0)],
                        shape=tensor.shape,
                        stride=tensor.stride(),
                    )
                    for name, tensor in sharded_model().items()
                }
                manifests.append(transport.publish(tensors.items(), version=version))
            transport.close()
        found[backend] = manifests, counts["messages"], counts["groups"]
        counts |= {"messages": 0, "groups": 0}
    dist.destroy_process_group()
    return found


def test_what_ranks_shard_is_hashed_from_host_to_host_in_few_messages() -> None:
    store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    with subprocess.Popen([sys.executable, __file__, str(store.port)]) as other:
        try:
            found = publish_shards(0, store)
            assert other.wait(60.0) == 0
        finally:
            other.kill()
    expected = {name: xxhash.xxh3_64_intdigest(tensor_bytes(name, each)) for name, each in sharded_model().items()}
    for backend, groups in (("gloo", 0), ("nccl", 1)):
        manifests, messages, made = found[backend]
        for manifest in manifests:
            assert {entry.name: entry.checksum for entry in manifest.tensors} == expected
        # 4,800 bytes of one tensor, 512 at a time, and those of all others together, for each version.
        assert (messages, made) == (2 * (10 + 1), groups)


def test_each_rank_holds_its_rows_alone(make: Make) -> None:
    ranks = [make(rank=rank, ranks=2) for rank in range(2)]
    published(ranks)
    shapes = []
    for rank in ranks:
        assert rank._sender is not None
        _, parts = rank._sender.versions[1]
        shapes.append([tuple(part.tensor.shape) for part in parts.values()])
    assert shapes == [[(5, 6), (3, 8), (2,), ()], [(5, 6), (2, 8), (1,), (0,)]]


def test_a_trainer_rank_that_is_gone_is_named(make: Make) -> None:
    ranks = [make(rank=rank, ranks=2) for rank in range(2)]
    manifest = published(ranks)
    ranks[1].close()
    with pytest.raises(WeightError, match="version 1 is not available: trainer rank 1 of 2"):
        make()._read(manifest)


def test_a_trainer_rank_that_does_not_answer_is_named_at_the_deadline(make: Make) -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    location = f"test.{'0' * 32}/1@127.0.0.1:{silent.getsockname()[1]}"
    manifest = published([make()])
    manifest = msgspec.structs.replace(manifest, location=f"{manifest.location} {location}")
    with pytest.raises(WeightError, match=r"trainer rank 1 of 2 \(127.0.0.1:\d+\) did not send its part within 0.3 s"):
        make(deadline_s=0.3)._read(manifest)
    silent.close()


def test_an_engine_that_stops_taking_is_named_and_others_are_served(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    large = {"large": torch.randn(1 << 22)}  # more than the sockets between two processes hold
    publisher = make(deadline_s=1.0)
    manifest = publisher.publish(large.items(), version=1)
    key, _, rest = manifest.location.partition("/")
    regions = [("large", whole((1 << 22,)))]
    order = collective._Order(version=1, digest=manifest.digest, taker="process 7 of here", regions=regions)
    deadline = collective._Deadline(20.0)
    connection = socket.create_connection(("127.0.0.1", int(rest.rpartition(":")[2])))
    connection.sendall(key.encode())
    meeting = collective._Meeting(connection, deadline)
    meeting.set("order", msgspec.msgpack.encode(order))
    meeting.get("answer")
    group = collective._group(meeting, 1, "127.0.0.1", deadline)  # it never receives
    (waiting,) = [each for each in threading.enumerate() if each.name == "weights for process 7 of here"]
    with make().pull(manifest) as tensors:
        assert torch.equal(tensors["large"], large["large"])
    with caplog.at_level(logging.WARNING):
        waiting.join()
    assert "process 7 of here did not take its part of version 1 within 1 s" in caplog.text
    del group
    connection.close()


def test_strangers_get_nothing_and_no_more_than_so_many_threads(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "_MOST_CONNECTIONS", 2)
    manifest = make(deadline_s=5.0).publish(a_model().items(), version=1)
    address = ("127.0.0.1", int(manifest.location.rpartition(":")[2]))
    key, _, _ = manifest.location.partition("/")
    with socket.create_connection(address) as connection:
        connection.sendall(b"0" * len(key) + b"more" * 1000)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    connect = partial(socket.create_connection, address)
    with connect(), connect(), connect() as third:
        third.settimeout(20.0)
        assert third.recv(1) == b""


def test_what_is_damaged_on_its_way_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = published([make()])
    group = collective._group

    class Noisy:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def send(self, data: list[torch.Tensor], rank: int, tag: int) -> Any:
            return self._inner.send(data, rank, tag)

        def recv(self, data: list[torch.Tensor], rank: int, tag: int) -> Any:
            self._inner.recv(data, rank, tag).wait(timedelta(seconds=10))
            data[0][0] ^= 1
            return self

        def wait(self, _: timedelta) -> None: ...

    monkeypatch.setattr(collective, "_group", lambda *arguments: Noisy(group(*arguments)))
    with pytest.raises(WeightMismatchError, match=r"version 1 from 127.0.0.1:.* was damaged on its way"):
        make().pull_regions(manifest, {"bias": whole((3,))})


def test_what_a_trainer_rank_does_not_hold_is_refused(make: Make) -> None:
    one, other = (make(rank=rank, ranks=2) for rank in range(2))
    first, second = (rank.publish(a_model().items(), version=1) for rank in (one, other))
    swapped = msgspec.structs.replace(first, location=f"{second.location} {first.location}")
    with pytest.raises(WeightMismatchError, match="version 1 is not the manifest's"):
        make()._read(swapped)


CHILD = """
import sys, torch
from engines.weights.collective import CollectiveTransport
transport = CollectiveTransport(namespace="test", rank=1, ranks=2)
manifest = transport.publish([("large", torch.ones(1 << 16, 16))], version=1)
print(manifest.encode().hex(), flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_rank_in_another_process_is_stopped_or_killed(make: Make, number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        try:
            there = WeightManifest.decode(bytes.fromhex(child.stdout.readline().decode()))
            here = make(rank=0, ranks=2).publish([("large", torch.ones(1 << 16, 16))], version=1)
            manifest = joined([here, there])
            with make(deadline_s=2.0).pull(manifest) as tensors:
                assert bool((tensors["large"] == 1).all())
            os.kill(child.pid, number)
            with pytest.raises(WeightError, match="trainer rank 1 of 2"):
                make(deadline_s=2.0)._read(manifest)
        finally:
            child.kill()


if __name__ == "__main__":
    publish_shards(1, TCPStore("127.0.0.1", int(sys.argv[1]), 2, is_master=False))
