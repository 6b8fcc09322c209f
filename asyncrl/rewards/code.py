"""Code: whether a program passes its tests, each in a sandbox of its own."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from typing import Any

from asyncrl.errors import ConfigError, EnvironmentFailure, RewardError
from asyncrl.rewards.rule import Answer, Verdict
from asyncrl.rewards.sandbox import SandboxLimits, run_program

__all__ = ["CodeRule", "program_in"]

_FENCE = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)

_HARNESS = """
import json, os, sys
spec = json.load(sys.stdin)
told = os.dup(1)
os.dup2(2, 1)
scope = {"__name__": "solution"}
exec(compile(spec["program"], "solution.py", "exec"), scope)
if "assertions" in spec:
    exec(compile(spec["assertions"], "tests.py", "exec"), scope)
else:
    name = spec["function"]
    function = scope[name] if name in scope else getattr(scope["Solution"](), name)
    found = json.loads(json.dumps(function(*spec["arguments"])))
    assert found == spec["expected"] or [found] == spec["expected"], f"{found!r} is not {spec['expected']!r}"
os.write(told, spec["secret"].encode())
"""


class CodeRule:
    """The share of its tests that a program passes, or 1 only if it passes all.

    The program is the last fenced block of the answer (a Python one, if there is any), or all of it. Tests are the
    ground truth, as a table or its JSON, in the forms that the field uses:

    ============================================== ==================================================================
    ``{"inputs": [...], "outputs": [...]}``         texts for standard input, and what must stand on standard output
    the same with ``"fn_name": "f"``                arguments of ``f`` (or of ``Solution().f``) and its results
    ``["assert f(1) == 2", ...]``, or one text      statements that must not raise; each of a list is a test
    ============================================== ==================================================================

    A program that raises, runs out of memory or time, or ends early has failed that test; a sandbox that cannot be set
    up judges nothing and raises. Parts: ``passed`` (share), ``compiles``, ``deadlines`` (share of the tests).

    Args:
        partial: whether a share of the tests is a share of the score.
        processes: tests that run at once.
        most_tests: tests of one answer, the first ones; more are left out.
        require_isolation: whether to refuse a machine where programs cannot be kept from network, files and other
            processes; otherwise what the system does not allow is left out.
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
        for name, count in (("processes", processes), ("most_tests", most_tests), ("memory_bytes", memory_bytes)):
            if count < 1:
                raise ConfigError(f"{name} is {count}", path=name, remedy="1 or more")
        if not 0 < deadline_s < 86_400:
            raise ConfigError(f"deadline_s is {deadline_s}", path="deadline_s", remedy="a positive number of seconds")
        self._partial = partial
        self._most_tests = most_tests
        self._require_isolation = require_isolation
        self._limits = SandboxLimits(deadline_s=deadline_s, memory_bytes=memory_bytes)
        self._places = asyncio.Semaphore(processes)

    async def judge(self, answer: Answer) -> Verdict:
        """As :meth:`asyncrl.rewards.rule.RewardRule.judge`."""
        tests = _tests(answer.ground_truth)[: self._most_tests]
        program = program_in(answer.solution_str)
        try:
            compile(program, "solution.py", "exec")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return Verdict(score=0.0, parts={"passed": 0.0, "compiles": 0.0, "deadlines": 0.0})
        try:
            async with asyncio.TaskGroup() as running:
                tasks = [running.create_task(self._passes(program, test)) for test in tests]
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group.exceptions[0].__cause__
        ends = [task.result() for task in tasks]
        passed = ends.count("passed") / len(ends)
        return Verdict(
            score=passed if self._partial else float(passed == 1.0),
            parts={"passed": passed, "compiles": 1.0, "deadlines": ends.count("deadline") / len(ends)},
        )

    async def close(self) -> None:
        """Nothing outlives a verdict."""

    async def _passes(self, program: str, test: dict[str, Any]) -> str:
        async with self._places:
            if "stdin" in test:
                end = await run_program({"main.py": program}, "main.py", stdin=test["stdin"], limits=self._limits)
                right = end.how == "exited" and end.code == 0 and _same_output(end.stdout, test["stdout"])
            else:
                # A program that ends the process early, or prints what it likes, does not know the secret.
                secret = secrets.token_hex(16)
                spec = json.dumps({"program": program, "secret": secret, **test})
                end = await run_program({"main.py": _HARNESS}, "main.py", stdin=spec, limits=self._limits)
                right = end.how == "exited" and end.code == 0 and end.stdout == secret
        if self._require_isolation and not (end.isolation.network and end.isolation.files and end.isolation.processes):
            raise EnvironmentFailure(
                "this machine does not allow programs to be isolated (user namespaces), and require_isolation is set"
            )
        return "passed" if right else end.how


def program_in(text: str) -> str:
    """The program in an answer: its last fenced block that says Python, else its last one, else all of it."""
    blocks = _FENCE.findall(text)
    if not blocks:
        return text
    python = [body for language, body in blocks if language.lower() in {"python", "python3", "py"}]
    return str(python[-1] if python else blocks[-1][1])


def _tests(given: Any) -> list[dict[str, Any]]:
    """Tests out of a ground truth.

    Raises:
        RewardError: it has none: the row is wrong, not the answer.
    """
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except json.JSONDecodeError:
            given = [given]  # statements as they stand
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
    """Arguments of a call: a list, or as some files have it a text with one JSON value per line.

    Raises:
        RewardError: the text is something else: the row is wrong, not the answer.
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


def _same_output(found: str, wanted: str) -> bool:
    """Equal but for white space at the ends of lines and blank lines at the end."""

    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.rstrip().splitlines()]

    return lines(found) == lines(wanted)
