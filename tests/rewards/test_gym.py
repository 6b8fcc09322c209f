"""Rows of reasoning-gym's data sets have the data sets' scores."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("reasoning_gym")

import reasoning_gym

from asyncrl.rewards.match import reasoning_gym_score as compute_score


def test_the_score_is_that_of_the_data_set():
    entry = reasoning_gym.create_dataset("leg_counting", size=1, seed=3)[0]
    row = {"entry": json.dumps(entry)}
    right = f"so <answer>{entry['answer']}</answer>"
    assert compute_score("reasoning_gym/leg_counting", right, entry["answer"], row) == 1.0
    assert compute_score("x", right, entry["answer"], {**row, "dataset": "leg_counting"}) == 1.0
    assert compute_score("reasoning_gym/leg_counting", str(entry["answer"]), entry["answer"], row) == 0.0
    assert compute_score("reasoning_gym/leg_counting", str(entry["answer"]), entry["answer"], row, tag="") == 1.0


def test_an_unknown_data_set_or_a_missing_entry_raises():
    with pytest.raises(ValueError, match="no data set 'leg'"):
        compute_score("reasoning_gym/leg", "", "4", {"entry": {}})
    with pytest.raises(ValueError, match=r"needs the row's extra_info\.entry"):
        compute_score("reasoning_gym/leg_counting", "", "4", {})
