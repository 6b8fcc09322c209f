"""Which cluster a program joins, and which it starts."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from asyncrl.errors import ResourceError
from asyncrl.single_controller.ray.cluster import RayCluster


@pytest.mark.parametrize(
    ("address", "variable", "joined"),
    [
        (None, "", "local"),
        ("local", "", "local"),
        ("local", "10.0.0.1:6379", "local"),
        (None, "10.0.0.1:6379", "10.0.0.1:6379"),
        ("10.0.0.2:6379", "10.0.0.1:6379", "10.0.0.2:6379"),
    ],
)
def test_a_cluster_is_started_unless_an_address_is_given(
    address: str | None, variable: str, joined: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {}

    def init(**given: Any) -> SimpleNamespace:
        options.update(given)
        return SimpleNamespace(address_info={})

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setenv("RAY_ADDRESS", variable)
    with RayCluster(address=address, num_cpus=3, log_folder=tmp_path):
        assert options["address"] == joined
        assert options.get("num_cpus") == (3 if joined == "local" else None)


def test_the_logs_of_a_resumed_run_are_those_of_its_own_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sessions = [tmp_path / name for name in ("rebooted", "second", "third")]
    for session in sessions[1:]:
        (session / "logs").mkdir(parents=True)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    for session in sessions:  # the first one's folder is gone when the second process starts
        joined = SimpleNamespace(address_info={"session_dir": str(session)})
        monkeypatch.setattr(ray, "init", lambda joined=joined, **_: joined)
        with RayCluster(address="10.0.0.1:6379", log_folder=tmp_path):
            assert (tmp_path / "ray").readlink() == session / "logs"
    assert "have no link" not in caplog.text
    (tmp_path / "ray").unlink()
    (tmp_path / "ray").write_text("of another program")
    with RayCluster(address="10.0.0.1:6379", log_folder=tmp_path):
        assert (tmp_path / "ray").read_text() == "of another program"
    assert f"have no link at {tmp_path / 'ray'}: File exists" in caplog.text


def test_a_start_that_fails_is_an_error_of_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**given: Any) -> SimpleNamespace:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ResourceError, match="no Ray cluster could be started here: The current node timed out"):
        RayCluster(log_folder=tmp_path).__enter__()


HEADLESS = """
import asyncio, sys, time
from pathlib import Path
from types import SimpleNamespace
import ray
from asyncrl.runtime import failure_of_program, run_with_signals
from asyncrl.single_controller.liveness import Liveness
from asyncrl.single_controller.ray import cluster

class Gone:
    def internal_kv_get(self, *_, **__):
        raise ray.exceptions.RayError("no answer")

def blocks(*_):
    time.sleep(3600)

where, folder = sys.argv[1:]
ray.is_initialized = lambda: False
ray.init = lambda **_: SimpleNamespace(address_info={})
ray.shutdown = blocks if where == "shutdown" else lambda: None
ray.get_runtime_context = lambda: SimpleNamespace(gcs_address="10.0.0.1:6379")
cluster._ray_worker = lambda: SimpleNamespace(global_worker=SimpleNamespace(gcs_client=Gone()), _global_node=None)
cluster.PATIENCE = Liveness(every_s=0.05, named_after_s=0.1, ended_after_s=0.2)
cluster.CLOSED_WITHIN_S = 0.5

async def main():
    with cluster.RayCluster(log_folder=Path(folder), on_lost=failure_of_program()):
        if where == "loop":
            blocks()
        await cluster.in_ray_thread(blocks)

run_with_signals(main())
"""


@pytest.mark.parametrize("where", ["question", "loop", "shutdown"])
def test_a_program_ends_without_its_head_wherever_ray_blocks_it(where: str, tmp_path: Path) -> None:
    begun = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", HEADLESS, where, str(tmp_path)], capture_output=True, text=True, timeout=50, check=False
    )
    assert ended.returncode == 1, ended
    assert "Ray's head (GCS at 10.0.0.1:6379) has not answered for" in ended.stderr.splitlines()[-1]
    assert ("Traceback" in ended.stderr) == (where == "question")  # an error of the program, which ended by itself
    assert time.monotonic() - begun < 40
