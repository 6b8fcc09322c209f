"""A server of sandboxes, for :class:`asyncrl.sandboxes.remote.RemoteBackend`, which has the protocol.

Everything is checked before any work: the key, the size of the body, the fields, and that the limits of a sandbox and
of a command are at most the server's. Who has the key can run programs here, within the isolation of the backend.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, fields
from typing import Annotated, Any

import msgspec
from aiohttp import web

from asyncrl.errors import AsyncRLError, ConfigError, SandboxError
from asyncrl.sandboxes.contract import Sandbox, SandboxBackend, SandboxLimits
from asyncrl.sandboxes.pool import SandboxPool
from asyncrl.serve.middleware import KeyRing
from asyncrl.serve.server import allow_connections, bounded_connections

_WAIT_S = 10.0
_IDLE_S = 75.0
_CONNECTIONS = 4096
_FILES_OF_A_SANDBOX = 8
_MOST_ARGUMENTS = 1024


class _Exec(msgspec.Struct, forbid_unknown_fields=True):
    command: Annotated[list[str], msgspec.Meta(min_length=1, max_length=_MOST_ARGUMENTS)]
    stdin: str
    env: dict[str, str]
    deadline_s: Annotated[float, msgspec.Meta(gt=0)]
    output_bytes: Annotated[int, msgspec.Meta(gt=0)]


class SandboxServer:
    """Leases sandboxes to clients; one that is not destroyed within ``lease_s`` is destroyed here.

    Args:
        backend: makes the sandboxes.
        limits: the most that a client gets.
        keys: of the clients.
        most: sandboxes at a time; a client waits a while for one, then gets 429, and may ask again.
    """

    def __init__(
        self, backend: SandboxBackend, limits: SandboxLimits, *, keys: KeyRing, most: int, lease_s: float
    ) -> None:
        self._backend = backend
        self._limits = limits
        self._keys = keys
        self._most = most
        self._places = asyncio.Semaphore(most)
        self._lease_s = lease_s
        self._leases: dict[str, tuple[Sandbox, AsyncExitStack]] = {}
        self._expiring: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def serving(self, *, host: str = "127.0.0.1", port: int = 0) -> AsyncGenerator[str, None]:
        """Serve inside the block; yield the address."""
        files, needed = _FILES_OF_A_SANDBOX * self._most, 2 * self._most  # an owner's, and one that waits for its place
        connections = allow_connections(max(_CONNECTIONS, needed) + files) - files
        if connections < needed:
            raise ConfigError(
                f"most is {self._most}, for which this process may not open enough files",
                path="most",
                remedy=f"raise `ulimit -n` to {files + needed + 512}, or give a lower --most",
            )
        app = web.Application(middlewares=[self._guard], client_max_size=4 * self._limits.file_bytes)
        app.router.add_post("/sandboxes", self._create)
        app.router.add_post("/sandboxes/{id}/exec", self._exec)
        app.router.add_post("/sandboxes/{id}/reset", self._reset)
        app.router.add_delete("/sandboxes/{id}", self._destroy)
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, keepalive_timeout=_IDLE_S, shutdown_timeout=1.0
        )
        await runner.setup()
        listener: asyncio.Server | None = None
        try:
            protocol = bounded_connections(runner, connections)
            try:
                listener = await asyncio.get_running_loop().create_server(protocol, host, port, backlog=128)
            except OSError as error:
                raise ConfigError(f"{host}:{port}: {error.strerror}", path="port", remedy="another one") from error
            yield f"http://{host}:{listener.sockets[0].getsockname()[1]}"
        finally:
            if listener is not None:
                listener.close()
            await runner.cleanup()
            leases = [lease for _, lease in self._leases.values()]
            self._leases.clear()
            await asyncio.gather(*(each.aclose() for each in leases), *self._expiring)
            await self._backend.close()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        if kind != "Bearer" or self._keys.holder_of(key) is None:
            return _answer({"error": "the key is missing or wrong"}, status=401)
        try:
            return await handler(request)
        except ConfigError as error:
            return _answer({"error": str(error)}, status=400)
        except AsyncRLError as error:
            return _answer({"error": str(error)}, status=503)

    async def _create(self, request: web.Request) -> web.Response:
        body = await request.read()
        with _reading_body():
            limits = SandboxLimits(**msgspec.json.decode(body, type=dict[str, Any])["limits"])
            given = msgspec.convert(asdict(limits), SandboxLimits)
        for each in fields(SandboxLimits):
            if getattr(given, each.name) > getattr(self._limits, each.name):
                most = getattr(self._limits, each.name)
                raise ConfigError(f"{each.name} is {getattr(given, each.name)}", remedy=f"at most {most} here")
        try:
            async with asyncio.timeout(_WAIT_S):
                await self._places.acquire()
        except TimeoutError:
            return _answer({"error": f"all {self._most} sandboxes are leased"}, status=429)
        name = secrets.token_urlsafe(16)
        async with AsyncExitStack() as stack:
            stack.callback(self._free, name)
            pool = SandboxPool(self._backend, given, most=1, lease_s=self._lease_s)
            sandbox = await stack.enter_async_context(pool.lease(timeout_s=_WAIT_S))
            lease = stack.pop_all()
        self._leases[name] = (sandbox, lease)
        ending = asyncio.get_running_loop().call_later(self._lease_s, self._expire, name)
        lease.callback(ending.cancel)
        return _answer({"id": name, "isolation": asdict(sandbox.isolation), "folder": sandbox.folder})

    def _expire(self, name: str) -> None:
        """End a lease, unless it has ended."""
        if name not in self._leases:
            return
        _, lease = self._leases.pop(name)
        task = asyncio.ensure_future(lease.aclose())
        self._expiring.add(task)
        task.add_done_callback(self._expiring.discard)

    def _free(self, name: str) -> None:
        self._leases.pop(name, None)
        self._places.release()

    async def _exec(self, request: web.Request) -> web.Response:
        sandbox = self._sandbox(request)
        body = await request.read()
        with _reading_body():
            asked = msgspec.json.decode(body, type=_Exec)
            stdin = base64.b64decode(asked.stdin, validate=True)
        if asked.deadline_s > self._limits.deadline_s:
            raise ConfigError(f"a command may take {self._limits.deadline_s:g} s here", path="deadline_s")
        if asked.output_bytes > (most := 2 * self._limits.file_bytes):
            raise ConfigError(f"a command may write {most} bytes here", path="output_bytes")
        with self._ending_with_its_sandbox(request):
            end = await sandbox.exec(
                asked.command,
                stdin=stdin,
                env=asked.env,
                deadline_s=asked.deadline_s,
                output_bytes=asked.output_bytes,
            )
        outputs = {name: base64.b64encode(getattr(end, name)).decode() for name in ("output", "error")}
        return _answer({"how": end.how, "code": end.code, **outputs})

    async def _reset(self, request: web.Request) -> web.Response:
        sandbox = self._sandbox(request)
        with self._ending_with_its_sandbox(request):
            return _answer({"proven": await sandbox.reset()})

    async def _destroy(self, request: web.Request) -> web.Response:
        self._sandbox(request)
        _, lease = self._leases.pop(request.match_info["id"])
        await lease.aclose()
        return _answer({})

    def _sandbox(self, request: web.Request) -> Sandbox:
        found = self._leases.get(request.match_info["id"])
        if found is None:
            raise SandboxError("there is no such sandbox, or its lease has ended")
        return found[0]

    @contextmanager
    def _ending_with_its_sandbox(self, request: web.Request) -> Iterator[None]:
        """End the lease if the block raises what destroys the sandbox: its failure, or the end of its client."""
        try:
            yield
        except (SandboxError, asyncio.CancelledError):
            self._expire(request.match_info["id"])
            raise


@contextmanager
def _reading_body() -> Iterator[None]:
    try:
        yield
    except (msgspec.MsgspecError, TypeError, KeyError, ValueError) as error:
        raise ConfigError(f"the body cannot be used: {error}", remedy="see asyncrl.sandboxes.remote") from error


def _answer(content: dict[str, Any], *, status: int = 200) -> web.Response:
    return web.Response(body=json.dumps(content).encode(), status=status, content_type="application/json")
