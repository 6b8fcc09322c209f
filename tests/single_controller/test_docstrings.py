"""Everything public says what it is and what it raises, with an example, and the examples run."""

from __future__ import annotations

import ast
import asyncio
import doctest
import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import asyncrl
import asyncrl.algorithms.advantages
import asyncrl.algorithms.policy_losses
import asyncrl.data
import asyncrl.errors
import asyncrl.single_controller
import asyncrl.verl
from asyncrl.algorithms import M2PO, PolicyObjective, PolicyTokens, TokenLosses, load_estimator
from asyncrl.config import Config
from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.data.future import Future
from asyncrl.interfaces import GenerationRequest, GroupSummary, SamplingParams
from asyncrl.ledger import Completed, Dispatched, Issued
from asyncrl.pipeline.certificate import certify
from asyncrl.rewards.rule import Answer
from asyncrl.rollout.prompts import prompt_rows
from asyncrl.rollout.record import encode_rows
from asyncrl.rollout.trajectory import Trajectory
from asyncrl.rollout.turns import sampled_turns
from asyncrl.rollout.worker import EpisodeLimits, RolloutSpec
from asyncrl.serve.serving import serve
from asyncrl.single_controller import ClassWithInitArgs, Dispatch, Role, Worker, create_colocated_worker_cls, register
from asyncrl.single_controller.local import LocalWorkerGroup
from asyncrl.testing import EchoFactory
from asyncrl.weights.transport import TransportSpec
from buffers.ledger import SQLiteLedger
from buffers.selection import SlotOrder
from engines.training.scratch import make_scratch_tokenizer

PACKAGES = (
    asyncrl.algorithms,
    asyncrl.algorithms.advantages,
    asyncrl.algorithms.policy_losses,
    asyncrl.data,
    asyncrl.single_controller,
    asyncrl.verl,
)
USED_BY_NAME = (
    "asyncrl.interfaces",
    "asyncrl.agents.calculator",
    "asyncrl.agents.tools",
    "asyncrl.pipeline.certificate",
    "asyncrl.pipeline.run",
    "asyncrl.pipeline.staleness",
    "asyncrl.rewards.match",
    "asyncrl.rewards.math",
    "asyncrl.rewards.rule",
    "asyncrl.rollout.admission",
    "asyncrl.rollout.continuation",
    "asyncrl.rollout.prompts",
    "asyncrl.rollout.replica_health",
    "asyncrl.rollout.routing",
    "asyncrl.rollout.worker",
    "buffers.replay",
    "buffers.state",
)
"""Modules of other packages that programs import from."""

MODULES = sorted(
    f"{package.__name__}.{module.name}" for package in PACKAGES for module in pkgutil.iter_modules(package.__path__)
)
SLOW = ("asyncrl.rewards.math",)
NEED_RAY = (
    "asyncrl.single_controller.ray",
    "asyncrl.single_controller.ray_resource_pool",
    "asyncrl.single_controller.resource_pool_manager",
    "asyncrl.verl.resource_pool",
    "asyncrl.verl.worker_group",
)
PREPARED = {"asyncrl.pipeline.run": "small_run", "asyncrl.rollout.worker": "replica"}
"""Modules whose examples need more than names, and the fixture that makes it."""
PUBLIC = (
    "asyncrl",
    "asyncrl.algorithms",
    "asyncrl.data",
    "asyncrl.single_controller",
    "asyncrl.single_controller.colocation",
    "asyncrl.single_controller.dispatch_functions",
    "asyncrl.single_controller.local",
    "asyncrl.single_controller.ray",
    "asyncrl.verl",
    *USED_BY_NAME,
)


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
        ledger.append(Issued(0), Dispatched(slot=0, attempt=0, version=1))
        ledger.append(Completed(slot=0, attempt=0, tokens=2), rows=encode_rows(rows))
        yield ledger


@pytest.fixture(scope="module")
def names(ledger: SQLiteLedger, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What the examples take for granted: what the example of the class, or of one beside it, has made."""
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
        slot=0,
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
            "SlotOrder": SlotOrder,
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
    """Ray, whose workers cannot import this module."""
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    return ray


@pytest.fixture
def small_run(tmp_path: Path) -> dict[str, Any]:
    """What the examples of runs are about."""
    tables = {
        "name": "shared",
        "steps": 1,
        "runs": str(tmp_path / "shared"),
        "cluster": {"backend": "local"},
        "model": {"source": "scratch", "options": {"layers": 1, "tokenizer_conversations": 8}},
        "env": {"name": "asyncrl.testing:EchoFactory"},
        "rollout": {"max_new_tokens": 4, "max_tokens": 64},
        "trainer": {"groups_per_step": 2, "group_size": 2},
        "sft": {"steps": 1},
        "eval": {"tasks": 2},
        "telemetry": {"progress": "none"},
    }
    return {"config": Config.from_mapping(tables), "folder": tmp_path}


@pytest.fixture
def replica(tmp_path: Path) -> dict[str, Any]:
    """What the examples of a rollout worker are about."""
    words = [EchoFactory().demonstration(index) for index in range(8)]
    make_scratch_tokenizer(words, vocab_size=320).save_pretrained(tmp_path)
    spec = RolloutSpec(
        engine="asyncrl.testing:EchoEngine",
        environment="asyncrl.testing:EchoFactory",
        transport=TransportSpec(name="asyncrl.testing:EmptyTransport", namespace="run-1"),
        limits=EpisodeLimits(max_turns=2, max_tokens=64),
        sampling=SamplingParams(max_new_tokens=16),
        gather_s=0.0,
    )
    return {"model": str(tmp_path), "prompt_rows": prompt_rows, "sampled_turns": sampled_turns, "spec": spec}


@pytest.fixture
def workers(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A group like that of verl's RayWorkerGroup."""
    request.getfixturevalue("ray_cluster")
    by_value()
    init = asyncrl.verl.create_colocated_worker_cls({"actor": asyncrl.verl.RayClassWithInitArgs(asyncrl.verl.Worker)})
    pool = asyncrl.verl.RayResourcePool([2], use_gpu=False)
    with asyncrl.verl.RayWorkerGroup(pool, init, name_prefix="workers") as made:
        yield made


def cases() -> Iterator[Any]:
    for name in [*MODULES, *USED_BY_NAME, "asyncrl.verl", "asyncrl.serve.serving"]:
        marks = [pytest.mark.ray, pytest.mark.slow] if name in NEED_RAY else [pytest.mark.slow] * (name in SLOW)
        yield pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", list(cases()))
def test_examples_run(
    name: str, names: dict[str, Any], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if name in NEED_RAY:
        request.getfixturevalue("ray_cluster")
        names = {**names, "ray": by_value()}
    if name == "asyncrl.verl.worker_group":
        names = {**names, "workers": request.getfixturevalue("workers")}
    if name in PREPARED:
        names = {**names, **request.getfixturevalue(PREPARED[name])}
    module = importlib.import_module(name)
    own = {**names, **vars(asyncrl.verl)} if name.startswith("asyncrl.verl") else names
    results = doctest.testmod(module, extraglobs={**own, **vars(module)})
    assert results.failed == 0


# ----------------------------------------------------------------------------------------------- everything has them


def public(module: ModuleType) -> dict[str, Any]:
    """Classes and functions that a module offers, and the public methods and properties of those classes.

    Of a Protocol the class alone: its example is a part that has the methods, or one at work.
    """
    found: dict[str, Any] = {}
    for name in module.__all__:
        member = getattr(module, name)
        if inspect.isclass(member) or inspect.isfunction(member):
            found[name] = member
        if inspect.isclass(member) and not issubclass(member, Enum) and not is_protocol(member):
            for attribute in dir(member):
                value = inspect.getattr_static(member, attribute)
                value = value if isinstance(value, property) else function_of(value)
                ours = str(getattr(function_of(value), "__module__", "")).startswith(("asyncrl.", "buffers."))
                if not attribute.startswith("_") and ours:
                    found[f"{name}.{attribute}"] = value
    return found


def is_protocol(kind: type) -> bool:
    return getattr(kind, "_is_protocol", False)


def function_of(member: Any) -> Any:
    if isinstance(member, property):
        return member.fget
    return member.__func__ if isinstance(member, staticmethod | classmethod) else member


def everything() -> Iterator[Any]:
    """Each once, under the first of its names."""
    seen: set[int] = set()
    for module_name in PUBLIC:
        for name, member in public(importlib.import_module(module_name)).items():
            if id(member) not in seen:
                seen.add(id(member))
                yield pytest.param(member, id=f"{module_name}.{name}")
    yield pytest.param(serve, id="asyncrl.serve")  # the package that is this function, too


@pytest.mark.parametrize("member", list(everything()))
def test_everything_public_has_an_example_and_tells_what_it_raises(member: Any) -> None:
    doc = inspect.getdoc(member) or ""
    examples = doctest.DocTestParser().get_examples(doc)
    assert [each for each in examples if not each.options.get(doctest.SKIP)], "has no example that runs"
    told = told_in(doc)
    untold = {error.__name__ for error in raised_by(member) if not any(issubclass(error, each) for each in told)}
    assert untold == set(), "raises what its docstring does not tell"


def told_in(doc: str) -> list[type[BaseException]]:
    """The classes in its section "Raises"."""
    section = re.search(r"^Raises[^\n]*:\n((?:[ ]+[^\n]*\n?|\n)*)", doc, re.MULTILINE)
    names = re.findall(r"^ +([\w.]+):", section[1], re.MULTILINE) if section else []
    return [error for name in names if (error := error_called(name.rpartition(".")[2])) is not None]


def error_called(name: str) -> type[BaseException] | None:
    for place in (asyncrl.errors, importlib.import_module("builtins"), importlib.import_module("concurrent.futures")):
        found = getattr(place, name, None)
        if isinstance(found, type) and issubclass(found, BaseException):
            return found
    return None


UNTOLD = {
    "AssertionError",  # a defect of ours
    "AttributeError",  # of __getattr__
    "NotImplementedError",
    "StopIteration",
    "StopAsyncIteration",
}


def raised_by(member: Any) -> set[type[BaseException]]:
    """What its own code raises by name: its body, and the private functions of its module or class that it calls."""
    if inspect.isclass(member):
        if issubclass(member, Enum):
            return set()
        made_by = [vars(member)[name] for name in ("__new__", "__init__", "__post_init__") if name in vars(member)]
        # Neither by dataclass nor by Protocol.
        own = [each for each in made_by if function_of(each).__module__ == member.__module__]
        written = [each for each in own if function_of(each).__code__.co_filename != "<string>"]
        return set().union(*(raised_by(each) for each in written)) if written else set()
    function = inspect.unwrap(function_of(member))
    found: set[type[BaseException]] = set()
    visited: set[Callable[..., Any]] = set()
    waiting = [function]
    while waiting:
        current = waiting.pop()
        if current in visited:
            continue
        visited.add(current)
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(current)))):
            if isinstance(node, ast.Raise) and node.exc is not None:
                called = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
                name = (
                    called.id
                    if isinstance(called, ast.Name)
                    else called.attr
                    if isinstance(called, ast.Attribute)
                    else ""
                )
                maker = helper(current, called)
                if maker is not None:  # `raise self.no_room()`
                    name = str(inspect.signature(maker).return_annotation)
                error = error_called(name)
                if error is not None and name not in UNTOLD:
                    found.add(error)
            elif isinstance(node, ast.Call):
                callee = helper(current, node.func)
                if callee is not None and callee.__name__.startswith("_"):
                    waiting.append(callee)
    return found


def helper(caller: Callable[..., Any], called: ast.expr) -> Callable[..., Any] | None:
    """The function of the caller's module or class that an expression in its code names."""
    found: Any = None
    if isinstance(called, ast.Name):
        found = vars(inspect.getmodule(caller)).get(called.id)
    elif (
        isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id in ("self", "cls")
    ):
        owner: Any = inspect.getmodule(caller)
        for part in caller.__qualname__.split(".")[:-1]:
            owner = getattr(owner, part, None)
        found = getattr(owner, called.attr, None)
    return found if inspect.isfunction(found) and found.__module__ == caller.__module__ else None


def test_what_a_function_raises_is_read_from_its_code() -> None:
    assert raised_by(DataProto.chunk) == {asyncrl.errors.SchemaError}
    assert raised_by(DataProto.save_to_disk) == set()
    # by way of private helpers
    assert raised_by(Worker.query_dispatch_info) == {asyncrl.errors.DispatchError}
    assert raised_by(ClassWithInitArgs) == set()
    assert told_in("Does.\n\nRaises:\n    SchemaError: why,\n        in two lines.\n    OSError: too.\n") == [
        asyncrl.errors.SchemaError,
        OSError,
    ]
    assert told_in("Raise SchemaError unless it fits.") == []
