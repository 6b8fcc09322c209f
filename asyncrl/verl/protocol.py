"""verl's functions beside DataProto: rows and dictionaries put together, and batches gathered from all ranks."""

# tensordict and torch.distributed leave arguments without types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from asyncrl.data.codec import Encoded, decode_joined, encode
from asyncrl.data.columns import Array, array_column
from asyncrl.data.equality import arrays_equal, tensors_equal
from asyncrl.data.proto import DataProto, DataProtoItem
from asyncrl.errors import SchemaError

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torch.distributed import ProcessGroup

__all__ = [
    "all_gather_data_proto",
    "collate_fn",
    "list_of_dict_to_dict_of_list",
    "union_numpy_dict",
    "union_tensor_dict",
]

V = TypeVar("V")


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """A batch of these rows: the ``collate_fn`` of a ``DataLoader`` over a DataProto. Without ``meta_info``.

    Tensors of one shape ``[...]`` become a column ``[B, ...]``, of different lengths a ragged one; all else becomes
    object arrays ``[B]``.

        >>> collate_fn([data[2], data[0]]).batch["x"].tolist()
        [3, 1]

    Raises:
        SchemaError: there is no row, or rows have different columns.
    """
    rows = list(x)
    if not rows:
        raise SchemaError("collate_fn needs at least one row: the columns of none are unknown")
    tensors: dict[str, list[Any]] = list_of_dict_to_dict_of_list(
        [dict(batch) if (batch := cast("Mapping[str, Any] | None", row.batch)) is not None else {} for row in rows]
    )
    others = list_of_dict_to_dict_of_list([row.non_tensor_batch for row in rows])
    return DataProto.from_dict(
        {name: torch.stack(each) if len({row.shape for row in each}) == 1 else each for name, each in tensors.items()},
        {name: array_column(name, each) for name, each in others.items()},
    )


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[str, V]]) -> dict[str, list[V]]:
    """One dictionary of lists; all dictionaries have the same keys.

        >>> list_of_dict_to_dict_of_list([{"loss": 1}, {"loss": 2}])
        {'loss': [1, 2]}

    Raises:
        SchemaError: their keys differ.
    """
    for number, each in enumerate(list_of_dict):
        if each.keys() != list_of_dict[0].keys():
            raise SchemaError(f"dictionary {number} has {sorted(each)}, dictionary 0 has {sorted(list_of_dict[0])}")
    return {key: [each[key] for each in list_of_dict] for key in (list_of_dict[0] if list_of_dict else ())}


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Add the tensors of ``tensor_dict2`` to ``tensor_dict1``, and return that. What both have must be equal.

        >>> from tensordict import TensorDict
        >>> left = TensorDict({"x": torch.tensor([1, 2])}, batch_size=2)
        >>> sorted(union_tensor_dict(left, TensorDict({"y": torch.tensor([3, 4])}, batch_size=2)).keys())
        ['x', 'y']

    Raises:
        SchemaError: their batch sizes differ, or naming the tensors that do; nothing was added then.
    """
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        sizes = f"{tuple(tensor_dict1.batch_size)} and {tuple(tensor_dict2.batch_size)}"
        raise SchemaError(f"union needs one batch size, got {sizes}")
    mine: dict[Any, Any] = dict(tensor_dict1.items())
    others: dict[Any, Any] = dict(tensor_dict2.items())
    _require_equal([name for name in mine if name in others and not tensors_equal(mine[name], others[name])])
    for name, value in others.items():
        if name not in mine:
            tensor_dict1.set(name, value)
    return tensor_dict1


def union_numpy_dict(
    tensor_dict1: MutableMapping[str, Array], tensor_dict2: Mapping[str, Array]
) -> MutableMapping[str, Array]:
    """Add the arrays of ``tensor_dict2`` to ``tensor_dict1``, and return that. What both have must be equal.

    NaN equals itself, and elements of object arrays are compared as deep as they go.

        >>> union_numpy_dict({"x": np.array([np.nan])}, {"x": np.array([np.nan]), "y": np.array([1])})
        {'x': array([nan]), 'y': array([1])}

    Raises:
        SchemaError: naming the arrays that differ; nothing was added then.
    """
    common = [name for name in tensor_dict2 if name in tensor_dict1]
    _require_equal([name for name in common if not arrays_equal(tensor_dict1[name], tensor_dict2[name])])
    tensor_dict1.update(tensor_dict2)
    return tensor_dict1


def _require_equal(differing: Sequence[object]) -> None:
    if differing:
        raise SchemaError(f"columns {list(differing)} are in both and differ")


def all_gather_data_proto(data: DataProto, process_group: ProcessGroup | None = None) -> None:
    """Give *this* batch the rows of all ranks of a process group, in the order of ranks; a collective.

    Columns are those of all ranks; ``meta_info`` stays that of this one. What travels are bytes of tensors and plain
    data, not pickles.

    Args:
        data: the rows of this rank; ranks may have different numbers of them.
        process_group: of ``torch.distributed``; None for all ranks.

    Raises:
        CodecError: an array holds something that is no data.
        SchemaError: columns of ranks differ.

    Example, for a single rank:
        >>> import torch.distributed as dist
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> mine = data.clone()
        >>> all_gather_data_proto(mine)
        >>> mine == data
        True
        >>> dist.destroy_process_group()
    """
    place = next((value.device for value in _tensors_of(data)), None)
    mine = encode(DataProto(data.batch, data.non_tensor_batch))
    joined = decode_joined([_unpacked(each) for each in _all_gather(_packed(mine), process_group)])
    if place is not None:
        joined.to(place)
    data.batch, data.non_tensor_batch = joined.batch, joined.non_tensor_batch


def _tensors_of(data: DataProto) -> Iterable[torch.Tensor]:
    return data.columns().tensors.values()


def _packed(encoded: Encoded) -> bytes:
    """The length of the header, the header (which tells the lengths of the buffers), the buffers."""
    return b"".join([len(encoded.header).to_bytes(8, "little"), encoded.header, *encoded.buffers])


def _unpacked(message: memoryview) -> Encoded:
    start = 8 + int.from_bytes(message[:8], "little")
    encoded = Encoded(bytes(message[8:start]), [])
    for size in encoded.fields.buffer_bytes:
        encoded.buffers.append(message[start : start + size])
        start += size
    return encoded


def _all_gather(message: bytes, group: ProcessGroup | None) -> list[memoryview]:
    """The messages of all ranks: their lengths first, then all of them, padded to the longest."""
    import torch.distributed as dist

    on_gpu = dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    length = torch.tensor([len(message)], device=device)
    lengths = [torch.zeros_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, length, group=group)
    padded = torch.zeros(max(int(each) for each in lengths), dtype=torch.uint8)
    padded[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    messages = [torch.empty_like(padded, device=device) for _ in lengths]
    dist.all_gather(messages, padded.to(device), group=group)
    received = (each.cpu().numpy() for each in messages)
    return [memoryview(cast("bytes", each))[: int(size)] for each, size in zip(received, lengths, strict=True)]
