"""What training engines of all roles share: a model and its optimizer over ranks, optimizer steps, and their folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from asyncrl.algorithms import TokenLosses
from asyncrl.data import DataProto
from asyncrl.errors import EngineClosedError, EngineError, InvalidDataError
from engines.training.dealing import Dealing
from engines.training.microbatch import Layout
from engines.training.model import ComputeDtype, PolicyModel, shard
from engines.training.optimizer import LearningRate, Schedule, ShardedAdamW, clipping_scale
from engines.training.options import check_options
from engines.training.packed_rows import PackedRows, RowStream
from engines.training.passes import LossesOf, Passes, Portion
from engines.training.rank_group import RankGroup
from engines.training.token_log_probs import Extras, TokenScores
from engines.training.trainer_folder import export_model, full_tensor, load_trainer, save_trainer

__all__ = ["ShardedEngine", "check_some"]

ModelT = TypeVar("ModelT", bound=PolicyModel)


@dataclass(kw_only=True, eq=False, repr=False)
class ShardedEngine(Generic[ModelT]):
    """Model and optimizer, sharded over the ranks of one group. Methods are collective.

    Engines derive from it, add what they minimise, and begin with :meth:`_open`. The arguments of all of them are these
    fields and their own; none is to be set once the engine is made.

    Args:
        model_path: folder or hub id of a transformers model.
        lr: peak learning rate.
        rank: this process, 0..world_size-1.
        world_size: number of ranks; 1 needs no network, and any number of such engines can live in one process.
        master_addr: where several ranks meet.
        master_port: likewise; needed for several ranks unless this process has a torch process group already.
        device: ``cpu``, ``cuda``, ``cuda:N`` or ``auto``: CUDA if there is any.
        dtype: what matrix products are computed in.
        weight_decay: decoupled; not applied to tensors of one dimension (norms, biases).
        betas: AdamW's decay rates of the two moments.
        eps: AdamW's epsilon.
        max_grad_norm: gradients are scaled down to this global norm; None leaves them.
        schedule: see :class:`~engines.training.optimizer.LearningRate`.
        warmup_steps: optimizer steps; one update makes ``minibatches * epochs`` of them.
        total_steps: optimizer steps; needed unless the schedule is constant.
        max_tokens_per_microbatch: tokens a rank computes at once, padding included. A longer row is computed alone.
        gradient_checkpointing: keep no activations inside decoder layers; compute them again for the backward pass.
        layout: how rows lie in a micro-batch: ``packed`` one after the other, ``padded`` to one length (for models
            whose attention cannot be told of rows), ``auto``: packed where the model allows it.
        minibatches: optimizer steps per pass over a batch.
        epochs: passes over a batch.
        publish_dtype: what published and exported floating weights are cast to.
        threads: CPU threads of torch, for the whole process; None leaves them as they are.
        seed: order in which rows are dealt to minibatches.
        collective_timeout_s: how long a rank waits for the others before it fails.

    Raises:
        ConfigError: a value that cannot be used; the message names it.
        OSError: there is no such model.
    """

    model_path: str = field(kw_only=False)
    lr: float
    rank: int = 0
    world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    device: str = "auto"
    dtype: ComputeDtype = "float32"
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    max_grad_norm: float | None = 1.0
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    max_tokens_per_microbatch: int = 8192
    gradient_checkpointing: bool = False
    layout: Layout | Literal["auto"] = "auto"
    minibatches: int = 1
    epochs: int = 1
    publish_dtype: ComputeDtype = "float32"
    threads: int | None = None
    seed: int = 0
    collective_timeout_s: float = 1800.0

    def _open(self, load: Callable[[], ModelT], *, temperature: float = 1.0) -> None:
        """Check the options, join the ranks and shard the model that ``load`` makes, on the CPU and not sharded yet."""
        check_options(
            max_tokens_per_microbatch=self.max_tokens_per_microbatch,
            minibatches=self.minibatches,
            epochs=self.epochs,
            threads=self.threads,
            max_grad_norm=self.max_grad_norm,
            temperature=temperature,
            weight_decay=self.weight_decay,
            betas=self.betas,
            eps=self.eps,
            layout=self.layout,
            dtype=self.dtype,
            publish_dtype=self.publish_dtype,
        )
        self._rate = LearningRate(
            peak=self.lr, schedule=self.schedule, warmup_steps=self.warmup_steps, total_steps=self.total_steps
        )
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        self._dealing_seed = self.seed
        self._updates = 0
        self._optimizer_steps = 0
        self._closed = False
        self._ranks = RankGroup(
            rank=self.rank,
            world_size=self.world_size,
            master_addr=self.master_addr,
            master_port=self.master_port,
            device=self.device,
            timeout_s=self.collective_timeout_s,
        )
        try:
            self._model: ModelT = self._load(load)
            self._cost = self._model.row_cost()
            shard(self._model, self._ranks.mesh, dtype=self.dtype)
            self._optimizer = ShardedAdamW(
                self._model.parameters_by_name(), weight_decay=self.weight_decay, betas=self.betas, eps=self.eps
            )
            self._passes = Passes(
                self._model, self._ranks, max_tokens=self.max_tokens_per_microbatch, temperature=temperature
            )
        except BaseException:
            self._ranks.close()
            raise

    def _load(self, load: Callable[[], ModelT]) -> ModelT:
        """The model, or the same kind of error on every rank: one may lack the folder."""
        try:
            model, failure = load(), None
        except Exception as error:  # noqa: BLE001 - raised again below
            model, failure = None, error
        self._ranks.agree(failure, doing="loading the model")
        assert model is not None
        return model

    # --------------------------------------------------------------------------------------------------------- folder

    def save(self, folder: Path) -> None:
        """Write weights, moments and counters; replaces ``folder`` as a whole. Collective; rank 0 writes.

        Raises:
            OSError: the folder cannot be written (on rank 0; :class:`EngineError` on the others).
        """
        self._check_open()
        counters = {"updates": self._updates, "optimizer_steps": self._optimizer_steps, "seed": self._dealing_seed}
        save_trainer(Path(folder), self._model, self._optimizer, self._ranks, counters=counters)

    def load(self, folder: Path) -> None:
        """Counterpart of :meth:`save`, at any world size. At the same world size training goes on bit for bit.

        Hyperparameters are this engine's; only the seed is that of the engine that saved.

        Raises:
            CheckpointError: missing, damaged or of another model. Nothing has been changed then.
        """
        self._check_open()
        counters = load_trainer(Path(folder), self._model, self._optimizer, self._ranks)
        self._updates = counters["updates"]
        self._optimizer_steps = counters["optimizer_steps"]
        self._dealing_seed = counters["seed"]

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder: config, weights in ``publish_dtype``, the tokenizer of ``model_path`` if any.

        With LoRA its weights have the adapters merged in; the adapters alone lie beside them in ``adapter``, as peft
        reads them.

        Raises:
            OSError: the folder cannot be written (on rank 0; :class:`EngineError` on the others).
        """
        self._check_open()
        export_model(
            Path(folder),
            self._model,
            self._full_tensors(),
            self._ranks,
            dtype=getattr(torch, self.publish_dtype),
            model_path=self.model_path,
        )

    def close(self) -> None:
        """Leave the process group and free the model. Idempotent."""
        if self._closed:
            return
        self._closed = True
        del self._passes, self._optimizer, self._model
        self._ranks.close()

    # ---------------------------------------------------------------------------------------------- for derived engines

    def _full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        dtype: torch.dtype = getattr(torch, self.publish_dtype)
        whole = self._model.merged((name, full_tensor(tensor)) for name, tensor in self._model.tensors_by_name())
        tensors = ((name, full.to(dtype) if full.is_floating_point() else full) for name, full in whole)
        return iter(self._model.to_checkpoint_names(dict(tensors)).items()) if self._model.renamed else tensors

    def _descend(
        self,
        dealing: Dealing,
        *,
        token_weights: Callable[[Tensor, int, int], Tensor],
        losses_of: Callable[[PackedRows, TokenScores, RowStream, Tensor], TokenLosses],
        extras: Extras = "none",
    ) -> dict[str, float]:
        """``epochs`` passes over a batch, each in ``minibatches`` optimizer steps; the update is counted.

        Args:
            dealing: the batch.
            token_weights: (trained tokens of each row, those of the step, its rows) -> weight of a row's tokens.
            losses_of: as for :meth:`Passes.accumulate`, with the rows before.
            extras: likewise.

        Returns:
            Metrics, averaged over steps: ``loss`` and ``grad_norm`` evenly, others by tokens; ``lr`` of the last step,
            ``tokens_trained`` and ``rows`` of the batch.

        Raises:
            InvalidDataError: no token to train on.
        """
        check_some(dealing.scored)
        steps: list[dict[str, float]] = []
        tokens_of_steps: list[int] = []
        for epoch in range(self.epochs):
            for rows, members in dealing.minibatches(self.minibatches, seed=self._draw(epoch)):
                portion = self._passes.portion(rows, members)
                if portion.tokens == 0:
                    continue
                weights = token_weights(_only(rows.scored, members), portion.tokens, portion.rows)

                def losses(
                    scores: TokenScores, stream: RowStream, mask: Tensor, rows: PackedRows = rows
                ) -> TokenLosses:
                    return losses_of(rows, scores, stream, mask)

                steps.append(self._step(rows, portion, weights, losses_of=losses, extras=extras))
                tokens_of_steps.append(portion.tokens)
        self._updates += 1
        per_step = {"loss", "grad_norm"}
        metrics = {
            name: _mean([step[name] for step in steps], [1] * len(steps) if name in per_step else tokens_of_steps)
            for name in steps[0]
        }
        return metrics | {
            "lr": steps[-1]["lr"],
            "tokens_trained": float(dealing.scored),
            "rows": float(dealing.rows),
        }

    def _draw(self, number: int = 0) -> int:
        """Seed of something that this update draws; ``number`` below 1024."""
        return (self._dealing_seed << 40) + (self._updates << 10) + number

    def _step(
        self, rows: PackedRows, portion: Portion, weights: Tensor, *, losses_of: LossesOf, extras: Extras
    ) -> dict[str, float]:
        self._optimizer.discard_gradients()  # of a step that was broken off by an error
        gradients = self._passes.accumulate(
            rows,
            portion,
            weights,
            losses_of=losses_of,
            squared_norm=self._optimizer.squared_gradient_norm,
            extras=extras,
        )
        for name, value in (("loss", gradients.loss), ("grad_norm", gradients.norm)):
            if not math.isfinite(value):
                self._optimizer.discard_gradients()
                raise EngineError(
                    f"{name} is {value} at optimizer step {self._optimizer_steps}: the weights were left as they are. "
                    f"Look at the batch (advantages, log-probs) and at lr={self._rate.at(self._optimizer_steps):g}"
                )
        lr = self._rate.at(self._optimizer_steps)
        self._optimizer.step(lr=lr, gradient_scale=clipping_scale(gradients.norm, self.max_grad_norm))
        self._optimizer_steps += 1
        return gradients.metrics | {"loss": gradients.loss, "grad_norm": gradients.norm, "lr": lr}

    def _score(self, dealing: Dealing, *, extras: Extras) -> tuple[Tensor, Tensor]:
        """Scores of the tokens of this rank's own rows; see :meth:`Passes.score`."""
        ((rows, _),) = dealing.minibatches(1, seed=0)
        scores, entropy = self._passes.score(rows, extras=extras)
        return dealing.give_back(scores), dealing.give_back(entropy)

    def _deal(self, rows: PackedRows) -> Dealing:
        return Dealing(rows, self._ranks, cost=self._cost)

    def _read(
        self,
        batch: DataProto,
        *,
        loss_mask: bool = True,
        required: Sequence[str] = (),
        optional: Sequence[str] = (),
    ) -> PackedRows:
        """The batch as packed rows, or an error on every rank if any rank's batch cannot be used."""
        rows: PackedRows | None = None
        failure: InvalidDataError | None = None
        try:
            rows = PackedRows.read(
                batch,
                vocabulary=self._model.vocabulary,
                loss_mask=loss_mask,
                required=required,
                optional=[name for name in optional if name not in required],
            )
        except InvalidDataError as error:
            failure = error
        self._ranks.agree(failure, doing="reading the batch")
        assert rows is not None
        return rows

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("the training engine is closed")


def check_some(tokens: int) -> None:
    """Raise :class:`InvalidDataError` if there are none."""
    if tokens == 0:
        raise InvalidDataError("no token to train on: loss_mask is False everywhere, on every rank")


def _only(scored: Tensor, members: Sequence[int]) -> Tensor:
    """[B] like ``scored``, 0 for rows that are no members."""
    kept = torch.zeros_like(scored)
    kept[list(members)] = scored[list(members)]
    return kept


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
