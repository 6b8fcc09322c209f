"""Examples in docstrings run, public classes and functions have one, and documented errors match the code."""

from __future__ import annotations

import ast
import asyncio
import builtins
import concurrent.futures
import doctest
import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
import threading
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import asyncrl
import asyncrl.algorithms.advantages
import asyncrl.algorithms.losses
import asyncrl.compat.verl
import asyncrl.data
import asyncrl.errors
import asyncrl.single_controller
from asyncrl.algorithms import M2PO, PolicyObjective, PolicyTokens, TokenLosses, load_estimator
from asyncrl.config import Config
from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.data.future import Future
from asyncrl.interfaces import GenerationRequest, GroupSummary, SamplingParams
from asyncrl.ledger import Completed, Dispatched, Issued
from asyncrl.rewards.rules import Answer
from asyncrl.rollout.trajectory import Trajectory, encode_rows, prompt_rows
from asyncrl.rollout.turns import sampled_turns
from asyncrl.rollout.worker import EpisodeLimits, RolloutSpec
from asyncrl.serve.serving import serve
from asyncrl.single_controller import ClassWithInitArgs, Dispatch, Role, Worker, create_colocated_worker_cls, register
from asyncrl.single_controller.local import LocalWorkerGroup
from asyncrl.staleness import certify
from asyncrl.testing import EchoFactory
from asyncrl.weights import TransportSpec
from buffers.ledger import SQLiteLedger
from buffers.selection import GroupIdOrder
from engines.training.scratch import make_scratch_tokenizer

PUBLIC = (
    "asyncrl",
    "asyncrl.algorithms",
    "asyncrl.data",
    "asyncrl.single_controller",
    "asyncrl.single_controller.ray",
    "asyncrl.compat.verl",
)
"""Packages whose classes and functions have an example each, and whose methods document what they raise."""
OTHER_MODULES = (
    "asyncrl.interfaces",
    "asyncrl.envs.calculator",
    "asyncrl.envs.tools",
    "asyncrl.staleness",
    "asyncrl.tasks.run",
    "asyncrl.rewards.match",
    "asyncrl.rewards.rules",
    "asyncrl.rollout.admission",
    "asyncrl.rollout.dispatcher",
    "asyncrl.rollout.trajectory",
    "asyncrl.rollout.health",
    "asyncrl.rollout.router",
    "asyncrl.rollout.worker",
    "asyncrl.serve.serving",
    "buffers.replay",
    "buffers.state",
)
"""Modules of other packages whose examples run."""
SLOW = ("asyncrl.rewards.match",)
NEED_RAY = (
    "asyncrl.single_controller.ray.backend",
    "asyncrl.single_controller.ray.resource_pool",
    "asyncrl.single_controller.resource_pool",
    "asyncrl.compat.verl.controller",
)
FIXTURES = {
    "asyncrl.compat.verl.controller": "workers",
    "asyncrl.rollout.worker": "replica",
    "asyncrl.tasks.run": "small_run",
}
"""Modules whose examples use more than ``names``, and the fixture that makes it."""


# ----------------------------------------------------------------------------------------------------- the examples run


class Greeter(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def greet(self, name: str) -> str:
        return f"{name}, from {self.rank} of {self.world_size}"

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double(self, batch: DataProto) -> DataProto:
        assert batch.batch is not None
        return batch.with_columns(x=batch.batch["x"] * 2)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def count(self, end: int) -> Iterator[int]:
        yield from range(end)


def add(a: int, b: int = 1) -> int:
    """Add two integers."""
    return a + b


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SQLiteLedger]:
    """One group of two rows, which earn 0 and 1."""
    rows = [
        Trajectory(
            task={},
            token_ids=(1, 2),
            loss_mask=(False, True),
            behaviour_log_probs=(0.0, -0.5),
            weight_versions=(-1, 1),
            reward=reward,
            turns=(),
            finish_reason="done",
        )
        for reward in (0.0, 1.0)
    ]
    with SQLiteLedger(tmp_path_factory.mktemp("ledger") / "ledger.sqlite", threaded=False) as ledger:
        ledger.append(Issued(0), Dispatched(group_id=0, attempt=0, version=1))
        ledger.append(Completed(group_id=0, attempt=0, tokens=2), rows=encode_rows(rows))
        yield ledger


@pytest.fixture(scope="module")
def names(ledger: SQLiteLedger, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The names that examples use without defining them."""
    data = DataProto.from_dict(
        tensors={"x": torch.tensor([1, 2, 3])}, non_tensors={"name": ["a", "b", "c"]}, meta_info={"step": 7}
    )
    half = torch.tensor([0.5, 0.5, 0.5]).log()
    tokens = PolicyTokens(
        current=torch.tensor([0.5, 0.75, 0.25]).log(),
        anchor=half,
        proximal=half,
        behaviour=torch.tensor([0.5, 0.25, 0.5]).log(),
        advantages=torch.tensor([1.0, 1.0, -1.0]),
        mask=torch.tensor([True, True, True]),
        row_index=torch.tensor([0, 0, 1]),
    )
    summary = GroupSummary(
        group_id=0,
        rows=2,
        oldest_version=1,
        tokens=4,
        version_tokens={1: 1, 2: 3},
        rewards=(0.0, 1.0),
        lengths=(1, 3),
    )
    init = ClassWithInitArgs(Greeter)
    with (
        LocalWorkerGroup(init, world_size=2) as group,
        LocalWorkerGroup(create_colocated_worker_cls({"left": init, "right": init})) as colocated,
    ):
        yield {
            "ClassWithInitArgs": ClassWithInitArgs,
            "DataProto": DataProto,
            "DataProtoFuture": DataProtoFuture,
            "Dispatch": Dispatch,
            "Future": Future,
            "Greeter": Greeter,
            "LocalWorkerGroup": LocalWorkerGroup,
            "M2PO": M2PO,
            "Role": Role,
            "GroupIdOrder": GroupIdOrder,
            "TokenLosses": TokenLosses,
            "add": add,
            "answer": Answer(data_source="sums", solution_str="4", ground_truth="4"),
            "asked": GenerationRequest(
                request_id="a", prompt_token_ids=(1,), sampling=SamplingParams(max_new_tokens=3)
            ),
            "asyncio": asyncio,
            "certificate": certify([summary], trainer_version=2, dropped_rows=2, dropped_tokens=4),
            "colocated": colocated,
            "data": data,
            "folder": tmp_path_factory.mktemp("folder"),
            "future": DataProtoFuture.of(data),
            "group": group,
            "ledger": ledger,
            "load_estimator": load_estimator,
            "np": np,
            "objective": PolicyObjective(),
            "summary": summary,
            "threading": threading,
            "tokens": tokens,
            "torch": torch,
        }


def by_value() -> ModuleType:
    """Return Ray, with this module pickled by value, since Ray's workers cannot import it."""
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    return ray


@pytest.fixture
def small_run(tmp_path: Path) -> dict[str, Any]:
    """The names in the examples of runs."""
    tables = {
        "name": "shared",
        "steps": 1,
        "runs": str(tmp_path / "shared"),
        "cluster": {"backend": "local"},
        "model": {"source": "scratch", "options": {"layers": 1, "tokenizer_conversations": 8}},
        "env": {"name": "asyncrl.testing:EchoFactory"},
        "rollout": {"max_new_tokens": 4, "max_seq_len": 64},
        "trainer": {"groups_per_step": 2, "group_size": 2},
        "sft": {"steps": 1},
        "eval": {"tasks": 2},
        "telemetry": {"progress": "none"},
    }
    return {"config": Config.from_mapping(tables), "folder": tmp_path}


@pytest.fixture
def replica(tmp_path: Path) -> dict[str, Any]:
    """The names in the examples of rollout workers."""
    words = [EchoFactory().demonstration(index) for index in range(8)]
    make_scratch_tokenizer(words, vocab_size=320).save_pretrained(tmp_path)
    spec = RolloutSpec(
        engine="asyncrl.testing:EchoEngine",
        environment="asyncrl.testing:EchoFactory",
        transport=TransportSpec(name="asyncrl.testing:EmptyTransport", namespace="run-1"),
        limits=EpisodeLimits(max_turns=2, max_seq_len=64),
        sampling=SamplingParams(max_new_tokens=16),
        gather_s=0.0,
    )
    return {"model": str(tmp_path), "prompt_rows": prompt_rows, "sampled_turns": sampled_turns, "spec": spec}


@pytest.fixture
def workers(ray_cluster: None) -> Iterator[dict[str, Any]]:
    """The names in the examples of verl's worker groups."""
    by_value()
    init = asyncrl.compat.verl.create_colocated_worker_cls(
        {"actor": asyncrl.compat.verl.RayClassWithInitArgs(asyncrl.compat.verl.Worker)}
    )
    pool = asyncrl.compat.verl.RayResourcePool([2], use_gpu=False)
    with asyncrl.compat.verl.RayWorkerGroup(pool, init, name_prefix="workers") as made:
        yield {"workers": made}


def modules() -> Iterator[Any]:
    found = set(OTHER_MODULES)
    for package in map(importlib.import_module, PUBLIC[1:]):
        found |= {f"{package.__name__}.{module.name}" for module in pkgutil.iter_modules(package.__path__)}
    for name in sorted({*found, "asyncrl.compat.verl"}):
        marks = [pytest.mark.ray, pytest.mark.slow] if name in NEED_RAY else [pytest.mark.slow] * (name in SLOW)
        yield pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", list(modules()))
def test_examples_run(
    name: str, names: dict[str, Any], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    known = dict(names)
    if name in NEED_RAY:
        request.getfixturevalue("ray_cluster")
        known["ray"] = by_value()
    if name in FIXTURES:
        known |= request.getfixturevalue(FIXTURES[name])
    if name.startswith("asyncrl.compat.verl"):
        known |= vars(asyncrl.compat.verl)
    module = importlib.import_module(name)
    assert doctest.testmod(module, extraglobs={**known, **vars(module)}).failed == 0


# -------------------------------------------------------------------------------------------------- documented errors


def exported() -> Iterator[tuple[str, Any]]:
    """Classes and functions that the public packages export, each once."""
    found = {"asyncrl.serve": serve}  # the package that is this function, too
    for package in map(importlib.import_module, PUBLIC):
        for name in package.__all__:
            member = getattr(package, name)
            if (inspect.isclass(member) or inspect.isfunction(member)) and member not in found.values():
                found[f"{package.__name__}.{name}"] = member
    yield from found.items()


def functions() -> Iterator[tuple[str, Any, str]]:
    """Exported functions, and constructors and public methods of exported classes, with their docstrings."""
    for name, member in exported():
        if not inspect.isclass(member):
            yield name, member, inspect.getdoc(member) or ""
        elif not issubclass(member, Enum) and not is_protocol(member):
            for attribute in dir(member):
                method = function_of(inspect.getattr_static(member, attribute))
                documented = member if attribute in ("__init__", "__new__", "__post_init__") else method
                if not inspect.isfunction(method) or (attribute.startswith("_") and documented is method):
                    continue
                inherited = documented is member and attribute not in vars(member)
                if method.__module__.startswith(("asyncrl.", "buffers.")) and not inherited:
                    yield f"{name}.{attribute}", method, inspect.getdoc(documented) or ""


def is_protocol(kind: type) -> bool:
    return getattr(kind, "_is_protocol", False)


def function_of(member: Any) -> Any:
    if isinstance(member, property):
        return member.fget
    return member.__func__ if isinstance(member, staticmethod | classmethod) else member


@pytest.mark.parametrize("member", [pytest.param(member, id=name) for name, member in exported()])
def test_exported_classes_and_functions_have_an_example(member: Any) -> None:
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(member) or "")
    assert [each for each in examples if not each.options.get(doctest.SKIP)]


@pytest.mark.parametrize(("function", "doc"), [pytest.param(*each, id=name) for name, *each in functions()])
def test_public_functions_and_methods_document_what_they_raise(function: Any, doc: str) -> None:
    documented = tuple(documented_errors(doc))
    assert {error.__name__ for error in raised_by(function) if not issubclass(error, documented)} == set()


def documented_errors(doc: str) -> list[type[BaseException]]:
    """The classes in the section "Raises" of a docstring."""
    section = re.search(r"^Raises[^\n]*:\n((?:[ ]+[^\n]*\n?|\n)*)", doc, re.MULTILINE)
    names = re.findall(r"^ +([\w.]+):", section[1], re.MULTILINE) if section else []
    return [error for name in names if (error := error_named(name.rpartition(".")[2])) is not None]


def error_named(name: str) -> type[BaseException] | None:
    for module in (asyncrl.errors, builtins, concurrent.futures):
        found = getattr(module, name, None)
        if isinstance(found, type) and issubclass(found, BaseException):
            return found
    return None


NOT_DOCUMENTED = (AssertionError, AttributeError, NotImplementedError, StopIteration, StopAsyncIteration)


def raised_by(function: Any) -> set[type[BaseException]]:
    """The classes in `raise` statements of a function, and of the private functions beside it that it calls."""
    found: set[type[BaseException]] = set()
    waiting, visited = [inspect.unwrap(function)], set[Any]()
    while waiting:
        current = waiting.pop()
        if current in visited or current.__code__.co_filename == "<string>":  # of dataclasses
            continue
        visited.add(current)
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(current)))):
            if isinstance(node, ast.Raise) and node.exc is not None:
                name = ast.unparse(node.exc.func if isinstance(node.exc, ast.Call) else node.exc)
                maker = function_beside(current, name)  # `raise self.placement_timeout_error()`
                error = error_named(inspect.signature(maker).return_annotation if maker else name.rpartition(".")[2])
                found |= {error} if error is not None and not issubclass(error, NOT_DOCUMENTED) else set()
            elif isinstance(node, ast.Call):
                called = function_beside(current, ast.unparse(node.func))
                waiting += [called] if called is not None and called.__name__.startswith("_") else []
    return found


def function_beside(function: Any, name: str) -> Any:
    """The function of the same module (``name``) or class (``self.name``), if there is one."""
    owner: Any = inspect.getmodule(function)
    prefix, _, attribute = name.rpartition(".")
    if prefix in ("self", "cls"):
        for part in function.__qualname__.split(".")[:-1]:
            owner = getattr(owner, part, None)
    found = getattr(owner, attribute, None) if prefix in ("", "self", "cls") else None
    return found if inspect.isfunction(found) and found.__module__ == function.__module__ else None


def test_errors_are_read_from_code_and_docstrings() -> None:
    assert raised_by(DataProto.split) == {asyncrl.errors.SchemaError}
    assert raised_by(DataProto.save_to_disk) == set()
    assert raised_by(Worker.query_dispatch_info) == {asyncrl.errors.DispatchError}  # raised by a private helper
    doc = "Do it.\n\nRaises:\n    SchemaError: why,\n        in two lines.\n    OSError: too.\n"
    assert documented_errors(doc) == [asyncrl.errors.SchemaError, OSError]
    assert documented_errors("Raise SchemaError unless it fits.") == []
