"""The pool on a virtual clock, over engines that tell on themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from asyncrl.errors import (
    ConfigError,
    DeadlineError,
    EngineClosedError,
    EngineError,
    InvalidDataError,
    OverloadedError,
    ResourceError,
    WeightError,
    WeightVersionError,
)
from asyncrl.interfaces import Generation, GenerationRequest, SamplingParams
from asyncrl.rollout.admission import AdmissionLimits
from asyncrl.rollout.pool_options import PoolOptions
from asyncrl.rollout.replica import Supervision
from asyncrl.rollout.replica_health import HealthPolicy
from asyncrl.rollout.replica_pool import ReplicaPool
from asyncrl.simulation.clock import run_virtually
from asyncrl.testing import EchoEngine
from asyncrl.weights.manifest import WeightManifest

QUICK = Supervision(
    health=HealthPolicy(probe_failures=2, restart_s=1.0), start_s=5.0, close_s=1.0, probe_every_s=2.0, probe_s=1.0
)


def options(**given: Any) -> PoolOptions:
    return PoolOptions(**{"supervision": QUICK, "weights_s": 2.0, "wait_s": 30.0, **given})


def request(name: str, tokens: int = 50, *, prompt: tuple[int, ...] = (7,)) -> GenerationRequest:
    return GenerationRequest(request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(max_new_tokens=tokens))


def manifest(version: int) -> WeightManifest:
    return WeightManifest(version=version, transport="none", location="nowhere", tensors=())


async def collect(pool: ReplicaPool, asked: GenerationRequest, **options: Any) -> Generation:
    chunks = [chunk async for chunk in pool.generate(asked, **options)]
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason is not None
    got = Generation(
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        log_probs=tuple(log_prob for chunk in chunks for log_prob in chunk.log_probs),
        weight_versions=tuple(version for chunk in chunks for version in chunk.weight_versions),
        finish_reason=chunks[-1].finish_reason,
    )
    assert got.token_ids == got.weight_versions, "every token is the version that made it"
    assert got.log_probs == tuple(-float(n) for n in range(len(got.token_ids))), "none lost, none twice"
    return got


def virtually(story: Coroutine[Any, Any, None]) -> None:
    run_virtually(story, seed=0, limit_s=10_000.0)


def serving(pool: ReplicaPool) -> dict[str, str]:
    return {status.name: status.state for status in pool.replicas()}


def test_a_dying_replica_costs_nobody_a_token(hospital: Any):
    async def story() -> None:
        house = hospital()
        async with ReplicaPool({name: house.factory(name) for name in "ab"}, options=options()) as pool:
            running = [asyncio.ensure_future(collect(pool, request(f"r{n}", 200))) for n in range(10)]
            await asyncio.sleep(0.8)
            assert all(house[name].statistics().running == 5 for name in "ab")
            house["a"].die()
            got = await asyncio.gather(*running)
            assert [len(generation.token_ids) for generation in got] == [200] * 10
            statistics = pool.statistics()
            assert (statistics.migrations, statistics.finished, statistics.tokens) == (5, 10, 2000)
            moved = [asked for asked in house["b"].requests if asked.continued_tokens]
            assert len(moved) == 5
            assert all(len(asked.prompt_token_ids) == 1 + asked.continued_tokens for asked in moved)
            assert serving(pool) == {"a": "dead", "b": "healthy"} or serving(pool)["a"] in ("starting", "healthy")
            await asyncio.sleep(3.0)
            assert serving(pool) == {"a": "healthy", "b": "healthy"}
            assert pool.statistics().restarts == 1

    virtually(story())


def test_a_replica_that_falls_silent_is_found_by_its_probes(hospital: Any):
    async def story() -> None:
        house = hospital()
        async with ReplicaPool({name: house.factory(name) for name in "ab"}, options=options()) as pool:
            running = [asyncio.ensure_future(collect(pool, request(f"r{n}", 200))) for n in range(4)]
            await asyncio.sleep(0.8)
            house["b"].freeze()
            begin = asyncio.get_running_loop().time()
            got = await asyncio.gather(*running)
            assert all(len(generation.token_ids) == 200 for generation in got)
            assert asyncio.get_running_loop().time() - begin < 2 * (2.0 + 1.0) + 2.0 + 4.0

    virtually(story())


def test_the_restarted_one_holds_the_current_version_before_it_serves(hospital: Any):
    async def story() -> None:
        house = hospital()
        async with ReplicaPool({name: house.factory(name) for name in "ab"}, options=options()) as pool:
            ended = await pool.publish(manifest(3))
            assert set(ended.committed) == {"a", "b"}
            house["a"].die()
            while serving(pool)["a"] != "stale":
                await asyncio.sleep(0.01)
            assert house["a"].weight_version == 0
            assert {(await collect(pool, request("b", 5))).token_ids} == {(3,) * 5}
            while serving(pool)["a"] != "healthy":
                assert not house["a"].requests
                await asyncio.sleep(0.01)
            assert house["a"].weight_version == 3
            assert pool.needed_versions == {3}

    virtually(story())


def test_one_that_cannot_take_the_weights_is_fenced_and_its_work_goes_on(hospital: Any):
    async def story() -> None:
        house = hospital()
        async with ReplicaPool({name: house.factory(name) for name in "ab"}, options=options()) as pool:
            running = [asyncio.ensure_future(collect(pool, request(f"r{n}", 300))) for n in range(4)]
            await asyncio.sleep(0.8)
            house["b"].refuses_weights = True
            ended = await pool.publish(manifest(1))
            assert ended.committed == ("a",)
            assert ended.fenced == {"b": "checksum differs"}
            assert serving(pool) == {"a": "healthy", "b": "stale"}
            house["b"].refuses_weights = False
            got = await asyncio.gather(*running)
            assert all(generation.spans[-1].version == 1 for generation in got)
            await asyncio.sleep(3.0)
            assert serving(pool) == {"a": "healthy", "b": "healthy"}
            assert house["b"].weight_version == 1
            assert pool.statistics().restarts == 0

    virtually(story())


def test_a_version_nobody_takes_is_an_error_and_the_next_one_heals(hospital: Any):
    async def story() -> None:
        house = hospital()
        async with ReplicaPool({"a": house.factory("a")}, options=options()) as pool:
            house["a"].refuses_weights = True
            with pytest.raises(WeightError, match="no replica could take weight version 1: a: checksum differs"):
                await pool.publish(manifest(1))
            house["a"].refuses_weights = False
            assert (await collect(pool, request("waits", 3))).token_ids == (1, 1, 1)
            with pytest.raises(WeightVersionError):
                await pool.publish(manifest(1))

    virtually(story())


def test_at_most_so_many_are_away_at_a_time(hospital: Any):
    async def story() -> None:
        house = hospital()
        away, most = 0, 0
        async with ReplicaPool({name: house.factory(name) for name in "abcd"}, options=options(max_away=2)) as pool:
            for name in "abcd":
                engine = house[name]

                async def commit(version: int, *, commit: Any = engine.commit_weights, **rest: Any) -> None:
                    nonlocal away, most
                    away += 1
                    most = max(most, away)
                    await commit(version, **rest)
                    away -= 1

                engine.commit_weights = commit
            await pool.publish(manifest(1))
        assert most == 2

    virtually(story())


def test_nonsense_is_not_passed_on(hospital: Any):
    async def story() -> None:
        house = hospital()
        async with ReplicaPool({name: house.factory(name) for name in "ab"}, options=options()) as pool:
            running = [asyncio.ensure_future(collect(pool, request(f"r{n}", 100))) for n in range(4)]
            await asyncio.sleep(0.1)
            house["a"].talks_nonsense = True
            got = await asyncio.gather(*running)
            assert all(len(generation.token_ids) == 100 for generation in got)
            assert pool.statistics().migrations == 2
            assert pool.replicas()[0].state == "suspect"
            assert "0 versions" in pool.replicas()[0].reason

    virtually(story())


def test_a_request_that_every_replica_fails_at_fails_itself(hospital: Any):
    async def story() -> None:
        house = hospital()
        async with ReplicaPool({name: house.factory(name) for name in "ab"}, options=options()) as pool:
            for name in "ab":
                house[name].talks_nonsense = True
            with pytest.raises(EngineError, match="3 replicas in a row failed at request 'r'"):
                await collect(pool, request("r"))
            assert pool.statistics().failed == 1

    virtually(story())


def test_sessions_and_prefixes_find_their_replica_again(hospital: Any):
    async def story() -> None:
        house = hospital()
        async with ReplicaPool({name: house.factory(name) for name in "abcd"}, options=options()) as pool:
            for turn in range(3):
                await asyncio.gather(
                    *(collect(pool, request(f"{s}.{turn}", 5), session=f"session {s}") for s in range(12))
                )
            prompt = tuple(range(64))
            await asyncio.gather(*(collect(pool, request(f"p{n}", 5, prompt=(*prompt, n))) for n in range(4)))
        for session in range(12):
            homes = [n for n in "abcd" if any(r.request_id.startswith(f"{session}.") for r in house[n].requests)]
            assert len(homes) == 1
        assert sum(any(r.request_id.startswith("p") for r in house[name].requests) for name in "abcd") == 1

    virtually(story())


def test_joining_draining_and_leaving(hospital: Any):
    async def story() -> None:
        house = hospital()
        async with ReplicaPool({"a": house.factory("a")}, options=options()) as pool:
            await pool.publish(manifest(2))
            long = asyncio.ensure_future(collect(pool, request("long", 400)))
            await asyncio.sleep(0.1)
            await pool.add("b", house.factory("b"))
            with pytest.raises(ResourceError, match="replica b is there already"):
                await pool.add("b", house.factory("b"))
            while serving(pool)["b"] != "healthy":
                await asyncio.sleep(0.05)
            assert house["b"].weight_version == 2
            draining = asyncio.ensure_future(pool.drain("a"))
            await asyncio.sleep(0)
            assert serving(pool)["a"] == "draining"
            await collect(pool, request("short", 3))
            assert [asked.request_id for asked in house["b"].requests] == ["short"]
            await pool.remove("a")
            await draining
            assert not house["a"].open
            assert len((await long).token_ids) == 400
            assert [asked.request_id for asked in house["b"].requests] == ["short", "long~1"]
            with pytest.raises(ResourceError, match="no replica a; there are b"):
                await pool.drain("a")

    virtually(story())


def test_a_drain_with_a_deadline_moves_what_is_left(hospital: Any):
    async def story() -> None:
        house = hospital()
        async with ReplicaPool({name: house.factory(name) for name in "ab"}, options=options()) as pool:
            running = [asyncio.ensure_future(collect(pool, request(f"r{n}", 400))) for n in range(2)]
            await asyncio.sleep(0.1)
            await pool.drain("a", deadline_s=0.5)
            assert house["a"].statistics().running == 0
            assert [len((await one).token_ids) for one in running] == [400, 400]

    virtually(story())


def test_pauses(hospital: Any):
    async def story() -> None:
        house = hospital()
        async with ReplicaPool({name: house.factory(name) for name in "ab"}, options=options()) as pool:
            running = [asyncio.ensure_future(collect(pool, request(f"r{n}", 100))) for n in range(4)]
            await asyncio.sleep(0.3)
            await pool.pause("keep")
            house["a"].die()  # its requests wait until the pause is over, however long that takes
            new = asyncio.ensure_future(collect(pool, request("new", 5)))
            await asyncio.sleep(200.0)
            assert not any(one.done() for one in [*running, new])
            assert house["a"].statistics().paused, "the one made again is paused, too"
            await pool.resume()
            assert [len((await one).token_ids) for one in running] == [100] * 4
            assert len((await new).token_ids) == 5
            running = [asyncio.ensure_future(collect(pool, request(f"s{n}", 100))) for n in range(4)]
            await asyncio.sleep(0.3)
            draining = asyncio.ensure_future(pool.pause("drain"))
            await asyncio.sleep(0.1)
            late = asyncio.ensure_future(collect(pool, request("late", 5)))
            house["b"].die()  # what it had has begun: it goes on although nothing new does
            await draining
            assert all(one.done() for one in running)
            assert not late.done()
            await pool.resume()
            assert len((await late).token_ids) == 5
            running = [asyncio.ensure_future(collect(pool, request(f"t{n}", 1000))) for n in range(4)]
            await asyncio.sleep(0.3)
            await pool.pause("abort")
            got = await asyncio.gather(*running)
            assert {generation.finish_reason for generation in got} == {"abort"}
            assert all(0 < len(generation.token_ids) < 1000 for generation in got)
            await pool.resume()
            assert pool.statistics().aborted == 4

    virtually(story())


def test_abort(hospital: Any):
    async def story() -> None:
        house = hospital()
        limits = AdmissionLimits(max_running=2)
        async with ReplicaPool({"a": house.factory("a")}, options=options(admission=limits)) as pool:
            running = [asyncio.ensure_future(collect(pool, request(f"r{n}", 500))) for n in range(3)]
            await asyncio.sleep(0.3)
            assert (pool.statistics().running, pool.statistics().waiting) == (2, 1)
            assert await pool.abort("r2")  # still at the door
            assert (await running[2]).token_ids == ()
            assert await pool.abort("r0")
            assert 0 < len((await running[0]).token_ids) < 500
            assert not await pool.abort("r0")
            house["a"].freeze()
            running[1].cancel()
            await asyncio.wait([running[1]])
            statistics = pool.statistics()
            assert (statistics.accepted, statistics.aborted, statistics.left) == (3, 2, 1)
            assert house["a"].statistics().running == 0

    virtually(story())


def test_full_queues_and_fairness(hospital: Any):
    async def story() -> None:
        house = hospital()
        limits = AdmissionLimits(max_running=1, max_waiting=4)
        async with ReplicaPool({"a": house.factory("a")}, options=options(admission=limits)) as pool:
            order: list[str] = []

            async def client(name: str, tenant: str) -> None:
                await collect(pool, request(name, 20), tenant=tenant)
                order.append(name)

            async with asyncio.TaskGroup() as clients:
                for n in range(4):
                    clients.create_task(client(f"crowd {n}", "crowd"))
                await asyncio.sleep(0)
                clients.create_task(client("lone", "lone"))
                await asyncio.sleep(0)
                with pytest.raises(OverloadedError, match="4 requests wait already") as caught:
                    await collect(pool, request("one too many"))
                assert caught.value.retry_after_s >= 1.0
            assert order == ["crowd 0", "lone", "crowd 1", "crowd 2", "crowd 3"]
            assert pool.statistics().refused == 1

    virtually(story())


def test_nobody_serves(hospital: Any):
    async def story() -> None:
        house = hospital()
        async with ReplicaPool({"a": house.factory("a")}, options=options(wait_s=5.0)) as pool:
            house["a"].die()
            pool._replicas["a"]._factory = house.factory("a", start_s=100.0)
            with pytest.raises(DeadlineError, match="no replica has served for 5 s: a: "):
                await collect(pool, request("r"))

    virtually(story())


def test_ids_are_unique_and_a_closed_pool_says_so(hospital: Any):
    async def story() -> None:
        house = hospital()
        pool = ReplicaPool({"a": house.factory("a")}, options=options())
        with pytest.raises(EngineError, match="has not been started"):
            await collect(pool, request("r"))
        await pool.start()
        running = asyncio.ensure_future(collect(pool, request("r", 500)))
        await asyncio.sleep(0.1)
        with pytest.raises(InvalidDataError, match="'r' is in use"):
            await collect(pool, request("r"))
        await pool.close()
        await pool.close()
        with pytest.raises(EngineClosedError, match="closed"):
            await running
        with pytest.raises(EngineClosedError, match="closed"):
            await collect(pool, request("s"))
        assert not house["a"].open

    virtually(story())


def test_a_pool_that_cannot_start_says_why_and_leaves_nothing():
    async def story() -> None:
        def make() -> EchoEngine:
            raise ConfigError("no such model", path="model.path")

        with pytest.raises(ConfigError, match="no such model"):
            await ReplicaPool({"a": make, "b": make}).start()

    virtually(story())
