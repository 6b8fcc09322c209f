"""What an engine samples under a version is handed on once the version is proven."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.data import DataProto
from asyncrl.errors import LiveWeightsError
from asyncrl.interfaces import GenerationChunk, GenerationRequest, SamplingParams
from asyncrl.rollout.chat import ChatRenderer
from asyncrl.rollout.trajectory import prompt_rows
from asyncrl.rollout.worker import EpisodeLimits, RolloutSpec, RolloutWorker
from asyncrl.testing import EchoEngine
from asyncrl.weights import Canary, TransportSpec, WeightManifest


class HeldCanary(EchoEngine):
    """Gives a canary's log-probs, -0.5 each, when ``opened`` is set."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.opened = asyncio.Event()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        if request.probe:
            await self.opened.wait()
        async for chunk in super().generate(request):
            yield chunk


def version_one(*, log_prob: float) -> WeightManifest:
    canary = Canary(token_ids=(1, 2, 3), log_probs=(log_prob, log_prob), tolerance=1e-3)
    return WeightManifest(version=1, transport="empty", location="", tensors=(), canary=canary)


def prompts() -> DataProto:
    return prompt_rows([{"word": "a"}], group_id=0, seeds=[1], purpose="train")


@pytest.fixture
async def worker(scratch: ChatRenderer, tmp_path: Path) -> AsyncIterator[RolloutWorker]:
    scratch.tokenizer.save_pretrained(tmp_path)
    spec = RolloutSpec(
        engine=HeldCanary,
        environment="asyncrl.testing:EchoFactory",
        transport=TransportSpec(name="asyncrl.testing:EmptyTransport", namespace="run"),
        limits=EpisodeLimits(max_turns=1, max_seq_len=64),
        sampling=SamplingParams(max_new_tokens=8),
    )
    made = RolloutWorker(spec)
    await made.start(str(tmp_path), 0)
    yield made
    await made.aclose()


async def test_rollouts_that_end_before_the_proof_wait_for_it(worker: RolloutWorker) -> None:
    await worker.prepare_weights(version_one(log_prob=-0.5))
    commit = asyncio.create_task(worker.commit_weights(1))
    rollout = asyncio.create_task(worker.rollout(prompts()))
    for _ in range(200):
        await asyncio.sleep(0)
    engine: Any = worker._engine
    assert engine.statistics().requests_finished == 1
    assert not rollout.done()
    engine.opened.set()
    assert (await commit).canary == 0
    assert list((await rollout).meta_info["summary"]["version_tokens"]) == [1]


async def test_rollouts_of_a_version_that_is_not_proven_are_not_handed_on(worker: RolloutWorker) -> None:
    await worker.prepare_weights(version_one(log_prob=-2.0))
    commit = asyncio.create_task(worker.commit_weights(1))
    before = asyncio.create_task(worker.rollout(prompts()))
    await asyncio.sleep(0)
    engine: Any = worker._engine
    engine.opened.set()
    with pytest.raises(LiveWeightsError, match="fixed tokens differ from the trainer's"):
        await commit
    for rollout in (before, worker.rollout(prompts())):
        with pytest.raises(LiveWeightsError, match="version 1"):
            await rollout


async def test_a_proof_that_is_cut_off_proves_nothing(worker: RolloutWorker) -> None:
    await worker.prepare_weights(version_one(log_prob=-0.5))
    commit = asyncio.create_task(worker.commit_weights(1))
    await asyncio.sleep(0)
    commit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await commit
    with pytest.raises(LiveWeightsError, match="version 1 was committed and not proven"):
        await worker.rollout(prompts())
    engine: Any = worker._engine
    engine.opened.set()
    await worker.prepare_weights(version_one(log_prob=-0.5))
    await worker.commit_weights(1)
    assert len(await worker.rollout(prompts())) == 1
