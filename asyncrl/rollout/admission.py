"""Which request may begin next, with fairness between tenants. Pure: tickets go in, grants come out.

At most ``max_running`` tickets are granted at a time. The others wait, each tenant in a queue of its own, first come
first served. Between tenants the one that has been given least goes first, in units of cost (expected tokens):
start-time fair queueing (Goyal, Vin and Cheng, 1996). So what two tenants with work waiting have been given never
differs by more than their largest tickets, and a tenant that comes back has saved up nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Ticket:
    """One request in the queue. ``cost`` is in expected tokens; ``granted`` while it may run."""

    tenant: str
    cost: float
    granted: bool = False


@dataclass(slots=True)
class _Queue:
    tickets: deque[Ticket] = field(default_factory=deque)
    given: float = 0.0  # virtual time up to which the tenant has been given its share


class Admission:
    """The state machine. Events: :meth:`enter`, :meth:`leave`; both may grant. ``running`` and ``waiting`` are counts.

    >>> admission = Admission(max_running=1)
    >>> tickets = [Ticket(tenant, 6.0) for tenant in ("crowd", "crowd", "crowd", "lone", "lone")]
    >>> for ticket in tickets:
    ...     admission.enter(ticket)
    >>> admission.running, admission.waiting
    (1, 4)
    >>> order = [tickets[0]]
    >>> while admission.running:
    ...     order += admission.leave(order[-1])
    >>> [ticket.tenant for ticket in order]
    ['crowd', 'lone', 'crowd', 'lone', 'crowd']

    Raises:
        ValueError: no request could ever run.
    """

    def __init__(self, *, max_running: int) -> None:
        if max_running < 1:
            raise ValueError(f"max_running must be at least 1, got {max_running}")
        self._max_running = max_running
        self._queues: dict[str, _Queue] = {}
        self._now = 0.0
        self.running = 0
        self.waiting = 0

    def enter(self, ticket: Ticket) -> None:
        """Grant the ticket, or let it wait."""
        queue = self._queues.setdefault(ticket.tenant, _Queue(given=self._now))
        if self.running < self._max_running and not self.waiting:
            self._grant(ticket, queue)
        else:
            queue.tickets.append(ticket)
            self.waiting += 1

    def leave(self, ticket: Ticket) -> list[Ticket]:
        """Remove a ticket, once: its request has ended or waits no longer. Return those granted in its place."""
        if ticket.granted:
            ticket.granted = False
            self.running -= 1
        else:
            self._queues[ticket.tenant].tickets.remove(ticket)
            self.waiting -= 1
        granted = []
        while self.waiting and self.running < self._max_running:
            tenant = min((name for name, queue in self._queues.items() if queue.tickets), key=self._next_start)
            queue = self._queues[tenant]
            granted.append(queue.tickets.popleft())
            self.waiting -= 1
            self._grant(granted[-1], queue)
        for name in [name for name, queue in self._queues.items() if not queue.tickets and queue.given <= self._now]:
            del self._queues[name]  # the tenant is not ahead of any other: it is as good as new
        return granted

    def _next_start(self, tenant: str) -> float:
        return max(self._queues[tenant].given, self._now)

    def _grant(self, ticket: Ticket, queue: _Queue) -> None:
        start = max(queue.given, self._now)
        self._now = start
        queue.given = start + ticket.cost
        ticket.granted = True
        self.running += 1
