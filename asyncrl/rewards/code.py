"""The rule ``code``: run a program against its tests, each test in its own sandbox."""

from __future__ import annotations

import ast
import asyncio
import json
import logging
import re
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from asyncrl.errors import RewardError, SandboxError
from asyncrl.rewards.rules import Answer, Verdict
from asyncrl.rewards.scoring import check_count, check_seconds
from asyncrl.runtime import run_all
from asyncrl.sandboxes.contract import ProgramEnd, SandboxLimits, as_failure
from asyncrl.sandboxes.namespaces import NamespacesBackend, NamespacesSandbox

_log = logging.getLogger(__name__)
_LAST_S = 1.0
_MAX_DEATHS = 3

_LANGUAGE = re.compile(r"[ \t]*([\w+-]*)")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.Pass)
_BY_NAME = ("globals", "locals", "vars", "eval", "exec")
"""Built-ins with which a test may call any of its functions."""

_ASSERTIONS = Path(__file__).with_name("code_program.py").read_text(encoding="utf-8")
_COMPILE = "import sys; compile(sys.stdin.read(), 'solution.py', 'exec')"
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
    the same with ``"fn_name": "f"``                arguments of ``f`` (or of ``Solution().f``) and its results; beside
                                                    arguments that are a text, a result is the text of its JSON
    ``["assert f(1) == 2", ...]``, or one text      statements that must not raise; each of a list is a test, after the
                                                    definitions before it
    ============================================== ==================================================================

    The program gets the inputs alone: what it prints or returns is compared outside its process, and assertions run in
    a sandbox of their own, where its functions and objects are called as if they were there
    (:mod:`asyncrl.rewards.code_program`). A program that raises, runs out of memory or time, or exits early fails that
    test. Parts: ``passed`` (share of the tests), ``compiles``, ``deadlines`` (share of the tests; all of them, if it
    is not even compiled in time).

    Args:
        partial: whether the share of passed tests is the score.
        processes: tests that run at once.
        most_tests: tests of one answer; only the first ones run.
        require_isolation: whether to refuse a machine where programs cannot be kept from network, files and other
            processes. Without it, programs run with the isolation that the system allows.
        deadline_s, memory_bytes: of one test; further limits in
            :class:`asyncrl.sandboxes.contract.SandboxLimits`.
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
        self._sandboxes = NamespacesBackend(require_isolation=require_isolation)
        self._limits = SandboxLimits(deadline_s=deadline_s, memory_bytes=memory_bytes)
        self._running = asyncio.Semaphore(processes)

    async def judge(self, answer: Answer) -> Verdict:
        first, *others = _tests(answer.ground_truth, self._most_tests)
        program = program_in(answer.solution_str)
        ends = [await self._run_test(program, first)]
        if ends[0] != "passed":
            async with self._running:
                compiled = await run_program(self._sandboxes, _COMPILE, stdin=program, limits=self._limits)
            if not compiled.succeeded:
                late = float(compiled.how == "deadline")
                return Verdict(score=0.0, parts={"passed": 0.0, "compiles": 0.0, "deadlines": late})
        ends += await run_all(self._run_test(program, test) for test in others)
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
                sides = {"solution": program, "tests": json.dumps(test["assertions"])}
                end, judged = await run_pair(self._sandboxes, _ASSERTIONS, sides, limits=self._limits)
                right = judged.succeeded
            elif "stdin" in test:
                end = await run_program(self._sandboxes, program, stdin=test["stdin"], limits=self._limits)
                right = end.succeeded and _same_output(end.stdout, test["stdout"])
            else:
                call = {"program": program, "function": test["function"], "arguments": test["arguments"]}
                end = await run_program(self._sandboxes, _CALL, stdin=json.dumps(call), limits=self._limits)
                right = end.succeeded and _is_result(end.stdout, test["expected"])
        return "passed" if right else end.how


async def run_program(
    sandboxes: NamespacesBackend, program: str, *, stdin: str = "", limits: SandboxLimits
) -> ProgramEnd:
    """Run a Python program in a new sandbox, and return how it ended.

    A program that dies by a signal such as SIGKILL may have been killed from outside: it runs again, in a new sandbox.
    The third such death counts as the program's own.

    Raises:
        SandboxError: the sandbox itself failed, three times.
    """

    async def once() -> list[ProgramEnd]:
        return [await _run_once(sandboxes, program, stdin, limits)]

    return (await _run_until_it_ends(once))[0]


async def run_pair(
    sandboxes: NamespacesBackend, program: str, stdins: Mapping[str, str], *, limits: SandboxLimits
) -> tuple[ProgramEnd, ProgramEnd]:
    """Run one program twice, in two sandboxes with a socket between them; return how both ended.

    Each side gets its name (a key of ``stdins``) and the descriptor of its socket as arguments. They start once both
    sandboxes are there. When the second side has ended, the first has a second to end: then it is stopped, and counts
    as ended like the second. Deaths are as for :func:`run_program`.
    """

    async def once() -> list[ProgramEnd]:
        over = asyncio.Event()
        async with AsyncExitStack() as stack:
            ends = [stack.enter_context(each) for each in socket.socketpair()]
            made = [await stack.enter_async_context(_sandbox_with(sandboxes, program, limits)) for _ in stdins]
            first, second = (
                _exec(sandbox, [side, "3"], stdin, connection=end, over=over)
                for sandbox, (side, stdin), end in zip(made, stdins.items(), ends, strict=True)
            )
            return await run_all([first, _ending_soon(second, over)])

    one, other = await _run_until_it_ends(once)
    return other if one.how == "stopped" else one, other


async def _run_until_it_ends(run: Callable[[], Awaitable[list[ProgramEnd]]]) -> list[ProgramEnd]:
    ends: list[ProgramEnd] = []
    for death in range(1, _MAX_DEATHS + 1):
        try:
            ends = await run()
        except SandboxError as error:
            _log.warning("%s (death %d)", error, death)
            if death == _MAX_DEATHS:
                raise
            continue
        killed = [end.code for end in ends if end.killed_from_outside]
        if not killed or death == _MAX_DEATHS:
            break
        _log.warning("a program died by %s before its deadline (death %d)", signal.Signals(killed[0]).name, death)
    return ends


async def _run_once(sandboxes: NamespacesBackend, program: str, stdin: str, limits: SandboxLimits) -> ProgramEnd:
    async with _sandbox_with(sandboxes, program, limits) as sandbox:
        return await _exec(sandbox, [], stdin)


@asynccontextmanager
async def _sandbox_with(
    sandboxes: NamespacesBackend, program: str, limits: SandboxLimits
) -> AsyncGenerator[NamespacesSandbox, None]:
    sandbox = await sandboxes.create(limits)
    try:
        await sandbox.write("main.py", program.encode("utf-8", "backslashreplace"))
        yield sandbox
    except OSError as error:
        raise as_failure("the program of a sandbox could not be written", error) from error
    finally:
        await sandbox.destroy()


async def _ending_soon(running: Awaitable[ProgramEnd], over: asyncio.Event) -> ProgramEnd:
    end = await running
    asyncio.get_running_loop().call_later(_LAST_S, over.set)
    return end


async def _exec(sandbox: NamespacesSandbox, arguments: list[str], stdin: str, **given: Any) -> ProgramEnd:
    command = [sys.executable, "-I", "main.py", *arguments]
    return await sandbox.exec(command, stdin=stdin.encode("utf-8", "backslashreplace"), **given)


def program_in(text: str) -> str:
    """Return the last fenced block of an answer that is marked as Python, else its last block, else all of it."""
    blocks = list(_blocks(text))
    if not blocks:
        return text
    python = [body for language, body in blocks if language.lower() in {"python", "python3", "py"}]
    return python[-1] if python else blocks[-1][1]


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield language and body of each fenced block, in time that grows with the length of the text alone."""
    fence = text.find("```")
    while fence >= 0 and (line_end := text.find("\n", fence)) >= 0:
        found = _LANGUAGE.match(text, fence + 3, line_end)
        closing = text.find("```", line_end)
        yield found[1] if found else "", text[line_end + 1 : closing if closing >= 0 else len(text)]
        fence = text.find("```", closing + 3) if closing >= 0 else -1


def _tests(given: Any, most: int) -> list[dict[str, Any]]:
    """Read the first tests in a ground truth; raise RewardError if it has none, or one that asserts nothing."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except json.JSONDecodeError:
            given = [given]  # assert statements
    if isinstance(given, dict) and "assert_case" in given:
        given = given["assert_case"]
    texts = given[:most] if isinstance(given, list) and all(isinstance(test, str) for test in given) else []
    kinds = [_kind(test) for test in texts]
    if "test" in kinds and "idle" not in kinds:
        before, tests = list[str](), []
        for text, kind in zip(texts, kinds, strict=True):
            if kind == "definitions":
                before.append(text)
            else:
                tests.append({"assertions": [*before, text]})
        return tests
    if isinstance(given, dict):
        inputs, outputs = given.get("inputs"), given.get("outputs")
        if isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs) > 0:
            name = given.get("fn_name")
            pairs = zip(inputs[:most], outputs[:most], strict=True)
            if name:
                return [
                    {
                        "function": str(name),
                        "arguments": _arguments(each),
                        "expected": _expected(right) if isinstance(each, str) else right,
                    }
                    for each, right in pairs
                ]
            return [{"stdin": _text(each), "stdout": _text(right)} for each, right in pairs]
    wrong = texts[kinds.index("idle")] if "idle" in kinds else given
    raise RewardError(
        'code needs tests as ground truth: {"inputs": [...], "outputs": [...]} of equal length, or assert statements, '
        f"outside of functions that nothing calls; got {repr(wrong)[:200]}",
        how="value",
    )


def _kind(text: str) -> Literal["test", "idle", "definitions", "broken"]:
    """Return what a text is; an ``idle`` one has assertions or test functions, and executes none."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "broken"
    executed = _executed(tree)
    if any(_asserts(each) or (isinstance(each, ast.Name) and each.id in _BY_NAME) for each in executed):
        return "test"
    others = set(ast.walk(tree)).difference(executed)
    if any(_asserts(each) or (isinstance(each, _FUNCTIONS) and each.name.startswith("test")) for each in others):
        return "idle"
    runs = any(
        not isinstance(each, _DEFINITIONS)
        and not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))  # a docstring
        and not _is_main(each)
        for each in tree.body
    )
    return "test" if runs else "definitions"


def _executed(tree: ast.Module) -> list[ast.AST]:
    """Return the nodes that may be executed, without functions whose names, or whose classes', nothing mentions."""
    functions: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = {}
    for each in ast.walk(tree):
        if isinstance(each, (*_FUNCTIONS, ast.ClassDef)):
            inside = each.body if isinstance(each, ast.ClassDef) else [each]
            functions.setdefault(each.name, []).extend(one for one in inside if isinstance(one, _FUNCTIONS))
    executed: list[ast.AST] = []
    left: list[ast.AST] = list(tree.body)
    while left:
        node = left.pop()
        if isinstance(node, _FUNCTIONS) or _is_main(node):
            continue
        executed.append(node)
        left += ast.iter_child_nodes(node)
        for function in functions.pop(node.id, ()) if isinstance(node, ast.Name) else ():
            executed.append(function)
            left += function.body
    return executed


def _is_main(node: ast.AST) -> bool:
    """Return whether a statement is for the main program, which a test is not."""
    return isinstance(node, ast.If) and "__name__" in ast.dump(node.test)


def _asserts(node: ast.AST) -> bool:
    """Return whether a node raises if something is wrong: an assertion, or a call like ``assert_equal``."""
    called = node.func if isinstance(node, ast.Call) else None
    name = called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""
    return isinstance(node, ast.Assert | ast.Raise) or name.startswith("assert") or name in ("fail", "raises")


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
