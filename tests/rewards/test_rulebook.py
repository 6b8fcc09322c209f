"""The rulebook: the selection of the rule by data source."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.rewards.rules import DEFAULT_RULES, Answer, Rulebook, Verdict


class Length:
    """A rule of a class: a share of the longest answer."""

    def __init__(self, *, longest: int = 10) -> None:
        self.longest = longest

    async def judge(self, answer: Answer) -> Verdict:
        return Verdict(score=len(answer.solution_str) / self.longest)

    async def close(self) -> None:
        pass


async def shout(solution_str: str, *, marks: str) -> float:
    return float(solution_str.endswith(marks))


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.syspath_prepend(request.path.parent)


LENGTH, SHOUT = "test_rulebook:Length", "test_rulebook:shout"


async def score(rules: Rulebook, text: str, source: str = "x") -> Verdict:
    try:
        return await rules.judge(Answer(data_source=source, solution_str=text, ground_truth=None))
    finally:
        await rules.close()


async def test_one_rule_for_all_rows_is_a_name_a_table_or_a_list():
    assert (await score(Rulebook(LENGTH), "abcde")).score == 0.5
    assert (await score(Rulebook({"rule": LENGTH, "longest": 5}), "abcde")).score == 1.0
    both = [{"rule": LENGTH, "weight": 2, "name": "length"}, {"rule": SHOUT, "marks": "!", "weight": 0.5}]
    assert await score(Rulebook(both), "abcd!") == Verdict(score=1.5, parts={"length": 0.5, "shout": 1.0})


async def test_the_first_matching_pattern_counts_before_the_rule_of_all_rows():
    rules = Rulebook(LENGTH, {"loud/*": {"rule": SHOUT, "marks": "!"}, "loud/long": LENGTH})
    assert (await score(rules, "ab!", "loud/long")).score == 1.0
    assert (await score(rules, "ab!", "quiet")).score == 0.3
    assert (await score(rules, "ab!", "openai/gsm8k")).score == 0.3


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("openai/gsm8k", "gsm8k"),
        ("DigitalLearningGmbH/MATH-lighteval", "math"),
        ("math_dapo", "math"),
        ("aime24", "math"),
        ("numina_olympiads", "math"),
        ("codecontests", "code"),
        ("reasoning_gym/leg_counting", "reasoning_gym"),
        ("searchR1_nq", "search_r1"),
    ],
)
def test_sources_that_verl_knows_have_a_rule(source: str, rule: str):
    assert DEFAULT_RULES[Rulebook().pattern(source)] == rule


@pytest.mark.parametrize(
    ("reward", "rewards", "message", "path"),
    [
        (None, {}, "no rule judges rows of the data source 'x'", "env.options.rewards.x"),
        ({"rule": LENGTH, "longst": 3}, {}, "no option 'longst'; did you mean 'longest'", "env.options.reward.longst"),
        ({"rule": SHOUT}, {}, "needs 'marks', which is neither an option nor a column", "env.options.reward.marks"),
        ({"rule": SHOUT, "marks": "!", "mark": 1}, {}, "has no option 'mark'", "env.options.reward.mark"),
        ([], {}, "names no rule", "env.options.reward"),
        ({"weight": 1}, {}, "names no rule", "env.options.reward"),
        ([{"rule": LENGTH, "weight": "x"}], {}, "weight is 'x'", "env.options.reward.weight"),
        ([LENGTH, LENGTH], {}, "two rules named 'Length'", "env.options.reward"),
        ("absent_module:f", {}, "cannot be imported", "env.options.reward"),
        ("/absent/file.py:f", {}, "/absent/file.py: no such file", "env.options.reward"),
        (None, {"x": "lenght"}, "no reward rule named 'lenght'", "env.options.rewards.x"),
    ],
)
def test_check_refuses_unknown_rules_and_options(reward: Any, rewards: dict[str, Any], message: str, path: str):
    with pytest.raises(ConfigError, match=message) as caught:
        Rulebook(reward, rewards, key="env.options").check({"x": ()})
    assert caught.value.path == path


def test_check_wants_what_a_rule_needs_in_every_source_that_it_judges():
    rules = Rulebook(SHOUT, key="env.options")
    with pytest.raises(ConfigError, match="needs 'marks', which is neither an option nor a column of the rows"):
        rules.check({"a": {"marks", "more"}, "b": {"more"}})
    rules.check({"a": {"marks", "more"}, "b": {"marks"}})


@pytest.mark.parametrize(
    ("written", "declared"),
    [
        ("exact", True),
        ("math", False),
        ("reasoning_gym", False),
        ("none", True),
        (SHOUT, False),
        (LENGTH, False),
        ({"rule": SHOUT, "marks": "!", "deterministic": True}, True),
        ({"rule": "regex", "pattern": "a", "deterministic": False}, False),
        ([{"rule": "exact"}, {"rule": "none"}], True),
        ([{"rule": "exact"}, {"rule": LENGTH}], False),
    ],
)
async def test_rules_declare_whether_they_judge_alike_again(written: Any, declared: bool):
    rules = Rulebook({"rule": SHOUT, "marks": "?"} if written == SHOUT else written)
    assert rules.deterministic("x") is declared
    await rules.close()


async def test_rows_of_search_r1_are_judged_by_their_targets():
    truth = {"target": ["The Eiffel Tower", "Tour Eiffel"]}
    answer = Answer(data_source="searchR1_nq", solution_str="<answer>eiffel tower</answer>", ground_truth=truth)
    rules = Rulebook()
    assert (await rules.judge(answer)).score == 1.0
    await rules.close()
