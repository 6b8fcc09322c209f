"""Who may begin next: bounded queues, and fairness between tenants. Pure: tickets go in, grants come out.

At most ``max_running`` tickets are granted at a time. The others wait, each tenant in a queue of its own, first come
first served. Between tenants the one that has been given least goes first, in units of cost (expected tokens) over the
tenant's share: start-time fair queueing (Goyal, Vin and Cheng, 1996). So what two tenants with work waiting have been
given never differs by more than their largest tickets, and a tenant that comes back has saved up nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncrl.errors import OverloadedError

__all__ = ["Admission", "AdmissionLimits", "Ticket"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """How much is taken in.

        >>> door = Admission(AdmissionLimits(max_running=1, shares={"paid": 3.0}))
        >>> tickets = [Ticket(tenant, 6.0) for tenant in ("free", "free", "paid", "paid", "paid")]
        >>> for ticket in tickets:
        ...     door.enter(ticket)
        >>> order = [tickets[0]]
        >>> while door.running:
        ...     order += door.leave(order[-1])
        >>> [ticket.tenant for ticket in order]  # three of the one tenant for one of the other
        ['free', 'paid', 'paid', 'paid', 'free']

    Attributes:
        max_running: requests granted at a time.
        max_waiting: requests that wait, of all tenants together.
        max_waiting_per_tenant: requests of one tenant that wait.
        shares: relative shares of tenants; 1.0 for who is not named.

    Raises:
        ValueError: nobody could ever run, a number of those who may wait is negative, or a share is not positive.
    """

    max_running: int = 1024
    max_waiting: int = 16_384
    max_waiting_per_tenant: int = 16_384
    shares: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_running < 1:
            raise ValueError(f"max_running must be at least 1, got {self.max_running}")
        if min(self.max_waiting, self.max_waiting_per_tenant) < 0:
            raise ValueError("the number of requests that may wait cannot be negative")
        if any(share <= 0 for share in self.shares.values()):
            raise ValueError("a tenant's share must be positive")


@dataclass(slots=True, eq=False)
class Ticket:
    """One request at the door. ``cost`` is in expected tokens; ``granted`` while it may run.

    >>> ticket = Ticket("a", 5.0)
    >>> Admission().enter(ticket)
    >>> ticket.granted
    True
    """

    tenant: str
    cost: float
    granted: bool = False


@dataclass(slots=True)
class _Queue:
    tickets: deque[Ticket] = field(default_factory=deque)
    given: float = 0.0  # virtual time up to which the tenant has been given its share


class Admission:
    """The state machine. Events: :meth:`enter`, :meth:`leave`; both may grant. ``running`` and ``waiting`` are counts.

    >>> door = Admission(AdmissionLimits(max_running=1))
    >>> first, second = Ticket("a", 5.0), Ticket("b", 5.0)
    >>> door.enter(first), door.enter(second), first.granted, second.granted
    (None, None, True, False)
    >>> door.leave(first) == [second]
    True
    """

    def __init__(self, limits: AdmissionLimits | None = None) -> None:
        self._limits = limits or AdmissionLimits()
        self._queues: dict[str, _Queue] = {}
        self._now = 0.0
        self.running = 0
        self.waiting = 0

    def enter(self, ticket: Ticket, *, retry_after_s: float = 1.0) -> None:
        """Grant the ticket, or let it wait.

            >>> door = Admission(AdmissionLimits(max_running=1, max_waiting=1))
            >>> door.enter(Ticket("a", 5.0))
            >>> door.enter(Ticket("b", 5.0))
            >>> door.running, door.waiting
            (1, 1)
            >>> door.enter(Ticket("c", 5.0))
            Traceback (most recent call last):
            asyncrl.errors.OverloadedError: 1 requests wait already, 1 may; try again later

        Raises:
            OverloadedError: a queue is full; carries ``retry_after_s``. Nothing has changed then.
        """
        limits = self._limits
        if self.running < limits.max_running and not self.waiting:
            self._grant(ticket, self._queue_of(ticket.tenant))
            return
        queue = self._queues.get(ticket.tenant)
        own = 0 if queue is None else len(queue.tickets)
        if self.waiting >= limits.max_waiting:
            raise OverloadedError(
                f"{self.waiting} requests wait already, {limits.max_waiting} may; try again later",
                retry_after_s=retry_after_s,
            )
        if own >= limits.max_waiting_per_tenant:
            raise OverloadedError(
                f"{own} requests of {ticket.tenant!r} wait already, {limits.max_waiting_per_tenant} may; "
                "try again later",
                retry_after_s=retry_after_s,
                tenant=ticket.tenant,
            )
        self._queue_of(ticket.tenant).tickets.append(ticket)
        self.waiting += 1

    def leave(self, ticket: Ticket) -> list[Ticket]:
        """The request has ended, or does not want to wait any longer. Returns the tickets granted in its place.

        Each ticket that entered leaves once.

        >>> door = Admission(AdmissionLimits(max_running=1))
        >>> runs, waits, gives_up = Ticket("a", 5.0), Ticket("b", 5.0), Ticket("b", 5.0)
        >>> for ticket in (runs, waits, gives_up):
        ...     door.enter(ticket)
        >>> door.leave(gives_up)
        []
        >>> door.leave(runs) == [waits], door.running, door.waiting
        (True, 1, 0)
        """
        if ticket.granted:
            ticket.granted = False
            self.running -= 1
        else:
            self._queues[ticket.tenant].tickets.remove(ticket)
            self.waiting -= 1
        granted = []
        while self.waiting and self.running < self._limits.max_running:
            tenant = min((name for name, queue in self._queues.items() if queue.tickets), key=self._turn)
            queue = self._queues[tenant]
            granted.append(queue.tickets.popleft())
            self.waiting -= 1
            self._grant(granted[-1], queue)
        self._forget()
        return granted

    def _turn(self, tenant: str) -> float:
        return max(self._queues[tenant].given, self._now)

    def _queue_of(self, tenant: str) -> _Queue:
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = _Queue(given=self._now)
        return queue

    def _grant(self, ticket: Ticket, queue: _Queue) -> None:
        start = max(queue.given, self._now)
        self._now = start
        queue.given = start + ticket.cost / self._limits.shares.get(ticket.tenant, 1.0)
        ticket.granted = True
        self.running += 1

    def _forget(self) -> None:
        """Tenants that are not ahead of anybody and have nothing waiting are as good as new."""
        for name in [name for name, queue in self._queues.items() if not queue.tickets and queue.given <= self._now]:
            del self._queues[name]
