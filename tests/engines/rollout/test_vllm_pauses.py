"""Pauses of the vLLM engine that are cancelled half-way, with a fake vLLM whose orders take effect at once and are
answered when the test says so; and a start that fails before vLLM's first request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.errors import EngineError, LiveWeightsError
from engines.rollout.vllm.engine import VLLMEngine
from engines.rollout.vllm.weights import NOT_PROVEN


class FakeLLM:
    """AsyncLLM, as far as pauses and updates use it."""

    def __init__(self) -> None:
        self.stopped = False
        self.answers = asyncio.Event()
        self.answers.set()
        self.ordered = asyncio.Event()
        self.output_handler: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        await self._order(stopped=True)

    async def resume_generation(self) -> None:
        await self._order(stopped=False)

    async def sleep(self, *, level: int, mode: str) -> None:
        await self._order(stopped=True)

    async def wake_up(self) -> None:
        await self._order(stopped=False)

    async def abort(self, request_ids: list[str], *, internal: bool) -> None:
        assert (request_ids, internal) == ([], True)

    async def _order(self, *, stopped: bool) -> None:
        self.stopped = stopped
        self.ordered.set()
        await self.answers.wait()


class FakeUpdates:
    """Records whether vLLM was paused when weights were loaded."""

    def __init__(self, llm: FakeLLM) -> None:
        self.llm = llm
        self.loaded_while_stopped: list[bool] = []

    def check(self, version: int) -> None:
        pass

    async def load(self, version: int) -> None:
        self.loaded_while_stopped.append(self.llm.stopped)


class Waiting:
    """A request that waits for its admission."""

    def __init__(self) -> None:
        self.admission: asyncio.Future[bool] = asyncio.get_running_loop().create_future()


def made() -> tuple[VLLMEngine, FakeLLM, FakeUpdates]:
    engine, llm = VLLMEngine("model", sleep_mode=True), FakeLLM()
    updates = FakeUpdates(llm)
    parts: Any = (SimpleNamespace(llm=llm), updates)
    engine._started, engine._updates = parts
    return engine, llm, updates


async def cancelled_before_the_answer(llm: FakeLLM, order: Awaitable[None]) -> None:
    llm.ordered.clear()
    llm.answers.clear()
    calling = asyncio.ensure_future(order)
    await llm.ordered.wait()
    for _ in range(3):
        calling.cancel()
        await asyncio.sleep(0)
    llm.answers.set()
    with pytest.raises(asyncio.CancelledError):
        await calling


async def test_after_a_cancelled_resume_a_pause_stops_and_a_commit_loads_into_a_stopped_model() -> None:
    engine, llm, updates = made()
    await engine.pause()
    await cancelled_before_the_answer(llm, engine.resume())
    await engine.pause()
    assert llm.stopped
    await engine.commit_weights(1)
    assert updates.loaded_while_stopped == [True]
    assert llm.stopped, "it stays paused"


@pytest.mark.parametrize(("stop", "go_on"), [("pause", "resume"), ("sleep", "wake")])
async def test_what_waits_begins_also_after_a_cancelled_resume_or_wake(stop: str, go_on: str) -> None:
    engine, llm, _ = made()
    await getattr(engine, stop)()
    held: Any = Waiting()
    engine._queue.arrive(held, probe=False)
    engine._admit()
    assert not held.admission.done()
    await cancelled_before_the_answer(llm, getattr(engine, go_on)())
    assert held.admission.result()


async def test_after_a_cancelled_pause_a_resume_goes_on() -> None:
    engine, llm, _ = made()
    await cancelled_before_the_answer(llm, engine.pause())
    assert llm.stopped
    await engine.resume()
    assert not llm.stopped


async def test_a_commit_pauses_vllm_even_if_it_should_be_paused() -> None:
    engine, llm, updates = made()
    await engine.pause()
    llm.stopped = False
    await engine.commit_weights(1)
    await engine.resume()
    await engine.commit_weights(2)
    assert updates.loaded_while_stopped == [True, True]
    assert not llm.stopped


@pytest.mark.parametrize("cancelled", [False, True])
async def test_an_order_ends_when_vllm_ends_before_it_answers(cancelled: bool) -> None:
    engine, llm, _ = made()
    llm.answers.clear()
    pausing = asyncio.ensure_future(engine.pause())
    await llm.ordered.wait()
    llm.output_handler.set_result(None)
    if cancelled:
        pausing.cancel()
    with pytest.raises(asyncio.CancelledError if cancelled else EngineError):
        await asyncio.wait_for(pausing, 5)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (f"Call to finish_weight_update method failed: {NOT_PROVEN}parameter w of weight version 1", LiveWeightsError),
        ("Worker failed with error 'CUDA out of memory'", EngineError),
    ],
)
async def test_an_engine_that_has_loaded_half_of_a_version_or_cannot_prove_it_is_lost(
    monkeypatch: pytest.MonkeyPatch, said: str, kind: type[Exception]
) -> None:
    engine, _, updates = made()

    async def load(version: int) -> None:
        raise Exception(said)

    monkeypatch.setattr(updates, "load", load)
    with pytest.raises(kind, match="weight version 1 was loaded in part"):
        await engine.commit_weights(1)
    with pytest.raises(EngineError, match="weight version 1 was loaded in part"):
        await engine.pause()


async def test_a_start_that_fails_before_the_first_request_says_why_and_shuts_vllm_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shut: list[bool] = []

    async def update_weight_version(version: str) -> None:
        raise RuntimeError("the engine core died")

    llm = SimpleNamespace(
        output_handler=None, update_weight_version=update_weight_version, shutdown=lambda: shut.append(True)
    )
    monkeypatch.setattr("engines.rollout.vllm.engine.start", lambda settings, folder: SimpleNamespace(llm=llm))
    with pytest.raises(EngineError, match="vLLM did not start: RuntimeError: the engine core died"):
        await VLLMEngine("model").start()
    assert shut == [True]
