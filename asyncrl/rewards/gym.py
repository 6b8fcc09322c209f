"""Scores of reasoning-gym's data sets, some of which evaluate the answer: ``[[1, 2]]``, ``3*x**2 + C``.

An answer is data. So each is scored in a fork of this process with limits, and wherever the package or sympy's parser
call ``eval`` there, :func:`evaluate` is called instead, which computes and does nothing else.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
import os
import re
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import reasoning_gym
import sympy
from sympy.parsing import sympy_parser

from asyncrl.sandboxes.contract import EXTERNAL_SIGNALS

_CPU_S = 3
_MEMORY_BYTES = 1 << 30
_CONTAINERS = (ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Load)
_DATA = (*_CONTAINERS, ast.BinOp, ast.operator, ast.UnaryOp, ast.unaryop)
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)
_FUNCTIONS = (abs, pow, sympy.S, sympy.sqrt, sympy.cbrt, sympy.root)
_NUMBERS = {sympy.Integer: 1, sympy.Float: 1, sympy.Rational: 2}
"""Largest number of arguments: the third of Rational makes numbers that are none."""

_ARITHMETIC = {"countdown", "puzzle24"}
"""Data sets whose scorers count the numbers in the text, where names, calls, comments and decimals could hold any."""


def _puzzle24(answer: str, entry: dict[str, Any]) -> bool:
    numbers = sorted(map(int, re.findall(r"\d+", answer)))
    if "**" in answer or "//" in answer:  # no operators of the task, and with them numbers vanish
        return False
    return numbers == sorted(entry["metadata"]["numbers"]) and sympy_parser.parse_expr(answer) == 24


def _coin_flip(answer: str, entry: dict[str, Any]) -> bool:
    return abs(Fraction(answer.replace(",", "")) - Fraction(entry["answer"].replace(",", ""))) <= 1e-4


_REQUIRED: dict[str, Callable[[str, dict[str, Any]], bool]] = {
    "puzzle24": _puzzle24,
    "coin_flip": _coin_flip,
    "game_of_life_halting": lambda answer, entry: answer.casefold() == entry["answer"].casefold(),
    "complex_arithmetic": lambda answer, _: "n" not in answer.casefold(),  # neither nan nor inf
    "number_sorting": lambda answer, _: all(map(math.isfinite, map(float, json.loads(answer.replace("'", '"'))))),
}
"""What also holds for right answers, by data set; its scorer gives the whole reward to wrong ones, such as ``nan``."""

_made: dict[str, Any] = {}
"""Data sets by name and configuration."""


def score(solution_str: str, entry: dict[str, Any], *, dataset: str, config: Mapping[str, Any] | None = None) -> float:
    """Return the data set's own score of an answer; 0 for one that lacks what is ``_REQUIRED`` there.

    The score is 0 if the answer makes the scorer raise, crash, compute for more than 3 s or need more than 1 GiB. Any
    other death of the fork kills this process, too.

    Args:
        solution_str: the answer alone.
        entry: the data set's entry.
        dataset: its name.
        config: its options.

    Raises:
        ValueError: the scorer also raises for the entry's own answer; the entry is wrong, not the answer.
    """
    if dataset in _ARITHMETIC and not re.fullmatch(r"[0-9\s()+*/-]*", solution_str):
        solution_str = "?"
    name = f"{dataset} {config}"
    if name not in _made:
        made = _made[name] = reasoning_gym.create_dataset(dataset, **(config or {}))
        with contextlib.suppress(Exception):  # imports and caches of the scorer, which the forks then have
            made.score_answer(answer=str(made[0]["answer"]), entry=made[0])
    try:
        reading, writing = os.pipe()
        child = os.fork()
    except OSError:  # no descriptors, processes or memory are left
        os.kill(os.getpid(), signal.SIGKILL)
        raise
    if child == 0:
        try:
            _limit()
            os.write(writing, json.dumps(_scored(_made[name], solution_str, entry, _REQUIRED.get(dataset))).encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading, "rb") as pipe:  # noqa: PTH123  a descriptor
        text = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code > 0 or -code in EXTERNAL_SIGNALS:
        # It was not the answer: the call is repeated in a new process.
        os.kill(os.getpid(), signal.SIGKILL if code > 0 else -code)
    reply = json.loads(text) if code == 0 else {"score": 0.0}
    if "error" in reply:
        raise ValueError(reply["error"])
    return float(reply["score"])


def _limit() -> None:
    """Set limits and the evaluation of this process."""
    with contextlib.suppress(OSError, ValueError):  # there are stricter limits; or no /proc
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S + 1))  # SIGXCPU, and not SIGKILL
        used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES, used + _MEMORY_BYTES))
    for name, module in list(sys.modules.items()):
        if module is sympy_parser or name.partition(".")[0] == "reasoning_gym":
            vars(module)["eval"] = evaluate


def _scored(
    dataset: Any, answer: str, entry: dict[str, Any], required: Callable[[str, dict[str, Any]], bool] | None
) -> dict[str, Any]:
    """Return the score, or why the entry has none."""
    with contextlib.suppress(Exception):
        found = float(dataset.score_answer(answer=answer, entry=entry))
        return {"score": found if required is None or required(answer, entry) else 0.0}
    try:
        dataset.score_answer(answer=str(entry["answer"]), entry=entry)
    except Exception:  # noqa: BLE001  a scorer may raise anything
        return {"error": traceback.format_exc()}
    return {"score": 0.0}


def evaluate(source: str, names: Mapping[str, Any] | None = None, own: Mapping[str, Any] | None = None) -> Any:
    """Evaluate data; or, of the ``names`` and ``own`` that sympy's parser gives, an expression of sympy's mathematics.

        >>> evaluate("[[1, 2], 3 * (4 - 1)]")
        [[1, 2], 9]
        >>> evaluate("sin(Symbol('x')) / Integer(2)", vars(sympy))
        sin(x)/2

    Raises:
        ValueError: it is something else, such as an attribute, a function of another kind or a condition.
    """
    tree = ast.parse(source.strip(), mode="eval")
    known = {**(names or {}), **(own or {})}
    if names is None:
        if other := next((node for node in ast.walk(tree) if not isinstance(node, _DATA)), None):
            raise ValueError(f"an answer has no {type(other).__name__} here")
    else:
        nodes = [tree.body]
        while nodes:
            nodes += _operands(nodes.pop(), known)
    return eval(compile(tree, "<answer>", "eval"), {"__builtins__": {}}, known)  # noqa: S307  as checked above


def _operands(node: ast.expr, known: Mapping[str, Any]) -> list[ast.expr]:
    """Return the operands of a form that makes an expression of sympy from such, or raise ValueError."""

    def thing(node: ast.expr) -> Any:
        return known.get(node.id) if isinstance(node, ast.Name) else None

    match node:
        case ast.Constant() if type(node.value) in (int, float, complex):
            return []
        case ast.Name() if _is_value(thing(node)):
            return []
        case ast.UnaryOp(op=ast.UAdd() | ast.USub()):
            return [node.operand]
        case ast.BinOp() if isinstance(node.op, _OPERATORS):
            return [node.left, node.right]
        case ast.Call(args=[ast.Constant(value=str(text))], keywords=[]):
            if thing(node.func) in _NUMBERS or (thing(node.func) is sympy.Symbol and text.isidentifier()):
                return []
        case ast.Call(func=ast.Call(func=made, args=[ast.Constant(value=str(text))], keywords=[]), keywords=[]):
            if thing(made) is sympy.Function and text.isidentifier():
                return node.args
        case ast.Call(keywords=[]) if _is_function(thing(node.func), len(node.args)):
            return node.args
    raise ValueError(f"an answer has no {ast.unparse(node)}")


def _is_value(thing: Any) -> bool:
    """Return whether it is a symbol or a number, such as pi."""
    return isinstance(thing, sympy.Expr) and type(thing).__module__.startswith("sympy.core.")


def _is_function(thing: Any, count: int) -> bool:
    """Return whether it makes an expression of ``count`` expressions."""
    if thing in _NUMBERS:
        return count <= _NUMBERS[thing]
    if thing in _FUNCTIONS:
        return True
    is_class = isinstance(thing, type) and issubclass(thing, sympy.Expr) and thing is not sympy.Piecewise
    return is_class and thing.__module__.startswith("sympy.functions.")
