"""Episodes: turns, limits, failures, and what they leave in tokens."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.data.ragged import rows_of, values_of
from asyncrl.envs.calculator import CalculatorFactory
from asyncrl.errors import (
    EngineClosedError,
    EnvironmentDeadlineError,
    EnvironmentFailure,
    InvalidDataError,
    RequestAbortedError,
)
from asyncrl.interfaces import Environment, Message, SamplingParams, Step, Task, Tool
from asyncrl.rollout.branches import unfold
from asyncrl.rollout.chat import ChatRenderer
from asyncrl.rollout.episode import (
    Diverged,
    EpisodePolicy,
    Players,
    replay_episode,
    run_agent_episode,
    run_episode,
)
from asyncrl.rollout.trajectory import Trajectory, Turn, encode_rows, trajectories_to_batch
from asyncrl.rollout.turns import TurnFeed, TurnRecorder, decode_turns
from asyncrl.testing import EchoEnvironment, ScriptedEngine
from asyncrl.testing.clock import run_virtually

TASK: Task = {"question": "(3+4)-2", "answer": 5, "steps": [[3, "+", 4, 7], [7, "-", 2, 5]]}
FIRST_CALL = '<tool_call>{"name": "calculator", "arguments": {"a": 3, "operator": "+", "b": 4}}</tool_call><|end|>'
SECOND_CALL = '<tool_call>{"name": "calculator", "arguments": {"a": 7, "operator": "-", "b": 2}}</tool_call><|end|>'


def engine_saying(renderer: ChatRenderer, *turns: str, **options: Any) -> ScriptedEngine:
    """Says the first text to a prompt without an earlier turn of its own, the next one later on, and so forth."""
    begun = renderer.tokenizer.encode("<|assistant|>", add_special_tokens=False)[0]

    def reply(prompt: tuple[int, ...]) -> list[int]:
        return renderer.tokenizer.encode(turns[prompt.count(begun) - 1], add_special_tokens=False)

    return ScriptedEngine(reply, **options)


def engine_answering(renderer: ChatRenderer) -> ScriptedEngine:
    """Says the same three tokens every time, the last one the end of its turn."""
    return ScriptedEngine(
        lambda _: [*renderer.tokenizer.encode("ok", add_special_tokens=False), renderer.end_of_turn_id]
    )


async def play(
    engine: ScriptedEngine, environment: Environment, renderer: ChatRenderer, task: Task = TASK, **overrides: Any
) -> Trajectory:
    await engine.start()
    arguments: dict[str, Any] = {
        "sampling": SamplingParams(max_new_tokens=50),
        "max_turns": 4,
        "max_seq_len": 200,
        "deadline_s": 5.0,
        "request_prefix": "row",
        "seed": 7,
    }
    return await run_episode(engine, environment, renderer, task, **(arguments | overrides))


async def test_an_episode_of_three_turns(scratch: ChatRenderer, factory: CalculatorFactory) -> None:
    engine = engine_saying(scratch, FIRST_CALL, SECOND_CALL, "5<|end|>", weight_version=3, log_prob=-0.25)
    trajectory = await play(engine, factory.make(), scratch)
    assert trajectory.reward == 1.0
    assert trajectory.finish_reason == "done"
    assert trajectory.info == {"calls": 2, "mistakes": 0}
    assert scratch.decode(trajectory.token_ids) == (
        f"<|user|>(3+4)-2<|end|><|assistant|>{FIRST_CALL}<|tool|>7<|end|><|assistant|>{SECOND_CALL}"
        "<|tool|>5<|end|><|assistant|>5<|end|>"
    )
    sampled = [t for t, mine in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if mine]
    assert scratch.decode(sampled) == FIRST_CALL + SECOND_CALL + "5<|end|>"
    for mine, log_prob, version in zip(
        trajectory.loss_mask, trajectory.behaviour_log_probs, trajectory.weight_versions, strict=True
    ):
        assert (log_prob, version) == ((-0.25, 3) if mine else (0.0, -1))
    assert [(turn.finish_reason, turn.message["content"]) for turn in trajectory.turns] == [
        ("stop", ""),
        ("stop", ""),
        ("stop", "5"),
    ]
    assert trajectory.token_ids[trajectory.turns[2].start : trajectory.turns[2].end] == tuple(sampled[-2:])


async def test_each_prompt_is_the_tokens_before_and_each_turn_has_id_and_seed_of_its_own(
    scratch: ChatRenderer, factory: CalculatorFactory
) -> None:
    engine = engine_saying(scratch, FIRST_CALL, SECOND_CALL, "5<|end|>")
    trajectory = await play(engine, factory.make(), scratch)
    for request, turn in zip(engine.requests, trajectory.turns, strict=True):
        assert request.prompt_token_ids == trajectory.token_ids[: turn.start]
        assert scratch.end_of_turn_id in request.sampling.stop_token_ids
    assert [request.request_id for request in engine.requests] == ["row-0", "row-1", "row-2"]
    assert len({request.sampling.seed for request in engine.requests}) == 3

    again = engine_saying(scratch, FIRST_CALL, SECOND_CALL, "5<|end|>")
    await play(again, factory.make(), scratch)
    assert [r.sampling.seed for r in again.requests] == [r.sampling.seed for r in engine.requests]


async def test_a_turn_cut_by_its_own_limit_is_closed_and_answered(
    scratch: ChatRenderer, factory: CalculatorFactory
) -> None:
    engine = engine_saying(scratch, "<tool_call>{" + 20 * "0", "5<|end|>")
    trajectory = await play(engine, factory.make(), scratch, sampling=SamplingParams(max_new_tokens=16))
    first, second = trajectory.turns
    assert first.finish_reason == "length"
    assert "malformed" in first.message
    between = scratch.decode(trajectory.token_ids[first.end : second.start])
    assert between.startswith("<|end|><|tool|>error: a tool call could not be read")
    assert trajectory.reward == 1.0
    assert trajectory.info == {"calls": 1, "mistakes": 1}


async def test_the_last_turn_ends_the_episode_with_what_was_earned(
    scratch: ChatRenderer, factory: CalculatorFactory
) -> None:
    trajectory = await play(engine_saying(scratch, FIRST_CALL), factory.make(), scratch, max_turns=1)
    assert (trajectory.finish_reason, trajectory.reward) == ("max_turns", 0.0)
    assert trajectory.loss_mask[-1], "nothing is appended after the last turn"

    words = ScriptedEngine(lambda prompt: scratch.tokenizer.encode("word0<|end|>"))
    kept = await play(words, EchoEnvironment(), scratch, {"word": "word0", "turns": 9}, max_turns=3)
    assert (kept.finish_reason, kept.reward, len(kept.turns)) == ("max_turns", 3.0, 3)


async def test_a_full_context_ends_the_episode(scratch: ChatRenderer, factory: CalculatorFactory) -> None:
    prompt_tokens = len(scratch.prompt([{"role": "user", "content": TASK["question"]}]))
    engine = engine_saying(scratch, "1" * 40)
    trajectory = await play(engine, factory.make(), scratch, max_seq_len=prompt_tokens + 6)
    assert (trajectory.finish_reason, trajectory.reward) == ("max_seq_len", 0.0)
    assert len(trajectory.token_ids) == prompt_tokens + 6
    assert trajectory.info == {}, "a turn that was cut by the context is not shown to the environment"

    call_tokens = len(scratch.tokenizer.encode(FIRST_CALL))
    no_room_to_answer = prompt_tokens + call_tokens + 2
    trajectory = await play(engine_saying(scratch, FIRST_CALL), factory.make(), scratch, max_seq_len=no_room_to_answer)
    assert trajectory.finish_reason == "max_seq_len"
    assert len(trajectory.token_ids) == prompt_tokens + call_tokens


async def test_a_prompt_that_fills_the_context_fails_its_episode(
    scratch: ChatRenderer, factory: CalculatorFactory
) -> None:
    with pytest.raises(EnvironmentFailure, match=r"raise rollout\.max_seq_len"):
        await play(engine_saying(scratch, "5<|end|>"), factory.make(), scratch, max_seq_len=5)


class Troubled:
    """Fails where and how the test asks for; records whether it was closed."""

    def __init__(self, trouble: BaseException | None, *, at: str = "step") -> None:
        self.closed = 0
        self._trouble = trouble
        self._at = at

    @property
    def tools(self) -> Sequence[Tool]:
        return ()

    async def reset(self, task: Task) -> Sequence[Message]:
        await self._happen("reset")
        return [{"role": "user", "content": "go"}]

    async def step(self, reply: Message) -> Step:
        await self._happen("step")
        return Step(done=True)

    async def close(self) -> None:
        self.closed += 1
        await self._happen("close")

    async def _happen(self, where: str) -> None:
        if where == self._at:
            if self._trouble is None:
                await asyncio.Event().wait()
            else:
                raise self._trouble


@pytest.mark.parametrize(("at", "tokens"), [("reset", 0), ("step", 3), ("close", 3)])
async def test_an_environment_that_raises_fails_the_episode(scratch: ChatRenderer, at: str, tokens: int) -> None:
    environment = Troubled(KeyError("gone"), at=at)
    with pytest.raises(EnvironmentFailure, match=f"{at} failed: KeyError: 'gone' in {__file__}:") as caught:
        await play(engine_saying(scratch, "12<|end|>"), environment, scratch)
    assert caught.value.tokens_generated == tokens
    assert isinstance(caught.value.__cause__, KeyError)
    assert environment.closed == 1


@pytest.mark.parametrize("at", ["reset", "step", "close"])
async def test_an_environment_that_hangs_passes_its_deadline(scratch: ChatRenderer, at: str) -> None:
    environment = Troubled(None, at=at)
    with pytest.raises(EnvironmentDeadlineError, match=f"{at} took longer than") as caught:
        await play(engine_saying(scratch, "12<|end|>"), environment, scratch, deadline_s=0.01)
    assert caught.value.tokens_generated == (0 if at == "reset" else 3)
    assert environment.closed == 1


class Queueing(EchoEnvironment):
    """Waits for its turn, 600 s of its own time at most, and then needs 50 s."""

    wait_s = 600.0

    def __init__(self, waits_s: float) -> None:
        super().__init__()
        self._waits_s = waits_s

    async def reset(self, task: Task) -> Sequence[Message]:
        await asyncio.sleep(self._waits_s + 50.0)
        return await super().reset(task)


def test_an_environment_may_wait_for_its_turn_beside_its_deadline(scratch: ChatRenderer) -> None:
    async def begin(waits_s: float, **limits: float) -> float:
        began_s = asyncio.get_running_loop().time()
        task = {"word": "1", "turns": 1}
        engine = engine_saying(scratch, "1<|end|>")
        with suppress(EnvironmentDeadlineError):
            return (await play(engine, Queueing(waits_s), scratch, task, deadline_s=60.0, **limits)).reward
        return began_s - asyncio.get_running_loop().time()

    assert run_virtually(begin(600.0)) == 1.0
    assert run_virtually(begin(620.0)) == -660.0
    assert run_virtually(begin(600.0, ends_s=500.0)) == -500.0


async def test_a_timeout_inside_the_environment_is_not_its_deadline(scratch: ChatRenderer) -> None:
    with pytest.raises(EnvironmentFailure) as caught:
        await play(engine_saying(scratch, "1<|end|>"), Troubled(TimeoutError("socket")), scratch)
    assert not isinstance(caught.value, EnvironmentDeadlineError)


class Nonsense(Troubled):
    """Returns what no environment may."""

    def __init__(self, *, prompt: Any = ({"role": "user", "content": "go"},), step: Any = None) -> None:
        super().__init__(None, at="nowhere")
        self._prompt, self._step = prompt, step

    async def reset(self, task: Task) -> Sequence[Message]:
        return self._prompt

    async def step(self, reply: Message) -> Step:
        return self._step


@pytest.mark.parametrize(
    ("environment", "message", "tokens"),
    [
        (Nonsense(prompt=None), "reset must return messages.*None", 0),
        (Nonsense(prompt="go"), "reset must return messages.*'go'", 0),
        (Nonsense(prompt=[{"content": "go"}]), "reset must return messages", 0),
        (Nonsense(), "must return a Step; got None", 3),
        (Nonsense(step=Step(reward=math.nan)), "finite number; got nan", 3),
        (Nonsense(step=Step(reward=-math.inf)), "finite number; got -inf", 3),
        (Nonsense(step=Step(reward="good")), "finite number; got 'good'", 3),
        (Nonsense(step=Step(messages=({"text": "?"},))), "step must return messages", 3),
        (Nonsense(step=Step(info=3)), "must be a mapping; got 3", 3),
    ],
)
async def test_nonsense_from_an_environment_fails_the_episode(
    scratch: ChatRenderer, environment: Nonsense, message: str, tokens: int
) -> None:
    with pytest.raises(EnvironmentFailure, match=message) as caught:
        await play(engine_saying(scratch, "12<|end|>"), environment, scratch)
    assert caught.value.tokens_generated == tokens
    assert environment.closed == 1


class HandsTools(Nonsense):
    """Returns the tools that it is made with, or raises them."""

    def __init__(self, tools: Any) -> None:
        super().__init__(step=Step(done=True))
        self._tools = tools

    @property
    def tools(self) -> Sequence[Tool]:
        if isinstance(self._tools, BaseException):
            raise self._tools
        return self._tools


class Unshowable:
    def __repr__(self) -> str:
        raise OSError("no words")


UNUSABLE_STEPS = [
    (Step(reward=np.array([1.0, 2.0])), r"step returned .*TypeError.* got array\(\[1., 2.\]\)"),
    (Step(reward=np.array([[1.0]])), r"step returned .* got array\(\[\[1.\]\]\)"),
    (Step(reward=torch.tensor([1.0, 2.0])), r"step returned .* got tensor\(\[1., 2.\]\)"),
    (Step(reward=10**400), "step returned .*OverflowError.* got 1000"),
    (Step(reward=10**5000), "step returned .*OverflowError.* got a int that cannot be shown"),
    (Step(reward=1e39), r"finite number; got 1e\+39"),
    (Step(reward=Unshowable()), "finite number; got a Unshowable that cannot be shown"),
    (Step(messages=({"role": "user", "content": 5},)), "step must return messages.*'content': 5"),
    (Step(messages=({"role": "user", "content": {"text": "a"}},)), "step must return messages"),
    (Step(messages=({"role": "user", "content": "a \ud83d"},)), r"step returned .*ud83d"),
    (Step(messages=({"role": "user", "tool_calls": 5},)), "step returned .*'tool_calls': 5"),
    (Step(done=np.array([True, False])), r"step returned .*array\(\[ True, False\]\)"),
    (Step(info={"reward_parts": {"form": "good"}}), "step returned .*'form': 'good'"),
    (Step(done=True, info={"state": Unshowable()}), "info of an environment's step cannot be stored: .*Unshowable"),
]


@pytest.mark.parametrize(("step", "message"), UNUSABLE_STEPS)
async def test_a_step_that_cannot_be_used_fails_the_episode(chatml: ChatRenderer, step: Step, message: str) -> None:
    environment = Nonsense(step=step)
    with pytest.raises(EnvironmentFailure, match=message) as caught:
        await play(engine_answering(chatml), environment, chatml)
    assert caught.value.tokens_generated == 3
    assert environment.closed == 1


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (Nonsense(prompt=[]), r"reset must return messages.*got \[\]"),
        (Nonsense(prompt=[{"role": "user", "content": 5}]), "reset must return messages.*'content': 5"),
        (Nonsense(prompt=[{"role": "user", "content": {"text": "a"}}]), "reset must return messages"),
        (Nonsense(prompt=[{"role": "user", "content": "a \ud83d"}]), r"reset returned .*ud83d"),
        (HandsTools(KeyError("gone")), "tools failed: KeyError: 'gone'"),
        (HandsTools(asyncio.CancelledError()), "tools failed: CancelledError"),
        (HandsTools([{"name": "add"}]), "tools must be Tools; got .*'name': 'add'"),
        (HandsTools(None), "tools failed: TypeError"),
        (HandsTools([Tool(name="a", description="", parameters={"x": {1, 2}})]), "tools failed: TypeError: .*set"),
    ],
)
async def test_a_beginning_that_cannot_be_used_fails_the_episode(
    chatml: ChatRenderer, environment: Nonsense, message: str
) -> None:
    with pytest.raises(EnvironmentFailure, match=message) as caught:
        await play(engine_answering(chatml), environment, chatml)
    assert caught.value.tokens_generated == 0
    assert environment.closed == 1


def declaring(name: str, read: Callable[[Any], Any]) -> Troubled:
    return type("Declaring", (Troubled,), {name: property(read)})(None, at="nowhere")


def unreadable(_: object) -> Any:
    raise KeyError("gone")


@pytest.mark.parametrize("name", ["wait_s", "replayable", "deterministic"])
async def test_a_declaration_that_cannot_be_read_fails_the_episode(chatml: ChatRenderer, name: str) -> None:
    environment = declaring(name, unreadable)
    recorded: Any = [None] if name == "replayable" else []
    if name == "deterministic":
        playing: Coroutine[Any, Any, Any] = replay_episode(environment, TASK, [], deadline_s=5.0)
    else:
        playing = play(engine_answering(chatml), environment, chatml, recorded=recorded)
    with pytest.raises(EnvironmentFailure, match=f"{name} failed: KeyError: 'gone'"):
        await playing
    assert environment.closed == 1


async def test_turns_are_not_shown_again_to_an_environment_that_forbids_it(chatml: ChatRenderer) -> None:
    environment = declaring("replayable", lambda _: False)
    with pytest.raises(Diverged, match="cannot be shown its turns again"):
        await play(engine_answering(chatml), environment, chatml, recorded=[None])
    assert environment.closed == 1


class Agent:
    """Returns what it is made with."""

    def __init__(self, returned: Any) -> None:
        self.closed = 0
        self._returned = returned

    async def run_agent(self, task: Task, policy: EpisodePolicy) -> Trajectory:
        return self._returned

    async def close(self) -> None:
        self.closed += 1


class Deals(EchoEnvironment):
    """Takes the cards of its task."""

    deterministic = True

    async def reset(self, task: Task) -> list[Message]:
        return [{"role": "user", "content": task["deck"].pop()}]

    async def run_agent(self, task: Task, policy: EpisodePolicy) -> Trajectory:
        await self.reset(task)
        return sampled(task=task)


async def test_an_environment_that_changes_its_task_changes_no_other_episode(scratch: ChatRenderer) -> None:
    task: Task = {"deck": ["ace", "king"]}
    first, second = [await play(engine_answering(scratch), Deals(), scratch, task) for _ in range(2)]
    assert first.token_ids == second.token_ids
    policy: Any = None  # it asks for no turn
    await replay_episode(Deals(), task, [], deadline_s=5.0)
    asked = await run_agent_episode(Deals(), task, policy, deadline_s=5.0)
    assert first.task == second.task == asked.task == task == {"deck": ["ace", "king"]}


TURN = Turn(start=1, end=2, finish_reason="stop", message={"role": "assistant", "content": ""})


def sampled(**changes: Any) -> Trajectory:
    said: dict[str, Any] = {
        "task": TASK,
        "token_ids": (1, 2),
        "loss_mask": (False, True),
        "behaviour_log_probs": (0.0, -1.0),
        "weight_versions": (-1, 0),
        "reward": 1.0,
        "turns": (),
        "finish_reason": "done",
    }
    return Trajectory(**said | changes)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "agent must return a Trajectory; got None"),
        (sampled(loss_mask=(False, False)), "without a turn of the policy"),
        (sampled(reward=None), "finite number; got None"),
        (sampled(reward=math.nan), "finite number; got nan"),
        (sampled(reward=Unshowable()), "finite number; got a Unshowable"),
        (sampled(turns=(replace(TURN, reward=1e39),)), r"finite number; got 1e\+39"),
        (sampled(info=None), "must be a mapping; got None"),
        (sampled(info={"reward_parts": {"form": "good"}}), "agent returned .*'form': 'good'"),
        (sampled(info={"state": Unshowable()}), "info of an environment's agent cannot be stored: .*Unshowable"),
    ],
)
async def test_what_an_agent_returns_and_cannot_be_used_fails_the_episode(returned: Any, message: str) -> None:
    environment = Agent(returned)
    policy: Any = None  # it asks for no turn
    with pytest.raises(EnvironmentFailure, match=message):
        await run_agent_episode(environment, TASK, policy, deadline_s=5.0)
    assert environment.closed == 1


@pytest.mark.parametrize("reward", [1, 1.0, True, np.float32(1), np.int64(1), np.array(1.0), torch.tensor(1.0)])
async def test_whatever_is_one_number_is_a_reward(chatml: ChatRenderer, reward: Any) -> None:
    trajectory = await play(engine_answering(chatml), Nonsense(step=Step(reward=reward, done=True)), chatml)
    assert (trajectory.reward, trajectory.turns[0].reward) == (1.0, 1.0)
    assert {type(trajectory.reward), type(trajectory.turns[0].reward)} == {float}


async def test_the_sum_of_the_rewards_is_a_finite_float32(chatml: ChatRenderer) -> None:
    said = ({"role": "user", "content": "on"},)
    kept = await play(engine_answering(chatml), Nonsense(step=Step(messages=said, reward=1.5e38)), chatml, max_turns=2)
    assert kept.reward == 3e38
    with pytest.raises(EnvironmentFailure, match=r"step must keep the sum .* is 4\.5e\+38") as caught:
        await play(engine_answering(chatml), Nonsense(step=Step(messages=said, reward=1.5e38)), chatml, max_turns=3)
    assert caught.value.tokens_generated == 9


@pytest.mark.parametrize("at", ["reset", "step", "close"])
async def test_a_spontaneous_cancellation_is_the_environments_failure(chatml: ChatRenderer, at: str) -> None:
    with pytest.raises(EnvironmentFailure, match=f"{at} failed: CancelledError"):
        await play(engine_answering(chatml), Troubled(asyncio.CancelledError(), at=at), chatml)


async def test_a_cancellation_while_the_environment_works_is_one(chatml: ChatRenderer) -> None:
    engine = engine_answering(chatml)
    episode = asyncio.ensure_future(play(engine, Troubled(None), chatml))
    while engine.statistics().tokens_generated < 3:
        await asyncio.sleep(0)
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode


async def test_errors_of_the_tree_travel_as_they_are(scratch: ChatRenderer) -> None:
    failure = EnvironmentFailure("the sandbox died")
    with pytest.raises(EnvironmentFailure) as caught:
        await play(engine_saying(scratch, "1<|end|>"), Troubled(failure), scratch)
    assert caught.value is failure
    assert failure.tokens_generated == 2


async def test_an_aborted_request_reports_its_tokens(scratch: ChatRenderer) -> None:
    environment = EchoEnvironment()
    engine = engine_saying(scratch, "12<|end|>", "3456789<|end|>")
    task = {"word": "12", "turns": 2}
    episode = asyncio.ensure_future(play(engine, environment, scratch, task))
    while engine.statistics().tokens_generated < 5:  # three of the first turn, two of the second
        await asyncio.sleep(0)
    assert await engine.abort("row-1")
    with pytest.raises(RequestAbortedError) as caught:
        await episode
    assert caught.value.tokens_generated == engine.statistics().tokens_generated >= 5
    assert engine.statistics().requests_aborted == 1


async def test_cancelling_leaves_nothing_running(scratch: ChatRenderer) -> None:
    environment = Troubled(ValueError("never reached"))
    engine = engine_saying(scratch, "123456789" * 5)
    await engine.start()
    await engine.pause()
    episode = asyncio.ensure_future(play(engine, environment, scratch))
    while not engine.requests:
        await asyncio.sleep(0)
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode
    assert environment.closed == 1
    assert (engine.statistics().running, engine.statistics().waiting) == (0, 0)


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        (OSError("no disk"), "the environment's close failed: OSError"),
        (InvalidDataError("no such row"), "no such row"),
        (asyncio.CancelledError(), "the environment's close failed: CancelledError"),
    ],
)
async def test_a_failure_to_close_hides_nothing(scratch: ChatRenderer, trouble: BaseException, message: str) -> None:
    engine = engine_saying(scratch, "123456789" * 5)
    await engine.start()
    await engine.pause()
    episode = asyncio.ensure_future(play(engine, Troubled(trouble, at="close"), scratch))
    while not engine.requests:
        await asyncio.sleep(0)
    episode.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await episode
    assert f"closing the environment failed too: {message}" in caught.value.__notes__[0]


async def test_a_closed_engine_ends_the_episode_and_the_environment(scratch: ChatRenderer) -> None:
    environment = Troubled(None)
    engine = engine_saying(scratch, "1<|end|>")
    await engine.start()
    await engine.close()
    with pytest.raises(EngineClosedError):
        await run_episode(
            engine,
            environment,
            scratch,
            TASK,
            sampling=SamplingParams(max_new_tokens=5),
            max_turns=1,
            max_seq_len=50,
            deadline_s=1.0,
            request_prefix="row",
            seed=0,
        )
    assert environment.closed == 1


async def test_new_weights_in_the_middle_of_a_turn_show_in_the_versions(scratch: ChatRenderer) -> None:
    engine = engine_saying(scratch, "12345678<|end|>")
    episode = asyncio.ensure_future(play(engine, EchoEnvironment(), scratch, {"word": "12345678"}))
    while engine.statistics().tokens_generated < 4:
        await asyncio.sleep(0)
    await engine.prepare_weights({}, version=1)
    await engine.commit_weights(1)
    trajectory = await episode
    versions = [v for v, mine in zip(trajectory.weight_versions, trajectory.loss_mask, strict=True) if mine]
    assert versions == sorted(versions)
    assert trajectory.version_tokens == {0: versions.count(0), 1: versions.count(1)}
    assert versions.count(0) >= 4
    assert versions.count(1) >= 1


async def test_latency_is_the_event_loops_time_per_step(scratch: ChatRenderer) -> None:
    started = asyncio.get_running_loop().time()
    task = {"word": "1", "turns": 2}
    await play(engine_saying(scratch, "1<|end|>", "1<|end|>"), EchoEnvironment(), scratch, task, latency_s=0.02)
    assert asyncio.get_running_loop().time() - started >= 0.04


async def test_an_episode_goes_on_from_its_recorded_turns(scratch: ChatRenderer, factory: CalculatorFactory) -> None:
    feed = TurnFeed(gather_s=0.0)
    turns = TurnRecorder(feed, group_id=3, attempt=0, row=1)
    turns.begin(trial=0)
    engine = engine_saying(scratch, FIRST_CALL, SECOND_CALL, "5<|end|>", weight_version=3, log_prob=-0.25)
    whole = await play(engine, factory.make(), scratch, turns=turns)
    recorded = decode_turns(await feed.drain())
    assert [(turn.turn, turn.place, turn.chain, turn.tokens) for turn in recorded] == [
        (number, number, 0, turn.end - turn.start) for number, turn in enumerate(whole.turns)
    ]
    for kept in range(4):
        later = engine_saying(scratch, FIRST_CALL, SECOND_CALL, "5<|end|>", weight_version=3, log_prob=-0.25)
        assert await play(later, factory.make(), scratch, recorded=recorded[:kept]) == whole
        assert [request.request_id for request in later.requests] == ["row-0", "row-1", "row-2"][kept:]
    other = {**TASK, "question": "(3+4)-1"}
    with pytest.raises(Diverged, match="answered differently"):
        await play(engine_saying(scratch, FIRST_CALL), factory.make(), scratch, other, recorded=recorded[:1])
    short = SamplingParams(max_new_tokens=3)
    with pytest.raises(Diverged, match="longer than it may be"):
        await play(engine_saying(scratch, FIRST_CALL), factory.make(), scratch, recorded=recorded[:1], sampling=short)


# ------------------------------------------------------------------------------------------------------------- players


def players_of(engine: ScriptedEngine, renderer: ChatRenderer, **changes: Any) -> Players:
    given: dict[str, Any] = {
        "engine": engine,
        "renderer": renderer,
        "sampling": SamplingParams(max_new_tokens=50),
        "max_turns": 9,
        "max_seq_len": 200,
        "request_prefix": "row",
        "seed": 7,
    }
    return Players(TASK, EpisodePolicy(**given | changes))


@settings(deadline=None, max_examples=30)
@given(asked=st.lists(st.integers(0, 2), min_size=1, max_size=9))
async def test_each_player_is_a_branch_with_what_it_has_seen_and_its_own_reward(
    scratch: ChatRenderer, asked: list[int]
) -> None:
    engine = engine_answering(scratch)
    await engine.start()
    players = players_of(engine, scratch)
    for number, player in enumerate(asked):
        assert await players.ask(player, [{"role": "user", "content": f"{player}/{number}"}])
    trajectory = players.trajectory({0: 1.0, 1: -1.5, 2: 0.25}, {"moves": len(asked)})
    batch = unfold(trajectories_to_batch([trajectory], group_id=0)).rows
    assert batch.batch is not None
    branches = [tuple(row.tolist()) for row in rows_of(batch.batch["input_ids"])]
    last = {player: number for number, player in enumerate(asked)}
    by_last_turn = sorted(last, key=lambda player: last[player])
    for player, branch, reward in zip(by_last_turn, branches, batch.batch["rewards"].tolist(), strict=True):
        prompt = engine.requests[last[player]].prompt_token_ids
        assert branch[: len(prompt)] == prompt
        assert scratch.decode(branch).count("<|user|>") == asked.count(player)
        assert reward == {0: 1.0, 1: -1.5, 2: 0.25}[player]
    assert trajectory.sampled_tokens == sum(values_of(batch.batch["loss_mask"]).tolist())
    assert [request.request_id for request in engine.requests] == [f"row-{number}" for number in range(len(asked))]


async def test_players_that_are_asked_at_once_reply_one_after_the_other(scratch: ChatRenderer) -> None:
    engine = engine_answering(scratch)
    await engine.start()
    players = players_of(engine, scratch)
    await asyncio.gather(*(players.ask(player, [{"role": "user", "content": "go"}]) for player in (0, 1)))
    trajectory = players.trajectory({0: np.float32(1.0), 1: np.float32(-1.0)}, {})
    assert [(turn.parent, turn.reward) for turn in trajectory.turns] == [(-1, 1.0), (-1, -1.0)]
    encode_rows([trajectory])


async def test_what_a_player_is_told_may_be_too_long_because_of_what_another_has_said(scratch: ChatRenderer) -> None:
    engine = engine_answering(scratch)
    await engine.start()
    players = players_of(engine, scratch)
    assert await players.ask(0, [{"role": "user", "content": "go"}])
    assert await players.ask(1, [{"role": "user", "content": 200 * "1"}]) is None
    assert players.trajectory({}, {}).finish_reason == "max_seq_len"


async def test_limits_end_a_game_of_players(scratch: ChatRenderer) -> None:
    engine = engine_answering(scratch)
    await engine.start()
    message = {"role": "user", "content": "go"}
    players = players_of(engine, scratch, max_turns=3)
    assert [await players.ask(player, [message]) is not None for player in (0, 1, 0, 1)] == [True, True, True, False]
    assert players.trajectory({}, {}).finish_reason == "max_turns"

    first = len(scratch.prompt([message]))
    players = players_of(engine, scratch, max_seq_len=first + 3 + 2)  # no room for a second message to one player
    assert [await players.ask(player, [message]) is not None for player in (0, 1, 0)] == [True, True, False]
    ended = players.trajectory({}, {})
    assert (ended.finish_reason, len(ended.turns), ended.reward) == ("max_seq_len", 2, 0.0)

    with pytest.raises(EnvironmentFailure, match=r"raise rollout\.max_seq_len"):
        await players_of(engine, scratch, max_seq_len=first).ask(0, [message])
    with pytest.raises(EnvironmentFailure, match="cannot be used"):
        await players_of(engine, scratch).ask(0, [{"role": "user", "content": "\ud800"}])
