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


def test_answers_count_as_right_by_the_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    answers, file = tmp_path / "answers.jsonl", tmp_path / "run.toml"
    answers.write_text('{"task_number": 0, "reward": 0.7, "sampled_tokens": 4, "truncated": false}\n')
    file.write_text(
        'name = "a"\nsteps = 1\n[model]\nsource = "scratch"\n[env]\nname = "calculator"\n[eval]\nsuccess_reward = 0.5\n'
    )

    def share(*words: str) -> float:
        assert main(["eval", *words, "--answers", str(answers), "--json"]) == 0
        mean: float = json.loads(capsys.readouterr().out)["scores"]["avg@1"]["mean"]
        return mean

    assert share(str(file)) == share("--eval.success_reward", "0.6") == 1.0
    assert share(str(file), "--eval.success_reward", "0.8") == share() == 0.0
    assert main(["eval", "--answers", str(answers), "--eval.sucess_reward", "0.5"]) == 2
    assert "did you mean eval.success_reward" in capsys.readouterr().err
    assert main(["eval", str(tmp_path / "absent.toml"), "--answers", str(answers)]) == 2


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
