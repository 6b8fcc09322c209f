"""Replies: what the ranks answer to one call, waited for together."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from asyncrl.data.plan import Block
from asyncrl.single_controller.controller_loop import ControllerLoop
from asyncrl.single_controller.host import Call, Cancelled, Failed, Reply

__all__ = ["Replies", "ReplyFuture", "Submission"]

ReplyFuture: TypeAlias = "asyncio.Future[Reply] | concurrent.futures.Future[Reply]"


@dataclass(frozen=True, slots=True, eq=False)
class Submission:
    """A call that has gone to one rank. ``block`` will hold the batch, if the reply says that there is one."""

    rank: int
    call: Call
    reply: ReplyFuture
    block: Block | None


class Replies:
    """Wakes the loop once: when every rank has replied, or the first one with a failure.

    Replies may come in any thread. Made and awaited on the controller loop.

    Attributes:
        failed: what has failed so far, in the order in which it came: the first one is most often the reason.
    """

    def __init__(self, submissions: Sequence[Submission], loop: ControllerLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._missing = len(submissions)
        self.failed: list[Submission] = []
        self._decided = asyncio.Event()
        self._complete = asyncio.Event()
        for submission in submissions:
            submission.reply.add_done_callback(functools.partial(self._came, submission))

    async def all_or_failure(self) -> None:
        await self._decided.wait()

    async def all_within(self, timeout_s: float) -> None:
        """Wait for the rest, but not for long."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._complete.wait()
        except TimeoutError:
            return

    def _came(self, submission: Submission, reply: ReplyFuture) -> None:
        failed = reply.cancelled() or reply.exception() is not None or isinstance(reply.result(), Failed | Cancelled)
        with self._lock:
            self._missing -= 1
            if failed:
                self.failed.append(submission)
            complete = self._missing == 0
        if complete:
            self._loop.notify(self._complete.set)
        if complete or failed:
            self._loop.notify(self._decided.set)
