"""Models whose weights every rank reads for itself: made without memory, sharded, then filled from safetensors files.

    empty_causal_lm     parameters without memory (torch's meta device), buffers as the model's own code computes them
    small_causal_lm     a twin with few layers and random weights, by which the model's code is judged meanwhile
    WeightFiles         names and shapes checked by the files' headers, before any memory is asked for
    fill                memory for the shards, and the part of each tensor that lies in them

No rank holds more than its shards and a piece of :data:`PIECE_BYTES`, however large a tensor is.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from asyncrl.errors import ConfigError
from engines.training.quantised import SCALES, quantised

PIECE_BYTES = 8 << 20
"""What is read before a file is mapped anew: pages that were read stay in a process's memory while it is mapped."""

_TWIN_VOCABULARY = 256


def model_file(model_path: str, name: str) -> Path | None:
    """Find a file of a model's folder, or of its repository on the hub; None if there is none of that name."""
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


class WeightFiles:
    """The tensors of a model, in the pieces that its safetensors files have of each.

    Raises:
        ConfigError: a file that the index names is missing, or one cannot be read.
    """

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._pieces: dict[str, list[Piece]] = {}
        for path in dict.fromkeys(files.values()):
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118  # no mapping
                    if files.get(name) == path:
                        shape = tuple(file.get_slice(name).get_shape())
                        self._pieces[name] = [Piece(path, name, (0,) * len(shape), shape)]

    @staticmethod
    def of(model_path: str) -> WeightFiles | None:
        """Find the files of a model; None if its weights are not in safetensors files."""
        index = model_file(model_path, "model.safetensors.index.json")
        if index is None:
            path = model_file(model_path, "model.safetensors")
            if path is None:
                return None
            with _opened(path) as file:
                return WeightFiles(dict.fromkeys(file.keys(), path))
        try:
            names: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        except (ValueError, KeyError) as error:
            raise _unusable(f"{index} cannot be read: {error!r}") from error
        found = {name: model_file(model_path, name) for name in dict.fromkeys(names.values())}
        if missing := [name for name, path in found.items() if path is None]:
            raise _unusable(f"{model_path} has no {missing[0]}, which its index names")
        return WeightFiles({name: path for name, file in names.items() if (path := found[file]) is not None})

    def fuse(self, causal_lm: Any) -> bool:
        """Have the tensors of files where the model has them, stacked and joined to one; False if it does more to them.

        So are experts: transformers has one tensor for those of a layer. The model knows how to write them apart again.
        """
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            Concatenate,
            MergeModulelist,
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        conversions = get_model_conversion_mapping(causal_lm, add_legacy=False)
        renamings = [each for each in conversions if type(each) is WeightRenaming]
        converters = [each for each in conversions if type(each) is WeightConverter]
        fused = [(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]
        if len(renamings) + len(converters) < len(conversions) or any(
            [(type(step), getattr(step, "dim", None)) for step in each.operations] not in fused for each in converters
        ):
            return False
        order = [pattern for each in converters for pattern in each.source_patterns]
        found: dict[str, dict[str | None, list[Piece]]] = {}
        for name in sorted(self._pieces, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters)
            found.setdefault(target, {}).setdefault(pattern, []).extend(self._pieces[name])
        self._pieces = {}
        for target, by_pattern in found.items():
            column = 0
            for pattern in sorted(by_pattern, key=lambda each: -1 if each is None else order.index(each)):
                pieces = by_pattern[pattern]
                if pattern is not None:
                    pieces = [
                        replace(each, start=(row, column, *each.start[1:]), sizes=(1, *each.sizes), is_row=True)
                        for row, each in enumerate(pieces)
                    ]
                    column += pieces[0].sizes[1]
                self._pieces.setdefault(target, []).extend(pieces)
        causal_lm._weight_conversions = [each for each in conversions if each.was_used()]  # noqa: SLF001  # as from_pretrained
        return True

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise :class:`ConfigError` unless the files have these tensors, of these shapes."""
        for name, shape in shapes.items():
            pieces = self._pieces.get(name)
            if not pieces:
                raise _unusable(f"the weights: there is no tensor {name}")
            ends = [map(sum, zip(each.start, each.sizes, strict=True)) for each in pieces]
            if (found := tuple(map(max, zip(*ends, strict=True)))) != shape:
                raise _unusable(f"{pieces[0].path}: {name} is {found}, the model's is {shape}")
            if sum(math.prod(each.sizes) for each in pieces) != math.prod(shape):
                raise _unusable(f"{pieces[0].path}: parts of {name} are missing")

    def read(self, targets: Mapping[str, tuple[Tensor, tuple[slice, ...]]]) -> None:
        """Copy parts of tensors into ``targets``: (memory to fill, where it lies in the whole) by name."""
        for path, parts in targets_by_file(targets, self._pieces).items():
            with _usable(path):
                read_parts(path, parts)


Target: TypeAlias = tuple[str, Tensor, tuple[slice, ...]]
"""The name of a tensor in a file, memory to fill, and where in that tensor it lies."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor in a file that is part of another: where it begins there, and its sizes."""

    path: Path
    name: str
    start: tuple[int, ...]
    sizes: tuple[int, ...]
    is_row: bool = False  # of the other; it has a dimension less then

    def shared_with(self, place: Sequence[slice]) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """Return where the common part is in this piece and in ``place``; None if there is none."""
        here: list[slice] = []
        there: list[slice] = []
        for start, size, wanted in zip(self.start, self.sizes, place, strict=True):
            low, high = max(start, wanted.start), min(start + size, wanted.stop)
            if low >= high:
                return None
            here.append(slice(low - start, high - start))
            there.append(slice(low - wanted.start, high - wanted.start))
        return tuple(here), tuple(there)


def targets_by_file(
    targets: Mapping[str, tuple[Tensor, tuple[slice, ...]]], pieces: Mapping[str, Sequence[Piece]]
) -> dict[Path, list[Target]]:
    """Return what each file has of ``targets``: (memory to fill, where it lies in the whole) by name."""
    found: dict[Path, list[Target]] = {}
    for name, (memory, place) in targets.items():
        for piece in pieces[name]:
            if (shared := piece.shared_with(place)) is not None:
                here, there = shared
                part = (memory[there][0], here[1:]) if piece.is_row else (memory[there], here)
                found.setdefault(piece.path, []).append((piece.name, *part))
    return found


def read_parts(path: Path, targets: Iterable[Target]) -> None:
    """Fill memory from a safetensors file, which is mapped for :data:`PIECE_BYTES` at a time.

    Raises:
        OSError, SafetensorError: the file cannot be read.
    """
    for piece in _pieces(targets):
        with safe_open(str(path), framework="pt") as file:
            for name, part, place in piece:
                _copy(part, file, name, place)


def _copy(part: Tensor, file: Any, name: str, place: tuple[slice, ...]) -> None:
    # A function of its own: a variable that outlived the file would keep it mapped.
    part.copy_(file.get_slice(name)[place] if place else file.get_tensor(name))


def _pieces(targets: Iterable[Target]) -> Iterator[list[Target]]:
    """Cut targets into lists of about :data:`PIECE_BYTES`."""
    piece: list[Target] = []
    size = 0
    for name, whole, place in targets:
        if whole.numel() == 0:
            continue
        at_once = max(1, PIECE_BYTES // whole[0].nbytes) if place else 1
        for start in range(0, len(whole) if place else 1, at_once):
            part = whole[start : start + at_once] if place else whole
            first = place[0].start + start if place else 0
            piece.append((name, part, (slice(first, first + len(part)), *place[1:]) if place else ()))
            size += part.nbytes
            if size >= PIECE_BYTES:
                yield piece
                piece, size = [], 0
    if piece:
        yield piece


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    with _usable(path), safe_open(str(path), framework="pt") as file:
        yield file


@contextmanager
def _usable(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise _unusable(f"{path} cannot be read: {error}") from error


def _unusable(message: str) -> ConfigError:
    return ConfigError(message, path="model_path", remedy="a complete folder, as save_pretrained writes it")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal LM of transformers; without memory if it has ``files`` to be filled from."""

    causal_lm: Any  # then on torch's meta device, but for buffers that are computed
    files: WeightFiles | None = None
    twin: Any = None  # then a small model of the same code, with random weights


def empty_causal_lm(path: str, config: Any, files: WeightFiles | None = None) -> LoadedModel | None:
    """Make a model of ``config`` without memory; None if it must be read as a whole. ``files`` are those of ``path``.

    That is so where its weights are not in safetensors files, are quantised or are stored in another form than stacked
    and joined (:meth:`WeightFiles.fuse`), and where its buffers cannot be distinguished from those of a smaller model.
    Must be called under ``model_loading_lock``.

    Raises:
        ConfigError: a file is missing or cannot be read.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    if getattr(config, "quantization_config", None) or (files := files or WeightFiles.of(path)) is None:
        return None
    # The twin is drawn on the CPU, and nothing else in the process may notice.
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        causal_lm: Any = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)
    if not files.fuse(causal_lm):
        return None
    twin = small_causal_lm(config)
    computed = dict(twin.named_buffers())
    for prefix, module in causal_lm.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name in module._non_persistent_buffers_set:  # noqa: SLF001  # torch has no public way
                found = computed.get(f"{prefix}.{name}" if prefix else name)
                if found is None or found.shape != buffer.shape:
                    return None
                module.register_buffer(name, found.clone(), persistent=False)
    if model_file(path, "generation_config.json") is not None:
        causal_lm.generation_config = GenerationConfig.from_pretrained(path)
    return LoadedModel(causal_lm, files, twin)


def small_causal_lm(config: Any, *, layers: int = 1) -> Any:
    """Make a model of the same code with ``layers``, one of each kind at least, 256 ids and random weights.

    Its head is scaled so that logits are about -10 to 10, where a cap or a scale of them shows.
    """
    from transformers import AutoModelForCausalLM

    kinds = list(getattr(config.get_text_config(), "layer_types", None) or ())
    small = with_layers(config, max([layers, *(kinds.index(kind) + 1 for kind in set(kinds))]))
    text = small.get_text_config()
    text.vocab_size = min(text.vocab_size, _TWIN_VOCABULARY)
    for part in (small, text):
        if part.pad_token_id is not None and part.pad_token_id >= text.vocab_size:
            part.pad_token_id = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        twin: Any = AutoModelForCausalLM.from_config(small, dtype=torch.float32)
        head = twin.get_output_embeddings()
        if head is not None:
            with torch.no_grad():
                head.weight.normal_(std=10.0 * head.weight.shape[1] ** -0.5)
    return twin


def with_layers(config: Any, most: int) -> Any:
    """Return a copy of a configuration of transformers with the first ``most`` layers, or all if there are fewer."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    layers: int = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, (list, tuple)) and len(value) == layers:
            setattr(text, name, value[:most])
    text.num_hidden_layers = min(layers, most)
    return config


def fill(model: nn.Module, causal_lm: nn.Module, files: WeightFiles, *, device: torch.device) -> None:
    """Give a model on the meta device memory (:func:`give_memory`), and read its weights.

    Raises:
        ConfigError: a file cannot be read any more.
    """
    empty = [name for name, tensor in stored_tensors(causal_lm).items() if _local(tensor).is_meta]
    give_memory(model, causal_lm, device=device)
    filled = stored_tensors(causal_lm)
    parameters = {name.replace(".base_layer.", "."): each for name, each in causal_lm.named_parameters()}
    with torch.no_grad():
        files.read(
            {name: (_local(filled[name]), place_of_shard(filled[name])) for name in empty if not _codes(filled[name])}
        )
        for name in empty:
            if _codes(codes := filled[name]):
                weight = torch.empty(_local(codes).shape, device=device)
                files.read({name: (weight, place_of_shard(codes))})
                scales = parameters[name.removesuffix(".weight") + SCALES]
                for tensor, found in zip((codes, scales), quantised(weight), strict=True):
                    _local(tensor).copy_(found)


def give_memory(model: nn.Module, causal_lm: nn.Module, *, device: torch.device) -> None:
    """Give a model on the meta device, sharded or not, memory on ``device``.

    ``model`` has ``causal_lm`` inside, and may be sharded itself. What has memory already (adapters, a new head,
    buffers) is moved; tied parameters stay tied.
    """
    names: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in causal_lm.modules():
        for name, parameter in module.named_parameters(recurse=False):
            names.setdefault(id(parameter), []).append((module, name))
    model._apply(  # noqa: SLF001  # to_empty() would also take the memory of what has some
        lambda tensor: torch.empty_like(tensor, device=device) if _local(tensor).is_meta else tensor.to(device)
    )
    for (module, name), *others in names.values():
        for other, its_name in others:
            other.register_parameter(its_name, getattr(module, name))


def stored_tensors(causal_lm: nn.Module) -> dict[str, Tensor]:
    """Return parameters, tied ones once, and persistent buffers, under their names in files."""
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in causal_lm.named_modules()
        for name in module._non_persistent_buffers_set  # noqa: SLF001
    }
    tensors = dict(causal_lm.named_parameters()) | {
        name: buffer for name, buffer in causal_lm.named_buffers() if name not in transient
    }
    return {name.replace(".base_layer.", "."): tensor for name, tensor in tensors.items() if not name.endswith(SCALES)}


def _codes(tensor: Tensor) -> bool:
    return tensor.dtype == torch.int8


def _local(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def place_of_shard(tensor: Tensor) -> tuple[slice, ...]:
    """Return where this rank's shard lies in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    sizes, firsts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(first, first + size) for first, size in zip(firsts, sizes, strict=True))
