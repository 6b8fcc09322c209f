"""A client of the control plane, its socket and its keys, for the command line: without the server's imports."""

from __future__ import annotations

import logging
import os
import re
import stat
import tempfile
from pathlib import Path
from typing import Any, Self

import aiohttp
import msgspec

from asyncrl.errors import ConfigError, InfrastructureError

_log = logging.getLogger(__name__)


class ControlClient:
    """Sends requests to the control plane of a running server. Use it with ``async with``.

    ``address`` is the path of its Unix socket, or its ``http://`` address, with an operator's ``key``.

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
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)  # a swap or a drain has no limit
        self._session = aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request; return its answer. Any: JSON of the route table's types.

        Raises:
            InfrastructureError: there is no answer, or it is an error, whose message is the server's.
        """
        assert self._session is not None
        base = self._address if self._address.startswith("http://") else "http://localhost"
        try:
            async with self._session.request(method, base + path, json=body) as answer:
                content = msgspec.json.decode(await answer.read())
        except (aiohttp.ClientError, OSError, msgspec.MsgspecError) as error:
            raise InfrastructureError(
                f"the server at {self._address} does not answer: {str(error) or type(error).__name__}"
            ) from error
        if answer.status >= 400:
            detail = content.get("error") if isinstance(content, dict) else None
            message = detail.get("message") if isinstance(detail, dict) else detail
            raise InfrastructureError(f"{message or 'the server refused the request'} (status {answer.status})")
        return content


def control_socket_path(port: int) -> Path:
    """Return the path of the control plane's Unix socket of the server on ``port``, in a folder of its user alone.

    Raises:
        ConfigError: that folder belongs to another user, or others may enter it.
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
            f"{folder} is not a folder of your own with mode 0700", path="control-socket", remedy="remove it"
        )
    return folder / f"serve-{port}.sock"


_COMMENT = re.compile(r"(?:^|\s)#")
_HOLDER_OR_KEY = re.compile(r"[^=\s]+=+[^=\s]")


def read_keys(path: Path, *, option: str = "api-key-file") -> dict[str, str]:
    """Return the keys of a file by holder: one per line, alone or as ``holder = key``, with ``#`` comments.

    Raises:
        ConfigError: the file cannot be read, has no key, names a holder twice, or has a line ``holder=key``, which may
            be a key as a whole.
    """
    try:
        if path.stat().st_mode & 0o077:
            _log.warning("%s can be read by other users of this machine; chmod 600 makes it yours alone", path)
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}", path=option, remedy="give a text file of keys") from error
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        text = _COMMENT.split(line, maxsplit=1)[0].strip()
        if not text:
            continue
        holder, equals, key = text.partition(" = ")
        if not equals:
            if _HOLDER_OR_KEY.match(text):
                raise ConfigError(
                    f"{path}:{number}: a key with = in the middle",
                    path=option,
                    remedy="write holder = key, with spaces",
                )
            holder, key = f"key-{number}", text
        if holder.strip() in keys:
            raise ConfigError(f"{path}:{number}: {holder.strip()!r} has a key already", path=option)
        keys[holder.strip()] = key.strip()
    if not keys:
        raise ConfigError(f"{path}: no key in it", path=option, remedy="write one key a line")
    return keys
