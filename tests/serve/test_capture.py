"""Rewarded sessions are stored once: whole, or not at all, and then they are kept."""

from __future__ import annotations

import asyncio
import math
import threading

import pytest

from asyncrl.data import DataProto
from asyncrl.errors import BufferClosedError, DeadlineError, InvalidDataError
from asyncrl.rollout.trajectory import Trajectory, Turn
from asyncrl.serve import sessions
from asyncrl.serve.errors import APIError
from asyncrl.serve.limits import Limits
from asyncrl.serve.sessions import BufferSink, FolderSink, GroupedSink, Session
from buffers.replay import AsyncReplayBuffer


def trajectory(number, *, sampled=2):
    turn = Turn(start=1, end=1 + sampled, finish_reason="stop", message={"role": "assistant", "content": "it"})
    return Trajectory(
        task={"number": number},
        token_ids=(number, *range(sampled)),
        loss_mask=(False, *(True,) * sampled),
        behaviour_log_probs=(0.0, *(-0.5,) * sampled),
        weight_versions=(-1, *(3,) * sampled),
        reward=float(number),
        turns=(turn,) if sampled else (),
        finish_reason="done",
        info={},
    )


def buffer(capacity=4):
    return AsyncReplayBuffer(capacity=capacity, max_staleness=1)


class FailingSink:
    """Stores groups, or raises."""

    def __init__(self):
        self.kept: list[list[int]] = []
        self.error: BaseException | None = None

    async def put(self, trajectories):
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        self.kept.append([each.task["number"] for each in trajectories])
        return "kept"


async def sample(served, name):
    await served.post(f"/sessions/{name}/generate", {"prompt_token_ids": [5, 6]})


async def test_rewarded_sessions_reach_a_replay_buffer(serve):
    target = buffer()
    await target.admit(0)  # the buffer has been used before
    target.drop(0, "of an earlier run")
    async with serve(lambda prompt: [7, 8], capture=BufferSink(target)) as served:
        for number in (0, 1):
            await sample(served, f"s{number}")
            body = {"reward": float(number), "group": "g", "group_size": 2}
            kept = await served.post(f"/sessions/s{number}/reward", body)
        assert kept["kept"] == "group_id 1"
        (group,) = await target.select(1, weight_version=0)
        rows = group.rows
        assert rows.batch["rewards"].tolist() == [0.0, 1.0]
        assert rows.batch["input_ids"][0].tolist() == [5, 6, 7, 8]
        assert rows.batch["weight_versions"][0].tolist() == [-1, -1, 0, 0]
        assert group.summary.tokens == 4
        await served.get("/sessions/s1", status=404)


async def test_what_grows_with_a_rewarded_session_is_done_in_a_thread(serve, watch_threads):
    made = (sessions, "trajectories_to_batch")
    on_the_loop = watch_threads((Session, "trajectory"), (sessions.pickle, "dumps"), made)
    async with serve(lambda prompt: [7, 8], capture=BufferSink(buffer())) as served:
        for number in (0, 1):
            await sample(served, f"s{number}")
            await served.post(f"/sessions/s{number}/reward", {"reward": 1.0, "group": "g", "group_size": 2})
    assert on_the_loop == {"trajectory": False, "dumps": False, "trajectories_to_batch": False}


async def test_groups_are_admitted_in_the_order_of_their_ids_however_long_their_batches_take(monkeypatch):
    made, release, target = sessions.trajectories_to_batch, threading.Event(), buffer()

    def batch(trajectories, *, group_id):
        if group_id == 0:
            assert release.wait(60)
        return made(trajectories, group_id=group_id)

    monkeypatch.setattr(sessions, "trajectories_to_batch", batch)
    sink = BufferSink(target)
    puts = [asyncio.create_task(sink.put([trajectory(number)])) for number in range(2)]
    for _ in range(5):
        await asyncio.to_thread(str)  # the second one, were it in a thread, would be admitted meanwhile
    assert target.statistics().admitted == 0
    release.set()
    assert await asyncio.gather(*puts) == ["group_id 0", "group_id 1"]


async def test_members_that_come_at_once_complete_their_group():
    sink = FailingSink()
    groups = GroupedSink(sink)
    kept = await asyncio.gather(*(groups.put([trajectory(number)], group="g", size=4) for number in range(4)))
    assert sorted(kept) == ["group g: 1 of 4", "group g: 2 of 4", "group g: 3 of 4", "kept"]
    assert sorted(sink.kept[0]) == [0, 1, 2, 3]


async def test_a_full_buffer_delays_rewards_and_loses_nothing(serve):
    target = buffer(capacity=1)
    async with serve(lambda prompt: [7, 8], capture=BufferSink(target, admission_timeout_s=0.05)) as served:
        for name in ("a", "b"):
            await sample(served, name)
        await served.post("/sessions/a/reward", {"reward": 1.0})
        async with served.client.post(f"{served.url}/sessions/b/reward", json={"reward": 1.0}) as answer:
            assert answer.status == 503
            assert int(answer.headers["Retry-After"]) >= 1
            assert "buffer is full" in await answer.text()
        (group,) = await target.select(1, weight_version=0)
        target.release([group.summary.group_id])
        await served.post("/sessions/b/reward", {"reward": 1.0})
        target.close()
        await sample(served, "c")
        error = await served.post("/sessions/c/reward", {"reward": 1.0}, status=503)
        assert "buffer is closed" in error["error"]["message"]
        assert (await served.get("/sessions/c"))["turns"] == 1


async def test_a_session_whose_client_disconnects_is_stored_once(serve):
    target = buffer(capacity=1)
    async with serve(lambda prompt: [7, 8], capture=BufferSink(target)) as served:
        for name in ("a", "b"):
            await sample(served, name)
        await served.post("/sessions/a/reward", {"reward": 1.0})
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await served.post("/sessions/b/reward", {"reward": 2.0})
        await served.post("/sessions/b/reward", {"reward": 2.0}, status=409)  # it is still being stored
        rewards = []
        for _ in range(2):
            (group,) = await target.select(1, weight_version=0, timeout_s=5.0)
            rewards += group.summary.rewards
            target.release([group.summary.group_id])
        assert rewards == [1.0, 2.0]
        for _ in range(100):
            if len(served.state.sessions) == 0:
                break
            await asyncio.sleep(0.01)
        await served.post("/sessions/b/reward", {"reward": 2.0}, status=404)
        assert target.statistics().admitted == 2


async def test_a_folder_that_cannot_be_written_keeps_the_session(serve, tmp_path):
    folder = tmp_path / "kept"
    async with serve(lambda prompt: [7, 8], capture=FolderSink(folder)) as served:
        await sample(served, "a")
        folder.rmdir()
        error = await served.post("/sessions/a/reward", {"reward": 1.0}, status=503)
        assert "it is kept" in error["error"]["message"]
        folder.mkdir()
        kept = await served.post("/sessions/a/reward", {"reward": 1.0})
        assert len(DataProto.load_from_disk(folder / kept["kept"])) == 1


async def test_two_servers_with_one_folder_overwrite_no_group_of_the_other(tmp_path):
    first, second = FolderSink(tmp_path), FolderSink(tmp_path)
    puts = [sink.put([trajectory(number)]) for number in range(4) for sink in (first, second)]
    names = await asyncio.gather(*puts)
    assert len({*names}) == 8
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(names)


@pytest.mark.parametrize("reward", [1e39, -1e300])
async def test_a_reward_that_float32_cannot_hold_is_refused(serve, reward):
    async with serve(lambda prompt: [7, 8]) as served:
        await sample(served, "a")
        await served.post("/sessions/a/reward", {"reward": reward}, status=400)
        await served.post("/sessions/a/reward", {"reward": 1.0})


@pytest.mark.parametrize("error", [OSError("full"), asyncio.CancelledError()], ids=["fails", "is cancelled"])
async def test_a_group_that_cannot_be_stored_waits_for_its_last_member(error):
    sink = FailingSink()
    groups = GroupedSink(sink)
    for number in (0, 1):
        await groups.put([trajectory(number)], group="g", size=3)
    sink.error = error
    with pytest.raises(type(error)):
        await groups.put([trajectory(2)], group="g", size=3)
    sink.error = None
    assert groups.incomplete == 1
    assert await groups.put([trajectory(2)], group="g", size=3) == "kept"
    assert sink.kept == [[0, 1, 2]]
    assert groups.incomplete == 0


async def test_a_group_of_one_that_fails_leaves_nothing():
    sink = FailingSink()
    groups = GroupedSink(sink)
    sink.error = OSError("full")
    with pytest.raises(OSError, match="full"):
        await groups.put([trajectory(0)], group="g", size=1)
    assert groups.incomplete == 0


async def test_an_idle_group_is_stored_although_nobody_rewards_a_session(caplog):
    sink = FailingSink()
    sink.error = OSError("full")
    groups = GroupedSink(sink, idle_s=0.02)
    await groups.put([trajectory(0)], group="g", size=2)
    async with asyncio.timeout(20):
        while "group 'g' could not be stored and still waits: full" not in caplog.text:
            await asyncio.sleep(0.01)
        sink.error = None
        while groups.incomplete or not sink.kept:
            await asyncio.sleep(0.01)
    assert sink.kept == [[0]]
    await groups.close()


async def test_a_group_that_begins_again_while_idle_ones_are_stored_waits_for_its_members():
    now = 0.0

    class Sink(FailingSink):
        async def put(self, trajectories):
            kept = await super().put(trajectories)
            if self.kept == [[0]]:
                for number in (2, 3):  # the first of them completes the group, the second begins it again
                    await groups.put([trajectory(number)], group="b", size=2)
            return kept

    sink = Sink()
    groups = GroupedSink(sink, clock=lambda: now)
    for number, name in enumerate("ab"):
        await groups.put([trajectory(number)], group=name, size=2)
    now = 10.0
    await groups._flush(before_s=5.0)
    assert (sink.kept, groups.incomplete) == ([[0], [1, 2]], 1)
    await groups.close()
    assert sink.kept == [[0], [1, 2], [3]]


async def test_groups_that_are_due_one_after_the_other_are_stored_together():
    sink = FailingSink()
    groups = GroupedSink(sink, idle_s=0.1)
    flush, flushed = groups._flush, []

    async def counted(*, before_s):
        flushed.append(before_s)
        await flush(before_s=before_s)

    groups._flush = counted
    for number in range(50):
        await groups.put([trajectory(number)], group=f"g{number}", size=2)
    for number, group in enumerate(groups._incomplete.values()):
        group.touched_s += number / 1000
    async with asyncio.timeout(20):
        while len(sink.kept) < 50:
            await asyncio.sleep(0.01)
    assert len(flushed) <= 4
    await groups.close()


async def test_closing_stores_a_group_once_although_it_is_being_stored():
    sink = BlockedSink()
    groups = GroupedSink(sink, idle_s=0.0)
    await groups.put([trajectory(0)], group="g", size=2)
    while groups.incomplete:
        await asyncio.sleep(0)
    closing = asyncio.create_task(groups.close())
    await asyncio.sleep(0)
    sink.open.set()
    await closing
    assert sink.kept == [[2]]


async def test_closing_again_after_a_deadline_does_nothing(caplog):
    groups = GroupedSink(BlockedSink(), idle_s=0.0)
    await groups.put([trajectory(0)], group="g", size=2)
    while groups.incomplete:
        await asyncio.sleep(0)
    await groups.close(deadline_s=0.01)  # ends the task that stores it
    assert "group 'g' is lost" in caplog.text
    await groups.close()


@pytest.mark.parametrize("deadline_s", [10.0, 0.01])
async def test_closing_waits_for_what_is_made_to_be_put_and_refuses_what_comes_later(caplog, deadline_s):
    sink, made = BlockedSink(), asyncio.Event()
    sink.open.set()
    groups = GroupedSink(sink)
    await groups.put([trajectory(0)], group="g", size=2)

    async def store():
        with groups.storing():
            await made.wait()
            return await groups.put([trajectory(1)], group="g", size=2)

    last = asyncio.create_task(store())
    await asyncio.sleep(0)
    closing = asyncio.create_task(groups.close(deadline_s=deadline_s))
    if deadline_s < 1:
        await closing
        made.set()
        with pytest.raises(BufferClosedError, match="group 'g' has 1 of 2 members"):
            await last
    else:
        await asyncio.sleep(0.01)
        made.set()
        await asyncio.gather(last, closing)
        assert "incomplete" not in caplog.text
    assert [len(each) for each in sink.kept] == ([] if deadline_s < 1 else [2])
    assert ("group 'g' is lost: 1 sessions" in caplog.text) == (deadline_s < 1)
    assert groups.incomplete == 0


@pytest.mark.parametrize("deadline_s", [10.0, 0.01])
async def test_closing_waits_for_a_group_that_is_being_stored_and_logs_it_if_it_never_is(caplog, deadline_s):
    sink = BlockedSink()
    groups = GroupedSink(sink)
    await groups.put([trajectory(0)], group="g", size=2)
    last = asyncio.create_task(groups.put([trajectory(1)], group="g", size=2))
    while groups.incomplete:
        await asyncio.sleep(0)
    closing = asyncio.create_task(groups.close(deadline_s=deadline_s))
    if deadline_s < 1:
        await closing
        assert not caplog.text
    for _ in range(20):  # what does not wait ends meanwhile
        await asyncio.sleep(0)
    last.cancel()
    with pytest.raises(asyncio.CancelledError):
        await last
    sink.open.set()
    await closing
    assert sink.kept == ([] if deadline_s < 1 else [[2]])
    assert ("group 'g' is lost: 1 sessions, 3 tokens" in caplog.text) == (deadline_s < 1)
    assert (groups.incomplete, groups.tokens) == (0, 0)


async def test_incomplete_groups_are_stored_when_they_are_idle():
    now = 0.0
    sink = FailingSink()
    groups = GroupedSink(sink, idle_s=10.0, clock=lambda: now)
    await groups.put([trajectory(0)], group="g", size=3)
    now = 6.0
    await groups.put([trajectory(1)], group="g", size=3)
    await groups.put([trajectory(2)], group="h", size=2)
    now = 12.0
    await groups.put([trajectory(3)], group="h", size=2)
    assert sink.kept == [[2, 3]]
    now = 16.0
    sink.error = OSError("full")
    await groups._flush(before_s=6.0)
    assert (groups.incomplete, groups.tokens) == (1, 6)
    now = 20.0
    with pytest.raises(OSError, match="full"):
        await groups.put([trajectory(4)], group="g", size=3)
    sink.error = None
    await groups._flush(before_s=19.0)
    assert (groups.incomplete, groups.tokens) == (1, 6), "its last member was refused and comes again"
    await groups._flush(before_s=20.0)
    assert sink.kept == [[2, 3], [0, 1]]
    assert (groups.incomplete, groups.tokens) == (0, 0)
    await groups.close()


async def test_incomplete_groups_are_stored_at_the_end(caplog):
    sink = FailingSink()
    groups = GroupedSink(sink, idle_s=math.inf)
    await groups.put([trajectory(0)], group="g", size=2)
    await groups.close()
    assert sink.kept == [[0]]
    target = buffer(capacity=1)
    groups = GroupedSink(BufferSink(target))
    await groups.put([trajectory(0)])
    await groups.put([trajectory(1)], group="g\nERROR", holder="team", size=2)
    await groups.close(deadline_s=0.05)
    assert r"group 'g\nERROR' of 'team' is lost: 1 sessions, 3 tokens" in caplog.text
    assert target.statistics().admitted == 1


async def test_groups_that_have_begun_are_completed_by_a_client_that_rewards_breadth_first():
    sink = FailingSink()
    groups = GroupedSink(sink, tokens=70)
    for attempt in range(8):
        for name in "abc":  # later members are longer than the first
            await groups.put([trajectory(attempt, sampled=2 + attempt // 4)], group=name, size=8)
        if attempt < 7:
            with pytest.raises(APIError, match="this key has 3 incomplete groups, with room reserved"):
                await groups.put([trajectory(0)], group="d", size=8)
    assert sink.kept == [list(range(8))] * 3
    assert (groups.incomplete, groups.tokens) == (0, 0)
    await groups.put([trajectory(2, sampled=500)], group="h", size=2)  # however long a session is, it is stored
    await groups.close()


async def test_a_group_is_stored_as_it_is_where_twice_the_room_is_held(caplog):
    sink = FailingSink()
    groups = GroupedSink(sink, tokens=12)
    await groups.put([trajectory(0)], group="g", size=3)
    await groups.put([trajectory(1, sampled=20)], group="g", size=4)
    sink.error = OSError("full")
    with pytest.raises(OSError, match="full"):
        await groups.put([trajectory(2)], group="g", size=4)
    assert (groups.incomplete, groups.tokens) == (1, 24)
    sink.error = None
    assert await groups.put([trajectory(2)], group="g", size=4) == "kept"
    assert sink.kept == [[0, 1, 2]]
    assert "group 'g' is stored with 3 of 4 members" in caplog.text


async def test_one_key_leaves_the_others_half_of_the_room_however_large_its_groups_are():
    groups = GroupedSink(FailingSink(), tokens=48)
    groups.several_keys = True
    await groups.put([trajectory(0)], group="a", holder="alice", size=4096)
    for name in "ab":
        await groups.put([trajectory(0)], group=name, holder="bob", size=3)
    await groups.put([trajectory(0)], group="a", holder="carol", size=3)
    with pytest.raises(
        APIError, match="all keys have 4 incomplete groups, with room reserved for 51 tokens"
    ) as refused:
        await groups.put([trajectory(0)], group="b", holder="carol", size=3)
    assert refused.value.status == 503
    await groups.put([trajectory(0)], group="a", holder="carol", size=3)
    await groups.close()


@pytest.mark.parametrize("bound", [{"tokens": 24}, {"groups": 4}])
async def test_one_key_has_half_of_the_room_for_incomplete_groups(bound):
    for several_keys in (True, False):
        groups = GroupedSink(FailingSink(), **bound)
        groups.several_keys = several_keys
        for name in "ab":
            await groups.put([trajectory(0)], group=name, holder="alice", size=2)
        if several_keys:
            with pytest.raises(
                APIError, match="this key has 2 incomplete groups, with room reserved for 12 tokens"
            ) as refused:
                await groups.put([trajectory(0)], group="c", holder="alice", size=2)
            assert refused.value.status == 429
            await groups.put([trajectory(0)], group="c", holder="bob", size=2)
        else:
            await groups.put([trajectory(0)], group="c", holder="alice", size=2)
        await groups.close()
    assert (groups.incomplete, groups.tokens) == (0, 0)


async def test_a_group_is_its_holders_own():
    groups = GroupedSink(FailingSink())
    await groups.put([trajectory(0)], group="x/g", holder="team", size=2)
    await groups.put([trajectory(1)], group="g", holder="team/x", size=2)
    assert groups.incomplete == 2
    await groups.close()


class BlockedSink:
    """Stores groups once ``open`` is set."""

    def __init__(self):
        self.kept = []
        self.open = asyncio.Event()

    async def put(self, trajectories):
        await self.open.wait()
        self.kept.append([each.sampled_tokens for each in trajectories])
        return "kept"


async def test_a_session_that_is_being_stored_takes_no_request(serve):
    sink = BlockedSink()
    async with serve(lambda prompt: [7, 8], capture=sink) as served:
        await sample(served, "a")
        rewarding = asyncio.create_task(served.post("/sessions/a/reward", {"reward": 1.0}))
        while not served.state.sessions.find("a", "").ending:
            await asyncio.sleep(0.01)
        await served.post("/sessions/a/generate", {"prompt_token_ids": [5]}, status=409)
        await served.post("/sessions/a/reward", {"reward": 1.0}, status=409)
        async with served.client.delete(f"{served.url}/sessions/a") as answer:
            assert answer.status == 409
        sink.open.set()
        await rewarding
        assert sink.kept == [[2]]
        await sample(served, "a")  # another session of that name
        assert (await served.get("/sessions/a"))["turns"] == 1


@pytest.mark.parametrize("parts", [{"a": "n/a"}, {"a": None}, [1], {"a": 1e300}])
async def test_parts_of_a_reward_are_numbers(serve, parts):
    async with serve(lambda prompt: [7, 8]) as served:
        await sample(served, "a")
        body = {"reward": 1.0, "group": "g", "group_size": 2, "info": {"reward_parts": parts}}
        error = await served.post("/sessions/a/reward", body, status=400)
        assert "reward_parts" in error["error"]["message"]
        body["info"] = {"reward_parts": {"a": 1, "b": 0.5}}
        assert (await served.post("/sessions/a/reward", body))["kept"] == "group g: 1 of 2"


async def test_what_is_kept_with_a_reward_has_a_limit(serve):
    async with serve(lambda prompt: [7, 8], limits=Limits(info_size_bytes=20)) as served:
        await sample(served, "a")
        for info, status in (({"task": "x" * 20}, 413), ({"task": "x" * 9}, 200)):
            await served.post("/sessions/a/reward", {"reward": 1.0, "info": info}, status=status)


async def test_a_group_without_samples_is_not_admitted():
    target = buffer(capacity=1)
    sink = BufferSink(target, admission_timeout_s=0.0)
    with pytest.raises(InvalidDataError, match="no sampled token"):
        await sink.put([trajectory(0, sampled=0)])
    await sink.put([trajectory(1)])
    with pytest.raises(DeadlineError):
        await sink.put([trajectory(2)])
    (group,) = await target.select(1, weight_version=3)
    target.release([group.summary.group_id])
    await sink.put([trajectory(2)])
    assert target.statistics().admitted == 2
