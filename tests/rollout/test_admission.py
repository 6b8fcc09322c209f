"""The door: who is let in, in which order, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import OverloadedError
from asyncrl.rollout.admission import Admission, AdmissionLimits, Ticket


def test_a_small_tenant_does_not_wait_behind_a_large_one():
    door = Admission(AdmissionLimits(max_running=1))
    crowd = [Ticket("crowd", 10.0) for _ in range(4)]
    for ticket in crowd:
        door.enter(ticket)
    lone = Ticket("lone", 10.0)
    door.enter(lone)
    assert door.leave(crowd[0]) == [lone]
    assert door.leave(lone) == [crowd[1]]
    assert (door.running, door.waiting) == (1, 2)


def test_shares():
    door = Admission(AdmissionLimits(max_running=1, shares={"paying": 3.0}))
    tickets = [Ticket(name, 6.0) for name in ("free", "paying") for _ in range(8)]
    first = Ticket("somebody", 1.0)
    for ticket in (first, *tickets):
        door.enter(ticket)
    order, running = [], first
    for _ in range(8):
        (running,) = door.leave(running)
        order.append(running.tenant)
    assert order.count("paying") == 6


def test_full_queues_refuse_and_say_when_to_come_back():
    door = Admission(AdmissionLimits(max_running=1, max_waiting=3, max_waiting_per_tenant=2))
    for tenant in ("a", "a", "a"):
        door.enter(Ticket(tenant, 1.0))
    with pytest.raises(OverloadedError, match="2 requests of 'a' wait already") as caught:
        door.enter(Ticket("a", 1.0), retry_after_s=7.0)
    assert (caught.value.retry_after_s, caught.value.tenant) == (7.0, "a")
    door.enter(Ticket("b", 1.0))
    with pytest.raises(OverloadedError, match="3 requests wait already") as caught:
        door.enter(Ticket("c", 1.0))
    assert caught.value.tenant == ""
    assert (door.running, door.waiting) == (1, 3)


def test_one_that_gives_up_waiting_leaves_its_place_to_nobody():
    door = Admission(AdmissionLimits(max_running=1))
    first, second, third = (Ticket("a", 1.0) for _ in range(3))
    for ticket in (first, second, third):
        door.enter(ticket)
    assert door.leave(second) == []
    assert door.leave(first) == [third]


@pytest.mark.parametrize("limits", [{"max_running": 0}, {"max_waiting": -1}, {"shares": {"a": 0.0}}])
def test_limits_that_make_no_sense(limits: dict[str, object]):
    with pytest.raises(ValueError, match=r"at least 1|negative|positive"):
        AdmissionLimits(**limits)  # type: ignore[arg-type]


@given(
    st.lists(
        st.one_of(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), st.tuples(st.just("leave"), st.integers(0, 9))),
        max_size=60,
    ),
    st.integers(1, 4),
)
def test_laws(happenings: list[tuple[str, int]], max_running: int):
    shares = {"a": 2.0}
    door = Admission(AdmissionLimits(max_running=max_running, max_waiting=12, max_waiting_per_tenant=6, shares=shares))
    waiting: list[Ticket] = []
    running: list[Ticket] = []
    given_since: dict[tuple[str, str], tuple[float, float]] = {}  # what two tenants got while both waited throughout
    for tenant, number in happenings:
        if tenant == "leave":
            everybody = running + waiting
            if not everybody:
                continue
            one = everybody[number % len(everybody)]
            granted = door.leave(one)
            (running if one in running else waiting).remove(one)
        else:
            one = Ticket(tenant, float(number))
            own = sum(ticket.tenant == tenant for ticket in waiting)
            if len(running) == max_running and (len(waiting) == 12 or own == 6):
                with pytest.raises(OverloadedError):
                    door.enter(one)
                continue
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
                    got = ticket.cost / shares.get(ticket.tenant, 1.0)
                    new = (old[0] + got * (ticket.tenant == pair[0]), old[1] + got * (ticket.tenant == pair[1]))
                    given_since[pair] = new
                    assert abs(new[0] - new[1]) <= 18.0, "nobody who waits falls behind by more than two tickets"
            waiting.remove(ticket)
            running.append(ticket)
        left = {ticket.tenant for ticket in waiting}
        given_since = {pair: got for pair, got in given_since.items() if {*pair} <= left}
        assert (door.running, door.waiting) == (len(running), len(waiting))
        assert all(ticket.granted for ticket in running)
        assert len(running) == max_running or not waiting, "no place stays empty while somebody waits"
