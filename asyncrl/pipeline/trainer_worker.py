"""A rank of the trainer as a worker: a training engine, and the transport its weights leave by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from asyncrl.data import DataProto
from asyncrl.errors import WeightVersionError
from asyncrl.interfaces import TrainingEngine, WeightTransport
from asyncrl.pipeline.ages import with_ages
from asyncrl.pipeline.credit import TokenCredit, with_token_advantages, with_turn_advantages
from asyncrl.pipeline.engine_rank import EngineRank
from asyncrl.pipeline.masking import mask_older
from asyncrl.single_controller import Dispatch, register
from asyncrl.weights.fingerprint import fingerprint_of
from asyncrl.weights.manifest import WeightManifest
from asyncrl.weights.transport import TransportSpec

if TYPE_CHECKING:
    from asyncrl.algorithms import KLEstimator

__all__ = ["TrainerSpec", "TrainerWorker"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """What a trainer rank is made from; picklable.

    Attributes:
        engine: entry point or dotted path of the training engine.
        engine_options: keyword arguments of the engine, from ``[trainer.options]``.
        transport: how weights leave; None for a group that publishes nothing (a reference policy).
    """

    engine: str
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    transport: TransportSpec | None = None


class TrainerWorker(EngineRank[TrainingEngine]):
    """Steps on the policy, each of which makes the weights of the next version, and publishes them."""

    def __init__(self, spec: TrainerSpec) -> None:
        super().__init__("asyncrl.training_engines", spec.engine, options=spec.engine_options, path="trainer.engine")
        self._version = 0
        self._adapted = False
        self._transport: WeightTransport | None = None
        if spec.transport is not None and self.rank == 0:
            self._transport = spec.transport.make()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def build(self, model_path: str, settings: dict[str, Any], weight_version: int = 0) -> None:
        """Make the training engine for a model; replaces the one held, if any (a new stage, a new optimizer).

        ``weight_version`` is what the model's weights are called; every :meth:`update` makes the next one.
        """
        self._version = weight_version
        self._adapted = settings.get("lora") is not None
        self._make_engine(model_path, settings)

    # pad=False: a row that filled up a share would be trained on twice; ranks may hold fewer rows, or none.
    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC, pad=False)
    def supervise(self, batch: DataProto) -> dict[str, float]:
        """One supervised step."""
        return self._held().supervise(batch)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC, pad=False)
    def update(
        self, batch: DataProto, oldest_version: int | None = None, credit: TokenCredit | None = None
    ) -> dict[str, float]:
        """One policy step: the weights of the next version. Tokens of versions below ``oldest_version`` are masked.

        Advantages are those of the batch, of its ``turn_advantages``, or made of ``credit``.
        """
        if credit is not None:
            batch = with_token_advantages(batch, credit)
        elif batch.batch is not None and "turn_advantages" in batch.batch.keys():  # noqa: SIM118  iterates rows
            batch = with_turn_advantages(batch)
        young = batch if oldest_version is None else mask_older(batch, oldest_version)
        metrics = self._held().update(with_ages(young, version=self._version))
        self._version += 1
        return metrics

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def reference_log_probs(self, batch: DataProto, estimator: KLEstimator | None = None) -> DataProto:
        """Column ``reference_log_probs`` (ragged, like ``input_ids``) under the weights held.

        A policy of adapters answers for the frozen weights they stand beside: it is its own reference.

        With an ``estimator`` also ``divergences`` [B]: what each row diverged, its sampled tokens summed, in nats.
        """
        engine: Any = self._held()  # one that takes `lora` has a method more than the contract
        scored = engine.reference_log_probs(batch) if self._adapted else engine.log_probs(batch)
        assert scored.batch is not None
        reference = scored.batch["log_probs"]
        found = {"reference_log_probs": reference}
        if estimator is not None:
            from asyncrl.algorithms import row_divergences

            assert batch.batch is not None
            sampled, mask = batch.batch["behaviour_log_probs"], batch.batch["loss_mask"]
            found["divergences"] = row_divergences(sampled, reference, mask, estimator=estimator)
        return DataProto.from_dict(tensors=found)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def publish(self, version: int) -> WeightManifest | None:
        """Make the current weights available as ``version``; the manifest from rank 0, None from the others.

        Raises:
            WeightVersionError: the current weights are not that version: calls came in another order than their labels.
        """
        if version != self._version:
            raise WeightVersionError(f"weights of version {self._version} were to be published as version {version}")
        tensors = self._held().named_tensors()
        if self._transport is not None:
            return self._transport.publish(tensors, version=version)
        for _name, tensor in tensors:  # gathering a sharded tensor is collective: take part, keep nothing
            del tensor
        return None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fingerprint(self) -> str:
        """What the current weights are (:mod:`asyncrl.weights.fingerprint`)."""
        return fingerprint_of(self._held().named_tensors())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def release(self, version: int) -> None:
        """Free a published version that every replica holds by now."""
        if self._transport is not None:
            self._transport.release(version)

    def close(self) -> None:
        """Leave the process group and unlink what was published."""
        super().close()
        if self._transport is not None:
            self._transport.close()
