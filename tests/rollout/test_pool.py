"""The pool over real worker groups whose workers only pretend to generate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch

from asyncrl.data import DataProto
from asyncrl.errors import DeadlineError, ResourceError, WeightError, WeightMismatchError, WeightVersionError
from asyncrl.rollout.pool import RolloutPool
from asyncrl.rollout.prompts import prompt_rows
from asyncrl.single_controller import ClassWithInitArgs, Dispatch, Execute, Worker, register
from asyncrl.single_controller.local import LocalWorkerGroup
from asyncrl.weights.manifest import WeightManifest


def manifest(version: int) -> WeightManifest:
    return WeightManifest(version=version, transport="none", location="nowhere", tensors=())


class Pretender(Worker):
    """Answers with its name and version; fails to prepare the versions it is told to."""

    def __init__(self, name: str, fails_to_prepare: tuple[int, ...] = (), hangs_on_prepare: bool = False) -> None:
        super().__init__()
        self.name = name
        self.version = -1
        self.prepared = -1
        self._fails = fails_to_prepare
        self._hangs = hangs_on_prepare
        self.gate = asyncio.Event()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def start(self, model_path: str, weight_version: int) -> None:
        self.version = weight_version

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def rollout(self, prompts: DataProto) -> DataProto:
        if prompts.meta_info["purpose"] == "slow":
            await self.gate.wait()
        return DataProto.from_dict(
            {"row": torch.arange(len(prompts))}, meta_info={"by": self.name, "version": self.version}
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def prepare_weights(self, manifest: WeightManifest) -> None:
        if self._hangs:
            await asyncio.Event().wait()
        if manifest.version in self._fails:
            raise WeightMismatchError("checksum differs")
        self.prepared = manifest.version

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def commit_weights(self, version: int, kv_cache: str) -> None:
        assert self.prepared == version
        self.version = version

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def open(self) -> None:
        self.gate.set()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    async def statistics(self) -> dict[str, dict[str, int]]:
        return {"delivered": {"train": 10}, "in_flight": {"train": 3}}


def group(name: str, **options: object) -> LocalWorkerGroup:
    return LocalWorkerGroup(ClassWithInitArgs(Pretender, name, **options), name=name)


@pytest.fixture
async def pair() -> AsyncIterator[RolloutPool]:
    a, b = group("a"), group("b", fails_to_prepare=(2,))
    pool = RolloutPool({"a": a, "b": b})
    await pool.start("model", weight_version=0)
    yield pool
    await a.aclose()
    await b.aclose()


def rows(count: int, purpose: str = "train") -> DataProto:
    return prompt_rows([{}] * count, slot=0, seeds=[0] * count, purpose=purpose)


async def by(pool: RolloutPool, count: int = 2) -> str:
    return str((await pool.rollout(rows(count)).header()).meta_info["by"])


async def test_work_goes_where_least_is_waiting(pair: RolloutPool):
    slow = pair.rollout(rows(4, "slow"))
    assert [await by(pair) for _ in range(3)] == ["b", "b", "b"]
    await pair._replicas["a"].group.open()
    assert (await slow.header()).meta_info["by"] == "a"
    assert await by(pair) == "a"


async def test_a_version_is_served_by_all_or_its_replica_is_fenced(pair: RolloutPool):
    assert set((await pair.publish(manifest(1))).committed) == {"a", "b"}
    assert pair.weight_version == 1
    ended = await pair.publish(manifest(2))
    assert ended.committed == ("a",)
    assert "checksum differs" in ended.fenced["b"]
    assert [await by(pair) for _ in range(3)] == ["a", "a", "a"]
    assert (await pair.rollout(rows(1)).header()).meta_info["version"] == 2


async def test_versions_only_grow(pair: RolloutPool):
    await pair.publish(manifest(3))
    with pytest.raises(WeightVersionError):
        await pair.publish(manifest(3))


async def test_token_counts_add_up(pair: RolloutPool):
    counts = await pair.token_counts()
    assert (counts.delivered, counts.in_flight) == (20, 6)


async def test_a_replica_that_hangs_meets_the_deadline_and_the_last_one_lost_is_an_error():
    only = group("only", hangs_on_prepare=True)
    pool = RolloutPool({"only": only}, deadline_s=0.1)
    await pool.start("model", weight_version=0)
    with pytest.raises(WeightError, match="no replica could take weight version 1"):
        await pool.publish(manifest(1))
    with pytest.raises(ResourceError, match="no rollout replica serves"):
        pool.rollout(rows(1))
    await only.aclose()


async def test_rollouts_that_never_end_meet_their_deadline_by_name():
    only = group("only")
    pool = RolloutPool({"only": only}, rollout_deadline_s=0.1)
    await pool.start("model", weight_version=0)
    with pytest.raises(DeadlineError, match=r"only\.rollout did not finish within 0\.1 s"):
        await pool.rollout(rows(1, "slow")).header()
    await only.aclose()


async def test_a_replica_fenced_in_the_middle_of_its_work_is_an_error_not_a_silence(pair: RolloutPool):
    first = pair.rollout(rows(1, "slow"))
    second = pair.rollout(rows(1, "slow"))  # on b, which fails to prepare version 2
    with pytest.raises(WeightError, match="1 rollouts were under way on replicas that are fenced now: b:"):
        await pair.publish(manifest(2))
    first.cancel()
    second.cancel()


async def test_a_pool_that_was_not_started_says_so():
    pool = RolloutPool({})
    with pytest.raises(WeightError, match="call start"):
        _ = pool.weight_version
    with pytest.raises(WeightError, match="call start"):
        await pool.publish(manifest(1))
