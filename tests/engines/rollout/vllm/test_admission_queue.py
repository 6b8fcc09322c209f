"""Which requests begin, in which order, and what pauses change."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engines.rollout.vllm.engine import AdmissionQueue


def test_as_many_as_fit_begin_in_the_order_they_came() -> None:
    queue: AdmissionQueue[str] = AdmissionQueue(2)
    for name in "abcd":
        queue.arrive(name)
    assert queue.admit() == ["a", "b"]
    assert (queue.admitted, queue.waiting) == (2, 2)
    assert queue.admit() == []
    queue.leave("b")
    assert queue.admit() == ["c"]
    queue.leave("d")  # it gave up while it waited
    queue.leave("a")
    assert queue.admit() == []
    assert (queue.admitted, queue.waiting) == (1, 0)


def test_nothing_begins_while_paused_or_while_weights_change() -> None:
    queue: AdmissionQueue[str] = AdmissionQueue(2)
    queue.paused = True
    queue.arrive("a")
    assert queue.admit() == []
    queue.paused, queue.held = False, True
    assert queue.admit() == []
    queue.held = False
    assert queue.admit() == ["a"]


def test_a_probe_goes_before_all_others_and_takes_no_place_of_theirs() -> None:
    queue: AdmissionQueue[str] = AdmissionQueue(1)
    for name in "ab":
        queue.arrive(name)
    assert queue.admit() == ["a"]
    queue.arrive("probe", probe=True)
    assert queue.admit() == ["probe"]
    queue.leave("a")
    assert queue.admit() == ["b"]
    queue.held = True
    queue.arrive("another", probe=True)
    assert queue.admit() == []
    queue.held = False
    assert queue.admit() == ["another"]
    for name in ("probe", "another", "b"):
        queue.leave(name)
    assert (queue.admitted, queue.waiting) == (0, 0)


@given(
    st.lists(st.tuples(st.sampled_from(["arrive", "leave", "pause", "resume", "hold", "let go"]), st.integers(0, 30)))
)
def test_never_too_many_never_out_of_order_never_lost(events: list[tuple[str, int]]) -> None:
    queue: AdmissionQueue[int] = AdmissionQueue(3)
    alive: list[int] = []
    begun: list[int] = []
    arrived = 0
    for event, which in events:
        if event == "arrive":
            alive.append(arrived)
            queue.arrive(arrived)
            arrived += 1
        elif event == "leave" and alive:
            queue.leave(alive.pop(which % len(alive)))
        elif event in ("pause", "resume"):
            queue.paused = event == "pause"
        elif event in ("hold", "let go"):
            queue.held = event == "hold"
        admitted = queue.admit()
        assert not (admitted and (queue.held or queue.paused))
        assert queue.admitted <= 3
        assert queue.admitted + queue.waiting == len(alive)
        begun += admitted
    assert begun == sorted(begun)
    queue.paused = queue.held = False
    while alive:
        queue.admit()
        queue.leave(alive.pop(0))
    assert (queue.admitted, queue.waiting) == (0, 0)
