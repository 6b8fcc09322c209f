"""Pauses of the SGLang engine, step by step, with a fake SGLang that samples and answers when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from asyncrl.errors import EngineClosedError, EngineError, WeightError
from asyncrl.interfaces import Generation, GenerationRequest
from engines.rollout.request import ModelTokens
from engines.rollout.sglang.engine import SGLangEngine
from engines.rollout.sglang.request import SGLangRequest

RequestOf = Callable[..., GenerationRequest]
Collect = Callable[..., Any]


class FakeSGLang:
    """SGLang's control and its manager: an endless queue until :meth:`sample`, then all tokens at once.

    Orders named ``slow`` wait for ``answers``, those in ``refused`` fail, and one that is cancelled has no effect.
    """

    def __init__(self) -> None:
        self.manager = self
        self.slow, self.refused = "", set[str]()
        self.ordered, self.answers = asyncio.Event(), asyncio.Event()
        self.adapters: list[str] = []
        self.frozen = False
        self.log_prob = -1.0
        self.orders = 0
        self.aborted: list[str] = []
        self._samples = asyncio.Event()
        self._version = 0

    async def generate_request(self, order: tuple[str, int], _request: None) -> AsyncIterator[dict[str, Any]]:
        _, tokens = order
        self.orders += 1
        try:
            await self._samples.wait()
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
        info = {
            "completion_tokens": tokens,
            "output_token_logprobs": [(self.log_prob,)] * tokens,
            "weight_versions": [{"version": self._version, "start": 0, "end": tokens}],
            "finish_reason": {"type": "length"},
        }
        yield {"output_ids": [1] * tokens, "meta_info": info}

    def sample(self) -> None:
        self._samples.set()

    def abort_request(self, name: str) -> None:
        self.aborted.append(name)

    async def _order(self, name: str) -> None:
        if name == self.slow:
            self.ordered.set()
            await self.answers.wait()
        if name in self.refused:
            raise WeightError(f"no {name}")

    async def close(self) -> None:
        pass

    async def freeze(self, mode: str) -> None:
        await self._order("freeze")
        self.frozen = True

    async def wait_carried_out(self) -> None:
        pass

    async def release_memory(self) -> None:
        pass

    async def thaw(self) -> None:
        await self._order("thaw")
        self.frozen = False

    async def load(self, named: Any, *, version: int, flush: bool) -> None:
        assert self.frozen
        await self._order("load")
        self._version = version

    async def load_adapter(self, name: str, adapter: Any, tensors: Any) -> None:
        assert name not in self.adapters
        await self._order(f"load {name}")
        self.adapters.append(name)

    async def unload_adapter(self, name: str) -> None:
        await self._order(f"unload {name}")
        self.adapters.remove(name)


class FakeStaged:
    """Weights that are always prepared."""

    def staged(self, version: int) -> list[Any]:
        return []

    def committed(self, version: int) -> None:
        pass


class FakeAdapters:
    """Adapters "a" and "b", of which a commit changes "a"."""

    def __init__(self) -> None:
        self.serving = {"a": 1, "b": 1}

    def version_of(self, name: str, *, at: int) -> int:
        return self.serving.get(name, at)

    def check(self, _: Any) -> None:
        pass

    def committed(self, _: list[Any]) -> frozenset[str]:
        self.serving = {"a": 2, "b": 1}
        return frozenset({"a"})


@pytest.fixture
def plain_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    def order(held: SGLangRequest, number: int, **_: Any) -> tuple[str, int]:
        held.sglang_id = f"{number}."
        return held.sglang_id, held.row.length_limit - len(held.row.tokens)

    monkeypatch.setattr(SGLangRequest, "order", order)


async def made(**options: Any) -> tuple[SGLangEngine, FakeSGLang]:
    engine, sglang = SGLangEngine("model", **options), FakeSGLang()
    parts: Any = (sglang, FakeStaged())
    engine._sglang, engine._staged = parts
    engine._ended = asyncio.get_running_loop().create_future()
    engine._model_tokens = ModelTokens("model", None, vocabulary=10, max_model_tokens=100)
    return engine, sglang


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.usefixtures("plain_orders")
async def test_a_commit_in_a_pause_restarts_what_is_queued(request_of: RequestOf, collect: Collect) -> None:
    engine, sglang = await made()
    queued = asyncio.ensure_future(collect(engine, request_of("queued", [1], 4)))
    await settled()
    await engine.pause()
    later = asyncio.ensure_future(collect(engine, request_of("later", [1], 4)))
    await engine.commit_weights(1)
    sglang.sample()
    await settled()
    assert sglang.frozen
    assert not queued.done()
    assert not later.done()
    await engine.resume()
    assert not sglang.frozen
    async with asyncio.timeout(5):
        done: list[Generation] = await asyncio.gather(queued, later)
    assert [(got.finish_reason, got.weight_versions) for got in done] == [("length", (1,) * 4)] * 2


@pytest.mark.usefixtures("plain_orders")
async def test_a_commit_does_not_restart_an_aborted_request(request_of: RequestOf, collect: Collect) -> None:
    engine, sglang = await made()
    queued = asyncio.ensure_future(collect(engine, request_of("queued", [1], 4)))
    await settled()
    assert await engine.abort("queued")
    assert sglang.aborted == ["0."], "ordered, and not echoed yet"
    await engine.commit_weights(1)
    async with asyncio.timeout(5):
        got: Generation = await queued
    assert (got.finish_reason, got.token_ids) == ("abort", ())


@pytest.mark.parametrize("order", ["pause", "sleep"])
@pytest.mark.usefixtures("plain_orders")
async def test_what_stops_after_an_abort_leaves_no_request_waiting(
    request_of: RequestOf, collect: Collect, order: str
) -> None:
    engine, sglang = await made(sleep_mode=True)
    running = asyncio.ensure_future(collect(engine, request_of("running", [1], 4)))
    await settled()
    engine._held["running"].row.append(1, -1.0, 0)
    assert await engine.abort("running")
    assert sglang.aborted == ["0."], "ordered, and it takes another step"
    await getattr(engine, order)()
    async with asyncio.timeout(5):
        got: Generation = await running
    assert (got.finish_reason, got.token_ids) == ("abort", (1,))


@pytest.mark.usefixtures("plain_orders")
async def test_a_request_that_begins_again_keeps_its_place(request_of: RequestOf, collect: Collect) -> None:
    engine, sglang = await made(max_running_requests=1)
    adapters: Any = FakeAdapters()
    engine._adapters = adapters
    first = asyncio.ensure_future(collect(engine, replace(request_of("first", [1], 4), adapter="a")))
    await settled()
    second = asyncio.ensure_future(collect(engine, replace(request_of("second", [1], 4), adapter="b")))
    engine._prepared = (2, [])
    await engine.commit_weights(2)
    await settled()
    assert sglang.orders == 2, "both of the first request: the second waits for its end"
    sglang.sample()
    async with asyncio.timeout(5):
        done: list[Generation] = await asyncio.gather(first, second)
    assert [got.weight_versions for got in done] == [(2,) * 4, (1,) * 4]
    assert not engine._begun


async def cancelled_before_the_answer(sglang: FakeSGLang, order: Awaitable[None], *, slow: str) -> None:
    sglang.slow = slow
    calling = asyncio.ensure_future(order)
    await sglang.ordered.wait()
    calling.cancel()
    await settled()
    sglang.answers.set()
    with pytest.raises(asyncio.CancelledError):
        await calling


@pytest.mark.parametrize("slow", ["freeze", "load", "thaw"])
@pytest.mark.usefixtures("plain_orders")
async def test_a_commit_that_is_cancelled_after_it_began_has_happened(
    request_of: RequestOf, collect: Collect, slow: str
) -> None:
    engine, sglang = await made()
    running = asyncio.ensure_future(collect(engine, request_of("running", [1], 4)))
    await settled()
    await cancelled_before_the_answer(sglang, engine.commit_weights(1), slow=slow)
    assert (engine.weight_version, sglang.frozen) == (1, False)
    sglang.sample()
    async with asyncio.timeout(5):
        got: Generation = await running
    assert got.weight_versions == (1,) * 4


@pytest.mark.usefixtures("plain_orders")
async def test_a_commit_that_did_not_begin_to_load_costs_no_request(request_of: RequestOf, collect: Collect) -> None:
    engine, sglang = await made()
    running = asyncio.ensure_future(collect(engine, request_of("running", [1], 4)))
    await settled()
    sglang.refused, sglang.frozen = {"freeze"}, True  # it was taken, and its answer is lost
    with pytest.raises(WeightError, match="no freeze"):
        await engine.commit_weights(1)
    assert not sglang.frozen
    sglang.sample()
    async with asyncio.timeout(5):
        got: Generation = await running
    assert got.weight_versions == (0,) * 4


@pytest.mark.usefixtures("plain_orders")
async def test_sglang_that_answers_neither_freeze_nor_thaw_serves_nothing(
    request_of: RequestOf, collect: Collect
) -> None:
    engine, sglang = await made()
    running = asyncio.ensure_future(collect(engine, request_of("running", [1], 4)))
    await settled()
    sglang.refused = {"freeze", "thaw"}
    with pytest.raises(WeightError, match="no freeze"):
        await engine.commit_weights(1)
    async with asyncio.timeout(5):
        with pytest.raises(EngineError, match="it stopped to load version 1, and does not go on"):
            await running
    sglang.refused = set()
    await engine.commit_weights(1)
    sglang.sample()
    async with asyncio.timeout(5):
        assert (await collect(engine, request_of("later", [1], 4))).weight_versions == (1,) * 4


async def test_a_pause_and_a_resume_that_are_cancelled_have_happened() -> None:
    engine, sglang = await made()
    await cancelled_before_the_answer(sglang, engine.pause(), slow="freeze")
    assert (sglang.frozen, engine._paused) == (True, True)
    sglang.ordered.clear()
    sglang.answers.clear()
    await cancelled_before_the_answer(sglang, engine.resume(), slow="thaw")
    assert (sglang.frozen, engine._paused) == (False, False)


async def test_an_adapter_is_freed_though_the_caller_that_ordered_it_is_cancelled() -> None:
    engine, sglang = await made()
    adapters: Any = FakeAdapters()
    engine._adapters, engine._replaced, sglang.adapters = adapters, ["a@1"], ["a@1"]
    parts: Any = [(SimpleNamespace(adapter=None), {})]
    sglang.slow = "unload a@1"
    preparing = asyncio.ensure_future(engine.prepare_adapters(parts, version=2))
    await sglang.ordered.wait()
    preparing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await preparing
    later = asyncio.ensure_future(engine.prepare_adapters(parts, version=3))
    await settled()
    assert not later.done(), "SGLang loads none meanwhile"
    sglang.answers.set()
    await later
    assert sglang.adapters == []


async def test_an_adapter_that_cannot_be_freed_in_a_pause_is_not_waited_for() -> None:
    engine, sglang = await made()
    adapters: Any = FakeAdapters()
    engine._adapters, engine._replaced, sglang.adapters = adapters, ["a@1"], ["a@1"]
    parts: Any = [(SimpleNamespace(adapter=None), {})]
    sglang.slow = "unload a@1"
    preparing = asyncio.ensure_future(engine.prepare_adapters(parts, version=2))
    await sglang.ordered.wait()
    preparing.cancel()
    await engine.pause()
    with pytest.raises(WeightError, match=r"an adapter that was replaced is freed first.*resume\(\) it"):
        await asyncio.wait_for(engine.prepare_adapters(parts, version=3), 5)
    await engine.resume()
    sglang.answers.set()
    await engine.prepare_adapters(parts, version=3)
    assert sglang.adapters == []


async def test_a_commit_of_adapters_that_fails_can_be_repeated() -> None:
    engine, sglang = await made()
    adapters: Any = FakeAdapters()
    engine._adapters, sglang.adapters = adapters, ["a@1", "b@1"]
    parts = [(SimpleNamespace(version=2, adapter=SimpleNamespace(name=name)), {}) for name in "ac"]
    prepared: Any = (2, parts)
    engine._prepared, sglang.refused = prepared, {"load c@2"}
    with pytest.raises(WeightError, match="no load c@2"):
        await engine.commit_weights(2)
    assert (sglang.adapters, engine.weight_version) == (["a@1", "b@1"], 0)
    sglang.refused = set()
    await engine.commit_weights(2)
    assert (sglang.adapters, engine._replaced) == (["a@1", "b@1", "a@2", "c@2"], ["a@1"])


async def test_a_commit_of_adapters_that_fails_says_why_though_its_cleanup_fails_too() -> None:
    engine, sglang = await made()
    adapters: Any = FakeAdapters()
    parts = [(SimpleNamespace(version=2, adapter=SimpleNamespace(name=name)), {}) for name in "abc"]
    prepared: Any = (2, parts)
    engine._adapters, engine._prepared, sglang.refused = adapters, prepared, {"load c@2", "unload a@2"}
    with pytest.raises(WeightError, match="no load c@2"):
        await engine.commit_weights(2)
    assert sglang.adapters == ["a@2"], "b@2 is freed all the same"
    sglang.refused = set()
    await engine.prepare_adapters([(SimpleNamespace(adapter=None), {})], version=2)  # type: ignore[list-item]
    engine._prepared = prepared
    await engine.commit_weights(2)
    assert sglang.adapters == ["a@2", "b@2", "c@2"]


@pytest.mark.parametrize("slow", ["freeze", "load", "thaw"])
async def test_orders_that_sglang_never_answers_end_with_the_engine(slow: str) -> None:
    engine, sglang = await made()
    sglang.slow = slow
    given_up, waiting = (asyncio.ensure_future(each) for each in (engine.commit_weights(1), engine.pause()))
    await sglang.ordered.wait()
    given_up.cancel()
    await settled()
    assert not given_up.done(), "a commit that has begun is finished"
    await engine.close()
    await settled()
    ended = [each.done() for each in (given_up, waiting)]
    sglang.answers.set()
    found = await asyncio.gather(given_up, waiting, return_exceptions=True)
    assert (ended, [type(each) for each in found]) == ([True, True], [asyncio.CancelledError, EngineClosedError])


@pytest.mark.usefixtures("plain_orders")
async def test_requests_without_a_seed_get_different_ones(request_of: RequestOf, collect: Collect) -> None:
    seeds: list[list[int]] = []
    for _ in range(2):
        engine, _sglang = await made(deterministic=True, seed=3)
        asked = [request_of(f"{n}", [1], 4, seed=0 if n == 2 else None) for n in range(3)]
        collecting = [asyncio.ensure_future(collect(engine, each)) for each in asked]
        await settled()
        seeds.append([held.row.seed for held in engine._held.values()])
        for each in collecting:
            each.cancel()
        await asyncio.wait(collecting)
    assert seeds[0] == seeds[1]
    assert seeds[0][0] != seeds[0][1]
    assert seeds[0][2] == 0


@pytest.mark.usefixtures("plain_orders")
async def test_log_probs_that_are_not_finite_are_an_error(request_of: RequestOf, collect: Collect) -> None:
    engine, sglang = await made()
    sglang.log_prob = float("nan")
    sglang.sample()
    with pytest.raises(EngineError, match="not finite under weight version 0"):
        await collect(engine, request_of("wrong", [1], 4))
