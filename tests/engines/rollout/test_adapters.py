"""Adapters beside the weights: what rows of several sample in one batch, what a version changes, what is refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from asyncrl.errors import InvalidDataError, LiveWeightsError, WeightError, WeightMismatchError, WeightVersionError
from asyncrl.interfaces import AdapterEngine, GenerationRequest, SamplingParams
from asyncrl.rollout.live_weights import commit_into
from asyncrl.rollout.replica import fetch_into
from asyncrl.weights import Adapter, Canary, WeightManifest, entries_of
from engines.rollout.model_tensors import AdapterVersions, ModelTensors
from engines.rollout.sglang.weights import completed
from engines.rollout.transformers.adapters import Adapters, ServedAdapter
from engines.rollout.transformers.engine import TransformersEngine
from engines.weights.shared_memory import SharedMemoryTransport

RANK, ALPHA = 3, 6.0
MODULES = [f"model.layers.{layer}.{name}" for layer in range(2) for name in ("self_attn.q_proj", "mlp.down_proj")]
Publish = Callable[..., WeightManifest]


@pytest.fixture
def base(model_of: Callable[..., Any]) -> Any:
    return model_of("llama", seed=0)


def adapter_of(base: Any, seed: int, rank: int = RANK) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for module in MODULES:
        outputs, inputs = base.get_submodule(module).weight.shape
        for matrix, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            name = f"base_model.model.{module}.lora_{matrix}.weight"
            tensors[name] = torch.empty(shape).normal_(std=0.3, generator=draw)
    return tensors


def merged(model_of: Callable[..., Any], tensors: dict[str, torch.Tensor]) -> Any:
    model = model_of("llama", seed=0)
    for module in MODULES:
        a, b = (tensors[f"base_model.model.{module}.lora_{matrix}.weight"] for matrix in "AB")
        model.get_submodule(module).weight += ALPHA / RANK * b @ a
    return model


@pytest.fixture
def transport(tmp_path: Path) -> Any:
    made = SharedMemoryTransport(namespace="adapters", directory=str(tmp_path), max_versions=16)
    yield made
    made.close()


@pytest.fixture
def publish(base: Any, transport: SharedMemoryTransport) -> Publish:
    """``publish(version, seed=..., name=...)`` an adapter of the base; ``tensors`` and fields of Adapter may differ."""

    def make(version: int, *, seed: int = 1, tensors: Any = None, beside: Any = (), **fields: Any) -> WeightManifest:
        tensors = adapter_of(base, seed) if tensors is None else tensors
        manifest = transport.publish(tensors.items(), version=version)
        given = {"rank": RANK, "alpha": ALPHA, "base": entries_of(base.named_parameters())}
        return msgspec.structs.replace(manifest, adapter=Adapter(**{**given, **fields}), beside=tuple(beside))

    return make


@pytest.fixture
async def engine(folder_of: Callable[..., Path]) -> AsyncIterator[TransformersEngine]:
    made = TransformersEngine(str(folder_of()), device="cpu", threads=1, max_adapter_rank=8)
    await made.start()
    yield made
    await made.close()


def a_request(name: str, adapter: str = "", *, seed: int = 0, tokens: int = 24) -> GenerationRequest:
    sampling = SamplingParams(max_new_tokens=tokens, seed=seed, ignore_eos=True)
    return GenerationRequest(
        request_id=name, prompt_token_ids=tuple(range(3, 9 + seed)), sampling=sampling, adapter=adapter
    )


async def take(engine: TransformersEngine, manifest: WeightManifest, transport: Any, kv_cache: Any = "keep") -> None:
    await fetch_into(engine, manifest, transport=transport)
    await commit_into(engine, manifest.version, kv_cache=kv_cache, manifest=manifest)


async def test_rows_of_several_adapters_in_one_batch_are_those_of_merged_models(
    engine: TransformersEngine,
    base: Any,
    model_of: Callable[..., Any],
    publish: Publish,
    transport: Any,
    collect: Callable[..., Any],
    plain_log_probs: Callable[..., list[float]],
) -> None:
    assert isinstance(engine, AdapterEngine)
    await take(engine, one := publish(1, seed=1, name="one"), transport)
    await take(engine, publish(2, seed=2, name="two", beside=[one]), transport)
    assert (engine.adapters, engine.weight_version) == ({"one": 1, "two": 2}, 2)
    models = {"": base, "one": merged(model_of, adapter_of(base, 1)), "two": merged(model_of, adapter_of(base, 2))}
    requests = [a_request(f"{name}-{seed}", name, seed=seed) for seed in range(3) for name in models]
    answers = await asyncio.gather(*(collect(engine, request) for request in requests))
    for request, answer in zip(requests, answers, strict=True):
        expected = plain_log_probs(models[request.adapter], request, answer.token_ids)
        assert answer.log_probs == pytest.approx(expected, abs=1e-4)
        assert set(answer.weight_versions) == {{"": 0, "one": 1, "two": 2}[request.adapter]}
    with pytest.raises(InvalidDataError, match="is for adapter 'three': none is served"):
        await collect(engine, a_request("x", "three"))


def test_modules_that_get_their_tokens_in_one_batch_or_in_none(base: Any) -> None:
    adapters, module = Adapters(base), base.get_submodule(MODULES[1])
    draw = torch.Generator().manual_seed(1)
    a, b, states = (torch.randn(shape, generator=draw) for shape in ((RANK, 48), (32, RANK), (1, 5, 48)))
    adapters._shadow = {"one": ServedAdapter(1, 2.0, {MODULES[1]: (a, b)}, {"a": a, "b": b})}
    adapters.prepared = 1
    adapters.swap(1)
    expected = module(states)
    expected[:, 1:3] += 2.0 * states[:, 1:3] @ a.T @ b.T
    with adapters.of_pass(["", "one", "one", "", ""]):
        assert torch.allclose(module(states), expected, atol=1e-5)
        assert torch.allclose(module(states[0]), expected[0], atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
async def test_adapters_that_come_while_the_engine_sleeps_serve_afterwards(
    folder_of: Callable[..., Path], publish: Publish, transport: Any, collect: Callable[..., Any]
) -> None:
    engine = TransformersEngine(str(folder_of()), device="cuda", threads=1)
    await engine.start()
    try:
        await take(engine, one := publish(1, seed=1, name="one"), transport)
        before = await collect(engine, a_request("one", "one"))
        await engine.sleep()
        await take(engine, two := publish(2, seed=1, name="two", beside=[one]), transport)
        await fetch_into(engine, publish(3, seed=2, name="two", beside=[two]), transport=transport)
        await engine.wake()
        for name in ("one", "two"):
            assert (await collect(engine, a_request(name, name))).token_ids == before.token_ids
    finally:
        await engine.close()


@pytest.mark.parametrize("kv_cache", ["keep", "recompute"])
async def test_a_new_version_of_an_adapter_reaches_its_own_requests_in_flight(
    engine: TransformersEngine,
    base: Any,
    model_of: Callable[..., Any],
    publish: Publish,
    transport: Any,
    kv_cache: Any,
    collect: Callable[..., Any],
    plain_log_probs: Callable[..., list[float]],
    mixed_log_probs: Callable[..., list[float]],
) -> None:
    await take(engine, one := publish(1, seed=1, name="one"), transport)
    await take(engine, two := publish(2, seed=2, name="two", beside=[one]), transport)
    await fetch_into(engine, newer := publish(3, seed=3, name="one", beside=[two]), transport=transport)
    generation, requests = engine._running(), [a_request(name, name) for name in ("", "one", "two")]
    step = generation.step

    def cut() -> None:
        if engine.weight_version == 2 and engine.statistics().tokens_generated >= 30:
            generation.commit(3, kv_cache=kv_cache)
        step()

    generation.step = cut  # type: ignore[method-assign]
    none, first, second = await asyncio.gather(*(collect(engine, request) for request in requests))
    assert (set(none.weight_versions), set(second.weight_versions)) == ({0}, {2})
    assert [span.version for span in first.spans] == [1, 3]
    models = {0: base} | {seed: merged(model_of, adapter_of(base, seed)) for seed in (1, 2, 3)}
    for request, answer, version in ((requests[0], none, 0), (requests[2], second, 2)):
        assert answer.log_probs == pytest.approx(plain_log_probs(models[version], request, answer.token_ids), abs=1e-4)
    if kv_cache == "keep":
        expected = mixed_log_probs(models, requests[1], first)
    else:
        cut_at = first.spans[0].end
        before, after = (plain_log_probs(models[version], requests[1], first.token_ids) for version in (1, 3))
        expected = before[:cut_at] + after[cut_at:]
    assert first.log_probs == pytest.approx(expected, abs=1e-4)
    await commit_into(engine, 3, kv_cache=kv_cache, manifest=newer)


async def test_a_replica_that_joins_late_takes_every_adapter_and_one_that_serves_takes_the_new_one(
    engine: TransformersEngine, publish: Publish, transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = publish(1, name="one")
    two = publish(2, name="two", beside=[one])
    await take(engine, two, transport)
    assert engine.adapters == {"one": 1, "two": 2}
    pulled: list[int] = []
    pull = transport.pull

    def noted(manifest: WeightManifest) -> Any:
        pulled.append(manifest.version)
        return pull(manifest)

    monkeypatch.setattr(transport, "pull", noted)
    await take(engine, publish(3, name="one", beside=[two]), transport)
    assert (pulled, engine.adapters) == ([3], {"one": 3, "two": 2})
    full = transport.publish([("w", torch.zeros(1))], version=4)
    with pytest.raises(WeightError, match=r"serves adapters \('one', 'two'\) beside its weights"):
        await fetch_into(engine, full, transport=transport)


def without_one(base: Any) -> dict[str, torch.Tensor]:
    tensors = adapter_of(base, 1)
    del tensors[f"base_model.model.{MODULES[0]}.lora_B.weight"]
    return tensors


def renamed(base: Any, old: str, new: str) -> dict[str, torch.Tensor]:
    return {name.replace(old, new): tensor for name, tensor in adapter_of(base, 1).items()}


def with_head(base: Any) -> dict[str, torch.Tensor]:
    outputs, inputs = base.lm_head.weight.shape
    head = {"A": torch.ones(RANK, inputs), "B": torch.ones(outputs, RANK)}
    return adapter_of(base, 1) | {f"base_model.model.lm_head.lora_{name}.weight": each for name, each in head.items()}


FAULTS: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "another rank": ("an adapter of rank 4 has", lambda base: {"rank": 4}),
    "a rank above the most": ("has rank 9; the engine takes 8", lambda base: {"rank": 9}),
    "no scale": ("has rank 3 and alpha 0.0", lambda base: {"alpha": 0.0}),
    "a missing matrix": (r"lacks the tensor .*lora_B", lambda base: {"tensors": without_one(base)}),
    "a transposed matrix": (
        "has shape",
        lambda base: {"tensors": {name: each.T.contiguous() for name, each in adapter_of(base, 1).items()}},
    ),
    "whole numbers": (
        "has dtype int64",
        lambda base: {"tensors": {name: each.long() for name, each in adapter_of(base, 1).items()}},
    ),
    "a module of another model": (
        "is for another base: the model has no linear module",
        lambda base: {"tensors": renamed(base, "q_proj", "qkv_proj")},
    ),
    "the output head": (
        "adapts the output head lm_head, .*: train it on modules among down_proj, ",
        lambda base: {"tensors": with_head(base)},
    ),
    "tensors of no adapter": ("belong to no adapter: bias", lambda base: {"tensors": {"bias": torch.ones(2)}}),
    "a base of other shapes": (
        "is for another base: embed has shape|is for another base: .* has shape",
        lambda base: {
            "base": tuple(
                msgspec.structs.replace(each, shape=(each.shape[0] + 1, *each.shape[1:]))
                for each in entries_of(base.named_parameters())
            )
        },
    ),
    "a base with other names": (
        "is for another base: weights of version 1 do not fit",
        lambda base: {"base": entries_of([("w", torch.ones(1))])},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_an_adapter_that_does_not_fit_is_named_and_nothing_changes(
    engine: TransformersEngine, base: Any, publish: Publish, transport: Any, fault: str
) -> None:
    message, wrong = FAULTS[fault]
    with pytest.raises(WeightMismatchError, match=message):
        await fetch_into(engine, publish(1, **wrong(base)), transport=transport)
    assert (engine.adapters, engine.weight_version) == ({}, 0)
    await take(engine, publish(2), transport)


async def test_other_target_modules_or_an_old_version_are_named(
    engine: TransformersEngine, base: Any, publish: Publish, transport: Any
) -> None:
    await take(engine, newest := publish(1), transport)
    fewer = {name: each for name, each in adapter_of(base, 1).items() if "q_proj" in name}
    with pytest.raises(WeightMismatchError, match="has other target modules than its last version"):
        await fetch_into(engine, publish(2, tensors=fewer), transport=transport)
    adapters = engine._running().decoder.adapters
    with pytest.raises(WeightVersionError, match="does not follow version 1"):
        adapters.prepare([(newest, {})], version=2, weights=0, stop=threading.Event())


async def test_a_cancelled_prepare_prepares_nothing(
    engine: TransformersEngine, publish: Publish, transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, began, goes_on = ModelTensors.check_adapter, threading.Event(), threading.Event()

    def slowly(*arguments: Any, **options: Any) -> list[str]:
        began.set()
        goes_on.wait(10.0)
        return check(*arguments, **options)

    monkeypatch.setattr(ModelTensors, "check_adapter", slowly)
    fetching = asyncio.ensure_future(fetch_into(engine, publish(1), transport=transport))
    await asyncio.to_thread(began.wait, 10.0)
    fetching.cancel()
    await asyncio.sleep(0)
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    with pytest.raises(WeightVersionError, match="none is prepared"):
        await engine.commit_weights(1)


async def test_the_weights_of_another_base_are_found_by_their_checksums(
    engine: TransformersEngine, model_of: Callable[..., Any], publish: Publish, transport: Any
) -> None:
    other = entries_of(model_of("llama", seed=5).named_parameters())
    with pytest.raises(WeightMismatchError, match=r"is for another base: its model\..* is not what the engine serves"):
        await fetch_into(engine, publish(1, base=other), transport=transport)
    await take(engine, proven := publish(2), transport)
    with torch.no_grad():  # as something else that writes to the memory
        engine._running().decoder.model.model.norm.weight[0] += 1e-3
    with pytest.raises(LiveWeightsError, match=r"serves weight version 2, but its tensor model\.norm\.weight"):
        await commit_into(engine, 2, kv_cache="keep", manifest=proven)


def skip(self: Adapters, version: int) -> frozenset[str]:
    self.prepared, self._shadow = None, {}
    self.serving = {name: replace(each, version=version) for name, each in self.serving.items()}
    return frozenset(self.serving)


async def test_a_commit_that_was_skipped_is_found(
    engine: TransformersEngine, publish: Publish, transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await take(engine, publish(1, seed=1), transport)
    monkeypatch.setattr(Adapters, "swap", skip)
    await fetch_into(engine, newer := publish(2, seed=2), transport=transport)
    with pytest.raises(LiveWeightsError, match=r"serves weight version 2, but its tensor .*lora_A"):
        await commit_into(engine, 2, kv_cache="keep", manifest=newer)


async def test_a_scale_that_was_lost_is_found_by_the_canary(
    engine: TransformersEngine, base: Any, model_of: Callable[..., Any], publish: Publish, transport: Any
) -> None:
    model, ids = merged(model_of, adapter_of(base, 1)), tuple(range(3, 25))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    log_probs = tuple(float(logits[at, token]) for at, token in enumerate(ids[1:]))
    canary = Canary(token_ids=ids, log_probs=log_probs, tolerance=1e-4)
    await take(engine, msgspec.structs.replace(publish(1, name="one"), canary=canary), transport)
    wrong = msgspec.structs.replace(publish(2, alpha=1.0, name="two"), canary=canary)
    with pytest.raises(LiveWeightsError, match="it computes with other weights"):
        await take(engine, wrong, transport)


async def test_an_engine_without_adapters_names_them(publish: Publish, transport: Any) -> None:
    from asyncrl.testing import EchoEngine

    engine = EchoEngine("", weight_version=0)
    with pytest.raises(WeightError, match="version 1 is an adapter, and EchoEngine serves none"):
        await fetch_into(engine, publish(1), transport=transport)


def test_versions_of_adapters_by_the_engine_s_version_and_numbers_that_are_given_back(
    base: Any, publish: Publish, folder_of: Callable[..., Path]
) -> None:
    def versions() -> AdapterVersions:
        return AdapterVersions(ModelTensors(base), str(folder_of()), weights=0, max_rank=4, most=2)

    served, one, two = versions(), publish(1, name="one"), publish(2, name="two")
    served.committed(served.check(one))
    served.committed(served.check(two))
    newer = publish(5, name="one", beside=[two])
    assert served.check(newer) == [newer]
    served.committed([newer])
    assert (served.serving, served.numbers) == ({"one": 5, "two": 2}, {"one": 1, "two": 2})
    found = [[served.version_of(name, at=at) for at in (0, 1, 2, 4, 5)] for name in ("one", "two", "")]
    assert found == [[0, 1, 1, 1, 5], [0, 0, 2, 2, 2], [0, 0, 0, 0, 0]]
    with pytest.raises(WeightMismatchError, match="'three' is one more than the engine takes: 2"):
        served.check(publish(6, name="three"))
    late = versions()  # a replica that joins has them at once, and a number that was not used is free again
    late.check(publish(7, name="four"))
    parts = late.check(newer)
    assert (parts, late.numbers) == ([two, newer], {"two": 1, "one": 2})
    assert late.committed(parts) == {"one", "two"}
    assert late.version_of("one", at=5) == 5


def test_what_sglang_fuses_is_completed_with_zeros(base: Any) -> None:
    like = {name: tensor for name, tensor in base.named_parameters() if "layers.0" in name}
    name = "base_model.model.model.layers.0.self_attn.{}.lora_{}.weight"
    adapter = {name.format("q_proj", "A"): torch.ones(2, 32), name.format("q_proj", "B"): torch.ones(32, 2)}
    found = completed(adapter, like, rank=2)
    assert {key: tuple(each.shape) for key, each in found.items()} == {
        name.format(module, matrix): shape
        for module, outputs in (("q_proj", 32), ("k_proj", 16), ("v_proj", 16))
        for matrix, shape in (("A", (2, 32)), ("B", (outputs, 2)))
    }
    assert {float(each.sum()) for key, each in found.items() if key not in adapter} == {0.0}
    assert all(torch.equal(found[key], each) for key, each in adapter.items())
