"""Invocation: one call of a worker group, to the ranks and back.

    in line --(its arguments are there)--> sent --(every rank has replied)--> over
       '-----(an argument failed)-------------'-----(a rank failed)-------------^
       '-----(cancelled, the group closed)----'---------------------------------'

A call whose arguments are there is sent by the thread that makes it, and the thread in which the last reply comes makes
the result: nothing else runs in between. A call that has to wait does so as a task on the controller loop; the workers
know nothing of it yet, and later calls pass it.
"""

# ruff: noqa: SLF001  a group and its invocations are one machine in two files
# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
import contextlib
import functools
import operator
import threading
from array import array
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Protocol

from asyncrl.data.future import DataProtoFuture
from asyncrl.data.plan import Block, Plan
from asyncrl.data.proto import DataProto
from asyncrl.errors import AsyncRLError, DispatchError, GroupClosedError, RankErrors, WorkerError
from asyncrl.single_controller.call import (
    NO_VALUE,
    Arguments,
    Call,
    Cancelled,
    Failed,
    Lost,
    Reply,
    ReturnedBatch,
)
from asyncrl.single_controller.dispatch import PROTO_MODES, Dispatch, Execute
from asyncrl.single_controller.mesh import Mesh, MeshDispatch
from asyncrl.single_controller.restart import workers_there
from asyncrl.single_controller.scatter import NO_ROWS, Scatter, Share, collect, to_fetch

if TYPE_CHECKING:
    from asyncrl.data.declared import Declared
    from asyncrl.data.outcome import Outcome
    from asyncrl.data.progress import Progress
    from asyncrl.single_controller.controller_loop import Work
    from asyncrl.single_controller.decorator import Registration
    from asyncrl.single_controller.mesh_inquiry import Inquiry
    from asyncrl.single_controller.retry import Repeats
    from asyncrl.single_controller.worker_group import WorkerGroup

__all__ = ["Invocation", "Unwatched"]

SOON_S = 0.02
"""How long a thread that asks for a result waits for the replies itself, before the controller loop does it."""

SIBLING_GRACE_S = 0.05
"""After the first failure of a call, how long its other ranks may go on: what fails them too is often under way."""


_SENT_AGAIN: Any = object()


class Unwatched(Protocol):
    """A reply on its way that nobody watches yet."""

    def watch(self) -> None:
        """Have the invocation told when it is there."""


class Invocation:
    """One call of ``group``; what comes of it goes to ``outcome``, how far it is to ``progress``.

    Args:
        plain: the method is no ``async def``: it runs in the workers' threads, one after another.
        repeats: whether it is sent again after failures, and when; None for never.
    """

    __slots__ = (
        "__weakref__",
        "_all_came",
        "_failures",
        "_group",
        "_in_line",
        "_lock",
        "_mesh",
        "_missing",
        "_over",
        "_plain",
        "_registration",
        "_repeats",
        "_scatter",
        "_sequences",
        "_shares",
        "_unwatched",
        "_values",
        "_waiting",
        "_work",
        "declared",
        "outcome",
        "progress",
        "thread",
    )

    def __init__(
        self,
        group: WorkerGroup,
        registration: Registration,
        scatter: Scatter,
        outcome: Outcome[Any],
        progress: Progress,
        *,
        plain: bool = True,
        repeats: Repeats | None = None,
    ) -> None:
        self._repeats = repeats
        self._group = group
        self._registration = registration
        self._scatter = scatter
        self._mesh: Mesh | None = None
        self._plain = plain
        self.outcome = outcome
        self.thread = threading.get_ident()
        self.declared: Declared | None = None
        self.progress = progress
        self._lock = threading.Lock()
        self._over = False
        self._in_line = False
        self._work: Work | None = None
        self._shares: Sequence[Share] = ()
        self._sequences = array("Q")
        self._waiting = 0
        self._missing = 0
        self._values: list[Any] = []
        self._failures: tuple[tuple[int, Reply], ...] = ()
        self._all_came: asyncio.Event | None = None
        self._unwatched: Sequence[Unwatched] = ()
        group._under_way.add(self)

    # ---------------------------------------------------------------------------------------------------- the way there

    def begin(self) -> None:
        """Send it now if nothing is to be waited for, else as soon as that has come. In the caller's thread."""
        group = self._group
        line = group._line
        error: BaseException | None = None
        with line.lock:
            now = group._may_send_here() and line.ahead == 0 and self._scatter.is_here
            if now:
                if self._repeats is not None:
                    self._scatter.snapshot()  # what is sent again is what was given
                error = self._try_to_send()
            else:
                line.ahead += 1
                self._in_line = True
                # The caller may go on changing its own.
                self._scatter.snapshot()
        if not now:
            work = group._owner.spawn(self._wait_and_send, self._waited)
            with self._lock:
                self._work = self._work or work  # unless it has been sent and has failed by now
        elif error is not None:
            self._end(error)

    async def _wait_and_send(self) -> None:
        group, scatter = self._group, self._scatter
        line = group._line
        with line.asking.join() as asking, line.unsent.join() as unsent:
            await asking.first()
            await workers_there(group)
            inquiry = self._mesh_inquiry()
            if inquiry is not None:
                await inquiry.first_answer()
            asking.leave()
            if self._plain:
                await unsent.first()
            if inquiry is not None:
                scatter.mesh = await inquiry.mesh()
            if not all(future.done() for future in scatter.futures):
                unsent.leave()
                self._leave_line()
            await self._arrivals()
            scatter.apply_custom()
            await self._arrivals()
            await workers_there(group)  # some may have died meanwhile, and be made again
            with line.lock:
                error = self._try_to_send()
        if error is not None:
            raise error

    def _mesh_inquiry(self) -> Inquiry | None:
        mode = self._registration.dispatch_mode
        if not isinstance(mode, MeshDispatch) or self._scatter.mesh is not None:
            return None
        return self._group._meshes.ask(mode.mesh_name)

    def _leave_line(self) -> None:
        if self._in_line:
            self._in_line = False
            self._group._line.leave()

    def _waited(self, task: asyncio.Task[None]) -> None:
        self._leave_line()
        if task.cancelled():
            self._end(None)
        elif (error := task.exception()) is not None:
            self._end(error)

    async def _arrivals(self) -> None:
        for future in self._scatter.futures:
            try:
                await future.completed()
            except AsyncRLError as error:
                raise error.on_its_way(f"it was an argument of {self.outcome.label}, which was not called") from (
                    error.__cause__
                )

    def _try_to_send(self) -> BaseException | None:
        """What kept it from being sent. Errors are reported once the line's lock is free: they wake others."""
        try:
            self.send()
        except Exception as error:  # noqa: BLE001  whatever it is, it is what the call failed with
            return error
        return None

    def send(self) -> None:
        """To all ranks in one go: no other call of these workers comes between. Under the line's lock."""
        if self._over:
            return
        group, registration, scatter = self._group, self._registration, self._scatter
        arguments = scatter.arguments()
        ranks = len(arguments)
        rows: Sequence[range] = ()
        if scatter.splits:
            self._shares = scatter.shares
        if isinstance(registration.dispatch_mode, Dispatch) and registration.dispatch_mode in PROTO_MODES:
            ends = accumulate(len(share.index) - share.padding for share in self._shares)
            rows = [range(start, end) for start, end in pairwise([0, *ends])]
        self.progress.sent(ranks, rows)
        if self._repeats is not None:
            self._repeats.sent()
        self._values = [None] * ranks
        self._waiting = (1 << ranks) - 1
        replies: list[Unwatched] = []
        self._missing = ranks
        call: Call | None = None
        for rank, each in enumerate(arguments):
            if call is None or each is not call.arguments:
                call = self._call_with(each)
            sequence = group._line.sequence(rank)
            self._sequences.append(sequence)
            try:
                reply = group._submit(rank, call, sequence, self)
            except BaseException:
                group._skip(rank, sequence)
                self._waiting &= (1 << rank) - 1
                self._abandon()
                raise
            if reply is not None:
                replies.append(reply)
        group._sent()
        if replies:
            self._unwatched = replies
            group._loop.watch_soon(self)
        # What the call was made with is not kept while workers compute, unless it may be sent again.
        self._mesh = scatter.mesh
        if self._repeats is None:
            del self._scatter
        self._abandon_if_over()

    def _abandon_if_over(self) -> None:
        """Cancelled by another thread while this one was sending."""
        if self._over:
            self._abandon()

    def _call_with(self, arguments: Arguments) -> Call:
        registration = self._registration
        return Call(
            method=self._group._method_of(registration),
            arguments=arguments,
            to_fetch=to_fetch(arguments, batches=not registration.materialize_futures),
            materialize_futures=registration.materialize_futures,
            read_only=registration.read_only,
            keep_batch=registration.returns_batch,
        )

    # ----------------------------------------------------------------------------------------------------- the way back

    def watch(self) -> None:
        """See replies as they come, from now on. From any thread.

        Somebody does so for every call: whoever awaits or asks, or the controller loop a moment after the call was
        made. Only a thread that blocks for the result right away is faster without.
        """
        with self._lock:
            replies, self._unwatched = self._unwatched, ()
        for reply in replies:
            reply.watch()

    def wait_here(self, timeout_s: float | None) -> None:
        """Take the replies in this thread if they come soon. Otherwise they are watched when this returns."""
        with self._lock:
            replies, self._unwatched = self._unwatched, ()
        if not replies:
            return
        taken = False
        try:
            taken = self._group._take_now(replies, SOON_S if timeout_s is None else min(SOON_S, timeout_s))
        finally:
            if not taken:
                for reply in replies:
                    reply.watch()

    def came(self, rank: int, reply: Reply, block: Block | None = None) -> None:
        """A rank has replied; a batch that it keeps lies in ``block``. In any thread, and never raises."""
        failed = isinstance(reply, NO_VALUE)
        with self._lock:
            if not self._waiting >> rank & 1:
                return  # taken, but for an interrupt in the middle, and watched then
            self._waiting &= ~(1 << rank)
        if failed:
            self.progress.ended(rank, "cancelled" if isinstance(reply, Cancelled) else "failed")
        elif isinstance(reply, ReturnedBatch):
            assert block is not None
            self._came_with(rank, Plan.shard(block, reply.header))
        elif isinstance(reply, Plan):
            self._came_with(rank, reply)
        else:
            self._values[rank] = reply
            self.progress.ended(rank, "done")
        with self._lock:
            self._missing -= 1
            if failed:
                self._failures += ((rank, reply),)
            first_failure = failed and len(self._failures) == 1
            complete, all_came = self._missing == 0, self._all_came
            over = self._over
        if over or self._group._loop.is_closed:  # at the end of a program nobody waits any more
            return
        if complete and all_came is not None:
            self._group._loop.notify(all_came.set)
        if first_failure:
            work = self._group._owner.spawn(self._fail, self._collected)
            with self._lock:
                self._work = work
        elif complete and not self._failures:
            self._finish()

    def _came_with(self, rank: int, plan: Plan) -> None:
        self._values[rank] = plan
        # What may be made again is given once it is whole.
        share = self._shares[rank] if rank < len(self._shares) else NO_ROWS
        make = functools.partial(_part, plan, share, self.outcome.label) if self._repeats is None else None
        self.progress.ended(rank, "done", header=plan.header, make=make)

    def _finish(self) -> None:
        if isinstance(self._registration.dispatch_mode, dict):
            self._work = self._group._owner.spawn(self._collect_custom, self._collected)
            return
        try:
            value = self._collect()
        except Exception as error:  # noqa: BLE001  whatever it is, it is what the call failed with
            self._end(error)
        else:
            self._succeed(value)

    def _collect(self) -> Any:
        registration = self._registration
        mode, label = registration.dispatch_mode, self.outcome.label
        alone = (
            registration.execute_mode is Execute.RANK_ZERO and not isinstance(mode, dict) and mode not in PROTO_MODES
        )
        if alone:
            value = self._values[0]
        else:
            value = collect(mode, self._values, self._shares, group=self._group, method=label, mesh=self._mesh)
        if self.declared is not None and isinstance(value, Plan):
            self.declared.check(value.header, label)
        if not registration.returns_batch or isinstance(value, Plan | DataProtoFuture):
            return value
        if isinstance(value, DataProto):
            return Plan.of(value)
        raise DispatchError(f"{label} is to return a DataProto and returned {type(value).__name__}")

    async def _collect_custom(self) -> Any:
        value = self._collect()
        return await value.plan() if isinstance(value, DataProtoFuture) else value

    async def _fail(self) -> Any:
        """Give the other ranks a moment, then end them; the first failure is the reason."""
        all_came = asyncio.Event()
        with self._lock:
            self._all_came = all_came
            if self._missing == 0:
                all_came.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SIBLING_GRACE_S):
                await all_came.wait()
        self._abandon()
        errors = [self._error(rank, reply) for rank, reply in sorted(self._failures, key=operator.itemgetter(0))]
        failure = RankErrors.of(errors, call=self.outcome.label, ranks=len(self._values))
        if self._repeats is None or not await self._repeats.allow(failure):
            raise failure
        await all_came.wait()
        return await self._send_again()

    async def _send_again(self) -> Any:
        await workers_there(self._group)
        with self._lock:
            self._failures, self._sequences, self._all_came = (), array("Q"), None
        line = self._group._line
        # From here on an interruption is seen by send itself: this task is not the work of the call any more.
        with line.lock:
            if not self._over:
                self.send()
        return _SENT_AGAIN

    def _collected(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            self._end(None)
        elif (error := task.exception()) is not None:
            self._end(error)
        elif task.result() is not _SENT_AGAIN:
            self._succeed(task.result())

    def _error(self, rank: int, reply: Reply) -> BaseException:
        """What a rank failed with."""
        group, method = self._group._home, self._group._method_of(self._registration)
        if isinstance(reply, Lost):
            return group._explain(rank, method, self._sequences[rank], reply.error)
        if isinstance(reply, Failed):
            return reply.to_error(group=group.name, rank=rank, method=method)
        message = f"{self.outcome.label} was cancelled by its own code on rank {rank}"
        return WorkerError(message, group=group.name, rank=rank, method=method)

    @property
    def is_sent(self) -> bool:
        """Whether the workers know of it."""
        return bool(self._sequences)

    @property
    def missing(self) -> list[int]:
        """Ranks that it was sent to and that have not replied."""
        waiting = self._waiting
        return [rank for rank in range(len(self._sequences)) if waiting >> rank & 1]

    # ---------------------------------------------------------------------------------------------------------- the end

    def cancel(self) -> None:
        """End it: it is never sent, or cancelled in the workers. From any thread, once the outcome is complete."""
        self._stop()
        self._group._tally.add("failed" if self.outcome.state == "failed" else "cancelled")

    def close(self) -> None:
        """The group is shut down."""
        self._stop()
        message = f"worker group {self._group.name} was shut down while {self.outcome.label} was going on"
        if self.outcome.fail(GroupClosedError(message)):
            self._group._tally.add("failed")

    def _stop(self) -> None:
        with self._lock:
            self._over = True
            work = self._work
        if work is not None:
            work.cancel()
        self._abandon()
        self._group._under_way.discard(self)

    def _succeed(self, value: Any) -> None:
        self._over = True
        self._group._under_way.discard(self)
        if self.outcome.succeed(value):
            self._group._tally.add_done(value.header.size_bytes if isinstance(value, Plan) else 0)

    def _end(self, error: BaseException | None) -> None:
        self._over = True
        self._group._under_way.discard(self)
        if error is None:
            if self.outcome.cancel():
                self._group._tally.add("cancelled")
        elif self.outcome.fail(error):
            self._group._tally.add("failed")

    def _abandon(self) -> None:
        """Cancel what is still going on."""
        with self._lock:
            waiting = self.missing
        for rank in waiting:
            self._group._cancel(rank, self._sequences[rank])


def _part(plan: Plan, share: Share, method: str) -> Plan:
    part: Plan = collect(Dispatch.DP_COMPUTE_PROTO, [plan], [share], group=None, method=method)
    return part
