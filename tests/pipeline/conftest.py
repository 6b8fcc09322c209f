from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config


@pytest.fixture(autouse=True)
def _worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    """``worlds:...`` can be named in a configuration, also by worker processes."""
    folder = str(Path(__file__).parent)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", folder)


@pytest.fixture
def small_config(tmp_path: Path) -> Callable[..., Config]:
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
            "rollout": {"max_new_tokens": 6, "max_tokens": 64},
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
