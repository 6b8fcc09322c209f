"""The program that a scoring process runs: user functions, one row at a time, away from the event loop.

Started as a file, ``python scoring_program.py FD``, by :mod:`asyncrl.rewards.scoring_process`. It imports the standard
library and the user's module, nothing else, so that a start costs what the user's module costs.

On the socket ``FD``, every message is 4 bytes of length (big endian) and a body. Requests are pickled, because columns
may hold any object and come from our own parent; replies are JSON, because they come from the user's code.

    parent                                             program
    {"path": sys.path, "function": "module:name"}  ->
                                                   <-  {"ready": true} or {"error": traceback}
    {"completion": ..., "task": ...}               ->
                                                   <-  {"value": 1.0}, {"value": {"score": 1.0, "format": 0.5}},
                                                       {"not_a_number": repr} or {"error": traceback}

The function runs in the main thread (libraries that set alarms need that); a second thread watches the socket. When it
closes, because the parent closed it or died, the whole process group is killed: nothing is left behind.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import pickle
import queue
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_LENGTH = struct.Struct(">I")
_REPR_CHARACTERS = 200
_LARGEST_FLOAT32 = 3.4028234663852886e38


def main() -> None:
    """Import the function, then answer requests until the parent closes the socket."""
    # Descriptor numbers are inherited; the parent's end is not.
    connection = socket.socket(fileno=int(sys.argv[1]))
    # A child that the function forks must not keep it open: our parent is to see our end.
    os.register_at_fork(after_in_child=connection.close)
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, requests), daemon=True).start()
    try:
        function = _load(requests.get())
        reply: dict[str, Any] = {"ready": True}
    except BaseException:  # noqa: BLE001  # whatever the user's module raises, SystemExit too, is the parent's to tell
        function, reply = None, {"error": traceback.format_exc()}
    _write(connection, reply)
    while function is not None:
        _write(connection, _answer(function, requests.get()))


def _load(hello: dict[str, Any]) -> Callable[..., Any]:
    sys.path[:] = hello["path"]
    module, _, attributes = hello["function"].rpartition(":")
    part: Any = load_file(module) if module.endswith(".py") else importlib.import_module(module)
    for attribute in attributes.split("."):
        part = getattr(part, attribute)
    function: Callable[..., Any] = part
    return function


def _answer(function: Callable[..., Any], request: bytes) -> dict[str, Any]:
    try:
        value = function(**pickle.loads(request))  # noqa: S301  # from our own parent
        return as_value(value)
    except BaseException:  # noqa: BLE001  # as above
        return {"error": traceback.format_exc()}


def load_file(path: str) -> Any:
    """The module in a file; what lies beside it can be imported by it."""
    name, folder = Path(path).stem, str(Path(path).resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def as_value(value: Any) -> dict[str, Any]:
    """``{"value": ...}`` of a number, or of a table with a number ``score``; else ``{"not_a_number": why}``.

    Of a table's other members those that are numbers stay: they are what the score was made of.
    """
    if not isinstance(value, dict):
        return as_number(value)
    if "score" not in value:
        return {"not_a_number": f"a table without 'score': {_shown(value)}"}
    score = as_number(value["score"])
    if "not_a_number" in score:
        return {"not_a_number": f"as 'score' {score['not_a_number']}"}
    parts = {str(name): as_number(part).get("value") for name, part in value.items()}
    return {"value": {name: part for name, part in parts.items() if part is not None}}


def as_number(value: Any) -> dict[str, Any]:
    """``{"value": float}`` if ``value`` is one finite float32, else ``{"not_a_number": why}``.

    Booleans count as 0 and 1; scalars of numpy and torch as what they hold (that is the vendors' edge of ``Any``).
    """
    shown = _shown(value)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, int | float):
        return {"not_a_number": f"{shown} of type {type(value).__name__}"}
    if not abs(value) <= _LARGEST_FLOAT32:  # nan compares as false; an int may be too large for a float
        return {"not_a_number": f"{shown}, which is no finite float32"}
    return {"value": float(value)}


def _shown(value: Any) -> str:
    try:
        return repr(value)[:_REPR_CHARACTERS]
    except Exception:  # noqa: BLE001  # a user's repr raises what it likes, and an int of 5,000 digits has none
        return f"some {type(value).__name__}"


def _read(connection: socket.socket, requests: queue.SimpleQueue[Any]) -> None:
    hello = True
    while (body := _receive(connection)) is not None:
        requests.put(pickle.loads(body) if hello else body)  # noqa: S301  # from our own parent
        hello = False
    _end()


def _end() -> None:
    os.killpg(os.getpid(), signal.SIGKILL)  # we lead our group: this kills us and whatever the function started


def _receive(connection: socket.socket) -> bytes | None:
    header = _exactly(connection, _LENGTH.size)
    return None if header is None else _exactly(connection, _LENGTH.unpack(header)[0])


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    body = bytearray()
    while len(body) < count:
        try:
            part = connection.recv(min(count - len(body), 1 << 20))
        except ConnectionError:
            return None
        if not part:
            return None
        body += part
    return bytes(body)


def _write(connection: socket.socket, reply: dict[str, Any]) -> None:
    body = json.dumps(reply).encode()
    try:
        connection.sendall(_LENGTH.pack(len(body)) + body)
    except ConnectionError:
        _end()


if __name__ == "__main__":
    main()
