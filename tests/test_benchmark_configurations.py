"""What benchmarks train with are configurations: a key that was renamed is found here, and not hours later."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = """
from pathlib import Path
from types import SimpleNamespace

import chaos, crash_points, curriculum, damaged_runs, delivery, freezes, planted_defects, replay, staleness_learning
from asyncrl.config import Config

runs = Path("runs")
given = {"seed": 0, "steps": 2, "latency_s": 0.0, "lr": 1e-4, "clip": 0.1, "max_staleness": 4, "runs": "runs"}
for case in staleness_learning.CASES:
    Config.from_mapping(staleness_learning.configuration(case, **given))
Config.from_mapping(curriculum.configuration(candidates=4, seed=0, steps=2, warm_steps=2, runs="runs"))
Config.from_mapping(damaged_runs.config(runs))
for number in range(20):
    Config.from_mapping(replay.config_of(number, runs)[0])
    chaos.config_of(SimpleNamespace(address="auto"), runs, number, **freezes.FrozenRun.cluster)
crash_points.run_config(runs)
delivery.configuration("float32")
for settings in ({}, planted_defects.WAIT, planted_defects.SCORED):
    planted_defects.tables(runs, settings)
"""


@pytest.mark.slow
def test_tables_of_benchmarks_are_configurations() -> None:
    """In a process of its own, since these programs set variables of the environment."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
