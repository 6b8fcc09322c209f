"""Batches and values in Ray's object store: one copy of each, fetched by whoever needs it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import ray
import ray.exceptions

from asyncrl.errors import InfrastructureError
from asyncrl.single_controller.call import StoredValue
from asyncrl.single_controller.ray_message import HereBlock, HereValue, slot_of

if TYPE_CHECKING:
    from asyncrl.data.proto import DataProto

__all__ = ["RayBlock", "RayValue", "first_line"]


class RayBlock:
    """A payload in Ray's object store. Pickles as its reference, or as its place beside a message."""

    __slots__ = ("ref",)

    def __init__(self, ref: ray.ObjectRef[Any]) -> None:
        self.ref = ref

    @classmethod
    def get_all(cls, blocks: Sequence[RayBlock]) -> list[DataProto]:
        try:
            found: Any = ray.get([block.ref for block in blocks])
            return cast("list[DataProto]", found)
        except ray.exceptions.RayError as error:
            raise _lost(error) from error

    @classmethod
    async def fetch_all(cls, blocks: Sequence[RayBlock]) -> list[DataProto]:
        found: list[DataProto] = await asyncio.gather(*(_fetch(block.ref) for block in blocks))
        return found

    def __reduce__(self) -> Any:
        slot = slot_of(self.ref)
        return (RayBlock, (self.ref,)) if slot is None else (HereBlock.in_slot, (slot,))


class RayValue(StoredValue):
    """An array in Ray's object store, put there once for all ranks."""

    __slots__ = ("_ref",)

    def __init__(self, ref: ray.ObjectRef[Any]) -> None:
        self._ref = ref

    async def fetch(self) -> Any:
        return await _fetch(self._ref)

    def __reduce__(self) -> Any:
        slot = slot_of(self._ref)
        return (RayValue, (self._ref,)) if slot is None else (HereValue.in_slot, (slot,))


async def _fetch(ref: ray.ObjectRef[Any]) -> Any:
    try:
        return await asyncio.wrap_future(ref.future())
    except ray.exceptions.RayError as error:
        raise _lost(error) from error


def _lost(error: ray.exceptions.RayError) -> InfrastructureError:
    what = "cannot be loaded here" if isinstance(error, ray.exceptions.RaySystemError) else "is lost"
    return InfrastructureError(f"an object in Ray's store {what}: {first_line(error)}")


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
