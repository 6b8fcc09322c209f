"""The rule ``code``: run a program against its tests, each test in its own sandbox."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

from asyncrl.errors import EnvironmentFailure, RewardError
from asyncrl.rewards.rules import Answer, Verdict
from asyncrl.rewards.sandbox import SandboxLimits, run_pair, run_program
from asyncrl.rewards.scoring import check_count, check_seconds
from asyncrl.runtime import run_all

_FENCE = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)

_ASSERTIONS = Path(__file__).with_name("code_program.py").read_text(encoding="utf-8")
_CALL = """
import json, os, sys
spec = json.load(sys.stdin)
output = os.dup(1)
os.dup2(2, 1)
scope = {"__name__": "solution"}
exec(compile(spec["program"], "solution.py", "exec"), scope)
name = spec["function"]
function = scope[name] if name in scope else getattr(scope["Solution"](), name)
os.write(output, json.dumps(function(*spec["arguments"])).encode())
"""


class CodeRule:
    """Score 1 if a program passes all of its tests, else 0; with ``partial``, the share that it passes.

    The program is the one that :func:`program_in` finds. The tests are the ground truth, as a table or its JSON:

    ============================================== ==================================================================
    ``{"inputs": [...], "outputs": [...]}``         texts for standard input, and the expected standard output
    the same with ``"fn_name": "f"``                arguments of ``f`` (or of ``Solution().f``) and its results
    ``["assert f(1) == 2", ...]``, or one text      statements that must not raise; each of a list is a test
    ============================================== ==================================================================

    The program gets the inputs alone: what it prints or returns is compared outside its process, and assertions run in
    a sandbox of their own, where its functions and objects are called as if they were there
    (:mod:`asyncrl.rewards.code_program`). A program that raises, runs out of memory or time, or exits early fails that
    test. Parts: ``passed`` (share of the
    tests), ``compiles``, ``deadlines`` (share of the tests).

    Args:
        partial: whether the share of passed tests is the score.
        processes: tests that run at once.
        most_tests: tests of one answer; only the first ones run.
        require_isolation: whether to refuse a machine where programs cannot be kept from network, files and other
            processes. Without it, programs run with the isolation that the system allows.
        deadline_s, memory_bytes: of one test; further limits in :class:`asyncrl.rewards.sandbox.SandboxLimits`.
    """

    def __init__(
        self,
        *,
        partial: bool = False,
        processes: int = 2,
        most_tests: int = 64,
        require_isolation: bool = False,
        deadline_s: float = 5.0,
        memory_bytes: int = 1 << 30,
    ) -> None:
        check_count("processes", processes)
        check_count("most_tests", most_tests)
        check_count("memory_bytes", memory_bytes)
        check_seconds("deadline_s", deadline_s)
        self._partial = partial
        self._most_tests = most_tests
        self._require_isolation = require_isolation
        self._limits = SandboxLimits(deadline_s=deadline_s, memory_bytes=memory_bytes)
        self._running = asyncio.Semaphore(processes)

    async def judge(self, answer: Answer) -> Verdict:
        tests = _tests(answer.ground_truth)[: self._most_tests]
        program = program_in(answer.solution_str)
        try:
            compile(program, "solution.py", "exec")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return Verdict(score=0.0, parts={"passed": 0.0, "compiles": 0.0, "deadlines": 0.0})
        ends = await run_all(self._run_test(program, test) for test in tests)
        passed = ends.count("passed") / len(ends)
        return Verdict(
            score=passed if self._partial else float(passed == 1.0),
            parts={"passed": passed, "compiles": 1.0, "deadlines": ends.count("deadline") / len(ends)},
        )

    async def close(self) -> None:
        """Do nothing: each test closes its own sandbox."""

    async def _run_test(self, program: str, test: dict[str, Any]) -> str:
        """Return ``passed``, or how the program ended."""
        async with self._running:
            if "assertions" in test:
                sides = {"solution": program, "tests": test["assertions"]}
                end, judged = await run_pair(_ASSERTIONS, sides, limits=self._limits)
                right = judged.how == "exited" and judged.code == 0
            elif "stdin" in test:
                end = await run_program({"main.py": program}, "main.py", stdin=test["stdin"], limits=self._limits)
                right = end.how == "exited" and end.code == 0 and _same_output(end.stdout, test["stdout"])
            else:
                call = {"program": program, "function": test["function"], "arguments": test["arguments"]}
                end = await run_program({"main.py": _CALL}, "main.py", stdin=json.dumps(call), limits=self._limits)
                right = end.how == "exited" and end.code == 0 and _is_result(end.stdout, test["expected"])
        if self._require_isolation and end.isolation.missing:
            raise EnvironmentFailure(
                f"this machine does not allow programs an own {', '.join(end.isolation.missing)} (user namespaces, "
                "seccomp: see asyncrl doctor), and require_isolation is set"
            )
        return "passed" if right else end.how


def program_in(text: str) -> str:
    """Return the last fenced block of an answer that is marked as Python, else its last block, else all of it."""
    blocks = _FENCE.findall(text)
    if not blocks:
        return text
    python = [body for language, body in blocks if language.lower() in {"python", "python3", "py"}]
    return str(python[-1] if python else blocks[-1][1])


def _tests(given: Any) -> list[dict[str, Any]]:
    """Read the tests in a ground truth; raise RewardError if it has none."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except json.JSONDecodeError:
            given = [given]  # assert statements
    if isinstance(given, dict) and "assert_case" in given:
        given = given["assert_case"]
    if isinstance(given, list) and given and all(isinstance(test, str) for test in given):
        return [{"assertions": test} for test in given]
    if isinstance(given, dict):
        inputs, outputs = given.get("inputs"), given.get("outputs")
        if isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs) > 0:
            name = given.get("fn_name")
            pairs = zip(inputs, outputs, strict=True)
            if name:
                return [
                    {"function": str(name), "arguments": _arguments(each), "expected": _expected(right)}
                    for each, right in pairs
                ]
            return [{"stdin": _text(each), "stdout": _text(right)} for each, right in pairs]
    raise RewardError(
        'code needs tests as ground truth: {"inputs": [...], "outputs": [...]} of equal length, or assert statements; '
        f"got {repr(given)[:200]}",
        how="value",
    )


def _arguments(given: Any) -> list[Any]:
    """Read the arguments of a call: a list, or a text with one JSON value per line (APPS).

    Raises:
        RewardError: the text is not JSON; the row is wrong, not the answer.
    """
    if isinstance(given, str):
        try:
            return [json.loads(line) for line in given.splitlines() if line.strip()]
        except (ValueError, RecursionError) as error:
            raise RewardError(
                f"a text in inputs beside fn_name needs one JSON value per line; got {repr(given)[:200]}", how="value"
            ) from error
    return given if isinstance(given, list) else [given]


def _expected(given: Any) -> Any:
    if isinstance(given, str):
        try:
            return json.loads(given)
        except json.JSONDecodeError:
            return given
    return given


def _text(given: Any) -> str:
    return "\n".join(map(str, given)) if isinstance(given, list) else str(given)


def _is_result(text: str, expected: Any) -> bool:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return bool(found == expected or [found] == expected)


def _same_output(found: str, wanted: str) -> bool:
    """Compare outputs, ignoring white space at the ends of lines and blank lines at the end."""

    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.rstrip().splitlines()]

    return lines(found) == lines(wanted)
