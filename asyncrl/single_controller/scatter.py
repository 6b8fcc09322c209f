"""Scatter and collect: how the arguments of one call are split over the ranks, and how their results are joined.

A call goes through three steps. In the caller's thread, batches are stored (and, where they are split, sliced into
views first), so that the caller may change its own. Then the call waits for the futures among its arguments, only for
their headers; nothing in the workers waits meanwhile. Now the rows are known, and so are every rank's arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from asyncrl.data.codec import Encoded
from asyncrl.data.columns import chunk_bounds
from asyncrl.data.future import DataProtoFuture, Future
from asyncrl.data.plan import Plan, Rows, rows_of
from asyncrl.data.proto import DataProto
from asyncrl.errors import DispatchError
from asyncrl.single_controller.call import Arguments, StoredValue
from asyncrl.single_controller.decorator import LIST_MODES, PROTO_MODES, SPLIT_MODES, Dispatch, DispatchMode
from asyncrl.single_controller.mesh import Mesh, MeshDispatch

if TYPE_CHECKING:
    from asyncrl.single_controller.worker_group import WorkerGroup

# ruff: noqa: SLF001  the backend's hooks are private, since registered methods become attributes of the group
# pyright: reportPrivateUsage=false


@dataclass(frozen=True, slots=True)
class Share:
    """The rows of a batch that one rank gets; the last ``padding`` of them are repetitions."""

    index: Rows
    padding: int = 0


NO_ROWS = Share(range(0))


def shares(rows: int, ranks: int, *, pad: bool) -> list[Share]:
    """Split rows into consecutive shares whose sizes differ by at most one, larger ones first.

    With ``pad``, smaller shares repeat their last row (an empty one: any row of the batch), so that all ranks get
    equally many: each at most one row more than its own.
    """
    result: list[Share] = []
    for rank, own in enumerate(chunk_bounds(rows, ranks, uneven=True)):
        if pad and rank >= rows % ranks > 0:
            repeated = own.stop - 1 if own else rank % rows
            result.append(Share(np.array([*own, repeated], dtype=np.int64), padding=1))
        else:
            result.append(Share(own))
    return result


class Scatter:
    """The arguments of one call of ``group``, split over ``ranks`` ranks.

    ``futures`` are those among the arguments, ``shares`` the rows for each rank or dp rank. The ``mesh`` of a
    :class:`MeshDispatch` is None if it is not known yet, to be set before :meth:`arguments`.

    Raises:
        DispatchError: the arguments do not suit the mode.
    """

    __slots__ = ("_group", "_listed", "_mode", "_pad", "_ranks", "_rows", "_whole", "futures", "mesh", "shares")

    def __init__(
        self,
        mode: DispatchMode,
        arguments: Arguments,
        *,
        ranks: int,
        pad: bool,
        group: WorkerGroup,
        mesh: Mesh | None = None,
    ) -> None:
        self._mode = mode
        self._ranks = ranks
        self._pad = pad
        self._group = group
        self.mesh = mesh
        self._rows: int | None = None
        self.shares: list[Share] = [NO_ROWS] * ranks
        self.futures: list[Future[Any]] = [leaf for leaf in leaves(arguments) if isinstance(leaf, Future)]
        self._whole = arguments
        self._listed: list[Arguments] | None = None
        if mode is Dispatch.DP_COMPUTE_PROTO_WITH_FUNC and not (arguments.args and callable(arguments.args[0])):
            raise DispatchError("DP_COMPUTE_PROTO_WITH_FUNC needs a function as first positional argument")
        if isinstance(mode, Dispatch | MeshDispatch):
            self._store_batches()
        elif not self.futures:
            self.apply_custom()

    def _store_batches(self) -> None:
        if self._mode in LIST_MODES:
            self._listed = [self._stored(each) for each in _transpose(self._whole, self._ranks)]
        elif self.splits:
            self._whole = _mapped(self._whole, self._stored_parts if self._parts else self._group._store)
        else:
            self._whole = self._stored(self._whole)

    def _stored(self, arguments: Arguments) -> Arguments:
        return _mapped(self._group._dereference(arguments), self._group._store)

    def apply_custom(self) -> None:
        """Call the dispatch function of a custom mode once the futures are done. It may return other futures."""
        if self._listed is not None or not isinstance(self._mode, dict):
            return
        group = _as_seen(self._group, self._ranks)
        returned: Any = self._mode["dispatch_fn"](group, *self._whole.args, **self._whole.kwargs)
        try:
            args, kwargs = returned
            arguments = Arguments(tuple(args), dict(kwargs))
        except (TypeError, ValueError) as error:
            raise DispatchError(
                f"a dispatch_fn must return (args, kwargs), a tuple and a dict, got {returned!r:.80}"
            ) from error
        listed = _transpose(arguments, self._ranks)
        self._listed = [self._stored(each) for each in listed]
        self.futures = [leaf for each in self._listed for leaf in leaves(each) if isinstance(leaf, Future)]

    @property
    def is_ready(self) -> bool:
        """Whether :meth:`arguments` can be called at once, and runs no code of the user's."""
        if isinstance(self._mode, dict):
            return False
        if isinstance(self._mode, MeshDispatch) and self.mesh is None:
            return False
        return all(future.done() and future.outcome.state == "done" for future in self.futures)

    @property
    def splits(self) -> bool:
        return isinstance(self._mode, MeshDispatch) or (isinstance(self._mode, Dispatch) and self._mode in SPLIT_MODES)

    @property
    def _parts(self) -> int | None:
        if isinstance(self._mode, MeshDispatch):
            return None if self.mesh is None else self.mesh.dp_size
        return self._ranks

    def _stored_parts(self, leaf: Any) -> Any:
        if not isinstance(leaf, DataProto):
            return self._group._store(leaf)
        return _Parts(self._group._store_parts(leaf, [share.index for share in self._shares_of(len(leaf))]))

    def _shares_of(self, rows: int) -> list[Share]:
        if self._rows is None:
            self._rows = rows
            assert self._parts is not None, self._mode
            self.shares = shares(rows, self._parts, pad=self._pad)
        elif self._rows != rows:
            raise DispatchError(
                f"all batches of a call must have equally many rows, since they are split alike, "
                f"got {self._rows} and {rows}"
            )
        return self.shares

    def snapshot(self) -> None:
        """Copy the batches, tensors and arrays that the caller still shares, and may change."""
        if self._listed is not None:
            self._listed = [_mapped(each, _copied) for each in self._listed]
        else:
            self._whole = _mapped(self._whole, _copied)

    def arguments(self) -> list[Arguments]:
        """Return the arguments by rank, with a :class:`Plan` for every stored batch, once the futures are done.

        Raises:
            DispatchError: batches differ in their rows, or the arguments do not suit the mode.
            BaseException: the error of a future.
        """
        if self._listed is not None:
            if not self.futures:
                return self._listed
            return [_mapped(each, _resolved) for each in self._listed]
        whole = _mapped(self._whole, _resolved) if self.futures else self._whole
        if not self.splits:
            return [whole] * self._ranks
        for leaf in leaves(whole):
            if isinstance(leaf, Plan):
                self._shares_of(leaf.header.rows)
            elif isinstance(leaf, DataProto):
                self._shares_of(len(leaf))
        if self._rows is None and self.mesh is not None:
            self.shares = [NO_ROWS] * self.mesh.dp_size
        parts = [_mapped(whole, self._part(number)) for number in range(self._parts or 0)]
        return parts if self.mesh is None else [parts[dp_rank] for dp_rank in self.mesh.dp_ranks]

    def _part(self, number: int) -> Callable[[Any], Any]:
        def part(leaf: Any) -> Any:
            if isinstance(leaf, _Parts):
                return leaf.parts[number]
            if isinstance(leaf, Plan):
                return leaf.take(self.shares[number].index)
            return rows_of(leaf, self.shares[number].index) if isinstance(leaf, DataProto) else leaf

        return part


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, _Parts):
        return _Parts([_copied(part) for part in leaf.parts])
    if isinstance(leaf, DataProto):
        return leaf.clone()
    if isinstance(leaf, torch.Tensor):
        copied = leaf.detach().clone()
        if isinstance(leaf, torch.nn.Parameter):  # of which `detach` makes a plain tensor
            return torch.nn.Parameter(copied, leaf.requires_grad)
        return copied.requires_grad_(leaf.requires_grad)
    if isinstance(leaf, np.ndarray):
        return leaf.copy()  # pyright: ignore[reportUnknownVariableType]  of any elements
    return leaf.own() if isinstance(leaf, Encoded) else leaf


def _resolved(leaf: Any) -> Any:
    return leaf.outcome.get() if isinstance(leaf, Future) else leaf


def to_fetch(arguments: Arguments, *, batches: bool = False) -> bool:
    """Return whether a worker has to fetch an argument; with ``batches``, also whether one is a batch sent inline."""
    kinds = (Plan, StoredValue, DataProto, Encoded) if batches else (Plan, StoredValue)
    for leaf in leaves(arguments):  # noqa: SIM110  on the path of every call, where a generator would cost more than the check
        if isinstance(leaf, kinds):
            return True
    return False


class _RankZero:
    """A group, to the functions of a custom mode that runs on rank 0 alone."""

    world_size = 1

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    @property  # type: ignore[misc]  # functions may ask whether it is a WorkerGroup
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._group.__class__


def _as_seen(group: Any, ranks: int) -> Any:
    return _RankZero(group) if ranks < group.world_size else group


@dataclass(frozen=True, slots=True)
class _Parts:
    parts: list[Any]


def collect(
    mode: DispatchMode,
    values: Sequence[Any],
    parts: Sequence[Share],
    *,
    group: object,
    method: str,
    mesh: Mesh | None = None,
) -> Any:
    """Make the result of a call from the values (or plans) by rank. A joined batch is a :class:`Plan`.

    Raises:
        DispatchError: a rank did not return a batch, or returned rows from which padding cannot be removed.
        SchemaError: the batches of the ranks have different columns.
    """
    if isinstance(mode, dict):
        futures = [DataProtoFuture.from_plan(each, method) if isinstance(each, Plan) else each for each in values]
        return mode["collect_fn"](_as_seen(group, len(values)), futures)
    if isinstance(mode, Dispatch) and mode not in PROTO_MODES:
        return list(values)
    ranks = range(len(values)) if mesh is None else mesh.collectors
    if isinstance(mode, MeshDispatch) and not mode.joins:
        return [values[rank] for rank in ranks]
    for rank in ranks:
        if not isinstance(values[rank], Plan):
            name = mode.name if isinstance(mode, Dispatch) else f"mesh {mode.mesh_name!r}"
            raise DispatchError(
                f"{method} returned {type(values[rank]).__name__} on rank {rank}, and {name} joins batches: return a "
                "DataProto, or register the method with DP_COMPUTE_METRIC to get a list of values"
            )
    collected = [values[rank] for rank in ranks]
    return Plan.concat([_unpadded(plan, share, method) for plan, share in zip(collected, parts, strict=True)])


def _unpadded(plan: Plan, share: Share, method: str) -> Plan:
    if not share.padding:
        return plan
    given, returned = len(share.index), plan.header.rows
    if returned % given:
        raise DispatchError(
            f"{method} got {given} rows of which {share.padding} were padding, and returned {returned}: padding can be "
            "removed only if every row returns equally many; register the method with pad=False, or pass a number of "
            "rows that the ranks divide"
        )
    return plan.take(range(returned // given * (given - share.padding)))


# ------------------------------------------------------------------------------------------------------ argument trees


_NESTED = frozenset({list, tuple, dict})


def leaves(arguments: Arguments) -> list[Any]:
    """Return every value in the arguments, and in the lists, tuples and dicts among them."""
    found: list[Any] = []
    _add_leaves(arguments.args, found)
    if arguments.kwargs:
        _add_leaves(arguments.kwargs.values(), found)
    return found


def _add_leaves(trees: Iterable[Any], found: list[Any]) -> None:
    for each in trees:
        kind = type(each)  # pyright: ignore[reportUnknownVariableType]  of anything
        if kind not in _NESTED:
            found.append(each)
        else:
            _add_leaves(each.values() if kind is dict else each, found)


def _mapped(arguments: Arguments, function: Callable[[Any], Any]) -> Arguments:
    args, kwargs = arguments.args, arguments.kwargs
    return Arguments(
        tuple([_map(each, function) for each in args]),
        {key: _map(each, function) for key, each in kwargs.items()} if kwargs else {},
    )


def _map(tree: Any, function: Callable[[Any], Any]) -> Any:
    kind = type(tree)  # pyright: ignore[reportUnknownVariableType]  of anything
    if kind not in _NESTED:
        return function(tree)
    if kind is dict:
        return {key: _map(each, function) for key, each in tree.items()}
    return kind([_map(each, function) for each in tree])


def _transpose(arguments: Arguments, ranks: int) -> list[Arguments]:
    """Turn arguments that are lists by rank into a list of arguments by rank."""
    named = [*((f"argument {number}", each) for number, each in enumerate(arguments.args)), *arguments.kwargs.items()]
    for name, value in named:
        entries = cast("Sequence[Any]", value) if isinstance(value, list | tuple) else None
        if entries is None or len(entries) != ranks:
            found = type(cast("object", value)).__name__ if entries is None else f"{len(entries)} entries"
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
