"""``asyncrl serve --join``: this machine's replicas in a pool that another machine serves."""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import signal
import socket
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from asyncrl.errors import ConfigError, InfrastructureError, ResourceError

from .output import show
from .pool import control_key

if TYPE_CHECKING:
    from asyncrl.serve.control_client import ControlClient

__all__ = ["join_command"]

_END_S = 20.0
_START_S = 60.0
_STARTED = "Ray runtime started"


def join_command(namespace: argparse.Namespace) -> int:
    """Offer this machine to the pool at ``namespace.join``, until Ctrl-C or the end of the pool."""
    from asyncrl.serve.control_client import ControlClient

    if namespace.model:
        raise ConfigError("--join takes no MODEL: the pool knows which one it serves", path="join")
    client = ControlClient(namespace.join, key=control_key(namespace.control_key_file))
    asyncio.run(_join(client, replicas=namespace.replicas, cpus=namespace.join_cpus))
    return 0


async def _join(client: ControlClient, *, replicas: int, cpus: float) -> None:
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    async with client, AsyncExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, asked.set)
            stack.callback(loop.remove_signal_handler, number)
        report = await client.ask("GET", "/pool")
        if not report["ray_address"]:
            raise ConfigError(
                "the pool takes no replicas from other machines",
                path="join",
                remedy="start it with asyncrl serve MODEL --ray HOST:PORT (a Ray cluster), or --ray local",
            )
        resource = f"asyncrl-{secrets.token_hex(4)}"
        show(f"joining {report['model']} over Ray at {report['ray_address']}")
        node = await _start_node(report["ray_address"], {resource: replicas}, cpus=cpus * replicas)
        stack.push_async_callback(_end, node)
        names = [f"{socket.gethostname()[:40]}-{resource[-8:]}-{number}" for number in range(replicas)]
        ended = asyncio.ensure_future(node.wait())
        stop = asyncio.ensure_future(asked.wait())
        for name in names:
            await client.ask("POST", "/replicas", {"name": name, "resource": resource})
            stack.push_async_callback(_drain, client, name)
            show(f"replica {name} joins; it serves when it holds the current weights (asyncrl pool ps)")
        await asyncio.wait([ended, stop], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if ended.done() and not asked.is_set():
            raise ResourceError(f"Ray's node on this machine ended (status {ended.result()}): see its logs in /tmp/ray")
        show("leaving: what is under way here is finished first")


async def _start_node(address: str, resources: dict[str, int], *, cpus: float) -> asyncio.subprocess.Process:
    """Ray's node on this machine, once it belongs to the cluster."""
    node = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        f"--address={address}",
        f"--num-cpus={max(1, round(cpus))}",
        f"--resources={json.dumps(resources)}",
        "--disable-usage-stats",
        "--block",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C is for this process: the node ends after its replicas
    )
    assert node.stdout is not None
    said: list[str] = []
    try:
        async with asyncio.timeout(_START_S):
            while line := (await node.stdout.readline()).decode(errors="replace"):
                said.append(line)
                if _STARTED in line:
                    return node
            reason = f"it ended with status {await node.wait()}"
    except TimeoutError:
        reason = f"it took over {_START_S:g} s"
    except asyncio.CancelledError:
        await _end(node)
        raise
    await _end(node)
    raise ResourceError(f"no Ray node could be started here for {address}: {reason}\n{''.join(said[-8:]).rstrip()}")


async def _end(node: asyncio.subprocess.Process) -> None:
    if node.returncode is not None:
        return
    node.terminate()
    try:
        async with asyncio.timeout(_END_S):
            await node.wait()
    except TimeoutError:
        node.kill()
        await node.wait()


async def _drain(client: ControlClient, name: str) -> None:
    try:
        await client.ask("POST", "/replicas/drain", {"name": name})
    except InfrastructureError as error:  # the pool may be gone before its guests
        show(f"replica {name}: {error}")
