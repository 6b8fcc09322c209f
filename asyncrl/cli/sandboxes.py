"""``asyncrl sandboxes``: serve sandboxes of this machine to others."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
from collections.abc import Sequence
from typing import Any

from asyncrl.cli.output import show
from asyncrl.errors import ConfigError
from asyncrl.plugins import make_part, offered_options

SUMMARY = "serve sandboxes of this machine to training runs of others"
_KEY = "ASYNCRL_SANDBOX_KEY"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``asyncrl sandboxes``."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8100, help="port to listen on (8100; 0: any that is free)")
    parser.add_argument("--backend", default="namespaces", metavar="NAME", help="what makes them (namespaces)")
    parser.add_argument("--image", metavar="IMAGE", help="of the backend container")
    parser.add_argument("--most", type=int, default=64, metavar="N", help="sandboxes at a time (64)")
    parser.add_argument("--lease", type=float, default=3600.0, metavar="S", help="their time to live (3600)")
    parser.add_argument("--deadline", type=float, default=60.0, metavar="S", help="of a command (60)")
    parser.add_argument("--memory-gib", type=float, default=2.0, metavar="G", help="of a sandbox (2)")
    parser.add_argument("--file-mib", type=float, default=256.0, metavar="M", help="of all files of a sandbox (256)")
    parser.add_argument("--files", type=int, default=1024, metavar="N", help="open files of a process (1024)")
    parser.add_argument("--children", type=int, default=256, metavar="N", help="processes of a sandbox (256)")
    parser.add_argument("--network", action="store_true", help="allow a network, which container has")


def run(namespace: argparse.Namespace, settings: Sequence[str]) -> int:
    """Serve until Ctrl-C; the key is that of ASYNCRL_SANDBOX_KEY, or a new one that is printed."""
    from asyncrl.sandboxes.contract import SandboxLimits
    from asyncrl.serve.middleware import KeyRing
    from asyncrl.serve.sandboxes import SandboxServer

    if namespace.most < 1:
        raise ConfigError(f"most is {namespace.most}", path="most", remedy="1 or more")
    key = os.environ.get(_KEY) or secrets.token_urlsafe(32)
    options: dict[str, Any] = {"image": namespace.image} if namespace.image else {}
    options |= offered_options("asyncrl.sandboxes", namespace.backend, {"lease_s": namespace.lease}, path="backend")
    backend = make_part("asyncrl.sandboxes", namespace.backend, options=options, path="backend")
    if namespace.network and not getattr(backend, "has_network", True):
        raise ConfigError(f"{namespace.backend} has no network", path="network", remedy="--backend container")
    limits = SandboxLimits(
        deadline_s=namespace.deadline,
        memory_bytes=int(namespace.memory_gib * (1 << 30)),
        file_bytes=int(namespace.file_mib * (1 << 20)),
        files=namespace.files,
        children=namespace.children,
        network=namespace.network,
    )

    async def serve() -> None:
        server = SandboxServer(
            backend, limits, keys=KeyRing({"client": key}), most=namespace.most, lease_s=namespace.lease
        )
        async with server.serving(host=namespace.host, port=namespace.port) as url:
            show(f"sandboxes at {url}" + ("" if os.environ.get(_KEY) else f"\nexport {_KEY}={key}"))
            await asyncio.Event().wait()

    try:
        asyncio.run(serve())
    except KeyboardInterrupt:
        return 0
    return 0
