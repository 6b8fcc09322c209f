"""Seeded storms of deaths, silence, nonsense, weights, pauses and departures, in virtual time.

Every token is the version that made it, and its log-prob the number it has in its request: what is lost, repeated or
mislabelled shows by itself.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from asyncrl.errors import EngineError, WeightError
from asyncrl.interfaces import GenerationRequest, SamplingParams
from asyncrl.rollout.health import HealthPolicy
from asyncrl.rollout.replica import PoolOptions, Supervision
from asyncrl.rollout.replica_pool import ReplicaPool
from asyncrl.testing.clock import run_virtually
from asyncrl.weights import WeightManifest

OPTIONS = PoolOptions(
    supervision=Supervision(
        health=HealthPolicy(probe_failures=2, restart_s=0.5, max_restart_s=2.0),
        start_s=5.0,
        close_s=1.0,
        probe_every_s=1.0,
        probe_s=1.0,
    ),
    max_running=24,
    weights_s=2.0,
    wait_s=300.0,
    max_failures=50,
)


@dataclass
class Storm:
    """The counts of one storm."""

    fleet: Any
    dice: random.Random
    swaps: int
    requests: int = 0
    tokens: int = 0
    aborted: int = 0
    swapped: int = 0
    newest: int = 0
    spans: int = 0
    running: bool = True
    faults: dict[str, int] = field(default_factory=dict)

    async def client(self, pool: ReplicaPool, name: str) -> None:
        turn = 0
        while self.running:
            turn += 1
            limit = self.dice.choice((1, 3, 40, 40, 200))
            request = GenerationRequest(
                request_id=f"{name}.{turn}",
                prompt_token_ids=(1,) * self.dice.randint(1, 80),
                sampling=SamplingParams(max_new_tokens=limit),
            )
            at, last, reason, spans = 0, 0, None, set()
            async for chunk in pool.generate(request, session=name, tenant=name[0]):
                assert reason is None, "nothing comes after the end"
                assert chunk.token_ids == chunk.weight_versions
                assert [round(-log_prob) for log_prob in chunk.log_probs] == list(range(at, at + len(chunk.token_ids)))
                for version in chunk.weight_versions:
                    assert version >= last, "versions never fall"
                    last = version
                spans |= {*chunk.weight_versions}
                at += len(chunk.token_ids)
                reason = chunk.finish_reason
            assert reason == "abort" or (reason == "length" and at == limit)
            self.requests += 1
            self.tokens += at
            self.aborted += reason == "abort"
            self.spans += len(spans) > 1

    async def swap(self, pool: ReplicaPool) -> None:
        for version in range(1, self.swaps + 1):
            await asyncio.sleep(self.dice.random() * 0.5)
            manifest = WeightManifest(version=version, transport="none", location="", tensors=())
            try:
                await pool.publish(manifest)
            except WeightError:
                continue  # no replica could take it, and it is withdrawn
            self.swapped += 1
            self.newest = version
        self.running = False

    async def inject_faults(self, pool: ReplicaPool) -> None:
        added = 0
        while self.running:
            await asyncio.sleep(self.dice.random() * 1.5)
            names = [status.name for status in pool.replicas()]
            name = self.dice.choice(names)
            fault = self.dice.choice(
                ("kill", "kill", "freeze", "nonsense", "refuse", "pause", "drain", "replace", "abort")
            )
            engine = self.fleet[name]
            self.faults[fault] = self.faults.get(fault, 0) + 1
            if fault == "kill":
                engine.die()
            elif fault == "freeze":
                engine.freeze()
            elif fault == "nonsense":
                engine.sends_invalid_chunks = True
            elif fault == "refuse":
                engine.refuses_weights = True
            elif fault == "pause":
                await pool.pause(self.dice.choice(("keep", "keep", "drain", "abort")))
                await asyncio.sleep(self.dice.random())
                await pool.resume()
            elif fault == "drain" and len(names) > 2:
                await pool.drain(name, deadline_s=0.5)
                await pool.remove(name)
            elif fault == "replace":
                added += 1
                await pool.add(f"n{added}", self.fleet.factory(f"n{added}"))
                if len(names) > 4:
                    await pool.remove(name)
            elif fault == "abort":
                held = list(pool._requests._held)
                if held:
                    await pool.abort(self.dice.choice(held))


async def run_storm(storm: Storm, *, clients: int) -> None:
    fleet = storm.fleet
    async with ReplicaPool({name: fleet.factory(name) for name in "abcd"}, options=OPTIONS) as pool:
        async with asyncio.TaskGroup() as group:
            for n in range(clients):
                group.create_task(storm.client(pool, f"{'xyz'[n % 3]}{n}"))
            group.create_task(storm.swap(pool))
            group.create_task(storm.inject_faults(pool))
        statistics = pool.statistics()
        assert statistics.running == statistics.waiting == 0
        assert statistics.accepted == storm.requests
        assert (statistics.finished, statistics.aborted) == (storm.requests - storm.aborted, storm.aborted)
        assert (statistics.failed, statistics.left) == (0, 0)
        assert statistics.tokens == storm.tokens
        assert fleet.tokens >= storm.tokens
        assert all(status.expected_tokens == 0 for status in pool.replicas())
        # When it is over, every replica comes to hold the current version by itself.
        await asyncio.sleep(60.0)
        for status in pool.replicas():
            if not fleet[status.name].refuses_weights and not fleet[status.name].frozen:
                assert status.serving, status
                assert status.weight_version == pool.weight_version >= storm.newest
    assert not any(engine.open for engines in fleet.engines.values() for engine in engines), "nothing is left open"


@pytest.mark.parametrize("seed", range(6))
def test_storm(faulty_fleet: Any, seed: int):
    storm = Storm(faulty_fleet(), random.Random(seed), swaps=40)
    run_virtually(run_storm(storm, clients=16), seed=seed, limit_s=100_000.0)
    assert storm.spans > 20
    # Nearly always 38 to 40; while all replicas that are left refuse weights or are frozen, versions are withdrawn.
    assert storm.swapped > 10


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_two_thousand_swaps(faulty_fleet: Any):
    storm = Storm(faulty_fleet(), random.Random(99), swaps=2000)
    run_virtually(run_storm(storm, clients=16), seed=99, limit_s=1e7)
    assert storm.swapped > 1500


def test_the_storm_would_show_a_wrong_label(faulty_fleet: Any):
    class Liar(faulty_fleet):  # type: ignore[misc]
        def factory(self, name: str, **options: Any) -> Any:
            make = super().factory(name, **options)

            def lying() -> Any:
                engine = make()
                commit = engine.commit_weights

                async def late(version: int, **rest: Any) -> None:
                    await commit(version, **rest)
                    if version == 5:
                        engine.generate = lambda request: _relabelled(type(engine).generate(engine, request))

                engine.commit_weights = late
                return engine

            return lying

    storm = Storm(Liar(), random.Random(1), swaps=20)
    with pytest.raises(ExceptionGroup) as caught:
        run_virtually(run_storm(storm, clients=8), seed=1, limit_s=100_000.0)
    assert caught.group_contains(AssertionError)
    assert not caught.group_contains(EngineError)


async def _relabelled(stream: Any) -> Any:
    async for chunk in stream:
        yield type(chunk)(
            token_ids=tuple(token - 1 for token in chunk.token_ids),
            log_probs=chunk.log_probs,
            weight_versions=chunk.weight_versions,
            finish_reason=chunk.finish_reason,
        )
