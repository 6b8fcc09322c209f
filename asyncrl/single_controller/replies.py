"""Replies: what the ranks answer to one call, waited for together."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

from asyncrl.data.plan import Block, Plan
from asyncrl.data.progress import Progress
from asyncrl.single_controller.controller_loop import ControllerLoop
from asyncrl.single_controller.dispatch import Dispatch, Share, collect
from asyncrl.single_controller.host import Call, Cancelled, Failed, Reply, ReturnedBatch

__all__ = ["Replies", "ReplyFuture", "Submission", "follow"]

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


def follow(
    progress: Progress, submissions: Sequence[Submission], shares: Sequence[Share] | None, *, method: str
) -> None:
    """Note in ``progress`` what becomes of a call that has been sent; ``shares`` of the rows where they are split."""
    if shares is None:
        progress.sent([None] * len(submissions))
    else:
        ends = list(accumulate(len(share.index) - share.padding for share in shares))
        progress.sent([range(start, end) for start, end in pairwise([0, *ends])])
    for submission in submissions:
        share = None if shares is None else shares[submission.rank]
        # Not the submission itself, which holds the arguments.
        note = functools.partial(_note, progress, submission.rank, submission.block, share, method)
        submission.reply.add_done_callback(note)


def _note(
    progress: Progress, rank: int, block: Block | None, share: Share | None, method: str, reply: ReplyFuture
) -> None:
    if reply.cancelled():
        progress.ended(rank, "cancelled")
        return
    value = None if reply.exception() is not None else reply.result()
    if value is None or isinstance(value, Failed):
        progress.ended(rank, "failed")
    elif isinstance(value, Cancelled):
        progress.ended(rank, "cancelled")
    elif isinstance(value, ReturnedBatch) and block is not None:
        plan = Plan.shard(block, value.header)
        make = functools.partial(_part, plan, share, method) if share is not None else None
        progress.ended(rank, "done", header=value.header, make=make)
    else:
        progress.ended(rank, "done")


def _part(plan: Plan, share: Share, method: str) -> Plan:
    part: Plan = collect(Dispatch.DP_COMPUTE_PROTO, [plan], [share], group=None, method=method)
    return part
