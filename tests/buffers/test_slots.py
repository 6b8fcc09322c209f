"""Collections of slots against plain sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffers.slots import SlotHeap, SlotRanges


@given(st.lists(st.tuples(st.sampled_from(["push", "discard", "pop", "first"]), st.integers(0, 12)), max_size=80))
def test_a_heap_is_a_set_that_knows_its_least(moves: list[tuple[str, int]]):
    heap, model = SlotHeap(), {}
    for move, slot in moves:
        if move == "push" and slot not in model:
            model[slot] = slot * 7 % 5
            heap.push(slot, model[slot])
        elif move == "discard":
            heap.discard(slot)
            model.pop(slot, None)
        elif move == "pop" and model:
            least = min(model, key=lambda one: (model[one], one))
            assert heap.pop() == least
            del model[least]
        elif move == "first":
            assert heap.first(slot) == tuple(sorted(model, key=lambda one: (model[one], one))[:slot])
        ordered = sorted(model, key=lambda one: (model[one], one))
        assert len(heap) == len(model)
        assert set(heap) == set(model)
        assert heap.least() == (ordered[0] if ordered else None)
        assert heap.least_priority() == (model[ordered[0]] if ordered else None)


def test_a_heap_forgets_what_was_discarded():
    heap = SlotHeap()
    for slot in range(10_000):
        heap.push(slot)
    for slot in range(9_999, 0, -1):
        heap.discard(slot)
    assert len(heap._heap) < 40
    assert heap.pop() == 0
    with pytest.raises(IndexError, match="empty"):
        heap.pop()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 15)), max_size=80))
def test_ranges_are_a_set(moves: list[tuple[bool, int]]):
    ranges, model = SlotRanges(), set()
    for add, slot in moves:
        if add:
            ranges.add(slot)
            model.add(slot)
        elif slot in model:
            ranges.remove(slot)
            model.remove(slot)
        else:
            with pytest.raises(KeyError):
                ranges.remove(slot)
        assert {slot for slot in range(17) if slot in ranges} == model
        assert [slot for one in ranges.ranges for slot in one] == sorted(model)
        assert all(one.stop < other.start for one, other in zip(ranges.ranges, ranges.ranges[1:], strict=False))


def test_slots_in_order_cost_one_range():
    ranges = SlotRanges()
    for slot in range(500, 1500):
        ranges.add(slot)
    assert ranges.ranges == (range(500, 1500),)
