"""What a group knows of its workers' meshes, and how it asks them."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Sequence

from asyncrl.errors import DispatchError, InfrastructureError
from asyncrl.single_controller.controller_loop import TaskOwner
from asyncrl.single_controller.mesh import Mesh, MeshPlace

__all__ = ["Inquiry", "Meshes"]


class Inquiry:
    """One mesh being asked for. On the controller loop."""

    def __init__(self) -> None:
        self._first_answer = asyncio.Event()
        self._finished = asyncio.Event()
        self._mesh: Mesh | None = None
        self._error: BaseException | None = None

    async def first_answer(self) -> None:
        """Wait until the workers' loops have answered."""
        await self._first_answer.wait()

    async def mesh(self) -> Mesh:
        """The mesh, once it is known.

        Raises:
            DispatchError: some workers are not in the mesh, or their places do not make one.
        """
        await self._finished.wait()
        if self._mesh is None:
            assert self._error is not None
            raise copy.copy(self._error) from self._error.__cause__
        return self._mesh

    def has_first_answer(self) -> None:
        """The workers' loops have answered."""
        self._first_answer.set()

    def end(self, result: Mesh | BaseException) -> None:
        """This has come of it."""
        if isinstance(result, Mesh):
            self._mesh = result
        else:
            self._error = result
        self._first_answer.set()
        self._finished.set()


class Meshes:
    """The meshes of one group; each is asked for when a call first needs it, and then known for good.

    The first question goes to the event loops of the workers, which answer at once whatever their methods do. If some
    worker is not in the mesh yet, the second one stands in line behind the plain methods called before, one of which
    may put it there. So that calls keep their order, those made meanwhile wait too: all for the first answer (one
    round trip), plain methods, which would stand in line anyway, for the second.

    Args:
        ask: ``ask(mesh_name, in_line)`` gives every rank's place, None where a worker is not in the mesh.
        owner: of the asking.
        group_name: for messages.
    """

    def __init__(
        self, ask: Callable[[str, bool], Awaitable[Sequence[MeshPlace | None]]], owner: TaskOwner, *, group_name: str
    ) -> None:
        self._ask = ask
        self._owner = owner
        self._group_name = group_name
        self._known: dict[str, Mesh] = {}
        self._inquiries: dict[str, Inquiry] = {}

    def known(self, name: str) -> Mesh | None:
        """The mesh, if it is known. From any thread."""
        return self._known.get(name)

    def all_known(self) -> dict[str, Mesh]:
        """The meshes that are known, by name. From any thread."""
        return dict(self._known)

    def ask(self, name: str) -> Inquiry:
        """Ask for a mesh, unless that is under way; after a failure the next call asks again. On the loop."""
        inquiry = self._inquiries.get(name)
        if inquiry is None:
            inquiry = Inquiry()
            if (mesh := self._known.get(name)) is not None:
                inquiry.end(mesh)
            else:
                self._inquiries[name] = inquiry
                self._begin(name, inquiry)
        return inquiry

    def _begin(self, name: str, inquiry: Inquiry) -> None:
        def end(task: asyncio.Task[Mesh]) -> None:
            del self._inquiries[name]
            if task.cancelled():
                inquiry.end(InfrastructureError(f"worker group {self._group_name} was shut down"))
            elif (error := task.exception()) is not None:
                inquiry.end(error)
            else:
                self._known[name] = task.result()
                inquiry.end(task.result())

        self._owner.spawn(lambda: self._inquire(name, inquiry), end)

    async def _inquire(self, name: str, inquiry: Inquiry) -> Mesh:
        places = await self._ask(name, False)
        if None in places:
            inquiry.has_first_answer()
            places = await self._ask(name, True)
        if absent := [rank for rank, place in enumerate(places) if place is None]:
            raise DispatchError(
                f"ranks {absent} of {self._group_name} are not in mesh {name!r}: call "
                f"self._register_dispatch_collect_info({name!r}, dp_rank=..., is_collect=...) in the worker's __init__ "
                "or in a method called before, and wait for that method if it is async"
            )
        return Mesh.of([place for place in places if place is not None], name=name)
