"""From configuration to what a rollout worker is made from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from asyncrl.config import load_config
from asyncrl.trainer.assembly import rollout_spec
from asyncrl.weights import TransportSpec

FILE = 'name = "run"\nsteps = 1\n[model]\nsource = "scratch"\n[env]\nname = "calculator"\n'
TRANSPORT = TransportSpec(name="shared_memory", namespace="here")


def test_an_engine_with_a_python_of_its_own_is_hosted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.toml").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    settings = ["--rollout.engine", "vllm", "--rollout.options.max_running_requests", "8"]
    spec = rollout_spec(load_config(tmp_path / "run.toml", settings), TRANSPORT, None)
    assert (spec.engine, spec.engine_options) == ("vllm", {"max_running_requests": 8})
    (tmp_path / "python").symlink_to("/usr/bin/env")
    settings += ["--rollout.python", "python"]
    spec = rollout_spec(load_config(tmp_path / "run.toml", settings), TRANSPORT, None)
    assert spec.engine == "remote"
    assert spec.engine_options == {
        "engine": "vllm",
        "python": os.fspath(tmp_path / "python"),  # the link itself: it is what makes a virtual environment
        "options": {"max_running_requests": 8},
    }
    assert spec.engine_given["dtype"] == "float32"
