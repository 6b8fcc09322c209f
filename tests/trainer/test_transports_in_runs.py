"""A run whose weights reach its engines in another way than through shared memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CALCULATOR = Path(__file__).parents[2] / "examples" / "calculator.toml"


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("transport", "backend"), [("disk", "ray"), ("object_store", "ray"), ("collective", "ray"), ("collective", "local")]
)
def test_a_run_ends_as_any_other(tmp_path: Path, transport: str, backend: str) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    options = ["--weights.options.directory", str(shared)] if transport == "disk" else []
    short = ["--steps", "3", "--sft.steps", "3", "--sft.warmup-steps", "1", "--eval.tasks", "8"]
    short += ["--model.dtype", "bfloat16", "--trainer.lr", "1e-6"]  # versions are published as what they change
    if backend == "local":
        short += ["--cluster.backend", "local"]
    elif transport == "collective":  # each of two ranks sends its rows to two engines
        short += ["--trainer.world-size", "2", "--rollout.replicas", "2"]
    command = [sys.executable, "-m", "asyncrl", "train", str(CALCULATOR), *short, "--weights.transport", transport]
    done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = tmp_path.glob("runs/*/summary.json")
    summary = json.loads(file.read_text())
    tokens = summary["tokens"]
    assert summary["staleness"]["max"] <= summary["max_staleness"]
    assert tokens["trained"] > 0
    assert tokens["generated"] == tokens["trained"] + sum(tokens["dropped"].values()) + tokens["in_flight"]
    assert list(shared.iterdir()) == []
