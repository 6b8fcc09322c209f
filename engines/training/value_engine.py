"""The critic's engine, and the reward model's: a model that says one number, and its optimizer, sharded over ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from asyncrl.algorithms import TokenLosses, ValueObjective, bradley_terry_losses
from asyncrl.data import DataProto
from asyncrl.data.ragged import offsets_from_lengths, ragged_from_values
from asyncrl.errors import InvalidDataError
from engines.training.packed_rows import PackedRows, RowStream
from engines.training.sharded_engine import ShardedEngine, check_some
from engines.training.token_log_probs import TokenScores
from engines.training.value_model import ValueModel, load_value_model

__all__ = ["FSDPValueEngine"]


@dataclass(kw_only=True, eq=False, repr=False)
class FSDPValueEngine(ShardedEngine[ValueModel]):
    """A :class:`~asyncrl.interfaces.ValueEngine`: values of tokens, scores of rows, and what either learns from.

    Everything that :class:`~engines.training.fsdp_engine.FSDPEngine` says of ranks, micro-batches and precision holds
    here too.

    Args:
        model_path: of a causal LM, whose head is replaced by one that says 0 at first, or of a model for sequence
            classification with one label. This and what is not named here is as :class:`ShardedEngine` says.
        objective: what :meth:`update` minimises.
        centring: 0 or more: how strongly :meth:`compare` pulls the sum of a pair's scores to 0.

    Raises:
        ConfigError: a value that cannot be used; the message names it.
        OSError: there is no such model.
    """

    lr: float = 0.0
    objective: ValueObjective = field(default_factory=ValueObjective)
    centring: float = 0.0

    def __post_init__(self) -> None:
        self._open(
            lambda: load_value_model(
                self.model_path, gradient_checkpointing=self.gradient_checkpointing, layout=self.layout
            )
        )

    # --------------------------------------------------------------------------------------------------------- critic

    def values(self, batch: DataProto) -> DataProto:
        """Column ``values``: ragged float32, aligned with ``input_ids``: before each token where ``loss_mask``, else 0.

        Raises:
            SchemaError, InvalidDataError: as :meth:`update`.
        """
        self._check_open()
        rows = self._read(batch)
        values, _ = self._score(self._deal(rows), extras="none")
        offsets = offsets_from_lengths(rows.lengths)
        return DataProto.from_dict(tensors={"values": ragged_from_values(values, offsets)})

    def update(self, batch: DataProto) -> dict[str, float]:
        """``minibatches * epochs`` optimizer steps towards ``returns`` of the tokens where ``loss_mask``.

        Columns: ``input_ids``, ``loss_mask``, ``returns`` (ragged). With more than one optimizer step, values at the
        start of the update are computed first: the clip is around those, whatever older values advantages were made of.

        Returns:
            ``loss`` and ``grad_norm`` (before clipping), ``lr``, the objective's metrics, ``tokens_trained``, ``rows``.

        Raises:
            SchemaError: a column is missing or misshapen.
            InvalidDataError: no token to train on, or a mask that includes a row's first token.
            EngineError: loss or gradient norm is not finite (no step is made of it), or another rank failed.
        """
        self._check_open()
        rows = self._read(batch, required=("returns",))
        dealing = self._deal(rows)
        check_some(dealing.scored)
        if self.minibatches * self.epochs > 1:
            rows.columns["old_values"], _ = self._score(dealing, extras="none")
        metrics = self._descend(dealing, token_weights=self.objective.token_weights, losses_of=self._value_losses)
        return self.objective.report(metrics)

    def _value_losses(self, rows: PackedRows, scores: TokenScores, stream: RowStream, mask: Tensor) -> TokenLosses:
        columns = {name: stream.of_tokens(column).to(mask.device) for name, column in rows.columns.items()}
        return self.objective.token_losses(
            scores.log_probs,
            old_values=columns.get("old_values", scores.log_probs.detach()),
            returns=columns["returns"],
            mask=mask,
        )

    # --------------------------------------------------------------------------------------------------- reward model

    def scores(self, batch: DataProto) -> DataProto:
        """Column ``scores`` [B] float32: what is read off a row's last token. Column: ``input_ids``.

        Raises:
            InvalidDataError: a row is empty.
        """
        self._check_open()
        rows = self._ended(self._read(batch, loss_mask=False))
        return DataProto.from_dict(tensors={"scores": self._row_scores(rows)})

    def compare(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step on pairs: rows chosen, rejected, chosen, rejected, ... of all ranks together.

        Columns: ``input_ids``; optionally ``margins`` [B], read off the chosen rows. The loss of a pair
        (:func:`~asyncrl.algorithms.bradley_terry_losses`) is known from two numbers, so a first pass makes the scores
        of all rows, and a second one their gradient: the two rows of a pair may lie in different micro-batches and on
        different ranks. A rank may hold no rows, or half a pair.

        Returns:
            ``loss`` (mean over pairs), ``accuracy`` (share of pairs whose chosen row has the higher score, ties half),
            ``distance`` (mean of chosen minus rejected), ``grad_norm``, ``lr``, ``pairs``.

        Raises:
            InvalidDataError: no pair, half a pair too many, or a row is empty.
            EngineError: as :meth:`update`.
        """
        self._check_open()
        rows = self._ended(self._read(batch, loss_mask=False, optional=("margins",)))
        counts = [count for (count,) in self._ranks.gather([len(rows)])]
        total = sum(counts)
        if total == 0 or total % 2:
            raise InvalidDataError(f"{total} rows are no pairs: chosen and rejected rows take turns")
        everyone = self._ranks.concatenated(self._row_scores(rows), counts).requires_grad_()
        margins = None
        if all(flag for (flag,) in self._ranks.gather(["margins" in rows.columns])):
            margins = self._ranks.concatenated(rows.columns["margins"][rows.mask], counts)[0::2]
        with torch.enable_grad():
            losses = bradley_terry_losses(everyone[0::2], everyone[1::2], margins=margins, centring=self.centring)
            (slopes,) = torch.autograd.grad(losses.loss.mean(), everyone)
        first = sum(counts[: self._ranks.rank])
        slope = torch.zeros(len(rows.mask))
        slope[rows.mask] = slopes[first : first + len(rows)].float()
        rows.columns = {"slope": slope}

        ((dealt, members),) = self._deal(rows).minibatches(1, seed=0)
        portion = self._passes.portion(dealt, members)
        weights = torch.ones(len(dealt))

        def losses_of(scores: TokenScores, stream: RowStream, mask: Tensor) -> TokenLosses:
            wanted = stream.of_tokens(dealt.columns["slope"]).to(mask.device)
            return TokenLosses(loss=torch.where(mask, wanted * scores.log_probs, 0.0))

        metrics = self._step(dealt, portion, weights, losses_of=losses_of, extras="none")
        self._updates += 1
        return {
            "loss": float(losses.loss.detach().mean()),
            "accuracy": float(losses.correct.mean()),
            "distance": float(losses.distance.mean()),
            "grad_norm": metrics["grad_norm"],
            "lr": metrics["lr"],
            "pairs": float(total // 2),
        }

    def _row_scores(self, rows: PackedRows) -> Tensor:
        """[B] of rows that were ended."""
        scores, _ = self._score(self._deal(rows), extras="none")
        return scores[rows.mask]

    def _ended(self, rows: PackedRows) -> PackedRows:
        """The same rows with one token more each, the only one to be scored: what stands before it is the whole row.

        Columns are those of the tokens before.
        """
        lengths = torch.tensor(rows.lengths, dtype=torch.int64)
        empty = (lengths == 0).nonzero().flatten().tolist()
        failure = InvalidDataError(f"row {empty[0]} has no token: there is nothing to score") if empty else None
        self._ranks.agree(failure, doing="reading the batch")
        last = torch.cumsum(lengths, 0) - 1
        source = torch.cat([torch.arange(len(rows.input_ids)), last])
        # Stable: a row's copy of its last token comes right behind it.
        source = source[torch.sort(source, stable=True).indices]
        mask = torch.zeros(len(source), dtype=torch.bool)
        mask[last + torch.arange(1, len(lengths) + 1)] = True
        return PackedRows(
            input_ids=rows.input_ids[source],
            mask=mask,
            columns={name: column[source] for name, column in rows.columns.items()},
            lengths=lengths + 1,
        )
