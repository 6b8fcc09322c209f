"""Pauses of the SGLang engine, step by step, with a fake SGLang that samples when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from asyncrl.interfaces import Generation, GenerationRequest
from engines.rollout.request import ModelTokens
from engines.rollout.sglang.engine import SGLangEngine
from engines.rollout.sglang.request import SGLangRequest

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

    async def generate_request(self, order: tuple[str, int], _request: None) -> AsyncIterator[dict[str, Any]]:
        _, tokens = order
        await self._samples.wait()
        info = {
            "completion_tokens": tokens,
            "output_token_logprobs": [(-1.0,)] * tokens,
            "weight_versions": [{"version": self._version, "start": 0, "end": tokens}],
            "finish_reason": {"type": "length"},
        }
        yield {"output_ids": [1] * tokens, "meta_info": info}

    def sample(self) -> None:
        self._samples.set()

    def abort_request(self, name: str) -> None:
        self.aborted.append(name)

    async def freeze(self, mode: str) -> None:
        self.frozen = True

    async def wait_carried_out(self) -> None:
        pass

    async def thaw(self) -> None:
        self.frozen = False

    async def load(self, named: Any, *, version: int, flush: bool) -> None:
        assert self.frozen
        self._version = version


class FakeStaged:
    """Weights that are always prepared."""

    def staged(self, version: int) -> list[Any]:
        return []

    def committed(self, version: int) -> None:
        pass


@pytest.fixture
def plain_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    def order(held: SGLangRequest, number: int, **_: Any) -> tuple[str, int]:
        held.sglang_id = f"{number}."
        return held.sglang_id, held.row.length_limit - len(held.row.tokens)

    monkeypatch.setattr(SGLangRequest, "order", order)


async def made() -> tuple[SGLangEngine, FakeSGLang]:
    engine, sglang = SGLangEngine("model"), FakeSGLang()
    parts: Any = (sglang, FakeStaged())
    engine._sglang, engine._staged = parts
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
