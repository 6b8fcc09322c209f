"""Orders to a live run in any order and at any moment: it ends in a state that is whole, and goes on from it."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from asyncrl import attach, train
from asyncrl.config import load_config
from asyncrl.errors import ConfigError, InfrastructureError, RunStoppedError
from asyncrl.tasks.handle import Run
from asyncrl.telemetry.run_directory import read_json_lines
from tests.tasks.test_handle import settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LATE = 10_000
"""Steps of a run that only an order ends."""

VALUES: dict[str, tuple[Any, ...]] = {
    "trainer.lr": (1e-3, 5e-3, 2e-2),
    "trainer.max_grad_norm": (0.5, 2.0),
    "algorithm.loss": ("gspo", "ppo"),
}
REFUSED = (("trainer.lr", -1), ("rollout.max_new_tokens", 3), ("trainer.group_size", 4), ("no.key", 0), ("steps", "x"))


def reward(completion: str) -> float:
    return float(len(completion))


def disturb(draw: random.Random, runs: list[Run[Any]], *, orders: int) -> dict[str, Any]:
    """Give orders through several handles at once; return the last value of each key that was set."""
    wanted: dict[str, Any] = {}
    lock = threading.Lock()

    def give(seed: int) -> None:
        own = random.Random(seed)
        for _ in range(orders):
            run = own.choice(runs)
            order = own.choice(("pause", "resume", "resume", "set", "set", "refused", "look"))
            with contextlib.suppress(InfrastructureError):
                if order == "set":
                    key = own.choice(sorted(VALUES))
                    with lock:  # which of two is the last one would be unknown
                        run.set(key, value := own.choice(VALUES[key]))
                        wanted[key] = value
                elif order == "refused":
                    key, value = own.choice(REFUSED)
                    with pytest.raises(ConfigError):
                        run.set(key, value)
                elif order == "look":
                    assert run.step >= 0
                    assert repr(run)
                else:
                    getattr(run, order)()
            time.sleep(own.random() * 0.1)

    givers = [threading.Thread(target=give, args=(draw.random(),)) for _ in range(2)]
    for each in givers:
        each.start()
    for each in givers:
        each.join()
    return wanted


def first_step(run: Run[Any]) -> None:
    while not run.step:
        time.sleep(0.02)


def go_on(path: Path, *, more: int) -> None:
    """Resume the run for some more steps; it is whole, and so is the record of all that was done before."""
    done = max((line["step"] for line in read_json_lines(path / "metrics.jsonl") if "reward_mean" in line), default=0)
    run = train(resume=path, steps=done + more, reward=reward)
    summary = run.wait()
    assert summary.steps == done + more
    assert [line["step"] for line in run._steps()] == [*range(1, done + more + 1)]
    summary.tokens.check()
    with run.recording() as recording:
        replayed = recording.replay()
        assert replayed.first_difference is None
        assert replayed.compared >= done + more - 1  # a step that an end interrupted may not have been published


@pytest.mark.parametrize("seed", [1])
def test_a_run_that_was_ordered_about_and_stopped_goes_on(tmp_path: Path, seed: int):
    draw = random.Random(seed)
    run = train(**settings(tmp_path, reward=reward, steps=LATE))
    first_step(run)
    wanted = disturb(draw, [run, attach(run.path)], orders=8)
    run.resume()
    if wanted:  # what was accepted is what it trains with
        reached = run.step
        while run.step < reached + 2:
            time.sleep(0.02)
        config = load_config(run.path / "config.toml")
        assert {key: getattr(getattr(config, key.split(".")[0]), key.split(".")[1]) for key in wanted} == wanted
    time.sleep(draw.random() * 0.3)
    if draw.random() < 0.5:
        run.pause()
    stoppers = [threading.Thread(target=each.stop) for each in (run, attach(run.path))]
    for each in stoppers:
        each.start()
    for each in stoppers:
        each.join()
    assert run.state == "ended"
    with pytest.raises(RunStoppedError):
        run.wait()
    with pytest.raises(InfrastructureError, match="takes no orders now"):
        run.pause()
    go_on(run.path, more=2)


PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from asyncrl import train
from tests.tasks.test_handle import settings
from tests.tasks.test_hostile_orders import LATE, reward

train(**settings(Path({folder!r}), reward=reward, steps=LATE)).wait()
"""


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_ended_among_its_orders_goes_on(tmp_path: Path, ending: signal.Signals):
    program = PROGRAM.format(tests=str(Path(__file__).parents[2]), folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    try:
        while not (found := list((tmp_path / "runs").glob("run-*/config.toml"))):
            assert process.poll() is None
            time.sleep(0.05)
        run = attach(found[0].parent)
        first_step(run)
        timer = threading.Timer(0.5, process.send_signal, (ending,))
        timer.start()
        disturb(random.Random(int(ending)), [run, run], orders=8)
        timer.join()
        process.wait(60)
    finally:
        process.kill()
        process.wait()
    go_on(run.path, more=2)
