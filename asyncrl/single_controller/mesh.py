"""Meshes: which ranks hold the same rows, and which of them answer.

In a model that is parallel in more than one way, several ranks work on the same rows (tensor and pipeline parallel
ones) and others on different rows (data parallel ones). Each worker tells its place in a named mesh::

    class Trainer(Worker):
        def __init__(self):
            super().__init__()
            dp_rank, tp_rank = divmod(self.rank, 2)
            self._register_dispatch_collect_info("actor", dp_rank=dp_rank, is_collect=tp_rank == 0)

        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
        def update(self, batch: DataProto) -> DataProto: ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.errors import DispatchError

__all__ = ["Mesh", "MeshDispatch", "MeshPlace", "make_nd_compute_dataproto_dispatch_fn"]


@dataclass(frozen=True, slots=True)
class MeshDispatch:
    """Rows of batches are split over the dp ranks of a mesh; all ranks of one dp rank get the same rows.

    All else is copied. The results of the collecting ranks are batches, joined in the order of the dp ranks; what other
    ranks return is not looked at.

        >>> MeshDispatch("actor").mesh_name
        'actor'
    """

    mesh_name: str


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> MeshDispatch:
    """The ``dispatch_mode`` of a method whose batches are split over the mesh ``mesh_name``.

    >>> make_nd_compute_dataproto_dispatch_fn("actor")
    MeshDispatch(mesh_name='actor')
    """
    return MeshDispatch(mesh_name)


@dataclass(frozen=True, slots=True)
class MeshPlace:
    """A worker's place in a mesh: which part of the rows it gets, and whether its result is taken."""

    dp_rank: int
    is_collect: bool


@dataclass(frozen=True, slots=True)
class Mesh:
    """``dp_ranks``: the dp rank of each rank. ``collectors``: for each dp rank, the rank whose result is taken."""

    dp_ranks: tuple[int, ...]
    collectors: tuple[int, ...]

    @property
    def dp_size(self) -> int:
        return len(self.collectors)

    @staticmethod
    def of(places: Sequence[MeshPlace], *, name: str) -> Mesh:
        """The mesh of these places by rank.

            >>> Mesh.of(
            ...     [MeshPlace(0, True), MeshPlace(0, False), MeshPlace(1, True), MeshPlace(1, False)], name="dp2_tp2"
            ... )
            Mesh(dp_ranks=(0, 0, 1, 1), collectors=(0, 2))

        Raises:
            DispatchError: dp ranks are not 0 to n-1, or one has not exactly one collecting rank: rows of a batch would
                be lost or come back twice.
        """
        dp_ranks = [place.dp_rank for place in places]
        dp_size = max(dp_ranks) + 1
        if sorted(set(dp_ranks)) != list(range(dp_size)):
            raise DispatchError(
                f"the dp ranks of mesh {name!r} must be 0 to n-1 without gaps, "
                f"the workers registered {dp_ranks} by rank"
            )
        collectors: list[int] = []
        for dp_rank in range(dp_size):
            found = [rank for rank, place in enumerate(places) if place == MeshPlace(dp_rank, True)]
            if len(found) != 1:
                raise DispatchError(
                    f"dp rank {dp_rank} of mesh {name!r} must have exactly one collecting rank, "
                    f"it has {found or 'none'}: register one of its ranks with is_collect=True, the others with False"
                )
            collectors.append(found[0])
        return Mesh(tuple(dp_ranks), tuple(collectors))
