"""The contract of sandboxes: untrusted programs run in one, with limits, and what they do stays in it.

A :class:`SandboxBackend` makes sandboxes, and is found by name (``asyncrl.sandboxes`` among the entry points):

    namespaces    processes of this machine in Linux namespaces        (:mod:`asyncrl.sandboxes.namespaces`)
    container     containers of docker or podman                       (:mod:`asyncrl.sandboxes.container`)
    remote        sandboxes of another machine, over HTTP              (:mod:`asyncrl.sandboxes.remote`)

A sandbox that fails raises :class:`~asyncrl.errors.SandboxError`; how a program in it ends is a result.
"""

from __future__ import annotations

import json
import logging
import math
import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Literal, Protocol, TypeAlias

from asyncrl.errors import ConfigError, SandboxError

_log = logging.getLogger(__name__)
_LARGEST_COMMAND = 96 << 10
_LAST_WORDS = 500
_LIMIT_SIGNALS = frozenset({signal.SIGKILL, signal.SIGXCPU, signal.SIGXFSZ})
"""By these a kernel ends what needs too much; a container's memory, by SIGKILL alone."""
EXTERNAL_SIGNALS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals that may come from outside; a program itself causes the others."""
_WRITE = """
case $1 in */*)
    mkdir -p -- "${1%/*}/" && cd -P . && cd -- "${1%/*}/" || exit
    [ "$(pwd -L)" = "$(pwd -P)" ] || { echo "a link leads to $(pwd -P)" >&2; exit 1; } ;;
esac
file=./${1##*/} mode=
[ -h "$file" ] || [ ! -f "$file" ] || [ ! -x "$file" ] || mode=+x
rm -f -- "$file" && cat > "$file" && { [ -z "$mode" ] || chmod "$mode" -- "$file"; }
"""
"""Writes below no link: it is in the folder that the path names, and removes what has the file's name first.

What could be run can be run again.
"""

How: TypeAlias = Literal["exited", "killed", "memory", "deadline", "output", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of a sandbox.

    Attributes:
        deadline_s: wall time of one command; then it is killed with everything it started.
        memory_bytes: of one process (its address space), and what all of them hold together.
        file_bytes: largest file, and all files together.
        output_bytes: of each of a command's two outputs; one that writes more is killed.
        files: open descriptors of a process.
        children: processes and threads at once.
        network: whether programs may reach a network.

    Raises:
        ConfigError: a number is not positive and finite.
    """

    deadline_s: float = 5.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 16 << 20
    output_bytes: int = 1 << 20
    files: int = 64
    children: int = 32
    network: bool = False

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name != "network" and not 0 < value < math.inf:
                raise ConfigError(f"{each.name} is {value}", path=each.name, remedy="a positive number")


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """What the programs of a sandbox have of their own."""

    user: bool
    network: bool
    processes: bool
    files: bool
    system_calls: bool

    @property
    def missing(self) -> list[str]:
        """The kinds that programs share with the machine."""
        return [name for name, had in asdict(self).items() if not had]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramEnd:
    """How a command ended.

    Attributes:
        how: ``exited``, ``killed`` (by a signal: a crash, a limit, itself), ``memory`` (its processes together held too
            much), ``deadline``, ``output`` (too much), or ``stopped`` (by its caller).
        code: exit code, or number of the signal; 0 for a deadline, too much output, and a caller.
        output, error: what it wrote; as text, ``stdout`` and ``stderr``.
    """

    how: How
    code: int
    output: bytes = b""
    error: bytes = b""

    @property
    def succeeded(self) -> bool:
        return self.how == "exited" and self.code == 0

    @property
    def killed_from_outside(self) -> bool:
        """Whether it died by one of :data:`EXTERNAL_SIGNALS`."""
        return self.how == "killed" and self.code in EXTERNAL_SIGNALS

    @property
    def not_started(self) -> bool:
        """Whether its status is that of a command which cannot be started, as shells give it: 126 or 127."""
        return self.how == "exited" and self.code in (126, 127)

    @property
    def stdout(self) -> str:
        return self.output.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        return self.error.decode("utf-8", "replace")


class CheckEnds:
    """Ends of checks that earn nothing and may say nothing of the work: a limit's, and of those that were not started.

    Both are parts of the reward, ``{name}_limits`` and ``{name}_not_started``. The first of each is logged.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._logged: set[str] = set()

    def parts(self, end: ProgramEnd) -> dict[str, float]:
        limited = end.how in ("deadline", "output", "memory") or (end.how == "killed" and end.code in _LIMIT_SIGNALS)
        parts = {f"{self._name}_limits": float(limited), f"{self._name}_not_started": float(end.not_started)}
        for part in {part for part, count in parts.items() if count} - self._logged:
            self._logged.add(part)
            last = (end.stderr or end.stdout).strip()[-_LAST_WORDS:]
            _log.warning("a %s earns 0: %s %d, %r (reward/%s counts them)", self._name, end.how, end.code, last, part)
        return parts


class Sandbox(ABC):
    """A folder, and commands that run in it one after the other. No process outlives the command that started it.

    Every method raises SandboxError if the sandbox itself fails, and then it is destroyed. A cancelled call destroys
    it, too.

    Attributes:
        limits: of its commands.
        isolation: what programs have of their own.
        folder: where they run, as they see it.
    """

    limits: SandboxLimits
    isolation: Isolation
    folder: str

    @abstractmethod
    async def exec(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        deadline_s: float | None = None,
        output_bytes: int | None = None,
    ) -> ProgramEnd:
        """Run a command in the folder. It has none of this process's environment variables.

        Backends return what :func:`unstartable` returns, if that is an end, before they use the sandbox.

        Args:
            command: program and arguments.
            stdin: its standard input.
            env: environment variables beside ``PATH``, ``HOME`` and ``LANG``.
            deadline_s: instead of that of the limits.
            output_bytes: likewise.
        """

    @abstractmethod
    async def reset(self) -> bool:
        """Make the sandbox what it was when it was made; return False if that cannot be proven."""

    @abstractmethod
    async def destroy(self) -> None:
        """End all processes and remove all files. Idempotent; raises nothing."""

    async def write(self, path: str, content: bytes) -> None:
        """Write a new file in place of what has its name, relative to the folder; its folders are made.

        Raises:
            OSError: it cannot be written: the disk is full, a program has put a folder in its place, or a link in that
                of one of its folders.
        """
        await self._shell(_WRITE, path, stdin=content)

    async def read(self, path: str) -> bytes:
        """Return a file of ``output_bytes`` at most.

        Raises:
            OSError: it cannot be read, is larger, or is a pipe.
        """
        return await self._shell('[ ! -p "$1" ] && cat -- "$1"', path)

    async def snapshot(self) -> bytes:
        """Return the folder as a tar archive, for :meth:`SandboxBackend.create`. It is data of untrusted programs.

        Raises:
            OSError: it cannot be read, or has more than twice ``file_bytes``.
        """
        return await self._shell("tar -cf - .", "", output_bytes=2 * self.limits.file_bytes)

    async def restore(self, snapshot: bytes) -> None:
        """Extract a snapshot in the folder.

        Raises:
            OSError: it cannot be extracted.
        """
        await self._shell("tar -xf -", "", stdin=snapshot)

    async def _shell(self, script: str, argument: str, *, stdin: bytes = b"", output_bytes: int | None = None) -> bytes:
        if argument.startswith("-"):
            argument = f"./{argument}"
        end = await self.exec(["/bin/sh", "-c", script, "sh", argument], stdin=stdin, output_bytes=output_bytes)
        if end.how == "deadline" or end.killed_from_outside:  # which no file of a program can cause
            await self.destroy()
            raise SandboxError(f"{argument or script}: a sandbox ended it ({end.how})")
        if not end.succeeded:
            raise OSError(f"{argument or script}: {end.stderr.strip()[:500] or end.how}")
        return end.output


class SandboxBackend(Protocol):
    """Makes sandboxes of one kind. A class whose sandboxes never have a network may say so: ``has_network = False``."""

    async def create(self, limits: SandboxLimits) -> Sandbox:
        """Make a sandbox with an empty folder.

        Raises:
            SandboxError: it cannot be made.
            ConfigError: the backend cannot keep the limits: it has no network, for example.
        """
        ...

    async def close(self) -> None:
        """Destroy the sandboxes that are left. Idempotent."""
        ...


def unstartable(command: Sequence[str], env: Mapping[str, str] | None) -> ProgramEnd | None:
    """Return the end of a command that no system starts, as a shell would report it; None of any other.

    Its arguments and its environment have more than 96 KiB as JSON, or there is a null byte in them.
    """
    variables = env or {}
    if any("\0" in each for each in (*command, *variables, *variables.values())):
        return ProgramEnd(how="exited", code=126, error=b"null byte in an argument\n")
    text = json.dumps([*command, variables], ensure_ascii=False)
    if len(text.encode("utf-8", "backslashreplace")) > _LARGEST_COMMAND:
        return ProgramEnd(how="exited", code=126, error=b"argument list too long\n")
    return None


def as_failure(what: str, error: BaseException) -> SandboxError:
    """Return the failure of a sandbox that an error means."""
    return SandboxError(f"{what}: {type(error).__name__}: {error}".rstrip(": "))
