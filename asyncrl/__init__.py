"""asyncrl: asynchronous streaming reinforcement learning of language models.

The names most programs need, loaded on first use: ``import asyncrl`` itself loads no heavy library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.data import DataProto as DataProto
    from asyncrl.data import DataProtoFuture as DataProtoFuture
    from asyncrl.serve.serving import serve as serve
    from asyncrl.single_controller import ClassWithInitArgs as ClassWithInitArgs
    from asyncrl.single_controller import Dispatch as Dispatch
    from asyncrl.single_controller import Execute as Execute
    from asyncrl.single_controller import ResourcePool as ResourcePool
    from asyncrl.single_controller import Worker as Worker
    from asyncrl.single_controller import WorkerGroup as WorkerGroup
    from asyncrl.single_controller import register as register
    from asyncrl.tasks.handle import Run as Run
    from asyncrl.tasks.handle import attach as attach
    from asyncrl.tasks.handle import evaluate as evaluate
    from asyncrl.tasks.handle import generate as generate
    from asyncrl.tasks.handle import sft as sft
    from asyncrl.tasks.handle import train as train
    from asyncrl.tasks.rerun import Recording as Recording

__version__ = "0.1.0"

_HOMES = {
    "DataProto": "asyncrl.data",
    "DataProtoFuture": "asyncrl.data",
    "ClassWithInitArgs": "asyncrl.single_controller",
    "Dispatch": "asyncrl.single_controller",
    "Execute": "asyncrl.single_controller",
    "Recording": "asyncrl.tasks.rerun",
    "ResourcePool": "asyncrl.single_controller",
    "Run": "asyncrl.tasks.handle",
    "Worker": "asyncrl.single_controller",
    "WorkerGroup": "asyncrl.single_controller",
    "attach": "asyncrl.tasks.handle",
    "evaluate": "asyncrl.tasks.handle",
    "generate": "asyncrl.tasks.handle",
    "register": "asyncrl.single_controller",
    "sft": "asyncrl.tasks.handle",
    "train": "asyncrl.tasks.handle",
}

__all__ = [
    "ClassWithInitArgs",
    "DataProto",
    "DataProtoFuture",
    "Dispatch",
    "Execute",
    "Recording",
    "ResourcePool",
    "Run",
    "Worker",
    "WorkerGroup",
    "__version__",
    "attach",
    "evaluate",
    "generate",
    "register",
    "serve",
    "sft",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "serve":  # a package that can be called
        return importlib.import_module("asyncrl.serve")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'asyncrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
