"""The trainer: policy and optimizer, sharded over ranks with FSDP2."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from asyncrl.algorithms import PolicyObjective, TokenLosses, supervised_token_losses, token_weights
from asyncrl.data import DataProto
from asyncrl.data.ragged import offsets_from_lengths, ragged_from_values
from asyncrl.errors import ConfigError, EngineClosedError, EngineError, InvalidDataError
from engines.training.dealing import Dealing
from engines.training.lora import lora_of, without_adapters
from engines.training.microbatch import Layout
from engines.training.model import ComputeDtype, PolicyModel, load_policy_model, shard
from engines.training.optimizer import LearningRate, Schedule, ShardedAdamW, clipping_scale
from engines.training.options import check_options
from engines.training.packed_rows import PackedRows, RowStream
from engines.training.passes import LossesOf, Passes, Portion
from engines.training.rank_group import RankGroup
from engines.training.token_log_probs import Extras, TokenScores
from engines.training.trainer_folder import export_model, full_tensor, load_trainer, save_trainer
from engines.training.whole_batch import prepared_columns

__all__ = ["FSDPEngine"]

_OPTIONAL = ("proximal_log_probs", "reference_log_probs", "ages")

_PREPARED = "prepared."
"""Prefix of the columns that an objective has made of the whole batch; they travel with their rows."""


class FSDPEngine:
    """A :class:`~asyncrl.interfaces.TrainingEngine` on ``torch.distributed.fsdp.fully_shard``.

    Weights, reduced gradients and moments are float32, sharded over the ranks. A step is a function of weights and
    batch: dropout is off, and neither how rows are spread over ranks nor how they are cut into micro-batches matters,
    up to the order of float32 additions. On the CPU the same calls give the same bits.

    Rows are spread over the ranks so that all have about the same work (see
    :class:`~engines.training.dealing.Dealing`) and computed in packed micro-batches (see :func:`plan_microbatches`); on
    ranks with fewer micro-batches, stand-ins of weight zero keep the collectives in step.

    Args:
        model_path: folder or hub id of a transformers causal LM.
        objective: what :meth:`update` minimises.
        rank: this process, 0..world_size-1.
        world_size: number of ranks; 1 needs no network, and any number of such engines can live in one process.
        master_addr: where several ranks meet.
        master_port: likewise; needed for several ranks unless this process has a torch process group already.
        device: ``cpu``, ``cuda``, ``cuda:N`` or ``auto``: CUDA if there is any.
        dtype: what matrix products are computed in.
        lr: peak learning rate.
        weight_decay: decoupled; not applied to tensors of one dimension (norms, biases).
        betas: AdamW's decay rates of the two moments.
        eps: AdamW's epsilon.
        max_grad_norm: gradients are scaled down to this global norm; None leaves them.
        schedule: see :class:`~engines.training.optimizer.LearningRate`.
        warmup_steps: optimizer steps; one :meth:`update` makes ``minibatches * epochs`` of them.
        total_steps: optimizer steps; needed unless the schedule is constant.
        max_tokens_per_microbatch: tokens a rank computes at once, padding included. A longer row is computed alone.
        gradient_checkpointing: keep no activations inside decoder layers; compute them again for the backward pass.
        layout: how rows lie in a micro-batch: ``packed`` one after the other, ``padded`` to one length (for models
            whose attention cannot be told of rows), ``auto``: packed where the model allows it.
        lora: train low-rank adapters instead of the weights: ``rank``, ``alpha`` and ``targets``, see
            :class:`~engines.training.lora.LoRA`.
        minibatches: optimizer steps per pass over a batch.
        epochs: passes over a batch.
        temperature: the one that tokens are sampled with: log-probs are of softmax(logits / temperature).
        publish_dtype: what :meth:`named_tensors` and :meth:`export` cast floating weights to.
        threads: CPU threads of torch, for the whole process; None leaves them as they are.
        seed: order in which rows are dealt to minibatches.
        collective_timeout_s: how long a rank waits for the others before it fails.

    Raises:
        ConfigError: a value that cannot be used; the message names it.
        OSError: there is no such model.
    """

    def __init__(
        self,
        model_path: str,
        *,
        objective: PolicyObjective,
        lr: float,
        rank: int = 0,
        world_size: int = 1,
        master_addr: str = "127.0.0.1",
        master_port: int | None = None,
        device: str = "auto",
        dtype: ComputeDtype = "float32",
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        max_grad_norm: float | None = 1.0,
        schedule: Schedule = "constant",
        warmup_steps: int = 0,
        total_steps: int | None = None,
        max_tokens_per_microbatch: int = 8192,
        gradient_checkpointing: bool = False,
        layout: Layout | Literal["auto"] = "auto",
        lora: Mapping[str, Any] | None = None,
        minibatches: int = 1,
        epochs: int = 1,
        temperature: float = 1.0,
        publish_dtype: ComputeDtype = "float32",
        threads: int | None = None,
        seed: int = 0,
        collective_timeout_s: float = 1800.0,
    ) -> None:
        check_options(
            max_tokens_per_microbatch=max_tokens_per_microbatch,
            minibatches=minibatches,
            epochs=epochs,
            threads=threads,
            max_grad_norm=max_grad_norm,
            temperature=temperature,
            dtype=dtype,
            publish_dtype=publish_dtype,
        )
        self._rate = LearningRate(peak=lr, schedule=schedule, warmup_steps=warmup_steps, total_steps=total_steps)
        if threads is not None:
            torch.set_num_threads(threads)
        self._model_path = model_path
        self._objective = objective
        self._max_grad_norm = max_grad_norm
        self._minibatches = minibatches
        self._epochs = epochs
        self._publish_dtype: torch.dtype = getattr(torch, publish_dtype)
        self._seed = seed
        self._updates = 0
        self._optimizer_steps = 0
        self._closed = False
        self._ranks = RankGroup(
            rank=rank,
            world_size=world_size,
            master_addr=master_addr,
            master_port=master_port,
            device=device,
            timeout_s=collective_timeout_s,
        )
        try:
            self._model: PolicyModel = load_policy_model(
                model_path,
                gradient_checkpointing=gradient_checkpointing,
                layout=layout,
                lora=lora_of(lora),
                seed=seed,
            )
            self._cost = self._model.row_cost()
            shard(self._model, self._ranks.mesh, dtype=dtype)
            self._optimizer = ShardedAdamW(
                self._model.parameters_by_name(), weight_decay=weight_decay, betas=betas, eps=eps
            )
            self._passes = Passes(
                self._model, self._ranks, max_tokens=max_tokens_per_microbatch, temperature=temperature
            )
        except BaseException:
            self._ranks.close()
            raise

    # ------------------------------------------------------------------------------------------------------- training

    def update(self, batch: DataProto) -> dict[str, float]:
        """One policy step: ``minibatches * epochs`` optimizer steps on a trajectory batch.

        Columns: ``input_ids``, ``loss_mask``, ``behaviour_log_probs``, ``advantages`` ([B] or ragged); optionally
        ``proximal_log_probs``, ``reference_log_probs`` and ``ages``. Without ``proximal_log_probs`` they are the
        current ones if there is a single optimizer step and the objective prepares nothing, otherwise they are
        computed once, before the first. Other columns are ignored. A rank may hold no rows, as long as the columns are
        there.

        Returns:
            ``loss`` and ``grad_norm`` (before clipping; both means over the optimizer steps), ``lr`` (of the last
            step), the objective's metrics (means over trained tokens), ``tokens_trained`` and ``rows`` (global, each
            counted once whatever the number of epochs).

        Raises:
            SchemaError: a column is missing or misshapen.
            InvalidDataError: no token to train on, or a mask that includes a row's first token.
            EngineError: loss or gradient norm is not finite (no step is made of it), or another rank failed.
        """
        self._check_open()
        rows = self._read(batch, required=self._objective.columns, optional=_OPTIONAL)
        held = self._ranks.gather([*(name in rows.columns for name in _OPTIONAL)])
        if any(each != held[0] for each in held):
            raise InvalidDataError(f"some ranks have the columns {', '.join(_OPTIONAL)}, others have not")
        dealing = Dealing(rows, self._ranks, cost=self._cost)
        _check_some(dealing.scored)
        prepares = self._objective.prepares
        if "proximal_log_probs" not in rows.columns and (prepares or self._minibatches * self._epochs > 1):
            rows.columns["proximal_log_probs"], _ = self._score(dealing, extras="none")
        if prepares:
            prepared = prepared_columns(
                self._objective,
                rows,
                self._ranks,
                row_counts=dealing.row_counts,
                token_counts=dealing.token_counts,
                seed=(self._seed << 40) + (self._updates << 10),
            )
            rows.columns |= {_PREPARED + name: column for name, column in prepared.items()}

        steps: list[dict[str, float]] = []
        weights_of_steps: list[int] = []
        for epoch in range(self._epochs):
            seed = (self._seed << 40) + (self._updates << 10) + epoch
            for dealt, members in dealing.minibatches(self._minibatches, seed=seed):
                portion = self._passes.portion(dealt, members)
                if portion.tokens == 0:
                    continue
                weights = self._objective.token_weights(
                    _only(dealt.scored, members), total_tokens=portion.tokens, total_rows=portion.rows
                )
                extras: Extras = "entropy_gradient" if self._objective.entropy_coefficient else "entropy"
                losses_of = partial(self._policy_losses, dealt)
                steps.append(self._step(dealt, portion, weights, losses_of=losses_of, extras=extras))
                weights_of_steps.append(portion.tokens)
        self._updates += 1
        per_step = {"loss", "grad_norm"}
        metrics = {
            name: _mean([step[name] for step in steps], [1] * len(steps) if name in per_step else weights_of_steps)
            for name in steps[0]
        }
        return self._objective.report(metrics) | {
            "lr": steps[-1]["lr"],
            "tokens_trained": float(dealing.scored),
            "rows": float(dealing.rows),
        }

    def supervise(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step of cross-entropy, every token where ``loss_mask`` counting the same.

        Returns:
            ``loss`` (nats per token), ``accuracy`` (share of tokens that were the most likely one), ``grad_norm``
            (before clipping), ``lr``, ``tokens``.

        Raises:
            SchemaError: as :meth:`update`.
            InvalidDataError: as :meth:`update`.
            EngineError: as :meth:`update`.
        """
        self._check_open()
        ((rows, members),) = Dealing(self._read(batch), self._ranks, cost=self._cost).minibatches(1, seed=0)
        portion = self._passes.portion(rows, members)
        _check_some(portion.tokens)
        weights = token_weights(
            rows.scored, aggregation="token_mean", total_tokens=portion.tokens, total_rows=portion.rows
        )
        metrics = self._step(rows, portion, weights, losses_of=_supervised_losses, extras="correct")
        self._updates += 1
        return metrics | {"tokens": float(portion.tokens)}

    def log_probs(self, batch: DataProto) -> DataProto:
        """Columns ``log_probs`` and ``entropy``: ragged float32, aligned with ``input_ids``, entry 0 of each row 0."""
        self._check_open()
        return self._log_probs(batch)

    def reference_log_probs(self, batch: DataProto) -> DataProto:
        """:meth:`log_probs` under the frozen weights that adapters stand beside: a reference without a second copy.

        Raises:
            ConfigError: without LoRA nothing is frozen.
        """
        self._check_open()
        if self._model.lora is None:
            raise ConfigError("all weights are trained: nothing is left to refer to", path="lora", remedy="set lora")
        with without_adapters(self._model):
            return self._log_probs(batch)

    # -------------------------------------------------------------------------------------------------------- weights

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Full weights under their checkpoint names, one at a time, tied ones once, adapters merged in. Collective.

        A tensor may be the trainer's own memory: it holds until the next step and must not be written to. Models whose
        checkpoint names are not the module's (fused experts) are gathered whole first.
        """
        self._check_open()
        dtype = self._publish_dtype
        whole = self._model.merged((name, full_tensor(tensor)) for name, tensor in self._model.tensors_by_name())
        tensors = ((name, full.to(dtype) if full.is_floating_point() else full) for name, full in whole)
        return iter(self._model.to_checkpoint_names(dict(tensors)).items()) if self._model.renamed else tensors

    def save(self, folder: Path) -> None:
        """Write weights, moments and counters; replaces ``folder`` as a whole. Collective; rank 0 writes.

        Raises:
            OSError: the folder cannot be written (on rank 0; :class:`EngineError` on the others).
        """
        self._check_open()
        counters = {"updates": self._updates, "optimizer_steps": self._optimizer_steps, "seed": self._seed}
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
        self._seed = counters["seed"]

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
            self.named_tensors(),
            self._ranks,
            dtype=self._publish_dtype,
            model_path=self._model_path,
        )

    def close(self) -> None:
        """Leave the process group and free the model. Idempotent."""
        if self._closed:
            return
        self._closed = True
        del self._passes, self._optimizer, self._model
        self._ranks.close()

    # ------------------------------------------------------------------------------------------------------- internal

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
        self._optimizer.step(lr=lr, gradient_scale=clipping_scale(gradients.norm, self._max_grad_norm))
        self._optimizer_steps += 1
        return gradients.metrics | {"loss": gradients.loss, "grad_norm": gradients.norm, "lr": lr}

    def _policy_losses(self, rows: PackedRows, scores: TokenScores, stream: RowStream, mask: Tensor) -> TokenLosses:
        columns = {name: stream.of_tokens(column).to(mask.device) for name, column in rows.columns.items()}
        return self._objective.token_losses(
            current_log_probs=scores.log_probs,
            proximal_log_probs=columns.get("proximal_log_probs", scores.log_probs.detach()),
            behaviour_log_probs=columns["behaviour_log_probs"],
            advantages=columns["advantages"],
            reference_log_probs=columns.get("reference_log_probs"),
            ages=columns.get("ages"),
            entropy=scores.entropy,
            mask=mask,
            rows=stream.of_tokens(rows.row_of).to(mask.device),
            prepared={
                name.removeprefix(_PREPARED): column for name, column in columns.items() if name.startswith(_PREPARED)
            },
        )

    def _score(self, dealing: Dealing, *, extras: Extras) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of every scored token of this rank's own rows; see :meth:`Passes.score`."""
        ((rows, _),) = dealing.minibatches(1, seed=0)
        log_probs, entropy = self._passes.score(rows, extras=extras)
        return dealing.give_back(log_probs), dealing.give_back(entropy)

    def _log_probs(self, batch: DataProto) -> DataProto:
        rows = self._read(batch, loss_mask=False)
        log_probs, entropy = self._score(Dealing(rows, self._ranks, cost=self._cost), extras="entropy")
        offsets = offsets_from_lengths(rows.lengths)
        return DataProto.from_dict(
            tensors={
                "log_probs": ragged_from_values(log_probs, offsets),
                "entropy": ragged_from_values(entropy, offsets),
            }
        )

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


def _supervised_losses(scores: TokenScores, _stream: RowStream, mask: Tensor) -> TokenLosses:
    losses = supervised_token_losses(scores.log_probs, mask=mask)
    return TokenLosses(loss=losses.loss, metrics={"accuracy": scores.correct * mask})


def _only(scored: Tensor, members: Sequence[int]) -> Tensor:
    """[B] like ``scored``, 0 for rows that are no members."""
    kept = torch.zeros_like(scored)
    kept[list(members)] = scored[list(members)]
    return kept


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def _check_some(tokens: int) -> None:
    if tokens == 0:
        raise InvalidDataError("no token to train on: loss_mask is False everywhere, on every rank")
