"""Sets of group numbers: one with fast access to its least member, and one that is small however many there are."""

from __future__ import annotations

import heapq
from collections.abc import Iterator


class GroupIdHeap:
    """A set of group numbers, ordered by ``(priority, group_id)``.

    ``push``, ``discard`` and ``pop`` cost O(log n) amortised: discarded entries stay in the heap until they reach the
    top or outnumber the others.
    """

    __slots__ = ("_heap", "_priorities")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        self._priorities: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._priorities)

    def __iter__(self) -> Iterator[int]:
        return iter(self._priorities)

    def push(self, group_id: int, priority: int = 0) -> None:
        self._priorities[group_id] = priority
        heapq.heappush(self._heap, (priority, group_id))

    def discard(self, group_id: int) -> None:
        if self._priorities.pop(group_id, None) is not None and len(self._heap) > 2 * len(self._priorities) + 16:
            self._heap = [(priority, group_id) for group_id, priority in self._priorities.items()]
            heapq.heapify(self._heap)

    def least(self) -> int | None:
        entry = self._top()
        return None if entry is None else entry[1]

    def least_priority(self) -> int | None:
        entry = self._top()
        return None if entry is None else entry[0]

    def first(self, count: int) -> tuple[int, ...]:
        """Return the first ``count`` numbers in order, without removing them. O(count log n)."""
        taken: list[tuple[int, int]] = []
        while len(taken) < count and (entry := self._top()) is not None:
            heapq.heappop(self._heap)
            # An entry pushed, discarded and pushed again is in the heap twice; the copies come one after the other.
            if not taken or taken[-1] != entry:
                taken.append(entry)
        for entry in taken:
            heapq.heappush(self._heap, entry)
        return tuple(group_id for _, group_id in taken)

    def pop(self) -> int:
        entry = self._top()
        if entry is None:
            raise IndexError("pop from an empty GroupIdHeap")
        heapq.heappop(self._heap)
        del self._priorities[entry[1]]
        return entry[1]

    def _top(self) -> tuple[int, int] | None:
        while self._heap:
            priority, group_id = self._heap[0]
            if self._priorities.get(group_id) == priority:
                return priority, group_id
            heapq.heappop(self._heap)
        return None


class GroupIdSet:
    """A set of group numbers of one byte for each number up to the highest: they are given out without gaps."""

    __slots__ = ("_members",)

    def __init__(self) -> None:
        self._members = bytearray()

    def __contains__(self, group_id: int) -> bool:
        return 0 <= group_id < len(self._members) and bool(self._members[group_id])

    def add(self, group_id: int) -> None:
        self._members.extend(bytes(max(0, group_id + 1 - len(self._members))))
        self._members[group_id] = True

    def remove(self, group_id: int) -> None:
        """Remove a number; raise KeyError if it is not in the set."""
        if group_id not in self:
            raise KeyError(group_id)
        self._members[group_id] = False
