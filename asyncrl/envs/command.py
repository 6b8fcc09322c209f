"""An agent that is a program: started for each episode, none of its lines changed, trained on what the model said.

The program gets the address of a session of its own (:mod:`asyncrl.serve.agents`), where the engine answers beside
which the episode runs. Whatever it does costs its own episode alone: it has limits of time, output and turns, and ends
with everything that it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from asyncrl.errors import ConfigError, EnvironmentDeadlineError, EnvironmentFailure
from asyncrl.interfaces import Environment, EnvironmentFactory, Message, Task
from asyncrl.io import LockedTemporaryDirectory
from asyncrl.plugins import make_part, offered_options
from asyncrl.rewards import scoring_program
from asyncrl.rollout.episode import EpisodePolicy
from asyncrl.rollout.trajectory import Trajectory
from asyncrl.runtime import shield_until_done
from asyncrl.serve.agents import MODEL_NAME, AgentSession
from asyncrl.single_controller.children import children

_KEY = "env.options"
_INHERITED = ("LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TZ", "USER")
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")
_END_S = 10.0
_GRACE_S = 5.0
"""Time for an agent to end once it has no more turns."""
_LAST_WORDS = 500


# ----------------------------------------------------------------------------------------------------- one program


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramEnd:
    """How a program ended: with ``code`` if it was not at a limit, and was not ``stopped`` for another reason."""

    how: Literal["exited", "killed", "deadline", "output", "stopped"]
    code: int
    stdout: str
    stderr: str


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
        with theirs:
            keeper = [sys.executable, "-I", "-S", scoring_program.__file__, str(theirs.fileno())]
            transport, outputs = await loop.subprocess_exec(
                lambda: _Outputs(output_bytes, over),
                *(*keeper, *command),
                cwd=folder,
                env=dict(env),
                stdin=None,
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
    how: Literal["exited", "killed", "deadline", "output", "stopped"] = "killed" if code < 0 else "exited"
    if outputs.flooded or late or stopped:
        how = "output" if outputs.flooded else "deadline" if late else "stopped"
    texts = [bytes(text).decode(errors="replace") for text in outputs.texts.values()]
    return ProgramEnd(how=how, code=abs(code), stdout=texts[0], stderr=texts[1])


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
        messages = await self._judge.reset(task)
        made = await asyncio.to_thread(LockedTemporaryDirectory, "agent")
        try:
            return await self._run(task, messages, policy, made.path)
        finally:
            await shield_until_done(asyncio.to_thread(made.close))

    async def close(self) -> None:
        await self._judge.close()

    async def _run(self, task: Task, messages: Sequence[Message], policy: EpisodePolicy, folder: Path) -> Trajectory:
        options, over = self._factory, asyncio.Event()
        loop = asyncio.get_running_loop()
        graces: list[asyncio.TimerHandle] = []

        def on_end() -> None:
            if session.failure is not None:
                over.set()
            elif not graces:
                graces.append(loop.call_later(_GRACE_S, over.set))

        async with AgentSession(policy, enforces_forms=options.enforce_forms, on_end=on_end) as session:
            names = {**_columns(task), **_texts(messages), **_placeholders(session), "folder": str(folder / "work")}
            env = options.environment(names, folder)
            await asyncio.to_thread(_make_folder, folder, options.copy, messages)
            command = [filled(part, names) for part in options.command]
            try:
                end = await run_program(
                    command,
                    folder=folder / "work",
                    env=_addresses(session) | env,
                    deadline_s=options.deadline_s,
                    output_bytes=options.output_bytes,
                    over=over,
                )
            finally:
                for grace in graces:
                    grace.cancel()
        if session.failure is not None:
            raise session.failure
        _check_end(end, session, options)
        earned = await self._earned(session, end, names, env, folder)
        info = {"exit_status": end.code, "branches": session.branches, "conversations": session.conversations}
        return session.trajectory(
            task, reward=earned.reward, info={**earned.info, **info}, turn_rewards=earned.turn_rewards
        )

    async def _earned(
        self, session: AgentSession, end: ProgramEnd, names: Mapping[str, str], env: Mapping[str, str], folder: Path
    ) -> _Earned:
        options, turns = self._factory, session.said()
        if options.judged_by == "exit_status":
            return _Earned(float(end.how == "exited" and end.code == 0))
        if options.judged_by == "rule":
            said = turns[-1]["message"].get("content") or ""
            step = await self._judge.step({"role": "assistant", "content": said})
            return _Earned(float(step.reward), info=dict(step.info))
        file = folder / "turns.json"
        await asyncio.to_thread(file.write_text, json.dumps(turns), encoding="utf-8")
        judging = await run_program(
            [filled(part, names) for part in options.judging_command],
            folder=folder / "work",
            env={**env, "ASYNCRL_TURNS_FILE": str(file)},
            deadline_s=options.deadline_s,
            output_bytes=options.output_bytes,
            over=asyncio.Event(),
        )
        if judging.how != "exited" or (options.judged_by == "score_command" and judging.code):
            raise _failure(f"{options.judged_by}", judging, options)
        if options.judged_by == "test_command":
            return _Earned(float(judging.code == 0))
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


def _check_end(end: ProgramEnd, session: AgentSession, options: CommandFactory) -> None:
    """Raise unless the program has ended by itself or for want of turns, and has had one."""
    if end.how in ("deadline", "output", "killed"):
        raise _failure("the agent", end, options)
    if not session.turns:
        raise _failure("the agent asked nothing of the model, and", end, options)


def _failure(who: str, end: ProgramEnd, options: CommandFactory) -> EnvironmentFailure:
    text = {
        "deadline": f"did not end within deadline_s = {options.deadline_s:g}",
        "output": f"wrote more than output_bytes = {options.output_bytes}",
        "killed": f"was killed by signal {end.code}",
        "stopped": "was stopped",
        "exited": f"ended with status {end.code}",
    }[end.how]
    name, last = ("stderr", end.stderr) if end.stderr.strip() else ("stdout", end.stdout)
    kind = EnvironmentDeadlineError if end.how == "deadline" else EnvironmentFailure
    return kind(f"{who} {text}" + (f"; its {name} ends with {last.strip()[-_LAST_WORDS:]!r}" if last.strip() else ""))


def _make_folder(folder: Path, copied: Path | None, messages: Sequence[Message]) -> None:
    for name in ("home", "tmp"):
        (folder / name).mkdir()
    if copied is None:
        (folder / "work").mkdir()
    else:
        shutil.copytree(copied, folder / "work", symlinks=True)
    (folder / "task.json").write_text(json.dumps({"messages": list(messages)}), encoding="utf-8")


def _columns(task: Task) -> dict[str, str]:
    """Return what a row has, as texts by name, for placeholders; a name of the run's own comes before these."""
    extra: Mapping[str, Any] = task.get("extra_info") or {}
    return {name: str(value) for name, value in {**task, **extra}.items() if isinstance(value, str | int | float)}


def _texts(messages: Sequence[Message]) -> dict[str, str]:
    def said(role: str) -> str:
        return "\n\n".join(str(each.get("content") or "") for each in messages if each["role"] == role)

    return {"task": said("user"), "system": said("system")}


def _placeholders(session: AgentSession) -> dict[str, str]:
    return {
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


def filled(text: str, names: Mapping[str, str]) -> str:
    """Fill in ``{name}``; other braces stay.

    >>> filled('{task}: {"a": 1}', {"task": "add"})
    'add: {"a": 1}'

    Raises:
        ConfigError: there is no such name.
    """

    def of(found: re.Match[str]) -> str:
        if found[1] not in names:
            remedy = f"one of {', '.join(sorted(names))}"
            raise ConfigError(f"{text!r} has no value for {found[0]}: {remedy}", path=f"{_KEY}.command", remedy=remedy)
        return names[found[1]]

    return _PLACEHOLDER.sub(of, text)


# ----------------------------------------------------------------------------------------------------- the factory


class CommandFactory:
    """Tasks of another environment, each given to a program.

    Args:
        command: the program and its arguments, with ``{task}`` (the text of the task), ``{system}``, ``{folder}``,
            ``{base_url}`` (of OpenAI's clients), ``{session_url}`` (of Anthropic's), ``{api_key}``, ``{model}``, and
            columns of the row by name. An argument that is a file in the folder of the run is given by its full path.
        tasks: environment that poses the tasks, and whose reward for the last message counts; ``options`` are its.
        reward: where the reward comes from instead: ``exit_status`` (1 if the program ends with status 0, else 0).
            Anything else is an option of ``tasks``.
        test_command: run in the program's folder afterwards; the reward is 1 if it ends with status 0, else 0.
        score_command: likewise; the reward is the number on the last line of its output.
        env: further environment variables, with the same placeholders. Of this process's own the program gets
            ``PATH``, ``LANG`` and the like alone.
        enforce_forms: whether a required call, a JSON schema or a grammar is enforced; such turns are not trained on.
        copy: folder whose copy the program starts in; an empty one without it.
        deadline_s: for the program, from its start to its end.
        output_bytes: of each of its two outputs.

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
        seed: int = 0,
        **options: Any,
    ) -> None:
        for name, given in (("command", command), ("test_command", test_command), ("score_command", score_command)):
            if isinstance(given, str) or not all(isinstance(part, str) for part in given):
                remedy = '["my-agent", "--task", "{task}"]'
                raise ConfigError(f"{name} is {given!r}", path=f"{_KEY}.{name}", remedy=remedy)
        if not command or (shutil.which(command[0]) is None and not _PLACEHOLDER.search(command[0])):
            named = command[0] if command else ""
            raise ConfigError(f"there is no program {named!r}", path=f"{_KEY}.command", remedy="install it")
        for name, limit in (("deadline_s", deadline_s), ("output_bytes", output_bytes)):
            if not (limit > 0 and math.isfinite(limit)):
                raise ConfigError(f"{name} is {limit}", path=f"{_KEY}.{name}", remedy="a positive number")
        if copy is not None and not Path(copy).is_dir():
            raise ConfigError(f"copy = {copy!r}: no such folder", path=f"{_KEY}.copy", remedy="check the path")
        self.command = [str(Path(part).absolute()) if Path(part).is_file() else part for part in command]
        self.copy = Path(copy).absolute() if copy is not None else None
        self.enforce_forms = enforce_forms
        self.deadline_s = deadline_s
        self.output_bytes = output_bytes
        self._env = dict(env or {})
        ways = {"exit_status": reward == "exit_status", "test_command": test_command, "score_command": score_command}
        chosen = [name for name, given in ways.items() if given]
        if len(chosen) > 1 or (chosen and reward not in (None, "exit_status")):
            remedy = "a rule, exit_status, test_command or score_command"
            raise ConfigError("the reward comes from one of several", path=f"{_KEY}.reward", remedy=remedy)
        self.judged_by: Literal["rule", "exit_status", "test_command", "score_command"] = "rule"
        self.judging_command = list(test_command or score_command)
        if chosen:
            self.judged_by = chosen[0]  # type: ignore[assignment]
            options |= {"reward": "none"} if tasks == "dataset" else {}
        elif reward is not None:
            options["reward"] = reward
        group, path = "asyncrl.environments", f"{_KEY}.tasks"
        own = offered_options(group, tasks, {"seed": seed}, path=path) | options
        self._tasks: EnvironmentFactory = make_part(group, tasks, options=own, path=path, table=_KEY)

    def __getattr__(self, name: str) -> Any:
        """Return the capability of ``tasks``: its demonstrations, its filter of prompts, the number of its rows."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._tasks, name)

    def task(self, index: int, *, split: Literal["train", "held_out"]) -> Task:
        return self._tasks.task(index, split=split)

    def make(self) -> CommandEnvironment:
        return CommandEnvironment(self, self._tasks.make())

    def demonstration(self, index: int) -> list[Message]:
        return self._tasks.demonstration(index)

    def environment(self, names: Mapping[str, str], folder: Path) -> dict[str, str]:
        """Return the environment variables of a program in ``folder``."""
        env = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        env |= {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp")}
        env["ASYNCRL_TASK_FILE"] = str(folder / "task.json")
        return env | {name: filled(value, names) for name, value in self._env.items()}
