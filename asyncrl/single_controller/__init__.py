"""Worker groups: workers in one process or on a Ray cluster, whose methods return futures at once.

The names that most programs need, imported on first use: a worker process reads this file, and loads neither torch nor
numpy for it. The Ray backend is ``asyncrl.single_controller.ray``, the one in this process
``asyncrl.single_controller.local``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.data.future import Future
    from asyncrl.single_controller.colocation import create_colocated_worker_cls
    from asyncrl.single_controller.decorator import Dispatch, Execute, register
    from asyncrl.single_controller.mesh import make_nd_compute_dataproto_dispatch_fn
    from asyncrl.single_controller.resource_pool import ResourcePool, ResourcePoolManager, Role
    from asyncrl.single_controller.restart import Restart
    from asyncrl.single_controller.worker import Worker
    from asyncrl.single_controller.worker_group import ClassWithInitArgs, WorkerGroup

_MODULES = {
    "ClassWithInitArgs": "asyncrl.single_controller.worker_group",
    "Dispatch": "asyncrl.single_controller.decorator",
    "Execute": "asyncrl.single_controller.decorator",
    "Future": "asyncrl.data.future",
    "ResourcePool": "asyncrl.single_controller.resource_pool",
    "ResourcePoolManager": "asyncrl.single_controller.resource_pool",
    "Restart": "asyncrl.single_controller.restart",
    "Role": "asyncrl.single_controller.resource_pool",
    "Worker": "asyncrl.single_controller.worker",
    "WorkerGroup": "asyncrl.single_controller.worker_group",
    "create_colocated_worker_cls": "asyncrl.single_controller.colocation",
    "make_nd_compute_dataproto_dispatch_fn": "asyncrl.single_controller.mesh",
    "register": "asyncrl.single_controller.decorator",
}

__all__ = [
    "ClassWithInitArgs",
    "Dispatch",
    "Execute",
    "Future",
    "ResourcePool",
    "ResourcePoolManager",
    "Restart",
    "Role",
    "Worker",
    "WorkerGroup",
    "create_colocated_worker_cls",
    "make_nd_compute_dataproto_dispatch_fn",
    "register",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'asyncrl.single_controller' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
