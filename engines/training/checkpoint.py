"""A trainer's state in a sealed folder that any mesh can read, and its model in a Hugging Face folder.

    folder/
      manifest.json            size and checksum of every other file (asyncrl.io)
      trainer.json             counters
      rank-00000.safetensors   shards that rank 0 holds, of weights (NAME) and moments (exp_avg.NAME, exp_avg_sq.NAME);
      rank-00001.safetensors   the header says where in the whole tensor each one lies

Each rank writes its shards and reads those parts of all files that lie in its shards, so no rank ever holds more than
one full tensor beside its own. Ranks that hold the same shard take turns. A :class:`Snapshot` is written by another
thread while training goes on: nothing in it needs the other ranks. To export it, rank 0 also holds a megabyte of full
tensors for each file.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.errors import CheckpointError
from asyncrl.io import DurableFiles, FileEntry, partial_name, verify_folder
from asyncrl.storage import origin
from engines.training.loading import Piece, model_file, place_of_shard, read_parts, targets_by_file
from engines.training.lora import adapter_tensors, is_adapter
from engines.training.model import PolicyModel, local_shard
from engines.training.offload import host_memory
from engines.training.optimizer import ShardedOptimizer
from engines.training.rank_group import RankGroup

_MODEL = "model.safetensors"
_STATE = "trainer.json"
_PLACES = "places"
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
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _SAFETENSORS_NAMES.items()}


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


_Moments: TypeAlias = dict[str, dict[str, Tensor]]

_Place: TypeAlias = Mapping[str, Sequence[int]]
"""``start`` of a shard in the whole tensor, and the ``shape`` of that."""


@dataclass(kw_only=True)
class HostMemory:
    """What snapshots are copied into, one after the other: new memory, pinned or not, takes longer than the copy."""

    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    in_use: threading.Lock = field(default_factory=threading.Lock)  # by the thread that writes
    owner: Snapshot | None = None  # the last to copy
    divided: tuple[list[str], dict[str, _Place]] = field(default=([], {}))  # of these tensors this rank writes those

    def prepare(self, model: PolicyModel, optimizer: ShardedOptimizer, ranks: RankGroup) -> None:
        """Allocate this memory before the first step, also for the moments that will be there after it. Collective.

        Where there is too little, the snapshot raises the error.
        """
        moments: _Moments = {}
        for name in (name for name, parameter in model.parameters_by_name() if parameter.requires_grad):
            parts = optimizer.empty_moments([name])[name]  # of one at a time: this is memory of the device
            moments[name] = {key: part.to("meta") for key, part in parts.items()}
        shards, _ = _shards_to_write(model, moments, ranks, self)
        with self.in_use, suppress(RuntimeError):
            for new in self._allocate(shards):
                new.zero_()  # the kernel finds a page for it when it is written to

    def copy(self, shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self._allocate(shards)
        for name, shard in shards.items():
            self.tensors[name].copy_(shard, non_blocking=True)
        for device in {shard.device for shard in shards.values() if shard.is_cuda}:
            torch.cuda.synchronize(device)
        return {name: self.tensors[name] for name in shards}

    def _allocate(self, shards: Mapping[str, Tensor]) -> list[Tensor]:
        """Allocate memory for the shards that have none, and return it."""
        new = {name: shard for name, shard in shards.items() if not _alike(self.tensors.get(name), shard)}
        pinned = any(shard.is_cuda for shard in shards.values())
        memory = host_memory([shard.nbytes for shard in new.values()], pinned=pinned)
        for (name, shard), held in zip(new.items(), memory, strict=True):
            self.tensors[name] = held.view(shard.dtype).view(shard.shape)
        return memory


def _alike(held: Tensor | None, shard: Tensor) -> bool:
    return held is not None and held.shape == shard.shape and held.dtype == shard.dtype


@dataclass(kw_only=True, eq=False)
class Snapshot:
    """This rank's part of a trainer's state (:class:`~asyncrl.interfaces.Snapshot`).

    Attributes:
        shards: those that this rank writes, by name; ``places`` are where they begin, and the whole tensor's shape.
        weights: of the whole model, in order.
    """

    state: Mapping[str, Any]
    shards: Mapping[str, Tensor]
    places: Mapping[str, _Place]
    weights: Sequence[TensorSpec]
    model: PolicyModel
    rank: int
    publish_dtype: torch.dtype
    model_path: str
    files: DurableFiles
    memory: HostMemory | None  # None: the shards are the engine's own

    def write(self, folder: Path) -> dict[str, FileEntry]:
        """Write this rank's files; return size and checksum of each by name.

        Raises:
            CheckpointError: a later snapshot has taken the memory of this one.
            OSError: a file cannot be written.
        """
        if self.memory is None:
            return self._write(folder)
        with self.memory.in_use:
            if self.memory.owner is not self:
                raise CheckpointError(f"{folder} was not written before the next snapshot was taken")
            return self._write(folder)

    def _write(self, folder: Path) -> dict[str, FileEntry]:
        name = f"rank-{self.rank:05d}.safetensors"
        specs = [_spec(key, shard) for key, shard in self.shards.items()]
        tensors = (shard.clone() if self.memory is None else shard for shard in self.shards.values())
        places = {_PLACES: json.dumps(self.places, separators=(",", ":"))}
        entries = {name: write_tensors(folder / name, specs, tensors, files=self.files, metadata=places)}
        if self.rank == 0:
            entries[_STATE] = self.files.write(folder / _STATE, _json(self.state))
        return entries

    def export(self, saved: Path, folder: Path) -> None:
        """Write the folder of :meth:`ShardedEngine.export` from what all ranks have written to ``saved``."""
        written = SavedTensors(saved)
        full = written.full(self.weights)
        merged = self.model.to_checkpoint_names(published(self.model.merged(full), self.publish_dtype, self.model.kept))
        of_adapters = adapter_tensors((spec.name, spec) for spec in self.weights)
        adapters = (tensor for _, tensor in written.full(spec for _, spec in of_adapters))
        contents = _model_contents(self.model, self.weights, merged, adapters, dtype=self.publish_dtype)
        finish = _model_settings(self.model, dtype=self.publish_dtype, model_path=self.model_path, files=self.files)
        _write_model(folder, contents, files=self.files, finish=finish)


def take_snapshot(
    model: PolicyModel,
    optimizer: ShardedOptimizer,
    ranks: RankGroup,
    *,
    counters: Mapping[str, int],
    memory: HostMemory | None,
    publish_dtype: torch.dtype,
    model_path: str,
    files: DurableFiles,
) -> Snapshot:
    """Copy what this rank writes into ``memory``; None: the snapshot is to be written before anything changes.

    Collective. Waits while the snapshot before is being written.
    """
    held, places = _shards_to_write(model, optimizer.moments(), ranks, memory)
    snapshot = Snapshot(
        state={
            "model_type": model.causal_lm.config.model_type,
            "counters": dict(counters),
            "lora": model.lora.as_record() if model.lora is not None else None,
            "optimizer": optimizer.name,
            "parameter_steps": _all_steps(model, optimizer, ranks),
        },
        shards=held,
        places=places,
        weights=[_spec(name, tensor) for name, tensor in model.described().items()],
        model=model,
        rank=ranks.rank,
        publish_dtype=publish_dtype,
        model_path=model_path,
        files=files,
        memory=memory,
    )
    if memory is not None:
        with memory.in_use:
            memory.owner, snapshot.shards = snapshot, memory.copy(held)
    return snapshot


def save_trainer(folder: Path, snapshot: Snapshot, ranks: RankGroup, *, files: DurableFiles) -> None:
    """Write a folder with the parts of all ranks and seal it; it takes the place of ``folder``. Collective.

    Raises:
        OSError: a file cannot be written (:class:`~asyncrl.errors.EngineError` on other ranks).
    """
    partial = partial_name(folder.absolute())

    def together(function: Callable[[], Any], *, first: bool = True) -> None:
        ranks.call_together(lambda: function() if not first or ranks.rank == 0 else None, doing=f"writing {folder}")

    try:
        together(lambda: files.make_folder(partial))
        together(lambda: snapshot.write(partial), first=False)
        together(lambda: files.seal(partial))
        together(lambda: files.replace(partial, folder.absolute()))
    except Exception:
        if ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def load_trainer(
    folder: Path, model: PolicyModel, optimizer: ShardedOptimizer, ranks: RankGroup, *, checked: Callable[[], None]
) -> dict[str, int]:
    """Restore what :func:`save_trainer` wrote, at any mesh, and return the counters. Collective; ranks share the check.

    ``checked`` is called before anything is changed.

    Raises:
        CheckpointError: the folder is missing, damaged or of another model (:class:`~asyncrl.errors.EngineError` on
            other ranks); after ``checked`` a file that was whole could not be read again.
    """
    parameters, described = dict(model.parameters_by_name()), model.described()

    def check() -> tuple[dict[str, Any], SavedTensors, _Moments]:
        verify_folder(folder, part=ranks.rank, parts=ranks.world_size)
        state = _read_state(folder / _STATE, model)
        if (there := state.get("optimizer", "adamw")) != optimizer.name:
            raise CheckpointError(f"{folder} was written with optimizer = {there}, here it is {optimizer.name}")
        saved = SavedTensors(folder)
        moments = optimizer.empty_moments(name for name in parameters if name in state["parameter_steps"])
        specs = [_spec(name, tensor) for name, tensor in described.items()]
        for name, parts in moments.items():
            for key, part in parts.items():
                alike = part.shape == local_shard(parameters[name]).shape
                specs.append(_spec(f"{key}.{name}", parameters[name] if alike else part, dtype=part.dtype))
        saved.check(specs, moments_elsewhere=described.keys() - parameters.keys())
        return state, saved, moments

    state, saved, moments = ranks.call_together(check, doing="load", catch=CheckpointError)

    checked()
    model.free_gathered()
    optimizer.discard_gradients()
    targets = {name: (local_shard(tensor), place_of_shard(tensor)) for name, tensor in model.tensors_by_name()}
    for name, parts in moments.items():
        for key, part in parts.items():
            alike = part.shape == local_shard(parameters[name]).shape
            targets[f"{key}.{name}"] = part, place_of_shard(parameters[name] if alike else part)
    with torch.no_grad():
        ranks.call_together(lambda: saved.read(targets), doing="load", catch=CheckpointError)
    optimizer.restore(moments, {name: state["parameter_steps"][name] for name in moments})
    counters: dict[str, int] = state["counters"]
    return counters


def export_model(
    folder: Path,
    model: PolicyModel,
    tensors: Iterator[tuple[str, Tensor]],
    ranks: RankGroup,
    *,
    dtype: torch.dtype,
    model_path: str,
    files: DurableFiles,
) -> None:
    """Write the folder of :meth:`ShardedEngine.export`. ``tensors`` are full weights by checkpoint name.

    Collective. If rank 0, which writes, fails, every rank still finishes gathering before the error is raised.
    """
    weights = model.described()
    specs = [_spec(name, tensor) for name, tensor in weights.items()]
    adapters = (tensor for _, tensor in adapter_tensors(full_tensors(model, ranks, of=is_adapter)))
    contents = _model_contents(model, specs, tensors, adapters, dtype=dtype)
    failure: Exception | None = None
    if ranks.rank == 0:
        finish = _model_settings(model, dtype=dtype, model_path=model_path, files=files)
        try:
            _write_model(folder, contents, files=files, finish=finish)
        except Exception as error:  # noqa: BLE001 - raised again by every rank, when the others have stopped gathering
            failure = error
    for _, gathered in contents.values():
        for _tensor in gathered:
            pass
    ranks.raise_together(failure, doing=f"writing {folder}")


_Contents: TypeAlias = Mapping[str, tuple[Sequence[TensorSpec], Iterator[Tensor]]]


def _model_contents(
    model: PolicyModel,
    specs: Sequence[TensorSpec],
    tensors: Iterator[tuple[str, Tensor]],
    adapters: Iterator[Tensor],
    *,
    dtype: torch.dtype,
) -> _Contents:
    """Return the tensors of an export's files; ``specs`` are those of the module's."""

    def empty() -> Iterator[tuple[str, Tensor]]:
        return ((spec.name, torch.empty(spec.shape, dtype=spec.dtype, device="meta")) for spec in specs)

    all_published = published(model.merged(empty()), dtype, model.kept)
    specs_of_model = [_spec(name, tensor) for name, tensor in model.to_checkpoint_names(all_published)]
    yielded = iter(tensor for _, tensor in tensors)
    contents: dict[str, tuple[Sequence[TensorSpec], Iterator[Tensor]]] = {_MODEL: (specs_of_model, yielded)}
    if model.lora is not None:
        specs_of_adapters = [_spec(name, tensor) for name, tensor in adapter_tensors(empty())]
        contents["adapter/adapter_model.safetensors"] = (specs_of_adapters, adapters)
    return contents


def _model_settings(
    model: PolicyModel, *, dtype: torch.dtype, model_path: str, files: DurableFiles
) -> Callable[[Path], None]:
    def finish(partial: Path) -> None:
        model.causal_lm.config.save_pretrained(partial)
        settings = json.loads((partial / "config.json").read_bytes())
        settings["dtype"] = str(dtype).removeprefix("torch.")
        settings["architectures"] = [model.architecture]
        files.write(partial / "config.json", _json(settings))
        if model.causal_lm.generation_config is not None:
            model.causal_lm.generation_config.save_pretrained(partial)
        if model.lora is not None:
            config = model.lora.adapter_config(base=origin(model_path))
            files.write(partial / "adapter" / "adapter_config.json", _json(config))
        for name in _TOKENIZER_FILES:
            if (source := model_file(model_path, name)) is not None:
                shutil.copyfile(source, partial / name)

    return finish


def _write_model(folder: Path, contents: _Contents, *, files: DurableFiles, finish: Callable[[Path], None]) -> None:
    with files.replacing(folder, sealed=False) as partial:
        for name, (specs, tensors) in contents.items():
            (partial / name).parent.mkdir(exist_ok=True)
            write_tensors(partial / name, specs, tensors, files=files)
        finish(partial)


def published(
    tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype, kept: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors with floating ones in ``dtype``; those named in ``kept`` as they are."""
    return ((name, full.to(dtype) if full.is_floating_point() and name not in kept else full) for name, full in tensors)


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor. Collective. On a device the result may be the memory of the shard, if that is all."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    shard = local_shard(tensor).detach()
    with torch.no_grad():  # of one rank, full_tensor() would take 0.1 ms to find out
        full = shard if tensor.device_mesh.size() == 1 else tensor.full_tensor()
    if full.is_cpu and full.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr():
        return full.clone()  # what numpy reads could not be freed (Offload)
    return full


def full_tensors(
    model: PolicyModel, ranks: RankGroup, *, of: Callable[[str], bool] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of a model one at a time, gathered, under the module's names: those ``of`` accepts. Collective."""
    mine = ((name, tensor) for name, tensor in model.tensors_by_name() if of is None or of(name))
    if model.pipeline is None:
        yield from ((name, full_tensor(tensor)) for name, tensor in mine)
        return
    held = dict(mine)
    for name, (place, empty) in model.pipeline.places.items():
        if of is not None and not of(name):
            continue
        is_mine = model.pipeline.group.rank() == place
        full = full_tensor(held[name]) if is_mine else torch.empty_like(empty, device=ranks.device)
        yield name, ranks.from_stage(full, place)


def _all_steps(model: PolicyModel, optimizer: ShardedOptimizer, ranks: RankGroup) -> dict[str, int]:
    """Return the optimizer's steps of the parameters of all stages. Collective."""
    steps = optimizer.steps()
    if model.pipeline is None:
        return steps
    shares = [steps.get(name, 0) / ranks.stage_size for name in model.pipeline.places]
    summed = zip(model.pipeline.places, ranks.sum_over_all(shares), strict=True)
    return {name: round(count) for name, count in summed if count}


def _shards_to_write(
    model: PolicyModel, moments: _Moments, ranks: RankGroup, memory: HostMemory | None
) -> tuple[dict[str, Tensor], Mapping[str, _Place]]:
    """Return the shards that this rank writes, and where they lie. Collective, unless ``memory`` has that already."""
    weights = dict(model.tensors_by_name())
    sharded = dict(weights)
    shards = {name: local_shard(tensor).detach() for name, tensor in weights.items()}
    for name, state in moments.items():
        for key, part in state.items():  # those of another shape are whole on every rank
            alike = part.shape == shards[name].shape
            sharded[f"{key}.{name}"], shards[f"{key}.{name}"] = weights[name] if alike else part, part
    if memory is not None and memory.divided[0] == list(sharded):
        return {name: shards[name] for name in memory.divided[1]}, memory.divided[1]
    places = {name: place_of_shard(tensor) for name, tensor in sharded.items()}
    numbers = [[number for part in place for number in (part.start, part.stop)] for place in places.values()]
    everywhere = ranks.gather_from_stage([number for place in numbers for number in place])
    mine: dict[str, _Place] = {}
    begin = 0
    for turn, (name, place) in enumerate(zip(places, numbers, strict=True)):
        holders = [rank for rank, theirs in enumerate(everywhere) if theirs[begin : begin + len(place)] == place]
        empty = any(part.start == part.stop for part in places[name])
        if holders[turn % len(holders)] == ranks.stage_rank and not (empty and sharded[name].numel()):
            mine[name] = {"start": [part.start for part in places[name]], "shape": list(sharded[name].shape)}
        begin += len(place)
    if memory is not None:
        memory.divided = list(sharded), mine
    return {name: shards[name] for name in mine}, mine


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


def _is_moment_of(name: str, parameters: Collection[str]) -> bool:
    return any(name[at + 1 :] in parameters for at, letter in enumerate(name) if letter == ".")


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True).encode()


# ------------------------------------------------------------------------------------------------- safetensors files


def write_tensors(
    path: Path,
    specs: Sequence[TensorSpec],
    tensors: Iterable[Tensor],
    *,
    files: DurableFiles,
    metadata: Mapping[str, str] | None = None,
) -> FileEntry:
    """Write a safetensors file, one tensor in memory at a time; ``specs`` are those of ``tensors``, in their order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}  # Hugging Face readers need it
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

    return files.write_chunks(path, chunks())


_OPENED_FOR_BYTES = 1 << 20


class SavedTensors:
    """The tensors in a folder of :func:`save_trainer`, in whatever rank's files their pieces lie.

    Raises:
        CheckpointError: a file cannot be read, or is none of a trainer.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pieces: dict[str, list[Piece]] = {}
        self.specs: dict[str, TensorSpec] = {}
        paths = sorted(folder.glob("rank-*.safetensors"))
        self._files = len(paths)
        for path in paths:
            with _readable(path), safe_open(str(path), framework="pt") as file:
                for name, place in json.loads(file.metadata()[_PLACES]).items():
                    piece = file.get_slice(name)
                    self.specs[name] = TensorSpec(name, _DTYPES[piece.get_dtype()], tuple(place["shape"]))
                    self._pieces.setdefault(name, []).append(
                        Piece(path, name, tuple(place["start"]), tuple(piece.get_shape()))
                    )

    def check(self, specs: Sequence[TensorSpec], *, moments_elsewhere: Collection[str] = ()) -> None:
        """Raise :class:`CheckpointError` unless there are exactly the tensors of ``specs``, with all their parts.

        Moments of ``moments_elsewhere``, parameters of other stages, may be there, too.
        """
        expected = {spec.name: spec for spec in specs}
        found = {name for name in self.specs if name in expected or not _is_moment_of(name, moments_elsewhere)}
        other = f"{self._folder} is of another model"
        if missing := sorted(expected.keys() - found):
            raise CheckpointError(f"{other}: it has no {missing[0]} (nor {len(missing) - 1} others)")
        if surplus := sorted(found - expected.keys()):
            raise CheckpointError(f"{other}: it has {surplus[0]} (and {len(surplus) - 1} others)")
        for name, spec in expected.items():
            if (saved := self.specs[name]) != spec:
                raise CheckpointError(f"{other}: {name} is {saved.dtype} {saved.shape}, here {spec.dtype} {spec.shape}")
            self._check_parts(spec)

    def _check_parts(self, spec: TensorSpec) -> None:
        there = sum(torch.Size(piece.sizes).numel() for piece in self._pieces.get(spec.name, ()))
        if there != torch.Size(spec.shape).numel():
            raise CheckpointError(f"{self._folder} is damaged: a part of {spec.name} is missing")

    def read(self, targets: Mapping[str, tuple[Tensor, tuple[slice, ...]]]) -> None:
        """Copy parts of tensors into ``targets``: (memory to fill, where it lies in the whole) by name."""
        for path, parts in targets_by_file(targets, self._pieces).items():
            with _readable(path):
                read_parts(path, parts)

    def full(self, specs: Iterable[TensorSpec]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors by name, in the host's memory; raise a CheckpointError if a part of one is missing.

        A file is opened anew for some tensors, so that it gives :data:`_OPENED_FOR_BYTES` on average.
        """

        def read() -> Iterator[tuple[str, Tensor]]:
            self.read({name: (tensor, place_of_shard(tensor)) for name, tensor in tensors.items()})
            for name in list(tensors):
                yield name, tensors.pop(name)

        tensors: dict[str, Tensor] = {}
        for spec in specs:
            self._check_parts(spec)
            tensors[spec.name] = torch.empty(spec.shape, dtype=spec.dtype)
            if sum(tensor.nbytes for tensor in tensors.values()) >= self._files * _OPENED_FOR_BYTES:
                yield from read()
        yield from read()


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
