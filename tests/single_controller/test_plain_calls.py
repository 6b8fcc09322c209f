"""Plain calls of a worker: one at a time, in order, in one thread, whatever is cancelled on the way."""

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

from asyncrl.single_controller.plain_calls import PlainCalls


@st.composite
def arrivals(draw: st.DrawFn) -> list[tuple[int, int, bool]]:
    """Of each call: its priority, steps of the loop that its arguments take, and whether it is cancelled on the way."""
    return draw(
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.booleans()), min_size=1, max_size=12),
    )


@given(calls=arrivals(), inline=st.booleans(), cancel_after=st.integers(0, 6))
def test_calls_run_one_at_a_time_and_each_once(
    calls: list[tuple[int, int, bool]], inline: bool, cancel_after: int
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

    async def one(plain: PlainCalls, number: int, priority: int, steps: int) -> int:
        async with plain.place(priority) as place:
            await place.next()
            for _ in range(steps):
                await asyncio.sleep(0)
            return await place.run(lambda: work(number))

    async def program() -> list[Any]:
        plain = PlainCalls(inline=inline)
        tasks = [
            asyncio.create_task(one(plain, number, priority, steps))
            for number, (priority, steps, _) in enumerate(calls)
        ]
        for _ in range(cancel_after):
            await asyncio.sleep(0)
        for task, (_, _, cancelled) in zip(tasks, calls, strict=True):
            if cancelled:
                task.cancel()
        async with asyncio.timeout(10):
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            # Whatever was cancelled, the line is free again.
            async with plain.place(0) as place:
                assert await place.run(lambda: "after") == "after"
        plain.stop()
        return ends

    ends = asyncio.run(program())
    assert len(began) == len(set(began))
    assert len(threads) <= 1
    for number, (end, (_, _, cancelled)) in enumerate(zip(ends, calls, strict=True)):
        assert end == number or (cancelled and isinstance(end, asyncio.CancelledError))
    # Of equals, who came first runs first.
    for priority in range(3):
        equals = [number for number in began if calls[number][0] == priority]
        assert equals == sorted(equals)


async def call(plain: PlainCalls, function: Any, *, priority: int = 0) -> Any:
    async with plain.place(priority) as place:
        return await place.run(function)


async def test_the_next_call_begins_while_the_loop_is_busy() -> None:
    plain = PlainCalls()
    began = threading.Event()
    open_ = threading.Event()
    first = asyncio.create_task(call(plain, open_.wait))
    second = asyncio.create_task(call(plain, began.set))
    await asyncio.sleep(0.05)  # both stand in line, the second one ready
    open_.set()
    assert began.wait(5)  # blocks this loop: nobody but the thread can have begun it
    await asyncio.gather(first, second)
    plain.stop()


async def test_a_call_that_comes_with_higher_priority_passes_what_has_not_begun() -> None:
    plain = PlainCalls()
    open_ = threading.Event()
    order: list[str] = []
    tasks = [asyncio.create_task(call(plain, open_.wait))]
    await asyncio.sleep(0)
    tasks += [
        asyncio.create_task(call(plain, lambda name=name: order.append(name), priority=priority))
        for name, priority in (("low", 0), ("high", 1), ("highest", 2))
    ]
    await asyncio.sleep(0.05)
    open_.set()
    await asyncio.gather(*tasks)
    assert order == ["highest", "high", "low"]
    plain.stop()


async def test_a_running_call_that_is_cancelled_keeps_its_place_until_it_ends() -> None:
    plain = PlainCalls()
    open_, over = threading.Event(), threading.Event()

    def work() -> None:
        open_.wait()
        time.sleep(0.02)
        over.set()

    running = asyncio.create_task(call(plain, work))
    await asyncio.sleep(0.05)
    running.cancel()
    behind = asyncio.create_task(call(plain, over.is_set))
    with pytest.raises(asyncio.CancelledError):
        await running
    open_.set()
    assert await behind
    plain.stop()


async def test_neither_results_nor_arguments_are_kept_while_the_next_one_runs() -> None:
    class Batch:
        pass

    plain = PlainCalls()
    open_ = threading.Event()
    given_, made, raised = Batch(), Batch(), Batch()
    watched = [weakref.ref(each) for each in (given_, made, raised)]

    def fails(batch: Batch) -> None:
        raise ValueError(batch)

    tasks = [
        asyncio.create_task(call(plain, lambda batch=given_, result=[made]: result.pop())),
        asyncio.create_task(call(plain, lambda batch=raised: fails(batch))),
    ]
    last = asyncio.create_task(call(plain, open_.wait))
    del given_, made, raised
    await asyncio.wait(tasks)
    assert isinstance(tasks[1].exception(), ValueError)
    del tasks
    gc.collect()
    kept, running = [each() for each in watched], not last.done()
    open_.set()
    await last
    plain.stop()
    assert running
    assert kept == [None] * 3


@pytest.mark.parametrize("error", [StopIteration(), SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("inline", [False, True])
async def test_what_ends_programs_and_generators_ends_the_call(error: BaseException, inline: bool) -> None:
    plain = PlainCalls(inline=inline)

    def work() -> None:
        raise error

    async with asyncio.timeout(5):
        with pytest.raises(RuntimeError, match="raised"):
            await call(plain, work)
        with pytest.raises(RuntimeError, match="raised"):
            await plain.run(work)
    plain.stop()


async def test_calls_end_when_their_thread_is_stopped() -> None:
    plain = PlainCalls()
    open_ = threading.Event()
    hook = asyncio.create_task(plain.run(open_.wait))
    await asyncio.sleep(0.02)
    queued = asyncio.create_task(call(plain, lambda: None))
    await asyncio.sleep(0.02)
    plain.stop()
    async with asyncio.timeout(5):
        with pytest.raises(asyncio.CancelledError):
            await queued
        with pytest.raises(RuntimeError, match="shutdown"):
            await call(plain, lambda: None)
    open_.set()
    await hook


async def test_many_calls_however_the_threads_take_turns() -> None:
    plain = PlainCalls()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(200):
            assert await asyncio.gather(*(call(plain, lambda n=n: n) for n in range(5))) == list(range(5))
    finally:
        sys.setswitchinterval(interval)
        plain.stop()
