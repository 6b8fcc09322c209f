"""Processes of real runs, killed at random: ``benchmarks/chaos.py`` for a few minutes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

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
    assert (figures["lost"], figures["duplicated"], figures["invented"]) == (0, 0, 0)
    assert len({fault["kind"] for fault in told["faults"]}) >= 4
    assert done.returncode == 0


def printed(program: str, *arguments: object) -> Any:
    """Run a program that imports benchmarks; return the JSON that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS)},
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("before", ["", "[ 9.9 s] the process of rank 0 of trainer died during its lifetime"])
def test_a_kill_beside_the_one_that_ended_the_life_is_witnessed_in_either_order(tmp_path, before):
    program = """
import json, sys, time
from pathlib import Path
import chaos

run = object.__new__(chaos.HurtRun)  # without a life of its own: only what it said is looked at
run.folder, run.output, run.lives = Path(sys.argv[1]), Path(sys.argv[1]) / "output.txt", 2
run.output.write_text(sys.argv[2] + "\\nerror: WorkerDiedError: the process of rank 0 of trainer died during __init__")
found = []
for seconds in (0.7, -0.7, -7.0, 7.0, -17.0):
    now = time.monotonic()
    run.kills = [
        chaos.Kill("rollout", 11, "rollout-0", now, {}, lives=1),
        chaos.Kill("trainer", 12, "trainer", now + seconds, {}, lives=1),
    ]
    found.append(run.unwitnessed())
    run.kills.reverse()
    for kill in run.kills:
        kill.witness = ""
    found.append(run.unwitnessed())
print(json.dumps(found))
"""
    missing = [f"{tmp_path.name}: the death of rollout-0 (11) left no witness"]
    assert printed(program, tmp_path, before) == [[]] * 6 + [missing] * 4


def test_a_stop_that_nobody_names_counts_unless_its_life_or_a_named_stop_ended_the_process(tmp_path):
    program = """
import json, random, sys
from pathlib import Path
import chaos, freezes

freezes.LOOK_EVERY_S = 0.0
run = object.__new__(freezes.FrozenRun)
run.campaign = chaos.Campaign(Path(sys.argv[1]), "", 0, random.Random(0), 9, freezes.KINDS)
run.folder, run.output, run.lives = Path(sys.argv[1]), Path(sys.argv[1]) / "output.txt", 1
run.driver, run._looked, run._gone, run._ends, run._ledger, run._step = 1, 0.0, {}, {}, None, 0
run.output.write_text("process 12 of reward has not answered for 15 s")
now = 1e6
freezes.time.monotonic = lambda: now
living = {11, 12, 13, 14, 15}
freezes.chaos.processes = lambda: dict.fromkeys(living)
run.kills = [
    chaos.Kill("rollout", 11, "rollout-0", now, {}, lives=1),
    chaos.Kill("reward", 12, "reward", now, {}, lives=1),
    chaos.Kill("scoring", 13, "scoring process 13", now, {}, lives=1, teller=12),
    chaos.Kill("trainer", 14, "trainer", now, {}, lives=1),
    chaos.Kill("buffer", 15, "buffer", now, {}, lives=1),
]
run.campaign.kills = list(run.kills)
found = []
for gone, passed, run.driver in ((11, 5, 1), (12, 1, 1), (13, 1, 1), (14, 20, 1), (15, 5, 0)):
    living.discard(gone)
    now += passed
    run.look()
    found.append([kill.pid for kill in run.campaign.kills])
print(json.dumps([*found, [kill.pid for kill in run.kills if freezes.late(kill)]]))
"""
    every, but_scoring = [11, 12, 13, 14, 15], [11, 12, 14, 15]
    assert printed(program, tmp_path) == [every, every, but_scoring, but_scoring, [11, 12, 15], [11, 15]]


@pytest.mark.ray
@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_a_campaign_that_is_ended_early_tells_what_it_found_and_how_little_that_is():
    """As by Ctrl-C: the signal goes to every process of the group."""
    program = subprocess.Popen(
        [sys.executable, str(BENCHMARKS / "chaos.py"), "--kills", "1000", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)},
        start_new_session=True,
    )
    assert program.stderr is not None
    said = []
    for line in program.stderr:
        said.append(line)
        if line == "run 1 begins\n":
            os.killpg(program.pid, signal.SIGINT)
    output = program.communicate()[0]
    assert "SIGINT: the run under way goes on to its end\n" in said
    told = json.loads(output.splitlines()[-1])
    figures = {each["name"]: each["value"] for each in told["figures"]}
    (asked,) = [each for each in told["figures"] if each["name"] == "kills"]
    assert told["ended_by"] == "SIGINT"
    assert (asked["goal"], asked["holds"]) == ("at least 1000", False)
    assert told["problems"] == []
    assert figures["runs"] == figures["lives, exit code 0"] == 1
    assert (figures["lost"], figures["duplicated"], figures["invented"]) == (0, 0, 0)
    assert program.returncode == 0
