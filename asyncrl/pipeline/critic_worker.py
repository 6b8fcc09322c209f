"""A rank of the critic as a worker: a value engine, asked for values of every group and trained beside the policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.data import DataProto
from asyncrl.interfaces import ValueEngine
from asyncrl.parts import make_part
from asyncrl.pipeline.credit import TokenCredit, with_returns
from asyncrl.pipeline.masking import mask_older
from asyncrl.single_controller import Dispatch, Worker, register

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


class CriticWorker(Worker):
    """Collective methods are plain ``def``: they run one after another, in the order of the calls, on every rank."""

    def __init__(self, spec: CriticSpec) -> None:
        super().__init__()
        self._spec = spec
        self._engine: Any = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def build(self, model_path: str, settings: dict[str, Any]) -> None:
        """Make the value engine for a model; replaces the one held, if any."""
        self.close()
        self._engine = make_part(
            "asyncrl.value_engines",
            self._spec.engine,
            model_path,
            options=self._spec.engine_options,
            path=self._spec.path,
            rank=self.rank,
            world_size=self.world_size,
            master_addr=self.master_addr,
            master_port=self.master_port,
            **settings,
        )

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

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save(self, folder: Path) -> None:
        """Write everything training goes on from."""
        self._held().save(folder)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load(self, folder: Path) -> None:
        """Go on from what :meth:`save` wrote."""
        self._held().load(folder)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export(self, folder: Path) -> None:
        """Write a Hugging Face model folder."""
        self._held().export(folder)

    def close(self) -> None:
        """Leave the process group and free the model."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _held(self) -> ValueEngine:
        if self._engine is None:
            raise RuntimeError("the critic holds no model yet: call build(model_path, settings) first")
        engine: ValueEngine = self._engine
        return engine
