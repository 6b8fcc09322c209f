"""Sandboxes of this machine: processes in Linux namespaces, without a package and without root.

Each is a process of :mod:`asyncrl.sandboxes.namespaces_program`. What the system does not allow is in its
:class:`~asyncrl.sandboxes.contract.Isolation`; limits and deadlines hold even so. Programs see the interpreter with its
installed packages (not those that are only linked to it) and the system's libraries, read-only.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from asyncrl.errors import ConfigError, SandboxError
from asyncrl.io import LockedTemporaryDirectory
from asyncrl.runtime import shield_until_done
from asyncrl.sandboxes.contract import How, Isolation, ProgramEnd, Sandbox, SandboxLimits, as_failure, unstartable
from asyncrl.single_controller.children import children

_PROGRAM = Path(__file__).with_name("namespaces_program.py")
_ANSWER_S = 10.0
_LAST_S = 1.0
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime")


class NamespacesBackend:
    """Makes sandboxes of this machine.

    Args:
        require_isolation: whether to refuse a machine that does not allow all kinds of isolation.
        loopback: whether programs have a loopback interface, of their sandbox's own.
    """

    has_network: ClassVar[bool] = False

    def __init__(self, *, require_isolation: bool = False, loopback: bool = False) -> None:
        self._require_isolation = require_isolation
        self._loopback = loopback

    async def create(self, limits: SandboxLimits) -> NamespacesSandbox:
        if limits.network:
            remedy = "the backend container, or network = false"
            raise ConfigError("namespaces has no network", path="network", remedy=remedy)
        sandbox = await NamespacesSandbox.start(limits, loopback=self._loopback)
        if self._require_isolation and sandbox.isolation.missing:
            await sandbox.destroy()
            raise SandboxError(
                f"this machine does not allow programs an own {', '.join(sandbox.isolation.missing)} (user namespaces, "
                "seccomp: see asyncrl doctor), and require_isolation is set"
            )
        return sandbox

    async def close(self) -> None:
        """Do nothing: the kernel ends what this process leaves."""


class NamespacesSandbox(Sandbox):
    """One sandbox. It ends with the thread that started it, and with this process however that dies."""

    def __init__(
        self,
        limits: SandboxLimits,
        folder: LockedTemporaryDirectory,
        process: asyncio.subprocess.Process,
        control: socket.socket,
    ) -> None:
        self.limits = limits
        self._directory = folder
        self._process = process
        self._control = control
        self._running = asyncio.Lock()
        self._destroying: asyncio.Task[None] | None = None
        self._first: int | None = None
        """Descriptor of the first process of its tree, readable once all processes have ended."""

    @classmethod
    async def start(cls, limits: SandboxLimits, *, loopback: bool = False) -> NamespacesSandbox:
        """Start a sandbox; raise SandboxError if it cannot be."""
        starting = asyncio.ensure_future(cls._start(limits, loopback=loopback))
        try:
            return await shield_until_done(starting)
        except asyncio.CancelledError:
            if not starting.cancelled() and starting.exception() is None:
                await starting.result().destroy()
            raise

    @classmethod
    async def _start(cls, limits: SandboxLimits, *, loopback: bool) -> NamespacesSandbox:
        try:
            folder = await asyncio.to_thread(LockedTemporaryDirectory, "sandbox")
        except OSError as error:
            raise as_failure("the folder of a sandbox could not be made", error) from error
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        names = ("memory_bytes", "file_bytes", "files", "children")
        spec: dict[str, Any] = {"folder": str(folder.path), "visible": visible_paths(), "loopback": loopback}
        spec |= {name: asdict(limits)[name] for name in names}
        command = [sys.executable, "-I", "-S", str(_PROGRAM), json.dumps(spec), str(theirs.fileno())]
        nothing = asyncio.subprocess.DEVNULL
        try:
            with theirs, children.starting("a sandbox"):
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=nothing,
                    stdout=nothing,
                    stderr=nothing,
                    env={"PATH": os.defpath, "LANG": "C.UTF-8"},
                    cwd=folder.path,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
        except OSError as error:
            control.close()
            await asyncio.to_thread(folder.close)
            raise as_failure("the process of a sandbox could not be started", error) from error
        sandbox = cls(limits, folder, process, control)
        try:
            begun = await sandbox._answer("its start")
        except SandboxError:
            await sandbox.destroy()
            raise
        sandbox.isolation, sandbox.folder = Isolation(**begun["isolation"]), begun["folder"]
        with contextlib.suppress(OSError, TypeError):  # not on this kernel, or there is no tree
            sandbox._first = os.pidfd_open(begun["first"])
        return sandbox

    async def exec(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        deadline_s: float | None = None,
        output_bytes: int | None = None,
        connection: socket.socket | None = None,
        over: asyncio.Event | None = None,
    ) -> ProgramEnd:
        """As :meth:`Sandbox.exec`; the command is stopped when ``over`` is set.

        It has ``connection``, which is closed here, as its descriptor 3.
        """
        if (refused := unstartable(command, env)) is not None:
            return refused
        deadline_s = self.limits.deadline_s if deadline_s is None else deadline_s
        path = f"{Path(sys.executable).parent}:{os.defpath}"
        own = {"PATH": path, "LANG": "C.UTF-8", "HOME": self.folder, "OMP_NUM_THREADS": "1"}
        cpu_s = (int(deadline_s) + 2) * (os.cpu_count() or 1)  # all threads count; it ends what the deadline could not
        order = {"do": "exec", "command": list(command), "env": {**own, **(env or {})}, "cpu_s": cpu_s}
        async with self._running:
            pipes = _Pipes(self.limits.output_bytes if output_bytes is None else output_bytes)
            try:
                await pipes.open(stdin)
                given = [*pipes.theirs, *([connection.fileno()] if connection is not None else [])]
                self._order(order, given)
                pipes.close_theirs()
                if connection is not None:
                    connection.close()  # only the program has its end
                return await self._end(pipes, deadline_s, over)
            except BaseException as error:
                await self.destroy()
                if isinstance(error, OSError):
                    raise as_failure("a command could not be started", error) from error
                raise
            finally:
                pipes.close()

    async def reset(self) -> bool:
        async with self._running:
            try:
                self._order({"do": "reset"})
                return bool((await self._answer("its reset"))["proven"])
            except BaseException:
                await self.destroy()
                raise

    async def destroy(self) -> None:
        if self._destroying is None:
            self._destroying = asyncio.ensure_future(self._destroy())
        await shield_until_done(self._destroying)

    async def _destroy(self) -> None:
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # at which the program ends everything, and then itself
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
        if self._first is not None:
            await _readable(self._first)
            os.close(self._first)
        self._control.close()
        await asyncio.to_thread(self._directory.close)

    async def _end(self, pipes: _Pipes, deadline_s: float, over: asyncio.Event | None) -> ProgramEnd:
        how: How = "exited"
        answer = asyncio.ensure_future(self._answer())
        stop = asyncio.ensure_future(over.wait()) if over is not None else None
        try:
            try:
                async with asyncio.timeout(deadline_s):
                    either: list[asyncio.Future[Any]] = [answer, pipes.overflow, *([stop] if stop is not None else [])]
                    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            except TimeoutError:
                how = "deadline"
            if not answer.done():
                how = "deadline" if how == "deadline" else "output" if pipes.overflow.done() else "stopped"
                self._order({"do": "kill"})
            async with asyncio.timeout(_ANSWER_S):
                end = await answer
        except TimeoutError as error:
            raise SandboxError(f"a sandbox did not end its command within {_ANSWER_S:g} s") from error
        finally:
            answer.cancel()
            if stop is not None:
                stop.cancel()
        if how == "exited":
            await pipes.read_to_the_end()
        code = int(end["code"])
        if how == "exited":
            how = (
                "output"
                if pipes.overflow.done()
                else "memory"
                if end["memory"]
                else "exited"
                if code >= 0
                else "killed"
            )
        code = abs(code) if how in ("exited", "killed", "memory") else 0
        return ProgramEnd(how=how, code=code, output=bytes(pipes.outputs[0]), error=bytes(pipes.outputs[1]))

    def _order(self, order: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        message = json.dumps(order, ensure_ascii=False).encode("utf-8", "surrogatepass")
        try:
            socket.send_fds(self._control, [message], descriptors)
        except OSError as error:
            raise SandboxError(f"a sandbox is gone: {error}") from error

    async def _answer(self, what: str = "") -> dict[str, Any]:
        """Return the next message of the program, within a deadline if it is for ``what``."""
        try:
            async with asyncio.timeout(_ANSWER_S if what else None):
                message = await asyncio.get_running_loop().sock_recv(self._control, 1 << 16)
        except TimeoutError as error:
            raise SandboxError(f"a sandbox gave no answer to {what} within {_ANSWER_S:g} s") from error
        except OSError as error:
            raise SandboxError(f"a sandbox is gone: {error}") from error
        if not message:
            raise SandboxError("the process of a sandbox died")
        answer: dict[str, Any] = json.loads(message)
        return answer


async def _readable(descriptor: int) -> None:
    """Wait until a descriptor is readable, for a while."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(descriptor, readable.set)
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(readable.wait(), _ANSWER_S)
    finally:
        loop.remove_reader(descriptor)


class _Pipes:
    """Standard input and outputs of one command. ``overflow`` is done when an output has more than ``most_bytes``."""

    def __init__(self, most_bytes: int) -> None:
        self.theirs: list[int] = []
        self.outputs = (bytearray(), bytearray())
        self.overflow: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ends: list[asyncio.Future[None]] = []
        self._transports: list[asyncio.BaseTransport] = []
        self._most_bytes = most_bytes

    async def open(self, stdin: bytes) -> None:
        loop = asyncio.get_running_loop()
        reading, writing = os.pipe()
        self.theirs.append(reading)
        transport, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, open(writing, "wb", buffering=0))  # noqa: ASYNC230, PTH123, SIM115
        self._transports.append(transport)
        transport.write(stdin)
        transport.close()  # once it is written
        for output in self.outputs:
            reading, writing = os.pipe()
            self.theirs.append(writing)
            end = loop.create_future()
            self._ends.append(end)
            protocol = functools.partial(_Output, output, self._most_bytes, end, self.overflow)
            file = open(reading, "rb", buffering=0)  # noqa: ASYNC230, PTH123, SIM115  a pipe does not block
            pipe, _ = await loop.connect_read_pipe(protocol, file)
            self._transports.append(pipe)

    async def read_to_the_end(self) -> None:
        """Read what is left; a process that is out of reach (see ``Isolation.processes``) may hold them open."""
        await asyncio.wait(self._ends, timeout=_LAST_S)

    def close_theirs(self) -> None:
        while self.theirs:
            os.close(self.theirs.pop())

    def close(self) -> None:
        self.close_theirs()
        for each in self._transports:
            if isinstance(each, asyncio.WriteTransport):  # it closes itself when all is written
                if each.get_write_buffer_size():
                    each.abort()
            else:
                each.close()


class _Output(asyncio.Protocol):
    def __init__(
        self, output: bytearray, most_bytes: int, end: asyncio.Future[None], overflow: asyncio.Future[None]
    ) -> None:
        self._output = output
        self._most_bytes = most_bytes
        self._end = end
        self._overflow = overflow

    def data_received(self, data: bytes) -> None:
        room = self._most_bytes - len(self._output)
        self._output += data[:room]
        if len(data) > room and not self._overflow.done():
            self._overflow.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._end.done():
            self._end.set_result(None)


def visible_paths() -> list[str]:
    """Return what a program may read beside its folder: the system's libraries, the interpreter and its packages."""
    found: list[str] = []
    for path in (
        *_SYSTEM,
        *(each for prefix in (sys.base_prefix, sys.prefix) for each in (os.path.realpath(prefix), prefix)),
    ):
        if not any(Path(path).is_relative_to(other) for other in found):
            found.append(path)
    return found
