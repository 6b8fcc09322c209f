"""Invocation: one call of a worker group, from the caller to the ranks and back.

    waiting --(its arguments are ready)--> sent --(every rank has replied)--> finished
       '-----(an argument failed)------------'-----(a rank failed)---------------^
       '-----(cancelled, the group closed)---'-----------------------------------'

A call whose arguments are ready is sent by the thread that makes it, and the thread that receives the last reply makes
the result: no other thread runs in between. A call that has to wait does so in a task on the controller loop; the
workers have not received it yet, and later calls overtake it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import operator
import threading
from array import array
from collections import OrderedDict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, pairwise
from typing import TYPE_CHECKING, Any, Protocol

from asyncrl.data.future import DataProtoFuture
from asyncrl.data.plan import Block, Plan
from asyncrl.data.proto import DataProto
from asyncrl.errors import AsyncRLError, DispatchError, GroupClosedError, RankErrors, WorkerDiedError, WorkerError
from asyncrl.single_controller.call import (
    NO_VALUE,
    Arguments,
    AttemptLost,
    Call,
    Cancelled,
    Failed,
    Reply,
    ReturnedBatch,
)
from asyncrl.single_controller.decorator import PROTO_MODES, Dispatch, Execute
from asyncrl.single_controller.mesh import Mesh, MeshDispatch
from asyncrl.single_controller.restart import workers_ready
from asyncrl.single_controller.scatter import NO_ROWS, Scatter, Share, collect, to_fetch

if TYPE_CHECKING:
    from asyncrl.data.future import Outcome, Progress
    from asyncrl.data.schema import Declared
    from asyncrl.runtime import Work
    from asyncrl.single_controller.decorator import Registration
    from asyncrl.single_controller.mesh import MeshQuery
    from asyncrl.single_controller.restart import WorkerRestarts
    from asyncrl.single_controller.worker_group import WorkerGroup

# ruff: noqa: SLF001  a group and its invocations work on each other's state
# pyright: reportPrivateUsage=false

REPLY_WAIT_S = 0.02
"""How long a thread that blocks for a result waits for the replies itself, before the controller loop does it."""

SIBLING_GRACE_S = 0.05
"""After the first failure of a call, how long its other ranks may run on: they often fail for the same reason."""

DEATH_WAIT_S = 10.0
"""How much longer a call that may be sent again waits for ranks that answer no cancellation: they may have died.

The peers of a process report the broken connection before its death is known.
"""

_SENT: Any = object()
"""The result of a task that has sent its call, which is not finished by that."""

_DROPPED: Any = ()
"""In place of the arguments and values of a finished call: its future, which refers to it, keeps its result alone."""


# ------------------------------------------------------------------------------------------------- the order of calls


class CallOrder:
    """Makes calls reach the workers in the order of the program, the same on all ranks.

    A group and the roles in its workers share one. A call that does not have to wait is sent at once unless earlier
    calls are pending. The others take tickets on the controller loop, in the order of the program, and wait behind two
    barriers: no call overtakes one whose workers or mesh are not known yet; and no synchronous method overtakes one
    that is not sent, unless that one waits for its arguments.

    Attributes:
        lock: held while a call is sent; methods about sequence numbers run under it.
        pending: number of calls that are made, not sent, and not to be overtaken.
        resolving: calls that wait for their workers, or for their mesh.
        unsent: calls that are not sent and do not wait for their arguments.
    """

    __slots__ = ("_sequences", "lock", "pending", "resolving", "unsent")

    def __init__(self, ranks: int) -> None:
        self.lock = threading.Lock()
        self.pending = 0
        self.resolving = TicketQueue()
        self.unsent = TicketQueue()
        self._sequences = [0] * ranks

    def take_sequence(self, rank: int) -> int:
        """Return the number of the next call to a rank, and count it."""
        number = self._sequences[rank]
        self._sequences[rank] += 1
        return number

    def next_sequence(self, rank: int) -> int:
        return self._sequences[rank]

    def begin_at(self, numbers: Sequence[int]) -> None:
        self._sequences = list(numbers)

    def leave(self) -> None:
        """Count a pending call less: it has been sent, or may be overtaken."""
        with self.lock:
            self.pending -= 1


class TicketQueue:
    """A queue of tickets: events, set in the order in which they were taken, each when all before it have left.

    On one event loop.
    """

    __slots__ = ("_tickets",)

    def __init__(self) -> None:
        self._tickets: OrderedDict[asyncio.Event, None] = OrderedDict()

    @contextlib.contextmanager
    def ticket(self) -> Generator[asyncio.Event]:
        """Take a ticket behind all others; it leaves the queue at the end of its ``with``."""
        ticket = asyncio.Event()
        self._tickets[ticket] = None
        try:
            self._set_first()
            yield ticket
        finally:
            self.leave(ticket)

    def leave(self, ticket: asyncio.Event) -> None:
        """Hold up no later ticket any more. Idempotent."""
        self._tickets.pop(ticket, None)
        self._set_first()

    def _set_first(self) -> None:
        for first in islice(self._tickets, 1):
            first.set()


# ------------------------------------------------------------------------------------------------------------ one call


class PendingReply(Protocol):
    """A reply of a rank that has not been received, and has no watcher yet."""

    def watch(self) -> None:
        """Pass the reply to the invocation when it arrives."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Invocation:
    """One call of ``group``, whose result goes to ``outcome``. ``restarts``: those that repeat it, if any do."""

    _group: WorkerGroup
    _registration: Registration
    _scatter: Scatter
    outcome: Outcome[Any]
    progress: Progress
    _restarts: WorkerRestarts | None = None
    thread: int = field(default_factory=threading.get_ident)
    declared: Declared | None = None
    _mesh: Mesh | None = None
    _sent_to: Sequence[int] = ()
    """By rank, the number of the process that it was sent to, where such are replaced."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _finished: bool = False
    _is_pending: bool = False
    _work: Work | None = None
    _shares: Sequence[Share] = ()
    _sequences: array[int] = field(default_factory=lambda: array("Q"))
    _waiting: int = 0
    """Bits of the ranks that have not replied."""
    _missing: int = 0
    """Number of replies that are not handled yet."""
    _values: list[Any] = _DROPPED
    _failures: tuple[tuple[int, Reply], ...] = ()
    _all_replied: asyncio.Event | None = None
    _unwatched: Sequence[PendingReply] = ()

    def __post_init__(self) -> None:
        self._group._active.add(self)

    # --------------------------------------------------------------------------------------------------------- sending

    def begin(self) -> None:
        """Send the call now if it does not have to wait, otherwise as soon as possible. In the caller's thread."""
        group = self._group
        order = group._order
        error: BaseException | None = None
        try:
            with order.lock:
                now = group._can_send_from_caller() and order.pending == 0 and self._scatter.is_ready
                if not now or self._restarts is not None:
                    self._scatter.snapshot()  # the caller may change its batches; what is sent again is the same
                if now:
                    error = self._try_to_send()
                else:
                    order.pending += 1
                    self._is_pending = True
        except BaseException:
            group._active.discard(self)
            raise
        if not now:
            work = group._owner.spawn(self._wait_and_send, self._after_task)
            with self._lock:
                self._work = self._work or work  # unless the call has been sent and has failed by now
        elif error is not None:
            self._end(error)

    async def _wait_and_send(self) -> Any:
        group, scatter = self._group, self._scatter
        order = group._order
        with order.resolving.ticket() as resolving, order.unsent.ticket() as unsent:
            await resolving.wait()
            await workers_ready(group)
            query = self._mesh_query()
            if query is not None:
                await query.first_reply.wait()
            order.resolving.leave(resolving)
            if not self._registration.is_async:
                await unsent.wait()
            if query is not None:
                scatter.mesh = await query.mesh()
            await self._arguments_completed(unsent)
            if isinstance(self._registration.dispatch_mode, dict):
                scatter.apply_custom()
                await self._arguments_completed(unsent)
            await workers_ready(group)  # some may have died meanwhile, and be replaced
            with order.lock:
                error = self._try_to_send()
        if error is not None:
            raise error
        return _SENT

    def _mesh_query(self) -> MeshQuery | None:
        mode = self._registration.dispatch_mode
        if not isinstance(mode, MeshDispatch) or self._scatter.mesh is not None:
            return None
        return self._group._meshes.query(mode.mesh_name)

    def _stop_being_pending(self) -> None:
        if self._is_pending:
            self._is_pending = False
            self._group._order.leave()

    async def _arguments_completed(self, unsent: asyncio.Event) -> None:
        """Wait for the futures among the arguments; later calls, which may make these, overtake this one meanwhile."""
        if not all(future.done() for future in self._scatter.futures):
            self._group._order.unsent.leave(unsent)
            self._stop_being_pending()
        for future in self._scatter.futures:
            try:
                await future.completed()
            except AsyncRLError as error:
                raise error.copy_with_note(f"it was an argument of {self.outcome.label}, which was not called") from (
                    error.__cause__
                )

    def _try_to_send(self) -> BaseException | None:
        """Return the error of :meth:`send`, to be reported when the order's lock is free: reporting wakes others."""
        try:
            self.send()
        except Exception as error:  # noqa: BLE001  whatever it is, the call fails with it
            return error
        return None

    def send(self) -> None:
        """Send the call to all ranks; no other call of these workers comes between. Under the order's lock."""
        if self._finished:
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
        restarts = group._worker_owner._restarts
        if restarts.policy is not None:
            self._sent_to = tuple(restarts.incarnations)
        self._values = [None] * ranks
        self._waiting = (1 << ranks) - 1
        replies: list[PendingReply] = []
        self._missing = ranks
        call: Call | None = None
        for rank, each in enumerate(arguments):
            if call is None or each is not call.arguments:
                call = self._call_with(each)
            sequence = group._order.take_sequence(rank)
            self._sequences.append(sequence)
            try:
                reply = group._submit(rank, call, sequence, self)
            except BaseException:
                group._skip(rank, sequence)
                self._waiting &= (1 << rank) - 1
                self._cancel_ranks()
                raise
            if reply is not None:
                replies.append(reply)
        group._sent()
        if replies:
            self._unwatched = replies
            group._loop.watch_soon(self)
        # The arguments are not kept while workers compute, unless they may be sent again.
        self._mesh = scatter.mesh
        if self._restarts is None:
            self._scatter = _DROPPED
        self._cancel_if_finished()

    def _cancel_if_finished(self) -> None:
        """Cancel the ranks if another thread has cancelled the call while this one was sending it."""
        if self._finished:
            self._cancel_ranks()

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

    # -------------------------------------------------------------------------------------------------------- replying

    def watch(self) -> None:
        """Handle replies as they arrive, from now on. From any thread.

        Every call is watched sooner or later: by the first that awaits or queries it, or by the controller loop a
        moment after the call was made. Only a thread that blocks for the result right away is faster without.
        """
        with self._lock:
            replies, self._unwatched = self._unwatched, ()
        for reply in replies:
            reply.watch()

    def wait_here(self, timeout_s: float | None) -> None:
        """Receive the replies in this thread if they arrive soon; otherwise watch them."""
        with self._lock:
            replies, self._unwatched = self._unwatched, ()
        if not replies:
            return
        received = False
        try:
            timeout_s = REPLY_WAIT_S if timeout_s is None else min(REPLY_WAIT_S, timeout_s)
            received = self._group._wait_for_replies(replies, timeout_s)
        finally:
            if not received:
                for reply in replies:
                    reply.watch()

    def handle_reply(self, rank: int, reply: Reply, block: Block | None = None) -> None:
        """Handle the reply of a rank; ``block`` holds the batch that it keeps. In any thread; never raises."""
        failed = isinstance(reply, NO_VALUE)
        with self._lock:
            if not self._waiting >> rank & 1:
                return  # received by a blocking thread that was interrupted, and then watched
            self._waiting &= ~(1 << rank)
        if failed:
            self.progress.ended(rank, "cancelled" if isinstance(reply, Cancelled) else "failed")
        elif isinstance(reply, ReturnedBatch):
            assert block is not None
            self._handle_batch(rank, Plan.shard(block, reply.header))
        elif isinstance(reply, Plan):
            self._handle_batch(rank, reply)
        else:
            self._values[rank] = reply
            self.progress.ended(rank, "done")
        with self._lock:
            self._missing -= 1
            if failed:
                self._failures += ((rank, reply),)
            first_failure = failed and len(self._failures) == 1
            complete, all_replied = self._missing == 0, self._all_replied
            finished = self._finished
            if finished and complete:  # what was cancelled, or failed on another rank, keeps nothing
                self._scatter = self._values = _DROPPED
        if finished or self._group._loop.is_closed:  # at the end of a program there are no waiters
            return
        if complete and all_replied is not None:
            self._group._loop.notify(all_replied.set)
        if first_failure:
            work = self._group._owner.spawn(self._fail, self._after_task)
            with self._lock:
                self._work = work
        elif complete and not self._failures:
            self._finish()

    def _handle_batch(self, rank: int, plan: Plan) -> None:
        self._values[rank] = plan
        # The parts of a call that may be sent again are not given out before it is complete.
        share = self._shares[rank] if rank < len(self._shares) else NO_ROWS
        make = functools.partial(_part, plan, share, self.outcome.label) if self._restarts is None else None
        self.progress.ended(rank, "done", header=plan.header, make=make)

    def _finish(self) -> None:
        if isinstance(self._registration.dispatch_mode, dict):
            self._work = self._group._owner.spawn(self._collect_custom, self._after_task)
            return
        try:
            value = self._collect()
        except Exception as error:  # noqa: BLE001  whatever it is, the call fails with it
            self._end(error)
        else:
            self._succeed(value)

    def _collect(self) -> Any:
        registration = self._registration
        mode, label = registration.dispatch_mode, self.outcome.label
        single = (
            registration.execute_mode is Execute.RANK_ZERO and not isinstance(mode, dict) and mode not in PROTO_MODES
        )
        if single:
            value = self._values[0]
        else:
            value = collect(mode, self._values, self._shares, group=self._group, method=label, mesh=self._mesh)
        if self.declared is not None and isinstance(value, Plan):
            self.declared.check(value.header, label)
        if not registration.returns_batch or isinstance(value, Plan | DataProtoFuture):
            return value
        if isinstance(value, DataProto):
            return Plan.of(value)
        raise DispatchError(f"{label} must return a DataProto, as it is annotated, and returned {type(value).__name__}")

    async def _collect_custom(self) -> Any:
        value = self._collect()
        return await value.plan() if isinstance(value, DataProtoFuture) else value

    async def _fail(self) -> Any:
        """Wait a moment for the other ranks, then cancel them, and raise the failures or send the call again."""
        all_replied = asyncio.Event()
        with self._lock:
            self._all_replied = all_replied
            if self._missing == 0:
                all_replied.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SIBLING_GRACE_S):
                await all_replied.wait()
        failed = self._failures
        self._cancel_ranks()
        if self._restarts is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DEATH_WAIT_S):
                    await all_replied.wait()
            failed += tuple(each for each in self._failures[len(failed) :] if isinstance(each[1], AttemptLost))
        failures = sorted(failed, key=operator.itemgetter(0))
        errors = [self._error(rank, reply) for rank, reply in failures]
        failure = RankErrors.of(errors, call=self.outcome.label, ranks=len(self._values))
        died: list[int] = []
        for (rank, reply), error in zip(failures, errors, strict=True):
            if isinstance(reply, AttemptLost) and isinstance(error, WorkerDiedError):  # not one of another group
                died.append(rank)
                if self._sent_to:
                    # The group may hear of it later than this call: the next one is for the worker that replaces it.
                    self._group._worker_owner._restarts.died(rank, self._sent_to[rank], error)
        if self._restarts is None or not await self._restarts.allow_again(died, self._sent_to):
            raise failure
        await all_replied.wait()
        return await self._send_again()

    async def _send_again(self) -> Any:
        await workers_ready(self._group)
        with self._lock:
            self._failures, self._sequences, self._all_replied = (), array("Q"), None
        # From here on `send` itself notices an interruption: this task is no longer the call's work.
        with self._group._order.lock:
            if not self._finished:
                self.send()
        return _SENT

    def _after_task(self, task: asyncio.Task[Any]) -> None:
        self._stop_being_pending()
        if task.cancelled():
            self._end(None)
        elif (error := task.exception()) is not None:
            self._end(error)
        elif task.result() is not _SENT:
            self._succeed(task.result())

    def _error(self, rank: int, reply: Reply) -> BaseException:
        """Return the error of a rank whose reply has no value."""
        group, method = self._group._worker_owner, self._group._method_of(self._registration)
        if isinstance(reply, AttemptLost):
            return group._explain(rank, method, reply.error)
        if isinstance(reply, Failed):
            return reply.to_error(group=group.name, rank=rank, method=method)
        message = f"{self.outcome.label} was cancelled by its own code on rank {rank}"
        return WorkerError(message, group=group.name, rank=rank, method=method)

    @property
    def is_sent(self) -> bool:
        return bool(self._sequences)

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks that the call was sent to and that have not replied."""
        waiting = self._waiting
        return [rank for rank in range(len(self._sequences)) if waiting >> rank & 1]

    # ---------------------------------------------------------------------------------------------------------- ending

    def cancel(self) -> None:
        """Never send the call, or cancel it in the workers. From any thread, once the outcome is complete."""
        self._stop()
        self._group._counts.add(self.outcome.state)

    def interrupt(self) -> bool:
        """Cancel the call and its outcome; return whether it was unfinished."""
        if not self.outcome.cancel():
            return False
        self.cancel()
        return True

    def close(self) -> None:
        """End the call because its group is shut down."""
        self._stop()
        message = f"worker group {self._group.name} was shut down before {self.outcome.label} finished"
        if self.outcome.fail(GroupClosedError(message)):
            self._group._counts.add("failed")

    def _stop(self) -> None:
        with self._lock:
            self._finished = True
            work = self._work
        if work is not None:
            work.cancel()
        self._cancel_ranks()
        self._group._active.discard(self)

    def _succeed(self, value: Any) -> None:
        self._finished = True
        self._scatter = self._values = _DROPPED
        self._group._active.discard(self)
        if self.outcome.succeed(value):
            self._group._counts.add("done", value.header.size_bytes if isinstance(value, Plan) else 0)

    def _end(self, error: BaseException | None) -> None:
        """Complete the outcome with an error, or cancel it."""
        self._finished = True
        self._scatter, self._values = _DROPPED, [None] * len(self._values)  # other ranks may still reply
        self._group._active.discard(self)
        if self.outcome.cancel() if error is None else self.outcome.fail(error):
            self._group._counts.add(self.outcome.state)

    def _cancel_ranks(self) -> None:
        with self._lock:
            waiting = self.missing_ranks
        for rank in waiting:
            self._group._cancel(rank, self._sequences[rank])


def _part(plan: Plan, share: Share, method: str) -> Plan:
    part: Plan = collect(Dispatch.DP_COMPUTE_PROTO, [plan], [share], group=None, method=method)
    return part
