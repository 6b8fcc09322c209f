"""A Ray cluster for one module, and what both backends are tested with."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.single_controller import ClassWithInitArgs, WorkerGroup
from asyncrl.single_controller.local import LocalWorkerGroup

MakeGroup = Callable[..., WorkerGroup]


HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def ray_cluster() -> None:
    """A cluster for the modules of this folder; :func:`pytest_runtest_teardown` ends it after the last in a row."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import ray

    if ray.is_initialized():
        return
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Generator[None, object, object]:
    result = yield
    if (nextitem is None or nextitem.path.parent != HERE) and "ray" in sys.modules:
        sys.modules["ray"].shutdown()
    return result


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=pytest.mark.ray)])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    return str(request.param)


@pytest.fixture(scope="module")
def make_group(backend: str) -> Iterator[MakeGroup]:
    """``make_group(WorkerClass, *args, world_size=2)``; the groups are shut down after the module."""
    groups: list[WorkerGroup] = []

    def make(cls: type[Any], *args: Any, world_size: int = 2, name: str = "") -> WorkerGroup:
        group: WorkerGroup
        if backend == "local":
            group = LocalWorkerGroup(ClassWithInitArgs(cls, *args), world_size=world_size, name=name)
        else:
            from asyncrl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

            group = RayWorkerGroup(RayResourcePool([world_size]), RayClassWithInitArgs(cls, *args), name=name)
        groups.append(group)
        return group

    yield make
    for group in groups:
        group.shutdown()
