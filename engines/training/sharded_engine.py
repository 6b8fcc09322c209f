"""What the training engines have in common: a model and its optimizer over ranks, optimizer steps, save and load."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeAlias, TypeVar, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.algorithms.aggregation import check_range
from asyncrl.data import DataProto
from asyncrl.errors import ConfigError, EngineClosedError, EngineError, InvalidDataError
from asyncrl.io import DurableFiles
from asyncrl.mesh import MeshShape
from engines.training.checkpoint import (
    HostMemory,
    Snapshot,
    export_model,
    full_tensors,
    load_trainer,
    published,
    save_trainer,
    take_snapshot,
)
from engines.training.log_probs import Extras
from engines.training.model import ComputeDtype, PolicyModel, check_mesh, local_shard, shard
from engines.training.offload import Offload, resizable
from engines.training.optimizer import (
    LearningRate,
    OptimizerName,
    Schedule,
    ShardedOptimizer,
    check_optimizer,
    clipping_scale,
)
from engines.training.packed_attention import forget_masks
from engines.training.packing import Layout, PackedRows
from engines.training.partition import BatchPartition
from engines.training.passes import LossFunction, MiniBatch, Passes
from engines.training.rank_group import RankGroup

ModelT = TypeVar("ModelT", bound=PolicyModel)
_Tensors: TypeAlias = Iterator[tuple[str, Tensor]]


@dataclass(kw_only=True, eq=False, repr=False)
class ShardedEngine(Generic[ModelT]):
    """Model and optimizer, sharded over the ranks of one group. Methods are collective.

    A derived engine adds the loss it minimises and calls :meth:`_open` first. Its arguments are these fields and its
    own; none may be set once the engine is made.

    Args:
        model_path: folder or hub id of a transformers model.
        lr: peak learning rate; of Adafactor, in parts of a tensor (:data:`~engines.training.optimizer.OptimizerName`).
        rank, world_size: this process, 0..world_size-1, and the number of ranks; 1 needs no network, and any number of
            such engines can live in one process.
        master_addr, master_port: where several ranks meet; the port is needed unless this process has a torch process
            group already.
        device: ``cpu``, ``cuda``, ``cuda:N`` or ``auto`` (CUDA if available).
        dtype: of matrix products.
        weight_decay: decoupled; not applied to tensors of one dimension (norms, biases).
        optimizer, optimizer_options: see :class:`~engines.training.optimizer.ShardedOptimizer`.
        betas, eps: AdamW's decay rates of the two moments, and its epsilon.
        max_grad_norm: gradients are scaled down to this global norm; None leaves them.
        lr_scheduler_type: see :class:`~engines.training.optimizer.LearningRate`.
        warmup_steps: optimizer steps; one update makes ``num_mini_batches * epochs`` of them.
        total_steps: optimizer steps; needed unless the learning rate is constant.
        max_tokens_per_microbatch: tokens a rank computes at once, padding included. A longer row is computed alone.
        gradient_checkpointing: keep no activations inside decoder layers; compute them again for the backward pass.
        compile: torch.compile of every decoder layer and of the passes over logits, the first time that they are
            computed; True for its default backend, or the name of one. Not with a mesh that has ``tp``.
        stages_per_rank: with a mesh that has ``pp``, the stages of its layers that each rank has; more than one
            (interleaved) leave ranks idle for less time, and send more.
        layout: how rows lie in a micro-batch: ``packed`` one after the other, ``padded`` to one length (for models
            without variable-length attention), ``auto``: packed where the model allows it.
        num_mini_batches, epochs: optimizer steps per pass over a batch, and passes.
        publish_dtype: of published and exported floating weights, but those that a family keeps in float32
            (:attr:`~engines.training.model.PolicyModel.kept`).
        threads: CPU threads of torch, for the whole process; None leaves them as they are.
        mesh: sizes of the dimensions that the ranks are arranged in (:class:`~asyncrl.mesh.MeshShape`); None: weights
            and rows are sharded over all.
        seed: of the assignment of rows to mini-batches.
        collective_timeout_s: how long a rank waits for the others before it fails.

    Raises:
        ConfigError: a value that cannot be used, or a damaged file of the model; the message names it.
        OSError: there is no such model.
    """

    files: ClassVar[DurableFiles] = DurableFiles()

    model_path: str = field(kw_only=False)
    lr: float
    rank: int = 0
    world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    device: str = "auto"
    dtype: ComputeDtype = "float32"
    weight_decay: float = 0.0
    optimizer: OptimizerName = "adamw"
    optimizer_options: Mapping[str, Any] | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    max_grad_norm: float | None = 1.0
    lr_scheduler_type: Schedule = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    max_tokens_per_microbatch: int = 8192
    gradient_checkpointing: bool = False
    compile: bool | str = False
    stages_per_rank: int = 1
    layout: Layout | Literal["auto"] = "auto"
    num_mini_batches: int = 1
    epochs: int = 1
    publish_dtype: ComputeDtype = "float32"
    threads: int | None = None
    mesh: Mapping[str, int] | MeshShape | None = None
    seed: int = 0
    collective_timeout_s: float = 1800.0

    def _open(self, load: Callable[[bool], ModelT], *, temperature: float = 1.0) -> None:
        """Check the options, join the ranks, and shard the model that ``load`` makes.

        ``load(True)`` makes one that gets its weights where they belong, if it can: one rank on a CPU has them there.
        """
        self._check()
        backend = "inductor" if self.compile is True else self.compile or None
        self._rate = self._learning_rate()
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        self._saved_seed = self.seed
        self._updates = 0
        self._optimizer_steps = 0
        self._closed = self._asleep = self._half_loaded = False
        self._ranks = RankGroup(
            rank=self.rank,
            world_size=self.world_size,
            master_addr=self.master_addr,
            master_port=self.master_port,
            device=self.device,
            timeout_s=self.collective_timeout_s,
            shape=self.mesh,
        )

        def checked() -> ModelT:
            model = load(self.world_size > 1 or self._ranks.device.type != "cpu")
            check_mesh(model, self._ranks.shape, stages_per_rank=self.stages_per_rank)
            return model

        try:
            self._model: ModelT = self._ranks.call_together(checked, doing="loading the model")
            self._cost = self._model.row_cost
            self._ranks.call_together(
                lambda: shard(
                    self._model,
                    self._ranks,
                    dtype=self.dtype,
                    backend=backend,
                    stages_per_rank=self.stages_per_rank,
                ),
                doing="reading the weights",
            )
            self._optimizer = ShardedOptimizer(
                self._model.parameters_by_name(),
                world_size=self._ranks.stage_size,
                weight_decay=self.weight_decay,
                betas=self.betas,
                eps=self.eps,
                name=self.optimizer,
                options=self.optimizer_options,
                apart=self._model.vocabulary_weights(),
            )
            self._passes = Passes(
                self._model, self._ranks, max_tokens=self.max_tokens_per_microbatch, temperature=temperature
            )
            self._offload = Offload(self._ranks.device)
            self._memory = HostMemory()
        except BaseException:
            self._ranks.close()
            raise

    @classmethod
    def check_options(cls, *arguments: Any, **options: Any) -> None:
        """Check the arguments of an engine without making it.

        Raises:
            ConfigError: one of them cannot be used, whatever the model.
        """
        engine, given = cls.__new__(cls), inspect.signature(cls).bind(*arguments, **options)
        values: dict[str, Any] = {}
        for each in fields(cls):
            if each.default is not MISSING:
                values[each.name] = each.default
            elif each.default_factory is not MISSING:
                values[each.name] = each.default_factory()
        for name, value in given.arguments.items():
            several = given.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            values |= value if several else {name: value}
        vars(engine).update(values)
        if all(hasattr(engine, each.name) for each in fields(cls)):  # else a derived class sets some itself
            engine._check()  # noqa: SLF001 - its own

    def _check(self) -> None:
        """Check the options, and those that a derived class adds."""
        for name in ("max_tokens_per_microbatch", "stages_per_rank", "num_mini_batches", "epochs", "threads"):
            value = getattr(self, name)
            if name == "threads" and value is None:
                continue
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value}", path=name, remedy="a whole number of at least 1")
        norm = self.max_grad_norm
        if norm is not None and not norm > 0:
            raise ConfigError(f"max_grad_norm is {norm}", path="max_grad_norm", remedy="positive, or None")
        if isinstance(self.compile, str) and self.compile not in torch.compiler.list_backends(()):
            known = ", ".join(torch.compiler.list_backends())
            raise ConfigError(f"compile is {self.compile!r}", path="compile", remedy=f"true, or one of {known}")
        if self.compile and (tp := MeshShape.of(self.mesh, world_size=self.world_size).tp) > 1:
            raise ConfigError(
                f"compile with mesh.tp = {tp}: torch does not trace divided products of streams of any length",
                path="compile",
                remedy="false, or a mesh without tp",
            )
        check_range("weight_decay", self.weight_decay, low=0.0)
        check_range("eps", self.eps, low=0.0, open_low=True)
        for beta in self.betas:
            check_range("betas", beta, low=0.0, high=math.nextafter(1.0, 0.0))
        for name, choices in (
            ("layout", ("auto", *get_args(Layout))),
            ("dtype", get_args(ComputeDtype)),
            ("publish_dtype", get_args(ComputeDtype)),
        ):
            if (value := getattr(self, name)) not in choices:
                raise ConfigError(f"{name} is {value!r}", path=name, remedy=f"one of {', '.join(choices)}")
        self._learning_rate()
        shape = MeshShape.of(self.mesh, world_size=self.world_size)
        if self.stages_per_rank > 1 and shape.pp == 1:
            raise ConfigError(
                f"stages_per_rank is {self.stages_per_rank}, but layers are not divided",
                path="stages_per_rank",
                remedy="1, or a mesh with pp",
            )
        check_optimizer(
            self.optimizer,
            self.optimizer_options,
            divided=self.world_size // (shape.dp_replicate * shape.pp),
            weight_decay=self.weight_decay,
            betas=self.betas,
            eps=self.eps,
        )

    def _learning_rate(self) -> LearningRate:
        return LearningRate(
            peak=self.lr,
            lr_scheduler_type=self.lr_scheduler_type,
            warmup_steps=self.warmup_steps,
            total_steps=self.total_steps,
        )

    # ------------------------------------------------------------------------------------------- save, load and export

    def save(self, folder: Path) -> None:
        """Write weights, moments and counters; replaces ``folder`` as a whole. Each rank writes its shards."""
        save_trainer(Path(folder), self._snapshot(memory=None), self._ranks, files=self.files)

    def prepare_snapshots(self) -> None:
        self._check_open()
        self._memory.prepare(self._model, self._optimizer, self._ranks)

    def snapshot(self) -> Snapshot:
        """Copy weights, moments and counters into host memory, to be written while training goes on."""
        return self._snapshot(memory=self._memory)

    def _snapshot(self, *, memory: HostMemory | None) -> Snapshot:
        self._check_open()
        return take_snapshot(
            self._model,
            self._optimizer,
            self._ranks,
            counters={"updates": self._updates, "optimizer_steps": self._optimizer_steps, "seed": self._saved_seed},
            memory=memory,
            publish_dtype=getattr(torch, self.publish_dtype),
            model_path=self.model_path,
            files=self.files,
        )

    def load(self, folder: Path) -> None:
        """Restore what :meth:`save` wrote, at any mesh. At the same one training continues bit for bit.

        Hyperparameters are this engine's; only the seed is that of the engine that saved. Nothing has been changed when
        it raises, unless a file that was whole could not be read again: then the engine can only load, or close.
        """
        self._check_awake()

        def checked() -> None:
            self._half_loaded = True

        counters = load_trainer(Path(folder), self._model, self._optimizer, self._ranks, checked=checked)
        self._half_loaded = False
        self._updates = counters["updates"]
        self._optimizer_steps = counters["optimizer_steps"]
        self._saved_seed = counters["seed"]

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder: config, weights in ``publish_dtype``, the tokenizer of ``model_path`` if any.

        With LoRA the weights have the adapters merged in; the adapters alone lie in ``adapter``, as peft reads them.
        """
        self._check_open()
        export_model(
            Path(folder),
            self._model,
            self._full_tensors(),
            self._ranks,
            dtype=getattr(torch, self.publish_dtype),
            model_path=self.model_path,
            files=self.files,
        )

    def sleep(self) -> None:
        if self._asleep:
            return
        self._check_open()
        self._optimizer.discard_gradients()
        weights: list[Tensor] = []
        for _, parameter in self._model.parameters_by_name():
            if not isinstance(parameter.data, DTensor):  # a shard has memory of its own, which only FSDP reads
                parameter.data = resizable(parameter.data)
            weights.append(local_shard(parameter))
        forget_masks()
        self._offload.release([*weights, *self._optimizer.resizable_moments()])
        self._asleep = True

    def wake(self) -> None:
        if self._asleep:
            self._offload.restore()
            self._asleep = False

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        del self._passes, self._optimizer, self._model
        self._offload.close()
        self._ranks.close()

    # --------------------------------------------------------------------------------------------- for derived engines

    def _run_mini_batches(
        self,
        partition: BatchPartition,
        *,
        token_weights: Callable[[Tensor, int, int], Tensor],
        loss_fn: LossFunction,
        extras: Extras = "none",
        epochs: int = 1,
        num_mini_batches: int = 1,
    ) -> dict[str, float]:
        """Make ``epochs`` passes over a batch, each of ``num_mini_batches`` optimizer steps.

        ``token_weights`` maps (trained tokens of each row, those of the mini-batch, its rows) to the weight of a row's
        tokens; ``loss_fn`` is that of :meth:`Passes.accumulate`. Metrics are averaged over steps:
        ``loss`` and ``grad_norm`` evenly, others by tokens; ``lr`` is that of the last step, ``tokens_trained`` and
        ``rows`` are of the batch.
        """
        check_any_tokens(partition.scored)
        steps: list[dict[str, float]] = []
        tokens_of_steps: list[int] = []
        for epoch in range(epochs):
            for rows, members in partition.mini_batches(num_mini_batches, seed=self._derived_seed(epoch)):
                mini_batch = self._passes.plan(rows, members)
                if mini_batch.tokens == 0:
                    continue
                scored = torch.zeros_like(rows.scored)  # 0 for the rows of other mini-batches
                scored[members] = rows.scored[members]
                weights = token_weights(scored, mini_batch.tokens, mini_batch.rows)
                steps.append(self._step(rows, mini_batch, weights, loss_fn=loss_fn, extras=extras))
                tokens_of_steps.append(mini_batch.tokens)
        self._updates += 1
        metrics = {
            name: _mean(
                [step[name] for step in steps], [1] * len(steps) if name in ("loss", "grad_norm") else tokens_of_steps
            )
            for name in steps[0]
        }
        return metrics | {
            "lr": steps[-1]["lr"],
            "tokens_trained": float(partition.scored),
            "rows": float(partition.rows),
        }

    def _step(
        self, rows: PackedRows, mini_batch: MiniBatch, weights: Tensor, *, loss_fn: LossFunction, extras: Extras
    ) -> dict[str, float]:
        self._optimizer.discard_gradients()  # those of a step that an error interrupted
        gradients = self._passes.accumulate(
            rows,
            mini_batch,
            weights,
            loss_fn=loss_fn,
            squared_norm=self._optimizer.squared_gradient_norm,
            extras=extras,
        )
        for name, value in (("loss", gradients.loss), ("grad_norm", gradients.norm)):
            if not math.isfinite(value):
                self._optimizer.discard_gradients()
                raise EngineError(
                    f"{name} is {value} at optimizer step {self._optimizer_steps}: only the steps before it were made. "
                    f"Look at the batch (advantages, log-probs) and at lr={self._rate.at(self._optimizer_steps):g}"
                )
        lr = self._rate.at(self._optimizer_steps)
        self._optimizer.step(lr=lr, gradient_scale=clipping_scale(gradients.norm, self.max_grad_norm))
        self._optimizer_steps += 1
        return gradients.metrics | {"loss": gradients.loss, "grad_norm": gradients.norm, "lr": lr}

    def _score(self, partition: BatchPartition, *, extras: Extras) -> tuple[Tensor, Tensor]:
        ((rows, _),) = partition.mini_batches(1, seed=0)
        scores, entropy = self._passes.score(rows, extras=extras)
        return partition.restore(scores), partition.restore(entropy)

    def _partition(self, rows: PackedRows) -> BatchPartition:
        return BatchPartition(rows, self._ranks, cost=self._cost)

    def _read(
        self,
        batch: DataProto,
        *,
        loss_mask: bool = True,
        required: Sequence[str] = (),
        optional: Sequence[str] = (),
    ) -> PackedRows:
        """Read the batch as packed rows; fail on every rank if any rank's batch cannot be used."""

        def read() -> PackedRows:
            rows = PackedRows.read(
                batch,
                vocabulary=self._model.vocabulary,
                loss_mask=loss_mask,
                required=required,
                optional=[name for name in optional if name not in required],
            )
            self._model.check_lengths(rows.lengths)
            return rows

        return self._ranks.call_together(read, doing="reading the batch", catch=InvalidDataError)

    def _published(self, tensors: _Tensors) -> _Tensors:
        return published(tensors, getattr(torch, self.publish_dtype), self._model.kept)

    def _full_tensors(self, of: Callable[[_Tensors], _Tensors] | None = None) -> _Tensors:
        """Yield full weights: ``of`` those of the module, or with adapters merged in."""
        full = full_tensors(self._model, self._ranks)
        return self._model.to_checkpoint_names(self._published((of or self._model.merged)(full)))

    def _derived_seed(self, number: int = 0) -> int:
        """Return a seed for one of the draws of this update; ``number`` is below 1024."""
        return (self._saved_seed << 40) + (self._updates << 10) + number

    def _check_open(self) -> None:
        self._check_awake()
        if self._half_loaded:
            raise EngineError("the weights are a mixture, since a checkpoint could not be read: load() one that can")

    def _check_awake(self) -> None:
        if self._closed:
            raise EngineClosedError("the training engine is closed")
        if self._asleep:
            raise EngineError("the training engine is asleep: call wake() first")


def check_any_tokens(tokens: int) -> None:
    if tokens == 0:
        raise InvalidDataError("no token to train on: loss_mask is False everywhere, on every rank")


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
