"""Collections of group_ids against plain sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffers.group_ids import GroupIdHeap, GroupIdSet


@given(st.lists(st.tuples(st.sampled_from(["push", "discard", "pop", "first"]), st.integers(0, 12)), max_size=80))
def test_a_heap_is_a_set_ordered_by_priority(moves: list[tuple[str, int]]):
    heap, model = GroupIdHeap(), {}
    for move, group_id in moves:
        if move == "push" and group_id not in model:
            model[group_id] = group_id * 7 % 5
            heap.push(group_id, model[group_id])
        elif move == "discard":
            heap.discard(group_id)
            model.pop(group_id, None)
        elif move == "pop" and model:
            least = min(model, key=lambda one: (model[one], one))
            assert heap.pop() == least
            del model[least]
        elif move == "first":
            assert heap.first(group_id) == tuple(sorted(model, key=lambda one: (model[one], one))[:group_id])
        ordered = sorted(model, key=lambda one: (model[one], one))
        assert len(heap) == len(model)
        assert set(heap) == set(model)
        assert heap.least() == (ordered[0] if ordered else None)
        assert heap.least_priority() == (model[ordered[0]] if ordered else None)


def test_a_heap_frees_the_memory_of_discarded_entries():
    heap = GroupIdHeap()
    for group_id in range(10_000):
        heap.push(group_id)
    for group_id in range(9_999, 0, -1):
        heap.discard(group_id)
    assert len(heap._heap) < 40
    assert heap.pop() == 0
    with pytest.raises(IndexError, match="empty"):
        heap.pop()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 15)), max_size=80))
def test_a_set_of_bytes_is_a_set(moves: list[tuple[bool, int]]):
    members, model = GroupIdSet(), set()
    for add, group_id in moves:
        if add:
            members.add(group_id)
            model.add(group_id)
        elif group_id in model:
            members.remove(group_id)
            model.remove(group_id)
        else:
            with pytest.raises(KeyError):
                members.remove(group_id)
        assert {group_id for group_id in range(17) if group_id in members} == model
