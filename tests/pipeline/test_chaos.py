"""Processes of real runs, killed at random: ``benchmarks/chaos.py`` for a few minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.ray
@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_whatever_is_killed_nothing_is_lost_repeated_or_made_up():
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "chaos.py"), "--kills", "8", "--seed", "1", "--json"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)},
    )
    assert done.stdout, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    figures = {each["name"]: each["value"] for each in told["figures"]}
    assert told["problems"] == []
    assert figures["kills"] == figures["witnesses"] == 8
    assert (figures["lost"], figures["duplicated"], figures["fabricated_rewards"]) == (0, 0, 0)
    assert len({fault["kind"] for fault in told["faults"]}) >= 4
    assert done.returncode == 0
