"""Processes that do not answer are named, then ended; those that only work are not."""

from __future__ import annotations

import doctest
import logging
import os
import signal
import time

import pytest

import asyncrl.single_controller.liveness
from asyncrl.errors import WorkerDiedError
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
    def process(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def work(self, seconds: float) -> int:
        end = time.monotonic() + seconds
        while time.monotonic() < end:  # computes, and gives the lock back as Python does
            sum(range(1000))
        return os.getpid()


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_frozen_process_is_named_ended_and_replaced_and_a_working_one_is_not(caplog: pytest.LogCaptureFixture):
    from asyncrl.single_controller import ClassWithInitArgs
    from asyncrl.single_controller.ray import RayResourcePool, RayWorkerGroup

    liveness = Liveness(every_s=0.3, named_after_s=1.5, ended_after_s=4.0)
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
