"""Rows of a data set that are worked on in a sandbox: the model runs commands, and a rule or a check gives the reward.

Each episode leases a sandbox with the row's files. The first message without a call ends it: then the row's check runs
in the sandbox, or the row's rule judges the message. A sandbox that fails costs the attempt, and is never a reward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, cast

from asyncrl.datasets import PromptRow
from asyncrl.envs.dataset import DatasetEnvironment, DatasetFactory
from asyncrl.envs.tools import PythonTool, Toolbox
from asyncrl.errors import ConfigError, EnvironmentFailure, SandboxError
from asyncrl.interfaces import Message, Step, Task
from asyncrl.plugins import check_part, make_part
from asyncrl.rewards.rules import Rulebook
from asyncrl.rollout.trajectory import REWARD_PARTS
from asyncrl.sandboxes.contract import CheckEnds, ProgramEnd, Sandbox, SandboxLimits, unstartable
from asyncrl.sandboxes.pool import SandboxPool

_GROUP = "asyncrl.sandboxes"
_LONGEST_ANSWER = 20_000
"""Characters of a command's output that the model is shown."""
_CHECK_ENV = {"PYTHONNOUSERSITE": "1", "GIT_CONFIG_GLOBAL": "/dev/null"}
"""Switches off what Python and git read from the home of a check, which is the policy's, too."""


class SandboxTools:
    """The tools of a sandbox, by name."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    async def bash(self, command: str) -> str:
        """Run a shell command. Files stay for the next call; processes end with this one.

        Args:
            command: the command line
        """
        return answer_text(await self._sandbox.exec(["/bin/sh", "-c", command]))

    async def python(self, program: str) -> str:
        """Run a Python program and return what it prints. Files stay for the next call; variables do not.

        Args:
            program: the program's text
        """
        return answer_text(await self._sandbox.exec(["python3", "-"], stdin=program.encode("utf-8", "replace")))

    async def write_file(self, path: str, content: str) -> str:
        """Write a file.

        Args:
            path: relative to the working folder
            content: its whole text
        """
        try:
            await self._sandbox.write(path, content.encode("utf-8", "replace"))
        except OSError as error:
            raise ValueError(str(error)) from error
        return "written"


_TOOLS = ("bash", "python", "write_file")


def _python_tools(sandbox: Sandbox, names: Sequence[str]) -> list[PythonTool]:
    tools = SandboxTools(sandbox)
    return [PythonTool(getattr(tools, name)) for name in names]


def answer_text(end: ProgramEnd) -> str:
    """Return what a command wrote, and how it ended unless that was well."""
    text = "\n".join(part.rstrip("\n") for part in (end.stdout, end.stderr) if part)
    if len(text) > _LONGEST_ANSWER:
        half = _LONGEST_ANSWER // 2
        text = f"{text[:half]}\n... ({len(text)} characters)\n{text[-half:]}"
    if end.succeeded:
        return text
    how = f"exit code {end.code}" if end.how == "exited" else f"it was ended: {end.how}"
    return f"{text}\n({how})".lstrip("\n")


class SandboxEnvironment(DatasetEnvironment):
    """One episode in one sandbox."""

    deterministic = False  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]  of all tasks
    replayable = True

    def __init__(
        self,
        rules: Rulebook,
        pool: Callable[[], SandboxPool],
        *,
        tools: Sequence[str],
        check: str,
        ends: CheckEnds,
        wait_s: float,
    ) -> None:
        super().__init__(rules)
        self._pool = pool
        self._shown = tools
        self._check = check
        self._ends = ends
        self.wait_s = wait_s
        self._lease = AsyncExitStack()
        self._sandbox: Sandbox | None = None

    async def reset(self, task: Task) -> Sequence[Message]:
        if (end := unstartable(self._check_of(task), None)) is not None:
            raise EnvironmentFailure(f"the row's check cannot be started: {end.stderr.strip()}")
        self._sandbox = await self._lease.enter_async_context(self._pool().lease(timeout_s=self.wait_s))
        shown = _python_tools(self._sandbox, self._shown)
        self._toolbox = Toolbox(shown, deadline_s=self._sandbox.limits.deadline_s + 30)
        try:
            await self._write(task["extra_info"].get("files"))
        except OSError as error:
            raise SandboxError(f"the row's files cannot be written: {error}") from error
        return await super().reset(task)

    async def close(self) -> None:
        self._sandbox = None
        await self._lease.aclose()
        await super().close()

    async def _judge(self, task: Task, reply: Message) -> Step:
        check = self._check_of(task)
        if not check:
            return await super()._judge(task, reply)
        assert self._sandbox is not None
        try:
            await self._write(task["extra_info"].get("tests"))
        except OSError as error:  # the policy has left no room for them
            end = ProgramEnd(how="memory", code=0, error=str(error).encode())
        else:
            end = await self._sandbox.exec(check, env=_CHECK_ENV)
        right = float(end.succeeded)
        return Step(reward=right, done=True, info={REWARD_PARTS: {"checked": right, **self._ends.parts(end)}})

    def _check_of(self, task: Task) -> list[str]:
        """Return the command that checks a task's work; an empty one if its rule judges the last message."""
        check = task["extra_info"].get("check") or self._check
        return ["/bin/sh", "-c", check] if check else []

    async def _write(self, files: Mapping[str, str] | None) -> None:
        assert self._sandbox is not None
        for path, text in (files or {}).items():
            if text is not None:  # a column of tables has every table's keys
                await self._sandbox.write(path, text.encode("utf-8", "backslashreplace"))


class SandboxFactory(DatasetFactory):
    """Tasks from the rows of files, each worked on in a sandbox of its own.

    ``extra_info`` of a row may have ``files`` (texts by path, there from the beginning), ``check`` (a shell command:
    the reward is 1 if its exit code is 0, else 0) and ``tests`` (further files, written just before the check).

    Args:
        tools: some of ``bash``, ``python`` and ``write_file``.
        check: the command of rows without one; without any, the row's reward rule judges the last message.
        backend: of :mod:`asyncrl.sandboxes.contract`, with its ``backend_options``.
        limits: of a sandbox, the fields of :class:`~asyncrl.sandboxes.contract.SandboxLimits`.
        most, warm: sandboxes at a time in one rollout worker, and how many are kept for later episodes.
        lease_s: longest time of an episode.
        wait_s: longest wait for a free sandbox, beside ``env.deadline_s``.
        options: those of :class:`~asyncrl.envs.dataset.DatasetFactory`, without ``tool_deadline_s``.
    """

    def __init__(
        self,
        *,
        tools: Sequence[str] = ("bash",),
        check: str = "",
        backend: str = "namespaces",
        backend_options: Mapping[str, Any] | None = None,
        limits: Mapping[str, Any] | None = None,
        most: int = 64,
        warm: int = 8,
        lease_s: float = 3600.0,
        wait_s: float = 600.0,
        seed: int = 0,
        **options: Any,
    ) -> None:
        if unknown := sorted(set(tools) - set(_TOOLS)):
            raise ConfigError(f"there is no tool {unknown[0]!r}", path="env.options.tools", remedy=f"of {_TOOLS}")
        if "tool_deadline_s" in options:
            what = "a command in a sandbox has the deadline of its limits"
            raise ConfigError(what, path="env.options.tool_deadline_s", remedy="give limits.deadline_s")
        super().__init__(seed=seed, **options)
        try:
            self._limits = SandboxLimits(**{"deadline_s": 30.0, **(limits or {})})
        except TypeError as error:
            raise ConfigError(str(error), path="env.options.limits", remedy="fields of SandboxLimits") from error
        self._backend: dict[str, Any] = {"options": backend_options or {}, "path": "env.options.backend"}
        self._backend_name = backend
        made = check_part(_GROUP, backend, table="env.options.backend_options", **self._backend)
        if self._limits.network and not getattr(made, "has_network", True):
            remedy = "the backend container, or network = false"
            raise ConfigError(f"{backend} has no network", path="env.options.limits.network", remedy=remedy)
        self._most, self._warm, self._lease_s, self._wait_s = most, min(warm, most), lease_s, wait_s
        self._shown, self._check, self._ends = tuple(tools), check, CheckEnds("check")
        self._declared = [each.tool for each in _python_tools(cast(Sandbox, None), self._shown)]
        self._pool: SandboxPool | None = None

    @property
    def longest_command_s(self) -> float:
        """Longest time of one command of a turn; ``env.deadline_s``, which the whole turn has, must be longer."""
        return self._limits.deadline_s

    def make(self) -> SandboxEnvironment:
        return SandboxEnvironment(
            self._rules, self._leases, tools=self._shown, check=self._check, ends=self._ends, wait_s=self._wait_s
        )

    async def aclose(self) -> None:
        """Destroy the sandboxes, and close the reward rules."""
        if self._pool is not None:
            await self._pool.close()
        await super().aclose()

    def _needs_rule(self, row: PromptRow) -> bool:
        return not (row.extra_info.get("check") or self._check)

    def _leases(self) -> SandboxPool:
        if self._pool is None:  # which needs a running loop
            backend = make_part(_GROUP, self._backend_name, table="env.options.backend_options", **self._backend)
            self._pool = SandboxPool(backend, self._limits, most=self._most, warm=self._warm, lease_s=self._lease_s)
        return self._pool
