"""The buffer's waits: fair, with deadlines and reasons, safe to cancel; on asyncio, uvloop and a virtual clock."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace

import pytest
import uvloop
from blockbuster import blockbuster_ctx
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import BufferClosedError, DeadlineError, InvalidDataError
from asyncrl.interfaces import DroppedGroup, GroupSummary, ReplayBuffer
from asyncrl.simulation import VirtualLoop
from asyncrl.staleness import AdmissionLaw, certify
from buffers.replay import AsyncReplayBuffer

ROWS = object()


def summary(group_id: int, version: int = 0, *, tokens: int = 10) -> GroupSummary:
    return GroupSummary(
        group_id=group_id,
        rows=1,
        oldest_version=version,
        tokens=tokens,
        version_tokens={version: tokens},
        rewards=(0.0,),
        lengths=(tokens,),
    )


LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop, "virtual": VirtualLoop}


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine], object]:
    def run_on_loop(story: Coroutine) -> object:
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner, blockbuster_ctx():
            return runner.run(story)

    return run_on_loop


def group_ids_of(taken: tuple) -> list[int]:
    return [one.summary.group_id for one in taken]


async def turn() -> None:
    """Let every task that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def full_buffer(capacity: int, *, put: bool = True, max_staleness: int = 1) -> AsyncReplayBuffer:
    buffer = AsyncReplayBuffer(capacity=capacity, max_staleness=max_staleness)
    for group_id in range(capacity):
        await buffer.admit(group_id)
        if put:
            buffer.put(summary(group_id), ROWS)
    return buffer


def test_it_satisfies_the_contract():
    buffer: ReplayBuffer = AsyncReplayBuffer(capacity=1, max_staleness=0)
    assert buffer.statistics().capacity == 1


def test_a_select_wakes_when_its_groups_are_ready(run):
    async def story() -> None:
        buffer = await full_buffer(3, put=False)
        async with asyncio.TaskGroup() as tasks:
            batch = tasks.create_task(buffer.select(2, weight_version=0))
            buffer.put(summary(1), ROWS)
            await turn()
            assert not batch.done()
            buffer.put(summary(0), ROWS)
        assert group_ids_of(batch.result()) == [0, 1]
        buffer.release([0, 1])
        assert buffer.statistics().released == 2

    run(story())


def test_admits_wait_for_places_in_order(run):
    async def story() -> None:
        buffer = await full_buffer(2)
        entered: list[int] = []

        async def enter(group_id: int) -> None:
            await buffer.admit(group_id)
            entered.append(group_id)

        async with asyncio.TaskGroup() as tasks:
            for group_id in (5, 3, 4):
                tasks.create_task(enter(group_id))
            await turn()
            assert entered == []
            await buffer.select(2, weight_version=0)
            buffer.release([1])
            # The free place belongs to 5; a call that comes now waits behind 4.
            tasks.create_task(enter(2))
            await turn()
            assert entered == [5]
            for group_id in (0, 5):
                buffer.drop(group_id, "test")
            await turn()
            assert entered == [5, 3, 4]
            buffer.drop(3, "test")
        assert entered == [5, 3, 4, 2]

    run(story())


def test_a_small_select_waits_behind_a_large_one(run):
    async def story() -> None:
        buffer = await full_buffer(4, put=False)
        async with asyncio.TaskGroup() as tasks:
            large = tasks.create_task(buffer.select(3, weight_version=0))
            await turn()
            small = tasks.create_task(buffer.select(1, weight_version=0))
            buffer.put(summary(0), ROWS)
            await turn()
            assert not small.done()
            first, second = buffer.explain()
            assert first.endswith("1 of 3 groups are next in order; group_id 1 is not finished")
            assert second.endswith("other calls of select came first")
            for group_id in (1, 2, 3):
                buffer.put(summary(group_id), ROWS)
        assert (group_ids_of(large.result()), group_ids_of(small.result())) == ([0, 1, 2], [3])

    run(story())


def test_when_a_large_select_is_cancelled_the_small_one_behind_it_is_served(run):
    async def story() -> None:
        buffer = await full_buffer(3, put=False)
        buffer.put(summary(0), ROWS)
        async with asyncio.TaskGroup() as tasks:
            large = tasks.create_task(buffer.select(3, weight_version=0))
            await turn()
            small = tasks.create_task(buffer.select(1, weight_version=0))
            await turn()
            large.cancel()
        assert group_ids_of(small.result()) == [0]

    run(story())


def test_a_select_that_cannot_be_served_any_more_raises_itself_and_those_behind_it_go_on(run):
    async def story() -> None:
        buffer = await full_buffer(2, put=False)
        dropped: list[int] = []
        buffer.on_drop(lambda group: dropped.append(group.group_id))
        recorded = asyncio.create_task(buffer.select(1, weight_version=0, group_ids=(0,)))
        behind = asyncio.create_task(buffer.select(1, weight_version=0))
        await turn()
        buffer.drop(0, "test")
        assert dropped == [0]
        with pytest.raises(InvalidDataError, match="group_id 0 must be ready, but it was released or dropped"):
            await recorded
        buffer.put(summary(1), ROWS)
        assert group_ids_of(await behind) == [1]

    run(story())


def test_a_cancelled_select_that_was_just_served_loses_no_group(run):
    async def story() -> None:
        buffer = await full_buffer(2, put=False)
        batch = asyncio.create_task(buffer.select(2, weight_version=0))
        await turn()
        buffer.put(summary(0), ROWS)
        buffer.put(summary(1), ROWS)
        assert buffer.statistics().selected == 2
        batch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await batch
        assert (buffer.statistics().selected, buffer.statistics().ready) == (0, 2)
        assert group_ids_of(await buffer.select(2, weight_version=0)) == [0, 1]

    run(story())


def test_a_cancelled_admit_that_was_just_served_reserves_nothing(run):
    async def story() -> None:
        buffer = await full_buffer(1)
        first, second = (asyncio.create_task(buffer.admit(group_id)) for group_id in (1, 2))
        await turn()
        buffer.drop(0, "test")
        assert buffer.statistics().pending == 1
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await second
        assert (buffer.statistics().admitted, buffer.statistics().pending) == (2, 1)
        buffer.drop(2, "test")
        await buffer.admit(1)

    run(story())


def test_a_closed_coroutine_returns_its_groups():
    async def story() -> None:
        buffer = await full_buffer(1, put=False)
        waiting = buffer.select(1, weight_version=0)
        waiting.send(None)
        buffer.put(summary(0), ROWS)
        assert buffer.statistics().selected == 1
        waiting.close()
        assert buffer.statistics().ready == 1

    asyncio.run(story())


async def test_an_admission_that_has_expired_makes_no_room():
    buffer = AsyncReplayBuffer(
        capacity=1, max_staleness=9, selection="fifo_ready", max_uses=3, samples_per_insert=1.0, insert_tolerance=1.0
    )
    await buffer.admit(0)
    waiting = asyncio.ensure_future(buffer.admit(1, timeout_s=60.0))
    await turn()
    buffer._expire(buffer._admissions[1], 60.0)
    buffer.put(summary(0), ROWS, uses=2)  # before the expired call runs; its share is had, so it could make room
    with pytest.raises(DeadlineError):
        await waiting
    assert (buffer.statistics().ready, dict(buffer.statistics().dropped)) == (1, {})


def test_a_deadline_error_names_what_was_waited_for():
    async def story() -> None:
        buffer = await full_buffer(2, put=False)
        with pytest.raises(DeadlineError, match="select of 2 groups at version 7 passed its deadline of 3 s") as select:
            await buffer.select(2, weight_version=7, timeout_s=3.0)
        assert select.value.waiting_for == "0 of 2 groups are next in order; group_id 0 is not finished"
        assert asyncio.get_running_loop().time() == 3.0
        with pytest.raises(DeadlineError, match="admit of group_id 9") as admit:
            await buffer.admit(9, timeout_s=0.5)
        assert admit.value.waiting_for == "all 2 places are taken (2 pending, 0 ready, 0 selected)"
        assert admit.value.timeout_s == 0.5
        buffer.drop(0, "test")
        await buffer.admit(9, timeout_s=0.0)
        assert buffer.statistics().waiting == {}

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(story())


def test_waits_are_shown_with_reason_and_seconds():
    async def story() -> None:
        buffer = await full_buffer(1, put=False)
        tasks = [asyncio.create_task(buffer.admit(5)), asyncio.create_task(buffer.select(1, weight_version=0))]
        await asyncio.sleep(2.0)
        tasks.append(asyncio.create_task(buffer.admit(6)))
        await asyncio.sleep(1.5)
        assert buffer.statistics().waiting == {
            "admit: the buffer is full": 3.5,
            "select: the next groups are not ready": 3.5,
        }
        waiting_for = "0 of 1 groups are next in order; group_id 0 is not finished"
        assert buffer.explain() == (
            "admit of group_id 5 has waited 3.5 s: all 1 places are taken (1 pending, 0 ready, 0 selected)",
            "admit of group_id 6 has waited 1.5 s: all 1 places are taken (1 pending, 0 ready, 0 selected)",
            f"select of 1 groups at version 0 has waited 3.5 s: {waiting_for}",
        )
        buffer.close()
        assert buffer.statistics().waiting == {}
        assert all(isinstance(one, BufferClosedError) for one in await asyncio.gather(*tasks, return_exceptions=True))

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(story())


def test_close_ends_every_wait_with_the_cause(run):
    async def story() -> None:
        buffer = await full_buffer(1, put=False)
        waits = [
            asyncio.create_task(buffer.admit(1)),
            asyncio.create_task(buffer.admit(2, timeout_s=60)),
            asyncio.create_task(buffer.select(1, weight_version=0)),
        ]
        await turn()
        cause = RuntimeError("a rank died")
        buffer.close(cause)
        buffer.close()
        for wait in waits:
            with pytest.raises(BufferClosedError, match="closed: RuntimeError: a rank died") as error:
                await wait
            assert error.value.__cause__ is cause
        for late in (buffer.admit(3), buffer.select(1, weight_version=0)):
            with pytest.raises(BufferClosedError):
                await late
        with pytest.raises(BufferClosedError):
            buffer.put(summary(0), ROWS)
        buffer.drop(0, "shutdown", tokens=4)
        assert buffer.statistics().dropped_tokens == {"shutdown": 4}

    run(story())


def test_a_waiting_select_drops_stale_groups_and_calls_the_listeners(run):
    async def story() -> None:
        buffer = await full_buffer(2, put=False, max_staleness=0)
        drops: list[DroppedGroup] = []
        replaced = asyncio.Event()

        def listen(dropped: DroppedGroup) -> None:
            drops.append(dropped)
            replaced.set()

        async def replace() -> None:
            await replaced.wait()
            await buffer.admit(2)
            buffer.put(summary(2, 1), ROWS)

        buffer.on_drop(listen)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(replace())
            batch = tasks.create_task(buffer.select(2, weight_version=1))
            await turn()
            buffer.put(summary(0, 0, tokens=7), ROWS)
            buffer.put(summary(1, 1), ROWS)
        assert group_ids_of(batch.result()) == [1, 2]
        assert drops == [DroppedGroup(group_id=0, reason="stale", tokens=7)]

    run(story())


def test_a_listener_may_drop_groups_and_its_error_propagates(run):
    async def story() -> None:
        buffer = await full_buffer(3, put=False)
        drops: list[int] = []

        def listen(dropped: DroppedGroup) -> None:
            drops.append(dropped.group_id)
            if dropped.group_id < 2:
                buffer.drop(dropped.group_id + 1, "with its neighbour")
            else:
                raise LookupError("listener")

        buffer.on_drop(listen)
        with pytest.raises(LookupError, match="listener"):
            buffer.drop(0, "test")
        assert drops == [0, 1, 2]
        assert sum(buffer.statistics().dropped.values()) == 3

    run(story())


def test_calls_that_could_never_be_served_are_refused(run):
    async def story() -> None:
        buffer = await full_buffer(2)
        for groups in (0, 3):
            with pytest.raises(InvalidDataError, match=r"1\.\.2 groups"):
                await buffer.select(groups, weight_version=0)
        with pytest.raises(InvalidDataError, match="admitted before"):
            await buffer.admit(0)
        waiting = asyncio.create_task(buffer.admit(7))
        await turn()
        with pytest.raises(InvalidDataError, match="being admitted by another call"):
            await buffer.admit(7)
        waiting.cancel()

    run(story())


def test_a_released_group_s_rows_are_forgotten():
    import gc
    import weakref

    class Rows: ...

    async def story() -> None:
        buffer = AsyncReplayBuffer(capacity=1, max_staleness=0)
        await buffer.admit(0)
        rows = Rows()
        alive = weakref.ref(rows)
        buffer.put(summary(0), rows)
        del rows
        await buffer.select(1, weight_version=0)
        assert alive() is not None
        buffer.release([0])
        gc.collect()
        assert alive() is None

    asyncio.run(story())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    capacity=st.integers(2, 6),
    selection=st.sampled_from(["fifo", "fifo_ready"]),
    max_staleness=st.integers(0, 2),
)
def test_under_random_schedules_no_group_is_lost_and_no_call_waits_forever(
    seed: int, capacity: int, selection: str, max_staleness: int
):
    """Producers and a trainer with random durations, deadlines and cancellations, until the buffer is closed."""
    draw = random.Random(seed)

    async def story() -> None:
        loop = asyncio.get_running_loop()
        buffer = AsyncReplayBuffer(capacity=capacity, max_staleness=max_staleness, selection=selection)
        group_ids = iter(range(10_000))
        trained: list[int] = []
        version = 0
        refused = 0

        async def produce() -> None:
            nonlocal refused
            while True:
                group_id = next(group_ids)
                try:
                    if draw.random() < 0.3:
                        async with asyncio.timeout(draw.uniform(0, 3)):
                            await buffer.admit(group_id)
                    else:
                        await buffer.admit(group_id, timeout_s=draw.choice([None, 0.0, draw.uniform(0, 4)]))
                except TimeoutError:
                    refused += 1
                    await asyncio.sleep(draw.uniform(0.1, 1))
                    continue
                sampled_at = version
                await asyncio.sleep(draw.choice([0.0, draw.uniform(0, 3)]))
                if draw.random() < 0.2:
                    buffer.drop(group_id, "failed", tokens=3)
                else:
                    buffer.put(summary(group_id, sampled_at), ROWS)

        async def train() -> None:
            nonlocal version
            while True:
                groups, at = draw.randint(1, max(1, capacity // 2)), version
                try:
                    if draw.random() < 0.3:
                        async with asyncio.timeout(draw.uniform(0, 2)):
                            batch = await buffer.select(groups, weight_version=at)
                    else:
                        batch = await buffer.select(groups, weight_version=at, timeout_s=draw.choice([None, 5.0]))
                except TimeoutError:
                    await asyncio.sleep(draw.uniform(0.1, 1))
                    continue
                assert len(batch) == groups
                assert all(at - one.summary.oldest_version <= max_staleness for one in batch)
                await asyncio.sleep(draw.uniform(0, 1))
                if draw.random() < 0.1:
                    buffer.restore(group_ids_of(batch))
                    continue
                buffer.release(group_ids_of(batch))
                trained.extend(group_ids_of(batch))
                version += 1

        tasks = [asyncio.create_task(produce()) for _ in range(capacity)]
        tasks += [asyncio.create_task(train()) for _ in range(draw.randint(1, 2))]
        for _ in range(60):
            await asyncio.sleep(0.5)
            counts = buffer.statistics()
            occupied = counts.pending + counts.ready + counts.selected
            assert counts.admitted == occupied + counts.released + sum(counts.dropped.values())
            assert occupied <= capacity
        buffer.close(KeyError("end of the story"))
        closed_at = loop.time()
        endings = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, BufferClosedError) for one in endings), endings
        assert loop.time() - closed_at <= 3.0, "waiters wake at once; only work in progress goes on"
        assert buffer.statistics().waiting == {}
        assert len(trained) == len(set(trained)) == buffer.statistics().released
        assert trained, "the trainer made progress"

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(story())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    groups_per_step=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    selection=st.sampled_from(["fifo", "fifo_ready"]),
    failure=st.sampled_from([0.0, 0.3]),
)
def test_under_the_admission_law_every_step_gets_its_batch_and_nothing_is_left(
    seed: int, groups_per_step: int, max_staleness: int, selection: str, failure: float
):
    """In group_id order no group becomes stale; otherwise dropped groups are replaced. The window is the capacity."""
    draw = random.Random(seed)
    steps = 6
    law = AdmissionLaw(groups_per_step, max_staleness=max_staleness, total_groups=steps * groups_per_step)

    async def story() -> AsyncReplayBuffer:
        buffer = AsyncReplayBuffer(capacity=law.window, max_staleness=max_staleness, selection=selection)
        changed = asyncio.Event()
        version = 0

        def dropped(group: DroppedGroup) -> None:
            law.dropped(group.group_id)
            changed.set()

        buffer.on_drop(dropped)

        async def group(group_id: int) -> None:
            versions: dict[int, int] = {}
            for _ in range(draw.randint(1, 4)):  # tokens under every version that comes along
                versions[version] = versions.get(version, 0) + 1
                await asyncio.sleep(draw.choice([0.1, draw.uniform(0, 20)]))
            if draw.random() < failure:
                buffer.drop(group_id, "failed", tokens=sum(versions.values()))
            else:
                tokens = sum(versions.values())
                buffer.put(replace(summary(group_id, min(versions), tokens=tokens), version_tokens=versions), ROWS)

        async def train() -> None:
            nonlocal version
            for _ in range(steps):
                batch = await buffer.select(groups_per_step, weight_version=version, timeout_s=10_000.0)
                certificate = certify([one.summary for one in batch], trainer_version=version)
                assert certificate.groups == groups_per_step
                assert certificate.maximum <= max_staleness
                if selection == "fifo":
                    assert group_ids_of(batch) == sorted(group_ids_of(batch))
                await asyncio.sleep(draw.uniform(0, 5))
                buffer.release(group_ids_of(batch))
                version += 1
                law.published(version)
                changed.set()

        async with asyncio.TaskGroup() as tasks:
            training = tasks.create_task(train())
            training.add_done_callback(lambda _: changed.set())
            while not training.done():
                changed.clear()
                while law.may_issue():
                    group_id = law.issue()
                    await buffer.admit(group_id, timeout_s=0.0)
                    tasks.create_task(group(group_id))
                await changed.wait()
        return buffer

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        counts = runner.run(story()).statistics()
    assert (counts.released, counts.pending, counts.ready) == (steps * groups_per_step, 0, 0)
    if selection == "fifo":
        assert "stale" not in counts.dropped
