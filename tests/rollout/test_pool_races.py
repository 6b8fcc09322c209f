"""Calls of the pool that overlap: each ends as its docstring says, whatever comes in between. On a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from asyncrl.errors import EngineClosedError, ResourceError, WorkerError
from asyncrl.interfaces import FinishReason, GenerationRequest, PauseMode, SamplingParams
from asyncrl.rollout.health import HealthPolicy
from asyncrl.rollout.replica import PoolOptions, ReplicaSet, Supervision
from asyncrl.rollout.replica_pool import ReplicaPool
from asyncrl.testing import EchoEngine
from asyncrl.testing.clock import run_virtually

OPTIONS = PoolOptions(
    supervision=Supervision(
        health=HealthPolicy(probe_failures=1, restart_s=1.0), start_s=5.0, close_s=1.0, probe_every_s=2.0, probe_s=1.0
    ),
    wait_s=30.0,
)


class SluggishEngine(EchoEngine):
    """Takes so many seconds for each call named: half of them before it does it, and half after.

    ``calls`` has every call's name when it begins, and again when it has run to its end.
    """

    def __init__(self, **seconds: float) -> None:
        super().__init__(token_s=0.01)
        self._seconds = seconds
        self.calls: list[str] = []

    @property
    def paused(self) -> bool:
        return self.statistics().paused

    async def _slowly(self, name: str, call: Coroutine[Any, Any, Any]) -> Any:
        half_s = self._seconds.get(name, 0.0) / 2
        self.calls.append(name)
        try:
            await asyncio.sleep(half_s)
            answer = await call
        finally:
            call.close()
        await asyncio.sleep(half_s)
        self.calls.append(name)
        return answer

    async def start(self) -> None:
        await self._slowly("start", super().start())

    async def close(self) -> None:
        await self._slowly("close", super().close())

    async def pause(self) -> None:
        await self._slowly("pause", super().pause())

    async def resume(self) -> None:
        await self._slowly("resume", super().resume())

    async def abort(self, request_id: str) -> bool:
        known: bool = await self._slowly("abort", super().abort(request_id))
        return known


def virtually(story: Coroutine[Any, Any, None]) -> None:
    run_virtually(story, seed=0, limit_s=10_000.0)


async def collect(pool: ReplicaPool, name: str, tokens: int) -> FinishReason | None:
    sampling = SamplingParams(max_new_tokens=tokens)
    request = GenerationRequest(request_id=name, prompt_token_ids=(7,), sampling=sampling)
    return [chunk async for chunk in pool.generate(request)][-1].finish_reason


async def orders(pool: ReplicaPool, *asked: tuple[float, PauseMode | None]) -> None:
    """Pause, or with None resume, each at its second; returns when all have returned."""

    async def order(at_s: float, mode: PauseMode | None) -> None:
        await asyncio.sleep(at_s)
        await (pool.resume() if mode is None else pool.pause(mode))

    await asyncio.gather(*(order(at_s, mode) for at_s, mode in asked))


# ------------------------------------------------------------------------------------------------- pauses that meet


@pytest.mark.parametrize("mode", ["keep", "abort", "drain"])
@pytest.mark.parametrize("resumed_s", [0.01, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35])
def test_a_resume_during_a_pause_wins(mode: PauseMode, resumed_s: float):
    async def story() -> None:
        engines = {name: SluggishEngine(pause=0.1, resume=0.2, abort=0.2) for name in "ab"}
        async with ReplicaPool({name: lambda e=engine: e for name, engine in engines.items()}, options=OPTIONS) as pool:
            running = [asyncio.ensure_future(collect(pool, f"r{n}", 25)) for n in range(2)]
            await asyncio.sleep(0.1)
            await orders(pool, (0.0, mode), (resumed_s, None))
            assert not pool.statistics().paused
            assert not any(engine.paused for engine in engines.values())
            await asyncio.gather(*running, collect(pool, "late", 3))

    virtually(story())


@pytest.mark.parametrize("first", ["keep", "abort", "drain"])
@pytest.mark.parametrize("second", ["keep", "abort", "drain"])
def test_two_pauses_at_once_stop_everything_until_one_resume(first: PauseMode, second: PauseMode):
    async def story() -> None:
        engines = {name: SluggishEngine(pause=0.1, resume=0.1, abort=0.1) for name in "ab"}
        async with ReplicaPool({name: lambda e=engine: e for name, engine in engines.items()}, options=OPTIONS) as pool:
            running = [asyncio.ensure_future(collect(pool, f"r{n}", 100)) for n in range(2)]
            await asyncio.sleep(0.1)
            await orders(pool, (0.0, first), (0.05, second))
            assert pool.statistics().paused
            assert all(engine.paused for engine in engines.values())
            if "abort" in (first, second):
                assert [await one for one in running] == ["abort", "abort"]
            else:
                assert [one.done() for one in running] == [second == "drain"] * 2
            await pool.resume()
            await asyncio.gather(*running, collect(pool, "late", 3))

    virtually(story())


def test_a_pause_during_a_resume_wins():
    async def story() -> None:
        engine = SluggishEngine(resume=0.2)
        async with ReplicaPool({"a": lambda: engine}, options=OPTIONS) as pool:
            await pool.pause()
            await orders(pool, (0.0, None), (0.1, "keep"))
            assert pool.statistics().paused
            assert engine.paused

    virtually(story())


def test_what_has_begun_goes_on_when_a_frozen_pool_is_drained():
    async def story() -> None:
        engine = SluggishEngine()
        async with ReplicaPool({"a": lambda: engine}, options=OPTIONS) as pool:
            running = asyncio.ensure_future(collect(pool, "r", 50))
            await asyncio.sleep(0.1)
            await pool.pause("keep")
            await pool.pause("drain")
            assert running.done()
            assert engine.paused

    virtually(story())


def test_a_pause_whose_caller_was_cancelled_takes_effect():
    async def story() -> None:
        engine = SluggishEngine(pause=0.2)
        async with ReplicaPool({"a": lambda: engine}, options=OPTIONS) as pool:
            pausing = asyncio.ensure_future(pool.pause())
            await asyncio.sleep(0.05)
            pausing.cancel()
            await asyncio.sleep(0.2)
            assert engine.paused
            await pool.resume()
            assert await collect(pool, "r", 3) == "length"

    virtually(story())


@pytest.mark.parametrize("mode", ["abort", "drain"])
def test_a_cancelled_pause_pauses_the_engines_once_their_requests_have_ended(mode: PauseMode):
    async def story() -> None:
        engine = SluggishEngine(abort=1.0)
        async with ReplicaPool({"a": lambda: engine}, options=OPTIONS) as pool:
            running = asyncio.ensure_future(collect(pool, "r", 200))
            await asyncio.sleep(0.1)
            pausing = asyncio.ensure_future(pool.pause(mode))
            await asyncio.sleep(0.1)
            pausing.cancel()
            await asyncio.wait([pausing])
            assert pausing.cancelled()
            assert await running == ("abort" if mode == "abort" else "length")
            assert engine.paused

    virtually(story())


def test_a_cancelled_drain_is_undone():
    async def story() -> None:
        async with ReplicaPool(dict.fromkeys("ab", SluggishEngine), options=OPTIONS) as pool:
            running = [asyncio.ensure_future(collect(pool, f"r{number}", 500)) for number in range(2)]
            await asyncio.sleep(0.1)
            first, second = (asyncio.ensure_future(pool.drain("a")) for _ in range(2))
            await asyncio.sleep(0.1)
            first.cancel()
            await asyncio.wait([first])
            assert [status.state for status in pool.replicas()] == ["draining", "healthy"], "the other goes on"
            second.cancel()
            await asyncio.wait([second])
            assert [status.state for status in pool.replicas()] == ["healthy", "healthy"]
            await asyncio.gather(*running)

    virtually(story())


# -------------------------------------------------------------------------------------------- replicas that begin


def test_a_resume_while_a_joining_engine_is_paused_reaches_it():
    async def story() -> None:
        engine = SluggishEngine(pause=0.5)
        async with ReplicaPool({"b": SluggishEngine}, options=OPTIONS) as pool:
            await pool.pause()
            await pool.add("a", lambda: engine)
            await asyncio.sleep(0.4)
            assert engine.paused
            await pool.resume()
            await pool.remove("b")
            assert await collect(pool, "r", 3) == "length"
            assert engine.calls == ["start", "start", "pause", "pause", "resume", "resume"]

    virtually(story())


def test_a_joining_engine_that_hangs_in_its_pause_is_given_up():
    async def story() -> None:
        engines: list[SluggishEngine] = []

        def make() -> SluggishEngine:
            engines.append(SluggishEngine() if engines else SluggishEngine(pause=1e9))
            return engines[-1]

        async with ReplicaPool({"b": SluggishEngine}, options=OPTIONS) as pool:
            await pool.pause()
            await pool.add("a", make)
            await asyncio.sleep(20.0)
            assert engines[0].calls[-1] == "close"
            assert engines[1].paused
            assert [status.state for status in pool.replicas()] == ["healthy", "healthy"]

    virtually(story())


def test_a_start_ends_when_the_pool_is_closed_meanwhile():
    async def story() -> None:
        pool = ReplicaPool({name: lambda: SluggishEngine(start=3.0) for name in "ab"}, options=OPTIONS)
        starting = asyncio.ensure_future(pool.start())
        await asyncio.sleep(1.0)
        await pool.close()
        with pytest.raises(EngineClosedError, match="closed"):
            await starting

    virtually(story())


def test_a_start_ends_when_the_pool_breaks_meanwhile():
    class BrokenEngine(EchoEngine):
        async def start(self) -> None:
            await asyncio.sleep(1.0)
            await super().start()

        @property
        def weight_version(self) -> int:
            raise RuntimeError("a defect")

    async def story() -> None:
        pool = ReplicaPool({"a": BrokenEngine, "b": lambda: SluggishEngine(start=3.0)}, options=OPTIONS)
        with pytest.raises(EngineClosedError, match="broke") as caught:
            await pool.start()
        assert isinstance(caught.value.__cause__, ExceptionGroup)
        with pytest.raises(ExceptionGroup):
            await pool.close()

    virtually(story())


def test_a_start_does_not_wait_for_a_replica_that_is_removed():
    async def story() -> None:
        pool = ReplicaPool({"a": lambda: SluggishEngine(start=3.0), "b": SluggishEngine}, options=OPTIONS)
        starting = asyncio.ensure_future(pool.start())
        await asyncio.sleep(1.0)
        await pool.remove("a")
        await starting
        assert [status.name for status in pool.replicas()] == ["b"]
        await pool.close()

    virtually(story())


@pytest.mark.parametrize("error", [RuntimeError("double free"), asyncio.CancelledError("double free")])
def test_an_engine_that_cannot_be_closed_costs_no_other(caplog: pytest.LogCaptureFixture, error: BaseException):
    class UnclosableEngine(SluggishEngine):
        async def close(self) -> None:
            raise error

    async def story() -> None:
        engines: list[SluggishEngine] = []

        def make() -> SluggishEngine:
            engines.append(SluggishEngine() if engines else UnclosableEngine())
            return engines[-1]

        async with ReplicaPool({"a": make, "b": SluggishEngine}, options=OPTIONS) as pool:
            engines[0].healthy = False
            await asyncio.sleep(10.0)
            assert [status.state for status in pool.replicas()] == ["healthy", "healthy"]
            assert len(engines) == 2
            assert await collect(pool, "r", 3) == "length"

    virtually(story())
    assert "replica a was not closed: double free" in caplog.text


def test_an_engine_whose_end_cannot_be_awaited_costs_no_other(faulty_fleet: Any):
    async def story() -> None:
        fleet = faulty_fleet()
        async with ReplicaPool({name: fleet.factory(name) for name in "ab"}, options=OPTIONS) as pool:

            async def fails() -> str:
                raise WorkerError("wait_ended raised MemoryError on rank 0")

            fleet["a"].wait_ended = fails
            fleet["a"].die()
            fleet["b"].wait_ended = fails
            await pool.remove("a")
            await pool.add("a", lambda: unawaitable(fleet.factory("a")(), fails))
            await asyncio.sleep(1.0)
            reasons = {status.name: status.reason for status in pool.replicas()}
            assert reasons == {"a": "WorkerError: wait_ended raised MemoryError on rank 0", "b": ""}
            assert await collect(pool, "r", 3) == "length"

    virtually(story())


def unawaitable(engine: Any, wait_ended: Any) -> Any:
    engine.wait_ended = wait_ended
    return engine


@pytest.mark.filterwarnings("error")
async def test_a_set_that_is_breaking_starts_nothing():
    broken: ReplicaSet[Any] = ReplicaSet("pool", Supervision(), deadline_s=1.0)
    await broken.open(weight_version=0)
    begun, over = asyncio.Event(), asyncio.Event()

    async def ends_slowly() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            await over.wait()

    async def fails() -> None:
        await begun.wait()
        raise RuntimeError("a defect")

    broken.spawn(ends_slowly(), name="slow")
    await asyncio.wait([broken.spawn(fails(), name="defect")])
    await asyncio.sleep(0)
    with pytest.raises(EngineClosedError, match="the pool is ending"):
        broken.spawn(fails(), name="late")
    over.set()
    with pytest.raises(ExceptionGroup):
        await broken.close()
    with pytest.raises(EngineClosedError, match="the pool failed"):
        broken.spawn(fails(), name="later")


# ---------------------------------------------------------------------------------------------- replicas that leave


def test_two_removes_of_one_replica_take_out_one():
    async def story() -> None:
        first, again = SluggishEngine(close=0.5), SluggishEngine()
        async with ReplicaPool({"a": lambda: first, "b": SluggishEngine}, options=OPTIONS) as pool:
            removing = [asyncio.ensure_future(pool.remove("a")) for _ in range(2)]
            await asyncio.sleep(0.1)
            with pytest.raises(ResourceError, match="replica a is there already"):
                await pool.add("a", lambda: again)
            await asyncio.gather(*removing)
            assert first.calls[-2:] == ["close", "close"]
            await pool.add("a", lambda: again)
            await asyncio.sleep(1.0)
            assert [(status.name, status.state) for status in pool.replicas()] == [("b", "healthy"), ("a", "healthy")]

    virtually(story())


def test_two_drains_and_removes_of_one_replica():
    async def story() -> None:
        async with ReplicaPool({name: lambda: SluggishEngine(close=0.5) for name in "ab"}, options=OPTIONS) as pool:
            running = [asyncio.ensure_future(collect(pool, f"r{n}", 50)) for n in range(4)]
            await asyncio.sleep(0.1)

            async def take_out() -> None:
                await pool.drain("a")
                await pool.remove("a")

            await asyncio.gather(take_out(), take_out())
            assert [status.name for status in pool.replicas()] == ["b"]
            await asyncio.gather(*running)

    virtually(story())


def test_a_cancelled_remove_finishes():
    async def story() -> None:
        engine = SluggishEngine(close=0.5)
        async with ReplicaPool({"a": lambda: engine, "b": SluggishEngine}, options=OPTIONS) as pool:
            removing = asyncio.ensure_future(pool.remove("a"))
            await asyncio.sleep(0.1)
            removing.cancel()
            await asyncio.sleep(1.0)
            assert removing.cancelled()
            assert engine.calls[-2:] == ["close", "close"]
            assert [status.name for status in pool.replicas()] == ["b"]
            await pool.add("a", SluggishEngine)

    virtually(story())


def test_a_replica_that_is_removed_before_it_began_is_gone():
    async def story() -> None:
        async with ReplicaPool({"b": SluggishEngine}, options=OPTIONS) as pool:
            await pool.add("a", SluggishEngine)
            await pool.remove("a")
            assert [status.name for status in pool.replicas()] == ["b"]

    virtually(story())


def test_closing_the_pool_lets_a_remove_close_its_engine():
    async def story() -> None:
        engine = SluggishEngine(close=0.5)
        async with ReplicaPool({"a": lambda: engine, "b": SluggishEngine}, options=OPTIONS) as pool:
            removing = asyncio.ensure_future(pool.remove("a"))
            await asyncio.sleep(0.1)
        assert engine.calls == ["start", "start", "close", "close"]
        assert not engine.statistics().running
        await removing

    virtually(story())


@pytest.mark.parametrize(("close_s", "ends_s"), [(0.5, 0.5), (1e9, 1.0)])
def test_closing_the_pool_lets_a_dead_replica_close_its_engine(close_s: float, ends_s: float):
    async def story() -> None:
        loop = asyncio.get_running_loop()
        engine = SluggishEngine(close=close_s)
        async with ReplicaPool({"a": lambda: engine, "b": SluggishEngine}, options=OPTIONS):
            engine.healthy = False
            while "close" not in engine.calls:
                await asyncio.sleep(0.01)
            died_s = loop.time()
        assert loop.time() - died_s == pytest.approx(ends_s, abs=0.02)
        assert (engine.calls[-2:] == ["close", "close"]) == (close_s < 1.0)

    virtually(story())
