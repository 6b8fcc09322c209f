"""Collections of slot numbers: the least of a changing set, and a compact memory of which were ever seen."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterator

__all__ = ["SlotHeap", "SlotRanges"]


class SlotHeap:
    """A set of slots whose least is at hand, ordered by ``(priority, slot)``.

    ``push``, ``discard`` and ``pop`` cost O(log n) amortised: discarded entries stay in the heap until they come to the
    top or outnumber the living ones.
    """

    __slots__ = ("_heap", "_priorities")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        self._priorities: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._priorities)

    def __contains__(self, slot: int) -> bool:
        return slot in self._priorities

    def __iter__(self) -> Iterator[int]:
        return iter(self._priorities)

    def push(self, slot: int, priority: int = 0) -> None:
        """Add a slot that is not in the set."""
        self._priorities[slot] = priority
        heapq.heappush(self._heap, (priority, slot))

    def discard(self, slot: int) -> None:
        """Take a slot out, if it is in."""
        if self._priorities.pop(slot, None) is not None and len(self._heap) > 2 * len(self._priorities) + 16:
            self._heap = [(priority, slot) for slot, priority in self._priorities.items()]
            heapq.heapify(self._heap)

    def least(self) -> int | None:
        """The first slot, or None of an empty set."""
        entry = self._top()
        return None if entry is None else entry[1]

    def least_priority(self) -> int | None:
        """The first slot's priority, or None of an empty set."""
        entry = self._top()
        return None if entry is None else entry[0]

    def first(self, count: int) -> tuple[int, ...]:
        """The first ``count`` slots in order, left where they are. O(count log n)."""
        taken: list[tuple[int, int]] = []
        while len(taken) < count and (entry := self._top()) is not None:
            heapq.heappop(self._heap)
            # An entry pushed, discarded and pushed again is in the heap twice; the copies come one after the other.
            if not taken or taken[-1] != entry:
                taken.append(entry)
        for entry in taken:
            heapq.heappush(self._heap, entry)
        return tuple(slot for _, slot in taken)

    def pop(self) -> int:
        """Take the first slot out of a set that is not empty."""
        entry = self._top()
        if entry is None:
            raise IndexError("pop from an empty SlotHeap")
        heapq.heappop(self._heap)
        del self._priorities[entry[1]]
        return entry[1]

    def _top(self) -> tuple[int, int] | None:
        while self._heap:
            priority, slot = self._heap[0]
            if self._priorities.get(slot) == priority:
                return priority, slot
            heapq.heappop(self._heap)
        return None


class SlotRanges:
    """A set of slots kept as disjoint ranges: slots that come in order cost no memory, however many they are.

    Lookup is O(log r) and a change at most O(r), for r ranges: usually one.
    """

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def __contains__(self, slot: int) -> bool:
        index = bisect_right(self._starts, slot) - 1
        return index >= 0 and slot < self._ends[index]

    @property
    def ranges(self) -> tuple[range, ...]:
        """The ranges, in order, none touching the next."""
        return tuple(range(start, end) for start, end in zip(self._starts, self._ends, strict=True))

    def add(self, slot: int) -> None:
        """Add a slot; one that is in already changes nothing."""
        index = bisect_right(self._starts, slot) - 1
        if index >= 0 and slot < self._ends[index]:
            return
        joins_left = index >= 0 and self._ends[index] == slot
        joins_right = index + 1 < len(self._starts) and self._starts[index + 1] == slot + 1
        if joins_left and joins_right:
            self._ends[index] = self._ends.pop(index + 1)
            del self._starts[index + 1]
        elif joins_left:
            self._ends[index] = slot + 1
        elif joins_right:
            self._starts[index + 1] = slot
        else:
            self._starts.insert(index + 1, slot)
            self._ends.insert(index + 1, slot + 1)

    def remove(self, slot: int) -> None:
        """Take a slot out.

        Raises:
            KeyError: it is not in.
        """
        index = bisect_right(self._starts, slot) - 1
        if index < 0 or slot >= self._ends[index]:
            raise KeyError(slot)
        start, end = self._starts[index], self._ends[index]
        replacement = [(a, b) for a, b in ((start, slot), (slot + 1, end)) if a < b]
        self._starts[index : index + 1] = [a for a, _ in replacement]
        self._ends[index : index + 1] = [b for _, b in replacement]
