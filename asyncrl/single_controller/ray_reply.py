"""Replies of Ray actors, on their way to the invocation that waits for them."""

# Ray leaves the types of handles, references and placement groups partly unknown.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false, reportPrivateUsage=false

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

import ray
import ray.exceptions

from asyncrl.single_controller.call import Lost, Reply, ReturnedBatch
from asyncrl.single_controller.ray_host import value_of
from asyncrl.single_controller.ray_store import RayBlock

if TYPE_CHECKING:
    from asyncrl.single_controller.invocation import Invocation
    from asyncrl.single_controller.ray import RayWorkerGroup

__all__ = ["RayReply", "items_of"]


class RayReply:
    """A reply on its way. ``keeping``: the method, if the worker keeps its batch."""

    __slots__ = ("_block", "_group", "_invocation", "_keeping", "_rank", "ref")

    def __init__(
        self,
        group: RayWorkerGroup,
        rank: int,
        keeping: str | None,
        ref: ray.ObjectRef[Any],
        block: RayBlock | None,
        invocation: Invocation,
    ) -> None:
        self._group = group
        self._rank = rank
        self._keeping = keeping
        self.ref = ref
        self._block = block
        self._invocation = invocation

    def watch(self) -> None:
        # What ObjectRef.future() is made of, without a Future for each rank.
        self.ref._on_completed(self)  # noqa: SLF001

    def __call__(self, value: Any) -> None:
        """Hand the reply on. In the thread that waited, or in one of Ray's, where nothing may block or raise."""
        if isinstance(value, ray.exceptions.RayTaskError):
            value = Lost(value.as_instanceof_cause())
        elif isinstance(value, ray.exceptions.RayError):
            value = Lost(value)
        block, small = self._block, False
        if self._keeping is not None:
            small = isinstance(value, bytes)
            if type(value) is tuple and len(value) == 2 and isinstance(value[0], ReturnedBatch):
                value, block = value[0], RayBlock(value[1])
            try:
                value = value_of(value)
            except Exception as error:  # noqa: BLE001  raised here it would be lost, and the call would never end
                value = Lost(error)
        self._group._replied(self._rank, self._keeping, small=small)  # noqa: SLF001
        self._invocation.came(self._rank, value, block)


async def items_of(references: Any) -> AsyncGenerator[Reply, None]:
    """What a streaming method gives, one reply after another; the last may tell of a failure."""
    try:
        async for reference in references:
            yield await reference
    except ray.exceptions.RayError as error:
        yield Lost(error)
