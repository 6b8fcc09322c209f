"""Dispatch and collect functions as building blocks of one's own modes, and names for such modes.

A mode of one's own is ``{"dispatch_fn": ..., "collect_fn": ...}``. The dispatch functions here take the group and the
arguments of a call and give every argument as a list with one entry for each rank; the collect functions take the group
and the values by rank. They know of a group only its ``world_size``.

    >>> from types import SimpleNamespace
    >>> dispatch_one_to_all(SimpleNamespace(world_size=2), 7, flag=True)
    (([7, 7],), {'flag': [True, True]})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol, TypeAlias, cast

from asyncrl.data.future import DataProtoFuture
from asyncrl.data.proto import DataProto
from asyncrl.errors import DispatchError
from asyncrl.single_controller.dispatch import CustomDispatch, Dispatch, Execute

__all__ = [
    "collect_all_to_all",
    "collect_dp_compute",
    "collect_dp_compute_data_proto",
    "collect_nd_compute",
    "collect_nd_compute_dataproto",
    "dispatch_all_to_all",
    "dispatch_dp_compute",
    "dispatch_dp_compute_data_proto",
    "dispatch_dp_compute_data_proto_with_func",
    "dispatch_nd_compute",
    "dispatch_nd_compute_dataproto",
    "dispatch_one_to_all",
    "get_predefined_dispatch_fn",
    "get_predefined_execute_fn",
    "register_dispatch_mode",
    "update_dispatch_mode",
]


class _Group(Protocol):
    @property
    def world_size(self) -> int: ...


Listed: TypeAlias = tuple[tuple[list[Any], ...], dict[str, list[Any]]]
"""Arguments and keyword arguments, each a list with one entry for each rank."""


def dispatch_one_to_all(worker_group: _Group, *args: Any, **kwargs: Any) -> Listed:
    """Every argument to every rank.

    >>> dispatch_one_to_all(group, 7, flag=True)
    (([7, 7],), {'flag': [True, True]})
    """
    ranks = worker_group.world_size
    return tuple([each] * ranks for each in args), {name: [each] * ranks for name, each in kwargs.items()}


def dispatch_all_to_all(worker_group: _Group, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments as they are: each has to be a list with one entry for each rank.

    >>> dispatch_all_to_all(group, [1, 2], flag=[True, False])
    (([1, 2],), {'flag': [True, False]})
    """
    return args, kwargs


def collect_all_to_all(worker_group: _Group, output: Sequence[Any]) -> Sequence[Any]:
    """The values by rank.

    >>> collect_all_to_all(group, [1, 2])
    [1, 2]
    """
    return output


def dispatch_dp_compute(worker_group: _Group, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments as they are, checked.

        >>> dispatch_dp_compute(group, [1, 2])
        (([1, 2],), {})

    Raises:
        DispatchError: one is no list with one entry for each rank.
    """
    for each in [*args, *kwargs.values()]:
        if not _has_entries(each, worker_group.world_size):
            raise DispatchError(f"every argument must be a list of {worker_group.world_size} entries, got {each!r:.80}")
    return args, kwargs


def collect_dp_compute(worker_group: _Group, output: Sequence[Any]) -> Sequence[Any]:
    """The values by rank, checked to be one for each.

        >>> collect_dp_compute(group, [1, 2])
        [1, 2]

    Raises:
        DispatchError: there are more or fewer.
    """
    if len(output) != worker_group.world_size:
        raise DispatchError(f"{worker_group.world_size} ranks gave {len(output)} values")
    return output


def dispatch_dp_compute_data_proto(worker_group: _Group, *args: Any, **kwargs: Any) -> Listed:
    """Rows of batches (B each) split over the ranks: consecutive ones, shares that differ by one row at most.

        >>> (shares,), _ = dispatch_dp_compute_data_proto(group, data)
        >>> [share.batch["x"].tolist() for share in shares]
        [[1, 2], [3]]

    Raises:
        DispatchError: an argument is no batch.
    """
    return _split(worker_group.world_size, args, kwargs)


def dispatch_dp_compute_data_proto_with_func(worker_group: _Group, *args: Any, **kwargs: Any) -> Listed:
    """The first argument, a function, to every rank; rows of the others (B each) split.

        >>> (functions, shares), _ = dispatch_dp_compute_data_proto_with_func(group, len, data)
        >>> functions, [len(share) for share in shares]
        ([<built-in function len>, <built-in function len>], [2, 1])

    Raises:
        DispatchError: the first argument is no function, or another one no batch.
    """
    if not args or not callable(args[0]):
        raise DispatchError("the first argument must be a function")
    split, named = _split(worker_group.world_size, args[1:], kwargs)
    return ([args[0]] * worker_group.world_size, *split), named


def collect_dp_compute_data_proto(worker_group: _Group, output: Sequence[Any]) -> DataProto | DataProtoFuture:
    """The batches of all ranks, joined. A future if one of them is one.

        >>> collect_dp_compute_data_proto(group, data.split(2)) == data
        True

    Raises:
        DispatchError: not one batch for each rank.
    """
    return _join(collect_dp_compute(worker_group, output))


def dispatch_nd_compute(
    dp_rank_mapping: Sequence[int], dp_size: int, worker_group: _Group, *args: Any, **kwargs: Any
) -> Listed:
    """From lists with one entry for each dp rank to lists with one for each rank; ``dp_rank_mapping`` by rank.

        >>> dispatch_nd_compute([0, 0, 1, 1], 2, group, ["first", "second"])
        ((['first', 'first', 'second', 'second'],), {})

    Raises:
        DispatchError: an argument is no list of ``dp_size`` entries.
    """
    for each in [*args, *kwargs.values()]:
        if not _has_entries(each, dp_size):
            raise DispatchError(f"every argument must be a list of {dp_size} entries, one for each dp rank")
    return (
        tuple([each[dp_rank] for dp_rank in dp_rank_mapping] for each in args),
        {name: [each[dp_rank] for dp_rank in dp_rank_mapping] for name, each in kwargs.items()},
    )


def collect_nd_compute(collect_mask: Sequence[bool], worker_group: _Group, output: Sequence[Any]) -> list[Any]:
    """The values of the ranks whose entry in ``collect_mask`` is true.

        >>> collect_nd_compute([False, True], group, ["first", "second"])
        ['second']

    Raises:
        DispatchError: not one value for each rank.
    """
    return [value for value, taken in zip(collect_dp_compute(worker_group, output), collect_mask, strict=True) if taken]


def dispatch_nd_compute_dataproto(
    dp_rank_mapping: Sequence[int], dp_size: int, worker_group: _Group, *args: Any, **kwargs: Any
) -> Listed:
    """Rows of batches (B each) split over the dp ranks; all ranks of a dp rank get the same rows.

        >>> (shares,), _ = dispatch_nd_compute_dataproto([0, 0, 1], 2, group, data)
        >>> [share.batch["x"].tolist() for share in shares]
        [[1, 2], [1, 2], [3]]

    Raises:
        DispatchError: an argument is no batch.
    """
    split, named = _split(dp_size, args, kwargs)
    return dispatch_nd_compute(dp_rank_mapping, dp_size, worker_group, *split, **named)


def collect_nd_compute_dataproto(
    collect_mask: Sequence[bool], worker_group: _Group, output: Sequence[Any]
) -> DataProto | DataProtoFuture:
    """The batches of the ranks whose entry in ``collect_mask`` is true, joined.

        >>> collect_nd_compute_dataproto([True, False], group, [data, data]) == data
        True

    Raises:
        DispatchError: not one value for each rank, or one that is taken is no batch.
    """
    return _join(collect_nd_compute(collect_mask, worker_group, output))


def _has_entries(value: object, number: int) -> bool:
    return isinstance(value, list | tuple) and len(cast("Sequence[object]", value)) == number


def _split(parts: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Listed:
    def cut(value: Any) -> list[Any]:
        if isinstance(value, DataProtoFuture):
            return value.chunk(parts)
        if not isinstance(value, DataProto):
            raise DispatchError(f"only batches are split, got {type(value).__name__}")
        size, larger = divmod(len(value), parts)
        ends = list(accumulate(size + (number < larger) for number in range(parts)))
        return [value.slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    return tuple(cut(each) for each in args), {name: cut(each) for name, each in kwargs.items()}


def _join(output: Sequence[Any]) -> DataProto | DataProtoFuture:
    for number, each in enumerate(output):
        if not isinstance(each, DataProto | DataProtoFuture):
            raise DispatchError(f"value {number} is to be a batch and is {type(each).__name__}")
    if any(isinstance(each, DataProtoFuture) for each in output):
        return DataProtoFuture.concat(output)
    joined: DataProto = DataProto.concat(output)
    return joined


# --------------------------------------------------------------------------------------------------- modes by name

Functions: TypeAlias = dict[str, Callable[..., Any]]

_PREDEFINED: dict[Dispatch, Functions] = {
    mode: {"dispatch_fn": dispatch, "collect_fn": collect}
    for mode, dispatch, collect in (
        (Dispatch.ONE_TO_ALL, dispatch_one_to_all, collect_all_to_all),
        (Dispatch.ALL_TO_ALL, dispatch_all_to_all, collect_all_to_all),
        (Dispatch.DP_COMPUTE, dispatch_dp_compute, collect_dp_compute),
        (Dispatch.DP_COMPUTE_PROTO, dispatch_dp_compute_data_proto, collect_dp_compute_data_proto),
        (
            Dispatch.DP_COMPUTE_PROTO_WITH_FUNC,
            dispatch_dp_compute_data_proto_with_func,
            collect_dp_compute_data_proto,
        ),
        (Dispatch.DP_COMPUTE_METRIC, dispatch_dp_compute_data_proto, collect_dp_compute),
    )
}
_registered: dict[str, CustomDispatch] = {}


def get_predefined_dispatch_fn(dispatch_mode: Dispatch | CustomDispatch) -> Functions:
    """The functions of a mode as ``{"dispatch_fn": ..., "collect_fn": ...}``, to build others of.

    Groups do not call those of the predefined modes: they do the same lazily, with padding.

        >>> get_predefined_dispatch_fn(Dispatch.ONE_TO_ALL)["dispatch_fn"].__name__
        'dispatch_one_to_all'

    Raises:
        DispatchError: RANK_ZERO, which has none.
    """
    if isinstance(dispatch_mode, dict):
        return {"dispatch_fn": dispatch_mode["dispatch_fn"], "collect_fn": dispatch_mode["collect_fn"]}
    if dispatch_mode not in _PREDEFINED:
        raise DispatchError(f"{dispatch_mode} has no functions")
    return dict(_PREDEFINED[dispatch_mode])


def get_predefined_execute_fn(execute_mode: Execute) -> dict[str, str]:
    """The name of the group's method that runs calls of a mode.

    >>> get_predefined_execute_fn(Execute.RANK_ZERO)
    {'execute_fn_name': 'execute_rank_zero'}
    """
    name = {Execute.ALL: "execute_all", Execute.RANK_ZERO: "execute_rank_zero"}[execute_mode]
    return {"execute_fn_name": name}


def register_dispatch_mode(
    dispatch_mode_name: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]
) -> CustomDispatch:
    """A mode of one's own under a name: ``@register(dispatch_mode=Dispatch.NAME)`` from now on in this process.

    Names are in capitals, however they are given.

        >>> mode = register_dispatch_mode("TO_ALL_AND_FIRST", dispatch_one_to_all, lambda group, output: output[0])
        >>> Dispatch.TO_ALL_AND_FIRST is mode
        True

    Returns:
        The mode, which type checkers know better than the name.

    Raises:
        DispatchError: the name is taken, or is no name.
    """
    name = dispatch_mode_name.upper()
    if not name.isidentifier() or hasattr(Dispatch, name):
        raise DispatchError(f"a dispatch mode cannot be called {dispatch_mode_name!r}: it is taken, or no name")
    mode = CustomDispatch(dispatch_fn=dispatch_fn, collect_fn=collect_fn)
    _registered[name] = mode
    setattr(Dispatch, name, mode)
    return mode


def update_dispatch_mode(
    dispatch_mode: CustomDispatch, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]
) -> None:
    """Give a mode of :func:`register_dispatch_mode` other functions, for all calls from now on.

        >>> mode = register_dispatch_mode("TO_ALL_AND_LAST", dispatch_one_to_all, lambda group, output: output[0])
        >>> update_dispatch_mode(mode, dispatch_one_to_all, lambda group, output: output[-1])

    Raises:
        DispatchError: it is a predefined one: what others rely on is not changed under their feet.
    """
    if not any(dispatch_mode is mode for mode in _registered.values()):
        raise DispatchError(f"{dispatch_mode} is not a mode made by register_dispatch_mode: register one of your own")
    cast("dict[str, Any]", dispatch_mode).update(dispatch_fn=dispatch_fn, collect_fn=collect_fn)
