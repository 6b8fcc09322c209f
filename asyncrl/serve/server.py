"""The sockets of the server: a user plane, a control plane, and how both are opened and drained."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import re
import resource
import socket
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from asyncrl.errors import ConfigError
from asyncrl.serve.call import Face
from asyncrl.serve.gate import Doorway, Gate
from asyncrl.serve.keys import KeyRing
from asyncrl.serve.routes import routes_of

__all__ = ["Binding", "Server", "control_socket_path", "is_loopback"]

_BACKLOG = 4096
_READ_BYTES = 64 << 10  # a body waits for its reader after each read of the socket: pieces need not be joined, nor one
# client read many times before the others' turn


class _NoBadRequests(logging.Filter):
    """aiohttp logs requests that are no HTTP, header lines and all: a key may be in them."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, HttpProcessingError)


_http_log = logging.getLogger("asyncrl.serve.http")
_http_log.addFilter(_NoBadRequests())

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """Where the server listens, and which keys open it.

    Attributes:
        host: of the user plane.
        port: likewise; 0 takes a free one.
        users: keys of the user plane; needed off loopback.
        control_port: of a control plane on TCP, on the same host; None has one on a Unix socket only.
        operators: keys of the control plane on TCP.
        control_socket: path of the control plane's Unix socket; None chooses one by the port.
        hosts: further names that a ``Host`` header may carry.
        origins: of web pages that may call the user plane, as browsers send them: ``https://lab.example``.

    Raises:
        ConfigError: an address that others reach would be open to all, or an origin is none.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    users: KeyRing | None = None
    control_port: int | None = None
    operators: KeyRing | None = None
    control_socket: Path | None = None
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.users is None and not is_loopback(self.host):
            raise ConfigError(
                f"{self.host} can be reached from other machines, and no key is set",
                path="host",
                remedy="give --api-key-file FILE, or listen on 127.0.0.1",
            )
        if self.control_port is not None and self.operators is None:
            raise ConfigError(
                "a control plane on TCP needs a key of its own",
                path="control-port",
                remedy="give --control-key-file FILE, or leave the port out: a Unix socket serves this machine",
            )
        for option, port in (("port", self.port), ("control-port", self.control_port)):
            if port is not None and not 0 <= port <= 65_535:
                raise ConfigError(f"{port} is no port", path=option, remedy="0 (any) to 65535")
        for origin in self.origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"{origin!r} is no origin of web pages",
                    path="allowed-origin",
                    remedy="write https://lab.example or http://localhost:3000, in lower case and without a path",
                )

    def known_hosts(self) -> frozenset[str] | None:
        """Names for the ``Host`` header; None for any, where a key guards an address of many names."""
        if self.users is not None and not is_loopback(self.host):
            return None
        return frozenset(name.lower() for name in (*_LOOPBACK_NAMES, self.host, *self.hosts))


class Server:
    """Made, then :meth:`start`, then :meth:`drain` perhaps, then :meth:`close`. Used from one event loop."""

    def __init__(self, face: Face, binding: Binding) -> None:
        self._face = face
        self._binding = binding
        self._runners: list[web.AppRunner] = []
        self._listeners: list[asyncio.Server] = []
        self.url = ""
        self.control_url = ""
        self.control_socket: Path | None = None

    async def start(self) -> None:
        """Open the sockets, the control plane first.

        Raises:
            ConfigError: an address is taken or cannot be had.
        """
        binding = self._binding
        allow_connections(self._face.limits.connections)
        user = _bound(binding.host, binding.port)
        try:
            port: int = user.getsockname()[1]
            path = binding.control_socket or control_socket_path(port)
            control = _bound_unix(path)
            self.control_socket = path
        except BaseException:
            user.close()
            raise
        await self._open(control, Doorway(plane="control"), unix=True)
        if binding.control_port is not None:
            operators = _bound(binding.host, binding.control_port)
            self.control_url = _url(operators)
            door = Doorway(plane="control", users=binding.users, operators=binding.operators, hosts=self._hosts())
            await self._open(operators, door)
        self.url = _url(user)
        door = Doorway(plane="user", users=binding.users, hosts=self._hosts(), origins=frozenset(binding.origins))
        await self._open(user, door)
        self._face.ready = True

    def _hosts(self) -> frozenset[str] | None:
        return self._binding.known_hosts()

    async def _open(self, listening: socket.socket, door: Doorway, *, unix: bool = False) -> None:
        limits = self._face.limits
        gate = Gate(self._face, door)
        routes = routes_of(door.plane)
        app = web.Application(client_max_size=limits.body_size_bytes)
        for route in routes:
            app.router.add_route(route.method, route.path, gate.handler(route), expect_handler=gate.expect)
        app.router.add_route("*", "/{rest:.*}", gate.fallback(routes), expect_handler=gate.expect)
        if door.origins:
            app.on_response_prepare.append(gate.tell_browser)
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=_http_log,
            handler_cancellation=True,
            keepalive_timeout=limits.idle_timeout_s,
            max_line_size=limits.header_size_bytes,
            max_field_size=limits.header_size_bytes,
            max_headers=limits.headers,
            auto_decompress=False,
            read_bufsize=_READ_BYTES,
            lingering_time=1.0,
            shutdown_timeout=2.0,
        )
        await runner.setup()
        self._runners.append(runner)
        server = runner.server
        assert server is not None
        connected = server._connections  # noqa: SLF001 - aiohttp counts them, and tells only by a copy of the list

        def protocol() -> asyncio.Protocol:
            if len(connected) >= limits.connections:
                self._face.meters.connections_refused += 1
                return _Full()
            return server()

        loop = asyncio.get_running_loop()
        if unix:
            self._listeners.append(await loop.create_unix_server(protocol, sock=listening, backlog=64))
        else:
            self._listeners.append(await loop.create_server(protocol, sock=listening, backlog=_BACKLOG))

    async def drain(self) -> None:
        """Take no more work; return when what was begun is finished."""
        self._face.admission.draining = True
        self._face.ready = False
        await self._face.admission.idle()

    async def close(self) -> None:
        """End everything, at once for what still runs. Idempotent."""
        self._face.admission.draining = True
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener.close()
        runners, self._runners = self._runners, []
        for runner in runners:
            await runner.cleanup()
        if self.control_socket is not None:
            with contextlib.suppress(FileNotFoundError):
                self.control_socket.unlink()
            self.control_socket = None


class _Full(asyncio.Protocol):
    """Tells one connection too many to come back."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        door = cast(asyncio.WriteTransport, transport)  # uvloop's are no subclass
        door.write(
            b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        )
        door.close()


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def control_socket_path(port: int) -> Path:
    """Where the control plane of the server on ``port`` is found: in a folder that only its user enters.

    Raises:
        ConfigError: that folder belongs to somebody else, or others may enter it.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        folder = Path(runtime) / "asyncrl"
    else:
        folder = Path(tempfile.gettempdir()) / f"asyncrl-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ConfigError(
            f"{folder}: {error.strerror}", path="control-socket", remedy="give --control-socket"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"{folder} is not a folder of yours alone (mode 0700)", path="control-socket", remedy="remove it"
        )
    return folder / f"serve-{port}.sock"


def allow_connections(count: int) -> None:
    """Raise this process's limit of open files so that ``count`` connections fit, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 512
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
            )


def _bound(host: str, port: int) -> socket.socket:
    bare = host.strip("[]")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            bare, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"{host}: {error.strerror}", path="host", remedy="give an address of this machine") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}", path="port", remedy="give another --port"
        ) from error
    listening.setblocking(False)
    return listening


def _bound_unix(path: Path) -> socket.socket:
    """A Unix socket that only this user may open: its mode is set before anybody can connect."""
    if path.is_socket():
        probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()  # its server died without taking it along
        except OSError:
            pass  # binding will say what is wrong
        else:
            raise ConfigError(f"another server has {path}", path="control-socket", remedy="give --control-socket")
        finally:
            probe.close()
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(str(path))
        path.chmod(0o600)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"{path}: {error.strerror or error}", path="control-socket", remedy="give another path"
        ) from error
    listening.setblocking(False)
    return listening


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
