"""Adapters on real vLLM and SGLang: rows of several in one batch, new versions while they are sampled, refusals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from asyncrl.errors import InvalidDataError, LiveWeightsError, WeightMismatchError
from asyncrl.interfaces import GenerationRequest, SamplingParams
from asyncrl.rollout.live_weights import commit_into
from asyncrl.weights import Adapter, Canary, TransportSpec, WeightManifest, entries_of
from engines.rollout.remote.engine import RemoteEngine
from engines.weights.shared_memory import SharedMemoryTransport

ROOT = Path(__file__).parents[3]
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
SHAPE = {"hidden_size": 64, "intermediate_size": 128, **HEADS}
"""On a CPU vLLM has no smaller heads; SGLang pads a size that is no multiple of 64, and not the adapters beside it."""
RANK, ALPHA, BOUND = 4, 8.0, 1e-4
TARGETS = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
MODULES = [f"model.layers.{layer}.{name}" for layer in range(2) for name in TARGETS]


def engine(name: str) -> Any:
    python = os.environ.get(f"ASYNCRL_{name.upper()}_PYTHON") or str(ROOT / f".venv-{name}/bin/python")
    missing = pytest.mark.skipif(shutil.which(python) is None, reason=f"no {name} at {python}: asyncrl engine install")
    return pytest.param((name, python), marks=[getattr(pytest.mark, name), missing], id=name)


ENGINES = pytest.mark.parametrize("named", [engine("vllm"), engine("sglang")])
pytestmark = pytest.mark.timeout(400)


def adapter_of(base: Any, seed: int) -> dict[str, torch.Tensor]:
    draw, tensors = torch.Generator().manual_seed(seed), {}
    for module in MODULES:
        outputs, inputs = base.get_submodule(module).weight.shape
        for matrix, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
            tensors[f"base_model.model.{module}.lora_{matrix}.weight"] = torch.empty(shape).normal_(
                std=0.2, generator=draw
            )
    return tensors


class Served:
    """An engine, a publisher, and the merged models of what was published, by version."""

    def __init__(self, engine: RemoteEngine, transport: SharedMemoryTransport, model_of: Callable[..., Any]) -> None:
        self.engine = engine
        self._transport = transport
        self._model_of = model_of
        self.base = model_of("llama", seed=0, **SHAPE)
        self.models = {0: self.base}
        self.parts: dict[str, WeightManifest] = {}

    def publish(self, name: str, *, seed: int, **fields: Any) -> WeightManifest:
        version, tensors = max(self.models) + 1, adapter_of(self.base, seed)
        model = self._model_of("llama", seed=0, **SHAPE)
        for module in MODULES:
            a, b = (tensors[f"base_model.model.{module}.lora_{matrix}.weight"] for matrix in "AB")
            model.get_submodule(module).weight += ALPHA / RANK * b @ a
        self.models[version] = model
        given = {"rank": RANK, "alpha": ALPHA, "name": name, "base": entries_of(self.base.named_parameters())}
        manifest = self._transport.publish(tensors.items(), version=version)
        manifest = msgspec.structs.replace(manifest, adapter=Adapter(**{**given, **fields}))
        beside = tuple(part for each, part in self.parts.items() if each != name)
        if not fields:  # what is wrong is not served
            self.parts[name] = manifest
        return msgspec.structs.replace(manifest, beside=beside)

    def canary(self, version: int) -> Canary:
        ids = tuple(range(3, 25))
        with torch.no_grad():
            logits = self.models[version](input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        log_probs = tuple(float(logits[at, token]) for at, token in enumerate(ids[1:]))
        return Canary(token_ids=ids, log_probs=log_probs, tolerance=BOUND)

    async def take(self, manifest: WeightManifest, kv_cache: Any = "keep") -> None:
        manifest = msgspec.structs.replace(manifest, canary=self.canary(manifest.version))
        await self.engine.fetch_weights(manifest)
        await commit_into(self.engine, manifest.version, kv_cache=kv_cache, manifest=manifest)


@contextlib.asynccontextmanager
async def serving(
    named: tuple[str, str], folder: Path, memory: Path, model_of: Callable[..., Any]
) -> AsyncIterator[Served]:
    name, python = named
    memory.mkdir()
    options = {"directory": str(memory), "max_versions": 64}
    spec = TransportSpec(name="shared_memory", namespace="adapters", options=options)
    own = {"vllm": {"kv_cache_bytes": 64 << 20}, "sglang": {"max_adapters": 4}}[name]
    made = RemoteEngine(
        str(folder),
        engine=name,
        python=python,
        transport=spec,
        dtype="float32",
        threads=1,
        max_adapter_rank=RANK,
        options={"max_running_requests": 16, **own},
    )
    transport = SharedMemoryTransport(namespace="adapters", **options)  # type: ignore[arg-type]
    try:
        await made.start()
        yield Served(made, transport, model_of)
    finally:
        await made.close()
        transport.close()


def a_request(name: str, adapter: str, *, seed: int = 0, tokens: int = 24) -> GenerationRequest:
    sampling = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    prompt = tuple(range(3, 9 + seed))
    return GenerationRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, adapter=adapter)


@ENGINES
async def test_adapters_beside_the_weights_of_a_real_engine(
    named: tuple[str, str],
    folder_of: Callable[..., Path],
    model_of: Callable[..., Any],
    collect: Callable[..., Any],
    plain_log_probs: Callable[..., list[float]],
    mixed_log_probs: Callable[..., list[float]],
    tmp_path: Path,
) -> None:
    async with serving(named, folder_of("llama", seed=0, **SHAPE), tmp_path / "memory", model_of) as served:
        one = served.publish("one", seed=1)
        await served.take(served.publish("two", seed=2))  # as a replica that joins late: both adapters come at once
        assert (served.engine.weight_version, one.version) == (2, 1)

        # Rows of several adapters, and of none, in one batch equal merged models.
        requests = [a_request(f"{name}-{at}", name, seed=at) for at in range(3) for name in ("", "one", "two")]
        for request, answer in zip(
            requests, await asyncio.gather(*(collect(served.engine, each) for each in requests)), strict=True
        ):
            version = {"": 0, "one": 1, "two": 2}[request.adapter]
            assert set(answer.weight_versions) == {version}
            expected = plain_log_probs(served.models[version], request, answer.token_ids)
            assert answer.log_probs == pytest.approx(expected, abs=BOUND)

        # New versions while requests run: each token's version is what its log-prob was computed with.
        rng = random.Random(3)
        for turn in range(4):
            name, kv_cache = rng.choice(["one", "two"]), ("keep", "recompute")[turn % 2]
            requests = [a_request(f"{turn}-{each}", each, tokens=160) for each in ("", "one", "two")]
            running = [asyncio.create_task(collect(served.engine, each)) for each in requests]
            newest = served.publish(name, seed=10 + turn)
            await served.take(newest, kv_cache)
            for request, task in zip(requests, running, strict=True):
                answer = await task
                spans = [span.version for span in answer.spans]
                assert len(answer.token_ids) == 160
                if request.adapter != name:
                    assert len(spans) == 1
                if (kv_cache == "keep" and named[0] != "sglang") or len(spans) == 1:  # SGLang always computes it again
                    expected = mixed_log_probs(served.models, request, answer)
                else:
                    by_version = {
                        each: plain_log_probs(served.models[each], request, answer.token_ids) for each in set(spans)
                    }
                    expected = [by_version[each][at] for at, each in enumerate(answer.weight_versions)]
                assert answer.log_probs == pytest.approx(expected, abs=BOUND, rel=BOUND)

        # What does not fit is named, and the engine goes on.
        with pytest.raises(InvalidDataError, match="is for adapter 'three': none is served"):
            await collect(served.engine, a_request("x", "three"))
        with pytest.raises(WeightMismatchError, match="an adapter of rank 3 has"):
            await served.take(served.publish("one", seed=5, rank=3))
        other = entries_of(model_of("llama", seed=8, **SHAPE).named_parameters())
        with pytest.raises(WeightMismatchError, match="is for another base: its"):
            await served.take(served.publish("two", seed=5, base=other))
        with pytest.raises(LiveWeightsError, match="the log-probs of 21 fixed tokens differ"):
            await served.take(served.publish("one", seed=6, alpha=1.0))
