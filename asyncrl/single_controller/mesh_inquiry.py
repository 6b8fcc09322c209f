"""What a group knows of its workers' meshes, and how it asks them."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Sequence

from asyncrl.errors import DispatchError, InfrastructureError
from asyncrl.single_controller.controller_loop import TaskOwner
from asyncrl.single_controller.mesh import Mesh, MeshPlace

__all__ = ["Meshes"]


class _Inquiry:
    def __init__(self) -> None:
        self.first_answer = asyncio.Event()
        self.finished = asyncio.Event()
        self.error: BaseException | None = None


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
        self._inquiries: dict[str, _Inquiry] = {}

    def known(self, name: str) -> Mesh | None:
        """The mesh, if it is known. From any thread."""
        return self._known.get(name)

    async def find(self, name: str) -> Mesh:
        """The mesh ``name``. On the loop.

        Raises:
            DispatchError: some workers are not in the mesh, or their places do not make one. The next call asks again.
        """
        if name in self._known:
            return self._known[name]
        inquiry = self._inquiries.get(name)
        if inquiry is None:
            inquiry = self._inquiries[name] = _Inquiry()
            self._begin(name, inquiry)
        await inquiry.first_answer.wait()
        await inquiry.finished.wait()
        if inquiry.error is not None:
            raise copy.copy(inquiry.error) from inquiry.error.__cause__
        return self._known[name]

    async def let_pass(self, *, in_line: bool) -> None:
        """Wait for the calls that were made earlier and are waiting for their mesh. On the loop."""
        passed: set[_Inquiry] = set()
        while ahead := [each for each in self._inquiries.values() if each not in passed]:
            passed.add(ahead[0])
            await ahead[0].first_answer.wait()
            if in_line:
                await ahead[0].finished.wait()

    def _begin(self, name: str, inquiry: _Inquiry) -> None:
        def end(task: asyncio.Task[None]) -> None:
            del self._inquiries[name]
            if task.cancelled():
                inquiry.error = InfrastructureError(f"worker group {self._group_name} was shut down")
            else:
                inquiry.error = task.exception()
            inquiry.first_answer.set()
            inquiry.finished.set()

        self._owner.spawn(lambda: self._inquire(name, inquiry), end)

    async def _inquire(self, name: str, inquiry: _Inquiry) -> None:
        places = await self._ask(name, False)
        if None in places:
            inquiry.first_answer.set()
            places = await self._ask(name, True)
        if absent := [rank for rank, place in enumerate(places) if place is None]:
            raise DispatchError(
                f"ranks {absent} of {self._group_name} are not in mesh {name!r}: call "
                f"self._register_dispatch_collect_info({name!r}, dp_rank=..., is_collect=...) in the worker's __init__ "
                "or in a method called before, and wait for that method if it is async"
            )
        self._known[name] = Mesh.of([place for place in places if place is not None], name=name)
