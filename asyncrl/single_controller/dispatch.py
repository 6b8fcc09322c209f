"""Dispatch and collect functions: building blocks of custom modes, and a registry of named modes.

A custom mode is ``{"dispatch_fn": ..., "collect_fn": ...}``. The dispatch functions take the group and the arguments of
a call and return every argument as a list with one entry for each rank; the collect functions take the group and the
values by rank. They use nothing of a group but its ``world_size``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias, cast

from asyncrl.data.columns import chunk_bounds
from asyncrl.data.future import DataProtoFuture
from asyncrl.data.plan import Plan
from asyncrl.data.proto import DataProto
from asyncrl.errors import DispatchError
from asyncrl.single_controller.decorator import CustomDispatch, Dispatch, Execute

# ruff: noqa: SLF001  an operation on futures
# pyright: reportPrivateUsage=false


class _Group(Protocol):
    @property
    def world_size(self) -> int: ...


Listed: TypeAlias = tuple[tuple[list[Any], ...], dict[str, list[Any]]]
"""Positional and keyword arguments, each a list with one entry for each rank."""


def dispatch_one_to_all(worker_group: _Group, *args: Any, **kwargs: Any) -> Listed:
    """Copy every argument to every rank.

    >>> dispatch_one_to_all(group, 7, flag=True)
    (([7, 7],), {'flag': [True, True]})
    """
    ranks = worker_group.world_size
    return tuple([each] * ranks for each in args), {name: [each] * ranks for name, each in kwargs.items()}


def dispatch_all_to_all(worker_group: _Group, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments unchanged: each has to be a list with one entry for each rank.

    >>> dispatch_all_to_all(group, [1, 2], flag=[True, False])
    (([1, 2],), {'flag': [True, False]})
    """
    return args, kwargs


def collect_all_to_all(worker_group: _Group, output: Sequence[Any]) -> Sequence[Any]:
    """Return the values by rank.

    >>> collect_all_to_all(group, [1, 2])
    [1, 2]
    """
    return output


def dispatch_dp_compute(worker_group: _Group, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Check that the arguments are lists with one entry for each rank, and return them unchanged.

        >>> dispatch_dp_compute(group, [1, 2])
        (([1, 2],), {})

    Raises:
        DispatchError: one is not such a list.
    """
    for each in [*args, *kwargs.values()]:
        if not _has_entries(each, worker_group.world_size):
            raise DispatchError(f"every argument must be a list of {worker_group.world_size} entries, got {each!r:.80}")
    return args, kwargs


def collect_dp_compute(worker_group: _Group, output: Sequence[Any]) -> Sequence[Any]:
    """Check that there is one value for each rank, and return the values.

        >>> collect_dp_compute(group, [1, 2])
        [1, 2]

    Raises:
        DispatchError: the number of values differs.
    """
    if len(output) != worker_group.world_size:
        raise DispatchError(f"{worker_group.world_size} ranks gave {len(output)} values")
    return output


def dispatch_dp_compute_data_proto(worker_group: _Group, *args: Any, **kwargs: Any) -> Listed:
    """Split batches of B rows over the ranks into consecutive shares that differ by one row at most.

        >>> (shares,), _ = dispatch_dp_compute_data_proto(group, data)
        >>> [share.batch["x"].tolist() for share in shares]
        [[1, 2], [3]]

    Raises:
        DispatchError: an argument is not a batch.
    """
    return _split(worker_group.world_size, args, kwargs)


def dispatch_dp_compute_data_proto_with_func(worker_group: _Group, *args: Any, **kwargs: Any) -> Listed:
    """Copy the first argument, a function, to every rank; split the others, batches of B rows.

        >>> (functions, shares), _ = dispatch_dp_compute_data_proto_with_func(group, len, data)
        >>> functions, [len(share) for share in shares]
        ([<built-in function len>, <built-in function len>], [2, 1])

    Raises:
        DispatchError: the first argument is not a function, or another one is not a batch.
    """
    if not args or not callable(args[0]):
        raise DispatchError("the first argument must be a function")
    split, named = _split(worker_group.world_size, args[1:], kwargs)
    return ([args[0]] * worker_group.world_size, *split), named


def collect_dp_compute_data_proto(worker_group: _Group, output: Sequence[Any]) -> DataProto | DataProtoFuture:
    """Join the batches of all ranks; the result is a future if one of them is.

        >>> collect_dp_compute_data_proto(group, data.split(2)) == data
        True

    Raises:
        DispatchError: the number of values differs, or one is not a batch.
    """
    return _join(collect_dp_compute(worker_group, output))


def dispatch_nd_compute(
    dp_rank_mapping: Sequence[int], dp_size: int, worker_group: _Group, *args: Any, **kwargs: Any
) -> Listed:
    """Turn lists by dp rank into lists by rank; ``dp_rank_mapping`` holds the dp rank of each rank.

        >>> dispatch_nd_compute([0, 0, 1, 1], 2, group, ["first", "second"])
        ((['first', 'first', 'second', 'second'],), {})

    Raises:
        DispatchError: an argument is not a list of ``dp_size`` entries.
    """
    for each in [*args, *kwargs.values()]:
        if not _has_entries(each, dp_size):
            raise DispatchError(f"every argument must be a list of {dp_size} entries, one for each dp rank")
    return (
        tuple([each[dp_rank] for dp_rank in dp_rank_mapping] for each in args),
        {name: [each[dp_rank] for dp_rank in dp_rank_mapping] for name, each in kwargs.items()},
    )


def collect_nd_compute(collect_mask: Sequence[bool], worker_group: _Group, output: Sequence[Any]) -> list[Any]:
    """Return the values of the ranks whose entry in ``collect_mask`` is true.

        >>> collect_nd_compute([False, True], group, ["first", "second"])
        ['second']

    Raises:
        DispatchError: the number of values is not that of the ranks.
    """
    return [value for value, taken in zip(collect_dp_compute(worker_group, output), collect_mask, strict=True) if taken]


def dispatch_nd_compute_dataproto(
    dp_rank_mapping: Sequence[int], dp_size: int, worker_group: _Group, *args: Any, **kwargs: Any
) -> Listed:
    """Split batches of B rows over the dp ranks; all ranks of a dp rank get the same rows.

        >>> (shares,), _ = dispatch_nd_compute_dataproto([0, 0, 1], 2, group, data)
        >>> [share.batch["x"].tolist() for share in shares]
        [[1, 2], [1, 2], [3]]

    Raises:
        DispatchError: an argument is not a batch.
    """
    split, named = _split(dp_size, args, kwargs)
    return dispatch_nd_compute(dp_rank_mapping, dp_size, worker_group, *split, **named)


def collect_nd_compute_dataproto(
    collect_mask: Sequence[bool], worker_group: _Group, output: Sequence[Any]
) -> DataProto | DataProtoFuture:
    """Join the batches of the ranks whose entry in ``collect_mask`` is true.

        >>> collect_nd_compute_dataproto([True, False], group, [data, data]) == data
        True

    Raises:
        DispatchError: the number of values is not that of the ranks, or a collected one is not a batch.
    """
    return _join(collect_nd_compute(collect_mask, worker_group, output))


def _has_entries(value: object, number: int) -> bool:
    return isinstance(value, list | tuple) and len(cast("Sequence[object]", value)) == number


def _split(parts: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Listed:
    def cut(value: Any) -> list[Any]:
        if isinstance(value, DataProtoFuture):
            return [value._derive(f".share({number})", partial(_share, number, parts)) for number in range(parts)]
        if not isinstance(value, DataProto):
            raise DispatchError(f"only batches are split, got {type(value).__name__}")
        return [value.slice(own.start, own.stop) for own in chunk_bounds(len(value), parts, uneven=True)]

    return tuple(cut(each) for each in args), {name: cut(each) for name, each in kwargs.items()}


def _share(number: int, parts: int, plan: Plan) -> Plan:
    return plan.take(chunk_bounds(plan.header.rows, parts, uneven=True)[number])


def _join(output: Sequence[Any]) -> DataProto | DataProtoFuture:
    for number, each in enumerate(output):
        if not isinstance(each, DataProto | DataProtoFuture):
            raise DispatchError(f"value {number} must be a batch, got {type(each).__name__}")
    if any(isinstance(each, DataProtoFuture) for each in output):
        return DataProtoFuture.concat(output)
    joined: DataProto = DataProto.concat(output)
    return joined


_PREDEFINED: dict[Dispatch, CustomDispatch] = {
    Dispatch.ONE_TO_ALL: {"dispatch_fn": dispatch_one_to_all, "collect_fn": collect_all_to_all},
    Dispatch.ALL_TO_ALL: {"dispatch_fn": dispatch_all_to_all, "collect_fn": collect_all_to_all},
    Dispatch.DP_COMPUTE: {"dispatch_fn": dispatch_dp_compute, "collect_fn": collect_dp_compute},
    Dispatch.DP_COMPUTE_PROTO: {
        "dispatch_fn": dispatch_dp_compute_data_proto,
        "collect_fn": collect_dp_compute_data_proto,
    },
    Dispatch.DP_COMPUTE_PROTO_WITH_FUNC: {
        "dispatch_fn": dispatch_dp_compute_data_proto_with_func,
        "collect_fn": collect_dp_compute_data_proto,
    },
    Dispatch.DP_COMPUTE_METRIC: {"dispatch_fn": dispatch_dp_compute_data_proto, "collect_fn": collect_dp_compute},
}
_registered: list[CustomDispatch] = []


def get_predefined_dispatch_fn(dispatch_mode: Dispatch | CustomDispatch) -> CustomDispatch:
    """Return a copy of the functions of a mode, to build others from.

    Groups do not call those of the predefined modes: they do the same lazily, with padding.

        >>> get_predefined_dispatch_fn(Dispatch.ONE_TO_ALL)["dispatch_fn"].__name__
        'dispatch_one_to_all'

    Raises:
        DispatchError: RANK_ZERO, which has no functions.
    """
    if isinstance(dispatch_mode, dict):
        return dispatch_mode.copy()
    if dispatch_mode not in _PREDEFINED:
        raise DispatchError(f"{dispatch_mode} has no dispatch and collect functions: use Execute.RANK_ZERO instead")
    return _PREDEFINED[dispatch_mode].copy()


def get_predefined_execute_fn(execute_mode: Execute) -> dict[str, str]:
    """Return the name of the group's method that runs calls of a mode.

    >>> get_predefined_execute_fn(Execute.RANK_ZERO)
    {'execute_fn_name': 'execute_rank_zero'}
    """
    return {"execute_fn_name": "execute_all" if execute_mode is Execute.ALL else "execute_rank_zero"}


def register_dispatch_mode(
    dispatch_mode_name: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]
) -> CustomDispatch:
    """Make a custom mode available as ``Dispatch.NAME`` (in capitals) in this process; return it, for type checkers.

        >>> mode = register_dispatch_mode("TO_ALL_AND_FIRST", dispatch_one_to_all, lambda group, output: output[0])
        >>> Dispatch.TO_ALL_AND_FIRST is mode
        True

    Raises:
        DispatchError: the name exists already, or is not an identifier.
    """
    name = dispatch_mode_name.upper()
    if not name.isidentifier() or hasattr(Dispatch, name):
        raise DispatchError(
            f"a dispatch mode cannot be called {dispatch_mode_name!r}: it exists, or is not an identifier"
        )
    mode = CustomDispatch(dispatch_fn=dispatch_fn, collect_fn=collect_fn)
    _registered.append(mode)
    setattr(Dispatch, name, mode)
    return mode


def update_dispatch_mode(
    dispatch_mode: CustomDispatch, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]
) -> None:
    """Replace the functions of a mode of :func:`register_dispatch_mode`, for all calls from now on.

        >>> mode = register_dispatch_mode("TO_ALL_AND_LAST", dispatch_one_to_all, lambda group, output: output[0])
        >>> update_dispatch_mode(mode, dispatch_one_to_all, lambda group, output: output[-1])

    Raises:
        DispatchError: the mode is a predefined one, which other code relies on.
    """
    if not any(dispatch_mode is mode for mode in _registered):
        raise DispatchError(f"{dispatch_mode} was not made by register_dispatch_mode: register one of your own")
    dispatch_mode["dispatch_fn"], dispatch_mode["collect_fn"] = dispatch_fn, collect_fn
