"""Rules that compare texts."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.rewards.match import exact, gsm8k, json_schema, regex, search_r1


@pytest.mark.parametrize(
    ("answer", "truth", "options", "score"),
    [
        (" 4 \n", "4", {}, 1),
        ("4", 4, {}, 1),
        ("New  York", "New York", {}, 1),
        ("new york", "New York", {}, 0),
        ("new york", ["NY", "New York"], {"ignore_case": True}, 1),
        ("it is <answer>3</answer> no, <answer> 4 </answer>", "4", {"tag": "answer"}, 1),
        ("it is 4", "4", {"tag": "answer"}, 0),
        ("<answer>4", "4", {"tag": "answer"}, 0),
        ("e\u0301", "\u00e9", {}, 1),  # one letter, written in two ways
    ],
)
def test_exact(answer: str, truth: Any, options: dict[str, Any], score: float):
    assert exact(answer, truth, **options) == score


@pytest.mark.parametrize(
    ("answer", "options", "score"),
    [
        ("<think>x</think>", {"pattern": r"(?s)^<think>.*</think>"}, 1),
        ("x</think>", {"pattern": r"(?s)^<think>.*</think>"}, 0),
        ("so 3, so 4", {"pattern": r"so (\d)", "group": 1}, 1),
        ("so 4, so 3", {"pattern": r"so (\d)", "group": 1}, 0),
        ("so 4", {"pattern": r"so (?P<n>\d)", "group": "n"}, 1),
        ("nothing", {"pattern": r"so (\d)", "group": 1}, 0),
    ],
)
def test_regex(answer: str, options: dict[str, Any], score: float):
    assert regex(answer, "4", **options) == score


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ('{"n": 3}', 1),
        ('Here:\n```json\n{"n": 3}\n```', 1),
        ('```json\n{"n": 3}\n```\nno:\n```\n{"n": "x"}\n```', 0),
        ('```python\nx\n```\nso\n```json\n{"n": 3}\n```', 1),
        ('the ```n``` is\n```json\n{"n": 3}\n```', 1),
        ('```json\n{"n": 3}\n```\nand\n```text\nx\n```', 0),
        ('Use ``` to fence.\n```json\n{"n": 3}\n```', 1),
        ('I will answer with ```json as asked:\n```json\n{"n": 3}\n```', 1),
        ('```json\n{"n": "x"}\n```\nFinal:\n```json\n{"n": 3}```', 1),
        ('Draft:\n```json\n{"n": 3}\n```\nFinal:\n```json\n{"n": "x"}```', 0),
        ('Draft:\n```json\n{"n": 3}\n```\nFinal: ```json\n{"n": "x"}\n```', 0),
        ('so ```json\n{"n": 3}```', 1),
        ('{"why": "```n",\n"n": 3, "a": "```"}', 1),
        ('{"n": 3', 0),
        ("[]", 0),
        ("[" * 100_000, 0),
        ("9" * 5000, 0),
    ],
)
def test_json_schema(answer: str, score: float):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    assert json_schema(answer, None, {}, schema=schema) == score
    assert json_schema(answer, None, {"schema": '{"type": "object", "required": ["n"], '
                                      '"properties": {"n": {"type": "integer"}}}'}) == score  # fmt: skip


def test_an_answer_that_no_number_or_recursion_holds_is_no_match():
    deep = {"type": "array", "items": {"$ref": "#"}}
    assert json_schema("[" * 700 + "]" * 700, None, {}, schema=deep) == 0.0
    for answer in ("9" * 4000, "Infinity", "NaN", "1e999"):
        assert json_schema(answer, None, {}, schema={"multipleOf": 0.5}) == 0.0


def test_an_open_fence_before_blank_lines_is_read_in_linear_time():
    for text in ("```json" + "\n" * 300_000, "```" + "a" * 300_000, "```" * 100_000, "```a\n" + "``\n" * 100_000):
        assert json_schema(text, None, {}, schema={}) == 0.0


def test_a_row_without_a_schema_raises():
    with pytest.raises(ValueError, match="needs a schema"):
        json_schema("{}", None, {})


@pytest.mark.parametrize(
    ("answer", "strict", "score"),
    [
        ("2 + 2 = 4\n#### 4", True, 1),
        ("#### 3\n#### 1,004.0", True, 0),
        ("it is 4", True, 0),
        ("it is 3, no 4", False, 1),
        ("#### x", True, 0),
    ],
)
def test_gsm8k(answer: str, strict: bool, score: float):
    assert gsm8k(answer, "4", strict=strict) == score


def test_a_row_without_a_ground_truth_raises():
    for truth in (None, []):
        with pytest.raises(ValueError, match="exact needs a ground truth"):
            exact("None", truth)
    for truth in (None, [], "", "####"):
        with pytest.raises(ValueError, match="gsm8k needs a number as ground truth"):
            gsm8k("#### 4", truth)


@pytest.mark.parametrize("truth", ["#### 1/2", "#### $5", "10%", "forty"])
def test_no_answer_equals_a_text_that_is_no_number(truth: str):
    assert gsm8k("#### 1", truth) == 0


def test_numbers_of_gsm8k_may_have_commas():
    assert gsm8k("#### 1,004", "1004") == 1
    assert gsm8k("#### 1004", "1,004") == 1


@pytest.mark.parametrize(("answer", "score"), [("#### 1,004", 1), ("#### 42", 0), ("it is 1004", 0)])
def test_gsm8k_takes_the_rows_of_the_hub_as_they_are(answer: str, score: float):
    solution = "A shelf holds 42 * 12 = <<42*12=504>>504 jars.\nWith the 500 of the cellar there are 1004.\n#### 1,004"
    assert gsm8k(answer, solution) == score


@pytest.mark.parametrize(
    ("answer", "target", "score"),
    [
        ("<answer>Paris</answer>", ["Lyon", "paris"], 1),
        ("<answer>\n the  U.S.A. </answer>", "USA", 1),
        ("<answer>theatre</answer>", ["atre"], 0),
        ("<answer>Paris</answer> no, <answer>Lyon</answer>", ["Paris"], 0),
        ("<answer>Paris</answer> and <answer>", ["Paris"], 1),
        ("Paris", ["Paris"], 0),
        ("Paris</answer>", ["Paris"], 0),
        ("<answer>in Paris</answer>", ["Paris"], 0),
        ("<answer>7</answer>", [7], 1),
        ("<answer>Paris</answer>" * 10, ["Paris"], 1),
        ("<answer>Paris</answer>" * 11, ["Paris"], 0.25),
        ("<answer>Lyon</answer>" * 11, ["Paris"], 0),
    ],
)
def test_search_r1(answer: str, target: Any, score: float):
    assert search_r1(answer, {"target": target}) == score


def test_a_row_without_a_target_raises():
    with pytest.raises(ValueError, match=r'needs a ground truth like \{"target": \[TEXT\]\}, not \'Paris\''):
        search_r1("<answer>Paris</answer>", "Paris")
