"""Who may begin, in which order, and what a pause means."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engines.rollout.vllm_adapter.gate import Gate


def test_as_many_as_there_is_room_for_in_the_order_they_came() -> None:
    gate: Gate[str] = Gate(2)
    numbers = [gate.arrive(name) for name in "abcd"]
    assert gate.admit() == ["a", "b"]
    assert (gate.inside, gate.waiting) == (2, 2)
    assert gate.admit() == []
    gate.leave(numbers[1])
    assert gate.admit() == ["c"]
    gate.leave(numbers[3])  # it gave up while it waited
    gate.leave(numbers[0])
    assert gate.admit() == []
    assert (gate.inside, gate.waiting) == (1, 0)


def test_nothing_begins_while_paused_or_while_weights_change() -> None:
    gate: Gate[str] = Gate(2)
    gate.pause()
    gate.arrive("a")
    assert gate.admit() == []
    gate.resume()
    gate.hold(True)
    assert gate.admit() == []
    gate.hold(False)
    assert gate.admit() == ["a"]


def test_a_drain_lets_those_begin_that_came_before_it() -> None:
    gate: Gate[str] = Gate(1)
    first = gate.arrive("first")
    assert gate.admit() == ["first"]
    second = gate.arrive("second")
    gate.drain()
    gate.arrive("late")
    assert gate.state == "draining"
    gate.leave(first)
    assert gate.admit() == ["second"]
    gate.drain()  # once more changes nothing
    gate.leave(second)
    assert gate.state == "paused"
    assert gate.admit() == []
    gate.resume()
    assert gate.admit() == ["late"]


def test_a_drain_of_nothing_is_a_pause() -> None:
    gate: Gate[str] = Gate(1)
    gate.drain()
    assert gate.state == "paused"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["arrive", "leave", "pause", "drain", "resume", "hold", "let go"]), st.integers(0, 30)
        )
    )
)
def test_never_more_than_fit_never_out_of_order_never_lost(events: list[tuple[str, int]]) -> None:
    gate: Gate[int] = Gate(3)
    alive: list[int] = []
    begun: list[int] = []
    held = False
    for event, which in events:
        state = gate.state
        if event == "arrive":
            alive.append(gate.arrive(len(begun) + gate.waiting))
        elif event == "leave" and alive:
            gate.leave(alive.pop(which % len(alive)))
        elif event == "pause":
            gate.pause()
        elif event == "drain":
            gate.drain()
        elif event == "resume":
            gate.resume()
        elif event in ("hold", "let go"):
            held = event == "hold"
            gate.hold(held)
        admitted = gate.admit()
        assert not (admitted and (held or gate.state == "paused"))
        assert gate.inside <= 3
        assert gate.inside + gate.waiting == len(alive)
        begun += admitted
        if state == "paused" and event not in ("resume", "drain"):
            assert gate.state == "paused"
    gate.hold(False)
    gate.resume()
    while alive:
        gate.admit()
        gate.leave(alive.pop(0))
    assert (gate.inside, gate.waiting) == (0, 0)
