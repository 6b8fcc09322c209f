"""Which slice of a tensor goes from which rank to which: a pure function of how both sides divide it.

A region is a box of a tensor: the first index and the one behind the last, for each dimension.

    trainer: rows over 2 ranks         engine: columns over 2 ranks        plan for the engine's rank 1
    rank 0   (0, 4) x (0, 6)           rank 0   (0, 8) x (0, 3)            from rank 0   (0, 4) x (3, 6)
    rank 1   (4, 8) x (0, 6)           rank 1   (0, 8) x (3, 6)            from rank 1   (4, 8) x (3, 6)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from asyncrl.errors import WeightMismatchError

Region: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """What one rank sends: ``region`` of the whole tensor, which ``rank`` holds."""

    rank: int
    region: Region


def whole(shape: Sequence[int]) -> Region:
    return tuple((0, size) for size in shape)


def volume(region: Region) -> int:
    return math.prod(stop - start for start, stop in region)


def divided(shape: Sequence[int], dim: int, *, rank: int, ranks: int) -> Region:
    """Return a rank's region of a tensor whose dimension ``dim`` is divided over ranks, as ``torch.chunk`` and FSDP do.

    The last ranks have less, or nothing. A tensor without dimensions is rank 0's, and of no other.

    >>> [divided((5, 2), 0, rank=rank, ranks=3) for rank in range(3)]
    [((0, 2), (0, 2)), ((2, 4), (0, 2)), ((4, 5), (0, 2))]
    """
    if not shape:
        return () if rank == 0 else ((0, 0),)
    each = -(-shape[dim] // ranks)
    start, stop = min(rank * each, shape[dim]), min((rank + 1) * each, shape[dim])
    return tuple((start, stop) if number == dim else (0, size) for number, size in enumerate(shape))


def common(one: Region, other: Region) -> Region | None:
    """Return the region in both; None if there is none."""
    if len(one) != len(other):
        return None
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return found if all(start < stop for start, stop in found) else None


def plan(held: Sequence[Region], wanted: Region) -> list[Slice]:
    """Return what each rank sends of the regions that they hold, which do not overlap, so that all of ``wanted`` comes.

    Raises:
        WeightMismatchError: no rank holds a part of it.
    """
    found = [Slice(rank, part) for rank, region in enumerate(held) if (part := common(region, wanted)) is not None]
    if (sent := sum(volume(each.region) for each in found)) != volume(wanted):
        raise WeightMismatchError(
            f"{len(held)} ranks hold {sent} of the {volume(wanted)} elements in {wanted}: {list(held)}"
        )
    return found


def within(region: Region, outer: Region) -> tuple[slice, ...]:
    """Return the index of a region in a tensor that has the region ``outer`` of the whole."""
    return tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(region, outer, strict=True))


def pieces(region: Region, *, most: int) -> Iterator[Region]:
    """Yield parts of a region, in row-major order, of at most ``most`` elements each (and at least one).

    >>> list(pieces(((0, 3), (0, 4)), most=8))
    [((0, 2), (0, 4)), ((2, 3), (0, 4))]
    """
    if volume(region) <= max(1, most):
        if volume(region):
            yield region
        return
    dim = next(number for number, (start, stop) in enumerate(region) if stop - start > 1)
    start, stop = region[dim]
    step = max(1, most * (stop - start) // volume(region))
    for first in range(start, stop, step):
        part = (*region[:dim], (first, min(first + step, stop)), *region[dim + 1 :])
        yield from pieces(part, most=most)
