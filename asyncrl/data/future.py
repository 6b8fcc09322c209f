"""DataProtoFuture: a batch that is still being made, as a value."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeVar, cast

from asyncrl.data.outcome import Outcome
from asyncrl.errors import DeadlineError
from asyncrl.single_controller.controller_loop import ControllerLoop, TaskOwner, Work

if TYPE_CHECKING:
    from collections.abc import Coroutine

    import numpy as np
    import torch

    from asyncrl.data.plan import Header, Plan
    from asyncrl.data.proto import DataProto

__all__ = ["DataProtoFuture", "Future"]

T = TypeVar("T")


class Future(Generic[T]):
    """What a call will return. Await it in any event loop, or call :meth:`result` in any thread.

    Futures are shared values: leaving an ``await`` early (``asyncio.wait_for``, a cancelled task) leaves the call
    going for the others who hold it; :meth:`cancel` and :meth:`deadline` end it in the workers.
    """

    def __init__(self, loop: ControllerLoop, label: str) -> None:
        self.controller = loop
        self.outcome: Outcome[Any] = Outcome(label)
        self._work: Work | None = None

    # -------------------------------------------------------------------------------------------------- the making

    def run(self, make: Callable[[], Coroutine[Any, Any, Any]], owner: TaskOwner) -> Self:
        """Let ``owner`` run ``make()`` for this future."""
        self._work = owner.spawn(make, self.outcome.settle)
        return self

    def start(self) -> None:
        """Begin what nobody has begun yet. Awaiting does it too."""

    def _value(self, raw: Any) -> T:
        return cast("T", raw)

    async def _value_async(self, raw: Any) -> T:
        return cast("T", raw)

    async def completed(self) -> Any:
        """The outcome as it is, without a payload: a plan, if this is a batch. Does not suspend if it is there."""
        self.start()
        await self.outcome.completion()
        try:
            return self.outcome.get()
        except concurrent.futures.CancelledError as error:
            raise asyncio.CancelledError(str(error)) from None

    # --------------------------------------------------------------------------------------------------- the using

    def done(self) -> bool:
        """Finished, failed or cancelled. The payload of a finished batch may still be with its workers."""
        return self.outcome.complete

    def cancelled(self) -> bool:
        return self.outcome.state == "cancelled"

    def cancel(self) -> bool:
        """End the call: its coroutines in the workers are cancelled, or it is never submitted.

        Returns:
            False if it had finished.
        """
        if not self.outcome.cancel():
            return False
        if self._work is not None:
            self._work.cancel()
        return True

    def result(self, timeout: float | None = None) -> T:
        """Wait for the value, blocking this thread for at most ``timeout`` seconds.

        Raises:
            DeadlineError: ``timeout`` passed; the call goes on.
            RuntimeError: called on the controller loop itself, which would wait for itself: ``await`` there.
        """
        return self._value(self._wait(timeout))

    def get(self, timeout: float | None = None) -> T:
        """:meth:`result`, under verl's name."""
        return self.result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the call failed with, or None. Waits like :meth:`result`, and raises if the call was cancelled."""
        try:
            self._wait(timeout)
        except concurrent.futures.CancelledError:
            raise
        except BaseException:
            if self.outcome.state != "failed":
                raise
            return self.outcome.error()
        return None

    def add_done_callback(self, callback: Callable[[Self], object]) -> None:
        """Call ``callback(self)`` on the controller loop once the call has finished, failed or been cancelled."""
        self.start()
        self.outcome.subscribe(lambda: self.controller.notify(callback, self))

    def deadline(self, timeout_s: float) -> Self:
        """Fail with :class:`DeadlineError` and cancel the call unless it finishes within ``timeout_s`` from now.

        Returns:
            This future, so that ``await group.update(batch).deadline(30)`` reads well.
        """
        self.start()
        self.controller.call(self._arm, timeout_s)
        return self

    def _arm(self, timeout_s: float) -> None:
        timer = self.controller.loop.call_later(timeout_s, self._expire, timeout_s)
        self.outcome.subscribe(lambda: self.controller.notify(timer.cancel))

    def _expire(self, timeout_s: float) -> None:
        label = self.outcome.label
        error = DeadlineError(f"{label} did not finish within {timeout_s:g} s", waiting_for=label, timeout_s=timeout_s)
        if self.outcome.fail(error) and self._work is not None:
            self._work.cancel()

    def __await__(self) -> Generator[Any, None, T]:
        return self._get_async().__await__()

    async def _get_async(self) -> T:
        return await self._value_async(await self.completed())

    def _wait(self, timeout_s: float | None) -> Any:
        self.start()
        if not self.outcome.complete:
            if self.controller.is_here:
                raise RuntimeError(
                    f"result() of {self.outcome.label} was called on the controller loop, which would wait for "
                    "itself: use `await future` there"
                )
            if not self.controller.loop.is_running():
                raise RuntimeError(
                    f"{self.outcome.label} cannot finish: the event loop it runs on is not running any more"
                )
            if not self.outcome.wait(timeout_s):
                raise DeadlineError(
                    f"{self.outcome.label} has not finished after {timeout_s:g} s; it goes on",
                    waiting_for=self.outcome.label,
                    timeout_s=timeout_s or 0.0,
                )
        return self.outcome.get()

    def _status(self) -> str:
        return self.outcome.status

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.outcome.label}: {self._status()}>"

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} stays in its process: hand it to a worker group's method, or send its result")


class DataProtoFuture(Future["DataProto"]):
    """A batch that is still being made, or that lies with its workers: a value that can be cut, joined and handed on.

    Operations return at once, finished or not, and mean what they mean on :class:`DataProto`:
    ``f.slice(0, 3).result()`` equals ``f.result().slice(0, 3)``. Nothing is changed in place. The payload moves only
    for ``await``/:meth:`result`, once; a future handed to a worker group moves from worker to worker, each rank
    fetching the blocks that hold its rows. :meth:`header` tells rows, columns and ``meta_info`` without any payload.

        >>> future = trainer.update(batch)  # doctest: +SKIP
        >>> first, second = future.chunk(2)  # doctest: +SKIP
        >>> scores = scorer.score(first)  # doctest: +SKIP
    """

    def __init__(
        self,
        loop: ControllerLoop,
        label: str,
        *,
        parents: Sequence[DataProtoFuture] = (),
        apply: Callable[[Sequence[Plan]], Plan] | None = None,
    ) -> None:
        super().__init__(loop, label)
        self._parents = tuple(parents)
        self._apply = apply
        self._start_lock = threading.Lock()
        self._started = apply is None
        self._data: DataProto | None = None

    @staticmethod
    def from_plan(plan: Plan, label: str, loop: ControllerLoop | None = None) -> DataProtoFuture:
        """A finished future."""
        future = DataProtoFuture(loop or ControllerLoop.default(), label)
        future.outcome.succeed(plan)
        return future

    @staticmethod
    def of(data: DataProto) -> DataProtoFuture:
        """A batch that is here, as a finished future."""
        from asyncrl.data.plan import Plan

        return DataProtoFuture.from_plan(Plan.of(data), "batch")

    # ------------------------------------------------------------------------------------------------- without payload

    async def header(self) -> Header:
        """Rows, schema, ``meta_info`` and size, as soon as the call has finished."""
        header = (await self.plan()).header
        return replace(header, meta_info=dict(header.meta_info))

    async def meta_info(self) -> dict[str, Any]:
        """``meta_info`` of the batch, as soon as the call has finished."""
        return (await self.header()).meta_info

    async def plan(self) -> Plan:
        """Which rows and columns of which blocks, as soon as the call has finished."""
        return cast("Plan", await self.completed())

    def __len__(self) -> int:
        if not self.done():
            raise RuntimeError(
                f"the number of rows of {self.outcome.label} is not known yet: "
                "`(await future.header()).rows` waits for it"
            )
        return cast("Plan", self.outcome.get()).header.rows

    def __bool__(self) -> bool:
        return True

    # ------------------------------------------------------------------------------------------------------------ rows

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProtoFuture:
        """Rows as Python slices a list."""
        text = ":".join("" if each is None else str(each) for each in (start, end))
        return self._derive(f"[{text}{'' if step is None else f':{step}'}]", lambda plan: plan.slice(start, end, step))

    def select_idxs(
        self, idxs: Sequence[int] | Sequence[bool] | np.ndarray[Any, Any] | torch.Tensor
    ) -> DataProtoFuture:
        """The rows ``idxs``: integers in their order, or one boolean a row."""
        import numpy as np
        import torch

        from asyncrl.data.columns import row_index

        kept: Any = np.array(idxs.detach().cpu().numpy() if isinstance(idxs, torch.Tensor) else idxs)
        return self._derive(".select_idxs", lambda plan: plan.take(row_index(kept, plan.header.rows)))

    def __getitem__(self, item: Any) -> DataProtoFuture:
        """Rows by a slice or an index of rows."""
        import builtins

        if isinstance(item, builtins.slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, int):
            raise TypeError("a future gives batches, not single rows: use future[i:i + 1], or (await future)[i]")
        return self.select_idxs(item)

    def __iter__(self) -> NoReturn:
        raise TypeError(f"{self.outcome.label} cannot be iterated before its rows are here: `await` it first")

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """``chunks`` parts of consecutive rows, by the rule of :meth:`DataProto.chunk`, before the rows are known."""
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

        Raises:
            RuntimeError: the number of rows, and so the number of parts, is not known yet.
        """
        if split_size < 1:
            from asyncrl.errors import SchemaError

            raise SchemaError(f"split_size must be at least 1, got {split_size}")
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: Sequence[DataProtoFuture | DataProto]) -> DataProtoFuture:
        """The rows of all, in order.

        Raises:
            SchemaError: there is none.
        """
        from asyncrl.data.plan import Plan

        futures = [_as_future(each) for each in data]
        if not futures:
            Plan.concat([])
        loop = next((each.controller for each in data if isinstance(each, DataProtoFuture)), futures[0].controller)
        label = f"concat({', '.join(each.outcome.label for each in futures)})"
        return DataProtoFuture(loop, label, parents=futures, apply=Plan.concat)

    # --------------------------------------------------------------------------------------------------------- columns

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> DataProtoFuture:
        """Only these columns and entries of ``meta_info``; None means all."""
        keys = [
            None if each is None else [each] if isinstance(each, str) else list(each)
            for each in (batch_keys, non_tensor_batch_keys, meta_info_keys)
        ]
        return self._derive(".select", lambda plan: plan.select(*keys))

    def union(self, other: DataProtoFuture | DataProto) -> DataProtoFuture:
        """These columns and those of ``other``, whose rows are the same rows. Neither is changed."""
        right = _as_future(other)
        label = f"{self.outcome.label}.union({right.outcome.label})"
        return DataProtoFuture(
            self.controller, label, parents=(self, right), apply=lambda plans: plans[0].union(plans[1])
        )

    # ------------------------------------------------------------------------------------------------------- machinery

    def _derive(self, text: str, apply: Callable[[Plan], Plan]) -> DataProtoFuture:
        return DataProtoFuture(
            self.controller, self.outcome.label + text, parents=(self,), apply=lambda plans: apply(plans[0])
        )

    def done(self) -> bool:
        if not self._started and all(parent.done() for parent in self._parents):
            self.start()
        return super().done()

    def start(self) -> None:
        with self._start_lock:
            if self._started:
                return
            self._started = True
        for parent in self._parents:
            parent.start()
        if all(parent.outcome.complete for parent in self._parents):
            self._resolve_now()
        else:
            self.run(self._resolve, self.controller.owner)

    def _resolve_now(self) -> None:
        assert self._apply is not None
        try:
            plan = self._apply([parent.outcome.get() for parent in self._parents])
        except concurrent.futures.CancelledError:
            self.outcome.cancel()
        except Exception as error:  # noqa: BLE001  whatever it is, it is what this future failed with
            self.outcome.fail(error)
        else:
            self.outcome.succeed(plan)

    async def _resolve(self) -> Plan:
        assert self._apply is not None
        return self._apply([await parent.plan() for parent in self._parents])

    def _value(self, raw: Any) -> DataProto:
        if self._data is None:
            self._data = cast("Plan", raw).get()
        return self._data.select()

    async def _value_async(self, raw: Any) -> DataProto:
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


def _as_future(data: DataProtoFuture | DataProto) -> DataProtoFuture:
    return data if isinstance(data, DataProtoFuture) else DataProtoFuture.of(data)
