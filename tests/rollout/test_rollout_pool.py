"""The trainer's pool over real worker groups whose workers generate nothing."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.errors import (
    ConfigError,
    DeadlineError,
    EngineClosedError,
    EngineError,
    GroupClosedError,
    LiveWeightsError,
    ResourceError,
    RolloutsLostError,
    VersionLostError,
    WeightError,
    WeightMismatchError,
    WeightVersionError,
    WorkerDiedError,
)
from asyncrl.rollout.pool import RolloutPool, WorkerGroupReplica
from asyncrl.rollout.trajectory import prompt_rows
from asyncrl.single_controller import ClassWithInitArgs, Dispatch, Execute, Worker, register
from asyncrl.single_controller.local import LocalWorkerGroup
from asyncrl.weights import WeightManifest


def manifest(version: int) -> WeightManifest:
    return WeightManifest(version=version, transport="none", location="nowhere", tensors=())


class FakeWorker(Worker):
    """Answers rollouts with its name and version; fails to prepare the given versions."""

    def __init__(
        self,
        name: str,
        fails_to_prepare: tuple[int, ...] = (),
        hangs_on_prepare: bool = False,
        hangs_after: float = math.inf,
        out_of_memory_at: str = "",
        hangs_at: str = "",
    ) -> None:
        super().__init__()
        self.name = name
        self.version = -1
        self.prepared = -1
        self._fails = fails_to_prepare
        self._hangs_after = -math.inf if hangs_on_prepare else hangs_after
        self._out_of_memory_at = out_of_memory_at
        self._hangs_at = hangs_at
        self.gate = asyncio.Event()
        self.dead = False
        self.orders: list[str] = []

    def _allocate(self, what_for: str) -> None:
        if what_for == self._out_of_memory_at:
            raise RuntimeError("CUDA out of memory")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def start(self, model_path: str, weight_version: int) -> None:
        self._allocate("start")
        self.version = weight_version
        self.delivered = self.in_flight = 0

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def rollout(self, prompts: DataProto) -> DataProto:
        self.delivered += len(prompts)
        self.in_flight += len(prompts)
        try:
            if prompts.meta_info["purpose"] == "last":
                self.dead = True
            if prompts.meta_info["purpose"] == "poison":
                raise WorkerDiedError(f"{self.name} died", group=self.name)
            if prompts.meta_info["sample"]:
                await self.gate.wait()
        finally:
            self.in_flight -= len(prompts)
        meta = {"by": self.name, "version": self.version, "summary": {"tokens": len(prompts)}, "wasted_tokens": 0}
        meta["deadline_s"] = prompts.meta_info.get("deadline_s")
        return DataProto.from_dict({"row": torch.arange(len(prompts))}, meta_info=meta)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def prepare_weights(self, manifest: WeightManifest) -> None:
        self._allocate("prepare")
        if manifest.version > self._hangs_after:
            await asyncio.Event().wait()
        if manifest.version in self._fails:
            raise WeightMismatchError("checksum differs")
        self.prepared = manifest.version

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def commit_weights(self, version: int, kv_cache: str) -> None:
        assert self.prepared == version
        if self.orders[-1:] == ["sleep"]:
            raise WeightError(f"version {version} cannot be committed while the engine is asleep")
        self._allocate("commit")
        self.version = version

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def open(self) -> None:
        self.gate.set()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def sleep(self) -> None:
        if self._hangs_at == "sleep":
            await asyncio.Event().wait()
        self._allocate("sleep")
        self.orders = [*self.orders, "sleep"]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def wake(self) -> None:
        if self._hangs_at == "wake":
            await asyncio.Event().wait()
        self.orders = [*self.orders, "wake"]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    async def slept(self) -> list[str]:
        return self.orders

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    async def turns(self) -> bytes:
        await self.gate.wait()
        return b"turns"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    async def engine_statistics(self) -> dict[str, Any]:
        if self.dead:
            raise WorkerDiedError(f"{self.name} died", group=self.name)
        where = "1 in the environment or its reward, the longest for 40 s"
        return {"episodes": where, "delivered": {"train": self.delivered}, "in_flight": {"train": self.in_flight}}


def group(name: str, **options: object) -> LocalWorkerGroup:
    return LocalWorkerGroup(ClassWithInitArgs(FakeWorker, name, **options), name=name)


Pair = tuple[RolloutPool, dict[str, LocalWorkerGroup]]


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    """Two replicas, of which b cannot take version 2; the dead come back as new groups."""
    groups = {"a": group("a"), "b": group("b", fails_to_prepare=(2,))}
    every = list(groups.values())

    async def revive(name: str) -> LocalWorkerGroup:
        groups[name] = group(name)
        every.append(groups[name])
        return groups[name]

    pool = RolloutPool(groups, revive=revive, restart_s=0.0)
    await pool.start("model", weight_version=0)
    yield pool, groups
    await pool.aclose()
    for one in every:
        await one.aclose()


def rows(count: int, *, slow: bool = False, purpose: str = "train") -> DataProto:
    return prompt_rows([{}] * count, group_id=0, seeds=[0] * count, purpose=purpose, sample=slow)


async def meta_of(pool: RolloutPool, prompts: DataProto) -> dict[str, Any]:
    return (await (await pool.rollout(prompts)).header()).meta_info


async def by(pool: RolloutPool, count: int = 2) -> str:
    return str((await meta_of(pool, rows(count)))["by"])


def replica(pool: RolloutPool, name: str) -> WorkerGroupReplica:
    return pool._replicas[name]


def calls(pool: RolloutPool, name: str) -> int:
    """Rollouts that the replica is doing."""
    instance = pool._replicas[name].instance
    return 0 if instance is None else len(instance.calls)


async def begun(pool: RolloutPool, name: str) -> None:
    while not calls(pool, name):
        await asyncio.sleep(0)


async def serving(pool: RolloutPool, name: str) -> None:
    while not replica(pool, name).serves:
        await asyncio.sleep(0)


def kill(pool: RolloutPool, name: str) -> None:
    instance = replica(pool, name).instance
    assert instance is not None
    replica(pool, name).lost(instance, WorkerDiedError("killed by SIGKILL", group=name))


async def test_a_replica_with_a_slow_group_says_where_its_rollouts_are(pair: Pair):
    pool, groups = pair
    slow = asyncio.ensure_future(meta_of(pool, rows(1, slow=True)))
    await begun(pool, "a")
    await pool.ask_slow()  # not for so long yet
    assert "environment" not in " ".join(pool.explain())
    await pool.ask_slow(after_s=-1.0)
    of_a, of_b = pool.explain()
    assert of_a.endswith("s (1 in the environment or its reward, the longest for 40 s)")
    assert of_b.endswith("idle")
    await groups["a"].open()
    await slow


async def test_work_goes_where_least_is_waiting(pair: Pair):
    pool, groups = pair
    slow = asyncio.ensure_future(meta_of(pool, rows(4, slow=True)))
    await begun(pool, "a")
    assert [await by(pool) for _ in range(3)] == ["b", "b", "b"]
    await groups["a"].open()
    assert (await slow)["by"] == "a"
    assert await by(pool) == "a"


async def test_a_replica_that_dies_while_the_pool_sleeps_starts_again_when_it_wakes(pair: Pair):
    pool, groups = pair
    slow = asyncio.ensure_future(meta_of(pool, rows(4, slow=True)))
    await begun(pool, "a")
    await pool.sleep()
    kill(pool, "b")
    for _ in range(20):
        await asyncio.sleep(0)
    assert not replica(pool, "b").serves
    assert await groups["b"].slept() == ["sleep"]  # the group that died: no other was made
    await pool.wake()
    await serving(pool, "b")
    assert await groups["a"].slept() == ["sleep", "wake"]
    assert await groups["b"].slept() == []  # a new one, which was not there when the pool slept
    await groups["a"].open()
    assert (await slow)["by"] == "a"


async def test_sleep_waits_for_a_replica_that_starts_and_takes_the_current_weights():
    may_start = asyncio.Event()

    async def revive(name: str) -> LocalWorkerGroup:
        await may_start.wait()
        made.append(group(name))
        return made[-1]

    made = [group("a"), group("b")]
    pool = RolloutPool({"a": made[0], "b": made[1]}, revive=revive, restart_s=0.0)
    await pool.start("model", weight_version=0)
    await pool.publish(manifest(1))
    kill(pool, "b")
    while not pool._starts:
        await asyncio.sleep(0)
    given_up = asyncio.ensure_future(pool.ready_to_sleep())
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.wait([given_up])
    assert pool._awake.is_set()
    sleeping = asyncio.ensure_future(pool.sleep())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not sleeping.done()
    may_start.set()
    await sleeping
    assert replica(pool, "b").serves
    assert await made[2].slept() == ["sleep"]
    await pool.wake()
    assert await made[2].slept() == ["sleep", "wake"]
    await pool.aclose()
    for one in made:
        await one.aclose()


@pytest.mark.parametrize("fault", [{"out_of_memory_at": "sleep"}, {"hangs_at": "sleep"}, {"hangs_at": "wake"}], ids=str)
async def test_a_replica_that_cannot_sleep_or_wake_is_lost_and_closed_by_then(fault: dict[str, str]):
    async def revive(name: str) -> LocalWorkerGroup:
        made.append(group(name))
        return made[-1]

    made = [group("a", **fault), group("b")]
    pool = RolloutPool({"a": made[0], "b": made[1]}, revive=revive, restart_s=0.0, deadline_s=0.2)
    await pool.start("model", weight_version=0)
    async with asyncio.timeout(10.0):
        await pool.sleep()
        if "wake" in fault.values():
            await pool.wake()
        else:
            assert [replica(pool, name).serves for name in "ab"] == [False, True]
    with pytest.raises(GroupClosedError):
        await made[0].slept()
    await pool.wake()
    await serving(pool, "a")
    assert await made[2].slept() == []
    await pool.aclose()
    for one in made:
        await one.aclose()


async def test_a_version_is_served_by_all_or_its_replica_is_fenced_until_the_next(pair: Pair):
    pool, _ = pair
    assert set((await pool.publish(manifest(1))).committed) == {"a", "b"}
    assert pool.weight_version == 1
    ended = await pool.publish(manifest(2))
    assert ended.committed == ("a",)
    assert "checksum differs" in ended.fenced["b"]
    assert [await by(pool) for _ in range(3)] == ["a", "a", "a"]
    assert (await meta_of(pool, rows(1)))["version"] == 2
    assert pool.needed_versions == {2}
    await pool.publish(manifest(3))
    await serving(pool, "b")  # a publication does not wait for a replica that was fenced when it began
    busy = asyncio.ensure_future(meta_of(pool, rows(1, slow=True)))
    await begun(pool, "a")
    assert (await meta_of(pool, rows(1)))["by"] == "b", "it took version 3, and serves again"
    busy.cancel()


async def test_a_pinned_replica_keeps_its_version_and_its_rollouts_until_the_block_ends(pair: Pair):
    pool, groups = pair
    slow = asyncio.ensure_future(meta_of(pool, rows(4, slow=True)))
    await begun(pool, "a")
    async with pool.pinned(1) as pin:
        assert pin.version == 0
        for version in (1, 3):
            assert (await pool.publish(manifest(version))).committed == ("a",)
        answers = [(await (await pool.rollout(rows(1, purpose="eval"), pin=pin)).header()).meta_info for _ in range(3)]
        assert {(meta["by"], meta["version"]) for meta in answers} == {("b", 0)}, "the one that had least to do"
        assert await by(pool) == "a", "busy as it is"
        with pytest.raises(ResourceError, match="2 replicas cannot be pinned"):
            async with pool.pinned(2):
                raise AssertionError
    assert await by(pool) == "a", "b has older weights still"
    while not replica(pool, "b").takes(None):
        await asyncio.sleep(0)
    assert (await meta_of(pool, rows(1)))["version"] == 3
    await groups["a"].open()
    await slow


async def test_a_second_pin_waits_until_a_replica_is_left_for_the_others(pair: Pair):
    pool, _ = pair
    order: list[str] = []

    async def evaluated(name: str, leave: asyncio.Event) -> int:
        async with pool.pinned(1) as pin:
            order.append(name)
            await leave.wait()
            return pin.version

    leave = asyncio.Event()
    first, second = (asyncio.ensure_future(evaluated(name, leave)) for name in ("first", "second"))
    while not order:
        await asyncio.sleep(0)
    await pool.publish(manifest(1))
    assert order == ["first"]
    leave.set()
    assert (await first, await second) == (0, 1)


async def test_a_version_that_is_lost_with_its_replica_is_told(pair: Pair):
    pool, _ = pair
    async with pool.pinned(1) as pin:
        answer = asyncio.ensure_future(pool.rollout(rows(1, slow=True, purpose="eval"), pin=pin))
        await begun(pool, "a")
        await pool.publish(manifest(1))
        kill(pool, "a")
        with pytest.raises(VersionLostError, match=r"version 0 is lost: .* the others serve version 1"):
            await answer
    await serving(pool, "a")
    assert (await meta_of(pool, rows(1)))["by"] == "a"


async def test_while_no_newer_weights_came_another_replica_takes_the_place_of_a_pinned_one(pair: Pair):
    pool, groups = pair
    async with pool.pinned(1) as pin:
        answer = asyncio.ensure_future(pool.rollout(rows(1, slow=True, purpose="eval"), pin=pin))
        await begun(pool, "a")
        kill(pool, "a")  # b alone must go on with the others' rollouts until a is back
        while replica(pool, "b").pin is None and replica(pool, "a").pin is None:
            await asyncio.sleep(0)
        for one in groups.values():
            await one.open()
        meta = (await (await answer).header()).meta_info
        assert meta["version"] == pin.version == 0


async def test_versions_only_grow(pair: Pair):
    pool, _ = pair
    await pool.publish(manifest(3))
    with pytest.raises(WeightVersionError):
        await pool.publish(manifest(3))


async def test_a_replica_that_hangs_meets_the_deadline_and_the_last_one_lost_is_an_error():
    only = group("only", hangs_on_prepare=True)
    pool = RolloutPool({"only": only}, deadline_s=0.1)
    await pool.start("model", weight_version=0)
    with pytest.raises(WeightError, match="no replica could take weight version 1"):
        await pool.publish(manifest(1))
    with pytest.raises(ResourceError, match="no rollout replica serves"):
        await pool.rollout(rows(1))
    await pool.aclose()
    await only.aclose()


async def test_rollouts_that_never_end_meet_their_deadline_by_name():
    only = group("only")
    pool = RolloutPool({"only": only}, rollout_deadline_s=0.1)
    await pool.start("model", weight_version=0)
    with pytest.raises(DeadlineError, match=r"not complete after 0\.1 s, in attempt 1: only\.rollout did not finish"):
        await pool.rollout(rows(1, slow=True))
    await pool.aclose()
    await only.aclose()


async def test_a_worker_knows_how_much_time_its_rollouts_have():
    for deadline_s in (None, 1000.0):
        only = group("only")
        pool = RolloutPool({"only": only}, rollout_deadline_s=deadline_s)
        await pool.start("model", weight_version=0)
        asked = rows(1)
        left_s = (await (await pool.rollout(asked)).header()).meta_info["deadline_s"]
        assert left_s is None if deadline_s is None else 0 < left_s <= deadline_s
        assert "deadline_s" not in asked.meta_info
        await pool.aclose()
        await only.aclose()


async def test_a_fenced_replica_that_hangs_keeps_no_version_from_being_released():
    groups = {"a": group("a"), "b": group("b", fails_to_prepare=(1,), hangs_after=1)}
    pool = RolloutPool(groups)
    await pool.start("model", weight_version=0)
    for version in (1, 2, 3, 4):
        ended = await pool.publish(manifest(version))
        assert ended.committed == ("a",)
        assert pool.needed_versions == {version}
    assert not replica(pool, "b").serves
    await pool.aclose()
    for one in groups.values():
        await one.aclose()


class SlowToPrepare(FakeWorker):
    """Prepares a version once it is let, as often as that."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, **options)
        self._may_prepare = asyncio.Semaphore(0)
        self._asked: list[int] = []

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def prepare_weights(self, manifest: WeightManifest) -> None:
        self._asked.append(manifest.version)
        await self._may_prepare.acquire()
        await super().prepare_weights(manifest)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def let(self) -> None:
        self._may_prepare.release()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    async def asked(self) -> list[int]:
        return self._asked


async def test_the_only_replica_may_come_back_later_than_versions_are_published():
    made = [group("only")]

    async def revive(name: str) -> LocalWorkerGroup:
        made.append(LocalWorkerGroup(ClassWithInitArgs(SlowToPrepare, name, fails_to_prepare=(1,)), name=name))
        return made[-1]

    pool = RolloutPool({"only": made[0]}, revive=revive, restart_s=0.0)
    await pool.start("model", weight_version=0)
    await pool.publish(manifest(1))
    kill(pool, "only")
    waiting = asyncio.ensure_future(by(pool))
    while len(made) == 1 or not pool._set.updates.updating("only"):
        await asyncio.sleep(0)
    while await made[1].asked() != [1]:
        pass
    await pool.publish(manifest(2))  # for which version 1 may be released: the replica cannot fetch it any more
    await made[1].let()
    while await made[1].asked() != [1, 2]:
        pass
    assert "checksum differs" in replica(pool, "only").health.reason
    await pool.publish(manifest(3))
    for _ in range(2):
        await made[1].let()
    async with asyncio.timeout(10.0):
        assert await waiting == "only"
    assert (await meta_of(pool, rows(1)))["version"] == 3
    await pool.aclose()
    for one in made:
        await one.aclose()


async def test_a_replica_that_has_prepared_the_next_version_is_coming_back():
    slow = LocalWorkerGroup(ClassWithInitArgs(SlowToPrepare, "a"), name="a")
    groups = {"a": slow, "b": group("b", fails_to_prepare=(1,))}
    pool = RolloutPool(groups)
    await pool.start("model", weight_version=0)
    await slow.let()
    assert "b" in (await pool.publish(manifest(1))).fenced
    publishing = asyncio.ensure_future(pool.publish(manifest(2)))
    while not any(one.prepared == 2 for one in pool._set.updates._publication.replicas):
        await asyncio.sleep(0)
    assert replica(pool, "b").lasts
    await slow.let()
    await publishing
    await serving(pool, "b")
    await pool.aclose()
    for one in groups.values():
        await one.aclose()


async def test_rollouts_do_not_wait_for_a_replica_that_came_back_and_cannot_take_the_current_weights():
    made = [group("only")]

    async def revive(name: str) -> LocalWorkerGroup:
        made.append(group(name, fails_to_prepare=(1,)))
        return made[-1]

    pool = RolloutPool({"only": made[0]}, revive=revive, restart_s=0.0)
    await pool.start("model", weight_version=0)
    await pool.publish(manifest(1))
    async with asyncio.timeout(10.0):
        with pytest.raises(ResourceError, match=r"no rollout replica serves: only: .*checksum differs"):
            await pool.rollout(rows(1, purpose="poison"))
    await pool.aclose()
    for one in made:
        await one.aclose()


async def test_rollouts_that_are_done_elsewhere_have_one_deadline_for_all_attempts(monkeypatch: pytest.MonkeyPatch):
    groups = {"a": group("a"), "b": group("b")}
    pool = RolloutPool(groups, rollout_deadline_s=0.3)
    await pool.start("model", weight_version=0)
    ends: list[float | None] = []
    send = pool._send

    async def noted(*given: Any, ends_s: float | None) -> DataProtoFuture:
        ends.append(ends_s)
        return await send(*given, ends_s=ends_s)

    monkeypatch.setattr(pool, "_send", noted)
    rolling = asyncio.ensure_future(pool.rollout(rows(1, slow=True)))
    await begun(pool, "a")
    kill(pool, "a")
    with pytest.raises(DeadlineError, match=r"complete after 0\.3 s, in attempt 2: b\.rollout did not finish"):
        await rolling
    assert ends[0] == ends[1]
    await pool.aclose()
    for one in groups.values():
        await one.aclose()


async def test_what_a_fenced_replica_was_doing_is_done_elsewhere_and_its_tokens_are_counted(pair: Pair):
    pool, groups = pair
    first = asyncio.ensure_future(meta_of(pool, rows(3, slow=True)))
    await begun(pool, "a")
    second = asyncio.ensure_future(meta_of(pool, rows(2, slow=True)))
    await begun(pool, "b")
    assert (await pool.token_counts()).in_flight == 5
    await pool.publish(manifest(2))  # which b cannot take
    await groups["a"].open()
    assert [(await one)["by"] for one in (first, second)] == ["a", "a"]
    counts = await pool.token_counts()
    assert (counts.delivered, counts.in_flight, counts.lost) == (7, 0, 2)


async def test_a_dead_replica_costs_time_and_comes_back_with_the_current_weights(pair: Pair):
    pool, groups = pair
    await pool.publish(manifest(1))
    first = asyncio.ensure_future(meta_of(pool, rows(3, slow=True)))
    await begun(pool, "a")
    second = asyncio.ensure_future(meta_of(pool, rows(1, slow=True)))
    await begun(pool, "b")
    dead = replica(pool, "a").instance
    kill(pool, "a")
    assert [await by(pool, 1)] == ["b"]
    await serving(pool, "a")
    assert replica(pool, "a").instance is not dead
    for one in groups.values():
        await one.open()
    assert {(await one)["version"] for one in (first, second)} == {1}
    assert (await meta_of(pool, rows(1)))["by"] == "a"
    assert (await meta_of(pool, rows(1)))["version"] == 1


async def test_rows_that_kill_every_replica_fail_by_name(pair: Pair):
    pool, _ = pair
    with pytest.raises(RolloutsLostError, match="3 replicas died or failed under the same rollouts"):
        await pool.rollout(rows(1, purpose="poison"))
    assert await by(pool, 1) in ("a", "b")


async def test_a_replica_that_is_found_dead_by_asking_for_its_counts_is_made_again(pair: Pair):
    pool, _ = pair
    first, second = await by(pool, 2), (await meta_of(pool, rows(3, purpose="last")))["by"]
    assert first == second == "a"
    counts = await pool.token_counts()
    assert (counts.delivered, counts.lost) == (2, 0)  # of the dead one what it had answered is known
    await serving(pool, "a")
    assert set(await pool.statistics()) == {"a", "b"}
    assert (await pool.token_counts()).delivered == 2
    assert await by(pool, 1) == "a"


@pytest.mark.parametrize("content", [bytes(24), b""])
async def test_a_meter_that_lags_takes_no_answer_back(pair: Pair, tmp_path: Path, content: bytes):
    pool, _ = pair
    assert await by(pool, 2) == "a"
    instance = replica(pool, "a").instance
    assert instance is not None
    instance.meter = tmp_path / "a.tokens"
    instance.meter.write_bytes(content)
    kill(pool, "a")
    counts = await pool.token_counts()
    assert (counts.delivered, counts.lost) == (2, 0)


async def test_rows_are_held_to_be_the_reason_when_a_replica_died_of_them_alone(monkeypatch: pytest.MonkeyPatch):
    every: list[LocalWorkerGroup] = []
    at_deaths: list[int] = []

    async def revive(name: str) -> LocalWorkerGroup:
        every.append(group(name))
        return every[-1]

    def lost(self: WorkerGroupReplica, instance: Any, error: Exception) -> None:
        at_deaths.append(1 + len(instance.calls))  # with the call that found it dead
        real(self, instance, error)

    real = WorkerGroupReplica.lost
    monkeypatch.setattr(WorkerGroupReplica, "lost", lost)

    async def again() -> DataProto:
        while not (replica(pool, "only").serves and calls(pool, "only")):
            await asyncio.sleep(0)  # the innocent rows are there before
        return rows(1, purpose="poison")

    every.append(group("only"))
    pool = RolloutPool({"only": every[0]}, revive=revive, restart_s=0.0)
    await pool.start("model", weight_version=0)
    innocent = asyncio.ensure_future(meta_of(pool, rows(1, slow=True)))
    await begun(pool, "only")
    guilty = asyncio.ensure_future(pool.rollout(rows(1, purpose="poison"), again=again))
    while not (replica(pool, "only").reserved or guilty.done()):
        await asyncio.sleep(0)
    later = asyncio.ensure_future(meta_of(pool, rows(1)))  # waits for a replica that is not reserved
    await every[-1].open()
    with pytest.raises(RolloutsLostError):
        await guilty
    assert at_deaths == [2, 2, 1]
    assert (await innocent)["by"] == (await later)["by"] == "only"
    assert not replica(pool, "only").reserved
    assert len(every) == 4
    await pool.aclose()
    for one in every:
        await one.aclose()


async def test_one_that_cannot_be_made_again_is_given_up():
    only = group("only")

    async def revive(name: str) -> LocalWorkerGroup:
        raise ResourceError("no seat is free")

    pool = RolloutPool({"only": only}, revive=revive, restarts=2, restart_s=0.0)
    await pool.start("model", weight_version=0)
    with pytest.raises(ResourceError, match="no rollout replica serves"):
        await pool.rollout(rows(1, purpose="poison"))
    await pool.aclose()
    await only.aclose()


@pytest.mark.parametrize("phase", ["prepare", "commit"])
async def test_a_workers_own_error_at_new_weights_costs_its_replica_only(phase: str):
    groups = [group("a", out_of_memory_at=phase), group("b")]
    pool = RolloutPool(dict(zip("ab", groups, strict=True)))
    await pool.start("model", weight_version=0)
    async with asyncio.timeout(10.0):
        ended = await pool.publish(manifest(1))
    assert ended.committed == ("b",)
    assert ended.fenced["a"].startswith(f"WorkerError: a.{phase}_weights raised RuntimeError on rank 0: CUDA out of")
    assert [await by(pool) for _ in range(3)] == ["b", "b", "b"]
    await pool.aclose()
    for one in groups:
        await one.aclose()


async def test_one_whose_worker_raises_as_it_is_made_again_is_given_up_with_its_reason():
    every = [group("only")]

    async def revive(name: str) -> LocalWorkerGroup:
        every.append(group(name, out_of_memory_at="start"))
        return every[-1]

    pool = RolloutPool({"only": every[0]}, revive=revive, restarts=2, restart_s=0.0)
    await pool.start("model", weight_version=0)
    async with asyncio.timeout(10.0):
        with pytest.raises(ResourceError, match=r"only: it could not be started: .* CUDA out of memory$"):
            await pool.rollout(rows(1, purpose="poison"))
    assert len(every) == 3
    await pool.aclose()
    for one in every:
        await one.aclose()


async def test_no_caller_waits_for_a_pool_that_is_closed():
    only = group("only", hangs_on_prepare=True)

    async def revive(name: str) -> LocalWorkerGroup:
        await asyncio.Event().wait()
        raise AssertionError

    pool = RolloutPool({"only": only}, revive=revive, restart_s=0.0)
    await pool.start("model", weight_version=0)
    publishing = asyncio.ensure_future(pool.publish(manifest(1)))
    await asyncio.sleep(0)
    kill(pool, "only")
    waiting = asyncio.ensure_future(pool.rollout(rows(1)))
    await asyncio.sleep(0)
    await pool.aclose()
    async with asyncio.timeout(10.0):
        with pytest.raises(EngineClosedError, match="the rollout pool is closed"):
            await waiting
        await publishing  # it ended with its only replica
        with pytest.raises(EngineClosedError, match="the rollout pool is closed"):
            await pool.publish(manifest(2))
    await only.aclose()


async def test_a_publication_under_way_ends_with_the_pool():
    only = group("only", hangs_on_prepare=True)
    pool = RolloutPool({"only": only})
    await pool.start("model", weight_version=0)
    publishing = asyncio.ensure_future(pool.publish(manifest(1)))
    await asyncio.sleep(0)
    await pool.aclose()
    async with asyncio.timeout(10.0):
        with pytest.raises(EngineClosedError, match="the rollout pool is closed"):
            await publishing
    await only.aclose()


async def test_a_pool_that_fails_raises_the_cause_in_waiting_callers():
    def full(_turns: bytes) -> None:
        raise OSError("no space left on device")

    only = group("only", hangs_on_prepare=True)
    pool = RolloutPool({"only": only})
    pool.on_turns(full)
    await pool.start("model", weight_version=0)
    publishing = asyncio.ensure_future(pool.publish(manifest(1)))
    await asyncio.sleep(0)
    await only.open()
    async with asyncio.timeout(10.0):
        with pytest.raises(EngineClosedError, match="the rollout pool failed") as caught:
            await publishing
    assert isinstance(caught.value.__cause__, ExceptionGroup)
    assert caught.value.__cause__.subgroup(OSError)
    with pytest.raises(ExceptionGroup):
        await pool.aclose()
    await only.aclose()


async def test_a_replica_of_several_ranks_is_refused():
    several = LocalWorkerGroup(ClassWithInitArgs(FakeWorker, "a"), world_size=2, name="a")
    with pytest.raises(ConfigError, match="replica 'a' of the rollout pool has 2 ranks"):
        RolloutPool({"a": several})
    await several.aclose()


async def test_a_pool_that_was_not_started_says_so():
    pool = RolloutPool({})
    with pytest.raises(EngineError, match="call start"):
        _ = pool.weight_version
    with pytest.raises(EngineError, match="call start"):
        await pool.publish(manifest(1))


class WrongTensors(FakeWorker):
    """Serves other tensors than it was sent, from version 1 on, unless it was started again."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name)
        self._wrong = options["wrong"]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def commit_weights(self, version: int, kv_cache: str) -> None:
        if self._wrong:
            raise LiveWeightsError(f"it serves other tensors than version {version}")
        await super().commit_weights(version, kv_cache)


@pytest.mark.parametrize("persists", [False, True])
async def test_a_replica_that_serves_other_tensors_is_started_again(persists: bool):
    every: list[LocalWorkerGroup] = []

    def made(name: str, *, wrong: bool) -> LocalWorkerGroup:
        every.append(LocalWorkerGroup(ClassWithInitArgs(WrongTensors, name, wrong=wrong), name=name))
        return every[-1]

    async def revive(name: str) -> LocalWorkerGroup:
        return made(name, wrong=persists)

    pool = RolloutPool({"a": made("a", wrong=True)}, revive=revive, restart_s=0.0)
    await pool.start("model", weight_version=0)
    try:
        await pool.publish(manifest(1))
        if persists:
            with pytest.raises(ResourceError, match="no rollout replica serves: a: it serves other tensors"):
                await by(pool)
            assert len(every) == 2  # the second time, no further one is made
            with pytest.raises(WeightError, match="take weight version 2: a: it serves other tensors than version 1"):
                await pool.publish(manifest(2))
        else:
            assert (await meta_of(pool, rows(2)))["version"] == 1
            assert len(every) == 2
    finally:
        await pool.aclose()
        for one in every:
            await one.aclose()


class FailsItsProof(FakeWorker):
    """Fails to commit once its gate is open; rollouts wait for that and are refused, as by a worker's own proof."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name)
        self._error: type[Exception] = options["error"]
        self._proving = asyncio.Lock()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def commit_weights(self, version: int, kv_cache: str) -> None:
        async with self._proving:
            self.orders = ["commit"]
            await self.gate.wait()
            raise self._error(f"version {version} is not proven")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def rollout(self, prompts: DataProto) -> DataProto:
        async with self._proving:
            raise LiveWeightsError("version 1 was committed and not proven")


@pytest.mark.parametrize(("error", "state"), [(LiveWeightsError, "dead"), (WeightError, "stale")])
async def test_rollouts_are_not_to_blame_for_a_version_that_is_not_proven(error: type[Exception], state: str):
    groups = {"a": LocalWorkerGroup(ClassWithInitArgs(FailsItsProof, "a", error=error), name="a"), "b": group("b")}
    pool = RolloutPool(groups, attempts=1)
    await pool.start("model", weight_version=0)
    try:
        publishing = asyncio.ensure_future(pool.publish(manifest(1)))
        while await groups["a"].slept() != ["commit"]:
            pass
        rolling = asyncio.ensure_future(by(pool))
        await begun(pool, "a")
        await groups["a"].open()
        async with asyncio.timeout(10.0):
            assert await rolling == "b"
        assert (await publishing).committed == ("b",)
        assert replica(pool, "a").health.state == state
    finally:
        await pool.aclose()
        for one in groups.values():
            await one.aclose()
