"""The sockets of the server: a user plane and a control plane, how they are opened, drained and closed."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import math
import os
import re
import resource
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from asyncrl.errors import ConfigError
from asyncrl.serve.call import ServerState
from asyncrl.serve.control_client import control_socket_path
from asyncrl.serve.middleware import KeyRing, Middleware, PlaneAccess
from asyncrl.serve.routes import routes_of

_BACKLOG = 4096
_AGENTS_CONNECTIONS = 65_536
"""That all agents of a process may open together; each has a server of its own."""
_READ_BYTES = 64 << 10
"""aiohttp pauses reading after each read of a body: pieces need not be joined, and clients take turns."""


class _NoBadRequests(logging.Filter):
    """Drops aiohttp's records of invalid HTTP, which contain header lines and so perhaps a key."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, HttpProcessingError)


_http_log = logging.getLogger("asyncrl.serve.http")
_http_log.addFilter(_NoBadRequests())

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """Where the server listens, and who may call it.

    Attributes:
        port: of the user plane; 0 takes a free one.
        users: keys of the user plane; required unless ``host`` is loopback.
        control_port: of a control plane on TCP, on the same host; None has one on a Unix socket only.
        operators: keys of the control plane on TCP.
        control_socket: path of the control plane's Unix socket; None chooses one by the port.
        hosts: further names that a ``Host`` header may have.
        origins: of web pages that may call the user plane, as browsers send them: ``https://lab.example``.

    Raises:
        ConfigError: other machines could call without a key, or a port or an origin is invalid.
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
                raise ConfigError(f"{port} is not a port", path=option, remedy="give 0 (any) to 65535")
        for origin in self.origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"{origin!r} is not an origin of web pages",
                    path="allowed-origin",
                    remedy="write https://lab.example or http://localhost:3000, in lower case and without a path",
                )

    def allowed_hosts(self) -> frozenset[str] | None:
        """Return the names for the ``Host`` header; None allows any, if a key protects a public address."""
        if self.users is not None and not is_loopback(self.host):
            return None
        return frozenset(name.lower() for name in (*_LOOPBACK_NAMES, self.host, *self.hosts))

    def bind(self) -> BoundPorts:
        """Return the TCP sockets, bound, which do not listen yet.

        Raises:
            ConfigError: an address is in use or not available, or another server has the control socket.
        """
        with contextlib.ExitStack() as stack:
            user = stack.enter_context(_bound(self.host, self.port, option="port"))
            operators = None
            if self.control_port is not None:
                operators = stack.enter_context(_bound(self.host, self.control_port, option="control-port"))
            path = self.control_socket or control_socket_path(user.getsockname()[1])
            _check_unix(path)
            stack.pop_all()
            return BoundPorts(user, operators, path)


@dataclass(frozen=True, slots=True)
class BoundPorts:
    """Sockets of the user plane and of the control plane on TCP, and the path of the latter's Unix socket."""

    user: socket.socket
    operators: socket.socket | None
    control: Path

    def close(self) -> None:
        self.user.close()
        if self.operators is not None:
            self.operators.close()


class Server:
    """Serves ``state`` from :meth:`start` to :meth:`close`. Used from one event loop.

    ``ports`` are those of ``binding``, if they are bound already.
    """

    def __init__(self, state: ServerState, binding: Binding, ports: BoundPorts | None = None) -> None:
        self._state = state
        self._binding = binding
        self._ports = ports
        self._runners: list[web.AppRunner] = []
        self._listeners: list[asyncio.Server] = []
        self.url = ""
        self.control_url = ""
        self.control_socket: Path | None = None

    async def start(self) -> None:
        """Open the sockets, the control plane first; all or none.

        Raises:
            ConfigError: an address is in use or not available.
        """
        binding, hosts = self._binding, self._binding.allowed_hosts()
        allow_connections(self._state.limits.connections)
        several_keys = binding.users is not None and len(binding.users) > 1
        self._state.sessions.several_keys = several_keys
        if self._state.capture is not None:
            self._state.capture.several_keys = several_keys
        async with contextlib.AsyncExitStack() as undo:
            ports = undo.enter_context(contextlib.closing(self._ports or binding.bind()))
            control = undo.enter_context(_bound_unix(ports.control))
            self.control_socket = ports.control
            undo.push_async_callback(self.close)
            await self._open(control, PlaneAccess(plane="control"), unix=True)
            if ports.operators is not None:
                self.control_url = _url(ports.operators)
                access = PlaneAccess(plane="control", users=binding.users, operators=binding.operators, hosts=hosts)
                await self._open(ports.operators, access)
            self.url = _url(ports.user)
            origins = frozenset(binding.origins)
            await self._open(ports.user, PlaneAccess(plane="user", users=binding.users, hosts=hosts, origins=origins))
            undo.pop_all()
        self._state.ready = True

    async def start_agent_plane(self) -> None:
        """Serve the sessions there are, and nothing else, on a free port of this machine.

        Raises:
            ConfigError: no port is available.
        """
        allow_connections(_AGENTS_CONNECTIONS)
        async with contextlib.AsyncExitStack() as undo:
            listening = undo.enter_context(_bound("127.0.0.1", 0, option="port"))
            undo.push_async_callback(self.close)
            self.url = _url(listening)
            await self._open(listening, PlaneAccess(plane="agent"))
            undo.pop_all()
        self._state.ready = True

    async def serve_agents_on(self, listening: socket.socket) -> None:
        """Serve the same on a socket that listens already, perhaps in another network; it is closed at the end."""
        listening.setblocking(False)
        await self._open(listening, PlaneAccess(plane="agent"))

    async def _open(self, listening: socket.socket, access: PlaneAccess, *, unix: bool = False) -> None:
        limits = self._state.limits
        middleware = Middleware(self._state, access)
        routes = routes_of(access.plane)
        app = web.Application(client_max_size=limits.body_size_bytes)
        for route in routes:
            path = route.path.replace("{model}", "{model:.+}")  # as Route.pattern has it
            app.router.add_route(route.method, path, middleware.handler(route), expect_handler=middleware.expect)
        app.router.add_route("*", r"/{rest:[\s\S]*}", middleware.fallback(routes), expect_handler=middleware.expect)
        if access.origins:
            app.on_response_prepare.append(middleware.add_cors_headers)
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
        protocol = bounded_connections(runner, limits.connections, on_refused=self._count_refused)
        loop = asyncio.get_running_loop()
        if unix:
            self._listeners.append(await loop.create_unix_server(protocol, sock=listening, backlog=64))
            return
        if sys.platform == "linux":  # connections inherit it; else a client that reads nothing of an answer would stay
            longest_ms = math.ceil(min(1000 * limits.write_timeout_s, 2**31 - 1))
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, longest_ms)
        try:
            self._listeners.append(await loop.create_server(protocol, sock=listening, backlog=_BACKLOG))
        except OSError as error:  # another server was bound to it as well, and has begun to listen first
            host, port = listening.getsockname()[:2]
            raise _not_available(host, port, error, option="port") from error

    def _count_refused(self) -> None:
        self._state.metrics.connections_refused += 1

    async def drain(self) -> None:
        """Take no more work; return when the running generations are finished."""
        self._state.concurrency.draining = True
        self._state.ready = False
        await self._state.concurrency.wait_idle()

    async def close(self) -> None:
        """Close all sockets and cancel what still runs. Idempotent."""
        self._state.concurrency.draining = True
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


class _ServerFull(asyncio.Protocol):
    """Answers a connection beyond the limit with 503."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        connection = cast(asyncio.WriteTransport, transport)  # uvloop's are no subclass
        connection.write(
            b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        )
        connection.close()


def bounded_connections(
    runner: web.AppRunner, most: int, *, on_refused: Callable[[], object] = lambda: None
) -> Callable[[], asyncio.Protocol]:
    """Return what makes the protocols of a runner that is set up; connections beyond ``most`` are answered with 503."""
    server = runner.server
    assert server is not None
    connected = server._connections  # noqa: SLF001 - aiohttp's public property copies the list

    def protocol() -> asyncio.Protocol:
        if len(connected) >= most:
            on_refused()
            return _ServerFull()
        return server()

    return protocol


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches ``host``."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def allow_connections(count: int) -> int:
    """Raise this process's limit of open files for ``count`` connections; return how many the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 512
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
            )
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return count if soft == resource.RLIM_INFINITY else min(count, soft - 512)


def _bound(host: str, port: int, *, option: str) -> socket.socket:
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
        raise _not_available(host, port, error, option=option) from error
    listening.setblocking(False)
    return listening


def _not_available(host: str, port: int, error: OSError, *, option: str) -> ConfigError:
    reason = os.strerror(error.errno) if error.errno else str(error)
    return ConfigError(f"cannot listen on {host}:{port}: {reason}", path=option, remedy=f"give another --{option}")


def _check_unix(path: Path) -> None:
    """Raise if a server listens on ``path``; remove what one has left there that is gone."""
    if path.is_socket():
        probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()  # its server died without removing it
        except OSError:
            pass  # binding raises the reason
        else:
            raise ConfigError(
                f"another server listens on {path}", path="control-socket", remedy="give --control-socket"
            )
        finally:
            probe.close()


def _bound_unix(path: Path) -> socket.socket:
    """Return a Unix socket that only this user may open: its mode is set before it listens."""
    _check_unix(path)
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
