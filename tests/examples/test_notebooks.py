"""The notebooks run from top to bottom, each in a kernel and a folder of its own, and show what they promise."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"
NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


def shown(name: str, folder: Path) -> tuple[str, int]:
    """Run a notebook; return what it printed, and how many pictures it drew."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    NotebookClient(
        notebook, timeout=110, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    outputs: list[Any] = [each for cell in notebook.cells if cell.cell_type == "code" for each in cell.outputs]
    text = "".join(each.text for each in outputs if each.output_type == "stream" and each.name == "stdout")
    text += "".join(each.data.get("text/plain", "") + "\n" for each in outputs if "data" in each)
    return text, sum("image/png" in each.get("data", {}) for each in outputs)


def lists_of(text: str) -> list[list[float]]:
    return [ast.literal_eval(each) for each in re.findall(r"^\[[\d., ]+\]$", text, re.MULTILINE)]


@pytest.mark.parametrize("name", NAMES)
def test_they_are_stored_without_outputs(name: str):
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert all(cell.outputs == [] and cell.execution_count is None for cell in notebook.cells if "outputs" in cell)


@pytest.mark.slow
def test_a_first_run_learns_goes_on_and_is_asked(tmp_path: Path):
    text, pictures = shown("first_run", tmp_path)
    first, last = map(float, re.findall(r"reward ([\d.]+) at the first step, ([\d.]+) at the last", text)[0])
    assert last > first + 0.3
    assert "50 steps" in text
    assert pictures == 1


@pytest.mark.slow
def test_own_tasks_are_learned(tmp_path: Path):
    text, _ = shown("own_task", tmp_path)
    words, tools, countdowns = lists_of(text)
    assert max(words[-3:]) > words[0] + 0.2
    assert tools[-1] > tools[0] + 0.4
    assert countdowns[-1] > countdowns[0] + 0.3


@pytest.mark.slow
def test_an_agent_is_trained_over_a_pool_whose_weights_change_under_way(tmp_path: Path):
    text, _ = shown("rollout_pool", tmp_path)
    (rounds,) = re.findall(r"reward by round: ([\d. ]+) at version 13", text)
    rewards = [float(each) for each in rounds.split()]
    assert sum(rewards[-4:]) > sum(rewards[:4]) + 0.3
    spans = ast.literal_eval(re.findall(r"^\[\{'version'.*?\}\]", text, re.MULTILINE | re.DOTALL)[0])
    assert [span["version"] for span in spans] == [0, 1]


@pytest.mark.slow
def test_old_samples_are_questioned_and_trained_on_again(tmp_path: Path):
    text, pictures = shown("off_policy", tmp_path)
    # The run goes on between step 10 and the pause, whose step it completes.
    (recorded,) = re.findall(r"^(\d+) steps are recorded", text, re.MULTILINE)
    assert 10 <= int(recorded) < 30
    assert "the same weights: True" in text
    by_hand, logged = (float(re.findall(rf"^{who} ([\d.]+)$", text, re.MULTILINE)[0]) for who in ("by hand", "the run"))
    assert by_hand == pytest.approx(logged, abs=2e-4)
    ages = [float(each) for each in re.findall(r"^age \w+ +effective sample share ([\d.]+)", text, re.MULTILINE)]
    assert len(ages) > 2
    assert ages[0] > ages[-1]
    assert len(re.findall(r"^(?:none|tis|mis|icepop|gentle) +[\d.]+", text, re.MULTILINE)) == 5
    assert pictures == 2


@pytest.mark.slow
def test_a_model_is_scored_before_and_after(tmp_path: Path):
    text, pictures = shown("evaluation", tmp_path)
    before, after = re.findall(r"avg@16 +([\d.]+) +\(", text)
    assert float(after) > float(before) + 0.2
    scored = [tuple(map(int, each)) for each in re.findall(r"^step +(\d+) +version +(\d+)", text, re.MULTILINE)]
    assert [step for step, _ in scored] == [0, 10, 20, 30]
    assert all(version >= step for step, version in scored)  # training goes on meanwhile
    assert pictures == 1
