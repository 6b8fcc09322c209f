"""Commands of weight updates to fake replicas: what is raised, and what ends meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from asyncrl.errors import EngineClosedError, WorkerError
from asyncrl.rollout.publication import WeightUpdates
from asyncrl.weights import WeightManifest


def manifest(version: int) -> WeightManifest:
    return WeightManifest(version=version, transport="none", location="nowhere", tensors=())


async def nothing(*_: Any) -> None: ...


async def for_ever(*_: Any) -> None:
    await asyncio.Event().wait()


@dataclass
class FakeReplica:
    """Prepares and commits as it is given; serves and is fenced without effect."""

    name: str
    prepare: Callable[[str, WeightManifest], Awaitable[None]] = nothing
    commit: Callable[[str, int], Awaitable[None]] = nothing

    async def prepare_weights(self, manifest: WeightManifest) -> None:
        await self.prepare(self.name, manifest)

    async def commit_weights(self, version: int) -> None:
        await self.commit(self.name, version)

    def verified(self) -> None: ...

    def fenced(self, reason: str) -> None: ...


def updates(tasks: asyncio.TaskGroup, **given: Any) -> WeightUpdates:
    replicas = {name: FakeReplica(name, **given) for name in "ab"}
    made = WeightUpdates(replicas, version=0, tasks=tasks, deadline_s=1e6)
    for name in replicas:
        made.joined(name, holds=0)
    return made


class Over(Exception):
    """Ends the owner of the tasks."""


@pytest.mark.parametrize("phase", ["prepare", "commit"])
async def test_whatever_a_replica_raises_fences_it_and_is_logged_once(phase: str, caplog: pytest.LogCaptureFixture):
    async def fails(name: str, _what: object) -> None:
        if name == "a":
            raise WorkerError("CUDA out of memory\n\ntraceback on rank 0: ...")

    async with asyncio.TaskGroup() as tasks:
        fleet = updates(tasks, **{phase: fails})
        ended = await fleet.publish(manifest(1))
        assert (ended.committed, ended.fenced) == (("b",), {"a": "WorkerError: CUDA out of memory"})
        assert [record.exc_info is not None for record in caplog.records] == [True, False]
        assert all(record.levelno >= logging.WARNING for record in caplog.records)


async def test_a_caller_that_waits_for_a_publication_gets_an_error_when_its_owner_ends():
    waiting: list[asyncio.Task[Any]] = []

    async def own() -> None:
        async with asyncio.TaskGroup() as tasks:
            fleet = updates(tasks, prepare=for_ever)
            waiting.append(asyncio.ensure_future(fleet.publish(manifest(1))))
            await asyncio.sleep(0)
            raise Over

    with pytest.raises(ExceptionGroup):
        await own()
    with pytest.raises(EngineClosedError, match="the pool ended before version 1 was published"):
        await waiting[0]


async def test_an_owner_that_is_ending_is_given_nothing_more_to_do():
    prepared: list[str] = []
    waiting: list[asyncio.Task[Any]] = []

    async def prepare(name: str, _manifest: object) -> None:
        if name == "b":
            await for_ever()
        prepared.append(name)

    async def leave(fleet: WeightUpdates) -> None:
        try:
            await for_ever()
        finally:
            fleet.left("b")  # which is all that a's commit has waited for

    async def own() -> None:
        async with asyncio.TaskGroup() as tasks:
            fleet = updates(tasks, prepare=prepare)
            tasks.create_task(leave(fleet))
            waiting.append(asyncio.ensure_future(fleet.publish(manifest(1))))
            while not prepared:
                await asyncio.sleep(0)
            raise Over

    with pytest.raises(ExceptionGroup) as caught:
        await own()
    assert [type(error) for error in caught.value.exceptions] == [Over]
    with pytest.raises(EngineClosedError, match="the pool ended"):
        await waiting[0]


async def test_a_wait_that_is_cancelled_takes_no_publication_back():
    gate = asyncio.Event()

    async def prepare(*_: Any) -> None:
        await gate.wait()

    async with asyncio.TaskGroup() as tasks:
        fleet = updates(tasks, prepare=prepare)
        waiting = asyncio.ensure_future(fleet.publish(manifest(1)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gate.set()
    assert fleet.version == 1
