"""The pool: rollout replicas that are asked as one, and get new weights without stopping.

Where a call goes is decided in :mod:`asyncrl.rollout.routing`, who may serve in :mod:`asyncrl.weights.publication`;
here the decisions are carried out. A replica is a worker group, so it may span several ranks.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.errors import InfrastructureError, WeightError
from asyncrl.interfaces import KVCachePolicy
from asyncrl.rollout.routing import ReplicaLoad, least_expected_work
from asyncrl.weights.manifest import WeightManifest
from asyncrl.weights.publication import Commit, Decision, Ended, Fence, Prepare, Publication, Serve

__all__ = ["RolloutPool", "TokenCounts"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Tokens that the pool's engines delivered for one purpose, and how many of them running episodes hold."""

    delivered: int
    in_flight: int


@dataclass(slots=True)
class _Replica:
    group: Any  # a worker group of RolloutWorkers: its methods are bound at run time
    serving: bool = False
    running: list[tuple[DataProtoFuture, int]] = field(default_factory=list)

    def rows(self) -> int:
        """Rollouts sent and not answered."""
        self.running = [(future, rows) for future, rows in self.running if not future.outcome.complete]
        return sum(rows for _future, rows in self.running)


class RolloutPool:
    """Replicas of :class:`asyncrl.rollout.worker.RolloutWorker` behind one face. Used from one event loop.

    Args:
        replicas: worker groups by name. The pool does not close them: whoever made them does.
        kv_cache: what running requests do with keys and values of older weights when new ones are committed.
        deadline_s: seconds each replica has for each phase of a weight update; past it, it is fenced.
        rollout_deadline_s: seconds a call of :meth:`rollout` may take; past it, its future fails.
    """

    def __init__(
        self,
        replicas: Mapping[str, Any],
        *,
        kv_cache: KVCachePolicy = "keep",
        deadline_s: float = 300.0,
        rollout_deadline_s: float | None = None,
    ) -> None:
        self._replicas = {name: _Replica(group) for name, group in replicas.items()}
        self._kv_cache: KVCachePolicy = kv_cache
        self._deadline_s = deadline_s
        self._rollout_deadline_s = rollout_deadline_s
        self._publication: Publication | None = None

    @property
    def weight_version(self) -> int:
        """Version that every serving replica holds, or is just getting.

        Raises:
            WeightError: the pool was not started.
        """
        if self._publication is None or self._publication.version is None:
            raise WeightError("the pool serves no weights yet: call start(model_path, weight_version=...) first")
        return self._publication.version

    async def start(self, model_path: str, *, weight_version: int) -> None:
        """Load the model on every replica, all at once, and serve it as ``weight_version``."""
        await asyncio.gather(*(replica.group.start(model_path, weight_version) for replica in self._replicas.values()))
        self._publication = Publication(version=weight_version)
        for name in self._replicas:
            self._carry_out_notices(self._publication.joined(name, holds=weight_version))

    def rollout(self, prompts: DataProto) -> DataProtoFuture:
        """Roll the rows out on the replica that has least to do; at once, as a future.

        Raises:
            ResourceError: no replica serves.
        """
        name = least_expected_work(
            ReplicaLoad(name=name, rows=replica.rows(), serving=replica.serving)
            for name, replica in self._replicas.items()
        )
        replica = self._replicas[name]
        future: DataProtoFuture = replica.group.rollout(prompts)
        if self._rollout_deadline_s is not None:
            future.deadline(self._rollout_deadline_s)
        replica.running.append((future, len(prompts)))
        return future

    async def publish(self, manifest: WeightManifest) -> Ended:
        """Bring a published version into every serving replica; they go on generating meanwhile.

        Every replica fetches and verifies it before the first one samples from it. One that fails is fenced and
        serves nothing more.

        Raises:
            WeightError: no replica is left that serves, or a fenced one has rollouts under way.
            WeightVersionError: the version is not newer than the one served.
        """
        if self._publication is None:
            raise WeightError("the pool serves no weights yet: call start(model_path, weight_version=...) first")
        fleet = self._publication
        running: dict[asyncio.Task[None], Prepare | Commit] = {}
        ended: Ended | None = None
        decisions: deque[Decision] = deque(fleet.begin(manifest.version))
        try:
            while ended is None:
                while decisions:
                    decision = decisions.popleft()
                    if isinstance(decision, Prepare | Commit):
                        task = asyncio.create_task(self._command(decision, manifest), name=f"weights {decision}")
                        running[task] = decision
                    elif isinstance(decision, Ended):
                        ended = decision
                    else:
                        self._carry_out_notices([decision])
                if ended is None:
                    done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        command, error = running.pop(task), task.exception()
                        if error is None:
                            decisions += fleet.succeeded(command)
                        elif isinstance(error, InfrastructureError):
                            decisions += fleet.failed(command, str(error))
                        else:
                            raise error
        finally:
            for task in running:
                task.cancel()
        reasons = "; ".join(f"{name}: {reason}" for name, reason in ended.fenced.items())
        if not any(replica.serving for replica in self._replicas.values()):
            raise WeightError(f"no replica could take weight version {manifest.version}: {reasons}")
        if lost := sum(self._replicas[name].rows() for name in ended.fenced):
            raise WeightError(f"{lost} rollouts were under way on replicas that are fenced now: {reasons}")
        return ended

    async def token_counts(self, purpose: str = "train") -> TokenCounts:
        """Add up the replicas' token meters."""
        answers = await self.statistics()
        return TokenCounts(
            delivered=sum(answer["delivered"][purpose] for answer in answers.values()),
            in_flight=sum(answer["in_flight"][purpose] for answer in answers.values()),
        )

    async def statistics(self) -> dict[str, dict[str, Any]]:
        """Each replica's :meth:`asyncrl.rollout.worker.RolloutWorker.statistics`, by name."""
        names = list(self._replicas)
        answers = await asyncio.gather(*(self._replicas[name].group.statistics() for name in names))
        return dict(zip(names, answers, strict=True))

    async def _command(self, command: Prepare | Commit, manifest: WeightManifest) -> None:
        group = self._replicas[command.replica].group
        if isinstance(command, Prepare):
            call = group.prepare_weights(manifest)
        else:
            call = group.commit_weights(command.version, self._kv_cache)
        await call.deadline(self._deadline_s)

    def _carry_out_notices(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Serve):
                self._replicas[decision.replica].serving = True
            elif isinstance(decision, Fence):
                self._replicas[decision.replica].serving = False
                _log.warning("replica %s is fenced: %s", decision.replica, decision.reason)
