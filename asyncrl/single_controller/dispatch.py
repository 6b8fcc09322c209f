"""How the arguments of a call are split over the ranks, and how results become one: the modes a method can name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, TypeAlias, TypedDict

from asyncrl.single_controller.mesh import MeshDispatch

__all__ = ["CustomDispatch", "Dispatch", "DispatchMode", "Execute"]


class Dispatch(Enum):
    """How arguments are split over the ranks, and results collected.

    "Batch" is a DataProto or DataProtoFuture, also inside lists, tuples and dicts of the arguments.

        >>> Dispatch["ONE_TO_ALL"].name
        'ONE_TO_ALL'
    """

    RANK_ZERO = "rank_zero"
    """Rank 0 alone runs the call; the result is its value."""
    ONE_TO_ALL = "one_to_all"
    """Every rank gets the same arguments; the result is the list of values by rank."""
    ALL_TO_ALL = "all_to_all"
    """Every argument is a list with one entry for each rank; the result is the list of values by rank."""
    DP_COMPUTE = "dp_compute"
    """As ALL_TO_ALL, under the name verl's programs use for data-parallel calls."""
    DP_COMPUTE_PROTO = "dp_compute_proto"
    """Rows of batches are split over the ranks, all else is copied; results are batches, joined."""
    DP_COMPUTE_PROTO_WITH_FUNC = "dp_compute_proto_with_func"
    """As DP_COMPUTE_PROTO, with a function for every rank as first argument."""
    DP_COMPUTE_METRIC = "dp_compute_metric"
    """Batches are split as by DP_COMPUTE_PROTO; the result is the list of values by rank."""


class Execute(Enum):
    """Which ranks run the call. With RANK_ZERO the arguments are those of a group of one, the result the value.

    >>> [mode.name for mode in Execute]
    ['ALL', 'RANK_ZERO']
    """

    ALL = "all"
    RANK_ZERO = "rank_zero"


class CustomDispatch(TypedDict):
    """Functions of one's own.

    ``dispatch_fn(worker_group, *args, **kwargs)`` returns ``(args, kwargs)`` in which every argument is a list with one
    entry for each rank. ``collect_fn(worker_group, output)`` makes the result from the values by rank; those of a
    method annotated ``-> DataProto`` are DataProtoFutures.
    """

    dispatch_fn: Callable[..., tuple[Sequence[Any], Mapping[str, Any]]]
    collect_fn: Callable[..., Any]


DispatchMode: TypeAlias = Dispatch | CustomDispatch | MeshDispatch

PROTO_MODES = frozenset({Dispatch.DP_COMPUTE_PROTO, Dispatch.DP_COMPUTE_PROTO_WITH_FUNC})
SPLIT_MODES = PROTO_MODES | {Dispatch.DP_COMPUTE_METRIC}
LIST_MODES = frozenset({Dispatch.ALL_TO_ALL, Dispatch.DP_COMPUTE})
