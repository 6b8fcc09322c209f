"""The plan of a resharding against gathering whole tensors and cutting them again."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import WeightMismatchError
from engines.weights.resharding import Region, common, divided, pieces, plan, volume, whole, within


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Region]:
    """The regions of ranks in a mesh of up to two dimensions, each of which divides one dimension of the tensor."""
    found = [whole(shape)]
    for _ in range(draw(st.integers(0, 2))) if shape else ():
        dim, ranks = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 4))
        cut = [divided(shape, dim, rank=rank, ranks=ranks) for rank in range(ranks)]
        found = [common(one, other) or tuple((0, 0) for _ in shape) for one in found for other in cut]
    return found


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Region], list[Region]]:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    return shape, draw(regions(shape)), draw(regions(shape))


@given(layouts(), st.integers(1, 20))
def test_every_rank_gets_what_gathering_and_cutting_gives(
    drawn: tuple[tuple[int, ...], list[Region], list[Region]], most: int
) -> None:
    shape, trainer, engine = drawn
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    shards = [tensor[within(region, whole(shape))] for region in trainer]
    for wanted in engine:
        expected = tensor[within(wanted, whole(shape))]
        found, writes = torch.full_like(expected, -1), torch.zeros_like(expected)
        for each in plan(trainer, wanted):
            for piece in pieces(each.region, most=most):
                assert 0 < volume(piece) <= most
                found[within(piece, wanted)] = shards[each.rank][within(piece, trainer[each.rank])]
                writes[within(piece, wanted)] += 1
        assert torch.equal(found, expected)
        assert bool((writes == 1).all())


@given(st.lists(st.integers(1, 7), min_size=1, max_size=3), st.integers(1, 5))
def test_division_is_that_of_torch(shape: list[int], ranks: int) -> None:
    tensor = torch.zeros(shape)
    for dim in range(len(shape)):
        sizes = [
            region[dim][1] - region[dim][0]
            for region in (divided(shape, dim, rank=r, ranks=ranks) for r in range(ranks))
        ]
        chunks = [len(part.movedim(dim, 0)) for part in tensor.chunk(ranks, dim=dim)]
        assert sizes == chunks + [0] * (ranks - len(chunks))


def test_a_part_that_no_rank_holds_is_named() -> None:
    held = [divided((8, 2), 0, rank=rank, ranks=4) for rank in (0, 1, 3)]
    with pytest.raises(WeightMismatchError, match="3 ranks hold 12 of the 16 elements"):
        plan(held, whole((8, 2)))


def test_a_scalar_is_rank_zeros() -> None:
    held = [divided((), 0, rank=rank, ranks=2) for rank in range(2)]
    assert [each.rank for each in plan(held, ())] == [0]
