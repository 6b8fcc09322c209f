"""DataProtoFuture: a batch that is still being made, as a value."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, cast

from asyncrl.data.pending import Future
from asyncrl.single_controller.controller_loop import ControllerLoop

if TYPE_CHECKING:
    import numpy as np
    import torch

    from asyncrl.data.declared import Declared
    from asyncrl.data.plan import Header, Plan
    from asyncrl.data.progress import Progress
    from asyncrl.data.proto import DataProto
    from asyncrl.data.schema import Schema

__all__ = ["DataProtoFuture", "FinishedRows", "Future"]


@dataclass(frozen=True, slots=True)
class FinishedRows:
    """Part of a batch, with a payload that lies where it was made.

    ``rows`` are counted in the arguments of the call: where it returns one row for each, they are the rows of the
    result; where it returns k, those times k.

        >>> FinishedRows(range(0, 3), future).rows
        range(0, 3)
    """

    rows: range
    batch: DataProtoFuture


class DataProtoFuture(Future["DataProto"]):
    """A batch that is still being made, or that lies with its workers: a value that can be cut, joined and handed on.

    Operations return at once, finished or not, and mean what they mean on :class:`DataProto`:
    ``f.slice(0, 3).result()`` equals ``f.result().slice(0, 3)``. Nothing is changed in place. The payload moves only
    for ``await``/:meth:`result`, once; a future handed to a worker group moves from worker to worker, each rank
    fetching the blocks that hold its rows. :meth:`header` tells rows, columns and ``meta_info`` without any payload.

        >>> doubled = group.double(data)  # at once
        >>> again = group.double(doubled.slice(0, 2))  # a future of a future
        >>> again.result().batch["x"].tolist()
        [4, 8]
    """

    def __init__(
        self,
        loop: ControllerLoop,
        label: str,
        *,
        inputs: Sequence[Future[Any]] = (),
        progress: Progress | None = None,
        parents: Sequence[DataProtoFuture] = (),
        apply: Callable[[Sequence[Plan]], Plan] | None = None,
    ) -> None:
        super().__init__(loop, label, inputs=inputs or parents, progress=progress)
        self.is_part = apply is not None
        self._parents = tuple(parents)
        self._apply = apply
        self._of_part: Callable[[Plan], Plan] = _unchanged
        self._start_lock = threading.Lock()
        self._started = apply is None
        self._data: DataProto | None = None
        self.declared: Declared | None = None

    @staticmethod
    def from_plan(plan: Plan, label: str, loop: ControllerLoop | None = None) -> DataProtoFuture:
        """A finished future of what ``plan`` describes.

        >>> DataProtoFuture.from_plan(asyncio.run(future.plan()), "again").result() == data
        True
        """
        future = DataProtoFuture(loop or ControllerLoop.default(), label)
        future.outcome.succeed(plan)
        return future

    @staticmethod
    def of(data: DataProto) -> DataProtoFuture:
        """A batch that is here, as a finished future.

        >>> DataProtoFuture.of(data).done()
        True
        """
        from asyncrl.data.plan import Plan

        return DataProtoFuture.from_plan(Plan.of(data), "batch")

    # ------------------------------------------------------------------------------------------------- without payload

    async def header(self) -> Header:
        """Rows, schema, ``meta_info`` and size, as soon as the call has finished.

        >>> asyncio.run(future.header()).rows
        3
        """
        header = (await self.plan()).header
        return replace(header, meta_info=dict(header.meta_info))

    async def meta_info(self) -> dict[str, Any]:
        """``meta_info`` of the batch, as soon as the call has finished.

        >>> asyncio.run(future.meta_info())
        {'step': 7}
        """
        return (await self.header()).meta_info

    async def plan(self) -> Plan:
        """Which rows and columns of which blocks, as soon as the call has finished.

        >>> asyncio.run(future.plan()).header.schema.names
        ('x', 'name')
        """
        return cast("Plan", await self.completed())

    async def rows(self) -> AsyncGenerator[FinishedRows, None]:
        """What has finished, rank by rank as they finish, without any payload; all parts joined in order are the batch.

        The result of a call whose rows are split comes in as many parts as ranks had rows; so does what ``select``,
        ``pop``, ``rename`` and ``then`` make of it. Any other future is one part. If a rank fails, the parts that had
        finished are given first, then the error is raised. Leaving early leaves the call going.

            >>> async def parts():
            ...     return [part.rows async for part in future.rows()]
            >>> asyncio.run(parts())
            [range(0, 3)]
        """
        self.start()
        given = False
        if self.progress is not None:
            async with contextlib.aclosing(self.progress.finished(self.outcome)) as parts:
                async for part in parts:
                    label = f"{self.outcome.label} of rows {part.rows.start}:{part.rows.stop}"
                    plan = self._of_part(part.make())
                    yield FinishedRows(part.rows, DataProtoFuture.from_plan(plan, label, self.controller))
                    given = True
        whole = await self.plan()
        if not given:
            yield FinishedRows(range(whole.header.rows), self)

    @property
    def knows_rows(self) -> bool:
        """Whether ``len`` is known: the call has finished, or declares it.

        >>> future.knows_rows
        True
        """
        return (self.declared is not None and self.declared.rows is not None) or self.done()

    @property
    def schema(self) -> Schema:
        """The columns, once the call has finished; before, if its method declares them.

            >>> future.schema.names
            ('x', 'name')

        Raises:
            RuntimeError: they are not known yet.
        """
        if self.declared is not None and self.declared.schema is not None:
            return self.declared.schema.any_rows()
        if not self.done():
            raise RuntimeError(
                f"the columns of {self.outcome.label} are not known yet: `(await future.header()).schema` waits for "
                "them, and register(schema=...) declares them"
            )
        return cast("Plan", self.outcome.get()).header.schema.any_rows()

    def __len__(self) -> int:
        if self.declared is not None and self.declared.rows is not None:
            return self.declared.rows
        if not self.done():
            raise RuntimeError(
                f"the number of rows of {self.outcome.label} is not known yet: "
                "`(await future.header()).rows` waits for it, and register(rows=...) declares it"
            )
        return cast("Plan", self.outcome.get()).header.rows

    def __bool__(self) -> bool:
        return True

    # ------------------------------------------------------------------------------------------------------------ rows

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProtoFuture:
        """Rows as Python slices a list.

        >>> future.slice(0, 2).result().batch["x"].tolist()
        [1, 2]
        """
        text = ":".join("" if each is None else str(each) for each in (start, end))
        import builtins

        return self._derive(
            f"[{text}{'' if step is None else f':{step}'}]",
            lambda plan: plan.slice(start, end, step),
            rows=lambda count: len(range(count)[builtins.slice(start, end, step)]),
        )

    def select_idxs(
        self, idxs: Sequence[int] | Sequence[bool] | np.ndarray[Any, Any] | torch.Tensor
    ) -> DataProtoFuture:
        """The rows ``idxs``: integers in their order, or one boolean a row.

        >>> future.select_idxs([2, 0]).result().batch["x"].tolist()
        [3, 1]
        """
        import numpy as np
        import torch

        from asyncrl.data.columns import row_index

        kept: Any = np.array(idxs.detach().cpu().numpy() if isinstance(idxs, torch.Tensor) else idxs)
        return self._derive(".select_idxs", lambda plan: plan.take(row_index(kept, plan.header.rows)))

    def __getitem__(self, item: Any) -> DataProtoFuture:
        """Rows by a slice or an index of rows.

        >>> future[1:].result() == data[1:]
        True
        """
        import builtins

        if isinstance(item, builtins.slice):
            rows: Any = cast("Any", item)
            return self.slice(rows.start, rows.stop, rows.step)
        if isinstance(item, int):
            raise TypeError("a future gives batches, not single rows: use future[i:i + 1], or (await future)[i]")
        return self.select_idxs(item)

    def __iter__(self) -> NoReturn:
        raise TypeError(f"{self.outcome.label} cannot be iterated before its rows are here: `await` it first")

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """``chunks`` parts of consecutive rows, by the rule of :meth:`DataProto.chunk`, before the rows are known.

            >>> [part.result().batch["x"].tolist() for part in future.chunk(3)]
            [[1], [2], [3]]

        Raises:
            SchemaError: ``chunks`` is below 1; when a part is used, as :meth:`DataProto.chunk`.
        """
        if chunks < 1:
            from asyncrl.errors import SchemaError

            raise SchemaError(f"chunks must be at least 1, got {chunks}")
        cut: list[list[Plan]] = []

        def part(number: int) -> Callable[[Plan], Plan]:
            def apply(plan: Plan) -> Plan:
                if not cut:
                    cut.append(plan.chunk(chunks))
                return cut[0][number]

            return apply

        return [self._derive(f".chunk({chunks})[{number}]", part(number)) for number in range(chunks)]

    def split(self, split_size: int) -> list[DataProtoFuture]:
        """Parts of ``split_size`` rows, the last one perhaps smaller.

            >>> [len(part) for part in future.split(2)]
            [2, 1]

        Raises:
            RuntimeError: the number of rows, and so the number of parts, is not known yet.
            SchemaError: ``split_size`` is below 1.
        """
        if split_size < 1:
            from asyncrl.errors import SchemaError

            raise SchemaError(f"split_size must be at least 1, got {split_size}")
        if not self.knows_rows:
            raise RuntimeError(
                f"into how many parts of {split_size} rows {self.outcome.label} splits is not known yet: "
                "`await future.header()` first, or use chunk, whose number of parts is given"
            )
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    def reorder(self, indices: Sequence[int] | np.ndarray[Any, Any] | torch.Tensor) -> DataProtoFuture:
        """The rows ``indices``. A new future: unlike a batch, a future is never changed in place.

        >>> future.reorder([2, 1, 0]).result().batch["x"].tolist()
        [3, 2, 1]
        """
        return self.select_idxs(indices)

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProtoFuture:
        """Every row ``repeat_times`` times: a a b b if ``interleave``, else a b a b. Fetched once for all copies.

            >>> future.repeat(2).result().batch["x"].tolist()
            [1, 1, 2, 2, 3, 3]

        Raises:
            SchemaError: ``repeat_times`` is negative.
        """
        if repeat_times < 0:
            from asyncrl.errors import SchemaError

            raise SchemaError(f"repeat_times must not be negative, got {repeat_times}")
        return self._derive(
            f".repeat({repeat_times})",
            lambda plan: plan.repeat(repeat_times, interleave=interleave),
            rows=lambda count: count * repeat_times,
        )

    @staticmethod
    def concat(data: Iterable[DataProtoFuture | DataProto]) -> DataProtoFuture:
        """The rows of all, in order.

            >>> len(DataProtoFuture.concat([future, data]).result())
            6

        Raises:
            SchemaError: there is none.
        """
        from asyncrl.data.plan import Plan

        given = list(data)
        futures = [_as_future(each) for each in given]
        if not futures:
            Plan.concat([])
        loop = next((each.controller for each in given if isinstance(each, DataProtoFuture)), futures[0].controller)
        label = f"concat({', '.join(each.outcome.label for each in futures)})"
        return DataProtoFuture(loop, label, parents=futures, apply=Plan.concat)

    # --------------------------------------------------------------------------------------------------------- columns

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> DataProtoFuture:
        """Only these columns and entries of ``meta_info``; None means all.

        >>> future.select(["x"], []).result().columns().names
        ['x']
        """
        keys = _listed(batch_keys, non_tensor_batch_keys, meta_info_keys)
        return self._derive(".select", lambda plan: plan.select(*keys), by_row=True)

    def pop(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> tuple[DataProtoFuture, DataProtoFuture]:
        """``popped, rest = future.pop(...)``: these columns and entries (None means none), and all others.

        A future is a value: it keeps its columns. ``popped`` is what :meth:`DataProto.pop` returns, ``rest`` what it
        leaves.

            >>> popped, rest = future.pop(["x"])
            >>> popped.result().columns().names, rest.result().columns().names
            (['x'], ['name'])
        """
        keys = _listed(batch_keys, non_tensor_batch_keys, meta_info_keys)
        popped = self._derive(".pop", lambda plan: plan.pop(*keys)[0], by_row=True)
        return popped, self._derive(".pop.rest", lambda plan: plan.pop(*keys)[1], by_row=True)

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> DataProtoFuture:
        """Columns of either kind under other names. A new future.

        >>> future.rename("x", "y").result().columns().names
        ['y', 'name']
        """
        old, new = ([each] if isinstance(each, str) else list(each) for each in (old_keys, new_keys))
        return self._derive(".rename", lambda plan: plan.rename(old, new), by_row=True)

    def then(self, function: Callable[[DataProto], DataProto]) -> DataProtoFuture:
        """What ``function`` gives for the rows, applied where they are consumed: here, or in each worker to its rows.

        It works row by row: it gives one row for each, in order, whatever the other rows are. (What needs all rows
        belongs in a worker's method, or after ``await``.) To learn columns and ``meta_info`` before there are rows, it
        is applied to an empty batch of the same columns first. It may write into its batch. On Ray it is pickled.

        Raises, when the result is used:
            UserCodeError: it raised (its error is the ``__cause__`` in this process) or returned no batch.
            SchemaError: not one row for each, or other columns or ``meta_info`` than for no rows.

            >>> double = future.then(lambda batch: batch.with_columns(double=batch.batch["x"] * 2))
            >>> double.result().batch["double"].tolist()
            [2, 4, 6]
        """
        label = getattr(function, "__name__", type(function).__name__)
        name = f"{label}, given to then() of {self.outcome.label},"
        return self._derive(f".then({label})", lambda plan: plan.then(function, name=name), by_row=True)

    def union(self, other: DataProtoFuture | DataProto) -> DataProtoFuture:
        """These columns and those of ``other``, whose rows are the same rows. Neither is changed.

        >>> future.union(future.select(["x"], []).rename("x", "y")).result().columns().names
        ['x', 'y', 'name']
        """
        right = _as_future(other)
        label = f"{self.outcome.label}.union({right.outcome.label})"
        return DataProtoFuture(
            self.controller, label, parents=(self, right), apply=lambda plans: plans[0].union(plans[1])
        )

    # ------------------------------------------------------------------------------------------------------- machinery

    def _derive(
        self,
        text: str,
        apply: Callable[[Plan], Plan],
        *,
        by_row: bool = False,
        rows: Callable[[int], int] | None = None,
    ) -> DataProtoFuture:
        """``by_row``: what it does to parts of the rows, joined, is what it does to all. ``rows``: how many it has."""
        derived = DataProtoFuture(
            self.controller,
            self.outcome.label + text,
            parents=(self,),
            apply=lambda plans: apply(plans[0]),
            progress=self.progress if by_row else None,
        )
        if self.declared is not None and (by_row or rows is not None):
            derived.declared = self.declared.with_rows(rows or (lambda count: count))
        if by_row and self.progress is not None:
            earlier = self._of_part
            derived._of_part = apply if earlier is _unchanged else lambda plan: apply(earlier(plan))
        return derived

    def _lineage(self) -> list[DataProtoFuture]:
        """What has to be started for this: it comes last, and everything after what it is made of."""
        found: dict[int, DataProtoFuture] = {}
        open_ones: list[tuple[DataProtoFuture, bool]] = [(self, False)]
        while open_ones:
            future, expanded = open_ones.pop()
            if id(future) in found or future._started:  # noqa: SLF001  of this class
                continue
            if expanded:
                found[id(future)] = future
            else:
                open_ones.append((future, True))
                open_ones += [(parent, False) for parent in future._parents]  # noqa: SLF001
        return list(found.values())

    def done(self) -> bool:
        for future in self._lineage():
            if all(Future[Any].done(parent) for parent in future._parents):  # noqa: SLF001  of this class
                future._begin()  # noqa: SLF001
        return super().done()

    def start(self) -> None:
        for future in self._lineage():
            future._begin()  # noqa: SLF001  of this class
        super().start()

    def _begin(self) -> None:
        with self._start_lock:
            if self._started:
                return
            self._started = True
            parents, apply = self._parents, self._apply
            # From here on, whoever runs it holds what it is made of.
            self._parents, self._apply = (), None
        assert apply is not None
        if self.outcome.complete:
            return
        if all(parent.outcome.complete for parent in parents):
            self._resolve_now(parents, apply)
        else:
            self.run(lambda: _resolved(parents, apply), self.controller.owner)

    def _resolve_now(self, parents: Sequence[DataProtoFuture], apply: Callable[[Sequence[Plan]], Plan]) -> None:
        try:
            plan = apply([parent.outcome.get() for parent in parents])
        except concurrent.futures.CancelledError:
            self.outcome.cancel()
        except Exception as error:  # noqa: BLE001  whatever it is, it is what this future failed with
            self.outcome.fail(error)
        else:
            self.outcome.succeed(plan)

    def value_of(self, raw: Any) -> DataProto:
        if self._data is None:
            self._data = cast("Plan", raw).get()
        return self._data.select()

    async def value_of_async(self, raw: Any) -> DataProto:
        if self._data is None:
            self._data = await cast("Plan", raw).fetch()
        return self._data.select()

    def _status(self) -> str:
        if self.outcome.state == "done":
            header = cast("Plan", self.outcome.get()).header
            names = ", ".join(header.schema.names)
            return f"{header.rows} rows, {header.size_bytes} bytes ({names})"
        return super()._status()

    def __reduce__(self) -> Any:
        if self.done() and self.outcome.state == "done":
            return DataProtoFuture.from_plan, (self.outcome.get(), self.outcome.label)
        return super().__reduce__()


def _unchanged(plan: Plan) -> Plan:
    return plan


async def _resolved(parents: Sequence[DataProtoFuture], apply: Callable[[Sequence[Plan]], Plan]) -> Plan:
    return apply([await parent.plan() for parent in parents])


def _listed(*keys: Iterable[str] | None) -> list[list[str] | None]:
    return [None if each is None else [each] if isinstance(each, str) else list(each) for each in keys]


def _as_future(data: DataProtoFuture | DataProto) -> DataProtoFuture:
    return data if isinstance(data, DataProtoFuture) else DataProtoFuture.of(data)
