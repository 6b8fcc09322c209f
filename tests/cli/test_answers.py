"""``asyncrl eval --answers`` and ``asyncrl export``, without a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.cli.main import main


def test_answers_in_a_file_are_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "answers.jsonl"
    rewards = [(0, 1.0), (0, 0.0), (1, 1.0), (1, 1.0)]
    records = [
        {"task_number": task, "reward": reward, "sampled_tokens": 4, "truncated": False} for task, reward in rewards
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert main(["eval", "--answers", str(file), "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)["scores"]
    assert (scores["avg@2"]["mean"], scores["pass@2"]["mean"]) == (0.75, 1.0)
    assert main(["eval", "--answers", str(file)]) == 0
    assert "avg@2            0.7500  [0.5000, 1.0000]" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "message"), [(["export", "RUN", "--out", "OUT"], "it has no checkpoints")])
def test_an_export_of_nothing_is_refused(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    given = [str(tmp_path) if word == "RUN" else str(tmp_path / "out") if word == "OUT" else word for word in words]
    assert main(given) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_supervised_training_of_no_steps_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "run.toml"
    file.write_text('name = "first"\nsteps = 0\n[model]\nsource = "scratch"\n[env]\nname = "calculator"\n')
    assert main(["sft", str(file), "--runs", str(tmp_path / "runs")]) == 2
    assert "sft.steps = 0: nothing is trained\n  give the optimizer steps" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
