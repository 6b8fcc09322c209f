"""Asks the control plane of a running server, over its Unix socket or its port."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import aiohttp
import msgspec

from asyncrl.errors import ConfigError, InfrastructureError

__all__ = ["ControlClient"]


class ControlClient:
    """One question after another. Use it with ``async with``.

    Args:
        address: path of the control plane's Unix socket, or its ``http://`` address.
        key: for the latter.

    Raises:
        ConfigError: there is no such socket.
    """

    def __init__(self, address: str, *, key: str = "") -> None:
        if not address.startswith("http://") and not Path(address).is_socket():
            raise ConfigError(
                f"no server has its control plane at {address}",
                path="control",
                remedy="start one with asyncrl serve, or name its --port or --control",
            )
        self._address = address
        self._key = key
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        connector: aiohttp.BaseConnector | None = None
        if not self._address.startswith("http://"):
            connector = aiohttp.UnixConnector(path=self._address)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)  # a swap or a drain takes as long as it takes
        self._session = aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The answer, as JSON gave it. Any: see the route table.

        Raises:
            InfrastructureError: nobody answers, or the answer is an error; its message is the server's.
        """
        assert self._session is not None
        base = self._address if self._address.startswith("http://") else "http://localhost"
        try:
            async with self._session.request(method, base + path, json=body) as answer:
                content = msgspec.json.decode(await answer.read())
        except (aiohttp.ClientError, OSError, msgspec.MsgspecError) as error:
            raise InfrastructureError(
                f"the server at {self._address} does not answer: {error or type(error).__name__}"
            ) from error
        if answer.status >= 400:
            told = content.get("error") if isinstance(content, dict) else None
            message = told.get("message", "it refused") if isinstance(told, dict) else told or "it refused"
            raise InfrastructureError(f"{message} (status {answer.status})")
        return content
