"""The scripted engine keeps the contract that real engines keep."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from asyncrl.errors import EngineClosedError, InvalidDataError, WeightMismatchError, WeightVersionError
from asyncrl.interfaces import Generation, GenerationRequest, RolloutEngine, SamplingParams
from asyncrl.testing import EchoFactory, ScriptedEngine


def request(name: str = "r", prompt: tuple[int, ...] = (1, 2), **sampling: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(**({"max_new_tokens": 8} | sampling))
    )


async def generate(engine: ScriptedEngine, asked: GenerationRequest) -> Generation:
    chunks = [chunk async for chunk in engine.generate(asked)]
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])
    assert chunks[-1].finish_reason is not None
    return Generation(
        token_ids=tuple(t for chunk in chunks for t in chunk.token_ids),
        log_probs=tuple(p for chunk in chunks for p in chunk.log_probs),
        weight_versions=tuple(v for chunk in chunks for v in chunk.weight_versions),
        finish_reason=chunks[-1].finish_reason,
    )


async def counting(**options: Any) -> ScriptedEngine:
    """Counts upwards from the last token of the prompt, without end."""
    engine = ScriptedEngine(lambda prompt: range(prompt[-1] + 1, prompt[-1] + 100), **options)
    await engine.start()
    return engine


async def decoded(engine: ScriptedEngine, tokens: int) -> None:
    while engine.statistics().tokens_generated < tokens:
        await asyncio.sleep(0)


async def test_it_is_a_rollout_engine() -> None:
    engine = await counting()
    assert isinstance(engine, RolloutEngine)
    assert await generate(engine, request(max_new_tokens=3)) == Generation(
        token_ids=(3, 4, 5), log_probs=(-0.5,) * 3, weight_versions=(0,) * 3, finish_reason="length"
    )
    stopped = await generate(engine, request(stop_token_ids=(4,)))
    assert (stopped.token_ids, stopped.finish_reason) == ((3, 4), "stop")
    statistics = engine.statistics()
    assert (statistics.tokens_generated, statistics.prompt_tokens, statistics.requests_finished) == (5, 4, 2)
    assert (statistics.running, statistics.kv_cache_tokens) == (0, 0)


async def test_requests_that_cannot_be_served() -> None:
    engine = await counting(context_tokens=4)
    for bad in (request(prompt=()), request(prompt=(1, 2, 3, 4))):
        with pytest.raises(InvalidDataError):
            await generate(engine, bad)
    async with contextlib.aclosing(engine.generate(request("same"))) as held:
        await anext(held)
        with pytest.raises(InvalidDataError, match="in use"):
            await generate(engine, request("same"))
    assert engine.statistics().running == 0
    await generate(engine, request("same"))


async def test_a_pause_freezes_requests_and_weights_change_beneath_them() -> None:
    engine = await counting()
    task = asyncio.ensure_future(generate(engine, request()))
    await decoded(engine, 3)
    await engine.pause()
    for _ in range(20):
        await asyncio.sleep(0)
    held = engine.statistics().tokens_generated
    late = asyncio.ensure_future(generate(engine, request("late")))
    await engine.prepare_weights({}, version=5)
    await engine.commit_weights(5)
    await asyncio.sleep(0)
    assert engine.statistics().tokens_generated == held
    assert (engine.statistics().running, engine.statistics().waiting) == (1, 1)
    await engine.resume()
    assert (await task).weight_versions == (0,) * held + (5,) * (8 - held)
    assert (await late).weight_versions == (5,) * 8


async def test_an_abort_delivers_what_there_is() -> None:
    engine = await counting()
    task = asyncio.ensure_future(generate(engine, request()))
    await decoded(engine, 2)
    assert await engine.abort(request().request_id)
    generation = await task
    assert generation.finish_reason == "abort"
    assert generation.token_ids == (3, 4, 5, 6, 7, 8, 9, 10)[: len(generation.token_ids)]
    assert engine.statistics().requests_aborted == 1


async def test_abort_of_an_unknown_request_is_false() -> None:
    engine = await counting()
    assert not await engine.abort("unknown")


async def test_weights_follow_their_versions() -> None:
    engine = await counting(weight_version=2, parameters=frozenset({"w"}))
    with pytest.raises(WeightVersionError, match="not newer"):
        await engine.prepare_weights({}, version=2)
    with pytest.raises(WeightMismatchError, match="'w'"):
        await engine.prepare_weights({}, version=3)
    with pytest.raises(WeightVersionError, match="cannot be committed"):
        await engine.commit_weights(3)
    assert engine.weight_version == 2


async def test_close_ends_everything_and_health_reports_it() -> None:
    engine = await counting()
    assert (await engine.health(1.0)).healthy
    engine.healthy = False
    assert (await engine.health(1.0)).error == "set to be unhealthy"
    engine.healthy = True
    await engine.pause()
    assert (await engine.health(0.01)).error == "no token within 0.01 s"
    waiting = asyncio.ensure_future(generate(engine, request()))
    await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(EngineClosedError):
        await waiting
    with pytest.raises(EngineClosedError):
        await engine.resume()
    assert not (await engine.health(1.0)).healthy
    await engine.close()


async def test_echo_tasks_of_the_splits_differ() -> None:
    factory = EchoFactory(turns=2)
    train = {factory.task(i, split="train")["word"] for i in range(50)}
    assert not train & {factory.task(i, split="held_out")["word"] for i in range(50)}
    environment = factory.make()
    (question,) = await environment.reset({"word": "hey", "turns": 2})
    assert (await environment.step({"role": "assistant", "content": "ho"})).reward == 0.0
    last = await environment.step({"role": "assistant", "content": question["content"]})
    assert (last.reward, last.done) == (1.0, True)
