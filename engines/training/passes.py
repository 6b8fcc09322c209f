"""Forward and backward passes over the rows of all ranks, in micro-batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from asyncrl.algorithms import TokenLosses
from engines.training.log_probs import Extras, TokenScores
from engines.training.model import PolicyModel
from engines.training.packing import Layout, MicroBatch, PackedMicroBatch, PackedRows, plan_microbatches, sent
from engines.training.prefixes import plan_shared
from engines.training.rank_group import RankGroup

_OVERHEAD_TOKENS: dict[Layout, int] = {"packed": 0, "padded": 128}
"""Cost of one more rectangle, in tokens: one more call of the attention kernel a layer, or one more micro-batch.

Measured on one CPU core with a llama of 0.5M parameters and 128 rows of 24..60 tokens, 0 to 64 are the same within
the noise for ``packed``, so no row is padded; 64 to 256 are within 3% of the best for ``padded``.
"""

LossFunction: TypeAlias = Callable[[TokenScores, Mapping[str, Tensor], Tensor], TokenLosses]
"""(scores of N tokens, their columns, mask [N]) -> losses of N tokens. The mask of a dummy is all False.

Columns [N] are those of the rows, and ``row_of``, the row of each token."""


@dataclass(frozen=True, slots=True)
class MiniBatch:
    plan: list[MicroBatch]  # of this rank
    microbatches: int  # the largest number on any rank: every rank computes as many
    tokens: int  # to be trained, over all ranks
    rows: int  # with at least one of them, over all ranks
    cost: float  # of a forward pass, over all ranks, in multiply-adds
    attention: float  # of that, what has no weights


@dataclass(frozen=True, slots=True)
class Gradients:
    """Loss, norm and metrics of a backward pass, whose gradients lie in the parameters. Equal on all ranks."""

    loss: float  # of the whole mini-batch
    norm: float  # global
    metrics: dict[str, float]  # means over the trained tokens


class Passes:
    """Forward and backward passes of a sharded model, in micro-batches of ``max_tokens`` cells. All are collective."""

    def __init__(self, model: PolicyModel, ranks: RankGroup, *, max_tokens: int, temperature: float) -> None:
        self._model = model
        self._ranks = ranks
        self.max_tokens = max_tokens
        self.temperature = temperature
        self.multiply_adds = 0.0  # that the passes so far needed, over all ranks
        self._overhead_tokens = _OVERHEAD_TOKENS[model.layout]
        # On CUDA a kernel for rows of any lengths takes their place.
        self._cost = model.row_cost if model.layout == "packed" and ranks.device.type == "cpu" else None

    def plan(self, rows: PackedRows, members: Iterable[int]) -> MiniBatch:
        """Plan an optimizer step over ``members`` of this rank's rows; rows without a token to train are left out."""
        lengths = [0] * len(rows)
        scored: list[int] = rows.scored.tolist()
        for row in members:
            if scored[row]:
                lengths[row] = rows.lengths[row]
        max_tokens = self.max_tokens
        if self._model.pipeline is not None:  # a few that are full would let the stages wait for one another
            max_tokens = max(1, min(max_tokens, -(-sum(lengths) // self._model.pipeline.least)))
        plan = self._plan_shared(rows, [row for row, length in enumerate(lengths) if length], max_tokens)
        if plan is None:
            plan = plan_microbatches(
                lengths, max_tokens=max_tokens, layout=self._model.layout, overhead_tokens=self._overhead_tokens
            )
        tokens = sum(scored[row] for each in plan for row in each.rows)
        of = self._model.row_cost
        cost = sum(of.of(length, scored[row]) for row, length in enumerate(lengths) if length)
        attention = sum(of.per_pair * length * (length + 1) / 2 for length in lengths)
        trained = sum(len(each.rows) for each in plan)
        held = self._ranks.gather([len(plan), tokens, trained, round(cost), round(attention)])
        return MiniBatch(
            plan=plan,
            microbatches=max(each[0] for each in held),
            tokens=sum(each[1] for each in held),
            rows=sum(each[2] for each in held),
            cost=float(sum(each[3] for each in held)),
            attention=float(sum(each[4] for each in held)),
        )

    def _plan_shared(self, rows: PackedRows, members: list[int], max_tokens: int) -> list[MicroBatch] | None:
        if self._cost is None:
            return None
        return plan_shared(rows, members, max_tokens=max_tokens, cost=self._cost)

    def score(self, rows: PackedRows, *, extras: Extras) -> tuple[Tensor, Tensor]:
        """Return log-prob and entropy (0 unless in ``extras``) of scored tokens: [T] on the CPU, 0 elsewhere."""
        log_probs = torch.zeros(len(rows.input_ids), dtype=torch.float32)
        entropy = torch.zeros_like(log_probs)
        mini_batch = self.plan(rows, range(len(rows)))

        def keep(micro_batch: PackedMicroBatch, scores: TokenScores) -> Tensor:
            if not micro_batch.is_dummy:
                log_probs[micro_batch.tokens] = scores.log_probs.float().cpu()
                if extras != "none":
                    entropy[micro_batch.tokens] = scores.entropy.float().cpu()
            return scores.log_probs

        with torch.no_grad():
            self._run(rows, mini_batch, extras, keep)
        self.multiply_adds += mini_batch.cost
        self._model.free_gathered()
        return self._ranks.from_last_stage(log_probs), self._ranks.from_last_stage(entropy)

    def accumulate(
        self,
        rows: PackedRows,
        mini_batch: MiniBatch,
        weights: Tensor,
        *,
        loss_fn: LossFunction,
        squared_norm: Callable[[], float],
        extras: Extras,
    ) -> Gradients:
        """Give the parameters the gradient of ``sum of weight * loss over all trained tokens of all ranks``.

        ``weights`` [B] are those of each token of a row. ``squared_norm``, this rank's share of the gradients', is
        called when they are complete. ``extras`` are what ``loss_fn`` needs beside log-probs.

        Raises:
            Exception: what ``loss_fn`` raised here.
            EngineError: it raised on another rank. All ranks have ended the pass, and none has made a step.
        """
        sums: dict[str, Tensor] = {}
        failures: list[Exception] = []

        def minimised(micro_batch: PackedMicroBatch, scores: TokenScores) -> Tensor:
            device = scores.log_probs.device
            mask = torch.full_like(scores.log_probs, not micro_batch.is_dummy, dtype=torch.bool)
            packed = {**rows.columns, "row_of": rows.row_of}
            columns = {name: sent(micro_batch.token_values(column), device) for name, column in packed.items()}
            try:
                losses = loss_fn(scores, columns, mask)
                weighted = (losses.loss * sent(micro_batch.row_values(weights), device)).sum()
            except Exception as error:  # a user's code; the other ranks wait in the backward pass
                if self._ranks.world_size == 1:
                    raise
                failures.append(error)
                losses = TokenLosses(loss=scores.log_probs * 0)
                weighted = losses.loss.sum()
            found = {"loss": weighted.detach(), **{name: each.sum() for name, each in losses.metrics.items()}}
            for name, each in found.items():
                sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64, device=device)) + each.double()
            return weighted

        self._run(rows, mini_batch, extras, minimised)
        weightless = mini_batch.cost if self._model.lora is None else mini_batch.attention
        self.multiply_adds += 2.0 * mini_batch.cost + weightless  # frozen weights have no gradients
        self._ranks.raise_together(failures[0] if failures else None, doing="the loss")
        names = sorted(sums)
        local: list[float] = torch.stack([sums[name] for name in names]).tolist() if names else []
        totals = self._ranks.sum(local)
        names, totals = self._of_last_stage(names, totals)
        (squared,) = self._ranks.sum_over_all([squared_norm()])
        means = {name: total / mini_batch.tokens for name, total in zip(names, totals, strict=True)}
        loss = means.pop("loss") * mini_batch.tokens
        return Gradients(loss=loss, norm=squared**0.5, metrics=means)

    def _run(
        self,
        rows: PackedRows,
        mini_batch: MiniBatch,
        extras: Extras,
        then: Callable[[PackedMicroBatch, TokenScores], Tensor],
    ) -> None:
        """Compute micro-batches; ``then`` gets the scores of each, and returns what is minimised with gradients."""
        pipeline = self._model.pipeline
        if pipeline is None:
            for micro_batch in self._microbatches(rows, mini_batch.plan, mini_batch.microbatches):
                found = then(micro_batch, self._forward(micro_batch, extras))
                if torch.is_grad_enabled():
                    found.backward()
            return
        batches = list(self._microbatches(rows, mini_batch.plan, pipeline.microbatches(mini_batch.microbatches)))
        inputs = [self._inputs(each) for each in batches]
        pipeline.run(
            [each for each, _ in inputs],
            lambda number, scores: then(batches[number], _spread(scores, inputs[number][1])),
            extras=extras,
            temperature=self.temperature,
        )

    def _of_last_stage(self, names: list[str], values: list[float]) -> tuple[list[str], list[float]]:
        """Return what the ranks with the last stage have; they alone compute losses."""
        if self._ranks.pp is None:
            return names, values
        said = torch.tensor(list(json.dumps([names, values]).encode()), dtype=torch.uint8)
        (size,) = self._ranks.from_last_stage(torch.tensor([len(said)])).tolist()
        said = self._ranks.from_last_stage(said if names else torch.zeros(size, dtype=torch.uint8))
        found: tuple[list[str], list[float]] = json.loads(bytes(said.tolist()))
        return found

    def _microbatches(self, rows: PackedRows, plan: list[MicroBatch], count: int) -> Iterable[PackedMicroBatch]:
        for number in range(count):
            yield rows.pack(plan[number]) if number < len(plan) else PackedMicroBatch.dummy()

    def _forward(self, micro_batch: PackedMicroBatch, extras: Extras) -> TokenScores:
        batch, places = self._inputs(micro_batch)
        scores: TokenScores = self._model(
            batch.input_ids,
            batch.positions,
            batch.predictors,
            batch.targets,
            rectangles=batch.rectangles,
            prefixes=batch.prefixes,
            extras=extras,
            temperature=self.temperature,
        )
        return _spread(scores, places)

    def _inputs(self, micro_batch: PackedMicroBatch) -> tuple[PackedMicroBatch, Tensor | None]:
        """Return what the model computes, on its device, and where the scores of tokens lie among those."""
        device = self._ranks.device
        predictors, targets, places = micro_batch.predictors, micro_batch.targets, None
        if any(prefix is not None for prefix in micro_batch.prefixes):
            # A token of a prefix is scored for all of its rows at once.
            (predictors, targets), places = torch.stack([predictors, targets]).unique(dim=1, return_inverse=True)
            places = sent(places, device)
        moved = replace(
            micro_batch,
            input_ids=sent(micro_batch.input_ids, device),
            positions=sent(micro_batch.positions, device),
            predictors=sent(predictors, device),
            targets=sent(targets, device),
        )
        return moved, places


def _spread(scores: TokenScores, places: Tensor | None) -> TokenScores:
    if places is None:
        return scores
    return TokenScores(*(each.index_select(0, places) if len(each) else each for each in scores))
