"""Pauses of the SGLang engine, to the step: SGLang is played here, and samples when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from asyncrl.interfaces import Generation, GenerationRequest, PauseMode
from engines.rollout.sglang_adapter.intake import RowIntake
from engines.rollout.sglang_adapter.request import SGLangRequest
from engines.rollout.sglang_engine import SGLangEngine

RequestOf = Callable[..., GenerationRequest]
Collect = Callable[..., Any]


class FakeSGLang:
    """SGLang's control and its manager: an endless queue until :meth:`sample`, then all tokens at once."""

    def __init__(self) -> None:
        self.manager = self
        self.frozen = False
        self.aborted: list[str] = []
        self._samples = asyncio.Event()
        self._version = 0

    async def generate_request(self, asked: tuple[str, int], _request: None) -> AsyncIterator[dict[str, Any]]:
        _, tokens = asked
        await self._samples.wait()
        told = {
            "completion_tokens": tokens,
            "output_token_logprobs": [(-1.0,)] * tokens,
            "weight_versions": [{"version": self._version, "start": 0, "end": tokens}],
            "finish_reason": {"type": "length"},
        }
        yield {"output_ids": [1] * tokens, "meta_info": told}

    def sample(self) -> None:
        self._samples.set()

    def abort_request(self, name: str) -> None:
        self.aborted.append(name)

    async def freeze(self, mode: str) -> None:
        self.frozen = True

    async def heard(self) -> None:
        pass

    async def thaw(self) -> None:
        self.frozen = False

    async def load(self, named: Any, *, version: int, flush: bool) -> None:
        assert self.frozen
        self._version = version


class FakeStaged:
    """Weights that are always there."""

    def staged(self, version: int) -> list[Any]:
        return []

    def committed(self, version: int) -> None:
        pass


@pytest.fixture
def asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(held: SGLangRequest, number: int, *, salt: str, options: Any) -> tuple[str, int]:
        held.asked_as = f"{number}."
        return held.asked_as, held.row.length_limit - len(held.row.tokens)

    monkeypatch.setattr(SGLangRequest, "ask", ask)


async def made() -> tuple[SGLangEngine, FakeSGLang]:
    engine, sglang = SGLangEngine("model"), FakeSGLang()
    parts: Any = (sglang, FakeStaged())
    engine._sglang, engine._staged = parts
    engine._intake = RowIntake(
        model_path="model", vocabulary=10, context_tokens=100, tokenizer=None, stop_token_ids=frozenset()
    )
    return engine, sglang


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.usefixtures("asks")
async def test_a_request_begun_again_by_a_commit_goes_on_in_a_drain(request_of: RequestOf, collect: Collect) -> None:
    engine, sglang = await made()
    queued = asyncio.ensure_future(collect(engine, request_of("queued", [1], 4)))
    await settled()
    draining = asyncio.ensure_future(engine.pause("drain"))
    await settled()
    later = asyncio.ensure_future(collect(engine, request_of("later", [1], 4)))
    await engine.commit_weights(1)
    sglang.sample()
    async with asyncio.timeout(5):
        await draining
        got: Generation = await queued
    assert (got.finish_reason, got.weight_versions) == ("length", (1,) * 4)
    assert sglang.frozen
    assert not later.done()
    await engine.resume()
    assert (await later).finish_reason == "length"


@pytest.mark.usefixtures("asks")
@pytest.mark.parametrize("by", ["abort", "pause"])
async def test_an_aborted_request_is_not_begun_again_by_a_commit(
    request_of: RequestOf, collect: Collect, by: str
) -> None:
    engine, sglang = await made()
    queued = asyncio.ensure_future(collect(engine, request_of("queued", [1], 4)))
    await settled()
    if by == "abort":
        assert await engine.abort("queued")
    pausing = asyncio.ensure_future(engine.pause("abort")) if by == "pause" else None
    await settled()
    assert sglang.aborted == ["0."], "told, and not echoed yet"
    await engine.commit_weights(1)
    async with asyncio.timeout(5):
        got: Generation = await queued
        if pausing is not None:
            await pausing
    assert (got.finish_reason, got.token_ids) == ("abort", ())


@pytest.mark.usefixtures("asks")
async def test_a_drain_after_a_pause_lets_what_has_come_finish(request_of: RequestOf, collect: Collect) -> None:
    engine, sglang = await made()
    kept = asyncio.ensure_future(collect(engine, request_of("kept", [1], 4)))
    await settled()
    await engine.pause("keep")
    waiting = asyncio.ensure_future(collect(engine, request_of("waiting", [1], 4)))
    await settled()
    draining = asyncio.ensure_future(engine.pause("drain"))
    await settled()
    assert (draining.done(), sglang.frozen) == (False, False)
    later = asyncio.ensure_future(collect(engine, request_of("later", [1], 4)))
    sglang.sample()
    async with asyncio.timeout(5):
        await draining
        done: list[Generation] = await asyncio.gather(kept, waiting)
    assert [got.finish_reason for got in done] == ["length", "length"]
    assert sglang.frozen
    await settled()
    assert not later.done()
    await engine.resume()
    assert (await later).finish_reason == "length"


@pytest.mark.usefixtures("asks")
@pytest.mark.parametrize("ended_by", [None, "keep", "abort"])
async def test_what_ends_the_wait_of_a_drain(
    request_of: RequestOf, collect: Collect, ended_by: PauseMode | None
) -> None:
    engine, sglang = await made()
    queued = asyncio.ensure_future(collect(engine, request_of("queued", [1], 4)))
    await settled()
    draining = asyncio.ensure_future(engine.pause("drain"))
    await settled()
    ending = asyncio.ensure_future(engine.resume() if ended_by is None else engine.pause(ended_by))
    await settled()
    if ended_by == "abort":
        assert not draining.done()
        assert not ending.done()
        engine._held["queued"].end_here()  # SGLang's echo
    async with asyncio.timeout(5):
        await draining
        await ending
    assert sglang.frozen == (ended_by is not None)
    await engine.resume()
    sglang.sample()
    assert (await queued).finish_reason == ("abort" if ended_by == "abort" else "length")
