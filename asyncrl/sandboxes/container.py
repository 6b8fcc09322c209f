"""Sandboxes in containers of docker or podman, through their command line.

A container has no capability, a read-only image, its folder in memory, and no network unless the limits allow it. Its
first process ends it at its time to live, whatever becomes of this process; containers that an earlier process of this
machine and user has left are removed before the first one is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncrl.errors import ConfigError, SandboxError
from asyncrl.runtime import run_all, shield_until_done
from asyncrl.sandboxes.contract import How, Isolation, ProgramEnd, Sandbox, SandboxLimits, as_failure, unstartable

_FOLDER = "/sandbox"
_USER = "65534:65534"
_LABEL = "asyncrl.owner"
_ORDER_S = 60.0
_FIRST = 'end=$(($(date +%s)+$1)); while [ $(date +%s) -lt $end ]; do sleep "$1" & wait $!; done'
"""The first process: it reaps orphans, and cannot be killed from within."""
_KILLED, _SIGNALS = 128, 64


class ContainerBackend:
    """Makes sandboxes in containers.

    Args:
        image: with ``/bin/sh``, ``cat``, ``chmod``, ``mkdir``, ``rm``, ``tar`` and what programs need.
        command: ``docker`` or ``podman``; the first of them that is installed if empty.
        lease_s: time to live of a container.
        options: further arguments of ``docker run``: ``["--runtime", "runsc"]``.
    """

    def __init__(self, *, image: str, command: str = "", lease_s: float = 3600.0, options: Sequence[str] = ()) -> None:
        found = [name for name in ([command] if command else ["docker", "podman"]) if shutil.which(name)]
        if not found:
            remedy = "install docker or podman, or use the backend namespaces"
            raise ConfigError(f"there is no {command or 'docker or podman'} here", path="command", remedy=remedy)
        self.command = found[0]
        self._image = image
        self._lease_s = lease_s
        self._options = list(options)
        self._live: set[ContainerSandbox] = set()
        self._cleaning: asyncio.Task[None] | None = None

    async def create(self, limits: SandboxLimits) -> ContainerSandbox:
        if self._cleaning is None or (self._cleaning.done() and self._cleaning.exception() is not None):
            self._cleaning = asyncio.ensure_future(self._remove_abandoned())
        await asyncio.shield(self._cleaning)
        starting = asyncio.ensure_future(self._start(limits))
        try:
            return await shield_until_done(starting)
        except asyncio.CancelledError:
            if not starting.cancelled() and starting.exception() is None:
                await starting.result().destroy()
            raise

    async def close(self) -> None:
        await run_all(each.destroy() for each in set(self._live))

    def forget(self, sandbox: ContainerSandbox) -> None:
        self._live.discard(sandbox)

    async def order(self, *arguments: str) -> str:
        """Run the command line with these arguments and return its output; raise SandboxError if it fails."""
        end = await _run([self.command, *arguments], b"", deadline_s=_ORDER_S, output_bytes=1 << 20)
        if not end.succeeded:
            reason = end.stderr.strip()[-500:] or end.how
            raise SandboxError(f"{self.command} {arguments[0]} failed ({end.code}): {reason}")
        return end.stdout.strip()

    async def _start(self, limits: SandboxLimits) -> ContainerSandbox:
        arguments = [
            *("run", "--detach", "--rm", "--label", f"{_LABEL}={_owner(os.getpid())}", "--user", _USER),
            *("--network", "bridge" if limits.network else "none"),
            *("--read-only", "--tmpfs", f"{_FOLDER}:rw,exec,nosuid,nodev,size={limits.file_bytes},uid=65534,mode=0777"),
            *("--tmpfs", f"/tmp:rw,exec,nosuid,nodev,size={limits.file_bytes},mode=1777", "--workdir", _FOLDER),  # noqa: S108  in the container
            *("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--ipc", "private"),
            *("--memory", str(limits.memory_bytes), "--memory-swap", str(limits.memory_bytes)),
            *("--pids-limit", str(limits.children + 2), "--ulimit", f"nofile={limits.files}:{limits.files}"),
            *("--ulimit", f"fsize={limits.file_bytes}:{limits.file_bytes}", "--ulimit", "core=0:0"),
            *(*self._options, "--entrypoint", "/bin/sh", self._image, "-c", _FIRST, "sh", f"{self._lease_s:.0f}"),
        ]
        sandbox = ContainerSandbox(self, await self.order(*arguments), limits)
        self._live.add(sandbox)
        return sandbox

    async def _remove_abandoned(self) -> None:
        listed = await self.order(
            "ps", "--all", "--filter", f"label={_LABEL}", "--format", f'{{{{.ID}}}} {{{{.Label "{_LABEL}"}}}}'
        )
        left = [line.split() for line in listed.splitlines()]
        here = _owner(os.getpid()).partition("-")[0]
        for container, owner in (each for each in left if len(each) == 2):
            machine, _, process = owner.partition("-")
            if machine == here and _owner(int(process.partition("-")[0])) != owner:
                with contextlib.suppress(SandboxError):  # it ends at its time to live
                    await self.order("rm", "--force", container)


class ContainerSandbox(Sandbox):
    """One container."""

    def __init__(self, backend: ContainerBackend, container: str, limits: SandboxLimits) -> None:
        self.limits = limits
        self.folder = _FOLDER
        self.isolation = Isolation(user=True, network=not limits.network, processes=True, files=True, system_calls=True)
        self.container = container
        self._backend = backend
        self._running = asyncio.Lock()
        self._destroying: asyncio.Task[None] | None = None

    async def exec(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        deadline_s: float | None = None,
        output_bytes: int | None = None,
    ) -> ProgramEnd:
        if self._destroying is not None:
            raise SandboxError("a sandbox is gone")
        if (end := unstartable(command, env)) is not None:
            return end
        variables = [part for item in {"HOME": _FOLDER, **(env or {})}.items() for part in ("--env", "=".join(item))]
        arguments = [self._backend.command, "exec", "--interactive", *variables, self.container, *command]
        async with self._running:
            try:
                end = await _run(
                    arguments,
                    stdin,
                    deadline_s=self.limits.deadline_s if deadline_s is None else deadline_s,
                    output_bytes=self.limits.output_bytes if output_bytes is None else output_bytes,
                )
                await self._kill()
            except BaseException:
                await self.destroy()
                raise
        if end.how == "exited" and _KILLED < end.code <= _KILLED + _SIGNALS:  # a shell's way of saying it
            return ProgramEnd(how="killed", code=end.code - _KILLED, output=end.output, error=end.error)
        return end

    async def reset(self) -> bool:
        """Return False: nothing here can prove it."""
        return False

    async def destroy(self) -> None:
        if self._destroying is None:
            self._destroying = asyncio.ensure_future(self._destroy())
        await shield_until_done(self._destroying)

    async def _kill(self) -> None:
        """End what a command has left; destroy a container whose processes leave no room for that, or prevent it."""
        try:
            # Everything but the first process, which this one then follows: what it says of itself is not needed.
            await self._backend.order("exec", self.container, "/bin/sh", "-c", "kill -9 -1 2>/dev/null; true")
        except SandboxError:
            if await self._backend.order("inspect", "--format", "{{.State.Running}}", self.container) != "true":
                raise
            await self.destroy()

    async def _destroy(self) -> None:
        with contextlib.suppress(SandboxError):  # it is gone, or it ends at its time to live
            await self._backend.order("rm", "--force", self.container)
        self._backend.forget(self)


async def _run(command: Sequence[str], stdin: bytes, *, deadline_s: float, output_bytes: int) -> ProgramEnd:
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    except OSError as error:
        raise as_failure(f"{command[0]} could not be started", error) from error
    outputs, how = (bytearray(), bytearray()), "exited"

    async def read(stream: asyncio.StreamReader | None, output: bytearray) -> None:
        assert stream is not None
        while part := await stream.read(65_536):
            room = output_bytes - len(output)
            output += part[:room]
            if len(part) > room:
                raise OverflowError

    async def write(writer: asyncio.StreamWriter | None) -> None:
        assert writer is not None
        try:
            writer.write(stdin)
            await writer.drain()
            writer.close()
        except ConnectionError:
            pass  # the program may not read its input

    try:
        async with asyncio.timeout(deadline_s):
            await run_all([read(process.stdout, outputs[0]), read(process.stderr, outputs[1]), write(process.stdin)])
            await process.wait()
    except TimeoutError:
        how = "deadline"
    except OverflowError:
        how = "output"
    finally:
        if process.returncode is None:
            process.kill()
            process._transport.close()  # type: ignore[attr-defined]  # noqa: SLF001  asyncio has no public way
            await shield_until_done(process.wait())
    code = process.returncode or 0
    ended: How = (
        "deadline" if how == "deadline" else "output" if how == "output" else "exited" if code >= 0 else "killed"
    )
    return ProgramEnd(
        how=ended,
        code=abs(code) if ended in ("exited", "killed") else 0,
        output=bytes(outputs[0]),
        error=bytes(outputs[1]),
    )


def _owner(process: int) -> str:
    """Return ``MACHINE-PROCESS-START`` of a process, which no other has; of one that has ended, without its start."""
    machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip().replace("-", "")
    try:
        started = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except OSError:
        started = ""
    return f"{machine}-{process}-{started}"
