"""Run untrusted programs in isolated processes, with limits and a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from asyncrl.errors import EnvironmentFailure
from asyncrl.io import LockedTemporaryDirectory

_log = logging.getLogger(__name__)
_PROGRAM = Path(__file__).with_name("sandbox_program.py")
_START_S = 10.0
_LAST_S = 1.0
_EXTERNAL_SIGNALS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals that may come from outside; the program itself causes the others."""
_MAX_DEATHS = 3
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of one program.

    Attributes:
        deadline_s: wall time until the program is killed with everything it started.
        memory_bytes: address space of each of its processes; if it has files and processes of its own, also what all
            of them hold together (looked at ten times a second: it then ends by SIGSEGV).
        file_bytes: largest file, and all files together where the working folder lies in memory.
        output_bytes: of each of its two outputs; a program that writes more is killed.
        files: open descriptors.
        children: processes and threads at once, if the program has its own user namespace.
    """

    deadline_s: float = 5.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 16 << 20
    output_bytes: int = 1 << 20
    files: int = 64
    children: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """The kinds of isolation that the system allowed (:mod:`asyncrl.rewards.sandbox_program`)."""

    user: bool
    network: bool
    processes: bool
    files: bool
    system_calls: bool

    @property
    def missing(self) -> list[str]:
        """The kinds that the system did not allow."""
        return [name for name, had in asdict(self).items() if not had]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramEnd:
    """How a program ended.

    Attributes:
        how: ``exited``, ``killed`` (by a signal: a limit, a crash, itself), ``deadline``, or ``output`` (too much).
        code: exit code, or number of the signal.
    """

    how: str
    code: int
    stdout: str
    stderr: str
    isolation: Isolation


class _OutputLimitExceeded(Exception):
    pass


async def run_program(
    files: Mapping[str, str], entry: str, *, stdin: str = "", limits: SandboxLimits | None = None
) -> ProgramEnd:
    """Run the Python program ``entry``, one of ``files``, in a temporary folder, and return how it ended.

    The program sees none of this process's environment variables and runs no start-up code of site packages; packages
    installed in this environment can be imported (not those that are only linked to it). It is killed with its process
    group at its deadline, and when this call ends for any reason; where the system allows a separate process tree,
    nothing survives it.

    A program that dies by a signal such as SIGKILL may have been killed from outside: it runs again, in a new sandbox.
    The third such death counts as the program's own.

    Raises:
        EnvironmentFailure: the sandbox itself could not be set up.
    """
    (end,) = await _run_until_it_ends(lambda: _run_alone(files, [entry], stdin, limits or SandboxLimits()))
    return end


async def run_pair(
    program: str, stdins: Mapping[str, str], *, limits: SandboxLimits | None = None
) -> tuple[ProgramEnd, ProgramEnd]:
    """Run one program twice, in two sandboxes with a socket between them; return how both ended.

    Each side gets its name (a key of ``stdins``) and the descriptor of its socket as arguments. When the second side
    has ended, the first has a second to end.

    Raises:
        EnvironmentFailure: as for :func:`run_program`.
    """
    limits = limits or SandboxLimits()

    async def once() -> list[ProgramEnd]:
        ends: list[asyncio.Task[ProgramEnd]] = []
        sockets = socket.socketpair()
        try:
            for (side, stdin), end in zip(stdins.items(), sockets, strict=True):
                command = ["main.py", side, str(end.fileno())]
                ends.append(asyncio.create_task(_run_once({"main.py": program}, command, stdin, limits, end)))
            await asyncio.wait([ends[1]])
            await asyncio.wait([ends[0]], timeout=_LAST_S)
            return [await ends[1]] if not ends[0].done() else [await ends[0], await ends[1]]
        finally:
            for end in sockets:
                end.close()
            for task in ends:
                task.cancel()
            await asyncio.gather(*ends, return_exceptions=True)

    ends = await _run_until_it_ends(once)
    return ends[0], ends[-1]


async def _run_alone(
    files: Mapping[str, str], command: list[str], stdin: str, limits: SandboxLimits
) -> list[ProgramEnd]:
    return [await _run_once(files, command, stdin, limits)]


async def _run_until_it_ends(run: Callable[[], Awaitable[list[ProgramEnd]]]) -> list[ProgramEnd]:
    deaths = 0
    while True:
        ends = await run()
        killed = [end.code for end in ends if end.how == "killed" and end.code in _EXTERNAL_SIGNALS]
        if not killed:
            return ends
        deaths += 1
        name = signal.Signals(killed[0]).name
        _log.warning("a sandbox died by %s before its deadline (death %d)", name, deaths)
        if deaths == _MAX_DEATHS:
            return ends


async def _run_once(
    files: Mapping[str, str],
    command: list[str],
    stdin: str,
    limits: SandboxLimits,
    connection: socket.socket | None = None,
) -> ProgramEnd:
    folder = await asyncio.to_thread(_folder, files)
    try:
        return await _run(folder.path, command, stdin, limits, connection)
    finally:
        await asyncio.shield(asyncio.to_thread(folder.close))


def _folder(files: Mapping[str, str]) -> LockedTemporaryDirectory:
    try:
        folder = LockedTemporaryDirectory("sandbox")
        for name, text in files.items():
            (folder.path / name).write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise EnvironmentFailure(f"the folder of a sandbox could not be created: {error}") from error
    return folder


async def _run(
    folder: Path, entry: list[str], stdin: str, limits: SandboxLimits, connection: socket.socket | None
) -> ProgramEnd:
    loop = asyncio.get_running_loop()
    report, theirs = os.pipe()
    with open(report, "rb", buffering=0) as reader:  # noqa: ASYNC230, PTH123  a pipe, read when it is written
        try:
            spec = {
                "folder": str(folder),
                "report": theirs,
                "visible": _visible(),
                "cpu_s": int(limits.deadline_s) + 2,
                **{name: asdict(limits)[name] for name in ("memory_bytes", "file_bytes", "files", "children")},
            }
            command = [sys.executable, "-I", "-S", str(_PROGRAM), json.dumps(spec), "--"]
            command += [sys.executable, "-I", *entry]
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    env={"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": str(folder), "OMP_NUM_THREADS": "1"},
                    cwd=folder,
                    pass_fds=(theirs,) if connection is None else (theirs, connection.fileno()),
                    start_new_session=True,
                )
            except OSError as error:
                raise EnvironmentFailure(f"the process of a sandbox could not be started: {error}") from error
        finally:
            os.close(theirs)
            if connection is not None:
                connection.close()  # only the program holds its end
        outputs = [bytearray(), bytearray()]
        how, isolation = "exited", None
        try:
            isolation = await _read_isolation(loop, reader)
            try:
                async with asyncio.timeout(limits.deadline_s):
                    await _exchange(process, stdin, outputs, limits.output_bytes)
            except TimeoutError:
                how = "deadline"
            except _OutputLimitExceeded:
                how = "output"
        finally:
            code = await asyncio.shield(_end(process, whole_tree=isolation is not None and isolation.processes))
    assert isolation is not None
    if how == "exited" and code < 0:
        how = "killed"
    stdout, stderr = (bytes(output).decode("utf-8", "replace") for output in outputs)
    return ProgramEnd(how=how, code=abs(code), stdout=stdout, stderr=stderr, isolation=isolation)


def _visible() -> list[str]:
    """Return what a program may read beside its folder: the system's libraries, the interpreter and its packages."""
    found: list[str] = []
    for path in (
        *_SYSTEM,
        *(each for prefix in (sys.base_prefix, sys.prefix) for each in (os.path.realpath(prefix), prefix)),
    ):
        if not any(Path(path).is_relative_to(other) for other in found):
            found.append(path)
    return found


async def _end(process: asyncio.subprocess.Process, *, whole_tree: bool) -> int:
    """Kill what is left of the program, wait for it, and return the exit code."""
    if whole_tree and process.returncode is None:
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            process.terminate()  # its handler kills the tree's first process and waits for the others
            async with asyncio.timeout(_START_S):
                # asyncio reports the exit only after the outputs have been read to their end.
                await asyncio.gather(_discard(process.stdout), _discard(process.stderr), process.wait())
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # A process that left the group may still hold the pipes open, and asyncio has no public way to close them.
    process._transport.close()  # type: ignore[attr-defined]  # noqa: SLF001
    return await process.wait()


async def _discard(stream: asyncio.StreamReader | None) -> None:
    while stream is not None and await stream.read(65_536):
        pass


async def _read_isolation(loop: asyncio.AbstractEventLoop, reader: object) -> Isolation:
    """Read the report that the sandbox writes before the program begins."""
    stream = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), reader)
    try:
        async with asyncio.timeout(_START_S):
            text = await stream.read()
        return Isolation(**json.loads(text))
    except (TimeoutError, ValueError, TypeError) as error:
        raise EnvironmentFailure("a sandbox did not start: sandbox_program.py failed") from error
    finally:
        transport.close()


async def _exchange(process: asyncio.subprocess.Process, stdin: str, outputs: list[bytearray], most_bytes: int) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None

    async def write(writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):  # the program may not read its input
            writer.write(stdin.encode("utf-8", "backslashreplace"))
            await writer.drain()
            writer.close()

    async def read(stream: asyncio.StreamReader, output: bytearray) -> None:
        while part := await stream.read(65_536):
            output += part
            if len(output) > most_bytes:
                raise _OutputLimitExceeded

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(write(process.stdin))
            group.create_task(read(process.stdout, outputs[0]))
            group.create_task(read(process.stderr, outputs[1]))
    except* _OutputLimitExceeded:
        raise _OutputLimitExceeded from None
    await process.wait()
