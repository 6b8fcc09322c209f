"""The virtual clock: time jumps, the seed fixes the order of events, and endless waits are reported."""

from __future__ import annotations

import asyncio
import doctest
import time

import pytest

import asyncrl.testing.clock
from asyncrl.simulation import SimulationDeadlock, VirtualLoop, run_virtually


def test_a_virtual_day_takes_no_real_time():
    async def story() -> list[float]:
        clock = asyncio.get_running_loop().time
        times = [clock()]
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(86_400))
            group.create_task(asyncio.sleep(60))
        times.append(clock())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        return [*times, clock()]

    started = time.perf_counter()
    assert run_virtually(story()) == [0.0, 86_400.0, 86_405.0]
    assert time.perf_counter() - started < 5


async def race() -> list[int]:
    """Ten sleepers wake at one moment: who comes first?"""
    order: list[int] = []

    async def sleeper(number: int) -> None:
        await asyncio.sleep(1)
        order.append(number)

    async with asyncio.TaskGroup() as group:
        for number in range(10):
            group.create_task(sleeper(number))
    return order


def test_the_seed_orders_simultaneous_events():
    assert run_virtually(race()) == list(range(10))
    orders = {tuple(run_virtually(race(), seed=seed)) for seed in range(20)}
    assert len(orders) > 10
    assert run_virtually(race(), seed=7) == run_virtually(race(), seed=7)


def test_sets_of_tasks_have_one_order_in_every_run():
    async def story() -> list[str]:
        tasks = [asyncio.create_task(asyncio.sleep(1), name=str(number)) for number in range(50)]
        done, _ = await asyncio.wait(tasks)
        return [task.get_name() for task in done]

    assert run_virtually(story(), seed=3) == run_virtually(story(), seed=3)


def test_an_endless_wait_is_reported():
    async def forgotten() -> None:
        await asyncio.Event().wait()

    async def story() -> None:
        await asyncio.sleep(3)
        async with asyncio.TaskGroup() as group:
            group.create_task(forgotten(), name="the forgotten one")

    with pytest.raises(
        SimulationDeadlock, match=r"at 3 s every task waits and no timer is set: .*the forgotten one in Event"
    ):
        run_virtually(story())


def test_the_limit_ends_an_endless_run():
    async def story() -> None:
        while True:
            await asyncio.sleep(1)

    with pytest.raises(SimulationDeadlock, match="it was to be over by 100 s"):
        run_virtually(story(), limit_s=100)


def test_threads_take_no_time_and_their_errors_travel():
    async def story() -> int:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        return await asyncio.to_thread(int, "7")

    assert run_virtually(story()) == 7


def test_leftover_tasks_are_cancelled():
    ended: list[str] = []

    async def left() -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            ended.append("left")

    async def story() -> str:
        story.task = asyncio.create_task(left())  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        return "done"

    assert run_virtually(story()) == "done"
    assert ended == ["left"]


def test_an_unretrieved_error_is_raised():
    async def story() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 // 0)
        await asyncio.sleep(1)

    with pytest.raises(ZeroDivisionError):
        run_virtually(story())


def test_the_loop_works_with_asyncio_runner():
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(race()) == list(range(10))


def test_the_example_in_the_docstring_runs():
    assert doctest.testmod(asyncrl.testing.clock).failed == 0
