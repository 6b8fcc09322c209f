"""The order in which a worker's host runs calls, however they arrive."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from asyncrl.single_controller.call import Arguments, Call, Cancelled, Failed
from asyncrl.single_controller.host import WorkerHost
from asyncrl.single_controller.worker import Worker, WorkerContext


class Diary(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.pages: list[int] = []

    def write(self, page: int) -> int:
        self.pages.append(page)
        return page

    async def leave(self) -> None:
        sys.exit(3)

    async def forever(self) -> None:
        await asyncio.Event().wait()


async def run(host: WorkerHost, sequence: int, method: str = "write", *, args: tuple[int, ...] | None = None) -> Any:
    call = Call(
        method=method,
        arguments=Arguments((sequence,) if args is None else args, {}),
        to_fetch=False,
    )
    return await host.call(call, sequence)


async def new_host() -> tuple[WorkerHost, Diary]:
    host = WorkerHost(inline=True)
    context = WorkerContext(
        rank=1, world_size=3, local_rank=0, local_world_size=1, group_name="g", master_addr="here", master_port=5
    )
    made: list[Diary] = []

    class Kept(Diary):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    assert await host.construct(Kept, (), {}, context) is None
    return host, made[0]


async def test_the_worker_knows_its_place() -> None:
    _, diary = await new_host()
    assert (diary.rank, diary.world_size, diary.group_name, diary.master_port) == (1, 3, "g", 5)
    # Outside of a host it is alone.
    assert (Diary().rank, Diary().world_size) == (0, 1)


async def test_calls_that_arrive_in_any_order_run_in_theirs() -> None:
    host, diary = await new_host()
    replies = await asyncio.gather(*(run(host, sequence) for sequence in (3, 1, 0, 2)))
    assert diary.pages == [0, 1, 2, 3]
    assert replies == [3, 1, 0, 2]


async def test_calls_that_never_arrive_are_skipped() -> None:
    host, diary = await new_host()
    waiting = asyncio.ensure_future(run(host, 3))
    await asyncio.sleep(0)
    for sequence in (2, 0, 1):
        assert not waiting.done()
        host.skip(sequence)
    assert await waiting == 3
    host.skip(1)
    assert await run(host, 4) == 4
    assert diary.pages == [3, 4]


async def test_a_call_cancelled_before_it_arrives_is_not_run() -> None:
    host, diary = await new_host()
    host.cancel(1)
    await run(host, 0)
    assert await run(host, 1) == Cancelled()
    await run(host, 2)
    assert diary.pages == [0, 2]


async def test_another_program_takes_over_from_one_whose_call_was_cancelled_while_it_waited() -> None:
    host, diary = await new_host()
    gone, late = (asyncio.ensure_future(run(host, sequence)) for sequence in (2, 3))
    await asyncio.sleep(0)
    gone.cancel()
    first = host.take_over()
    reply = await late
    assert isinstance(reply, Failed)
    assert reply.kind == "GroupClosedError"
    assert await run(host, first) == first
    assert diary.pages == [first]


async def test_a_running_coroutine_is_cancelled() -> None:
    host, _ = await new_host()
    running = asyncio.ensure_future(run(host, 0, "forever", args=()))
    await run(host, 1)
    host.cancel(0)
    assert await running == Cancelled()


async def test_an_unknown_method_is_an_answer() -> None:
    host, _ = await new_host()
    reply = await run(host, 0, "missing")
    assert isinstance(reply, Failed)
    assert (reply.kind, reply.message) == ("AttributeError", "'Kept' object has no attribute 'missing'")


async def test_leaving_the_program_ends_what_prepares_only() -> None:
    host, _ = await new_host()
    failed = await host.prepare("leave")
    assert failed is not None
    assert failed.message == "the method raised SystemExit(3)"


async def test_closing_cancels_what_runs() -> None:
    host, _ = await new_host()
    running = asyncio.ensure_future(run(host, 0, "forever", args=()))
    await run(host, 1)
    assert await host.close() is None
    assert await running == Cancelled()
