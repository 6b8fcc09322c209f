"""Retry: when a call is made again. Only calls of methods that are registered as idempotent ever are.

What decides is whose fault a failure is (:mod:`asyncrl.errors`): an :class:`InfrastructureError` is repeated as often
as the method allows; a death is repeated if the :class:`Restart` of the group brings the process back; errors of user
code and bad data never are. A call is repeated as a whole, on all its ranks: they may work together.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncrl.errors import DispatchError, GroupClosedError, InfrastructureError, RankErrors, WorkerDiedError

if TYPE_CHECKING:
    from asyncrl.single_controller.restart import Lives

__all__ = ["Repeats", "Retry", "doubled"]


def doubled(pause_s: float, times: int) -> float:
    """A pause, doubled so often; as often as a float can hold, at most.

    >>> doubled(0.5, 2), doubled(0.0, 5000)
    (2.0, 0.0)
    """
    return pause_s * 2.0 ** min(times, sys.float_info.max_exp - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How often a call may be repeated after failures of the infrastructure, and after which pause.

    The pause doubles from ``backoff_s`` up to ``max_backoff_s``.

        >>> [Retry(times=4, backoff_s=1.0, max_backoff_s=3.0).pause_s(number) for number in range(4)]
        [1.0, 2.0, 3.0, 3.0]

    Raises:
        DispatchError: ``times`` is below 1, or ``backoff_s`` negative or above ``max_backoff_s``.
    """

    times: int = 3
    backoff_s: float = 0.1
    max_backoff_s: float = 5.0

    def __post_init__(self) -> None:
        if self.times < 1 or not 0 <= self.backoff_s <= self.max_backoff_s:
            raise DispatchError(f"a retry needs times >= 1 and 0 <= backoff_s <= max_backoff_s, got {self}")

    def pause_s(self, number: int) -> float:
        """Seconds before repetition ``number``, counted from 0.

        >>> Retry(backoff_s=0.5).pause_s(2)
        2.0
        """
        return min(doubled(self.backoff_s, number), self.max_backoff_s)


class Repeats:
    """The repetitions of one call.

    Args:
        retry: how often after failures other than deaths; None for never.
        lives: of the processes that the call runs in.
    """

    __slots__ = ("_lives", "_retry", "_since", "_used")

    def __init__(self, retry: Retry | None, lives: Lives) -> None:
        self._retry = retry
        self._lives = lives
        self._used = 0
        self._since: Sequence[int] = ()

    def sent(self) -> None:
        """The call goes to the processes that there are now."""
        self._since = tuple(self._lives.incarnations)

    async def allow(self, failure: BaseException) -> bool:
        """Whether to send the call again after ``failure``. Returns when it is time to. On the controller loop."""
        if isinstance(failure, WorkerDiedError):
            return await self._lives.replaced(_ranks(failure), self._since)
        if not isinstance(failure, InfrastructureError) or isinstance(failure, GroupClosedError):
            return False
        if self._retry is None or self._used == self._retry.times:
            return False
        self._used += 1
        await asyncio.sleep(self._retry.pause_s(self._used - 1))
        return True


def _ranks(failure: WorkerDiedError) -> Iterable[int]:
    if isinstance(failure, RankErrors):
        return [each.rank for each in failure.exceptions if isinstance(each, WorkerDiedError)]
    return [failure.rank]
