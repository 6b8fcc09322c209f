"""Games of textarena: many of them, against scripted opponents, offline."""

from __future__ import annotations

import asyncio
import random
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("textarena", reason="needs textarena, which is not in the exact set: on PYTHONPATH in .ci/run")

from asyncrl.envs.textarena import TextArenaFactory, _in_time, choose_bracketed
from asyncrl.errors import ConfigError, EnvironmentDeadlineError, EnvironmentFailure
from asyncrl.rollout.episode import replay_episode

pytestmark = pytest.mark.slow
Play = Callable[..., Any]


def said(prompt: str) -> str:
    return choose_bracketed(prompt[-3000:], draw=random.Random(len(prompt)))


async def test_a_game_of_two_is_played_as_either_player_and_again(play_many: Play):
    factory = TextArenaFactory(game="TicTacToe-v0")
    assert [factory.task(index, split="train")["player"] for index in range(3)] == [0, 1, 0]
    first = await play_many(factory, said, episodes=20)
    assert {each.reward for each in first} <= {-1.0, 0.0, 1.0}
    assert len({each.reward for each in first}) > 1
    for index, each in enumerate(first[:4]):
        replies = [turn.message for turn in each.turns]
        again = await replay_episode(factory.make(), factory.task(index, split="train"), replies, deadline_s=30.0)
        assert again is not None
        assert sum(step.reward for step in again.steps) == each.reward


async def test_the_policy_plays_itself_and_each_player_is_a_branch(play_many: Play):
    factory = TextArenaFactory(game="TicTacToe-v0", self_play=True, instructions="Win.")
    assert "player" not in factory.task(0, split="train")
    assert factory.task(1, split="held_out")["player"] == 1
    games = await play_many(factory, said, episodes=20)
    for game in games:
        parents = [turn.parent for turn in game.turns]
        continued = [parent for parent in parents if parent != -1]
        assert parents.count(-1) == 2
        assert len(set(continued)) == len(continued)
        last = [turn.reward for number, turn in enumerate(game.turns) if number not in continued]
        assert game.reward == 0.0
        assert sorted(last) == sorted(game.info["rewards"])
        assert sum(turn.reward != 0 for turn in game.turns) == sum(reward != 0 for reward in last)
    assert {tuple(sorted(game.info["rewards"])) for game in games} >= {(-1, 1)}


async def test_held_out_games_are_against_the_opponent(play_many: Play):
    factory = TextArenaFactory(game="TicTacToe-v0", self_play=True)
    held_out = type(
        "HeldOut", (), {"make": factory.make, "task": lambda self, index, split: factory.task(index, split="held_out")}
    )
    games = await play_many(held_out(), said, episodes=12)
    assert {game.reward for game in games} <= {-1.0, 0.0, 1.0}
    assert len({game.reward for game in games}) > 1


async def test_the_users_function_is_the_opponent():
    async def first_free(observation: str, *, draw: random.Random) -> str:
        return re.findall(r"\[\d\]", observation)[0]

    environment = TextArenaFactory(game="TicTacToe-v0", player=1, opponent=first_free, instructions="Win.").make()
    messages = await environment.reset({"game": "TicTacToe-v0", "seed": 1, "player": 1})
    assert messages[0]["content"] == "Win."
    assert not environment.deterministic
    step = await environment.step({"content": "[99]"})
    assert not step.done
    await environment.close()


async def test_a_plain_function_moves_in_a_thread():
    def moved(observation: str, *, draw: random.Random) -> str:
        threads.append(threading.current_thread())
        return "[4]"

    threads: list[threading.Thread] = []
    environment = TextArenaFactory(game="TicTacToe-v0", opponent=moved).make()
    await environment.reset({"game": "TicTacToe-v0", "seed": 1, "player": 1})
    assert threads
    assert threading.main_thread() not in threads
    await environment.close()


async def test_only_the_games_own_deadline_is_one(monkeypatch: pytest.MonkeyPatch):
    async def fails() -> None:
        raise TimeoutError("the server of the opponent")

    with pytest.raises(TimeoutError, match="the server of the opponent"):
        await _in_time(fails())
    monkeypatch.setattr("asyncrl.envs.textarena._CALL_S", 0.01)
    with pytest.raises(EnvironmentDeadlineError, match=r"a move took longer than 0.01 s"):
        await _in_time(asyncio.Event().wait())


async def test_a_game_that_the_opponent_loses_first_is_begun_again():
    task, moves = {"game": "TicTacToe-v0", "seed": 1, "player": 1}, ["[99]", "[99]", "[4]"]
    environment = TextArenaFactory(game="TicTacToe-v0", opponent=lambda observation, *, draw: moves.pop(0)).make()
    await environment.reset(task)
    assert not moves
    await environment.close()
    environment = TextArenaFactory(game="TicTacToe-v0", opponent=lambda observation, *, draw: "[99]").make()
    with pytest.raises(EnvironmentFailure, match="before player 1 had moved, 64 times"):
        await environment.reset(task)
    await environment.close()


def test_what_cannot_be_begun_is_refused():
    with pytest.raises(ConfigError, match=r"one of them 0: \w+: .*Nothing-v0"):
        TextArenaFactory(game="Nothing-v0")
    with pytest.raises(ConfigError, match="one of them 2"):
        TextArenaFactory(game="TicTacToe-v0", player=2)
