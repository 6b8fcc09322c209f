"""What is read of a run's folder: shapes of other programs, names that are no text, searches that end in time."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from asyncrl.page import runs
from asyncrl.page.runs import RunFolder, RunFolders
from asyncrl.page.server import _json
from asyncrl.telemetry.run_directory import RunDirectory


def made(root: Path, *, rollouts: int = 6) -> Path:
    with RunDirectory.create(root, "run") as run:
        run.write_config("")
        for number in range(rollouts):
            text = f"Grüße {number}" if number % 2 else f"Plain {number}"
            run.log_trajectory({"step": number, "text": text, "reward": number / 10, "task": {"prompt": "TEXT"}})
    return run.path


SHAPES = [{"idle": 3}, {"advice": ["x"]}, {"failures": {"a": 1}}, {"tokens": None}, {"staleness": {"histogram": []}}]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("file", ["summary.json", "status.json"])
def test_a_file_of_another_shape_is_damage(tmp_path: Path, file: str, shape: dict[str, object]):
    path = made(tmp_path)
    (path / file).write_text(json.dumps(shape))
    found = RunFolder(path).overview()
    known_there = file == "summary.json" or set(shape) & {"idle", "advice"}
    assert found["damaged"] == ({file: 1} if known_there else {})
    assert (found["idle"], found["advice"]) == ({}, None)
    assert RunFolder(path).failures()["failures"] == {}


def test_metrics_that_come_and_go_stay_beside_their_steps(tmp_path: Path):
    with RunDirectory.create(tmp_path, "run") as run:
        run.write_config("")
        for step, more in ((1, {}), (2, {"train/kl": 0.5}), (3, {})):
            run.log_metrics({"reward_mean": step / 4, **more}, step=step, version=step)
    folder = RunFolder(run.path)
    curves = folder.overview()["curves"]
    assert (curves["step"], curves["train/kl"]) == ([1.0, 2.0, 3.0], [None, 0.5, None])
    assert folder.line()["reward"] == 0.75


def test_what_a_resume_removes_is_gone_at_once(tmp_path: Path):
    with RunDirectory.create(tmp_path, "run") as run:
        run.write_config("")
        run.log_metrics({"reward_mean": 0.5}, step=1, version=1)
        run.log_trajectory({"step": 1, "text": "one"})
    shown, listed = RunFolder(run.path), RunFolder(run.path)
    assert (shown.overview()["step"], shown.rollouts()["all"], listed.line()["step"]) == (1, 1, 1)
    with RunDirectory.open(run.path) as again:
        again.rewind(0)
        assert (shown.overview()["curves"], shown.rollouts()["all"], listed.line()["reward"]) == ({}, 0, None)
        again.log_metrics({"reward_mean": 0.25}, step=1, version=1)
    assert shown.overview()["curves"]["reward_mean"] == [0.25]


def test_a_list_of_runs_keeps_the_newest_numbers_alone(tmp_path: Path):
    with RunDirectory.create(tmp_path, "run") as run:
        run.write_config("")
        for step in range(1, 4):
            run.log_metrics({"reward_mean": step / 4, "train/kl": 0.5}, step=step, version=step)
    folder = RunFolder(run.path)
    line = folder.line()
    assert (line["step"], line["reward"], line["success"]) == (3, 0.75, None)
    assert folder._steps.by_name.keys() == {"step", "reward_mean", "time_s"}
    assert all(len(column) == 1 for column in folder._steps.by_name.values())
    assert folder.overview()["curves"]["train/kl"] == [0.5, 0.5, 0.5]
    assert folder.line() == line


def test_damaged_rollouts_are_named(tmp_path: Path):
    path = made(tmp_path)
    lines = (path / "trajectories.jsonl").read_bytes().splitlines(keepends=True)
    damaged = [lines[0], b"[" + lines[1], lines[2].replace(b"Plain", b"Plane")]
    (path / "trajectories.jsonl").write_bytes(b"".join(damaged))
    folder = RunFolder(path)
    found = folder.rollouts()
    assert (found["all"], found["damaged"]) == (2, {"trajectories.jsonl": 1})
    assert (folder.rollout(1), folder.rollouts(text="Plane")["rollouts"]) == (None, [])


def test_a_search_answers_in_time_and_says_where_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = RunFolder(made(tmp_path))

    def search(text: str) -> tuple[list[int], int | None]:
        found = folder.rollouts(text=text)
        return [each["number"] for each in found["rollouts"]], found["before"]

    assert search("plain") == ([4, 2, 0], None)
    assert search("GRÜSSE") == ([5, 3, 1], None)
    assert search("text") == ([5, 4, 3, 2, 1, 0], None)  # of the task
    assert search("reward") == ([], None)  # a name in the line, not a text of the rollout
    monkeypatch.setattr(runs, "SEARCH_S", -1.0)
    assert search("plain") == ([], 6)
    assert [each["number"] for each in folder.rollouts(before=3, count=2)["rollouts"]] == [2, 1]


def test_a_name_that_is_no_text_is_listed_and_found(tmp_path: Path):
    path = made(tmp_path)
    path.rename(tmp_path / os.fsdecode(b"caf\xe9"))
    folders = RunFolders(tmp_path)
    (line,) = folders.lines()
    assert line["name"] == "caf\\udce9"
    found = folders.find(line["name"])
    assert found is not None
    assert found.rollouts()["all"] == 6


def test_half_of_a_character_is_shown_as_its_escape():
    body = _json({"text": "a\ud800", "reward": float("nan")}).body
    assert json.loads(bytes(body)) == {"text": "a\\ud800", "reward": None}
