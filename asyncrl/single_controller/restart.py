"""Restart: what becomes of a group when the process of a rank dies.

    alive --(its process dies)--> dead --(the policy allows)--> made again --(constructed)--> alive
                                    '--(no policy, spent, no seats, the constructor raises)--> gone

A worker that is made again has the same rank, class, arguments and environment, and none of the state of the old one.
While workers are made again, calls wait (as they do at the start of the group); so do those in the middle of a chain.
Calls that were under way fail with :class:`WorkerDiedError`, except those of idempotent methods: they are sent again,
with the same inputs, which outlive the process that made them. When the policy is spent, everything fails with the
last death; when somebody has ended the group, or its seats are gone, with :class:`GroupClosedError`.

Deaths arrive as news: each process holds one call that never returns, and its failure is the news. Nobody polls.
"""

# ruff: noqa: SLF001  a group and the lives of its workers are one machine in two files
# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from asyncrl.data.pending import Future
from asyncrl.errors import DispatchError, RankErrors, WorkerDiedError
from asyncrl.single_controller.retry import doubled

if TYPE_CHECKING:
    from asyncrl.single_controller.worker_group import WorkerGroup

__all__ = ["Lives", "Restart", "workers_there"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """The restart policy of a group.

        >>> with LocalWorkerGroup(ClassWithInitArgs(Greeter), restart=Restart(backoff_s=0.0)) as greeters:
        ...     greeters.kill(0)
        ...     greeters.greet("hi").result()  # by a new worker
        ['hi, from 0 of 1']

    Attributes:
        max_restarts: how often in the life of the group, whatever ranks it takes each time.
        scope: ``"group"`` makes all workers again when one dies: what workers with collectives need, whose
            communicators die with any of them. ``"worker"`` makes the dead ones again, for workers that do not talk to
            each other.
        backoff_s: pause before; doubled each time.
        prepare: a method without arguments that new workers run before any call, such as verl's ``"init_model"``.

    Raises:
        DispatchError: ``max_restarts`` is below 1, ``backoff_s`` negative, or there is no such scope.
    """

    max_restarts: int = 3
    scope: Literal["worker", "group"] = "group"
    backoff_s: float = 0.05
    prepare: str = ""

    def __post_init__(self) -> None:
        if self.max_restarts < 1 or not self.backoff_s >= 0 or self.scope not in ("worker", "group"):
            raise DispatchError(f"a restart needs max_restarts >= 1, backoff_s >= 0 and a scope, got {self}")

    def pause_s(self, number: int) -> float:
        """Seconds before restart ``number``, counted from 0.

        >>> Restart(backoff_s=0.5).pause_s(2)
        2.0
        """
        return doubled(self.backoff_s, number)


async def workers_there(group: WorkerGroup) -> None:
    """Wait until every worker is constructed, at this moment. On the controller loop."""
    while (ready := group._ready).outcome.state != "done":
        await ready.completed()


class Lives:
    """The processes of a group's workers, one after another for each rank. On the controller loop, but for reading.

    Attributes:
        policy: None leaves the dead alone.
        incarnations: which process of each rank is the current one, from 0.
        restarts: how often workers have been made again.
        deaths: of processes of a group that was neither starting nor closed.
    """

    def __init__(self, group: WorkerGroup, policy: Restart | None) -> None:
        self._group = weakref.ref(group)
        self.policy = policy
        self.incarnations = [0] * group.world_size
        self.restarts = 0
        self.deaths = 0
        self._dead: dict[int, WorkerDiedError] = {}
        self._begun = False
        self._working = False
        self._gone = False
        self._changed = asyncio.Event()

    @property
    def dead(self) -> tuple[int, ...]:
        """Ranks whose process is gone and not yet made again."""
        return tuple(sorted(self._dead))

    def begin(self) -> None:
        """All workers are constructed."""
        self._begun = True

    def died(self, rank: int, incarnation: int, error: WorkerDiedError) -> None:
        """News of a death."""
        group = self._group()
        if group is None or group._closed or self.incarnations[rank] != incarnation or rank in self._dead:
            return
        if not self._begun:
            return  # that failure is the start's
        self._dead[rank] = error
        self.deaths += 1
        if self._working:
            return
        if self.policy is None or self.restarts >= self.policy.max_restarts:
            logger.error("%s; it is not made again", error)
            self._gone = True
            self._tell()
            return
        self._working = True
        ready: Future[None] = Future(group._loop, f"restart of {group.name}")
        group._is_ready_with(ready)
        ready.run(self._make_again, group._owner)
        ready.outcome.error()  # whoever waits for it tells of it

    def left(self) -> None:
        """The workers are no longer this program's to make again."""
        self._gone = True
        self._tell()

    async def replaced(self, ranks: Iterable[int], since: Sequence[int]) -> bool:
        """Wait until these ranks work again, in other processes than ``since``; False if they never will."""
        waiting = list(ranks)
        while not (self.policy is None or self._gone):
            # One that is being made has its number already, and is not to be called yet.
            if not self._working and all(self.incarnations[rank] > since[rank] for rank in waiting):
                return True
            await self._changed.wait()
        return False

    async def _make_again(self) -> None:
        group, policy = self._group(), self.policy
        assert group is not None
        assert policy is not None
        try:
            while self._dead:
                errors = list(self._dead.values())
                if self.restarts >= policy.max_restarts:
                    raise errors[0]
                await asyncio.sleep(policy.pause_s(self.restarts))
                self.restarts += 1
                ranks = sorted(range(group.world_size) if policy.scope == "group" else self._dead)
                logger.warning("%s; making ranks %s again (%d)", errors[0], ranks, self.restarts)
                await self._replace(group, ranks, policy.prepare)
        except BaseException:
            self._gone = True
            raise
        finally:
            self._working = False
            self._tell()

    async def _replace(self, group: WorkerGroup, ranks: Sequence[int], prepare: str) -> None:
        with group._line.lock:  # a call that another thread is sending goes to the old ones, and knows it
            for rank in ranks:
                self._dead.pop(rank, None)
                self.incarnations[rank] += 1
        try:
            failures = await group._replace(ranks, prepare)
        except WorkerDiedError as error:
            self._dead.setdefault(error.rank, error)
            return
        errors = [
            failure.to_error(group=group.name, rank=rank, method="__init__")
            for rank, failure in zip(ranks, failures, strict=True)
            if failure is not None
        ]
        if errors:
            raise RankErrors.of(errors, call=f"the restart of {group.name}", ranks=len(ranks))

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
