"""Reward rules: verdicts, and the errors of failures."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from asyncrl.errors import EnvironmentDeadlineError, EnvironmentFailure, RewardError
from asyncrl.rewards.rules import Answer, FunctionRule, NoRule, RewardRule, Verdict, WeightedSum

ANSWER = Answer(data_source="sums", solution_str="4", ground_truth="4", extra_info={"index": 7})


@pytest.fixture
def function(tmp_path: Path):
    def write(source: str) -> str:
        (tmp_path / "score.py").write_text(dedent(source))
        return f"{tmp_path / 'score.py'}:compute_score"

    return write


async def verdict(rule: RewardRule) -> Verdict:
    try:
        return await rule.judge(ANSWER)
    finally:
        await rule.close()


async def test_verls_signature_works_from_a_file(function):
    rule = FunctionRule(
        function(
            """
            def compute_score(data_source, solution_str, ground_truth, extra_info=None):
                assert (data_source, extra_info) == ("sums", {"index": 7})
                return {"score": solution_str == ground_truth, "length": len(solution_str), "note": "kept out"}
            """
        )
    )
    assert await verdict(rule) == Verdict(score=1.0, parts={"length": 1.0})


async def test_a_function_may_take_fewer_arguments_and_further_options(function):
    rule = FunctionRule(
        function("async def compute_score(solution_str, bonus): return len(solution_str) + bonus"), bonus=2
    )
    assert (rule.missing_options(()), rule.unknown_options) == (frozenset(), frozenset())
    assert await verdict(rule) == Verdict(score=3.0)
    wrong = FunctionRule(function("async def compute_score(solution_str, bonus): return 0"), bonsu=2)
    assert (wrong.missing_options(()), wrong.unknown_options) == ({"bonus"}, {"bonsu"})
    assert wrong.missing_options(["bonus"]) == frozenset()


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ("raise KeyError('mine')", RewardError, "KeyError: 'mine'"),
        ("return 'much'", RewardError, "'much' of type str"),
        ("return {'value': 1}", RewardError, "a table without 'score'"),
        ("return {'score': float('nan')}", RewardError, "nan, which is not a finite float32"),
        ("return 10**400", RewardError, "10000.*, which is not a finite float32"),
        ("return 10**5000", RewardError, "int, which is not a finite float32"),
        ("import time; time.sleep(60)", EnvironmentDeadlineError, "took longer than its deadline"),
        ("import os; os._exit(3)", EnvironmentFailure, "ended with exit code 3"),
    ],
)
async def test_no_failure_is_a_score(function, caplog, body: str, error: type[Exception], message: str):
    rule = FunctionRule(function(f"def compute_score(**given):\n    {body}\n"), deadline_s=0.3)
    with pytest.raises(error, match=message):
        await verdict(rule)
    hung = [each.message for each in caplog.records if "took longer than its deadline of 0.3 s" in each.message]
    assert len(hung) == (error is EnvironmentDeadlineError)  # logged when it happens: the row is tried again


@pytest.mark.parametrize("value", ["10**400", "{'score': 10**5000}", "-(10**400)"])
async def test_an_async_function_may_not_return_more_than_a_float32_holds(function, value: str):
    with pytest.raises(RewardError, match="which is not a finite float32"):
        await verdict(FunctionRule(function(f"async def compute_score(**given):\n    return {value}\n")))


async def test_columns_fill_no_options_of_the_rules_that_are_installed():
    truth = Answer(data_source="x", solution_str="4", ground_truth="4", extra_info={"tag": "b", "pattern": "5"})
    for rule, score in (("exact", 1.0), ("regex", 0.0)):
        made = FunctionRule(f"asyncrl.rewards.match:{rule}")
        assert (await made.judge(truth)).score == score
        await made.close()


class Fixed:
    def __init__(self, score: float, **parts: float) -> None:
        self.verdict = Verdict(score=score, parts=parts)
        self.closed = False

    async def judge(self, answer: Answer) -> Verdict:
        if self.verdict.score < 0:
            raise EnvironmentFailure("the judge is ill")
        return self.verdict

    async def close(self) -> None:
        self.closed = True


async def test_a_weighted_sum_has_the_scores_of_its_rules_as_parts():
    rules = [Fixed(1.0, steps=3.0), Fixed(0.5)]
    total = WeightedSum([("math", 2.0, rules[0]), ("format", -1.0, rules[1])])
    assert await verdict(total) == Verdict(score=1.5, parts={"math": 1.0, "math/steps": 3.0, "format": 0.5})
    assert [rule.closed for rule in rules] == [True, True]


async def test_a_weighted_sum_fails_with_any_of_its_rules():
    with pytest.raises(EnvironmentFailure, match="the judge is ill"):
        await verdict(WeightedSum([("math", 1.0, Fixed(1.0)), ("judge", 1.0, Fixed(-1.0))]))


async def test_no_rule_marks_answers_as_not_judged():
    assert await verdict(NoRule()) == Verdict(score=0.0, parts={"judged": 0.0})
