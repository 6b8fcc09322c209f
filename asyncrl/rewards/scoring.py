"""User-written reward functions, called in separate processes because they may hang, leak, crash or set alarms."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import math
import os
import pickle
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError, RewardError
from asyncrl.plugins import Part, is_importable, load_part, part_text
from asyncrl.rewards.scoring_program import as_value, load_file
from asyncrl.runtime import in_own_thread
from asyncrl.single_controller.children import children, stopped_among

_log = logging.getLogger(__name__)
_PROGRAM = Path(__file__).with_name("scoring_program.py")
_LENGTH = struct.Struct(">I")
_MAX_DEATHS = 3
_NONCE_BYTES = 16
_MAX_REPLY_BYTES = 16 << 20
_END_S = 10.0


def check_seconds(name: str, value: float) -> None:
    """Raise ConfigError unless ``value`` is a finite positive number of seconds."""
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"{name} is {value}", path=name, remedy="a positive number of seconds")


def check_count(name: str, value: int) -> None:
    """Raise ConfigError unless ``value`` is 1 or more."""
    if value < 1:
        raise ConfigError(f"{name} is {value}", path=name, remedy="1 or more")


class ScoringProcess:
    """A process that runs one function, one call at a time. It starts when needed, and again after a death.

    States: absent -> running -> absent (killed, crashed or closed). A call that passes its deadline or is cancelled
    kills the process and its whole group, so that a function that never returns ends with everything it started. A
    death between two calls is logged when it happens (on Linux; elsewhere at the next call).

    A process that dies by a signal during a call may have been killed from outside (by the kernel's OOM killer, for
    example): the call is repeated in a new process. So it is if the process is stopped: then it is killed, at the
    latest at the call's deadline (:mod:`asyncrl.single_controller.children`). A call fails after three such deaths, or
    when its process exits.

    ``start_deadline_s`` is the longest time for starting Python and importing the module.
    """

    def __init__(self, function: str, *, start_deadline_s: float) -> None:
        self._function = function
        self._start_deadline_s = start_deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._in_call = False
        self._watched: int | None = None
        """Descriptor of the process, readable once it has ended."""
        self._reaping: asyncio.Task[None] | None = None
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    @property
    def pid(self) -> int | None:
        """Id of the running process, or None."""
        return self._process.pid if self._process is not None else None

    async def call(self, arguments: dict[str, Any], *, deadline_s: float) -> float | dict[str, float]:
        """Call the function with keyword arguments; ``deadline_s`` holds for each process that runs the call.

        The value is a number, or a table of numbers with ``score``.

        Raises:
            RewardError: with the reason as ``how``: the function raised, returned no finite number or passed the
                deadline, its process exited, or three processes died.
        """
        request = pickle.dumps(arguments)
        await self._reap()
        self._in_call = True
        try:
            reply = await self._call_until_answered(request, deadline_s=deadline_s)
        finally:
            self._in_call = False
        await self._reap()  # it may have died since it answered
        if "error" in reply:
            raise RewardError(f"raised\n{reply['error']}", how="raised")
        return checked_value(reply)

    async def _call_until_answered(self, request: bytes, *, deadline_s: float) -> dict[str, Any]:
        deaths: list[str] = []
        while True:
            try:
                return await self._call_once(request, deadline_s=deadline_s)
            except _ProcessEnded as end:
                self._check_open()
                deaths.append(_describe_exit(end.code))
                text = f"its process ended {deaths[-1]}"
                if end.code >= 0:
                    raise RewardError(text, how="died") from None
                _log.warning("%s died during a call (%s; death %d)", self._label(end.pid), deaths[-1], len(deaths))
                if len(deaths) == _MAX_DEATHS:
                    text += f": {len(deaths)} processes died during this call ({', '.join(deaths)})"
                    raise RewardError(text, how="died") from None

    async def _call_once(self, request: bytes, *, deadline_s: float) -> dict[str, Any]:
        try:
            if self._process is None:
                await self._start()
            try:
                async with asyncio.timeout(deadline_s):
                    return await self._exchange(request)
            except TimeoutError:
                await self._check_runs()
                text = f"took longer than its deadline of {deadline_s:g} s and was killed"
                _log.warning("a call of %s %s", self._function, text)  # now: the row is tried again, and others wait
                raise RewardError(text, how="deadline") from None
        except BaseException:
            # The process is still busy, or in an unknown state.
            if self._process is not None and _has_ended(self._process.pid):
                _log.warning("%s died during a call that was given up", self._label(self._process.pid))
            await self.stop()
            raise

    async def _check_runs(self) -> None:
        """Raise _ProcessEnded if the process is stopped: then it is not the function that takes long."""
        process = self._process
        stopped: list[int] = [] if process is None else await asyncio.to_thread(stopped_among, process.pid)
        if process is not None and stopped:
            _log.warning("%s is stopped at the deadline of its call, and is killed", self._label(process.pid))
            raise _ProcessEnded(process.pid, await self.stop())

    def _label(self, pid: int) -> str:
        return f"scoring process {pid} of {self._function}"

    async def _start(self) -> None:
        self._check_open()
        ours, theirs = socket.socketpair()
        with theirs:
            self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)
            opening = asyncio.ensure_future(asyncio.to_thread(self._open, theirs.fileno()))
            try:
                self._process = await asyncio.shield(opening)
            except asyncio.CancelledError:
                self._process = await opening  # a thread cannot be stopped; the caller stops its process
                raise
            finally:
                if self._process is None:
                    self._writer.close()
        self._check_open()
        self._watch()
        try:
            async with asyncio.timeout(self._start_deadline_s):
                reply = await self._exchange(pickle.dumps({"path": sys.path, "function": self._function}))
        except TimeoutError:
            await self._check_runs()
            raise RewardError(f"its module was not imported within {self._start_deadline_s:g} s") from None
        if "error" in reply:
            raise RewardError(f"its module could not be imported\n{reply['error']}")

    def _open(self, descriptor: int) -> subprocess.Popen[bytes]:
        with children.starting(f"a scoring process of {self._function}"):
            return subprocess.Popen(  # noqa: S603  # our own interpreter and program
                # -P: the program's own folder must not shadow the user's modules.
                [sys.executable, "-P", str(_PROGRAM), str(descriptor)],
                stdin=subprocess.DEVNULL,
                pass_fds=(descriptor,),
                start_new_session=True,
            )

    def _watch(self) -> None:
        assert self._process is not None
        children.add(self._process.pid, self._label(self._process.pid), kill=_order_end)
        with contextlib.suppress(AttributeError, OSError):  # not on this system or kernel
            self._watched = os.pidfd_open(self._process.pid)
        if self._watched is not None:
            asyncio.get_running_loop().add_reader(self._watched, self._on_exit)

    def _unwatch(self) -> None:
        watched, self._watched = self._watched, None
        if watched is not None:
            asyncio.get_running_loop().remove_reader(watched)
            os.close(watched)

    def _on_exit(self) -> None:
        self._unwatch()
        self._reaping = asyncio.ensure_future(self._reap())

    async def _reap(self) -> None:
        """Stop and log a process that died between two calls."""
        process = self._process
        if process is not None and not self._in_call and _has_ended(process.pid):
            how = _describe_exit(await self.stop())
            _log.warning("%s died between two calls (%s)", self._label(process.pid), how)

    async def _exchange(self, body: bytes) -> dict[str, Any]:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        try:
            self._writer.write(_LENGTH.pack(len(nonce) + len(body)) + nonce + body)
            await self._writer.drain()
            (count,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            answer = await self._reader.readexactly(count) if count <= _MAX_REPLY_BYTES else b""
        except (asyncio.IncompleteReadError, ConnectionError):
            pid = self._process.pid if self._process is not None else 0
            _log.warning("%s is gone", self._label(pid))  # at once: the call may be cancelled meanwhile
            raise _ProcessEnded(pid, await self.stop()) from None
        try:
            reply = json.loads(answer)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict) or reply.get("to") != nonce.hex() or not _is_reply(reply):
            raise RewardError("its process wrote to the socket of its replies", how="value")
        return reply

    async def close(self) -> None:
        """Stop the process and refuse further calls; a call that still runs fails. Idempotent."""
        self._closed = True
        if self._reaping is not None:
            await self._reaping
        await self._reap()
        await self.stop()

    def _check_open(self) -> None:
        if self._closed:
            raise RewardError("was closed") from None

    async def stop(self) -> int:
        """Kill the process and its group, and return its exit code (0 without a process). Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return 0
        children.remove(process.pid)
        self._unwatch()
        self._writer.close()
        return await asyncio.shield(asyncio.to_thread(_end, process))


def _is_reply(reply: dict[str, Any]) -> bool:
    """Check the types: what a program sends is not trusted."""
    if "value" in reply:
        return "value" in as_value(reply["value"]) and not isinstance(reply["value"], bool)
    return reply.get("ready") is True or any(isinstance(reply.get(name), str) for name in ("error", "not_a_number"))


class _ProcessEnded(Exception):
    """The process ended before it answered."""

    def __init__(self, pid: int, code: int) -> None:
        super().__init__(pid, code)
        self.pid = pid
        self.code = code


def _end(process: subprocess.Popen[bytes]) -> int:
    """Let the process end with all that the function started, and return its exit code."""
    # A dead process keeps its id until it is waited for, so these cannot hit another group.
    kill = threading.Timer(_END_S, _kill_group, (process.pid,))
    kill.start()
    _order_end(process.pid)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    kill.cancel()
    kill.join()
    _kill_group(process.pid)
    return process.wait()


def _order_end(pid: int) -> None:
    """Have the process end with all that the function started. One that is stopped goes on to do so."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGCONT)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"with exit code {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:  # real-time signals have no names
        return f"by signal {-code}"


def _has_ended(pid: int) -> bool:
    """Check whether a child has ended, without waiting for it, so that its id is not reused."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def checked_value(reply: dict[str, Any]) -> float | dict[str, float]:
    """Return the value in a reply of :mod:`~asyncrl.rewards.scoring_program`; raise RewardError without one."""
    if "not_a_number" in reply:
        rule = "a reward is a finite number, or a table with one as 'score'"
        raise RewardError(f"returned {reply['not_a_number']}; {rule}", how="value")
    value: float | dict[str, float] = reply["value"]
    return value


class UserFunction:
    """Calls a user's function with keyword arguments, under a deadline. All calls come from one event loop.

    A plain function runs in ``processes`` of :class:`ScoringProcess`, so it may block, set alarms, leak or crash. One
    that another process cannot import (of a notebook, a closure) runs in threads of its own, which its deadline
    abandons but cannot stop. An ``async def`` function runs on the event loop and is cancelled at its deadline. Of both
    kinds ``concurrency`` calls run at a time, beside abandoned ones.

    Args:
        function: ``package.module:name``, ``path/to/file.py:name``, or the function. This process imports it, too, to
            read its signature.
        deadline_s: longest time for one call, in one process.
        processes: largest number of processes; they start when needed.
        start_deadline_s: longest time for starting a process and importing the module there.

    Attributes:
        function: the function.
        parameters: names of the parameters that may be passed by keyword.
        required: those without a default.
        takes_any: whether the function also takes ``**others``.

    Raises:
        ConfigError: the function cannot be imported or called by keyword, or a number is out of range.
    """

    def __init__(
        self,
        function: Part,
        *,
        deadline_s: float = 10.0,
        processes: int = 1,
        concurrency: int = 64,
        start_deadline_s: float = 60.0,
    ) -> None:
        check_seconds("deadline_s", deadline_s)
        check_seconds("start_deadline_s", start_deadline_s)
        check_count("processes", processes)
        check_count("concurrency", concurrency)
        self.name = name = part_text(function)
        self._deadline_s = deadline_s
        self.function = load_function(function) if isinstance(function, str) else function
        self.parameters, self.required, self.takes_any = _parameters(name, self.function)
        self._asynchronous = inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(
            getattr(self.function, "__call__", None)  # noqa: B004  # an object with async __call__
        )
        self._here = self._asynchronous or not is_importable(function)
        self._running = asyncio.Semaphore(concurrency)
        self._processes = [ScoringProcess(name, start_deadline_s=start_deadline_s) for _ in range(processes)]
        self._idle: asyncio.LifoQueue[ScoringProcess] = asyncio.LifoQueue()
        for process in reversed(self._processes):
            self._idle.put_nowait(process)
        self._closed = False

    async def call(self, arguments: dict[str, Any]) -> float | dict[str, float]:
        """Call the function; values and errors are those of :meth:`ScoringProcess.call`."""
        if self._closed:
            raise RewardError("was closed")
        if self._here:
            return await self._call_here(arguments)
        async with self._process() as process:
            return await process.call(arguments, deadline_s=self._deadline_s)

    async def close(self) -> None:
        """End all processes and what they started; calls that still run fail. Idempotent."""
        self._closed = True
        await asyncio.gather(*(process.close() for process in self._processes))

    @asynccontextmanager
    async def _process(self) -> AsyncIterator[ScoringProcess]:
        process = await self._idle.get()
        try:
            if self._closed:
                raise RewardError("was closed")
            yield process
        finally:
            self._idle.put_nowait(process)

    async def _call_here(self, arguments: dict[str, Any]) -> float | dict[str, float]:
        async with self._running:
            deadline = asyncio.timeout(self._deadline_s)
            try:
                async with deadline:
                    if self._asynchronous:
                        value = await self.function(**arguments)
                    else:
                        value = await in_own_thread(self.function, **arguments)
            except Exception as error:
                if isinstance(error, TimeoutError) and deadline.expired():
                    text = f"took longer than its deadline of {self._deadline_s:g} s"
                    raise RewardError(text, how="deadline") from None
                raise RewardError(f"raised\n{traceback.format_exc()}", how="raised") from error
        return checked_value(as_value(value))


def load_function(name: str) -> Any:
    """Import ``package.module:name`` or ``path/to/file.py:name``; raise ConfigError if it cannot be, or is no function.

    ``__main__`` is refused: other processes have another one.
    """
    module, colon, attribute = name.rpartition(":")
    if not colon or module == "__main__":
        raise ConfigError(
            f"{name!r} cannot be imported by another process",
            path="function",
            remedy="put the reward function into a separate module and write package.module:name",
        )
    if module.endswith(".py"):
        function = _from_file(module, attribute)
    else:
        function = load_part("asyncrl.reward_functions", name, path="function")
    if not callable(function):
        raise ConfigError(f"{name} is a {type(function).__name__}, not a function", path="function")
    return function


def _from_file(path: str, attribute: str) -> Any:
    if not Path(path).is_file():
        raise ConfigError(f"{path}: no such file", path="function", remedy="check the path of the reward function")
    try:
        return getattr(load_file(path), attribute)
    except AttributeError as error:
        raise ConfigError(f"{path} has no {attribute!r}", path="function", remedy="check the name") from error
    except Exception as error:  # importing a user's module may raise anything
        raise ConfigError(
            f"{path} cannot be imported: {type(error).__name__}: {error}", path="function", remedy="see the cause"
        ) from error


def _parameters(name: str, function: Any) -> tuple[frozenset[str], frozenset[str], bool]:
    """Return the function's parameters, the required ones, and whether it takes ``**others``."""
    kinds = inspect.Parameter
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is kinds.POSITIONAL_ONLY for p in parameters):
        raise ConfigError(
            f"{name} has positional-only parameters", path="function", remedy="arguments are passed by keyword"
        )
    named = [p for p in parameters if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    required = frozenset(p.name for p in named if p.default is kinds.empty)
    return frozenset(p.name for p in named), required, any(p.kind is kinds.VAR_KEYWORD for p in parameters)
