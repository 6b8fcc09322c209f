"""The same handle in a script, in threads, inside asyncio and under uvloop: ``await`` or ``result()``, in any order."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import uvloop

from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.single_controller import ClassWithInitArgs, Dispatch, Worker, WorkerGroup, register
from asyncrl.single_controller.local import LocalWorkerGroup

TIMEOUT_S = 30.0
PACKAGES = os.environ.get("ASYNCRL_MARIMO_PACKAGES", "")
"""Folder with marimo, which may need other versions of packages than the rest of the tests."""


class Doubler(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def double(self, batch: DataProto) -> DataProto:
        await asyncio.sleep(0)
        assert batch.batch is not None
        return DataProto.from_dict({"x": batch.batch["x"] * 2})


@pytest.fixture(scope="module")
def doubler() -> Iterator[WorkerGroup]:
    with LocalWorkerGroup(ClassWithInitArgs(Doubler), world_size=2) as group:
        yield group


BATCH = DataProto.from_dict({"x": torch.arange(3)})
DOUBLED = DataProto.from_dict({"x": torch.arange(3) * 2})


def test_in_a_script(doubler: WorkerGroup) -> None:
    future: DataProtoFuture = doubler.double(BATCH)
    assert future.result(TIMEOUT_S) == DOUBLED
    assert asyncio.run(awaited(future)) == DOUBLED


@pytest.mark.slow
def test_in_a_script_of_its_own() -> None:
    program = """
import torch
from asyncrl import ClassWithInitArgs, DataProto, Dispatch, Worker, register
from asyncrl.single_controller.local import LocalWorkerGroup

class Doubler(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"x": batch.batch["x"] * 2})

group = LocalWorkerGroup(ClassWithInitArgs(Doubler), world_size=2)
print(group.double(DataProto.from_dict({"x": torch.arange(3)})).result(timeout=30).batch["x"].tolist())
"""  # no shutdown: the end of the program is one
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert ran.stdout == "[0, 2, 4]\n"
    assert "Traceback" not in ran.stderr


@pytest.mark.ray
@pytest.mark.slow
def test_a_script_that_ends_in_the_middle_of_calls_ends_quietly() -> None:
    program = """
import time
import ray
from asyncrl import Worker, register
from asyncrl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

class Sleeper(Worker):
    @register()
    def sleep(self) -> None:
        time.sleep(60)

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
group = RayWorkerGroup(RayResourcePool([2]), RayClassWithInitArgs(Sleeper))
group.ready().result(timeout=60)
calls = [group.sleep() for _ in range(10)]
time.sleep(0.5)
print(calls[0].done())
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert ran.stdout == "False\n", ran.stderr
    assert "Traceback" not in ran.stderr


async def awaited(future: DataProtoFuture) -> DataProto:
    return await future


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_inside_a_running_loop(doubler: WorkerGroup, run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    async def program() -> None:
        first, second = doubler.double(BATCH), doubler.double(BATCH)
        # Blocking this loop, as a cell of a notebook does: the controller's loop is another one.
        assert first.result(TIMEOUT_S) == DOUBLED
        assert await first == await second == second.result(TIMEOUT_S) == DOUBLED
        chained = doubler.double(doubler.double(BATCH).slice(0, 2))
        assert (await chained).batch["x"].tolist() == [0, 4]
        assert await asyncio.wait_for(asyncio.gather(first, awaited(second)), TIMEOUT_S) == [DOUBLED, DOUBLED]

    run(program())


def test_one_future_awaited_by_loops_of_several_threads(doubler: WorkerGroup) -> None:
    future = doubler.double(BATCH)
    found: list[DataProto] = []
    threads = [
        threading.Thread(target=lambda run=run: found.append(run(awaited(future))))
        for run in (asyncio.run, uvloop.run, asyncio.run)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert found == [DOUBLED] * 3


@pytest.mark.slow
@pytest.mark.skipif(not PACKAGES and find_spec("marimo") is None, reason="needs marimo, or ASYNCRL_MARIMO_PACKAGES")
def test_in_cells_of_marimo(tmp_path: Path) -> None:
    program = tmp_path / "cells.py"
    program.write_text(CELLS)
    paths = [str(Path(__file__).parents[2]), *filter(None, [PACKAGES, os.environ.get("PYTHONPATH")])]
    ran = subprocess.run(
        [sys.executable, str(program)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.stdout == "[0, 2, 4] [0, 2, 4]\n", ran.stderr


CELLS = """
import marimo
app = marimo.App()

@app.cell
def _():
    import torch
    from asyncrl import ClassWithInitArgs, DataProto, Dispatch, Worker, register
    from asyncrl.single_controller.local import LocalWorkerGroup

    class Doubler(Worker):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        async def double(self, batch: DataProto) -> DataProto:
            return DataProto.from_dict({"x": batch.batch["x"] * 2})

    group = LocalWorkerGroup(ClassWithInitArgs(Doubler), world_size=2)
    future = group.double(DataProto.from_dict({"x": torch.arange(3)}))
    return future, group

@app.cell
async def _(future):
    awaited = (await future).batch["x"].tolist()
    return (awaited,)

@app.cell
def _(awaited, future):
    blocked = future.result(timeout=10).batch["x"].tolist()
    print(awaited, blocked)
    return

if __name__ == "__main__":
    app.run()
"""
