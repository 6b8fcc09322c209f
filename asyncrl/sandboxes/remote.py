"""Sandboxes of another machine, over HTTP: the client of ``asyncrl sandboxes`` (:mod:`asyncrl.serve.sandboxes`).

    POST   /sandboxes              {"limits": {...}}                      -> {"id", "isolation", "folder"}
    POST   /sandboxes/ID/exec      {"command", "stdin", "env", ...}       -> {"how", "code", "output", "error"}
    POST   /sandboxes/ID/reset                                            -> {"proven"}
    DELETE /sandboxes/ID                                                  -> {}

Bytes are base64. A call that the client leaves ends on the server, and destroys its sandbox. One that the client never
destroys ends at the server's time to live.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from asyncrl.errors import AsyncRLError, ConfigError, SandboxError
from asyncrl.sandboxes.contract import Isolation, ProgramEnd, Sandbox, SandboxLimits, unstartable

if TYPE_CHECKING:
    import aiohttp

_GRACE_S = 30.0
"""For an answer beyond what the command itself may take: for its start, and for a network."""
_DESTROY_S = 10.0


class _AllLeasedError(SandboxError): ...


class RemoteBackend:
    """Makes sandboxes on a server.

    Args:
        url: of the server, ``http://host:port``.
        key_env: environment variable that holds its key.
        wait_s: longest wait for a sandbox of a server whose sandboxes are all leased.
    """

    def __init__(self, *, url: str, key_env: str = "ASYNCRL_SANDBOX_KEY", wait_s: float = 600.0) -> None:
        if not re.match(r"https?://[^/\s]+", url):
            raise ConfigError(f"url is {url!r}", path="url", remedy="http://host:port")
        if not os.environ.get(key_env):
            raise ConfigError(f"{key_env} is not set here", path="key_env", remedy="set it to the server's key")
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {os.environ[key_env]}"}
        self._wait_s = wait_s
        self._session: aiohttp.ClientSession | None = None

    async def create(self, limits: SandboxLimits) -> RemoteSandbox:
        clock = asyncio.get_running_loop().time
        ends_s = clock() + self._wait_s
        while True:  # the server lets each request wait
            try:
                made = await self.ask("POST", "/sandboxes", {"limits": asdict(limits)}, deadline_s=_GRACE_S)
            except _AllLeasedError:
                if clock() >= ends_s:
                    raise
                await asyncio.sleep(1.0)  # a proxy may answer at once
            else:
                return RemoteSandbox(self, made, limits)

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def ask(self, method: str, path: str, body: Mapping[str, Any], *, deadline_s: float) -> dict[str, Any]:
        """Send a request and return the answer.

        Raises:
            SandboxError: the server cannot be reached, failed, or gave no answer.
            ConfigError: it refused the key, the limits or the request's form.
        """
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=None),
                connector=aiohttp.TCPConnector(limit=0),  # those that wait for a sandbox keep none from its owner
            )
        try:
            async with (
                asyncio.timeout(deadline_s),
                self._session.request(method, self._url + path, json=body, allow_redirects=False) as response,
            ):
                answer = json.loads(await response.read())
                if not isinstance(answer, dict):
                    raise ValueError(f"status {response.status}, and no object")
        except (aiohttp.ClientError, ValueError, TimeoutError) as error:
            raise SandboxError(f"{self._url} gave no answer: {type(error).__name__}: {error}") from error
        if response.status in (400, 401, 403):
            raise ConfigError(f"{self._url} refused: {answer.get('error')}", path="limits", remedy="see the server")
        if response.status == 429:
            raise _AllLeasedError(f"{self._url}: {answer.get('error')}")
        if response.status != 200:
            raise SandboxError(f"{self._url} failed with status {response.status}: {answer.get('error')}")
        return answer


class RemoteSandbox(Sandbox):
    """One sandbox of a server."""

    def __init__(self, backend: RemoteBackend, made: Mapping[str, Any], limits: SandboxLimits) -> None:
        self.limits = limits
        self.isolation = Isolation(**made["isolation"])
        self.folder = str(made["folder"])
        self._backend = backend
        self._path = f"/sandboxes/{made['id']}"
        self._destroyed = False

    async def exec(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        deadline_s: float | None = None,
        output_bytes: int | None = None,
    ) -> ProgramEnd:
        if (refused := unstartable(command, env)) is not None:
            return refused
        deadline_s = self.limits.deadline_s if deadline_s is None else deadline_s
        body = {
            "command": list(command),
            "stdin": base64.b64encode(stdin).decode(),
            "env": dict(env or {}),
            "deadline_s": deadline_s,
            "output_bytes": self.limits.output_bytes if output_bytes is None else output_bytes,
        }
        end = await self._ask("exec", body, deadline_s=deadline_s + _GRACE_S)
        outputs = {name: base64.b64decode(end[name]) for name in ("output", "error")}
        return ProgramEnd(how=end["how"], code=int(end["code"]), **outputs)

    async def reset(self) -> bool:
        return bool((await self._ask("reset", {}, deadline_s=_GRACE_S))["proven"])

    async def destroy(self) -> None:
        if not self._destroyed:
            self._destroyed = True
            with contextlib.suppress(AsyncRLError):  # it is gone already, or ends at its time to live
                await self._backend.ask("DELETE", self._path, {}, deadline_s=_DESTROY_S)

    async def _ask(self, what: str, body: Mapping[str, Any], *, deadline_s: float) -> dict[str, Any]:
        if self._destroyed:
            raise SandboxError("a sandbox is gone")
        try:
            return await self._backend.ask("POST", f"{self._path}/{what}", body, deadline_s=deadline_s)
        except BaseException:
            await self.destroy()
            raise
