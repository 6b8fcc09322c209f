"""The program of a scoring process: it calls a user's function, one row at a time.

:mod:`asyncrl.rewards.scoring` starts it as ``python scoring_program.py FD``. It imports only the standard library and
the user's module, so that a start costs no more than that module.

On the socket ``FD``, every message is 4 bytes of length (big endian) and a body. Requests are 16 random bytes and a
pickle, because columns may hold any object and the parent is trusted; replies are JSON, because the user's code is not.
A reply repeats the random bytes of its request as ``to``: what the function writes to the socket is not taken for one.

    parent                                             program
    {"path": sys.path, "function": "module:name"}  ->
                                                   <-  {"ready": true} or {"error": traceback}
    {"completion": ..., "task": ...}               ->
                                                   <-  {"value": 1.0}, {"value": {"score": 1.0, "format": 0.5}},
                                                       {"not_a_number": repr} or {"error": traceback}

The function runs in a child of this process, in its main thread (libraries that set alarms need that). This process
only waits: when the child ends, the parent closes the socket or dies, or SIGTERM comes, it kills everything that the
function started, whatever its sessions and groups (it adopts their orphans), and ends as the child did. Where it was
stopped (SIGSTOP), the parent's death continues it.

As ``python scoring_program.py FD COMMAND ...`` the child becomes that command instead, in a session of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import json
import os
import pickle
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_LENGTH = struct.Struct(">I")
_NONCE = 16
_REPR_CHARACTERS = 200
_ERROR_CHARACTERS = 100_000
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LARGEST_FLOAT32 = 3.4028234663852886e38


def main() -> None:
    """Fork the process that runs the function; wait until it or the parent ends, and end all that it started."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    with contextlib.suppress(OSError, AttributeError):  # elsewhere than on Linux only the group is killed
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # Stopped, it would not see that the parent has died.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, _ignore)
    keeper, command, program = os.getpid(), sys.argv[2:], os.fork()
    if program == 0:
        if command:
            os.setsid()
        signal.set_wakeup_fd(-1)
        os.close(reading)
        os.close(writing)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == keeper:
            _become(command) if command else _serve(connection)
        os._exit(0)
    events = select.poll()
    events.register(connection, 0)  # POLLHUP alone: the program reads the requests
    events.register(reading, select.POLLIN)
    status: int | None = None
    while status is None:
        happened = dict(events.poll())
        ordered = reading in happened and signal.SIGTERM in os.read(reading, 64)
        status = _reap(program)
        if status is None and (ordered or connection.fileno() in happened):
            os.kill(program, signal.SIGKILL)
            status = os.waitpid(program, 0)[1]
    if command:  # all of a group at once: its processes cannot start others meanwhile
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program, signal.SIGKILL)
    _kill_descendants()
    _end_like(os.waitstatus_to_exitcode(status))


def _become(command: list[str]) -> None:
    try:
        os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127)


def _ignore(number: int, frame: object) -> None:
    """Do nothing: the number goes to the pipe."""


def _reap(program: int) -> int | None:
    """Wait for children that have ended; return the program's status if it is among them."""
    status: int | None = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = ended[1] if ended[0] == program else status
    return status


def _kill_descendants() -> None:
    """Kill and await the children until there is none: when one has died, its own children are this process's."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    with contextlib.suppress(ChildProcessError, OSError):  # none is left; or the kernel does not list them
        while True:
            for pid in map(int, children.read_text().split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)


def _end_like(code: int) -> None:
    if code < 0:
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _serve(connection: socket.socket) -> None:
    """Import the function, then answer requests until the parent closes the socket."""
    # A child that the function forks must not keep the socket open: the parent must see the end of this process.
    os.register_at_fork(after_in_child=connection.close)
    body = _receive(connection)
    try:
        function = _load(pickle.loads(body[_NONCE:]))  # noqa: S301  # from our own parent
        reply: dict[str, Any] = {"ready": True}
    except BaseException:  # noqa: BLE001  # a user's module may raise anything, SystemExit too; the parent reports it
        function, reply = None, {"error": traceback.format_exc()}
    _write(connection, body, reply)
    while function is not None:
        body = _receive(connection)
        _write(connection, body, _answer(function, body[_NONCE:]))


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
    """Import a file as a module; it may import modules from its own folder."""
    name, folder = Path(path).stem, str(Path(path).resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def as_value(value: Any) -> dict[str, Any]:
    """Return ``{"value": ...}`` for a number or a table with a number ``score``, else ``{"not_a_number": why}``.

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
    """Return ``{"value": float}`` for a finite float32, a boolean or a scalar of numpy or torch, as above."""
    shown = _shown(value)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, int | float):
        return {"not_a_number": f"{shown} of type {type(value).__name__}"}
    if not abs(value) <= _LARGEST_FLOAT32:  # nan compares as false; an int may be too large for a float
        return {"not_a_number": f"{shown}, which is not a finite float32"}
    return {"value": float(value)}


def _shown(value: Any) -> str:
    try:
        return repr(value)[:_REPR_CHARACTERS]
    except Exception:  # noqa: BLE001  # a user's repr may raise anything, and an int of 5,000 digits has none
        return f"a value of type {type(value).__name__}"


def _receive(connection: socket.socket) -> bytes:
    """Return a message; end this process if the parent closed the socket."""
    return _exactly(connection, _LENGTH.unpack(_exactly(connection, _LENGTH.size))[0])


def _exactly(connection: socket.socket, count: int) -> bytes:
    body = bytearray()
    while len(body) < count:
        try:
            part = connection.recv(min(count - len(body), 1 << 20))
        except ConnectionError:
            part = b""
        if not part:
            os._exit(0)
        body += part
    return bytes(body)


def _write(connection: socket.socket, request: bytes, reply: dict[str, Any]) -> None:
    if "error" in reply:
        reply["error"] = reply["error"][-_ERROR_CHARACTERS:]
    body = json.dumps({**reply, "to": request[:_NONCE].hex()}).encode()
    try:
        connection.sendall(_LENGTH.pack(len(body)) + body)
    except ConnectionError:
        os._exit(0)


if __name__ == "__main__":
    main()
