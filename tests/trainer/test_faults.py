"""Whole runs on Ray, in a process of their own, that are hurt on purpose."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from asyncrl.config import Config

pytestmark = pytest.mark.ray

WITHIN_S = 60.0
"""Far beyond what anything here takes; a test that needs it has found a hang."""


@dataclass
class Command:
    process: subprocess.Popen[str]
    output: Path
    known: set[tuple[int, str]] = field(default_factory=set)

    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, text: str) -> None:
        """Until the command has written ``text``."""
        deadline = time.monotonic() + WITHIN_S
        while text not in self.text():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.05)

    def family(self) -> dict[tuple[int, str], str]:
        """Every living process the command ever started, however indirectly: (pid, start time) -> command line."""
        parents, living = {}, {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    title = (entry / "cmdline").read_text().replace("\0", " ")
                except OSError:
                    continue
                if fields[0] != "Z":
                    parents[int(entry.name)] = int(fields[1])
                    living[int(entry.name)] = ((int(entry.name), fields[19]), title)
        wanted = {self.process.pid}
        while grown := {pid for pid, parent in parents.items() if parent in wanted} - wanted:
            wanted |= grown
        self.known |= {living[pid][0] for pid in wanted if pid in living}
        return {identity: title for identity, title in living.values() if identity in self.known}


@contextmanager
def train(config: Config, folder: Path, *, group: bool = False) -> Iterator[Command]:
    """Run the command, with ``group`` as ``timeout`` does: in a process group of its own, which it does not lead."""
    file = folder / "run.toml"
    file.write_text(config.to_toml())
    output = folder / "output.txt"
    with output.open("w") as stream:
        process = subprocess.Popen(
            [
                *(["sh", "-c", '"$@"; exit $?', "sh"] if group else []),
                sys.executable,
                "-m",
                "asyncrl",
                "train",
                str(file),
            ],
            process_group=0 if group else None,
            stdout=stream,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        command = Command(process, output)
        try:
            yield command
        finally:
            for pid, _start in command.family():
                os.kill(pid, signal.SIGKILL)
            process.wait()


def nothing_is_left(command: Command) -> None:
    """No process (and so no port) and no shared memory of the run is left, at most moments after it ended."""
    deadline = time.monotonic() + 20
    while command.family():
        assert time.monotonic() < deadline, f"processes left behind: {command.family()}"
        time.sleep(0.05)
    assert not list(Path("/dev/shm").glob(f"asyncrl-{command.process.pid}*"))


@pytest.fixture
def long_config(small_config: Callable[..., Config]) -> Config:
    """A run on Ray that would take for ever."""
    return small_config(steps=1_000_000, cluster={"backend": "ray"}, telemetry={"progress": "plain"})


@pytest.mark.slow
def test_a_dead_trainer_ends_the_run_with_its_name_within_seconds(long_config: Config, tmp_path: Path):
    with train(long_config, tmp_path) as command:
        command.wait_for("tokens/s")
        assert len(command.family()) > 3
        trainer = next(pid for (pid, _start), title in command.family().items() if "ray::trainer" in title)
        killed = time.monotonic()
        os.kill(trainer, signal.SIGKILL)
        assert command.process.wait(WITHIN_S) == 1
        assert time.monotonic() - killed < 20
        assert "WorkerDiedError" in command.text()
        assert "rank 0 of trainer" in command.text()
        assert "Traceback" not in command.text()
        nothing_is_left(command)


@pytest.mark.slow
def test_a_prompt_that_kills_every_replica_costs_no_run(small_config: Callable[..., Config], tmp_path: Path):
    note = tmp_path / "died"
    world = {"name": "worlds:DigitsFactory", "options": {"dies_on": 20, "note": str(note)}}
    config = small_config(steps=40, cluster={"backend": "ray"}, env=world, telemetry={"progress": "plain"})
    with train(config, tmp_path) as command:
        assert command.process.wait(3 * WITHIN_S) == 0, command.text()
        assert note.exists()
        (run,) = (tmp_path / "runs").iterdir()
        assert "3 replicas died or failed under the same rollouts" in (run / "logs" / "driver.log").read_text()
        summary = json.loads((run / "summary.json").read_text())
        tokens = summary["tokens"]
        assert summary["steps"] == 40
        assert tokens["generated"] == tokens["trained"] + sum(tokens["dropped"].values()) + tokens["in_flight"]
        nothing_is_left(command)


@pytest.mark.slow
def test_a_killed_rollout_replica_costs_no_run(small_config: Callable[..., Config], tmp_path: Path):
    config = small_config(
        steps=400, cluster={"backend": "ray"}, rollout={"replicas": 2}, telemetry={"progress": "plain"}
    )
    with train(config, tmp_path) as command:
        command.wait_for("tokens/s")
        replica = next(pid for (pid, _start), title in command.family().items() if "rollout-0" in title)
        os.kill(replica, signal.SIGKILL)
        assert command.process.wait(2 * WITHIN_S) == 0, command.text()
        (run,) = (tmp_path / "runs").iterdir()
        log = (run / "logs" / "driver.log").read_text()
        assert "replica rollout-0 is lost" in log
        assert "replica rollout-0 is back, with weight version" in log
        tokens = json.loads((run / "summary.json").read_text())["tokens"]
        assert tokens["generated"] == tokens["trained"] + sum(tokens["dropped"].values()) + tokens["in_flight"]
        nothing_is_left(command)


@pytest.mark.slow
def test_a_killed_reward_worker_costs_no_run(small_config: Callable[..., Config], tmp_path: Path):
    reward = {"source": "function", "options": {"function": "worlds:length_score"}}
    config = small_config(steps=200, cluster={"backend": "ray"}, reward=reward, telemetry={"progress": "plain"})
    with train(config, tmp_path) as command:
        command.wait_for("tokens/s")
        worker = next(pid for (pid, _start), title in command.family().items() if "ray::reward" in title)
        os.kill(worker, signal.SIGKILL)
        assert command.process.wait(2 * WITHIN_S) == 0, command.text()
        (run,) = (tmp_path / "runs").iterdir()
        assert "restarting ranks [0] (restart 1)" in (run / "logs" / "driver.log").read_text()
        tokens = json.loads((run / "summary.json").read_text())["tokens"]
        assert tokens["generated"] == tokens["trained"] + sum(tokens["dropped"].values()) + tokens["in_flight"]
        nothing_is_left(command)


@pytest.mark.slow
@pytest.mark.parametrize(("signal_number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_and_leaves_nothing_behind(
    long_config: Config, tmp_path: Path, signal_number: int, status: int
):
    with train(long_config, tmp_path) as command:
        command.wait_for("tokens/s")
        assert len(command.family()) > 3
        command.process.send_signal(signal_number)
        assert command.process.wait(WITHIN_S) == status, command.text()
        assert "Traceback" not in command.text()
        nothing_is_left(command)


@pytest.mark.slow
def test_sigterm_to_the_process_group_ends_the_run_as_ctrl_c_does(small_config: Callable[..., Config], tmp_path: Path):
    config = small_config(
        steps=1_000_000, cluster={"backend": "ray"}, telemetry={"progress": "plain"}, checkpoint={"every": 1_000_000}
    )
    with train(config, tmp_path, group=True) as command:
        command.wait_for("tokens/s")
        (driver,) = (
            pid for (pid, _), title in command.family().items() if " -m asyncrl train" in title and "sh -c" not in title
        )
        sent = time.monotonic()
        os.killpg(command.process.pid, signal.SIGTERM)
        command.process.wait(WITHIN_S)
        while Path(f"/proc/{driver}").exists() and time.monotonic() - sent < WITHIN_S:
            time.sleep(0.05)
        assert time.monotonic() - sent < 20
        assert "Traceback" not in command.text()
        assert "go on with: asyncrl train --resume" in command.text()
        nothing_is_left(command)
    (run,) = (tmp_path / "runs").iterdir()
    assert [*(run / "checkpoints").glob("step-*")]


@pytest.mark.slow
@pytest.mark.parametrize("role", ["trainer", "rollout"])
def test_a_frozen_process_is_named_and_mended_like_a_death(long_config: Config, tmp_path: Path, role: str):
    cluster = long_config.cluster.model_copy(update={"health_check_timeout_s": 9.0})
    with train(long_config.model_copy(update={"cluster": cluster}), tmp_path) as command:
        command.wait_for("tokens/s")
        frozen = next(pid for (pid, _start), title in command.family().items() if f"ray::{role}" in title)
        os.kill(frozen, signal.SIGSTOP)
        (run,) = (tmp_path / "runs").iterdir()
        log = run / "logs" / "driver.log"
        deadline = time.monotonic() + WITHIN_S
        while f"(process {frozen} on" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        if role == "trainer":
            assert command.process.wait(WITHIN_S) == 1
            assert "rank 0 of trainer" in command.text()
            nothing_is_left(command)
        else:
            while "its process is killed" not in log.read_text():
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            steps = (run / "metrics.jsonl").read_text().count("train/loss")
            while (run / "metrics.jsonl").read_text().count("train/loss") < steps + 3:
                assert command.process.poll() is None, command.text()
                assert time.monotonic() < deadline + WITHIN_S, log.read_text()
                time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "how"), [("start", signal.SIGKILL), ("train", signal.SIGKILL), ("train", signal.SIGSTOP)]
)
def test_a_head_that_is_gone_ends_the_run_by_name(long_config: Config, tmp_path: Path, when: str, how: signal.Signals):
    saving = long_config.checkpoint.model_copy(update={"every": 20})
    with train(long_config.model_copy(update={"checkpoint": saving}), tmp_path) as command:
        deadline = time.monotonic() + WITHIN_S
        while not [*tmp_path.glob("runs/*/logs/ray")]:  # Ray is connected, and no worker is placed yet
            assert time.monotonic() < deadline, command.text()
        if when == "train":
            command.wait_for("tokens/s")
        (head,) = (pid for (pid, _), title in command.family().items() if "gcs_server" in title)
        os.kill(head, how)
        killed = time.monotonic()
        assert command.process.wait(WITHIN_S) == 1, command.text()
        assert time.monotonic() - killed < 34  # 14 s of silence, and the end; a blocked loop is aborted 11 s later
        assert "Ray's head (GCS at" in command.text()
        assert "Traceback" not in command.text()
        nothing_is_left(command)
    if when == "train":
        (run,) = (tmp_path / "runs").iterdir()
        assert [*(run / "checkpoints").glob("step-*")]


@pytest.mark.slow
def test_a_signal_while_the_workers_start_leaves_nothing_behind_either(long_config: Config, tmp_path: Path):
    with train(long_config, tmp_path) as command:
        command.wait_for("start")
        time.sleep(3.0)  # anywhere in the start-up will do
        assert command.family()
        command.process.send_signal(signal.SIGINT)
        assert command.process.wait(WITHIN_S) == 130, command.text()
        nothing_is_left(command)
