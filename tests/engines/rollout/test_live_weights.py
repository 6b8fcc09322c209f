"""The tensors that an engine serves from are those that were published, or the replica is replaced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace

from asyncrl.errors import LiveWeightsError
from asyncrl.interfaces import GenerationChunk, GenerationRequest, LiveWeightsEngine, SamplingParams
from asyncrl.rollout.live_weights import _warn_uncompared, commit_into, sampled_entries
from asyncrl.rollout.replica import fetch_into
from asyncrl.weights import Canary, TensorEntry, TransportSpec, WeightManifest, rounding_error
from engines.rollout.remote.engine import RemoteEngine
from engines.rollout.remote.process import EngineHost
from engines.rollout.remote.protocol import Commit, Launch, Prepare
from engines.rollout.transformers.engine import TransformersEngine
from engines.rollout.transformers.weights import ShadowWeights
from engines.weights.shared_memory import SharedMemoryTransport

FolderOf = Callable[..., Path]


@pytest.fixture
async def engine(folder_of: FolderOf) -> AsyncIterator[TransformersEngine]:
    made = TransformersEngine(str(folder_of()), device="cpu", threads=1)
    await made.start()
    yield made
    await made.close()


@pytest.fixture
def publish(model_of: Callable[..., Any], tmp_path: Path) -> Any:
    transport = SharedMemoryTransport(namespace="live", directory=str(tmp_path))
    yield lambda version, dtype=torch.float32: transport.publish(
        [(name, tensor.to(dtype)) for name, tensor in model_of("llama", seed=version).named_parameters()],
        version=version,
    )
    transport.close()


@pytest.fixture
def pulled(tmp_path: Path) -> Any:
    transport = SharedMemoryTransport(namespace="live", directory=str(tmp_path))
    yield transport
    transport.close()


def keep_old(self: ShadowWeights, version: int) -> None:
    self._shadow.tensors.clear()
    self.version, self.prepared = version, None


async def test_versions_that_arrived_pass(engine: TransformersEngine, publish: Any, pulled: Any) -> None:
    assert isinstance(engine, LiveWeightsEngine)
    for version in (1, 2):
        await fetch_into(engine, manifest := publish(version), transport=pulled)
        for _ in range(2):  # a commit that was given up and was over: it is checked all the same
            await commit_into(engine, version, kv_cache="keep", manifest=manifest)
    live = await engine.live_checksums([each.name for each in manifest.tensors])
    assert live == {each.name: (each.dtype, each.checksum) for each in manifest.tensors}


async def test_an_engine_that_took_the_number_alone_is_found(
    engine: TransformersEngine, publish: Any, pulled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShadowWeights, "swap", keep_old)
    await fetch_into(engine, manifest := publish(1), transport=pulled)
    with pytest.raises(LiveWeightsError, match=r"says that it serves weight version 1, but its tensor .* has"):
        await commit_into(engine, 1, kv_cache="keep", manifest=manifest)


async def test_memory_that_changed_after_it_was_verified_is_found(
    engine: TransformersEngine, publish: Any, pulled: Any
) -> None:
    await fetch_into(engine, manifest := publish(1), transport=pulled)
    shadow = engine._running().weights._shadow.tensors
    name = next(name for name in shadow if "down_proj" in name)
    changed = shadow[name].clone()
    changed[0, 0] += 1e-3
    shadow[name] = changed
    with pytest.raises(LiveWeightsError, match=r"its tensor .*down_proj"):
        await commit_into(engine, 1, kv_cache="keep", manifest=manifest)


async def test_tensors_that_the_engine_casts_are_left_out_and_the_log_says_so(
    engine: TransformersEngine, publish: Any, pulled: Any, caplog: pytest.LogCaptureFixture
) -> None:
    _warn_uncompared.cache_clear()
    for version in (1, 2):
        await fetch_into(engine, manifest := publish(version, torch.bfloat16), transport=pulled)
        await commit_into(engine, version, kv_cache="keep", manifest=manifest)
    (warning,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert "published in bfloat16, and the engine holds them in float32" in warning


async def test_an_engine_in_a_process_of_its_own_checks_itself(
    folder_of: FolderOf, publish: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Launch(
        engine="transformers",
        model_path=str(folder_of()),
        options={"device": "cpu", "threads": 1},
        transport=TransportSpec(name="shared_memory", namespace="live", options={"directory": str(tmp_path)}),
    )
    host = EngineHost(launch)
    await host.start()
    try:
        for version in (1, 2):
            await host._carry_out(Prepare(0, publish(version)))
            if version == 2:
                monkeypatch.setattr(ShadowWeights, "swap", keep_old)
                with pytest.raises(LiveWeightsError):
                    await host._carry_out(Commit(0, version, "keep"))
            else:
                await host._carry_out(Commit(0, version, "keep"))
    finally:
        monkeypatch.undo()
        await host.close()


async def test_a_commit_that_was_cut_off_is_proven_in_the_engines_process_when_it_is_repeated(
    folder_of: FolderOf, publish: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one takes the number alone, and ends while the tensors are read back."""
    launch = Launch(
        engine="transformers",
        model_path=str(folder_of()),
        options={"device": "cpu", "threads": 1},
        transport=TransportSpec(name="shared_memory", namespace="live", options={"directory": str(tmp_path)}),
    )
    host, client, reading = EngineHost(launch), RemoteEngine(""), asyncio.Event()
    engine: Any = host._engine

    async def call(make: Any, *arguments: Any) -> None:
        await host._carry_out(make(0, *arguments))
        client._update(engine.statistics())

    async def held(_: Sequence[str]) -> Any:
        reading.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(client, "_call", call)
    monkeypatch.setattr(ShadowWeights, "swap", keep_old)
    await host.start()
    try:
        await fetch_into(client, manifest := publish(1), transport=None)
        with monkeypatch.context() as patch:
            patch.setattr(engine, "live_checksums", held)
            commit = asyncio.ensure_future(commit_into(client, 1, kv_cache="keep", manifest=manifest))
            await reading.wait()
            commit.cancel()
            await asyncio.wait([commit])
        await fetch_into(client, manifest, transport=None)
        assert client.weight_version == 1
        with pytest.raises(LiveWeightsError, match="weight version 1, but its tensor"):
            await commit_into(client, 1, kv_cache="keep", manifest=manifest)
    finally:
        monkeypatch.undo()
        await host.close()


def asked(manifest: WeightManifest, model: Any, *, tolerance: float = 1e-5) -> WeightManifest:
    """The manifest with a canary of this model's log-probs."""
    ids = tuple(range(1, 21))
    log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    known = log_probs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    canary = Canary(token_ids=ids, log_probs=tuple(known), tolerance=tolerance)
    return msgspec.structs.replace(manifest, canary=canary)


async def test_an_engine_computes_what_the_trainer_computes(
    engine: TransformersEngine, publish: Any, pulled: Any, model_of: Callable[..., Any]
) -> None:
    manifest = asked(publish(1), model_of("llama", seed=1))
    await fetch_into(engine, manifest, transport=pulled)
    proof = await commit_into(engine, 1, kv_cache="keep", manifest=manifest)
    assert 0 <= proof.canary < 1
    assert engine.statistics().tokens_generated == 0  # a canary is no work
    manifest = asked(publish(2), model_of("llama", seed=1))
    await fetch_into(engine, manifest, transport=pulled)
    with pytest.raises(LiveWeightsError, match=r"weight version 2, but the log-probs of 19 fixed tokens differ .* by"):
        await commit_into(engine, 2, kv_cache="keep", manifest=manifest)


async def test_keys_and_values_of_older_weights_are_found(
    engine: TransformersEngine, publish: Any, pulled: Any, model_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    true = engine.generate

    async def stale(request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        async for chunk in true(request):
            scored = request.sampling.prompt_log_probs is not None
            yield chunk if scored else replace(chunk, log_probs=tuple(each - 0.01 for each in chunk.log_probs))

    monkeypatch.setattr(engine, "generate", stale)
    manifest = asked(publish(1), model_of("llama", seed=1))
    await fetch_into(engine, manifest, transport=pulled)
    with pytest.raises(LiveWeightsError, match="keys and values of older weights are used again"):
        await commit_into(engine, 1, kv_cache="keep", manifest=manifest)


async def test_a_canary_goes_before_all_others_and_a_paused_engine_is_not_asked(
    folder_of: FolderOf, publish: Any, pulled: Any, model_of: Callable[..., Any]
) -> None:
    engine = TransformersEngine(str(folder_of()), device="cpu", threads=1, max_running_requests=1)
    await engine.start()
    try:
        sampling = SamplingParams(max_new_tokens=200)
        request = GenerationRequest(request_id="long", prompt_token_ids=(1, 2), sampling=sampling)
        stream = engine.generate(request)
        await anext(stream)
        manifest = asked(publish(1), model_of("llama", seed=1))
        await fetch_into(engine, manifest, transport=pulled)
        await commit_into(engine, 1, kv_cache="keep", manifest=manifest)
        assert engine.statistics().running == 1  # it is not over: the canary did not wait for it
        await engine.pause()
        wrong = asked(publish(2), model_of("llama", seed=1))
        await fetch_into(engine, wrong, transport=pulled)
        await commit_into(engine, 2, kv_cache="keep", manifest=wrong)
    finally:
        await engine.close()


def test_the_bound_is_that_of_two_programs_rounding() -> None:
    assert rounding_error(4, "float32") == pytest.approx(2**-24 * 4)
    assert rounding_error(4, "bfloat16") == pytest.approx(2**-9 * 4)


def entry(name: str, size_bytes: int) -> TensorEntry:
    return TensorEntry(name=name, shape=(size_bytes,), dtype="uint8", offset=0, size_bytes=size_bytes, checksum=0)


def test_every_tensor_has_its_turn_and_no_version_reads_much() -> None:
    tensors = (*(entry(f"t{number}", 3 << 20) for number in range(40)), entry("embedding", 1 << 30))
    manifest = WeightManifest(version=0, transport="", location="", tensors=tensors, checked_bytes=8 << 20)
    seen: set[str] = set()
    for version in range(200):
        chosen = sampled_entries(msgspec.structs.replace(manifest, version=version))
        assert sum(each.size_bytes for each in chosen) <= 8 << 20
        seen |= {each.name for each in chosen}
    assert seen == {f"t{number}" for number in range(40)}
    assert sampled_entries(msgspec.structs.replace(manifest, checked_bytes=1 << 40)) == list(tensors)
    assert sampled_entries(msgspec.structs.replace(manifest, checked_bytes=0)) == []
