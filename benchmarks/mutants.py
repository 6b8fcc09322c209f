"""Plants small defects in `asyncrl/algorithms`, one at a time, and counts those that its tests detect.

    python benchmarks/mutants.py [--sample 300] [--seed 0] [--jobs 2] [--only policy_losses] [--json]

A mutant is a module with one change: an operator, a comparison or a number replaced, a condition negated, a keyword
left out, `detach`, a minus or a `raise` taken away, `min` for `max`, and the like. Messages, docstrings and annotations
are left alone. Each mutant runs all of `tests/algorithms` in a process forked from one that has imported torch and
pytest, until a test fails. A mutant that survives is printed as a line of code and its change: either a test is
missing, or no input can show the change. A mutant that takes more than ``--timeout-s`` seconds is counted apart, and
not as killed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib
import importlib.abc
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

os.environ["OMP_NUM_THREADS"] = "1"

ROOT = Path(__file__).resolve().parent.parent
CODE, TESTS = ROOT / "asyncrl" / "algorithms", ROOT / "tests" / "algorithms"
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
NAMES = {
    "all": "any",
    "any": "all",
    "amax": "amin",
    "amin": "amax",
    "ceil": "floor",
    "exp": "expm1",
    "floor": "ceil",
    "log": "log1p",
    "max": "min",
    "maximum": "minimum",
    "mean": "sum",
    "min": "max",
    "minimum": "maximum",
    "ones_like": "zeros_like",
    "sum": "mean",
    "zeros_like": "ones_like",
}
UNWRAPPED = {"abs", "clamp", "contiguous", "detach", "exp", "float", "log", "square", "sqrt", "tolist"}
"""Methods whose call is replaced by what they are called on, where they take no argument."""

OURS = 70
"""Exit status of a forked process in which pytest itself did not come to an end."""


@dataclass(frozen=True)
class Mutant:
    path: str  # from the repository's root
    line: int
    before: str
    after: str
    source: str  # of the whole module


FATAL = Mutant(path="asyncrl/algorithms/losses.py", line=1, before="", after="", source="")
"""No test can be collected with it."""


# ---------------------------------------------------------------------------------------------------- making mutants


def changes(node: ast.AST) -> Iterator[Callable[[ast.AST], ast.AST | None]]:
    """Ways to change one node; each takes a copy of it and gives what stands there instead, None for nothing."""

    def field(name: str, value: object, index: int | None = None) -> Callable[[ast.AST], ast.AST]:
        def change(at: ast.AST) -> ast.AST:
            if index is None:
                setattr(at, name, value)
            else:
                getattr(at, name)[index] = value
            return at

        return change

    match node:
        case ast.BinOp(op=operator) | ast.AugAssign(op=operator) | ast.BoolOp(op=operator):
            if type(operator) in SWAPS:
                yield field("op", SWAPS[type(operator)]())
        case ast.Compare(ops=operators):
            for index, operator in enumerate(operators):
                yield field("ops", SWAPS[type(operator)](), index)
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert()):
            yield lambda at: at.operand  # type: ignore[attr-defined, no-any-return]
        case ast.Constant(value=bool() as value):
            yield field("value", not value)
        case ast.Constant(value=int() | float() as value):
            yield field("value", value + 1)
        case ast.Constant(value=str() as value) if " " not in value:  # a name, no message
            yield field("value", f"{value}?")
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            yield field("test", ast.UnaryOp(op=ast.Not(), operand=test))
        case ast.Raise():
            yield lambda at: ast.Pass()
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield field("value", ast.Constant(value=None))
        case ast.Call(func=function, args=arguments, keywords=keywords):
            for index in range(len(keywords)):
                yield lambda at, index=index: without(at, index)  # type: ignore[misc]
            match function:
                case ast.Attribute(attr=name) if name in UNWRAPPED and not arguments and not keywords:
                    yield lambda at: at.func.value  # type: ignore[attr-defined, no-any-return]
                case ast.Attribute(attr=name) if name in NAMES:
                    yield lambda at: renamed(at, "attr")
                case ast.Name(id=name) if name in NAMES:
                    yield lambda at: renamed(at, "id")


def without(call: ast.AST, index: int) -> ast.AST:
    del call.keywords[index]  # type: ignore[attr-defined]
    return call


def renamed(call: ast.AST, field: str) -> ast.AST:
    function = call.func  # type: ignore[attr-defined]
    setattr(function, field, NAMES[getattr(function, field)])
    return call


def places(node: ast.AST, way: tuple[tuple[str, int | None], ...] = ()) -> Iterator[tuple[ast.AST, tuple]]:
    """Nodes that a mutant may change, each with the way to it from the module."""
    yield node, way
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params") or isinstance(node, ast.Raise):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            said = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)  # a docstring
            told = isinstance(child, ast.JoinedStr | ast.Import | ast.ImportFrom)
            listed = isinstance(child, ast.Assign) and any(getattr(to, "id", "") == "__all__" for to in child.targets)
            if isinstance(child, ast.AST) and not (said or told or listed):
                yield from places(child, (*way, (name, index)))


def mutants(path: Path) -> Iterator[Mutant]:
    tree = ast.parse(path.read_text())
    for node, way in places(tree):
        for change in changes(node):
            copied = copy.deepcopy(tree)
            parent: ast.AST = copied
            for name, index in way[:-1]:
                parent = getattr(parent, name) if index is None else getattr(parent, name)[index]
            name, index = way[-1]
            at = getattr(parent, name) if index is None else getattr(parent, name)[index]
            before = ast.unparse(at)
            instead = change(at)
            if index is None:
                setattr(parent, name, instead)
            else:
                getattr(parent, name)[index] = instead
            source = ast.unparse(ast.fix_missing_locations(copied))
            yield Mutant(
                path=str(path.relative_to(ROOT)),
                line=node.lineno,  # type: ignore[attr-defined]
                before=before.splitlines()[0],
                after=ast.unparse(instead).splitlines()[0] if instead is not None else "",
                source=source,
            )


# --------------------------------------------------------------------------------------------------- meeting the tests


class Planted(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a mutant's source."""

    def __init__(self, mutant: Mutant) -> None:
        *packages, name = Path(mutant.path).with_suffix("").parts
        self.file = ROOT / mutant.path
        self.package = self.file.parent if name == "__init__" else None
        self.name = ".".join(packages if self.package else [*packages, name])
        self.source = mutant.source

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        inside = [str(self.package)] if self.package else None
        return spec_from_file_location(fullname, self.file, loader=self, submodule_search_locations=inside)

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.source, str(self.file), "exec"), vars(module))


def tests(path: str) -> tuple[list[str], list[str]]:
    """The test files that are called as the module or its folder, and the others."""
    words = {Path(part).stem for part in Path(path).parts[2:]}
    own, others = [], []
    for file in sorted(TESTS.glob("test_*.py")):
        (own if file.stem.removeprefix("test_") in words else others).append(str(file))
    return own, others


def meet(mutant: Mutant | None) -> int:
    """In a forked process: pytest's exit status."""
    import pytest

    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    if mutant is not None:
        sys.meta_path.insert(0, Planted(mutant))
    status = 0
    # Processes of xdist's would import the module from its file.
    words = ["-n", "0", "-x", "-q", "-p", "no:cacheprovider", "--timeout", "60", f"--rootdir={ROOT}"]
    for files in tests(mutant.path if mutant else ""):
        if files and status == 0:  # without a file pytest would look for some
            status = int(pytest.main([*words, *files]))
    return status


def fate(mutant: Mutant | None, timeout_s: float) -> str:
    """`killed`, `survived`, or `timed out`."""
    child = os.fork()
    if child == 0:
        status = OURS
        try:
            os.setpgid(0, 0)
            status = meet(mutant)
        finally:
            os._exit(status)
    deadline = time.monotonic() + timeout_s
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            code = os.waitstatus_to_exitcode(status)
            if code == OURS:
                raise RuntimeError(f"no test could be run on {mutant}")
            return "survived" if code == 0 else "killed"
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "timed out"
        time.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=300, help="so many of them, at random; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--only", default="", help="modules whose path contains this")
    parser.add_argument("--timeout-s", type=float, default=300.0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    found = [
        mutant
        for path in sorted(CODE.rglob("*.py"))
        if arguments.only in str(path.relative_to(ROOT))
        for mutant in mutants(path)
    ]
    chosen = found
    if 0 < arguments.sample < len(found):
        chosen = random.Random(arguments.seed).sample(found, arguments.sample)

    for slow_to_import in ("hypothesis", "numpy", "pytest", "torch", "transformers"):
        importlib.import_module(slow_to_import)
    assert not any(name.startswith("asyncrl") for name in sys.modules), "the mutant would come too late"
    if fate(None, arguments.timeout_s) != "survived":
        print("the tests fail without any defect", file=sys.stderr)
        return 1
    if fate(FATAL, arguments.timeout_s) != "killed":
        print("the tests pass without a loss: no mutant reaches them", file=sys.stderr)
        return 1
    began = time.monotonic()
    fates: Counter[str] = Counter()
    survivors: list[Mutant] = []
    with ThreadPoolExecutor(arguments.jobs) as jobs:
        for mutant, what in zip(chosen, jobs.map(lambda each: fate(each, arguments.timeout_s), chosen), strict=True):
            fates[what] += 1
            if what != "killed":
                survivors.append(mutant)
                if not arguments.json:
                    print(f"{what}: {mutant.path}:{mutant.line}: {mutant.before}  ->  {mutant.after}", flush=True)
    share = fates["killed"] / max(1, len(chosen))
    figures = {
        "mutants": len(found),
        "tried": len(chosen),
        **{name.replace(" ", "_"): fates[name] for name in ("killed", "survived", "timed out")},
        "share_killed": round(share, 3),
        "goal": 0.9,
        "holds": share >= 0.9,
        "seconds": round(time.monotonic() - began),
    }
    if arguments.json:
        left = [{"path": at.path, "line": at.line, "before": at.before, "after": at.after} for at in survivors]
        print(json.dumps({"figures": figures, "left": left}))
    else:
        print(figures)
    return 0 if figures["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
