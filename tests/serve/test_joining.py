"""Another machine brings replicas: here a second Ray node on this one, which the command itself starts."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import asyncrl
from asyncrl.cli.main import main
from asyncrl.interfaces import SamplingParams
from asyncrl.serve.control_client import ControlClient
from asyncrl.serve.server import Binding
from engines.training.scratch import make


def test_what_cannot_join_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "a-model", "--join", "http://127.0.0.1:1"]) == 2
    assert "--join takes no MODEL" in capsys.readouterr().err
    assert main(["serve", "--join", str(tmp_path / "nobody")]) == 2
    assert "no server has its control plane" in capsys.readouterr().err
    assert main(["serve"]) == 2
    assert "needs a MODEL" in capsys.readouterr().err


def demonstration(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"count {number}"}, {"role": "assistant", "content": "one two three"}]


@pytest.fixture
def head() -> Iterator[str]:
    """A Ray cluster of one node; gives its address."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield str(cluster.address)
    ray.shutdown()
    cluster.shutdown()


async def joined(control: ControlClient, state: str) -> dict[str, Any]:
    """The replica that is not from here, once it is in ``state``; asked for at most a minute."""
    async with asyncio.timeout(90):
        while True:
            replicas = (await control.ask("GET", "/replicas"))["replicas"]
            for replica in replicas:
                if not replica["name"].startswith("replica-") and replica["state"] == state:
                    return dict(replica)
            await asyncio.sleep(0.2)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(300)
async def test_a_machine_joins_serves_and_leaves(head: str, tmp_path: Path) -> None:
    folder = tmp_path / "tiny-model"
    make(folder, seed=0, demonstrations=demonstration, tokenizer_conversations=16)
    binding = Binding(port=0, control_socket=tmp_path / "control.sock")
    options = {"threads": 1, "dtype": "float32", "device": "cpu"}
    async with (
        asyncrl.serve(str(folder), binding=binding, engine_options=options, ray=head) as pool,
        ControlClient(str(pool.control_socket)) as control,
    ):
        swapped = await control.ask("POST", "/weights", {"action": "swap", "folder": str(folder)})
        assert swapped["version"] == 1
        command = (sys.executable, "-m", "asyncrl", "serve", "--join", str(pool.control_socket))
        joining = await asyncio.create_subprocess_exec(*command, env={**os.environ, "OMP_NUM_THREADS": "1"})
        guest = await joined(control, "healthy")
        assert guest["weight_version"] == 1, "it served nothing before it held the current weights"
        sampling = SamplingParams(max_new_tokens=8, temperature=0.0)
        said = [await pool.chat([{"role": "user", "content": f"count {number}"}], sampling) for number in (3, 4, 3, 4)]
        assert said[:2] == said[2:]
        await pool.pool.drain("replica-0")
        assert await pool.chat([{"role": "user", "content": "count 3"}], sampling) == said[0], "by the guest alone"
        pool.pool._replicas["replica-0"].draining = False
        joining.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(joining.wait(), 60) == 0
        assert [status.name for status in pool.pool.replicas()] == ["replica-0"]
