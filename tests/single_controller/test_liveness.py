"""Processes that do not answer are named, then ended; those that only work are not."""

from __future__ import annotations

import asyncio
import doctest
import logging
import os
import signal
import time
from pathlib import Path

import pytest

import asyncrl.single_controller.liveness
from asyncrl.errors import RankErrors, WorkerDiedError
from asyncrl.single_controller import Dispatch, Restart, Worker, register
from asyncrl.single_controller.liveness import Liveness, Silence


def test_its_example():
    assert doctest.testmod(asyncrl.single_controller.liveness).failed == 0


def test_a_silent_rank_is_ended_once_and_its_successor_begins_anew():
    silence = Silence(Liveness(every_s=1, named_after_s=2, ended_after_s=5))
    silence.sent(1, now_s=0.0)
    silence.sent(1, now_s=3.0)  # the first ping counts
    assert silence.waits(1)
    assert not silence.waits(0)
    assert [*silence.overdue(now_s=4.9)] == []
    assert [*silence.overdue(now_s=5.0)] == [1]
    assert [*silence.overdue(now_s=9.0)] == []
    silence.answered(1)
    silence.sent(1, now_s=10.0)
    assert [*silence.overdue(now_s=15.0)] == [1]


@pytest.mark.parametrize("times", [(0, 1, 2), (2, 1, 3), (1, 3, 2)])
def test_times_rise(times: tuple[float, float, float]):
    with pytest.raises(ValueError, match="times must rise"):
        Liveness(every_s=times[0], named_after_s=times[1], ended_after_s=times[2])


def test_the_time_at_which_a_process_is_named_follows_from_that_at_which_it_is_ended():
    assert Liveness.of(120.0).named_after_s == 20.0
    assert Liveness.of(6.0).named_after_s == 2.0


class Sleeper(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def report_another(self) -> None:
        raise WorkerDiedError("a worker of another group died", group="others", rank=1)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def process(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def work(self, seconds: float) -> int:
        end = time.monotonic() + seconds
        while time.monotonic() < end:  # computes, and gives the lock back as Python does
            sum(range(1000))
        return os.getpid()


class SlowToStart(Worker):
    def __init__(self, notes: str) -> None:
        super().__init__()
        Path(notes).write_text(str(os.getpid()))
        time.sleep(600)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_process_that_is_frozen_while_its_worker_is_constructed_is_ended(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    from asyncrl.single_controller import ClassWithInitArgs
    from asyncrl.single_controller.ray import RayResourcePool, RayWorkerGroup, backend

    notes = tmp_path / "process"
    monkeypatch.setattr(backend, "STARTING_NAMED_S", 1.0)
    monkeypatch.setattr(backend, "START_S", 3.0)
    init = ClassWithInitArgs(SlowToStart, str(notes))
    group = RayWorkerGroup(RayResourcePool([1]), init, name="slow", liveness=Liveness.of(3.0))
    try:
        while not (notes.exists() and notes.read_text()):
            time.sleep(0.05)
        os.kill(int(notes.read_text()), signal.SIGSTOP)
        with pytest.raises(WorkerDiedError, match=r"rank 0 of slow|slow\[0\]"):
            group.ready().result(60)
    finally:
        group.shutdown()
    assert f"slow[0] (process {notes.read_text()} on" in caplog.text


class SlowToPrepare(Sleeper):
    def __init__(self, notes: str) -> None:
        super().__init__()
        self.notes = Path(notes)

    def prepare(self) -> None:
        self.notes.write_text(str(os.getpid()))
        time.sleep(600)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_replacement_that_is_frozen_while_it_is_prepared_is_ended(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    from asyncrl.single_controller import ClassWithInitArgs
    from asyncrl.single_controller.ray import RayResourcePool, RayWorkerGroup, backend

    notes = tmp_path / "process"
    monkeypatch.setattr(backend, "STARTING_NAMED_S", 1.0)
    monkeypatch.setattr(backend, "START_S", 3.0)
    init, restart = ClassWithInitArgs(SlowToPrepare, str(notes)), Restart(max_restarts=1, prepare="prepare")
    group = RayWorkerGroup(RayResourcePool([1]), init, name="slow", restart=restart, liveness=Liveness.of(6.0))
    try:
        os.kill(group.process().result(60)[0], signal.SIGKILL)
        while not (notes.exists() and notes.read_text()):
            time.sleep(0.05)
        os.kill(int(notes.read_text()), signal.SIGSTOP)
        with pytest.raises(WorkerDiedError, match=r"rank 0 of slow|slow\[0\]"):
            group.process().result(60)
    finally:
        group.shutdown()
    assert f"slow[0] (process {notes.read_text()} on" in caplog.text


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_process_that_never_starts_is_named_and_given_up(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    from asyncrl.single_controller import ClassWithInitArgs
    from asyncrl.single_controller.ray import RayResourcePool, RayWorkerGroup, backend

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(backend, "STARTING_NAMED_S", 0.2)
    monkeypatch.setattr(backend, "START_S", 0.4)
    monkeypatch.setattr(RayWorkerGroup, "_value", never)
    liveness = Liveness(every_s=0.1, named_after_s=0.2, ended_after_s=0.4)
    group = RayWorkerGroup(RayResourcePool([1]), ClassWithInitArgs(Sleeper), name="late", liveness=liveness)
    try:
        with pytest.raises(WorkerDiedError, match=r"the process of late\[0\] has not started for 0\.4 s"):
            group.ready().result(60)
    finally:
        group.shutdown()
    assert "the process of late[0] has not started for 0.2 s: it is stopped, or its machine is busy" in caplog.text


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_after_a_call_has_failed_by_a_death_the_next_one_goes_to_the_new_process(monkeypatch: pytest.MonkeyPatch):
    """Though the group has not heard of the death from Ray."""
    from asyncrl.single_controller import ClassWithInitArgs
    from asyncrl.single_controller.ray import RayResourcePool, RayWorkerGroup

    monkeypatch.setattr(RayWorkerGroup, "_watch_actor", lambda group, rank, handle: None)
    restart = Restart(max_restarts=2, scope="worker", backoff_s=0.0)
    with RayWorkerGroup(RayResourcePool([2]), ClassWithInitArgs(Sleeper), restart=restart) as group:
        first, second = group.process().result(60)
        os.kill(second, signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            group.work(0.1).result(60)
        again = group.process().result(60)
        assert again[0] == first
        assert again[1] != second
        with pytest.raises((WorkerDiedError, RankErrors)):
            group.report_another().result(60)
        assert group.process().result(60) == again, "what a worker raises is no death of its own"


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_frozen_process_is_named_ended_and_replaced_and_a_working_one_is_not(caplog: pytest.LogCaptureFixture):
    from asyncrl.single_controller import ClassWithInitArgs
    from asyncrl.single_controller.ray import RayResourcePool, RayWorkerGroup

    liveness = Liveness(every_s=0.3, named_after_s=3.0, ended_after_s=10.0)
    caplog.set_level(logging.WARNING)
    with RayWorkerGroup(
        RayResourcePool([2]),
        ClassWithInitArgs(Sleeper),
        name="sleepers",
        restart=Restart(max_restarts=1, scope="worker"),
        liveness=liveness,
    ) as group:
        first, second = group.process().result(60)
        assert group.work(5.0).result(60) == [first, second]
        assert group.explain_silence() == []
        waiting = group.work(2.0)
        os.kill(second, signal.SIGSTOP)
        while not (lines := group.explain_silence()):
            time.sleep(0.05)
        assert f"sleepers[1] (process {second} on" in lines[0]
        with pytest.raises(WorkerDiedError, match=r"rank 1 of sleepers|sleepers\[1\]"):
            waiting.result(60)
        again = group.process().result(60)
        assert again[0] == first
        assert again[1] != second
    assert any("its process is killed" in record.message for record in caplog.records)
