"""New weights while requests are in flight: where the cut is, what each side of it was computed from, nothing lost."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncrl.errors import WeightMismatchError, WeightVersionError
from asyncrl.interfaces import (
    Generation,
    GenerationRequest,
    KVCachePolicy,
    RolloutEngineStatistics,
    SleepingEngine,
    VersionSpan,
)
from asyncrl.rollout.replica import fetch_into
from engines.rollout.transformers.engine import TransformersEngine
from engines.weights.shared_memory import SharedMemoryTransport

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


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.named_parameters()}


async def reaches(engine: TransformersEngine, tokens: int) -> None:
    while engine.statistics().tokens_generated < tokens:
        await engine._call(lambda: None)  # the next boundary between two steps


def commit_when(
    engine: TransformersEngine, reached: Callable[[RolloutEngineStatistics], bool], *, kv_cache: KVCachePolicy
) -> None:
    """Commit version 1 in the engine's thread, before the first step with such statistics."""
    generation = engine._running()
    step = generation.step

    def watched_step() -> None:
        if engine.weight_version == 0 and reached(engine.statistics()):
            generation.commit(1, kv_cache=kv_cache)
        step()

    generation.step = watched_step  # type: ignore[method-assign]


@pytest.mark.parametrize("kv_cache", ["keep", "recompute"])
@pytest.mark.parametrize(("kind", "tied", "alike"), [("llama", False, 0), ("qwen3", True, 0), ("llama", False, 40)])
async def test_both_sides_of_the_cut_are_exact(
    folder_of: FolderOf,
    collect: Collect,
    request_of: RequestOf,
    plain_log_probs: Any,
    mixed_log_probs: Any,
    kv_cache: KVCachePolicy,
    kind: str,
    tied: bool,
    alike: int,
) -> None:
    """The first ``alike`` tokens of all prompts are the same."""
    folder = folder_of(kind, tied=tied)
    models = [load(folder), load(folder_of(kind, seed=1, tied=tied)), load(folder_of(kind, seed=2, tied=tied))]
    dice = random.Random(7)
    begin = [dice.randrange(67) for _ in range(alike)]
    requests = [
        request_of(i, begin + [dice.randrange(67) for _ in range(dice.randint(1, 30))], dice.randint(40, 70))
        for i in range(9)
    ]
    # Five run, four wait; a small prefill budget lets recomputed rows come back one after the other.
    async with serving(folder, max_running_requests=5, prefill_tokens_per_step=48) as engine:
        tasks = [asyncio.ensure_future(collect(engine, r)) for r in requests]
        for version in (1, 2):
            await engine.prepare_weights(tensors_of(models[version]), version=version)
            await reaches(engine, 70 * version)
            await engine.commit_weights(version, kv_cache=kv_cache)
            assert engine.weight_version == version
        done: list[Generation] = await asyncio.gather(*tasks)
        assert bool(engine._running().schedule.reused_tokens) == bool(alike)
    assert {version for got in done for version in got.weight_versions} == {0, 1, 2}
    assert any(len(got.spans) > 1 for got in done)
    for request, got in zip(requests, done, strict=True):
        assert list(got.weight_versions) == sorted(got.weight_versions)
        assert len(got.token_ids) == request.sampling.max_new_tokens
        if kv_cache == "keep":
            expected = mixed_log_probs(models, request, got)
        else:
            by_version = [plain_log_probs(model, request, got.token_ids) for model in models]
            expected = [by_version[version][n] for n, version in enumerate(got.weight_versions)]
        assert got.log_probs == pytest.approx(expected, abs=1e-4), (request.request_id, got.spans)


@pytest.mark.parametrize("committed_at", [5, 8])
async def test_a_session_reads_everything_again_after_a_commit(
    folder_of: FolderOf, collect: Collect, request_of: RequestOf, plain_log_probs: Any, committed_at: int
) -> None:
    """The commit comes in the middle of a turn, whose cache is of both versions, or between two turns."""
    new = load(folder_of("llama", seed=1))
    async with serving(folder_of("llama", seed=0)) as engine:
        await engine.prepare_weights(tensors_of(new), version=1)
        if committed_at < 8:
            commit_when(engine, lambda statistics: statistics.tokens_generated == committed_at, kv_cache="keep")
        first: Generation = await collect(engine, replace(request_of("a", [1, 2, 3], 8), session="s"))
        if committed_at == 8:
            await engine.commit_weights(1)
        second = replace(request_of("b", [1, 2, 3, *first.token_ids, 4, 5], 8), session="s")
        got: Generation = await collect(engine, second)
    assert set(got.weight_versions) == {1}
    expected = plain_log_probs(new, second, got.token_ids)
    assert got.log_probs == pytest.approx(expected, abs=1e-4)


async def test_the_two_policies_differ(folder_of: FolderOf, collect: Collect, request_of: RequestOf) -> None:
    other = tensors_of(load(folder_of(seed=1)))
    seen: dict[str, Generation] = {}
    policies: tuple[KVCachePolicy, ...] = ("keep", "recompute")
    for kv_cache in policies:
        async with serving(folder_of()) as engine:
            await engine.prepare_weights(other, version=1)
            commit_when(engine, lambda counted: counted.tokens_generated == 10, kv_cache=kv_cache)
            seen[kv_cache] = await collect(engine, request_of("a", [1, 2, 3], 30, seed=5))
    keep, recompute = seen["keep"], seen["recompute"]
    assert keep.spans == recompute.spans
    assert [span.version for span in keep.spans] == [0, 1]
    cut = keep.spans[1].start
    assert keep.log_probs[:cut] == recompute.log_probs[:cut]
    assert max(abs(a - b) for a, b in zip(keep.log_probs[cut:], recompute.log_probs[cut:], strict=True)) > 0.01


@pytest.mark.parametrize("kv_cache", ["keep", "recompute"])
async def test_weights_that_arrive_while_paused(
    folder_of: FolderOf, collect: Collect, request_of: RequestOf, kv_cache: KVCachePolicy
) -> None:
    async with serving(folder_of()) as engine:
        task = asyncio.ensure_future(collect(engine, request_of("a", [1, 2, 3], 240)))
        await reaches(engine, 5)
        await engine.pause()
        cut = engine.statistics().tokens_generated
        await engine.prepare_weights(tensors_of(load(folder_of(seed=1))), version=3)
        await engine.commit_weights(3, kv_cache=kv_cache)
        assert engine.statistics().tokens_generated == cut
        await engine.resume()
        got: Generation = await task
    assert got.spans == (VersionSpan(version=0, start=0, end=cut), VersionSpan(version=3, start=cut, end=240))


async def test_a_prompt_half_read_at_the_cut_begins_again(
    folder_of: FolderOf, collect: Collect, request_of: RequestOf, plain_log_probs: Any
) -> None:
    other = load(folder_of(seed=1))
    request = request_of("a", [(7 * i) % 67 for i in range(200)], 5)
    async with serving(folder_of(), prefill_tokens_per_step=16) as engine:
        await engine.prepare_weights(tensors_of(other), version=1)
        commit_when(engine, lambda counted: counted.decode_steps == 4, kv_cache="keep")  # 64 tokens are read
        got: Generation = await collect(engine, request)
    assert set(got.weight_versions) == {1}
    expected = plain_log_probs(other, request, got.token_ids)
    assert got.log_probs == pytest.approx(expected, abs=1e-4)


async def test_decoding_goes_on_while_weights_are_prepared(
    folder_of: FolderOf, collect: Collect, request_of: RequestOf
) -> None:
    async with serving(folder_of()) as engine:
        task = asyncio.ensure_future(collect(engine, request_of("a", [1], 250)))
        await reaches(engine, 1)
        await engine.prepare_weights(tensors_of(load(folder_of(seed=1))), version=1)
        assert engine.weight_version == 0
        got: Generation = await task
    assert set(got.weight_versions) == {0}


async def test_what_is_refused_leaves_the_old_weights(
    folder_of: FolderOf, collect: Collect, request_of: RequestOf
) -> None:
    good = tensors_of(load(folder_of(seed=1)))
    bad = {**good, "model.norm.weight": torch.zeros(3)}
    async with serving(folder_of(), weight_version=4) as engine:
        before: Generation = await collect(engine, request_of("a", [1, 2], 20, seed=1))
        with pytest.raises(WeightMismatchError, match=r"model\.norm\.weight of version 5 has shape"):
            await engine.prepare_weights(bad, version=5)
        with pytest.raises(WeightVersionError, match="version 4 does not follow version 4"):
            await engine.prepare_weights(good, version=4)
        with pytest.raises(WeightVersionError, match="cannot commit weight version 5: none is prepared"):
            await engine.commit_weights(5)
        await engine.prepare_weights(good, version=6)
        with pytest.raises(WeightVersionError, match="cannot commit weight version 5: version 6 is prepared"):
            await engine.commit_weights(5)
        after: Generation = await collect(engine, request_of("a", [1, 2], 20, seed=1))
        assert (after.token_ids, engine.weight_version) == (before.token_ids, 4)
        assert set(after.weight_versions) == {4}
        await engine.commit_weights(6)
        assert (await collect(engine, request_of("a", [1, 2], 20, seed=1))).token_ids != before.token_ids


async def test_a_cancelled_prepare_waits_for_its_reader_and_prepares_nothing(folder_of: FolderOf) -> None:
    tensors = tensors_of(load(folder_of(seed=1)))
    async with serving(folder_of()) as engine:
        preparing = asyncio.ensure_future(engine.prepare_weights(tensors, version=1))
        await asyncio.sleep(0)
        preparing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await preparing
        for tensor in tensors.values():
            tensor.fill_(float("nan"))  # they are not read any more
        await engine.prepare_weights(tensors_of(load(folder_of(seed=2))), version=2)
        await engine.commit_weights(2)
        assert (await engine.health(30.0)).weight_version == 2


async def test_an_engine_that_sleeps_loses_nothing(
    folder_of: FolderOf, collect: Collect, request_of: RequestOf
) -> None:
    """Sleep once in the middle and once with new weights: the tokens stay the same."""
    requests = [request_of(i, [i + 1, 2, 3], 40, seed=i) for i in range(4)]
    async with serving(folder_of()) as engine:
        expected = [(await collect(engine, one)).token_ids for one in requests]
    async with serving(folder_of()) as engine:
        assert isinstance(engine, SleepingEngine)
        tasks = [asyncio.ensure_future(collect(engine, one)) for one in requests]
        await reaches(engine, 30)
        await engine.sleep()
        await engine.sleep()
        asleep = engine.statistics()
        assert engine._running().decoder.cache._memory is None
        assert "asleep" in (await engine.health(5.0)).error
        await engine.resume()
        late = asyncio.ensure_future(collect(engine, request_of("late", [9], 5, seed=1)))
        await asyncio.sleep(0.05)
        assert engine.statistics().tokens_generated == asleep.tokens_generated
        await engine.wake()
        await engine.wake()
        assert [got.token_ids for got in await asyncio.gather(*tasks)] == expected
        await late
        other = tensors_of(load(folder_of(seed=1)))
        await engine.pause()
        await engine.sleep()
        await engine.prepare_weights(other, version=1)
        await engine.wake()
        waits = asyncio.ensure_future(collect(engine, request_of("a", [1, 2], 20, seed=1)))
        await asyncio.sleep(0.05)
        assert not waits.done(), "it is still paused"
        await engine.sleep()
        await engine.commit_weights(1)
        await engine.wake()
        await engine.resume()
        got = await waits
    async with serving(folder_of(seed=1)) as fresh:
        assert got.token_ids == (await collect(fresh, request_of("a", [1, 2], 20, seed=1))).token_ids
    assert set(got.weight_versions) == {1}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
async def test_an_engine_that_sleeps_leaves_the_device(
    folder_of: FolderOf, collect: Collect, request_of: RequestOf
) -> None:
    folder = folder_of(intermediate_size=16384)  # 12 MiB: torch's allocator keeps small tensors among others

    def devices(engine: TransformersEngine) -> set[str]:
        return {live.device.type for live in engine._running().decoder.model.parameters()}

    async with serving(folder, device="cuda") as engine:
        request = request_of("a", [1, 2, 3], 40, seed=1)
        expected = await collect(engine, request)
        held = torch.cuda.memory_reserved()
        await engine.sleep()
        assert devices(engine) == {"cpu"}
        assert torch.cuda.memory_reserved() <= held - (12 << 20), "another process has to be able to take it"
        await engine.prepare_weights(tensors_of(load(folder)), version=1)
        await engine.wake()
        assert devices(engine) == {"cuda"}
        assert (await collect(engine, request)).token_ids == expected.token_ids
        await engine.commit_weights(1)
        assert devices(engine) == {"cuda"}
        assert (await collect(engine, request)).token_ids == expected.token_ids


@pytest.mark.parametrize("asked", ["sleep", "wake"])
async def test_weights_that_are_being_written_are_not_moved(folder_of: FolderOf, asked: str) -> None:
    may_go_on = threading.Event()

    class Slow(dict[str, torch.Tensor]):
        def items(self) -> Any:
            may_go_on.wait(30.0)
            return super().items()

    async with serving(folder_of()) as engine:
        if asked == "wake":
            await engine.sleep()
        preparing = asyncio.ensure_future(engine.prepare_weights(Slow(tensors_of(load(folder_of()))), version=1))
        await asyncio.sleep(0.05)
        moving = asyncio.ensure_future(getattr(engine, asked)())
        await asyncio.sleep(0.05)
        moved = moving.done()
        may_go_on.set()
        await asyncio.gather(preparing, moving)
        assert not moved


async def test_engines_of_one_host_serve_from_the_published_bytes(
    folder_of: FolderOf, collect: Collect, request_of: RequestOf, tmp_path: Path
) -> None:
    """Two engines, five versions: each generates what an engine started with the version does; two files suffice."""
    request = request_of("a", [1, 2, 3], 12, seed=1)
    publisher, *readers = (SharedMemoryTransport(namespace="host", directory=str(tmp_path)) for _ in range(3))

    def mapped() -> list[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return [line.split()[-1] for line in lines if str(tmp_path) in line]

    async with serving(folder_of()) as one, serving(folder_of()) as other:
        for version in range(1, 6):
            manifest = publisher.publish(tensors_of(load(folder_of(seed=version))).items(), version=version)
            for engine, reader in zip((one, other), readers, strict=True):
                await fetch_into(engine, manifest, transport=reader)
                await engine.commit_weights(version)
            publisher.release(version - 1)
            async with serving(folder_of(seed=version)) as fresh:
                expected = await collect(fresh, request)
            for engine in (one, other):
                got = await collect(engine, request)
                assert (got.token_ids, got.log_probs) == (expected.token_ids, expected.log_probs)
        assert len(list(tmp_path.iterdir())) == 2, "a version that is served is no obstacle to writing the one before"
        held = mapped()
        assert held.count(str(tmp_path / manifest.location)) == 3  # the publisher's and two readers'
        damaged = msgspec.structs.replace(manifest, version=9)
        with pytest.raises(WeightMismatchError):
            await fetch_into(one, damaged, transport=readers[0])
        assert (await collect(one, request)).token_ids == expected.token_ids
    publisher.close()
    for reader in readers:
        reader.close()
    gc.collect()
    assert mapped() == []


@pytest.mark.parametrize("kv_cache", ["keep", "recompute"])
async def test_every_token_is_of_the_version_it_is_labelled_with(
    telltale: tuple[Path, Callable[[int], Any]], request_of: RequestOf, collect: Collect, kv_cache: KVCachePolicy
) -> None:
    folder, weights = telltale
    dice = random.Random(3)
    running = True
    done: list[tuple[GenerationRequest, Generation]] = []
    async with serving(folder, max_running_requests=6, prefill_tokens_per_step=24) as engine:

        async def client(name: int) -> None:
            turn = 0
            while running:
                turn += 1
                request = request_of(f"{name}.{turn}", [1] * dice.randint(1, 40), dice.randint(1, 60))
                done.append((request, await collect(engine, request)))

        async with asyncio.TaskGroup() as group:
            for name in range(10):
                group.create_task(client(name))
            for version in range(1, 40):
                await engine.prepare_weights(weights(version), version=version)
                await reaches(engine, engine.statistics().tokens_generated + 30)
                await engine.commit_weights(version, kv_cache=kv_cache)
            running = False
        counted = engine.statistics().tokens_generated
    for request, got in done:
        assert got.token_ids == got.weight_versions
        assert list(got.weight_versions) == sorted(got.weight_versions)
        assert len(got.token_ids) == request.sampling.max_new_tokens
    assert sum(len(got.token_ids) for _, got in done) == counted
    assert sum(len(got.spans) > 1 for _, got in done) >= 20


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 30), st.integers(1, 12)),
        st.tuples(st.just("abort"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("leave"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("keep"), st.integers(0, 6), st.just(0)),
        st.tuples(st.just("commit keep"), st.just(0), st.just(0)),
        st.tuples(st.just("commit recompute"), st.just(0), st.just(0)),
        st.tuples(st.just("turns"), st.integers(1, 12), st.just(0)),
        st.tuples(st.just("health"), st.just(0), st.just(0)),
    ),
    min_size=4,
    max_size=30,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS, slots=st.integers(1, 3), budget=st.integers(4, 40))
def test_counters_agree_after_any_order_of_events(
    telltale: tuple[Path, Callable[[int], Any]],
    request_of: RequestOf,
    collect: Collect,
    actions: list[tuple[str, int, int]],
    slots: int,
    budget: int,
) -> None:
    folder, weights = telltale

    async def story() -> None:
        tasks: list[asyncio.Task[Generation]] = []
        limits: list[int] = []
        left: set[int] = set()
        async with serving(folder, max_running_requests=slots, prefill_tokens_per_step=budget) as engine:
            for kind, number, tokens in actions:
                if kind == "submit":
                    limits.append(tokens)
                    request = request_of(len(tasks), [1] * number, tokens)
                    tasks.append(asyncio.ensure_future(collect(engine, request)))
                elif kind == "abort":
                    await engine.abort(str(number))
                elif kind == "leave" and tasks:
                    if tasks[number % len(tasks)].cancel():
                        left.add(number % len(tasks))
                elif kind == "keep":
                    await engine.pause()
                    for _ in range(number):
                        await asyncio.sleep(0)
                    await engine.resume()
                elif kind.startswith("commit"):
                    version = engine.weight_version + 1
                    await engine.prepare_weights(weights(version), version=version)
                    policy: KVCachePolicy = "keep" if kind.endswith("keep") else "recompute"
                    await engine.commit_weights(version, kv_cache=policy)
                elif kind == "health":
                    assert (await engine.health(30.0)).healthy
                else:
                    for _ in range(number):
                        await asyncio.sleep(0)
            results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30.0)
            await engine.pause()
            statistics = engine.statistics()
        delivered = 0
        for i, got in enumerate(results):
            if isinstance(got, asyncio.CancelledError):
                assert i in left
                continue
            assert isinstance(got, Generation), got
            assert got.token_ids == got.weight_versions
            assert list(got.weight_versions) == sorted(got.weight_versions)
            assert got.finish_reason in ("length", "abort")
            assert len(got.token_ids) == limits[i] or got.finish_reason == "abort"
            delivered += len(got.token_ids)
        assert statistics.running == statistics.waiting == statistics.kv_cache_tokens == 0
        assert delivered <= statistics.tokens_generated
        if not left:
            assert delivered == statistics.tokens_generated
            assert statistics.requests_finished + statistics.requests_aborted == len(tasks)

    asyncio.run(story())
