"""The pool on a virtual clock, over engines whose tokens show every fault."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Coroutine, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncrl.errors import (
    ConfigError,
    DeadlineError,
    EngineClosedError,
    EngineError,
    InvalidDataError,
    ResourceError,
    WeightError,
    WeightVersionError,
)
from asyncrl.interfaces import Generation, GenerationRequest, SamplingParams
from asyncrl.rollout.health import HealthPolicy
from asyncrl.rollout.replica import PoolOptions, Supervision
from asyncrl.rollout.replica_pool import ReplicaPool
from asyncrl.runtime import shield_until_done
from asyncrl.testing import EchoEngine, EmptyTransport, VersionEchoEngine
from asyncrl.testing.clock import run_virtually
from asyncrl.weights import TensorEntry, WeightManifest

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


def test_a_dying_replica_costs_no_request_a_token(faulty_fleet: Any):
    async def story() -> None:
        fleet = faulty_fleet()
        async with ReplicaPool({name: fleet.factory(name) for name in "ab"}, options=options()) as pool:
            running = [asyncio.ensure_future(collect(pool, request(f"r{n}", 200))) for n in range(10)]
            await asyncio.sleep(0.8)
            assert all(fleet[name].statistics().running == 5 for name in "ab")
            fleet["a"].die()
            got = await asyncio.gather(*running)
            assert [len(generation.token_ids) for generation in got] == [200] * 10
            statistics = pool.statistics()
            assert (statistics.migrations, statistics.finished, statistics.tokens) == (5, 10, 2000)
            moved = [asked for asked in fleet["b"].requests if asked.continued_tokens]
            assert len(moved) == 5
            assert all(len(asked.prompt_token_ids) == 1 + asked.continued_tokens for asked in moved)
            assert serving(pool) == {"a": "dead", "b": "healthy"} or serving(pool)["a"] in ("starting", "healthy")
            await asyncio.sleep(3.0)
            assert serving(pool) == {"a": "healthy", "b": "healthy"}
            assert pool.statistics().restarts == 1

    virtually(story())


def test_a_replica_that_falls_silent_is_found_by_its_probes(faulty_fleet: Any):
    async def story() -> None:
        fleet = faulty_fleet()
        async with ReplicaPool({name: fleet.factory(name) for name in "ab"}, options=options()) as pool:
            running = [asyncio.ensure_future(collect(pool, request(f"r{n}", 200))) for n in range(4)]
            await asyncio.sleep(0.8)
            fleet["b"].freeze()
            begin = asyncio.get_running_loop().time()
            got = await asyncio.gather(*running)
            assert all(len(generation.token_ids) == 200 for generation in got)
            assert asyncio.get_running_loop().time() - begin < 2 * (2.0 + 1.0) + 2.0 + 4.0

    virtually(story())


def test_the_restarted_one_holds_the_current_version_before_it_serves(faulty_fleet: Any):
    async def story() -> None:
        fleet = faulty_fleet()
        async with ReplicaPool({name: fleet.factory(name) for name in "ab"}, options=options()) as pool:
            ended = await pool.publish(manifest(3))
            assert set(ended.committed) == {"a", "b"}
            fleet["a"].die()
            while serving(pool)["a"] != "stale":
                await asyncio.sleep(0.01)
            assert fleet["a"].weight_version == 0
            assert {(await collect(pool, request("b", 5))).token_ids} == {(3,) * 5}
            while serving(pool)["a"] != "healthy":
                assert not fleet["a"].requests
                await asyncio.sleep(0.01)
            assert fleet["a"].weight_version == 3
            assert pool.needed_versions == {3}

    virtually(story())


def test_one_that_cannot_take_the_weights_is_fenced_and_its_work_goes_on(faulty_fleet: Any):
    async def story() -> None:
        fleet = faulty_fleet()
        async with ReplicaPool({name: fleet.factory(name) for name in "ab"}, options=options()) as pool:
            running = [asyncio.ensure_future(collect(pool, request(f"r{n}", 300))) for n in range(4)]
            await asyncio.sleep(0.8)
            fleet["b"].refuses_weights = True
            ended = await pool.publish(manifest(1))
            assert ended.committed == ("a",)
            assert ended.fenced == {"b": "checksum differs"}
            assert serving(pool) == {"a": "healthy", "b": "stale"}
            fleet["b"].refuses_weights = False
            got = await asyncio.gather(*running)
            assert all(generation.spans[-1].version == 1 for generation in got)
            await asyncio.sleep(3.0)
            assert serving(pool) == {"a": "healthy", "b": "healthy"}
            assert fleet["b"].weight_version == 1
            assert pool.statistics().restarts == 0

    virtually(story())


def test_a_version_that_no_replica_takes_is_an_error_and_changes_nothing(faulty_fleet: Any):
    async def story() -> None:
        fleet = faulty_fleet()
        async with ReplicaPool({"a": fleet.factory("a")}, options=options()) as pool:
            fleet["a"].refuses_weights = True
            with pytest.raises(WeightError, match="no replica could take weight version 1: a: checksum differs"):
                await pool.publish(manifest(1))
            assert serving(pool) == {"a": "healthy"}
            assert (await collect(pool, request("goes on", 3))).token_ids == (0, 0, 0)
            fleet["a"].refuses_weights = False
            await pool.publish(manifest(1))
            with pytest.raises(WeightVersionError):
                await pool.publish(manifest(1))
            assert (await collect(pool, request("new", 3))).token_ids == (1, 1, 1)

    virtually(story())


def test_a_version_that_kills_the_only_replica_is_withdrawn(faulty_fleet: Any):
    async def story() -> None:
        fleet = faulty_fleet()
        async with ReplicaPool({"a": fleet.factory("a")}, options=options()) as pool:

            async def die(_: WeightManifest) -> None:
                fleet["a"].die()
                await asyncio.Event().wait()

            fleet["a"].fetch_weights = die
            with pytest.raises(WeightError, match="no replica could take weight version 1: a: killed by SIGKILL"):
                await pool.publish(manifest(1))
            ended = await pool.publish(manifest(2))  # none serves now: those that come back have to take it
            assert (ended.committed, pool.weight_version) == ((), 2)
            assert (await collect(pool, request("r", 3))).token_ids == (2, 2, 2)

    virtually(story())


def test_a_commit_that_is_over_too_late_costs_no_restart(faulty_fleet: Any):
    async def story() -> None:
        fleet = faulty_fleet()
        async with ReplicaPool({"a": fleet.factory("a")}, options=options()) as pool:
            commit = fleet["a"].commit_weights

            async def late(version: int, **given: Any) -> None:
                async def finish() -> None:
                    await asyncio.sleep(2.5)  # options().weights_s is 2
                    await commit(version, **given)

                await shield_until_done(finish())

            fleet["a"].commit_weights = late
            with pytest.raises(WeightError, match="commit of version 1 took over 2 s"):
                await pool.publish(manifest(1))
            assert (await collect(pool, request("r", 3))).token_ids == (1, 1, 1)
            assert pool.statistics().restarts == 0

    virtually(story())


class ProvenEngine(VersionEchoEngine):
    """Takes ``proof_s`` for the checksum of its one tensor, which is wrong under the ``wrong`` versions."""

    def __init__(self, proven: set[int], *, proof_s: float, wrong: int | None) -> None:
        super().__init__(token_s=0.01)
        self._proven, self._proof_s, self._wrong = proven, proof_s, wrong

    async def live_checksums(self, names: Collection[str]) -> Mapping[str, tuple[str, int]]:
        version = self.weight_version
        await asyncio.sleep(self._proof_s)
        if version != self._wrong:
            self._proven.add(version)
        return {name: ("uint8", int(version != self._wrong)) for name in names}


@settings(max_examples=25, deadline=None)
@given(
    proofs_s=st.lists(st.floats(0, 0.3), min_size=3, max_size=3),
    wrong=st.none() | st.integers(1, 3),
    gaps_s=st.lists(st.floats(0.01, 0.3), min_size=3, max_size=3),
)
def test_no_token_of_a_version_that_is_not_proven_reaches_a_reader(
    proofs_s: list[float], wrong: int | None, gaps_s: list[float]
):
    proven = {0}
    engines: list[ProvenEngine] = []

    def make() -> ProvenEngine:
        engines.append(ProvenEngine(proven, proof_s=proofs_s[len(engines) % 3], wrong=None if engines else wrong))
        return engines[-1]

    async def story() -> None:
        entry = TensorEntry(name="w", shape=(1,), dtype="uint8", offset=64, size_bytes=1, checksum=1)
        async with ReplicaPool({"a": make}, options=options(), transport=EmptyTransport()) as pool:

            async def read(name: str) -> tuple[int, ...]:
                versions: tuple[int, ...] = ()
                async for chunk in pool.generate(request(name, 200)):
                    assert proven.issuperset(chunk.weight_versions)
                    versions += chunk.weight_versions
                return versions

            reading = [asyncio.ensure_future(read(name)) for name in "xyz"]
            for version, gap_s in enumerate(gaps_s, start=1):
                await asyncio.sleep(gap_s)
                published = replace(manifest(version), tensors=(entry,))
                with contextlib.suppress(WeightError):  # no replica is left for a moment
                    await pool.publish(published)
            for versions in await asyncio.gather(*reading):
                assert len(versions) == 200
                assert list(versions) == sorted(versions)
            assert len(engines) == 1 + (wrong is not None)

    virtually(story())


def test_at_most_max_committing_replicas_swap_at_a_time(faulty_fleet: Any):
    async def story() -> None:
        fleet = faulty_fleet()
        away, most = 0, 0
        async with ReplicaPool(
            {name: fleet.factory(name) for name in "abcd"}, options=options(max_committing=2)
        ) as pool:
            for name in "abcd":
                engine = fleet[name]

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


def test_nonsense_is_not_passed_on(faulty_fleet: Any):
    async def story() -> None:
        fleet = faulty_fleet()
        async with ReplicaPool({name: fleet.factory(name) for name in "ab"}, options=options()) as pool:
            running = [asyncio.ensure_future(collect(pool, request(f"r{n}", 100))) for n in range(4)]
            await asyncio.sleep(0.1)
            fleet["a"].sends_invalid_chunks = True
            got = await asyncio.gather(*running)
            assert all(len(generation.token_ids) == 100 for generation in got)
            assert pool.statistics().migrations == 2
            assert pool.replicas()[0].state == "suspect"
            assert "0 versions" in pool.replicas()[0].reason

    virtually(story())


def test_a_request_that_every_replica_fails_at_fails_itself(faulty_fleet: Any):
    async def story() -> None:
        fleet = faulty_fleet()
        async with ReplicaPool({name: fleet.factory(name) for name in "ab"}, options=options()) as pool:
            for name in "ab":
                fleet[name].sends_invalid_chunks = True
            with pytest.raises(EngineError, match="3 replicas in a row failed at request 'r'"):
                await collect(pool, request("r"))
            assert pool.statistics().failed == 1

    virtually(story())


def test_sessions_and_prefixes_find_their_replica_again(faulty_fleet: Any):
    async def story() -> None:
        fleet = faulty_fleet()
        async with ReplicaPool({name: fleet.factory(name) for name in "abcd"}, options=options()) as pool:
            for turn in range(3):
                await asyncio.gather(
                    *(collect(pool, request(f"{s}.{turn}", 5), session=f"session {s}") for s in range(12))
                )
            prompt = tuple(range(64))
            await asyncio.gather(*(collect(pool, request(f"p{n}", 5, prompt=(*prompt, n))) for n in range(4)))
        for session in range(12):
            homes = [n for n in "abcd" if any(r.request_id.startswith(f"{session}.") for r in fleet[n].requests)]
            assert len(homes) == 1
        assert sum(any(r.request_id.startswith("p") for r in fleet[name].requests) for name in "abcd") == 1

    virtually(story())


def test_joining_draining_and_leaving(faulty_fleet: Any):
    async def story() -> None:
        fleet = faulty_fleet()
        async with ReplicaPool({"a": fleet.factory("a")}, options=options()) as pool:
            await pool.publish(manifest(2))
            long = asyncio.ensure_future(collect(pool, request("long", 400)))
            await asyncio.sleep(0.1)
            await pool.add("b", fleet.factory("b"))
            with pytest.raises(ResourceError, match="replica b is there already"):
                await pool.add("b", fleet.factory("b"))
            while serving(pool)["b"] != "healthy":
                await asyncio.sleep(0.05)
            assert fleet["b"].weight_version == 2
            draining = asyncio.ensure_future(pool.drain("a"))
            await asyncio.sleep(0)
            assert serving(pool)["a"] == "draining"
            await collect(pool, request("short", 3))
            assert [asked.request_id for asked in fleet["b"].requests] == ["short"]
            await pool.remove("a")
            await draining
            assert not fleet["a"].open
            assert len((await long).token_ids) == 400
            assert [asked.request_id for asked in fleet["b"].requests] == ["short", "long~1"]
            with pytest.raises(ResourceError, match="no replica a; there are b"):
                await pool.drain("a")

    virtually(story())


def test_a_drain_with_a_deadline_moves_what_is_left(faulty_fleet: Any):
    async def story() -> None:
        fleet = faulty_fleet()
        async with ReplicaPool({name: fleet.factory(name) for name in "ab"}, options=options()) as pool:
            running = [asyncio.ensure_future(collect(pool, request(f"r{n}", 400))) for n in range(2)]
            await asyncio.sleep(0.1)
            await pool.drain("a", deadline_s=0.5)
            assert fleet["a"].statistics().running == 0
            assert [len((await one).token_ids) for one in running] == [400, 400]

    virtually(story())


def test_pauses(faulty_fleet: Any):
    async def story() -> None:
        fleet = faulty_fleet()
        async with ReplicaPool({name: fleet.factory(name) for name in "ab"}, options=options()) as pool:
            running = [asyncio.ensure_future(collect(pool, request(f"r{n}", 100))) for n in range(4)]
            await asyncio.sleep(0.3)
            await pool.pause("keep")
            fleet["a"].die()  # its requests wait until the pause is over, however long that takes
            new = asyncio.ensure_future(collect(pool, request("new", 5)))
            await asyncio.sleep(200.0)
            assert not any(one.done() for one in [*running, new])
            assert fleet["a"].statistics().paused, "the one made again is paused, too"
            await pool.resume()
            assert [len((await one).token_ids) for one in running] == [100] * 4
            assert len((await new).token_ids) == 5
            running = [asyncio.ensure_future(collect(pool, request(f"s{n}", 100))) for n in range(4)]
            await asyncio.sleep(0.3)
            draining = asyncio.ensure_future(pool.pause("drain"))
            await asyncio.sleep(0.1)
            late = asyncio.ensure_future(collect(pool, request("late", 5)))
            fleet["b"].die()  # what it had has begun: it goes on although nothing new does
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


def test_a_pause_waits_for_a_commit_however_long_that_may_take_and_not_for_an_engine_that_hangs(faulty_fleet: Any):
    async def story() -> None:
        fleet = faulty_fleet()
        async with ReplicaPool({"a": fleet.factory("a")}, options=options()) as pool:
            await collect(pool, request("first", 5))
            engine, ordering, done = fleet["a"], asyncio.Lock(), list[str]()
            commit, pause = engine.commit_weights, engine.pause

            async def slow_commit(version: int, **given: Any) -> None:
                async with ordering:
                    await asyncio.sleep(1.5 * QUICK.probe_s)
                    await commit(version, **given)
                    done.append("commit")

            async def pause_after_it() -> None:
                async with ordering:
                    await pause()
                    done.append("pause")

            engine.commit_weights, engine.pause = slow_commit, pause_after_it
            publishing = asyncio.ensure_future(pool.publish(manifest(1)))
            while not ordering.locked():
                await asyncio.sleep(0.01)
            await pool.pause("keep")
            await publishing
            assert done == ["commit", "pause"]
            assert (serving(pool), pool.statistics().restarts) == ({"a": "healthy"}, 0)
            await pool.resume()
            async with ordering:
                await pool.pause("keep")
                await asyncio.sleep(60.0)
                assert pool.statistics().restarts == 1

    virtually(story())


def test_an_engine_that_hangs_in_a_pause_is_noticed_while_weights_are_fetched(faulty_fleet: Any):
    async def story() -> None:
        fleet = faulty_fleet()
        async with ReplicaPool({"a": fleet.factory("a")}, options=options(weights_s=60.0)) as pool:
            await collect(pool, request("first", 5))
            begun, never = asyncio.Event(), asyncio.Event()

            async def fetch(*given: Any, **more: Any) -> None:
                begun.set()
                await never.wait()

            fleet["a"].fetch_weights, fleet["a"].pause = fetch, never.wait
            publishing = asyncio.ensure_future(pool.publish(manifest(1)))
            await begun.wait()
            started = asyncio.get_running_loop().time()
            await pool.pause("keep")
            assert asyncio.get_running_loop().time() - started <= 2 * QUICK.probe_s
            with pytest.raises(WeightError, match="it could not be paused or resumed: no answer within 1 s"):
                await publishing

    virtually(story())


def test_one_that_takes_no_weights_in_a_pause_is_asked_again_after_it_and_not_made_again(faulty_fleet: Any):
    async def story() -> None:
        fleet = faulty_fleet()
        async with ReplicaPool({name: fleet.factory(name) for name in "ab"}, options=options()) as pool:
            await pool.pause("keep")
            fleet["b"].refuses_weights = True
            await pool.publish(manifest(1))
            await asyncio.sleep(200.0)
            assert serving(pool) == {"a": "healthy", "b": "stale"}
            fleet["b"].refuses_weights = False
            await pool.resume()
            await asyncio.sleep(3.0)
            assert serving(pool) == {"a": "healthy", "b": "healthy"}
            assert pool.statistics().restarts == 0

    virtually(story())


def test_abort(faulty_fleet: Any):
    async def story() -> None:
        fleet = faulty_fleet()
        async with ReplicaPool({"a": fleet.factory("a")}, options=options(max_running=2)) as pool:
            running = [asyncio.ensure_future(collect(pool, request(f"r{n}", 500))) for n in range(3)]
            await asyncio.sleep(0.3)
            assert (pool.statistics().running, pool.statistics().waiting) == (2, 1)
            assert await pool.abort("r2")  # still at the door
            assert (await running[2]).token_ids == ()
            assert await pool.abort("r0")
            assert 0 < len((await running[0]).token_ids) < 500
            assert not await pool.abort("r0")
            fleet["a"].freeze()
            running[1].cancel()
            await asyncio.wait([running[1]])
            statistics = pool.statistics()
            assert (statistics.accepted, statistics.aborted, statistics.left) == (3, 2, 1)
            assert fleet["a"].statistics().running == 0

    virtually(story())


def test_fairness(faulty_fleet: Any):
    async def story() -> None:
        fleet = faulty_fleet()
        async with ReplicaPool({"a": fleet.factory("a")}, options=options(max_running=1)) as pool:
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
            assert order == ["crowd 0", "lone", "crowd 1", "crowd 2", "crowd 3"]

    virtually(story())


def test_a_request_fails_when_no_replica_serves_in_time(faulty_fleet: Any):
    async def story() -> None:
        fleet = faulty_fleet()
        async with ReplicaPool({"a": fleet.factory("a")}, options=options(wait_s=5.0)) as pool:
            fleet["a"].die()
            pool._replicas["a"]._factory = fleet.factory("a", start_s=100.0)
            with pytest.raises(DeadlineError, match="no replica has served for 5 s: a: "):
                await collect(pool, request("r"))

    virtually(story())


def test_ids_are_unique_and_a_closed_pool_refuses_requests(faulty_fleet: Any):
    async def story() -> None:
        fleet = faulty_fleet()
        pool = ReplicaPool({"a": fleet.factory("a")}, options=options())
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
        assert not fleet["a"].open

    virtually(story())


def test_a_pool_that_cannot_start_says_why_and_leaves_nothing():
    async def story() -> None:
        def make() -> EchoEngine:
            raise ConfigError("no such model", path="model.path")

        with pytest.raises(ConfigError, match="no such model"):
            await ReplicaPool({"a": make, "b": make}).start()

    virtually(story())
