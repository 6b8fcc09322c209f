"""The training engine: policy and optimizer, sharded over ranks with FSDP2."""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncrl.algorithms import PolicyObjective, TokenLosses, supervised_token_losses, token_weights
from asyncrl.algorithms.aggregation import check_range
from asyncrl.data import DataProto
from asyncrl.data.ragged import offsets_from_lengths, ragged_from_values
from asyncrl.errors import ConfigError, InvalidDataError
from asyncrl.interfaces import TrainerUsage
from asyncrl.mesh import MemoryPlan, MeshShape
from engines.training.checkpoint import full_tensor, full_tensors
from engines.training.log_probs import TokenScores
from engines.training.lora import adapter_tensors, base_tensors, is_adapter, lora_of, without_adapters
from engines.training.model import PolicyModel, load_policy_model
from engines.training.packing import PackedRows
from engines.training.rank_group import RankGroup
from engines.training.sharded_engine import ShardedEngine, check_any_tokens

_OPTIONAL = ("proximal_log_probs", "reference_log_probs", "staleness")
_PREPARED = "prepared."  # prefix of the columns that the objective prepares; they are exchanged with their rows
_PLANNED = (
    "dtype",
    "gradient_checkpointing",
    "optimizer",
    "optimizer_options",
)  # those of the options that need memory
_SEEDS = 2**63 - 25  # a prime: every bit of the seed counts, in the 64 bits that torch takes


@dataclass(kw_only=True, eq=False, repr=False)
class FSDPEngine(ShardedEngine[PolicyModel]):
    """A :class:`~asyncrl.interfaces.TrainingEngine` on ``torch.distributed.fsdp.fully_shard``.

    Weights, reduced gradients and moments are float32, sharded over the ranks. A step is a function of weights and
    batch: nothing is drawn in a pass, and neither how rows are spread over ranks nor how they are cut into
    micro-batches matters, up to the order of float32 additions. On the CPU the same calls give the same bits.

    Ranks with fewer micro-batches (:class:`~engines.training.partition.BatchPartition`,
    :func:`~engines.training.packing.plan_microbatches`) compute dummies of weight zero, so that all ranks call the same
    collectives.

    :meth:`update` minimises ``objective``. ``lora`` trains low-rank adapters instead of the weights
    (:class:`~engines.training.lora.LoRA`), which are held in ``dtype`` then. ``temperature`` is the one that tokens are
    sampled with: log-probs are of softmax(logits / temperature). Other arguments are those of :class:`ShardedEngine`.
    """

    objective: PolicyObjective
    lora: Mapping[str, Any] | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        self._update_s = self._multiply_adds = self._memory_peak_gb = 0.0
        lora = lora_of(self.lora)
        self._open(
            lambda sharded: load_policy_model(
                self.model_path,
                gradient_checkpointing=self.gradient_checkpointing,
                layout=self.layout,
                lora=lora,
                seed=self.seed,
                sharded=sharded,
                dtype=self.dtype,
            ),
            temperature=self.temperature,
        )

    def _check(self) -> None:
        super()._check()
        lora_of(self.lora)
        check_range("temperature", self.temperature, low=0.0, open_low=True)

    def update(self, batch: DataProto) -> dict[str, float]:
        """Make ``num_mini_batches * epochs`` optimizer steps on a trajectory batch.

        Columns: ``input_ids``, ``loss_mask``, ``behaviour_log_probs``, ``advantages`` ([B] or ragged); optionally
        ``proximal_log_probs``, ``reference_log_probs`` and ``staleness``. Without ``proximal_log_probs`` they are the
        current ones if there is a single optimizer step and the objective prepares nothing, otherwise they are computed
        once, before the first. A rank may hold no rows, as long as it has the columns.

        Metrics: ``loss`` and ``grad_norm`` (before clipping; both means over the optimizer steps), ``lr`` (of the last
        step), the objective's (means over trained tokens), ``tokens_trained`` and ``rows`` (global, each counted once
        whatever the number of epochs).
        """
        self._check_open()
        with self._metered():
            return self._update(batch)

    def usage(self) -> TrainerUsage:
        device = self._ranks.device
        peak = peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        return TrainerUsage(
            update_s=self._update_s,
            tflop=2 * self._multiply_adds / 1e12 / self.world_size,
            peak_tflops=peak,
            memory_peak_gb=self._memory_peak_gb,
        )

    @contextmanager
    def _metered(self) -> Iterator[None]:
        """Count an update in :meth:`usage`."""
        device, on_device = self._ranks.device, self._ranks.device.type == "cuda"
        if on_device:
            torch.cuda.reset_peak_memory_stats(device)
        begun_s, before = time.perf_counter(), self._passes.multiply_adds
        yield
        # Metrics have been read, so a device has computed all but the last optimizer step.
        self._update_s += time.perf_counter() - begun_s
        self._multiply_adds += self._passes.multiply_adds - before
        resident_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        used = torch.cuda.max_memory_allocated(device) if on_device else 1024 * resident_kib
        self._memory_peak_gb = used / 1e9

    def _update(self, batch: DataProto) -> dict[str, float]:
        rows = self._read(batch, required=self.objective.columns, optional=_OPTIONAL)
        present = self._ranks.gather([name in rows.columns for name in _OPTIONAL])
        if any(each != present[0] for each in present):
            raise InvalidDataError(f"some ranks have the columns {', '.join(_OPTIONAL)}, others do not")
        if self.objective.whiten_advantages:
            rows.columns["advantages"] = whitened(rows.columns["advantages"], rows.mask, self._ranks)
        partition = self._partition(rows)
        check_any_tokens(partition.scored)
        prepares = self.objective.prepares
        if "proximal_log_probs" not in rows.columns and (prepares or self.num_mini_batches * self.epochs > 1):
            rows.columns["proximal_log_probs"], _ = self._score(partition, extras="none")
        if prepares:
            prepared = prepared_columns(
                self.objective,
                rows,
                self._ranks,
                row_counts=partition.row_counts,
                token_counts=partition.token_counts,
                seed=self._derived_seed(),
            )
            rows.columns |= {_PREPARED + name: column for name, column in prepared.items()}
        metrics = self._run_mini_batches(
            partition,
            token_weights=lambda lengths, tokens, rows: self.objective.token_weights(
                lengths, total_tokens=tokens, total_rows=rows
            ),
            loss_fn=self._policy_losses,
            epochs=self.epochs,
            num_mini_batches=self.num_mini_batches,
            extras="entropy_gradient" if self.objective.entropy_coef else "entropy",
        )
        return self.objective.report(metrics)

    def supervise(self, batch: DataProto) -> dict[str, float]:
        """Make one optimizer step of cross-entropy, in which every token where ``loss_mask`` counts the same.

        Metrics: ``loss`` (nats per token), ``accuracy`` (share of tokens that were the most likely one), ``grad_norm``
        (before clipping), ``lr``, ``tokens``.
        """
        self._check_open()
        metrics = self._run_mini_batches(
            self._partition(self._read(batch)),
            token_weights=lambda lengths, tokens, rows: token_weights(
                lengths, loss_agg_mode="token_mean", total_tokens=tokens, total_rows=rows
            ),
            loss_fn=_supervised_losses,
            extras="correct",
        )
        metrics["tokens"] = metrics.pop("tokens_trained")
        del metrics["rows"]
        return metrics

    def log_probs(self, batch: DataProto) -> DataProto:
        self._check_open()
        return self._log_probs(batch)

    def reference_log_probs(self, batch: DataProto) -> DataProto:
        """Return :meth:`log_probs` under the frozen weights beside the adapters: a reference without a second copy.

        Raises:
            ConfigError: the engine trains without LoRA, so no weights are frozen.
        """
        self._check_open()
        if self._model.lora is None:
            raise ConfigError("all weights are trained: there is no reference model", path="lora", remedy="set lora")
        with without_adapters(self._model):
            return self._log_probs(batch)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full weights one at a time, adapters merged in.

        A tensor may be the trainer's own memory: it is valid until the next step and must not be written to.
        """
        self._check_open()
        return self._full_tensors()

    def sharded_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's shards; full weights where adapters are merged in, names differ, or layers are divided."""
        self._check_open()
        if self._model.renamed or self._model.lora is not None or self._model.pipeline is not None:
            return self._full_tensors()
        return self._published((name, tensor.detach()) for name, tensor in self._model.tensors_by_name())

    def adapter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapters alone, whole, under peft's names; as :meth:`named_tensors`, which has them merged in."""
        self._check_open()
        self._model.free_gathered()
        if self._model.pipeline is not None:
            return self._published(adapter_tensors(full_tensors(self._model, self._ranks, of=is_adapter)))
        modules = self._model.adapter_modules.items()
        return self._published((name, full_tensor(module.weight)) for name, module in modules)

    def base_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the full weights beside the adapters, which training leaves as they are; as :meth:`named_tensors`."""
        self._check_open()
        return self._full_tensors(base_tensors)

    @staticmethod
    def plan_memory(
        model_path: str,
        *,
        row_tokens: int,
        scored: float,
        objective: PolicyObjective,
        world_size: int = 1,
        mesh: Mapping[str, int] | MeshShape | None = None,
        device: str = "cpu",
        lora: Mapping[str, Any] | None = None,
        max_tokens_per_microbatch: int = 8192,
        **options: Any,  # the engine's others, of which those of the model count
    ) -> MemoryPlan:
        """Return what each rank needs in an update (:func:`~engines.training.memory.plan_memory`)."""
        from engines.training.memory import plan_memory

        return plan_memory(
            model_path,
            shape=MeshShape.of(mesh, world_size=world_size),
            device_type=device.partition(":")[0],
            lora=lora_of(lora),
            max_tokens=max_tokens_per_microbatch,
            row_tokens=row_tokens,
            scored=scored,
            extras="entropy_gradient" if objective.entropy_coef else "entropy",
            **{name: value for name, value in options.items() if name in _PLANNED},
        )

    def _policy_losses(self, scores: TokenScores, columns: Mapping[str, Tensor], mask: Tensor) -> TokenLosses:
        return self.objective.token_losses(
            current_log_probs=scores.log_probs,
            proximal_log_probs=columns.get("proximal_log_probs", scores.log_probs.detach()),
            behaviour_log_probs=columns["behaviour_log_probs"],
            advantages=columns["advantages"],
            reference_log_probs=columns.get("reference_log_probs"),
            staleness=columns.get("staleness"),
            entropy=scores.entropy,
            mask=mask,
            rows=columns["row_of"],
            prepared={
                name.removeprefix(_PREPARED): column for name, column in columns.items() if name.startswith(_PREPARED)
            },
        )

    def _log_probs(self, batch: DataProto) -> DataProto:
        rows = self._read(batch, loss_mask=False)
        log_probs, entropy = self._score(self._partition(rows), extras="entropy")
        offsets = offsets_from_lengths(rows.lengths)
        return DataProto.from_dict(
            tensors={
                "log_probs": ragged_from_values(log_probs, offsets),
                "entropy": ragged_from_values(entropy, offsets),
            }
        )


PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "L40S": 362.0,
}
"""1e12 dense bfloat16 operations that a device can do in a second, by words of its name; vendors' figures."""


def peak_tflops(device: str) -> float | None:
    """Return what a device of this name can do; None if it is not known, or a part of a device."""
    known = (tflops for words, tflops in PEAK_TFLOPS.items() if re.search(rf"\b{words}\b", device))
    return None if "MIG" in device else next(known, None)


def _supervised_losses(scores: TokenScores, _columns: Mapping[str, Tensor], mask: Tensor) -> TokenLosses:
    losses = supervised_token_losses(scores.log_probs, mask=mask)
    return TokenLosses(loss=losses.loss, metrics={"accuracy": scores.correct * mask})


def prepared_columns(
    objective: PolicyObjective,
    rows: PackedRows,
    ranks: RankGroup,
    *,
    row_counts: Sequence[int],
    token_counts: Sequence[int],
    seed: int,
) -> dict[str, Tensor]:
    """Return the columns that the objective prepares from the tokens of all ranks, before rows are exchanged and cut.

    Collective. Every rank computes the same from the tokens of all, in the order of their rows. ``rows`` are this
    rank's own, with ``proximal_log_probs``; the counts are those of each rank, and ``seed`` is equal on all. The
    columns are [T] float32 of this rank's rows; 0 for tokens that are not trained.
    """
    mine, rank = rows.mask, ranks.data_rank
    row_of = (rows.row_of[mine] + sum(row_counts[:rank])).double()
    batch = {
        name: ranks.gather_column(rows.columns[name][mine], token_counts)
        for name in ("proximal_log_probs", "behaviour_log_probs", "advantages")
    }
    whole = objective.prepare(**batch, rows=ranks.gather_column(row_of, token_counts).long(), seed=seed % _SEEDS)
    first = sum(token_counts[:rank])
    prepared: dict[str, Tensor] = {}
    for name, column in whole.items():
        prepared[name] = torch.zeros(len(mine))
        prepared[name][mine] = column[first : first + token_counts[rank]].float()
    return prepared


def whitened(column: Tensor, mask: Tensor, ranks: RankGroup) -> Tensor:
    """Shift and scale ``column`` [T] to mean 0 and variance 1 over the tokens inside ``mask`` of all ranks.

    Collective. Other tokens stay as they are. The variance is the sample one (divided by T - 1); equal numbers give 0.
    """
    inside = column[mask].double()
    count, total = ranks.sum([float(len(inside)), float(inside.sum())])
    deviations = inside - total / max(count, 1.0)
    squares, largest = ranks.sum([float(deviations.square().sum()), float(inside.abs().sum())])
    deviation = (squares / max(count - 1.0, 1.0)) ** 0.5
    # The mean of equal numbers need not be that number in floating point: a deviation of 1e-17 counts as 0.
    scale = 1.0 / deviation if deviation > 1e-12 * largest else 0.0
    changed = column.clone()
    changed[mask] = (deviations * scale).to(column.dtype)
    return changed
