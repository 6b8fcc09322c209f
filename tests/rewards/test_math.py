"""The rule ``math``: equivalent results are equal."""

from __future__ import annotations

import pytest

pytest.importorskip("math_verify")

from asyncrl.rewards.match import math_score as compute_score
from asyncrl.rewards.rules import Answer, FunctionRule


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1),
        (r"so \boxed{0.5}", r"\frac12", 1),
        (r"$\boxed{\{2, 1\}}$", r"\{1, 2\}", 1),
        (r"\boxed{3} no: \boxed{4}", "4", 1),
        ("The answer is 4.", "4", 1),
        (r"\boxed{5}", "4", 0),
        ("", "4", 0),
        ("no idea", "4", 0),
        (r"\boxed{2}", ["1", "2"], 1),
    ],
)
def test_equivalent_results_are_equal(answer: str, truth: object, score: float):
    assert compute_score(answer, truth) == score


def test_boxed_ignores_results_outside_a_box():
    assert compute_score("The answer is 4.", "4", boxed=True) == 0
    assert compute_score(r"\boxed{4}", "4", boxed=True) == 1


def test_a_ground_truth_that_cannot_be_parsed_raises():
    with pytest.raises(ValueError, match="cannot parse the ground truth"):
        compute_score("4", "")


@pytest.mark.slow
async def test_math_score_runs_in_a_process_with_a_deadline():
    rule = FunctionRule("asyncrl.rewards.match:math_score", deadline_s=20.0)
    try:
        verdict = await rule.judge(Answer(data_source="math", solution_str=r"\boxed{4}", ground_truth="4"))
        hard = Answer(data_source="math", solution_str=r"\boxed{9^{9^{9^{9^9}}}}", ground_truth="4")
        assert (await rule.judge(hard)).score == 0.0  # bounded by math-verify itself, or it would cost the rollout
    finally:
        await rule.close()
    assert verdict.score == 1.0
