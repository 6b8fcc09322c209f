"""The rule ``code``: programs and their tests."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import ConfigError, RewardError, SandboxError
from asyncrl.rewards import code
from asyncrl.rewards.code import CodeRule, program_in
from asyncrl.rewards.code_program import names_of
from asyncrl.rewards.rules import Answer, Verdict
from asyncrl.sandboxes.contract import ProgramEnd, SandboxLimits
from tests.rewards.forgeries import FORGERIES, HONEST, REPLACED, TESTS

DOUBLE = {"inputs": ["1\n", "21\n"], "outputs": ["2", "42\n"]}


async def judge(program: str, tests: Any, **options: Any) -> Verdict:
    answer = Answer(data_source="apps", solution_str=program, ground_truth=tests)
    return await CodeRule(**{"deadline_s": 5.0, **options}).judge(answer)


@pytest.mark.parametrize("tests", [DOUBLE, json.dumps(DOUBLE)])
async def test_standard_output_is_compared(tests: Any):
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


@pytest.mark.parametrize("text", ["5", "true", "null", "[1]"])
async def test_a_result_beside_arguments_that_are_no_text_is_itself(text: str):
    tests: dict[str, Any] = {"fn_name": "f", "inputs": [[text]], "outputs": [text]}
    assert (await judge("def f(x): return x", tests)).score == 1.0
    assert (await judge("import json\ndef f(x): return json.loads(x)", tests)).score == 0.0


async def test_assertions_are_tests():
    assert (await judge("def f(x): return x + 1", ["assert f(1) == 2", "assert f(2) == 4"], partial=True)).score == 0.5
    assert (await judge("def f(x): return x + 1", "assert f(1) == 2")).score == 1.0


@pytest.mark.parametrize("kind", TESTS)
async def test_an_honest_program_passes(kind: str):
    assert (await judge(HONEST, TESTS[kind])).score == 1.0


@pytest.mark.parametrize("kind", TESTS)
async def test_no_forgery_is_rewarded(kind: str):
    rule = CodeRule(deadline_s=3.0, processes=3)
    answers = (Answer(data_source="apps", solution_str=each, ground_truth=TESTS[kind]) for each in FORGERIES.values())
    verdicts = await asyncio.gather(*map(rule.judge, answers))
    assert [name for name, verdict in zip(FORGERIES, verdicts, strict=True) if verdict.score] == []


@pytest.mark.parametrize(
    ("program", "assertion"),
    [
        ("def f(*a, **k): return a, k", "assert f(1, [2], x={3}) == ((1, [2]), {'x': {3}})"),
        (
            "def f(): return b'x', 1j, frozenset({1}), {(1, 2): None}",
            "assert f() == (b'x', 1j, frozenset({1}), {(1, 2): None})",
        ),
        (
            "from decimal import Decimal\ndef f(): return Decimal('0.1')",
            "from decimal import Decimal as D\nassert f() == D('0.1')",
        ),
        ("from collections import Counter\ndef f(x): return Counter(x)", "assert f('aab') == {'a': 2, 'b': 1}"),
        ("def f(x): x.sort()", "x = [2, 1]\nf(x)\nassert x == [1, 2]"),
        ("def f(g, x): return g(x) + 1", "assert f(lambda x: x * 10, 2) == 21"),
        ("def f(n):\n    for k in range(n): yield k", "assert list(f(3)) == [0, 1, 2]"),
        (
            "class Stack:\n    def __init__(s): s.all = []\n    def push(s, x): s.all.append(x)",
            "s = Stack()\ns.push(4)\nassert s.all == [4]",
        ),
        ("def f(): raise KeyError('x')", "try:\n    f()\nexcept KeyError:\n    pass\nelse:\n    assert False"),
        ("import math\nLIMIT = 7", "assert math.floor(7.5) == LIMIT"),
        ("def sum(a, b): return a - b", "assert sum(3, 1) == 2"),
        ("class sky: blue = 1", "assert sky.blue == 1"),
        ("print('{\"names\": {}}')\ndef f(): print('x'); return 1", "assert f() == 1"),
        ("def add(a, b): return a + b", "def check(candidate):\n    assert candidate(1, 2) == 3\n\ncheck(add)"),
        (
            "import numpy\ndef f(): return numpy.arange(3)",
            "import numpy\nassert numpy.array_equal(f(), numpy.arange(3))",
        ),
    ],
)
async def test_assertions_call_the_program_in_its_own_sandbox(program: str, assertion: str):
    assert (await judge(program, assertion)).score == 1.0
    assert (await judge(program, f"{assertion}\nassert False")).score == 0.0


@pytest.mark.parametrize("what", REPLACED)
async def test_what_the_tests_compare_with_is_not_the_programs(what: str):
    program, assertion = REPLACED[what]
    assert (await judge(program, assertion)).score == 0.0


@pytest.mark.parametrize("program", ["def f(x): raise StopIteration", "def f(x): next(iter(()))"])
async def test_no_exception_of_a_program_ends_a_loop_of_the_tests(program: str):
    assertion = "assert all(map(lambda case: f(case[0]) == case[1], [(1, 2), (2, 3)]))"
    assert (await judge(program, assertion)).score == 0.0
    assert (await judge("def f(x): return x + 1", assertion)).score == 1.0


@pytest.mark.parametrize(
    ("assertions", "wanted", "modules"),
    [
        ("assert set(f((3, 4))) == set((4,))", {"f"}, {}),
        ("assert sum(10, 15) == 6", {"sum"}, {}),
        ("assert sum(range(4)) == 6", set(), {}),
        ("given = [1]\nassert sum(given) == 1", {"sum", "given"}, {}),
        ("assert math.isclose(f(1), np.pi)", {"f"}, {"math": {"isclose"}, "np": {"pi"}}),
        ("assert token(3) == Sky.BLUE", {"token", "Sky"}, {}),  # a module cannot be called
        ("def check(f):\n    assert abs(f(1)) < 2\ncheck(f)", {"f", "check"}, {}),
        ("sorted = sorted\nassert f(1)", {"f"}, {}),
    ],
)
def test_names_that_assertions_take_from_a_program(assertions: str, wanted: set[str], modules: dict[str, set[str]]):
    assert names_of(assertions) == (wanted, modules)


async def test_a_program_that_passes_its_deadline_fails_the_test():
    rule = CodeRule(deadline_s=1.5)
    verdict = await rule.judge(Answer(data_source="apps", solution_str="while True: pass", ground_truth=DOUBLE))
    assert verdict == Verdict(score=0.0, parts={"passed": 0.0, "compiles": 1.0, "deadlines": 1.0})


IDLE = (
    "",
    [""],
    "# assert f(1)",
    "'f(1) is 2'\nimport math\nMETADATA = {}\ndef check(f):\n    assert f(1) == 2",
    "def test_f():\n    assert f(1) == 2\nif __name__ == '__main__':\n    test_f()",
    "assert f(1) = 2",
    "import random\nrandom.seed(0)\ndef test_f():\n    assert f(1) == 2",
    "sys.path.append('.')\nclass TestF(unittest.TestCase):\n    def test(self):\n        self.assertEqual(f(1), 2)",
    "def make():\n    return f\ng = make()\ndef test_f():\n    g(1)\nprint('ok')",
    ["assert f(1) == 2", "def test_f():\n    assert f(2) == 3"],
    ["import math", "assert f(1) = 2"],
)
"""Texts of which nothing is asserted, or not all that should be."""


@pytest.mark.parametrize(
    "tests", [*[None, {}, [], {"inputs": ["1"], "outputs": []}, {"inputs": [], "outputs": []}, 7], *IDLE]
)
async def test_a_row_without_tests_raises_a_reward_error(tests: Any):
    with pytest.raises(RewardError, match="code needs tests"):
        await judge("print(1)", tests)


CHECK = "def check(f, x=1):\n    if f(x) != x + 1:\n        raise ValueError\n"


@pytest.mark.parametrize(
    "text",
    [
        f"{CHECK}result = check(f)",
        f"{CHECK}_ = [check(f, x) for x in (1, 2)]",
        f"{CHECK}def run(): check(f)\nlist(map(lambda _: run(), [1]))",
        "class Test:\n    def test(self):\n        assert f(1) == 2\nTest().test()",
        "def test_f():\n    assert f(1) == 2\n[each() for name, each in globals().items() if name == 'test_f']",
        "import unittest\nunittest.TestCase().assertEqual(f(1), 2)",
        "assert f(1) == 2\ndef test_more(): pass",
        "f(1).real",
        "def test_cases(): return [1, 2]\nfor each in test_cases(): f(each)",
        "def check(f):\n    assert f(1) == 2\nclass Other:\n    def check(self): pass\ncheck(f)",
    ],
)
def test_a_text_whose_assertions_run_is_a_test(text: str):
    assert code._tests(text, 9) == [{"assertions": [text]}]
    assert code._tests(["import math", text], 9) == [{"assertions": ["import math", text]}]


CLOSE = "def isclose(a, b):\n    return abs(a - b) < 1e-6"


@pytest.mark.parametrize("helper", ["from math import isclose", CLOSE, f"{CLOSE}\nright = 2.0"])
async def test_definitions_run_before_the_tests_behind_them_and_are_not_the_programs(helper: str):
    tests = ["assert f(3) == 4", helper, "assert isclose(f(1), 2.0)", "assert isclose(f(2), 3.0)"]
    assert (await judge("def f(x): return x + 1", tests)).score == 1.0
    forged = await judge("def f(x): return 0\ndef isclose(a, b): return True", tests, partial=True)
    assert (forged.score, forged.parts["compiles"]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("definitions", "right", "wrong", "test"),
    [
        (
            ["from math import *"],
            "def factorial(n): return n * factorial(n - 1) if n else 1",
            "def factorial(n): return 0",
            "assert factorial(5) == 120",
        ),
        (["from solution import f"], "def f(x): return x + 1", "def f(x): return 0", "assert f(1) == 2"),
        (["import no_such_module"], "def f(x): return x + 1", "def f(x): return 0", "assert f(1) == 2"),
        ([CLOSE], "def sum(a, b): return 6", "def sum(a, b): return 7", "assert sum(10, 15) == 6"),
        (
            ["import math", "from __future__ import annotations"],
            "def f(x): return x + 1",
            "def f(x): return 0",
            "assert f(1) == math.floor(2.5)",
        ),
        (
            ["from math import *\ndef check(x):\n    return factorial(x) == 120"],
            "def factorial(n): return n * factorial(n - 1) if n else 1",
            "def factorial(n): return 0",
            "assert check(5)",
        ),
        (
            ["def check(x):\n    return factorial(x) == 120", "from math import *"],
            "def factorial(n): return n * factorial(n - 1) if n else 1",
            "def factorial(n): return 0",
            "assert check(5)",
        ),
        (
            ["from math import *"],
            "def f(x): return x + 1",
            "def f(x): return 0\ndef isclose(a, b): return True",
            "assert isclose(f(1), 2)",
        ),
        (
            ["import no_such_module as nm\ndef check(f):\n    return f(1) == 2"],
            "def f(x): return x + 1",
            "def f(x): return 0\ndef check(f): return True",
            "assert check(f)",
        ),
        (
            ["def near(a, b):\n    return abs(a - b) < 1e-6\nimport no_such_module"],
            "def f(x): return x + 1",
            "def f(x): return 0\ndef near(a, b): return True",
            "assert near(f(1), 2)",
        ),
        (
            ["def check(x):\n    return f(x) == x + 1", "LIMIT = 2"],
            "def f(x): return x + 1",
            "def f(x): return 0",
            "assert check(LIMIT)",
        ),
    ],
)
async def test_definitions_take_no_names_of_the_program_by_accident(
    definitions: list[str], right: str, wrong: str, test: str
):
    assert (await judge(right, [*definitions, test])).score == 1.0
    assert (await judge(wrong, [*definitions, test])).score == 0.0


async def test_one_broken_test_of_several_fails_and_those_behind_the_last_are_not_read():
    right = "assert f(1) == 2"
    assert (await judge("def f(x): return x + 1", [right, "assert f(1", right], partial=True)).score == 2 / 3
    tests = [right, "def test_f():\n    assert f(1) == 2"]
    assert (await judge("def f(x): return x + 1", tests, most_tests=1)).score == 1.0


@pytest.mark.parametrize("arguments", ["hello", "1\n{", "[" * 100_000, "1" * 5000])
async def test_arguments_that_are_not_json_raise_a_reward_error(arguments: str):
    tests = {"fn_name": "f", "inputs": [arguments], "outputs": ["hello"]}
    with pytest.raises(RewardError, match="one JSON value per line") as caught:
        await judge("def f(x): return x", tests)
    assert (caught.value.how, len(str(caught.value)) < 400) == ("value", True)


async def test_a_program_that_explodes_when_it_is_compiled_fails_in_a_sandbox():
    lines = [f"{' ' * depth}{line}" for depth in range(24) for line in ("try: pass", "finally:")]
    program = "\n".join([*lines, f"{' ' * 24}pass", "print(2)"])
    verdict = await judge(program, DOUBLE, deadline_s=1.0)
    assert (verdict.score, verdict.parts["compiles"]) == (0.0, 0.0)
    broken = await judge("print(2", DOUBLE)
    assert broken == Verdict(score=0.0, parts={"passed": 0.0, "compiles": 0.0, "deadlines": 0.0})


async def test_a_program_that_passes_a_test_is_not_compiled_once_more(monkeypatch: pytest.MonkeyPatch):
    ran: list[str] = []

    async def once(sandboxes: Any, program: str, *_: Any) -> ProgramEnd:
        ran.append(program)
        late = program == code._COMPILE
        return ProgramEnd(how="deadline" if late else "exited", code=0, output=b"2")

    monkeypatch.setattr(code, "_run_once", once)
    assert (await judge("print(2)", {"inputs": ["1"], "outputs": ["2"]})).score == 1.0
    assert ran == ["print(2)"]
    late = await judge("print(2)", {"inputs": ["1"], "outputs": ["3"]})
    assert late == Verdict(score=0.0, parts={"passed": 0.0, "compiles": 0.0, "deadlines": 1.0})


async def test_a_program_killed_from_outside_runs_again(monkeypatch: pytest.MonkeyPatch):
    ends = [ProgramEnd(how="killed", code=9), SandboxError("died"), ProgramEnd(how="exited", code=0, output=b"2")]

    async def once(sandboxes: Any, program: str, *_: Any) -> ProgramEnd:
        if program == code._COMPILE:
            return ProgramEnd(how="exited", code=0)
        end = ends.pop(0)
        if isinstance(end, SandboxError):
            raise end
        return end

    monkeypatch.setattr(code, "_run_once", once)
    assert (await judge("print(2)", {"inputs": [""], "outputs": ["2"]})).score == 1.0
    assert ends == []


@pytest.mark.parametrize("end", [ProgramEnd(how="killed", code=9), SandboxError("died")])
async def test_the_third_death_is_the_programs_own_and_never_a_dead_sandboxes(
    end: ProgramEnd | SandboxError, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    async def once(*_: Any) -> ProgramEnd:
        if isinstance(end, SandboxError):
            raise end
        return end

    monkeypatch.setattr(code, "_run_once", once)
    if isinstance(end, SandboxError):
        with pytest.raises(SandboxError, match="died"):
            await judge("print(2)", DOUBLE)
    else:
        assert (await judge("print(2)", DOUBLE)).score == 0.0
    assert "death 2" in caplog.text


class Pair:
    """A backend whose first sandbox of a pair ends when it is stopped, perhaps by failing."""

    def __init__(self, *, fails: int) -> None:
        self.fails = fails
        self.log: list[str] = []
        self.destroy = self.nothing

    async def create(self, limits: Any) -> Pair:
        self.log.append("create")
        return self

    async def write(self, path: str, content: bytes) -> None:
        self.log.append("write")

    async def exec(self, command: Any, *, over: asyncio.Event | None = None, **_: Any) -> ProgramEnd:
        self.log.append(command[-2])
        if command[-2] == "tests":
            return ProgramEnd(how="exited", code=1)
        await (over or asyncio.Event()).wait()
        self.fails -= 1
        if self.fails >= 0:
            raise SandboxError("died")
        return ProgramEnd(how="stopped", code=0)

    async def nothing(self) -> None: ...


async def test_a_pair_begins_together_and_a_sandbox_that_fails_is_no_failed_test(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(code, "_LAST_S", 0.0)
    pair, sides = Pair(fails=1), {"solution": "", "tests": ""}
    end, judged = await code.run_pair(pair, "", sides, limits=SandboxLimits())  # type: ignore[arg-type]
    assert pair.log == ["create", "write", "create", "write", "solution", "tests"] * 2
    assert end == judged == ProgramEnd(how="exited", code=1)
    with pytest.raises(SandboxError, match="died"):
        await code.run_pair(Pair(fails=3), "", sides, limits=SandboxLimits())  # type: ignore[arg-type]


def test_program_in_prefers_the_last_python_block():
    assert program_in("no fence") == "no fence"
    assert program_in("```python\na\n```\n```\nb\n```") == "a\n"
    assert program_in("```py\na\n```\n```python3\nb\n```") == "b\n"
    assert program_in("```\na\n```\n```text\nb\n```") == "b\n"
    assert program_in("```python\ncut off") == "cut off"


@given(text=st.lists(st.sampled_from(["`", "```", "\n", "py", "a", " ", "\t"]), max_size=10).map("".join))
@settings(max_examples=200, deadline=None)
def test_a_block_is_what_lies_between_fences(text: str):
    blocks = re.findall(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:```|\Z)", text, re.DOTALL)
    python = [body for language, body in blocks if language == "py"]
    assert program_in(text) == (python[-1] if python else blocks[-1][1] if blocks else text)


@pytest.mark.parametrize("text", ["```" + " " * 300_000, "```" + "a" * 300_000, "```" * 100_000])
def test_a_fence_without_an_end_is_read_in_linear_time(text: str):
    assert program_in(text) == text


@pytest.mark.parametrize(
    ("name", "value"), [("processes", 0), ("most_tests", 0), ("deadline_s", 0), ("memory_bytes", 0)]
)
def test_values_out_of_range_are_refused(name: str, value: int):
    with pytest.raises(ConfigError, match=name):
        CodeRule(**{name: value})
