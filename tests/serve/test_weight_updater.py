"""Weight updates from folders, published through shared memory to scripted replicas."""

from __future__ import annotations

import asyncio
import itertools
import threading
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import save_file

from asyncrl.errors import WeightError, WeightVersionError
from asyncrl.rollout.replica_pool import ReplicaPool
from asyncrl.serve.pool import Follower, WeightUpdater
from asyncrl.testing import ScriptedEngine
from engines.weights.shared_memory import SharedMemoryTransport
from engines.weights.store import StoreTransport


class GatedTransport(SharedMemoryTransport):
    """Shared memory whose publications and pulls wait for ``go``."""

    def __init__(self, directory):
        super().__init__(namespace="updater-test", directory=str(directory))
        self.begun, self.go = threading.Event(), threading.Event()
        self.go.set()

    def publish(self, tensors, *, version):
        self._pass()
        return super().publish(tensors, version=version)

    @contextmanager
    def pull(self, manifest):
        self._pass()
        with super().pull(manifest) as tensors:
            yield tensors

    def _pass(self):
        self.begun.set()
        assert self.go.wait(10)

    async def reached(self):
        assert await asyncio.to_thread(self.begun.wait, 10)


@pytest.fixture
def transport(tmp_path):
    memory = tmp_path / "memory"
    memory.mkdir()
    made = GatedTransport(memory)
    yield made
    made.close()


@pytest.fixture
def folder(tmp_path):
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
async def pool(transport):
    async with ReplicaPool({"r0": lambda: ScriptedEngine(lambda prompt: [7])}, transport=transport) as made:
        yield made


@pytest.fixture
def updater(pool, transport):
    return WeightUpdater(pool, transport)


async def swap(updater, folder):
    await updater.swap(folder)


async def test_a_swap_cancelled_while_publishing_leaves_nothing(updater, pool, folder, transport):
    transport.begun.clear()
    transport.go.clear()
    first = asyncio.create_task(swap(updater, folder))
    await transport.reached()
    for _ in range(3):
        first.cancel()
        await asyncio.sleep(0)
    second = asyncio.create_task(swap(updater, folder))
    await asyncio.sleep(0)
    transport.go.set()
    with pytest.raises(asyncio.CancelledError):
        await first
    await second
    assert (pool.weight_version, transport.versions) == (2, (2,)), "version 1 was published, not needed, and freed"
    for version in (3, 4, 5):
        await swap(updater, folder)
        assert (pool.weight_version, transport.versions) == (version, (version,))


async def test_a_cancelled_swap_frees_what_it_published(updater, folder, transport):
    transport.begun.clear()
    transport.go.clear()
    first = asyncio.create_task(swap(updater, folder))
    await transport.reached()
    first.cancel()
    for _ in range(3):
        await asyncio.sleep(0)
    assert not first.done(), "a publication cannot be interrupted, and no other may begin"
    transport.go.set()
    await asyncio.wait([first])
    assert first.cancelled()
    assert (updater.prepared, transport.versions) == (None, ())


async def test_versions_follow_all_that_were_published(updater, pool, folder, transport):
    assert [(await updater.prepare_folder(folder)).version for _ in range(3)] == [1, 2, 3]
    with pytest.raises(WeightVersionError, match="3 is not newer than 3"):
        await updater.prepare_folder(folder, version=3)
    assert (updater.prepared, transport.versions) == (3, (3,))
    await updater.commit(3)
    assert (await updater.prepare_folder(folder, version=9)).version == 9
    assert (await updater.prepare_folder(folder)).version == 10
    assert pool.weight_version == 3


async def test_preparing_replaces_what_was_prepared(updater, folder, transport):
    await swap(updater, folder)
    for version in (2, 3, 4):
        await updater.prepare_folder(folder, version=version)
        assert (updater.prepared, transport.versions) == (version, (1, version))
    with pytest.raises(WeightVersionError, match="version 3 cannot be committed: 4 is prepared"):
        await updater.commit(3)
    await updater.commit(4)
    assert transport.versions == (4,)


async def test_a_folder_without_weights_replaces_nothing(updater, folder, transport, tmp_path):
    await updater.prepare_folder(folder)
    with pytest.raises(WeightError, match="holds no safetensors"):
        await updater.prepare_folder(tmp_path / "nowhere")
    assert (updater.prepared, transport.versions) == (1, (1,))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(WeightError, match=r"model\.safetensors"):
        await updater.prepare_folder(broken)
    assert (updater.prepared, transport.versions) == (None, ())
    await swap(updater, folder)
    assert transport.versions == (2,)


async def test_two_concurrent_swaps_are_served_one_after_the_other(updater, pool, folder, transport):
    ended = await asyncio.gather(updater.swap(folder), updater.swap(folder))
    assert [each.committed for each in ended] == [("r0",), ("r0",)]
    assert (pool.weight_version, transport.versions) == (2, (2,))


async def test_a_prepared_version_that_another_call_replaces_is_not_committed(updater, pool, folder, transport):
    async def in_two_calls():
        await updater.commit((await updater.prepare_folder(folder)).version)

    results = await asyncio.gather(in_two_calls(), in_two_calls(), return_exceptions=True)
    assert isinstance(results[0], WeightVersionError)
    assert "version 1 cannot be committed: 2 is prepared" in str(results[0])
    assert results[1] is None
    assert (pool.weight_version, transport.versions) == (2, (2,))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_weights_that_are_not_finite_are_refused_by_name(updater, pool, folder, transport, value, dtype):
    good = {"a": torch.ones(3), "empty": torch.ones(0), "mask": torch.tensor([True])}
    save_file(good | {"b": torch.tensor([1.0, value, 2.0], dtype=dtype)}, folder / "model.safetensors")
    with pytest.raises(WeightError, match=r"model\.safetensors: b has values that are nan or infinite"):
        await swap(updater, folder)
    assert (pool.weight_version, transport.versions) == (0, ())
    save_file(good, folder / "model.safetensors")
    await swap(updater, folder)
    assert [(each.state, each.weight_version) for each in pool.replicas()] == [("healthy", 1)]


async def test_weights_of_another_model_leave_every_replica_serving(transport, folder):
    def engine():
        return ScriptedEngine(lambda prompt: [7], parameters=frozenset({"w", "v"}))

    async with ReplicaPool({"r0": engine, "r1": engine}, transport=transport) as pool:
        updater = WeightUpdater(pool, transport)
        with pytest.raises(WeightError, match=r"no replica could take weight version 1: r\d: names \['v'\] are not on"):
            await swap(updater, folder)
        assert [(each.state, each.restarts, each.weight_version) for each in pool.replicas()] == [("healthy", 0, 0)] * 2
        assert (updater.prepared, transport.versions) == (None, ())
        save_file({"w": torch.ones(3), "v": torch.ones(3)}, folder / "model.safetensors")
        await swap(updater, folder)
        assert [each.weight_version for each in pool.replicas()] == [2, 2]


async def test_a_cancelled_pull_is_left_when_it_is_done(pool, transport, updater, folder):
    left, errors = threading.Event(), []
    pull = transport.pull

    @contextmanager
    def watched(manifest):
        with pull(manifest) as tensors:
            try:
                yield tensors
            except BaseException as error:
                errors.append(type(error))
                raise
            finally:
                left.set()

    transport.pull = watched
    await updater.prepare_folder(folder)
    transport.begun.clear()
    transport.go.clear()
    committing = asyncio.create_task(updater.commit(1))
    await transport.reached()
    removing = asyncio.create_task(pool.remove("r0"))
    await asyncio.sleep(0)
    transport.go.set()
    await removing
    await asyncio.wait([committing])
    assert await asyncio.to_thread(left.wait, 10)
    assert errors == [asyncio.CancelledError]


async def test_a_cancelled_commit_is_finished_before_the_next(updater, pool, folder, transport):
    await swap(updater, folder)
    await updater.prepare_folder(folder)
    transport.begun.clear()
    transport.go.clear()
    first = asyncio.create_task(updater.commit(2))
    await transport.reached()
    first.cancel()
    second = asyncio.create_task(swap(updater, folder))
    await asyncio.sleep(0)
    transport.go.set()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (pool.weight_version, transport.versions) == (2, (2,))
    await second
    assert (pool.weight_version, transport.versions) == (3, (3,))


# ----------------------------------------------------------------------------------------------------------- following


@pytest.fixture
def run(tmp_path):
    made = StoreTransport(namespace="run", url=f"file://{tmp_path}/store", kept_versions=1)
    yield made
    made.close()


@pytest.fixture
def told():
    return []


@pytest.fixture
def follower(updater, run, told):
    source = StoreTransport(namespace="follower", url=run._store.url)
    return Follower(updater, source, url="store", every_s=0.02, tell=told.append)


def announce(run, version, **tensors):
    run.announce(run.publish((tensors or {"w": torch.full((3,), float(version))}).items(), version=version))
    run.release(version - 1)


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_follower_serves_the_newest_version_under_its_own_number(pool, follower, run, told, transport):
    await follower.look()
    assert (pool.weight_version, follower.newest) == (0, None), "nothing is announced"
    announce(run, 7)
    await follower.look()
    await follower.look()
    assert (pool.weight_version, follower.newest, told) == (7, 7, ["weight version 7 of store"])
    following = asyncio.create_task(follower.run())
    for version in (8, 9, 12):
        announce(run, version)
        await until(lambda version=version: pool.weight_version == version)
        assert transport.versions == (version,)
    following.cancel()
    await asyncio.wait([following])
    assert (following.cancelled(), follower.error) == (True, "")


async def test_what_cannot_be_followed_is_told_once_and_the_weights_before_stay(pool, follower, run, told):
    announce(run, 5)
    await follower.look()
    other = StoreTransport(namespace="other", url=run._store.url, kept_versions=1)
    announce(other, 3)
    following = asyncio.create_task(follower.run())
    await until(lambda: follower.error)
    await asyncio.sleep(0.2)  # it looks some more
    assert pool.weight_version == 5
    assert told[1:] == ["weight version 5 stays: version 3 is not newer than 5, which was served or published"]
    announce(other, 6)
    await until(lambda: pool.weight_version == 6)
    assert follower.error == ""
    following.cancel()
    await asyncio.wait([following])
    other.close()


async def test_a_version_that_no_replica_could_take_is_offered_again_without_reading_it_again(transport, run, told):
    failures = [OSError("the device is busy")] * 2

    class Busy(ScriptedEngine):
        async def prepare_weights(self, tensors, *, version):
            if failures:
                raise failures.pop()
            await super().prepare_weights(tensors, version=version)

    async with ReplicaPool({"r0": lambda: Busy(lambda prompt: [7])}, transport=transport) as pool:
        source = StoreTransport(namespace="follower", url=run._store.url)
        follower = Follower(WeightUpdater(pool, transport), source, url="store", every_s=0.02, tell=told.append)
        announce(run, 4)
        following = asyncio.create_task(follower.run())
        await until(lambda: pool.weight_version == 4)
        following.cancel()
        await asyncio.wait([following])
        assert told[0].startswith("weight version 0 stays: ")
        assert told[-1] == "weight version 4 of store"
        assert transport.versions == (4,)


async def test_a_follower_whose_source_is_gone_looks_less_often_until_another_version_is_there(updater, told):
    looks = []

    class Gone:
        def announced(self):
            looks.append(asyncio.run_coroutine_threadsafe(now(), loop).result())
            raise WeightError("no answer")

    async def now():
        return loop.time()

    loop = asyncio.get_running_loop()
    follower = Follower(updater, Gone(), url="store", every_s=0.01, tell=told.append)
    following = asyncio.create_task(follower.run())
    await until(lambda: len(looks) > 5)
    following.cancel()
    await asyncio.wait([following])
    waits = [later - earlier for earlier, later in itertools.pairwise(looks)]
    assert all(wait >= 0.01 * 2 ** (number + 1) for number, wait in enumerate(waits[:4]))
    assert told == ["weight version 0 stays: no answer"]


async def test_a_url_is_a_folder_too(updater, pool, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path / "cache"))
    await updater.swap(f"file://{folder}")
    assert pool.weight_version == 1
    with pytest.raises(WeightError, match="nowhere': there is nothing"):
        await updater.swap(f"file://{tmp_path}/nowhere")
