"""The folder of a run."""

import json
import re

import pytest

from asyncrl.errors import ConfigError
from asyncrl.telemetry import RunDirectory


class Clock:
    now_s = 50.0

    def __call__(self):
        return self.now_s


def test_a_new_run_has_a_folder_of_its_own(tmp_path):
    runs = [RunDirectory.create(tmp_path / "deep" / "runs", "first") for _ in range(3)]
    assert len({run.path for run in runs}) == 3
    assert all(re.fullmatch(r"first-\d{8}-\d{6}(-\d+)?", run.path.name) for run in runs)
    assert all(run.logs.is_dir() and run.checkpoints.is_dir() and not run.resumed for run in runs)
    for run in runs:
        run.close()


def test_metrics_have_step_time_and_version(tmp_path):
    clock = Clock()
    with RunDirectory.create(tmp_path, "first", clock=clock) as run:
        clock.now_s += 1.5
        run.log_metrics({"reward": 0.25, "loss": float("nan")}, step=3, version=2)
        run.flush()
        assert run.metrics() == [
            {"step": 3, "time_s": 1.5, "version": 2, "reward": 0.25, "loss": None, "not_finite": {"loss": "nan"}}
        ]
        with pytest.raises(ValueError, match="step, version"):
            run.log_metrics({"step": 1, "version": 2}, step=3, version=2)


def test_a_resumed_run_goes_on_where_it_was(tmp_path):
    clock = Clock()
    with RunDirectory.create(tmp_path, "first", clock=clock) as run:
        run.write_config("steps = 3\n")
        for step in (1, 2, 3):
            clock.now_s += 10
            run.log_metrics({"reward": step}, step=step, version=step)
            run.log_trajectory({"step": step, "text": "..."})
    with run.metrics_path.open("a") as file:
        file.write('{"step": 4, "ti')  # a crash in the middle of a line

    later = Clock()
    later.now_s = 7_000.0
    with RunDirectory.open(run.path, clock=later) as again:
        assert again.resumed
        assert again.elapsed_s == 30
        assert again.rewind(2) == 1  # the checkpoint was of step 2
        later.now_s += 5
        again.log_metrics({"reward": 9}, step=3, version=3)
        again.flush()
        assert [(line["step"], line["time_s"], line["reward"]) for line in again.metrics()] == [
            (1, 10, 1),
            (2, 20, 2),
            (3, 35, 9),
        ]
        assert len(again.trajectories_path.read_text().splitlines()) == 2


def test_a_score_that_the_checkpoint_does_not_know_is_taken_again_and_stands_once(tmp_path):
    with RunDirectory.create(tmp_path, "first") as run:
        run.log_metrics({"eval/success": 0.25}, step=0, version=0)
        run.log_metrics({"reward": 1}, step=1, version=1)
        run.log_metrics({"reward": 2}, step=2, version=2)
        run.log_metrics({"eval/success": 0.5}, step=2, version=2)  # after the checkpoint of step 2, which tells of one
        assert run.rewind(2, scored={0}) == 1
        assert [(line["step"], line.get("eval/success")) for line in run.metrics()] == [(0, 0.25), (1, None), (2, None)]


def test_the_summary_is_whole_and_valid(tmp_path):
    with RunDirectory.create(tmp_path, "first") as run:
        run.write_summary({"reward_last": float("inf"), "staleness": {"histogram": {0: 3}}})
        assert json.loads(run.summary_path.read_text()) == {"reward_last": None, "staleness": {"histogram": {"0": 3}}}
        assert not list(run.path.glob("*.part"))


def test_folders_that_cannot_be(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="no folder can be made there"):
        RunDirectory.create(tmp_path / "file" / "runs", "first")
    with pytest.raises(ConfigError, match="no run to resume"):
        RunDirectory.open(tmp_path)
