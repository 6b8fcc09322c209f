"""Scores of reasoning-gym's data sets, some of which evaluate the answer: ``[[1, 2]]``, ``3*x**2 + C``.

An answer is data. So each is scored in a fork of this process with limits, and wherever the package or sympy's parser
call ``eval`` there, :func:`evaluate` is called instead, which computes and does nothing else.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import reasoning_gym
import sympy
from sympy.parsing import sympy_parser

_CPU_S = 3
_MEMORY_BYTES = 1 << 30
_EXTERNAL_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_DATA = (ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Load)
_MATHEMATICS = (ast.BinOp, ast.operator, ast.UnaryOp, ast.unaryop, ast.Name, ast.Call)

_made: dict[str, Any] = {}
"""Data sets by name and configuration."""


def score(solution_str: str, entry: dict[str, Any], *, dataset: str, config: Mapping[str, Any] | None = None) -> float:
    """Return the data set's own score of an answer.

    The score is 0 if the answer makes the scorer raise, crash, compute for more than 3 s or need more than 1 GiB.

    Args:
        solution_str: the answer alone.
        entry: the data set's entry.
        dataset: its name.
        config: its options.

    Raises:
        ValueError: the scorer also raises for the entry's own answer; the entry is wrong, not the answer.
    """
    name = f"{dataset} {config}"
    if name not in _made:
        _made[name] = reasoning_gym.create_dataset(dataset, **(config or {}))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, json.dumps(_limited(_made[name], solution_str, entry)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:  # noqa: PTH123  a descriptor
        text = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if -code in _EXTERNAL_SIGNALS:
        os.kill(os.getpid(), -code)  # it was not the answer: the call is repeated in a new process
    reply = json.loads(text or '{"score": 0.0}')
    if "error" in reply:
        raise ValueError(reply["error"])
    return float(reply["score"])


def _limited(dataset: Any, answer: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Set limits and the evaluation of this process, and return the score, or why the entry has none."""
    with contextlib.suppress(OSError, ValueError):  # there are stricter limits; or no /proc
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S + 1))  # SIGXCPU, and not SIGKILL
        used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES, used + _MEMORY_BYTES))
    for name, module in list(sys.modules.items()):
        if module is sympy_parser or name.partition(".")[0] == "reasoning_gym":
            vars(module)["eval"] = evaluate
    with contextlib.suppress(Exception):
        return {"score": float(dataset.score_answer(answer=answer, entry=entry))}
    try:
        dataset.score_answer(answer=str(entry["answer"]), entry=entry)
    except Exception:  # noqa: BLE001  a scorer may raise anything
        return {"error": traceback.format_exc()}
    return {"score": 0.0}


def evaluate(source: str, names: Mapping[str, Any] | None = None, own: Mapping[str, Any] | None = None) -> Any:
    """Evaluate data and arithmetic, and of ``names`` and ``own`` what is sympy's mathematics.

        >>> evaluate("[[1, 2], 3 * (4 - 1)]")
        [[1, 2], 9]

    Raises:
        ValueError: the expression has something else: an attribute, another function, a condition.
    """
    known = {**(names or {}), **(own or {})}
    tree = ast.parse(source.strip(), mode="eval")
    for node in ast.walk(tree):
        if not isinstance(node, _DATA + _MATHEMATICS):
            raise ValueError(f"an answer has no {type(node).__name__}")
        if isinstance(node, ast.Name) and not _is_mathematics(known.get(node.id)):
            raise ValueError(f"{node.id} is nothing that an answer may name")
    return eval(compile(tree, "<answer>", "eval"), {"__builtins__": {}}, known)  # noqa: S307  as checked above


def _is_mathematics(thing: Any) -> bool:
    """Return whether it is ``abs``, a symbol, a number or a function; not what sympy has for programs."""
    if thing is abs:
        return True
    module = str(getattr(thing, "__module__", ""))
    is_basic = isinstance(thing, sympy.Basic) or (isinstance(thing, type) and issubclass(thing, sympy.Basic))
    return module.startswith("sympy.functions.") or (module.startswith("sympy.core.") and is_basic)
