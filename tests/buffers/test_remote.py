"""The buffer in a worker of its own: the contract of the local buffer, and what the distance adds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.data.plan import Plan
from asyncrl.errors import (
    AsyncRLError,
    BufferClosedError,
    ConfigError,
    DeadlineError,
    EngineError,
    InvalidDataError,
    LedgerError,
    WorkerDiedError,
    WorkerError,
)
from asyncrl.interfaces import DroppedGroup, GroupSummary, OutOfProcessReplayBuffer, ReplayBuffer
from asyncrl.ledger import Completed, Consumed, Dispatched, Issued
from asyncrl.plugins import make_part
from asyncrl.rollout.trajectory import Trajectory, encode_rows
from asyncrl.runtime import ControllerLoop
from asyncrl.single_controller import ClassWithInitArgs, Dispatch, Worker, register
from asyncrl.single_controller.local import LocalWorkerGroup
from buffers.ledger import SQLiteLedger
from buffers.remote import BufferWorker, RemoteReplayBuffer
from buffers.replay import AsyncReplayBuffer
from buffers.selection import ReadyOrder

ROWS = DataProto()


def summary(group_id: int, version: int = 0, *, rewards: tuple[float, ...] = (0.0, 1.0)) -> GroupSummary:
    return GroupSummary(
        group_id=group_id,
        rows=2,
        oldest_version=version,
        tokens=10,
        version_tokens={version: 10},
        rewards=rewards,
        lengths=(4, 6),
    )


def recorded(path: Path) -> SQLiteLedger:
    """Make a ledger of two groups with two rows each, with rewards 0 and 1; step 1 used group 1."""
    ledger = SQLiteLedger(path, threaded=False)
    for group_id in range(2):
        rows = [
            Trajectory(
                task={},
                token_ids=(1, group_id),
                loss_mask=(False, True),
                behaviour_log_probs=(0.0, -0.5),
                weight_versions=(-1, 0),
                reward=reward,
                turns=(),
                finish_reason="done",
            )
            for reward in (0.0, 1.0)
        ]
        ledger.append(Issued(group_id), Dispatched(group_id=group_id, attempt=0, version=0))
        ledger.append(Completed(group_id=group_id, attempt=0, tokens=2), rows=encode_rows(rows))
    ledger.append(Consumed(group_id=1, step=1, position=0))
    return ledger


class Place(Protocol):
    def __call__(self, **options: Any) -> AbstractAsyncContextManager[ReplayBuffer]: ...


@asynccontextmanager
async def local(**options: Any) -> AsyncIterator[ReplayBuffer]:
    yield AsyncReplayBuffer(**options)


@asynccontextmanager
async def remote(**options: Any) -> AsyncIterator[ReplayBuffer]:
    buffer = RemoteReplayBuffer(**options)
    worker, given = buffer.worker()
    group = LocalWorkerGroup(ClassWithInitArgs(worker, given), name="buffer")
    await group.ready()
    await buffer.attach(group)
    try:
        yield buffer
    finally:
        await buffer.aclose()
        await group.aclose()


@pytest.fixture(params=[local, remote], ids=["replay", "remote"])
def place(request: pytest.FixtureRequest) -> Place:
    made: Place = request.param
    return made


def group_ids_of(taken: Any) -> list[int]:
    return [group.summary.group_id for group in taken]


async def test_what_was_admitted_and_put_is_selected_once_and_released(place: Place):
    async with place(capacity=3, max_staleness=1) as buffer:
        for group_id in range(3):
            await buffer.admit(group_id)
        taking = asyncio.ensure_future(buffer.select(2, weight_version=0))
        buffer.put(summary(1), ROWS)
        buffer.put(summary(0), ROWS)
        assert group_ids_of(await taking) == [0, 1]
        buffer.release([0, 1])
        await buffer.settled()
        counts = buffer.statistics()
        assert (counts.admitted, counts.pending, counts.ready, counts.selected, counts.released) == (3, 1, 0, 0, 2)


async def test_a_group_with_reserved_uses_is_selected_by_its_number_only(place: Place):
    options: dict[str, Any] = {"max_uses": 2, "zero_variance": "drop", "eviction": "oldest", "keep_groups": 1}
    async with place(capacity=4, max_staleness=1, selection="fifo_ready", samples_per_insert=1.0, **options) as buffer:
        for group_id in range(4):  # two are as many as are admitted anew
            await buffer.admit(group_id, again=True, timeout_s=1.0)
        buffer.put(summary(0, rewards=(1.0, 1.0)), ROWS, reserved_uses=2)
        buffer.put(summary(1), ROWS, reserved_uses=1)
        buffer.put(summary(2, version=5), ROWS)
        assert group_ids_of(await buffer.select(1, weight_version=5)) == [2]
        for _ in range(2):
            with pytest.raises(DeadlineError):
                await buffer.select(1, weight_version=5, timeout_s=0.01)
            assert group_ids_of(await buffer.select(1, weight_version=5, group_ids=[0])) == [0]
            buffer.release([0])
        taken = await buffer.select(1, weight_version=5, group_ids=[1])
        buffer.restore(group_ids_of(taken))  # the step did not happen: the reservation stays
        with pytest.raises(DeadlineError):
            await buffer.select(1, weight_version=1, timeout_s=0.01)
        assert group_ids_of(await buffer.select(1, weight_version=5, group_ids=[1])) == [1]
        buffer.release([1])
        assert group_ids_of(await buffer.select(1, weight_version=1)) == [1]  # kept: it is like any other now
        await buffer.settled()
        assert buffer.statistics().dropped == {}
        assert buffer.statistics().released == 1


async def test_a_wait_has_a_deadline_and_a_reason(place: Place):
    async with place(capacity=1, max_staleness=1) as buffer:
        await buffer.admit(0)
        with pytest.raises(DeadlineError, match=r"all 1 places are taken \(1 pending"):
            await buffer.admit(1, timeout_s=0.01)
        with pytest.raises(DeadlineError, match=r"deadline of 0\.01 s") as caught:
            await buffer.select(1, weight_version=0, timeout_s=0.01)
        assert caught.value.waiting_for
        assert buffer.statistics().admitted == 1


async def test_listeners_are_called_for_stale_groups_while_the_select_still_waits(place: Place):
    async with place(capacity=2, max_staleness=1) as buffer:
        news: list[DroppedGroup] = []
        dropped = asyncio.Event()

        def record(group: DroppedGroup) -> None:
            news.append(group)
            dropped.set()

        buffer.on_drop(record)
        await buffer.admit(0)
        buffer.put(summary(0, version=0), ROWS)
        taking = asyncio.ensure_future(buffer.select(1, weight_version=2))
        await dropped.wait()
        assert news == [DroppedGroup(group_id=0, reason="stale", tokens=10)]
        await buffer.admit(1)
        buffer.put(summary(1, version=2), ROWS)
        assert group_ids_of(await taking) == [1]


@pytest.mark.parametrize("turns", range(6))
async def test_a_select_that_is_cancelled_at_any_moment_changes_nothing(place: Place, turns: int):
    async with place(capacity=1, max_staleness=1) as buffer:
        await buffer.admit(0)
        buffer.put(summary(0), ROWS)
        taking = asyncio.ensure_future(buffer.select(1, weight_version=0))
        for _ in range(turns):
            await asyncio.sleep(0)
        taking.cancel()
        try:
            taken = await taking
        except asyncio.CancelledError:
            taken = await buffer.select(1, weight_version=0, timeout_s=5.0)
        assert group_ids_of(taken) == [0]


async def test_the_result_of_a_cancelled_select_is_taken_back():
    async with remote(capacity=1, max_staleness=1) as buffer:
        await buffer.admit(0)
        buffer.put(summary(0), ROWS)
        lost = buffer._group.select(99, 1, 0, None, None, ())  # its result arrives after the caller was cancelled
        await lost
        await buffer._group.cancel(ticket=99)
        assert group_ids_of(await buffer.select(1, weight_version=0, timeout_s=5.0)) == [0]


@pytest.mark.parametrize("turns", range(4))
async def test_an_admission_that_is_cancelled_leaves_its_place_free(place: Place, turns: int):
    async with place(capacity=1, max_staleness=1) as buffer:
        entering = asyncio.ensure_future(buffer.admit(0))
        for _ in range(turns):
            await asyncio.sleep(0)
        entering.cancel()
        try:
            await entering
            buffer.drop(0, "unwanted")
        except asyncio.CancelledError:
            pass
        await buffer.admit(1, timeout_s=5.0)


async def test_an_illegal_call_raises_by_name(place: Place):
    async with place(capacity=1, max_staleness=1) as buffer:

        async def put() -> None:
            buffer.put(summary(7), ROWS)
            await buffer.settled()

        with pytest.raises(InvalidDataError, match="group_id 7 must be pending, but it was never admitted"):
            await put()


async def test_an_illegal_call_in_the_worker_ends_every_wait():
    async with remote(capacity=2, max_staleness=1) as buffer:
        taking = asyncio.ensure_future(buffer.select(1, weight_version=0))
        await asyncio.sleep(0)
        buffer.release([3])
        with pytest.raises(BufferClosedError, match="group_id 3 must be selected"):
            await taking
        with pytest.raises(BufferClosedError, match="group_id 3 must be selected"):
            await buffer.admit(0)


class Faulty(ReadyOrder):
    def ready(self, summary: GroupSummary) -> None:
        raise LookupError("no such index")


async def test_any_error_of_a_call_in_the_worker_ends_every_wait():
    async with remote(capacity=2, max_staleness=1, selection=Faulty()) as buffer:
        taking = asyncio.ensure_future(buffer.select(1, weight_version=0))
        await buffer.admit(0)
        buffer.put(summary(0), ROWS)
        async with asyncio.timeout(10):
            with pytest.raises(BufferClosedError, match="put of the buffer raised LookupError: no such index"):
                await taking
            with pytest.raises(WorkerError, match="put of the buffer raised LookupError") as caught:
                await buffer.settled()
            assert 'raise LookupError("no such index")' in caught.value.remote_traceback


@pytest.mark.parametrize("error", [InvalidDataError, EngineError, None])
async def test_an_operation_that_does_not_reach_the_worker_ends_every_wait(error: type[AsyncRLError] | None):
    """Whatever its error, the worker lives and waits, and has to be told."""
    rows = DataProtoFuture(ControllerLoop.default(), "rows")
    if error is None:
        rows.outcome.cancel()
    else:
        rows.outcome.fail(error("no rows"))
    why = "no rows" if error is not None else "execute was cancelled"
    async with remote(capacity=2, max_staleness=1) as buffer:
        taking = asyncio.ensure_future(buffer.select(1, weight_version=0))
        await buffer.admit(0)
        buffer.put(summary(0), rows)
        async with asyncio.timeout(10):
            with pytest.raises(AsyncRLError, match=why):
                await buffer.settled()
            with pytest.raises(AsyncRLError, match=why):
                await taking
            with pytest.raises(AsyncRLError, match=why):
                await buffer.admit(1)


async def test_settled_waits_for_an_operation_whose_rows_are_being_made():
    rows = DataProtoFuture(ControllerLoop.default(), "rows")
    async with remote(capacity=2, max_staleness=1) as buffer:
        for group_id in range(2):
            await buffer.admit(group_id)
        buffer.put(summary(0), rows)
        buffer.put(summary(1), ROWS)  # overtakes it
        with pytest.raises(DeadlineError, match="execute operation 1 of 3"):
            await buffer.settled(timeout_s=0.05)
        async with asyncio.timeout(10):
            while buffer.statistics().ready == 0:
                await asyncio.sleep(0.01)
            rows.outcome.succeed(Plan.of(DataProto.from_dict({"x": torch.arange(2)})))
            await buffer.settled()
        assert buffer.statistics().ready == 2


async def test_a_buffer_that_was_closed_is_closed_after_the_shutdown_of_its_group():
    async with remote(capacity=1, max_staleness=1) as buffer:
        buffer.put(summary(0), DataProtoFuture(ControllerLoop.default(), "rows"))
        buffer.close()
    async with asyncio.timeout(10):
        while buffer._error is None:
            await asyncio.sleep(0.01)
    with pytest.raises(BufferClosedError, match="admit: the buffer is closed"):
        await buffer.admit(0)


async def test_closing_ends_every_wait_with_the_cause(place: Place):
    async with place(capacity=1, max_staleness=1) as buffer:
        taking = asyncio.ensure_future(buffer.select(1, weight_version=0))
        await asyncio.sleep(0.01)
        buffer.close(ValueError("the trainer broke"))
        with pytest.raises(BufferClosedError, match="ValueError: the trainer broke") as caught:
            await taking
        assert isinstance(caught.value.__cause__, ValueError)
        with pytest.raises(BufferClosedError):
            await buffer.admit(0)


async def test_rows_are_returned_as_they_were_put(place: Place):
    rows = DataProto.from_dict({"x": torch.arange(2)})
    scores = DataProto.from_dict({"scores": torch.tensor([0.25, 0.75])})
    async with place(capacity=1, max_staleness=1, columns=("scores",)) as buffer:
        await buffer.admit(0)
        buffer.put(summary(0), DataProtoFuture.of(rows))
        buffer.extend(0, ("scores",), DataProtoFuture.of(scores), rewards=(0.25, 0.75))
        (group,) = await buffer.select(1, weight_version=0)
        assert group.summary.rewards == (0.25, 0.75)
        assert (await group.rows) == rows.union(scores)


@pytest.mark.parametrize("seed", range(4))
async def test_both_take_the_same_groups_in_the_same_order(seed: int):
    """One random program, two buffers: the same results, the same statistics, the same drops."""
    options: dict[str, Any] = {
        "capacity": 6,
        "max_staleness": 1,
        "selection": "prioritized",
        "priority": "advantage",
        "zero_variance": "drop",
        "max_uses": 2,
        "seed": seed,
    }
    stories = []
    for make in (local, remote):
        dice, story, drops = random.Random(seed), [], []
        async with make(**options) as buffer:
            buffer.on_drop(drops.append)
            version, group_id, selected = 0, 0, []
            for _ in range(60):
                counts = buffer.statistics()
                taken_places = counts.pending + counts.ready + counts.selected
                what = dice.choice(["admit", "admit", "select", "release", "restore", "publish", "drop"])
                if what == "admit" and taken_places < 6:
                    await buffer.admit(group_id)
                    equal = dice.random() < 0.2
                    buffer.put(summary(group_id, version, rewards=(0.5, 0.5) if equal else (dice.random(), 0.0)), ROWS)
                    group_id += 1
                elif what == "select" and counts.ready:
                    try:
                        taken = await buffer.select(1, weight_version=version, timeout_s=0.05)
                        selected += group_ids_of(taken)
                        story.append(("took", group_ids_of(taken), [group.uses for group in taken]))
                    except DeadlineError:
                        story.append(("waited",))
                elif what in ("release", "restore") and selected:
                    getattr(buffer, what)([selected.pop()])
                elif what == "drop" and selected:
                    buffer.drop(selected.pop(), "unwanted")
                elif what == "publish":
                    version += 1
                await buffer.settled()
                story.append(replace(buffer.statistics(), waiting={}))
        stories.append((story, drops))
    assert stories[0] == stories[1]
    assert any(entry[0] == "took" for entry in stories[0][0] if isinstance(entry, tuple))


async def test_a_buffer_without_a_worker_and_wrong_options_are_refused():
    buffer = RemoteReplayBuffer(capacity=1, max_staleness=0)
    assert isinstance(buffer, OutOfProcessReplayBuffer)
    with pytest.raises(BufferClosedError, match="no worker yet"):
        await buffer.admit(0)
    with pytest.raises(ConfigError, match="did you mean 'max_uses'"):
        make_part(
            "asyncrl.replay_buffers",
            "buffers.remote:RemoteReplayBuffer",
            options={"max_use": 2},
            path="buffer.kind",
            capacity=1,
            max_staleness=0,
        )
    with pytest.raises(ConfigError):
        RemoteReplayBuffer(capacity=1, max_staleness=0, insert_tolerance=3.0)


async def test_the_death_of_its_worker_ends_every_wait():
    buffer = RemoteReplayBuffer(capacity=1, max_staleness=0)
    group = LocalWorkerGroup(ClassWithInitArgs(*buffer.worker()), name="buffer")
    await group.ready()
    await buffer.attach(group)
    taking = asyncio.ensure_future(buffer.select(1, weight_version=0))
    await buffer.admit(0)
    group.kill(0)
    with pytest.raises(WorkerDiedError, match="of buffer was killed"):
        await taking
    buffer.drop(0, "unwanted")
    with pytest.raises(WorkerDiedError):
        await buffer.settled()
    with pytest.raises(WorkerDiedError, match="of buffer was killed"):  # later calls raise the same
        await buffer.select(1, weight_version=0)
    await buffer.aclose()


async def test_query_reads_the_ledger(place: Place, tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    with recorded(path) as ledger:
        async with place(capacity=1, max_staleness=0, ledger=ledger) as buffer:
            found = buffer.query("reward > :least", {"least": 0.5})
            assert (found.batch["group_id"].tolist(), found.batch["step"].tolist()) == ([0, 1], [-1, 1])
            assert found.batch["input_ids"][1].tolist() == [1, 1]
            assert found.non_tensor_batch["state"].tolist() == ["completed", "consumed"]
            assert buffer.query(limit=3).batch["row"].tolist() == [0, 1, 0]
            assert len(buffer.query("group_id = 7")) == 0
            with pytest.raises(LedgerError, match="no such column: nonsense"):
                buffer.query("nonsense = 1")
    async with place(capacity=1, max_staleness=0, ledger=SQLiteLedger.archive(path)) as buffer:
        buffer.close()
        assert len(buffer.query("step = 1")) == 2


async def test_query_without_a_ledger_explains_how_to_have_one(place: Place):
    async with place(capacity=1, max_staleness=0) as buffer:
        with pytest.raises(LedgerError, match=r"made without one; make it with ledger=SQLiteLedger\(path\)"):
            buffer.query("reward > 0.5")


class Maker(Worker):
    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def make(self) -> DataProto:
        return DataProto.from_dict({"x": torch.arange(200_000).reshape(2, -1)})


@pytest.mark.ray
@pytest.mark.slow
async def test_on_ray_it_holds_references_and_the_rows_lie_in_the_object_store(tmp_path: Path):
    import ray

    from asyncrl.single_controller.ray import RayResourcePool, RayWorkerGroup
    from asyncrl.single_controller.ray.messages import RayValue

    with ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False), recorded(tmp_path / "sqlite") as ledger:
        buffer = RemoteReplayBuffer(capacity=2, max_staleness=0, ledger=ledger)
        worker, options = buffer.worker()
        group = RayWorkerGroup(
            resource_pool=RayResourcePool([1], cpus_per_worker=0), ray_cls_with_init=ClassWithInitArgs(worker, options)
        )
        assert worker is BufferWorker
        await group.ready()
        await buffer.attach(group)
        makers = RayWorkerGroup(
            resource_pool=RayResourcePool([1], cpus_per_worker=0), ray_cls_with_init=ClassWithInitArgs(Maker)
        )
        rows = makers.make()
        await rows.header()
        await buffer.admit(0)
        buffer.put(summary(0), rows)
        del rows
        (taken,) = await buffer.select(1, weight_version=0, timeout_s=30.0)
        (block,) = (await taken.rows.plan()).blocks()
        assert isinstance(block, RayValue)
        assert torch.equal((await taken.rows).batch["x"], torch.arange(200_000).reshape(2, -1))
        assert len(buffer.query("step = 1")) == 2  # the ledger stayed here
        await buffer.aclose()
        await group.aclose()
        await makers.aclose()
