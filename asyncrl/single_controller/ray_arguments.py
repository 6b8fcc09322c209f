"""Arguments on their way from the driver: what is large goes into Ray's object store once, what is small along."""

# Ray leaves the types of handles, references and placement groups partly unknown.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from asyncrl.data.codec import Encoded, encode_slices
from asyncrl.data.plan import Header, Plan, Rows
from asyncrl.data.proto import DataProto
from asyncrl.single_controller.call import Arguments
from asyncrl.single_controller.ray_host import INLINE_BYTES
from asyncrl.single_controller.ray_store import RayBlock, RayValue

__all__ = ["referred", "stored", "stored_parts"]


def referred(arguments: Arguments) -> Arguments:
    """A reference that is itself an argument stands for its value, as in calls of Ray; one inside a list does not."""
    args, kwargs = arguments.args, arguments.kwargs
    if not any(isinstance(each, ray.ObjectRef) for each in (*args, *kwargs.values())):
        return arguments

    def value(each: Any) -> Any:
        return RayValue(each) if isinstance(each, ray.ObjectRef) else each

    return Arguments(tuple(map(value, args)), {name: value(each) for name, each in kwargs.items()})


def stored(value: Any) -> Any:
    """One argument: a large batch as a :class:`Plan`, anything else large as a :class:`RayValue`."""
    if isinstance(value, DataProto):
        if value.size_bytes > INLINE_BYTES:
            return Plan.shard(RayBlock(ray.put(value)), Header.of(value))
        return value
    if isinstance(value, np.ndarray | bytes):
        size_bytes = len(value) if isinstance(value, bytes) else value.nbytes
        if size_bytes > INLINE_BYTES:
            return RayValue(ray.put(value))
    return value


def stored_parts(data: DataProto, parts: Sequence[Rows]) -> list[Encoded] | list[Plan] | None:
    """The parts of a batch, as bytes if it is small; None if they are not consecutive rows."""
    slices = [part for part in parts if isinstance(part, range)]
    if len(slices) < len(parts):
        return None
    encoded = encode_slices(data, slices)  # cutting batches instead would cost a tenth of what storing them does
    if data.size_bytes <= INLINE_BYTES:
        return encoded
    return [Plan.shard(RayBlock(ray.put(each)), Header.coded(each)) for each in encoded]
