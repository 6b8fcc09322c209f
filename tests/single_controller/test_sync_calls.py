"""The synchronous calls of a worker run one at a time, in order, in one thread, whatever is cancelled."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.single_controller.host import SyncCalls


@st.composite
def arrivals(draw: st.DrawFn) -> list[tuple[int, bool]]:
    """Of each call: steps of the loop that its arguments take, and whether it is cancelled on the way."""
    return draw(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=12))


@given(calls=arrivals(), inline=st.booleans(), cancel_after=st.integers(0, 6))
def test_calls_run_one_at_a_time_in_order_and_each_once(
    calls: list[tuple[int, bool]], inline: bool, cancel_after: int
) -> None:
    began: list[int] = []
    at_once = threading.Lock()
    threads: set[int] = set()

    def work(number: int) -> int:
        assert at_once.acquire(blocking=False), "two at once"
        began.append(number)
        threads.add(threading.get_ident())
        at_once.release()
        return number

    async def one(queue: SyncCalls, number: int, steps: int) -> int:
        async with queue.enqueue() as queued:
            await queued.wait_second()
            for _ in range(steps):
                await asyncio.sleep(0)
            return await queued.run(lambda: work(number))

    async def program() -> list[Any]:
        queue = SyncCalls(inline=inline)
        tasks = [asyncio.create_task(one(queue, number, steps)) for number, (steps, _) in enumerate(calls)]
        for _ in range(cancel_after):
            await asyncio.sleep(0)
        for task, (_, cancelled) in zip(tasks, calls, strict=True):
            if cancelled:
                task.cancel()
        async with asyncio.timeout(10):
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            # Whatever was cancelled, the line is free again.
            async with queue.enqueue() as queued:
                assert await queued.run(lambda: "after") == "after"
        queue.stop()
        return ends

    ends = asyncio.run(program())
    assert began == sorted(set(began))
    assert len(threads) <= 1
    for number, (end, (_, cancelled)) in enumerate(zip(ends, calls, strict=True)):
        assert end == number or (cancelled and isinstance(end, asyncio.CancelledError))


async def call(queue: SyncCalls, function: Any) -> Any:
    async with queue.enqueue() as queued:
        return await queued.run(function)


async def test_the_next_call_begins_while_the_loop_is_busy() -> None:
    queue = SyncCalls()
    began = threading.Event()
    open_ = threading.Event()
    first = asyncio.create_task(call(queue, open_.wait))
    second = asyncio.create_task(call(queue, began.set))
    await asyncio.sleep(0.05)  # both stand in line, the second one ready
    open_.set()
    assert began.wait(5)  # blocks this loop: nobody but the thread can have begun it
    await asyncio.gather(first, second)
    queue.stop()


async def test_a_running_call_that_is_cancelled_keeps_its_place_until_it_ends() -> None:
    queue = SyncCalls()
    open_, over = threading.Event(), threading.Event()

    def work() -> None:
        open_.wait()
        time.sleep(0.02)
        over.set()

    running = asyncio.create_task(call(queue, work))
    await asyncio.sleep(0.05)
    running.cancel()
    behind = asyncio.create_task(call(queue, over.is_set))
    with pytest.raises(asyncio.CancelledError):
        await running
    open_.set()
    assert await behind
    queue.stop()


async def test_neither_results_nor_arguments_are_kept_while_the_next_one_runs() -> None:
    class Batch:
        pass

    queue = SyncCalls()
    begun, open_ = threading.Event(), threading.Event()
    given_, made, raised = Batch(), Batch(), Batch()
    watched = [weakref.ref(each) for each in (given_, made, raised)]

    def fails(batch: Batch) -> None:
        raise ValueError(batch)

    def waits() -> None:
        begun.set()
        open_.wait()

    tasks = [
        asyncio.create_task(call(queue, lambda batch=given_, result=[made]: result.pop())),
        asyncio.create_task(call(queue, lambda batch=raised: fails(batch))),
    ]
    last = asyncio.create_task(call(queue, waits))
    del given_, made, raised
    await asyncio.wait(tasks)
    await asyncio.to_thread(begun.wait)
    assert isinstance(tasks[1].exception(), ValueError)
    del tasks
    gc.collect()
    kept, running = [each() for each in watched], not last.done()
    open_.set()
    await last
    queue.stop()
    assert running
    assert kept == [None] * 3


@pytest.mark.parametrize("error", [StopIteration(), SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("inline", [False, True])
async def test_what_ends_programs_and_generators_ends_the_call(error: BaseException, inline: bool) -> None:
    queue = SyncCalls(inline=inline)

    def work() -> None:
        raise error

    async with asyncio.timeout(5):
        with pytest.raises(RuntimeError, match="raised"):
            await call(queue, work)
        with pytest.raises(RuntimeError, match="raised"):
            await queue.run(work)
    queue.stop()


async def test_calls_end_when_their_thread_is_stopped() -> None:
    queue = SyncCalls()
    open_ = threading.Event()
    hook = asyncio.create_task(queue.run(open_.wait))
    await asyncio.sleep(0.02)
    queued = asyncio.create_task(call(queue, lambda: None))
    await asyncio.sleep(0.02)
    queue.stop()
    async with asyncio.timeout(5):
        with pytest.raises(asyncio.CancelledError):
            await queued
        with pytest.raises(RuntimeError, match="shutdown"):
            await call(queue, lambda: None)
    open_.set()
    await hook


async def test_many_calls_however_the_threads_take_turns() -> None:
    queue = SyncCalls()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(200):
            assert await asyncio.gather(*(call(queue, lambda n=n: n) for n in range(5))) == list(range(5))
    finally:
        sys.setswitchinterval(interval)
        queue.stop()
