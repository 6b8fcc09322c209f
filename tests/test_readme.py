"""What the README says is what happens."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_its_program_prints_what_it_says():
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, "README.md", "exec"), {"__name__": "__main__"})
    (promised,) = re.findall(r"print\(.*#\s*(.+)", program)
    assert printed.getvalue().strip() == promised.strip()


def test_its_tree_names_what_is_there_and_all_of_it():
    (tree,) = re.findall(r"## The house\n\n```\n(.*?)```", README, re.DOTALL)
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
