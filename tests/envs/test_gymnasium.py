"""Environments of gymnasium as text."""

from __future__ import annotations

import asyncio
import math
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("gymnasium")

import gymnasium

from asyncrl.config import Config
from asyncrl.envs.gymnasium import Actions, GymnasiumFactory, observation_text
from asyncrl.errors import ConfigError, EnvironmentFailure
from asyncrl.rollout.episode import replay_episode
from asyncrl.tasks.run import train

Play = Callable[..., Any]
LAKE: dict[str, Any] = {"id": "FrozenLake-v1", "actions": ["left", "down", "right", "up"], "is_slippery": False}
WAY = ["down", "down", "right", "right", "down", "right"]


class Words(gymnasium.Env):
    """Shows token ids; the policy writes texts. What it returns as a reward is given."""

    observation_space = gymnasium.spaces.MultiDiscrete([3, 3])
    action_space = gymnasium.spaces.Text(8)

    def __init__(self, reward: float = 1.0) -> None:
        self.reward = reward

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.np_random.integers(0, 3, 2), {}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == "raise":
            raise KeyError(action)
        return self.np_random.integers(0, 3, 2), self.reward, action == "end", False, {}


class Buttons(gymnasium.Env):
    """Two wheels, both wanted at 2."""

    observation_space = gymnasium.spaces.Dict({"wheels": gymnasium.spaces.Box(0, 1, (2,))})
    action_space = gymnasium.spaces.MultiDiscrete([3, 3])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return {"wheels": self.action_space.nvec / 7.0}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return {"wheels": action / 7.0}, float(sum(action)), bool((action == 2).all()), False, {}


gymnasium.register("Words-v0", entry_point=Words)
gymnasium.register("Buttons-v0", entry_point=Buttons)
gymnasium.register("Chance-v0", entry_point=Buttons, nondeterministic=True)


def playing(*actions: str) -> Callable[[str], str]:
    return lambda text: actions[text.count("<|assistant|>") - 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "max_turns"),
    [
        (LAKE, 6),
        ({"id": "Taxi-v4", "render": True}, 6),
        ({"id": "Blackjack-v1", "actions": ["stick", "hit"]}, 6),
        ({"id": "CliffWalking-v1"}, 6),
        ({"id": "CartPole-v1"}, 6),
    ],
    ids=lambda given: given["id"] if isinstance(given, dict) else "",
)
async def test_hundreds_of_episodes_leave_nothing_and_replay(
    options: dict[str, Any], max_turns: int, play_many: Play
) -> None:
    factory = GymnasiumFactory(seed=3, **options)

    def said(text: str) -> str:
        return f"I choose {factory._actions.write(random.Random(text))}."

    trajectories = await play_many(factory, said, episodes=104, max_turns=max_turns)
    assert {each.finish_reason for each in trajectories} <= {"done", "max_turns"}
    assert len({each.task["seed"] for each in trajectories}) == 104
    for trajectory in trajectories[:10]:
        replies = [turn.message for turn in trajectory.turns]
        replayed = await replay_episode(factory.make(), trajectory.task, replies, deadline_s=10)
        assert replayed.deterministic
        assert sum(step.reward for step in replayed.steps) == trajectory.reward


async def test_the_goal_is_reached(play_many: Play) -> None:
    factory = GymnasiumFactory(**LAKE, render=True)
    (won,) = await play_many(factory, playing(*WAY), episodes=1)
    assert (won.reward, won.finish_reason, won.info["truncated"]) == (1.0, "done", False)
    (drowned,) = await play_many(factory, playing("down", "Up or right? Right."), episodes=1)
    assert (drowned.reward, drowned.finish_reason) == (0.0, "done")
    cut = GymnasiumFactory(**LAKE, max_episode_steps=2)
    (truncated,) = await play_many(cut, playing("up", "up"), episodes=1)
    assert (truncated.finish_reason, truncated.info["truncated"], len(truncated.turns)) == ("done", True, 2)


async def test_a_reply_without_an_action_is_answered() -> None:
    factory = GymnasiumFactory(**LAKE, invalid_reward=-0.25)
    environment = factory.make()
    first = await environment.reset(factory.task(0, split="train"))
    assert first == [
        {"role": "system", "content": "Answer with one of: left, down, right, up."},
        {"role": "user", "content": "0"},
    ]
    step = await environment.step({"role": "assistant", "content": "downwards"})
    assert (step.reward, step.done, step.info) == (-0.25, False, {"mistakes": 1})
    assert "left, down, right, up" in step.messages[0]["content"]
    assert (await environment.step({"role": "assistant", "content": "DOWN"})).messages[0]["content"] == "4"
    await environment.close()


@pytest.mark.parametrize(("waits_s", "order"), [(60.0, ["step", "close"]), (0.01, ["close", "step"])])
async def test_an_environment_whose_step_was_left_behind_is_closed_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, waits_s: float, order: list[str]
) -> None:
    monkeypatch.setattr("asyncrl.envs.gymnasium._STEP_ENDS_S", waits_s)
    begun, may_end, closed = threading.Event(), threading.Event(), threading.Event()
    calls: list[str] = []

    class Slow(Words):
        def step(self, action: str) -> Any:
            begun.set()
            may_end.wait(10)
            calls.append("step")
            return super().step(action)

        def close(self) -> None:
            calls.append("close")
            closed.set()

    factory = GymnasiumFactory(id="Words-v0")
    factory._make = Slow
    environment = factory.make()
    await environment.reset({"seed": 0})
    stepping = asyncio.ensure_future(environment.step({"role": "assistant", "content": "on"}))
    await asyncio.to_thread(begun.wait, 10)
    stepping.cancel()
    closing = [asyncio.ensure_future(environment.close()) for _ in range(2)]
    if order[0] == "close":
        await asyncio.gather(*closing)
    await asyncio.sleep(0.05)
    assert calls == order[: order[0] == "close"]
    may_end.set()
    await asyncio.gather(*closing)
    while len(calls) < 2:
        await asyncio.sleep(0.01)
    assert calls == order
    assert ("is closed while a step of it still runs" in caplog.text) == (order[0] == "close")


async def test_texts_token_ids_and_lists_of_actions() -> None:
    words = GymnasiumFactory(id="Words-v0", symbols=["a", "b", "c"])
    environment = words.make()
    _, shown = await environment.reset(words.task(0, split="train"))
    assert len(shown["content"].split()) == 2
    assert set(shown["content"].split()) <= {"a", "b", "c"}
    assert (await environment.step({"role": "assistant", "content": "too long a text"})).info == {"mistakes": 1}
    assert (await environment.step({"role": "assistant", "content": "end"})).done
    with pytest.raises(ConfigError, match="no demonstration"):
        words.demonstration(0)

    wheels = GymnasiumFactory(id="Buttons-v0").make()
    assert (await wheels.reset({"seed": 1}))[-1]["content"] == "wheels: 0.4286 0.4286"
    assert (await wheels.step({"role": "assistant", "content": "only 2"})).info == {"mistakes": 1}
    assert (await wheels.step({"role": "assistant", "content": "first 9, then 9 9"})).info == {"mistakes": 2}
    step = await wheels.step({"role": "assistant", "content": "2 2"})
    assert (step.reward, step.done) == (4.0, True)
    assert not GymnasiumFactory(id="Chance-v0").make().deterministic
    assert observation_text(((1, 2.5), "x")) == "1 2.5\nx"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (12345.0, "12345"),
        (1234567.89, "1234567.89"),
        (-2.0, "-2"),
        (3 / 7, "0.4286"),
        (1e300, "1e+300"),
        (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)
def test_numbers_of_observations_keep_their_size(value: float, text: str) -> None:
    assert observation_text(value) == text


@pytest.mark.parametrize("number", [-1, 3])
def test_an_id_without_a_symbol_is_a_failure(number: int) -> None:
    with pytest.raises(EnvironmentFailure, match=f"the id {number}, and symbols has words for 0 to 2"):
        observation_text([0, number], ["a", "b", "c"])


def test_names_of_actions_may_have_marks_and_begin_alike() -> None:
    actions = Actions(gymnasium.spaces.Discrete(4), ["go", "go back", "<fire>", "stop!"])
    replies = ["go back", "Go!", "I go back, then <FIRE>.", "stop!", "stopping, gone", "go backwards"]
    assert [actions.read(reply) for reply in replies] == [1, 0, 2, 3, None, 0]


def test_lists_of_numbers_begin_where_the_space_does() -> None:
    actions = Actions(gymnasium.spaces.MultiDiscrete([2, 3], start=[1, -4]), [])
    assert actions.hint == "Answer with 2 numbers: 1 to 2, -4 to -2."
    written = {actions.write(random.Random(seed)) for seed in range(100)}
    assert written == {f"{first} {second}" for first in (1, 2) for second in (-4, -3, -2)}
    assert all(actions.read(each) is not None for each in written)


async def test_a_reward_that_is_no_number_and_an_error_are_failures(play_many: Play) -> None:
    wrong = GymnasiumFactory(id="Words-v0", reward=math.nan)
    (failure,) = await play_many(wrong, playing("end"), episodes=1)
    assert isinstance(failure, EnvironmentFailure)
    assert "reward of an environment's step" in str(failure)
    assert "nan" in str(failure)
    (failure,) = await play_many(GymnasiumFactory(id="Words-v0"), playing("raise"), episodes=1)
    assert isinstance(failure, EnvironmentFailure)
    assert "KeyError" in str(failure)


def test_the_splits_have_different_seeds() -> None:
    factory = GymnasiumFactory(id="CartPole-v1", seed=7)
    seeds = [[factory.task(n, split=split)["seed"] for n in range(50)] for split in ("train", "held_out")]
    assert not set(seeds[0]) & set(seeds[1])
    assert factory.demonstration(1) == factory.demonstration(1)
    assert {message["role"] for message in factory.demonstration(0)} == {"system", "user", "assistant"}


def test_invalid_options_are_refused() -> None:
    for options, says in (
        ({"id": "NoSuch-v0"}, "NameNotFound"),
        ({"id": "CartPole-v1", "speed": 3}, "TypeError"),
        ({"id": "CartPole-v1", "actions": ["left"]}, "1 names for Discrete"),
        ({"id": "Pendulum-v1"}, "which a model cannot write"),
    ):
        with pytest.raises(ConfigError, match=says):
            GymnasiumFactory(**options)


def test_a_missing_package_is_named_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ConfigError) as caught:
        GymnasiumFactory(id="CartPole-v1")
    assert caught.value.remedy == "pip install asyncrl[gymnasium]"


@pytest.mark.slow
def test_a_run(small_config: Callable[..., Config]) -> None:
    env = {"name": "asyncrl.envs.gymnasium:GymnasiumFactory", "max_turns": 6, "options": LAKE}
    summary = train(small_config(env=env, rollout={"max_seq_len": 120}))
    assert summary["steps"] == 3
    assert summary["tokens"]["generated"] > 0
