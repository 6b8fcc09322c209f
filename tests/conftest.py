"""What every test may rely on."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config

# A shell starts what it runs in the background with SIGINT ignored, and so would every process that a test starts and
# interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Ray lowers the priority of its workers: whatever else a machine does would starve them past every deadline.
os.environ.setdefault("RAY_worker_niceness", "0")


def pytest_configure(config: pytest.Config) -> None:
    """Only GPU tests see a GPU: what chooses its device itself must give everywhere what it gives on a CPU."""
    asked = config.option.markexpr
    if "gpu" not in asked or "not gpu" in asked:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(tryfirst=True)  # before marks are asked for
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on Ray are at least slow: a cluster takes seconds to start, and the processor while it runs."""
    for item in items:
        if item.get_closest_marker("ray") and not any(map(item.get_closest_marker, ("chaos", "long"))):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """What is imported by now stays: the collections that tests ask for need not look through it each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    """``worlds:...`` of tests/trainer can be named in a configuration, also by worker processes."""
    folder = str(Path(__file__).parent / "trainer")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")])))


@pytest.fixture
def small_config(worlds: None, tmp_path: Path) -> Callable[..., Config]:
    """A run of a few seconds: a model of 20,000 parameters in the world of digits. Sections are merged into it."""

    def make(**changes: Any) -> Config:
        tables: dict[str, Any] = {
            "name": "small",
            "steps": 3,
            "max_staleness": 1,
            "runs": str(tmp_path / "runs"),
            "cluster": {"backend": "local"},
            "model": {
                "source": "scratch",
                "options": {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2, "max_position": 128},
            },
            "env": {"name": "worlds:DigitsFactory"},
            "rollout": {"max_new_tokens": 6, "max_seq_len": 64},
            "trainer": {"groups_per_step": 2, "group_size": 4, "lr": 1e-2},
            "eval": {"tasks": 4},
            "checkpoint": {"every": 0},
            "telemetry": {"progress": "none"},
        }
        for name, value in changes.items():
            if isinstance(value, dict):
                tables[name] = {**tables.get(name, {}), **value}
            else:
                tables[name] = value
        return Config.from_mapping(tables)

    return make
