"""The workers of a run: a rank of the trainer, of the critic, and a reward model.

Each is a class behind the ranks of a worker group; ``TrainerGroup``, ``CriticGroup`` and ``RewardGroup`` are the
methods of these groups. What is done to the rows right before a step (masking stale tokens, advantages of tokens) is
done here, where the rows are: no column of tokens travels for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import msgspec

from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.errors import EngineError, RewardError, SchemaError, WeightVersionError
from asyncrl.interfaces import (
    AdapterTrainingEngine,
    MeteredTrainingEngine,
    RewardModel,
    ShardedTrainingEngine,
    SleepingTrainingEngine,
    Snapshot,
    SnapshotEngine,
    TrainerUsage,
    TrainingEngine,
    ValueEngine,
)
from asyncrl.io import FileEntry
from asyncrl.mesh import MeshShape
from asyncrl.plugins import Part, make_part, offered_options
from asyncrl.rollout.branches import unfold
from asyncrl.runtime import in_abandonable_thread, in_thread
from asyncrl.single_controller import Dispatch, Worker, register
from asyncrl.single_controller.mesh import MeshDispatch
from asyncrl.storage import Store, local_model
from asyncrl.weights import (
    Adapter,
    AnnouncingTransport,
    Canary,
    DeltaTransport,
    TensorEntry,
    TransportSpec,
    WeightManifest,
    WeightTransport,
    entries_of,
    manifest_fingerprint,
    rounding_error,
)

if TYPE_CHECKING:
    from torch import Tensor

    from asyncrl.algorithms.kl import KLEstimator


# --------------------------------------------------------------------------------------- the groups, as seen by callers


class EngineGroup(Protocol):
    """What the groups of trainer and critic share. Folders are written and read by all ranks together."""

    def prepare_snapshots(self) -> Awaitable[Any]: ...

    def snapshot(self, folder: Path, model: Path | None = None) -> Awaitable[Any]: ...

    def write_snapshot(self, folder: Path) -> Awaitable[Sequence[Mapping[str, FileEntry]]]: ...

    def send_snapshot(self, folder: Path, to: str) -> Awaitable[Any]: ...

    def export_snapshot(self, saved: Path, folder: Path) -> Awaitable[Any]: ...

    def save(self, folder: Path) -> Awaitable[Any]: ...

    def load(self, folder: Path) -> Awaitable[Any]: ...

    def export(self, folder: Path) -> Awaitable[Any]: ...

    def sleep(self) -> Awaitable[Any]: ...

    def wake(self) -> Awaitable[Any]: ...


class TrainerGroup(EngineGroup, Protocol):
    """A worker group of :class:`TrainerWorker`. Answers come one a rank, unless they are rows."""

    def build(self, model_path: str, settings: Mapping[str, Any], weight_version: int = 0) -> Awaitable[Any]: ...

    def supervise(self, batch: DataProto) -> Awaitable[Sequence[Mapping[str, float]]]: ...

    def update(
        self, batch: DataProtoFuture, oldest_version: int | None = None, by_token: TokenAdvantages | None = None
    ) -> Awaitable[Sequence[Mapping[str, float]]]: ...

    def reference_log_probs(self, batch: DataProtoFuture, estimator: KLEstimator | None = None) -> DataProtoFuture: ...

    def log_probs(self, batch: DataProto) -> DataProtoFuture: ...

    def publish(self, version: int, rebase: bool = False) -> Awaitable[Sequence[WeightManifest | None]]: ...

    def fingerprint(self) -> Awaitable[Sequence[str]]: ...

    def usage(self) -> Awaitable[Sequence[TrainerUsage | None]]: ...

    def announce(self, manifest: WeightManifest) -> Awaitable[Any]: ...

    def release(self, version: int) -> Awaitable[Any]: ...


class CriticGroup(EngineGroup, Protocol):
    """A worker group of :class:`CriticWorker`."""

    def build(self, model_path: str, settings: Mapping[str, Any]) -> Awaitable[Any]: ...

    def values(self, batch: DataProtoFuture) -> DataProtoFuture: ...

    def update(
        self, batch: DataProtoFuture, by_token: TokenAdvantages, oldest_version: int | None = None
    ) -> Awaitable[Sequence[Mapping[str, float]]]: ...

    def scores(self, batch: DataProto) -> DataProtoFuture: ...

    def compare(self, pairs: DataProto) -> Awaitable[Sequence[Mapping[str, float]]]: ...


class RewardGroup(Protocol):
    """A worker group of :class:`RewardWorker`."""

    def start(self, model_path: str) -> Awaitable[Any]: ...

    def score(self, batch: DataProtoFuture, model_path: str) -> DataProtoFuture: ...


# --------------------------------------------------------------------------------------------------- rows before a step


def with_staleness(batch: DataProto, *, version: int) -> DataProto:
    """Add a column ``staleness``: ``version`` minus the version that sampled the token, 0 where none did.

    Reads ``weight_versions`` (ragged); a batch without it is returned unchanged.
    """
    if batch.batch is None or "weight_versions" not in batch.batch.keys():  # noqa: SIM118  a TensorDict iterates rows
        return batch
    import torch

    from asyncrl.data.ragged import offsets_of, ragged_from_values, values_of

    versions = values_of(batch.batch["weight_versions"])
    staleness = torch.where(versions >= 0, version - versions, 0).float()
    return batch.with_columns(staleness=ragged_from_values(staleness, offsets_of(batch.batch["weight_versions"])))


def mask_stale_tokens(batch: DataProto, oldest_version: int) -> DataProto:
    """Set ``loss_mask`` to False for tokens that were sampled under a version below ``oldest_version``.

    Reads ``loss_mask`` and ``weight_versions``, both ragged; returns new rows.
    """
    import torch

    from asyncrl.data.ragged import offsets_of, ragged_from_values, values_of

    assert batch.batch is not None
    mask, versions = batch.batch["loss_mask"], batch.batch["weight_versions"]
    young = torch.logical_and(values_of(mask), values_of(versions) >= oldest_version)
    return batch.with_columns(loss_mask=ragged_from_values(young, offsets_of(mask)))


def canary_row(batch: DataProto, tokens: int) -> DataProto | None:
    """Return one row of the first ``tokens`` of the batch's first row, of which the last is left out; None for none.

    An empty batch, as a rank may have, gives a row of two tokens: scoring it is collective.
    """
    import torch

    from asyncrl.data.ragged import ragged_from_list, rows_of

    if tokens < 2:
        return None
    assert batch.batch is not None
    first = rows_of(batch.batch["input_ids"])[0] if len(batch) else torch.zeros(3, dtype=torch.int64)
    return DataProto.from_dict({"input_ids": ragged_from_list([first[:-1][:tokens].clone()])})


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAdvantages:
    """How a worker makes advantages of tokens, and the critic's targets, from rewards; picklable.

    Columns of a batch it is applied to: ``weight_versions``, ``rewards`` [B], ``values`` where the estimator or
    :func:`with_returns` needs them; ``turns`` and ``turn_rewards`` with ``by_turns``; ``behaviour_log_probs`` and
    ``reference_log_probs`` with a ``kl_coef``.

    Attributes:
        estimator: entry point of ``asyncrl.advantages``, or a dotted path; ``options`` are its options.
        by_turns: the reward of a turn is given at its last token, and what no turn earned at the row's last token; else
            a row's whole reward is given at its last token.
        gae_lambda: of the critic's returns: 1 is the observed return, less relies on the critic itself.
        kl_coef: of the divergence from the reference (by ``kl_estimator``), subtracted from each token's reward.
    """

    estimator: Part
    options: Mapping[str, Any] = field(default_factory=dict)
    by_turns: bool = False
    gae_lambda: float = 1.0
    kl_coef: float = 0.0
    kl_estimator: KLEstimator = "k1"


def with_token_advantages(batch: DataProto, by_token: TokenAdvantages) -> DataProto:
    """Add ``advantages``: ragged float32, one for each sampled token, 0 elsewhere."""
    from asyncrl.algorithms.advantages import load_estimator

    found = _Sampled(batch, by_token)
    estimator = load_estimator(by_token.estimator, options=by_token.options)
    columns = {"rewards": found.rewards, "lengths": found.lengths, "token_rewards": found.token_rewards}
    if "values" in found.columns:
        columns["values"] = found.of("values")
    return found.joined("advantages", estimator(columns))


def with_returns(batch: DataProto, by_token: TokenAdvantages) -> DataProto:
    """Add ``returns``, the critic's targets: ``gae`` with the estimator's gamma and the critic's ``gae_lambda``."""
    from asyncrl.algorithms.advantages import gae, load_estimator

    found = _Sampled(batch, by_token)
    gamma = load_estimator(by_token.estimator, options=by_token.options).option("gamma")
    _, returns = gae(
        found.token_rewards,
        found.of("values"),
        found.lengths,
        gamma=1.0 if gamma is None else gamma,
        gae_lambda=by_token.gae_lambda,
    )
    return found.joined("returns", returns)


def with_turn_advantages(batch: DataProto) -> DataProto:
    """Add ``advantages`` (ragged float32): each sampled token gets the advantage of its turn.

    Reads ``turns`` and ``turn_advantages`` (ragged, one for each turn of the row).

    Raises:
        SchemaError: a row has a turn without an advantage.
    """
    import torch

    from asyncrl.data.ragged import lengths, offsets_of, ragged_from_values, values_of

    assert batch.batch is not None
    turns, by_turn = batch.batch["turns"], batch.batch["turn_advantages"]
    numbers = values_of(turns).long()
    rows = torch.repeat_interleave(torch.arange(len(batch)), lengths(turns))
    counts = lengths(by_turn)
    if bool((numbers >= counts[rows]).any()):
        row = int(rows[numbers >= counts[rows]][0])
        raise SchemaError(f"row {row} has {int(counts[row])} advantages of turns, and tokens of a later turn")
    places = (offsets_of(by_turn)[rows] + numbers).clamp(min=0)
    padded = torch.cat([values_of(by_turn).float(), torch.zeros(1)])  # a batch without any turn has nothing to index
    advantages = torch.where(numbers >= 0, padded[places.clamp(max=len(padded) - 1)], 0.0)
    return batch.with_columns(advantages=ragged_from_values(advantages, offsets_of(turns)))


class _Sampled:
    """The sampled tokens of a batch, row after row, and their rewards.

    ``weight_versions`` marks them: ``loss_mask`` may leave out stale tokens, which still are steps of the episode.
    """

    def __init__(self, batch: DataProto, by_token: TokenAdvantages) -> None:
        import torch

        from asyncrl.data.ragged import lengths, offsets_of, values_of

        assert batch.batch is not None
        self._batch = batch
        self.columns: dict[str, Any] = dict(batch.batch.items())
        versions = self.columns["weight_versions"]
        self._offsets = offsets_of(versions)
        self._chosen = values_of(versions) >= 0
        rows = torch.repeat_interleave(torch.arange(len(batch)), lengths(versions))
        self.lengths = torch.bincount(rows[self._chosen], minlength=len(batch))
        self.rewards: Tensor = self.columns["rewards"].float()
        self.token_rewards = self._rewarded(by_token)

    def of(self, name: str) -> Tensor:
        from asyncrl.data.ragged import values_of

        if name not in self.columns:
            raise SchemaError(f"advantages of tokens need {name!r}; the batch has {sorted(self.columns)}")
        return values_of(self.columns[name])[self._chosen]

    def joined(self, name: str, tokens: Tensor) -> DataProto:
        import torch

        from asyncrl.data.ragged import ragged_from_values

        column = torch.zeros(len(self._chosen))
        column[self._chosen] = tokens.float()
        return self._batch.with_columns(**{name: ragged_from_values(column, self._offsets)})

    def _rewarded(self, by_token: TokenAdvantages) -> Tensor:
        import torch

        from asyncrl.algorithms.kl import kl_estimate, penalised_token_rewards
        from asyncrl.data.ragged import rows_of

        divergences = torch.zeros(int(self.lengths.sum()))
        if by_token.kl_coef:
            divergences = kl_estimate(
                self.of("behaviour_log_probs"), self.of("reference_log_probs"), estimator=by_token.kl_estimator
            )
        outcomes = self.rewards
        if by_token.by_turns:
            earned = rows_of(self.columns["turn_rewards"])
            outcomes = outcomes - torch.stack([row.sum() for row in earned]) if earned else outcomes
        tokens = penalised_token_rewards(outcomes, divergences, self.lengths, coefficient=by_token.kl_coef)
        return tokens + self._turn_rewards() if by_token.by_turns else tokens

    def _turn_rewards(self) -> Tensor:
        import torch

        from asyncrl.data.ragged import offsets_of, values_of

        numbers = self.of("turns").long()
        rows = torch.repeat_interleave(torch.arange(len(self.lengths)), self.lengths)
        last = torch.ones(len(numbers), dtype=torch.bool)
        last[:-1] = (numbers[1:] != numbers[:-1]) | (rows[1:] != rows[:-1])
        earned = torch.zeros(len(numbers))
        places = offsets_of(self.columns["turn_rewards"])[rows[last]] + numbers[last]
        earned[last] = values_of(self.columns["turn_rewards"])[places]
        return earned


# ------------------------------------------------------------------------------------------------------------ workers


EngineT = TypeVar("EngineT", TrainingEngine, ValueEngine)

_ROWS = "rows"
_BY_ROWS, _METRICS = MeshDispatch(_ROWS), MeshDispatch(_ROWS, joins=False)


class EngineRank(Worker, Generic[EngineT]):
    """Base of the workers that hold an engine of their own on every rank.

    Collective methods are plain ``def``: they run one after another, in the order of the calls, on every rank.
    ``group`` and ``name`` are the engine's entry point (or a dotted path), ``options`` its keyword arguments that a
    user wrote, and ``path``, for messages, is the dotted key of the configuration that names it. The ranks of a mesh
    that have one data rank get the same rows; the first of them returns the result.
    """

    def __init__(
        self, group: str, name: Part, *, options: Mapping[str, Any], path: str, mesh: MeshShape | None = None
    ) -> None:
        super().__init__()
        self._group, self._name, self._options, self._path, self._mesh = group, name, options, path, mesh
        shape = mesh or MeshShape.of(None, world_size=self.world_size)
        self._register_dispatch_collect_info(
            _ROWS, dp_rank=shape.data_rank(self.rank), is_collect=shape.answers(self.rank)
        )
        self._engine: EngineT | None = None
        self._snapshot: Snapshot | None = None
        self._written: Mapping[str, FileEntry] = {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def prepare_snapshots(self) -> None:
        """Get the memory of snapshots, where the engine takes them."""
        prepare = getattr(self._held(), "prepare_snapshots", None)
        if prepare is not None:
            prepare()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def snapshot(self, folder: Path, model: Path | None = None) -> None:
        """Copy what training continues from, for :meth:`write_snapshot` and :meth:`export_snapshot`.

        An engine that cannot do that writes ``folder``, and the model into ``model``, before this returns.
        """
        engine = self._held()
        if isinstance(engine, SnapshotEngine):
            self._snapshot = engine.snapshot()
            return
        engine.save(folder)
        if model is not None:
            engine.export(model)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def write_snapshot(self, folder: Path) -> Mapping[str, FileEntry]:
        """Write this rank's files of the last snapshot, beside other calls; return size and checksum of each."""
        self._written = {} if self._snapshot is None else await in_thread(self._snapshot.write, folder)
        return self._written

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def send_snapshot(self, folder: Path, to: str) -> None:
        """Copy the files that this rank writes of each snapshot from ``folder`` to a URL."""
        files = {name: folder / name for name in self._written}
        await in_abandonable_thread(lambda: Store(to).put(files))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def export_snapshot(self, saved: Path, folder: Path) -> None:
        """Write a Hugging Face model folder from what all ranks have written to ``saved``, beside other calls."""
        if self._snapshot is not None and self.rank == 0:
            await in_thread(self._snapshot.export, saved, folder)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save(self, folder: Path) -> None:
        """Write what training continues from."""
        self._held().save(folder)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load(self, folder: Path) -> None:
        """Continue from what :meth:`save` wrote."""
        self._held().load(folder)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export(self, folder: Path) -> None:
        """Write a Hugging Face model folder."""
        self._held().export(folder)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep(self) -> None:
        """Free the memory of weights and optimizer until :meth:`wake`; without an engine there is nothing to free."""
        if self._engine is not None:
            self._sleeping().sleep()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wake(self) -> None:
        """Continue where :meth:`sleep` left off."""
        if self._engine is not None:
            self._sleeping().wake()

    def close(self) -> None:
        """Leave the process group and free the model."""
        self._close_engine()

    def _sleeping(self) -> SleepingTrainingEngine:
        engine = self._held()
        if not isinstance(engine, SleepingTrainingEngine):
            raise EngineError(
                f"{type(engine).__name__} cannot free its memory for a while (it has no sleep and wake), so rollouts "
                "cannot share its devices: leave rollout out of cluster.colocate"
            )
        return engine

    def _make_engine(self, model_path: str, settings: Mapping[str, Any]) -> None:
        self._close_engine()
        given = dict(settings) if self._mesh is None else {"mesh": self._mesh, **settings}
        self._engine = make_part(
            self._group,
            self._name,
            local_model(model_path),
            options=self._options,
            path=self._path,
            rank=self.rank,
            world_size=self.world_size,
            master_addr=self.master_addr,
            master_port=self.master_port,
            **given,
        )

    def _close_engine(self) -> None:
        engine, self._engine, self._snapshot = self._engine, None, None
        if engine is not None:
            engine.close()

    def _held(self) -> EngineT:
        if self._engine is None:
            raise RuntimeError(f"{type(self).__name__} holds no model yet: call build(model_path, settings) first")
        return self._engine


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """What a trainer rank is made from; picklable. Without ``transport`` it publishes nothing (a reference policy).

    With ``adapters_apart`` a policy that is trained through adapters publishes these alone.
    """

    engine: Part
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    transport: TransportSpec | None = None
    proof: ProofSpec | None = None
    adapters_apart: bool = False
    mesh: MeshShape | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofSpec:
    """What engines have to show for each version (:mod:`asyncrl.rollout.live_weights`).

    ``dtype`` is the coarsest that trainer or engine compute in; ``tolerance`` None is what it explains.
    """

    checked_bytes: int
    canary_tokens: int
    dtype: str
    tolerance: float | None = None

    def asked(self, manifest: WeightManifest, token_ids: Sequence[int], log_probs: Sequence[float]) -> WeightManifest:
        """Return the manifest with what is asked of engines; ``log_probs`` are those of the tokens from the second."""
        canary = None
        if log_probs:
            matrices = sum(len(entry.shape) > 1 for entry in manifest.computed_with)
            explained = CANARY_DEVIATIONS * rounding_error(matrices, self.dtype)
            tolerance = explained if self.tolerance is None else self.tolerance
            canary = Canary(token_ids=tuple(token_ids), log_probs=tuple(log_probs), tolerance=tolerance)
        return msgspec.structs.replace(manifest, checked_bytes=self.checked_bytes, canary=canary)


CANARY_DEVIATIONS = 8.0
"""Standard deviations of rounding that the median over a canary's tokens may be off: beyond what chance gives."""


def _usage_of(engine: TrainingEngine) -> TrainerUsage | None:
    return engine.usage() if isinstance(engine, MeteredTrainingEngine) else None


class TrainerWorker(EngineRank[TrainingEngine]):
    """A rank of the trainer: updates the policy, each time to the next version of the weights, and publishes them."""

    def __init__(self, spec: TrainerSpec) -> None:
        super().__init__(
            "asyncrl.training_engines",
            spec.engine,
            options=spec.engine_options,
            path="trainer.engine",
            mesh=spec.mesh,
        )
        self._version = 0
        self._lora: Mapping[str, Any] | None = None
        self._apart = spec.adapters_apart
        self._base: tuple[TensorEntry, ...] | None = None
        self._proof = spec.proof
        self._canary: DataProto | None = None
        self._transport: WeightTransport | None = None
        self._divided = spec.transport is not None and spec.transport.divided
        if spec.transport is not None and (self.rank == 0 or self._divided):
            self._transport = spec.transport.make(rank=self.rank, ranks=self.world_size)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def build(self, model_path: str, settings: dict[str, Any], weight_version: int = 0) -> None:
        """Make the training engine for a model, in place of the one held before (a new stage, a new optimizer).

        The model's weights are ``weight_version``; every :meth:`update` makes the next one.
        """
        self._version = weight_version
        self._lora = settings.get("lora")
        self._base = None
        self._make_engine(model_path, settings)

    # pad=False: a row that filled up a share would be trained on twice; ranks may hold fewer rows, or none.
    @register(dispatch_mode=_METRICS, pad=False)
    def supervise(self, batch: DataProto) -> dict[str, float]:
        """Take one supervised step."""
        return self._held().supervise(batch)

    @register(dispatch_mode=_METRICS, pad=False)
    def update(
        self, batch: DataProto, oldest_version: int | None = None, by_token: TokenAdvantages | None = None
    ) -> dict[str, float]:
        """Take one policy step, which makes the weights of the next version.

        Tokens of versions below ``oldest_version`` are masked. Advantages are made by ``by_token``, or come from the
        columns ``turn_advantages`` or ``advantages``.
        """
        batch = unfold(batch).rows
        if by_token is not None:
            batch = with_token_advantages(batch, by_token)
        elif batch.batch is not None and "turn_advantages" in batch.batch.keys():  # noqa: SIM118  iterates rows
            batch = with_turn_advantages(batch)
        young = batch if oldest_version is None else mask_stale_tokens(batch, oldest_version)
        if self._canary is None and self._proof is not None:
            self._canary = canary_row(batch, self._proof.canary_tokens)
        engine = self._held()
        before = _usage_of(engine)
        metrics = engine.update(with_staleness(young, version=self._version))
        self._version += 1
        used = _usage_of(engine)
        return metrics if used is None else metrics | used.since(before).metrics()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def usage(self) -> TrainerUsage | None:
        """Return what updates have used since :meth:`build`; None if the engine does not tell."""
        return _usage_of(self._held())

    @register(dispatch_mode=_BY_ROWS)
    def log_probs(self, batch: DataProto) -> DataProto:
        """Compute ``log_probs`` (ragged, like ``input_ids``) under the weights held."""
        found = unfold(batch)
        return found.fold(self._held().log_probs(found.rows).select(["log_probs"]))

    @register(dispatch_mode=_BY_ROWS)
    def reference_log_probs(self, batch: DataProto, estimator: KLEstimator | None = None) -> DataProto:
        """Compute ``reference_log_probs`` (ragged, like ``input_ids``) under the weights held.

        A policy with LoRA adapters computes them without its adapters: it is its own reference. With an ``estimator``
        also ``divergences`` [B]: the KL of each row, its sampled tokens summed, in nats.
        """
        engine: Any = self._held()  # one that takes `lora` has a method more than the contract
        branches = unfold(batch)
        scored = (
            engine.reference_log_probs(branches.rows) if self._lora is not None else engine.log_probs(branches.rows)
        )
        scored = branches.fold(scored.select(["log_probs"]))
        assert scored.batch is not None
        reference = scored.batch["log_probs"]
        found = {"reference_log_probs": reference}
        if estimator is not None:
            from asyncrl.algorithms.kl import row_divergences

            assert batch.batch is not None
            sampled, mask = batch.batch["behaviour_log_probs"], batch.batch["loss_mask"]
            found["divergences"] = row_divergences(sampled, reference, mask, estimator=estimator)
        return DataProto.from_dict(tensors=found)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def publish(self, version: int, rebase: bool = False) -> WeightManifest | None:
        """Publish the current weights as ``version``; return the manifest, None on a rank that holds nothing of it.

        With ``rebase`` as a whole, even where differences could be published: a replica could not use the last version.

        Raises:
            WeightVersionError: the current weights are not that version: calls came in another order than their labels.
        """
        if version != self._version:
            raise WeightVersionError(f"weights of version {self._version} were to be published as version {version}")
        tensors, adapter = self._published(sharded=self._divided)
        manifest = None
        if self._transport is not None:
            if rebase and isinstance(self._transport, DeltaTransport):
                self._transport.rebase()
            manifest = self._transport.publish(tensors, version=version)
            manifest = msgspec.structs.replace(manifest, adapter=adapter)
        else:
            for _name, tensor in tensors:  # gathering a sharded tensor is collective: take part, keep nothing
                del tensor
        if self._proof is None:
            return manifest
        token_ids, log_probs = self._canary_log_probs()
        return None if manifest is None else self._proof.asked(manifest, token_ids, log_probs)

    def _published(self, *, sharded: bool = False) -> tuple[Iterable[tuple[str, Tensor]], Adapter | None]:
        """Return the tensors that are published, and what they are if they are an adapter's."""
        engine, lora = self._held(), self._lora
        if lora is None or not self._apart:
            if sharded and isinstance(engine, ShardedTrainingEngine):
                return engine.sharded_tensors(), None
            return engine.named_tensors(), None
        assert isinstance(engine, AdapterTrainingEngine), "the run has chosen how adapters are published by the engine"
        if self._base is None:  # once: it stays as it is
            self._base = entries_of(engine.base_tensors())
        return engine.adapter_tensors(), Adapter(rank=lora["rank"], alpha=lora["alpha"], base=self._base)

    def _canary_log_probs(self) -> tuple[Sequence[int], Sequence[float]]:
        """Return the canary's tokens, and the log-probs of those from the second on; none before the first update."""
        from asyncrl.data.ragged import values_of

        if self._canary is None:
            return (), ()
        scored = self._held().log_probs(self._canary)
        assert self._canary.batch is not None
        assert scored.batch is not None
        token_ids: list[int] = values_of(self._canary.batch["input_ids"]).tolist()
        return token_ids, values_of(scored.batch["log_probs"]).tolist()[1:]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fingerprint(self) -> str:
        """Return the fingerprint of the current weights (:mod:`asyncrl.weights`), as they are published."""
        tensors, adapter = self._published()
        held = WeightManifest(version=0, transport="", location="", tensors=entries_of(tensors), adapter=adapter)
        return manifest_fingerprint(held)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def announce(self, manifest: WeightManifest) -> None:
        """Tell pools that belong to no run of a version that those of the run serve, beside other calls."""
        transport = self._transport
        if isinstance(transport, AnnouncingTransport):
            await in_abandonable_thread(lambda: transport.announce(manifest))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def release(self, version: int) -> None:
        """Free a published version that no replica needs any more."""
        if (transport := self._transport) is not None:
            await in_abandonable_thread(lambda: transport.release(version))

    def close(self) -> None:
        """Leave the process group and unlink what was published."""
        super().close()
        if self._transport is not None:
            self._transport.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSpec:
    """What a critic rank is made from; picklable. ``path`` is the configuration's key that names the engine."""

    engine: Part
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    path: str = "critic.engine"
    mesh: MeshShape | None = None


class CriticWorker(EngineRank[ValueEngine]):
    """A rank of the critic, or of a reward model in training: computes values and scores, and is trained on them."""

    def __init__(self, spec: CriticSpec) -> None:
        super().__init__(
            "asyncrl.value_engines", spec.engine, options=spec.engine_options, path=spec.path, mesh=spec.mesh
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def build(self, model_path: str, settings: dict[str, Any]) -> None:
        """Make the value engine for a model, in place of the one held before."""
        self._make_engine(model_path, settings)

    @register(dispatch_mode=_BY_ROWS)
    def values(self, batch: DataProto) -> DataProto:
        """Compute ``values`` (ragged, like ``input_ids``) under the weights held."""
        found = unfold(batch)
        return found.fold(self._held().values(found.rows))

    # pad=False: a row that filled up a share would be trained on twice; ranks may hold fewer rows, or none.
    @register(dispatch_mode=_METRICS, pad=False)
    def update(
        self, batch: DataProto, by_token: TokenAdvantages, oldest_version: int | None = None
    ) -> dict[str, float]:
        """Take one step towards the returns of a batch; tokens of versions below ``oldest_version`` are masked."""
        rows = with_returns(unfold(batch).rows, by_token)
        return self._held().update(rows if oldest_version is None else mask_stale_tokens(rows, oldest_version))

    @register(dispatch_mode=_BY_ROWS)
    def scores(self, batch: DataProto) -> DataProto:
        """Compute ``scores`` [B] at the last token of each row."""
        return self._held().scores(batch)

    @register(dispatch_mode=_METRICS, pad=False)
    def compare(self, pairs: DataProto) -> dict[str, float]:
        """Take one step on rows chosen, rejected, chosen, rejected, ..."""
        return self._held().compare(pairs)


class RewardWorker(Worker):
    """Scores rows with a reward model. ``spec`` is its source (entry point or dotted path) and its options.

    It has no state but its model, so a worker whose process died is restarted and its calls are repeated.
    """

    def __init__(self, spec: tuple[str, dict[str, Any]]) -> None:
        super().__init__()
        self._source, self._options = spec
        self._model: RewardModel | None = None
        self._making = asyncio.Lock()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, idempotent=True)
    async def start(self, model_path: str) -> None:
        """Make the reward model. One that takes a ``tokenizer`` gets the policy's, unless its options name another."""
        await self._made(model_path)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, idempotent=True)
    async def score(self, batch: DataProto, model_path: str) -> DataProto:
        """Compute ``scores`` [B] float32. A restarted worker makes its model first, as :meth:`start` does.

        ``meta_info["deterministic"]`` is what the model declares.

        Raises:
            RewardError: a score is not a finite float32.
        """
        model = await self._made(model_path)
        scored = await model.score(batch)
        assert scored.batch is not None
        scores = scored.batch["rewards"].float()
        bad = (~scores.isfinite()).nonzero().flatten().tolist()
        if bad:
            given = float(scored.batch["rewards"][bad[0]])
            raise RewardError(f"the reward model gave row {bad[0]} {given}, not a finite float32", how="value")
        deterministic = bool(getattr(model, "deterministic", False))
        return DataProto.from_dict(tensors={"scores": scores}, meta_info={"deterministic": deterministic})

    async def _made(self, model_path: str) -> RewardModel:
        async with self._making:
            if self._model is None:
                self._model = await self._make(model_path)
        return self._model

    async def _make(self, model_path: str) -> RewardModel:
        group, path = "asyncrl.reward_models", "reward.source"
        model_path = await in_thread(local_model, model_path, weights=False)
        options = offered_options(group, self._source, {"tokenizer": model_path}, path=path) | self._options
        # In a thread: loading a model takes seconds, and this loop serves other calls.
        model: RewardModel = await in_thread(make_part, group, self._source, options=options, path=path)
        return model

    async def aclose(self) -> None:
        if self._model is not None:
            await self._model.close()
