"""Rows made of reasoning-gym's data sets are scored as the data sets do."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("reasoning_gym")

import reasoning_gym

from asyncrl.rewards.gym import compute_score


def test_the_data_sets_own_scorer():
    entry = reasoning_gym.create_dataset("leg_counting", size=1, seed=3)[0]
    row = {"entry": json.dumps(entry)}
    right = f"so <answer>{entry['answer']}</answer>"
    assert compute_score("reasoning_gym/leg_counting", right, entry["answer"], row) == 1.0
    assert compute_score("x", right, entry["answer"], {**row, "dataset": "leg_counting"}) == 1.0
    assert compute_score("reasoning_gym/leg_counting", str(entry["answer"]), entry["answer"], row) == 0.0
    assert compute_score("reasoning_gym/leg_counting", str(entry["answer"]), entry["answer"], row, tag="") == 1.0


def test_a_row_that_cannot_be_scored_is_wrong_not_the_answer():
    with pytest.raises(ValueError, match="no data set 'leg'"):
        compute_score("reasoning_gym/leg", "", "4", {"entry": {}})
    with pytest.raises(ValueError, match=r"need the row's extra_info\.entry"):
        compute_score("reasoning_gym/leg_counting", "", "4", {})
