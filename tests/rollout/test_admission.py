"""Admission: which tickets are granted, and in which order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.rollout.admission import Admission, Ticket


def test_a_small_tenant_does_not_wait_behind_a_large_one():
    door = Admission(max_running=1)
    crowd = [Ticket("crowd", 10.0) for _ in range(4)]
    for ticket in crowd:
        door.enter(ticket)
    lone = Ticket("lone", 10.0)
    door.enter(lone)
    assert door.leave(crowd[0]) == [lone]
    assert door.leave(lone) == [crowd[1]]
    assert (door.running, door.waiting) == (1, 2)


def test_a_ticket_that_leaves_the_queue_grants_no_other():
    door = Admission(max_running=1)
    first, second, third = (Ticket("a", 1.0) for _ in range(3))
    for ticket in (first, second, third):
        door.enter(ticket)
    assert door.leave(second) == []
    assert door.leave(first) == [third]


def test_a_limit_under_which_nothing_could_run():
    with pytest.raises(ValueError, match="max_running must be at least 1, got 0"):
        Admission(max_running=0)


@given(
    st.lists(
        st.one_of(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), st.tuples(st.just("leave"), st.integers(0, 9))),
        max_size=60,
    ),
    st.integers(1, 4),
)
def test_laws(happenings: list[tuple[str, int]], max_running: int):
    door = Admission(max_running=max_running)
    waiting: list[Ticket] = []
    running: list[Ticket] = []
    given_since: dict[tuple[str, str], tuple[float, float]] = {}  # what two tenants got while both waited throughout
    for tenant, number in happenings:
        if tenant == "leave":
            entered = running + waiting
            if not entered:
                continue
            one = entered[number % len(entered)]
            granted = door.leave(one)
            (running if one in running else waiting).remove(one)
        else:
            one = Ticket(tenant, float(number))
            door.enter(one)
            granted = [one] if one.granted else []
            waiting.append(one)
        for ticket in granted:
            tenants = {other.tenant for other in waiting}
            first = next(other for other in waiting if other.tenant == ticket.tenant)
            assert first is ticket, "first come, first served within a tenant"
            for pair in [(a, b) for a in "abc" for b in "abc" if a < b]:
                if {*pair} <= tenants:
                    old = given_since.get(pair, (0.0, 0.0))
                    got = ticket.cost
                    new = (old[0] + got * (ticket.tenant == pair[0]), old[1] + got * (ticket.tenant == pair[1]))
                    given_since[pair] = new
                    assert abs(new[0] - new[1]) <= 18.0, "no waiting tenant falls behind by more than two tickets"
            waiting.remove(ticket)
            running.append(ticket)
        left = {ticket.tenant for ticket in waiting}
        given_since = {pair: got for pair, got in given_since.items() if {*pair} <= left}
        assert (door.running, door.waiting) == (len(running), len(waiting))
        assert all(ticket.granted for ticket in running)
        assert len(running) == max_running or not waiting, "no place stays empty while a ticket waits"
