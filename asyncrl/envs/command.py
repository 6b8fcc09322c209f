"""An agent that is a program: started for each episode, none of its lines changed, trained on what the model said.

The program gets the address of a session of its own (:mod:`asyncrl.serve.agents`), where the engine answers beside
which the episode runs. Whatever it does costs its own episode alone: it has limits of time, output and turns, and ends
with everything that it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import math
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import tarfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from inspect import getattr_static
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeVar

from asyncrl.errors import ConfigError, EnvironmentDeadlineError, EnvironmentFailure, SandboxError
from asyncrl.foreign import place_of
from asyncrl.interfaces import ClosableFactory, Environment, EnvironmentFactory, EnvironmentWait, Message, Task
from asyncrl.io import LockedTemporaryDirectory
from asyncrl.plugins import make_part, offered_options
from asyncrl.rewards import scoring_program
from asyncrl.rollout.episode import EpisodePolicy
from asyncrl.rollout.trajectory import REWARD_PARTS, Trajectory
from asyncrl.runtime import shield_until_done
from asyncrl.sandboxes.contract import CheckEnds, How, ProgramEnd, SandboxLimits, unstartable
from asyncrl.sandboxes.namespaces import NamespacesBackend, NamespacesSandbox, visible_paths
from asyncrl.sandboxes.pool import SandboxPool
from asyncrl.serve.agents import MODEL_NAME, AgentSession
from asyncrl.single_controller.children import children

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_KEY = "env.options"
_INHERITED = ("LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TZ", "USER")
_PLACEHOLDER = re.compile(r"\$?\{([A-Za-z_]\w*)\}")
_OWN_NAMES = ("task", "system", "folder", "base_url", "session_url", "api_key", "model")
_END_S = 10.0
_GRACE_S = 5.0
"""Time for an agent to end once it has no more turns."""
_SHELLS = ("sh", "bash", "dash", "ksh", "zsh", "env", "timeout", "xargs")
"""Programs that end with status 126 or 127 for a command that they cannot start."""
_LAST_WORDS = 500
_PER_CORE = 4
"""Episodes at a time: most of them wait for the model."""
_SANDBOX: Mapping[str, Any] = {"memory_bytes": 4 << 30, "file_bytes": 256 << 20, "files": 1024, "children": 256}
"""Limits of a sandbox for an agent, where they are not given; time and output are the agent's."""


# ----------------------------------------------------------------------------------------------------- one program


class _Outputs(asyncio.SubprocessProtocol):
    """What a program writes, up to a limit; ``over`` is set when it has ended, or has written more."""

    def __init__(self, limit: int, over: asyncio.Event) -> None:
        self._limit = limit
        self._over = over
        self.texts = {1: bytearray(), 2: bytearray()}
        self.flooded = False
        self.exited = asyncio.Event()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.texts[fd] += data[: self._limit + 1 - len(self.texts[fd])]
        if len(self.texts[fd]) > self._limit:
            self.flooded = True
            self._over.set()

    def process_exited(self) -> None:
        self.exited.set()
        asyncio.get_running_loop().call_later(1.0, self._over.set)  # a process that left may hold the pipes

    def connection_lost(self, exc: Exception | None) -> None:
        self._over.set()


async def run_program(
    command: Sequence[str],
    *,
    folder: Path,
    env: Mapping[str, str],
    deadline_s: float,
    output_bytes: int,
    over: asyncio.Event,
) -> ProgramEnd:
    """Run a program in ``folder`` until it ends, or until ``over`` is set; then kill all that it has started.

    ``output_bytes`` bounds each of its two outputs. Whatever becomes of the caller, or of this process, a keeper
    (:mod:`asyncrl.rewards.scoring_program`) ends the program, its daemons included.

    Raises:
        OSError: no process can be started.
    """
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    with ours:
        with theirs, children.starting(f"agent {command[0]}"):
            keeper = [sys.executable, "-I", "-S", scoring_program.__file__, str(theirs.fileno())]
            transport, outputs = await loop.subprocess_exec(
                lambda: _Outputs(output_bytes, over),
                *(*keeper, *command),
                cwd=folder,
                env=dict(env),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        pid, late = transport.get_pid(), False
        children.add(pid, f"agent {command[0]}", kill=_order_end)
        try:
            async with asyncio.timeout(deadline_s):
                await over.wait()
        except TimeoutError:
            late = True
        finally:
            children.remove(pid)
            stopped = not outputs.exited.is_set()
            ours.close()  # the keeper kills what still runs
            await shield_until_done(_ended(pid, outputs))
            code = transport.get_returncode() or 0
            transport.close()
    how: How = "killed" if code < 0 else "exited"
    if outputs.flooded or late or stopped:
        how = "output" if outputs.flooded else "deadline" if late else "stopped"
    output, error = (bytes(text) for text in outputs.texts.values())
    return ProgramEnd(how=how, code=abs(code), output=output, error=error)


async def _ended(pid: int, outputs: _Outputs) -> None:
    try:
        async with asyncio.timeout(_END_S):
            await outputs.exited.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        await outputs.exited.wait()


def _order_end(pid: int) -> None:
    """Have the keeper end with all that the program started; one that is stopped goes on to do so."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGCONT)


# --------------------------------------------------------------------------------------------- where a program runs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    deadline_s: float
    output_bytes: int


class _NoPlaceError(EnvironmentFailure):
    """A program has left no place for the next one: its folder is gone, or its sandbox is full or blocked."""


class _Machine:
    """A folder of this machine, in which programs run as this user."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self._env = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        self._env |= {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp")}

    async def prepare(self, factory: CommandFactory) -> None:
        await self._in_thread(self._make_folders, factory.copy)

    async def prepare_judging(self, factory: CommandFactory, name: str) -> None:
        """Make a folder ``name`` with an empty ``home``; files of this machine are where they are."""
        del factory
        with self._left_by_agent():
            await self._in_thread((Path(self.folder) / name / "home").mkdir, parents=True)

    async def write(self, name: str, text: str) -> None:
        with self._left_by_agent():
            await self._in_thread((Path(self.folder) / name).write_text, text, encoding="utf-8")

    async def run(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        limits: _Limits,
        *,
        over: asyncio.Event,
        session: AgentSession | None = None,
    ) -> ProgramEnd:
        del session  # which is on this machine
        folder, limit = Path(self.folder) / "work", asdict(limits)
        with self._left_by_agent():
            return await run_program(command, folder=folder, env={**self._env, **env}, over=over, **limit)

    @staticmethod
    @contextlib.contextmanager
    def _left_by_agent() -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, FileExistsError, NotADirectoryError, PermissionError) as error:
            raise _NoPlaceError(f"the agent has removed or closed its folder: {error}") from error

    @staticmethod
    async def _in_thread(call: Callable[..., object], *given: Any, **more: Any) -> None:
        """Write in the folder; a thread that goes on after a cancellation would write in it once it is removed."""
        await shield_until_done(asyncio.to_thread(call, *given, **more))

    def _make_folders(self, copied: Path | None) -> None:
        folder = Path(self.folder)
        for name in ("home", "tmp"):
            (folder / name).mkdir()
        if copied is None:
            (folder / "work").mkdir()
        else:
            shutil.copytree(copied, folder / "work", symlinks=True)


_IN_FOLDER = 'cd "$0" && exec "$@"'
_WITH_SERVER = """
import os, socket, sys
listening = socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=4096)
with socket.socket(fileno=3) as host:
    socket.send_fds(host, [b"."], [listening.fileno()])
os.chdir(sys.argv[2])
os.execvp(sys.argv[3], sys.argv[3:])
"""
"""Starts a program beside a socket that listens in the sandbox's own network, and that this process accepts from."""


class _Sandboxed:
    """A sandbox, whose programs reach nothing but their session."""

    def __init__(self, sandbox: NamespacesSandbox) -> None:
        self.folder = sandbox.folder
        self._sandbox = sandbox

    async def prepare(self, factory: CommandFactory) -> None:
        files = {"work": factory.copy, **_under("program", factory.files)}
        try:
            await self._sandbox.restore(await asyncio.to_thread(_archive, files))
        except OSError as error:
            raise SandboxError(f"the agent's files cannot be written: {error}") from error

    async def prepare_judging(self, factory: CommandFactory, name: str) -> None:
        """Make a folder ``name`` with an empty ``home`` and what the agent must not have touched."""
        files = _under(name, {"home": None, **factory.judging_files})
        made = await asyncio.to_thread(_archive, files)
        try:
            await self._sandbox.restore(made)
        except OSError as error:
            raise _NoPlaceError(f"the agent leaves no room for {factory.judged_by}: {error}") from error

    async def write(self, name: str, text: str) -> None:
        try:
            await self._sandbox.write(name, text.encode())
        except OSError as error:
            raise _NoPlaceError(f"{name} cannot be written in the agent's sandbox: {error}") from error

    async def run(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        limits: _Limits,
        *,
        over: asyncio.Event,
        session: AgentSession | None = None,
    ) -> ProgramEnd:
        work, given = f"{self.folder}/work", {**asdict(limits), "env": env, "over": over}
        served = session if self._sandbox.isolation.network else None
        launch = ["/bin/sh", "-c", _IN_FOLDER, work, *command]
        if served is not None:
            launch = [sys.executable, "-I", "-S", "-c", _WITH_SERVER, str(served.port), work, *command]
        if (end := unstartable(launch, env)) is not None:
            raise EnvironmentFailure(f"{command[0]} cannot be started: {end.stderr.strip()}")
        if served is None:
            return await self._sandbox.exec(launch, **given)
        ours, theirs = socket.socketpair()
        serving = asyncio.create_task(_serve_on_what_comes(ours, served))
        try:
            return await self._sandbox.exec(launch, connection=theirs, **given)
        finally:
            theirs.close()
            serving.cancel()
            await asyncio.wait([serving])


async def _serve_on_what_comes(ours: socket.socket, session: AgentSession) -> None:
    """Serve the session on the socket that a program's start has sent; return when there is none to come."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    with ours:
        ours.setblocking(False)
        loop.add_reader(ours, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(ours)
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    if descriptors:
        await session.listen_on(socket.socket(fileno=descriptors[0]))


def _under(folder: str, files: Mapping[str, Path | None]) -> dict[str, Path | None]:
    return {f"{folder}/{name}": path for name, path in files.items()}


def _archive(files: Mapping[str, Path | None]) -> bytes:
    """Return files and folders by their names in a tar archive; None is an empty folder."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, path in files.items():
            if path is not None:
                archive.add(path, name)
                continue
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(folder)
    return made.getvalue()


# ------------------------------------------------------------------------------------------------------ the episode


class CommandEnvironment:
    """One episode of a program.

    Args:
        factory: with the options.
        judge: poses the task, and gives the reward of the last message, where that is asked for.
    """

    def __init__(self, factory: CommandFactory, judge: Environment) -> None:
        self._factory = factory
        self._judge = judge

    async def run_agent(self, task: Task, policy: EpisodePolicy) -> Trajectory:
        async with self._factory.turn():
            messages = await self._asked("reset", self._judge.reset(task))
            async with self._factory.place() as place:
                return await self._run(task, messages, policy, place)

    async def close(self) -> None:
        await self._judge.close()

    async def _asked(self, what: str, call: Awaitable[_T]) -> _T:
        wait_s = self._judge.wait_s if what == "reset" and isinstance(self._judge, EnvironmentWait) else 0.0
        deadline = asyncio.timeout(self._factory.limits.deadline_s + wait_s)
        try:
            async with deadline:
                return await call
        except TimeoutError as error:
            if not deadline.expired():
                raise
            late = f"the {what} of tasks took longer than deadline_s = {self._factory.limits.deadline_s:g}"
            raise EnvironmentDeadlineError(late + place_of(error)) from error

    async def _run(
        self, task: Task, messages: Sequence[Message], policy: EpisodePolicy, place: _Machine | _Sandboxed
    ) -> Trajectory:
        factory, over = self._factory, asyncio.Event()
        loop = asyncio.get_running_loop()
        graces: list[asyncio.TimerHandle] = []

        def on_end() -> None:
            if session.failure is not None:
                over.set()
            elif not graces:
                graces.append(loop.call_later(_GRACE_S, over.set))

        async with AgentSession(policy, enforces_forms=factory.enforce_forms, on_end=on_end) as session:
            names = {**_columns(task), **_texts(messages), **_placeholders(session, place.folder)}
            env = factory.environment(names, place.folder)
            await place.prepare(factory)
            await place.write("task.json", json.dumps({"messages": list(messages)}))
            command = [filled(part, names) for part in factory.command]
            try:
                end = await place.run(command, _addresses(session) | env, factory.limits, over=over, session=session)
            finally:
                for grace in graces:
                    grace.cancel()
        if session.failure is not None:
            raise session.failure
        _check_end(end, session, factory)
        earned = await self._earned(session, end, names, env, place)
        info = {"exit_status": end.code, "branches": session.branches, "conversations": session.conversations}
        return session.trajectory(
            task, reward=earned.reward, info={**earned.info, **info}, turn_rewards=earned.turn_rewards
        )

    async def _earned(
        self,
        session: AgentSession,
        end: ProgramEnd,
        names: Mapping[str, str],
        env: Mapping[str, str],
        place: _Machine | _Sandboxed,
    ) -> _Earned:
        factory, turns = self._factory, session.said()
        if factory.judged_by == "exit_status":
            return _Earned(float(end.succeeded))
        if factory.judged_by == "rule":
            said = turns[-1]["message"].get("content") or ""
            step = await self._asked("step", self._judge.step({"role": "assistant", "content": said}))
            if not step.done:
                raise EnvironmentFailure(
                    "the environment of tasks goes on after the agent's last message, which it must judge at once: "
                    "take the reward from exit_status, test_command or score_command"
                )
            return _Earned(float(step.reward), info=dict(step.info))
        name = f"judge-{secrets.token_hex(8)}"  # in which the agent can have prepared nothing
        own = f"{place.folder}/{name}"
        names = {**names, "judging_files": own}
        command = [filled(part, names, option=factory.judged_by) for part in factory.judging_command]
        home = {**dict.fromkeys(("HOME", "TMPDIR"), f"{own}/home"), "PYTHONNOUSERSITE": "1"}
        env = {**home, **env, "ASYNCRL_TURNS_FILE": f"{own}/turns.json"}
        try:
            await place.prepare_judging(factory, name)
            await place.write(f"{name}/turns.json", json.dumps(turns))
            judging = await place.run(command, env, factory.limits, over=asyncio.Event())
        except _NoPlaceError as error:
            if factory.judged_by == "score_command":
                raise
            judging = ProgramEnd(how="memory", code=0, error=str(error).encode())
        failed = not judging.succeeded
        if factory.judged_by == "test_command":  # which the agent's work may crash
            unstarted = factory.judge_starts and judging.not_started
            failed = unstarted or judging.how in ("deadline", "stopped") or judging.killed_from_outside
        if failed:
            raise _failure(f"{factory.judged_by}", judging, factory)
        if factory.judged_by == "test_command":
            return _Earned(float(judging.succeeded), info={REWARD_PARTS: factory.tests.parts(judging)})
        return _score((judging.stdout.strip().splitlines() or [""])[-1], turns=len(turns))


@dataclass(frozen=True, slots=True)
class _Earned:
    reward: float
    turn_rewards: Sequence[float] = ()
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])


def _score(line: str, *, turns: int) -> _Earned:
    """Return what a score_command has printed: a number, or JSON with ``reward`` and perhaps ``turn_rewards``."""
    try:
        given = json.loads(line)
        table = given if isinstance(given, dict) else {"reward": given}
        earned = _Earned(float(table["reward"]), [float(each) for each in table.get("turn_rewards", ())])
        if all(map(math.isfinite, (earned.reward, *earned.turn_rewards))) and len(earned.turn_rewards) in (0, turns):
            return earned
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise EnvironmentFailure(
        f'the last line of score_command must be a number, or {{"reward": ..., "turn_rewards": [...]}} with one for '
        f"each of {turns} turns; it is {line[:80]!r}"
    )


def _check_end(end: ProgramEnd, session: AgentSession, factory: CommandFactory) -> None:
    """Raise unless the program has ended by itself or for want of turns, and has had one."""
    if end.how not in ("exited", "stopped"):
        raise _failure("the agent", end, factory)
    if not session.turns:
        why = " as its first request needs more than env.max_turns," if session.refused else ""
        raise _failure(f"the agent has had no turn of the model,{why} and", end, factory)


def _failure(who: str, end: ProgramEnd, factory: CommandFactory) -> EnvironmentFailure:
    text = {
        "deadline": f"did not end within deadline_s = {factory.limits.deadline_s:g}",
        "output": f"wrote more than output_bytes = {factory.limits.output_bytes}",
        "memory": "held more than memory_bytes",
        "killed": f"was killed by signal {end.code}",
        "stopped": "was stopped",
        "exited": f"ended with status {end.code}" + (" (it could not be started)" if end.not_started else ""),
    }[end.how]
    name, last = ("stderr", end.stderr) if end.stderr.strip() else ("stdout", end.stdout)
    kind = EnvironmentDeadlineError if end.how == "deadline" else EnvironmentFailure
    return kind(f"{who} {text}" + (f"; its {name} ends with {last.strip()[-_LAST_WORDS:]!r}" if last.strip() else ""))


def _columns(task: Task) -> dict[str, str]:
    """Return what a row has, as texts by name, for placeholders; a name of the run's own comes before these."""
    extra: Mapping[str, Any] = task.get("extra_info") or {}
    return {name: str(value) for name, value in {**task, **extra}.items() if isinstance(value, str | int | float)}


def _texts(messages: Sequence[Message]) -> dict[str, str]:
    def said(role: str) -> str:
        return "\n\n".join(str(each.get("content") or "") for each in messages if each["role"] == role)

    return {"task": said("user"), "system": said("system")}


def _placeholders(session: AgentSession, folder: str) -> dict[str, str]:
    return {
        "folder": f"{folder}/work",
        "files": f"{folder}/program",
        "base_url": f"{session.url}/v1",
        "session_url": session.url,
        "api_key": session.key,
        "model": MODEL_NAME,
    }


def _addresses(session: AgentSession) -> dict[str, str]:
    """Return the environment variables in which clients look for an address and a key."""
    return {
        **dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), f"{session.url}/v1"),
        "ANTHROPIC_BASE_URL": session.url,
        **dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), session.key),
    }


def filled(text: str, names: Mapping[str, str], *, option: str = "command") -> str:
    """Fill in ``{name}`` in the value of an option; other braces stay, a shell's ``${name}`` too.

    >>> filled('{task}: {"a": 1} ${HOME}', {"task": "add"})
    'add: {"a": 1} ${HOME}'

    Raises:
        ConfigError: there is no such name.
    """

    def of(found: re.Match[str]) -> str:
        if found[0].startswith("$"):
            return found[0]
        if found[1] not in names:
            remedy = f"one of {', '.join(sorted(names))}"
            raise ConfigError(f"{text!r} has no value for {found[0]}: {remedy}", path=f"{_KEY}.{option}", remedy=remedy)
        return names[found[1]]

    return _PLACEHOLDER.sub(of, text)


# ----------------------------------------------------------------------------------------------------- the factory


def _is_program(part: str, copy: str | None, env: Mapping[str, str] | None) -> bool:
    """Check whether a command can begin so: with a program of this machine, of the copied folder, or of a row."""
    copied = str(Path(copy, part)) if copy is not None and "/" in part else part
    path = (env or {}).get("PATH")
    of_row = any(not found[0].startswith("$") for found in _PLACEHOLDER.finditer(part))
    return bool(of_row or shutil.which(part, path=path) or shutil.which(copied))


def _absolute(command: Sequence[str], copy: str | None = None) -> list[str]:
    """Give files by their full paths, but not those that the program finds in its copied folder."""

    def full(part: str) -> str:
        copied = copy is not None and _is_file(str(Path(copy, part)))
        return str(Path(part).absolute()) if _is_file(part) and not copied else part

    return [full(part) for part in command]


def _is_file(text: str) -> bool:
    return os.path.isfile(text)  # noqa: PTH113  of a text that is too long for a path, pathlib raises


def _is_script(program: str) -> bool:
    """Check for a file of this machine that an interpreter runs; programs that are found by ``PATH`` are none."""
    if not (program.startswith("/") and _is_file(program)):
        return False
    try:
        with Path(program).open("rb") as file:
            return b"\0" not in file.read(256)  # by which shells tell scripts, with #! or without
    except OSError:  # which may be run and not read
        return False


_CAPABILITIES = {
    name: property(attrgetter(f"_tasks.{name}")) for name in ("held_out_rows", "filter_overlong_prompts", "difficulty")
}
"""Optional capabilities of a factory that are those of the environment which poses the tasks."""


class CommandFactory:
    """Tasks of another environment, each given to a program.

    Args:
        command: the program and its arguments, with ``{task}`` (the text of the task), ``{system}``, ``{folder}``,
            ``{base_url}`` (of OpenAI's clients), ``{session_url}`` (of Anthropic's), ``{api_key}``, ``{model}``, and
            columns of the row by name. An argument that is a file in the folder of the run is given by its full path.
        tasks: environment that poses the tasks, and whose reward for the last message counts; ``options`` are its.
        reward: where the reward comes from instead: ``exit_status`` (1 if the program ends with status 0, else 0).
            Anything else is an option of ``tasks``.
        test_command: run in the program's folder afterwards; the reward is 1 if it ends with status 0, else 0. Status
            126 or 127 is a failure, as of a command that cannot be started, but not of a shell, a script, or a program
            in that folder; so is the deadline, and a signal that may come from outside (SIGKILL, SIGTERM). No other
            end is one.
        score_command: likewise; the reward is the number on the last line of its output.
        env: further environment variables, with the same placeholders. Of this process's own the program gets
            ``PATH``, ``LANG`` and the like alone.
        enforce_forms: whether a required call, a JSON schema or a grammar is enforced; such turns are not trained on.
        copy: folder whose copy the program starts in; an empty one without it.
        deadline_s: for the program, from its start to its end; likewise for what judges it, and for ``tasks`` to pose
            the task and to judge the last message.
        output_bytes: of each of its two outputs.
        concurrency: episodes at a time in one rollout worker, by default four for each core of the machine; further
            ones wait: no deadline of this environment has begun, but ``rollout.deadline_s`` has.
        sandbox: limits of a sandbox of this machine in which it runs, and what judges it
            (:class:`~asyncrl.sandboxes.contract.SandboxLimits`), perhaps with ``require_isolation``. The program then
            reaches its session, and nothing else. An empty table takes the defaults; None runs it as this user.

    Raises:
        ConfigError: an option cannot be used, or those of ``tasks`` cannot.
    """

    def __init__(
        self,
        *,
        command: Sequence[str],
        tasks: str = "dataset",
        reward: Any = None,
        test_command: Sequence[str] = (),
        score_command: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        enforce_forms: bool = False,
        copy: str | None = None,
        deadline_s: float = 600.0,
        output_bytes: int = 16 << 20,
        concurrency: int | None = None,
        sandbox: Mapping[str, Any] | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        for name, given in (("command", command), ("test_command", test_command), ("score_command", score_command)):
            if isinstance(given, str) or not all(isinstance(part, str) for part in given):
                remedy = '["my-agent", "--task", "{task}"]'
                raise ConfigError(f"{name} is {given!r}", path=f"{_KEY}.{name}", remedy=remedy)
            later = name != "command" and "/" in (given[0] if given else "")  # it may be what the agent makes
            if (given or name == "command") and not later and not _is_program(given[0] if given else "", copy, env):
                missing = f"there is no program {given[0] if given else ''!r}"
                raise ConfigError(missing, path=f"{_KEY}.{name}", remedy="install it, or check the path")
        texts = {"command": command, "test_command": test_command, "score_command": score_command}
        for name, written in {**texts, "env": [*(env or {}).values()]}.items():
            for known in (each for text in written for each in _OWN_NAMES if f"${{{each}}}" in text):
                remedy = f"write {{{known}}}"
                raise ConfigError(f"{name}: ${{{known}}} is a shell's", path=f"{_KEY}.{name}", remedy=remedy)
        for name, limit in (("deadline_s", deadline_s), ("output_bytes", output_bytes)):
            if not (limit > 0 and math.isfinite(limit)):
                raise ConfigError(f"{name} is {limit}", path=f"{_KEY}.{name}", remedy="a positive number")
        if concurrency is None:
            concurrency = _PER_CORE * (os.cpu_count() or 1)
        if not isinstance(concurrency, int) or concurrency < 1:
            raise ConfigError(f"concurrency is {concurrency!r}", path=f"{_KEY}.concurrency", remedy="1 or more")
        if copy is not None and not Path(copy).is_dir():
            raise ConfigError(f"copy = {copy!r}: no such folder", path=f"{_KEY}.copy", remedy="check the path")
        self.command = _absolute(command)
        self.files: dict[str, Path] = {}
        self.judging_files: dict[str, Path] = {}
        self.copy = Path(copy).absolute() if copy is not None else None
        self.enforce_forms = enforce_forms
        self.limits = _Limits(deadline_s=deadline_s, output_bytes=output_bytes)
        self._running = asyncio.Semaphore(concurrency)
        self._is_late = False
        self._concurrency = concurrency
        self._env = dict(env or {})
        self._sandboxes: SandboxPool | None = None
        self._sandbox = None if sandbox is None else self._sandbox_options(sandbox)
        ways = {"exit_status": reward == "exit_status", "test_command": test_command, "score_command": score_command}
        chosen = [name for name, given in ways.items() if given]
        if len(chosen) > 1 or (chosen and reward not in (None, "exit_status")):
            remedy = "a rule, exit_status, test_command or score_command"
            raise ConfigError("the reward comes from one of several", path=f"{_KEY}.reward", remedy=remedy)
        self.judged_by: Literal["rule", "exit_status", "test_command", "score_command"] = "rule"
        self.judging_command = _absolute(test_command or score_command, copy)
        # Status 126 or 127 of a shell or a script may be that of a command in it; a program of the folder may be gone.
        program = "".join(self.judging_command[:1])
        shell = Path(program).name in _SHELLS or _is_script(program)
        self.judge_starts = not shell and (program.startswith("/") or "/" not in program)
        self.tests = CheckEnds("test")
        if self._sandbox is not None:
            most = self._sandbox[0].file_bytes
            self._carry(self.command, self.files, "files", most)
            self._carry(self.judging_command, self.judging_files, "judging_files", most)
        if chosen:
            self.judged_by = chosen[0]  # type: ignore[assignment]
            options |= {"reward": "none"} if tasks == "dataset" else {}
        elif reward is not None:
            options["reward"] = reward
        group, path = "asyncrl.environments", f"{_KEY}.tasks"
        own = offered_options(group, tasks, {"seed": seed}, path=path) | options
        self._tasks: EnvironmentFactory = make_part(group, tasks, options=own, path=path, table=_KEY)
        # isinstance() looks for members without __getattr__: a class of its own has those that the tasks have.
        has = {
            name
            for name in _CAPABILITIES
            if getattr_static(self._tasks, name, None) is not None and getattr_static(self, name, None) is None
        }
        own_class = type(type(self).__name__, (type(self),), {name: _CAPABILITIES[name] for name in has})
        self.__class__ = own_class  # pyright: ignore[reportAttributeAccessIssue]

    def task(self, index: int, *, split: Literal["train", "held_out"]) -> Task:
        return self._tasks.task(index, split=split)

    def make(self) -> CommandEnvironment:
        return CommandEnvironment(self, self._tasks.make())

    def demonstration(self, index: int) -> list[Message]:
        return self._tasks.demonstration(index)

    def environment(self, names: Mapping[str, str], folder: str) -> dict[str, str]:
        """Return the environment variables of a program, beside those of the place where it runs."""
        return {"ASYNCRL_TASK_FILE": f"{folder}/task.json"} | {
            name: filled(value, names, option="env") for name, value in self._env.items()
        }

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncGenerator[None, None]:
        """Be one of the episodes that go on at a time; the first that waits for long is warned of."""
        what = f"one of {_KEY}.concurrency = {self._concurrency} programs at a time"
        warning = asyncio.get_running_loop().call_later(self.limits.deadline_s, self._warn, what)
        try:
            await self._running.acquire()
        except asyncio.CancelledError as error:
            raise asyncio.CancelledError(f"it waited to be {what}") from error
        finally:
            warning.cancel()
        try:
            yield
        finally:
            self._running.release()

    def _warn(self, what: str) -> None:
        if not self._is_late:
            self._is_late = True
            text = "an episode has waited for %g s to be %s: rollout.deadline_s ends it if there are too few"
            _log.warning(text, self.limits.deadline_s, what)

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncGenerator[_Machine | _Sandboxed, None]:
        """Have a place for an episode's programs inside the block; nothing of them is left after it."""
        if self._sandbox is not None:
            if self._sandboxes is None:  # which needs a running loop
                limits, backend = self._sandbox
                lease_s = 2 * self.limits.deadline_s + 60.0
                most, warm = self._concurrency, min(8, self._concurrency)
                self._sandboxes = SandboxPool(backend, limits, most=most, warm=warm, lease_s=lease_s)
            async with self._sandboxes.lease(timeout_s=self.limits.deadline_s) as sandbox:
                assert isinstance(sandbox, NamespacesSandbox)
                yield _Sandboxed(sandbox)
            return
        made = await asyncio.to_thread(LockedTemporaryDirectory, "agent")
        try:
            yield _Machine(made.path)
        finally:
            await shield_until_done(asyncio.to_thread(made.close))

    async def aclose(self) -> None:
        """Destroy the sandboxes, and close ``tasks``."""
        if self._sandboxes is not None:
            await self._sandboxes.close()
        if isinstance(self._tasks, ClosableFactory):
            await self._tasks.aclose()

    def _sandbox_options(self, given: Mapping[str, Any]) -> tuple[SandboxLimits, NamespacesBackend]:
        path, own = f"{_KEY}.sandbox", dict(given)
        require = bool(own.pop("require_isolation", False))
        try:
            limits = SandboxLimits(**{**_SANDBOX, "deadline_s": self.limits.deadline_s, **own})
        except TypeError as error:
            remedy = "fields of SandboxLimits, or require_isolation"
            raise ConfigError(str(error), path=path, remedy=remedy) from error
        if limits.network:
            raise ConfigError("a sandbox has no network but its session", path=f"{path}.network", remedy="false")
        return limits, NamespacesBackend(require_isolation=require, loopback=True)

    def _carry(self, command: list[str], files: dict[str, Path], placeholder: str, file_bytes: int) -> None:
        """Note the files of a command that a sandbox does not show, and name them as they will lie in it."""
        visible = [Path(each) for each in visible_paths()]
        for number, part in enumerate(command):
            found = Path((shutil.which(part) or "") if number == 0 and "/" not in part else part)
            if found.is_absolute() and _is_file(str(found)) and not any(map(found.is_relative_to, visible)):
                name = f"{number}/{found.name}"
                files[name], command[number] = found.resolve(), f"{{{placeholder}}}/{name}"
        size = sum(each.stat().st_size for each in files.values())
        if size > file_bytes:
            names = ", ".join(map(str, files.values()))
            text = f"a sandbox holds {file_bytes} bytes of files, and {names} have {size}"
            raise ConfigError(text, path=f"{_KEY}.sandbox.file_bytes", remedy="more, or smaller files")
