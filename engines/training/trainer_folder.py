"""Model and optimizer to and from a folder, whatever the number of ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from asyncrl.errors import CheckpointError
from engines.training import checkpoint
from engines.training.checkpoint import TensorSpec
from engines.training.lora import adapter_tensors
from engines.training.model import PolicyModel, local_shard
from engines.training.optimizer import MOMENTS, ShardedAdamW
from engines.training.rank_group import RankGroup

__all__ = ["export_model", "full_tensor", "load_trainer", "model_file", "save_trainer"]

_MODEL = "model.safetensors"
_OPTIMIZER = "optimizer.safetensors"
_STATE = "trainer.json"

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor. Collective. On one rank it may be the shard's own memory."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    if tensor.device_mesh.size() == 1:
        return local_shard(tensor).detach()  # full_tensor() would take 0.1 ms to find out
    with torch.no_grad():
        return tensor.full_tensor()


def save_trainer(
    folder: Path, model: PolicyModel, optimizer: ShardedAdamW, ranks: RankGroup, *, counters: Mapping[str, int]
) -> None:
    """Write weights, moments and counters. Collective; rank 0 writes.

    Raises:
        OSError: the folder cannot be written (on rank 0; :class:`~asyncrl.errors.EngineError` on the others).
    """
    sharded = dict(model.parameters_by_name())
    moments = optimizer.moments()
    state = {
        "model_type": model.causal_lm.config.model_type,
        "counters": dict(counters),
        "lora": model.lora.as_record() if model.lora is not None else None,
        "parameter_steps": optimizer.steps(),
    }

    def finish(partial: Path) -> None:
        checkpoint.write_json(partial / _STATE, state)
        checkpoint.seal(partial)

    _write_folder(
        folder,
        {
            _MODEL: (_weight_specs(model), (full_tensor(tensor) for _, tensor in model.tensors_by_name())),
            _OPTIMIZER: (
                _moment_specs(model, list(moments)),
                (
                    full_tensor(_like(pair[moment], sharded[name]))
                    for name, pair in moments.items()
                    for moment in MOMENTS
                ),
            ),
        },
        ranks,
        finish=finish,
    )


def load_trainer(folder: Path, model: PolicyModel, optimizer: ShardedAdamW, ranks: RankGroup) -> dict[str, int]:
    """Counterpart of :func:`save_trainer`, at any number of ranks. Returns the counters. Collective.

    Raises:
        CheckpointError: missing, damaged or of another model; nothing has been changed then.
        EngineError: that happened on another rank.
    """
    failure: CheckpointError | None = None
    state: dict[str, Any] = {}
    parameters = dict(model.parameters_by_name())
    try:
        if ranks.rank == 0:
            checkpoint.verify(folder)
        state = _read_state(folder / _STATE, model)
        stepped = [name for name in parameters if name in state["parameter_steps"]]
        checkpoint.check_tensors(folder / _MODEL, _weight_specs(model))
        checkpoint.check_tensors(folder / _OPTIMIZER, _moment_specs(model, stepped))
    except CheckpointError as error:
        failure = error
    ranks.agree(failure, doing="load")

    model.free_gathered()
    optimizer.discard_gradients()
    tensors = dict(model.tensors_by_name())
    with torch.no_grad():
        for (name, tensor), value in zip(
            tensors.items(), checkpoint.read_tensors(folder / _MODEL, list(tensors)), strict=True
        ):
            local_shard(tensors[name]).copy_(_part_of(value, like=tensor))
    moments: dict[str, dict[str, Tensor]] = {name: {} for name in state["parameter_steps"]}
    names = [(name, moment) for name in moments for moment in MOMENTS]
    values = checkpoint.read_tensors(folder / _OPTIMIZER, [f"{moment}.{name}" for name, moment in names])
    for (name, moment), value in zip(names, values, strict=True):
        moments[name][moment] = _part_of(value, like=parameters[name]).clone()
    optimizer.restore(moments, state["parameter_steps"])
    counters: dict[str, int] = state["counters"]
    return counters


def export_model(
    folder: Path,
    model: PolicyModel,
    tensors: Iterable[tuple[str, Tensor]],
    ranks: RankGroup,
    *,
    dtype: torch.dtype,
    model_path: str,
) -> None:
    """Write a Hugging Face folder: config, weights, and the tokenizer of ``model_path`` if it has one.

    Args:
        folder: replaced as a whole.
        model: gives config and shapes.
        tensors: full weights by checkpoint name. Collective.
        ranks: rank 0 writes.
        dtype: of the floating weights, for the config.
        model_path: folder or hub id the tokenizer is copied from.
    """

    def finish(partial: Path) -> None:
        model.causal_lm.config.save_pretrained(partial)
        settings = checkpoint.read_json(partial / "config.json")
        settings["dtype"] = str(dtype).removeprefix("torch.")
        settings["architectures"] = [model.architecture]
        checkpoint.write_json(partial / "config.json", settings)
        if model.causal_lm.generation_config is not None:
            model.causal_lm.generation_config.save_pretrained(partial)
        if model.lora is not None:
            checkpoint.write_json(
                partial / "adapter" / "adapter_config.json", model.lora.adapter_config(base=model_path)
            )
        for name in _TOKENIZER_FILES:
            if (source := model_file(model_path, name)) is not None:
                shutil.copyfile(source, partial / name)

    files: dict[str, tuple[Sequence[TensorSpec], Iterator[Tensor]]] = {}
    if model.lora is not None:
        adapters = list(adapter_tensors(model.tensors_by_name()))
        files["adapter/adapter_model.safetensors"] = (
            [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in adapters],
            (full_tensor(tensor) for _, tensor in adapters),
        )
    if model.renamed:
        whole = dict(tensors)
        specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in whole.items()]
        values: Iterator[Tensor] = iter(whole.values())
    else:
        shapes = (
            (spec.name, torch.empty(spec.shape, dtype=spec.dtype, device="meta")) for spec in _weight_specs(model)
        )
        specs = [
            TensorSpec(name, dtype if shape.dtype.is_floating_point else shape.dtype, tuple(shape.shape))
            for name, shape in model.merged(shapes)
        ]
        values = (tensor for _, tensor in tensors)
    _write_folder(folder, {_MODEL: (specs, values)} | files, ranks, finish=finish)


def _write_folder(
    folder: Path,
    files: Mapping[str, tuple[Sequence[TensorSpec], Iterator[Tensor]]],
    ranks: RankGroup,
    *,
    finish: Callable[[Path], None],
) -> None:
    """Rank 0 writes, all gather; if rank 0 fails, the gathering still ends on every rank before the error is raised."""
    failure: Exception | None = None
    if ranks.rank == 0:
        try:
            with checkpoint.replace_folder(folder) as partial:
                for name, (specs, tensors) in files.items():
                    (partial / name).parent.mkdir(exist_ok=True)
                    checkpoint.write_tensors(partial / name, specs, tensors, metadata={"format": "pt"})
                finish(partial)
        except Exception as error:  # noqa: BLE001 - raised again by every rank, when the others have stopped gathering
            failure = error
    for _, tensors in files.values():
        for _tensor in tensors:
            pass
    ranks.agree(failure, doing=f"writing {folder}")


def _weight_specs(model: PolicyModel) -> list[TensorSpec]:
    return [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in model.tensors_by_name()]


def _moment_specs(model: PolicyModel, names: Sequence[str]) -> list[TensorSpec]:
    parameters = dict(model.parameters_by_name())
    return [
        TensorSpec(f"{moment}.{name}", parameters[name].dtype, tuple(parameters[name].shape))
        for name in names
        for moment in MOMENTS
    ]


def _read_state(path: Path, model: PolicyModel) -> dict[str, Any]:
    state = checkpoint.read_json(path)
    if not isinstance(state, dict) or not {"model_type", "counters", "parameter_steps"} <= state.keys():
        raise CheckpointError(f"{path} is not the state of a trainer")
    if state["model_type"] != model.causal_lm.config.model_type:
        raise CheckpointError(
            f"{path} is of another model: a {state['model_type']}, here it is a {model.causal_lm.config.model_type}"
        )
    here = model.lora.as_record() if model.lora is not None else None
    if (there := state.get("lora")) != here:
        raise CheckpointError(f"{path} was written with lora = {there}, here it is {here}")
    return state


def _like(local: Tensor, sharded: Tensor) -> Tensor:
    """A local tensor as the shard of a tensor that is distributed like ``sharded``."""
    if not isinstance(sharded, DTensor):
        return local
    return DTensor.from_local(
        local, sharded.device_mesh, sharded.placements, run_check=False, shape=sharded.shape, stride=sharded.stride()
    )


def _part_of(value: Tensor, *, like: Tensor) -> Tensor:
    """This rank's part of a full tensor."""
    if not isinstance(like, DTensor):
        return value.to(like.device)
    value = value.to(like.device_mesh.device_type)
    return local_shard(distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None))


def model_file(model_path: str, name: str) -> Path | None:
    """A file of a model's folder, or of its repository on the hub; None if it has none of that name."""
    if (folder := Path(model_path)).is_dir():
        return folder / name if (folder / name).is_file() else None
    from transformers.utils.hub import cached_file

    found = cached_file(
        model_path,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)
