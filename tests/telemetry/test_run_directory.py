"""The folder of a run."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.telemetry import RunDirectory
from asyncrl.telemetry.run_directory import read_json_lines, rewrite_json_lines


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
        with pytest.raises(ValueError, match="step, version"):
            run.log_metrics({"step": 1, "version": 2}, step=3, version=2)
    assert run.metrics() == [
        {"step": 3, "time_s": 1.5, "version": 2, "reward": 0.25, "loss": None, "not_finite": {"loss": "nan"}}
    ]


def test_a_folder_in_use_names_its_owner(tmp_path):
    with RunDirectory.create(tmp_path, "first") as run:
        run.write_config("")
        with pytest.raises(ConfigError, match=rf"in use by process {os.getpid()} on .* since \d{{4}}-"):
            RunDirectory.open(run.path)
        run.log_metrics({"a": 1}, step=1, version=0)
    with RunDirectory.open(run.path) as again:
        assert len(again.metrics()) == 1


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    program = (
        "import os, sys; from pathlib import Path; from asyncrl.telemetry import RunDirectory;"
        "run = RunDirectory.create(Path(sys.argv[1]), 'first'); run.write_config('');"
        "print(run.path, flush=True); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE, text=True, check=False)
    RunDirectory.open(Path(killed.stdout.strip())).close()


@pytest.mark.parametrize("damage", [b'{"step": 2, \xff', b"{", b"5", b'"step"', b"[1]"])
def test_damaged_lines_are_set_aside(tmp_path, damage, caplog):
    with RunDirectory.create(tmp_path, "first") as run:
        run.write_config("")
        for step in (1, 2, 3):
            run.log_metrics({"reward": step}, step=step, version=step)
            run.log_trajectory({"step": step})
    run.summary_path.write_bytes(damage + b"{")
    before = {}
    for path in (run.metrics_path, run.trajectories_path):
        first, _, third, _ = path.read_bytes().split(b"\n")
        before[path] = b"\n".join([first, damage, third, b""])
        path.write_bytes(before[path])
    with RunDirectory.open(run.path) as again:
        assert [line["step"] for line in again.metrics()] == [1, 3]
        assert again.rewind(1) == 1
        assert again.summary() is None
    for path, content in before.items():
        aside = path.with_name(path.name + ".damaged")
        assert aside.read_bytes() == content
        assert aside.name in caplog.text
    assert run.summary_path.with_name("summary.json.damaged").is_file()


def test_a_folder_in_the_place_of_a_file_is_set_aside(tmp_path, caplog):
    with RunDirectory.create(tmp_path, "first") as run:
        run.write_config("")
    names = ("metrics.jsonl", "trajectories.jsonl", "timeline.json", "status.json", "summary.json", "logs/driver.log")
    for name in names:
        (run.path / name).unlink(missing_ok=True)
        (run.path / name).mkdir()
    with RunDirectory.open(run.path) as again:
        assert (again.metrics(), again.summary()) == ([], None)
    assert all(f"{Path(name).name}.damaged" in caplog.text for name in names)


def test_damaged_lines_are_left_out_where_a_run_is_only_read(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": \xff}\n' + b"[" * 200_000 + b'\n{"step": 4}\n')
    assert read_json_lines(path) == [{"step": 1}, {"step": 4}]
    assert f"{path}: 2 damaged lines are left out" in caplog.text
    assert "cut off" not in caplog.text
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    assert read_json_lines(path) == [{"step": 1}]
    assert f"{path}: the last line is left out: it was cut off" in caplog.text


def test_a_changed_letter_of_a_trajectory_is_noticed(tmp_path, caplog):
    with RunDirectory.create(tmp_path, "first") as run:
        run.write_config("")
        for step in (1, 2):
            run.log_trajectory({"step": step, "text": "a \u00e4 \U0001f600", "reward": 0.1, "parts": {1: math.nan}})
    whole = run.trajectories_path.read_bytes()
    path = run.trajectories_path
    assert [line["step"] for line in read_json_lines(path)] == [1, 2]
    assert all("xxh3_64" not in line for line in read_json_lines(path))
    path.write_bytes(whole.replace(b'"text": "a', b'"text": "e', 1))
    assert [line["step"] for line in read_json_lines(path)] == [2]
    assert "1 damaged lines are left out" in caplog.text
    assert rewrite_json_lines(path, lambda record: record["step"] != 2) == 1
    path.write_bytes(whole)
    assert rewrite_json_lines(path, lambda record: record["step"] == 2) == 1
    assert path.read_bytes() == whole.split(b"\n")[1] + b"\n"


def test_a_changed_configuration_is_kept(tmp_path):
    with RunDirectory.create(tmp_path, "first") as run:
        run.write_config("a = 1\n")
        run.write_config("a = 1\n", step=3)
        assert [path.name for path in run.path.glob("config*")] == ["config.toml"]
        run.write_config("a = 2\n", step=5)
        assert (run.path / "config-5.toml").read_text() == "a = 1\n"
        assert run.config_path.read_text() == "a = 2\n"
        run.write_config("a = 3\n", step=5)  # resumed once more before the next checkpoint
        assert (run.path / "config-5.toml").read_text() == "a = 1\n"


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
        again.close()
        assert [(line["step"], line["time_s"], line["reward"]) for line in again.metrics()] == [
            (1, 10, 1),
            (2, 20, 2),
            (3, 35, 9),
        ]
        assert len(again.trajectories_path.read_text().splitlines()) == 2


def test_a_score_that_came_after_its_checkpoint_stays(tmp_path):
    with RunDirectory.create(tmp_path, "first") as run:
        run.log_metrics({"eval/success": 0.25}, step=0, version=0)
        run.log_metrics({"reward": 1}, step=1, version=1)
        run.log_metrics({"reward": 2}, step=2, version=2)
        run.log_metrics({"eval/success": 0.5}, step=2, version=2)  # after the checkpoint of step 2
        run.log_metrics({"reward": 3}, step=3, version=3)
        assert run.rewind(2) == 1
        scores = [(line["step"], line.get("eval/success")) for line in run.metrics()]
        assert scores == [(0, 0.25), (1, None), (2, None), (2, 0.5)]


def test_the_summary_is_whole_and_valid(tmp_path):
    with RunDirectory.create(tmp_path, "first") as run:
        run.write_summary({"reward_last": float("inf"), "staleness": {"histogram": {0: 3}}})
        assert json.loads(run.summary_path.read_text()) == {"reward_last": None, "staleness": {"histogram": {"0": 3}}}
        assert not list(run.path.glob("*.part"))


def test_folders_that_cannot_be(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="a folder cannot be made there"):
        RunDirectory.create(tmp_path / "file" / "runs", "first")
    with pytest.raises(ConfigError, match="no run to resume"):
        RunDirectory.open(tmp_path)
