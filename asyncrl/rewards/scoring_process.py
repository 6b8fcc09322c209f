"""A process of its own for functions that may hang, leak, crash or set alarms."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

from asyncrl.errors import RewardError

__all__ = ["ScoringProcess", "checked_value"]

_log = logging.getLogger(__name__)
_PROGRAM = Path(__file__).with_name("scoring_program.py")
_LENGTH = struct.Struct(">I")
_MOST_DEATHS = 3


class ScoringProcess:
    """Runs one function, one call at a time; started when first needed, again after it was killed.

    States: absent -> running -> absent (killed, crashed or closed). A call that passes its deadline or is cancelled
    kills the process and its whole group, so a function that never returns, and what it started, is really gone. A
    death between two calls is logged when it happens (on Linux; elsewhere at the next call).

    A process that dies by a signal in the middle of a call may have been killed by anybody: the call is made again, in
    a new one. A call that three of them die under is what kills them, and fails; so does one whose process exits.

    Args:
        function: ``package.module:name``, or ``path/to/file.py:name``.
        start_deadline_s: longest time for starting Python and importing the module.
    """

    def __init__(self, function: str, *, start_deadline_s: float) -> None:
        self._function = function
        self._start_deadline_s = start_deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._in_call = False
        self._watched: int | None = None
        """Descriptor of the process, readable once it has ended."""
        self._clearing: asyncio.Task[None] | None = None
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    @property
    def pid(self) -> int | None:
        """Of the running process, None while there is none."""
        return self._process.pid if self._process is not None else None

    async def call(self, arguments: dict[str, Any], *, deadline_s: float) -> float | dict[str, float]:
        """The function's value for these keyword arguments: a number, or a table of numbers with ``score``.

        Raises:
            RewardError: it raised, returned no finite number, took longer than ``deadline_s`` in one process, or its
                process exited, or was killed one after the other; ``how`` says which.
        """
        request = pickle.dumps(arguments)
        await self._clear_away()
        self._in_call = True
        try:
            reply = await self._until_answered(request, deadline_s=deadline_s)
        finally:
            self._in_call = False
        if "error" in reply:
            raise RewardError(f"raised\n{reply['error']}", how="raised")
        return checked_value(reply)

    async def _until_answered(self, request: bytes, *, deadline_s: float) -> dict[str, Any]:
        """Ask one process after the other, as long as they are killed."""
        deaths: list[str] = []
        while True:
            try:
                return await self._ask(request, deadline_s=deadline_s)
            except _Ended as end:
                self._check_open()
                deaths.append(_how(end.code))
                told = f"its process ended {deaths[-1]}"
                if end.code >= 0:
                    raise RewardError(told, how="died") from None
                who = f"scoring process {end.pid} of {self._function}"
                _log.warning("%s has died in the middle of a call (%s; death %d)", who, deaths[-1], len(deaths))
                if len(deaths) == _MOST_DEATHS:
                    told += f": {len(deaths)} have died under this call, one after the other ({', '.join(deaths)})"
                    raise RewardError(told, how="died") from None

    async def _ask(self, request: bytes, *, deadline_s: float) -> dict[str, Any]:
        try:
            if self._process is None:
                await self._start()
            try:
                async with asyncio.timeout(deadline_s):
                    return await self._exchange(request)
            except TimeoutError:
                raise RewardError(
                    f"took longer than its deadline of {deadline_s:g} s and was killed", how="deadline"
                ) from None
        except BaseException:
            # The process is in an unknown state, or still busy: whatever the reason, it goes.
            await self.stop()
            raise

    async def _start(self) -> None:
        self._check_open()
        ours, theirs = socket.socketpair()
        with theirs:
            self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)
            opening = asyncio.ensure_future(asyncio.to_thread(self._open, theirs.fileno()))
            try:
                self._process = await asyncio.shield(opening)
            except asyncio.CancelledError:
                self._process = await opening  # the thread cannot be stopped; its process can, by our caller
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
            raise RewardError(f"its module was not imported within {self._start_deadline_s:g} s") from None
        if "error" in reply:
            raise RewardError(f"its module could not be imported\n{reply['error']}")

    @staticmethod
    def _open(descriptor: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603  # our own interpreter and program
            # -P: the program's own folder must not shadow anybody's modules.
            [sys.executable, "-P", str(_PROGRAM), str(descriptor)],
            stdin=subprocess.DEVNULL,
            pass_fds=(descriptor,),
            start_new_session=True,
        )

    def _watch(self) -> None:
        assert self._process is not None
        with contextlib.suppress(AttributeError, OSError):  # this system or its kernel has none
            self._watched = os.pidfd_open(self._process.pid)
        if self._watched is not None:
            asyncio.get_running_loop().add_reader(self._watched, self._noticed)

    def _unwatch(self) -> None:
        watched, self._watched = self._watched, None
        if watched is not None:
            asyncio.get_running_loop().remove_reader(watched)
            os.close(watched)

    def _noticed(self) -> None:
        self._unwatch()
        self._clearing = asyncio.ensure_future(self._clear_away())

    async def _clear_away(self) -> None:
        """Take away a process that died between two calls, by no call's fault."""
        process = self._process
        if process is not None and not self._in_call and _ended(process.pid):
            how = _how(await self.stop())
            _log.warning("scoring process %d of %s has died between two calls (%s)", process.pid, self._function, how)

    async def _exchange(self, body: bytes) -> dict[str, Any]:
        try:
            self._writer.write(_LENGTH.pack(len(body)) + body)
            await self._writer.drain()
            (count,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            reply: dict[str, Any] = json.loads(await self._reader.readexactly(count))
        except (asyncio.IncompleteReadError, ConnectionError):
            pid = self._process.pid if self._process is not None else 0
            raise _Ended(pid, await self.stop()) from None
        return reply

    async def close(self) -> None:
        """As :meth:`stop`, for good: a call that still runs fails. Idempotent."""
        self._closed = True
        if self._clearing is not None:
            await self._clearing
        await self.stop()

    def _check_open(self) -> None:
        if self._closed:
            raise RewardError("was closed") from None

    async def stop(self) -> int:
        """Kill the process and everything in its group; return its exit code (0 if there was none). Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return 0
        self._unwatch()
        self._writer.close()
        # Until it is waited for, a dead process keeps its id: this cannot hit a group that is not ours. One that had
        # begun to exit keeps its exit code.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return await asyncio.shield(asyncio.to_thread(process.wait))


class _Ended(Exception):
    """The process has ended before it answered."""

    def __init__(self, pid: int, code: int) -> None:
        super().__init__(pid, code)
        self.pid = pid
        self.code = code


def _how(code: int) -> str:
    if code >= 0:
        return f"with exit code {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:  # real-time signals have no names
        return f"by signal {-code}"


def _ended(pid: int) -> bool:
    """Whether our child has ended. It is left to be waited for, so that its id stays its own."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def checked_value(reply: dict[str, Any]) -> float | dict[str, float]:
    """What :func:`asyncrl.rewards.scoring_program.as_value` made of a returned value.

    Raises:
        RewardError: it was no number.
    """
    if "not_a_number" in reply:
        raise RewardError(f"returned {reply['not_a_number']}", how="value")
    value: float | dict[str, float] = reply["value"]
    return value
