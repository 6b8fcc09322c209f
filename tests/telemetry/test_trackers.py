"""Metrics for others, whatever these others do."""

import json
import logging
import sys
import threading
from types import SimpleNamespace

import pytest

from asyncrl.errors import ConfigError
from asyncrl.telemetry import Trackers, open_trackers
from asyncrl.telemetry import trackers as trackers_module


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
    with Trackers({"mine": lambda: recorder}) as trackers:
        trackers.log({"a": 1, "nan": float("nan"), "text": "x", "flag": True}, step=1)
        trackers.log({"a": 2.5}, step=2)
    assert recorder.logged == [(1, {"a": 1.0}), (2, {"a": 2.5})]
    assert recorder.closed


def test_a_broken_tracker_hurts_nobody_and_is_told(caplog):
    broken, well = Broken(), Recorder()
    with caplog.at_level(logging.WARNING), Trackers({"broken": lambda: broken, "well": lambda: well}) as trackers:
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
    trackers = Trackers({"slow": lambda: slow})
    trackers.log({"a": 1}, step=1)  # returns although the service does not
    assert slow.logged == []
    gate.set()
    trackers.close()
    trackers.close()
    assert slow.logged == [(1, {"a": 1.0})]


def test_a_slow_tracker_does_not_keep_others_waiting(monkeypatch, caplog):
    monkeypatch.setattr(trackers_module, "CLOSE_TIMEOUT_S", 0.05)
    gate, arrived = threading.Event(), threading.Event()

    class Hangs(Recorder):
        def log(self, metrics, *, step):
            gate.wait()

    class Tells(Recorder):
        def log(self, metrics, *, step):
            super().log(metrics, step=step)
            if step == 2:
                arrived.set()

    well = Tells()
    trackers = Trackers({"hangs": Hangs, "well": lambda: well})
    trackers.log({"a": 1}, step=1)
    trackers.log({"a": 1}, step=2)
    assert arrived.wait(10)
    with caplog.at_level(logging.ERROR):
        trackers.close()  # waits no longer than it must
    gate.set()
    assert trackers.lost["hangs"] >= 1
    assert "did not finish in time" in caplog.text
    assert well.closed


def test_what_waits_has_a_bound(monkeypatch):
    monkeypatch.setattr(trackers_module, "MOST_WAITING", 3)
    gate = threading.Event()
    recorder = Recorder()

    def make():
        gate.wait()  # a service that takes its time to answer at all
        return recorder

    trackers = Trackers({"slow": make})
    for step in range(10):
        trackers.log({"a": 1}, step=step)
    gate.set()
    trackers.close()
    assert [step for step, _ in recorder.logged] == [7, 8, 9]
    assert trackers.lost == {"slow": 7}


def test_a_tracker_that_cannot_be_made_is_told_and_left_out(caplog):
    def make():
        raise ConnectionError("no such host")

    with caplog.at_level(logging.WARNING), Trackers({"dead": make}) as trackers:
        trackers.log({"a": 1}, step=1)
    assert "could not be made and is left out" in caplog.text
    assert "no such host" in caplog.text
    assert trackers.failures == {"dead": 1}


def test_texts_go_to_those_that_take_them():
    class Reads(Recorder):
        def log_text(self, name, text, *, step):
            self.logged.append((step, name, text))

    reads, plain = Reads(), Recorder()
    with Trackers({"reads": lambda: reads, "plain": lambda: plain}) as trackers:
        trackers.log_text("trajectory", "2+2=4", step=3)
    assert (reads.logged, plain.logged, trackers.failures) == (
        [(3, "trajectory", "2+2=4")],
        [],
        {"reads": 0, "plain": 0},
    )


def test_no_trackers_no_thread():
    before = threading.active_count()
    with Trackers({}) as trackers:
        trackers.log({"a": 1}, step=1)
        assert threading.active_count() == before


def test_a_missing_package_is_told_with_its_fix(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError) as caught:
        open_trackers(["asyncrl.telemetry.trackers:WandbTracker"], tmp_path, name="x", config={})
    assert "pip install 'wandb" in caught.value.remedy
    assert caught.value.path == "telemetry.trackers"


def test_an_unknown_tracker(tmp_path):
    with pytest.raises(ConfigError, match="no tracker named 'wanbd'"):
        open_trackers(["wanbd"], tmp_path, name="x", config={})


def test_what_trackio_prints_is_no_result_and_one_that_hangs_takes_none(tmp_path, monkeypatch, capsys):
    hangs, ends = threading.Event(), threading.Event()

    class Run:
        def finish(self):
            print("* finishes")
            hangs.set()
            ends.wait()

    def init(**_):
        print("* greets")
        return Run()

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init))
    tracker = trackers_module.TrackioTracker(tmp_path, name="mine", config={})
    closing = threading.Thread(target=tracker.close)
    closing.start()
    assert hangs.wait(10)
    print("the result")
    ends.set()
    closing.join()
    assert capsys.readouterr() == ("the result\n", "* greets\n* finishes\n")


CONFIG = {"name": "mine", "trainer": {"lr": 0.1}}


def tracked(name, folder):
    """A few entries through the real package, one of them of an earlier step, as evaluations come."""
    folder.mkdir()
    with open_trackers([name], folder, name="mine", config=CONFIG) as trackers:
        for step in range(1, 4):
            trackers.log({"reward": step / 4}, step=step)
        trackers.log({"eval/success": 0.5}, step=2)
        trackers.log_text("trajectory", "2+2=<4>", step=3)
    assert trackers.failures == {name: 0}
    assert trackers.lost == {name: 0}


@pytest.mark.slow
def test_tensorboard_really(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracked("asyncrl.telemetry.trackers:TensorBoardTracker", tmp_path / "mine-1")
    events = EventAccumulator(str(tmp_path / "mine-1" / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert [event.step for event in events.Scalars("eval/success")] == [2]
    assert "trajectory/text_summary" in events.Tags()["tensors"]


@pytest.mark.slow
def test_wandb_really_without_a_network(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracked("asyncrl.telemetry.trackers:WandbTracker", tmp_path / "mine-1")
    (kept,) = (tmp_path / "mine-1" / "wandb").glob("offline-run-*/*.wandb")
    content = kept.read_bytes()
    for text in (b"eval/success", b"trainer/step", b"trajectory"):
        assert text in content


@pytest.mark.slow
def test_trackio_really(tmp_path, monkeypatch, capsys):
    pytest.importorskip("trackio")
    import sqlite3

    import trackio.utils  # noqa: F401  it reads its folder when it is imported

    for module in [module for name, module in sys.modules.items() if name.startswith("trackio")]:
        for name in ("TRACKIO_DIR", "MEDIA_DIR"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, tmp_path / "kept")
    tracked("asyncrl.telemetry.trackers:TrackioTracker", tmp_path / "mine-1")
    assert capsys.readouterr().out == ""
    (file,) = (tmp_path / "kept").glob("*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("SELECT step, metrics FROM metrics WHERE run_name = 'mine-1' ORDER BY id").fetchall()
    found = [(step, json.loads(metrics).get("reward")) for step, metrics in rows]
    assert found[:3] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert len(found) == 5
