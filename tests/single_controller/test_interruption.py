"""Ctrl-C: what this thread, or this cell, began is cancelled in the workers; nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

WORKER = """
import asyncio, os, signal, sys, threading, time
from asyncrl.single_controller import ClassWithInitArgs, Dispatch, Worker, register

class Sleeper(Worker):
    def __init__(self):
        super().__init__()
        self.ended = []

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def sleep(self, name):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.ended.append(name)
            raise

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    async def cancelled(self, count):
        async with asyncio.timeout(30):
            while len(self.ended) < count:
                await asyncio.sleep(0.01)
        return sorted(self.ended)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def process(self):
        return os.getpid()
"""
LOCAL = """
from asyncrl.single_controller.local import LocalWorkerGroup
group = LocalWorkerGroup(ClassWithInitArgs(Sleeper), world_size=2)
"""
RAY = """
import ray
from asyncrl.single_controller.ray import RayResourcePool, RayWorkerGroup
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
group = RayWorkerGroup(RayResourcePool([2]), ClassWithInitArgs(Sleeper))
"""
SCRIPT = """
print("workers", *group.process().result(), flush=True)
elsewhere = []
thread = threading.Thread(target=lambda: elsewhere.append(group.sleep("of another thread")))
thread.start()
thread.join()
first = group.sleep("first")
second = group.sleep("second")

def say_when_main_waits():
    def names(frame):
        return [] if frame is None else [frame.f_code.co_name, *names(frame.f_back)]
    while "result" not in names(sys._current_frames()[threading.main_thread().ident]):
        time.sleep(0.01)
    print("waiting", flush=True)

group.cancelled(0).result()
saying = threading.Thread(target=say_when_main_waits)
saying.start()
try:
    second.result()
except KeyboardInterrupt:
    print("interrupted", first.cancelled(), elsewhere[0].done(), group.cancelled(2).result(), flush=True)
"""


@pytest.mark.parametrize("backend", [LOCAL, pytest.param(RAY, marks=[pytest.mark.ray, pytest.mark.slow])])
def test_an_interrupted_script_leaves_nothing_behind(backend: str) -> None:
    script = WORKER + backend + SCRIPT
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        workers = [int(each) for each in process.stdout.readline().split()[1:]]
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted True False ['first', 'second']\n"
        assert process.wait(60) == 0
    for worker in workers:
        assert not _is_alive(worker)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2]
    return not state.startswith("Z")


def test_an_interrupted_cell_cancels_what_it_began_and_not_what_others_did() -> None:
    pytest.importorskip("IPython")
    script = f"""
    from IPython.core.interactiveshell import InteractiveShell
    shell = InteractiveShell.instance()
    run = lambda cell: shell.run_cell(cell, silent=False)
    run({WORKER + LOCAL!r})
    run("earlier = group.sleep('earlier'); group.process().result()")
    run("futures = [group.sleep('one'), group.sleep('two')]; group.process().result()\\nsignal.raise_signal(2)")
    run("print(earlier.done(), [each.cancelled() for each in futures], group.cancelled(2).result())")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert "False [True, True] ['one', 'two']" in done.stdout, done.stdout + done.stderr
