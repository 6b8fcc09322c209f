"""verl's functions for batches: collating rows, merging dictionaries, and gathering batches from all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from asyncrl.data.columns import Array, array_column, arrays_equal, tensors_equal
from asyncrl.data.disk import from_bytes, to_bytes
from asyncrl.data.proto import DataProto, DataProtoItem
from asyncrl.errors import SchemaError

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torch.distributed import ProcessGroup


# tensordict and torch.distributed leave arguments without types.
# pyright: reportUnknownMemberType=false


V = TypeVar("V")


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """Make a batch of these rows: the ``collate_fn`` of a ``DataLoader`` over a DataProto. Drops ``meta_info``.

    Tensors of one shape ``[...]`` become a column ``[B, ...]``, of different lengths a ragged one; all other values
    become object arrays ``[B]``.

        >>> collate_fn([data[2], data[0]]).batch["x"].tolist()
        [3, 1]

    Raises:
        SchemaError: ``x`` is empty, or rows have different columns.
    """
    rows = list(x)
    if not rows:
        raise SchemaError("collate_fn needs at least one row: without one, the columns are unknown")
    tensors: dict[str, list[Any]] = list_of_dict_to_dict_of_list(
        [dict(batch) if (batch := cast("Mapping[str, Any] | None", row.batch)) is not None else {} for row in rows]
    )
    others = list_of_dict_to_dict_of_list([row.non_tensor_batch for row in rows])
    return DataProto.from_dict(
        {name: torch.stack(each) if len({row.shape for row in each}) == 1 else each for name, each in tensors.items()},
        {name: array_column(name, each) for name, each in others.items()},
    )


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[str, V]]) -> dict[str, list[V]]:
    """Turn dictionaries with the same keys into one dictionary of lists.

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
    """Add the tensors of ``tensor_dict2`` to ``tensor_dict1``, and return it. Tensors in both must be equal.

        >>> from tensordict import TensorDict
        >>> left = TensorDict({"x": torch.tensor([1, 2])}, batch_size=2)
        >>> sorted(union_tensor_dict(left, TensorDict({"y": torch.tensor([3, 4])}, batch_size=2)).keys())
        ['x', 'y']

    Raises:
        SchemaError: batch sizes or tensors in both differ; then nothing was added.
    """
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        sizes = f"{tuple(tensor_dict1.batch_size)} and {tuple(tensor_dict2.batch_size)}"
        raise SchemaError(f"union needs one batch size, got {sizes}")
    added = _missing(dict(tensor_dict1.items()), dict(tensor_dict2.items()), tensors_equal)
    return tensor_dict1.update(added)


def union_numpy_dict(
    tensor_dict1: MutableMapping[str, Array], tensor_dict2: Mapping[str, Array]
) -> MutableMapping[str, Array]:
    """Add the arrays of ``tensor_dict2`` to ``tensor_dict1``, and return it. Arrays in both must be equal.

    NaN equals itself, and elements of object arrays are compared recursively.

        >>> union_numpy_dict({"x": np.array([np.nan])}, {"x": np.array([np.nan]), "y": np.array([1])})
        {'x': array([nan]), 'y': array([1])}

    Raises:
        SchemaError: arrays in both differ; then nothing was added.
    """
    tensor_dict1.update(_missing(tensor_dict1, tensor_dict2, arrays_equal))
    return tensor_dict1


def _missing(mine: Mapping[Any, Any], others: Mapping[Any, Any], equal: Callable[[Any, Any], bool]) -> dict[Any, Any]:
    """Return what only ``others`` has; raise :class:`SchemaError` if what both have differs."""
    if differing := [name for name in mine if name in others and not equal(mine[name], others[name])]:
        raise SchemaError(f"columns {differing} are in both and differ")
    return {name: value for name, value in others.items() if name not in mine}


def all_gather_data_proto(data: DataProto, process_group: ProcessGroup | None = None) -> None:
    """Replace the rows of *this* batch by those of all ranks of a process group (None: all ranks). A collective.

    The rows come in rank order; ranks may have different numbers of them. ``meta_info`` is not exchanged. Ranks
    exchange the bytes of tensors and plain data, not pickles.

    Raises:
        CodecError: an array holds objects that are not plain data.
        SchemaError: the columns of the ranks differ.

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
    mine = to_bytes(DataProto(data.batch, data.non_tensor_batch))
    joined: DataProto = DataProto.concat([from_bytes(each) for each in _all_gather(mine, process_group)])
    if place is not None:
        joined.to(place)
    data.batch, data.non_tensor_batch = joined.batch, joined.non_tensor_batch


def _tensors_of(data: DataProto) -> Iterable[torch.Tensor]:
    return data.columns().tensors.values()


def _all_gather(message: bytes, group: ProcessGroup | None) -> list[memoryview]:
    """Exchange messages with all ranks: first their lengths, then the messages, padded to the longest."""
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
