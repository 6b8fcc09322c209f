"""Trajectories to be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.cli.main import main
from asyncrl.telemetry.report import trajectory_text

RECORD = {
    "step": 3,
    "group_id": 7,
    "task": {"ground_truth": "4"},
    "text": "<|user|>2+2\n<|assistant|>4<|end|>\n",
    "reward": 1.0,
    "reward_parts": {"math": 1.0, "format": 0.5},
    "finish": "done",
    "weight_versions": [1, 2],
}


def test_a_line_about_it_and_the_conversation_as_it_went():
    assert trajectory_text(RECORD).split("\n") == [
        "step 3, group_id 7: reward 1 (math 1, format 0.5), done, weight version 1 to 2",
        "expected: 4",
        "<|user|>2+2",
        "<|assistant|>4<|end|>",
    ]
    assert trajectory_text({"text": "x", "weight_versions": [2]}) == "weight version 2\nx"


@pytest.mark.parametrize(
    ("parts", "shown"),
    [
        ([1.0], ""),
        ("math", ""),
        ({"x": "0.5"}, " (x 0.5)"),
        ({"x": float("nan")}, " (x nan)"),
        ({"x": None}, " (x None)"),
        ({"x": True, 3: 1 / 3}, " (x 1, 3 0.3333)"),
    ],
)
def test_parts_of_a_reward_that_are_no_numbers_by_name(parts: object, shown: str):
    assert trajectory_text({"reward": 1.0, "reward_parts": parts, "text": "x"}) == f"reward 1{shown}\nx"


def test_the_command_prints_those_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    records = [{**RECORD, "step": step, "text": f"text of {step}"} for step in (1, 2, 2)]
    (tmp_path / "trajectories.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert main(["trajectories", str(tmp_path), "--step", "2"]) == 0
    assert capsys.readouterr().out.count("text of 2") == 2
    assert main(["trajectories", str(tmp_path), "--last", "1"]) == 0
    assert capsys.readouterr().out.count("text of") == 1
    assert main(["trajectories", str(tmp_path), "--step", "9"]) == 2
    assert main(["trajectories", str(tmp_path / "absent")]) == 2
    assert "no trajectory of step 9" in (told := capsys.readouterr().err)
    assert "it has no trajectories.jsonl" in told
