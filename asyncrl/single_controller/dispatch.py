"""Dispatch: how the arguments of one call reach the ranks, and how their results become one.

A call goes through three steps. In the caller's thread, batches are stored (and, where they are to be split, cut into
views first), so the caller may go on changing its own. On the controller loop, futures among the arguments are awaited
as far as their headers; nothing in the workers waits meanwhile. Then the rows are known, and every rank's arguments
follow without a suspension, so that ranks of a group always see calls in one order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias, TypedDict

import numpy as np

from asyncrl.data.future import DataProtoFuture, Future
from asyncrl.data.plan import Plan, Rows
from asyncrl.data.proto import DataProto
from asyncrl.errors import DispatchError
from asyncrl.single_controller.mesh import Mesh, MeshDispatch

__all__ = [
    "Arguments",
    "CustomDispatch",
    "Dispatch",
    "DispatchMode",
    "Execute",
    "Scatter",
    "Share",
    "collect",
    "shares",
]


class Dispatch(Enum):
    """How arguments are split over the ranks, and results collected.

    "Batch" is a DataProto or DataProtoFuture, also inside lists, tuples and dicts of the arguments.
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
    """Which ranks run the call. With RANK_ZERO the arguments are those of a group of one, the result the value."""

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


@dataclass(frozen=True, slots=True)
class Arguments:
    """What one rank is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Share:
    """The rows of a batch that one rank gets; the last ``padding`` of them are repeated ones."""

    index: Rows
    padding: int = 0


def shares(rows: int, ranks: int, *, pad: bool) -> list[Share]:
    """Consecutive rows for each rank, sizes differing by at most one, larger ones first.

    With ``pad``, smaller shares repeat their last row (or, having none, some row of the batch), so that all ranks get
    equally many: each at most one row more than its own.
    """
    size, larger = divmod(rows, ranks)
    result: list[Share] = []
    start = 0
    for rank in range(ranks):
        end = start + size + (rank < larger)
        if pad and larger and rank >= larger:
            repeated = end - 1 if size else rank % rows
            result.append(Share(np.array([*range(start, end), repeated], dtype=np.int64), padding=1))
        else:
            result.append(Share(range(start, end)))
        start = end
    return result


class Scatter:
    """The arguments of one call on their way to ``ranks`` ranks.

    Attributes:
        shares: rows for each rank, or for each dp rank of a mesh.
        mesh: where the mode is a :class:`MeshDispatch`. If not known yet, to be set before :meth:`resolve`.

    Raises:
        DispatchError: the arguments do not suit the mode.
    """

    def __init__(
        self,
        mode: DispatchMode,
        arguments: Arguments,
        *,
        ranks: int,
        pad: bool,
        store: Callable[[Any], Any],
        group: object = None,
        mesh: Mesh | None = None,
    ) -> None:
        self._mode = mode
        self._ranks = ranks
        self._pad = pad
        self._store = store
        self._group = group
        self.mesh = mesh
        self._rows: int | None = None
        self.shares: list[Share] = [Share(range(0))] * ranks
        self._whole = arguments
        self._listed: list[Arguments] | None = None
        if mode is Dispatch.DP_COMPUTE_PROTO_WITH_FUNC and not (arguments.args and callable(arguments.args[0])):
            raise DispatchError("DP_COMPUTE_PROTO_WITH_FUNC needs a function as first positional argument")
        if isinstance(mode, Dispatch | MeshDispatch):
            self._keep_batches()
        elif not any(isinstance(leaf, Future) for leaf in leaves(arguments)):
            self._apply_custom(arguments)

    def _keep_batches(self) -> None:
        if self._mode in LIST_MODES:
            self._listed = [
                Arguments(*_map((each.args, each.kwargs), self._store)) for each in _transpose(self._whole, self._ranks)
            ]
        else:
            convert = self._stored_parts if self._splits and self._parts else self._store
            self._whole = Arguments(*_map((self._whole.args, self._whole.kwargs), convert))

    def _apply_custom(self, arguments: Arguments) -> None:
        assert isinstance(self._mode, dict)
        args, kwargs = self._mode["dispatch_fn"](self._group, *arguments.args, **arguments.kwargs)
        listed = _transpose(Arguments(tuple(args), dict(kwargs)), self._ranks)
        self._listed = [Arguments(*_map((each.args, each.kwargs), self._store)) for each in listed]

    @property
    def _splits(self) -> bool:
        return isinstance(self._mode, MeshDispatch) or (isinstance(self._mode, Dispatch) and self._mode in SPLIT_MODES)

    @property
    def _parts(self) -> int | None:
        """Into how many parts batches are split, if that is known."""
        if isinstance(self._mode, MeshDispatch):
            return None if self.mesh is None else self.mesh.dp_size
        return self._ranks

    def _stored_parts(self, leaf: Any) -> Any:
        if not isinstance(leaf, DataProto):
            return self._store(leaf)
        parts = self._shares_of(len(leaf))
        return _Parts([self._store(_cut(leaf, share.index)) for share in parts])

    def _shares_of(self, rows: int) -> list[Share]:
        if self._rows is None:
            self._rows = rows
            assert self._parts is not None, self._mode
            self.shares = shares(rows, self._parts, pad=self._pad)
        elif self._rows != rows:
            raise DispatchError(
                f"all batches of a call are split alike and need equally many rows, got {self._rows} and {rows}"
            )
        return self.shares

    async def resolve(self, resolve: Callable[[Any], Awaitable[Any]]) -> list[Arguments]:
        """Arguments by rank, with a :class:`Plan` for every batch.

        ``resolve`` gives the plan of a DataProtoFuture and the value of another future. Suspends only if it does.
        """
        if self._listed is None and isinstance(self._mode, dict):
            for leaf in leaves(self._whole):
                if isinstance(leaf, Future):
                    await resolve(leaf)
            self._apply_custom(self._whole)
        if self._listed is not None:
            return [
                Arguments(*(await _map_async((each.args, each.kwargs), _only_futures(resolve))))
                for each in self._listed
            ]
        whole = await _map_async((self._whole.args, self._whole.kwargs), _only_futures(resolve))
        if not self._splits:
            return [Arguments(*whole)] * self._ranks
        for leaf in leaves(whole):
            if isinstance(leaf, Plan):
                self._shares_of(leaf.header.rows)
        if self._rows is None and self.mesh is not None:
            self.shares = [Share(range(0))] * self.mesh.dp_size
        parts = [Arguments(*_map(whole, self._part(number))) for number in range(self._parts or 0)]
        return parts if self.mesh is None else [parts[dp_rank] for dp_rank in self.mesh.dp_ranks]

    def _part(self, number: int) -> Callable[[Any], Any]:
        def part(leaf: Any) -> Any:
            if isinstance(leaf, _Parts):
                return leaf.plans[number]
            return leaf.take(self.shares[number].index) if isinstance(leaf, Plan) else leaf

        return part


class StoredValue(ABC):
    """An argument, not a batch, that a backend keeps where workers fetch it."""

    @abstractmethod
    async def fetch(self) -> Any:
        """The value, without blocking the loop."""


@dataclass(frozen=True, slots=True)
class _Parts:
    plans: list[Plan]


def collect(
    mode: DispatchMode,
    values: Sequence[Any],
    parts: Sequence[Share],
    *,
    group: object,
    method: str,
    mesh: Mesh | None = None,
) -> Any:
    """The result of a call from the values (or plans) by rank. A joined batch is a :class:`Plan`.

    Raises:
        DispatchError: a rank returned something else than batches, or rows from which padding cannot be taken off.
        SchemaError: batches of the ranks do not fit together.
    """
    if isinstance(mode, dict):
        futures = [DataProtoFuture.from_plan(each, method) if isinstance(each, Plan) else each for each in values]
        return mode["collect_fn"](group, futures)
    if isinstance(mode, Dispatch) and mode not in PROTO_MODES:
        return list(values)
    ranks = range(len(values)) if mesh is None else mesh.collectors
    for rank in ranks:
        if not isinstance(values[rank], Plan):
            name = mode.name if isinstance(mode, Dispatch) else f"mesh {mode.mesh_name!r}"
            raise DispatchError(
                f"{method} returned {type(values[rank]).__name__} on rank {rank}, and {name} joins batches: return a "
                "DataProto, or register the method with DP_COMPUTE_METRIC to get the list of values"
            )
    collected = [values[rank] for rank in ranks]
    return Plan.concat([_unpadded(plan, share, method) for plan, share in zip(collected, parts, strict=True)])


def _unpadded(plan: Plan, share: Share, method: str) -> Plan:
    if not share.padding:
        return plan
    given, returned = len(share.index), plan.header.rows
    if returned % given:
        raise DispatchError(
            f"{method} was given {given} rows of which {share.padding} were padding, and returned {returned}: padding "
            "can be taken off only if every row gives equally many; register the method with pad=False, or pass a "
            "number of rows that the ranks divide"
        )
    return plan.take(range(returned // given * (given - share.padding)))


# ------------------------------------------------------------------------------------------------------ argument trees


def leaves(tree: Any) -> Iterator[Any]:
    """Everything in nested lists, tuples, dicts and :class:`Arguments`."""
    if isinstance(tree, Arguments):
        yield from leaves(tree.args)
        yield from leaves(tree.kwargs)
    elif type(tree) in (list, tuple):
        for each in tree:
            yield from leaves(each)
    elif type(tree) is dict:
        for each in tree.values():
            yield from leaves(each)
    else:
        yield tree


def _map(tree: Any, function: Callable[[Any], Any]) -> Any:
    if type(tree) in (list, tuple):
        return type(tree)(_map(each, function) for each in tree)
    if type(tree) is dict:
        return {key: _map(each, function) for key, each in tree.items()}
    return function(tree)


async def _map_async(tree: Any, function: Callable[[Any], Awaitable[Any]]) -> Any:
    if type(tree) in (list, tuple):
        return type(tree)([await _map_async(each, function) for each in tree])
    if type(tree) is dict:
        return {key: await _map_async(each, function) for key, each in tree.items()}
    return await function(tree)


def _only_futures(resolve: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
    async def convert(leaf: Any) -> Any:
        return await resolve(leaf) if isinstance(leaf, Future) else leaf

    return convert


def _transpose(arguments: Arguments, ranks: int) -> list[Arguments]:
    """From lists by rank in every argument to arguments in every rank."""
    named = [*((f"argument {number}", each) for number, each in enumerate(arguments.args)), *arguments.kwargs.items()]
    for name, value in named:
        if not isinstance(value, list | tuple) or len(value) != ranks:
            found = f"{len(value)} entries" if isinstance(value, list | tuple) else type(value).__name__
            raise DispatchError(
                f"{name} must be a list with one entry for each of the {ranks} ranks, got {found}; "
                "ONE_TO_ALL copies an argument to every rank, DP_COMPUTE_PROTO splits batches"
            )
    return [
        Arguments(
            tuple(each[rank] for each in arguments.args), {key: each[rank] for key, each in arguments.kwargs.items()}
        )
        for rank in range(ranks)
    ]


def _cut(data: DataProto, index: Rows) -> DataProto:
    if isinstance(index, range):
        return data.slice(index.start, index.stop)
    return data.select_idxs(index)
