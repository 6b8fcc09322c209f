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


class ScoringProcess:
    """Runs one function, one call at a time; started when first needed, again after it was killed.

    States: absent -> running -> absent (killed, crashed or closed). A call that passes its deadline or is cancelled
    kills the process and its whole group, so a function that never returns, and what it started, is really gone.

    Args:
        function: ``package.module:name``, or ``path/to/file.py:name``.
        start_deadline_s: longest time for starting Python and importing the module.
    """

    def __init__(self, function: str, *, start_deadline_s: float) -> None:
        self._function = function
        self._start_deadline_s = start_deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    @property
    def pid(self) -> int | None:
        """Of the running process, None while there is none."""
        return self._process.pid if self._process is not None else None

    async def call(self, arguments: dict[str, Any], *, deadline_s: float) -> float | dict[str, float]:
        """The function's value for these keyword arguments: a number, or a table of numbers with ``score``.

        Raises:
            RewardError: it raised, returned no finite number, took longer than ``deadline_s``, or its process died;
                ``how`` says which.
        """
        request = pickle.dumps(arguments)
        if self._process is not None and _ended(self._process.pid):
            pid, code = self._process.pid, await self.stop()  # between two calls: no call's fault
            _log.warning("scoring process %d of %s has died between two calls (%s)", pid, self._function, _how(code))
        try:
            if self._process is None:
                await self._start()
            try:
                async with asyncio.timeout(deadline_s):
                    reply = await self._exchange(request)
            except TimeoutError:
                raise RewardError(
                    f"took longer than its deadline of {deadline_s:g} s and was killed", how="deadline"
                ) from None
        except BaseException:
            # The process is in an unknown state, or still busy: whatever the reason, it goes.
            await self.stop()
            raise
        if "error" in reply:
            raise RewardError(f"raised\n{reply['error']}", how="raised")
        return checked_value(reply)

    async def _start(self) -> None:
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

    async def _exchange(self, body: bytes) -> dict[str, Any]:
        try:
            self._writer.write(_LENGTH.pack(len(body)) + body)
            await self._writer.drain()
            (count,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            reply: dict[str, Any] = json.loads(await self._reader.readexactly(count))
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await self.stop()
            raise RewardError(f"its process ended {_how(code)}", how="died") from None
        return reply

    async def stop(self) -> int:
        """Kill the process and everything in its group; return its exit code (0 if there was none). Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return 0
        self._writer.close()
        # Until it is waited for, a dead process keeps its id: this cannot hit a group that is not ours. One that had
        # begun to exit keeps its exit code.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return await asyncio.shield(asyncio.to_thread(process.wait))


def _how(code: int) -> str:
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


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
