"""A whole run over rows of a file, judged by rules: what comes in arrives in metrics, files and checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.errors import RewardError
from asyncrl.pipeline.run import train
from asyncrl.telemetry import RunDirectory

REWARD = """
async def compute_score(data_source, solution_str, ground_truth, extra_info):
    if extra_info["index"] == FAILS_ON:
        raise KeyError("mine")
    digits = sum(character.isdigit() for character in solution_str)
    return {"score": digits / 10 + (ground_truth in solution_str), "digits": digits}
"""


@pytest.fixture
def dataset_config(tmp_path: Path, small_config: Callable[..., Config]) -> Callable[..., Config]:
    """The small run over twelve rows in verl's columns, one of them longer than a trajectory."""

    def make(fails_on: int = -1, **changes: Any) -> Config:
        rows, said = [], []
        for number in range(12):
            question = f"{number}+1" if number != 11 else "1+" * 200 + "1"
            rows.append(
                {
                    "data_source": "sums",
                    "prompt": [{"role": "user", "content": question}],
                    "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
                    "extra_info": {"index": number},
                }
            )
            said.append({"prompt": question[:8], "response": str(number + 1)})
        for name, records in (("train", rows[2:]), ("test", rows[:2]), ("said", said)):
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        (tmp_path / "reward.py").write_text(REWARD.replace("FAILS_ON", str(fails_on)))
        options = {
            "files": str(tmp_path / "train.jsonl"),
            "held_out": str(tmp_path / "test.jsonl"),
            "demonstrations": str(tmp_path / "said.jsonl"),
            "reward": f"{tmp_path / 'reward.py'}:compute_score",
        }
        env = {"name": "asyncrl.agents.dataset:DatasetFactory", "max_turns": 1, "options": options}
        return small_config(env=env, eval={"tasks": 2}, **changes)

    return make


@pytest.mark.slow
def test_rows_of_a_file_are_trained_on_and_their_rewards_told_in_parts(dataset_config: Callable[..., Config]):
    config = dataset_config()
    summary = train(config)
    assert summary["tokens"]["generated"] > 0
    assert summary["steps"] == 3
    (path,) = config.runs.iterdir()
    run = RunDirectory.open(path)
    steps = [line for line in run.metrics() if "reward_mean" in line]
    assert len(steps) == 3
    assert all(line["reward/digits"] >= 0 for line in steps)
    assert any("eval/reward/digits" in line for line in run.metrics())
    samples = [json.loads(line) for line in run.trajectories_path.read_text().splitlines()]
    assert all(sample["task"]["data_source"] == "sums" for sample in samples)
    assert all(len(sample["text"]) < 100 for sample in samples)  # the row that is too long was never posed
    assert {"digits"} == set(samples[0]["reward_parts"])
    run.close()


@pytest.mark.slow
def test_a_rule_that_is_wrong_ends_the_run_by_name(dataset_config: Callable[..., Config]):
    with pytest.raises(RewardError, match="KeyError: 'mine'"):
        train(dataset_config(fails_on=5, steps=20))
