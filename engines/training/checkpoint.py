"""A trainer's state in a sealed folder, and its model in a Hugging Face folder, whatever the number of ranks.

    folder/
      manifest.json           size and checksum of every other file (asyncrl.io)
      trainer.json            counters
      model.safetensors       full float32 weights by checkpoint name
      optimizer.safetensors   full moments: exp_avg.NAME, exp_avg_sq.NAME

Tensors are gathered and written one after another, so no rank ever holds more than one full tensor beside its shards.
Any number of ranks can read them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.errors import CheckpointError
from asyncrl.io import DurableFiles, verify_folder
from engines.training.loading import model_file, place_of_shard
from engines.training.lora import adapter_tensors
from engines.training.model import PolicyModel, local_shard
from engines.training.optimizer import MOMENTS, ShardedAdamW
from engines.training.rank_group import RankGroup

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
_SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class TensorSpec(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def _spec(name: str, tensor: Tensor, *, dtype: torch.dtype | None = None) -> TensorSpec:
    return TensorSpec(name, dtype or tensor.dtype, tuple(tensor.shape))


# ------------------------------------------------------------------------------------------------- save, load, export


def save_trainer(
    folder: Path,
    model: PolicyModel,
    optimizer: ShardedAdamW,
    ranks: RankGroup,
    *,
    counters: Mapping[str, int],
    files: DurableFiles,
) -> None:
    """Write weights, moments and counters. Collective; rank 0 writes, and raises :class:`OSError` if it cannot."""
    sharded = dict(model.parameters_by_name())
    moments = optimizer.moments()
    state = {
        "model_type": model.causal_lm.config.model_type,
        "counters": dict(counters),
        "lora": model.lora.as_record() if model.lora is not None else None,
        "parameter_steps": optimizer.steps(),
    }
    _write_folder(
        folder,
        {
            _MODEL: (_weight_specs(model), (full_tensor(tensor) for _, tensor in model.tensors_by_name())),
            _OPTIMIZER: (
                _moment_specs(model, list(moments)),
                (
                    full_tensor(_sharded_like(pair[moment], sharded[name]))
                    for name, pair in moments.items()
                    for moment in MOMENTS
                ),
            ),
        },
        ranks,
        files=files,
        finish=lambda partial: files.write(partial / _STATE, _json(state)),
        sealed=True,
    )


def load_trainer(folder: Path, model: PolicyModel, optimizer: ShardedAdamW, ranks: RankGroup) -> dict[str, int]:
    """Restore what :func:`save_trainer` wrote, at any number of ranks, and return the counters. Collective.

    Raises:
        CheckpointError: the folder is missing, damaged or of another model (:class:`~asyncrl.errors.EngineError` on
            other ranks); nothing has been changed then.
    """
    parameters = dict(model.parameters_by_name())

    def checked() -> dict[str, Any]:
        if ranks.rank == 0:
            verify_folder(folder)
        state = _read_state(folder / _STATE, model)
        stepped = [name for name in parameters if name in state["parameter_steps"]]
        check_tensors(folder / _MODEL, _weight_specs(model))
        check_tensors(folder / _OPTIMIZER, _moment_specs(model, stepped))
        return state

    state = ranks.call_together(checked, doing="load", catch=CheckpointError)

    model.free_gathered()
    optimizer.discard_gradients()
    tensors = dict(model.tensors_by_name())
    with torch.no_grad():
        for tensor, value in zip(tensors.values(), read_tensors(folder / _MODEL, list(tensors)), strict=True):
            local_shard(tensor).copy_(_shard_of(value, like=tensor))
    moments: dict[str, dict[str, Tensor]] = {name: {} for name in state["parameter_steps"]}
    names = [(name, moment) for name in moments for moment in MOMENTS]
    values = read_tensors(folder / _OPTIMIZER, [f"{moment}.{name}" for name, moment in names])
    for (name, moment), value in zip(names, values, strict=True):
        moments[name][moment] = _shard_of(value, like=parameters[name]).clone()
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
    files: DurableFiles,
) -> None:
    """Write the folder of :meth:`ShardedEngine.export`. ``tensors`` are full weights by checkpoint name. Collective."""

    def finish(partial: Path) -> None:
        model.causal_lm.config.save_pretrained(partial)
        settings = json.loads((partial / "config.json").read_bytes())
        settings["dtype"] = str(dtype).removeprefix("torch.")
        settings["architectures"] = [model.architecture]
        files.write(partial / "config.json", _json(settings))
        if model.causal_lm.generation_config is not None:
            model.causal_lm.generation_config.save_pretrained(partial)
        if model.lora is not None:
            files.write(partial / "adapter" / "adapter_config.json", _json(model.lora.adapter_config(base=model_path)))
        for name in _TOKENIZER_FILES:
            if (source := model_file(model_path, name)) is not None:
                shutil.copyfile(source, partial / name)

    contents: dict[str, tuple[Sequence[TensorSpec], Iterator[Tensor]]] = {}
    if model.renamed:
        full = dict(tensors)
        contents[_MODEL] = ([_spec(name, tensor) for name, tensor in full.items()], iter(full.values()))
    else:
        empty = ((spec.name, torch.empty(spec.shape, dtype=spec.dtype, device="meta")) for spec in _weight_specs(model))
        specs = [
            _spec(name, tensor, dtype=dtype if tensor.dtype.is_floating_point else None)
            for name, tensor in model.merged(empty)
        ]
        contents[_MODEL] = (specs, (tensor for _, tensor in tensors))
    if model.lora is not None:
        adapters = list(adapter_tensors(model.tensors_by_name()))
        contents["adapter/adapter_model.safetensors"] = (
            [_spec(name, tensor) for name, tensor in adapters],
            (full_tensor(tensor) for _, tensor in adapters),
        )
    _write_folder(folder, contents, ranks, files=files, finish=finish, sealed=False)


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor. Collective. On one rank the result may be the shard's own memory."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    if tensor.device_mesh.size() == 1:  # full_tensor() would take 0.1 ms to find out
        shard = local_shard(tensor).detach()
        return shard.clone() if shard.device.type == "cpu" else shard  # what numpy reads could not be freed (Offload)
    with torch.no_grad():
        return tensor.full_tensor()


def _write_folder(
    folder: Path,
    contents: Mapping[str, tuple[Sequence[TensorSpec], Iterator[Tensor]]],
    ranks: RankGroup,
    *,
    files: DurableFiles,
    finish: Callable[[Path], None],
    sealed: bool,
) -> None:
    """Rank 0 writes, all gather. If rank 0 fails, every rank still finishes gathering before the error is raised."""
    failure: Exception | None = None
    if ranks.rank == 0:
        try:
            with files.replacing(folder, sealed=sealed) as partial:
                for name, (specs, tensors) in contents.items():
                    (partial / name).parent.mkdir(exist_ok=True)
                    write_tensors(partial / name, specs, tensors, files=files)
                finish(partial)
        except Exception as error:  # noqa: BLE001 - raised again by every rank, when the others have stopped gathering
            failure = error
    for _, tensors in contents.values():
        for _tensor in tensors:
            pass
    ranks.raise_together(failure, doing=f"writing {folder}")


def _weight_specs(model: PolicyModel) -> list[TensorSpec]:
    return [_spec(name, tensor) for name, tensor in model.tensors_by_name()]


def _moment_specs(model: PolicyModel, names: Sequence[str]) -> list[TensorSpec]:
    parameters = dict(model.parameters_by_name())
    return [_spec(f"{moment}.{name}", parameters[name]) for name in names for moment in MOMENTS]


def _read_state(path: Path, model: PolicyModel) -> dict[str, Any]:
    try:
        state = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
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


def _sharded_like(local: Tensor, sharded: Tensor) -> Tensor:
    if not isinstance(sharded, DTensor):
        return local
    return DTensor.from_local(
        local, sharded.device_mesh, sharded.placements, run_check=False, shape=sharded.shape, stride=sharded.stride()
    )


def _shard_of(value: Tensor, *, like: Tensor) -> Tensor:
    return value[place_of_shard(like)].to(like.device)


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True).encode()


# ------------------------------------------------------------------------------------------------- safetensors files


def write_tensors(path: Path, specs: Sequence[TensorSpec], tensors: Iterable[Tensor], *, files: DurableFiles) -> None:
    """Write a safetensors file, one tensor in memory at a time; ``specs`` are those of ``tensors``, in their order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # Hugging Face readers need it
    offset = 0
    for spec in specs:
        header[spec.name] = {
            "dtype": _SAFETENSORS_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.size_bytes],
        }
        offset += spec.size_bytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)

    def chunks() -> Iterator[bytes | memoryview]:
        yield len(encoded).to_bytes(8, "little")
        yield encoded
        for spec, tensor in zip(specs, tensors, strict=True):
            if tensor.dtype != spec.dtype or tuple(tensor.shape) != spec.shape:
                raise CheckpointError(f"{spec.name} was announced as {spec}, got {tensor.dtype} {tuple(tensor.shape)}")
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            yield flat.view(torch.uint8).numpy().data

    files.write_chunks(path, chunks())


def check_tensors(path: Path, specs: Sequence[TensorSpec]) -> None:
    """Raise :class:`CheckpointError` unless the file can be read and holds exactly the tensors of ``specs``."""
    expected = {spec.name: spec for spec in specs}
    with _opened(path) as file:
        found = set(file.keys())
        if missing := sorted(expected.keys() - found):
            raise CheckpointError(f"{path} is of another model: it has no {missing[0]} (nor {len(missing) - 1} others)")
        if surplus := sorted(found - expected.keys()):
            raise CheckpointError(f"{path} is of another model: it has {surplus[0]} (and {len(surplus) - 1} others)")
        for name, spec in expected.items():
            piece = file.get_slice(name)
            if tuple(piece.get_shape()) != spec.shape or piece.get_dtype() != _SAFETENSORS_NAMES[spec.dtype]:
                raise CheckpointError(
                    f"{path} is of another model: {name} is {piece.get_dtype()} {tuple(piece.get_shape())}, "
                    f"here it is {_SAFETENSORS_NAMES[spec.dtype]} {spec.shape}"
                )


def read_tensors(path: Path, names: Sequence[str]) -> Iterator[Tensor]:
    with _opened(path) as file:
        for name in names:
            yield file.get_tensor(name)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(str(path), framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
