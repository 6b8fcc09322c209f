"""The pool over real processes that are really killed, while weights change under load."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from asyncrl.interfaces import Generation, GenerationRequest
from asyncrl.rollout.health import HealthPolicy
from asyncrl.rollout.replica import PoolOptions, Supervision
from asyncrl.rollout.replica_pool import ReplicaPool
from asyncrl.testing import EmptyTransport
from asyncrl.weights import TransportSpec, WeightTransport
from engines.rollout.remote.engine import RemoteEngine
from engines.rollout.transformers.engine import TransformersEngine
from engines.weights.shared_memory import SharedMemoryTransport

Collect = Callable[..., Any]
RequestOf = Callable[..., GenerationRequest]
FolderOf = Callable[..., Path]

OPTIONS = PoolOptions(
    supervision=Supervision(health=HealthPolicy(restart_s=0.1, max_restart_s=1.0), start_s=60.0, probe_every_s=1.0),
    weights_s=60.0,
    wait_s=60.0,
)


@contextlib.asynccontextmanager
async def pool_of(replicas: int, model: str = "", **options: Any) -> AsyncIterator[ReplicaPool]:
    factories = {f"r{n}": lambda: RemoteEngine(model, **options) for n in range(replicas)}
    async with ReplicaPool(factories, options=OPTIONS) as pool:
        yield pool


def pid_of(pool: ReplicaPool, name: str) -> int | None:
    engine = pool._replicas[name].engine
    return engine.pid if isinstance(engine, RemoteEngine) else None


@dataclass
class Fire:
    """Clients, swaps and kills; wrong labels show by the tokens themselves."""

    request_of: RequestOf
    collect: Collect
    dice: random.Random
    running: bool = True
    done: list[Generation] = field(default_factory=list)
    kills: int = 0
    vocabulary: int = 1 << 30

    async def client(self, pool: ReplicaPool, name: int) -> None:
        turn = 0
        while self.running:
            turn += 1
            limit = self.dice.randint(1, 80)
            got = await self.collect(pool, self.request_of(f"{name}.{turn}", [1] * self.dice.randint(1, 20), limit))
            expected = tuple(version % self.vocabulary for version in got.weight_versions)
            assert got.token_ids == expected, "every token is the version that made it"
            assert list(got.weight_versions) == sorted(got.weight_versions)
            assert len(got.token_ids) == limit
            self.done.append(got)

    async def kill(self, pool: ReplicaPool, *, every_s: float) -> None:
        while self.running:
            await asyncio.sleep(every_s)
            serving = [status.name for status in pool.replicas() if status.serving]
            pid = pid_of(pool, self.dice.choice(serving)) if len(serving) > 1 else None
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                self.kills += 1

    async def burn(
        self, pool: ReplicaPool, publish: Callable[[int], Any], *, clients: int, swaps: int, kill_every_s: float
    ) -> None:
        async with asyncio.TaskGroup() as group:
            for name in range(clients):
                group.create_task(self.client(pool, name))
            group.create_task(self.kill(pool, every_s=kill_every_s))
            version = 0
            while version < swaps or self.kills < 2:
                version += 1
                await publish(version)
                await asyncio.sleep(0.02)
            self.running = False


@pytest.mark.slow
async def test_processes_are_killed_while_weights_change_and_every_token_is_right(
    request_of: RequestOf, collect: Collect
) -> None:
    spec = TransportSpec(name="asyncrl.testing:EmptyTransport", namespace="none")
    fire = Fire(request_of, collect, random.Random(5))
    async with pool_of(
        3, engine="asyncrl.testing:VersionEchoEngine", options={"token_s": 0.001}, transport=spec
    ) as pool:
        publish = lambda version: pool.publish(EmptyTransport().publish((), version=version))  # noqa: E731
        await fire.burn(pool, publish, clients=12, swaps=60, kill_every_s=0.6)
        statistics = pool.statistics()
        pids = [pid for name in ("r0", "r1", "r2") if (pid := pid_of(pool, name)) is not None]
    assert statistics.migrations > 0
    assert (statistics.failed, statistics.finished) == (0, len(fire.done))
    assert statistics.tokens == sum(len(got.token_ids) for got in fire.done)
    assert any(len(got.spans) > 1 for got in fire.done)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_killed_replicas_requests_go_on_with_the_same_tokens(
    folder_of: FolderOf, request_of: RequestOf, collect: Collect
) -> None:
    folder = str(folder_of())
    requests = [request_of(n, [n + 1, 2, 3], 200, seed=n, temperature=0.9) for n in range(8)]
    alone = TransformersEngine(folder, device="cpu", threads=1)
    await alone.start()
    expected: list[Generation] = [await collect(alone, one) for one in requests]
    await alone.close()
    async with pool_of(2, folder, options={"device": "cpu"}, threads=1) as pool:
        running = [asyncio.ensure_future(collect(pool, one)) for one in requests]
        while pool.statistics().tokens < 200:
            await asyncio.sleep(0.005)
        pid = pid_of(pool, "r0")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        got: list[Generation] = await asyncio.gather(*running)
        assert pool.statistics().migrations == 4
    for one, other in zip(got, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_models_are_killed_while_weights_change_and_every_token_is_right(
    telltale: tuple[Path, Callable[[int], Any]], tmp_path: Path, request_of: RequestOf, collect: Collect
) -> None:
    folder, weights = telltale
    spec = TransportSpec(name="shared_memory", namespace="fire", options={"directory": str(tmp_path)})
    transport: WeightTransport = SharedMemoryTransport(namespace="fire", max_versions=3, directory=str(tmp_path))
    fire = Fire(request_of, collect, random.Random(6), vocabulary=67)
    held: set[int] = set()
    async with pool_of(2, str(folder), options={"device": "cpu"}, threads=1, transport=spec) as pool:

        async def publish(version: int) -> None:
            manifest = await asyncio.to_thread(transport.publish, weights(version % 67).items(), version=version)
            held.add(version)
            await pool.publish(manifest)
            for old in held - pool.needed_versions:
                transport.release(old)
                held.discard(old)

        await fire.burn(pool, publish, clients=8, swaps=66, kill_every_s=4.0)
        statistics = pool.statistics()
    transport.close()
    assert statistics.failed == 0
    assert statistics.tokens == sum(len(got.token_ids) for got in fire.done)
