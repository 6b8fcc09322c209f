"""The vLLM engine, for real: in the environment that ``asyncrl engine install vllm --cpu`` makes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch

from asyncrl.errors import EngineError, InvalidDataError, WeightError, WeightMismatchError, WeightVersionError
from asyncrl.interfaces import Generation, GenerationRequest, KVCachePolicy, OutOfProcessEngine, RolloutEngineStatistics
from asyncrl.io import LockedTemporaryDirectory
from asyncrl.single_controller.children import children
from asyncrl.single_controller.liveness import Liveness
from asyncrl.weights import TransportSpec, joined
from engines.rollout.remote.engine import RemoteEngine

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

Collect = Callable[..., Any]
RequestOf = Callable[..., GenerationRequest]
FolderOf = Callable[..., Path]

ROOT = Path(__file__).parents[3]
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
"""vLLM's attention on a CPU has no smaller heads."""
CONTEXT = 256


def interpreter() -> Path:
    named = os.environ.get("ASYNCRL_VLLM_PYTHON")
    return Path(named) if named else ROOT / ".venv-vllm" / "bin" / "python"


@pytest.fixture(scope="module")
def python() -> str:
    if not interpreter().exists():
        pytest.skip(f"no vLLM at {interpreter()}: asyncrl engine install vllm --cpu, or name it in ASYNCRL_VLLM_PYTHON")
    return str(interpreter())


@pytest.fixture(scope="module")
def hosting(python: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    memory = tmp_path_factory.mktemp("weights")

    @contextlib.asynccontextmanager
    async def host(
        folder: Path, *, version: int = 0, transport: TransportSpec | None = None, **options: Any
    ) -> AsyncIterator[RemoteEngine]:
        shared = TransportSpec(name="shared_memory", namespace="vllm", options={"directory": str(memory)})
        engine = RemoteEngine(
            str(folder),
            engine="vllm",
            python=python,
            transport=transport or shared,
            dtype="float32",
            threads=1,
            weight_version=version,
            options={"kv_cache_bytes": 64 << 20, "max_running_requests": 16, **options},
        )
        try:
            await engine.start()
            yield engine
        finally:
            await engine.close()

    return host


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def worst(got: Generation, expected: list[float]) -> float:
    assert len(expected) == len(got.log_probs) > 0
    return float((torch.tensor(got.log_probs) - torch.tensor(expected)).abs().max())  # NaN if one is


def mixed_log_probs(models: dict[int, Any], request: GenerationRequest, got: Generation) -> list[float]:
    """Replay with transformers' own cache: each token's keys and values under the weights that read it."""
    from transformers import DynamicCache

    cache = DynamicCache()
    log_probs = []
    pending = list(request.prompt_token_ids)
    for token, version in zip(got.token_ids, got.weight_versions, strict=True):
        with torch.no_grad():
            out = models[version](input_ids=torch.tensor([pending]), past_key_values=cache, use_cache=True)
        log_probs.append(float(out.logits[0, -1].double().log_softmax(-1)[token]))
        pending = [token]
    return log_probs


class Served:
    """An engine and the model whose weights it holds now."""

    def __init__(self, engine: RemoteEngine, folder_of: FolderOf) -> None:
        self.engine = engine
        self.folder_of = folder_of
        self.models = {0: load(folder_of("llama", **SHAPE))}

    @property
    def model(self) -> Any:
        return self.models[self.engine.weight_version]

    async def prepare(self) -> int:
        version = self.engine.weight_version + 1
        self.models[version] = load(self.folder_of("llama", seed=1 + version % 2, **SHAPE))
        await self.engine.prepare_weights(tensors_of(self.models[version]), version=version)
        return version


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(hosting: Any, folder_of: FolderOf) -> AsyncIterator[Served]:
    async with hosting(folder_of("llama", **SHAPE), sleep_mode=True) as engine:
        yield Served(engine, folder_of)


async def current(engine: RemoteEngine) -> RolloutEngineStatistics:
    await engine.abort("unknown")  # every answer brings statistics
    return engine.statistics()


async def first_chunks(engine: RemoteEngine, requests: list[GenerationRequest]) -> list[asyncio.Task[Generation]]:
    """Begin the requests and return when each has its first token."""
    tasks, begun = [], []
    for request in requests:
        event = asyncio.Event()
        tasks.append(asyncio.ensure_future(reading(engine, request, event)))
        begun.append(asyncio.ensure_future(event.wait()))
    await asyncio.gather(*begun)
    return tasks


async def reading(engine: RemoteEngine, request: GenerationRequest, event: asyncio.Event) -> Generation:
    tokens: list[int] = []
    log_probs: list[float] = []
    versions: list[int] = []
    reason = None
    async for chunk in engine.generate(request):
        tokens += chunk.token_ids
        log_probs += chunk.log_probs
        versions += chunk.weight_versions
        reason = chunk.finish_reason
        event.set()
    assert reason is not None
    return Generation(
        token_ids=tuple(tokens), log_probs=tuple(log_probs), weight_versions=tuple(versions), finish_reason=reason
    )


async def test_log_probs_are_those_of_the_distribution_sampled_from(
    served: Served, collect: Collect, request_of: RequestOf, plain_log_probs: Any
) -> None:
    assert isinstance(served.engine, OutOfProcessEngine)
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7},
        {"temperature": 0.0},
        {"top_k": 5},
        {"top_p": 0.8},
        {"temperature": 1.3, "top_p": 0.9, "top_k": 20},
    ]
    requests = [request_of(f"p{i}", [i + 1, 2, 3 * i, 60], 40, seed=i, **way) for i, way in enumerate(ways * 2)]
    together: list[Generation] = await asyncio.gather(*(collect(served.engine, each) for each in requests))
    for request, got in zip(requests, together, strict=True):
        assert (len(got.token_ids), got.finish_reason) == (40, "length")
        assert worst(got, plain_log_probs(served.model, request, got.token_ids)) <= 1e-4, request.sampling
    again: Generation = await collect(served.engine, requests[0])
    assert again.token_ids == together[0].token_ids  # a seed, whatever runs beside it
    assert served.engine.statistics().tokens_generated >= 13 * 40


async def test_what_is_refused(served: Served, collect: Collect, request_of: RequestOf) -> None:
    for prompt, said in (
        ([], "empty prompt"),
        ([1, 67], r"token id 67; the vocabulary is 0\.\.66"),
        ([1] * CONTEXT, "leaves no room to generate"),
    ):
        with pytest.raises(InvalidDataError, match=said):
            await collect(served.engine, request_of("bad", prompt, 4))
    with pytest.raises(InvalidDataError, match="has no tokenizer"):
        await collect(served.engine, request_of("bad", [1], 4, stop=("x",)))
    with pytest.raises(InvalidDataError, match="vLLM does not take request 'bad'"):  # not a failure of the engine
        await collect(served.engine, request_of("bad", [1], 4, top_log_probs=60))
    ended: Generation = await collect(served.engine, request_of("good", [1], 4, stop_token_ids=(1 << 20,)))
    assert ended.finish_reason == "length"


async def test_ends(served: Served, collect: Collect, request_of: RequestOf) -> None:
    whole: Generation = await collect(served.engine, request_of("whole", [5, 6], 30, temperature=0.0))
    stop = whole.token_ids[10]
    first = whole.token_ids.index(stop)
    request = request_of("stopped", [5, 6], 30, temperature=0.0, stop_token_ids=(stop,))
    got: Generation = await collect(served.engine, request)
    assert (got.token_ids, got.finish_reason) == (whole.token_ids[: first + 1], "stop")
    full: Generation = await collect(served.engine, request_of("full", [7] * (CONTEXT - 3), 30))
    assert (len(full.token_ids), full.finish_reason) == (3, "length")
    moved = GenerationRequest(
        request_id="moved",
        prompt_token_ids=(5, 6, *whole.token_ids[:12]),
        sampling=request_of("", [1], 30, temperature=0.0).sampling,
        continued_tokens=12,
    )
    rest: Generation = await collect(served.engine, moved)
    assert rest.token_ids == whole.token_ids[12:]


async def test_abort_and_a_closed_stream(served: Served, request_of: RequestOf) -> None:
    engine = served.engine
    one, two = await first_chunks(engine, [request_of("one", [1], 250), request_of("two", [2], 250)])
    assert await engine.abort("one")
    assert (await one).finish_reason == "abort"
    assert not await engine.abort("one")
    two.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await two
    assert (await current(engine)).running == 0
    crowd = [asyncio.ensure_future(reading(engine, request_of(f"c{i}", [1], 200), asyncio.Event())) for i in range(20)]
    while (await current(engine)).waiting != 4:
        assert not any(task.done() for task in crowd)
    assert await engine.abort("c19")  # it waits
    assert (await crowd[19]).token_ids == ()
    for name in range(19):
        await engine.abort(f"c{name}")
    ended = await asyncio.gather(*crowd)
    # Requests that ended by themselves just before are complete.
    assert all(got.finish_reason == "abort" or len(got.token_ids) == 200 for got in ended)
    assert "abort" in {got.finish_reason for got in ended[:19]}
    assert (await current(engine)).running == 0


async def test_pause_and_resume(served: Served, collect: Collect, request_of: RequestOf) -> None:
    engine = served.engine
    (task,) = await first_chunks(engine, [request_of("kept", [1], 120)])
    await engine.pause()
    before = (await current(engine)).tokens_generated
    later = asyncio.ensure_future(collect(engine, request_of("later", [1], 5)))
    assert "paused" in (await engine.health(5.0)).error
    assert (await current(engine)).tokens_generated == before
    assert not later.done()
    assert (await current(engine)).paused
    await engine.resume()
    await engine.resume()
    assert len((await task).token_ids) == 120
    assert len((await later).token_ids) == 5
    health = await engine.health(20.0)
    assert (health.healthy, health.weight_version) == (True, engine.weight_version)
    assert "no token within" in (await engine.health(1e-6)).error


async def test_sleep_and_wake(served: Served, collect: Collect, request_of: RequestOf) -> None:
    """Running requests, some without a token, and queued ones go on; pause and resume are followed on waking."""
    engine, begun = served.engine, [request_of(f"begun {n}", [n + 1], 60) for n in range(4)]
    tasks = await first_chunks(engine, begun)
    late = [request_of(f"late {n}", [n + 9], 10) for n in range(20)]
    tasks += [asyncio.ensure_future(collect(engine, one)) for one in late]
    await asyncio.gather(engine.sleep(), engine.sleep())
    assert "asleep" in (await engine.health(5.0)).error
    version = await served.prepare()
    with pytest.raises(WeightError, match="asleep"):
        await engine.commit_weights(version)
    before = (await current(engine)).tokens_generated
    await engine.pause()
    await engine.resume()
    assert await engine.abort("late 19")
    assert (await current(engine)).tokens_generated == before
    await engine.wake()
    await engine.wake()
    async with asyncio.timeout(30):
        done: list[Generation] = await asyncio.gather(*tasks)
    assert [one.finish_reason for one in done] == ["length"] * 23 + ["abort"]
    for request, got in zip(begun, done, strict=False):
        # Drawn without a seed: of 960 such answers, half of which slept, 19 were off by more than 1e-4 and none by more
        # than 2.3e-4, as vLLM's attention on a CPU approximates exp. Keys of other weights would be off by over 1e-2.
        assert worst(got, mixed_log_probs(served.models, request, got)) < 1e-3

    await engine.pause()
    await engine.sleep()
    await engine.wake()
    waits = asyncio.ensure_future(collect(engine, request_of("waits", [1], 5)))
    assert "paused" in (await engine.health(5.0)).error
    assert not waits.done()
    await engine.commit_weights(version)
    await engine.resume()
    assert set((await waits).weight_versions) == {version}


async def test_an_order_is_carried_out_though_its_caller_is_cancelled(served: Served, request_of: RequestOf) -> None:
    engine = served.engine
    (task,) = await first_chunks(engine, [request_of("kept", [1], 200)])
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.01):  # vLLM takes 20 ms to answer
            await engine.pause()
    await engine.resume()
    await engine.pause()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.001):
            await engine.resume()
    await engine.pause()
    before = (await current(engine)).tokens_generated
    version = await served.prepare()
    assert (await current(engine)).tokens_generated == before
    await engine.commit_weights(version)
    await engine.resume()
    async with asyncio.timeout(20):
        assert len((await task).token_ids) == 200


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("kv_cache", ["keep", "recompute"])
async def test_both_sides_of_the_cut_are_exact(
    served: Served, request_of: RequestOf, plain_log_probs: Any, kv_cache: KVCachePolicy, paused: bool
) -> None:
    engine = served.engine
    old = engine.weight_version
    while True:
        requests = [request_of(f"{kv_cache}{i}", [3 * i + 1, 7, 9], 230, seed=i) for i in range(5)]
        tasks = await first_chunks(engine, requests)
        await engine.pause()  # they are under way still, however long these weights take to come
        if not any(task.done() for task in tasks):
            break
        await engine.resume()  # this process had to wait for all of their 230 tokens
        await asyncio.gather(*tasks)
    version = await served.prepare()
    assert engine.weight_version == old
    assert not any(task.done() for task in tasks)
    if not paused:
        await engine.resume()
    await engine.commit_weights(version, kv_cache=kv_cache)
    assert engine.weight_version == version
    await engine.resume()
    done = await asyncio.gather(*tasks)
    for request, got in zip(requests, done, strict=True):
        assert [span.version for span in got.spans] == [old, version]
        assert len(got.token_ids) == 230
        if kv_cache == "keep":
            expected = mixed_log_probs(served.models, request, got)
        else:
            by_version = {each: plain_log_probs(served.models[each], request, got.token_ids) for each in (old, version)}
            expected = [by_version[each][n] for n, each in enumerate(got.weight_versions)]
        # Wider than elsewhere: over 230 tokens the rounding of two float32 programs adds up in keys and values. Keys of
        # the wrong weights would be off by more than 1e-2.
        assert worst(got, expected) <= 1e-3, got.spans


async def test_no_prefix_of_older_weights_serves_a_later_request(
    served: Served, collect: Collect, request_of: RequestOf, plain_log_probs: Any
) -> None:
    engine = served.engine
    prompt = [(7 * i) % 67 for i in range(200)]
    for turn in range(3):
        request = request_of(f"turn {turn}", prompt, 20, seed=3)
        first: Generation = await collect(engine, request)
        version = await served.prepare()
        early = asyncio.ensure_future(collect(engine, request_of(f"early {turn}", prompt, 20, seed=4)))
        await asyncio.sleep(0)  # sent, and perhaps begun, when the weights change
        await engine.commit_weights(version)
        later: Generation = await collect(engine, request_of(f"later {turn}", prompt, 20, seed=3))
        assert set(first.weight_versions) == {version - 1}
        assert set(later.weight_versions) == {version}
        assert worst(first, plain_log_probs(served.models[version - 1], request, first.token_ids)) <= 1e-4
        assert worst(later, plain_log_probs(served.models[version], request, later.token_ids)) <= 1e-4
        got: Generation = await early
        if set(got.weight_versions) == {version}:
            assert worst(got, plain_log_probs(served.models[version], request, got.token_ids)) <= 1e-4


async def test_weights_that_do_not_fit_leave_the_old_ones(
    served: Served, collect: Collect, request_of: RequestOf, plain_log_probs: Any
) -> None:
    engine = served.engine
    version = engine.weight_version
    tensors = tensors_of(served.model)
    with pytest.raises(WeightMismatchError, match=r"model\.norm\.weight of version \d+ has shape"):
        await engine.prepare_weights({**tensors, "model.norm.weight": torch.zeros(3)}, version=version + 1)
    with pytest.raises(WeightVersionError, match="versions grow"):
        await engine.prepare_weights(tensors, version=version)
    with pytest.raises(WeightVersionError, match="none is prepared"):
        await engine.commit_weights(version + 1)
    request = request_of("still", [1, 2], 20, seed=1)
    got: Generation = await collect(engine, request)
    assert set(got.weight_versions) == {version}
    assert worst(got, plain_log_probs(served.model, request, got.token_ids)) <= 1e-4


async def test_damaged_bytes_are_not_loaded(
    served: Served, collect: Collect, request_of: RequestOf, tmp_path_factory: pytest.TempPathFactory
) -> None:
    engine = served.engine
    transport = engine._launch.transport
    assert transport is not None
    version = engine.weight_version + 1
    published = TransportSpec(name="shared_memory", namespace="vllm", options=transport.options).make()
    manifest = published.publish(list(tensors_of(served.model).items()), version=version)
    path = Path(str(transport.options["directory"])) / manifest.location
    data = bytearray(path.read_bytes())
    data[manifest.tensors[3].offset] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(WeightMismatchError, match="differ from their checksum"):
        await engine.fetch_weights(manifest)
    with pytest.raises(WeightVersionError, match="none is prepared"):
        await engine.commit_weights(version)
    published.close()
    assert len((await collect(engine, request_of("after damage", [1], 5))).token_ids) == 5


async def test_a_tied_head_gets_the_new_weights_too(
    hosting: Any, folder_of: FolderOf, collect: Collect, request_of: RequestOf, plain_log_probs: Any
) -> None:
    async with hosting(folder_of("qwen3", tied=True, **SHAPE), version=3) as engine:
        for version, seed in ((4, 1), (5, 2)):
            model = load(folder_of("qwen3", seed=seed, tied=True, **SHAPE))
            await engine.prepare_weights(tensors_of(model), version=version)
            await engine.commit_weights(version)
            request = request_of(f"v{version}", [9, 8, 7], 60, seed=version)
            got: Generation = await collect(engine, request)
            assert set(got.weight_versions) == {version}
            assert worst(got, plain_log_probs(model, request, got.token_ids)) <= 1e-4


async def test_two_trainer_ranks_send_weights_to_two_ranks_of_the_engine(
    hosting: Any, folder_of: FolderOf, collect: Collect, request_of: RequestOf, plain_log_probs: Any
) -> None:
    shape = {**SHAPE, "num_key_value_heads": 2}
    spec = TransportSpec(name="collective", namespace="vllm")
    trainer = [spec.make(rank=rank, ranks=2) for rank in range(2)]
    arguments = {"tensor_parallel_size": 2}
    async with hosting(folder_of("llama", **shape), transport=spec, arguments=arguments) as engine:
        for version in (1, 2):
            model = load(folder_of("llama", seed=version, **shape))
            manifest = joined([rank.publish(tensors_of(model).items(), version=version) for rank in trainer])
            await engine.fetch_weights(manifest)
            await engine.commit_weights(version)
            request = request_of(f"v{version}", [9, 8, 7], 30, seed=version)
            got: Generation = await collect(engine, request)
            assert set(got.weight_versions) == {version}
            assert worst(got, plain_log_probs(model, request, got.token_ids)) <= 1e-4
    for rank in trainer:
        rank.close()


@pytest.fixture(scope="module")
def telltale_folder(folder_of: FolderOf, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Version v can only say v."""
    model = load(folder_of("llama", **SHAPE))

    def weights(version: int) -> dict[str, torch.Tensor]:
        tensors = tensors_of(model)
        for name, tensor in tensors.items():
            if "o_proj" in name or "down_proj" in name:
                tensor.zero_()
            elif "embed_tokens" in name or "norm" in name:
                tensor.fill_(1.0)
            elif name == "lm_head.weight":
                tensor.fill_(-1.0)
                tensor[version % 67] = 1.0
        return tensors

    folder = tmp_path_factory.mktemp("telltale")
    model.load_state_dict(weights(0))
    model.save_pretrained(folder)
    return folder, weights


SWAPS = int(os.environ.get("ASYNCRL_VLLM_SWAPS", "150"))


async def test_every_token_is_of_the_version_it_is_labelled_with(
    telltale_folder: Any, hosting: Any, request_of: RequestOf, collect: Collect
) -> None:
    folder, weights = telltale_folder
    dice = random.Random(5)
    done: list[tuple[GenerationRequest, Generation]] = []
    asked: dict[int, str] = {}
    running = True
    async with hosting(folder) as engine:

        async def client(name: int) -> None:
            turn = 0
            while running:
                turn += 1
                asked[name] = f"{name}.{turn}"
                request = request_of(asked[name], [1] * dice.randint(1, 80), dice.randint(1, 60))
                done.append((request, await collect(engine, request)))

        async with asyncio.TaskGroup() as clients:
            for name in range(20):
                clients.create_task(client(name))
            for version in range(1, SWAPS + 1):
                await engine.prepare_weights(weights(version), version=version)
                paused = dice.random() < 0.6
                if paused:
                    await engine.pause()
                for name in dice.sample(range(20), dice.choice([0, 0, 4])):
                    await engine.abort(asked[name])
                await engine.commit_weights(version, kv_cache=dice.choice(["keep", "recompute"]))
                if paused:
                    await engine.resume()
            running = False
        counted = (await current(engine)).tokens_generated
    wrong = tokens = aborted = mixed = 0
    for request, got in done:
        tokens += len(got.token_ids)
        wrong += sum(token != version % 67 for token, version in zip(got.token_ids, got.weight_versions, strict=True))
        assert list(got.weight_versions) == sorted(got.weight_versions)
        aborted += got.finish_reason == "abort"
        mixed += len(got.spans) > 1
        assert got.finish_reason == "abort" or len(got.token_ids) == request.sampling.max_new_tokens
    print(
        f"{SWAPS} swaps, {len(done)} requests ({aborted} aborted, {mixed} across a cut), {tokens} tokens: {wrong} wrong"
    )
    assert wrong == 0
    assert tokens == counted
    assert mixed >= 20
    assert aborted >= 1


async def test_a_dead_engine_core_is_reported_and_leaves_nothing(
    hosting: Any, folder_of: FolderOf, request_of: RequestOf
) -> None:
    async with hosting(folder_of("llama", **SHAPE)) as engine:
        host = psutil.Process(engine.pid)
        (task,) = await first_chunks(engine, [request_of("a", [1], 250)])
        cores = [each for each in host.children(recursive=True) if each.memory_info().rss > 200 << 20]
        assert cores
        cores[0].send_signal(signal.SIGKILL)
        with pytest.raises(EngineError, match="gone"):
            await task
        assert "it exited with status 1" in await asyncio.wait_for(engine.wait_ended(), 60)
    async with hosting(folder_of("llama", **SHAPE)) as engine:
        left = psutil.Process(engine.pid).children(recursive=True)
        os.kill(engine.pid, signal.SIGKILL)
        assert "killed by SIGKILL" in await asyncio.wait_for(engine.wait_ended(), 60)
        _, alive = await asyncio.to_thread(psutil.wait_procs, left, 20)
        assert [each for each in alive if "resource_tracker" not in " ".join(each.cmdline())] == []


async def test_a_stopped_engine_core_is_named_and_ended_with_all_of_its_engine(
    hosting: Any, folder_of: FolderOf, request_of: RequestOf, caplog: pytest.LogCaptureFixture
) -> None:
    children.configure(Liveness(every_s=0.1, named_after_s=0.3, ended_after_s=1.0))
    try:
        async with hosting(folder_of("llama", **SHAPE)) as engine:
            host = psutil.Process(engine.pid)
            family = [host, *host.children(recursive=True)]
            (task,) = await first_chunks(engine, [request_of("a", [1], 250)])
            core = next(each for each in family[1:] if each.memory_info().rss > 200 << 20)
            core.send_signal(signal.SIGSTOP)
            with pytest.raises(EngineError, match="killed by SIGKILL"):
                await asyncio.wait_for(task, 60)
            _, alive = await asyncio.to_thread(psutil.wait_procs, family, 20)
            assert [each for each in alive if "resource_tracker" not in " ".join(each.cmdline())] == []
        assert f"process {core.pid} of the process {host.pid} of engine" in caplog.text
    finally:
        children.configure(Liveness())


DRIVER = """
import asyncio, sys
from engines.rollout.remote.engine import RemoteEngine
async def main():
    options = {"kv_cache_bytes": 1 << 26}
    engine = RemoteEngine(sys.argv[1], engine="vllm", python=sys.argv[2], threads=1, options=options)
    await engine.start()
    print("started", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


OWN_PROGRAM = """
import asyncio, sys
from engines.rollout.vllm.engine import VLLMEngine
async def main():
    engine = VLLMEngine(sys.argv[1], kv_cache_bytes=1 << 26)
    await engine.start()
    print("started", flush=True)
    await asyncio.Event().wait()
if __name__ == "__main__":
    asyncio.run(main())
"""


async def test_a_killed_program_that_made_the_engine_itself_leaves_neither_processes_nor_files(
    python: str, folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory() as short:
        program = Path(short) / "program.py"
        program.write_text(OWN_PROGRAM)
        command = (python, str(program), str(folder_of("llama", **SHAPE)))
        await leaves_nothing(command, Path(short) / "files", monkeypatch, family=3)


@pytest.mark.parametrize("started", [False, True])
async def test_a_killed_driver_leaves_neither_processes_nor_files(
    python: str, folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch, started: bool
) -> None:
    """Kill it when vLLM's engine core has just been started, or later."""
    with tempfile.TemporaryDirectory() as short:  # a socket's path has at most 107 characters
        command = (sys.executable, "-c", DRIVER, str(folder_of("llama", **SHAPE)), python)
        await leaves_nothing(command, Path(short) / "files", monkeypatch, started=started)


async def leaves_nothing(
    command: tuple[str, ...],
    temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    started: bool = True,
    family: int = 4,  # driver, engine's process, resource tracker, engine core
) -> None:
    temporary.mkdir()
    driver = await asyncio.create_subprocess_exec(
        *command,
        env={**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
    )
    processes: list[psutil.Process] = []
    try:
        assert driver.stdout is not None
        if started:
            assert await driver.stdout.readline() == b"started\n"
        async with asyncio.timeout(200):
            while len(processes) < family:
                await asyncio.sleep(0.05)
                own = psutil.Process(driver.pid)
                processes = [own, *own.children(recursive=True)]
    finally:
        driver.kill()
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout=60)
    left = [process.cmdline() for process in alive]
    for process in alive:
        process.kill()
    made = [path for path in temporary.rglob("*") if path.is_socket() or path.name.startswith("vllm_dist_")]
    kinds = {"socket" if path.is_socket() else "file" for path in made}
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    LockedTemporaryDirectory("test").close()
    assert (left, [*temporary.glob("asyncrl*"), *temporary.glob("vllm_dist_*")]) == ([], [])
    assert all(path.parent.name.startswith("asyncrl.vllm.") for path in made)
    assert not started or kinds == {"socket", "file"}
