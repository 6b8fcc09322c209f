"""Runs that die where something reaches the disk, and files that are damaged: ``benchmarks/`` has the programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def told_by(program: str, *arguments: str) -> tuple[dict[str, Any], list[Any]]:
    """The figures of a benchmark by name, and what it found wrong."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / program), "--json", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(BENCHMARKS.parent)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    return {each["name"]: each["value"] for each in told["figures"]}, told["wrong"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("world", "points"), [("model", 40), ("run", 4)])
def test_stopped_at_any_point_and_resumed_the_run_ends_the_same(world: str, points: int):
    figures, wrong = told_by("crash_points.py", "--points", str(points), "--world", world, "--jobs", "2")
    assert wrong == []
    assert figures["equal weights after resuming"] == figures["points died at"] == points
    assert figures["deaths with a witness"] >= points
    # There are 500 points to die at, and every kind of operation is among them.
    assert figures["points of the run"] >= (500 if world == "model" else 100)
    kinds = {name.removeprefix("points, ") for name in figures if name.startswith("points, ")}
    assert kinds >= {"before write", "written", "synced", "before rename", "renamed", "inserted", "committed"}


@pytest.mark.slow
def test_no_damage_to_a_ledger_or_a_checkpoint_passes_unnoticed():
    figures, wrong = told_by("damage.py", "--damages", "400", "--jobs", "2")
    assert wrong == []
    assert figures["reported, or without any meaning"] == figures["damages"] == 400
