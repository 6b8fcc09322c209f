"""Scatter and collect: how the arguments of one call reach the ranks, and how their results become one.

A call goes through three steps. In the caller's thread, batches are stored (and, where they are to be split, cut into
views first), so the caller may go on changing its own. Then futures among the arguments are waited for, as far as their
headers; nothing in the workers waits meanwhile. Now the rows are known, and every rank's arguments follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from asyncrl.data.codec import Encoded
from asyncrl.data.future import DataProtoFuture, Future
from asyncrl.data.plan import Plan, Rows
from asyncrl.data.proto import DataProto
from asyncrl.errors import DispatchError
from asyncrl.single_controller.call import Arguments, StoredValue
from asyncrl.single_controller.dispatch import LIST_MODES, PROTO_MODES, SPLIT_MODES, Dispatch, DispatchMode
from asyncrl.single_controller.mesh import Mesh, MeshDispatch

__all__ = ["Scatter", "Share", "collect", "leaves", "rows_of", "shares", "to_fetch"]


@dataclass(frozen=True, slots=True)
class Share:
    """The rows of a batch that one rank gets; the last ``padding`` of them are repeated ones."""

    index: Rows
    padding: int = 0


NO_ROWS = Share(range(0))


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

    Args:
        store: puts one argument where the workers can fetch it, or leaves it as it is.
        store_parts: the same for the parts of a batch with these rows.
        refer: what a rank, or all of them, get, with what the backend's own references stand for.

    Attributes:
        futures: those among the arguments.
        shares: rows for each rank, or for each dp rank of a mesh.
        mesh: where the mode is a :class:`MeshDispatch`. If not known yet, to be set before :meth:`arguments`.

    Raises:
        DispatchError: the arguments do not suit the mode.
    """

    __slots__ = (
        "_group",
        "_listed",
        "_mode",
        "_pad",
        "_ranks",
        "_refer",
        "_rows",
        "_store",
        "_store_parts",
        "_whole",
        "futures",
        "mesh",
        "shares",
    )

    def __init__(
        self,
        mode: DispatchMode,
        arguments: Arguments,
        *,
        ranks: int,
        pad: bool,
        store: Callable[[Any], Any],
        store_parts: Callable[[DataProto, Sequence[Rows]], list[Any]] | None = None,
        refer: Callable[[Arguments], Arguments] | None = None,
        group: object = None,
        mesh: Mesh | None = None,
    ) -> None:
        self._mode = mode
        self._ranks = ranks
        self._pad = pad
        self._store = store

        def store_each(data: DataProto, parts: Sequence[Rows]) -> list[Any]:
            return [store(rows_of(data, part)) for part in parts]

        self._store_parts = store_parts or store_each
        self._refer = refer
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
            self._keep_batches()
        elif not self.futures:
            self.apply_custom()

    def _keep_batches(self) -> None:
        if self._mode in LIST_MODES:
            self._listed = [self._stored(each) for each in _transpose(self._whole, self._ranks)]
        elif self.splits:
            self._whole = _mapped(self._whole, self._stored_parts if self._parts else self._store)
        else:
            self._whole = self._stored(self._whole)

    def _stored(self, arguments: Arguments) -> Arguments:
        return _mapped(arguments if self._refer is None else self._refer(arguments), self._store)

    def apply_custom(self) -> None:
        """Call the mode's own function, if it has one, once the futures are done. It may give others to wait for."""
        if self._listed is not None or not isinstance(self._mode, dict):
            return
        args, kwargs = self._mode["dispatch_fn"](self._group, *self._whole.args, **self._whole.kwargs)
        listed = _transpose(Arguments(tuple(args), dict(kwargs)), self._ranks)
        self._listed = [self._stored(each) for each in listed]
        self.futures = [leaf for each in self._listed for leaf in leaves(each) if isinstance(leaf, Future)]

    @property
    def is_here(self) -> bool:
        """Whether :meth:`arguments` can be asked at once, and runs no code of the user's."""
        if isinstance(self._mode, dict):
            return False
        if isinstance(self._mode, MeshDispatch) and self.mesh is None:
            return False
        return all(future.done() and future.outcome.state == "done" for future in self.futures)

    @property
    def splits(self) -> bool:
        """Whether batches are split by rows."""
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
        return _Parts(self._store_parts(leaf, [share.index for share in self._shares_of(len(leaf))]))

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

    def snapshot(self) -> None:
        """Copy the batches that are the caller's own still."""
        if self._listed is not None:
            self._listed = [_mapped(each, _own) for each in self._listed]
        else:
            self._whole = _mapped(self._whole, _own)

    def arguments(self) -> list[Arguments]:
        """Arguments by rank, with a :class:`Plan` for every batch. To be asked once the futures are done.

        Raises:
            DispatchError: batches differ in their rows, or the arguments do not suit the mode.
            BaseException: what a future failed with.
        """
        if self._listed is not None:
            if not self.futures:
                return self._listed
            return [_mapped(each, _arrived) for each in self._listed]
        whole = _mapped(self._whole, _arrived) if self.futures else self._whole
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


def _own(leaf: Any) -> Any:
    if isinstance(leaf, _Parts):
        return _Parts([_own(part) for part in leaf.parts])
    if isinstance(leaf, DataProto):
        return leaf.clone()
    return leaf.own() if isinstance(leaf, Encoded) else leaf


def _arrived(leaf: Any) -> Any:
    return leaf.outcome.get() if isinstance(leaf, Future) else leaf


def to_fetch(arguments: Arguments, *, batches: bool = False) -> bool:
    """Whether a worker has to fetch something before it calls its method; ``batches`` counts those that come along."""
    kinds = (Plan, StoredValue, DataProto, Encoded) if batches else (Plan, StoredValue)
    for leaf in leaves(arguments):  # noqa: SIM110  on the way of every call: a generator costs more than what it does
        if isinstance(leaf, kinds):
            return True
    return False


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


_NESTED = frozenset({list, tuple, dict})


def leaves(arguments: Arguments) -> list[Any]:
    """Everything in the arguments, and in lists, tuples and dicts among them."""
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
    """The same with ``function`` of every leaf."""
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
    """From lists by rank in every argument to arguments in every rank."""
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


def rows_of(data: DataProto, index: Rows) -> DataProto:
    """These rows of a batch that is here: a view if they are consecutive."""
    if isinstance(index, range):
        return data.slice(index.start, index.stop)
    return data.select_idxs(index)
