"""Mathematics means what it means, however it is written."""

from __future__ import annotations

import pytest

pytest.importorskip("math_verify")

from asyncrl.rewards.math import compute_score
from asyncrl.rewards.rule import Answer, FunctionRule


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
def test_results_are_compared_as_what_they_mean(answer: str, truth: object, score: float):
    assert compute_score(answer, truth) == score


def test_only_boxes_may_count():
    assert compute_score("The answer is 4.", "4", boxed=True) == 0
    assert compute_score(r"\boxed{4}", "4", boxed=True) == 1


def test_a_ground_truth_that_cannot_be_read_is_the_rows_fault():
    with pytest.raises(ValueError, match="no mathematics"):
        compute_score("4", "")


@pytest.mark.slow
async def test_in_a_process_with_a_deadline():
    rule = FunctionRule("asyncrl.rewards.math:compute_score", deadline_s=20.0)
    try:
        verdict = await rule.judge(Answer(data_source="math", solution_str=r"\boxed{4}", ground_truth="4"))
        hard = Answer(data_source="math", solution_str=r"\boxed{9^{9^{9^{9^9}}}}", ground_truth="4")
        assert (await rule.judge(hard)).score == 0.0  # bounded by math-verify itself, or it would cost the rollout
    finally:
        await rule.close()
    assert verdict.score == 1.0
