"""Metrics for others, whatever these others do."""

import logging
import threading

import pytest

from asyncrl.errors import ConfigError
from asyncrl.telemetry import Trackers, open_trackers


class Recorder:
    def __init__(self):
        self.logged = []
        self.closed = False

    def log(self, metrics, *, step):
        self.logged.append((step, metrics))

    def close(self):
        self.closed = True


class Broken(Recorder):
    def log(self, metrics, *, step):
        super().log(metrics, step=step)
        raise ConnectionError("offline")


def test_finite_numbers_are_delivered_in_order():
    recorder = Recorder()
    with Trackers({"mine": recorder}) as trackers:
        trackers.log({"a": 1, "nan": float("nan"), "text": "x", "flag": True}, step=1)
        trackers.log({"a": 2.5}, step=2)
    assert recorder.logged == [(1, {"a": 1.0}), (2, {"a": 2.5})]
    assert recorder.closed


def test_a_broken_tracker_hurts_nobody_and_is_told(caplog):
    broken, well = Broken(), Recorder()
    with caplog.at_level(logging.WARNING), Trackers({"broken": broken, "well": well}) as trackers:
        for step in range(10):
            trackers.log({"a": 1.0}, step=step)
    assert len(well.logged) == 10
    assert len(broken.logged) == 3
    assert trackers.failures == {"broken": 3, "well": 0}
    assert "left out from now on" in caplog.text
    assert "offline" in caplog.text


def test_logging_does_not_wait_for_a_slow_service():
    gate = threading.Event()

    class Slow(Recorder):
        def log(self, metrics, *, step):
            gate.wait()
            super().log(metrics, step=step)

    slow = Slow()
    trackers = Trackers({"slow": slow})
    trackers.log({"a": 1}, step=1)  # returns although the service does not
    assert slow.logged == []
    gate.set()
    trackers.close()
    trackers.close()
    assert slow.logged == [(1, {"a": 1.0})]


def test_no_trackers_no_thread():
    before = threading.active_count()
    with Trackers({}) as trackers:
        trackers.log({"a": 1}, step=1)
        assert threading.active_count() == before


def test_a_missing_package_is_told_with_its_fix(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(ConfigError) as caught:
        open_trackers(["asyncrl.telemetry.trackers:WandbTracker"], tmp_path, name="x", config={})
    assert "pip install 'wandb" in caught.value.remedy
    assert caught.value.path == "telemetry.trackers"


def test_an_unknown_tracker(tmp_path):
    with pytest.raises(ConfigError, match="no tracker named 'wanbd'"):
        open_trackers(["wanbd"], tmp_path, name="x", config={})
