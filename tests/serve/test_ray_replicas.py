"""Replicas of another machine: a second Ray node on this one, which the command itself starts."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self, cast

import pytest

import asyncrl
from asyncrl.cli import pool as cli_pool
from asyncrl.cli import serving
from asyncrl.cli.main import main
from asyncrl.interfaces import SamplingParams
from asyncrl.rollout.engine_worker import EngineSpec
from asyncrl.runtime import Terminated
from asyncrl.serve.control_client import ControlClient
from asyncrl.serve.pool import RayReplicas
from asyncrl.serve.server import Binding
from asyncrl.single_controller.liveness import Liveness
from asyncrl.single_controller.resource_pool import NodeResources
from engines.training.scratch import make


def test_invalid_joins_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "a-model", "--join", "http://127.0.0.1:1"]) == 2
    assert "--join takes no MODEL" in capsys.readouterr().err
    assert main(["serve", "--join", str(tmp_path / "missing")]) == 2
    assert "no server has its control plane" in capsys.readouterr().err
    assert main(["serve"]) == 2
    assert "needs a MODEL" in capsys.readouterr().err


class Pool:
    """A pool that never finishes a drain, as its control plane answers."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[str] = asyncio.Queue()
        self.bodies: list[Any] = []
        self.hangs_at = "/replicas/drain"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def ask(self, _method: str, path: str, body: object = None) -> Any:
        self.asked.put_nowait(path)
        self.bodies.append(body)
        if path == self.hangs_at:
            await asyncio.Event().wait()
        return {"ray_address": "somewhere", "model": "tiny"}


class Node:
    def __init__(self) -> None:
        self.returncode: int | None = None
        self.over = asyncio.Event()

    async def wait(self) -> int:
        await self.over.wait()
        return 0

    def terminate(self) -> None:
        self.over.set()


async def until_asked(pool: Pool, path: str) -> None:
    while await pool.asked.get() != path:
        pass


async def test_a_second_ctrl_c_ends_a_join_that_waits_for_its_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, node = Pool(), Node()

    async def start_node(*_: object, **__: object) -> Node:
        return node

    monkeypatch.setattr(serving, "_start_node", start_node)
    joining = asyncio.ensure_future(serving._join(cast("Any", pool), replicas=2, cpus=1.0, gpus=0.5))
    for _ in range(2):
        await until_asked(pool, "/replicas")
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGINT)
    await until_asked(pool, "/replicas/drain")
    os.kill(os.getpid(), signal.SIGINT)
    assert await asyncio.wait_for(joining, 10) == 130
    assert node.over.is_set()
    assert [body["gpus"] for body in pool.bodies if body is not None and "resource" in body] == [0.5, 0.5]


@pytest.mark.parametrize(("number", "ending"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
async def test_a_signal_ends_a_join_that_has_not_joined_yet(
    monkeypatch: pytest.MonkeyPatch, number: int, ending: type[BaseException]
) -> None:
    pool = Pool()
    starting = asyncio.Event()

    async def start_node(*_: object, **__: object) -> Node:
        starting.set()
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(serving, "_start_node", start_node)

    async def join() -> None:
        with pytest.raises(ending):
            await serving._join(cast("Any", pool), replicas=2, cpus=1.0, gpus=None)

    joining = asyncio.ensure_future(join())
    await starting.wait()
    os.kill(os.getpid(), number)
    await joining


@pytest.mark.parametrize(
    ("node", "asked", "reserved"),
    [({"GPU": 8.0}, None, 2.0), ({"GPU": 8.0}, 0.5, 0.5), ({"CPU": 4.0}, None, 0.0), ({"CPU": 4.0}, 1.0, 1.0)],
)
def test_a_replica_reserves_what_its_engine_takes_where_there_are_gpus(
    monkeypatch: pytest.MonkeyPatch, node: dict[str, float], asked: float | None, reserved: float
) -> None:
    nodes = [
        NodeResources(name="head", total={"GPU": 8.0}, available={}),
        NodeResources(name="joined", total={"joined": 1.0, **node}, available={}),
    ]
    monkeypatch.setattr("asyncrl.single_controller.ray.resource_pool.cluster_nodes", lambda: nodes)
    monkeypatch.setattr("asyncrl.single_controller.ray.RayWorkerGroup", lambda place, *_, **__: place)
    spec = EngineSpec(engine="transformers", model="none")
    replicas = RayReplicas(address="", liveness=Liveness(), spec=spec, transport=None, gpus=2.0)
    engine: Any = replicas.factory("guest", "joined", gpus=asked)()
    assert engine._make_group().gpus_per_worker == reserved


def test_the_gpus_of_an_added_replica_are_asked_for() -> None:
    parser = argparse.ArgumentParser()
    cli_pool.add_pool_options(parser)
    given = parser.parse_args(["add", "guest", "--on", "joined", "--gpus", "0.5"])
    body = {"name": "guest", "resource": "joined", "gpus": 0.5}
    assert cli_pool._request(given) == ("POST", "/replicas", body)


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
    """Return the replica of the other machine, once it is in ``state``."""
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
        questions = [[{"role": "user", "content": f"count {number}"}] for number in (3, 4, 3, 4)]
        replies = [await pool.chat(question, sampling) for question in questions]
        assert replies[:2] == replies[2:]
        await pool.pool.drain("replica-0")
        assert await pool.chat(questions[0], sampling) == replies[0], "by the joined replica alone"
        pool.pool._replicas["replica-0"].draining = False
        joining.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(joining.wait(), 60) == 0
        assert [status.name for status in pool.pool.replicas()] == ["replica-0"]
