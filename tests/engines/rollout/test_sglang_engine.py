"""SGLang as a rollout engine: exact log-probs, versions stamped by its scheduler, pauses, swaps, aborts, its end.

One SGLang is started for most of the tests, and is given one version after another.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch

from asyncrl.errors import EngineError, InvalidDataError, WeightError, WeightMismatchError, WeightVersionError
from asyncrl.interfaces import Generation, GenerationRequest, KVCachePolicy, OutOfProcessEngine, RolloutEngineStatistics
from asyncrl.io import LockedTemporaryDirectory
from asyncrl.rollout.health import HealthPolicy
from asyncrl.rollout.replica import PoolOptions, Supervision
from asyncrl.rollout.replica_pool import ReplicaPool
from asyncrl.single_controller.children import children
from asyncrl.single_controller.liveness import Liveness
from asyncrl.weights import TransportSpec, joined
from engines.rollout.remote.engine import RemoteEngine
from engines.weights.shared_memory import SharedMemoryTransport

Collect = Callable[..., Any]
RequestOf = Callable[..., GenerationRequest]
FolderOf = Callable[..., Path]

PYTHON = os.environ.get("ASYNCRL_SGLANG_PYTHON") or str(Path(__file__).parents[3] / ".venv-sglang/bin/python")
ENGINE = "engines.rollout.sglang.engine:SGLangEngine"
VOCABULARY = 67
WAIT_S = 60.0

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        shutil.which(PYTHON) is None,
        reason=f"no SGLang at {PYTHON}: asyncrl engine install sglang --cpu, or name one in ASYNCRL_SGLANG_PYTHON",
    ),
]


@dataclass
class Served:
    """An SGLang, and the transport of its weights."""

    engine: RemoteEngine
    transport: SharedMemoryTransport
    folder: Path
    versions: Iterator[int]

    async def prepare(self, tensors: dict[str, torch.Tensor]) -> int:
        version = next(self.versions)
        manifest = await asyncio.to_thread(self.transport.publish, tensors.items(), version=version)
        await self.engine.fetch_weights(manifest)
        self.transport.release(version)
        return version

    async def swap(self, tensors: dict[str, torch.Tensor], kv_cache: KVCachePolicy = "keep") -> int:
        version = await self.prepare(tensors)
        await self.engine.commit_weights(version, kv_cache=kv_cache)
        assert self.engine.weight_version == version
        return version

    async def sampled(self) -> int:
        """Return how many tokens have been sampled until now."""
        return (await current(self.engine)).tokens_generated

    async def reaches(self, tokens: int) -> None:
        """Wait until so many tokens have been sampled."""
        async with asyncio.timeout(WAIT_S):
            while await self.sampled() < tokens:
                await asyncio.sleep(0.005)


async def current(engine: RemoteEngine) -> RolloutEngineStatistics:
    await engine.abort("unknown")  # every answer brings statistics
    return engine.statistics()


@contextlib.asynccontextmanager
async def hosting(folder: Path, **options: Any) -> AsyncIterator[RemoteEngine]:
    engine = RemoteEngine(
        str(folder),
        engine=ENGINE,
        python=PYTHON,
        threads=1,
        options={"device": "cpu", "max_running_requests": 12, "kv_cache_tokens": 4096, "sleep_mode": True},
        **options,
    )
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(folder_of: FolderOf, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    shared = str(tmp_path_factory.mktemp("weights"))
    transport = SharedMemoryTransport(namespace="sglang", max_versions=3, directory=shared)
    spec = TransportSpec(name="shared_memory", namespace="sglang", options={"directory": shared})
    async with hosting(folder_of(), transport=spec) as engine:
        yield Served(engine, transport, folder_of(), count(1))
    transport.close()


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.named_parameters()}


def prompts(dice: random.Random, number: int, longest: int = 30) -> list[list[int]]:
    return [[dice.randrange(VOCABULARY) for _ in range(dice.randint(1, longest))] for _ in range(number)]


def jointly_cut(model: Any, request: GenerationRequest, tokens: tuple[int, ...]) -> list[float]:
    """SGLang takes top-k and top-p of one distribution: a token stays if both leave it there."""
    sampling, prompt = request.sampling, request.prompt_token_ids
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0].double()
    log_probs = []
    for row, token in zip(logits[len(prompt) - 1 : -1] / sampling.temperature, tokens, strict=True):
        ranked = row.softmax(-1).sort(descending=True)
        kept = (ranked.values.cumsum(-1) - ranked.values <= sampling.top_p) & (
            torch.arange(VOCABULARY) < sampling.top_k
        )
        (place,) = (ranked.indices == token).nonzero().flatten().tolist()
        assert kept[place]
        log_probs.append(float((ranked.values[place] / ranked.values[kept].sum()).log()))
    return log_probs


async def test_log_probs_are_those_of_the_distribution_sampled_from(
    served: Served, folder_of: FolderOf, request_of: RequestOf, collect: Collect, plain_log_probs: Any
) -> None:
    model = load(folder_of())
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7},
        {"temperature": 0.0},
        {"top_p": 0.8},
        {"top_k": 5},
        {"temperature": 1.3, "top_p": 0.6, "top_k": 20},
    ]
    requests = [
        request_of(f"{name}.{number}", prompt, 40, **way)
        for name, way in enumerate(ways)
        for number, prompt in enumerate(prompts(random.Random(name), 4))
    ]
    done: list[Generation] = await asyncio.gather(*(collect(served.engine, one) for one in requests))
    off: list[float] = []
    for one, got in zip(requests, done, strict=True):
        assert len(got.token_ids) == 40
        assert set(got.weight_versions) == {0}
        expected = plain_log_probs(model, one, got.token_ids)
        if one.sampling.top_k and one.sampling.top_p < 1.0:
            expected = jointly_cut(model, one, got.token_ids)
        assert got.log_probs == pytest.approx(expected, abs=1e-4)
        off += [abs(a - b) for a, b in zip(got.log_probs, expected, strict=True)]
    print(f"largest difference to transformers: {max(off):.2e}")


async def test_a_request_that_was_begun_elsewhere_and_one_that_stops(
    served: Served, folder_of: FolderOf, request_of: RequestOf, collect: Collect, plain_log_probs: Any
) -> None:
    greedy = request_of("greedy", [3, 1, 4, 1, 5], 30, temperature=0.0)
    whole: Generation = await collect(served.engine, greedy)
    moved = GenerationRequest(
        request_id="moved",
        prompt_token_ids=greedy.prompt_token_ids + whole.token_ids[:11],
        sampling=greedy.sampling,
        continued_tokens=11,
    )
    rest: Generation = await collect(served.engine, moved)
    assert rest.token_ids == whole.token_ids[11:]
    complete = GenerationRequest(
        request_id="complete",
        prompt_token_ids=greedy.prompt_token_ids + whole.token_ids,
        sampling=greedy.sampling,
        continued_tokens=30,
    )
    nothing: Generation = await collect(served.engine, complete)
    assert (nothing.token_ids, nothing.finish_reason) == ((), "length")
    stop = whole.token_ids[6]
    stopped: Generation = await collect(
        served.engine, request_of("stops", [3, 1, 4, 1, 5], 30, temperature=0.0, stop_token_ids=(stop,))
    )
    assert stopped.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert stopped.finish_reason == "stop"


async def test_requests_that_cannot_be_served_are_refused(
    served: Served, request_of: RequestOf, collect: Collect
) -> None:
    for wrong, message in (
        (request_of("a", [], 5), "empty prompt"),
        (request_of("b", [VOCABULARY], 5), "vocabulary is 0..66"),
        (request_of("c", [1] * 256, 5), "no room"),
        (request_of("d", [1], 5, stop=("x",)), "no tokenizer"),
        (request_of("e", [1], 5, grammar="start: /a+/"), "asks for a grammar"),
        (request_of("f", [1], 5, top_log_probs=3, temperature=1.0, top_p=0.5), "asks for the likeliest"),
    ):
        with pytest.raises(InvalidDataError, match=message):
            await collect(served.engine, wrong)
    got: Generation = await collect(served.engine, request_of("long", [1] * 100, 1000))
    assert got.finish_reason == "length"
    assert 100 + len(got.token_ids) >= 250


@pytest.mark.parametrize("kv_cache", ["keep", "recompute"])
async def test_both_sides_of_each_cut_are_exact(
    served: Served,
    folder_of: FolderOf,
    request_of: RequestOf,
    collect: Collect,
    plain_log_probs: Any,
    mixed_log_probs: Any,
    kv_cache: KVCachePolicy,
) -> None:
    models: dict[int, Any] = {}
    models[await served.swap(tensors_of(load(folder_of())))] = load(folder_of())
    # All begin with the same tokens: what one has computed serves the next, but never across versions.
    begin = [(7 * n) % VOCABULARY for n in range(40)]
    requests = [request_of(n, begin + prompt, 120) for n, prompt in enumerate(prompts(random.Random(3), 40))]
    others = [load(folder_of(seed=seed)) for seed in (1, 2)]
    tasks = [asyncio.ensure_future(collect(served.engine, one)) for one in requests]
    for other in others:
        await served.reaches(await served.sampled() + 400)
        await served.engine.pause()  # they are under way still, however long these weights take to come
        version = await served.prepare(tensors_of(other))
        await served.engine.resume()
        await served.engine.commit_weights(version, kv_cache=kv_cache)
        models[version] = other
    done: list[Generation] = await asyncio.gather(*tasks)
    assert {version for got in done for version in got.weight_versions} == set(models)
    assert sum(len(got.spans) > 1 for got in done) >= 12
    for one, got in zip(requests, done, strict=True):
        assert len(got.token_ids) == 120
        if kv_cache == "keep":
            expected = mixed_log_probs(models, one, got)
        else:
            by_version = {version: plain_log_probs(model, one, got.token_ids) for version, model in models.items()}
            expected = [by_version[version][n] for n, version in enumerate(got.weight_versions)]
        assert got.log_probs == pytest.approx(expected, abs=1e-4)


async def test_nothing_computed_under_older_weights_serves_a_later_request(
    served: Served, folder_of: FolderOf, request_of: RequestOf, collect: Collect, plain_log_probs: Any
) -> None:
    """With ``keep`` no cache is emptied, and equal prompts would fit its older entries."""
    prompt = [(11 * n) % VOCABULARY for n in range(120)]
    for seed in (0, 1, 2, 0):
        model = load(folder_of(seed=seed))
        version = await served.swap(tensors_of(model))
        for number in range(3):
            one = request_of(f"{version}.{number}", prompt, 20)
            got: Generation = await collect(served.engine, one)
            assert set(got.weight_versions) == {version}
            expected = plain_log_probs(model, one, got.token_ids)
            assert got.log_probs == pytest.approx(expected, abs=1e-4)


async def test_pauses(served: Served, request_of: RequestOf, collect: Collect) -> None:
    engine = served.engine
    before = await served.sampled()
    kept = asyncio.ensure_future(collect(engine, request_of("kept", [1, 2, 3], 240)))
    ended = asyncio.ensure_future(collect(engine, request_of("ended", [4, 5], 240)))
    await served.reaches(before + 20)
    await engine.pause()
    later = asyncio.ensure_future(collect(engine, request_of("later", [6], 5)))
    frozen = (await current(engine)).tokens_generated
    answer = await engine.health(5.0)
    assert (answer.healthy, "paused" in answer.error) == (False, True)
    assert await engine.abort("ended")
    assert not await engine.abort("unknown")
    got: Generation = await ended
    assert got.finish_reason == "abort"
    assert (await current(engine)).tokens_generated == frozen
    assert (await current(engine)).paused
    await engine.resume()
    done: tuple[Generation, Generation] = await asyncio.gather(kept, later)
    assert [(len(one.token_ids), one.finish_reason) for one in done] == [(240, "length"), (5, "length")]
    assert (await engine.health(WAIT_S)).healthy


async def test_sleep_and_wake(
    served: Served, folder_of: FolderOf, request_of: RequestOf, collect: Collect, plain_log_probs: Any
) -> None:
    """Running requests and queued ones go on; pause and resume are followed on waking."""
    engine = served.engine
    other = load(folder_of(seed=1))
    model_version = await served.swap(tensors_of(load(folder_of())))
    requests = [request_of(f"begun {n}", [n + 1], 60) for n in range(24)]
    before = await served.sampled()
    tasks = [asyncio.ensure_future(collect(engine, one)) for one in requests]
    await served.reaches(before + 40)
    await asyncio.gather(engine.sleep(), engine.sleep())
    assert "asleep" in (await engine.health(5.0)).error
    version = await served.prepare(tensors_of(other))
    with pytest.raises(WeightError, match="asleep"):
        await engine.commit_weights(version)
    asleep = await served.sampled()
    await engine.pause()
    await engine.resume()
    assert await engine.abort("begun 23")
    assert (await current(engine)).tokens_generated == asleep
    await engine.wake()
    await engine.wake()
    async with asyncio.timeout(WAIT_S):
        done: list[Generation] = await asyncio.gather(*tasks)
    assert [one.finish_reason for one in done] == ["length"] * 23 + ["abort"]
    model = load(folder_of())
    for request, got in zip(requests, done, strict=True):
        assert set(got.weight_versions) <= {model_version}
        assert got.log_probs == pytest.approx(plain_log_probs(model, request, got.token_ids), abs=1e-4)

    await engine.pause()
    await engine.sleep()
    await engine.wake()
    waits = asyncio.ensure_future(collect(engine, request_of("waits", [1], 5)))
    assert "paused" in (await engine.health(5.0)).error
    assert not waits.done()
    await engine.commit_weights(version)
    await engine.resume()
    assert set((await waits).weight_versions) == {version}


async def test_a_commit_in_a_pause_restarts_what_is_queued(
    served: Served, folder_of: FolderOf, request_of: RequestOf, collect: Collect
) -> None:
    """Requests that a pause froze, and that wait for a place."""
    engine = served.engine
    version = await served.prepare(tensors_of(load(folder_of(seed=1))))
    before = await served.sampled()
    kept = asyncio.ensure_future(collect(engine, request_of("kept", [1, 2, 3], 240)))
    await served.reaches(before + 8)
    crowd = [asyncio.ensure_future(collect(engine, request_of(f"crowd {n}", [n + 1], 200))) for n in range(24)]
    await served.reaches(await served.sampled() + 40)  # twelve at a time: half of them are queued in SGLang
    await engine.pause()
    later = asyncio.ensure_future(collect(engine, request_of("later", [9], 5)))
    await engine.commit_weights(version)
    assert (await current(engine)).paused
    assert not later.done()
    await engine.resume()
    async with asyncio.timeout(WAIT_S):
        done: list[Generation] = await asyncio.gather(kept, *crowd, later)
    ends = [(len(one.token_ids), one.finish_reason) for one in done]
    assert ends == [(240, "length"), *[(200, "length")] * 24, (5, "length")]
    assert sum({*one.weight_versions} == {version} for one in done) >= 12


async def test_weights_that_do_not_fit_leave_the_old_ones(
    served: Served, folder_of: FolderOf, request_of: RequestOf, collect: Collect, plain_log_probs: Any
) -> None:
    model = load(folder_of(seed=1))
    held = await served.swap(tensors_of(model))
    wrong = tensors_of(model)
    wrong["model.norm.weight"] = torch.ones(5)
    with pytest.raises(WeightMismatchError, match=r"model\.norm\.weight.*shape"):
        await served.prepare(wrong)
    del wrong["model.norm.weight"]
    with pytest.raises(WeightMismatchError, match=r"missing names model\.norm\.weight"):
        await served.prepare(wrong)
    version = await served.prepare(tensors_of(load(folder_of(seed=2))))
    with pytest.raises(WeightVersionError, match=f"version {version} is prepared"):
        await served.engine.commit_weights(version + 1)
    one = request_of("old", [1, 2, 3], 20)
    got: Generation = await collect(served.engine, one)
    assert set(got.weight_versions) == {held}
    expected = plain_log_probs(model, one, got.token_ids)
    assert got.log_probs == pytest.approx(expected, abs=1e-4)


async def test_closing_a_stream_frees_its_place(served: Served, request_of: RequestOf) -> None:
    stream = served.engine.generate(request_of("left", [1, 2], 200))
    assert (await anext(stream)).token_ids
    await stream.aclose()
    async with asyncio.timeout(WAIT_S):
        while (await current(served.engine)).running:
            await asyncio.sleep(0.01)
    assert served.engine.statistics().kv_cache_capacity_tokens == 4096


async def test_every_token_is_of_the_version_it_is_labelled_with(
    served: Served, telltale: tuple[Path, Callable[[int], Any]], request_of: RequestOf, collect: Collect
) -> None:
    """Swaps under load, both cache policies and pauses mixed."""
    _, weights = telltale
    dice = random.Random(8)
    await served.swap(weights((next(served.versions) + 1) % VOCABULARY))
    swaps, running, ends, tokens = 200, True, Counter[str](), 0

    async def client(name: int) -> None:
        nonlocal tokens
        turn = 0
        while running:
            turn += 1
            limit = dice.randint(1, 60)
            got = await collect(served.engine, request_of(f"{name}.{turn}", [1] * dice.randint(1, 30), limit))
            assert got.token_ids == tuple(version % VOCABULARY for version in got.weight_versions)
            assert list(got.weight_versions) == sorted(got.weight_versions)
            assert got.finish_reason == "abort" or len(got.token_ids) == limit
            ends[got.finish_reason] += 1
            tokens += len(got.token_ids)

    async with asyncio.TaskGroup() as group:
        for name in range(16):
            group.create_task(client(name))
        for number in range(swaps):
            version = next(served.versions)
            manifest = served.transport.publish(weights(version % VOCABULARY).items(), version=version)
            await served.engine.fetch_weights(manifest)
            served.transport.release(version)
            if number % 10 == 0:
                await served.engine.pause()
            await served.engine.commit_weights(version, kv_cache=dice.choice(["keep", "recompute"]))
            if number % 10 == 0:
                await served.engine.resume()
            # What clients must get under each version, however fast the machine is.
            async with asyncio.timeout(WAIT_S):
                while tokens < 10 * (number + 1):
                    await asyncio.sleep(0.005)
        running = False
    print(f"{swaps} swaps, {tokens} tokens, {ends}")


async def test_two_trainer_ranks_send_weights(
    folder_of: FolderOf, request_of: RequestOf, collect: Collect, plain_log_probs: Any
) -> None:
    spec = TransportSpec(name="collective", namespace="sglang")
    trainer = [spec.make(rank=rank, ranks=2) for rank in range(2)]
    model = load(folder_of(seed=1))
    async with hosting(folder_of(), transport=spec) as engine:
        await engine.fetch_weights(joined([rank.publish(tensors_of(model).items(), version=1) for rank in trainer]))
        await engine.commit_weights(1)
        request = request_of("after", [5, 6, 7], 30)
        got: Generation = await collect(engine, request)
    assert set(got.weight_versions) == {1}
    expected = plain_log_probs(model, request, got.token_ids)
    assert got.log_probs == pytest.approx(expected, abs=1e-4)
    for rank in trainer:
        rank.close()


async def test_nothing_listens_and_nothing_outlives_a_kill(served: Served, request_of: RequestOf) -> None:
    assert isinstance(served.engine, OutOfProcessEngine)
    assert served.engine.pid is not None
    host = psutil.Process(served.engine.pid)
    family = [host, *host.children(recursive=True)]
    assert len(family) >= 2
    for process in family:
        for connection in process.net_connections(kind="inet"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.ip in ("127.0.0.1", "::1"), f"{process.name()} listens at {connection.laddr}"
                with pytest.raises((OSError, asyncio.IncompleteReadError, TimeoutError)):
                    await _asks_for_a_page(connection.laddr.port)
    stream = served.engine.generate(request_of("last", [1], 200))
    assert (await anext(stream)).token_ids
    host.kill()
    with pytest.raises(EngineError, match="SIGKILL"):
        async for _ in stream:
            pass
    _, alive = await asyncio.to_thread(psutil.wait_procs, family, timeout=20)
    assert not alive, [process.cmdline() for process in alive]


async def test_a_stopped_scheduler_is_named_and_ended_with_all_of_its_engine(
    folder_of: FolderOf, request_of: RequestOf, caplog: pytest.LogCaptureFixture
) -> None:
    children.configure(Liveness(every_s=0.1, named_after_s=0.3, ended_after_s=1.0))
    try:
        async with hosting(folder_of()) as engine:
            host = psutil.Process(engine.pid)
            family = [host, *host.children(recursive=True)]
            stream = engine.generate(request_of("a", [1], 200))
            assert (await anext(stream)).token_ids
            scheduler = max(family[1:], key=lambda each: each.memory_info().rss)
            scheduler.suspend()
            with pytest.raises(EngineError, match="SIGKILL"):
                async for _ in stream:
                    pass
            _, alive = await asyncio.to_thread(psutil.wait_procs, family, timeout=20)
            assert not alive, [process.cmdline() for process in alive]
        assert f"process {scheduler.pid} of the process {host.pid} of engine" in caplog.text
    finally:
        children.configure(Liveness())


DRIVER = """
import asyncio, sys
from engines.rollout.remote.engine import RemoteEngine
async def main():
    engine = RemoteEngine(sys.argv[1], engine=sys.argv[2], python=sys.argv[3], threads=1,
                          options={"device": "cpu", "kv_cache_tokens": 4096})
    await engine.start()
    print("started", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.fixture
def short_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as short:  # a socket's path has at most 107 characters
        yield Path(short)


@pytest.mark.parametrize("started", [False, True])
async def test_a_killed_driver_leaves_neither_processes_nor_files(
    folder_of: FolderOf, short_path: Path, monkeypatch: pytest.MonkeyPatch, started: bool
) -> None:
    """Kill it when SGLang's last process has just been started, before it can watch its parent; or later."""
    driver = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", DRIVER, str(folder_of()), ENGINE, PYTHON),
        env={**os.environ, "TMPDIR": str(short_path)},
        stdout=asyncio.subprocess.PIPE,
    )
    family: list[psutil.Process] = []
    try:
        assert driver.stdout is not None
        if started:
            assert await driver.stdout.readline() == b"started\n"
        async with asyncio.timeout(300):
            while len(family) < 5:  # driver, engine's process, resource tracker, scheduler, detokenizer
                await asyncio.sleep(0.05)
                own = psutil.Process(driver.pid)
                family = [own, *own.children(recursive=True)]
        mapped = [line for each in family for line in Path(f"/proc/{each.pid}/maps").read_text().splitlines()]
        shared = [line for line in mapped if "/dev/shm/sglang" in line]
        assert not started or (shared and all(line.endswith("(deleted)") for line in shared)), shared
    finally:
        driver.kill()
    _, alive = await asyncio.to_thread(psutil.wait_procs, family, timeout=90)
    assert not alive, [process.cmdline() for process in alive]
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    left = {path.name for path in short_path.iterdir()}
    assert all(name.startswith("asyncrl.sglang.") for name in left), left
    LockedTemporaryDirectory("test").close()
    assert not list(short_path.iterdir()), "what the next process makes does not clear this away"


async def _asks_for_a_page(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(2):
            assert not (await reader.readexactly(5)).startswith(b"HTTP/")
            raise OSError("it is not HTTP")
    finally:
        writer.close()


async def test_requests_of_a_killed_sglang_go_on_elsewhere(
    folder_of: FolderOf, request_of: RequestOf, collect: Collect
) -> None:
    options = PoolOptions(
        supervision=Supervision(health=HealthPolicy(restart_s=0.1, max_restart_s=1.0), start_s=300.0), wait_s=300.0
    )

    def make() -> RemoteEngine:
        given = {"device": "cpu", "kv_cache_tokens": 4096}
        return RemoteEngine(str(folder_of()), engine=ENGINE, python=PYTHON, threads=1, options=given)

    async with ReplicaPool({"a": make, "b": make}, options=options) as pool:
        requests = [request_of(n, [n + 1, 2, 3], 240, temperature=0.0) for n in range(8)]
        alone = [await collect(pool, one) for one in requests]
        async with asyncio.timeout(3 * WAIT_S):
            while not pool.statistics().migrations:  # on a busy machine all may be done before the kill
                running = [asyncio.ensure_future(collect(pool, one)) for one in requests]
                begin = pool.statistics().tokens
                while pool.statistics().tokens < begin + 200:
                    await asyncio.sleep(0.005)
                busiest = max(pool._replicas.values(), key=lambda replica: len(replica.attempts))
                if busiest.attempts:
                    assert isinstance(busiest.engine, RemoteEngine)
                    assert busiest.engine.pid is not None
                    psutil.Process(busiest.engine.pid).kill()
                done: list[Generation] = await asyncio.gather(*running)
                assert [got.token_ids for got in done] == [got.token_ids for got in alone]
        assert pool.statistics().failed == 0
