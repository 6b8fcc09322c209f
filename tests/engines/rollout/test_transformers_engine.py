"""The embedded engine keeps the contract of RolloutEngine: tokens, log-probs, ends, pauses, failures."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import uvloop
from blockbuster import blockbuster_ctx
from msgspec.structs import replace

from asyncrl.errors import ConfigError, EngineClosedError, EngineError, InvalidDataError
from asyncrl.interfaces import Generation, GenerationChunk, GenerationRequest, RolloutEngine, SessionEngine
from engines.rollout.transformers.engine import TransformersEngine

Collect = Callable[..., Any]
RequestOf = Callable[..., GenerationRequest]
FolderOf = Callable[..., Path]


@contextlib.asynccontextmanager
async def serving(folder: Path, **options: Any) -> AsyncIterator[TransformersEngine]:
    engine = TransformersEngine(str(folder), **{"device": "cpu", "threads": 1, **options})
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


@pytest.fixture
async def engine(folder_of: FolderOf) -> AsyncIterator[TransformersEngine]:
    async with serving(folder_of(), max_running_requests=4) as made:
        yield made


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


async def first_chunk(stream: Any) -> GenerationChunk:
    chunk: GenerationChunk = await anext(stream)
    return chunk


async def reaches(engine: TransformersEngine, tokens: int) -> None:
    while engine.statistics().tokens_generated < tokens:
        await engine._call(lambda: None)  # the next boundary between two steps


SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"temperature": 1.4, "top_k": 5},
    {"top_p": 0.7},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.8},
]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
async def test_log_probs_are_those_of_a_plain_forward_pass(
    folder_of: FolderOf, collect: Collect, request_of: RequestOf, plain_log_probs: Any, kind: str
) -> None:
    folder = folder_of(kind)
    model = load(folder)
    dice = random.Random(kind)
    requests = [
        request_of(i, [dice.randrange(67) for _ in range(dice.randint(1, 60))], dice.randint(1, 50), **SAMPLINGS[i % 6])
        for i in range(30)
    ]
    async with (
        serving(folder, max_running_requests=7, prefill_tokens_per_step=32) as engine,
        asyncio.TaskGroup() as group,
    ):
        tasks = [group.create_task(collect(engine, r)) for r in requests[:10]]
        # The others join while these run.
        await collect(engine, request_of("first", [1, 2], 5))
        tasks += [group.create_task(collect(engine, r)) for r in requests[10:]]
    for request, task in zip(requests, tasks, strict=True):
        got: Generation = task.result()
        assert len(got.token_ids) == request.sampling.max_new_tokens
        assert got.finish_reason == "length"
        assert set(got.weight_versions) == {0}
        expected = plain_log_probs(model, request, got.token_ids)
        assert got.log_probs == pytest.approx(expected, abs=1e-4), request.sampling


@pytest.mark.parametrize("capacity_tokens", [None, 144])
async def test_turns_of_sessions_read_what_is_new_and_give_the_same(
    folder_of: FolderOf, collect: Collect, request_of: RequestOf, plain_log_probs: Any, capacity_tokens: int | None
) -> None:
    """Four sessions side by side, with a cache that holds all of them or little more than one."""
    folder = folder_of("llama")
    model = load(folder)

    async def play(engine: TransformersEngine, name: str) -> None:
        dice = random.Random(name)
        context: list[int] = []
        for turn in range(3):
            context += [dice.randrange(67) for _ in range(20)]
            request = replace(request_of(f"{name}-{turn}", context, 12), session=name)
            got: Generation = await collect(engine, request)
            expected = plain_log_probs(model, request, got.token_ids)
            assert got.log_probs == pytest.approx(expected, abs=1e-4)
            context += got.token_ids

    async with serving(folder, max_model_tokens=128) as sized:
        block_bytes = sized._running().decoder.cache.block_bytes
    size = None if capacity_tokens is None else (1 + capacity_tokens // 16) * block_bytes
    async with serving(folder, max_model_tokens=128, kv_cache_bytes=size) as engine:
        async with asyncio.TaskGroup() as group:
            for name in "abcd":
                group.create_task(play(engine, name))
        schedule = engine._running().schedule
        if size is None:
            assert schedule.reused_tokens == 4 * (31 + 63), "all but the last token of the two turns before"
            assert engine.statistics().kv_cache_tokens == 4 * 96, "six blocks hold 95 tokens"
        else:
            assert schedule.reused_tokens < 4 * (31 + 63)
            assert 0 < engine.statistics().kv_cache_tokens <= engine.statistics().kv_cache_capacity_tokens
        for name in "abcd":
            engine.forget_session(name)
        await engine._call(lambda: None)
        assert engine.statistics().kv_cache_tokens == 0
        assert isinstance(engine, SessionEngine)


async def test_two_groups_read_their_system_prompt_and_each_its_own_once_and_give_the_same(
    folder_of: FolderOf, collect: Collect, request_of: RequestOf, plain_log_probs: Any
) -> None:
    folder = folder_of("qwen3")
    model = load(folder)
    dice = random.Random(0)
    system = [dice.randrange(67) for _ in range(40)]
    prompts = [[*system, *(dice.randrange(67) for _ in range(length))] for length in (30, 25)]
    requests = [request_of(f"{at}-{i}", prompt, 12) for at, prompt in enumerate(prompts) for i in range(4)]
    async with serving(folder, prefill_tokens_per_step=32) as engine:
        await engine.pause()
        tasks = [asyncio.ensure_future(collect(engine, request)) for request in requests]
        await asyncio.sleep(0)
        await engine.resume()
        done: list[Generation] = await asyncio.gather(*tasks)
        assert engine._running().schedule.reused_tokens == 3 * 64 + 32 + 3 * 64, "in blocks of 16"
        assert engine.statistics().kv_cache_tokens == 0
    assert len({got.token_ids for got in done}) == 8
    for request, got in zip(requests, done, strict=True):
        expected = plain_log_probs(model, request, got.token_ids)
        assert got.log_probs == pytest.approx(expected, abs=1e-4)


async def test_it_is_a_rollout_engine(engine: TransformersEngine) -> None:
    assert isinstance(engine, RolloutEngine)


async def test_a_stop_token_is_delivered_and_ends(
    engine: TransformersEngine, collect: Collect, request_of: RequestOf
) -> None:
    free: Generation = await collect(engine, request_of("free", [5, 6], 20, temperature=0.0))
    third = free.token_ids[2]
    first = free.token_ids.index(third)
    got: Generation = await collect(engine, request_of("a", [5, 6], 20, temperature=0.0, stop_token_ids=(third,)))
    assert got.token_ids == free.token_ids[: first + 1]
    assert got.finish_reason == "stop"


async def test_the_models_own_end_of_sequence(folder_of: FolderOf, collect: Collect, request_of: RequestOf) -> None:
    async with serving(folder_of(eos_token_id=list(range(0, 67, 2)))) as engine:
        got: Generation = await collect(engine, request_of("a", [5, 6], 100))
    assert got.finish_reason == "stop"
    assert [token % 2 for token in got.token_ids] == [1] * (len(got.token_ids) - 1) + [0]


async def test_the_context_is_a_limit_too(engine: TransformersEngine, collect: Collect, request_of: RequestOf) -> None:
    got: Generation = await collect(engine, request_of("a", [1] * 250, 100))
    assert len(got.token_ids) == 6
    assert got.finish_reason == "length"


@pytest.fixture(scope="session")
def folder_with_tokenizer(folder_of: FolderOf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The llama, with a vocabulary in which every token is one character."""
    import shutil

    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("spelling") / "model"
    shutil.copytree(folder_of(), folder)
    letters = [chr(ord("0") + i) for i in range(67)]
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


async def test_stop_strings(folder_with_tokenizer: Path, collect: Collect, request_of: RequestOf) -> None:
    async with serving(folder_with_tokenizer) as engine:
        free: Generation = await collect(engine, request_of("free", [5, 6], 30, seed=1))
        text = "".join(chr(ord("0") + token) for token in free.token_ids)
        stop = text[10:13]
        got: Generation = await collect(engine, request_of("a", [5, 6], 30, seed=1, stop=("\x00", stop)))
        end = text.index(stop) + 3
        assert got.token_ids == free.token_ids[:end]
        assert got.finish_reason == "stop"


@pytest.mark.parametrize(
    ("prompt", "sampling", "words"),
    [
        ([], {}, "empty prompt"),
        ([1, 67], {}, "holds token id 67; the vocabulary is 0..66"),
        ([-1], {}, "holds token id -1"),
        ([1] * 256, {}, "leaves no room to generate in a context of 256"),
        ([1], {"stop": ("x",)}, "has no tokenizer"),
    ],
)
async def test_what_cannot_be_generated_is_refused(
    engine: TransformersEngine, collect: Collect, request_of: RequestOf, prompt: list[int], sampling: Any, words: str
) -> None:
    with pytest.raises(InvalidDataError, match=words):
        await collect(engine, request_of("a", prompt, 5, **sampling))
    assert engine.statistics().waiting == 0


async def test_ids_are_unique_among_the_requests_held(
    engine: TransformersEngine, collect: Collect, request_of: RequestOf
) -> None:
    stream = engine.generate(request_of("a", [1], 200))
    await first_chunk(stream)
    with pytest.raises(InvalidDataError, match="already being generated"):
        await collect(engine, request_of("a", [1], 5))
    await stream.aclose()  # type: ignore[attr-defined]
    assert len((await collect(engine, request_of("a", [1], 5))).token_ids) == 5


async def test_seeds_make_a_request_repeatable_beside_any_neighbours(
    folder_of: FolderOf, collect: Collect, request_of: RequestOf
) -> None:
    async with serving(folder_of()) as engine:
        alone: Generation = await collect(engine, request_of("a", [3, 4], 40, seed=11, temperature=1.5))
        crowd = [collect(engine, request_of(i, [i + 1] * (i + 1), 30, seed=i)) for i in range(9)]
        among: Generation
        among, *_ = await asyncio.gather(collect(engine, request_of("a", [3, 4], 40, seed=11, temperature=1.5)), *crowd)
        other: Generation = await collect(engine, request_of("a", [3, 4], 40, seed=12, temperature=1.5))
    assert alone.token_ids == among.token_ids
    assert alone.token_ids != other.token_ids


async def test_without_seeds_the_engines_seed_decides(
    folder_of: FolderOf, collect: Collect, request_of: RequestOf
) -> None:
    async def run(seed: int) -> list[tuple[int, ...]]:
        async with serving(folder_of(), seed=seed) as engine:
            done = await asyncio.gather(*(collect(engine, request_of(i, [1, 2], 12)) for i in range(5)))
        return [got.token_ids for got in done]

    first = await run(1)
    assert first == await run(1)
    assert first != await run(2)
    assert len(set(first)) == 5


async def test_requests_that_come_together_join_one_step_in_order(
    folder_of: FolderOf, collect: Collect, request_of: RequestOf
) -> None:
    async with serving(folder_of(), max_running_requests=2) as engine:
        order: list[str] = []

        async def run(name: str) -> None:
            await collect(engine, request_of(name, [1], 4))
            order.append(name)

        await engine.pause()
        running = [asyncio.ensure_future(run(name)) for name in "abcd"]
        await asyncio.sleep(0)
        await engine.resume()
        await asyncio.gather(*running)
        assert order == list("abcd")
        assert engine.statistics().decode_steps == 8  # 4 tokens, two by two


async def test_abort_delivers_the_tokens_sampled_so_far(engine: TransformersEngine, request_of: RequestOf) -> None:
    tokens: list[int] = []
    reason = None
    async for chunk in engine.generate(request_of("a", [1, 2], 200)):
        tokens += chunk.token_ids
        reason = chunk.finish_reason
        if len(tokens) >= 3 and reason is None:
            assert await engine.abort("a") is True
            assert await engine.abort("a") is False
    assert reason == "abort"
    assert 3 <= len(tokens) < 200
    assert await engine.abort("a") is False
    statistics = engine.statistics()
    assert (statistics.requests_aborted, statistics.requests_finished) == (1, 0)
    assert statistics.tokens_generated == len(tokens)


async def test_abort_of_a_request_that_waits(
    engine: TransformersEngine, collect: Collect, request_of: RequestOf
) -> None:
    running = [engine.generate(request_of(i, [1], 200)) for i in range(4)]
    for stream in running:
        await first_chunk(stream)
    waiting = asyncio.ensure_future(collect(engine, request_of("w", [1], 5)))
    await asyncio.sleep(0)
    assert engine.statistics().waiting == 1
    assert await engine.abort("w")
    got: Generation = await waiting
    assert (got.token_ids, got.finish_reason) == ((), "abort")
    for stream in running:
        await stream.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", ["aclose", "cancel", "break"])
async def test_closing_a_stream_early_frees_the_slot(
    engine: TransformersEngine, collect: Collect, request_of: RequestOf, how: str
) -> None:
    if how == "aclose":
        stream = engine.generate(request_of("a", [1], 200))
        await first_chunk(stream)
        await stream.aclose()  # type: ignore[attr-defined]
    elif how == "cancel":
        started = asyncio.Event()

        async def read() -> None:
            async for _ in engine.generate(request_of("a", [1], 200)):
                started.set()

        task = asyncio.ensure_future(read())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        async for _ in engine.generate(request_of("a", [1], 200)):
            break
        await asyncio.sleep(0)  # the forgotten generator is closed by the loop's next turn
    await collect(engine, request_of("b", [1], 3))
    statistics = engine.statistics()
    assert statistics.running == statistics.waiting == 0
    assert statistics.requests_aborted == 1


async def test_a_reader_that_does_not_read_costs_nothing_and_loses_nothing(
    engine: TransformersEngine, collect: Collect, request_of: RequestOf
) -> None:
    slow = engine.generate(request_of("slow", [1, 2, 3], 100))
    got = [await first_chunk(slow)]
    await collect(engine, request_of("quick", [1], 150))
    got += [chunk async for chunk in slow]
    assert sum(len(chunk.token_ids) for chunk in got) == 100
    assert len(got) == 2, "what was not read came in one piece"


async def test_a_kept_request_goes_on_after_resume(
    engine: TransformersEngine, collect: Collect, request_of: RequestOf, folder_of: FolderOf, plain_log_probs: Any
) -> None:
    request = request_of("a", [7, 8, 9], 60)
    reading = asyncio.ensure_future(collect(engine, request))
    await reaches(engine, 3)
    await engine.pause()
    frozen = engine.statistics()
    late = asyncio.ensure_future(collect(engine, request_of("b", [1], 2)))
    for _ in range(20):
        await asyncio.sleep(0)
    now = engine.statistics()
    assert now.tokens_generated == frozen.tokens_generated
    assert now.paused
    assert (now.running, now.waiting) == (1, 1)
    assert not reading.done()
    await engine.resume()
    await engine.resume()
    got: Generation = await reading
    assert len((await late).token_ids) == 2
    assert not engine.statistics().paused
    expected = plain_log_probs(load(folder_of()), request, got.token_ids)
    assert got.log_probs == pytest.approx(expected, abs=1e-4)


async def test_health_is_a_real_token(engine: TransformersEngine, request_of: RequestOf) -> None:
    running = [engine.generate(request_of(i, [1], 250)) for i in range(4)]
    for stream in running:
        await first_chunk(stream)
    before = engine.statistics()
    health = await engine.health(30.0)
    assert health.healthy, health.error
    assert health.weight_version == 0
    after = engine.statistics()
    assert after.decode_steps > before.decode_steps
    assert after.requests_finished == 0, "a probe is no request"
    for stream in running:
        await stream.aclose()  # type: ignore[attr-defined]


async def test_health_of_an_engine_that_is_paused_or_closed(engine: TransformersEngine) -> None:
    await engine.pause()
    health = await engine.health(30.0)
    assert not health.healthy
    assert "paused" in health.error
    await engine.resume()
    assert (await engine.health(30.0)).healthy
    await engine.close()
    assert "closed" in (await engine.health(30.0)).error


async def test_health_has_a_deadline(engine: TransformersEngine) -> None:
    health = await engine.health(0.0)
    assert not health.healthy
    assert "no token within 0.0 s" in health.error


async def test_a_failing_step_ends_every_request(
    engine: TransformersEngine, collect: Collect, request_of: RequestOf
) -> None:
    assert engine._generation is not None
    decoder = engine._generation.decoder

    def broken(_: object) -> torch.Tensor:
        raise RuntimeError("out of luck")

    reading = [asyncio.ensure_future(collect(engine, request_of(i, [1], 50))) for i in range(6)]
    await reaches(engine, 4)
    decoder.read = broken  # type: ignore[method-assign]
    for failure in await asyncio.gather(*reading, return_exceptions=True):
        assert isinstance(failure, EngineError)
        assert "RuntimeError: out of luck" in str(failure)
    with pytest.raises(EngineError, match="out of luck"):
        await collect(engine, request_of("a", [1], 5))
    assert "out of luck" in (await engine.health(5.0)).error


async def test_a_failing_event_ends_every_request(
    engine: TransformersEngine, collect: Collect, request_of: RequestOf
) -> None:
    def broken() -> None:
        raise RuntimeError("out of luck")

    reading = asyncio.ensure_future(collect(engine, request_of("a", [1], 200)))
    await reaches(engine, 1)
    engine._post(broken)
    with pytest.raises(EngineError, match="RuntimeError: out of luck"):
        await reading


async def test_weights_that_are_not_numbers_cost_the_request_not_the_engine(
    engine: TransformersEngine, collect: Collect, request_of: RequestOf, folder_of: FolderOf
) -> None:
    good = {name: tensor.clone() for name, tensor in load(folder_of()).named_parameters()}
    bad = {name: torch.full_like(tensor, float("nan")) for name, tensor in good.items()}
    before: Generation = await collect(engine, request_of("a", [1, 2, 3], 20, seed=1))
    await engine.prepare_weights(bad, version=1)
    await engine.commit_weights(1)
    with pytest.raises(EngineError, match="not finite under weight version 1"):
        await collect(engine, request_of("long", [1] * 40, 20))  # its slot must not spoil the next row's
    await engine.prepare_weights(good, version=2)
    await engine.commit_weights(2)
    after: Generation = await collect(engine, request_of("a", [1, 2, 3], 20, seed=1))
    assert after.token_ids == before.token_ids
    assert after.log_probs == pytest.approx(before.log_probs, abs=1e-5)


async def test_a_commit_that_is_cancelled_before_it_began_does_not_happen(
    engine: TransformersEngine, folder_of: FolderOf
) -> None:
    weights = {name: tensor.clone() for name, tensor in load(folder_of()).named_parameters()}
    await engine.prepare_weights(weights, version=1)
    stop, stepping = threading.Event(), engine._stepping
    assert stepping is not None
    stepping.post(lambda: (stop.wait(10.0), None)[1])  # a long step
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.commit_weights(1), 0.05)
    stop.set()
    await engine.resume()  # behind whatever was posted
    assert engine.weight_version == 0
    await engine.prepare_weights(weights, version=1)
    await engine.commit_weights(1)
    assert engine.weight_version == 1


async def test_a_commit_that_is_cancelled_after_it_began_has_happened(
    engine: TransformersEngine, folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {name: tensor.clone() for name, tensor in load(folder_of()).named_parameters()}
    await engine.prepare_weights(weights, version=1)
    generation = engine._generation
    assert generation is not None
    commit, began = generation.commit, threading.Event()

    def slowly(*arguments: Any, **options: Any) -> None:
        began.set()
        time.sleep(0.2)
        commit(*arguments, **options)

    monkeypatch.setattr(generation, "commit", slowly)
    committing = asyncio.ensure_future(engine.commit_weights(1))
    await asyncio.to_thread(began.wait, 10.0)
    committing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await committing
    assert engine.weight_version == 1


async def test_close_ends_every_request(engine: TransformersEngine, collect: Collect, request_of: RequestOf) -> None:
    reading = [asyncio.ensure_future(collect(engine, request_of(i, [1], 250))) for i in range(6)]
    await asyncio.sleep(0)
    await asyncio.gather(engine.close(), engine.close())
    for failure in await asyncio.gather(*reading, return_exceptions=True):
        assert isinstance(failure, EngineClosedError)
    for call in (
        lambda: collect(engine, request_of("a", [1], 5)),
        lambda: engine.abort("a"),
        engine.pause,
        engine.resume,
        engine.start,
        lambda: engine.prepare_weights({}, version=1),
        lambda: engine.commit_weights(1),
    ):
        with pytest.raises(EngineClosedError):
            await call()
    await engine.close()


async def test_the_tokens_of_prompts_are_scored_in_pieces_and_after_a_preemption(
    folder_of: FolderOf, collect: Collect, request_of: RequestOf
) -> None:
    folder = folder_of()
    model = load(folder)
    dice = random.Random(7)
    prompts = [[dice.randrange(67) for _ in range(length)] for length in (1, 2, 40, 90, 120)]
    async with serving(folder, max_running_requests=4, prefill_tokens_per_step=16) as engine:
        got = await asyncio.gather(
            *(collect(engine, request_of(i, p, 5, prompt_log_probs=2, temperature=0.5)) for i, p in enumerate(prompts)),
            *(collect(engine, request_of(f"plain {i}", p, 5)) for i, p in enumerate(prompts)),
        )
    for prompt, scored, plain in zip(prompts, got[:5], got[5:], strict=True):
        assert (plain.prompt_log_probs, plain.prompt_top_log_probs) == ((), ())
        log_probs = (
            model(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)
        )  # temperature 1, whatever is asked
        expected = [0.0, *(float(log_probs[at, token]) for at, token in enumerate(prompt[1:]))]
        assert scored.prompt_log_probs == pytest.approx(expected, abs=1e-4)
        assert len(scored.prompt_top_log_probs) == len(prompt)
        for at, top in enumerate(scored.prompt_top_log_probs[1:]):
            values, tokens = log_probs[at].topk(2)
            assert [token for token, _ in top] == tokens.tolist()
            assert [value for _, value in top] == pytest.approx(values.tolist(), abs=1e-4)


async def test_statistics_count(folder_of: FolderOf, collect: Collect, request_of: RequestOf) -> None:
    async with serving(folder_of(), max_running_requests=2) as engine:
        generation = engine._running()
        carry_out = generation.step

        def step() -> None:
            carry_out()
            if generation.counters.decode_steps == 4:
                generation.schedule.pause()

        generation.step = step  # type: ignore[method-assign]
        await engine.pause()
        streams = [engine.generate(request_of(i, [1] * 10, 20)) for i in range(3)]
        first, second, third = (asyncio.ensure_future(first_chunk(stream)) for stream in streams)
        await asyncio.sleep(0)
        await engine.resume()
        while not engine.statistics().paused:
            await asyncio.sleep(0)
        await asyncio.gather(first, second)
        now = engine.statistics()
        assert (now.running, now.waiting, now.paused) == (2, 1, True)
        assert now.tokens_generated == 2 * now.decode_steps == 8
        assert now.prompt_tokens == 20
        assert now.kv_cache_tokens == 2 * 16  # a block for each, of 14 tokens
        assert now.kv_cache_capacity_tokens == 3 * 256  # two rows and a probe
        third.cancel()
        await asyncio.gather(third, return_exceptions=True)  # its abort is carried out before the resume
        await engine.resume()
        for stream in streams[:2]:
            async for _ in stream:
                pass
        done = engine.statistics()
        assert (done.running, done.waiting, done.kv_cache_tokens) == (0, 0, 0)
        assert (done.requests_finished, done.requests_aborted) == (2, 1)
        assert done.tokens_generated == 40
        assert done.decode_steps == 20
        assert done.busy_s > 0.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"max_running_requests": 0}, "max_running_requests must be at least 1"),
        ({"prefill_tokens_per_step": 0}, "prefill_tokens_per_step must be at least 1"),
        ({"threads": 0}, "threads must be at least 1"),
    ],
)
def test_options_that_cannot_be_used(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TransformersEngine("somewhere", **options)


async def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    engine = TransformersEngine(str(tmp_path / "nothing"))
    with pytest.raises(EngineError, match="has not been started"):
        engine.statistics()
    with pytest.raises(EngineError, match="cannot load"):
        await engine.start()
    await engine.close()


def test_importing_the_engine_loads_no_transformers() -> None:
    code = "import sys, engines.rollout.transformers.engine; print('transformers' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_the_event_loop_is_never_blocked(
    loop: Any, folder_of: FolderOf, collect: Collect, request_of: RequestOf
) -> None:
    folder = folder_of()
    tensors = {name: tensor.clone() for name, tensor in load(folder).named_parameters()}

    async def story() -> None:
        async with serving(folder, max_running_requests=3) as engine:
            reading = [asyncio.ensure_future(collect(engine, request_of(i, [1, 2], 30))) for i in range(8)]
            await engine.prepare_weights(tensors, version=1)
            await engine.commit_weights(1, kv_cache="recompute")
            await engine.pause()
            await engine.resume()
            await engine.abort("7")
            assert (await engine.health(30.0)).healthy
            done = await asyncio.gather(*reading)
            assert sum(len(got.token_ids) for got in done) == engine.statistics().tokens_generated

    with asyncio.Runner(loop_factory=loop) as runner, blockbuster_ctx():
        runner.run(story())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.5)])
async def test_on_a_gpu(
    folder_of: FolderOf, collect: Collect, request_of: RequestOf, plain_log_probs: Any, dtype: str, tolerance: float
) -> None:
    folder = folder_of("qwen3")
    model = load(folder)
    requests = [request_of(i, list(range(1, 2 + 5 * i)), 40, **SAMPLINGS[i % 6]) for i in range(12)]
    async with serving(folder, device="cuda", dtype=dtype, max_running_requests=5) as engine:
        tasks = [asyncio.ensure_future(collect(engine, request)) for request in requests]
        tensors = {name: tensor.clone() for name, tensor in model.named_parameters()}
        await engine.prepare_weights(tensors, version=1)
        await engine.commit_weights(1, kv_cache="recompute")
        done: list[Generation] = await asyncio.gather(*tasks)
    for request, got in zip(requests, done, strict=True):
        expected = plain_log_probs(model, request, got.token_ids)
        if request.sampling.top_p == 1.0 and request.sampling.top_k == 0:
            # Truncation under another rounding may cut elsewhere; without it the numbers can be compared.
            assert got.log_probs == pytest.approx(expected, abs=tolerance)
        assert len(got.token_ids) == 40
