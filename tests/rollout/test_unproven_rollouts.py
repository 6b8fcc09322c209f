"""What an engine samples under a version is handed on once the version is proven."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.data import DataProto
from asyncrl.errors import LiveWeightsError, WeightVersionError
from asyncrl.interfaces import GenerationChunk, GenerationRequest, Message, SamplingParams, Step
from asyncrl.rollout.chat import ChatRenderer
from asyncrl.rollout.trajectory import prompt_rows
from asyncrl.rollout.turns import decode_turns
from asyncrl.rollout.worker import EpisodeLimits, RolloutSpec, RolloutWorker
from asyncrl.testing import EchoEngine, EchoEnvironment, EchoFactory
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


class HeldSteps(EchoFactory):
    """Its environments answer while ``opened`` is set, as it is at first."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = asyncio.Event()
        self.opened.set()

    def make(self) -> EchoEnvironment:
        return HeldEnvironment(self.opened)


class HeldEnvironment(EchoEnvironment):
    def __init__(self, opened: asyncio.Event) -> None:
        super().__init__()
        self._opened = opened

    async def step(self, reply: Message) -> Step:
        await self._opened.wait()
        return await super().step(reply)


def version(number: int, *, log_prob: float = -0.5) -> WeightManifest:
    canary = Canary(token_ids=(1, 2, 3), log_probs=(log_prob, log_prob), tolerance=1e-3)
    return WeightManifest(version=number, transport="empty", location="", tensors=(), canary=canary)


def prompts(*, attempt: int | None = None) -> DataProto:
    return prompt_rows([{"word": "a"}], group_id=0, seeds=[1], purpose="train", attempt=attempt)


async def settled() -> None:
    for _ in range(200):
        await asyncio.sleep(0)


@pytest.fixture
async def worker(scratch: ChatRenderer, tmp_path: Path) -> AsyncIterator[RolloutWorker]:
    scratch.tokenizer.save_pretrained(tmp_path)
    spec = RolloutSpec(
        engine=HeldCanary,
        environment=HeldSteps,
        transport=TransportSpec(name="asyncrl.testing:EmptyTransport", namespace="run"),
        limits=EpisodeLimits(max_turns=1, max_seq_len=64),
        sampling=SamplingParams(max_new_tokens=8),
        gather_s=0.0,
    )
    made = RolloutWorker(spec)
    await made.start(str(tmp_path), 0)
    yield made
    await made.aclose()


def parts(worker: RolloutWorker) -> tuple[HeldCanary, HeldSteps]:
    engine, environments = worker._engine, worker._environments
    assert isinstance(engine, HeldCanary)
    assert isinstance(environments, HeldSteps)
    return engine, environments


async def test_rollouts_that_end_before_the_proof_wait_for_it(worker: RolloutWorker) -> None:
    await worker.prepare_weights(version(1, log_prob=-0.5))
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
    await worker.prepare_weights(version(1, log_prob=-2.0))
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
    await worker.prepare_weights(version(1, log_prob=-0.5))
    commit = asyncio.create_task(worker.commit_weights(1))
    await asyncio.sleep(0)
    commit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await commit
    with pytest.raises(LiveWeightsError, match="version 1 was committed and not proven"):
        await worker.rollout(prompts())
    engine: Any = worker._engine
    engine.opened.set()
    await worker.prepare_weights(version(1, log_prob=-0.5))
    await worker.commit_weights(1)
    assert len(await worker.rollout(prompts())) == 1


async def test_a_commit_that_fails_before_the_engine_swaps_costs_no_rollout(worker: RolloutWorker) -> None:
    with pytest.raises(WeightVersionError, match="cannot be committed"):
        await worker.commit_weights(2)
    assert list((await worker.rollout(prompts())).meta_info["summary"]["version_tokens"]) == [0]


async def test_rollouts_of_older_versions_do_not_wait_for_a_proof(worker: RolloutWorker) -> None:
    engine, environments = parts(worker)
    environments.opened.clear()
    rollout = asyncio.create_task(worker.rollout(prompts()))
    await settled()
    assert engine.statistics().requests_finished == 1
    await worker.prepare_weights(version(1))
    commit = asyncio.create_task(worker.commit_weights(1))
    await settled()
    environments.opened.set()
    async with asyncio.timeout(10.0):
        assert list((await rollout).meta_info["summary"]["version_tokens"]) == [0]
    assert not commit.done()
    engine.opened.set()
    await commit


async def test_rollouts_of_a_version_that_was_never_proven_are_not_handed_on_after_a_later_one_was(
    worker: RolloutWorker,
) -> None:
    engine, environments = parts(worker)
    environments.opened.clear()
    await worker.prepare_weights(version(1))
    commit = asyncio.create_task(worker.commit_weights(1))
    rollout = asyncio.create_task(worker.rollout(prompts()))
    await settled()
    assert engine.statistics().requests_finished == 1
    commit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await commit
    engine.opened.set()
    await worker.prepare_weights(version(2))
    await worker.commit_weights(2)
    environments.opened.set()
    with pytest.raises(LiveWeightsError, match="version 1 was committed and not proven"):
        await rollout


@pytest.mark.parametrize("proven", [True, False])
async def test_turns_of_a_version_leave_once_it_is_proven(worker: RolloutWorker, proven: bool) -> None:
    engine, environments = parts(worker)
    environments.opened.clear()
    await worker.prepare_weights(version(1, log_prob=-0.5 if proven else -2.0))
    commit = asyncio.create_task(worker.commit_weights(1))
    rollout = asyncio.create_task(worker.rollout(prompts(attempt=1)))
    turns = asyncio.create_task(worker.turns())
    await settled()
    assert engine.statistics().requests_finished == 1
    assert not turns.done()
    engine.opened.set()
    await asyncio.wait([commit])
    await settled()
    assert turns.done() is proven
    environments.opened.set()
    if proven:
        assert [turn.newest_version for turn in decode_turns(turns.result())] == [1]
        assert len(await rollout) == 1
        return
    for failed in (commit, rollout):
        with pytest.raises(LiveWeightsError, match="version 1"):
            await failed
    await settled()
    assert not turns.done()
    turns.cancel()
