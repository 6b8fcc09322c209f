"""Reward workers that die while they score."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.errors import RewardError, WorkerDiedError
from asyncrl.single_controller import WorkerGroup
from asyncrl.tasks.run import train
from asyncrl.trainer.assembly import Assembly

REWARD = {"source": "function", "options": {"function": "worlds:reply_score"}}


@pytest.fixture
def killing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[WorkerGroup]]:
    """Kill the reward worker just after it was asked for the n-th time; the group, once it is there."""

    def kill_at(*calls: int) -> list[WorkerGroup]:
        made: list[WorkerGroup] = []
        start = Assembly.start

        async def started(self: Assembly, *arguments: Any) -> None:
            await start(self, *arguments)
            group = self.reward
            made.append(group)
            asked = 0
            score = group.score

            def scored(*given: Any, **named: Any) -> Any:
                nonlocal asked
                asked += 1
                scores = score(*given, **named)
                if asked in calls:
                    scores.start()
                    group.kill(0)
                return scores

            monkeypatch.setattr(group, "score", scored, raising=False)

        monkeypatch.setattr(Assembly, "start", started)
        return made

    return kill_at


def scored(folder: Path) -> list[tuple[int, list[float], list[float]]]:
    """Each prompt trained on, with its rewards and those that its text earns."""
    (run,) = folder.glob("small-2*")
    with closing(sqlite3.connect(run / "ledger.sqlite")) as ledger:
        told = ledger.execute("SELECT group_id, body FROM events WHERE kind = 'rewarded' ORDER BY group_id").fetchall()
        rows = ledger.execute("SELECT group_id, turns FROM rows ORDER BY group_id, row").fetchall()
    earned: dict[int, list[float]] = {}
    for group_id, turns in rows:
        last_turn = json.loads(turns)[-1][3]
        earned.setdefault(group_id, []).append((len(last_turn["content"]) + 1) / 100)
    return [(group_id, json.loads(body)["rewards"], earned[group_id]) for group_id, body in told]


def test_a_reward_worker_that_dies_is_made_again_and_asked_again(
    small_config: Callable[..., Config], killing: Callable[..., list[WorkerGroup]], tmp_path: Path
):
    groups = killing(1, 6)
    summary = train(small_config(reward=REWARD, eval={"tasks": 0}))
    counts = groups[0].statistics()
    assert (counts.deaths, counts.restarts) == (2, 2)
    assert summary["weight_version"] == 3
    found = scored(tmp_path / "runs")
    assert [group_id for group_id, _told, _earned in found] == sorted({group_id for group_id, _told, _earned in found})
    assert len(found) >= 6
    for _group_id, told, earned in found:
        assert told == pytest.approx(earned)


def test_a_process_that_is_killed_while_it_scores_costs_nothing(
    small_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("KILLS", f"2:{tmp_path / 'note'}")
    options = {"function": "worlds:reply_score_of_killed"}
    summary = train(small_config(reward={"source": "function", "options": options}, eval={"tasks": 0}))
    assert summary["weight_version"] == 3
    found = scored(tmp_path / "runs")
    rows = 4 * len(found)
    assert (tmp_path / "note").stat().st_size >= rows + 2
    for _group_id, told, earned in found:
        assert told == pytest.approx(earned)


def test_a_function_that_kills_every_process_ends_the_run_by_name(
    small_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("KILLS", f"1000000:{tmp_path / 'note'}")
    options = {"function": "worlds:reply_score_of_killed"}
    with pytest.raises(
        RewardError, match=r"no reward for row \d .*worlds:reply_score_of_killed its process .* by SIGKILL"
    ):
        train(small_config(reward={"source": "function", "options": options}, eval={"tasks": 0}))
    assert scored(tmp_path / "runs") == []


def test_where_no_restart_is_left_the_death_ends_the_run(
    small_config: Callable[..., Config], killing: Callable[..., list[WorkerGroup]]
):
    killing(1)
    with pytest.raises(WorkerDiedError, match="reward"):
        train(small_config(reward={**REWARD, "max_restarts": 0}, eval={"tasks": 0}))
