"""The policy plays itself: each player is a branch of the episode, and learns from a reward of its own."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, ClassVar

import pytest

import asyncrl
from asyncrl.errors import ConfigError
from asyncrl.interfaces import Message, Task
from asyncrl.rollout.episode import EpisodePolicy, Players
from asyncrl.rollout.trajectory import Trajectory


class Duel:
    """Two players say a digit, and do not see the other's. The larger wins: 9 is what neither regrets."""

    credit = "branch"
    all_said: ClassVar[list[int]] = []

    async def run_agent(self, task: Task, policy: EpisodePolicy) -> Trajectory:
        players, said = Players(task, policy), list[int]()
        for player in (0, 1):
            reply = await players.ask(player, [{"role": "user", "content": f"duel {player}"}])
            text = "" if reply is None else str(reply["content"])
            said.append(int(text) if text.isdecimal() and len(text) == 1 else -1)
        self.all_said.extend(said)
        won = float(said[0] > said[1]) - float(said[0] < said[1])
        return players.trajectory({0: won, 1: -won}, {"said": said})

    async def close(self) -> None: ...


class Duels:
    def task(self, index: int, *, split: str) -> Task:
        return {"duel": index, "split": split}

    def make(self) -> Duel:
        return Duel()

    def demonstration(self, index: int) -> list[Message]:
        digit = random.Random(index).randint(0, 9)
        return [{"role": "user", "content": f"duel {index % 2}"}, {"role": "assistant", "content": f"{digit}"}]


def settings(folder: Path) -> dict[str, Any]:
    return {
        "model": {"source": "scratch", "options": {"hidden_size": 32, "layers": 1, "tokenizer_conversations": 32}},
        "env": Duels,
        "steps": 30,
        "runs": folder / "runs",
        "cluster.backend": "local",
        "rollout": {"max_new_tokens": 3, "max_seq_len": 64},
        "trainer": {"groups_per_step": 2, "group_size": 8, "lr": 3e-3},
        "sft": {"steps": 40, "lr": 1e-2, "batch_size": 32},
        "telemetry.progress": "none",
    }


def test_credit_by_outcome_is_refused_where_players_have_rewards_of_their_own(tmp_path: Path):
    with pytest.raises(ConfigError, match='must be "branch"'):
        asyncrl.train(**settings(tmp_path)).wait()


@pytest.mark.slow
def test_a_policy_that_plays_itself_learns_what_wins(tmp_path: Path):
    asyncrl.train(**settings(tmp_path), **{"algorithm.credit": "branch"}).wait()
    said = Duel.all_said  # the rollout worker is in this process
    assert sum(digit >= 8 for digit in said[-100:]) > 80
