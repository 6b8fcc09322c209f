"""The examples in docstrings run, and everything public has one."""

from __future__ import annotations

import asyncio
import doctest
import importlib
import inspect
import pkgutil
import threading
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import asyncrl.data
import asyncrl.single_controller
from asyncrl.data import DataProto, DataProtoFuture

PACKAGES = (asyncrl.data, asyncrl.single_controller)
MODULES = sorted(
    f"{package.__name__}.{module.name}" for package in PACKAGES for module in pkgutil.iter_modules(package.__path__)
)


def names() -> dict[str, Any]:
    """What the examples take for granted: the batch of :class:`DataProto`'s own example."""
    data = DataProto.from_dict(
        tensors={"x": torch.tensor([1, 2, 3])}, non_tensors={"name": ["a", "b", "c"]}, meta_info={"step": 7}
    )
    return {
        "DataProto": DataProto,
        "DataProtoFuture": DataProtoFuture,
        "asyncio": asyncio,
        "data": data,
        "future": DataProtoFuture.of(data),
        "np": np,
        "threading": threading,
        "torch": torch,
    }


@pytest.mark.parametrize("name", [*MODULES, "asyncrl.verl"])
def test_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    results = doctest.testmod(module, extraglobs=names())
    assert results.failed == 0


def public(module: ModuleType) -> dict[str, Any]:
    """Classes and functions that the package offers, and the public methods and properties of those classes."""
    found: dict[str, Any] = {}
    for name in module.__all__:
        member = getattr(module, name)
        if not inspect.isclass(member) and not inspect.isfunction(member):
            continue
        found[name] = member
        if inspect.isclass(member):
            for attribute, value in vars(member).items():
                value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
                if not attribute.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                    found[f"{name}.{attribute}"] = value
    return found


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_everything_public_says_what_it_is(package: ModuleType) -> None:
    silent = [name for name, member in public(package).items() if not inspect.getdoc(member)]
    # A name without arguments may say it alone.
    assert [name for name in silent if takes_arguments(public(package)[name])] == []


def takes_arguments(member: Any) -> bool:
    return inspect.isfunction(member) and len(inspect.signature(member).parameters) > 1


def test_every_operation_on_a_batch_has_an_example() -> None:
    dumb = [name for name, member in public(asyncrl.data).items() if ">>>" not in (inspect.getdoc(member) or "")]
    assert [name for name in dumb if not name.startswith(("DataProtoFuture.", "FinishedRows", "Schema"))] == []
