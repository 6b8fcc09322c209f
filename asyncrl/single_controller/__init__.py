"""Who computes: worker groups whose methods return futures at once.

The names most programs need, loaded on first use. The distributed backend is ``asyncrl.single_controller.ray``, the one
in this process ``asyncrl.single_controller.local``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.data.future import Future as Future
    from asyncrl.single_controller.colocation import create_colocated_worker_cls as create_colocated_worker_cls
    from asyncrl.single_controller.decorator import register as register
    from asyncrl.single_controller.dispatch import Dispatch as Dispatch
    from asyncrl.single_controller.dispatch import Execute as Execute
    from asyncrl.single_controller.mesh import (
        make_nd_compute_dataproto_dispatch_fn as make_nd_compute_dataproto_dispatch_fn,
    )
    from asyncrl.single_controller.resource_pool import ResourcePool as ResourcePool
    from asyncrl.single_controller.resource_pool_manager import ResourcePoolManager as ResourcePoolManager
    from asyncrl.single_controller.restart import Restart as Restart
    from asyncrl.single_controller.retry import Retry as Retry
    from asyncrl.single_controller.role import Role as Role
    from asyncrl.single_controller.worker import Worker as Worker
    from asyncrl.single_controller.worker_group import ClassWithInitArgs as ClassWithInitArgs
    from asyncrl.single_controller.worker_group import WorkerGroup as WorkerGroup

_HOMES = {
    "ClassWithInitArgs": "asyncrl.single_controller.worker_group",
    "Dispatch": "asyncrl.single_controller.dispatch",
    "Execute": "asyncrl.single_controller.dispatch",
    "Future": "asyncrl.data.future",
    "ResourcePool": "asyncrl.single_controller.resource_pool",
    "ResourcePoolManager": "asyncrl.single_controller.resource_pool_manager",
    "Restart": "asyncrl.single_controller.restart",
    "Retry": "asyncrl.single_controller.retry",
    "Role": "asyncrl.single_controller.role",
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
    "Retry",
    "Role",
    "Worker",
    "WorkerGroup",
    "create_colocated_worker_cls",
    "make_nd_compute_dataproto_dispatch_fn",
    "register",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'asyncrl.single_controller' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
