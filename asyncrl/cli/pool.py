"""``asyncrl pool``: shows and changes a served pool over its control plane."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.cli.output import show, show_json
from asyncrl.errors import ConfigError, InfrastructureError
from asyncrl.storage import is_url

if TYPE_CHECKING:
    from asyncrl.serve.control_client import ControlClient


_ACTIONS = {
    "ps": "the replicas",
    "top": "the replicas, refreshed",
    "add": "start replica NAME; --on RESOURCE: on a node of the pool's Ray cluster with that resource",
    "drain": "let replica NAME finish its requests, and remove it",
    "swap": "serve the weights in FOLDER, or at a URL, from now on; one of peft's: beside them, as the model --adapter",
    "pause": "stop decoding; --mode keep, abort or drain",
    "resume": "go on decoding",
}


GPUS_OF_A_REPLICA = "for each replica, also a fraction (what its engine takes, where there are GPUs)"


def add_pool_options(parser: argparse.ArgumentParser) -> None:
    actions = "; ".join(f"{action}: {text}" for action, text in _ACTIONS.items())
    parser.add_argument("action", choices=tuple(_ACTIONS), metavar="ACTION", help=actions)
    parser.add_argument("what", nargs="?", default="", metavar="NAME|FOLDER|URL", help="for add, drain and swap")
    parser.add_argument("--port", type=int, default=8000, metavar="P", help="of the server on this machine (8000)")
    parser.add_argument("--control", default="", metavar="ADDRESS", help="its control socket, or http://HOST:PORT")
    parser.add_argument("--control-key-file", type=Path, metavar="F", help="for the latter; else ASYNCRL_CONTROL_KEY")
    parser.add_argument("--on", default="", metavar="RESOURCE", help="of add: a custom resource of Ray nodes")
    parser.add_argument("--gpus", type=float, metavar="N", help=f"of add --on, {GPUS_OF_A_REPLICA}")
    parser.add_argument("--mode", choices=("keep", "abort", "drain"), default="keep", help="of pause (keep)")
    parser.add_argument("--adapter", metavar="NAME", help="of swap: the model's name for an adapter (the folder's)")
    parser.add_argument("--version-number", type=int, metavar="V", help="of the weights to swap in (the next)")
    parser.add_argument("--every", type=_seconds, default=1.0, metavar="S", help="seconds between looks of top (1)")
    parser.add_argument("--json", action="store_true", help="print the server's answer as JSON")


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise ValueError(text)
    return seconds


def pool_command(namespace: argparse.Namespace, settings: Sequence[str]) -> int:
    from asyncrl.serve.control_client import ControlClient, control_socket_path

    if namespace.action in ("add", "drain", "swap") and not namespace.what:
        raise ConfigError(f"asyncrl pool {namespace.action} needs a name, a folder or a URL", path="pool")
    address = namespace.control or str(control_socket_path(namespace.port))
    client = ControlClient(address, key=control_key(namespace.control_key_file))
    asyncio.run(_run(client, namespace))
    return 0


def control_key(file: Path | None) -> str:
    """Return the first key of a file, or ASYNCRL_CONTROL_KEY; empty without either."""
    from asyncrl.serve.control_client import read_keys

    key = os.environ.get("ASYNCRL_CONTROL_KEY", "").strip()
    if file is not None:
        key = next(iter(read_keys(file, option="control-key-file").values()))
    if not key.isascii() or not key.isprintable():
        raise ConfigError("the control key has characters that are not printable ASCII", path="control-key-file")
    return key


async def _run(client: ControlClient, namespace: argparse.Namespace) -> None:
    async with client:
        if namespace.action == "top":
            await _top(client, every_s=namespace.every)
            return
        method, path, body = _request(namespace)
        answer = await client.ask(method, path, body)
        if namespace.json:
            show_json(answer)
            return
        if namespace.action == "swap":
            held = ", ".join(f"{name} {version}" for name, version in answer["replicas"].items())
            show(f"weight version {answer['version']} ({held})")
            return
        show(_table(await client.ask("GET", "/pool")))


def _request(namespace: argparse.Namespace) -> tuple[str, str, Any]:
    """Return method, path and body of an action. Any: JSON."""
    name = namespace.what
    match namespace.action:
        case "ps":
            return "GET", "/pool", None
        case "pause":
            return "POST", "/pause", {"mode": namespace.mode}
        case "resume":
            return "POST", "/resume", None
        case "add":
            return "POST", "/replicas", {"name": name, "resource": namespace.on, "gpus": namespace.gpus}
        case "drain":
            return "POST", "/replicas/drain", {"name": name}
        case _:
            folder = name if is_url(name) else str(Path(name).expanduser().resolve())
            given = {"folder": folder, "version": namespace.version_number, "adapter": namespace.adapter}
            return "POST", "/weights", {"action": "swap", **given}


async def _top(client: ControlClient, *, every_s: float) -> None:
    from rich.live import Live
    from rich.text import Text

    loop = asyncio.get_running_loop()
    before, then = 0, loop.time()
    with Live(screen=sys.stdout.isatty(), auto_refresh=False) as live:
        while True:
            report = await client.ask("GET", "/pool")
            now, tokens = loop.time(), report["sampled_tokens"]
            speed = (tokens - before) / (now - then) if before else 0.0
            before, then = tokens, now
            live.update(Text(f"{_table(report)}\n{speed:,.0f} tokens/s"), refresh=True)
            await asyncio.sleep(every_s)


def _table(report: dict[str, Any]) -> str:
    """Return a report as a table; an InfrastructureError if it is none. Any: JSON of a PoolReport."""
    if not isinstance(report, dict) or "pool" not in report:
        raise InfrastructureError("the server at this address is not the control plane of asyncrl serve")
    pool = report["pool"]
    rows = [("replica", "state", "version", "requests", "tokens", "restarts", "reason")]
    for replica in pool["replicas"]:
        engine = replica["engine"] or {}
        rows.append(
            (
                replica["name"],
                replica["state"],
                "-" if replica["weight_version"] is None else str(replica["weight_version"]),
                str(replica["requests"]),
                str(engine.get("tokens_generated", "-")),
                str(replica["restarts"]),
                replica["reason"][:60],
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    paused = ", paused" if pool["paused"] else ""
    lines.append(
        f"{report['model']}: version {pool['weight_version']}{paused}; {pool['running']} running, "
        f"{pool['waiting']} waiting, {pool['finished']} finished, {pool['migrations']} migrated; "
        f"{report['sessions']} sessions"
    )
    return "\n".join(lines)
