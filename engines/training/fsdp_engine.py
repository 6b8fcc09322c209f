"""The trainer: policy and optimizer, sharded over ranks with FSDP2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from asyncrl.algorithms import PolicyObjective, TokenLosses, supervised_token_losses, token_weights
from asyncrl.data import DataProto
from asyncrl.data.ragged import offsets_from_lengths, ragged_from_values
from asyncrl.errors import ConfigError, InvalidDataError
from engines.training.lora import lora_of, without_adapters
from engines.training.model import PolicyModel, load_policy_model
from engines.training.packed_rows import PackedRows, RowStream
from engines.training.sharded_engine import ShardedEngine, check_some
from engines.training.token_log_probs import TokenScores
from engines.training.whole_batch import prepared_columns, whitened

__all__ = ["FSDPEngine"]

_OPTIONAL = ("proximal_log_probs", "reference_log_probs", "ages")

_PREPARED = "prepared."
"""Prefix of the columns that an objective has made of the whole batch; they travel with their rows."""


@dataclass(kw_only=True, eq=False, repr=False)
class FSDPEngine(ShardedEngine[PolicyModel]):
    """A :class:`~asyncrl.interfaces.TrainingEngine` on ``torch.distributed.fsdp.fully_shard``.

    Weights, reduced gradients and moments are float32, sharded over the ranks. A step is a function of weights and
    batch: dropout is off, and neither how rows are spread over ranks nor how they are cut into micro-batches matters,
    up to the order of float32 additions. On the CPU the same calls give the same bits.

    Rows are spread over the ranks so that all have about the same work (see
    :class:`~engines.training.dealing.Dealing`) and computed in packed micro-batches (see :func:`plan_microbatches`); on
    ranks with fewer micro-batches, stand-ins of weight zero keep the collectives in step.

    Args:
        model_path: of a causal LM. This and what is not named here is as :class:`ShardedEngine` says.
        objective: what :meth:`update` minimises.
        lora: train low-rank adapters instead of the weights: ``rank``, ``alpha`` and ``targets``, see
            :class:`~engines.training.lora.LoRA`.
        temperature: the one that tokens are sampled with: log-probs are of softmax(logits / temperature).

    Raises:
        ConfigError: a value that cannot be used; the message names it.
        OSError: there is no such model.
    """

    objective: PolicyObjective
    lora: Mapping[str, Any] | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        lora = lora_of(self.lora)
        self._open(
            lambda: load_policy_model(
                self.model_path,
                gradient_checkpointing=self.gradient_checkpointing,
                layout=self.layout,
                lora=lora,
                seed=self.seed,
            ),
            temperature=self.temperature,
        )

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
        rows = self._read(batch, required=self.objective.columns, optional=_OPTIONAL)
        held = self._ranks.gather([*(name in rows.columns for name in _OPTIONAL)])
        if any(each != held[0] for each in held):
            raise InvalidDataError(f"some ranks have the columns {', '.join(_OPTIONAL)}, others have not")
        if self.objective.whiten:
            rows.columns["advantages"] = whitened(rows.columns["advantages"], rows.mask, self._ranks)
        dealing = self._deal(rows)
        check_some(dealing.scored)
        prepares = self.objective.prepares
        if "proximal_log_probs" not in rows.columns and (prepares or self.minibatches * self.epochs > 1):
            rows.columns["proximal_log_probs"], _ = self._score(dealing, extras="none")
        if prepares:
            prepared = prepared_columns(
                self.objective,
                rows,
                self._ranks,
                row_counts=dealing.row_counts,
                token_counts=dealing.token_counts,
                seed=self._draw(),
            )
            rows.columns |= {_PREPARED + name: column for name, column in prepared.items()}
        metrics = self._descend(
            dealing,
            token_weights=lambda lengths, tokens, rows: self.objective.token_weights(
                lengths, total_tokens=tokens, total_rows=rows
            ),
            losses_of=self._policy_losses,
            extras="entropy_gradient" if self.objective.entropy_coefficient else "entropy",
        )
        return self.objective.report(metrics)

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
        return self.objective.token_losses(
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
