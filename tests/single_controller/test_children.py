"""A process that is stopped is named, then killed, with what it has started; one that works or goes on is not."""

from __future__ import annotations

import contextlib
import doctest
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import asyncrl.single_controller.children
from asyncrl.single_controller.children import ChildWatch, kill_stopped, stopped_among
from asyncrl.single_controller.liveness import Liveness

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what is stopped is read from /proc")

SOON = Liveness(every_s=0.02, named_after_s=0.1, ended_after_s=0.4)
NAMED_ONLY = Liveness(every_s=0.02, named_after_s=0.1, ended_after_s=60)
WITH_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
print(child.pid, flush=True)
time.sleep(60)  # not until the child ends: both are killed, one after the other
"""


@pytest.fixture
def parent() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process, and its child, which computes."""
    process = subprocess.Popen([sys.executable, "-c", WITH_CHILD], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        yield process, child
    finally:
        for pid in (child, process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_its_example():
    assert doctest.testmod(asyncrl.single_controller.children).failed == 0


@pytest.mark.parametrize("which", ["itself", "its child"])
def test_a_stopped_process_is_named_and_killed(parent, caplog: pytest.LogCaptureFixture, which: str):
    process, child = parent
    victim = process.pid if which == "itself" else child
    with ChildWatch(SOON).watching(process.pid, "the engine"):
        time.sleep(0.6)  # longer than a stopped one may: working is no freeze
        assert process.poll() is None
        os.kill(victim, signal.SIGSTOP)
        assert process.wait(20) == -signal.SIGKILL
    label = "the engine" if which == "itself" else f"process {child} of the engine"
    assert f"{label} has been stopped for 0 s; it is killed after 0.4 s" in caplog.text
    assert f"{label} has been stopped for 0 s: it is killed" in caplog.text
    assert stopped_among(victim) == []


def test_one_that_is_due_while_another_is_looked_at_is_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    now_s, killed = [0.0], list[int]()
    monkeypatch.setattr("asyncrl.single_controller.children.time.monotonic", lambda: now_s[0])
    monkeypatch.setattr(ChildWatch, "_run", lambda _self: None)
    watch = ChildWatch(SOON)
    for pid in (1, 2):
        watch.add(pid, f"process {pid}", kill=killed.append)
    for now_s[0], pid in ((0.0, 1), (0.0, 2), (0.39, 1), (0.41, 2), (0.42, 1), (0.44, 2), (0.45, 1)):
        watch._look(pid, [1] if pid == 1 else [])
    assert killed == [1]
    watch._look(1, [])  # what was stopped is gone, and the process not yet
    assert "runs again" not in caplog.text


def test_one_that_goes_on_is_left_alone(parent, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)
    process, _ = parent
    with ChildWatch(NAMED_ONLY).watching(process.pid, "the engine"):
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: "the engine has been stopped" in caplog.text)
        os.kill(process.pid, signal.SIGCONT)
        until(lambda: "the engine runs again" in caplog.text)
    assert process.poll() is None


def test_one_that_is_stopped_before_its_program_begins_is_killed(caplog: pytest.LogCaptureFixture):
    watch = ChildWatch(SOON)
    with watch.starting("an engine"):
        pid = os.fork()
        if pid == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert f"process {pid}, which was to be an engine, has been stopped for 0 s: it is killed" in caplog.text
    assert watch.names == []


def test_times_can_change_while_a_process_is_stopped(parent):
    process, _ = parent
    watch = ChildWatch(Liveness(every_s=30, named_after_s=60, ended_after_s=90))
    with watch.watching(process.pid, "the engine"):
        os.kill(process.pid, signal.SIGSTOP)
        watch.configure(SOON)
        assert process.wait(20) == -signal.SIGKILL


def test_a_stopped_child_does_not_outlive_the_process_that_is_killed_with_it(parent):
    process, child = parent
    os.kill(child, signal.SIGSTOP)
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: stopped_among(process.pid) == [process.pid, child])
    kill_stopped(process.pid)
    assert process.wait(20) == -signal.SIGKILL
    until(lambda: not Path(f"/proc/{child}").exists())


def test_no_stranger_is_watched(parent):
    process, child = parent
    os.kill(child, signal.SIGSTOP)
    until(lambda: stopped_among(process.pid) == [child])
    assert stopped_among(child) == []  # a child of the child is another's


def test_a_name_may_hold_any_byte():
    program = r"open('/proc/self/comm', 'wb').write(b') T 1 \xff'); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert stopped_among(process.pid) == []
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: stopped_among(process.pid) == [process.pid])
        kill_stopped(process.pid)


def test_one_that_cannot_be_looked_at_or_killed_leaves_the_others_watched(monkeypatch: pytest.MonkeyPatch):
    killed = list[int]()

    def look(pid: int) -> list[int]:
        if pid == 1:
            raise OSError("no such file")
        return [pid]

    def kill(pid: int) -> None:
        if pid == 2:
            raise PermissionError("of another user")
        killed.append(pid)

    monkeypatch.setattr("asyncrl.single_controller.children.stopped_among", look)
    watch = ChildWatch(Liveness(every_s=0.001, named_after_s=0.001, ended_after_s=0.001))
    for pid in (1, 2, 3):
        watch.add(pid, f"process {pid}", kill=kill)
    until(lambda: killed == [3])
    for pid in (1, 2, 3):
        watch.remove(pid)
