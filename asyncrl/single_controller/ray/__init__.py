"""The Ray backend: every worker is an actor, placed by placement groups.

The names are imported on first use: the process of a worker reads this file before its environment is set up, and
:class:`~asyncrl.single_controller.ray.cluster.RayCluster` sets variables that Ray reads when it is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.single_controller.ray.backend import RayClassWithInitArgs, RayWorkerGroup
    from asyncrl.single_controller.ray.resource_pool import (
        RayResourcePool,
        SubRayResourcePool,
        merge_resource_pool,
        split_resource_pool,
    )

__all__ = [
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "SubRayResourcePool",
    "merge_resource_pool",
    "split_resource_pool",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'asyncrl.single_controller.ray' has no attribute {name!r}")
    module = "backend" if name in ("RayClassWithInitArgs", "RayWorkerGroup") else "resource_pool"
    return getattr(importlib.import_module(f"asyncrl.single_controller.ray.{module}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
