"""Batches as TensorDicts, with everything in them, and back."""

# tensordict leaves arguments without types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from asyncrl.data.columns import Columns
from asyncrl.errors import SchemaError

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

__all__ = ["packed_tensordict", "tensordict_of", "unpacked_tensordict"]


def tensordict_of(
    tensors: Mapping[str, torch.Tensor], *, rows: int | None, device: torch.device | None = None
) -> TensorDict:
    """A TensorDict with one batch dimension of ``rows``, or none; with a ``device``, what is set later moves there."""
    # Imported here: tensordict takes as long to load as torch, and half of this package works without it.
    from tensordict import TensorDict

    return TensorDict(dict(tensors), batch_size=[] if rows is None else [rows], device=device)


def packed_tensordict(columns: Columns, meta_info: Mapping[str, Any]) -> TensorDict:
    """Tensors, arrays as NonTensorStack, ``meta_info`` as NonTensorData, in one TensorDict.

    Raises:
        SchemaError: an entry of ``meta_info`` has the name of a column.
    """
    from tensordict import NonTensorData, NonTensorStack

    clash = sorted(meta_info.keys() & {*columns.names})
    if clash:
        raise SchemaError(f"meta_info {clash} have names of columns: one TensorDict cannot hold both")
    result: Any = tensordict_of(columns.tensors, rows=columns.rows)
    for name, array in columns.arrays.items():
        result.set(name, NonTensorStack(*(NonTensorData(element) for element in array)))
    for name, value in meta_info.items():
        result.set(name, NonTensorData(value, batch_size=[columns.rows]))
    return result  # type: ignore[no-any-return]


def unpacked_tensordict(
    tensor_dict: TensorDict,
) -> tuple[dict[str, torch.Tensor], dict[str, list[Any]], dict[str, Any]]:
    """Tensors, NonTensorStacks as lists, and the data of NonTensorData."""
    from tensordict import NonTensorData, NonTensorStack

    tensors: dict[str, torch.Tensor] = {}
    lists: dict[str, list[Any]] = {}
    info: dict[str, Any] = {}
    for name in list(tensor_dict.keys()):
        value = cast("Any", tensor_dict).get(name)
        if isinstance(value, NonTensorStack):
            lists[str(name)] = [element.data for element in value]
        elif isinstance(value, NonTensorData):
            info[str(name)] = value.data
        else:
            tensors[str(name)] = value
    return tensors, lists, info
