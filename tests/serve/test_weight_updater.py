"""Weight updates from folders, published through shared memory to scripted replicas."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from contextlib import asynccontextmanager, contextmanager
from typing import ClassVar

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from asyncrl.errors import ResourceError, WeightError, WeightVersionError
from asyncrl.rollout.replica_pool import ReplicaPool
from asyncrl.serve.pool import Follower, WeightUpdater
from asyncrl.testing import ScriptedEngine
from asyncrl.weights import Adapter
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
    transport.release = lambda version: None  # it is withdrawn, and the pull still finds it
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


async def test_what_the_rules_refuse_is_not_published(pool, folder, transport):
    updater = WeightUpdater(pool, transport, reserved=("tiny",))
    await updater.prepare_folder(folder)
    (folder / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 4}')
    with pytest.raises(WeightError, match="'tiny' is the model itself"):
        await updater.swap(folder, adapter="tiny")
    assert (updater.prepared, transport.versions) == (1, (1,))


async def test_replicas_on_other_machines_and_adapters_exclude_each_other(updater, folder):
    (folder / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 4}')
    with updater.admitting("r0", adapters=False):
        pass
    with pytest.raises(ResourceError), updater.admitting("r0", adapters=True):
        raise ResourceError("the name is taken")
    with pytest.raises(WeightError, match="r0 on other machines take full versions alone"):
        await updater.prepare_folder(folder, adapter="red")
    with updater.admitting("r0", adapters=True):
        pass
    await updater.prepare_folder(folder, adapter="red")
    with pytest.raises(WeightError, match="adapters are served"), updater.admitting("r1", adapters=False):
        pass


async def test_no_replica_without_adapters_joins_while_one_is_committed(pool, updater, folder, monkeypatch):
    (folder / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 4}')
    publish = pool.publish

    async def refusing(manifest):
        with pytest.raises(WeightError, match="adapters are served"), updater.admitting("r9", adapters=False):
            pass
        return await publish(manifest)

    monkeypatch.setattr(pool, "publish", refusing)
    with pytest.raises(WeightError, match="serves none: publish the weights with the adapter merged in"):
        await updater.swap(folder, adapter="red")


@pytest.mark.parametrize("second", ["an adapter", "full weights"])
async def test_the_rules_hold_when_a_version_is_committed(transport, folder, monkeypatch, second):
    """Another trainer prepares a version while the first adapter is committed."""
    (folder / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 4}')
    published = []
    async with ReplicaPool({}, transport=transport) as pool:
        updater, publish = WeightUpdater(pool, transport), pool.publish

        async def watched(manifest):
            published.append(manifest)
            if manifest.version == 1:
                other = transport.publish({"w": torch.ones(3)}.items(), version=2)
                blue = Adapter(rank=2, alpha=4.0, name="blue") if second == "an adapter" else None
                updater.prepare(msgspec.structs.replace(other, adapter=blue))
            return await publish(manifest)

        monkeypatch.setattr(pool, "publish", watched)
        await updater.swap(folder, adapter="red")
        if second == "full weights":
            with pytest.raises(WeightError, match=r"adapters \('red'\) are served"):
                await updater.commit(2)
            return
        await updater.commit(2)
        assert [each.adapter.name for each in published[1].beside] == ["red"]


async def test_two_concurrent_swaps_of_manifests_are_served_one_after_the_other(updater, pool, transport):
    manifests = [transport.publish({"w": torch.ones(3)}.items(), version=version) for version in (1, 2)]
    ended = await asyncio.gather(*map(updater.swap_manifest, manifests))
    assert [each.committed for each in ended] == [("r0",), ("r0",)]
    assert pool.weight_version == 2


async def test_a_version_that_is_committed_while_no_replica_serves_is_served_by_the_next(transport, folder):
    async with ReplicaPool({}, transport=transport) as pool:
        updater = WeightUpdater(pool, transport)
        assert (await updater.swap(folder)).committed == ()
        assert pool.weight_version == 1


# ----------------------------------------------------------------------------------------------------------- following


@pytest.fixture
def run(tmp_path):
    made = StoreTransport(namespace="run", url=f"file://{tmp_path}/store", kept_versions=1)
    yield made
    made.close()


@pytest.fixture
def source(run):
    return StoreTransport(namespace="follower", url=run._store.url)


@pytest.fixture
def follower(updater, source):
    return Follower(updater, source, url="store", every_s=0.02)


def announce(run, version, **tensors):
    run.announce(run.publish((tensors or {"w": torch.full((3,), float(version))}).items(), version=version))
    for older in run.versions[:-1]:
        run.release(older)


@asynccontextmanager
async def following(follower):
    task = asyncio.create_task(follower.run())
    yield
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def count_looks(source):
    looks, announced = [], source.announced
    source.announced = lambda: looks.append(time.monotonic()) or announced()
    return looks


async def test_a_follower_serves_the_newest_version_under_its_own_number(pool, follower, run, transport):
    await follower.begin()
    assert (pool.weight_version, follower.newest) == (0, None)
    assert "nothing is announced at store: the run needs weights.options.kept_versions >= 1" in follower.problem
    announce(run, 7)
    assert [await follower.look() for _ in range(2)] == ["", ""]
    assert (pool.weight_version, follower.newest, transport.versions) == (7, 7, (7,))
    async with following(follower):
        for version in (8, 9, 12):
            announce(run, version)
            await until(lambda version=version: (pool.weight_version, follower.problem) == (version, ""))
    assert (follower.newest, transport.versions) == (12, (12,))


async def test_what_cannot_be_followed_is_logged_once_and_the_weights_before_stay(pool, follower, run, source, caplog):
    announce(run, 5)
    await follower.begin()
    other = StoreTransport(namespace="other", url=run._store.url, kept_versions=1)
    looks = count_looks(source)
    for version in (3, 5):
        caplog.clear()
        looks.clear()
        announce(other, version, w=torch.zeros(3))
        async with following(follower):
            await until(lambda: len(looks) > 5)
        assert pool.weight_version == 5
        (line,) = caplog.messages
        assert line == (
            f"weight version 5 stays: version {version} is not newer than 5, which was served or published; wait until "
            "a resumed run is past it, and start the server again to follow another run"
        )
        assert line.endswith(follower.problem)
    announce(other, 6)
    async with following(follower):
        await until(lambda: (pool.weight_version, follower.problem) == (6, ""))
    other.close()


async def test_weights_that_are_not_finite_are_not_followed(pool, follower, run):
    announce(run, 1, w=torch.tensor([1.0, float("nan"), 2.0]))
    with pytest.raises(WeightError, match="w has values that are nan or infinite, so it is not served"):
        await follower.begin()
    assert [(each.state, each.weight_version) for each in pool.replicas()] == [("healthy", 0)]
    announce(run, 2)
    await follower.begin()
    assert pool.weight_version == 2


class Busy(ScriptedEngine):
    """Takes no weights until ``failures`` is empty."""

    failures: ClassVar[list[Exception]] = []

    async def prepare_weights(self, tensors, *, version):
        if self.failures:
            raise self.failures.pop()
        await super().prepare_weights(tensors, version=version)


@pytest.fixture
async def busy_pool(transport, monkeypatch):
    monkeypatch.setattr(Busy, "failures", [WeightError("the device is busy")] * 2)
    async with ReplicaPool({"r0": lambda: Busy(lambda prompt: [7])}, transport=transport) as made:
        yield made


async def test_a_version_that_no_replica_could_take_is_offered_again_without_reading_it_again(
    busy_pool, transport, run, source
):
    pulls, pull = [], source.pull
    source.pull = lambda manifest: pulls.append(manifest.version) or pull(manifest)
    follower = Follower(WeightUpdater(busy_pool, transport), source, url="store", every_s=0.02)
    announce(run, 4)
    async with following(follower):
        await until(lambda: (busy_pool.weight_version, follower.problem) == (4, ""))
    assert (Busy.failures, pulls, transport.versions) == ([], [4], (4,))


async def test_another_version_of_the_same_number_is_not_taken_for_the_one_that_is_prepared(
    busy_pool, transport, run, source
):
    """A run is killed and goes on from an earlier step: it makes another version 4."""
    updater = WeightUpdater(busy_pool, transport)
    announce(run, 4)
    with pytest.raises(WeightError, match="the device is busy"):
        await updater.take(source.announced(), source)
    assert updater.prepared == 4
    again = StoreTransport(namespace="again", url=run._store.url, kept_versions=1)
    announce(again, 4, w=torch.zeros(3))
    with pytest.raises(WeightVersionError, match="4 is not newer than 4"):
        await updater.take(source.announced(), source)
    assert busy_pool.weight_version == 0
    Busy.failures.clear()
    announce(again, 5, w=torch.zeros(3))
    await updater.take(source.announced(), source)
    assert (busy_pool.weight_version, transport.versions) == (5, (5,))
    again.close()


async def test_a_version_that_fails_is_tried_less_often_and_another_one_at_once(updater, pool, run, source):
    follower = Follower(updater, source, url="store", every_s=0.02)
    tries, looks = [], count_looks(source)
    announce(run, 1)

    @contextmanager
    def cut_off(manifest):
        tries.append(time.monotonic())
        raise WeightError("the connection was cut off")
        yield

    pull, source.pull = source.pull, cut_off
    async with following(follower):
        await until(lambda: len(tries) == 4)
        waits = [later - earlier for earlier, later in itertools.pairwise(tries)]
        assert all(wait >= 0.01 * 2**number for number, wait in enumerate(waits))
        assert len(looks) > len(tries)
        await until(lambda: follower.problem == "the connection was cut off")
        source.pull = pull
        announce(run, 2)
        await until(lambda: (pool.weight_version, follower.problem) == (2, ""))


async def test_a_follower_that_waits_for_a_store_ends_at_once(updater):
    asked, answer = threading.Event(), threading.Event()

    class Hangs:
        def announced(self):
            asked.set()
            answer.wait(60)

    async with asyncio.timeout(30):
        async with following(Follower(updater, Hangs(), url="store", every_s=0.01)):
            await asyncio.to_thread(asked.wait, 10)
    waiting = {thread.name for thread in threading.enumerate() if thread.daemon}
    answer.set()
    assert "a call that may be abandoned" in waiting


async def test_a_url_is_a_folder_too(updater, pool, tmp_path, monkeypatch):
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    save_file({"w": torch.ones(3)}, tmp_path / "model" / "model.safetensors")
    await updater.swap(f"file://{tmp_path}/model")
    assert pool.weight_version == 1
    with pytest.raises(WeightError, match="nowhere': there is nothing"):
        await updater.swap(f"file://{tmp_path}/nowhere")
