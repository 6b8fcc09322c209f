"""Meshes: which ranks get the same rows, which of them return the result, and how a group learns it.

In a model that is parallel in more than one way, several ranks work on the same rows (tensor and pipeline parallel
ones) and others on different rows (data parallel ones). Each worker registers its position in a named mesh::

    class Trainer(Worker):
        def __init__(self):
            super().__init__()
            dp_rank, tp_rank = divmod(self.rank, 2)
            self._register_dispatch_collect_info("actor", dp_rank=dp_rank, is_collect=tp_rank == 0)

        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
        def update(self, batch: DataProto) -> DataProto: ...
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from asyncrl.errors import DispatchError, InfrastructureError
from asyncrl.runtime import TaskOwner


@dataclass(frozen=True, slots=True)
class MeshDispatch:
    """Dispatch mode that splits batches over the dp ranks of a mesh; all ranks of one dp rank get the same rows.

    All else is copied. The results of the collecting ranks are batches, joined in the order of the dp ranks, or with
    ``joins=False`` listed in that order; what other ranks return is ignored.
    """

    mesh_name: str
    joins: bool = True


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> MeshDispatch:
    """Return the ``dispatch_mode`` of a method whose batches are split over the mesh ``mesh_name``.

    >>> make_nd_compute_dataproto_dispatch_fn("actor")
    MeshDispatch(mesh_name='actor', joins=True)
    """
    return MeshDispatch(mesh_name)


@dataclass(frozen=True, slots=True)
class MeshPosition:
    dp_rank: int
    is_collect: bool


@dataclass(frozen=True, slots=True)
class Mesh:
    """``dp_ranks``: the dp rank of each rank. ``collectors``: for each dp rank, the rank whose result is collected."""

    dp_ranks: tuple[int, ...]
    collectors: tuple[int, ...]

    @property
    def dp_size(self) -> int:
        return len(self.collectors)

    @staticmethod
    def of(positions: Sequence[MeshPosition], *, name: str) -> Mesh:
        """Make the mesh of these positions by rank.

        Raises:
            DispatchError: dp ranks are not 0 to n-1, or a dp rank does not have exactly one collecting rank: rows of a
                batch would be lost or returned twice.
        """
        dp_ranks = [position.dp_rank for position in positions]
        dp_size = max(dp_ranks) + 1
        if sorted(set(dp_ranks)) != list(range(dp_size)):
            raise DispatchError(
                f"the dp ranks of mesh {name!r} must be 0 to n-1 without gaps, "
                f"the workers registered {dp_ranks} by rank"
            )
        collectors: list[int] = []
        for dp_rank in range(dp_size):
            found = [rank for rank, position in enumerate(positions) if position == MeshPosition(dp_rank, True)]
            if len(found) != 1:
                raise DispatchError(
                    f"dp rank {dp_rank} of mesh {name!r} must have exactly one collecting rank, "
                    f"it has {found or 'none'}: register one of its ranks with is_collect=True, the others with False"
                )
            collectors.append(found[0])
        return Mesh(tuple(dp_ranks), tuple(collectors))


@dataclass(eq=False, slots=True)
class MeshQuery:
    """A query for one mesh, on the controller loop. ``first_reply`` is set once the workers' loops have replied."""

    first_reply: asyncio.Event = field(default_factory=asyncio.Event)
    _done: asyncio.Event = field(default_factory=asyncio.Event)
    _result: Mesh | BaseException | None = None

    async def mesh(self) -> Mesh:
        """Wait for the mesh; raise :class:`DispatchError` if a worker is not in it, or if the positions form none."""
        await self._done.wait()
        assert self._result is not None
        if isinstance(self._result, BaseException):
            raise copy.copy(self._result) from self._result.__cause__  # each caller adds its own traceback
        return self._result

    def finish(self, result: Mesh | BaseException) -> None:
        self._result = result
        self.first_reply.set()
        self._done.set()


class Meshes:
    """The meshes of one group; each is queried when a call first needs it, and then known for good.

    The first query runs on the event loops of the workers, which reply at once whatever their methods do. If some
    worker is not in the mesh yet, the second one queues behind the synchronous methods called before, one of which may
    register it. So that calls keep their order, those made meanwhile wait too: all for the first reply (one round
    trip), synchronous methods, which would queue anyway, for the second.

    ``ask(mesh_name, queued)`` returns every rank's position, None where a worker is not in the mesh. Known meshes may
    be read from any thread.
    """

    def __init__(
        self, ask: Callable[[str, bool], Awaitable[Sequence[MeshPosition | None]]], owner: TaskOwner, *, group_name: str
    ) -> None:
        self._ask = ask
        self._owner = owner
        self._group_name = group_name
        self._known: dict[str, Mesh] = {}
        self._queries: dict[str, MeshQuery] = {}

    def known(self, name: str) -> Mesh | None:
        return self._known.get(name)

    def all_known(self) -> dict[str, Mesh]:
        return dict(self._known)

    def query(self, name: str) -> MeshQuery:
        """Start a query, or return the active one; after a failure the next call queries again. On the loop."""
        query = self._queries.get(name)
        if query is None:
            query = MeshQuery()
            if (mesh := self._known.get(name)) is not None:
                query.finish(mesh)
            else:
                self._queries[name] = query
                self._begin(name, query)
        return query

    def _begin(self, name: str, query: MeshQuery) -> None:
        def end(task: asyncio.Task[Mesh]) -> None:
            del self._queries[name]
            if task.cancelled():
                query.finish(InfrastructureError(f"worker group {self._group_name} was shut down"))
            elif (error := task.exception()) is not None:
                query.finish(error)
            else:
                self._known[name] = task.result()
                query.finish(task.result())

        self._owner.spawn(lambda: self._run(name, query), end)

    async def _run(self, name: str, query: MeshQuery) -> Mesh:
        positions = await self._ask(name, False)
        if None in positions:
            query.first_reply.set()
            positions = await self._ask(name, True)
        if absent := [rank for rank, position in enumerate(positions) if position is None]:
            raise DispatchError(
                f"ranks {absent} of {self._group_name} are not in mesh {name!r}: call "
                f"self._register_dispatch_collect_info({name!r}, dp_rank=..., is_collect=...) in the worker's __init__ "
                "or in a method called before, and wait for that method if it is async"
            )
        return Mesh.of([position for position in positions if position is not None], name=name)
