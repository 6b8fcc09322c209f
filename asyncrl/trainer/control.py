"""Orders to a run that trains: pause, resume, set, stop; from this process or another one of the same user.

A run listens at ``RUN/control.sock``, which only its user may open. An order is one line of JSON, and so is its answer:

    {"order": "set", "key": "trainer.lr", "value": 1e-6}        {"ok": true} or {"error": "...", "remedy": "..."}
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.errors import AsyncRLError, ConfigError, InfrastructureError

_NAME = "control.sock"
_MOST_BYTES = 1 << 16
_TOO_LONG = f"an order has at most {_MOST_BYTES} bytes"
_ANSWER_S = 10.0

Orders = Mapping[str, Callable[..., None]]
"""What each order calls, with the other keys of its line. The functions do not block; what they raise is the answer."""


@asynccontextmanager
async def listening(folder: Path, orders: Orders) -> AsyncIterator[None]:
    """Take orders for the run in ``folder`` inside the block."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError, asyncio.IncompleteReadError, TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                try:
                    answer = _carry_out(await reader.readuntil(b"\n"), orders)
                except asyncio.LimitOverrunError:
                    answer = {"error": _TOO_LONG}
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(serve, sock=await asyncio.to_thread(_bind, folder), limit=_MOST_BYTES)
    try:
        yield
    finally:
        server.close()
        await asyncio.to_thread((folder / _NAME).unlink, missing_ok=True)


def give_order(folder: Path, order: str, **arguments: Any) -> None:
    """Give an order to the run in ``folder``, and wait for its answer. Blocks.

    Raises:
        InfrastructureError: the run takes no orders: it is starting or ending, or has ended.
        ConfigError: it refused, or the order is too long, or no plain data.
    """
    key, remedy = str(arguments.get("key", "")), "stop the run, and resume it with another configuration"
    try:
        line = json.dumps({"order": order, **arguments}, default=_number).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        text = f"{key} = {arguments.get('value')!r:.100} cannot be sent to a run: {error}"
        raise ConfigError(text, path=key, remedy=f"name a function as package.module:name, or {remedy}") from None
    if len(line) > _MOST_BYTES:
        raise ConfigError(f"{_TOO_LONG}, and this one {len(line)}", path=key, remedy=remedy)
    try:
        with _address(folder) as address, socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_ANSWER_S)
            connection.connect(address)
            connection.sendall(line)
            answer = json.loads(connection.makefile("rb").readline(_MOST_BYTES) or b"null")
    except (OSError, ValueError):
        answer = None
    if not isinstance(answer, dict):
        raise InfrastructureError(f"{folder} takes no orders now: a run does while it trains")
    if "error" in answer:
        raise ConfigError(str(answer["error"]), path=str(answer.get("path", "")), remedy=str(answer.get("remedy", "")))


def _number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} is no plain data")


def _bind(folder: Path) -> socket.socket:
    (folder / _NAME).unlink(missing_ok=True)  # of a process that was killed: the run's lock says that it is gone
    listener = socket.socket(socket.AF_UNIX)
    os.fchmod(listener.fileno(), 0o600)  # taken over by the file that bind makes
    with _address(folder) as address:
        listener.bind(address)
    return listener


def _carry_out(line: bytes, orders: Orders) -> dict[str, Any]:
    try:
        given = json.loads(line)
        carry_out = orders[given.pop("order")]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {"error": f"an order is one of {', '.join(orders)}"}
    try:
        carry_out(**given)
    except AsyncRLError as error:
        return {"error": str(error), "path": getattr(error, "path", ""), "remedy": getattr(error, "remedy", "")}
    except (TypeError, AttributeError, RecursionError) as error:  # their types are the sender's
        return {"error": f"wrong arguments: {error}"}
    return {"ok": True}


@contextmanager
def _address(folder: Path) -> Iterator[str]:
    """Yield a path of the socket that is short enough for one, however deep the folder is."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        short = Path(f"/proc/self/fd/{descriptor}")
        yield str((short if short.exists() else folder) / _NAME)
    finally:
        os.close(descriptor)
