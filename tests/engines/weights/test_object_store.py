"""Weights through Ray's object store: without a cluster, and when the publisher is gone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from asyncrl.errors import WeightError
from engines.weights.object_store import ObjectStoreTransport

PROGRAM = """
import ray, torch
from asyncrl.errors import WeightError
from engines.weights.object_store import ObjectStoreTransport

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

@ray.remote(num_cpus=0)
class Trainer:
    def __init__(self):
        self.transport = ObjectStoreTransport(namespace="run")

    def publish(self, version):
        return self.transport.publish([("w", torch.full((1000,), float(version)))], version=version).encode()

from asyncrl.weights import WeightManifest
trainer = Trainer.remote()
reader = ObjectStoreTransport(namespace="run")
manifest = WeightManifest.decode(ray.get(trainer.publish.remote(3)))
with reader.pull(manifest) as tensors:
    print(set(tensors["w"].tolist()))
    ray.kill(trainer)
    print(tensors["w"].sum().item())
import time
for _ in range(100):
    try:
        with reader.pull(manifest):
            time.sleep(0.1)
    except WeightError as error:
        print("not available in Ray's object store" in str(error))
        break
"""


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(200)
def test_the_versions_of_a_publisher_that_died_are_gone_and_what_was_read_stays() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=180, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.split() == ["{3.0}", "3000.0", "True"]


NODES = """
import ray, torch
from ray.cluster_utils import Cluster
from engines.weights.object_store import ObjectStoreTransport

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
for _ in range(2):
    cluster.add_node(num_cpus=1)
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")

def node_of(index):
    return ray.get(index.__ray_call__.remote(lambda self: ray.get_runtime_context().get_node_id()))

def values(manifest):
    with ObjectStoreTransport(namespace="run").pull(manifest) as tensors:
        return [sorted(set(tensor.tolist())) for tensor in tensors.values()]

publishers = [ObjectStoreTransport(namespace="run", delta=True) for _ in range(5)]
for each in publishers:
    first = each.publish([("w", torch.full((1000,), 3.0))], version=3)
print({node_of(each._index) for each in publishers} == {ray.get_runtime_context().get_node_id()})

ray.kill(each._index)
changed = torch.full((1000,), 3.0)
changed[0] = 4.0
second = each.publish([("w", changed)], version=4)
print(len(second.chain), values(first), values(second))
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(200)
def test_the_index_is_beside_its_publisher_and_is_made_again_with_all_versions() -> None:
    ran = subprocess.run([sys.executable, "-c", NODES], capture_output=True, text=True, timeout=180, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.splitlines() == ["True", "2 [[3.0]] [[3.0, 4.0]]"]


@pytest.mark.slow
def test_without_a_cluster_the_error_names_the_remedy() -> None:
    program = "import pytest, sys; from tests.engines.weights import test_object_store as t; t.alone()"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]


def alone() -> None:
    transport = ObjectStoreTransport(namespace="run")
    with pytest.raises(WeightError, match="'object_store' needs Ray, and this process belongs to no cluster"):
        transport.publish([("w", torch.ones(2))], version=0)
    transport.close()


@pytest.mark.parametrize("change", [{"max_versions": 0}, {"batch_size_bytes": 0}, {"namespace": "a b"}], ids=str)
def test_bad_arguments_are_refused(change: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        ObjectStoreTransport(**{"namespace": "run", **change})


ELSEWHERE = """
import asyncio, sys
import ray, torch
from asyncrl.weights import TransportSpec
from engines.rollout.remote.engine import RemoteEngine

async def main():
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    spec = TransportSpec(name="object_store", namespace="run", options={})
    publisher = spec.make()
    engine = RemoteEngine("", engine="asyncrl.testing:VersionEchoEngine", python=sys.argv[1], transport=spec)
    await engine.start()
    await engine.fetch_weights(await asyncio.to_thread(publisher.publish, [("w", torch.ones(1000))], version=1))
    await engine.commit_weights(1)
    print(engine.weight_version)
    await engine.close()
    publisher.close()

asyncio.run(main())
"""


@pytest.mark.ray
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("vllm", "sglang")]
)
def test_the_environment_of_an_engine_reads_it(engine: str) -> None:
    python = os.environ.get(f"ASYNCRL_{engine.upper()}_PYTHON")
    if python is None:
        pytest.skip(f"ASYNCRL_{engine.upper()}_PYTHON names no environment")
    command = [sys.executable, "-c", ELSEWHERE, python]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert (ran.returncode, ran.stdout.split()) == (0, ["1"]), ran.stderr[-2000:]
