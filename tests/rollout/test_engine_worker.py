"""An engine in a worker group is an engine like any other: its tokens, its weights, its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.errors import (
    EngineClosedError,
    EngineError,
    LiveWeightsError,
    WeightError,
    WeightMismatchError,
    WeightVersionError,
)
from asyncrl.interfaces import GenerationRequest, OutOfProcessEngine, SamplingParams
from asyncrl.rollout.engine_worker import EngineSpec, EngineWorker, WorkerGroupEngine
from asyncrl.rollout.health import HealthPolicy
from asyncrl.rollout.live_weights import commit_into
from asyncrl.rollout.replica import PoolOptions, Supervision
from asyncrl.rollout.replica_pool import ReplicaPool
from asyncrl.single_controller import ClassWithInitArgs
from asyncrl.single_controller.liveness import Liveness
from asyncrl.single_controller.local import LocalWorkerGroup
from asyncrl.testing import VersionEchoEngine
from asyncrl.weights import WeightManifest, WeightTransport
from engines.weights.shared_memory import SharedMemoryTransport

TELLTALE = EngineSpec(engine="asyncrl.testing:VersionEchoEngine", model="", options={"token_s": 0.001})


def request(name: str, tokens: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=name, prompt_token_ids=(7, 8), sampling=SamplingParams(max_new_tokens=tokens, temperature=0.0)
    )


async def tokens_of(source: Any, asked: GenerationRequest) -> tuple[int, ...]:
    tokens: list[int] = []
    async for chunk in source.generate(asked):
        assert chunk.token_ids == chunk.weight_versions, "every token is the version that made it"
        tokens += chunk.token_ids
    return tuple(tokens)


def here(spec: EngineSpec = TELLTALE) -> LocalWorkerGroup:
    return LocalWorkerGroup(ClassWithInitArgs(EngineWorker, spec), world_size=1)


@contextlib.asynccontextmanager
async def hosted(
    transport: WeightTransport | None = None, spec: EngineSpec = TELLTALE
) -> AsyncIterator[WorkerGroupEngine]:
    engine = WorkerGroupEngine(lambda: here(spec), transport=transport)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[SharedMemoryTransport]:
    made = SharedMemoryTransport(namespace="worker", max_versions=3, directory=str(tmp_path))
    yield made
    made.close()


def weights(version: int) -> list[tuple[str, torch.Tensor]]:
    return [("a.weight", torch.full((3, 4), float(version))), ("b", torch.tensor(version, dtype=torch.bfloat16))]


async def test_tokens_pauses_and_weights(transport: SharedMemoryTransport) -> None:
    async with hosted(transport) as engine:
        assert isinstance(engine, OutOfProcessEngine)
        stream = engine.generate(request("one", 300))
        assert (await anext(stream)).token_ids == (0,)
        await engine.pause()
        assert engine.statistics().paused
        with pytest.raises(WeightVersionError):
            await engine.commit_weights(5)
        await engine.fetch_weights(transport.publish(weights(5), version=5))
        await engine.commit_weights(5)
        assert engine.weight_version == 5
        await engine.resume()
        tokens = [token async for chunk in stream for token in chunk.token_ids]
        assert tokens[-1] == 5
        assert (await engine.health(5.0)).healthy
        other = engine.generate(request("two", 5000))
        assert (await anext(other)).token_ids == (5,)
        assert await engine.abort("two")
        assert not await engine.abort("unknown")
        assert [chunk.finish_reason async for chunk in other][-1] == "abort"
        assert engine.statistics().tokens_generated >= 300
    with pytest.raises(EngineClosedError):
        await engine.pause()


async def test_bytes_that_are_not_the_manifests_do_not_reach_the_engine(transport: SharedMemoryTransport) -> None:
    class Lossy:
        @contextmanager
        def pull(self, manifest: WeightManifest) -> Iterator[Mapping[str, torch.Tensor]]:
            with transport.pull(manifest) as tensors:
                yield {**tensors, "b": tensors["b"] + 1}

    lossy: Any = Lossy()
    async with hosted(lossy) as engine:
        with pytest.raises(WeightMismatchError, match="b of version 1 did not arrive"):
            await engine.fetch_weights(transport.publish(weights(1), version=1))
        with pytest.raises(WeightVersionError):
            await engine.commit_weights(1)
        with pytest.raises(WeightError, match="manifest"):
            await engine.prepare_weights({}, version=2)


class OtherTensors(VersionEchoEngine):
    """Serves other tensors than it was sent; the first time, it does not come to say so."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._asked = False

    async def live_checksums(self, names: Sequence[str]) -> dict[str, tuple[str, int]]:
        if not self._asked:
            self._asked = True
            await asyncio.Event().wait()
        return dict.fromkeys(names, ("float32", 0))


@pytest.mark.parametrize("learns", ["resume", "fetch_weights"])  # whose answers have the version
async def test_a_commit_that_was_cut_off_is_proven_when_it_is_repeated(
    transport: SharedMemoryTransport, learns: str
) -> None:
    spec = EngineSpec(engine=f"{__name__}:OtherTensors", model="", options={})
    async with hosted(transport, spec) as engine:
        manifest = transport.publish(weights(1), version=1)
        await engine.fetch_weights(manifest)
        commit = asyncio.ensure_future(commit_into(engine, 1, kv_cache="keep", manifest=manifest))
        while (await engine.health(5.0)).weight_version < 1:
            pass
        commit.cancel()
        await asyncio.wait([commit])
        await (engine.resume() if learns == "resume" else engine.fetch_weights(manifest))
        assert engine.weight_version == 1
        with pytest.raises(LiveWeightsError, match=r"weight version 1, but its tensor a\.weight"):
            await commit_into(engine, 1, kv_cache="keep", manifest=manifest)


async def test_an_engine_that_cannot_be_made_says_why() -> None:
    engine = WorkerGroupEngine(
        lambda: here(EngineSpec(engine="asyncrl.testing:VersionEchoEngine", model="", options={}))
    )
    with pytest.raises(EngineError, match="not been started"):
        await engine.pause()
    await engine.start()
    assert not (await engine.health(5.0)).error
    await engine.close()
    assert "closed" in (await engine.health(0.1)).error


@pytest.fixture
def two_nodes() -> Iterator[Callable[[], Any]]:
    """A Ray cluster of two nodes on this machine; the second offers ``elsewhere``. Gives what removes it."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    node = cluster.add_node(num_cpus=2, resources={"elsewhere": 2})
    yield lambda: cluster.remove_node(node, allow_graceful=False)
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(180)
async def test_a_replica_joins_from_another_node_and_the_node_goes(
    two_nodes: Callable[[], Any], transport: SharedMemoryTransport
) -> None:
    from asyncrl.serve.pool import RayReplicas

    supervision = Supervision(health=HealthPolicy(restart_s=0.1, max_restart_s=1.0), start_s=60.0, probe_every_s=1.0)
    replicas = RayReplicas(address="", liveness=Liveness(), spec=TELLTALE, transport=transport, start_s=5.0)
    home = WorkerGroupEngine(here, transport=transport)
    async with ReplicaPool({"home": lambda: home}, options=PoolOptions(supervision=supervision)) as pool:
        for version in (1, 2):
            await pool.publish(transport.publish(weights(version), version=version))
            for old in {0, 1, 2} - pool.needed_versions:
                transport.release(old)
        await pool.add("guest", replicas.factory("guest", "elsewhere"))
        await pool._replicas["guest"].settled.wait()
        (guest,) = [status for status in pool.replicas() if status.name == "guest"]
        assert (guest.state, guest.weight_version) == ("healthy", 2)
        assert guest.engine is not None
        running = [asyncio.ensure_future(tokens_of(pool, request(f"r{n}", 1500))) for n in range(8)]
        while pool.statistics().tokens < 400:
            await asyncio.sleep(0.01)
        assert any(status.name == "guest" and status.requests for status in pool.replicas())
        await pool.publish(transport.publish(weights(3), version=3))
        await asyncio.to_thread(two_nodes)
        for tokens in await asyncio.gather(*running):
            assert len(tokens) == 1500
            assert list(tokens) == sorted(tokens)
            assert set(tokens) == {2, 3}
        assert pool.statistics().migrations >= 1
        assert pool.statistics().failed == 0
