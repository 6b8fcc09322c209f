"""A spawner forks engines' processes: they serve, they die alone, and nobody outlives the one he works for."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from asyncrl.errors import ConfigError, EngineError
from asyncrl.interfaces import Generation, GenerationRequest
from asyncrl.testing import TelltaleEngine
from engines.rollout import process_spawner
from engines.rollout.process_spawner import ProcessSpawner
from engines.rollout.remote_engine import RemoteEngine

HERE = "tests.engines.rollout.test_process_spawner"
ROOT = Path(__file__).parents[3]

RequestOf = Callable[..., GenerationRequest]
Collect = Callable[..., Any]


class Forkable(TelltaleEngine):
    """Needs nothing but this file."""

    @staticmethod
    def import_for_fork(model_path: str) -> None:
        assert model_path == "some model"


class Threaded(Forkable):
    @staticmethod
    def import_for_fork(model_path: str) -> None:
        threading.Thread(target=threading.Event().wait, daemon=True).start()


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)


@pytest_asyncio.fixture
async def spawner() -> AsyncIterator[ProcessSpawner]:
    made = ProcessSpawner(f"{HERE}:Forkable", "some model")
    yield made
    await made.close()
    assert made.pid is None


def hosted(spawner: ProcessSpawner, **options: Any) -> RemoteEngine:
    return RemoteEngine("", engine=f"{HERE}:Forkable", spawner=spawner, **options)


async def test_what_is_forked_serves_dies_alone_and_is_replaced(
    spawner: ProcessSpawner, request_of: RequestOf, collect: Collect, tmp_path: Path
) -> None:
    first, second = hosted(spawner, log_path=str(tmp_path / "log")), hosted(spawner)
    await asyncio.gather(first.start(), second.start())  # both wait for one spawner
    assert len({first.pid, second.pid, spawner.pid, os.getpid()}) == 4
    got: Generation = await collect(first, request_of("a", [1], 5))
    assert len(got.token_ids) == 5

    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    assert "killed by SIGKILL" in await first.wait_ended()
    with pytest.raises(EngineError, match="killed by SIGKILL"):
        await collect(first, request_of("b", [1], 5))
    assert len((await collect(second, request_of("c", [1], 5))).token_ids) == 5

    third = hosted(spawner)
    await third.start()
    for engine in (first, second, third):
        await engine.close()
    assert [child.pid for child in psutil.Process().children() if child.pid == second.pid] == []


async def test_a_spawner_that_dies_takes_nobody_along_and_is_started_again(
    spawner: ProcessSpawner, request_of: RequestOf, collect: Collect
) -> None:
    engine = hosted(spawner)
    await engine.start()
    before = spawner.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    assert len((await collect(engine, request_of("a", [1], 5))).token_ids) == 5
    other = hosted(spawner)
    while spawner.pid == before:  # its end is told by the kernel, in no order with what engines say
        await asyncio.sleep(0)
    await other.start()
    assert spawner.pid not in (None, before)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    assert "exited with status 255" in await engine.wait_ended()  # nobody is left who would know how
    await engine.close()
    await other.close()


@pytest.mark.slow
async def test_no_engine_is_forked_that_does_not_say_so_or_has_threads(
    request_of: RequestOf, collect: Collect, caplog: pytest.LogCaptureFixture
) -> None:
    for engine in ("asyncrl.testing:TelltaleEngine", f"{HERE}:Threaded"):
        spawner = ProcessSpawner(engine, "some model")
        hosting = RemoteEngine("", engine=engine, spawner=spawner)
        await hosting.start()
        assert psutil.Process(hosting.pid).ppid() == os.getpid()  # made from nothing, by this process
        assert len((await collect(hosting, request_of("a", [1], 3))).token_ids) == 3
        await hosting.close()
        await spawner.close()
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"processes of {HERE}:Threaded are made one by one, and slowly: 2 threads run" in told
    with pytest.raises(ConfigError, match="of its own environment"):
        RemoteEngine("", engine="transformers", spawner=spawner, python="/usr/bin/python3")
    with pytest.raises(EngineError, match="is closed"):
        await hosted(spawner).start()


@pytest.mark.slow
async def test_a_real_model_is_forked_and_says_what_it_says_anywhere(
    folder_of: Callable[..., Path],
    request_of: RequestOf,
    collect: Collect,
    plain_log_probs: Any,
    model_of: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # as a user's shell has them
        monkeypatch.delenv(threads, raising=False)
    folder = str(folder_of("llama"))
    spawner = RemoteEngine.spawner("transformers", folder)
    engines = [RemoteEngine(folder, options={"threads": 1, "device": "cpu"}, spawner=spawner) for _ in range(2)]
    await asyncio.gather(*(engine.start() for engine in engines))
    assert all(psutil.Process(engine.pid).ppid() == spawner.pid for engine in engines)
    for seed, engine in enumerate(engines):
        request = request_of("a", [1, 2, 3], 20, seed=seed)
        got: Generation = await collect(engine, request)
        expected = plain_log_probs(model_of("llama", seed=0), request, got.token_ids)
        assert got.log_probs == pytest.approx(expected, abs=1e-4)
        await engine.close()
    await spawner.close()


DRIVER = f"""
import asyncio, sys
from engines.rollout.process_spawner import ProcessSpawner
from engines.rollout.remote_engine import RemoteEngine

async def main():
    spawner = ProcessSpawner("{HERE}:Forkable", "some model")
    engine = RemoteEngine("", engine="{HERE}:Forkable", spawner=spawner)
    await engine.start()
    print(engine.pid, spawner.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, True])
def test_what_is_forked_ends_with_the_one_it_works_for(busy: bool) -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE)
    assert driver.stdout is not None
    processes = [psutil.Process(int(word)) for word in driver.stdout.readline().split()]
    if busy:
        processes[0].suspend()  # it does nothing by itself any more: only the kernel can end it
    driver.kill()
    driver.wait()
    driver.stdout.close()
    _, alive = psutil.wait_procs(processes, 10)
    assert alive == []


def test_a_second_thread_makes_forking_unsound() -> None:
    assert "threads run" in process_spawner._unsound() or threading.active_count() == 1
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    assert "locks a fork would leave locked" in process_spawner._unsound()
    done.set()
    thread.join()
