"""A run in a real marimo notebook: it can be awaited, and as the last line of a cell it shows itself, and again."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = os.environ.get("ASYNCRL_MARIMO_PACKAGES", "")
"""Folder with marimo, which may need other versions of packages than the rest of the tests."""
NOTEBOOK = """
import marimo

app = marimo.App()


@app.cell
def _():
    import asyncrl

    run = asyncrl.train(
        model="scratch",
        demonstrations=[{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "1"}]}] * 8,
        data=[{"prompt": str(number)} for number in range(8)],
        reward=lambda completion: float(len(completion) > 1),
        steps=30,
        sft={"steps": 2, "batch_size": 8},
        rollout={"max_new_tokens": 4},
        cluster={"backend": "local"},
    )
    run
    return (run,)


@app.cell
async def _(run):
    steps = [step["step"] async for step in run]
    f"{(await run).steps} of {len(steps)} steps"
    return
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not PACKAGES and importlib.util.find_spec("marimo") is None, reason="needs marimo, or ASYNCRL_MARIMO_PACKAGES"
)
def test_a_run_shows_itself_and_is_awaited(tmp_path: Path):
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    paths = [str(Path(__file__).parents[2]), *filter(None, [PACKAGES, os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "marimo", "export", "html", "notebook.py", "-o", "notebook.html"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shown = (tmp_path / "notebook.html").read_text()
    steps = [int(step) for step in re.findall(r"(?:training|finished), step (\d+) of 30", shown)]
    assert steps
    assert steps[0] > 0, "it was not drawn again"
    assert "30 of 30 steps" in shown
