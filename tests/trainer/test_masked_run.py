"""A real run with a rollout that is slower than the bound: each policy, held to what it promises."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from asyncrl.config import Config
from asyncrl.tasks.run import train


@pytest.mark.parametrize("policy", ["mask", pytest.param("correct", marks=pytest.mark.slow)])
def test_a_slow_rollout_in_a_real_run(small_config: Callable[..., Config], policy: str):
    config = small_config(
        steps=6,
        max_staleness=1,
        env={"name": "late_world:LateFactory"},
        trainer={"groups_per_step": 1, "group_size": 2},
        staleness={"policy": policy},
        eval={"tasks": 0},
    )
    summary = train(config)
    (run,) = config.runs.glob("small-2*")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train/loss" in line]
    masked = sum(line["masked_tokens"] for line in steps)
    # Slot 0 began under version 0 and is trained on at version 3 or later: its first turn is too old, not its last.
    if policy == "mask":
        assert masked == summary["tokens"]["dropped"]["masked"] > 0
        assert summary["staleness"]["max"] <= 1
    else:
        assert masked == 0
        assert summary["staleness"]["max"] >= 3
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[-1]["length_ratio"] == 1.0
    assert (
        sum(line[key] for line in steps for key in line if key.startswith("staleness/")) == summary["tokens"]["trained"]
    )
