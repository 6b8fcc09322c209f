"""Restart: what happens to groups and their calls when workers die.

A :class:`Restart` policy replaces the workers whose processes died::

    alive --(its process dies)--> dead --(the policy allows)--> replaced --(constructed)--> alive
                                    '--(no policy, spent, no resources, the constructor raises)--> lost

A new worker has the same rank, class, arguments and environment as the one before, and none of its state. While workers
are replaced, calls wait, as they do at the start of the group. Active calls fail with :class:`WorkerDiedError`, except
those of idempotent methods: they are sent again, to all their ranks, which may work together, with the same inputs,
which outlive the process that made them. No other failure is repeated. When the policy is spent, every call fails with
the last death; when the group was ended from outside, or its placement groups are gone, with :class:`GroupClosedError`.

Deaths are reported, not polled: each process holds one call that never returns, and whose failure reports the death.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from asyncrl.data.future import Future
from asyncrl.errors import DispatchError, WorkerDiedError

if TYPE_CHECKING:
    from asyncrl.single_controller.worker_group import WorkerGroup

# ruff: noqa: SLF001  WorkerRestarts is a part of its group
# pyright: reportPrivateUsage=false

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """The restart policy of a group.

        >>> with LocalWorkerGroup(ClassWithInitArgs(Greeter), restart=Restart(backoff_s=0.0)) as greeters:
        ...     greeters.kill(0)
        ...     greeters.greet("hi").result()  # runs in a new worker
        ['hi, from 0 of 1']

    Attributes:
        max_restarts: of the group in total, however many ranks each of them replaces.
        scope: ``"group"`` replaces all workers when one dies: needed by workers with collectives, whose communicators
            die with any of them. ``"worker"`` replaces only the dead ones, for workers that do not communicate.
        backoff_s: pause before the first restart; doubled each time.
        prepare: a method without arguments that new workers run before any call, such as verl's ``"init_model"``.

    Raises:
        DispatchError: ``max_restarts`` is below 1, ``backoff_s`` negative, or ``scope`` unknown.
    """

    max_restarts: int = 3
    scope: Literal["worker", "group"] = "group"
    backoff_s: float = 0.05
    prepare: str = ""

    def __post_init__(self) -> None:
        if self.max_restarts < 1 or not self.backoff_s >= 0 or self.scope not in ("worker", "group"):
            raise DispatchError(
                f"a restart needs max_restarts >= 1, backoff_s >= 0 and scope 'worker' or 'group', got {self}"
            )

    def pause_s(self, number: int) -> float:
        """Return the seconds before restart ``number``, counted from 0; the doubling ends where a float would."""
        return self.backoff_s * 2.0 ** min(number, 1023)


async def workers_ready(group: WorkerGroup) -> None:
    """Wait until all workers are constructed at the same time. On the controller loop."""
    while (ready := group._ready).outcome.state != "done":
        await ready.completed()


class WorkerRestarts:
    """The deaths and restarts of a group's workers. Changed on the controller loop, read from any thread.

    ``policy`` None leaves dead workers dead. ``incarnations``: the number of the current process of each rank, from 0.
    ``restarts``: how often workers have been replaced. ``deaths``: of processes, between the start of the group and its
    shutdown.
    """

    def __init__(self, group: WorkerGroup, policy: Restart | None) -> None:
        self._group = weakref.ref(group)
        self.policy = policy
        self.incarnations = [0] * group.world_size
        self.restarts = 0
        self.deaths = 0
        self._dead: dict[int, WorkerDiedError] = {}
        self._started = False
        self._restarting = False
        self._lost = False
        self._changed = asyncio.Event()

    @property
    def dead(self) -> tuple[int, ...]:
        return tuple(sorted(self._dead))

    def begin(self) -> None:
        """Handle deaths from now on: all workers are constructed. The start itself handles earlier ones."""
        self._started = True

    def died(self, rank: int, incarnation: int, error: WorkerDiedError) -> None:
        group = self._group()
        if group is None or group._closed or self.incarnations[rank] != incarnation or rank in self._dead:
            return
        if not self._started:
            return
        self._dead[rank] = error
        self.deaths += 1
        if self._restarting:
            return
        if self.policy is None or self.restarts >= self.policy.max_restarts:
            logger.error("%s; the worker is not restarted", error)
            self.stop()
            return
        self._restarting = True
        ready: Future[None] = Future(group._loop, f"restart of {group.name}")
        group._set_ready(ready)
        ready.run(lambda: self._restart(group), group._owner)
        ready.outcome.error()  # those that wait for it report it

    def stop(self) -> None:
        self._lost = True
        self._notify()

    async def allow_again(self, lost: Collection[int], sent_to: Sequence[int]) -> bool:
        """Wait until a call that the ranks ``lost`` can be sent again, to others than ``sent_to``.

        Return False if it cannot, or if no rank lost it: no other failure is repeated.
        """
        while lost and not (self.policy is None or self._lost):
            # A worker under construction has its number already, but takes no calls yet.
            if not self._restarting and all(self.incarnations[rank] > sent_to[rank] for rank in lost):
                return True
            await self._changed.wait()
        return False

    async def _restart(self, group: WorkerGroup) -> None:
        policy = self.policy
        assert policy is not None
        try:
            while self._dead:
                errors = list(self._dead.values())
                if self.restarts >= policy.max_restarts:
                    raise errors[0]
                await asyncio.sleep(policy.pause_s(self.restarts))
                self.restarts += 1
                ranks = sorted(range(group.world_size) if policy.scope == "group" else self._dead)
                logger.warning("%s; restarting ranks %s (restart %d)", errors[0], ranks, self.restarts)
                await self._replace(group, ranks, policy.prepare)
        except BaseException:
            self._lost = True
            raise
        finally:
            self._restarting = False
            self._notify()

    async def _replace(self, group: WorkerGroup, ranks: Sequence[int], prepare: str) -> None:
        with group._order.lock:  # a call that another thread is sending goes to the old processes, and records it
            for rank in ranks:
                self._dead.pop(rank, None)
                self.incarnations[rank] += 1
        try:
            failures = await group._replace(ranks, prepare)
        except WorkerDiedError as error:
            for rank in ranks:  # none of the new ones is kept
                self._dead.setdefault(rank, error)
            return
        group._raise_failures(ranks, failures, what="restart")

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
