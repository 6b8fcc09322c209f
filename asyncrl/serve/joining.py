"""Replicas on other machines: engines in Ray actors there, which the pool treats like any other replica."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from asyncrl.interfaces import RolloutEngine, WeightTransport
from asyncrl.rollout.engine_worker import EngineSpec, EngineWorker
from asyncrl.rollout.worker_engine import WorkerEngine

__all__ = ["Joining"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """How a replica is made on a node of a Ray cluster that this process is connected to.

    Attributes:
        address: of the cluster, for machines that join it.
        spec: the engine; its model is read on the node.
        transport: where new weights lie here; they are sent on through Ray.
        cpus, gpus: what a replica takes of its node.
        start_s: how long a place on the node is waited for.
    """

    address: str
    spec: EngineSpec
    transport: WeightTransport | None
    cpus: float = 1.0
    gpus: float = 0.0
    start_s: float = 60.0

    def at(self, name: str, resource: str) -> Callable[[], RolloutEngine]:
        """Makes the engine of replica ``name`` on a node that offers ``resource``, one of it for each replica."""

        def make_group() -> Any:  # Any: a worker group's methods are bound at run time
            from asyncrl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

            place = RayResourcePool(
                [1],
                cpus_per_worker=self.cpus,
                gpus_per_worker=self.gpus,
                resources_per_worker={resource: 1.0},
                placement_timeout_s=self.start_s,
            )
            return RayWorkerGroup(place, RayClassWithInitArgs(EngineWorker, self.spec), name=name)

        return lambda: WorkerEngine(make_group, transport=self.transport)
