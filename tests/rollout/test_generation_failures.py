"""Failures of generation that other systems have shown: each check finds a planted copy of the bug, and none here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import EngineError, EnvironmentFailure
from asyncrl.interfaces import Generation, GenerationChunk, GenerationRequest, Message, SamplingParams, Step
from asyncrl.rollout import episode
from asyncrl.rollout.chat import ChatRenderer
from asyncrl.rollout.trajectory import Trajectory, prompt_rows
from asyncrl.rollout.worker import EpisodeLimits, RolloutSpec, RolloutWorker
from asyncrl.testing import EchoEnvironment, EchoFactory, ScriptedEngine
from asyncrl.weights import TransportSpec

ARGUMENTS: dict[str, Any] = {
    "task": {"word": "go"},
    "sampling": SamplingParams(max_new_tokens=50),
    "max_turns": 1,
    "max_seq_len": 200,
    "deadline_s": 5.0,
    "request_prefix": "row",
    "seed": 7,
}


def wrong(trajectory: Trajectory, *, delivered: int) -> list[str]:
    """What is wrong with taking this for a rollout, when the engine delivered so many tokens, and no end to them."""
    found = []
    if not sum(trajectory.loss_mask):
        found.append("an empty text")
    elif sum(trajectory.loss_mask) == delivered:
        found.append("an answer that was never finished")
    found.append(f"reward {trajectory.reward:g}")
    return found


class DyingEngine(ScriptedEngine):
    """Its stream ends after two tokens, without a word, as a connection to a process that is gone may."""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        yield GenerationChunk(token_ids=(5, 6), log_probs=(-0.5, -0.5), weight_versions=(0, 0))


async def taken_for_finished(engine: Any, request: GenerationRequest, **_: Any) -> Generation:
    """The planted bug: what came is what there is."""
    chunks = [chunk async for chunk in engine.generate(request)]
    return Generation(
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        log_probs=tuple(value for chunk in chunks for value in chunk.log_probs),
        weight_versions=tuple(version for chunk in chunks for version in chunk.weight_versions),
        finish_reason=(chunks[-1].finish_reason if chunks else None) or "stop",
    )


@pytest.mark.parametrize("planted", [False, True])
async def test_a_dead_engine_is_no_success(scratch: ChatRenderer, monkeypatch: pytest.MonkeyPatch, planted: bool):
    if planted:
        monkeypatch.setattr(episode, "_generate", taken_for_finished)
    engine = DyingEngine(lambda _: [])
    await engine.start()
    message, found = "", []
    try:
        found = wrong(await episode.run_episode(engine, EchoEnvironment(), scratch, **ARGUMENTS), delivered=2)
    except EngineError as error:
        message = str(error)
    assert ("without a finish reason" in message) is not planted
    assert found == (["an answer that was never finished", "reward 0"] if planted else [])


class Broken(EchoEnvironment):
    async def step(self, reply: Message) -> Step:
        raise ConnectionError("the sandbox is gone")


async def with_a_default(engine: Any, environment: Any, renderer: ChatRenderer, **arguments: Any) -> Trajectory:
    """The planted bug: whatever happens, the batch gets its row."""
    try:
        return await episode.run_episode(engine, environment, renderer, **arguments)
    except Exception:  # noqa: BLE001  that is the bug
        return Trajectory(
            task=arguments["task"],
            token_ids=(1,),
            loss_mask=(False,),
            behaviour_log_probs=(0.0,),
            weight_versions=(-1,),
            reward=0.0,
            turns=(),
            finish_reason="done",
        )


@pytest.mark.parametrize(("play", "planted"), [(episode.run_episode, False), (with_a_default, True)])
async def test_an_exception_is_no_empty_text_with_reward_0(scratch: ChatRenderer, play: Any, planted: bool):
    engine = ScriptedEngine(lambda _: scratch.tokenizer.encode("go<|end|>", add_special_tokens=False))
    await engine.start()
    failure, found = None, []
    try:
        found = wrong(await play(engine, Broken(), scratch, **ARGUMENTS), delivered=0)
    except EnvironmentFailure as error:
        failure = error
    assert found == (["an empty text", "reward 0"] if planted else [])
    assert (failure is None) is planted
    if failure is not None:
        assert isinstance(failure.__cause__, ConnectionError)
        assert failure.tokens_generated > 0


class Refusing(EchoFactory):
    """Cannot make its first environments, as where a server has no place for more of them."""

    def __init__(self, *, errors: list[Exception]) -> None:
        super().__init__()
        self._errors = errors

    def make(self) -> EchoEnvironment:
        if self._errors:
            raise self._errors.pop()
        return super().make()


@pytest.mark.parametrize("refusals", [2, 3])
async def test_an_environment_that_cannot_be_made_is_tried_again(scratch: ChatRenderer, tmp_path: Path, refusals: int):
    scratch.tokenizer.save_pretrained(tmp_path)
    spec = RolloutSpec(
        engine="asyncrl.testing:EchoEngine",
        environment=Refusing,
        environment_options={"errors": [ConnectionError("no place"), EnvironmentFailure("none"), OSError()][:refusals]},
        transport=TransportSpec(name="asyncrl.testing:EmptyTransport", namespace="run"),
        limits=EpisodeLimits(max_turns=1, max_seq_len=64),
        sampling=SamplingParams(max_new_tokens=8),
    )
    worker = RolloutWorker(spec)
    await worker.start(str(tmp_path), 0)
    prompts = prompt_rows([{"word": "a"}], group_id=0, seeds=[1], purpose="train")
    if refusals < spec.limits.max_attempts:
        failures = (await worker.rollout(prompts)).meta_info["failures"]
        assert [name.partition(" ")[0] for name in failures] == ["EnvironmentFailure", "ConnectionError"]
    else:
        with pytest.raises(EnvironmentFailure, match="could not be made: ConnectionError: no place"):
            await worker.rollout(prompts)
    await worker.aclose()
