"""A rank of the critic as a worker: a value engine, asked for values of every group and trained beside the policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.data import DataProto
from asyncrl.interfaces import ValueEngine
from asyncrl.pipeline.credit import TokenCredit, with_returns
from asyncrl.pipeline.engine_rank import EngineRank
from asyncrl.pipeline.masking import mask_older
from asyncrl.single_controller import Dispatch, register

__all__ = ["CriticSpec", "CriticWorker"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSpec:
    """What a critic rank is made from; picklable.

    Attributes:
        engine: entry point or dotted path of the value engine.
        engine_options: keyword arguments of the engine that a user wrote.
        path: dotted key of the configuration that names the engine, for messages.
    """

    engine: str
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    path: str = "critic.engine"


class CriticWorker(EngineRank[ValueEngine]):
    """Values and scores on request, and steps towards better ones."""

    def __init__(self, spec: CriticSpec) -> None:
        super().__init__("asyncrl.value_engines", spec.engine, options=spec.engine_options, path=spec.path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def build(self, model_path: str, settings: dict[str, Any]) -> None:
        """Make the value engine for a model; replaces the one held, if any."""
        self._make_engine(model_path, settings)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def values(self, batch: DataProto) -> DataProto:
        """Column ``values`` (ragged, like ``input_ids``) under the weights held."""
        return self._held().values(batch)

    # pad=False: a row that filled up a share would be trained on twice; ranks may hold fewer rows, or none.
    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC, pad=False)
    def update(self, batch: DataProto, credit: TokenCredit, oldest_version: int | None = None) -> dict[str, float]:
        """One step towards the returns of a batch. Tokens of versions below ``oldest_version`` are masked."""
        judged = with_returns(batch, credit)
        return self._held().update(judged if oldest_version is None else mask_older(judged, oldest_version))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def scores(self, batch: DataProto) -> DataProto:
        """Column ``scores`` [B], read off the end of each row."""
        return self._held().scores(batch)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC, pad=False)
    def compare(self, pairs: DataProto) -> dict[str, float]:
        """One step on rows chosen, rejected, chosen, rejected, ..."""
        return self._held().compare(pairs)
