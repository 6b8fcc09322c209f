"""Folders that become weights: published through shared memory, for replicas that answer by a script."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import save_file

from asyncrl.errors import WeightError, WeightVersionError
from asyncrl.rollout.replica_pool import ReplicaPool
from asyncrl.serve.weight_door import WeightDoor
from asyncrl.testing import ScriptedEngine
from engines.weights.shared_memory import SharedMemoryTransport


class Gated(SharedMemoryTransport):
    """Shared memory whose publications and pulls begin when the test says so."""

    def __init__(self, directory):
        super().__init__(namespace="door-test", directory=str(directory))
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
    made = Gated(memory)
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
def door(pool, transport):
    return WeightDoor(pool, transport)


async def swap(door, folder):
    await door.commit((await door.prepare_folder(folder)).version)


async def test_a_swap_that_is_called_off_while_it_publishes_leaves_nothing(door, pool, folder, transport):
    transport.begun.clear()
    transport.go.clear()
    first = asyncio.create_task(swap(door, folder))
    await transport.reached()
    for _ in range(3):
        first.cancel()
        await asyncio.sleep(0)
    second = asyncio.create_task(swap(door, folder))
    await asyncio.sleep(0)
    transport.go.set()
    with pytest.raises(asyncio.CancelledError):
        await first
    await second
    assert (pool.weight_version, transport.versions) == (2, (2,)), "1 was published, wanted by nobody, and freed"
    for version in (3, 4, 5):
        await swap(door, folder)
        assert (pool.weight_version, transport.versions) == (version, (version,))


async def test_a_swap_that_is_called_off_frees_what_it_published(door, folder, transport):
    transport.begun.clear()
    transport.go.clear()
    first = asyncio.create_task(swap(door, folder))
    await transport.reached()
    first.cancel()
    for _ in range(3):
        await asyncio.sleep(0)
    assert not first.done(), "who publishes cannot be interrupted, and nobody else may begin"
    transport.go.set()
    await asyncio.wait([first])
    assert first.cancelled()
    assert (door.prepared, transport.versions) == (None, ())


async def test_folders_are_numbered_after_all_that_was_published(door, pool, folder, transport):
    assert [(await door.prepare_folder(folder)).version for _ in range(3)] == [1, 2, 3]
    with pytest.raises(WeightVersionError, match="3 is not newer than 3"):
        await door.prepare_folder(folder, version=3)
    assert (door.prepared, transport.versions) == (3, (3,))
    await door.commit(3)
    assert (await door.prepare_folder(folder, version=9)).version == 9
    assert (await door.prepare_folder(folder)).version == 10
    assert pool.weight_version == 3


async def test_what_is_prepared_anew_takes_the_place_of_what_was(door, folder, transport):
    await swap(door, folder)
    for version in (2, 3, 4):
        await door.prepare_folder(folder, version=version)
        assert (door.prepared, transport.versions) == (version, (1, version))
    with pytest.raises(WeightVersionError, match="version 3 cannot be committed: 4 is prepared"):
        await door.commit(3)
    await door.commit(4)
    assert transport.versions == (4,)


async def test_a_folder_without_weights_replaces_nothing(door, folder, transport, tmp_path):
    await door.prepare_folder(folder)
    with pytest.raises(WeightError, match="holds no safetensors"):
        await door.prepare_folder(tmp_path / "nowhere")
    assert (door.prepared, transport.versions) == (1, (1,))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(WeightError, match=r"model\.safetensors"):
        await door.prepare_folder(broken)
    assert (door.prepared, transport.versions) == (None, ())
    await swap(door, folder)
    assert transport.versions == (2,)


async def test_of_two_swaps_at_once_the_later_is_served(door, pool, folder, transport):
    told = await asyncio.gather(swap(door, folder), swap(door, folder), return_exceptions=True)
    assert isinstance(told[0], WeightVersionError)
    assert "version 1 cannot be committed: 2 is prepared" in str(told[0])
    assert told[1] is None
    assert (pool.weight_version, transport.versions) == (2, (2,))


async def test_a_commit_that_is_called_off_is_finished_before_the_next(door, pool, folder, transport):
    await swap(door, folder)
    await door.prepare_folder(folder)
    transport.begun.clear()
    transport.go.clear()
    first = asyncio.create_task(door.commit(2))
    await transport.reached()
    first.cancel()
    second = asyncio.create_task(swap(door, folder))
    await asyncio.sleep(0)
    transport.go.set()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (pool.weight_version, transport.versions) == (2, (2,))
    await second
    assert (pool.weight_version, transport.versions) == (3, (3,))
