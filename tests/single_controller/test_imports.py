"""Worker processes load neither torch nor numpy, and Ray is imported after its environment is set."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("ray")


def fresh(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.parametrize("module", ["asyncrl.single_controller.ray.host", "asyncrl.single_controller.worker"])
def test_a_worker_process_loads_neither_torch_nor_numpy(module: str) -> None:
    heavy = ("torch", "numpy", "tensordict")
    assert fresh(f"import sys, {module}; print(*[name for name in {heavy} if name in sys.modules])").strip() == ""


def test_a_cluster_started_here_requires_a_token() -> None:
    code = """if True:
        import os, sys
        from asyncrl.single_controller.ray import cluster
        assert "ray" not in sys.modules  # it reads its settings when it is imported
        cluster._require_token()
        print(os.environ["RAY_AUTH_MODE"], len(os.environ["RAY_AUTH_TOKEN"]))
    """
    assert fresh(code).split() == ["token", "64"]
