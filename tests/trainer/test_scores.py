"""Scores by hand, and the laws of their intervals."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import InvalidDataError
from asyncrl.trainer.evaluation import (
    TaskScores,
    estimate_mean,
    pass_at_k,
    score_tasks,
    summarise_answers,
    wilson_interval,
)


@settings(deadline=None)
@given(samples=st.integers(1, 8), data=st.data())
def test_pass_at_k_is_the_share_of_all_choices_with_a_right_one(samples: int, data: st.DataObject):
    right, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    answers = [True] * right + [False] * (samples - right)
    choices = list(combinations(answers, k))
    assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_pass_at_k_needs_k_samples():
    for samples, right, k in ((2, 1, 3), (2, 3, 1), (2, -1, 1), (2, 1, 0)):
        with pytest.raises(ValueError, match="needs at least"):
            pass_at_k(samples, right, k)


def test_wilsons_interval_by_hand():
    # 8 of 10: (0.8 + 0.19207) / 1.38415 = 0.71674, half 1.95996/1.38415 * sqrt(0.016 + 0.0096036) = 0.22658
    assert wilson_interval(8, 10) == pytest.approx((0.49016, 0.94331), abs=2e-4)
    assert all(
        low <= right / n <= high for n in range(1, 40) for right in (0, n) for low, high in [wilson_interval(right, n)]
    )
    low, high = wilson_interval(10, 10)
    assert high == pytest.approx(1.0)
    assert low == pytest.approx(10 / (10 + 1.959964**2))  # 1 / (1 + z^2 / n)


@settings(max_examples=20, deadline=None)
@given(values=st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=30))
def test_an_interval_holds_its_mean(values: list[float]):
    found = estimate_mean(values)
    assert 0.0 <= found.low <= found.mean + 1e-9
    assert found.mean - 1e-9 <= found.high <= 1.0


def test_the_bootstrap_goes_by_seed_and_narrows_with_tasks():
    few, many = estimate_mean([0.25, 0.75] * 10, seed=1), estimate_mean([0.25, 0.75] * 160, seed=1)
    assert few == estimate_mean([0.25, 0.75] * 10, seed=1)
    # The standard error of a mean of n values that are 0.25 away from it is 0.25 / sqrt(n).
    assert few.high - few.low == pytest.approx(2 * 1.96 * 0.25 / 20**0.5, rel=0.1)
    assert many.high - many.low == pytest.approx(2 * 1.96 * 0.25 / 320**0.5, rel=0.1)


def test_two_tasks_by_hand():
    tasks = [TaskScores(rewards=(1.0, 0.0, 0.0, 0.0)), TaskScores(rewards=(1.0, 1.0, 0.5, 1.0))]
    scores = {name: each.mean for name, each in score_tasks(tasks).items()}
    assert scores == {
        "reward": pytest.approx((0.25 + 0.875) / 2),
        "avg@4": pytest.approx(0.5),
        "pass@1": pytest.approx(0.5),
        "pass@2": pytest.approx((0.5 + 1.0) / 2),
        "pass@4": pytest.approx(1.0),
    }


def test_a_reward_that_a_batch_has_rounded_is_as_right_as_one_that_it_has_not():
    tasks = [TaskScores(rewards=(0.9, float(torch.tensor(0.9)))), TaskScores(rewards=(0.7 + 0.2, 0.89999))]
    assert score_tasks(tasks, success_reward=0.9)["avg@2"].mean == 0.75


def test_one_sample_has_no_pass_at_k_and_three_end_with_three():
    assert list(score_tasks([TaskScores(rewards=(1.0,))])) == ["reward", "avg@1"]
    assert list(score_tasks([TaskScores(rewards=(1.0, 0.0, 1.0))])) == ["reward", "avg@3", "pass@1", "pass@2", "pass@3"]
    with pytest.raises(ValueError, match="at least one task"):
        score_tasks([])


def answer(task: int, sample: int, reward: float, **more: Any) -> dict[str, Any]:
    return {"task_number": task, "sample": sample, "reward": reward, "sampled_tokens": 4, "truncated": False, **more}


def test_answers_are_summed_up_by_task_and_source():
    answers = [
        answer(0, 0, 1.0, data_source="a", reward_parts={"format": 1.0}),
        answer(0, 1, 0.0, data_source="a", reward_parts={"format": 0.0, "nan": None}),
        answer(1, 0, 1.0, data_source="b", truncated=True),
        answer(1, 1, 1.0, data_source="b"),
    ]
    summary = summarise_answers(answers)
    assert (summary["tasks"], summary["samples"], summary["truncated_share"]) == (2, 2.0, 0.25)
    assert summary["scores"]["avg@2"].mean == 0.75
    assert {source: scores["pass@1"].mean for source, scores in summary["by_data_source"].items()} == {
        "a": 0.5,
        "b": 1.0,
    }
    assert summary["reward_parts"] == {"format": 0.5}
    with pytest.raises(InvalidDataError, match="no answer"):
        summarise_answers([])
