"""Forward and backward passes over the rows of all ranks, in micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from asyncrl.algorithms import TokenLosses
from engines.training.microbatch import Layout, MicroBatch, plan_microbatches
from engines.training.model import PolicyModel
from engines.training.packed_rows import PackedRows, RowStream
from engines.training.rank_group import RankGroup
from engines.training.token_log_probs import Extras, TokenScores

__all__ = ["Gradients", "LossesOf", "Passes", "Portion"]

_OVERHEAD_TOKENS: dict[Layout, int] = {"packed": 0, "padded": 128}
"""Cost of one more rectangle, in tokens: one more call of the attention kernel a layer, or one more micro-batch.

Measured on one CPU core with a llama of 0.5M parameters and 128 rows of 24..60 tokens, 0 to 64 are the same within
the noise for ``packed``, so no row is padded; 64 to 256 are within 3% of the best for ``padded``.
"""

LossesOf: TypeAlias = Callable[[TokenScores, RowStream, Tensor], TokenLosses]
"""(scores of N tokens, their rows, mask [N]) -> losses of N tokens. The mask is all False for a stand-in."""


@dataclass(frozen=True, slots=True)
class Portion:
    """Rows that one optimizer step is made of.

    Attributes:
        plan: this rank's micro-batches.
        microbatches: how many every rank computes.
        tokens: tokens to be trained, over all ranks.
        rows: rows with at least one of them, over all ranks.
    """

    plan: list[MicroBatch]
    microbatches: int
    tokens: int
    rows: int


@dataclass(frozen=True, slots=True)
class Gradients:
    """What a backward pass over a portion left behind, beside the gradients themselves. Equal on all ranks.

    Attributes:
        loss: of the whole portion.
        norm: global norm of the gradients.
        metrics: means over the trained tokens.
    """

    loss: float
    norm: float
    metrics: dict[str, float]


class Passes:
    """Runs a sharded model over packed rows. Every method is collective.

    Attributes:
        max_tokens: cells of a micro-batch.
        temperature: divides the logits.
    """

    def __init__(self, model: PolicyModel, ranks: RankGroup, *, max_tokens: int, temperature: float) -> None:
        self._model = model
        self._ranks = ranks
        self.max_tokens = max_tokens
        self.temperature = temperature
        self._overhead_tokens = _OVERHEAD_TOKENS[model.layout]

    def portion(self, rows: PackedRows, members: Iterable[int]) -> Portion:
        """Plan an optimizer step over these rows of this rank; rows without a token to train are left out."""
        lengths = [0] * len(rows)
        scored: list[int] = rows.scored.tolist()
        for row in members:
            if scored[row]:
                lengths[row] = rows.lengths[row]
        plan = plan_microbatches(
            lengths, max_tokens=self.max_tokens, layout=self._model.layout, overhead_tokens=self._overhead_tokens
        )
        tokens = sum(scored[row] for each in plan for row in each.rows)
        held = self._ranks.gather([len(plan), tokens, sum(len(each.rows) for each in plan)])
        return Portion(
            plan=plan,
            microbatches=max(each[0] for each in held),
            tokens=sum(each[1] for each in held),
            rows=sum(each[2] for each in held),
        )

    def score(self, rows: PackedRows, *, extras: Extras) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of every scored token, both [T] float32 on the CPU; 0 elsewhere.

        Entropy is all 0 unless ``extras`` asks for it.
        """
        log_probs = torch.zeros(len(rows.input_ids), dtype=torch.float32)
        entropy = torch.zeros_like(log_probs)
        portion = self.portion(rows, range(len(rows)))
        with torch.no_grad():
            for stream in self._microbatches(rows, portion):
                scores = self._forward(stream, extras)
                if stream.real:
                    log_probs[stream.tokens] = scores.log_probs.float().cpu()
                    if extras != "none":
                        entropy[stream.tokens] = scores.entropy.float().cpu()
        self._model.free_gathered()
        return log_probs, entropy

    def accumulate(
        self,
        rows: PackedRows,
        portion: Portion,
        weights: Tensor,
        *,
        losses_of: LossesOf,
        squared_norm: Callable[[], float],
        extras: Extras,
    ) -> Gradients:
        """Leave the gradient of ``sum of weight * loss over all trained tokens of all ranks`` in the parameters.

        Args:
            rows: this rank's rows.
            portion: the part of them to go over.
            weights: [B] weight of each token of a row.
            losses_of: from scores to losses.
            squared_norm: sum of squares of this rank's share of the gradients, called when they are complete.
            extras: what ``losses_of`` needs beside log-probs.
        """
        sums: dict[str, Tensor] = {}
        for stream in self._microbatches(rows, portion):
            scores = self._forward(stream, extras)
            device = scores.log_probs.device
            mask = torch.full_like(scores.log_probs, stream.real, dtype=torch.bool)
            losses = losses_of(scores, stream, mask)
            loss = (losses.loss * stream.of_rows(weights).to(device)).sum()
            # FSDP averages over ranks; the sum is wanted.
            (loss * self._ranks.world_size).backward()
            found = {"loss": loss.detach(), **{name: each.sum() for name, each in losses.metrics.items()}}
            for name, each in found.items():
                sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64, device=device)) + each.double()
        names = sorted(sums)
        local: list[float] = torch.stack([sums[name] for name in names]).tolist()
        *totals, squared = self._ranks.sum([*local, squared_norm()])
        means = {name: total / portion.tokens for name, total in zip(names, totals, strict=True)}
        loss_of_portion = means.pop("loss") * portion.tokens
        return Gradients(loss=loss_of_portion, norm=squared**0.5, metrics=means)

    def _microbatches(self, rows: PackedRows, portion: Portion) -> Iterable[RowStream]:
        for number in range(portion.microbatches):
            yield rows.stream(portion.plan[number]) if number < len(portion.plan) else RowStream.stand_in()

    def _forward(self, stream: RowStream, extras: Extras) -> TokenScores:
        device = self._ranks.device
        scores: TokenScores = self._model(
            stream.input_ids.to(device),
            stream.positions.to(device),
            stream.predictors.to(device),
            stream.targets.to(device),
            rectangles=stream.rectangles,
            extras=extras,
            temperature=self.temperature,
        )
        return scores
