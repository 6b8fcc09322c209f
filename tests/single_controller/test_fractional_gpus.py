"""Seats with GPUs, shared by groups: on a cluster that says it has one GPU, which no worker touches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os
import ray
from asyncrl import Dispatch, Worker, register
from asyncrl.errors import ResourceError
from asyncrl.single_controller import ResourcePoolManager, Role
from asyncrl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

class Member(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def gpus(self):
        shares = ray.get_runtime_context().get_assigned_resources().get("GPU", 0)
        return os.environ.get("CUDA_VISIBLE_DEVICES"), shares

def gpus(pool, **options):
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Member).options(**options))
    return group, group.gpus().result(100)

ray.init(num_cpus=4, num_gpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
manager = ResourcePoolManager({"all": [1]}, {Role.Actor: "all", Role.Critic: "all"}, use_gpu=True)
manager.create_resource_pool()
pool = manager.get_resource_pool(Role.Actor)
first, seen = gpus(pool)
print(seen)  # half a GPU, which is GPU 0
second, seen = gpus(pool, num_gpus=0.25)
print(seen)  # a quarter of the same
try:
    ResourcePoolManager({"all": [2]}, {Role.Actor: "all"}, use_gpu=True).create_resource_pool()
except ResourceError as error:
    print(str(error).splitlines()[1])
for group in (first, second):
    group.shutdown()
print(gpus(RayResourcePool([2], gpus_per_worker=0.5))[1])  # two bundles on one GPU
"""


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_groups_share_a_gpu(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    # The tests hide every GPU, and Ray starts with no more than it sees.
    one_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": "0"}
    ran = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=280, check=False, env=one_gpu
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.splitlines() == [
        "[('0', 0.5)]",
        "[('0', 0.25)]",
        "requested: 2 CPU, 2 GPU",
        "[('0', 0.5), ('0', 0.5)]",
    ]
