"""The trainer: policy and optimizer, sharded over ranks with FSDP2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from torch import Tensor

from asyncrl.algorithms import PolicyObjective, TokenLosses, supervised_token_losses, token_weights
from asyncrl.data import DataProto
from asyncrl.data.ragged import offsets_from_lengths, ragged_from_values
from asyncrl.errors import ConfigError, InvalidDataError
from engines.training.lora import lora_of, without_adapters
from engines.training.microbatch import Layout
from engines.training.model import ComputeDtype, PolicyModel, load_policy_model
from engines.training.optimizer import Schedule
from engines.training.packed_rows import PackedRows, RowStream
from engines.training.sharded_engine import ShardedEngine, check_some
from engines.training.token_log_probs import TokenScores
from engines.training.whole_batch import prepared_columns, whitened

__all__ = ["FSDPEngine"]

_OPTIONAL = ("proximal_log_probs", "reference_log_probs", "ages")

_PREPARED = "prepared."
"""Prefix of the columns that an objective has made of the whole batch; they travel with their rows."""


class FSDPEngine(ShardedEngine[PolicyModel]):
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
        lora_made = lora_of(lora)
        super().__init__(
            model_path,
            load=lambda: load_policy_model(
                model_path, gradient_checkpointing=gradient_checkpointing, layout=layout, lora=lora_made, seed=seed
            ),
            lr=lr,
            rank=rank,
            world_size=world_size,
            master_addr=master_addr,
            master_port=master_port,
            device=device,
            dtype=dtype,
            weight_decay=weight_decay,
            betas=betas,
            eps=eps,
            max_grad_norm=max_grad_norm,
            schedule=schedule,
            warmup_steps=warmup_steps,
            total_steps=total_steps,
            max_tokens_per_microbatch=max_tokens_per_microbatch,
            minibatches=minibatches,
            epochs=epochs,
            temperature=temperature,
            publish_dtype=publish_dtype,
            threads=threads,
            seed=seed,
            collective_timeout_s=collective_timeout_s,
        )
        self._objective = objective

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
        if self._objective.whiten:
            rows.columns["advantages"] = whitened(rows.columns["advantages"], rows.mask, self._ranks)
        dealing = self._deal(rows)
        check_some(dealing.scored)
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
                seed=self._draw(),
            )
            rows.columns |= {_PREPARED + name: column for name, column in prepared.items()}
        metrics = self._descend(
            dealing,
            token_weights=lambda lengths, tokens, rows: self._objective.token_weights(
                lengths, total_tokens=tokens, total_rows=rows
            ),
            losses_of=self._policy_losses,
            extras="entropy_gradient" if self._objective.entropy_coefficient else "entropy",
        )
        return self._objective.report(metrics)

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
        ((rows, members),) = self._deal(self._read(batch)).minibatches(1, seed=0)
        portion = self._passes.portion(rows, members)
        check_some(portion.tokens)
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
        return self._full_tensors()

    # ------------------------------------------------------------------------------------------------------- internal

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

    def _log_probs(self, batch: DataProto) -> DataProto:
        rows = self._read(batch, loss_mask=False)
        log_probs, entropy = self._score(self._deal(rows), extras="entropy")
        offsets = offsets_from_lengths(rows.lengths)
        return DataProto.from_dict(
            tensors={
                "log_probs": ragged_from_values(log_probs, offsets),
                "entropy": ragged_from_values(entropy, offsets),
            }
        )


def _supervised_losses(scores: TokenScores, _stream: RowStream, mask: Tensor) -> TokenLosses:
    losses = supervised_token_losses(scores.log_probs, mask=mask)
    return TokenLosses(loss=losses.loss, metrics={"accuracy": scores.correct * mask})
