"""Requests whose engines end them early, and requests whose readers are slow, in virtual time."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from msgspec.structs import replace

from asyncrl.errors import ContinuationError, EngineError
from asyncrl.interfaces import FinishReason, GenerationChunk, GenerationRequest, SamplingParams
from asyncrl.rollout.replica import PoolOptions, Supervision
from asyncrl.rollout.replica_pool import ReplicaPool
from asyncrl.rollout.router import rendezvous
from asyncrl.testing.clock import run_virtually
from asyncrl.weights import WeightManifest

OPTIONS = PoolOptions(supervision=Supervision(close_s=1.0, probe_every_s=2.0, probe_s=1.0), wait_s=30.0)


def request(name: str, tokens: int) -> GenerationRequest:
    return GenerationRequest(request_id=name, prompt_token_ids=(7,), sampling=SamplingParams(max_new_tokens=tokens))


def manifest(version: int) -> WeightManifest:
    return WeightManifest(version=version, transport="none", location="nowhere", tensors=())


def numbers(chunks: list[GenerationChunk]) -> list[int]:
    """The engines of the fleet count: what is lost or comes twice shows."""
    return [round(-log_prob) for chunk in chunks for log_prob in chunk.log_probs]


async def collect(pool: ReplicaPool, asked: GenerationRequest, *, session: str | None = None) -> list[GenerationChunk]:
    return [chunk async for chunk in pool.generate(asked, session=session)]


def virtually(story: Coroutine[Any, Any, None]) -> None:
    run_virtually(story, seed=0, limit_s=1000.0)


def quitting(
    make: Callable[[], Any], *, after: int, saying: FinishReason | type[BaseException] | None, streams: int
) -> Callable[[], Any]:
    """Engines whose first streams end after so many tokens, with a finish reason, none, or an exception."""

    def made() -> Any:
        engine = make()
        left, generate = streams, engine.generate

        async def quits(asked: GenerationRequest) -> AsyncIterator[GenerationChunk]:
            nonlocal left
            if left:
                left -= 1
                reason = None if isinstance(saying, type) else saying
                if after or reason:
                    said = tuple(-float(asked.continued_tokens + n) for n in range(after))
                    yield GenerationChunk(
                        token_ids=(0,) * after, log_probs=said, weight_versions=(0,) * after, finish_reason=reason
                    )
                if isinstance(saying, type):
                    raise saying
                return
            async for chunk in generate(asked):
                yield chunk

        engine.generate = quits
        return engine

    return made


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("saying", ["abort", None, asyncio.CancelledError, RuntimeError])
def test_a_stream_that_the_engine_gives_up_goes_on_from_its_tokens(faulty_fleet: Any, after: int, saying: Any):
    async def story() -> None:
        make = quitting(faulty_fleet().factory("a"), after=after, saying=saying, streams=2)
        async with ReplicaPool({"a": make}, options=OPTIONS) as pool:
            chunks = await collect(pool, request("r", 9))
            assert numbers(chunks) == list(range(9))
            assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]
            statistics = pool.statistics()
            assert (statistics.finished, statistics.tokens, statistics.migrations) == (1, 9, 2)

    virtually(story())


@pytest.mark.parametrize("saying", ["abort", None])
def test_streams_that_are_given_up_without_a_token_count_as_failures(faulty_fleet: Any, saying: Any):
    async def story() -> None:
        fleet = faulty_fleet()
        factories = {name: quitting(fleet.factory(name), after=0, saying=saying, streams=1000) for name in "ab"}
        async with ReplicaPool(factories, options=OPTIONS) as pool:
            with pytest.raises(EngineError, match="3 replicas in a row failed at request 'r'"):
                await collect(pool, request("r", 9))
            assert pool.statistics().failed == 1

    virtually(story())


def test_an_engine_that_cannot_go_on_ends_the_request_and_keeps_its_health(faulty_fleet: Any):
    async def story() -> None:
        make = quitting(faulty_fleet().factory("a"), after=2, saying=None, streams=1)

        def resumes_nothing() -> Any:
            engine = make()
            generate = engine.generate

            async def checks(asked: GenerationRequest) -> AsyncIterator[GenerationChunk]:
                if asked.continued_tokens:
                    raise ContinuationError("send it again")
                async for chunk in generate(asked):
                    yield chunk

            engine.generate = checks
            return engine

        async with ReplicaPool({"a": resumes_nothing}, options=OPTIONS) as pool:
            with pytest.raises(ContinuationError, match="send it again"):
                await collect(pool, request("r", 9))
            assert (pool.statistics().failed, pool.replicas()[0].restarts) == (1, 0)
            assert numbers(await collect(pool, request("again", 3))) == [0, 1, 2]

    virtually(story())


def test_one_that_gives_a_request_up_is_the_last_to_get_it_again(faulty_fleet: Any):
    async def story() -> None:
        fleet = faulty_fleet()
        factories = {
            "a": quitting(fleet.factory("a"), after=0, saying="abort", streams=1000),
            "b": fleet.factory("b"),
        }
        async with ReplicaPool(factories, options=dataclasses.replace(OPTIONS, max_failures=2)) as pool:
            for n in range(16):
                assert numbers(await collect(pool, request(f"r{n}", 9), session=f"s{n}")) == list(range(9))
            assert 0 < pool.statistics().migrations < 16, "each is preferred by some sessions"

    virtually(story())


def test_a_session_leaves_a_busy_replica_where_reading_its_prompt_elsewhere_costs_less(faulty_fleet: Any):
    async def story() -> None:
        fleet = faulty_fleet()
        factories = {name: fleet.factory(name) for name in "ab"}
        async with ReplicaPool(factories, options=dataclasses.replace(OPTIONS, margin=0.0)) as pool:
            busy = pool.generate(request("busy", 50), session="s")
            await anext(busy)
            await collect(pool, request("short", 1), session="s")
            long = replace(request("long", 1), prompt_token_ids=(7,) * 1000)  # as much work as 100 sampled tokens
            await collect(pool, long, session="s")
            home, away = rendezvous("session s", ["a", "b"])
            assert [asked.request_id for asked in fleet[home].requests] == ["busy", "long"]
            assert [asked.request_id for asked in fleet[away].requests] == ["short"]
            async for _ in busy:
                pass

    virtually(story())


def test_a_drain_does_not_wait_for_a_slow_reader(faulty_fleet: Any):
    async def story() -> None:
        fleet = faulty_fleet()
        async with ReplicaPool({"a": fleet.factory("a")}, options=OPTIONS) as pool:
            stream = pool.generate(request("r", 1000))
            chunks = [await anext(stream)]
            await pool.add("b", fleet.factory("b"))
            while not pool.replicas()[1].serving:
                await asyncio.sleep(0.05)
            async with asyncio.timeout(1.1):
                await pool.drain("a", deadline_s=1.0)
            assert fleet["a"].statistics().running == 0
            status = pool.replicas()[0]
            assert (status.requests, status.expected_tokens) == (0, 0)
            chunks += [chunk async for chunk in stream]
            assert numbers(chunks) == list(range(1000))
            assert [asked.request_id for asked in fleet["b"].requests] == ["r~1"]
            assert all(status.expected_tokens == 0 for status in pool.replicas())
            statistics = pool.statistics()
            assert (statistics.finished, statistics.migrations, statistics.tokens) == (1, 1, 1000)

    virtually(story())


def test_what_an_engine_has_finished_is_off_its_replica_before_it_is_read(faulty_fleet: Any):
    async def story() -> None:
        fleet = faulty_fleet()
        async with ReplicaPool({"a": fleet.factory("a")}, options=OPTIONS) as pool:
            stream = pool.generate(request("r", 20))
            chunks = [await anext(stream)]
            async with asyncio.timeout(5.0):
                await pool.drain("a")
            status = pool.replicas()[0]
            assert (status.requests, status.expected_tokens) == (0, 0)
            chunks += [chunk async for chunk in stream]
            assert numbers(chunks) == list(range(20))
            assert pool.replicas()[0].expected_tokens == 0
            assert (pool.statistics().finished, pool.statistics().migrations) == (1, 0)

    virtually(story())


def test_a_draining_pause_waits_for_engines_and_not_for_readers(faulty_fleet: Any):
    async def story() -> None:
        fleet = faulty_fleet()
        async with ReplicaPool({"a": fleet.factory("a")}, options=OPTIONS) as pool:
            stream = pool.generate(request("r", 20))
            chunks = [await anext(stream)]
            async with asyncio.timeout(5.0):
                await pool.pause("drain")
            assert fleet["a"].tokens == 20, "it was not stopped before"
            chunks += [chunk async for chunk in stream]
            assert numbers(chunks) == list(range(20))
            await pool.resume()

    virtually(story())


def test_a_foreign_error_of_one_engine_at_new_weights_costs_that_engine_only(faulty_fleet: Any):
    async def story() -> None:
        fleet = faulty_fleet()
        async with ReplicaPool({name: fleet.factory(name) for name in "ab"}, options=OPTIONS) as pool:

            async def out_of_memory(_manifest: object) -> None:
                raise RuntimeError("CUDA out of memory")

            fetch, fleet["a"].fetch_weights = fleet["a"].fetch_weights, out_of_memory
            ended = await pool.publish(manifest(1))
            assert (ended.committed, ended.fenced) == (("b",), {"a": "RuntimeError: CUDA out of memory"})
            assert numbers(await collect(pool, request("r", 9))) == list(range(9))
            fleet["a"].fetch_weights = fetch
            await asyncio.sleep(3.0)
            assert [status.state for status in pool.replicas()] == ["healthy", "healthy"]

    virtually(story())


def test_a_probe_passes_those_that_wait(faulty_fleet: Any):
    async def story() -> None:
        fleet = faulty_fleet()
        async with ReplicaPool({"a": fleet.factory("a")}, options=dataclasses.replace(OPTIONS, max_running=1)) as pool:
            others = [asyncio.ensure_future(collect(pool, request(name, 100))) for name in "xy"]
            await asyncio.sleep(0.1)
            assert len(await collect(pool, replace(request("probe", 1), probe=True))) == 1
            assert [each.done() for each in others] == [False, False]
            assert [len(numbers(await each)) for each in others] == [100, 100]

    virtually(story())
