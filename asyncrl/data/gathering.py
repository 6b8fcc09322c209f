"""Several futures at once: all of them, or each as it finishes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any, TypeVar

from asyncrl.data.pending import Future
from asyncrl.single_controller.controller_loop import ControllerLoop

__all__ = ["as_completed", "gather"]

T = TypeVar("T")


def gather(*futures: Future[T]) -> Future[list[T]]:
    """The values of all, in this order, as a future. Payloads of batches move when it is awaited.

    It fails as soon as one fails, and is cancelled as soon as one is; the others go on, since futures are shared.
    Cancelling it cancels none of them.

        >>> gather(DataProtoFuture.of(data), DataProtoFuture.of(data[:1])).result()[1].batch["x"].tolist()
        [1]
    """
    loop = futures[0].controller if futures else ControllerLoop.default()
    gathered = _Gathered(loop, f"gather({', '.join(each.outcome.label for each in futures)})", futures)
    return gathered.run(lambda: _all(futures), loop.owner)


async def as_completed(futures: Iterable[Future[T]]) -> AsyncGenerator[Future[T], None]:
    """Iterate over the futures, each as soon as it has finished, failed or been cancelled.

    Leaving the loop early leaves the futures going, and nothing behind once the iterator is closed.

        >>> async def first_column(*futures):
        ...     return [(await future).batch["x"].tolist() async for future in as_completed(futures)]
        >>> asyncio.run(first_column(DataProtoFuture.of(data)))
        [[1, 2, 3]]
    """
    waiting = list(futures)
    loop = asyncio.get_running_loop()
    finished: asyncio.Queue[Future[T]] = asyncio.Queue()
    subscriptions: list[Callable[[], None]] = []

    def arrival(future: Future[T]) -> Callable[[], None]:
        def arrive() -> None:
            # A closed loop has nobody left who waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(finished.put_nowait, future)

        return arrive

    try:
        for future in waiting:
            future.start()
            subscriptions.append(future.outcome.subscribe(arrival(future)))
        for _ in waiting:
            yield await finished.get()
    finally:
        for unsubscribe in subscriptions:
            unsubscribe()


class _Gathered(Future[list[T]]):
    """Its outcome is the list of those of its futures: plans for batches, as it travels to a worker."""

    is_part = True

    def __init__(self, loop: ControllerLoop, label: str, futures: Sequence[Future[T]]) -> None:
        super().__init__(loop, label, inputs=futures)
        self._futures = tuple(futures)

    def value_of(self, raw: Any) -> list[T]:
        return [future.value_of(each) for future, each in zip(self._futures, raw, strict=True)]

    async def value_of_async(self, raw: Any) -> list[T]:
        pairs = zip(self._futures, raw, strict=True)
        return list(await asyncio.gather(*(future.value_of_async(each) for future, each in pairs)))


async def _all(futures: Sequence[Future[Any]]) -> list[Any]:
    async with contextlib.aclosing(as_completed(futures)) as finished:
        async for future in finished:
            await future.completed()
    return [await future.completed() for future in futures]
