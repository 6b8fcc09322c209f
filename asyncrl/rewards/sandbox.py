"""Foreign programs in processes that are held apart from this machine, and are gone at their deadline."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from asyncrl.errors import EnvironmentFailure
from asyncrl.owned_folder import OwnedFolder

__all__ = ["Isolation", "ProgramEnd", "SandboxLimits", "run_program"]

_log = logging.getLogger(__name__)
_PROGRAM = Path(__file__).with_name("sandbox_program.py")
_START_S = 10.0
_SENT = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals that somebody sends; of the others a program dies by what it does."""
_MOST_DEATHS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """What one program may use; the deadline is wall time, the rest the kernel counts.

    Attributes:
        deadline_s: until it is killed with everything it started.
        memory_bytes: address space of each of its processes.
        file_bytes: largest file, and all files together where they lie in memory.
        output_bytes: of each of its two outputs; more ends it.
        files: open descriptors.
        children: processes and threads at once, where they can be counted apart from ours.
    """

    deadline_s: float = 5.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 16 << 20
    output_bytes: int = 1 << 20
    files: int = 64
    children: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """What could be taken away from a program (:mod:`asyncrl.rewards.sandbox_program`)."""

    user: bool
    network: bool
    processes: bool
    files: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramEnd:
    """How a program ended.

    Attributes:
        how: ``exited``, ``killed`` (by a signal: a limit, a crash, itself), ``deadline``, or ``output`` (too much).
        code: exit code, or number of the signal.
        stdout, stderr: what it wrote, undecodable bytes replaced.
        isolation: what it was run without.
    """

    how: str
    code: int
    stdout: str
    stderr: str
    isolation: Isolation


class _TooMuch(Exception):
    """More output than is allowed."""


async def run_program(
    files: Mapping[str, str], entry: str, *, stdin: str = "", limits: SandboxLimits | None = None
) -> ProgramEnd:
    """Run the Python program ``entry``, one of ``files``, in a folder of its own that is gone afterwards.

    It sees none of our environment variables and no site packages' start-up code; what is installed can be imported.
    However it ends is a fact to be told, no error. It is killed with its group at its deadline, and whatever the reason
    this call ends; where it has a process tree of its own, nothing outlives that.

    One that dies of a signal that can be sent, SIGKILL above all, may have been killed by anybody: it is run again, in
    a new sandbox. The third such death is the program's own.

    Raises:
        EnvironmentFailure: the sandbox itself could not be set up.
    """
    limits = limits or SandboxLimits()
    deaths = 0
    while True:
        end = await _run_once(files, entry, stdin, limits)
        if end.how != "killed" or end.code not in _SENT:
            return end
        deaths += 1
        name = signal.Signals(end.code).name
        _log.warning("a sandbox of %s has died by %s before its deadline (death %d)", entry, name, deaths)
        if deaths == _MOST_DEATHS:
            return end


async def _run_once(files: Mapping[str, str], entry: str, stdin: str, limits: SandboxLimits) -> ProgramEnd:
    folder = await asyncio.to_thread(_folder, files)
    try:
        return await _run(folder.path, entry, stdin, limits)
    finally:
        await asyncio.shield(asyncio.to_thread(folder.close))


def _folder(files: Mapping[str, str]) -> OwnedFolder:
    try:
        folder = OwnedFolder("sandbox")
        for name, text in files.items():
            (folder.path / name).write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise EnvironmentFailure(f"no folder could be made for a sandbox: {error}") from error
    return folder


async def _run(folder: Path, entry: str, stdin: str, limits: SandboxLimits) -> ProgramEnd:
    loop = asyncio.get_running_loop()
    report, theirs = os.pipe()
    with open(report, "rb", buffering=0) as reader:  # noqa: ASYNC230, PTH123  a pipe, read when it is written
        try:
            spec = {
                "folder": str(folder),
                "report": theirs,
                "cpu_s": int(limits.deadline_s) + 2,
                **{name: asdict(limits)[name] for name in ("memory_bytes", "file_bytes", "files", "children")},
            }
            command = [sys.executable, "-I", "-S", str(_PROGRAM), json.dumps(spec), "--", sys.executable, "-I", entry]
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    env={"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": str(folder), "OMP_NUM_THREADS": "1"},
                    cwd=folder,
                    pass_fds=(theirs,),
                    start_new_session=True,
                )
            except OSError as error:
                raise EnvironmentFailure(f"no process could be started for a sandbox: {error}") from error
        finally:
            os.close(theirs)
        outputs = [bytearray(), bytearray()]
        how, isolation = "exited", None
        try:
            isolation = await _told(loop, reader)
            try:
                async with asyncio.timeout(limits.deadline_s):
                    await _exchange(process, stdin, outputs, limits.output_bytes)
            except TimeoutError:
                how = "deadline"
            except _TooMuch:
                how = "output"
        finally:
            code = await asyncio.shield(_end(process, whole_tree=isolation is not None and isolation.processes))
    assert isolation is not None
    if how == "exited" and code < 0:
        how = "killed"
    stdout, stderr = (bytes(output).decode("utf-8", "replace") for output in outputs)
    return ProgramEnd(how=how, code=abs(code), stdout=stdout, stderr=stderr, isolation=isolation)


async def _end(process: asyncio.subprocess.Process, *, whole_tree: bool) -> int:
    """Kill what is left, and wait until it is gone; returns the exit code."""
    if whole_tree and process.returncode is None:
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            process.terminate()  # it kills the first process of the tree and waits for all the others
            async with asyncio.timeout(_START_S):
                # asyncio tells of an exit when the last byte was read, so what nobody wants is read as well.
                await asyncio.gather(_discard(process.stdout), _discard(process.stderr), process.wait())
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # Whoever left the group may hold the pipes open still: there is no other way to let go of them.
    process._transport.close()  # type: ignore[attr-defined]  # noqa: SLF001
    return await process.wait()


async def _discard(stream: asyncio.StreamReader | None) -> None:
    while stream is not None and await stream.read(65_536):
        pass


async def _told(loop: asyncio.AbstractEventLoop, reader: object) -> Isolation:
    """What the sandbox could take away; it says so before the program begins."""
    stream = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), reader)
    try:
        async with asyncio.timeout(_START_S):
            text = await stream.read()
        return Isolation(**json.loads(text))
    except (TimeoutError, ValueError, TypeError) as error:
        raise EnvironmentFailure("a sandbox did not begin: its own program failed") from error
    finally:
        transport.close()


async def _exchange(process: asyncio.subprocess.Process, stdin: str, outputs: list[bytearray], most_bytes: int) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None

    async def say(writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):  # it may not want to hear
            writer.write(stdin.encode("utf-8", "backslashreplace"))
            await writer.drain()
            writer.close()

    async def hear(stream: asyncio.StreamReader, output: bytearray) -> None:
        while part := await stream.read(65_536):
            output += part
            if len(output) > most_bytes:
                raise _TooMuch

    try:
        async with asyncio.TaskGroup() as talking:
            talking.create_task(say(process.stdin))
            talking.create_task(hear(process.stdout, outputs[0]))
            talking.create_task(hear(process.stderr, outputs[1]))
    except* _TooMuch:
        raise _TooMuch from None
    await process.wait()
