"""Programs and their tests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncrl.errors import ConfigError, EnvironmentFailure, RewardError
from asyncrl.rewards import code, sandbox
from asyncrl.rewards.code import CodeRule, program_in
from asyncrl.rewards.rule import Answer, Verdict

DOUBLE = {"inputs": ["1\n", "21\n"], "outputs": ["2", "42\n"]}


async def judge(program: str, tests: Any, **options: Any) -> Verdict:
    answer = Answer(data_source="apps", solution_str=program, ground_truth=tests)
    return await CodeRule(deadline_s=5.0, **options).judge(answer)


@pytest.mark.parametrize("tests", [DOUBLE, json.dumps(DOUBLE)])
async def test_what_stands_on_standard_output_counts(tests: Any):
    right = await judge("Here:\n```python\nprint(int(input()) * 2)\n```\nDone.", tests)
    assert right == Verdict(score=1.0, parts={"passed": 1.0, "compiles": 1.0, "deadlines": 0.0})
    half = await judge("```python\nprint(2)\n```", tests)
    assert (half.score, half.parts["passed"]) == (0.0, 0.5)
    assert (await judge("```python\nprint(2)\n```", tests, partial=True)).score == 0.5


@pytest.mark.parametrize(
    "program", ["def f(a, b): return [a, b]", "class Solution:\n    def f(self, a, b): return (a, b)"]
)
async def test_functions_are_called(program: str):
    tests = {"fn_name": "f", "inputs": [[1, "x"], '2\n"y"'], "outputs": [[1, "x"], '[2, "y"]']}
    assert (await judge(program, tests)).score == 1.0


async def test_assertions_are_tests():
    assert (await judge("def f(x): return x + 1", ["assert f(1) == 2", "assert f(2) == 4"], partial=True)).score == 0.5
    assert (await judge("def f(x): return x + 1", "assert f(1) == 2")).score == 1.0


@pytest.mark.parametrize(
    "cheat",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "import os\nos.write(1, b'0' * 32)\nos._exit(0)",
        "raise KeyError",
        "def f(x",
    ],
)
async def test_ending_early_is_not_passing(cheat: str):
    assert (await judge(cheat, ["assert f(1) == 2"])).score == 0.0


async def test_a_program_that_does_not_end_has_failed_and_says_so():
    rule = CodeRule(deadline_s=0.1)
    verdict = await rule.judge(Answer(data_source="apps", solution_str="while True: pass", ground_truth=DOUBLE))
    assert verdict == Verdict(score=0.0, parts={"passed": 0.0, "compiles": 1.0, "deadlines": 1.0})


@pytest.mark.parametrize("tests", [None, {}, [], {"inputs": ["1"], "outputs": []}, {"inputs": [], "outputs": []}, 7])
async def test_a_row_without_tests_is_wrong_not_the_answer(tests: Any):
    with pytest.raises(RewardError, match="code needs tests"):
        await judge("print(1)", tests)


@pytest.mark.parametrize("arguments", ["hello", "1\n{", "[" * 100_000, "1" * 5000])
async def test_arguments_that_are_no_json_are_wrong_not_the_answer(arguments: str):
    tests = {"fn_name": "f", "inputs": [arguments], "outputs": ["hello"]}
    with pytest.raises(RewardError, match="one JSON value per line") as told:
        await judge("def f(x): return x", tests)
    assert (told.value.how, len(str(told.value)) < 400) == ("value", True)


async def test_a_machine_that_cannot_isolate_may_be_refused(monkeypatch: pytest.MonkeyPatch):
    async def bare(*_: Any, **__: Any) -> sandbox.ProgramEnd:
        nothing = sandbox.Isolation(user=False, network=False, processes=False, files=False)
        return sandbox.ProgramEnd(how="exited", code=0, stdout="2", stderr="", isolation=nothing)

    monkeypatch.setattr(code, "run_program", bare)
    tests = {"inputs": [""], "outputs": ["2"]}
    assert (await judge("print(2)", tests)).score == 1.0
    with pytest.raises(EnvironmentFailure, match="does not allow programs to be isolated"):
        await judge("print(2)", tests, require_isolation=True)


def test_the_program_in_an_answer():
    assert program_in("no fence") == "no fence"
    assert program_in("```python\na\n```\n```\nb\n```") == "a\n"
    assert program_in("```py\na\n```\n```python3\nb\n```") == "b\n"
    assert program_in("```\na\n```\n```text\nb\n```") == "b\n"
    assert program_in("```python\ncut off") == "cut off"


@pytest.mark.parametrize(
    ("name", "value"), [("processes", 0), ("most_tests", 0), ("deadline_s", 0), ("memory_bytes", 0)]
)
def test_what_cannot_be_used_is_told(name: str, value: int):
    with pytest.raises(ConfigError, match=name):
        CodeRule(**{name: value})
