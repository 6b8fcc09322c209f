"""Calls reach the workers in the order of the program, whenever they are made."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys

import pytest
import torch

from asyncrl.data import DataProto
from asyncrl.errors import WorkerDiedError
from asyncrl.single_controller import (
    ClassWithInitArgs,
    Dispatch,
    Restart,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from asyncrl.single_controller.invocation import TicketQueue
from asyncrl.single_controller.local import LocalWorkerGroup
from asyncrl.single_controller.scatter import Scatter

MESH = make_nd_compute_dataproto_dispatch_fn("actor")
STEPS = 40
"""More turns of the loop than a first call takes."""


class Diary(Worker):
    """Writes down what it was called for; joins its mesh at once or in ``init_model``."""

    def __init__(self, *, late: bool) -> None:
        super().__init__()
        self.entries: list[str] = []
        if not late:
            self.init_model()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        self._register_dispatch_collect_info("actor", dp_rank=self.rank, is_collect=True)

    @register(dispatch_mode=MESH)
    def split(self, batch: DataProto) -> DataProto:
        self.entries.append("split")
        return batch

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def plain(self, entry: str) -> None:
        self.entries.append(entry)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def read(self) -> list[str]:
        return self.entries


def batch() -> DataProto:
    return DataProto.from_dict(tensors={"x": torch.arange(2)})


async def steps(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("started", [False, True])
async def test_a_call_passes_none_at_whatever_moment_it_is_made(late: bool, started: bool) -> None:
    """The second call comes at every step of what the first one waits for: the start of the group, its mesh."""
    for pause in range(STEPS):
        group = LocalWorkerGroup(ClassWithInitArgs(Diary, late=late), world_size=2, loop="current")
        if started:
            await group.ready()
        if late:
            group.init_model()
        group.split(batch())
        await steps(pause)
        group.plain("second")
        await steps(pause % 7)
        group.plain("third")
        assert await group.read() == [["split", "second", "third"]] * 2
        await group.aclose()


async def test_calls_keep_their_order_while_workers_are_made_again() -> None:
    for pause in range(STEPS):
        group = LocalWorkerGroup(
            ClassWithInitArgs(Diary, late=False), world_size=2, loop="current", restart=Restart(backoff_s=0.0)
        )
        await group.ready()
        group.kill(1)
        await steps(pause)
        group.plain("first")
        group.plain("second")
        entries = await group.read()
        assert entries[1] == ["first", "second"], f"after {pause} steps"
        await group.aclose()


async def test_a_call_ends_at_whatever_moment_its_worker_is_killed() -> None:
    for pause in range(STEPS):
        group = LocalWorkerGroup(ClassWithInitArgs(Diary, late=False), world_size=2, loop="current")
        await group.ready()
        called = group.read()
        called.start()
        await steps(pause)
        group.kill(1)
        async with asyncio.timeout(5.0):
            error = await asyncio.gather(called, return_exceptions=True)
        assert error == [[[], []]] or isinstance(error[0], WorkerDiedError), f"after {pause} steps"
        await group.aclose()


async def test_a_cancelled_call_lets_the_others_pass() -> None:
    for pause in range(STEPS):
        group = LocalWorkerGroup(ClassWithInitArgs(Diary, late=False), world_size=2, loop="current")
        first = group.split(batch())
        group.plain("second")
        await steps(pause)
        first.cancel()
        entries = await group.read()
        assert entries[0][-1] == "second"
        assert group._order.pending == 0
        await group.aclose()


async def test_a_call_whose_batches_cannot_be_copied_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async with LocalWorkerGroup(ClassWithInitArgs(Diary, late=False), world_size=2, loop="current") as group:
        with monkeypatch.context() as full:
            full.setattr(Scatter, "snapshot", lambda _: bytearray(sys.maxsize))
            with pytest.raises(MemoryError):
                group.plain("lost")
        assert (group._order.pending, group.unfinished_calls()) == (0, [])


def test_the_earliest_ticket_is_first() -> None:
    """In any order of leaving, the first one is always the earliest that has not left."""
    for seed in range(50):
        chance = random.Random(seed)
        queue = TicketQueue()
        inside: list[asyncio.Event] = []
        with contextlib.ExitStack() as left_at_the_end:
            for _ in range(40):
                if inside and chance.random() < 0.5:
                    queue.leave(inside.pop(chance.randrange(len(inside))))
                else:
                    inside.append(left_at_the_end.enter_context(queue.ticket()))
                assert [ticket.is_set() for ticket in inside] == [index == 0 for index in range(len(inside))]
